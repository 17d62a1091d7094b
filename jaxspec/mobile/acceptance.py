"""Greedy acceptance of a static tree, in arithmetic that phones compute exactly.

`core.verify.verify_greedy` gathers by computed indices and reduces booleans; a phone's GPU takes
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


class Accepted(NamedTuple):
    """What greedy verification decided.

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
    tree: Tree, tokens: Int[Array, " nodes"], choices: Int[Array, " nodes"]
) -> Accepted:
    """Keeps the longest path of tokens that the target would have chosen itself.

    Args:
        tree: static, with at least one node below the root. Siblings must hold different tokens, as
            the likeliest ones do: then no depth has two accepted nodes.
        tokens: the pending token, then one per node.
        choices: the target's own choice after each node.
    """
    levels, nodes = tree.paths.shape[1], len(tree.parents)
    is_parent = tree.parents[1:, None] == np.arange(nodes)[None]
    draft_ancestors = tree.ancestors[:, 1:]
    at_depth = tree.depths[None] == np.arange(levels)[:, None]

    agrees = jnp.equal(tokens[1:].reshape(1, 1, nodes - 1, 1), choices.reshape(1, 1, 1, nodes))
    agrees = jnp.sum(agrees.astype(jnp.float32) * _constant(is_parent), axis=3)
    missing = (1.0 - agrees).reshape(1, 1, 1, nodes - 1) * _constant(draft_ancestors)
    accepted = jax.nn.relu(1.0 - jnp.sum(missing, axis=3)).reshape(1, 1, 1, nodes)
    path = accepted * _constant(at_depth)

    # What the target chose at the node of depth d is the token of depth d + 1, or the bonus.
    emitted = jnp.sum(path.astype(jnp.int32) * choices.reshape(1, 1, 1, nodes), axis=3)
    reached = jnp.sum(path, axis=3).reshape(1, 1, 1, levels)
    # Row d: depth d was reached but not d + 1. A slice with a zero behind it, which says the same,
    # goes wrong in browsers.
    stopped = np.eye(levels) - np.eye(levels, k=1)
    last = jnp.sum(reached * _constant(stopped), axis=3).reshape(1, 1, 1, levels)
    emitted = emitted.reshape(1, 1, 1, levels)
    return Accepted(
        path=path.reshape(levels, nodes),
        count=jnp.sum(path, axis=(2, 3)).reshape(()).astype(jnp.int32),
        tokens=emitted.reshape(levels),
        last=jnp.sum(last.astype(jnp.int32) * emitted, axis=3).reshape(()),
    )


def _constant(matrix: ArrayLike) -> Float[Array, "1 1 rows columns"]:
    return jnp.asarray(np.asarray(matrix)[None, None], jnp.float32)
