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
from jaxspec.core.loop import round_up
from jaxspec.core.types import Hidden, KVCache, LanguageModel, LayerKV
from jaxspec.diffusion.unmask import Canvas, Pace, Prediction, Rules, predict

CACHES = ("none", "blocks", "prefix", "dual")
_WIDEST = 2
"""Tokens of drafts over those of the canvas, in a pass that opens a block. Masks are square."""


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
        window: positions of a prediction; a block and those after it that drafts reach.
        per_decision: positions that a decision fills in at most.
        num_nodes: canvases per row and pass.
        one_shape: with `"blocks"`, every pass reads as many blocks as any may need; see also
            `opening_nodes` and `rest_widths`.
    """

    rules: Rules
    shift: bool
    block_causal: bool
    cache: str
    canvas_size: int
    max_new: int
    window: int
    per_decision: int = 1
    num_nodes: int = 1
    one_shape: bool = False

    @property
    def block(self) -> int:
        """Positions per block."""
        return self.rules.block

    @property
    def opening_nodes(self) -> int:
        """Canvases that the pass that opens a block reads; all but the first have drafts in it.

        Only the first if all passes are to have one shape. Else as many as widen the pass by
        `_WIDEST` canvases.
        """
        if not self.reopens or self.one_shape:
            return 1
        return min(self.num_nodes, 1 + _WIDEST * self.canvas_size // self.rest_widths[-1])

    @property
    def rest_widths(self) -> tuple[int, ...]:
        """Positions that a pass within a block reads, ascending; the last are enough for any block.

        With `"prefix"`, fewer blocks are left with every block that is finished.
        """
        if self.cache == "dual":
            return (self.block,)
        most = min(self.max_new, self.canvas_size)
        parts = (1,) if self.one_shape else (4, 2, 1)
        return tuple(sorted({min(most, round_up(-(-most // n), self.block)) for n in parts}))

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


class Rest(NamedTuple):
    """The part of a canvas that passes within a block read.

    Attributes:
        begin: its first position.
        positions: all of them.
        elsewhere: True for positions of the whole canvas that are seen as the opening pass read
            them.
        own: True for positions of the part that are seen as they are.
    """

    begin: Int[Array, ""]
    positions: Int[Array, " width"]
    elsewhere: Bool[Array, " positions"]
    own: Bool[Array, " width"]

    def of(self, tokens: Int[Array, " positions"]) -> Int[Array, " width"]:
        """Returns the tokens of the part."""
        return jax.lax.dynamic_slice_in_dim(tokens, self.begin, self.positions.shape[0])


def rest_of(plan: DenoisePlan, row: CanvasSettings, start: Int[Array, ""], width: int) -> Rest:
    """Returns the block that begins at `start` (`"dual"`), or it and all after it (`"prefix"`).

    `width`, one of `plan.rest_widths`, must reach the row's end with `"prefix"`.
    """
    size = plan.canvas_size
    # A late block may leave less than the full width after it. The part then begins earlier, and
    # each position that is read twice is seen once.
    begin = jnp.minimum(start, size - width)
    positions, everywhere = begin + jnp.arange(width), jnp.arange(size)
    elsewhere = everywhere < start
    if plan.cache == "dual":
        elsewhere = elsewhere | ((everywhere >= start + plan.block) & (everywhere < row.end))
    return Rest(begin, positions, elsewhere, (positions >= start) & (positions < row.end))


def read_rest(
    network: LanguageModel,
    plan: DenoisePlan,
    row: CanvasSettings,
    canvas: Canvas,
    kept: tuple[LayerKV, ...],
    last: Prediction,
    width: int,
) -> Prediction:
    """Reads the current block (`"dual"`), or it and all after it (`"prefix"`), in one pass.

    Args:
        network: the network.
        plan: static settings.
        row: facts of the row.
        canvas: the canvas, within a block.
        kept: keys and values of the pass that opened the block; the rest of the canvas is seen as
            it was then.
        last: an earlier prediction. With `"dual"`, drafts of the next block come from it.
        width: positions to read, see `rest_of`.
    """
    rest = rest_of(plan, row, canvas.start, width)
    seen = jnp.concatenate([rest.elsewhere, rest.own])[None]
    seen = jnp.broadcast_to(seen, (rest.own.shape[0], seen.shape[1]))
    tokens = rest.of(canvas.tokens)
    hidden = network.forward(tokens, rest.positions, seen, None, scratch=kept)
    return _predict_rest(network, plan, row, canvas.start, rest, hidden.features, last)


def open_block(
    network: LanguageModel, plan: DenoisePlan, row: CanvasSettings, canvases: Canvas, width: int
) -> tuple[Prediction, tuple[LayerKV, ...]]:
    """Opens a block: reads the whole first canvas, and, as `read_rest` does, the others' rest.

    The others have drafts in the block, and `width` positions are read of them. They see the first
    one's keys and values, which are made in the same pass.

    Returns:
        The prediction for each canvas, and keys and values of the first.
    """
    first = jax.tree.map(lambda leaf: leaf[0], canvases)
    others = canvases.tokens.shape[0] - 1
    if not others:
        prediction, layers = read_canvas(network, plan, row, first)
        return jax.tree.map(lambda leaf: leaf[None], prediction), layers
    size, rest = plan.canvas_size, rest_of(plan, row, first.start, width)
    everywhere = jnp.arange(size)
    parts = jax.vmap(rest.of)(canvases.tokens[1:]).reshape(-1)
    whole_sees = jnp.concatenate([everywhere < row.end, jnp.zeros(others * width, bool)])
    same = jnp.repeat(jnp.eye(others, dtype=bool), width, axis=0)
    own = (same[:, :, None] & rest.own[None, None]).reshape(others * width, -1)
    elsewhere = jnp.broadcast_to(rest.elsewhere[None], (others * width, size))
    seen = jnp.concatenate(
        [
            jnp.broadcast_to(whole_sees[None], (size, whole_sees.shape[0])),
            jnp.concatenate([elsewhere, own], axis=1),
        ]
    )
    hidden = network.forward(
        jnp.concatenate([first.tokens, parts]),
        jnp.concatenate([everywhere, jnp.tile(rest.positions, others)]),
        seen,
        None,
    )
    begin = jnp.minimum(first.start, size - plan.window)
    of_window = begin - int(plan.shift) + jnp.arange(plan.window)
    logits = network.unembed(hidden.features[jnp.maximum(of_window, 0)])
    opening = predict(plan.rules, logits, begin, row.key, row.temperature)
    features = hidden.features[size:].reshape(others, width, -1)
    later = jax.vmap(
        lambda each: _predict_rest(network, plan, row, first.start, rest, each, opening)
    )(features)
    layers = tuple(
        LayerKV(layer.keys[..., :size], layer.values[:, :size]) for layer in hidden.new_kv
    )
    predictions = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), opening, later)
    return predictions, layers


def _predict_rest(
    network: LanguageModel,
    plan: DenoisePlan,
    row: CanvasSettings,
    start: Int[Array, ""],
    rest: Rest,
    features: Float[Array, "width embed"],
    last: Prediction,
) -> Prediction:
    """Returns the prediction for the window that begins with the block at `start`."""
    width = features.shape[0]
    if plan.shift:
        # The position before the block was not read again, so the prediction for the block's first
        # position means nothing. That position is filled in already.
        features = jnp.concatenate([features[:1], features[:-1]])
    window = plan.block if plan.cache == "dual" else plan.window
    begin = jnp.minimum(start, plan.canvas_size - window)
    places = begin + jnp.arange(window) - rest.begin
    logits = network.unembed(features[jnp.clip(places, 0, width - 1)])
    said = predict(plan.rules, logits, begin, row.key, row.temperature)
    said = said._replace(known=(places >= start - rest.begin) & (places < width))
    return said if window == plan.window else _before(plan, said, last)


def _before(plan: DenoisePlan, said: Prediction, last: Prediction) -> Prediction:
    """Returns a prediction for a block, followed by what an earlier one says of the next block."""
    begin = jnp.minimum(said.start, plan.canvas_size - plan.window)
    positions = begin + jnp.arange(plan.window)
    here, there = positions - said.start, positions - last.start
    in_block = (here >= 0) & (here < plan.block)
    in_last = (here >= plan.block) & (there >= 0) & (there < plan.window)

    def join(ours: Array, theirs: Array) -> Array:
        ours = ours[jnp.clip(here, 0, plan.block - 1)]
        theirs = theirs[jnp.clip(there, 0, plan.window - 1)]
        return jnp.where(in_block.reshape(-1, *[1] * (ours.ndim - 1)), ours, theirs)

    joined = jax.tree.map(join, said._replace(start=()), last._replace(start=()))
    known = joined.known & (in_block | in_last)
    return joined._replace(start=begin, known=known)


class Finished(NamedTuple):
    """Keys and values of the finished blocks of a row, whose network is causal over blocks.

    Attributes:
        cache: of all finished blocks.
        edge: features of the last cached position; they decide the next one under `shift`. In
            what a pass returns, those of the last position of each block.
    """

    cache: KVCache
    edge: Float[Array, "*blocks embed"]


class Blocks(NamedTuple):
    """Blocks of a row's canvases that a pass reads, counted from the first one that is not cached.

    Blocks that canvases share are read once: canvases whose drafts reach into a next block share
    the full blocks before it.

    Attributes:
        canvas: the canvas whose tokens each entry reads.
        level: the block that each entry reads; 0 is the first that is not cached.
        of_nodes: for each level and canvas, the entry that holds this block of the canvas.
        is_read: True if there is such an entry.
    """

    canvas: Int[Array, " blocks"]
    level: Int[Array, " blocks"]
    of_nodes: Int[Array, "levels nodes"]
    is_read: Bool[Array, "levels nodes"]


def read_blocks(
    network: LanguageModel,
    plan: DenoisePlan,
    row: CanvasSettings,
    canvases: Canvas,
    finished: Finished,
    blocks: Blocks,
) -> tuple[Prediction, Finished]:
    """Reads blocks of several canvases in one pass; each sees the finished ones and its own before.

    Returns:
        The prediction for each canvas, `plan.window` positions; and, for each canvas, the keys and
        values of its blocks except the last, and the last features of each of these, to append
        those that are full.
    """
    begin, block = finished.cache.length, plan.block
    count = blocks.canvas.shape[0]
    starts = begin + block * blocks.level
    tokens = jax.vmap(lambda canvas, start: jax.lax.dynamic_slice(canvas, (start,), (block,)))(
        canvases.tokens[blocks.canvas], starts
    )
    positions = starts[:, None] + jnp.arange(block)[None]
    entries, of_entries = jnp.arange(count), blocks.of_nodes[:, blocks.canvas]
    is_before = jnp.arange(of_entries.shape[0])[:, None] < blocks.level[None]
    is_before = is_before[:, :, None] & (of_entries[:, :, None] == entries[None, None])
    seen = (entries[:, None] == entries[None]) | jnp.any(is_before, axis=0)
    seen = jnp.repeat(jnp.repeat(seen, block, axis=0), block, axis=1)
    hidden = network.forward(tokens.reshape(-1), positions.reshape(-1), seen, finished.cache)
    of_blocks = hidden.features.reshape(count, block, -1)
    features, lasts = of_blocks, of_blocks[:, -1]
    if plan.shift:
        before = jnp.take_along_axis(of_entries, jnp.maximum(blocks.level - 1, 0)[None], axis=0)[0]
        edges = jnp.where(blocks.level[:, None] > 0, lasts[before], finished.edge[None])
        features = jnp.concatenate([edges[:, None], features[:, :-1]], axis=1)
    logits = network.unembed(features.reshape(count * block, -1)).reshape(count, block, -1)
    said = jax.vmap(partial(predict, plan.rules), in_axes=(0, 0, None, None))(
        logits, starts, row.key, row.temperature
    )

    def of_canvases(entries: Array) -> Array:
        return jnp.concatenate([entries[of_level] for of_level in blocks.of_nodes], axis=1)

    prediction = jax.tree.map(of_canvases, said._replace(start=()))
    is_read = jnp.repeat(blocks.is_read.T, block, axis=1)
    nodes = is_read.shape[0]
    prediction = prediction._replace(start=jnp.full(nodes, begin), known=prediction.known & is_read)
    last = blocks.of_nodes[:-1]

    def of_canvas(entries: Array, axis: int) -> Array:
        """Puts the blocks of each canvas one after the other."""
        return jnp.concatenate([entries[of_level] for of_level in last], axis=axis)

    layers = tuple(
        LayerKV(
            of_canvas(
                jnp.moveaxis(layer.keys.reshape(*layer.keys.shape[:2], count, block), 2, 0), 3
            ),
            of_canvas(
                jnp.moveaxis(layer.values.reshape(-1, count, block, layer.values.shape[2]), 1, 0), 2
            ),
        )
        for layer in settled(hidden)
    )
    edges = jnp.moveaxis(lasts[last], 0, 1)
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
