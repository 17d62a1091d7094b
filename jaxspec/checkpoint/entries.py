"""Entries of config.json, checked as they are read: numbers, layer types, rotations.

Two layouts are in use: the one that checkpoints on the Hub carry (`rope_theta`, `rope_scaling` at
the top level, layer patterns by rule), and the one written by transformers 5 (`rope_parameters`,
`layer_types`). Both are read; the first is written, since every reader knows it.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from jaxspec.checkpoint.files import CheckpointError, given
from jaxspec.core.checks import Count, Positive, one_of
from jaxspec.models.config import (
    DynamicScaling,
    Fraction,
    Layers,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    Scaling,
    YarnScaling,
)

Json = Mapping[str, Any]
TARGET_DIGEST = "target_digest"
"""Entry of drafters: `jaxspec.models.digest` of the weights of the target they were trained for."""

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
# Settings of the rotation that may stand beside those of its type.
_OF_ANY_TYPE = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    "original_max_position_embeddings",
)
_REQUIRED = object()


def read(values: Json, key: str, hint: Any, default: Any = _REQUIRED) -> Any:
    """Reads an entry as an annotation says, see `jaxspec.core.checks`.

    Args:
        values: the entries.
        key: which of them.
        hint: its type and rules.
        default: stands for an entry that is absent or null; without one, it must be there.

    Raises:
        CheckpointError: it is missing or something else, naming it.

    Example:
        >>> read({"num_hidden_layers": 4.0}, "num_hidden_layers", int)
        4
    """
    value = values.get(key)
    if value is not None:
        return given(f"config.json: {key}", value, hint)
    if default is _REQUIRED:
        raise CheckpointError(f"config.json lacks {key!r}.")
    return default


def read_common(text: Json, names: Mapping[str, str]) -> dict[str, Any]:
    """Reads the entries that all families have.

    Args:
        text: the entries.
        names: what a family calls those that it calls otherwise. Errors name them so too.
    """

    def entry(name: str, hint: Any, default: Any = _REQUIRED) -> Any:
        return read(text, names.get(name, name), hint, default)

    width, heads = entry("hidden_size", Count), entry("num_attention_heads", Count)
    # Those that have another name for it have no such default.
    activation = _REQUIRED if "hidden_act" in names else "silu"
    head_dim = read(text, "head_dim", Count, None)
    if head_dim is None and width % heads:
        raise CheckpointError(
            f"config.json: {names.get('hidden_size', 'hidden_size')} must be a multiple of "
            f"{heads}, the number of heads, where head_dim is not given; got {width}."
        )
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "head_dim": head_dim or width // heads,
        "num_key_value_heads": entry("num_key_value_heads", Count, heads),
        "num_hidden_layers": entry("num_hidden_layers", Layers),
        "vocab_size": entry("vocab_size", Count),
        "intermediate_size": entry("intermediate_size", Count),
        "max_position_embeddings": entry("max_position_embeddings", Count),
        "rms_norm_eps": entry("rms_norm_eps", Positive, 1e-6),
        "hidden_act": _ACTIVATIONS[
            entry("hidden_act", Annotated[str, one_of(*_ACTIVATIONS)], activation)
        ],
        "tie_word_embeddings": entry("tie_word_embeddings", bool, False),
    }


def read_layer_types(text: Json, rule: list[str]) -> tuple[str, ...]:
    """Reads the kind of each layer: as listed, or by the family's rule."""
    listed = read(text, "layer_types", tuple[Annotated[str, one_of(*_LAYER_TYPES)], ...], None)
    return tuple(rule if listed is None else (_LAYER_TYPES[kind] for kind in listed))


