"""Sets of sub-layers to skip: from indices, published ones, from a file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxspec.checkpoint import shipped_folders
from jaxspec.checkpoint.files import as_path, read_json
from jaxspec.core.checks import Natural, Nodes, Share, at_most_entries, checked, shown
from jaxspec.models import Skips
from jaxspec.models.config import MOST_LAYERS, Layers

_Bits = Annotated[Sequence[Any], at_most_entries(2 * MOST_LAYERS)]


def skips_of(num_layers: int, attention: Iterable[int], mlp: Iterable[int]) -> Skips:
    """Returns the set for `LayerSkip` that skips the attention and the MLP of given layers.

    Raises:
        ValueError: an index does not name a layer, or is given twice, or there are too many layers.

    Example:
        >>> skips_of(3, attention=[0, 2], mlp=[])
        Skips(attention=(True, False, True), mlp=(False, False, False))
    """
    num_layers = checked("num_layers", num_layers, Layers)
    parts = {"attention": attention, "mlp": mlp}
    skip = {name: [False] * num_layers for name in parts}
    for name, layers in parts.items():
        for layer in checked(name, layers, Iterable):
            if type(layer) is not int or not 0 <= layer < num_layers:
                raise ValueError(
                    f"{name} must name layers in 0..{num_layers - 1} to skip, got {shown(layer)}."
                )
            if skip[name][layer]:
                raise ValueError(f"{name} names layer {layer} twice.")
            skip[name][layer] = True
    return Skips(*map(tuple, skip.values()))


def skips_of_bits(bits: Sequence[int] | Int[np.ndarray, " entries"], num_layers: int) -> Skips:
    """Returns the set of a 0/1 vector: an entry per sub-layer, attention first, or per layer.

    Args:
        bits: 1 to skip; `2 * num_layers` or `num_layers` of them.
        num_layers: of the model.

    Raises:
        ValueError: an argument is something else, the number of entries is another, or an entry is
            neither 0 nor 1.

    Example:
        >>> skips_of_bits([0, 1, 0], 3) == skips_of_bits([0, 1, 0, 0, 1, 0], 3)
        True
    """
    num_layers = checked("num_layers", num_layers, Layers)
    entries = checked("bits", bits, _Bits)
    if len(entries) not in (num_layers, 2 * num_layers):
        raise ValueError(
            f"bits must have {2 * num_layers} entries for the sub-layers of {num_layers} layers, "
            f"or {num_layers} for the layers, got {len(entries)}."
        )
    if not all(entry in (0, 1) for entry in entries):
        raise ValueError(f"bits must hold 0 or 1 for each, got {shown(list(entries))}.")
    plain = tuple(bool(entry) for entry in entries)
    return Skips(plain[:num_layers], plain[-num_layers:])


def skipped_layers(skip: Skips) -> dict[str, list[int]]:
    """Returns the indices, as `skips_of` takes them.

    Example:
        >>> skipped_layers(skips_of(3, attention=[0, 2], mlp=[]))
        {'attention': [0, 2], 'mlp': []}
    """
    return {
        name: [layer for layer, skipped in enumerate(part) if skipped]
        for name, part in zip(Skips._fields, skip, strict=True)
    }


class _Published(NamedTuple):
    """Layers as numbers and ranges, both ends included."""

    num_layers: int
    attention: str
    mlp: str


# The sets of the published program of Draft & Verify (dilab-zju/self-speculative-decoding).
_PUBLISHED = {
    "llama-2-13b": _Published(
        40, "3 5 6 8 10 11 14 15 18 22-31 33-37", "6 9 10 11 15 24 25 27 28 35"
    ),
    "llama-2-13b-chat": _Published(
        40, "7-11 14 15 18 22 23 24 26-38", "7 10 11 14 27 30 32 33 37 38"
    ),
    "codellama-13b": _Published(
        40,
        "5 6 9 10 11 14 15 16 21 23 24 26-32 34-37",
        "10 11 12 14 15 25 26 27 30 32 33 34",
    ),
    "llama-2-70b": _Published(
        80,
        "10 11 13 14 16 18-22 25 27-31 35 41 43 45-58 60-63 65-70 74 75 78 79",
        "2 4 9 10 13 14 16 20 21 22 24-29 31 34 37 41 47-50 53 54 55 57 58 60 62 63 66 67 68 70 76",
    ),
}
PUBLISHED_SKIPS = tuple(_PUBLISHED)
"""Names for `published_skips`: the models that the sets were searched for."""


def published_skips(name: str, num_layers: int | None = None) -> Skips:
    """Returns a set published with Draft & Verify (Zhang et al. 2024) for the model of that name.

    Args:
        name: one of `PUBLISHED_SKIPS`.
        num_layers: of the model to draft with, to check it; `None` for no check.

    Raises:
        ValueError: the name is unknown, or the model has another depth.

    Example:
        >>> [sum(part) for part in published_skips("llama-2-13b")]
        [24, 10]
    """
    if checked("name", name, str) not in _PUBLISHED:
        raise ValueError(
            f"skips: no published set {shown(name)}; there are {', '.join(_PUBLISHED)}."
        )
    depth, attention, mlp = _PUBLISHED[name]
    if num_layers not in (None, depth):
        raise ValueError(
            f"skips: the published set {name!r} is for a model of {depth} layers, this one has "
            f"{num_layers}: search one for it with `jaxspec tune skips`."
        )
    return skips_of(depth, _listed(attention), _listed(mlp))


def _listed(ranges: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in ranges.split()]
    return [layer for first, *last in ends for layer in range(first, max([first, *last]) + 1)]


_OF_SEARCH: dict[str, Any] = {
    "num_layers": Layers,
    "attention": tuple[Natural, ...],
    "mlp": tuple[Natural, ...],
    "num_speculative_tokens": Nodes,
    "threshold": Share,
}


def skip_settings(source: str | Path) -> dict[str, Any]:
    """Reads the settings of `LayerSkip` that `jaxspec tune skips` found.

    Args:
        source: a file or folder that it wrote, or the name of a set that comes with the package,
            such as "demo-skips".

    Raises:
        ValueError: `source` does not exist, or is not a result of `jaxspec tune skips`.
    """
    path = as_path("source", source)
    if not path.exists() and str(source) in shipped_folders():
        path = shipped_folders()[str(source)]
    if path.is_dir():
        path = path / "skips.json"
    found = read_json(path)
    if missing := sorted(_OF_SEARCH.keys() - found.keys()):
        raise ValueError(f"{path} is no result of `jaxspec tune skips`: it has no {missing[0]!r}.")
    try:
        layers, *parts, length, threshold = (
            checked(name, found[name], hint) for name, hint in _OF_SEARCH.items()
        )
        skip = skips_of(layers, *parts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {"skip": skip, "num_speculative_tokens": length, "threshold": threshold}
