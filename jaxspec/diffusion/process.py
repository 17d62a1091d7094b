"""Masking of text for training a diffusion language model, and the weight of each masked position.

A masked diffusion model bounds the negative log-likelihood of a text by its predictions at masked
positions: with a share t ~ U(0, 1) of them masked, the sum of cross-entropies divided by t
(LLaDA, arXiv 2502.09992, eq. 3; MDLM, arXiv 2406.07524). With a number k ~ U{1..n} of n positions
in place of a share, the sum times n / k is the same in expectation and varies less (LLaDA, appendix
A, eq. 6). Functions are of one row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

LOWEST_SHARE = 1e-3
"""Shares are drawn from here up, as LLaDA's guidelines do: 1 / t stays finite."""


class Masked(NamedTuple):
    """Hidden positions of a row, and their weights.

    Attributes:
        hidden: True for positions to predict; the network reads the mask token there.
        weights: of each position's cross-entropy; 0 for positions that are not hidden.
    """

    hidden: Bool[Array, " positions"]
    weights: Float[Array, " positions"]


def mask_share(
    key: PRNGKeyArray, maskable: Bool[Array, " positions"], groups: Int[Array, " positions"]
) -> Masked:
    """Hides each position of a group with the group's chance t ~ U(0, 1); it then weighs 1/t.

    Args:
        key: of the draws.
        maskable: positions that may be hidden.
        groups: number of each position's group, such as a document; a group is contiguous.
    """
    share_key, position_key = jax.random.split(key)
    drawn = drawn_per_group(share_key, groups)
    shares = (1.0 - LOWEST_SHARE) * drawn + LOWEST_SHARE
    hidden = maskable & (jax.random.uniform(position_key, groups.shape) < shares)
    return Masked(hidden, jnp.where(hidden, 1.0 / shares, 0.0))


def mask_number(
    key: PRNGKeyArray, maskable: Bool[Array, " positions"], groups: Int[Array, " positions"]
) -> Masked:
    """Hides k ~ U{1..n} of the n maskable positions of each group; a hidden one weighs n / k.

    Arguments as for `mask_share`; the bound is the same one.
    """
    number_key, position_key = jax.random.split(key)
    order = jax.random.uniform(position_key, groups.shape)
    together = (groups[:, None] == groups[None, :]) & maskable[None, :]
    size = jnp.sum(together, axis=1)
    rank = jnp.sum(together & (order[None, :] < order[:, None]), axis=1)
    number = 1 + jnp.floor(drawn_per_group(number_key, groups) * size)
    hidden = maskable & (rank < number)
    return Masked(hidden, jnp.where(hidden, size / number, 0.0))


def block_training_mask(
    documents: Int[Array, " positions"],
    blocks: Int[Array, " positions"],
    firsts: Int[Array, " positions"] | None = None,
) -> Bool[Array, "2*positions 2*positions"]:
    """Returns the attention mask of a masked copy of a row followed by a clean one (BD3-LM, 3).

    A masked position sees the masked positions of its own block and the clean ones of earlier
    blocks. A clean position sees the clean ones of its own block and of earlier ones, and never a
    masked one (arXiv 2503.09573).

    Args:
        documents: number of each position's document; none sees another.
        blocks: number of each position's block within its document.
        firsts: if several blocks are predicted together, the number of the first of them: a masked
            position sees these blocks masked, up to its own, and clean ones only before them.
            `None`: each block by itself.
    """
    firsts = blocks if firsts is None else firsts
    same = documents[:, None] == documents[None, :]
    reached = same & (blocks[:, None] >= blocks[None, :])
    together = reached & (firsts[:, None] == firsts[None, :])
    earlier = same & (firsts[:, None] > blocks[None, :])
    return jnp.block([[together, earlier], [jnp.zeros_like(same), reached]])


def drawn_per_group(
    key: PRNGKeyArray, groups: Int[Array, " positions"]
) -> Float[Array, " positions"]:
    """Draws a number from [0, 1) for each group; returns it at each position of the group."""
    first = jnp.argmax(groups[:, None] == groups[None, :], axis=1)
    return jax.random.uniform(key, groups.shape)[first]
