"""What an exported model needs on a phone, in figures, before anything is exported."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.core.types import PyTree
from jaxspec.drafters import Eagle, LayerSkip, LoadedDrafter
from jaxspec.mobile.quantize import QUANTIZATIONS, check_quantization
from jaxspec.models import ModelConfig
from jaxspec.models.transformer import param_shapes

_SCALE_BYTES = 12  # scale, zero point and their index, of each output of a product
_FLOAT_BYTES = 4


class PhoneMemory(NamedTuple):
    """Bytes of an exported model while it decodes, at most.

    products: weights of all products, the output head and an EAGLE head's own included.
    table: of token embeddings.
    repeated: further copies of products, where every use of a weight is packed apart.
    caches: keys and values of one text in float32, twice, as input and output take turns.
    """

    products: int
    table: int
    repeated: int
    caches: int

    @property
    def total(self) -> int:
        return sum(self)


def estimate_phone_memory(
    config: ModelConfig,
    quantization: str,
    slots: int,
    head: PyTree = (),
    draft_pass: PyTree = (),
    draft_passes: int = 0,
    separate_signatures: int = 0,
) -> PhoneMemory:
    """Estimates the memory of `step` with its weights and caches; buffers for a pass are small.

    Args:
        config: of the target.
        quantization: of weights, one of `QUANTIZATIONS`.
        slots: of the caches.
        head: weights of an EAGLE head, or their shapes; it has one layer.
        draft_pass: weights that one pass of the drafter reads, an output head among them.
        draft_passes: of all functions: as many as a step's tree is deep, and one for each function
            that only drafts.
        separate_signatures: functions of the file that read all of the target, where each packs
            what it reads for itself, once for every use: a GPU, or a CPU without a weight cache.
            0: a CPU with one, which packs each weight once.

    Raises:
        ValueError: the quantization is not known.
    """
    check_quantization(quantization)
    target: Any = param_shapes(config)
    table = target["embed"]["embedding"]
    products = _bytes_of_products((target, head), quantization)
    if not config.tied_head:
        products -= stored_bytes(table.shape, quantization)
    repeated = 0
    if separate_signatures:
        repeated = (separate_signatures - 1) * products
        repeated += draft_passes * _bytes_of_products(draft_pass, quantization)
    layers = config.num_layers + bool(jax.tree.leaves(head))
    row = 2 * layers * config.num_kv_heads * config.head_dim * _FLOAT_BYTES
    return PhoneMemory(
        products=products,
        table=stored_bytes(table.shape, "float32" if quantization == "float32" else "int8"),
        repeated=repeated,
        caches=2 * slots * row,
    )


def draft_pass_weights(target: PyTree, drafter: LoadedDrafter) -> PyTree:
    """What one pass of a drafter that can be baked in reads of its own weights and the target's."""
    method, embedding = drafter.drafter, target["embed"]["embedding"]
    output = target.get("head", embedding)
    if isinstance(method, Eagle):
        own = drafter.params.params
        return own if "head" in own else (own, output)
    assert isinstance(method, LayerSkip), "no other drafter is baked in"
    assert method.skip is not None, "a set that is compiled in"
    skipped = {"attention": method.skip.attention, "mlp": method.skip.mlp}
    kept = [
        target[f"layer_{layer}"][part]
        for part, flags in skipped.items()
        for layer, skip in enumerate(flags)
        if not skip
    ]
    return kept, output


def _bytes_of_products(weights: PyTree, quantization: str) -> int:
    matrices = [leaf for leaf in jax.tree.leaves(weights) if leaf.ndim > 1]
    return sum(stored_bytes(leaf.shape, quantization) for leaf in matrices)


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
