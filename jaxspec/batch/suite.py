"""The suite of `jaxspec bench --suite batch`: what decoding files brings, measured."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.batch.bench import (
    DRAFTED,
    DRAFTINGS,
    SHIPPED_FLAGS,
    Advance,
    Bench,
    command_of,
    opening_of,
    shipped_bench,
)
from jaxspec.batch.job import Drafting
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, rows_of
from jaxspec.batch.writer import Collector
from jaxspec.bench.compare import describe, divergence_of
from jaxspec.bench.comparison import TIE_GAP, Divergence
from jaxspec.bench.machine import this_machine
from jaxspec.bench.page import bullets, table
from jaxspec.bench.table import divergence_lines
from jaxspec.bench.timing import release_programs
from jaxspec.generation import generate

_TITLE = "Decoding files of prompts"
_AIMS = {"refill": 1.3, "rows": 6.0, "host": 0.03, "memory": 1.1}


class BatchSuite(NamedTuple):
    """How much is measured.

    prompts_per_set: prompts of the comparison with fixed batches.
    max_new_tokens: of every prompt, at most.
    batch: rows at once where that is not what is measured.
    waves: prompts for each of `batch` rows, in the ratio of so many to one; both decode the same.
    hashed: prompts whose outputs are compared in all ways.
    devices: virtual ones, which another process divides the rows over.
    """

    prompts_per_set: int = 1319
    max_new_tokens: int = 128
    batch: int = 32
    waves: int = 8
    hashed: int = 256
    devices: int = 8


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
    one: jobs of one row at a time, by way to decode.
    many: of `batch` rows: the same prompts, in the same slots.
    """

    suite: BatchSuite
    repeats: int
    drafter: str
    num_prompts: int
    speeds: Mapping[str, Speed]
    one: Mapping[str, JobReport]
    many: Mapping[str, JobReport]
    ways: tuple[Way, ...]

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
    bench = shipped_bench(
        "batch", data_folder, suite.prompts_per_set, suite.max_new_tokens, repeats, advance
    )
    figures = measure_batches(bench, suite, repeats, SHIPPED_FLAGS)
    return figures, as_markdown(figures)


def measure_batches(
    bench: Bench, suite: BatchSuite, repeats: int, flags: Sequence[str]
) -> BatchFigures:
    """Measures any model and drafter.

    `flags` give the same two to `jaxspec batch`, for a process of its own.
    """
    measuring = _Measuring(bench, suite, repeats, flags)
    rows = rows_of(bench.prompts)
    shared = rows[: suite.waves * suite.batch]
    return BatchFigures(
        suite=suite,
        repeats=repeats,
        drafter=describe(bench.drafter),
        num_prompts=len(rows),
        ways=measuring.ways(rows[: suite.hashed]),
        one=measuring.speeds(shared, 1),
        many=measuring.speeds(shared, suite.batch),
        speeds={name: measuring.refill(rows, name) for name in DRAFTINGS},
    )


class _Measuring(NamedTuple):
    """What all measurements share."""

    bench: Bench
    suite: BatchSuite
    repeats: int
    flags: Sequence[str]

    def refill(self, rows: Sequence[Row], name: str) -> Speed:
        """Fixed batches in the order of the file against refilled slots, in turns."""
        bench, prompts, size = self.bench, self.bench.prompts, self.suite.batch
        drafter = bench.drafter if name == DRAFTED else None
        batches = [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]
        fixed, reports = [], []
        for turn in range(self.repeats):
            tokens, seconds = 0, 0.0
            for number, batch in enumerate(batches):
                if number % 10 == 0:
                    done = f"{number * size} of {len(prompts)} prompts"
                    self.bench.advance(f"fixed batches, {name}, turn {turn + 1}: {done}")
                metrics = generate(bench.model, batch, bench.config, drafter).metrics
                tokens += metrics.num_tokens
                seconds += metrics.seconds or 0.0
            fixed.append(tokens / seconds)
            self.bench.advance(f"refilled slots, {name}, turn {turn + 1}")
            reports.append(self.bench.job(rows, size, DRAFTINGS[name]))
        release_programs()
        return Speed(float(np.median(fixed)), _median(reports))

    def speeds(self, rows: Sequence[Row], batch: int) -> dict[str, JobReport]:
        """So many rows at once, all of them in the slots that the longest needs."""
        slots = self.bench.slots_for(rows)
        found: dict[str, list[JobReport]] = {name: [] for name in DRAFTINGS}
        for turn in range(self.repeats + 1):
            for name, reports in found.items():
                self.bench.advance(f"{batch} rows at once, {name}, turn {turn}")
                # A first, short job warms up.
                some = rows if turn else rows[: 2 * batch]
                report = self.bench.job(some, batch, DRAFTINGS[name], slots=slots)
                if turn:
                    reports.append(report)
        return {name: _median(reports) for name, reports in found.items()}

    def ways(self, rows: Sequence[Row]) -> tuple[Way, ...]:
        """Decodes the same rows in every way that must not matter."""
        shuffled = list(rows)
        random.Random(0).shuffle(shuffled)
        small, large = max(1, self.suite.batch // 4), self.suite.batch
        found: dict[str, dict[int, list[int]]] = {}

        def way(name: str, rows: Sequence[Row], batch: int, drafting: Drafting) -> None:
            self.bench.advance(f"outputs: {name}")
            output = Collector()
            self.bench.job(rows, batch, drafting, output=output)
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
            self.bench.advance(f"outputs: {name}")
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
        self.bench.job(
            rows, size, "always", output=output, should_stop=lambda: len(output.records) >= enough
        )
        self.bench.job(rows, size, "always", output=output)
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
                self.bench.model,
                row.line - 1,
                np.asarray(row.prompt),
                np.asarray(plain[row.line]),
                np.asarray(other[row.line]),
            )
            for row in rows
            if plain[row.line] != other[row.line]
        ]
        return tuple(divergence for divergence in found if divergence is not None)


