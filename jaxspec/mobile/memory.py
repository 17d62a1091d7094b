"""Memory that an exported model needs on a phone, estimated before anything is exported."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.types import PyTree
from jaxspec.drafters import (
    Deer,
    DFlash,
    DrafterLike,
    DraftModel,
    Eagle,
    LayerSkip,
    LoadedDrafter,
)
from jaxspec.mobile.contents import ExportConfig, contents_of, drafters_over_trees, in_one_dtype
from jaxspec.mobile.quantize import MOST_EXTRA, QUANTIZATIONS, check_quantization
from jaxspec.models import ModelConfig
from jaxspec.models.transformer import param_shapes

_SCALE_BYTES = 12  # scale, zero point and their index, of each output of a product
_FLOAT_BYTES = 4
_PASSES = ("prefill", "verify", "decode", "step", "step_block", "step_block_sampled")
"""Kinds of functions that read the whole target."""
_DRAFT_PASSES = ("absorb", "draft", "draft_block", "step_block", "step_block_sampled")
"""Kinds of functions with one pass of the drafter; in `step` most have one for each level."""


class PhoneMemory(NamedTuple):
    """Bytes of an exported model while it decodes, at most.

    Attributes:
        products: weights of all products, those of the output head and of a drafter included.
        table: table of token embeddings.
        repeated: further copies of products, where every use of a weight is packed separately.
        caches: keys and values of one text in float32, twice, as input and output take turns. The
            states `table` of token recycling and `text` of prompt lookup are not counted.
    """

    products: int
    table: int
    repeated: int
    caches: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def phone_memory(model: Model, drafter: DrafterLike | None, config: ExportConfig) -> PhoneMemory:
    """Estimates the memory of a file before it is written.

    The file runs on a CPU with a weight cache or, for `bundle="gpu"`, on a GPU.

    Args:
        model: the target, causal.
        drafter: as for `export`.
        config: settings of the file.

    Raises:
        ValueError: as `export`, for what cannot be exported.
    """
    model, loaded = in_one_dtype(model, drafter)
    names = (name.rpartition("_") for name in contents_of(model, loaded, config).signatures)
    kinds = [kind if size.isdigit() else f"{kind}_{size}".strip("_") for kind, _, size in names]
    head, draft_pass, in_steps = (), (), 0
    if isinstance(loaded.drafter, Eagle | DFlash | LayerSkip):
        draft_pass = draft_pass_weights(model.params, loaded)
        in_steps = sum(each.tree_shape[1] for each in drafters_over_trees(loaded.drafter, config))
    if isinstance(loaded.drafter, DFlash):
        in_steps = 1  # for a tree of any depth
    if isinstance(loaded.drafter, Eagle | DFlash):
        head = loaded.params.params
    if isinstance(loaded.drafter, Deer | DraftModel):
        draft_pass = dict(loaded.params.params)
        if not loaded.params.config.tied_head:
            del draft_pass["embed"]  # rows of it are read, in no product
    if isinstance(loaded.drafter, DraftModel):
        # It reads the prompt too, and in a step one pass for each level.
        in_steps = loaded.drafter.tree_shape[1] + sum(kind == "prefill" for kind in kinds)
    needed = estimate_phone_memory(
        model.config,
        config.quantization,
        config.capacity,
        head,
        draft_pass,
        in_steps + sum(kind in _DRAFT_PASSES for kind in kinds),
        separate_signatures=sum(kind in _PASSES for kind in kinds) * (config.bundle == "gpu"),
        head_config=loaded.params.config if head else None,
    )
    if isinstance(loaded.drafter, Deer | DraftModel):
        # A model of its own; only the target's weights are rounded for texts.
        plain = config.quantization.removesuffix("-calibrated")
        drafting = estimate_phone_memory(loaded.params.config, plain, config.capacity)
        needed = PhoneMemory(*map(sum, zip(needed, drafting, strict=True)))
    return needed


def estimate_phone_memory(
    config: ModelConfig,
    quantization: str,
    capacity: int,
    head: PyTree = (),
    draft_pass: PyTree = (),
    draft_passes: int = 0,
    separate_signatures: int = 0,
    head_config: ModelConfig | None = None,
) -> PhoneMemory:
    """Estimates the memory of weights and caches; buffers for a pass are small.

    Args:
        config: of the target.
        quantization: of weights, one of `QUANTIZATIONS`.
        capacity: of the caches, in tokens.
        head: weights of an EAGLE or a DFlash head, or their shapes.
        draft_pass: weights that one pass of the drafter reads, an output head among them.
        draft_passes: in all functions: the depth of a step's tree, and one for each function that
            only drafts.
        separate_signatures: functions that read the whole target and pack its weights separately,
            on a GPU or on a CPU without a weight cache. 0: a CPU with a weight cache, which packs
            each weight once.
        head_config: of the head's layers; `None`: one that is like the target's.

    Raises:
        ValueError: the quantization is not known.

    Example:
        >>> import jaxspec
        >>> config = jaxspec.load("demo").config
        >>> needed = estimate_phone_memory(config, "int8", capacity=1024)
        >>> needed.total == needed.products + needed.table + needed.caches
        True
    """
    check_quantization(quantization)
    target: Any = param_shapes(config)
    table = target["embed"]["embedding"]
    products = _bytes_of_products(target, quantization)
    if not config.tied_head:
        products -= stored_bytes(table.shape, quantization)
    table_bytes = stored_bytes(table.shape, "float32" if quantization == "float32" else "int8")
    weights = QUANTIZATIONS[quantization]
    if weights is not None and weights.calibrated:
        products += int(MOST_EXTRA * (products + table_bytes))
        if config.tied_head:  # it keeps the table's 8 bits
            products += table_bytes - stored_bytes(table.shape, quantization)
    row_bytes = _row_bytes(config)
    if jax.tree.leaves(head):
        products += _bytes_of_products(head, quantization)
        row_bytes += _row_bytes(head_config or config.replace(num_layers=1, layer_types=()))
    repeated = 0
    if separate_signatures:
        repeated = (separate_signatures - 1) * products
        repeated += draft_passes * _bytes_of_products(draft_pass, quantization)
    return PhoneMemory(
        products=products,
        table=table_bytes,
        repeated=repeated,
        caches=2 * capacity * row_bytes,
    )


def _row_bytes(config: ModelConfig) -> int:
    """Returns the bytes of one token in the cache of a model."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _FLOAT_BYTES


