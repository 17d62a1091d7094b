"""The table of families, `FAMILIES`: how the config.json of each differs from that of others."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.checkpoint.entries import (
    ACTIVATION_NAMES,
    LARGEST_SIZE,
    LAYER_TYPE_NAMES,
    Json,
    read_integer,
    read_layer_types,
    read_number,
    read_number_or_none,
    read_rope,
    sliding_fields,
)
from jaxspec.checkpoint.files import CheckpointError
from jaxspec.models.config import Diffusion, Experts, LongRopeScaling, ModelConfig, Rope


class Family(NamedTuple):
    """Differences of one `model_type` from the others.

    Attributes:
        architecture: the class that other libraries build for it.
        defaults: what its readers assume where config.json is silent.
        fields: from config.json, the `ModelConfig` fields in which it differs from a bare decoder.
        entries: from a `ModelConfig`, the config.json entries that say so.
        names: what it calls entries that the others share, by their common name.
    """

    architecture: str
    defaults: Json
    fields: Callable[[Json], dict[str, Any]]
    entries: Callable[[ModelConfig], dict[str, Any]]
    names: Mapping[str, str] = MappingProxyType({})


def _llama_fields(text: Json) -> dict[str, Any]:
    bias = bool(text.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(text.get("mlp_bias"))}


def _llama_entries(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias}


def _mistral_fields(text: Json) -> dict[str, Any]:
    return sliding_fields(text, ("sliding",) * read_integer(text, "num_hidden_layers"))


def _mistral_entries(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _qwen2_fields(text: Json) -> dict[str, Any]:
    first = read_integer(text, "max_window_layers", 28)
    windowed = bool(text.get("use_sliding_window"))
    rule = [
        "sliding" if windowed and layer >= first else "full"
        for layer in range(read_integer(text, "num_hidden_layers"))
    ]
    return {"qkv_bias": True, **sliding_fields(text, read_layer_types(text, rule))}


def _qwen2_entries(config: ModelConfig) -> dict[str, Any]:
    types = config.layer_types
    # Readers without `layer_types` know only "full up to here".
    first = types.index("sliding") if "sliding" in types else config.num_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": [LAYER_TYPE_NAMES[kind] for kind in types],
    }


def _qwen3_fields(text: Json) -> dict[str, Any]:
    bias = bool(text.get("attention_bias"))
    return {**_qwen2_fields(text), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _qwen3_entries(config: ModelConfig) -> dict[str, Any]:
    return {**_qwen2_entries(config), "attention_bias": config.out_bias}


def _qwen3_moe_fields(text: Json) -> dict[str, Any]:
    num_layers = read_integer(text, "num_hidden_layers")
    step = read_integer(text, "decoder_sparse_step", 1)
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"mlp_only_layers must be a list; config.json has {dense!r}.")
    experts = Experts(
        num=read_integer(text, "num_experts", text.get("num_local_experts")),
        per_token=read_integer(text, "num_experts_per_tok"),
        mlp_dim=read_integer(text, "moe_intermediate_size"),
        normalize=bool(text.get("norm_topk_prob")),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
    # Unlike the dense ones, its readers slide all layers or none.
    kind = "sliding" if text.get("use_sliding_window") else "full"
    return {**_qwen3_fields(text), **sliding_fields(text, (kind,) * num_layers), "experts": experts}


def _qwen3_moe_entries(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None  # what makes a network of this family
    return {
        "attention_bias": config.out_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "num_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(experts.layers) if not sparse],
    }


def _gemma2_fields(text: Json) -> dict[str, Any]:
    scalar = read_number(text, "query_pre_attn_scalar")
    num_layers = read_integer(text, "num_hidden_layers")
    rule = ["full" if layer % 2 else "sliding" for layer in range(num_layers)]
    return {
        **_llama_fields(text),
        **sliding_fields(text, read_layer_types(text, rule)),
        "norm_plus_one": True,
        "post_norms": True,
        "query_scale": None if scalar == text.get("head_dim") else scalar**-0.5,
        "attention_softcap": read_number_or_none(text, "attn_logit_softcapping"),
        "final_softcap": read_number_or_none(text, "final_logit_softcapping"),
        "embed_scale": math.sqrt(read_integer(text, "hidden_size")),
    }


def _gemma2_entries(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.out_bias,
        "hidden_activation": ACTIVATION_NAMES[config.activation],
        "query_pre_attn_scalar": round(config.score_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "sliding_window": config.sliding_window,
        "layer_types": [LAYER_TYPE_NAMES[kind] for kind in config.layer_types],
    }


def _gemma3_fields(text: Json) -> dict[str, Any]:
    period = read_integer(text, "sliding_window_pattern", 6)
    num_layers = read_integer(text, "num_hidden_layers")
    rule = ["sliding" if (layer + 1) % period else "full" for layer in range(num_layers)]
    return {
        **_gemma2_fields(text),
        **sliding_fields(text, read_layer_types(text, rule)),
        "qk_norm": True,
        "sliding_rope": read_rope(text, "sliding_attention"),
    }


def _gemma3_entries(config: ModelConfig) -> dict[str, Any]:
    rope = config.sliding_rope or config.rope
    return {**_gemma2_entries(config), "rope_local_base_freq": rope.theta}


def _phi3_entries(config: ModelConfig) -> dict[str, Any]:
    entries = {
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": config.rope.fraction,
        "original_max_position_embeddings": config.max_positions,
    }
    if isinstance(config.rope.scaling, LongRopeScaling):
        entries["original_max_position_embeddings"] = config.rope.scaling.original_max_positions
    return entries


def _diffusion(text: Json, shift: bool | None = None) -> dict[str, Any]:
    """The fields of a network that fills in masks; `shift` where config.json does not say it.

    `block_size` is the published name; `shift_logits`, `masked_window` and `separator_token_id` are
    ours, for what is published nowhere.
    """
    shift = text.get("shift_logits", shift)
    if not isinstance(shift, bool):
        raise CheckpointError(
            "config.json does not say whether the output at a slot decides the next slot: add "
            f'"shift_logits": true, or false if it decides its own; it has {shift!r}.'
        )
    if text.get("mask_token_id") is None:
        raise CheckpointError(
            "config.json lacks 'mask_token_id', the id of the mask in the tokenizer: add it."
        )
    # Ids begin at 0, sizes at 1.
    for name in ("mask_token_id", "separator_token_id"):
        token = text.get(name)
        if token is not None and (type(token) is not int or not 0 <= token <= LARGEST_SIZE):
            raise CheckpointError(f"{name} must be an id; config.json has {token!r}.")
    mask, separator = text["mask_token_id"], text.get("separator_token_id")
    block = None if text.get("block_size") is None else read_integer(text, "block_size")
    window = None if text.get("masked_window") is None else read_integer(text, "masked_window")
    return {"diffusion": Diffusion(mask, shift, block, window, separator)}


def _diffusion_entries(config: ModelConfig) -> dict[str, Any]:
    entries = {
        "mask_token_id": config.masking.mask_token_id,
        "shift_logits": config.masking.shift,
        "block_size": config.masking.block,
        "masked_window": config.masking.window,
        "separator_token_id": config.masking.separator,
    }
    return {name: value for name, value in entries.items() if value is not None}


# Settings that LLaDA's code knows, with the values that every published network has.
_LLADA_ALWAYS: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False, None),
    "attention_layer_norm": (False, None),
    "include_bias": (False, None),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "input_emb_norm": (False, None),
    "multi_query_attention": (False, None),
    "scale_logits": (False, None),
    "clip_qkv": (None,),
}


_LLADA_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "hidden_act": "activation_type",
    "tie_word_embeddings": "weight_tying",
}


OPTIONAL = ("num_key_value_heads", "hidden_act", "tie_word_embeddings")


def _llada_fields(text: Json) -> dict[str, Any]:
    for key, values in _LLADA_ALWAYS.items():
        if text.get(key, values[0]) not in values:
            raise CheckpointError(
                f"{key} must be {values[0]!r} in a LLaDA that this library can read; config.json "
                f"has {text[key]!r}."
            )
    return {
        # The table's rows, of which the tokenizer need not use all.
        "vocab_size": read_integer(text, "embedding_size", text.get("vocab_size")),
        # Its readers take these from nowhere else.
        "head_dim": read_integer(text, "hidden_size") // read_integer(text, "num_attention_heads"),
        "rope": Rope(read_number(text, "rope_theta", 10_000.0)),
        **_diffusion(text, shift=False),
    }


def _llada_entries(config: ModelConfig) -> dict[str, Any]:
    always = {key: values[0] for key, values in _LLADA_ALWAYS.items()}
    return {**always, "embedding_size": config.vocab_size, **_diffusion_entries(config)}


def _dream_fields(text: Json) -> dict[str, Any]:
    # Published ones shift and see everything. Those with blocks do not all shift.
    shift = True if text.get("block_size") is None else None
    return {**_qwen2_fields(text), **_diffusion(text, shift)}


def _dream_entries(config: ModelConfig) -> dict[str, Any]:
    return {**_qwen2_entries(config), **_diffusion_entries(config)}


def _sdar_fields(text: Json) -> dict[str, Any]:
    if "block_size" not in text:
        raise CheckpointError(
            "config.json lacks 'block_size': how many slots a block has, or null if every token "
            "sees all others."
        )
    return {**_qwen3_fields(text), **_diffusion(text, shift=False)}


def _sdar_entries(config: ModelConfig) -> dict[str, Any]:
    return {**_qwen3_entries(config), "block_size": None, **_diffusion_entries(config)}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {}, _llama_fields, _llama_entries),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        _mistral_fields,
        _mistral_entries,
    ),
    "qwen2": Family("Qwen2ForCausalLM", {}, _qwen2_fields, _qwen2_entries),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 128}, _qwen3_fields, _qwen3_entries),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {}, _qwen3_moe_fields, _qwen3_moe_entries),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        _gemma2_fields,
        _gemma2_entries,
    ),
    # The published multimodal files leave out nearly everything that has a default.
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        _gemma3_fields,
        _gemma3_entries,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        _mistral_fields,
        _phi3_entries,
    ),
    # Diffusion language models.
    "llada": Family(
        "LLaDAModelLM",
        {"rms_norm_eps": 1e-5},
        _llada_fields,
        _llada_entries,
        MappingProxyType(_LLADA_NAMES),
    ),
    "Dream": Family("DreamModel", {}, _dream_fields, _dream_entries),
    "sdar": Family("SDARForCausalLM", {"head_dim": 128}, _sdar_fields, _sdar_entries),
}


def plainest_family(config: ModelConfig) -> str:
    if config.diffusion is not None:
        return "sdar" if config.qk_norm else "Dream" if config.qkv_bias else "llada"
    if config.experts is not None:
        return "qwen3_moe"
    if config.norm_plus_one:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.qk_norm:
        return "qwen3"
    if config.rope.fraction < 1 or isinstance(config.rope.scaling, LongRopeScaling):
        return "phi3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "mistral" if config.sliding_window is not None else "llama"
