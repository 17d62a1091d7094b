"""The guard on made-up clocks where rows are read into slots, which takes longer if they draft."""

import math
import random
from typing import NamedTuple

import pytest

from jaxspec.batch import Guard, GuardSettings


class Times(NamedTuple):
    """Seconds that a machine takes for a step, and to read a token; `True` where it drafts.

    rejoin: seconds to let a row draft that went on plainly.
    noise: of each time, the deviation of its logarithm.
    """

    step: dict[bool, float]
    read: dict[bool, float]
    rejoin: float = 0.04
    noise: float = 0.0


class Job(NamedTuple):
    """Seconds of a job, and the share of its steps that drafted."""

    seconds: float
    drafted: float


def decode(
    times: Times,
    tau: float,
    num_slots: int,
    num_rows: int,
    guard: Guard | None = None,
    always: bool = False,
    row_tokens: int = 100,
    seed: int = 0,
) -> Job:
    """Slots refilled as in `jaxspec.batch.run`; without a guard all steps are as `always` says."""
    rng = random.Random(seed)
    rows = [(rng.choice((64, 128)), rng.randint(1, 2 * row_tokens - 1)) for _ in range(num_rows)]
    slots: list[float | None] = [None] * num_slots
    stale = [False] * num_slots
    seconds, num_steps, num_drafted = 0.0, 0, 0

    def took(length: float) -> float:
        nonlocal seconds
        spent = length * rng.lognormvariate(0, times.noise) if times.noise else length
        seconds += spent
        return spent

    while True:
        chunk = (always, 32) if guard is None else guard.choose()
        drafting, limit = chunk
        free = [slot for slot in range(num_slots) if slots[slot] is None][: len(rows)]
        read = 0
        for slot in free:
            prompt, slots[slot] = rows.pop()
            stale[slot] = not drafting
            read += prompt
        if free:
            spent = took(read * times.read[drafting])
            if guard is not None:
                guard.book_reading(drafting, len(free), read, spent)
        running = [slot for slot in range(num_slots) if slots[slot] is not None]
        if not running:
            return Job(seconds, num_drafted / num_steps)
        extra = 0.0
        if drafting and any(stale[slot] for slot in running):
            extra = took(times.rejoin * sum(stale[slot] for slot in running))
            stale = [False] * num_slots
        pace = tau if drafting else 1.0
        wanted = max(1, num_slots // 16) if rows else len(running)
        left = sorted(math.ceil(slots[slot] / pace) for slot in running)
        steps = min(limit, left[wanted - 1])
        row_steps = tokens = stopped = 0
        for slot in running:
            made = min(steps, math.ceil(slots[slot] / pace))
            emitted = min(slots[slot], made * pace)
            row_steps, tokens = row_steps + made, tokens + emitted
            slots[slot] = slots[slot] - emitted or None
            stopped += slots[slot] is None
        spent = took(steps * times.step[drafting])
        if not drafting:
            stale = [True] * num_slots
        num_steps, num_drafted = num_steps + steps, num_drafted + steps * drafting
        if guard is not None:
            guard.book(
                drafting,
                steps,
                row_steps,
                round(tokens),
                spent,
                extra,
                num_stopped=stopped,
                waiting=bool(rows),
            )


DEARER = Times(step={False: 0.01, True: 0.0364}, read={False: 0.0005, True: 0.0012})
"""Eight rows: steps that draft bring 1.1 times the tokens, and reading for drafts costs as much."""


def both(times: Times, tau: float, num_slots: int, num_rows: int) -> float:
    """Returns the speed-up of a job that always drafts."""
    plain = decode(times, tau, num_slots, num_rows)
    return plain.seconds / decode(times, tau, num_slots, num_rows, always=True).seconds


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_win_do_not_draft_where_reading_loses_it(noise, seed):
    times = DEARER._replace(noise=noise)
    assert 4 * times.step[False] / times.step[True] > 1.09
    assert both(DEARER, 4.0, 8, 256) < 0.97
    guarded = decode(times, 4.0, 8, 256, Guard(most_tokens=200), seed=seed)
    plain = decode(times, 4.0, 8, 256, seed=seed)
    assert guarded.drafted < 0.05
    assert guarded.seconds < plain.seconds / 0.97


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_steps_that_win_by_more_than_reading_costs_draft(noise, num_slots):
    cheap = {False: 0.0005, True: 0.0006}
    times = Times(step={False: 0.01, True: 0.02}, read=cheap, rejoin=0.05, noise=noise)
    assert both(times, 4.0, num_slots, 256) > 1.1
    guarded = decode(times, 4.0, num_slots, 256, Guard(most_tokens=200))
    drafting = decode(times, 4.0, num_slots, 256, always=True)
    assert guarded.drafted > 0.85
    assert guarded.seconds < 1.05 * drafting.seconds


@pytest.mark.parametrize("expected", [None, 0.9])
@pytest.mark.parametrize(
    ("waves", "seed", "least"), [(4, 0, 0.92), (8, 0, 0.95), (16, 0, 0.97), (16, 1, 0.97)]
)
@pytest.mark.parametrize("num_slots", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("step", [0.012, 0.03, 0.036, 0.04, 0.06])
def test_a_guarded_job_is_never_much_slower_than_a_plain_one(
    step, num_slots, waves, seed, least, expected
):
    """At any number of rows: plain steps of more rows take longer, and so do those that draft.

    To find out takes the same time in any job, so in a short one it weighs more.
    """
    rows = 1 + num_slots / 8
    times = Times(
        {False: 0.01 * rows, True: step * rows}, {False: 0.0005, True: 0.0009}, noise=0.03
    )
    num_rows = max(128, waves * num_slots)
    plain = decode(times, 4.0, num_slots, num_rows, seed=seed)
    guard = Guard(GuardSettings(expected=expected), most_tokens=200)
    guarded = decode(times, 4.0, num_slots, num_rows, guard, seed=seed)
    assert guarded.seconds < plain.seconds / least


def test_what_filling_took_is_in_the_speed_up_as_long_as_rows_wait():
    guard = Guard(most_tokens=100)
    for drafting in (True, False):
        guard.book(drafting, 1, 8, 32 if drafting else 8, 1.0)  # warms up
        guard.book(drafting, 10, 80, 320 if drafting else 80, 0.2 if drafting else 0.1)
    assert guard.speedup == pytest.approx(2.0)
    guard.book_reading(True, 8, 800, 0.8)
    guard.book_reading(False, 8, 800, 0.4)
    assert guard.speedup == pytest.approx(2.0)  # nothing waits
    guard.book(False, 10, 80, 80, 0.1, waiting=True)
    plain, drafted = 0.01 / 8 + 0.05 / 100, 0.02 / (8 * 4) + 0.1 / 100
    assert guard.speedup == pytest.approx(plain / drafted)


def test_rows_that_end_say_how_many_tokens_one_reading_serves():
    guard = Guard(most_tokens=1000)
    for drafting in (True, False):
        guard.book(drafting, 1, 4, 4, 1.0)
        guard.book(drafting, 10, 40, 40, 0.1, num_stopped=0, waiting=True)
        guard.book_reading(drafting, 4, 400, 0.2 if drafting else 0.1)
    of_the_longest = guard.speedup
    assert of_the_longest == pytest.approx((0.0025 + 0.025 / 1000) / (0.0025 + 0.05 / 1000))
    guard.book(False, 10, 40, 12, 0.1, num_stopped=4, waiting=True)
    assert guard.speedup < of_the_longest - 0.2


def test_it_goes_on_plainly_until_it_knows_what_hangs_on_it():
    """Drafting wins or loses by what plain rows take to be read, and none was."""
    guard = Guard(most_tokens=100)
    guard.book_reading(True, 8, 800, 0.8)
    while (chunk := guard.choose()).drafting:
        steps = chunk.limit
        guard.book(True, steps, 8 * steps, 32 * steps, 0.034 * steps, waiting=True)
    for _ in range(20):
        drafting, steps = guard.choose()
        assert not drafting
        assert steps <= 10
        guard.book(False, steps, 8 * steps, 8 * steps, 0.01 * steps, waiting=True)
    guard.book_reading(False, 4, 400, 0.39)
    guard.book(False, 10, 80, 80, 0.1, waiting=True)
    assert guard.choose() == (True, 32)  # reading takes as long either way, so steps decide


def test_what_drafts_goes_on_until_it_loses():
    """Rows that change back and forth have their text read again each time."""

    def decided(guard: Guard, seconds: float) -> bool:
        chunks = []
        for _ in range(40):
            drafting, steps = guard.choose()
            chunks.append(drafting)
            took = steps * (seconds if drafting else 0.01)
            guard.book(drafting, steps, 8 * steps, (32 if drafting else 8) * steps, took)
        return sum(chunks[-10:]) > 5  # some may try the other kind

    assert not decided(Guard(), 0.04 / 1.02)
    guard = Guard()
    assert decided(guard, 0.04 / 1.1)
    assert decided(guard, 0.04 / 1.02)
    assert not decided(guard, 0.04 / 0.98)
