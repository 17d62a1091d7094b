"""What a job needs: rows grouped by the cache slots they take, and how many fit into memory."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.batch.rows import EncodedRow
from jaxspec.core.loop import SLOTS_MULTIPLE
from jaxspec.core.types import Drafter
from jaxspec.generation import bucket_of

MOST_ROWS = {"cpu": 32}
"""Rows at once by platform, when nobody says: more bring little there."""
MOST_ROWS_ELSEWHERE = 256
SHARE_OF_MEMORY = 0.8
"""Of what is available. The rest is for what is not foreseen."""
_WORTH_A_GROUP = 8
"""Times the rows decoded at once: a smaller group loses more in waiting for its last rows."""
_PREFIX_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are decoded in the same slots.

    slots: of each row's cache.
    rows: in the order in which they are begun.
    """

    slots: int
    rows: tuple[EncodedRow, ...]

    @property
    def largest_bucket(self) -> int:
        return max(bucket_of(len(row.tokens)) for row in self.rows)


def slots_needed(num_tokens: int, max_new_tokens: int, max_positions: int, depth: int) -> int:
    """Cache slots of a row with a prompt of so many tokens, for drafts of so many levels.

    What is emitted fits, with one step's overhang; and so does the bucket the prompt is read in.
    """
    room = min(max_new_tokens, max_positions - num_tokens)
    overhang = depth + 1
    return max(num_tokens + room, bucket_of(num_tokens)) + overhang


def group_rows(
    rows: Sequence[EncodedRow],
    max_new_tokens: int,
    max_positions: int,
    drafter: Drafter,
    batch: int,
    slots: int | None = None,
) -> list[Group]:
    """Puts rows that need about as many slots together, the shortest first.

    Capacities halve from the largest that is needed; a group that would not keep `batch` rows busy
    for a while joins the next larger one.

    Args:
        rows: good ones.
        max_new_tokens: of each row.
        max_positions: of the model.
        drafter: its drafts lie past a text while they are verified.
        batch: rows at once.
        slots: one capacity for all; every row must fit.
    """
    if not rows:
        return []
    depth = drafter.tree_shape[1]
    needed = [slots_needed(len(row.tokens), max_new_tokens, max_positions, depth) for row in rows]
    if slots is not None:
        return [Group(slots, tuple(rows))]
    largest = round_up(max(needed))
    capacities = [largest]
    while (half := round_up(capacities[0] // 2)) < capacities[0]:
        capacities.insert(0, half)
    groups, held = [], []
    lower = 0
    for capacity in capacities:
        held += [
            (place, row)
            for place, (row, need) in enumerate(zip(rows, needed, strict=True))
            if lower < need <= capacity
        ]
        lower = capacity
        if len(held) >= _WORTH_A_GROUP * batch or capacity == largest:
            groups.append((capacity, held))
            held = []
    if len(groups) > 1 and len(groups[-1][1]) < _WORTH_A_GROUP * batch:
        # The largest has no larger one to join: the one below joins it.
        _, longest = groups.pop()
        groups[-1] = (largest, groups[-1][1] + longest)
    return [
        Group(capacity, tuple(row for _, row in sorted(placed, key=lambda pair: pair[0])))
        for capacity, placed in groups
        if placed
    ]


def round_up(slots: int) -> int:
    """The next multiple that caches come in."""
    return -(-slots // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


def most_rows(num_rows: int, parts: int = 1) -> int:
    """Rows at once to begin with, when nobody says: a power of two, no more than there are.

    Or a few more, so that each of `parts` gets as many.
    """
    most = MOST_ROWS.get(jax.default_backend(), MOST_ROWS_ELSEWHERE)
    rows = min(most, 1 << max(0, num_rows - 1).bit_length())
    return -(-rows // parts) * parts


def shared_prefix(rows: Sequence[EncodedRow], chunk: int) -> np.ndarray:
    """The ids that every prompt begins with, as far as reading them once is worth a program.

    At least one token of each prompt is left. The number is one that the rest can be read behind in
    passes of some size.
    """
    if len(rows) < 2:
        return np.zeros(0, np.int32)
    shortest = min(len(row.tokens) for row in rows)
    first = rows[0].tokens[: shortest - 1]
    common = len(first)
    for row in rows[1:]:
        same = row.tokens[:common] == first[:common]
        common = common if same.all() else int(np.argmin(same))
    multiple = _PREFIX_MULTIPLE if common < chunk else math.gcd(chunk, 4 * _PREFIX_MULTIPLE)
    return first[: common // multiple * multiple]