def draft_pass_weights(target: PyTree, drafter: LoadedDrafter) -> PyTree:
    """Returns the weights that one pass of a drafter reads, its own and the target's."""
    method, embedding = drafter.drafter, target["embed"]["embedding"]
    output = target.get("head", embedding)
    if isinstance(method, Eagle | DFlash):
        own = drafter.params.params
        return own if "head" in own else (own, output)
    assert isinstance(method, LayerSkip), "no other drafter is in a file"
    assert method.skip is not None, "its set is fixed"
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
    """Refuses a file that does not fit.

    Args:
        needed: estimated.
        available: bytes of the phone.

    Raises:
        ValueError: with all figures.
    """
    if needed.total <= available:
        return
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needed._asdict().items())
    raise ValueError(
        f"The file would need {needed.total / 1e9:.2f} GB on the phone ({parts}), which has "
        f"{available / 1e9:.2f} GB: take less capacity, fewer bits, or a smaller model."
    )


def stored_bytes(shape: tuple[int, ...], quantization: str) -> int:
    """Returns the bytes of a weight of this shape in a file, its scales included."""
    size, weights = int(np.prod(shape)), QUANTIZATIONS[quantization]
    if weights is None:
        return size * _FLOAT_BYTES
    groups = size // weights.block if weights.block else max(shape)
    scales = groups * (2 if weights.block else _SCALE_BYTES)
    return size * weights.bits // 8 + scales
