"""Verification: which drafted tokens stand, and what the target says next. Lossless.

Every rule is a pure function of given uniforms: `uniforms[i]` decides on node i, `uniforms[0]`
draws the emitted token. So a test can enumerate the distribution of a function itself, and a key
only enters where a step draws the uniforms. Target logits come in warped; row i scores what
follows node i. Log space or plain products, at least float32, no epsilon in a ratio that must be
exact.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.proposal import shares_draws
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.sampling import argmax_rows, at_least_float32, inverse_cdf
from jaxspec.core.types import Proposal, Tree, Verdict


def verify_greedy(proposal: Proposal, target_logits: Float[Array, "nodes vocab"]) -> Verdict:
    """Keeps the longest path of tokens that the target would have chosen itself."""
    return follow_choices(proposal, argmax_rows(target_logits))


def follow_choices(proposal: Proposal, choices: Int[Array, " nodes"]) -> Verdict:
    """`verify_greedy`, given the target's own token after each node in place of its logits."""
    tree = proposal.tree
    agrees = proposal.tokens == choices[jnp.maximum(tree.parents, 0)]
    last = _deepest(tree, agrees & proposal.valid)
    return Verdict(tree.paths[last], tree.depths[last] + 1, choices[last])


def verify(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Rejection sampling by the rule that the proposal calls for, seen from its structure.

    Without distributions, tokens were chosen deterministically. With them, whole paths are judged,
    except where several parents share one draw.
    """
    if proposal.draft_logprobs is None:
        return verify_deterministic(uniforms, proposal, target_logits)
    rule = verify_tree if shares_draws(proposal) else verify_traversal
    return rule(uniforms, proposal, target_logits)


def verify_chain(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Rejection sampling over a chain of sampled tokens (Leviathan et al. 2023, algorithm 1)."""
    target_logprobs = jax.nn.log_softmax(at_least_float32(target_logits), axis=-1)
    distributions = proposal.draft_logprobs
    assert distributions is not None, "a chain without distributions is verified as deterministic"
    draft_logprobs = distributions[proposal.law_row[1:]].astype(target_logprobs.dtype)

    drafted = proposal.tokens[1:, None]
    log_ratio = jnp.take_along_axis(target_logprobs[:-1] - draft_logprobs, drafted, axis=1)
    keep = (jnp.log(uniforms[1:]) < log_ratio[:, 0]) & proposal.valid[1:]
    num_kept = jnp.sum(jnp.cumprod(keep.astype(jnp.int32)))

    # A zero row stands for "nothing was drafted here": at the end of the chain, and where the
    # draft stopped early, the residual is the target's own distribution and needs no special case.
    draft_probs = jnp.where(proposal.valid[1:, None], jnp.exp(draft_logprobs), 0.0)
    draft_probs = jnp.pad(draft_probs, ((0, 1), (0, 0)))[num_kept]
    next_token = _draw_residual(uniforms[0], jnp.exp(target_logprobs[num_kept]), draft_probs)
    return Verdict(proposal.tree.paths[num_kept], num_kept + 1, next_token)


def verify_deterministic(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Tries deterministically chosen children in order, each with the probability left to it.

    A rejected child is struck from the distribution and the rest renormalised, so a child is
    accepted with exactly the target's probability of its token (EAGLE-2's rule; Li et al. 2024b).
    Only scalars are needed per node; the whole distribution is read once, for the emitted token.
    """
    tree, tokens = proposal.tree, proposal.tokens
    logits = at_least_float32(target_logits)
    log_totals = jax.nn.logsumexp(logits, axis=-1)
    parents = jnp.maximum(tree.parents, 0)
    probs = jnp.exp(logits[parents, tokens] - log_totals[parents])

    nodes = jnp.arange(tokens.shape[0])
    siblings = (tree.parents[:, None] == tree.parents[None, :]) & proposal.valid[None, :]
    earlier = siblings & (nodes[None, :] < nodes[:, None])
    repeated = jnp.any(earlier & (tokens[:, None] == tokens[None, :]), axis=1)
    probs = jnp.where(proposal.valid & ~repeated, probs, 0.0)
    struck = jnp.sum(jnp.where(earlier, probs[None, :], 0.0), axis=1)

    keep = uniforms * (1.0 - struck) < probs
    first_kept = keep & ~jnp.any(earlier & keep[None, :], axis=1)
    last = _deepest(tree, first_kept)

    rejected = (tree.parents == last) & proposal.valid
    distribution = jnp.exp(logits[last] - log_totals[last])
    strike = jnp.zeros_like(distribution).at[tokens].max(rejected.astype(distribution.dtype))
    next_token = _draw_residual(uniforms[0], distribution, distribution * strike)
    return Verdict(tree.paths[last], tree.depths[last] + 1, next_token)


def verify_tree(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Walks down a tree whose siblings were drawn from one distribution without replacement.

    At each node, children are tried in the order they were drawn: accepted with probability
    min(1, target / draft); after a rejection the target's distribution becomes its normalised
    residual, and the draft's loses the token and is renormalised (EAGLE section 1.8; SpecInfer).
    """
    tree, distributions = proposal.tree, proposal.draft_logprobs
    assert distributions is not None, "a tree without distributions is verified as deterministic"
    logits = at_least_float32(target_logits)
    depth = tree.paths.shape[-1] - 1

    def try_children(_, walk):
        node, arrived, distribution = walk
        first = jnp.maximum(tree.children[node, 0], 0)
        draft = jnp.exp(distributions[proposal.law_row[first]]).astype(distribution.dtype)
        accepted = jnp.int32(-1)
        for rank in range(tree.children.shape[-1]):
            child = tree.children[node, rank]
            index = jnp.maximum(child, 0)
            token = proposal.tokens[index]
            drawn = (child >= 0) & arrived & (accepted < 0) & (draft[token] > 0)
            tried = drawn & proposal.valid[index]
            keep = tried & (uniforms[index] * draft[token] < distribution[token])
            accepted = jnp.where(keep, child, accepted)
            distribution = jnp.where(tried & ~keep, _residual(distribution, draft), distribution)
            # Later siblings were drawn without this token, whether it is of use or not.
            draft = jnp.where(drawn, _without(draft, token), draft)
        arrived = accepted >= 0
        node = jnp.where(arrived, accepted, node)
        return node, arrived, jnp.where(arrived, jax.nn.softmax(logits[node]), distribution)

    root = (jnp.int32(0), jnp.bool_(True), jax.nn.softmax(logits[0]))
    last, _, distribution = jax.lax.fori_loop(0, depth, try_children, root)
    next_token = inverse_cdf(distribution, uniforms[0])
    return Verdict(tree.paths[last], tree.depths[last] + 1, next_token)


def verify_traversal(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Judges whole paths by the joint ratio of their tokens, from the leaves to the root.

    A token that the target likes less than the draft may stand if its followers make up for it. So
    no fewer tokens are accepted than by `verify_chain` and `verify_tree`, on average. Over a chain
    this is block verification (Sun et al. 2024, algorithm 2), over a tree a traversal of it (Weng
    et al. 2025), here for siblings drawn without replacement.

    Each node has a weight, the probability that its path is accepted. It owes its own followers
    the target's distribution times that weight. Each child in turn takes what its draw covers; the
    rest, given that the child's subtree was rejected, is left to the next one. A node's last rest
    is the probability that the path ends there. No two parents may share a draw.
    """
    tree, tokens, distributions = proposal.tree, proposal.tokens, proposal.draft_logprobs
    assert distributions is not None, "a tree without distributions is verified as deterministic"
    logits = at_least_float32(target_logits)
    nodes, vocab = logits.shape
    places = jnp.arange(nodes)
    num_children = jnp.sum(tree.children >= 0, axis=1)
    draws = proposal.law_row[jnp.maximum(tree.children[:, 0], 0)]

    def laws_at(parent: Int[Array, ""]) -> tuple[Array, Array]:
        """Returns the target's law after a node, and what its children are drawn from."""
        law = jax.nn.softmax(logits[parent])
        # After a node that no token may follow nothing is emitted, so any distribution will do.
        law = jnp.where(jnp.isfinite(law), law, 1 / vocab)
        return law, jnp.exp(distributions[draws[parent]]).astype(logits.dtype)

    def give(parent: Int[Array, ""], owed: Array, draft: Array) -> tuple[Array, Array]:
        """Returns what a node owes after all its children, if they are rejected; their weights."""

        def take_turn(rank: Int[Array, ""], state: tuple[Array, ...]) -> tuple[Array, ...]:
            rest, draft, weights = state
            is_child = rank < num_children[parent]
            child = jnp.maximum(tree.children[parent, rank], 0)
            token = tokens[child]
            drawn = is_child & (draft[token] > 0)
            tried = drawn & proposal.valid[child]
            ratio = rest[token] / jnp.where(drawn, draft[token], 1.0)
            weight = jnp.where(tried, jnp.minimum(ratio, 1.0), 0.0)
            rest = jnp.where(tried, _rest_after(rest, draft), rest)
            draft = jnp.where(drawn, _without(draft, token), draft)
            return rest, draft, jnp.where((places == child) & is_child, weight, weights)

        state = owed, draft, jnp.zeros(nodes, logits.dtype)
        turns = largest_of_rows(num_children[parent])
        rest, _, weights = jax.lax.fori_loop(0, turns, take_turn, state)
        return rest, weights

    # Parents come before their children, and each has a distribution of its own.
    (parents,) = jnp.nonzero(num_children > 0, size=len(distributions), fill_value=nodes)

    def visit(index: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        weights, ends = state
        parent = parents[index]
        law, draft = laws_at(parent)
        rest, of_children = give(parent, weights[parent] * law, draft)
        return weights + of_children, ends.at[parent].set(jnp.sum(rest), mode="drop")

    root = jnp.zeros(nodes, logits.dtype).at[0].set(1.0)
    weights, ends = jax.lax.fori_loop(0, len(distributions), visit, (root, root))
    # A node without children ends all that reaches it.
    ends = jnp.where(num_children > 0, jnp.minimum(ends, 1.0), weights).at[0].set(1.0)

    # Logarithms of probabilities that a path ends neither at a node, nor below it, nor at it or its
    # later siblings or their parent.
    passes = jnp.log1p(-ends)
    below = jnp.sum(jnp.where(tree.ancestors, passes[:, None], 0.0), axis=0)
    siblings = (tree.parents[:, None] == tree.parents[None, :]) & (places > 0)[None, :]
    later = siblings & (places[None, :] >= places[:, None])
    left = jnp.sum(jnp.where(later, below[None, :], 0.0), axis=1)
    left = left + passes[jnp.maximum(tree.parents, 0)]
    keep = uniforms * -jnp.expm1(left) < -jnp.expm1(below)
    earlier = siblings & (places[None, :] < places[:, None])
    last = _deepest(tree, keep & ~jnp.any(earlier & keep[None, :], axis=1))

    law, draft = laws_at(last)
    owed = weights[last] * law
    rest, _ = give(last, owed, draft)
    next_token = inverse_cdf(jnp.where(jnp.sum(rest) > 0, rest, owed), uniforms[0])
    return Verdict(tree.paths[last], tree.depths[last] + 1, next_token)


def _deepest(tree: Tree, accepted: Bool[Array, " nodes"]) -> Int[Array, ""]:
    """The deepest node all of whose ancestors are accepted; the lowest index on ties."""
    is_root = tree.depths == 0
    reached = jnp.all(~tree.ancestors | (accepted | is_root)[None, :], axis=1)
    return jnp.argmax(jnp.where(reached, tree.depths, -1)).astype(jnp.int32)


def _residual(
    target: Float[Array, " vocab"], draft: Float[Array, " vocab"]
) -> Float[Array, " vocab"]:
    """Returns what the target still owes after the draft's share, normalized.

    Where rounding leaves nothing, the two distributions were equal: the target's own is returned.
    """
    owed = jnp.maximum(target - draft, 0.0)
    total = jnp.sum(owed)
    return jnp.where(total > 0, owed / jnp.where(total > 0, total, 1.0), target)


def _rest_after(
    owed: Float[Array, " vocab"], draft: Float[Array, " vocab"]
) -> Float[Array, " vocab"]:
    """Returns what a node owes its followers, given that a token of the draft was rejected.

    What the draft has too much is the probability of that. Both may owe less than 1.
    """
    rejected = jnp.sum(jnp.maximum(draft - owed, 0.0))
    return jnp.maximum(owed - draft, 0.0) / jnp.where(rejected > 0, rejected, jnp.inf)


def _draw_residual(
    uniform: Float[Array, ""], target: Float[Array, " vocab"], draft: Float[Array, " vocab"]
) -> Int[Array, ""]:
    return inverse_cdf(_residual(target, draft), uniform)


def _without(distribution: Float[Array, " vocab"], token: Int[Array, ""]) -> Float[Array, " vocab"]:
    """The distribution of a draw that leaves one token out; zeros if that was the only one."""
    rest = distribution.at[token].set(0.0)
    total = jnp.sum(rest)
    return rest / jnp.where(total > 0, total, 1.0)
