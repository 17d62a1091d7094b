"""How text is masked for training a diffusion language model, and what each masked slot weighs.

A masked diffusion model bounds the negative log-likelihood of a text by what it says of masked
slots: with a share t ~ U(0, 1) of them masked, the sum of their cross-entropies divided by t
(LLaDA, arXiv 2502.09992, eq. 3; MDLM, arXiv 2406.07524). With a number k ~ U{1..n} of n slots in
place of a share, the sum times n / k is the same in expectation and varies less (LLaDA, appendix A,
eq. 6). Functions are of one row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

LOWEST_SHARE = 1e-3
"""Shares are drawn from here up, as LLaDA's guidelines do: 1 / t stays finite."""


class Masked(NamedTuple):
    """Which slots of a row are hidden.

    hidden: to be foreseen; the network reads the mask token there.
    weights: of each slot's cross-entropy; 0 where nothing is hidden.
    """

    hidden: Bool[Array, " slots"]
    weights: Float[Array, " slots"]


def mask_share(
    key: PRNGKeyArray, maskable: Bool[Array, " slots"], groups: Int[Array, " slots"]
) -> Masked:
    """Hides each slot of a group with the group's own chance t ~ U(0, 1); a hidden one weighs 1/t.

    Args:
        key: what is drawn with.
        maskable: slots that may be hidden.
        groups: such as documents; slots of one number lie together.
    """
    share_key, slot_key = jax.random.split(key)
    drawn = drawn_per_group(share_key, groups)
    shares = (1.0 - LOWEST_SHARE) * drawn + LOWEST_SHARE
    hidden = maskable & (jax.random.uniform(slot_key, groups.shape) < shares)
    return Masked(hidden, jnp.where(hidden, 1.0 / shares, 0.0))


def mask_number(
    key: PRNGKeyArray, maskable: Bool[Array, " slots"], groups: Int[Array, " slots"]
) -> Masked:
    """Hides k ~ U{1..n} of the n maskable slots of each group; a hidden one weighs n / k.

    Arguments as for `mask_share`; the bound is the same one.
    """
    number_key, slot_key = jax.random.split(key)
    order = jax.random.uniform(slot_key, groups.shape)
    together = (groups[:, None] == groups[None, :]) & maskable[None, :]
    size = jnp.sum(together, axis=1)
    rank = jnp.sum(together & (order[None, :] < order[:, None]), axis=1)
    number = 1 + jnp.floor(drawn_per_group(number_key, groups) * size)
    hidden = maskable & (rank < number)
    return Masked(hidden, jnp.where(hidden, size / number, 0.0))


def block_training_mask(
    documents: Int[Array, " slots"],
    blocks: Int[Array, " slots"],
    firsts: Int[Array, " slots"] | None = None,
) -> Bool[Array, "2*slots 2*slots"]:
    """Who sees whom when a masked copy of a row is followed by a clean one (BD3-LM, section 3).

    A masked slot sees the masked slots of its own block and the clean ones of earlier blocks; a
    clean slot the clean ones of its own block and of earlier ones, and never a masked one
    (arXiv 2503.09573).

    Args:
        documents: number of each slot's document; none sees another.
        blocks: number of each slot's block within its document.
        firsts: where several blocks are foreseen together, the number of the first of them: a
            masked slot sees these up to its own block masked, and clean ones only before them.
            None: each block by itself.
    """
    firsts = blocks if firsts is None else firsts
    same = documents[:, None] == documents[None, :]
    reached = same & (blocks[:, None] >= blocks[None, :])
    together = reached & (firsts[:, None] == firsts[None, :])
    earlier = same & (firsts[:, None] > blocks[None, :])
    return jnp.block([[together, earlier], [jnp.zeros_like(same), reached]])


def drawn_per_group(key: PRNGKeyArray, groups: Int[Array, " slots"]) -> Float[Array, " slots"]:
    """A number from [0, 1) for each group, at each of its slots."""
    first = jnp.argmax(groups[:, None] == groups[None, :], axis=1)
    return jax.random.uniform(key, groups.shape)[first]
