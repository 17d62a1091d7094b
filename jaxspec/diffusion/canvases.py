"""Passes over the canvases of a batch: the choice of what is read, and of the program's width.

In a causal network the prefixes of a draft share one pass. Here they cannot: every token sees all
others, so one token filled in changes all keys and values. Each canvas is therefore a separate row.
A network that is causal over blocks reads the blocks in which canvases differ side by side, like
the nodes of a tree; shared blocks are read once.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core.types import LanguageModel, PyTree, Stop, Tree
from jaxspec.diffusion.passes import (
    Blocks,
    CanvasSettings,
    DenoisePlan,
    Finished,
    open_block,
    read_blocks,
    read_canvas,
    read_rest,
)
from jaxspec.diffusion.speculation import CanvasDrafts, DenoiseState
from jaxspec.diffusion.unmask import Canvas, EvenPace, Prediction


def pass_over_rows(
    network: LanguageModel,
    plan: DenoisePlan,
    tree: Tree,
    states: DenoiseState,
    drafts: CanvasDrafts,
) -> tuple[PyTree, Prediction, Finished | tuple[()]]:
    """Reads the canvases of a batch in one pass.

    Returns:
        What is kept, the prediction for every canvas, and the blocks of each canvas, to append
        those that are full (`()` without the `"blocks"` cache).
    """
    if plan.cache == "blocks":
        return states.kept, *_pass_over_blocks(network, plan, tree, states, drafts)
    if plan.reopens:
        return *_pass_over_rest(network, plan, states, drafts), ()
    return states.kept, _pass_over_canvases(network, plan, states, drafts), ()


def _pass_over_canvases(
    network: LanguageModel, plan: DenoisePlan, states: DenoiseState, drafts: CanvasDrafts
) -> Prediction:
    def read(row: CanvasSettings, canvas: Canvas) -> Prediction:
        return read_canvas(network, plan, row, canvas)[0]

    return _of_nodes(read, plan, states.row, drafts)


def take_part(plan: DenoisePlan, states: DenoiseState) -> Bool[Array, " rows"]:
    """Returns the rows that a pass is for: all that run; rows that open a block may have to wait.

    Rows reach the ends of their blocks after different numbers of passes. They open the next block
    together: otherwise nearly every step of a large batch would read whole canvases.
    """
    running = states.canvas.stop == Stop.RUNNING
    if not plan.reopens:
        return running
    within = running & (states.canvas.step > 0)
    return jnp.where(jnp.any(within), within, running)


def _pass_over_rest(
    network: LanguageModel, plan: DenoisePlan, states: DenoiseState, drafts: CanvasDrafts
) -> tuple[PyTree, Prediction]:
    """Makes the short pass for rows within a block; without any, the pass that opens blocks."""
    takes_part, widths = take_part(plan, states), plan.rest_widths

    def opening(states: DenoiseState, drafts: CanvasDrafts) -> tuple[PyTree, Prediction]:
        canvases = jax.tree.map(lambda leaf: leaf[:, : plan.opening_nodes], drafts.canvases)
        read = partial(open_block, network, plan, width=widths[-1])
        fresh, layers = jax.vmap(read)(states.row, canvases)
        kept = choose_rows(takes_part, layers, states.kept)
        return kept, with_nodes(fresh, plan.num_nodes)

    def within(width: int, states: DenoiseState, drafts: CanvasDrafts) -> tuple[PyTree, Prediction]:
        def read(held: tuple[CanvasSettings, PyTree, Prediction], canvas: Canvas) -> Prediction:
            row, kept, last = held
            return read_rest(network, plan, row, canvas, kept, last, width)

        rows = states.row, states.kept, states.prediction
        return states.kept, _of_nodes(read, plan, rows, drafts)

    is_within = jnp.any(takes_part & (states.canvas.step > 0))
    left = jnp.max(jnp.where(takes_part, states.row.end - states.canvas.start, 0))
    index = jnp.sum(left > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
    branches = [opening, *(partial(within, width) for width in widths)]
    return jax.lax.switch(jnp.where(is_within, 1 + index, 0), branches, states, drafts)


def _pass_over_blocks(
    network: LanguageModel,
    plan: DenoisePlan,
    tree: Tree,
    states: DenoiseState,
    drafts: CanvasDrafts,
) -> tuple[Prediction, Finished]:
    """Reads each canvas's blocks that are not cached, and the next one if it is needed."""
    wanted = jax.vmap(partial(_blocks_wanted, plan, tree))(states, drafts)
    widths = block_counts(plan, tree)
    if plan.one_shape:
        widths = widths[-1:]

    def branch(width: int, states: DenoiseState, drafts: CanvasDrafts, wanted: Array):
        def read(row: CanvasSettings, canvases: Canvas, kept: Finished, wanted: Array):
            return read_blocks(network, plan, row, canvases, kept, _listed(tree, width, wanted))

        return jax.vmap(read)(states.row, drafts.canvases, states.kept, wanted)

    most = jnp.max(jnp.sum(wanted, axis=(1, 2)))
    index = jnp.sum(most > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
    # Not under `vmap`, where every branch would be computed.
    branches = [partial(branch, width) for width in widths]
    return jax.lax.switch(index, branches, states, drafts, wanted)


def _blocks_wanted(
    plan: DenoisePlan, tree: Tree, state: DenoiseState, drafts: CanvasDrafts
) -> Bool[Array, "levels nodes"]:
    """Returns the blocks to read of each canvas, counted from the first one that is not cached.

    A draft changes its parent's current block, and shares those before it. The last canvas of a
    path also reads the blocks that its next drafts may reach, most likely if all of it is kept.
    """
    canvases, parents = drafts.canvases, np.maximum(tree.parents, 0)
    reads = drafts.valid & (canvases.stop == Stop.RUNNING)
    levels = (canvases.start - state.kept.cache.length) // plan.block
    from_level = jnp.where(tree.parents < 0, 0, levels[parents])
    every = jnp.arange(plan.window // plan.block)[:, None]
    own = reads[None] & (every >= from_level[None]) & (every <= levels[None])
    positions = jnp.arange(canvases.tokens.shape[1])
    positions, starts = positions[None], canvases.start[:, None]
    of_block = (positions >= starts) & (positions < starts + plan.block)
    left = jnp.sum((canvases.tokens == plan.rules.mask_token_id) & of_block, axis=1)
    is_child = tree.parents[:, None] == np.arange(len(parents))[None]
    is_last = reads & ~jnp.any(reads[:, None] & is_child, axis=0)
    further = (_positions_ahead(plan, tree, state, drafts, left) - left) // plan.block + 1
    runs_on = is_last[None] & (every > levels[None]) & (every <= (levels + further)[None])
    return own | (runs_on & (state.kept.cache.length + every * plan.block < state.row.end))


def _positions_ahead(
    plan: DenoisePlan,
    tree: Tree,
    state: DenoiseState,
    drafts: CanvasDrafts,
    left: Int[Array, " nodes"],
) -> Int[Array, " nodes"]:
    """Returns how many positions after each canvas the drafts of the next pass may fill in.

    At an even pace, as many as `limit` decisions fill in. Otherwise most decisions fill in far
    fewer than a whole block, so it is `limit` times the mean of the drafts on the canvas's path.
    Where there are none it is `left`, the masks of the block, so that the next block is read.
    Drafts that reach further are not made; lossless texts stay the same.
    """
    most = jnp.full(left.shape, drafts.limit * plan.per_decision)
    if isinstance(state.row.pace, EvenPace):
        return most
    masks = jnp.sum(drafts.canvases.tokens == plan.rules.mask_token_id, axis=1)
    of_drafts = -(-(masks[0] - masks) * drafts.limit // np.maximum(tree.depths, 1))
    return jnp.minimum(jnp.where(tree.depths > 0, of_drafts, left), most)


def block_counts(plan: DenoisePlan, tree: Tree) -> tuple[int, ...]:
    """Returns the blocks per row and pass worth compiling, ascending.

    One per canvas, and 0, 1, 2, 4, ... more for each path to an end. A path crosses the ends of the
    blocks that drafts fill and that of a full block that is not cached, and runs on behind its end.
    """
    nodes = plan.num_nodes
    ends = nodes - len(set(tree.parents[1:nodes].tolist()))
    filled = int(tree.depths[:nodes].max()) * plan.per_decision // plan.block
    most = min(2 + 2 * filled, plan.window // plan.block - 1)
    more = [0, *itertools.takewhile(lambda n: n < most, (2**i for i in itertools.count())), most]
    return tuple(nodes + ends * extra for extra in more)


def _listed(tree: Tree, width: int, wanted: Bool[Array, "levels nodes"]) -> Blocks:
    """Returns a list of the wanted blocks: first ones, then those after them."""
    index, ancestors = jnp.arange(wanted.shape[1])[None, None], jnp.asarray(tree.ancestors)
    entries = (jnp.cumsum(wanted.reshape(-1)) - 1).reshape(wanted.shape)
    on_path = ancestors[None] & wanted[:, None]
    # The nearest canvas on the path that reads this block. A canvas before the block needs
    # predictions for it only to draft from; those of a later canvas on its path serve.
    nearest = jnp.max(jnp.where(on_path, index, -1), axis=2)
    later = ancestors.T[None] & wanted[:, None]
    source = jnp.where(nearest >= 0, nearest, jnp.argmax(later, axis=2))
    of_nodes = jnp.take_along_axis(entries, source, axis=1)
    is_entry = wanted[None] & (entries[None] == jnp.arange(width)[:, None, None])
    return Blocks(
        canvas=jnp.argmax(jnp.any(is_entry, axis=1), axis=1),
        level=jnp.argmax(jnp.any(is_entry, axis=2), axis=1),
        of_nodes=jnp.clip(of_nodes, 0, width - 1),
        is_read=((nearest >= 0) | jnp.any(later, axis=2)) & (of_nodes < width),
    )


def _of_nodes(read: Callable, plan: DenoisePlan, rows: Any, drafts: CanvasDrafts) -> Any:
    """Reads the canvases of every row."""
    canvases = jax.tree.map(lambda leaf: leaf[:, : plan.num_nodes], drafts.canvases)
    return jax.vmap(jax.vmap(read, in_axes=(None, 0)))(rows, canvases)


def with_nodes(found: Any, num_nodes: int) -> Any:
    """Pads arrays of rows and nodes with zeros to `num_nodes` nodes."""
    return jax.tree.map(partial(widen, axis=1, size=num_nodes), found)


def widen(leaf: Array, axis: int, size: int) -> Array:
    """Pads an axis with zeros to a size; arrays without the axis stay as they are."""
    if axis >= leaf.ndim:
        return leaf
    return jnp.pad(
        leaf, [(0, size - leaf.shape[axis] if i == axis else 0) for i in range(leaf.ndim)]
    )


def choose_rows(rows: Bool[Array, " rows"], chosen: Any, others: Any) -> Any:
    """Returns the rows of `chosen` if `rows` is True, those of `others` if not."""

    def choose(one: Array, other: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(choose, chosen, others)
