"""Groups, slots and the shared prefix."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from jaxspec.batch.plan import (
    capacity_for,
    capacity_needed,
    group_rows,
    read_in,
    shared_prefix,
)
from jaxspec.batch.rows import EncodedRow
from jaxspec.core.loop import round_up


def rows_of_lengths(*lengths: int) -> list[EncodedRow]:
    return [EncodedRow(i + 1, i, np.arange(n, dtype=np.int32)) for i, n in enumerate(lengths)]


def needs(max_new_tokens: int, max_positions: int, depth: int = 0) -> Callable[[EncodedRow], int]:
    return lambda row: capacity_needed(len(row.tokens), max_new_tokens, max_positions, depth)


def test_capacities_hold_bucket_output_and_one_steps_overhang():
    # 5 tokens are read in a bucket of 16; 10 more are emitted; a step of depth 3 writes 4.
    assert capacity_needed(5, 10, max_positions=100, depth=3) == 16 + 4
    assert capacity_needed(16, 10, max_positions=100, depth=3) == 26 + 4
    assert capacity_needed(16, 10, max_positions=20, depth=3) == 20 + 4


def test_a_long_prompt_among_many_short_ones_does_not_make_them_pay():
    lengths = [20] * 40 + [900] * 40
    groups = group_rows(rows_of_lengths(*lengths), needs(32, 1024), batch_size=4)
    assert [len(group.rows) for group in groups] == [40, 40]
    assert groups[0].capacity <= 128 < 932 <= groups[1].capacity


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_row_once_in_order_and_each_fits(seed):
    rng = np.random.default_rng(seed)
    rows = rows_of_lengths(*rng.integers(1, 500, size=rng.integers(1, 200)))
    batch, new = int(rng.integers(1, 9)), int(rng.integers(0, 200))
    depth = int(rng.integers(1, 6))
    groups = group_rows(rows, needs(new, 512, depth), batch)
    assert sorted(row.line for group in groups for row in group.rows) == [r.line for r in rows]
    for group in groups:
        assert [row.line for row in group.rows] == sorted(row.line for row in group.rows)
        for row in group.rows:
            assert capacity_needed(len(row.tokens), new, 512, depth) <= group.capacity
    capacities = [group.capacity for group in groups]
    assert capacities == sorted(set(capacities))
    # A group more costs what some rows do, so it must take less of many.
    if len(groups) > 1:
        assert all(len(group.rows) > batch for group in groups[:-1])


def cost(sizes: dict[int, int], batch_size: int) -> int:
    """Cost of groups: every step costs a thousand cached tokens more, and a group some rows."""
    return sum((rows + 2 * batch_size + 16) * (1024 + size) for size, rows in sizes.items())


@pytest.mark.parametrize("seed", range(5))
def test_no_other_grouping_by_the_same_capacities_takes_less(seed):
    rng = np.random.default_rng(seed)
    lengths, batch = rng.integers(1, 700, size=rng.integers(100, 900)), int(rng.integers(1, 32))
    groups = group_rows(rows_of_lengths(*lengths), needs(64, 1024), batch)
    needed = [capacity_needed(int(length), 64, 1024, 0) for length in lengths]
    largest = round_up(max(needed))
    ladder = sorted({min(largest, capacity_for(need)) for need in needed})
    costs = []
    for count in range(len(ladder)):
        for chosen in itertools.combinations(ladder[:-1], count):
            bounds = [0, *chosen, largest]
            sizes = {
                upper: sum(lower < need <= upper for need in needed)
                for lower, upper in itertools.pairwise(bounds)
            }
            costs.append(cost(sizes, batch))
    assert cost({group.capacity: len(group.rows) for group in groups}, batch) == min(costs)


def test_capacities_are_few_and_waste_little():
    ladder = sorted({capacity_for(needed) for needed in range(1, 4097)})
    assert ladder[:8] == list(range(64, 513, 64))
    assert ladder[8:] == [
        octave * part // 4 for octave in (512, 1024, 2048) for part in (5, 6, 7, 8)
    ]
    for needed in range(1, 4097):
        assert needed <= capacity_for(needed) <= max(needed + 63, 1.25 * needed)


def test_a_few_longer_prompts_do_not_make_a_file_of_others_pay():
    """A tenth of a thousand rows needs a capacity above 256; the others do not get it."""
    groups = group_rows(rows_of_lengths(*[90] * 900, *[200] * 100), needs(128, 2048), 32)
    assert [(group.capacity, len(group.rows)) for group in groups] == [(256, 900), (384, 100)]
    # With fewer rows, the end of a further group would take longer than it saves.
    groups = group_rows(rows_of_lengths(*[90] * 90, *[200] * 10), needs(128, 2048), 32)
    assert [(group.capacity, len(group.rows)) for group in groups] == [(384, 100)]


def test_without_rows_there_are_no_groups():
    assert group_rows([], needs(8, 512), batch_size=4) == []


def prefixed(length: int, *others: int) -> list[EncodedRow]:
    rows = [np.r_[np.arange(length), np.full(other, 1000 + i)] for i, other in enumerate(others)]
    return [EncodedRow(i + 1, i, row.astype(np.int32)) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("length", "read"), [(0, 0), (15, 0), (40, 32), (300, 256), (320, 320)])
def test_the_shared_prefix_is_what_can_be_read_behind(length, read):
    assert shared_prefix(prefixed(length, 5, 9, 1), chunk=256).tolist() == list(range(read))


def test_equal_prompts_leave_a_token_to_read():
    assert len(shared_prefix(prefixed(48, 0, 0), chunk=256)) == 32
    assert len(shared_prefix(prefixed(48, 0), chunk=256)) == 0


def test_what_prompts_are_read_in_is_of_few_sizes():
    sizes = [read_in(length) for length in range(1, 1025)]
    assert sorted(set(sizes)) == [16, *range(32, 257, 32), 512, 1024]
    assert all(length <= size for length, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