def sliding_fields(text: Json, types: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields about windows. Having one takes a window and a layer that slides."""
    window = read(text, "sliding_window", int, None)
    if "sliding" not in types or window is None:
        return {"layer_types": ("full",) * len(types), "sliding_window": None}
    return {"layer_types": types, "sliding_window": window}


def read_rope(text: Json, layer_type: str) -> Rope:
    """Reads the rotation of one kind of layer.

    Values are looked for in the rope section first, then at the top level.
    """
    theta_key = "rope_theta"
    # The settings of each kind of layer may stand by themselves, among or beside common ones.
    section = _rope_section(text)
    common = {key: value for key, value in section.items() if key not in _LAYER_TYPES}
    if layer_type in section:
        _check_parameters(common, "default")
        common = read(section, layer_type, Mapping[str, Any], {})
    elif layer_type == "sliding_attention":
        common = {}
    if layer_type == "sliding_attention":
        # Only Gemma-3 asks; its short-range layers are neither scaled nor of the same base.
        theta_key = "rope_local_base_freq"
    theta = read(common, "rope_theta", Positive, read(text, theta_key, Positive, 10_000.0))
    name = "partial_rotary_factor"
    fraction = read(common, name, Fraction, read(text, name, Fraction, 1.0))
    if fraction != 1 and text["model_type"] != "phi3":
        raise CheckpointError(
            f"partial_rotary_factor is known for phi3 only; config.json has {fraction} with "
            f"model_type {text['model_type']!r}."
        )
    try:
        return Rope(theta, fraction, _scaling(common, text))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"The RoPE settings of config.json are wrong: {error}") from error


def _rope_section(text: Json) -> Json:
    """Settings of the rotation, from the two places where they may stand."""
    old, new = (
        read(text, key, Mapping[str, Any], {}) for key in ("rope_scaling", "rope_parameters")
    )
    different = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
    if different:
        raise CheckpointError(
            f"config.json: rope_scaling and rope_parameters say different things of "
            f"{', '.join(different)}: leave one of them out."
        )
    return {**old, **new}


def _check_parameters(section: Json, kind: str) -> None:
    """Refuses settings of the rotation that its type does not know."""
    fields = dataclasses.fields(_SCALINGS[kind]) if kind in _SCALINGS else ()
    known = {*_OF_ANY_TYPE, *(_SCALING_NAMES.get(field.name, field.name) for field in fields)}
    if kind == "yarn":
        known.add("finetuned")  # of the first models with it: how they were made
    unknown = [key for key, value in section.items() if value is not None and key not in known]
    if unknown:
        without = ", which settings without a rope_type are of," if kind == "default" else ""
        raise CheckpointError(
            f"config.json: RoPE type {kind!r}{without} has no setting {', '.join(unknown)[:200]}."
        )


def _scaling(section: Json, text: Json) -> Scaling | None:
    kinds = {read(section, key, str, None) for key in ("rope_type", "type")} - {None}
    if text["model_type"] == "phi3":  # its first releases used other names
        kinds = {"longrope" if kind in ("su", "yarn") else kind for kind in kinds}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in ("default", *_SCALINGS):
        raise CheckpointError(
            f"The RoPE type must be one of default, {', '.join(_SCALINGS)}; config.json has "
            f"{' and '.join(repr(kind[:80]) for kind in (kind, *kinds))}."
        )
    _check_parameters(section, kind)
    longest = text["max_position_embeddings"]
    name = "original_max_position_embeddings"
    stated = read(text, name, Count, read(section, name, Count, None))
    if kind == "default":
        return None
    defaults: dict[str, Any] = {}
    if kind in ("yarn", "longrope"):
        # One of both is needed, and the other follows.
        defaults["original_max_positions"] = longest
        if stated is not None:
            defaults["factor"] = longest / stated if kind == "yarn" else max(longest / stated, 1.0)
    if kind == "dynamic":
        stated = longest
    section = {**section, name: stated}
    record = _SCALINGS[kind]
    hints = typing.get_type_hints(record, include_extras=True)
    values = {}
    for field in dataclasses.fields(record):
        known = _REQUIRED if field.default is dataclasses.MISSING else field.default
        values[field.name] = read(
            section,
            _SCALING_NAMES.get(field.name, field.name),
            hints[field.name],
            defaults.get(field.name, known),
        )
    return record(**values)


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
