"""Penalties of repetition, exact at every node of a tree.

The text of a node is the row's text and the tokens on the path to the node. So each node's logits
are those of plain decoding after that text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.types import Context, Penalties, Proposal

Logits = Float[Array, "nodes vocab"]


def penalize(
    logits: Logits,
    penalties: Penalties,
    context: Context,
    num_emitted: Int[Array, ""],
    proposal: Proposal,
) -> Logits:
    """Applies a row's penalties to what the target says after each node.

    Args:
        logits: of the target, one row for each node.
        penalties: the rules.
        context: the row. The root of the tree is the last token of its text.
        num_emitted: how many tokens of the text were emitted; those before them are the prompt.
        proposal: the nodes.

    Returns:
        Logits; -inf where a rule forbids a token.
    """
    repetition, presence, frequency, ngram_size, min_new_tokens = penalties
    if repetition is not None:
        seen = _counts(logits, context, jnp.int32(0), proposal) > 0
        penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen, penalized, logits)
    if presence is not None or frequency is not None:
        counts = _counts(logits, context, context.length - num_emitted, proposal)
        if frequency is not None:
            logits = logits - frequency * counts
        if presence is not None:
            logits = logits - presence * (counts > 0)
    if ngram_size is not None:
        repeats = _ends_of_ngrams(logits.shape[1], ngram_size, context, proposal)
        logits = jnp.where(repeats, -jnp.inf, logits)
    if min_new_tokens is not None:
        too_early = num_emitted + proposal.tree.depths < min_new_tokens
        ids = jnp.where(context.stop_ids < 0, logits.shape[1], context.stop_ids)
        stops = jnp.zeros(logits.shape[1], bool).at[ids].set(True, mode="drop")
        logits = jnp.where(too_early[:, None] & stops[None, :], -jnp.inf, logits)
    return logits


def _counts(
    logits: Logits, context: Context, start: Int[Array, ""], proposal: Proposal
) -> Float[Array, "nodes vocab"]:
    """Returns how often each token occurs in the text of each node, from a place on."""
    tree = proposal.tree
    places = jnp.arange(context.tokens.shape[0])
    counted = ((places >= start) & (places < context.length)).astype(logits.dtype)
    in_text = jnp.zeros(logits.shape[1], logits.dtype).at[context.tokens].add(counted)
    below_root = tree.ancestors & (tree.depths > 0)[None, :]
    counts = jnp.broadcast_to(in_text, logits.shape)
    return counts.at[:, proposal.tokens].add(below_root.astype(logits.dtype))


def _ends_of_ngrams(
    vocab_size: int, size: Int[Array, ""], context: Context, proposal: Proposal
) -> Bool[Array, "nodes vocab"]:
    """Marks the tokens that would end an n-gram which the text of a node holds already."""
    tree = proposal.tree
    path = tree.paths[:, 1:]
    following = jnp.where(path < 0, 0, proposal.tokens[path])
    room = jnp.zeros((tree.paths.shape[0], path.shape[1]), context.tokens.dtype)
    text = jnp.broadcast_to(context.tokens, (room.shape[0], *context.tokens.shape))
    text = jax.lax.dynamic_update_slice(
        jnp.concatenate([text, room], axis=1),
        following.astype(text.dtype),
        (jnp.int32(0), context.length),
    )
    ends = context.length + tree.depths
    places = jnp.arange(text.shape[1])

    def compare(back: Int[Array, ""], same: Bool[Array, "nodes places"]):
        last = jnp.take_along_axis(text, jnp.maximum(ends - back, 0)[:, None], axis=1)
        return same & (jnp.roll(text, back, axis=1) == last)

    complete = (places >= size - 1) & (size > 0)
    whole = complete[None, :] & (places[None, :] < ends[:, None])
    # Longer n-grams than the text occur nowhere.
    found = jax.lax.fori_loop(1, jnp.minimum(size, text.shape[1]), compare, whole)
    rows = jnp.arange(text.shape[0])[:, None]
    return jnp.zeros((text.shape[0], vocab_size), bool).at[rows, text].max(found)
