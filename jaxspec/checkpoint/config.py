"""`config.json` of Hugging Face checkpoints to `ModelConfig`, and back.

Two layouts are in use: the one that checkpoints on the Hub carry (`rope_theta`, `rope_scaling` at
the top level, layer patterns by rule), and the one written by transformers 5 (`rope_parameters`,
`layer_types`). Both are read; the first is written, since every reader knows it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.models.config import (
    Diffusion,
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    Scaling,
    YarnScaling,
)

Json = Mapping[str, Any]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATION_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
_LAYER_TYPE_NAMES = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}


class Family(NamedTuple):
    """What sets one `model_type` apart.

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


def config_from_json(raw: Json, max_positions: int | None = None) -> ModelConfig:
    """Reads a parsed config.json.

    Args:
        raw: the JSON object, in either layout. Of a multimodal Gemma-3, the text part is read.
        max_positions: longest text to prepare for. None: what the file says, but for models with
            two LongRoPE tables the length they were first trained with, which selects the short
            table; a longer one selects the long table, for all texts.

    Raises:
        CheckpointError: unknown `model_type`, RoPE type or activation; a missing or impossible
            value; quantised weights; `max_positions` beyond what `prepared_for` allows.
    """
    name = model_type(raw)
    family = FAMILIES[name]
    # An explicit null is an answer (no window, no cap), so it also replaces a default.
    text = {**family.defaults, **_text_part(raw), "model_type": name}
    text = _with_common_names(text, family.names)
    if raw.get("quantization_config") or text.get("quantization_config"):
        raise CheckpointError(
            "config.json has a quantization_config, and quantised weights cannot be read: use the "
            "original checkpoint, or dequantise this one first."
        )
    if text.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json sets use_bidirectional_attention: this is an encoder, not a decoder."
        )
    num_heads = _integer(text, "num_attention_heads")
    embed_dim = _integer(text, "hidden_size")
    sizes = {
        "vocab_size": _integer(text, "vocab_size"),
        "embed_dim": embed_dim,
        "num_layers": _integer(text, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _integer(text, "num_key_value_heads", num_heads),
        "head_dim": _integer(text, "head_dim", embed_dim // num_heads),
        "mlp_dim": _integer(text, "intermediate_size"),
        "max_positions": _integer(text, "max_position_embeddings"),
        "norm_eps": _number(text, "rms_norm_eps", 1e-6),
        "activation": _activation(text),
        "tied_head": bool(text.get("tie_word_embeddings")),
        "rope": _rope(text, "full_attention"),
    }
    try:
        config = ModelConfig(**{**sizes, **family.fields(text)})
        if max_positions is None:
            max_positions = _usable_positions(config)
        return prepared_for(config, max_positions)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json describes no network that can be: {error}") from error


def prepared_for(config: ModelConfig, max_positions: int) -> ModelConfig:
    """The config of the same weights for texts of another length.

    Weights know the positions of their training, `config.max_positions` of them. RoPE scaling
    stretches that: by its factor, from the length it names as the original one or, where it names
    none, from `config.max_positions`; dynamic scaling without end.

    Raises:
        CheckpointError: the length is beyond that.
    """
    longest = _reach(config)
    if longest is not None and max_positions > longest:
        raise CheckpointError(
            f"max_positions must be at most {longest}, which is as far as this model's positions "
            f"were trained or scaled; got {max_positions}. Longer texts need a model for them, or "
            "a RoPE scaling in its config."
        )
    return config.replace(max_positions=max_positions)


def model_type(raw: Json) -> str:
    """The `model_type` of a parsed config.json, or of its text part where it has several.

    Raises:
        CheckpointError: it is not one of `FAMILIES`.
    """
    default = "gemma3_text" if raw.get("model_type") == "gemma3" else None
    name = _text_part(raw).get("model_type", default)
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"model_type must be one of {', '.join(sorted(FAMILIES))}; config.json has {name!r}."
        )
    return name


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a network, under a `model_type` whose readers build exactly that.

    Where several families would do, it is the plainest of them: a Mistral without a window becomes
    a Llama.

    Raises:
        CheckpointError: no family describes it; the fields that cannot be expressed are named.
    """
    name = _plainest_family(config)
    family = FAMILIES[name]
    scaling = config.rope.scaling
    raw = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": _stored_positions(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _ACTIVATION_NAMES[config.activation],
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if scaling is None else _scaling_entries(scaling, config),
        **family.entries(config),
    }
    raw = {family.names.get(key, key): value for key, value in raw.items()}
    understood = config_from_json(raw, config.max_positions)
    different = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(understood, field.name)
    ]
    if different:
        raise CheckpointError(
            f"No Hugging Face family describes this network (nearest: {name}); what cannot be "
            f"expressed: {', '.join(different)}. Save it as an Orbax folder instead."
        )
    return raw


def _text_part(raw: Json) -> Json:
    nested = raw.get("text_config")
    if not isinstance(nested, Mapping):
        return raw
    shared = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id") if key in raw}
    return {**shared, **nested}


def _with_common_names(text: Json, names: Mapping[str, str]) -> dict[str, Any]:
    common = {key: value for key, value in text.items() if key not in names.values()}
    for ours, theirs in names.items():
        # What is missing or wrong is named as the file names it.
        common[ours] = text.get(theirs) if ours in _OPTIONAL else _integer(text, theirs)
    return common


# One pair of functions per family: what its config.json means, and how to say it again.


def _llama_fields(text: Json) -> dict[str, Any]:
    bias = bool(text.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(text.get("mlp_bias"))}


def _llama_entries(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.out_bias, "mlp_bias": config.mlp_bias}


def _mistral_fields(text: Json) -> dict[str, Any]:
    return _sliding(text, ("sliding",) * _integer(text, "num_hidden_layers"))


def _mistral_entries(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _qwen2_fields(text: Json) -> dict[str, Any]:
    first = _integer(text, "max_window_layers", 28)
    windowed = bool(text.get("use_sliding_window"))
    rule = [
        "sliding" if windowed and layer >= first else "full"
        for layer in range(_integer(text, "num_hidden_layers"))
    ]
    return {"qkv_bias": True, **_sliding(text, _layer_types(text, rule))}


def _qwen2_entries(config: ModelConfig) -> dict[str, Any]:
    types = config.layer_types
    # Readers without `layer_types` know only "full up to here".
    first = types.index("sliding") if "sliding" in types else config.num_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": [_LAYER_TYPE_NAMES[kind] for kind in types],
    }


def _qwen3_fields(text: Json) -> dict[str, Any]:
    bias = bool(text.get("attention_bias"))
    return {**_qwen2_fields(text), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def _qwen3_entries(config: ModelConfig) -> dict[str, Any]:
    return {**_qwen2_entries(config), "attention_bias": config.out_bias}


def _qwen3_moe_fields(text: Json) -> dict[str, Any]:
    num_layers = _integer(text, "num_hidden_layers")
    step = _integer(text, "decoder_sparse_step", 1)
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"mlp_only_layers must be a list; config.json has {dense!r}.")
    experts = Experts(
        num=_integer(text, "num_experts", text.get("num_local_experts")),
        per_token=_integer(text, "num_experts_per_tok"),
        mlp_dim=_integer(text, "moe_intermediate_size"),
        normalize=bool(text.get("norm_topk_prob")),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
    # Unlike the dense ones, its readers slide all layers or none.
    kind = "sliding" if text.get("use_sliding_window") else "full"
    return {**_qwen3_fields(text), **_sliding(text, (kind,) * num_layers), "experts": experts}


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
    scalar = _number(text, "query_pre_attn_scalar")
    num_layers = _integer(text, "num_hidden_layers")
    rule = ["full" if layer % 2 else "sliding" for layer in range(num_layers)]
    return {
        **_llama_fields(text),
        **_sliding(text, _layer_types(text, rule)),
        "norm_plus_one": True,
        "post_norms": True,
        "query_scale": None if scalar == text.get("head_dim") else scalar**-0.5,
        "attention_softcap": _number_or_none(text, "attn_logit_softcapping"),
        "final_softcap": _number_or_none(text, "final_logit_softcapping"),
        "embed_scale": math.sqrt(_integer(text, "hidden_size")),
    }


def _gemma2_entries(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.out_bias,
        "hidden_activation": _ACTIVATION_NAMES[config.activation],
        "query_pre_attn_scalar": round(config.score_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "sliding_window": config.sliding_window,
        "layer_types": [_LAYER_TYPE_NAMES[kind] for kind in config.layer_types],
    }


def _gemma3_fields(text: Json) -> dict[str, Any]:
    period = _integer(text, "sliding_window_pattern", 6)
    num_layers = _integer(text, "num_hidden_layers")
    rule = ["sliding" if (layer + 1) % period else "full" for layer in range(num_layers)]
    return {
        **_gemma2_fields(text),
        **_sliding(text, _layer_types(text, rule)),
        "qk_norm": True,
        "sliding_rope": _rope(text, "sliding_attention"),
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
        if token is not None and (type(token) is not int or not 0 <= token <= _LARGEST):
            raise CheckpointError(f"{name} must be an id; config.json has {token!r}.")
    mask, separator = text["mask_token_id"], text.get("separator_token_id")
    block = None if text.get("block_size") is None else _integer(text, "block_size")
    window = None if text.get("masked_window") is None else _integer(text, "masked_window")
    return {"diffusion": Diffusion(mask, shift, block, window, separator)}


def _diffusion_entries(config: ModelConfig) -> dict[str, Any]:
    diffusion = config.diffusion
    assert diffusion is not None  # what makes a network of these families
    entries: dict[str, Any] = {
        "mask_token_id": diffusion.mask_token_id,
        "shift_logits": diffusion.shift,
    }
    if diffusion.block is not None:
        entries["block_size"] = diffusion.block
    if diffusion.window is not None:
        entries["masked_window"] = diffusion.window
    if diffusion.separator is not None:
        entries["separator_token_id"] = diffusion.separator
    return entries


# What LLaDA's code can do besides, and none of the published networks does.
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
_OPTIONAL = ("num_key_value_heads", "hidden_act", "tie_word_embeddings")


def _llada_fields(text: Json) -> dict[str, Any]:
    for key, values in _LLADA_ALWAYS.items():
        if text.get(key, values[0]) not in values:
            raise CheckpointError(
                f"{key} must be {values[0]!r} in a LLaDA that this library can read; config.json "
                f"has {text[key]!r}."
            )
    return {
        # The table's rows, of which the tokenizer need not use all.
        "vocab_size": _integer(text, "embedding_size", text.get("vocab_size")),
        # Its readers take these from nowhere else.
        "head_dim": _integer(text, "hidden_size") // _integer(text, "num_attention_heads"),
        "rope": Rope(_number(text, "rope_theta", 10_000.0)),
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


def _plainest_family(config: ModelConfig) -> str:
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


def _layer_types(text: Json, rule: list[str]) -> tuple[str, ...]:
    """The pattern of layers: as listed, or by the family's rule."""
    listed = text.get("layer_types")
    if listed is None:
        return tuple(rule)
    known = isinstance(listed, list) and {str(kind) for kind in listed} <= _LAYER_TYPES.keys()
    if not known:
        raise CheckpointError(
            f"layer_types must be a list of {', '.join(_LAYER_TYPES)}; config.json has {listed!r}."
        )
    return tuple(_LAYER_TYPES[kind] for kind in listed)


def _sliding(text: Json, types: tuple[str, ...]) -> dict[str, Any]:
    """The fields about windows. Both a window and a layer that slides are needed to have one."""
    if "sliding" not in types or text.get("sliding_window") is None:
        return {"layer_types": ("full",) * len(types), "sliding_window": None}
    return {"layer_types": types, "sliding_window": _integer(text, "sliding_window")}


def _activation(text: Json) -> str:
    name = text.get("hidden_activation") or text.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act must be one of {', '.join(_ACTIVATIONS)}; config.json has {name!r}."
        )
    return _ACTIVATIONS[name]


