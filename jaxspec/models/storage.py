"""The form in which the matrices of a network are kept in memory.

A network computes in the dtype of its norms. The matrices that it multiplies with may be stored in
fewer bits, and are multiplied as the numbers that they stand for: a pass of few tokens takes about
as long as reading them takes.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.checks import shown
from jaxspec.core.types import PyTree

Holder = TypeVar("Holder")

STORAGES = ("float32", "bfloat16", "int8")
"""Forms that `stored_as` knows."""

_MATRICES = ("kernel", "embedding")
_LARGEST = 127


def is_matrix(path: tuple[str, ...]) -> bool:
    """Says whether a parameter is a matrix that `multiply` takes.

    The stacked matrices of experts are not: some are gathered, and XLA multiplies them.

    Example:
        >>> is_matrix(("layer_0", "mlp", "down", "kernel")), is_matrix(("norm", "scale"))
        (True, False)
    """
    return path[-1] in _MATRICES and "experts" not in path


def stored_as(params: PyTree, storage: str) -> PyTree:
    """Returns the parameters of a network or a head with their matrices in another form.

    Args:
        params: nested dicts.
        storage: `float32` and `bfloat16` cast. `int8` rounds each output channel to whole numbers
            in -127..127 times a scale, symmetrically; the scales lie next to the matrix. A scale
            has 16 significant bits, so that a float32 holds each product: what `unscaled` gives
            becomes the same integers and scales again.

    Raises:
        ValueError: another form.

    Example:
        >>> kernel = jnp.array([[0.5, -6.0], [2.0, 2.0]])  # two output channels
        >>> stored = stored_as({"fc": {"kernel": kernel}}, "int8")["fc"]
        >>> stored["kernel"].tolist()
        [[32, -127], [127, 42]]
        >>> [round(127 * scale, 3) for scale in stored["scale"].tolist()]
        [2.0, 6.0]
    """
    if storage not in STORAGES:
        raise ValueError(f"weights must be one of {', '.join(STORAGES)}, got {shown(storage)}.")

    def store(path: tuple[str, ...], matrix: Array) -> dict[str, Array]:
        if storage != "int8":
            return {path[-1]: matrix.astype(storage)}
        summed = _summed_axes(path, matrix.ndim)
        matrix = matrix.astype(jnp.float32)
        scale = _rounded_up(jnp.max(jnp.abs(matrix), axis=summed, keepdims=True) / _LARGEST)
        # A channel of zeros has any scale.
        whole = jnp.round(matrix / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
        return {path[-1]: whole, "scale": jnp.squeeze(scale, summed)}

    return _map_matrices(params, store)


def kept_like(params: PyTree, target: PyTree) -> PyTree:
    """Returns a head's parameters with their matrices in the form of its target's.

    In bfloat16 only those that lose nothing by that. In int8 all: a draft need not be exact.
    """
    form = target["embed"]["embedding"].dtype

    def keep(path: tuple[str, ...], matrix: Array) -> dict[str, Array]:
        narrow = matrix.astype(jnp.bfloat16)
        exact = matrix.dtype == jnp.float32 and bool(jnp.all(narrow.astype(matrix.dtype) == matrix))
        return {path[-1]: narrow if exact else matrix}

    if form == jnp.int8:
        return stored_as(params, "int8")
    return _map_matrices(params, keep) if form == jnp.bfloat16 else params


def unscaled(params: PyTree) -> PyTree:
    """Returns the same parameters, those of int8 multiplied by their scales."""
    return _map_matrices(params, lambda path, matrix: {path[-1]: matrix})


def widened(holder: Holder) -> Holder:
    """Returns a network or a head with all parameters in its own dtype.

    For what reads parameters one by one: training, and files for phones. Parameters of drafters
    without weights come back as they are.
    """
    dtype = getattr(holder, "dtype", None)
    if dtype is None or not dataclasses.is_dataclass(holder):
        return holder
    plain = dataclasses.replace(holder, params=unscaled(holder.params))  # pyright: ignore
    is_narrow = lambda leaf: leaf.dtype in (jnp.bfloat16, jnp.float16)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_narrow(leaf) else leaf, plain)


def _rounded_up(scale: Array) -> Array:
    """The next numbers of 16 significant bits; positive ones only."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0xFF) & ~0xFF, jnp.float32)


def _summed_axes(path: tuple[str, ...], num_axes: int) -> tuple[int, ...]:
    """The axes of a matrix that a product sums over; the others are its output channels."""
    if path[-1] == "embedding":  # [vocab, embed], read turned by a tied head
        return (1,)
    return tuple(range(num_axes - 1)) if path[-2:] == ("out", "kernel") else (0,)


def _map_matrices(
    params: PyTree,
    change: Callable[[tuple[str, ...], Array], dict[str, Array]],
    path: tuple[str, ...] = (),
) -> PyTree:
    """Puts what `change` makes of each matrix, as float32 if it had scales, into its place."""
    changed = {}
    matrices = [name for name in params if is_matrix((*path, name))]
    for name, value in params.items():
        here = (*path, name)
        if isinstance(value, dict):
            changed[name] = _map_matrices(value, change, here)
        elif name not in matrices:
            changed[name] = value
    for name in matrices:
        matrix, scale = params[name], changed.pop("scale", None)
        if scale is not None:
            summed = _summed_axes((*path, name), matrix.ndim)
            matrix = matrix.astype(scale.dtype) * jnp.expand_dims(scale, summed)
        changed |= change((*path, name), matrix)
    return changed
