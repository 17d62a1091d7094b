"""The suite `batch-guard`: how many rows at once drafting pays for, and what the guard gains."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.harness import Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import GSM8K
from benchmarks.suites.jobs import DRAFTED, DRAFTINGS, NEEDS, Jobs, shipped_jobs
from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.plan import read_in
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, rows_of
from jaxspec.measure.figures import PLAIN
from jaxspec.measure.machine import this_machine
from jaxspec.measure.timing import release_programs
from jaxspec.tuning.plots import check_plots

GUARDED, INFORMED, AGAIN = "guarded", "informed", "plain again"
PLOT = "batch-guard.png"
WAYS = (PLAIN, DRAFTED, GUARDED, INFORMED, AGAIN)
"""Kinds of decoding in the order of a turn; every other turn takes them backwards."""
_GUARD_AIM = 0.97


class GuardSizes(NamedTuple):
    """Sizes of the suite `batch-guard`.

    Attributes:
        sizes: rows at once, as far as there are prompts.
        waves: prompts for each row at once.
        fewest: prompts at any size, if there are as many.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waves: int = 16
    fewest: int = 64

    def num_prompts(self, size: int) -> int:
        """Returns how many prompts a job of `size` rows at once decodes."""
        return max(self.fewest, self.waves * size)


class Spread(NamedTuple):
    """One figure over the turns."""

    middle: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.lowest:.3f}..{self.highest:.3f}]"


class CurvePoint(NamedTuple):
    """Jobs of one number of rows at once.

    Attributes:
        rows: rows at once.
        num_prompts: prompts of each job.
        speeds: tokens per second by way, one for each turn.
        shares: shares of the steps that drafted, likewise.
    """

    rows: int
    num_prompts: int
    speeds: Mapping[str, tuple[float, ...]]
    shares: Mapping[str, tuple[float, ...]]

    def over_plain(self, way: str) -> tuple[float, ...]:
        """Returns tokens per second over plain decoding's of the same turn."""
        pairs = zip(self.speeds[way], self.speeds[PLAIN], strict=True)
        return tuple(speed / plain for speed, plain in pairs)

    def spread(self, way: str) -> Spread:
        """Returns median, lowest and highest of `over_plain`."""
        ratios = self.over_plain(way)
        return Spread(median(ratios), min(ratios), max(ratios))


def measure_curve(jobs: Jobs, sizes: GuardSizes, repeats: int) -> tuple[CurvePoint, ...]:
    """Measures any model and drafter. All jobs have the same capacity."""
    rows = rows_of(jobs.prompts)
    here = [size for size in sizes.sizes if size <= len(rows)]
    capacity = jobs.capacity_for(rows[: max(map(sizes.num_prompts, here))])
    return tuple(
        _point(jobs, rows[: sizes.num_prompts(size)], size, capacity, repeats) for size in here
    )


def _point(jobs: Jobs, rows: Sequence[Row], size: int, capacity: int, repeats: int) -> CurvePoint:
    """Compiles with short jobs, then runs all ways in turns.

    A trend in the course of a turn is reversed in the next one.
    """
    jobs.advance(f"{size} rows at once, compiling")
    of_each_bucket = {read_in(len(row.prompt or ())): row for row in rows}
    for drafting in DRAFTINGS.values():
        jobs.job([*of_each_bucket.values()], size, drafting, capacity=capacity)
    reports: dict[str, list[JobReport]] = {way: [] for way in WAYS}
    for turn in range(repeats):
        for way in reversed(WAYS) if turn % 2 else WAYS:
            jobs.advance(f"{size} rows at once, {way}, turn {turn + 1} of {repeats}")
            guard = GuardSettings(expected=_speedup(reports)) if way == INFORMED else None
            drafting = "never" if way == AGAIN else DRAFTINGS.get(way, "auto")
            reports[way].append(jobs.job(rows, size, drafting, capacity=capacity, guard=guard))
    release_programs()
    return CurvePoint(
        size,
        len(rows),
        {way: tuple(each.tokens_per_second for each in found) for way, found in reports.items()},
        {way: tuple(each.drafted_fraction for each in found) for way, found in reports.items()},
    )


def _speedup(reports: Mapping[str, Sequence[JobReport]]) -> float:
    """Returns the speed-up of drafting in the turns so far; a first turn drafts before it asks."""
    pairs = zip(reports[DRAFTED], reports[PLAIN], strict=True)
    return median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)


