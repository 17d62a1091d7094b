"""The plan of a job: rows grouped by the capacity of their caches, and rows at once."""

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxspec.batch.rows import EncodedRow
from jaxspec.core.loop import CAPACITY_MULTIPLE, round_up
from jaxspec.decoding.request import MIN_BUCKET, bucket_of

MOST_ROWS = {"cpu": 32}
"""Most rows at once by platform, if nobody asks for a number: more bring little there."""
MOST_ROWS_ELSEWHERE = 256
_FINEST = 512
"""Largest capacity in steps of `CAPACITY_MULTIPLE`; above, there are four to an octave."""
_REST_OF_A_STEP = 1024
"""Cached tokens whose attention takes about as long as everything else in a row's step."""
_DRAINED, _COMPILED = 2, 16
"""Cost of one more group, in rows that could be decoded in its time: 2 for each row at once, as the
group's last rows leave slots empty, and 16 for its programs."""
_PREFIX_MULTIPLE = 16
_BUCKET_MULTIPLE, _ONE_PASS = 32, 256


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are decoded in the same slots.

    Attributes:
        capacity: tokens that each row's cache holds.
        rows: rows, in the order in which they are begun.
    """

    capacity: int
    rows: tuple[EncodedRow, ...]


def read_in(num_tokens: int) -> int:
    """Returns the padded length of a prompt.

    There are few such lengths, so that programs are few. Up to 256 tokens, which are read in one
    pass where native code does not run, they are finer than powers of two.

    Example:
        >>> [read_in(num_tokens) for num_tokens in (5, 40, 200, 300)]
        [16, 64, 224, 512]
    """
    if num_tokens <= MIN_BUCKET or num_tokens > _ONE_PASS:
        return bucket_of(num_tokens)
    return round_up(num_tokens, _BUCKET_MULTIPLE)


def capacity_needed(num_tokens: int, max_new_tokens: int, max_positions: int, depth: int) -> int:
    """Returns the cached tokens of a row: its prompt, its output, and one step's overhang.

    The padded prompt fits as well. The overhang is as deep as the draft tree.
    """
    room = min(max_new_tokens, max_positions - num_tokens)
    overhang = depth + 1
    return max(num_tokens + room, read_in(num_tokens)) + overhang


def group_rows(
    rows: Sequence[EncodedRow],
    need_of: Callable[[EncodedRow], int],
    batch_size: int,
    capacity: int | None = None,
) -> list[Group]:
    """Groups rows that need about the same capacity, the smallest first.

    Attention takes time for the whole capacity, and slots run empty at the end of every group. The
    groups are those that together take least time by a rough model of both. `need_of` returns the
    capacity that a row needs. With `capacity` there is one group, and every row must fit into it.
    """
    if not rows:
        return []
    if capacity is not None:
        return [Group(capacity, tuple(rows))]
    needed = list(map(need_of, rows))
    largest = round_up(max(needed))
    counts = Counter(min(largest, capacity_for(need)) for need in needed)
    chosen = _cheapest(counts, _DRAINED * batch_size + _COMPILED)
    groups: dict[int, list[EncodedRow]] = {capacity: [] for capacity in chosen}
    for row, need in zip(rows, needed, strict=True):
        groups[chosen[bisect_left(chosen, need)]].append(row)
    return [Group(capacity, tuple(placed)) for capacity, placed in groups.items()]


def _cheapest(counts: Mapping[int, int], spent: int) -> list[int]:
    """Chooses the capacities that take least time, ascending, the largest always among them.

    Rows whose own capacity is not chosen go into the next larger one. `counts` holds the number of
    rows that need each capacity, `spent` the cost of a group in rows.
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


def capacity_for(needed: int) -> int:
    """Returns the smallest capacity that holds `needed` tokens.

    There are few capacities, so there are few programs.

    Example:
        >>> [capacity_for(needed) for needed in (1, 65, 513, 1025)]
        [64, 128, 640, 1280]
    """
    multiple = CAPACITY_MULTIPLE
    if needed > _FINEST:
        multiple = (1 << (needed - 1).bit_length()) // 8
    return round_up(needed, multiple)


def most_rows(num_rows: int, parts: int = 1) -> int:
    """Returns rows at once if nobody asks for a number: a power of two that holds all rows.

    It is limited by what helps on the platform, and rounded up so that each of the mesh's `parts`
    gets the same number.
    """
    most = MOST_ROWS.get(jax.default_backend(), MOST_ROWS_ELSEWHERE)
    rows = min(most, 1 << max(0, num_rows - 1).bit_length())
    return round_up(rows, parts)


def shared_prefix(rows: Sequence[EncodedRow], chunk: int) -> np.ndarray:
    """Returns the ids that every prompt begins with, if reading them once is worth a program.

    At least one token of each prompt is left. The length is one behind which the rest can be read
    in passes of `chunk` tokens or a fraction of it.
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
