"""Passes over canvases: the positions that a network reads, and its predictions for them.

Everything is for one row. A row keeps its prompt at positions 0, 1, ...; no position sees one past
the row's end. Blocks begin where the prompt ends; in a network that
is causal over blocks they lie at multiples of the block, so the first one may begin with the
prompt's last tokens.

Kept between passes:

- `"none"`: nothing. Every pass reads the whole canvas. Exact.
- `"blocks"`: keys and values of finished blocks, for networks that are causal over blocks. Exact.
- `"prefix"` and `"dual"` (Fast-dLLM): a block's first pass reads the whole canvas; the passes after
  it take keys and values of what lies before the block, or on both sides of it, from that first
  one. APPROXIMATE: in a network that sees both sides those change with every token filled in.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import pad_caches, settled
from jaxspec.core.types import Hidden, KVCache, LanguageModel, LayerKV
from jaxspec.diffusion.unmask import Canvas, Pace, Prediction, Rules, predict

CACHES = ("none", "blocks", "prefix", "dual")


@dataclass(frozen=True)
class DenoisePlan:
    """Static settings of a denoising program, in addition to those of the network.

    Attributes:
        rules: of decisions.
        shift: the output at a position decides the next one.
        block_causal: the network is causal over blocks of `rules.block`.
        cache: one of `CACHES`.
        canvas_size: positions of every canvas; see `sized`.
        max_new: positions to fill in per row, except those that complete a last block.
        window: positions of a prediction.
        node_counts: canvases per row and pass worth compiling, ascending.
        one_shape: with `"blocks"`, every pass reads as many blocks as any may need.
    """

    rules: Rules
    shift: bool
    block_causal: bool
    cache: str
    canvas_size: int
    max_new: int
    window: int
    node_counts: tuple[int, ...] = (1,)
    one_shape: bool = False

    @property
    def block(self) -> int:
        """Positions per block."""
        return self.rules.block

    @property
    def num_nodes(self) -> int:
        """Most canvases per row and pass."""
        return self.node_counts[-1]

    def sized(self, canvas_size: int) -> "DenoisePlan":
        """Returns the plan for canvases of a size."""
        return replace(self, canvas_size=canvas_size)

    @property
    def reopens(self) -> bool:
        """True if only the first pass of a block reads the whole canvas."""
        return self.cache in ("prefix", "dual")


class CanvasSettings(NamedTuple):
    """Facts of one row that stay the same while it is filled in.

    Attributes:
        length: of the prompt.
        wanted: the position after the last one that was asked for.
        end: the position after the last block; past `wanted` if the last block is longer.
        stop_ids: ids that end the text; -1 for unused entries.
        pace: how many positions each step fills in.
        temperature: `None` if no row of the batch draws.
        guidance: scale of classifier-free guidance, away from the prediction without the prompt;
            `None` for none, without the second pass.
        key: of the row's randomness.
    """

    length: Int[Array, ""]
    wanted: Int[Array, ""]
    end: Int[Array, ""]
    stop_ids: Int[Array, " stop_ids"]
    pace: Pace
    temperature: Float[Array, ""] | None
    guidance: Float[Array, ""] | None
    key: PRNGKeyArray


def read_canvas(
    network: LanguageModel, plan: DenoisePlan, row: CanvasSettings, canvas: Canvas
) -> tuple[Prediction, tuple[LayerKV, ...]]:
    """Reads a whole canvas in one pass.

    Returns:
        The prediction for the window, and keys and values of every position. The window begins with
        the current block, or with the text if masks may be left behind.
    """
    size = canvas.tokens.shape[0]
    positions = jnp.arange(size)
    seen = jnp.broadcast_to(positions < row.end, (size, size))
    if plan.block_causal:
        seen = seen & masks.block_causal(size, plan.block)
    first = row.length if plan.rules.allow_mask_token else canvas.start
    start = jnp.minimum(first, size - plan.window)

    def pass_over(tokens: Int[Array, " positions"]) -> tuple[Array, Hidden]:
        hidden = network.forward(tokens, positions, seen, None)
        # No output decides the first position; it belongs to the prompt.
        of_window = start - int(plan.shift) + jnp.arange(plan.window)
        return network.unembed(hidden.features[jnp.maximum(of_window, 0)]), hidden

    logits, hidden = pass_over(canvas.tokens)
    if row.guidance is not None:
        blank = jnp.where(positions < row.length, plan.rules.mask_token_id, canvas.tokens)
        without, _ = pass_over(blank)
        logits = without + (row.guidance + 1.0) * (logits - without)
    return predict(plan.rules, logits, start, row.key, row.temperature), hidden.new_kv


def read_rest(
    network: LanguageModel,
    plan: DenoisePlan,
    row: CanvasSettings,
    canvas: Canvas,
    kept: tuple[LayerKV, ...],
) -> Prediction:
    """Reads the current block (`"dual"`), or it and all after it (`"prefix"`), in one pass.

    `kept` holds the keys and values of the first pass of the block; the rest of the canvas is seen
    as it was then.
    """
    size = canvas.tokens.shape[0]
    width = plan.block if plan.cache == "dual" else min(plan.max_new, size)
    # A late block may leave less than the full width after it. The pass then begins earlier, and
    # each position that it reads twice is seen once.
    begin = jnp.minimum(canvas.start, size - width)
    tokens = jax.lax.dynamic_slice_in_dim(canvas.tokens, begin, width)
    positions = begin + jnp.arange(width)
    everywhere = jnp.arange(size)
    own = (positions >= canvas.start) & (positions < row.end)
    elsewhere = everywhere < canvas.start
    if plan.cache == "dual":
        after = (everywhere >= canvas.start + plan.block) & (everywhere < row.end)
        elsewhere = elsewhere | after
    seen = jnp.broadcast_to(jnp.concatenate([elsewhere, own])[None], (width, size + width))
    hidden = network.forward(tokens, positions, seen, None, scratch=kept)
    features = hidden.features
    if plan.shift:
        # The position before the block was not read again, so the prediction for the block's first
        # position means nothing. That position is filled in already.
        features = jnp.concatenate([features[:1], features[:-1]])
    features = jax.lax.dynamic_slice_in_dim(features, canvas.start - begin, plan.block)
    logits = network.unembed(features)
    return predict(plan.rules, logits, canvas.start, row.key, row.temperature)


class Finished(NamedTuple):
    """Keys and values of the finished blocks of a row, whose network is causal over blocks.

    Attributes:
        cache: of all finished blocks.
        edge: features of the last cached position; they decide the next one under `shift`.
    """

    cache: KVCache
    edge: Float[Array, " embed"]


class Blocks(NamedTuple):
    """Blocks of a row's canvases that a pass reads: the first that is not cached, or the next one.

    Blocks that canvases share are read once: canvases whose drafts reach into the next block share
    the full block before it.

    Attributes:
        canvas: the canvas whose tokens each entry reads.
        is_next: True for a next block, False for a first one.
        before: for a next block, the entry that holds the first block of its canvas.
        firsts: for each canvas, the entry that holds its first block.
        nexts: for each canvas, the entry that holds its next block.
        has_first: True if the first block of a canvas is read.
        has_next: True if the next block of a canvas is read.
    """

    canvas: Int[Array, " blocks"]
    is_next: Bool[Array, " blocks"]
    before: Int[Array, " blocks"]
    firsts: Int[Array, " nodes"]
    nexts: Int[Array, " nodes"]
    has_first: Bool[Array, " nodes"]
    has_next: Bool[Array, " nodes"]


def read_blocks(
    network: LanguageModel,
    plan: DenoisePlan,
    row: CanvasSettings,
    canvases: Canvas,
    finished: Finished,
    blocks: Blocks,
) -> tuple[Prediction, Finished]:
    """Reads blocks of several canvases in one pass; each block sees the finished ones.

    Returns:
        The prediction for each canvas, `plan.window` positions; and the keys, values and last
        features of each canvas's first block, to append when that block is full.
    """
    begin, block = finished.cache.length, plan.block
    count = blocks.canvas.shape[0]
    starts = begin + block * blocks.is_next
    tokens = jax.vmap(lambda canvas, start: jax.lax.dynamic_slice(canvas, (start,), (block,)))(
        canvases.tokens[blocks.canvas], starts
    )
    positions = starts[:, None] + jnp.arange(block)[None]
    entries = jnp.arange(count)
    is_before = (blocks.before[:, None] == entries[None]) & blocks.is_next[:, None]
    seen = (entries[:, None] == entries[None]) | is_before
    seen = jnp.repeat(jnp.repeat(seen, block, axis=0), block, axis=1)
    hidden = network.forward(tokens.reshape(-1), positions.reshape(-1), seen, finished.cache)
    of_blocks = hidden.features.reshape(count, block, -1)
    features, lasts = of_blocks, of_blocks[:, -1]
    if plan.shift:
        edges = jnp.where(blocks.is_next[:, None], lasts[blocks.before], finished.edge[None])
        features = jnp.concatenate([edges[:, None], features[:, :-1]], axis=1)
    logits = network.unembed(features.reshape(count * block, -1)).reshape(count, block, -1)
    said = jax.vmap(partial(predict, plan.rules), in_axes=(0, 0, None, None))(
        logits, starts, row.key, row.temperature
    )

    def of_canvases(entries: Array) -> Array:
        both = jnp.concatenate([entries[blocks.firsts], entries[blocks.nexts]], axis=1)
        return jnp.pad(both, [(0, 0), (0, plan.window - 2 * block)] + [(0, 0)] * (both.ndim - 2))

    prediction = jax.tree.map(of_canvases, said._replace(start=()))
    is_read = jnp.stack([blocks.has_first, blocks.has_next], axis=1)
    is_read = jnp.repeat(is_read, block, axis=1)
    is_read = jnp.pad(is_read, [(0, 0), (0, plan.window - 2 * block)])
    nodes = blocks.firsts.shape[0]
    prediction = prediction._replace(start=jnp.full(nodes, begin), known=prediction.known & is_read)
    layers = tuple(
        LayerKV(
            jnp.moveaxis(layer.keys.reshape(*layer.keys.shape[:2], count, block), 2, 0),
            jnp.moveaxis(layer.values.reshape(-1, count, block, layer.values.shape[2]), 1, 0),
        )
        for layer in settled(hidden)
    )
    layers, edges = jax.tree.map(lambda leaf: leaf[blocks.firsts], (layers, lasts))
    return prediction, Finished(KVCache(layers, jnp.full(nodes, begin)), edges)


def read_prompt(
    network: LanguageModel, plan: DenoisePlan, tokens: Int[Array, " bucket"], length: Int[Array, ""]
) -> Finished:
    """Reads the whole blocks of a prompt in one pass."""
    bucket = tokens.shape[0]
    hidden = network.forward(
        tokens, jnp.arange(bucket), masks.block_causal(bucket, plan.block), None
    )
    whole = length - length % plan.block

    cache = pad_caches(KVCache(settled(hidden), whole), plan.canvas_size)
    return Finished(cache, hidden.features[jnp.maximum(whole - 1, 0)])
