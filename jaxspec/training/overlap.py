"""Losses between the laws of a draft and those of its target, one for each place.

A token that is drawn from a draft's law is accepted with a chance that is the overlap of both laws,
the sum over all tokens of the smaller of the two probabilities (Leviathan et al. 2023, section
3.2). Cross-entropy is the least where the overlap is the largest, at equal laws; a small draft,
which cannot make them equal, ends elsewhere. The LK losses (Samarin et al. 2026, 2602.23881) have
the overlap itself as their objective.

A token that cannot be drafted is never accepted, so the target's law is taken as it is, not
normalised anew over the tokens that can be drafted. The gradient of -log(overlap) by the logits has
a sum of sizes of at most 2, as that of cross-entropy, however small the overlap. It vanishes where
no token that can be drafted has a higher probability in the target's law than in the draft's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.training.settings import CROSS_ENTROPY

DECAY = 3.0
"""Decay of the divergence's weight in "hybrid" with the overlap; the paper's choice."""


class Match(NamedTuple):
    """Comparison of a draft's law with the target's, at each place.

    Attributes:
        cross_entropy: of the draft's law against the target's, the latter normalised over the
            tokens that can be drafted.
        divergence: of Kullback and Leibler, from the draft's law to the target's: its sum over the
            tokens that can be drafted.
        log_overlap: logarithm of the overlap of both laws.
    """

    cross_entropy: Float[Array, "*places"]
    divergence: Float[Array, "*places"]
    log_overlap: Float[Array, "*places"]

    @property
    def overlap(self) -> Float[Array, "*places"]:
        """The chance that a token drawn from the draft's law is accepted."""
        return jnp.exp(self.log_overlap)


def match(
    draft_logits: Float[Array, "*places vocab"],
    target_logits: Float[Array, "*places vocab"],
    log_total: Float[Array, "*places"] | None = None,
) -> Match:
    """Compares the laws of a draft with those of its target, which get no gradient.

    Args:
        draft_logits: of the tokens that can be drafted; -inf for others.
        target_logits: of the same tokens.
        log_total: log-sum-exp of the target's logits of all tokens; `None`: these are all.

    >>> draft, target = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.8, 0.2]))
    >>> found = match(draft, target)
    >>> round(float(found.overlap), 6)  # 0.5 of the first token and 0.2 of the second
    0.7
    """
    # The same operations for both, so that equal logits are equal laws to the last bit.
    draft_total = jax.nn.logsumexp(draft_logits, axis=-1)
    target_logits = jax.lax.stop_gradient(target_logits)
    total = jax.nn.logsumexp(target_logits, axis=-1) if log_total is None else log_total
    draft = draft_logits - draft_total[..., None]
    target = target_logits - jax.lax.stop_gradient(total)[..., None]
    smaller = jnp.minimum(draft, target)
    own_terms = jax.nn.softmax(target_logits, axis=-1) * draft_logits
    terms = jnp.exp(target) * (target - draft)
    return Match(
        draft_total - jnp.sum(jnp.where(draft_logits > -jnp.inf, own_terms, 0.0), axis=-1),
        jnp.sum(jnp.where(smaller > -jnp.inf, terms, 0.0), axis=-1),
        jax.nn.logsumexp(smaller, axis=-1),
    )


def losses_of(
    loss: str,
    found: Match,
    counted: Bool[Array, "*places"],
    axes: Sequence[int] | None = None,
) -> Float[Array, "*places"]:
    """Returns a loss of each place, whether it counts or not.

    Args:
        loss: one of `settings.LOSSES`. "hybrid" goes from the divergence to 1 - overlap as the mean
            overlap rises: the weight of the divergence is exp(-3 x mean overlap).
        found: the laws' comparison.
        counted: places of that mean.
        axes: axes of that mean, so that each depth of a draft has its own; `None`: all.

    >>> found = match(jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.8, 0.2]])))
    >>> counted = jnp.array([True])
    >>> [round(float(losses_of(loss, found, counted)[0]), 4) for loss in ("overlap", "hybrid")]
    [0.3567, 0.2869]
    """
    if loss == CROSS_ENTROPY:
        return found.cross_entropy
    if loss == "overlap":
        return -found.log_overlap
    overlap = found.overlap
    total = jnp.sum(overlap * counted, axis=axes, keepdims=True)
    mean = total / jnp.maximum(jnp.sum(counted, axis=axes, keepdims=True), 1)
    share = jax.lax.stop_gradient(jnp.exp(-DECAY * mean))
    return share * found.divergence + (1.0 - share) * (1.0 - overlap)
