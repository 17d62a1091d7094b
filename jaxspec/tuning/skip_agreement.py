"""Agreement of a network with itself when sub-layers are skipped in regular patterns.

It tells, before any search, what self-speculation can reach; layer drop in training raises it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.drafters.skip_sets import skips_of
from jaxspec.models import Skips
from jaxspec.tuning.skip_text import FixedText

SHARES = (0.5, 2 / 3, 0.75)


def regular_patterns(num_layers: int, share: float) -> dict[str, Skips]:
    """Returns sets that skip a share of the 2 x `num_layers` sub-layers, by name.

    Patterns of whole layers round down. They keep the first and the last layer if they can.

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
    """Returns `count` layers at equal distances, without the first and the last if possible."""
    inner = range(1, num_layers - 1)
    among = inner if count <= len(inner) else range(num_layers)
    return [among[int((place + 0.5) * len(among) / count)] for place in range(count)]


class Agreement(NamedTuple):
    """Agreement of one set on fixed text.

    Attributes:
        pattern: name of the pattern.
        share: share of sub-layers skipped.
        tokens: share of drafted tokens that are the whole network's choice at their place. Each
            draft reads the text, so a wrong token does not affect the next one.
        first: the same for the first token of each draft, which attends to no key of the skipped
            network.
    """

    pattern: str
    share: float
    tokens: float
    first: float


def measure_agreement(text: FixedText, shares: Sequence[float]) -> list[Agreement]:
    """Measures all patterns at all shares."""
    found = []
    for share in shares:
        for pattern, skip in regular_patterns(text.target.num_layers, share).items():
            agrees = np.asarray(text.drafts(skip).agrees)[text.counted]
            skipped = np.mean([*skip.attention, *skip.mlp])
            found.append(
                Agreement(pattern, float(skipped), float(agrees.mean()), float(agrees[:, 0].mean()))
            )
    return found