def _median(reports: Sequence[JobReport]) -> JobReport:
    return sorted(reports, key=lambda report: report.tokens_per_second)[len(reports) // 2]


def _tokens_by_line(records: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    return {record["line"]: record["tokens"] for record in records}


def _digest(tokens: Mapping[int, list[int]]) -> str:
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def _command_of(figures: BatchFigures) -> str:
    return command_of("batch", figures.suite.prompts_per_set, figures.repeats)


def as_markdown(figures: BatchFigures) -> str:
    """The whole part of the page."""
    suite = figures.suite
    digests = {way.digest for way in figures.ways}
    divergences = [
        line for way in figures.ways for line in divergence_lines(way.name, way.divergences)
    ]
    parts = [
        *opening_of(
            _TITLE,
            _command_of(figures),
            figures.num_prompts,
            suite.max_new_tokens,
            figures.drafter,
        ),
        f"## Refilled slots against fixed batches, {suite.batch} rows at once",
        "Fixed: `generate`, batch by batch in the order of the file. tokens/s: emitted over wall "
        "time, prompts included, compiling left out. idle: share of the slots' steps without a "
        "running row. reading: share of the time in which prompts were read. host: share of the "
        "time in which the device waited for the host. tau: tokens per target pass of a row, "
        "bonus token INCLUDED.",
        _speeds_table(figures),
        f"## {suite.batch} rows over one",
        "The same prompts in the same slots. reading: share of the time in which prompts were read "
        "into slots, one at a time whatever the rows at once.",
        table(
            [
                *("", "one row, tokens/s", "reading"),
                *(f"{suite.batch} rows, tokens/s", "reading", "ratio", "aim"),
            ],
            [_rows_over_one(name, one, figures.many[name]) for name, one in figures.one.items()],
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
    ]
    return "\n\n".join(parts) + "\n"


def _rows_over_one(name: str, one: JobReport, many: JobReport) -> list[str]:
    return [
        name,
        f"{one.tokens_per_second:.0f}",
        f"{one.read_fraction:.1%}",
        f"{many.tokens_per_second:.0f}",
        f"{many.read_fraction:.1%}",
        f"{many.tokens_per_second / one.tokens_per_second:.2f}",
        f"{_AIMS['rows']:g}",
    ]


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
            f"{report.read_fraction:.1%}",
            f"{report.host_fraction:.1%}",
            f"{report.tau:.2f}",
            f"{held / 1e6:.1f} MB, {held / foretold:.3f}",
        ]

    columns = ["", "fixed tokens/s", "refilled tokens/s", f"ratio (aim {_AIMS['refill']:g})"]
    columns += ["idle", "reading", f"host (aim {_AIMS['host']:.0%})", "tau"]
    columns += [f"states, over what was foretold (aim {_AIMS['memory']:g})"]
    return table(columns, [cells(name, speed) for name, speed in figures.speeds.items()])


def as_dict(figures: BatchFigures) -> dict[str, Any]:
    """Every figure, ready for JSON."""
    return {
        "suite": "batch",
        "command": _command_of(figures),
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
        "one_row": {name: report.as_dict() for name, report in figures.one.items()},
        "many_rows": {name: report.as_dict() for name, report in figures.many.items()},
        "ways": [
            {
                "name": way.name,
                "digest": way.digest,
                "divergences": [each._asdict() for each in way.divergences],
            }
            for way in figures.ways
        ],
    }
