"""How often a network agrees with itself when sub-layers are skipped, for a few regular patterns.

What self-speculation can hope for, before any search, and what layer drop in training is for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.drafters.skip_sets import skips_of
from jaxspec.models import Skips
from jaxspec.training.skip_objective import FixedText

SHARES = (0.5, 2 / 3, 0.75)


def regular_patterns(num_layers: int, share: float) -> dict[str, Skips]:
    """Sets that skip a share of the 2 x `num_layers` sub-layers, by name.

    Patterns of whole layers round down to them. The first and the last layer are kept where a
    pattern leaves a choice.

    Raises:
        ValueError: `share` is outside [0, 1].

    Example:
        >>> regular_patterns(4, 0.5)["last layers"].mlp
        (False, False, True, True)
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}.")
    count = round(2 * num_layers * share)
    layers = count // 2
    first_part = min(count, num_layers)
    many, rest = _spread(first_part, num_layers), _spread(count - first_part, num_layers)
    last = num_layers - 1 if layers < num_layers else num_layers
    sets = {
        "every other layer": (_spread(layers, num_layers),) * 2,
        "middle layers": (range(last - layers, last),) * 2,
        "last layers": (range(num_layers - layers, num_layers),) * 2,
        "attention first": (many, rest),
        "MLPs first": (rest, many),
    }
    return {name: skips_of(num_layers, *parts) for name, parts in sets.items()}


def _spread(count: int, num_layers: int) -> list[int]:
    """So many layers at equal distances, without the first and the last if that can be."""
    inner = range(1, num_layers - 1)
    among = inner if count <= len(inner) else range(num_layers)
    return [among[int((place + 0.5) * len(among) / count)] for place in range(count)]


class Agreement(NamedTuple):
    """One set on fixed text.

    share: of sub-layers skipped.
    tokens: share of drafted tokens that are the whole network's choice at their place. Each draft
        reads the text: a wrong token is not what the next one sees.
    first: the same of the first token of each draft, which sees no key of the skipped network.
    """

    pattern: str
    share: float
    tokens: float
    first: float


def measure_agreement(text: FixedText, shares: Sequence[float]) -> list[Agreement]:
    """All patterns at all shares."""
    found = []
    for share in shares:
        for pattern, skip in regular_patterns(text.target.num_layers, share).items():
            agrees = np.asarray(text.drafts(skip).agrees)[text.counted]
            skipped = np.mean([*skip.attention, *skip.mlp])
            found.append(
                Agreement(pattern, float(skipped), float(agrees.mean()), float(agrees[:, 0].mean()))
            )
    return found
