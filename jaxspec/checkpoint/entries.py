"""Entries of config.json, checked as they are read: numbers, layer types, rotations.

Two layouts are in use: the one that checkpoints on the Hub carry (`rope_theta`, `rope_scaling` at
the top level, layer patterns by rule), and the one written by transformers 5 (`rope_parameters`,
`layer_types`). Both are read; the first is written, since every reader knows it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.files import CheckpointError
from jaxspec.models.config import (
    DynamicScaling,
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
ACTIVATION_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
LAYER_TYPE_NAMES = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
_SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}
# Fields of scalings that config.json calls otherwise.
_SCALING_NAMES = {
    "original_max_positions": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
# Sizes beyond this cannot index an array.
LARGEST_SIZE = 2**31 - 1
_REQUIRED = object()


def read_layer_types(text: Json, rule: list[str]) -> tuple[str, ...]:
    """Reads the kind of each layer: as listed, or by the family's rule."""
    listed = text.get("layer_types")
    if listed is None:
        return tuple(rule)
    known = isinstance(listed, list) and {str(kind) for kind in listed} <= _LAYER_TYPES.keys()
    if not known:
        raise CheckpointError(
            f"layer_types must be a list of {', '.join(_LAYER_TYPES)}; config.json has {listed!r}."
        )
    return tuple(_LAYER_TYPES[kind] for kind in listed)


def sliding_fields(text: Json, types: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields about windows. Having one takes a window and a layer that slides."""
    if "sliding" not in types or text.get("sliding_window") is None:
        return {"layer_types": ("full",) * len(types), "sliding_window": None}
    return {"layer_types": types, "sliding_window": read_integer(text, "sliding_window")}


def read_activation(text: Json) -> str:
    """Reads the activation of the MLPs."""
    name = text.get("hidden_activation") or text.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act must be one of {', '.join(_ACTIVATIONS)}; config.json has {name!r}."
        )
    return _ACTIVATIONS[name]


def read_rope(text: Json, layer_type: str) -> Rope:
    """Reads the rotation of one kind of layer.

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
    theta = read_number(section, "rope_theta", read_number(text, theta_key, 10_000.0))
    fraction = read_number(
        section, "partial_rotary_factor", read_number(text, "partial_rotary_factor", 1.0)
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
    longest = read_integer(text, "max_position_embeddings")
    original = read_integer(
        text,
        "original_max_position_embeddings",
        read_integer(section, "original_max_position_embeddings", longest),
    )
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise CheckpointError(
            f"The RoPE type must be one of default, {', '.join(_SCALINGS)}; config.json has "
            f"{kind!r}."
        )
    known: dict[str, Any] = {"original_max_positions": longest if kind == "dynamic" else original}
    if kind == "yarn":
        known["factor"] = read_number(section, "factor", longest / original)
    if kind == "longrope":
        known["factor"] = read_number(section, "factor", max(longest / original, 1.0))
    values = {}
    for entry in dataclasses.fields(_SCALINGS[kind]):
        name = _SCALING_NAMES.get(entry.name, entry.name)
        if entry.name in known:
            values[entry.name] = known[entry.name]
        elif entry.name == "truncate":
            values[entry.name] = bool(section.get(name, True))
        elif entry.name in ("short_factors", "long_factors"):
            values[entry.name] = _numbers(section, name)
        elif entry.default is None:
            values[entry.name] = read_number_or_none(section, name)
        else:
            default = _REQUIRED if entry.default is dataclasses.MISSING else entry.default
            values[entry.name] = read_number(section, name, default)
    return _SCALINGS[kind](**values)


def scaling_entries(scaling: Scaling, config: ModelConfig) -> dict[str, Any]:
    """Returns the entries that describe a scaling of the rotation."""
    kind = next(name for name, record in _SCALINGS.items() if type(scaling) is record)
    entries = {
        _SCALING_NAMES.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in vars(scaling).items()
        if value is not None
    }
    if isinstance(scaling, DynamicScaling | LongRopeScaling):
        del entries["original_max_position_embeddings"]  # it stands at the top
    if not isinstance(scaling, LongRopeScaling):
        return {"rope_type": kind, **entries}
    # Phi-3's first readers want "type" and exactly three entries, so the rest is only written where
    # it says something new.
    if stored_positions(config) / scaling.original_max_positions == scaling.factor:
        del entries["factor"]
    return {"type": kind, **entries}


def usable_positions(config: ModelConfig) -> int:
    """Returns the longest text that a network is prepared for if nothing else is asked for."""
    scaling = config.rope.scaling
    if isinstance(scaling, LongRopeScaling):
        return min(config.max_positions, scaling.original_max_positions)
    return config.max_positions


def reach(config: ModelConfig) -> int | None:
    """Returns the longest text that training and scaling reach; `None`: any length."""
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


def stored_positions(config: ModelConfig) -> int:
    """Returns `max_position_embeddings`: how far the weights can go, in any use."""
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


def read_integer(values: Json, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
    """Reads a whole number of at least `least`; without a default, it must be there."""
    value = _value(values, key, default)
    if type(value) is not int or not least <= value <= LARGEST_SIZE:
        raise CheckpointError(
            f"{key} must be a whole number of at least {least}; config.json has {value!r}."
        )
    return value


def read_number(values: Json, key: str, default: Any = _REQUIRED) -> float:
    """Reads a number; without a default, it must be there."""
    value = _value(values, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise CheckpointError(f"{key} must be a number; config.json has {value!r}.")
    return float(value)


def read_number_or_none(values: Json, key: str) -> float | None:
    """Reads a number, or `None` where there is none."""
    return None if values.get(key) is None else read_number(values, key)


def _numbers(values: Json, key: str) -> tuple[float, ...]:
    listed = _value(values, key, _REQUIRED)
    if not isinstance(listed, list):
        raise CheckpointError(f"{key} must be a list of numbers; config.json has {listed!r}.")
    return tuple(read_number({key: value}, key) for value in listed)


def _value(values: Json, key: str, default: Any) -> Any:
    value = values.get(key)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise CheckpointError(f"config.json lacks {key!r}.")
    return default
