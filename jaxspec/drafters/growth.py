"""Trees that several drafters share: static ones grown level by level, the best of a pool."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jaxspec.core.cache import KEY_PLACES_AXIS, VALUE_PLACES_AXIS
from jaxspec.core.forms import exchangeable
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.proposal import choose_children, tree_proposal
from jaxspec.core.tree import traced_tree
from jaxspec.core.types import Hidden, LayerKV, Proposal, Tree, Warp

Scratch = tuple[LayerKV, ...]
LevelPass = Callable[
    [
        int,
        Int[Array, " expanded"],
        Float[Array, "expanded embed"],
        Bool[Array, "expanded seen"],
        Scratch | None,
    ],
    Hidden,
]
"""A draft pass over the nodes of one level that have children.

It takes their depth, their tokens, the features of their parents, a mask of the scratch entries and
nodes that each sees, and the keys and values of the levels above.
"""


def grow_tree(
    tree: Tree,
    key: PRNGKeyArray,
    root: Int[Array, ""],
    warp: Warp,
    feature: Float[Array, "1 embed"],
    unembed: Callable[[Float[Array, "nodes embed"]], Float[Array, "nodes draft_vocab"]],
    forward: LevelPass,
    vocab_size: int,
    draft_ids: Int[Array, " draft_vocab"] | None = None,
    grammar: RowGrammar | None = None,
) -> Proposal:
    """Chooses the children of every node from the draft model's distribution at it.

    Each level that has nodes with children costs one pass over those nodes; the root's level costs
    none.

    Args:
        tree: static.
        key: for sampled children.
        root: the pending token.
        warp: of the row.
        feature: gives the distribution at the root.
        unembed: features to draft logits.
        forward: the pass of one level.
        vocab_size: of the target.
        draft_ids: the target's id of each draft logit; `None`: the same, except for padding.
        grammar: of the row.

    Raises:
        ValueError: a node has more children than there are tokens to draft.
    """
    branch, num_drafted = (
        tree.children.shape[1],
        vocab_size if draft_ids is None else len(draft_ids),
    )
    if branch > num_drafted:
        raise ValueError(
            f"paths: a node has {branch} children, but only {num_drafted} tokens can be drafted."
        )
    has_child = tree.children[:, 0] >= 0
    if draft_ids is not None and warp.bias is not None:
        warp = warp._replace(bias=warp.bias[draft_ids])
    tokens = root[None]
    features, above = feature, np.zeros(1, np.int32)  # of the nodes `above`
    scratch, scratch_nodes, distributions = None, np.zeros(0, np.int32), []
    states: Any = None if grammar is None else grammar.state[None]
    depth = tree.paths.shape[1] - 1
    for level, level_key in enumerate(jax.random.split(key, depth)):
        expanded = np.flatnonzero((tree.depths == level) & has_child)
        if level > 0:
            seen = np.concatenate([scratch_nodes, expanded])
            hidden = forward(
                level,
                take_rows(tokens, expanded),
                take_rows(features, np.searchsorted(above, tree.parents[expanded])),
                jnp.asarray(tree.ancestors[np.ix_(expanded, seen)]),
                scratch,
            )
            scratch, scratch_nodes = extend(scratch, hidden.new_kv), seen
            features, above = hidden.features, expanded
        logits = unembed(features)
        if draft_ids is None:
            logits = fit_vocab(logits, vocab_size)
        if grammar is not None:
            logits = grammar.keep(logits, states[expanded], level, warp.bias, draft_ids)
        choices, logprobs = choose_children(level_key, logits, warp, branch)
        below = np.flatnonzero(tree.depths == level + 1)
        rows = np.searchsorted(expanded, tree.parents[below])
        chosen = take_rows(choices.reshape(-1), rows * branch + tree.ranks[below])
        chosen = chosen if draft_ids is None else lookup_ids(draft_ids, chosen)
        tokens = jnp.concatenate([tokens, chosen])
        if grammar is not None:
            moved = grammar.after(states[tree.parents[below]], chosen)
            states = jnp.concatenate([states, moved])
        distributions.append(logprobs)
    draft_logprobs = None
    if warp.temperature is not None:
        draft_logprobs = jnp.concatenate(distributions)
        if draft_ids is not None:
            nowhere = jnp.full((draft_logprobs.shape[0], vocab_size), -jnp.inf)
            draft_logprobs = nowhere.at[:, draft_ids].set(draft_logprobs)
    every_node = jnp.ones(tree.parents.shape[0], bool)
    return tree_proposal(tree, tokens, every_node, draft_logprobs)


def take_rows(array: Shaped[Array, "rows *row"], rows: np.ndarray) -> Shaped[Array, "taken *row"]:
    """Returns `array[rows]` for static rows, cut out in runs: a gather is slower on CPUs.

    The GPU of a phone has no gather at all.

    Example:
        >>> take_rows(jnp.arange(5), np.array([1, 2, 4])).tolist()
        [1, 2, 4]
    """
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    pieces = [jax.lax.slice_in_dim(array, run[0], run[-1] + 1) for run in runs]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


@exchangeable
def lookup_ids(ids: Int[Array, " table"], index: Int[Array, " taken"]) -> Int[Array, " taken"]:
    """Returns `ids[index]`."""
    return ids[index]


def fit_vocab(
    logits: Float[Array, "parents draft_vocab"], size: int
) -> Float[Array, "parents vocab"]:
    """Cuts or pads logits to a vocabulary's size; families pad vocabularies differently."""
    missing = max(0, size - logits.shape[-1])
    return jnp.pad(logits[:, :size], ((0, 0), (0, missing)), constant_values=-jnp.inf)


def extend(scratch: Scratch | None, new_kv: Scratch) -> Scratch:
    """Returns scratch with the keys and values of another pass appended."""
    if scratch is None:
        return new_kv
    return tuple(
        LayerKV(
            jnp.concatenate([old.keys, new.keys], KEY_PLACES_AXIS),
            jnp.concatenate([old.values, new.values], VALUE_PLACES_AXIS),
        )
        for old, new in zip(scratch, new_kv, strict=True)
    )


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
