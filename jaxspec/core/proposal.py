"""Proposals of the common shapes, and the pass widths that fit them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.sampling import (
    argmax_rows,
    draw_without_replacement,
    inverse_cdf,
    warp_logits,
)
from jaxspec.core.tree import chain
from jaxspec.core.types import Proposal, Tree, Warp


def tree_proposal(
    tree: Tree,
    tokens: Int[Array, " nodes"],
    valid: Bool[Array, " nodes"],
    draft_logprobs: Float[Array, "distributions vocab"] | None = None,
) -> Proposal:
    """A proposal over a static tree, with one distribution per expanded parent in node order.

    Args:
        tree: from a constructor of `core.tree`; its arrays become constants.
        tokens: the pending token, then one token per node.
        valid: see `Proposal`.
        draft_logprobs: one row per parent that has children, in node order; `None` if tokens were
            chosen deterministically. An unused row may be added, see `of_own_draws`.

    Example:
        >>> from jaxspec import tree_from_parents
        >>> tree = tree_from_parents([-1, 0, 0, 1])
        >>> proposal = tree_proposal(tree, jnp.array([5, 7, 8, 9]), jnp.ones(4, bool))
        >>> proposal.law_row.tolist()  # siblings share a distribution
        [0, 0, 0, 1]
    """
    parents = np.asarray(tree.parents)
    expanded = np.unique(parents[1:])
    law_row = np.concatenate([[0], np.searchsorted(expanded, parents[1:])]).astype(np.int32)
    if draft_logprobs is not None:
        draft_logprobs = of_own_draws(tree, draft_logprobs)
    # Arrays from here on: verification indexes them with traced nodes, under a map or not.
    tree = jax.tree.map(jnp.asarray, tree)
    return Proposal(tokens, tree, valid, draft_logprobs, jnp.asarray(law_row))


def chain_proposal(
    tokens: Int[Array, " nodes"],
    valid: Bool[Array, " nodes"],
    draft_logprobs: Float[Array, "nodes-1 vocab"] | None = None,
) -> Proposal:
    """A proposal without branches: the pending token, then each draft after the one before.

    Example:
        >>> proposal = chain_proposal(jnp.array([5, 7, 8]), jnp.ones(3, bool))
        >>> proposal.tree.parents.tolist()
        [-1, 0, 1]
    """
    return tree_proposal(chain(tokens.shape[0] - 1), tokens, valid, draft_logprobs)


def shares_draws(proposal: Proposal) -> bool:
    """Tells, from shapes alone, whether all parents of one depth share one draw.

    There is one distribution for each depth then. See `of_own_draws` for the others.

    Example:
        >>> from jaxspec import tree_from_parents
        >>> tree, zeros = tree_from_parents([-1, 0, 0, 1, 2]), jnp.zeros(5, jnp.int32)
        >>> laws = jnp.full((2, 9), -jnp.log(9.0))  # one for each of two depths
        >>> shares_draws(Proposal(zeros, tree, zeros == 0, laws, zeros))
        True
    """
    assert proposal.draft_logprobs is not None, "nothing was drawn"
    branches = proposal.tree.children.shape[1] > 1
    return branches and proposal.draft_logprobs.shape[0] < proposal.tree.paths.shape[1]


def of_own_draws(
    tree: Tree, logprobs: Float[Array, "distributions vocab"]
) -> Float[Array, "rows vocab"]:
    """Returns distributions from which no two parents share a draw, in enough rows to say so.

    A tree that branches has more rows than depths then, so an unused one is added if each depth has
    one parent alone. A chain needs none.

    Example:
        >>> from jaxspec import tree_from_parents
        >>> of_own_draws(tree_from_parents([-1, 0, 0, 1]), jnp.zeros((2, 9))).shape
        (3, 9)
    """
    branches = tree.children.shape[1] > 1
    return filled(logprobs, max(len(logprobs), branches * tree.paths.shape[1]))


def filled(array: Array, size: int) -> Array:
    """Returns an array of `size` entries, zeros after its own.

    Example:
        >>> filled(jnp.ones(2), 3).tolist()
        [1.0, 1.0, 0.0]
    """
    missing = size - array.shape[0]
    return jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))


def bank(num_tokens: int) -> tuple[int, ...]:
    """Pass widths for drafts whose length varies: powers of two, then `num_tokens` itself.

    Each width is one more copy of the model in the program, so one that would save less than a
    quarter of the pass is left out.

    Example:
        >>> bank(6)
        (1, 2, 4, 6)
    """
    powers = (1 << exponent for exponent in range(num_tokens.bit_length()))
    return (*(width for width in powers if 4 * width <= 3 * num_tokens), num_tokens)


def choose_children(
    key: PRNGKeyArray, logits: Float[Array, "parents vocab"], warp: Warp, branch: int
) -> tuple[Int[Array, "parents branch"], Float[Array, "parents vocab"]]:
    """Picks `branch` tokens under each parent, and says from which distributions they come.

    Greedy: the likeliest, in order. Sampling: draws without replacement from the warped
    distribution.

    Returns:
        Tokens, and the normalised log-probabilities they were drawn from.

    Example:
        >>> logits = jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
        >>> tokens, logprobs = choose_children(jax.random.key(0), logits, Warp(), branch=2)
        >>> tokens.tolist()
        [[1, 2], [0, 2]]
    """
    warped = warp_logits(logits, warp)
    logprobs = jax.nn.log_softmax(warped, axis=-1)
    if warp.temperature is None:
        # Chosen before they are normalised: callers that use no distributions do not pay for them.
        if branch == 1:
            return argmax_rows(warped)[:, None], logprobs
        return jax.lax.top_k(warped, branch)[1], logprobs
    if branch == 1:
        uniforms = jax.random.uniform(key, logprobs.shape[:1], logprobs.dtype)
        return jax.vmap(inverse_cdf)(jnp.exp(logprobs), uniforms)[:, None], logprobs
    return draw_without_replacement(key, logprobs, branch), logprobs
