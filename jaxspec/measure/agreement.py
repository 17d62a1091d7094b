"""Agreement of a model whose weights were rounded with the model before that."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

TextLogits = Float[np.ndarray, "positions vocab"]


class TextAgreement(NamedTuple):
    """Two models' distributions over the next token, compared at the same positions.

    Attributes:
        positions: number of positions.
        kl: mean divergence of the second model's distribution from the first's, in nats per token.
        top1: share of the positions at which both have the same likeliest token.
    """

    positions: int
    kl: float
    top1: float


def agreement(texts: Iterable[tuple[TextLogits, TextLogits]]) -> TextAgreement:
    """Compares the logits of two models.

    Args:
        texts: for each text, logits of the exact model and of the other at its positions.

    Raises:
        ValueError: there is no position.

    Example:
        >>> even, odds = np.zeros((1, 2)), np.log([[3.0, 1.0]])
        >>> found = agreement([(odds, odds), (odds, even)])
        >>> found.positions, round(found.kl, 4), found.top1
        (2, 0.0654, 1.0)
    """
    kl, same = [], []
    for exact, other in texts:
        p, q = _logprobs(exact), _logprobs(other)
        kl += np.sum(np.exp(p) * (p - q), axis=1).tolist()
        same += (exact.argmax(1) == other.argmax(1)).tolist()
    if not kl:
        raise ValueError("texts must hold a position to compare, got none.")
    return TextAgreement(len(kl), float(np.mean(kl)), float(np.mean(same)))


def _logprobs(logits: TextLogits) -> TextLogits:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
