"""The suite of `jaxspec bench --suite batch`: what decoding files brings, measured."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.job import Drafting, run
from jaxspec.batch.plan import round_up, slots_needed
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, rows_of
from jaxspec.batch.writer import Collector
from jaxspec.bench.compare import describe, divergence_of
from jaxspec.bench.comparison import TIE_GAP, Divergence
from jaxspec.bench.machine import this_machine
from jaxspec.bench.page import bullets, table
from jaxspec.bench.results import MADE_BY
from jaxspec.bench.shipped import EAGLE_HEAD, MADE_FOR, PromptSet, first_that_fit, read_prompt_set
from jaxspec.bench.table import divergence_lines
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import Model, load, load_eagle, shipped_heads, shipped_models
from jaxspec.checkpoint.files import replacing_files
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.generation import GenerationConfig, encode_prompt, generate
from jaxspec.trees import tree_of_head

Advance = Callable[[str], None]
PLOT = "batch.png"
_TITLE = "Decoding files of prompts"
_PLAIN, _DRAFTED = "plain", "drafted"
_AIMS = {"refill": 1.3, "rows": 6.0, "host": 0.03, "memory": 1.1, "guard": 0.97}


class BatchSuite(NamedTuple):
    """How much is measured.

    prompts_per_set: prompts of the comparison with fixed batches.
    max_new_tokens: of every prompt, at most.
    batch: rows at once where that is not what is measured.
    rows_of_one: prompts decoded one at a time, for the ratio of `batch` rows to one.
    hashed: prompts whose outputs are compared in all ways.
    devices: virtual ones, which another process divides the rows over.
    sizes: rows at once of the guard's curve, as far as there are prompts.
    waves: prompts for each row at once there.
    fewest: prompts at the fewest there.
    """

    prompts_per_set: int = 1319
    prompt_set: PromptSet = PromptSet("GSM8K", "gsm8k/test.jsonl.gz", "{question}\n")
    max_new_tokens: int = 128
    batch: int = 32
    rows_of_one: int = 16
    hashed: int = 256
    devices: int = 8
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    waves: int = 4
    fewest: int = 24


BATCH_SUITES = {"batch": BatchSuite()}


class Speed(NamedTuple):
    """Fixed batches and refilled slots, of one way to decode.

    fixed: tokens per second of `generate`, batch by batch.
    refilled: what `run` reports.
    """

    fixed: float
    refilled: JobReport

    @property
    def ratio(self) -> float:
        return self.refilled.tokens_per_second / self.fixed


class CurvePoint(NamedTuple):
    """Tokens per second with so many rows at once.

    plain, drafted: all steps so.
    guarded: the guard decides, without knowing anything.
    informed: it begins with what this curve says, `drafted / plain`.
    guarded_share, informed_share: of steps that drafted.
    """

    rows: int
    plain: float
    drafted: float
    guarded: float
    informed: float
    guarded_share: float
    informed_share: float

    @property
    def speedup(self) -> float:
        return self.drafted / self.plain


class Way(NamedTuple):
    """Outputs of one way to run the same job.

    digest: of all tokens, in the order of lines.
    divergences: where rows leave those of the first way.
    """

    name: str
    digest: str
    divergences: tuple[Divergence, ...]


class BatchFigures(NamedTuple):
    """All that the suite measures.

    speeds: by way to decode.
    one: tokens per second of one row at a time, by way to decode.
    many: of `batch` rows, the same prompts' neighbours.
    """

    suite: BatchSuite
    repeats: int
    drafter: str
    num_prompts: int
    speeds: Mapping[str, Speed]
    one: Mapping[str, float]
    many: Mapping[str, float]
    ways: tuple[Way, ...]
    curve: tuple[CurvePoint, ...]

    @property
    def as_it_should(self) -> bool:
        """False if an output differs by more than a tie."""
        return all(each.is_tie for way in self.ways for each in way.divergences)


def measure_batch_suite(
    suite: BatchSuite, data_folder: Path, repeats: int, advance: Advance | None = None
) -> tuple[BatchFigures, str]:
    """Measures the shipped target with its head.

    Args:
        suite: how much of it.
        data_folder: where the prompts are; they are read in place.
        repeats: timed runs of each, in turns; medians count.
        advance: told what is measured next; `None` prints it on standard error.

    Returns:
        The figures, and their part of the page.

    Raises:
        ValueError: a number is below 1, or the data, the model or its head are missing.
    """
    for name, value in (("prompts_per_set", suite.prompts_per_set), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if MADE_FOR not in shipped_models() or EAGLE_HEAD not in shipped_heads():
        raise ValueError(
            f"Suite 'batch' measures {MADE_FOR} with the head {EAGLE_HEAD}, which are in "
            "checkpoints/ of the repository, and not here."
        )
    model = load(MADE_FOR)
    drafter = Eagle.of(load_eagle(EAGLE_HEAD, model.network), tree_of_head(EAGLE_HEAD))
    prompts = first_that_fit(
        read_prompt_set(suite.prompt_set, data_folder),
        model,
        suite.max_new_tokens,
        suite.prompts_per_set,
    )
    ids = [encode_prompt(model, prompt.text) for prompt in prompts]
    flags = ("--model", MADE_FOR, "--drafter", f"eagle:head={EAGLE_HEAD}")
    figures = measure_batches(model, drafter, ids, suite, repeats, advance or _say, flags)
    return figures, as_markdown(figures)


def _say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)


def measure_batches(
    model: Model,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    suite: BatchSuite,
    repeats: int,
    advance: Advance,
    flags: Sequence[str],
) -> BatchFigures:
    """Measures any model and drafter on prompts given as ids.

    `flags` give the same two to `jaxspec batch`, for a process of its own.
    """
    bench = _Bench(model, drafter, suite, repeats, advance, flags)
    rows = rows_of(prompts)
    return BatchFigures(
        suite=suite,
        repeats=repeats,
        drafter=describe(drafter),
        num_prompts=len(prompts),
        curve=tuple(bench.point(rows, size) for size in suite.sizes if size <= len(rows)),
        ways=bench.ways(rows[: suite.hashed]),
        one=bench.speeds(rows[: suite.rows_of_one], 1),
        many=bench.speeds(rows[: suite.waves * suite.batch], suite.batch),
        speeds={name: bench.refill(rows, prompts, name) for name in (_PLAIN, _DRAFTED)},
    )


class _Bench(NamedTuple):
    """What all measurements share."""

    model: Model
    drafter: LoadedDrafter
    suite: BatchSuite
    repeats: int
    advance: Advance
    flags: Sequence[str]

    @property
    def config(self) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=self.suite.max_new_tokens)

    def job(
        self,
        rows: Sequence[Row],
        batch: int,
        drafting: Drafting,
        output: Collector | None = None,
        **settings: Any,
    ) -> JobReport:
        return run(
            self.model,
            rows,
            output or Collector(),
            self.config,
            self.drafter,
            batch=batch,
            drafting=drafting,
            **settings,
        )

    def slots(self, rows: Sequence[Row]) -> int:
        """What holds each of these rows."""
        longest = max(len(row.prompt or ()) for row in rows)
        config, depth = self.model.config, self.drafter.drafter.tree_shape[1]
        needed = slots_needed(longest, self.suite.max_new_tokens, config.max_positions, depth)
        return round_up(needed)

    def refill(self, rows: Sequence[Row], prompts: Sequence[Sequence[int]], name: str) -> Speed:
        """Fixed batches in the order of the file against refilled slots, in turns."""
        size = self.suite.batch
        drafter = self.drafter if name == _DRAFTED else None
        batches = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        fixed, reports = [], []
        for turn in range(self.repeats):
            tokens, seconds = 0, 0.0
            for number, batch in enumerate(batches):
                if number % 10 == 0:
                    done = f"{number * size} of {len(prompts)} prompts"
                    self.advance(f"fixed batches, {name}, turn {turn + 1}: {done}")
                metrics = generate(self.model, batch, self.config, drafter).metrics
                tokens += metrics.num_tokens
                seconds += metrics.seconds or 0.0
            fixed.append(tokens / seconds)
            self.advance(f"refilled slots, {name}, turn {turn + 1}")
            reports.append(self.job(rows, size, _always(name)))
        release_programs()
        reports.sort(key=lambda report: report.tokens_per_second)
        return Speed(float(np.median(fixed)), reports[len(reports) // 2])

    def speeds(self, rows: Sequence[Row], batch: int) -> dict[str, float]:
        """Tokens per second with so many rows at once."""
        found = {_PLAIN: [], _DRAFTED: []}
        for turn in range(self.repeats + 1):
            for name, figures in found.items():
                self.advance(f"{batch} rows at once, {name}, turn {turn}")
                # A first job warms up: the speed of one row at a time is that of a short run.
                report = self.job(rows if turn else rows[: 2 * batch], batch, _always(name))
                if turn:
                    figures.append(report.tokens_per_second)
        return {name: float(np.median(figures)) for name, figures in found.items()}

    def ways(self, rows: Sequence[Row]) -> tuple[Way, ...]:
        """Decodes the same rows in every way that must not matter."""
        shuffled = list(rows)
        random.Random(0).shuffle(shuffled)
        small, large = max(1, self.suite.batch // 4), self.suite.batch
        found: dict[str, dict[int, list[int]]] = {}

        def way(name: str, rows: Sequence[Row], batch: int, drafting: Drafting) -> None:
            self.advance(f"outputs: {name}")
            output = Collector()
            self.job(rows, batch, drafting, output=output)
            found[name] = _tokens_by_line(output.records)

        way(f"{small} rows at once, plain", rows, small, "never")
        for size in (1, small, large):
            way(f"{size} row{'s' * (size > 1)} at once, drafted", rows, size, "always")
        way("shuffled, drafted", shuffled, large, "always")
        way("guarded", rows, large, "auto")
        for name, decode in (
            ("stopped on the way and resumed, drafted", self._resumed),
            (f"on {self.suite.devices} virtual devices, drafted", self._on_devices),
        ):
            self.advance(f"outputs: {name}")
            found[name] = decode(rows)
        first = next(iter(found.values()))
        return tuple(
            Way(name, _digest(by_line), self._divergences(rows, first, by_line))
            for name, by_line in found.items()
        )

    def _resumed(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Stopped once a quarter of the records is there."""
        output, size = Collector(), self.suite.batch
        enough = max(1, len(rows) // 4)
        self.job(
            rows, size, "always", output=output, should_stop=lambda: len(output.records) >= enough
        )
        self.job(rows, size, "always", output=output)
        return _tokens_by_line(output.records)

    def _on_devices(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """What `jaxspec batch` writes in a process that sees several devices."""
        count = self.suite.devices
        flag = f"--xla_force_host_platform_device_count={count}"
        settings = {
            "--mesh": f"data={count}",
            "--batch": self.suite.batch,
            "--drafting": "always",
            "--max-new-tokens": self.suite.max_new_tokens,
        }
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
            lines = (json.dumps({"tokens": list(row.prompt or ())}) + "\n" for row in rows)
            source.write_text("".join(lines))
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "jaxspec", "batch", source, out, *self.flags),
                    *(str(word) for pair in settings.items() for word in pair),
                ],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise ValueError(f"A job on {count} virtual devices failed:\n{done.stderr}")
            records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        return _tokens_by_line(records)

    def _divergences(
        self, rows: Sequence[Row], plain: Mapping[int, list[int]], other: Mapping[int, list[int]]
    ) -> tuple[Divergence, ...]:
        found = [
            divergence_of(
                self.model,
                row.line - 1,
                np.asarray(row.prompt),
                np.asarray(plain[row.line]),
                np.asarray(other[row.line]),
            )
            for row in rows
            if plain[row.line] != other[row.line]
        ]
        return tuple(divergence for divergence in found if divergence is not None)

    def point(self, rows: Sequence[Row], size: int) -> CurvePoint:
        """One point of the guard's curve; a first, short job of each kind compiles.

        All points have the same slots, and the smaller ones the first of the rows.
        """
        slots = self.slots(rows[: max(map(self._num_rows, self.suite.sizes))])
        rows = rows[: self._num_rows(size)]
        speeds = {name: [] for name in ("plain", "drafted", "guarded", "informed")}
        shares = dict.fromkeys(speeds, 0.0)
        self.advance(f"guard, {size} rows at once, compiling")
        for drafting in _KINDS.values():
            self.job(rows[:size], size, drafting, slots=slots)
        for turn in range(self.repeats):
            for name, figures in speeds.items():
                self.advance(f"guard, {size} rows at once, {name}, turn {turn + 1}")
                guard = None
                if name == "informed":
                    ratio = np.median(speeds["drafted"]) / np.median(speeds["plain"])
                    guard = GuardSettings(expected=float(ratio))
                drafting = _KINDS.get(name, "auto")
                report = self.job(rows, size, drafting, guard=guard, slots=slots)
                figures.append(report.tokens_per_second)
                shares[name] = report.drafted_fraction
        release_programs()
        medians = {name: float(np.median(figures)) for name, figures in speeds.items()}
        return CurvePoint(
            size,
            **medians,
            guarded_share=shares["guarded"],
            informed_share=shares["informed"],
        )

    def _num_rows(self, size: int) -> int:
        return max(self.suite.fewest, self.suite.waves * size)


