"""`config.json` of Hugging Face checkpoints to `ModelConfig`, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.entries import (
    ACTIVATION_NAMES,
    Json,
    reach,
    read,
    read_common,
    read_rope,
    scaling_entries,
    stored_positions,
    usable_positions,
)
from jaxspec.checkpoint.families import FAMILIES, plainest_family
from jaxspec.checkpoint.files import CheckpointError, given
from jaxspec.core.checks import Count, shown
from jaxspec.models.config import ModelConfig

# Fields that are entries of config.json.
_FIELDS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_head": "tie_word_embeddings",
}


def config_from_json(raw: Json, max_positions: int | None = None) -> ModelConfig:
    """Reads a parsed config.json.

    Args:
        raw: the JSON object, in either layout. Of a multimodal Gemma-3, the text part is read.
        max_positions: longest text to prepare for. `None`: what the file says. For models with
            two LongRoPE tables, `None` is the length they were first trained with, which selects
            the short table; a longer one selects the long table, for all texts.

    Raises:
        CheckpointError: unknown `model_type`, RoPE type or activation; an entry that is missing, of
            another type or impossible; a setting that its RoPE type does not have; quantized
            weights; `max_positions` beyond what `prepared_for` allows.

    Example:
        >>> import json
        >>> from jaxspec.checkpoint import config_from_json, shipped_models
        >>> file = shipped_models()["demo"] / "config.json"
        >>> config_from_json(json.loads(file.read_text())).num_layers
        12
    """
    max_positions = given("max_positions", max_positions, Count | None)
    name = model_type(raw)
    family = FAMILIES[name]
    # An explicit null is an answer (no window, no cap), so it also replaces a default.
    text = {**family.defaults, **_text_part(raw), "model_type": name}
    if raw.get("quantization_config") or text.get("quantization_config"):
        raise CheckpointError(
            "config.json has a quantization_config, and quantized weights cannot be read: use the "
            "original checkpoint, or dequantize this one first."
        )
    if read(text, "use_bidirectional_attention", bool, False):
        raise CheckpointError(
            "config.json sets use_bidirectional_attention: this is an encoder, not a decoder."
        )
    common = read_common(text, family.names)
    text |= common
    sizes = {ours: common[theirs] for ours, theirs in _FIELDS.items()}
    sizes["rope"] = read_rope(text, "full_attention")
    try:
        config = ModelConfig(**{**sizes, **family.fields(text)})
        if max_positions is None:
            max_positions = usable_positions(config)
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
    max_positions = given("max_positions", max_positions, Count)
    longest = reach(config)
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
        CheckpointError: it is not one of `FAMILIES`, or this is no JSON object.
    """
    raw = given("raw", raw, Mapping[str, Any])
    default = "gemma3_text" if raw.get("model_type") == "gemma3" else None
    name = _text_part(raw).get("model_type", default)
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"model_type must be one of {', '.join(sorted(FAMILIES))}; config.json has "
            f"{shown(name)}."
        )
    return name


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a network, under a `model_type` whose readers build exactly that.

    Where several families would do, it is the plainest of them: a Mistral without a window becomes
    a Llama.

    Raises:
        CheckpointError: no family describes it; the fields that cannot be expressed are named.

    Example:
        >>> from jaxspec.checkpoint import config_to_json
        >>> from jaxspec.models import ModelConfig
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> config_to_json(config)["model_type"]
        'llama'
        >>> config_to_json(config.replace(qk_norm=True))["model_type"]
        'qwen3'
    """
    name = plainest_family(config)
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
        "max_position_embeddings": stored_positions(config),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if scaling is None else scaling_entries(scaling, config),
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
    nested = read(raw, "text_config", Mapping[str, Any], None)
    if nested is None:
        return raw
    shared = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id") if key in raw}
    return {**shared, **nested}
