"""The suite of `jaxspec bench --suite batch-guard`: where drafting pays, by rows at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jaxspec.batch.bench import (
    DRAFTED,
    DRAFTINGS,
    PLAIN,
    Advance,
    Bench,
    command_of,
    opening_of,
    shipped_bench,
)
from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.plan import read_in
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, rows_of
from jaxspec.bench.compare import describe
from jaxspec.bench.machine import this_machine
from jaxspec.bench.page import table
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint.files import replacing_files
from jaxspec.trees.plots import check_plots

PLOT = "batch.png"
GUARDED, INFORMED, AGAIN = "guarded", "informed", "plain again"
WAYS = (PLAIN, DRAFTED, GUARDED, INFORMED, AGAIN)
"""In the order of a turn; every other turn takes them backwards."""
_TITLE = "Where speculation pays, by rows at once"
_AIM = 0.97


class GuardSuite(NamedTuple):
    """How much is measured.

    prompts_per_set: prompts at most; the first of them are what fewer rows decode.
    max_new_tokens: of every prompt, at most.
    sizes: rows at once, as far as there are prompts.
    waves: prompts for each row at once.
    fewest: prompts at any size, if there are as many.
    """

    prompts_per_set: int = 1024
    max_new_tokens: int = 128
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waves: int = 16
    fewest: int = 64

    def num_prompts(self, size: int) -> int:
        """What a job with so many rows at once decodes."""
        return max(self.fewest, self.waves * size)


GUARD_SUITES = {"batch-guard": GuardSuite()}


class CurvePoint(NamedTuple):
    """Jobs with so many rows at once.

    rows: at once.
    num_prompts: of each job.
    speeds: tokens per second by way, one for each turn.
    shares: of the steps that drafted, as `speeds`.
    """

    rows: int
    num_prompts: int
    speeds: Mapping[str, tuple[float, ...]]
    shares: Mapping[str, tuple[float, ...]]

    def over_plain(self, way: str) -> tuple[float, ...]:
        """Tokens per second over plain decoding's of the same turn."""
        pairs = zip(self.speeds[way], self.speeds[PLAIN], strict=True)
        return tuple(speed / plain for speed, plain in pairs)


class GuardFigures(NamedTuple):
    """All that the suite measures."""

    suite: GuardSuite
    repeats: int
    drafter: str
    num_prompts: int
    curve: tuple[CurvePoint, ...]


def measure_guard_suite(
    suite: GuardSuite, data_folder: Path, repeats: int, advance: Advance | None = None
) -> tuple[GuardFigures, str]:
    """Measures the shipped target with its head.

    Args:
        suite: how much of it.
        data_folder: where the prompts are; they are read in place.
        repeats: turns, in each of which every way runs.
        advance: told what is measured next; `None` prints it on standard error.

    Returns:
        The figures, and their part of the page.

    Raises:
        ValueError: a number is below 1, or the data, the model or its head are missing.
    """
    bench = shipped_bench(
        "batch-guard", data_folder, suite.prompts_per_set, suite.max_new_tokens, repeats, advance
    )
    figures = measure_curve(bench, suite, repeats)
    return figures, as_markdown(figures)


def measure_curve(bench: Bench, suite: GuardSuite, repeats: int) -> GuardFigures:
    """Measures any model and drafter. All jobs have the same slots."""
    rows = rows_of(bench.prompts)
    sizes = [size for size in suite.sizes if size <= len(rows)]
    slots = bench.slots_for(rows[: max(map(suite.num_prompts, sizes))])
    curve = tuple(
        _point(bench, rows[: suite.num_prompts(size)], size, slots, repeats) for size in sizes
    )
    return GuardFigures(suite, repeats, describe(bench.drafter), len(rows), curve)


def _point(bench: Bench, rows: Sequence[Row], size: int, slots: int, repeats: int) -> CurvePoint:
    """First, short jobs compile; then all ways run in turns.

    What grows slower or faster in the course of a turn does so the other way round in the next.
    """
    bench.advance(f"{size} rows at once, compiling")
    of_each_bucket = {read_in(len(row.prompt or ())): row for row in rows}
    for drafting in DRAFTINGS.values():
        bench.job([*of_each_bucket.values()], size, drafting, slots=slots)
    reports: dict[str, list[JobReport]] = {way: [] for way in WAYS}
    for turn in range(repeats):
        for way in reversed(WAYS) if turn % 2 else WAYS:
            bench.advance(f"{size} rows at once, {way}, turn {turn + 1} of {repeats}")
            guard = GuardSettings(expected=_speedup(reports)) if way == INFORMED else None
            drafting = "never" if way == AGAIN else DRAFTINGS.get(way, "auto")
            reports[way].append(bench.job(rows, size, drafting, guard=guard, slots=slots))
    release_programs()
    return CurvePoint(
        size,
        len(rows),
        {way: tuple(each.tokens_per_second for each in found) for way, found in reports.items()},
        {way: tuple(each.drafted_fraction for each in found) for way, found in reports.items()},
    )


