"""Parameter trees: read from stored tensors leaf by leaf or left there, and written as tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import native
from jaxspec.checkpoint.names import Tensor, TensorPlacement, copy_into
from jaxspec.core.types import PyTree
from jaxspec.models.storage import is_matrix
from jaxspec.progress import progress_bar
from jaxspec.sharding import param_sharding, put

# XLA takes a NumPy buffer as it is, without a copy, when it is aligned like this.
_ALIGNMENT = 64
# Number of weights from which loading takes long enough to show a progress bar.
_LARGE = 500_000_000


def matrices_as_stored(dtype: np.dtype, stored: np.dtype, mesh: Mesh | None) -> bool:
    """Says whether matrices that are stored in bfloat16 stay that in a network of float32.

    They do where native code multiplies them as the float32 numbers that they are. XLA would
    convert them in every pass.
    """
    runs = jax.default_backend() == "cpu" and native.status().instructions is not None
    return runs and mesh is None and dtype == np.float32 and stored.name == "bfloat16"


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dictionaries by path, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in flat}


def shapes_by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its path."""
    return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def read_params(
    shapes: PyTree,
    placed: Mapping[str, list[TensorPlacement]],
    stored: Mapping[str, Tensor],
    dtype: np.dtype,
    mesh: Mesh | None = None,
    matrices: np.dtype | None = None,
) -> PyTree:
    """Reads every leaf of a parameter tree, holding one stored tensor at a time.

    Args:
        shapes: the tree, with a shape in place of each array.
        placed: the tensors that make up each leaf.
        stored: the tensors by name.
        dtype: dtype of the leaves.
        mesh: devices to divide each leaf over as it is read; `None`: the default device.
        matrices: dtype of those that `jaxspec.models.storage` calls matrices; `None`: `dtype`.
    """
    leaves = leaves_by_path(shapes)
    large = sum(leaf.size for leaf in leaves.values()) > _LARGE
    arrays = []
    with progress_bar(len(leaves), shown=large) as advance:
        for path, shape in leaves.items():
            advance("loading weights")
            own = matrices if is_matrix(tuple(path.split("/"))) else None
            leaf = _read_leaf(shape.shape, own or dtype, placed[path], stored)
            # Waiting keeps the host from running ahead with leaves that a device has yet to take.
            arrays.append(
                jax.block_until_ready(
                    jax.device_put(leaf)
                    if mesh is None
                    else put(leaf, param_sharding(path, leaf.shape, mesh))
                )
            )
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def unread_params(
    shapes: PyTree,
    placed: Mapping[str, list[TensorPlacement]],
    stored: Mapping[str, Tensor],
    dtype: np.dtype,
) -> PyTree:
    """Returns the tree of `read_params` with leaves that are read whenever they are asked for."""

    def unread(path: str, shape: tuple[int, ...]) -> UnreadLeaf:
        return UnreadLeaf(shape, dtype, lambda: _read_leaf(shape, dtype, placed[path], stored))

    leaves = [unread(path, leaf.shape) for path, leaf in leaves_by_path(shapes).items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


class UnreadLeaf:
    """A weight in its files: NumPy reads it when it makes an array of it, and keeps nothing.

    Attributes:
        shape: its axes.
        dtype: of the array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]):
        """Describes a weight that `make` reads."""
        self.shape, self.dtype, self._make = shape, dtype, make

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def astype(self, dtype: Any) -> "UnreadLeaf":
        return UnreadLeaf(self.shape, np.dtype(dtype), lambda: self._make().astype(dtype))

    def __getitem__(self, index: Any) -> jax.Array:
        return jax.numpy.asarray(np.asarray(self)[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is always a new array
        array = self._make()
        return array if dtype is None else array.astype(dtype, copy=False)


def _read_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    placed: list[TensorPlacement],
    stored: Mapping[str, Tensor],
) -> np.ndarray:
    leaf = _aligned_empty(shape, dtype)
    for placement in placed:
        copy_into(placement, leaf, stored[placement.name].read())
    return leaf


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
