"""Acceptance of static trees and drawn chains, in arithmetic that phones compute exactly.

The verification of `core` gathers by computed indices and reduces booleans; a phone's GPU takes
neither. Here everything is a product with constants and a sum. Constants are [1, 1, rows, columns]:
the GPU delegate reads only the first row of smaller ones. Token ids never become floats, as half
precision would lose them; zeros and ones may.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from jaxspec.core.tree import chain
from jaxspec.core.types import Tree
from jaxspec.drafters.growth import take_rows


class Accepted(NamedTuple):
    """Result of verification.

    Attributes:
        path: `path[d]` is one-hot at the accepted node of depth d; zeros past the last one.
        count: tokens emitted, the bonus token INCLUDED.
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
        levels: rows of the result, equal for trees that share their state; `None`: those needed.
    """
    levels, nodes = levels or tree.paths.shape[1], len(tree.parents)
    is_parent = tree.parents[1:, None] == np.arange(nodes)[None]
    agrees = jnp.equal(tokens[1:].reshape(1, 1, nodes - 1, 1), choices.reshape(1, 1, 1, nodes))
    agrees = jnp.sum(agrees.astype(jnp.float32) * _constant(is_parent), axis=3)
    path, ends = _walk(tree, agrees.reshape(1, 1, 1, nodes - 1), levels)

    # The target's choice at the node of depth d is the token of depth d + 1, or the bonus.
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
    """Does `core.verify.verify_deterministic` for a static tree, whose children are not drawn.

    Each child is tried in turn with the probability that the target still gives it; the last token
    is drawn from the rest of the distribution where the path ends. The distribution is exact up to
    float32 rounding; a single draw may differ from that of `core` where rounding decides.

    Args:
        tree: as for `accept_greedy`.
        tokens: the pending token, then one per node.
        uniforms: in [0, 1); entry i decides on node i, entry 0 draws the emitted token.
        probs: the target's distribution after each node, warped.
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

    # The distribution where the path ends, without the children that were rejected there.
    last = jnp.sum(ends.reshape(1, 1, levels, 1) * path, axis=2).reshape(1, 1, 1, nodes)
    is_parent = parents[:, None] == np.arange(nodes)[None]
    tried = jnp.sum(last * _constant(is_parent), axis=3).reshape(1, drafts)
    ending = last.reshape(1, nodes) @ probs
    left = ending * (1.0 - tried @ drafted)
    # Nothing is left where, up to rounding, the children had the whole distribution.
    left = left + _is_zero(jnp.sum(left, axis=1, keepdims=True)) * ending
    return _with_drawn(tree, tokens, path, ends, draw_rows(left, uniforms[:1]))


