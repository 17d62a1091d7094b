"""The table of families, `FAMILIES`: how the config.json of each differs from that of others."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from jaxspec.checkpoint.entries import (
    LAYER_TYPE_NAMES,
    TARGET_DIGEST,
    Json,
    read,
    read_common,
    read_layer_types,
    read_rope,
    sliding_fields,
)
from jaxspec.checkpoint.files import CheckpointError
from jaxspec.core.checks import Count, Natural, Positive, one_of, shown
from jaxspec.models.config import Diffusion, Experts, LongRopeScaling, ModelConfig, Rope


class Family(NamedTuple):
    """Differences of one `model_type` from the others.

    Attributes:
        architecture: the class that other libraries build for it.
        defaults: what its readers assume where config.json is silent.
        fields: from config.json, of which `read_common` has read its part, the `ModelConfig` fields
            in which it differs from a bare decoder.
        entries: from a `ModelConfig`, the config.json entries that say so.
        names: what it calls entries that the others share, by their common name.
    """

    architecture: str
    defaults: Json
    fields: Callable[[Json], dict[str, Any]]
    entries: Callable[[ModelConfig], dict[str, Any]]
    names: Mapping[str, str] = MappingProxyType({})


def _llama_fields(text: Json) -> dict[str, Any]:
    bias = read(text, "attention_bias", bool, False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": read(text, "mlp_bias", bool, False)}


def _llama_entries(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias}


def _mistral_fields(text: Json) -> dict[str, Any]:
    return sliding_fields(text, ("sliding",) * text["num_hidden_layers"])


def _mistral_entries(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _mixtral_fields(text: Json) -> dict[str, Any]:
    experts = Experts(
        num=read(text, "num_local_experts", Count),
        per_token=read(text, "num_experts_per_tok", Count),
        mlp_dim=text["intermediate_size"],
        normalize=True,
        layers=(True,) * text["num_hidden_layers"],
    )
    return {**_mistral_fields(text), "experts": experts}


def _mixtral_entries(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None  # what makes a network of this family
    return {
        **_mistral_entries(config),
        "num_local_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
    }


def _qwen2_fields(text: Json) -> dict[str, Any]:
    first = read(text, "max_window_layers", Natural, 28)
    windowed = read(text, "use_sliding_window", bool, False)
    rule = [
        "sliding" if windowed and layer >= first else "full"
        for layer in range(text["num_hidden_layers"])
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
    bias = read(text, "attention_bias", bool, False)
    return {**_qwen2_fields(text), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _qwen3_entries(config: ModelConfig) -> dict[str, Any]:
    return {**_qwen2_entries(config), "attention_bias": config.out_bias}


def _qwen_experts(text: Json, shared_dim: int | None = None) -> Experts:
    step = read(text, "decoder_sparse_step", Count, 1)
    dense = set(read(text, "mlp_only_layers", tuple[Natural, ...], ()))
    names = ("num_experts", "num_local_experts")
    name = next((name for name in names if text.get(name) is not None), names[0])
    return Experts(
        num=read(text, name, Count),
        per_token=read(text, "num_experts_per_tok", Count),
        mlp_dim=read(text, "moe_intermediate_size", Count),
        normalize=read(text, "norm_topk_prob", bool, False),
        layers=tuple(
            layer not in dense and (layer + 1) % step == 0
            for layer in range(text["num_hidden_layers"])
        ),
        shared_dim=shared_dim,
    )


def _qwen_expert_entries(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None  # what makes a network of this family
    return {
        "num_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp_dim,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(experts.layers) if not sparse],
    }


def _qwen2_moe_fields(text: Json) -> dict[str, Any]:
    end = read(text, "max_window_layers", Natural, 28)
    windowed = read(text, "use_sliding_window", bool, False)
    # Every other layer slides, up to that one.
    rule = [
        "sliding" if windowed and layer < end and layer % 2 == 0 else "full"
        for layer in range(text["num_hidden_layers"])
    ]
    return {
        "qkv_bias": read(text, "qkv_bias", bool, False),
        **sliding_fields(text, read_layer_types(text, rule)),
        "experts": _qwen_experts(text, read(text, "shared_expert_intermediate_size", Count)),
    }


def _qwen2_moe_entries(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None  # what makes a network of this family
    return {
        **_qwen2_entries(config),
        **_qwen_expert_entries(config),
        "max_window_layers": config.num_layers,
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": config.experts.shared_dim,
    }


def _qwen3_moe_fields(text: Json) -> dict[str, Any]:
    # Unlike the dense ones, its readers slide all layers or none.
    kind = "sliding" if read(text, "use_sliding_window", bool, False) else "full"
    types = (kind,) * text["num_hidden_layers"]
    return {
        **_qwen3_fields(text),
        **sliding_fields(text, types),
        "experts": _qwen_experts(text),
    }


def _qwen3_moe_entries(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.out_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **_qwen_expert_entries(config),
    }


def _query_scale(text: Json, scale: float) -> float | None:
    """The same, or `None` where that is what scores are multiplied by unless it is given."""
    return None if scale == text["head_dim"] ** -0.5 else scale


_GEMMA_NAMES: Mapping[str, str] = {"hidden_act": "hidden_activation"}


def _gemma2_fields(text: Json) -> dict[str, Any]:
    rule = ["full" if layer % 2 else "sliding" for layer in range(text["num_hidden_layers"])]
    return {
        **_llama_fields(text),
        **sliding_fields(text, read_layer_types(text, rule)),
        "norm_plus_one": True,
        "post_norms": True,
        "query_scale": _query_scale(text, read(text, "query_pre_attn_scalar", Positive) ** -0.5),
        "attention_softcap": read(text, "attn_logit_softcapping", Positive, None),
        "final_softcap": read(text, "final_logit_softcapping", Positive, None),
        "embed_scale": math.sqrt(text["hidden_size"]),
    }


def _gemma2_entries(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.out_bias,
        "query_pre_attn_scalar": round(config.score_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "sliding_window": config.sliding_window,
        "layer_types": [LAYER_TYPE_NAMES[kind] for kind in config.layer_types],
    }


def _gemma3_fields(text: Json) -> dict[str, Any]:
    period = read(text, "sliding_window_pattern", Count, 6)
    layers = range(text["num_hidden_layers"])
    rule = ["sliding" if (layer + 1) % period else "full" for layer in layers]
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


def _olmo2_fields(text: Json) -> dict[str, Any]:
    bias = read(text, "attention_bias", bool, False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
        "joint_qk_norm": True,
    }


def _olmo2_entries(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.out_bias}


def _smollm3_fields(text: Json) -> dict[str, Any]:
    num_layers = text["num_hidden_layers"]
    interval = read(text, "no_rope_layer_interval", Count, 4)
    slides = read(text, "use_sliding_window", bool, False)
    if slides or "sliding" in read_layer_types(text, []):
        raise CheckpointError(
            "use_sliding_window, layer_types: layers of a SmolLM3 that slide are not supported, "
            "but config.json has them."
        )
    rule = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    rotated = read(text, "no_rope_layers", tuple[Annotated[int, one_of(0, 1)], ...], rule)
    if len(rotated) < num_layers:
        raise CheckpointError(
            f"config.json: no_rope_layers must say for each of {num_layers} layers 1, rotated, or "
            f"0, not rotated; it has {len(rotated)} entries."
        )
    types = tuple("full" if flag else "unrotated" for flag in rotated[:num_layers])
    return {**_llama_fields(text), "layer_types": types}


def _smollm3_entries(config: ModelConfig) -> dict[str, Any]:
    rotated = [int(kind != "unrotated") for kind in config.layer_types]
    return {**_llama_entries(config), "no_rope_layers": rotated}


def _granite_fields(text: Json) -> dict[str, Any]:
    embed_scale = read(text, "embedding_multiplier", Positive, 1.0)
    return {
        **_llama_fields(text),
        "query_scale": _query_scale(text, read(text, "attention_multiplier", Positive, 1.0)),
        "embed_scale": None if embed_scale == 1 else embed_scale,
        "residual_scale": read(text, "residual_multiplier", Positive, 1.0),
        "logit_divisor": read(text, "logits_scaling", Positive, 1.0),
    }


def _granite_entries(config: ModelConfig) -> dict[str, Any]:
    return {
        **_llama_entries(config),
        "attention_multiplier": config.score_scale,
        "embedding_multiplier": config.embed_scale or 1.0,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


def _diffusion(text: Json, shift: bool | None = None) -> dict[str, Any]:
    """The fields of a network that fills in masks; `shift` where config.json does not say it.

    `block_size` is the published name, and `markov_rank` DSpark's; `shift_logits`, `masked_window`,
    `separator_token_id` and `target_digest` are ours, for what is published nowhere.
    """
    shift = read(text, "shift_logits", bool, shift)
    if shift is None:
        raise CheckpointError(
            "config.json does not say whether the output at a slot decides the next slot: add "
            '"shift_logits": true, or false if it decides its own.'
        )
    if text.get("mask_token_id") is None:
        raise CheckpointError(
            "config.json lacks 'mask_token_id', the id of the mask in the tokenizer: add it."
        )
    diffusion = Diffusion(
        read(text, "mask_token_id", Natural),
        shift,
        block=read(text, "block_size", Count, None),
        window=read(text, "masked_window", Count, None),
        separator=read(text, "separator_token_id", Natural, None),
        made_for=read(text, TARGET_DIGEST, str, None),
        rank=read(text, "markov_rank", Natural, 0),
    )
    return {"diffusion": diffusion}


def _diffusion_entries(config: ModelConfig) -> dict[str, Any]:
    entries = {
        "mask_token_id": config.masking.mask_token_id,
        "shift_logits": config.masking.shift,
        "block_size": config.masking.block,
        "masked_window": config.masking.window,
        "separator_token_id": config.masking.separator,
        TARGET_DIGEST: config.masking.made_for,
        "markov_rank": config.masking.rank or None,
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


_LLADA_NAMES: Mapping[str, str] = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "hidden_act": "activation_type",
    "tie_word_embeddings": "weight_tying",
}


def _llada_fields(text: Json) -> dict[str, Any]:
    for key, values in _LLADA_ALWAYS.items():
        given = text.get(key, values[0])
        if not any(type(given) is type(value) and given == value for value in values):
            raise CheckpointError(
                f"{key} must be {values[0]!r} in a LLaDA that this library can read; config.json "
                f"has {shown(given)}."
            )
    return {
        # The table's rows, of which the tokenizer need not use all.
        "vocab_size": read(text, "embedding_size", Count, text["vocab_size"]),
        # Its readers take these from nowhere else.
        "head_dim": read_common({**text, "head_dim": None}, _LLADA_NAMES)["head_dim"],
        "rope": Rope(read(text, "rope_theta", Positive, 10_000.0)),
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
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
        _mixtral_fields,
        _mixtral_entries,
    ),
    "qwen2": Family("Qwen2ForCausalLM", {}, _qwen2_fields, _qwen2_entries),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"num_key_value_heads": 16, "sliding_window": 4096, "qkv_bias": True},
        _qwen2_moe_fields,
        _qwen2_moe_entries,
    ),
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
        _GEMMA_NAMES,
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
        _GEMMA_NAMES,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        _mistral_fields,
        _phi3_entries,
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, _olmo2_fields, _olmo2_entries),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        _smollm3_fields,
        _smollm3_entries,
    ),
    "granite": Family("GraniteForCausalLM", {}, _granite_fields, _granite_entries),
    # Diffusion language models.
    "llada": Family(
        "LLaDAModelLM",
        {"rms_norm_eps": 1e-5},
        _llada_fields,
        _llada_entries,
        _LLADA_NAMES,
    ),
    "Dream": Family("DreamModel", {}, _dream_fields, _dream_entries),
    "sdar": Family("SDARForCausalLM", {"head_dim": 128}, _sdar_fields, _sdar_entries),
}


def plainest_family(config: ModelConfig) -> str:
    if config.diffusion is not None:
        return "sdar" if config.qk_norm else "Dream" if config.qkv_bias else "llada"
    if "unrotated" in config.layer_types:
        return "smollm3"
    if config.experts is not None:
        if config.experts.shared_dim is not None:
            return "qwen2_moe"
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.norm_plus_one:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if not config.pre_norms:
        return "olmo2"
    scales = (config.embed_scale, config.query_scale)
    if scales != (None, None) or (config.residual_scale, config.logit_divisor) != (1, 1):
        return "granite"
    if config.qk_norm:
        return "qwen3"
    if config.rope.fraction < 1 or isinstance(config.rope.scaling, LongRopeScaling):
        return "phi3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "mistral" if config.sliding_window is not None else "llama"
