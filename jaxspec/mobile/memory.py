"""What an exported model needs on a phone, in figures, before anything is exported."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.core.types import PyTree
from jaxspec.mobile.quantize import QUANTIZATIONS, check_quantization
from jaxspec.models import ModelConfig
from jaxspec.models.transformer import param_shapes

_SCALE_BYTES = 12  # scale, zero point and their index, of each output of a product
_FLOAT_BYTES = 4


class PhoneMemory(NamedTuple):
    """Bytes of an exported model while it decodes.

    products: weights of all products, the output head and an EAGLE head's own included.
    table: of token embeddings.
    repeated_head: copies of the output head, packed once per use in a step beyond the first.
        CPUs share one copy with a weight cache, GPUs do not.
    caches: keys and values of one text in float32, twice, as input and output take turns.
    """

    products: int
    table: int
    repeated_head: int
    caches: int

    @property
    def total(self) -> int:
        return sum(self)


def estimate_phone_memory(
    config: ModelConfig,
    quantization: str,
    slots: int,
    head: PyTree | None = None,
    depth: int = 0,
) -> PhoneMemory:
    """Estimates the memory of `step` with its weights and caches; buffers for a pass are small.

    Args:
        config: of the target.
        quantization: of weights, one of `QUANTIZATIONS`.
        slots: of the caches.
        head: weights of an EAGLE head, or their shapes; it has one layer.
        depth: of its tree: `step` uses the output head that many times more.

    Raises:
        ValueError: the quantization is not known.
    """
    check_quantization(quantization)
    target: Any = param_shapes(config)
    table = target["embed"]["embedding"]
    output_head = table if config.tied_head else target["head"]["kernel"]
    matrices = [leaf for leaf in jax.tree.leaves((target, head)) if leaf.ndim > 1]
    products = sum(stored_bytes(leaf.shape, quantization) for leaf in matrices)
    if not config.tied_head:
        products -= stored_bytes(table.shape, quantization)
    layers = config.num_layers + (head is not None)
    row = 2 * layers * config.num_kv_heads * config.head_dim * _FLOAT_BYTES
    return PhoneMemory(
        products=products,
        table=stored_bytes(table.shape, "float32" if quantization == "float32" else "int8"),
        repeated_head=depth * stored_bytes(output_head.shape, quantization),
        caches=2 * slots * row,
    )


def check_phone_memory(needed: PhoneMemory, available: int) -> None:
    """Refuses what cannot fit.

    Raises:
        ValueError: with figures.
    """
    if needed.total <= available:
        return
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed._asdict().items())
    raise ValueError(
        f"The file would need {needed.total / 1e9:.2f} GB on the phone ({parts}), which has "
        f"{available / 1e9:.2f} GB: take fewer slots, fewer bits, or a smaller model."
    )


def stored_bytes(shape: tuple[int, ...], quantization: str) -> int:
    """Bytes of a weight of this shape in a file, its scales included."""
    size, recipe = int(np.prod(shape)), QUANTIZATIONS[quantization]
    if recipe is None:
        return size * _FLOAT_BYTES
    groups = size // recipe.block if recipe.block else max(shape)
    scales = groups * (2 if recipe.block else _SCALE_BYTES)
    return size * recipe.bits // 8 + scales
