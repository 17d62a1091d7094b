"""Trees made of the best of many candidates: shared by drafters of dynamic trees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.tree import traced_tree
from jaxspec.core.types import Proposal


class Pool(NamedTuple):
    """Candidates for the tree in the order of their creation, so that parents come first.

    Attributes:
        tokens: of the candidates.
        parents: index in the pool; -1 is the root.
        scores: the drafter's log-probability of the path from the root.
    """

    tokens: Int[Array, " candidates"]
    parents: Int[Array, " candidates"]
    scores: Float[Array, " candidates"]


def best_of_pool(
    pool: Pool, root: Int[Array, ""], num_nodes: int, max_depth: int, branch: int
) -> Proposal:
    """Returns the tree of the `num_nodes` best candidates; its tokens are deterministic.

    Re-ranking of EAGLE-2 (Li et al. 2024b, section 4.2).

    Args:
        pool: at least `num_nodes` candidates.
        root: the pending token.
        num_nodes: of the tree, the root not counted.
        max_depth: static bound on depth.
        branch: static bound on children per node.
    """
    # The best of the pool include their parents: no child scores above its parent, and on ties
    # `top_k` takes the one created first.
    best = jnp.zeros(pool.scores.shape[0], bool)
    best = best.at[jax.lax.top_k(pool.scores, num_nodes)[1]].set(True)
    kept = jnp.nonzero(best, size=num_nodes)[0]  # ascending, without a sort
    parents = jnp.searchsorted(kept, pool.parents[kept]) + 1
    parents = jnp.where(pool.parents[kept] < 0, 0, parents).astype(jnp.int32)
    parents = jnp.concatenate([jnp.full(1, -1, jnp.int32), parents])
    every_node = jnp.ones(num_nodes + 1, bool)
    tree = traced_tree(parents, every_node, max_depth, min(branch, num_nodes))
    tokens = jnp.concatenate([root[None], pool.tokens[kept]])
    no_law = jnp.zeros(num_nodes + 1, jnp.int32)
    return Proposal(tokens, tree, every_node, None, no_law)