def _rope(text: Json, layer_type: str) -> Rope:
    """How one kind of layer rotates.

    Values are looked for in the rope section first, then at the top level.
    """
    section = _object(text.get("rope_scaling") or text.get("rope_parameters"))
    theta_key = "rope_theta"
    if layer_type == "sliding_attention":
        # Only Gemma-3 asks; its short-range layers are neither scaled nor of the same base.
        theta_key = "rope_local_base_freq"
        section = _object(section.get(layer_type))
    elif "full_attention" in section:
        section = _object(section["full_attention"])
    theta = _number(section, "rope_theta", _number(text, theta_key, 10_000.0))
    fraction = _number(
        section, "partial_rotary_factor", _number(text, "partial_rotary_factor", 1.0)
    )
    if fraction != 1 and text["model_type"] != "phi3":
        raise CheckpointError(
            f"partial_rotary_factor is known for phi3 only; config.json has {fraction} with "
            f"model_type {text['model_type']!r}."
        )
    try:
        return Rope(theta, fraction, _scaling(section, text))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"The RoPE settings of config.json are wrong: {error}") from error


def _scaling(section: Json, text: Json) -> Scaling | None:
    kind = section.get("rope_type", section.get("type", "default"))
    if text["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its first releases used other names
    longest = _integer(text, "max_position_embeddings")
    original = _integer(
        text,
        "original_max_position_embeddings",
        _integer(section, "original_max_position_embeddings", longest),
    )
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_number(section, "factor"))
        case "dynamic":
            return DynamicScaling(_number(section, "factor"), longest)
        case "llama3":
            return Llama3Scaling(
                factor=_number(section, "factor"),
                low_freq_factor=_number(section, "low_freq_factor"),
                high_freq_factor=_number(section, "high_freq_factor"),
                original_max_positions=original,
            )
        case "yarn":
            return YarnScaling(
                factor=_number(section, "factor", longest / original),
                original_max_positions=original,
                attention_factor=_number_or_none(section, "attention_factor"),
                beta_fast=_number(section, "beta_fast", 32.0),
                beta_slow=_number(section, "beta_slow", 1.0),
                mscale=_number_or_none(section, "mscale"),
                mscale_all_dim=_number_or_none(section, "mscale_all_dim"),
                truncate=bool(section.get("truncate", True)),
            )
        case "longrope":
            return LongRopeScaling(
                short_factors=_numbers(section, "short_factor"),
                long_factors=_numbers(section, "long_factor"),
                factor=_number(section, "factor", max(longest / original, 1.0)),
                original_max_positions=original,
                attention_factor=_number_or_none(section, "attention_factor"),
            )
    raise CheckpointError(
        "The RoPE type must be one of default, linear, dynamic, llama3, yarn, longrope; "
        f"config.json has {kind!r}."
    )


