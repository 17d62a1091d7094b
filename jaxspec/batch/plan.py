"""What a job needs: rows grouped by the cache slots they take, and how many fit into memory."""

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxspec.batch.rows import EncodedRow
from jaxspec.core.loop import SLOTS_MULTIPLE
from jaxspec.core.types import Drafter
from jaxspec.generation import MIN_BUCKET, bucket_of

MOST_ROWS = {"cpu": 32}
"""Rows at once by platform, when nobody says: more bring little there."""
MOST_ROWS_ELSEWHERE = 256
SHARE_OF_MEMORY = 0.8
"""Of what is available. The rest is for what is not foreseen."""
_FINEST = 512
"""Slots up to which capacities are multiples of what caches come in; above, four to an octave."""
_REST_OF_A_STEP = 1024
"""Slots whose attention takes about as long as all else in a row's step."""
_DRAINED, _COMPILED = 2, 16
"""Rows that could be decoded in the time a further group costs: so many for each of those at once,
as its last rows leave slots empty, and these for its programs."""
_PREFIX_MULTIPLE = 16
_BUCKET_MULTIPLE, _ONE_PASS = 32, 256


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are decoded in the same slots.

    slots: of each row's cache.
    rows: in the order in which they are begun.
    """

    slots: int
    rows: tuple[EncodedRow, ...]


def read_in(num_tokens: int) -> int:
    """Places that a prompt of so many tokens is read in, one pass up to 256 of them.

    Of few sizes, so that programs are few, and finer than powers of two, as reading pays for each.
    """
    if num_tokens <= MIN_BUCKET or num_tokens > _ONE_PASS:
        return bucket_of(num_tokens)
    return -(-num_tokens // _BUCKET_MULTIPLE) * _BUCKET_MULTIPLE


def slots_needed(num_tokens: int, max_new_tokens: int, max_positions: int, depth: int) -> int:
    """Cache slots of a row with a prompt of so many tokens, for drafts of so many levels.

    What is emitted fits, with one step's overhang; and so does what the prompt is read in.
    """
    room = min(max_new_tokens, max_positions - num_tokens)
    overhang = depth + 1
    return max(num_tokens + room, read_in(num_tokens)) + overhang


def group_rows(
    rows: Sequence[EncodedRow],
    max_new_tokens: int,
    max_positions: int,
    drafter: Drafter,
    batch: int,
    slots: int | None = None,
) -> list[Group]:
    """Puts rows that need about as many slots together, the shortest first.

    Attention pays for a capacity, and every group costs its end, so groups are those that together
    take least by a rough model of both.

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
    counts = Counter(min(largest, capacity_of(need)) for need in needed)
    chosen = _cheapest(counts, _DRAINED * batch + _COMPILED)
    groups: dict[int, list[EncodedRow]] = {capacity: [] for capacity in chosen}
    for row, need in zip(rows, needed, strict=True):
        groups[chosen[bisect_left(chosen, need)]].append(row)
    return [Group(capacity, tuple(placed)) for capacity, placed in groups.items()]


def _cheapest(counts: Mapping[int, int], spent: int) -> list[int]:
    """Some of the capacities that so many rows need, ascending, the largest always among them.

    Rows whose own is not chosen go into the next larger one. A group costs as much as `spent` rows.
    """
    capacities = sorted(counts)
    best: list[tuple[int, list[int]]] = [(0, [])]
    for last, capacity in enumerate(capacities):
        ways = []
        for first in range(last + 1):
            cost, chosen = best[first]
            rows = spent + sum(counts[each] for each in capacities[first : last + 1])
            ways.append((cost + rows * (_REST_OF_A_STEP + capacity), [*chosen, capacity]))
        best.append(min(ways))
    return best[-1][1]


def capacity_of(needed: int) -> int:
    """The smallest capacity of a cache that holds so many slots: there are few, so are programs."""
    multiple = SLOTS_MULTIPLE
    if needed > _FINEST:
        multiple = (1 << (needed - 1).bit_length()) // 8
    return -(-needed // multiple) * multiple


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
