"""Acceptance of a static tree, greedy or sampled, in arithmetic that phones compute exactly.

The verification of `core` gathers by computed indices and reduces booleans; a phone's GPU takes
neither. Here everything is a product with constants and a sum. Constants are [1, 1, rows, columns]:
the GPU delegate reads only the first row of smaller ones. Token ids never become floats, which
lose them in half precision; zeros and ones may.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from jaxspec.core.types import Tree
from jaxspec.drafters.growth import take_rows


class Accepted(NamedTuple):
    """What verification decided.

    path: `path[d]` is one-hot at the accepted node of depth d; zeros past the last one.
    count: tokens emitted, the bonus token included.
    tokens: the emitted tokens; zeros past them.
    last: the last of them, the next root.
    """

    path: Float[Array, "levels nodes"]
    count: Int[Array, ""]
    tokens: Int[Array, " levels"]
    last: Int[Array, ""]


def accept_greedy(
    tree: Tree,
    tokens: Int[Array, " nodes"],
    choices: Int[Array, " nodes"],
    levels: int | None = None,
) -> Accepted:
    """Keeps the longest path of tokens that the target would have chosen itself.

    Args:
        tree: static, with at least one node below the root. Siblings must hold different tokens, as
            the likeliest ones do: then no depth has two accepted nodes.
        tokens: the pending token, then one per node.
        choices: the target's own choice after each node.
        levels: rows of what comes out, for trees that are to give as many; `None`: those it needs.
    """
    levels, nodes = levels or tree.paths.shape[1], len(tree.parents)
    is_parent = tree.parents[1:, None] == np.arange(nodes)[None]
    agrees = jnp.equal(tokens[1:].reshape(1, 1, nodes - 1, 1), choices.reshape(1, 1, 1, nodes))
    agrees = jnp.sum(agrees.astype(jnp.float32) * _constant(is_parent), axis=3)
    path, ends = _walk(tree, agrees.reshape(1, 1, 1, nodes - 1), levels)

    # What the target chose at the node of depth d is the token of depth d + 1, or the bonus.
    emitted = jnp.sum(path.astype(jnp.int32) * choices.reshape(1, 1, 1, nodes), axis=3)
    emitted = emitted.reshape(1, 1, 1, levels)
    return _accepted(path, emitted, jnp.sum(ends.astype(jnp.int32) * emitted, axis=3))


def accept_sampled(
    tree: Tree,
    tokens: Int[Array, " nodes"],
    uniforms: Float[Array, " nodes"],
    probs: Float[Array, "nodes vocab"],
    levels: int | None = None,
) -> Accepted:
    """`core.verify.verify_deterministic` for a static tree: children chosen, not drawn.

    Each child is tried in turn with the probability that the target still gives it; what is
    emitted last is drawn from what is left of the law where the path ends. The law is exact, up to
    the rounding of float32; a single draw may differ from the one of `core` where rounding
    decides.

    Args:
        tree: as for `accept_greedy`.
        tokens: the pending token, then one per node.
        uniforms: in [0, 1); entry i decides on node i, entry 0 draws the emitted token.
        probs: the target's law after each node, warped.
        levels: as for `accept_greedy`.
    """
    levels, nodes, drafts = levels or tree.paths.shape[1], len(tree.parents), len(tree.parents) - 1
    vocab = probs.shape[1]
    parents = np.asarray(tree.parents[1:])
    drafted = jax.nn.one_hot(tokens[1:], vocab, dtype=probs.dtype)
    chances = jnp.sum(take_rows(probs, parents) * drafted, axis=1).reshape(1, 1, 1, drafts)

    earlier = (parents[:, None] == parents[None]) & np.tri(drafts, k=-1, dtype=bool)
    struck = jnp.sum(chances * _constant(earlier), axis=3).reshape(1, 1, 1, drafts)
    keep = uniforms[1:].reshape(1, 1, 1, drafts) * (1.0 - struck) < chances
    keep = keep.astype(jnp.float32)
    kept_before = jnp.sum(keep * _constant(earlier), axis=3).reshape(1, 1, 1, drafts)
    path, ends = _walk(tree, keep * jax.nn.relu(1.0 - kept_before), levels)

    # The law where the path ends, without the children that were tried there in vain.
    last = jnp.sum(ends.reshape(1, 1, levels, 1) * path, axis=2).reshape(1, 1, 1, nodes)
    is_parent = parents[:, None] == np.arange(nodes)[None]
    tried = jnp.sum(last * _constant(is_parent), axis=3).reshape(1, drafts)
    law = last.reshape(1, nodes) @ probs
    left = law * (1.0 - tried @ drafted)
    # Where rounding leaves nothing, the children had it all but for rounding.
    spent = jnp.equal(jnp.sum(left, axis=1, keepdims=True), 0.0).astype(jnp.float32)
    left = left + spent * law
    cumulative = jnp.cumsum(left, axis=1)
    total = jnp.max(cumulative, axis=1, keepdims=True)
    reached = (cumulative >= uniforms[:1].reshape(1, 1) * total).astype(jnp.float32)
    possible = (left > 0.0).astype(jnp.float32)
    drawn = jnp.argmax(reached * possible, axis=1).astype(jnp.int32).reshape(1, 1, 1)

    # Row d emits the accepted token of depth d + 1; behind the path stands what was drawn.
    is_below = tree.depths[None] == np.arange(1, levels + 1)[:, None]
    below = jnp.sum(path, axis=2).reshape(1, 1, 1, nodes) * _constant(is_below)
    emitted = jnp.sum(below.astype(jnp.int32) * tokens.reshape(1, 1, 1, nodes), axis=3)
    emitted = emitted.reshape(1, 1, 1, levels) + ends.astype(jnp.int32) * drawn[..., None]
    return _accepted(path, emitted, drawn)


def _walk(
    tree: Tree, agrees: Float[Array, "1 1 1 drafts"], levels: int
) -> tuple[Float[Array, "1 1 levels nodes"], Float[Array, "1 1 1 levels"]]:
    """The nodes all of whose ancestors agree, by depth, and where they end; one-hot rows."""
    nodes = len(tree.parents)
    missing = (1.0 - agrees) * _constant(tree.ancestors[:, 1:])
    accepted = jax.nn.relu(1.0 - jnp.sum(missing, axis=3)).reshape(1, 1, 1, nodes)
    path = accepted * _constant(tree.depths[None] == np.arange(levels)[:, None])
    reached = jnp.sum(path, axis=3).reshape(1, 1, 1, levels)
    # Row d: depth d was reached but not d + 1. A slice with a zero behind it, which says the same,
    # goes wrong in browsers.
    stopped = np.eye(levels) - np.eye(levels, k=1)
    ends = jnp.sum(reached * _constant(stopped), axis=3).reshape(1, 1, 1, levels)
    return path, ends


def _accepted(
    path: Float[Array, "1 1 levels nodes"],
    emitted: Int[Array, "1 1 1 levels"],
    last: Int[Array, "1 1 1"],
) -> Accepted:
    _, _, levels, nodes = path.shape
    return Accepted(
        path=path.reshape(levels, nodes),
        count=jnp.sum(path, axis=(2, 3)).reshape(()).astype(jnp.int32),
        tokens=emitted.reshape(levels),
        last=last.reshape(()),
    )


def _constant(matrix: ArrayLike) -> Float[Array, "1 1 rows columns"]:
    return jnp.asarray(np.asarray(matrix)[None, None], jnp.float32)
