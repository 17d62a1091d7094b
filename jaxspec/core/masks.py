"""Attention masks of one row: `mask[i, j]` is True when token i sees token j.

A tree's mask needs no function: it is `tree.ancestors`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core.forms import exchangeable


def causal(num_tokens: int) -> Bool[Array, "tokens tokens"]:
    """Each token sees itself and what came before."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def bidirectional(num_tokens: int) -> Bool[Array, "tokens tokens"]:
    """Every token sees every token: a diffusion model's block."""
    return jnp.ones((num_tokens, num_tokens), bool)


def block_causal(num_tokens: int, block: int) -> Bool[Array, "tokens tokens"]:
    """Each token sees its own block of `block` tokens whole, and all blocks before it."""
    blocks = jnp.arange(num_tokens) // block
    return blocks[:, None] >= blocks[None, :]


def same_document(documents: Int[Array, " tokens"]) -> Bool[Array, "tokens tokens"]:
    """Each token sees the tokens of its own document: for several packed into one sequence."""
    return documents[:, None] == documents[None, :]


@exchangeable
def sliding_window(
    mask: Bool[Array, "#queries keys"],
    query_positions: Int[Array, " queries"],
    key_positions: Int[Array, " keys"],
    window: int,
) -> Bool[Array, "queries keys"]:
    """Returns the part of a mask that lies less than `window` positions behind each query."""
    return mask & (query_positions[:, None] - key_positions[None, :] < window)