def _scaling_entries(scaling: Scaling, config: ModelConfig) -> dict[str, Any]:
    match scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor, _):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling():
            entries = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "mscale": scaling.mscale,
                "mscale_all_dim": scaling.mscale_all_dim,
                "truncate": scaling.truncate,
            }
            return {key: value for key, value in entries.items() if value is not None}
        case LongRopeScaling():
            # Phi-3's first readers want "type" and exactly three entries, so the rest is only
            # written where it says something new.
            entries = {
                "type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
            }
            if _stored_positions(config) / scaling.original_max_positions != scaling.factor:
                entries["factor"] = scaling.factor
            if scaling.attention_factor is not None:
                entries["attention_factor"] = scaling.attention_factor
            return entries


def _usable_positions(config: ModelConfig) -> int:
    scaling = config.rope.scaling
    if isinstance(scaling, LongRopeScaling):
        return min(config.max_positions, scaling.original_max_positions)
    return config.max_positions


def _reach(config: ModelConfig) -> int | None:
    match config.rope.scaling:
        case DynamicScaling():
            return None
        case LinearScaling(factor=factor):
            return round(factor * config.max_positions)
        case (
            Llama3Scaling(factor=factor, original_max_positions=original)
            | YarnScaling(factor=factor, original_max_positions=original)
            | LongRopeScaling(factor=factor, original_max_positions=original)
        ):
            return max(config.max_positions, round(factor * original))
    return config.max_positions