_KINDS: dict[str, Drafting] = {"plain": "never", "drafted": "always"}


def _always(name: str) -> Drafting:
    return _KINDS[name]


def _tokens_by_line(records: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    return {record["line"]: record["tokens"] for record in records}


def _digest(tokens: Mapping[int, list[int]]) -> str:
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def plot_place(page: Path) -> Path:
    """Where the picture goes: the folder `docs` beside the page's folder, or that folder."""
    docs = page.resolve().parent.parent / "docs"
    return (docs if docs.is_dir() else page.parent) / PLOT


def plot_curve(curve: Sequence[CurvePoint], path: Path) -> None:
    """Draws tokens per second by rows at once, and what the guard makes of plain decoding.

    Raises:
        ValueError: matplotlib is not installed.
    """
    from jaxspec.trees.plots import check_plots

    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    speeds, ratios = figure.subplots(1, 2)
    rows = [point.rows for point in curve]
    for name in ("plain", "drafted", "guarded", "informed"):
        values = [getattr(point, name) for point in curve]
        speeds.plot(rows, values, marker="o", label=name)
        if name != "plain":
            over = [value / point.plain for value, point in zip(values, curve, strict=True)]
            ratios.plot(rows, over, marker="o", label=name)
    ratios.axhline(_AIMS["guard"], linestyle=":", color="gray", label=f"{_AIMS['guard']:g}")
    speeds.set_ylabel("tokens per second")
    ratios.set_ylabel("tokens per second over plain decoding's")
    for axes in (speeds, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(size) for size in rows])
        axes.set_xlabel("rows at once")
        axes.legend()
    with replacing_files(path.parent) as folder:
        figure.savefig(folder / path.name, dpi=110)