def accept_drawn(
    tokens: Int[Array, " nodes"],
    uniforms: Float[Array, " nodes"],
    probs: Float[Array, "nodes vocab"],
    draft_probs: Float[Array, "nodes-1 vocab"],
) -> Accepted:
    """Does `core.verify.verify_traversal` for a chain: block verification (Sun et al. 2024).

    The weight of a node is the probability that the path to it is accepted; the rest there, what
    the target still owes behind it if its follower is rejected.

    Args:
        tokens: the pending token, then drawn ones.
        uniforms: as for `accept_sampled`.
        probs: the target's distribution after each token, warped.
        draft_probs: what each drawn token was drawn from.
    """
    nodes, vocab = probs.shape
    drafted = jax.nn.one_hot(tokens[1:], vocab, dtype=probs.dtype)
    weight = jnp.ones((1, 1), probs.dtype)
    owed, rests, ends = [], [], []
    for node in range(nodes - 1):
        owed.append(weight * probs[node : node + 1])
        draft, child = draft_probs[node : node + 1], drafted[node : node + 1]
        surplus = jnp.sum(jax.nn.relu(draft - owed[-1]), axis=1, keepdims=True)
        rests.append(jax.nn.relu(owed[-1] - draft) / (surplus + _is_zero(surplus)))
        ends.append(jnp.minimum(jnp.sum(rests[-1], axis=1, keepdims=True), 1.0))
        chance = jnp.sum(draft * child, axis=1, keepdims=True)
        ratio = jnp.sum(owed[-1] * child, axis=1, keepdims=True) / (chance + _is_zero(chance))
        weight = jnp.minimum(ratio, 1.0)
    owed.append(weight * probs[nodes - 1 :])
    rests.append(owed[-1])
    # Nothing ends above the root.
    passes = [jnp.zeros((1, 1)), *(1.0 - end for end in [*ends[1:], weight])]

    # Probabilities that a path ends neither at a node nor below it, from the last one on.
    below = [passes[-1]]
    for through in reversed(passes[1:-1]):
        below.insert(0, through * below[0])
    missed = jnp.concatenate(below, axis=1)
    here_too = missed * jnp.concatenate(passes[:-1], axis=1)
    keep = jnp.less(uniforms[None, 1:] * (1.0 - here_too), 1.0 - missed).astype(jnp.float32)
    tree = chain(nodes - 1)
    path, last = _walk(tree, keep.reshape(1, 1, 1, nodes - 1), nodes)

    left, whole = (last.reshape(1, nodes) @ jnp.concatenate(rows) for rows in (rests, owed))
    left = left + _is_zero(jnp.sum(left, axis=1, keepdims=True)) * whole
    return _with_drawn(tree, tokens, path, last, draw_rows(left, uniforms[:1]))


def draw_rows(
    weights: Float[Array, "rows vocab"], uniforms: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """Does `core.sampling.inverse_cdf` for each row."""
    cumulative = jnp.cumsum(weights, axis=1)
    total = jnp.max(cumulative, axis=1, keepdims=True)
    reached = (cumulative >= uniforms[:, None] * total).astype(jnp.float32)
    possible = (weights > 0.0).astype(jnp.float32)
    return jnp.argmax(reached * possible, axis=1).astype(jnp.int32)


def _is_zero(numbers: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    return jnp.equal(numbers, 0.0).astype(jnp.float32)


def _with_drawn(
    tree: Tree,
    tokens: Int[Array, " nodes"],
    path: Float[Array, "1 1 levels nodes"],
    ends: Float[Array, "1 1 1 levels"],
    drawn: Int[Array, " 1"],
) -> Accepted:
    """Returns a path whose row d emits the accepted token of depth d + 1; behind it, the drawn."""
    _, _, levels, nodes = path.shape
    is_below = tree.depths[None] == np.arange(1, levels + 1)[:, None]
    below = jnp.sum(path, axis=2).reshape(1, 1, 1, nodes) * _constant(is_below)
    emitted = jnp.sum(below.astype(jnp.int32) * tokens.reshape(1, 1, 1, nodes), axis=3)
    drawn = drawn.reshape(1, 1, 1)
    emitted = emitted.reshape(1, 1, 1, levels) + ends.astype(jnp.int32) * drawn[..., None]
    return _accepted(path, emitted, drawn)


def _walk(
    tree: Tree, agrees: Float[Array, "1 1 1 drafts"], levels: int
) -> tuple[Float[Array, "1 1 levels nodes"], Float[Array, "1 1 1 levels"]]:
    """Returns the nodes all of whose ancestors agree, by depth, and their end; one-hot rows."""
    nodes = len(tree.parents)
    missing = (1.0 - agrees) * _constant(tree.ancestors[:, 1:])
    accepted = jax.nn.relu(1.0 - jnp.sum(missing, axis=3)).reshape(1, 1, 1, nodes)
    path = accepted * _constant(tree.depths[None] == np.arange(levels)[:, None])
    reached = jnp.sum(path, axis=3).reshape(1, 1, 1, levels)
    # Row d: depth d was reached but not d + 1. A slice with a zero behind it would be the same, but
    # browsers compute it wrongly.
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
