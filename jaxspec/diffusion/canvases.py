"""Passes over the canvases of a batch: the choice of what is read, and of the program's width.

In a causal network the prefixes of a draft share one pass. Here they cannot: every token sees all
others, so one token filled in changes all keys and values. Each canvas is therefore a separate row.
A network that is causal over blocks reads the blocks in which canvases differ side by side, like
the nodes of a tree; shared blocks are read once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

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
from jaxspec.diffusion.unmask import Canvas, Prediction


def pass_over_rows(
    network: LanguageModel,
    plan: DenoisePlan,
    tree: Tree,
    states: DenoiseState,
    drafts: CanvasDrafts,
) -> tuple[PyTree, Prediction, Finished | tuple[()]]:
    """Reads the canvases of a batch in one pass.

    Returns:
        What is kept, the prediction for every canvas, and the first block of each canvas, to append
        when it is full (`()` without the `"blocks"` cache).
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
    takes_part = take_part(plan, states)

    def opening(states: DenoiseState, drafts: CanvasDrafts) -> tuple[PyTree, Prediction]:
        count = plan.num_nodes if plan.opens_with_drafts else 1
        canvases = jax.tree.map(lambda leaf: leaf[:, :count], drafts.canvases)
        fresh, layers = jax.vmap(partial(open_block, network, plan))(states.row, canvases)
        kept = choose_rows(takes_part, layers, states.kept)
        return kept, with_nodes(fresh, plan.num_nodes)

    def within(states: DenoiseState, drafts: CanvasDrafts) -> tuple[PyTree, Prediction]:
        def read(held: tuple[CanvasSettings, PyTree, Prediction], canvas: Canvas) -> Prediction:
            row, kept, last = held
            return read_rest(network, plan, row, canvas, kept, last)

        rows = states.row, states.kept, states.prediction
        return states.kept, _of_nodes(read, plan, rows, drafts)

    is_within = jnp.any(takes_part & (states.canvas.step > 0))
    return jax.lax.cond(is_within, within, opening, states, drafts)


def _pass_over_blocks(
    network: LanguageModel,
    plan: DenoisePlan,
    tree: Tree,
    states: DenoiseState,
    drafts: CanvasDrafts,
) -> tuple[Prediction, Finished]:
    """Reads each canvas's first block that is not cached, and the next one if it is needed."""
    wanted = jax.vmap(partial(_blocks_wanted, plan, tree))(states, drafts)
    widths = _block_counts(tree, plan.num_nodes)
    if plan.one_shape:
        widths = widths[-1:]

    def branch(width: int, states: DenoiseState, drafts: CanvasDrafts, wanted: tuple[Array, Array]):
        def read(
            row: CanvasSettings, canvases: Canvas, kept: Finished, wanted: tuple[Array, Array]
        ):
            return read_blocks(network, plan, row, canvases, kept, _listed(tree, width, *wanted))

        return jax.vmap(read)(states.row, drafts.canvases, states.kept, wanted)

    most = jnp.max(jnp.sum(jnp.stack(wanted), axis=(0, 2)))
    index = jnp.sum(most > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
    # Not under `vmap`, where every branch would be computed.
    branches = [partial(branch, width) for width in widths]
    return jax.lax.switch(index, branches, states, drafts, wanted)


def _blocks_wanted(
    plan: DenoisePlan, tree: Tree, state: DenoiseState, drafts: CanvasDrafts
) -> tuple[Bool[Array, " nodes"], Bool[Array, " nodes"]]:
    """Returns the canvases whose first uncached block to read, and those whose next one.

    A canvas whose parent has that block full shares it.
    """
    canvases, parents = drafts.canvases, np.maximum(tree.parents, 0)
    begin = state.kept.cache.length
    following = begin + plan.block
    reads = drafts.valid & (canvases.stop == Stop.RUNNING)
    is_past = reads & (canvases.start > begin)
    shares = is_past & is_past[parents] & (jnp.asarray(tree.parents) >= 0)
    # The next drafts may reach into the next block, most likely if all of a path is kept.
    positions = jnp.arange(canvases.tokens.shape[1])
    of_block = (positions >= begin) & (positions < following)
    left = jnp.sum((canvases.tokens == plan.rules.mask_token_id) & of_block[None], axis=1)
    is_child = tree.parents[:, None] == np.arange(len(parents))[None]
    is_last = reads & ~jnp.any(reads[:, None] & is_child, axis=0)
    runs_on = is_last & (left <= drafts.limit * plan.per_decision) & (following < state.row.end)
    return reads & ~shares, is_past | runs_on


def _block_counts(tree: Tree, nodes: int) -> tuple[int, int]:
    """Returns the blocks per row and pass worth compiling: one per canvas, two at path ends."""
    return nodes, 2 * nodes - len(set(tree.parents[1:nodes].tolist()))


def _listed(
    tree: Tree, width: int, firsts: Bool[Array, " nodes"], nexts: Bool[Array, " nodes"]
) -> Blocks:
    """Returns a list of the wanted blocks: first blocks, then next ones."""
    nodes = len(tree.parents)
    index = jnp.arange(nodes)
    ancestors = jnp.asarray(tree.ancestors)
    # The nearest canvas on the path whose first block is read.
    holder = jnp.max(jnp.where(ancestors & firsts[None], index[None], 0), axis=1)
    # A canvas before the next block needs predictions for it only to draft from; those of a later
    # canvas on its path serve.
    later = jnp.argmax(ancestors.T & nexts[None], axis=1)
    first_entries = jnp.cumsum(firsts) - 1
    next_entries = jnp.cumsum(nexts) - 1 + jnp.sum(firsts)
    entries = jnp.arange(width)
    is_first = firsts[None] & (first_entries[None] == entries[:, None])
    is_next = nexts[None] & (next_entries[None] == entries[:, None])
    canvas = jnp.argmax(is_first | is_next, axis=1)
    of_nodes = jnp.clip(jnp.stack([first_entries[holder], next_entries[later]]), 0, width - 1)
    return Blocks(
        canvas=canvas,
        is_next=jnp.any(is_next, axis=1),
        before=of_nodes[0][canvas],
        firsts=of_nodes[0],
        nexts=of_nodes[1],
        has_first=firsts | nexts,
        has_next=nexts[later],
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
