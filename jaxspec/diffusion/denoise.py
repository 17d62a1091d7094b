"""Passes over canvases: which slots a network reads, and what it says of them.

Everything is for one row. A row keeps its prompt at slots 0, 1, ...; positions are slots, and
slots past the row's end are seen by nobody. Blocks begin where the prompt ends; in a network that
is causal over blocks they lie at multiples of the block, so the first one may begin with the
prompt's last tokens.

What is kept between passes:

- `"none"`: nothing. Every pass reads the whole canvas. Exact.
- `"blocks"`: keys and values of finished blocks, for networks that are causal over blocks. Exact.
- `"prefix"` and `"dual"` (Fast-dLLM): a block's first pass reads the whole canvas; the passes after
  it take keys and values of what lies before the block, or on both sides of it, from that first
  one. APPROXIMATE: in a network that sees both sides those change with every token filled in.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import pad_slots, settled
from jaxspec.core.types import Hidden, KVCache, LanguageModel, LayerKV
from jaxspec.diffusion.unmask import Canvas, Pace, Prediction, Rules, predict

CACHES = ("none", "blocks", "prefix", "dual")


@dataclass(frozen=True)
class Plan:
    """What is static about a denoising program, besides the network's settings.

    rules: of decisions.
    shift: the output at a slot decides the next one.
    block_causal: the network is causal over blocks of `rules.block`.
    cache: one of `CACHES`.
    slots: of every canvas.
    max_new: slots to fill in, per row, but for what completes a last block.
    window: slots that a prediction is about.
    node_counts: canvases per row and pass worth compiling, ascending.
    one_shape: with `"blocks"`, every pass reads as many blocks as any may need.
    """

    rules: Rules
    shift: bool
    block_causal: bool
    cache: str
    slots: int
    max_new: int
    window: int
    node_counts: tuple[int, ...] = (1,)
    one_shape: bool = False

    @property
    def block(self) -> int:
        return self.rules.block

    @property
    def num_nodes(self) -> int:
        """Canvases per row and pass, at most."""
        return self.node_counts[-1]

    @property
    def reopens(self) -> bool:
        """Whether a block's first pass reads the whole canvas, and the others do not."""
        return self.cache in ("prefix", "dual")


class Row(NamedTuple):
    """What stays the same while a row is filled in.

    length: of the prompt.
    wanted: the slot after the last one that was asked for.
    end: the slot after the last block; behind `wanted` where whole blocks reach further.
    stop_ids: ids that end the text; -1 where unused.
    temperature: `None` if no row of the batch draws.
    guidance: how far to move away from what the network says without the prompt (classifier-free
        guidance); `None` for not at all, without the second pass.
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
    network: LanguageModel, plan: Plan, row: Row, canvas: Canvas
) -> tuple[Prediction, tuple[LayerKV, ...]]:
    """One pass over a whole canvas: what it says of the window, and keys and values of every slot.

    The window begins with the current block; where masks may be left behind, with the text.
    """
    slots = canvas.tokens.shape[0]
    positions = jnp.arange(slots)
    seen = jnp.broadcast_to(positions < row.end, (slots, slots))
    if plan.block_causal:
        seen = seen & masks.block_causal(slots, plan.block)
    first = row.length if plan.rules.allow_mask_token else canvas.start
    start = jnp.minimum(first, slots - plan.window)

    def pass_over(tokens: Int[Array, " slots"]) -> tuple[Array, Hidden]:
        hidden = network.forward(tokens, positions, seen, None)
        # No slot lies before the first. What is said of that one means nothing, and it is the
        # prompt's.
        of_window = start - int(plan.shift) + jnp.arange(plan.window)
        return network.unembed(hidden.features[jnp.maximum(of_window, 0)]), hidden

    logits, hidden = pass_over(canvas.tokens)
    if row.guidance is not None:
        blank = jnp.where(positions < row.length, plan.rules.mask_token_id, canvas.tokens)
        without, _ = pass_over(blank)
        logits = without + (row.guidance + 1.0) * (logits - without)
    return predict(plan.rules, logits, start, row.key, row.temperature), hidden.new_kv


def read_rest(
    network: LanguageModel, plan: Plan, row: Row, canvas: Canvas, kept: tuple[LayerKV, ...]
) -> Prediction:
    """One pass over the current block (`"dual"`), or over it and all after it (`"prefix"`).

    Everything else is seen as it was in the block's first pass, whose keys and values are `kept`.
    """
    slots = canvas.tokens.shape[0]
    width = plan.block if plan.cache == "dual" else min(plan.max_new, slots)
    # The widest text may not fit behind a late block: then the pass begins earlier, and what it
    # reads twice is seen once.
    begin = jnp.minimum(canvas.start, slots - width)
    tokens = jax.lax.dynamic_slice_in_dim(canvas.tokens, begin, width)
    positions = begin + jnp.arange(width)
    everywhere = jnp.arange(slots)
    own = (positions >= canvas.start) & (positions < row.end)
    elsewhere = everywhere < canvas.start
    if plan.cache == "dual":
        after = (everywhere >= canvas.start + plan.block) & (everywhere < row.end)
        elsewhere = elsewhere | after
    seen = jnp.broadcast_to(jnp.concatenate([elsewhere, own])[None], (width, slots + width))
    hidden = network.forward(tokens, positions, seen, None, scratch=kept)
    features = hidden.features
    if plan.shift:
        # The slot before the block was not read again. What is said of the block's first slot means
        # nothing, and it is filled in already.
        features = jnp.concatenate([features[:1], features[:-1]])
    features = jax.lax.dynamic_slice_in_dim(features, canvas.start - begin, plan.block)
    logits = network.unembed(features)
    return predict(plan.rules, logits, canvas.start, row.key, row.temperature)


class Finished(NamedTuple):
    """Keys and values of the finished blocks of a row, whose network is causal over blocks.

    edge: the features of the last slot of the cache, which decide the next one under `shift`.
    """

    cache: KVCache
    edge: Float[Array, " embed"]


class Blocks(NamedTuple):
    """Blocks that a pass reads of a row's canvases: the first that is not cached, or the next one.

    What canvases have in common is read once: those that drafts lead into the next block share the
    block before it, which is full.

    canvas: whose tokens to read.
    is_next: whether the block is the one behind the first.
    before: of a next block: the entry that holds the first block of its canvas.
    firsts, nexts: of each canvas: the entries that hold its blocks.
    has_first, has_next: whether they are read.
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
    plan: Plan,
    row: Row,
    canvases: Canvas,
    finished: Finished,
    blocks: Blocks,
) -> tuple[Prediction, Finished]:
    """One pass over some blocks of several canvases, each of which sees the finished ones.

    Returns:
        What it says of each canvas, `plan.window` slots; and the keys, values and last features of
        each canvas's first block: what to append once that block is full.
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
    network: LanguageModel, plan: Plan, tokens: Int[Array, " bucket"], length: Int[Array, ""]
) -> Finished:
    """The whole blocks of a prompt, in one pass."""
    bucket = tokens.shape[0]
    hidden = network.forward(
        tokens, jnp.arange(bucket), masks.block_causal(bucket, plan.block), None
    )
    whole = length - length % plan.block

    cache = pad_slots(KVCache(settled(hidden), whole), plan.slots)
    return Finished(cache, hidden.features[jnp.maximum(whole - 1, 0)])
