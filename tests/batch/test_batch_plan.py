"""Groups, slots and the shared prefix."""

import numpy as np
import pytest

from jaxspec.batch.plan import group_rows, shared_prefix, slots_needed
from jaxspec.batch.rows import EncodedRow
from jaxspec.drafters import NoDraft, PromptLookup


def rows_of_lengths(*lengths: int) -> list[EncodedRow]:
    return [EncodedRow(i + 1, i, np.arange(n, dtype=np.int32)) for i, n in enumerate(lengths)]


def test_slots_hold_bucket_output_and_one_steps_overhang():
    # 5 tokens are read in a bucket of 16; 10 more are emitted; a step of depth 3 writes 4.
    assert slots_needed(5, 10, max_positions=100, depth=3) == 16 + 4
    assert slots_needed(16, 10, max_positions=100, depth=3) == 26 + 4
    assert slots_needed(16, 10, max_positions=20, depth=3) == 20 + 4


def test_a_long_prompt_among_many_short_ones_does_not_make_them_pay():
    lengths = [20] * 40 + [900] * 40
    groups = group_rows(rows_of_lengths(*lengths), 32, 1024, NoDraft(), batch=4)
    assert [len(group.rows) for group in groups] == [40, 40]
    assert groups[0].slots <= 128 < 932 <= groups[1].slots


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_row_once_in_order_and_each_fits(seed):
    rng = np.random.default_rng(seed)
    rows = rows_of_lengths(*rng.integers(1, 500, size=rng.integers(1, 200)))
    batch, new = int(rng.integers(1, 9)), int(rng.integers(0, 200))
    drafter = PromptLookup(num_speculative_tokens=int(rng.integers(1, 6)))
    groups = group_rows(rows, new, 512, drafter, batch)
    assert sorted(row.line for group in groups for row in group.rows) == [r.line for r in rows]
    depth = drafter.tree_shape[1]
    for group in groups:
        assert [row.line for row in group.rows] == sorted(row.line for row in group.rows)
        for row in group.rows:
            assert slots_needed(len(row.tokens), new, 512, depth) <= group.slots
    if len(groups) > 1:
        assert all(len(group.rows) >= 8 * batch for group in groups)


def test_without_rows_there_are_no_groups():
    assert group_rows([], 8, 512, NoDraft(), batch=4) == []


def prefixed(length: int, *others: int) -> list[EncodedRow]:
    rows = [np.r_[np.arange(length), np.full(other, 1000 + i)] for i, other in enumerate(others)]
    return [EncodedRow(i + 1, i, row.astype(np.int32)) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("length", "read"), [(0, 0), (15, 0), (40, 32), (300, 256), (320, 320)])
def test_the_shared_prefix_is_what_can_be_read_behind(length, read):
    assert shared_prefix(prefixed(length, 5, 9, 1), chunk=256).tolist() == list(range(read))


def test_equal_prompts_leave_a_token_to_read():
    assert len(shared_prefix(prefixed(48, 0, 0), chunk=256)) == 32
    assert len(shared_prefix(prefixed(48, 0), chunk=256)) == 0