def _stored_positions(config: ModelConfig) -> int:
    """`max_position_embeddings`: how far the weights can go, whatever this network is used for."""
    match config.rope.scaling:
        case LongRopeScaling(factor=factor, original_max_positions=original):
            return max(config.max_positions, round(factor * original))
        case DynamicScaling(original_max_positions=original):
            return original
    return config.max_positions


def _object(value: Any) -> Json:
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"The RoPE settings must be JSON objects; config.json has {value!r}.")
    return value or {}


_REQUIRED = object()
_LARGEST = 2**31 - 1  # of sizes: beyond it no array can be indexed


def _integer(values: Json, key: str, default: Any = _REQUIRED) -> int:
    value = _value(values, key, default)
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise CheckpointError(f"{key} must be a positive whole number; config.json has {value!r}.")
    return value


def _number(values: Json, key: str, default: Any = _REQUIRED) -> float:
    value = _value(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise CheckpointError(f"{key} must be a number; config.json has {value!r}.")
    return float(value)


def _number_or_none(values: Json, key: str) -> float | None:
    return None if values.get(key) is None else _number(values, key)


def _numbers(values: Json, key: str) -> tuple[float, ...]:
    listed = _value(values, key, _REQUIRED)
    if not isinstance(listed, list):
        raise CheckpointError(f"{key} must be a list of numbers; config.json has {listed!r}.")
    return tuple(_number({key: value}, key) for value in listed)


def _value(values: Json, key: str, default: Any) -> Any:
    value = values.get(key)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise CheckpointError(f"config.json lacks {key!r}.")
    return default