def command_of(figures: BatchFigures) -> str:
    """What to type to measure this again."""
    return (
        f"jaxspec bench --suite batch --prompts-per-set {figures.suite.prompts_per_set} "
        f"--repeats {figures.repeats}"
    )


def as_markdown(figures: BatchFigures) -> str:
    """The whole part of the page."""
    suite = figures.suite
    digests = {way.digest for way in figures.ways}
    divergences = [
        line for way in figures.ways for line in divergence_lines(way.name, way.divergences)
    ]
    slowest = min(figures.curve, key=lambda point: point.informed / point.plain)
    alone = min(figures.curve, key=lambda point: point.guarded / point.plain)
    parts = [
        f"# {_TITLE}\n\n{MADE_BY}\n    {command_of(figures)}",
        f"{MADE_FOR}, {figures.num_prompts} prompts of {suite.prompt_set.category}, greedy, up to "
        f"{suite.max_new_tokens} new tokens, ended by the model's own end tokens, float32. "
        f"Drafted: `{figures.drafter}`. {this_machine()}.",
        f"## Refilled slots against fixed batches, {suite.batch} rows at once",
        "Fixed: `generate`, batch by batch in the order of the file. tokens/s: emitted over wall "
        "time, prompts included, compiling left out. idle: share of the slots' steps without a "
        "running row. host: share of the time in which the device waited for the host. tau: tokens "
        "per target pass of a row, bonus token INCLUDED.",
        _speeds_table(figures),
        f"## {suite.batch} rows over one",
        table(
            ["", "one row, tokens/s", f"{suite.batch} rows, tokens/s", "ratio", "aim"],
            [
                [
                    name,
                    f"{figures.one[name]:.0f}",
                    f"{figures.many[name]:.0f}",
                    f"{figures.many[name] / figures.one[name]:.2f}",
                    f"{_AIMS['rows']:g}",
                ]
                for name in figures.one
            ],
        ),
        "## The same outputs",
        f"{min(suite.hashed, figures.num_prompts)} prompts in {len(figures.ways)} ways: "
        f"{len(digests)} hash{'' if len(digests) == 1 else 'es'} of all tokens. Where rows part "
        f"from the first way's, the gap is listed: a tie lies below {TIE_GAP:g}.",
        table(
            ["way", "hash", "rows that part", "ties of them"],
            [
                [
                    way.name,
                    f"`{way.digest}`",
                    str(len(way.divergences)),
                    str(sum(each.is_tie for each in way.divergences)),
                ]
                for way in figures.ways
            ],
        ),
        *([bullets(*divergences)] if divergences else []),
        "## Where speculation pays, by rows at once",
        "plain, drafted: all steps so. guarded: the guard decides from the time of its own chunks. "
        "informed: it begins with this curve's speed-up. In brackets the share of steps that "
        f"drafted. Slowest over plain: informed {slowest.informed / slowest.plain:.3f} at "
        f"{slowest.rows} rows, guarded {alone.guarded / alone.plain:.3f} at {alone.rows} rows "
        f"(aim: at least {_AIMS['guard']:g}).",
        _curve_table(figures.curve),
    ]
    return "\n\n".join(parts) + "\n"


