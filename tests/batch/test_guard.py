"""The guard on made-up clocks: it drafts where that is faster, and finding out costs little."""

import math
import random

import pytest

from jaxspec.batch import Guard, GuardSettings


def simulate(
    step_seconds: dict[bool, float],
    tau: float,
    total_tokens: int,
    rows: int = 8,
    noise: float = 0.0,
    rejoin_seconds: float = 0.0,
    settings: GuardSettings | None = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Seconds of a guarded job over those of a plain one, and the share of tokens drafted.

    The guard sees times with noise; the seconds are without.
    """
    rng = random.Random(seed)
    guard = Guard(settings, longest=32)
    seconds, tokens, drafted, stale = 0.0, 0.0, 0.0, False
    first = {True: 10.0, False: 10.0}
    while tokens < total_tokens:
        chunk = guard.choose()
        steps = rng.randint(min(1, chunk.limit), chunk.limit)
        factor = rng.lognormvariate(0, noise) if noise else 1.0
        # A loop's first step takes ten times as long.
        took = (steps - 1 + first[chunk.drafting]) * step_seconds[chunk.drafting] if steps else 0.0
        first[chunk.drafting] = 1.0
        emitted = steps * rows * (tau if chunk.drafting else 1.0)
        extra = rejoin_seconds if chunk.drafting and stale else 0.0
        stale = not chunk.drafting
        guard.book(chunk.drafting, steps, steps * rows, round(emitted), took * factor, extra)
        seconds, tokens = seconds + took + extra, tokens + emitted
        drafted += emitted * chunk.drafting
    return seconds / (total_tokens / rows * step_seconds[False]), drafted / tokens


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("slower", [0.3, 0.6, 0.8, 0.95])
def test_where_drafting_loses_the_job_takes_hardly_longer(slower, noise):
    times = {False: 0.01, True: 0.01 * 2 / slower}
    ratio, drafted = simulate(times, 2.0, 100_000, noise=noise, rejoin_seconds=0.3)
    assert ratio < 1 / 0.97
    assert drafted < 0.05


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("faster", [1.15, 1.5, 2.5])
def test_where_drafting_wins_the_job_drafts(faster, noise):
    times = {False: 0.01, True: 0.01 * 3 / faster}
    ratio, drafted = simulate(times, 3.0, 100_000, noise=noise, rejoin_seconds=0.3)
    assert drafted > 0.9
    assert ratio < 1.06 / faster


def test_noise_alone_never_drafts_for_long():
    for seed in range(5):
        ratio, _ = simulate({False: 0.01, True: 0.02}, 2.0, 50_000, noise=0.15, seed=seed)
        assert ratio < 1 / 0.97


@pytest.mark.parametrize("ratio", [0.98, 1.0, 1.03, 1.06])
def test_close_calls_do_not_make_it_change_all_the_time(ratio):
    """Each return to drafts costs thirty steps here."""
    for seed in range(5):
        times = {False: 0.01, True: 0.01 * 2 / ratio}
        slower, _ = simulate(times, 2.0, 50_000, noise=0.05, rejoin_seconds=0.3, seed=seed)
        assert slower < 1 / 0.97


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("ratio", [0.9, 1.25])
def test_chunks_of_few_steps_do_not_mislead_it(rows, ratio):
    """A chunk takes as long as three plain steps besides its own, and each stop of a row ends one.

    A row stops after every 100 tokens that the batch emits.
    """
    once, tau, tokens = 3.0, 3.8, 100

    def num_chunks(emitted: float) -> float:
        """Chunks in which the batch emits 100 tokens, with 32 steps at most."""
        return 1 / (1 - math.exp(-32 * emitted / tokens))

    plain = once * num_chunks(rows) + tokens / rows
    drafted = (plain / ratio - once * num_chunks(rows * tau)) * rows * tau / tokens
    right = 0
    for seed in range(10):
        rng, guard = random.Random(seed), Guard(GuardSettings(probe_seconds=200.0))
        for _ in range(200):
            drafting, limit = guard.choose()
            emitted = rows * (tau if drafting else 1.0)
            steps = min(limit, math.ceil(rng.expovariate(1 / tokens) / emitted))
            took = (once + steps * (drafted if drafting else 1.0)) * rng.lognormvariate(0, 0.1)
            guard.book(drafting, steps, steps * rows, round(steps * emitted), took)
        right += guard.choose().drafting == (ratio > 1)
    assert right >= 9


def test_a_curve_that_denies_drafting_is_believed_from_the_first_step():
    assert not Guard(GuardSettings(expected=0.7)).choose().drafting
    assert not Guard(GuardSettings(expected=1.02)).choose().drafting
    assert Guard(GuardSettings(expected=1.1)).choose() == (True, 32)
    times = {False: 0.05, True: 0.3}
    ratio, drafted = simulate(times, 2.0, 3000, settings=GuardSettings(expected=0.7))
    assert drafted == 0
    assert ratio < 1.2  # the warm-up of the first step, of 375


def test_it_changes_its_mind_when_the_text_does():
    guard = Guard()
    for tau, seconds in ((3.0, 60.0), (1.0, 60.0), (3.0, 600.0)):
        clock = 0.0
        while clock < seconds:
            chunk = guard.choose()
            took = chunk.limit * (0.02 if chunk.drafting else 0.01)
            emitted = round(chunk.limit * 8 * (tau if chunk.drafting else 1))
            guard.book(chunk.drafting, chunk.limit, chunk.limit * 8, emitted, took)
            clock += took
        assert guard.choose().drafting == (tau > 2)


def test_many_samples_are_enough_some_day():
    """Chunks that are forgotten meanwhile must leave as many as are asked for."""
    guard = Guard(GuardSettings(samples=40))
    for _ in range(200):
        drafting, limit = guard.choose()
        guard.book(drafting, limit, limit, limit * (3 if drafting else 1), limit * 0.01)
    assert guard.choose() == (True, 32)


def test_a_first_probe_after_an_expected_speedup_compares_alike():
    """Chunks of two steps take as much once as for their steps; drafting loses by a tenth."""
    guard = Guard(GuardSettings(expected=0.8))
    for _ in range(4000):
        drafting, limit = guard.choose()
        steps = min(limit, 2)
        took = 0.02 + steps * (0.033 if drafting else 0.01)
        guard.book(drafting, steps, 8 * steps, 8 * steps * (3 if drafting else 1), took)
    assert not guard.choose().drafting
    assert guard.speedup == pytest.approx(3 / 3.3, rel=0.02)


def test_the_first_steps_time_is_not_believed():
    guard = Guard()
    assert guard.choose() == (True, 1)
    guard.book(True, 1, 8, 24, 100.0)
    assert guard.speedup is None
    while guard.speedup is None:
        chunk = guard.choose()
        tau = 3 if chunk.drafting else 1
        guard.book(chunk.drafting, chunk.limit, chunk.limit, chunk.limit * tau, chunk.limit * 0.01)
    assert guard.speedup == pytest.approx(3.0)


@pytest.mark.parametrize(
    "wrong",
    [{"margin": -0.1}, {"samples": 0}, {"probe_seconds": 0}, {"probe_share": 1}, {"expected": 0}],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match="must be"):
        GuardSettings(**wrong)


def test_plain_steps_that_fill_in_several_tokens_count_them():
    """Steps with drafts emit no more tokens than plain ones here, and take longer."""
    guard = Guard(GuardSettings(probe_seconds=0.01))
    for _ in range(60):
        chunk = guard.choose()
        seconds = 0.001 * chunk.limit * (1.5 if chunk.drafting else 1.0)
        guard.book(chunk.drafting, chunk.limit, chunk.limit, 4 * chunk.limit, seconds)
    assert guard.speedup == pytest.approx(1 / 1.5, rel=0.1)
    assert not guard.choose().drafting
