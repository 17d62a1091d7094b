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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

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
    one_shape: with `"blocks"`, a pass reads two blocks whether or not it needs the second.
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
        # The slot before the text always exists: a prompt has one token at least.
        of_window = jax.lax.dynamic_slice_in_dim(
            hidden.features, start - int(plan.shift), plan.window
        )
        return network.unembed(of_window), hidden

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


def read_blocks(
    network: LanguageModel, plan: Plan, row: Row, canvas: Canvas, finished: Finished, width: int
) -> tuple[Prediction, Finished]:
    """One pass over the block after the finished ones, or over it and the next (`width` slots).

    Returns:
        What it says of `plan.window` slots, known for `width` of them; and the first block's keys,
        values and last features: what to append once that block is full.
    """
    begin = finished.cache.length
    tokens = jax.lax.dynamic_slice_in_dim(canvas.tokens, begin, width)
    positions = begin + jnp.arange(width)
    seen = masks.block_causal(width, plan.block)
    hidden = network.forward(tokens, positions, seen, finished.cache)
    features = hidden.features
    if plan.shift:
        features = jnp.concatenate([finished.edge[None], features[:-1]])
    prediction = predict(plan.rules, network.unembed(features), begin, row.key, row.temperature)

    def widen(entries: Array) -> Array:
        if not entries.ndim:
            return entries
        return jnp.pad(entries, [(0, plan.window - width)] + [(0, 0)] * (entries.ndim - 1))

    prediction = jax.tree.map(widen, prediction)
    layers = tuple(
        LayerKV(layer.keys[:, :, : plan.block], layer.values[:, : plan.block])
        for layer in settled(hidden)
    )
    block = KVCache(layers, begin)
    return prediction, Finished(block, hidden.features[plan.block - 1])


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