def _speeds_table(figures: BatchFigures) -> str:
    def cells(name: str, speed: Speed) -> list[str]:
        report = speed.refilled
        held, foretold = report.state_bytes_held, report.state_bytes_foretold
        return [
            name,
            f"{speed.fixed:.0f}",
            f"{report.tokens_per_second:.0f}",
            f"{speed.ratio:.2f}",
            f"{report.idle_fraction:.1%}",
            f"{report.host_fraction:.1%}",
            f"{report.tau:.2f}",
            f"{held / 1e6:.1f} MB, {held / foretold:.3f}",
        ]

    columns = ["", "fixed tokens/s", "refilled tokens/s", f"ratio (aim {_AIMS['refill']:g})"]
    columns += ["idle", f"host (aim {_AIMS['host']:.0%})", "tau"]
    columns += [f"states, over what was foretold (aim {_AIMS['memory']:g})"]
    return table(columns, [cells(name, speed) for name, speed in figures.speeds.items()])


def _curve_table(curve: Sequence[CurvePoint]) -> str:
    def cells(point: CurvePoint) -> list[str]:
        return [
            str(point.rows),
            f"{point.plain:.0f}",
            f"{point.drafted:.0f}",
            f"{point.speedup:.2f}",
            f"{point.guarded:.0f} [{point.guarded_share:.0%}]",
            f"{point.guarded / point.plain:.3f}",
            f"{point.informed:.0f} [{point.informed_share:.0%}]",
            f"{point.informed / point.plain:.3f}",
        ]

    columns = ["rows", "plain", "drafted", "over plain", "guarded", "over plain", "informed"]
    return table([*columns, "over plain"], [cells(point) for point in curve])


def as_dict(figures: BatchFigures) -> dict[str, Any]:
    """Every figure, ready for JSON."""
    return {
        "suite": "batch",
        "command": command_of(figures),
        "machine": this_machine()._asdict(),
        "drafter": figures.drafter,
        "num_prompts": figures.num_prompts,
        "outputs_agree": figures.as_it_should,
        "refill": {
            name: {
                "fixed_tokens_per_second": speed.fixed,
                "ratio": speed.ratio,
                "refilled": speed.refilled.as_dict(),
            }
            for name, speed in figures.speeds.items()
        },
        "one_row_tokens_per_second": dict(figures.one),
        "many_rows_tokens_per_second": dict(figures.many),
        "ways": [
            {
                "name": way.name,
                "digest": way.digest,
                "divergences": [each._asdict() for each in way.divergences],
            }
            for way in figures.ways
        ],
        "curve": [{**point._asdict(), "speedup": point.speedup} for point in figures.curve],
    }