def _speedup(reports: Mapping[str, Sequence[JobReport]]) -> float:
    """Of drafting, by the turns so far; the first turn drafts before it asks."""
    return median(
        drafted.tokens_per_second / plain.tokens_per_second
        for drafted, plain in zip(reports[DRAFTED], reports[PLAIN], strict=True)
    )


def plot_place(page: Path) -> Path:
    """Where the picture goes: the folder `docs` beside the page's folder, or that folder."""
    docs = page.resolve().parent.parent / "docs"
    return (docs if docs.is_dir() else page.parent) / PLOT


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
            spread = [_spread(point.over_plain(way)) for point in curve]
            middle = [each.middle for each in spread]
            reach = [
                [each.middle - each.lowest for each in spread],
                [each.highest - each.middle for each in spread],
            ]
            ratios.errorbar(
                rows, middle, reach, marker="o", capsize=3, color=line.get_color(), label=way
            )
    noise = [_spread(point.over_plain(AGAIN)) for point in curve]
    lowest, highest = [each.lowest for each in noise], [each.highest for each in noise]
    ratios.fill_between(rows, lowest, highest, color="gray", alpha=0.3, linewidth=0, label="noise")
    ratios.axhline(_AIM, linestyle=":", color="gray", label=f"{_AIM:g}")
    speeds.set_ylabel("tokens per second")
    ratios.set_ylabel("tokens per second over plain decoding's")
    for axes in (speeds, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(size) for size in rows])
        axes.set_xlabel("rows at once")
        axes.legend()
    with replacing_files(path.parent) as folder:
        figure.savefig(folder / path.name, dpi=110)


class _Spread(NamedTuple):
    """Of one figure over the turns."""

    middle: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.lowest:.3f}..{self.highest:.3f}]"


def _spread(values: Sequence[float]) -> _Spread:
    return _Spread(median(values), min(values), max(values))


def _command_of(figures: GuardFigures) -> str:
    return command_of("batch-guard", figures.suite.prompts_per_set, figures.repeats)


def as_markdown(figures: GuardFigures) -> str:
    """The whole part of the page."""
    suite = figures.suite
    noise = [ratio for point in figures.curve for ratio in point.over_plain(AGAIN)]
    parts = [
        *opening_of(
            _TITLE,
            _command_of(figures),
            figures.num_prompts,
            suite.max_new_tokens,
            figures.drafter,
        ),
        "drafted: all steps draft. guarded: the guard decides from the time of its own chunks. "
        "informed: it begins with the speed-up measured so far. noise: plain decoding once more. "
        "Each is tokens per second (emitted over wall time, prompts included, compiling left out) "
        "over those of plain decoding in the same turn: the median of "
        f"{figures.repeats} turn{'s' * (figures.repeats > 1)} [lowest..highest]; every other turn "
        "runs backwards. steps: share of them that drafted. Each job decodes "
        f"{suite.waves} prompts for each row at once, and {suite.fewest} at the fewest, as far as "
        "there are so many.",
        f"Slowest over plain: {_slowest(figures.curve, GUARDED)}, "
        f"{_slowest(figures.curve, INFORMED)} (aim: at least {_AIM:g}). "
        f"Noise alone: {min(noise):.3f} to {max(noise):.3f}.",
        _curve_table(figures.curve),
    ]
    return "\n\n".join(parts) + "\n"


def _slowest(curve: Sequence[CurvePoint], way: str) -> str:
    ratio, rows = min((median(point.over_plain(way)), point.rows) for point in curve)
    return f"{way} {ratio:.3f} at {rows} row{'s' * (rows > 1)}"


def _curve_table(curve: Sequence[CurvePoint]) -> str:
    def cells(point: CurvePoint) -> list[str]:
        def over_plain(way: str) -> str:
            return str(_spread(point.over_plain(way)))

        return [
            *(str(point.rows), str(point.num_prompts), f"{median(point.speeds[PLAIN]):.0f}"),
            *(over_plain(AGAIN), over_plain(DRAFTED)),
            *(over_plain(GUARDED), f"{median(point.shares[GUARDED]):.0%}"),
            *(over_plain(INFORMED), f"{median(point.shares[INFORMED]):.0%}"),
        ]

    columns = ["rows", "prompts", "plain tokens/s", "noise", DRAFTED, GUARDED, "steps", INFORMED]
    return table([*columns, "steps"], [cells(point) for point in curve])


def as_dict(figures: GuardFigures) -> dict[str, Any]:
    """Every figure, ready for JSON."""
    return {
        "suite": "batch-guard",
        "command": _command_of(figures),
        "machine": this_machine()._asdict(),
        "drafter": figures.drafter,
        "num_prompts": figures.num_prompts,
        "curve": [
            {
                "rows": point.rows,
                "num_prompts": point.num_prompts,
                "ways": {
                    way: {
                        "tokens_per_second": point.speeds[way],
                        "over_plain": point.over_plain(way),
                        "drafted_fraction": point.shares[way],
                    }
                    for way in WAYS
                },
            }
            for point in figures.curve
        ],
    }