def plot_curve(curve: Sequence[CurvePoint], path: Path) -> None:
    """Draws tokens per second by rows at once, and each way over plain decoding.

    Lines are medians of the turns; bars, and the band of plain decoding over itself, reach from the
    lowest to the highest.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    speeds, ratios = figure.subplots(1, 2)
    rows = [point.rows for point in curve]
    for way in (PLAIN, DRAFTED, GUARDED, INFORMED):
        medians = [median(point.speeds[way]) for point in curve]
        (line,) = speeds.plot(rows, medians, marker="o", label=way)
        if way != PLAIN:
            spread = [point.spread(way) for point in curve]
            reach = [
                [each.middle - each.lowest for each in spread],
                [each.highest - each.middle for each in spread],
            ]
            middle, color = [each.middle for each in spread], line.get_color()
            ratios.errorbar(rows, middle, reach, marker="o", capsize=3, color=color, label=way)
    noise = [point.spread(AGAIN) for point in curve]
    lowest, highest = [each.lowest for each in noise], [each.highest for each in noise]
    ratios.fill_between(rows, lowest, highest, color="gray", alpha=0.3, linewidth=0, label="noise")
    ratios.axhline(_GUARD_AIM, linestyle=":", color="gray", label=f"{_GUARD_AIM:g}")
    speeds.set_ylabel("tokens per second")
    ratios.set_ylabel("tokens per second over plain decoding's")
    for axes in (speeds, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(size) for size in rows])
        axes.set_xlabel("rows at once")
        axes.legend()
    figure.savefig(path, dpi=110)


def _measure_guard(run: SuiteRun) -> Page:
    check_plots()
    jobs, sizes = shipped_jobs(run), GuardSizes()
    curve = measure_curve(jobs, sizes, run.repeats)
    return guard_page(curve, jobs.about(), sizes, run.repeats)


def guard_page(curve: Sequence[CurvePoint], about: str, sizes: GuardSizes, repeats: int) -> Page:
    """Returns the page of the suite `batch-guard`, with its picture."""
    noise = [ratio for point in curve for ratio in point.over_plain(AGAIN)]
    text = [
        about,
        "drafted: all steps draft. guarded: the guard decides from the time of its own chunks. "
        "informed: it begins with the speed-up measured so far. noise: plain decoding once more. "
        "Each is tokens per second (emitted over wall time, prompts included, compiling left out) "
        "over those of plain decoding in the same turn: the median of "
        f"{repeats} turn{'s' * (repeats > 1)} [lowest..highest]; every other turn runs backwards. "
        f"steps: share of them that drafted. Each job decodes {sizes.waves} prompts for each row "
        f"at once, and at least {sizes.fewest}, as far as there are that many.",
        f"Slowest over plain: {_slowest(curve, GUARDED)}, {_slowest(curve, INFORMED)} (aim: at "
        f"least {_GUARD_AIM:g}). Noise alone: {min(noise):.3f} to {max(noise):.3f}.",
    ]
    columns = ["rows", "prompts", "plain tokens/s", "noise", DRAFTED, GUARDED, "steps", INFORMED]
    rows = [
        [
            *(str(point.rows), str(point.num_prompts), f"{median(point.speeds[PLAIN]):.0f}"),
            *(str(point.spread(AGAIN)), str(point.spread(DRAFTED))),
            *(str(point.spread(GUARDED)), f"{median(point.shares[GUARDED]):.0%}"),
            *(str(point.spread(INFORMED)), f"{median(point.shares[INFORMED]):.0%}"),
        ]
        for point in curve
    ]
    points = [
        {**point._asdict(), "over_plain": {way: point.over_plain(way) for way in WAYS}}
        for point in curve
    ]
    return Page(
        [Section(text=text, columns=[*columns, "steps"], rows=rows)],
        {"curve": points, "machine": this_machine()},
        plots={PLOT: partial(plot_curve, curve)},
    )


def _slowest(curve: Sequence[CurvePoint], way: str) -> str:
    ratio, rows = min((point.spread(way).middle, point.rows) for point in curve)
    return f"{way} {ratio:.3f} at {rows} row{'s' * (rows > 1)}"


GUARD_SUITES: Mapping[str, Suite] = {
    "batch-guard": Suite(
        title="Where speculation pays, by rows at once",
        about="the guard's speed by rows at once, with a picture",
        measure=_measure_guard,
        prompt_sets=(GSM8K,),
        prompts_per_set=1024,
        repeats=3,
        needs=NEEDS,
    ),
}
