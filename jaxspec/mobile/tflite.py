"""Functions and weights into one `.tflite`: lowered for shapes, then filled with weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.types import Params
from jaxspec.mobile.convert import Lowered, lower, to_flatbuffer
from jaxspec.mobile.memory import estimate_phone_memory
from jaxspec.mobile.records import Signature
from jaxspec.mobile.weights import Leaf, put_weights

_LARGEST = (1 << 31) - 1  # offsets in a flatbuffer are 31 bits


def lower_all(
    signatures: Mapping[str, Signature], params: Params, quantization: str
) -> dict[str, Lowered]:
    """Lowers functions for weights of these shapes.

    Raises:
        ValueError: in this quantization the weights do not fit into one file.
    """
    shapes = jax.tree.map(_shape_in_file, params)
    _check_size(params, quantization)
    return {name: lower(shapes, signature) for name, signature in signatures.items()}


def to_tflite(
    lowered: Mapping[str, Lowered],
    params: Params,
    quantization: str,
    texts: Mapping[str, str],
) -> bytearray:
    """Makes one file of functions of `lower_all`, the weights that they read, and some texts."""
    return put_weights(to_flatbuffer(lowered, texts), _leaves(params), quantization)


def _shape_in_file(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a weight: integers keep their type, all others are float32."""
    whole = jnp.issubdtype(leaf.dtype, jnp.integer)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if whole else jnp.float32)


def _leaves(params: Params) -> list[Leaf]:
    """Lists all weights; each is made when it is asked for."""

    def leaf(path: Any, array: Any) -> Leaf:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return Leaf(name, lambda: np.asarray(array).astype(_shape_in_file(array).dtype, copy=False))

    return [leaf(path, array) for path, array in jax.tree_util.tree_leaves_with_path(params)]


def _check_size(params: Params, quantization: str) -> None:
    config = params.target.config
    stored = estimate_phone_memory(config, quantization, 0, params.draft)
    size = stored.products + stored.table
    if config.tied_head and quantization == "float32":
        size -= stored.table  # look-ups and products read the same bytes
    if size > _LARGEST:
        raise ValueError(
            f"model: its weights take {size / 2**30:.1f} GiB as {quantization}, and a .tflite "
            "holds less than 2 GiB; take fewer bits, or a smaller model."
        )
