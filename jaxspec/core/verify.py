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

    Without distributions, tokens were chosen deterministically. With them, a chain takes the ratio
    test, and a tree the recursive rule for siblings drawn without replacement.
    """
    if proposal.draft_logprobs is None:
        return verify_deterministic(uniforms, proposal, target_logits)
    if proposal.tree.children.shape[-1] == 1:
        return verify_chain(uniforms, proposal, target_logits)
    return verify_tree(uniforms, proposal, target_logits)


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


def _draw_residual(
    uniform: Float[Array, ""], target: Float[Array, " vocab"], draft: Float[Array, " vocab"]
) -> Int[Array, ""]:
    return inverse_cdf(_residual(target, draft), uniform)


def _without(distribution: Float[Array, " vocab"], token: Int[Array, ""]) -> Float[Array, " vocab"]:
    """The distribution of a draw that leaves one token out; zeros if that was the only one."""
    rest = distribution.at[token].set(0.0)
    total = jnp.sum(rest)
    return rest / jnp.where(total > 0, total, 1.0)
