"""A digest of weights, by which a drafter knows the target that it was trained for."""

import hashlib

import jax
import ml_dtypes
import numpy as np

from jaxspec.core.types import PyTree

_NUMBERS = 64  # of each array, from its beginning
_EXACT = ("float32", "bfloat16")


def weights_digest(params: PyTree) -> str | None:
    """Returns 32 hexadecimal digits of a SHA-256 over a few numbers of each array.

    It takes milliseconds at any size. It does not change with dtype, storage in bfloat16 or a mesh:
    numbers are rounded to bfloat16. Names and shapes of the arrays count too: where a new release
    arranges arrays in another way, config.json must have another name for the digest.

    Args:
        params: nested dicts of arrays.

    Returns:
        The digest; `None` for weights that tell too little: in int8 or float16, whose rounding is
        another one, left in their files, or partly on other machines.

    Example:
        >>> from jaxspec.checkpoint import load
        >>> weights_digest(load("demo").params) == weights_digest(load("demo", "bfloat16").params)
        True
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    for _, leaf in leaves:
        if not isinstance(leaf, jax.Array) or leaf.dtype.name not in _EXACT:
            return None
        if not leaf.is_fully_addressable:
            return None
    in_place = jax.default_backend() == "cpu"  # there NumPy copies nothing, and compiles nothing
    arrays = [np.asarray(leaf) if in_place else leaf for _, leaf in leaves]
    first = [array[(0,) * (array.ndim - 1)][:_NUMBERS] for array in arrays]
    digest = hashlib.sha256()
    for (path, leaf), numbers in zip(leaves, jax.device_get(first), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digest.update(f"{name} {leaf.shape}\n".encode())
        digest.update(np.asarray(numbers).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:32]
