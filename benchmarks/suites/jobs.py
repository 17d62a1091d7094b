"""The suite `batch`: decoding files of prompts."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Advance, Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import GSM8K
from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.job import run
from jaxspec.batch.plan import capacity_needed
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, rows_of
from jaxspec.batch.settings import DraftingMode, JobSettings
from jaxspec.batch.writer import Collector
from jaxspec.checkpoint import Model, load, load_eagle
from jaxspec.commands.methods import EAGLE_HEAD, MADE_FOR
from jaxspec.core.loop import round_up
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import GenerationConfig, encode_prompt
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.measure.compare import describe, divergence_of
from jaxspec.measure.comparison import TIE_GAP, Divergence, divergence_lines
from jaxspec.measure.figures import PLAIN, DecodedText, Sample
from jaxspec.measure.machine import this_machine
from jaxspec.measure.timing import decode_in_turns, release_programs

DRAFTED = "drafted"
DRAFTINGS: Mapping[str, DraftingMode] = {PLAIN: "never", DRAFTED: "always"}
SHIPPED_FLAGS = ("--model", MADE_FOR, "--drafter", f"eagle:head={EAGLE_HEAD}")
"""The same target and head, for `jaxspec batch`."""
NEEDS = (MADE_FOR, EAGLE_HEAD)
_AIMS = {"refill": 1.3, "rows": 6.0, "host": 0.03, "memory": 1.1}


class Jobs(NamedTuple):
    """Jobs of one model, which differ in their rows and in how they are decoded.

    Attributes:
        model: the target.
        drafter: its drafter.
        prompts: prompts as ids.
        max_new_tokens: tokens of every output at most.
        advance: told what is measured next.
    """

    model: Model
    drafter: LoadedDrafter
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    advance: Advance

    @property
    def config(self) -> GenerationConfig:
        """Greedy settings."""
        return GenerationConfig(max_new_tokens=self.max_new_tokens)

    def capacity_for(self, rows: Sequence[Row]) -> int:
        """Returns the cache capacity that holds each of some rows, with drafts or without."""
        longest = max(len(row.prompt or ()) for row in rows)
        positions, depth = self.model.config.max_positions, self.drafter.drafter.tree_shape[1]
        return round_up(capacity_needed(longest, self.max_new_tokens, positions, depth))

    def job(
        self,
        rows: Sequence[Row],
        batch_size: int,
        drafting: DraftingMode,
        output: Collector | None = None,
        capacity: int | None = None,
        guard: GuardSettings | None = None,
        **others: Any,
    ) -> JobReport:
        """Decodes rows; `others` are further arguments of `jaxspec.batch.run`."""
        return run(
            self.model,
            rows,
            output or Collector(),
            self.config,
            self.drafter,
            settings=JobSettings(
                batch_size=batch_size, capacity=capacity, drafting=drafting, guard=guard
            ),
            **others,
        )

    def about(self) -> str:
        """Returns a line on model, prompts, drafter and machine."""
        return (
            f"{self.model.name}, {len(self.prompts)} prompts of {GSM8K.category}, greedy, up to "
            f"{self.max_new_tokens} new tokens, ended by the model's own end tokens, float32. "
            f"Drafted: `{describe(self.drafter)}`. {this_machine()}."
        )


class Job(NamedTuple):
    """Rows, and how many of them are decoded at once.

    Attributes:
        rows: rows of the job.
        batch_size: rows at once.
        capacity: places of a row's cache; `None` for as many as each group of rows needs.
    """

    rows: Sequence[Row]
    batch_size: int
    capacity: int | None = None


class JobRunner:
    """Decodes jobs; methods are those of `DRAFTINGS`, and the same as fixed batches.

    A fixed batch is one call of `generate` on rows in the order of the file.

    Attributes:
        reports: reports of the jobs so far, by method.
    """

    def __init__(self, jobs: Jobs):
        self._jobs = jobs
        self.reports: dict[str, list[JobReport]] = {}

    def decode(self, method: str, prompt: Job, seed: int) -> Sample:
        """Decodes a job once; decoding is greedy, so `seed` is not used."""
        del seed
        kind, _, name = method.rpartition(", ")
        if kind == "fixed":
            return self._fixed(prompt, name)
        output = Collector()
        report = self._jobs.job(
            prompt.rows, prompt.batch_size, DRAFTINGS[name], output, prompt.capacity
        )
        self.reports.setdefault(method, []).append(report)
        by_line = tokens_by_line(output.records)
        rows = tuple(DecodedText(_ids(row), by_line[row.line]) for row in prompt.rows)
        return Sample(rows, report.seconds, report.counts)

    def _fixed(self, prompt: Job, name: str) -> Sample:
        jobs, size, rows = self._jobs, prompt.batch_size, []
        drafter = jobs.drafter if name == DRAFTED else None
        counts, seconds = Counts(), 0.0
        prompts = [_ids(row) for row in prompt.rows]
        for first in range(0, len(prompts), size):
            result = generate(jobs.model, prompts[first : first + size], jobs.config, drafter)
            metrics = result.metrics
            rows += list(result)
            counts += Counts(num_tokens=metrics.num_tokens, num_steps=metrics.num_verify_steps)
            seconds += metrics.seconds or 0.0
        return Sample(tuple(rows), seconds, counts)

    def median_report(self, method: str) -> JobReport:
        """Returns a method's report of median speed, and forgets its reports."""
        reports = sorted(self.reports.pop(method), key=lambda report: report.tokens_per_second)
        return reports[len(reports) // 2]


def shipped_jobs(run: SuiteRun) -> Jobs:
    """Returns jobs of the shipped target with its head; they say on standard error what runs."""
    model = load(MADE_FOR)
    drafter = Eagle.of(load_eagle(EAGLE_HEAD, model.network))
    prompts = run.prompts(model, run.suite.max_new_tokens)
    ids = [encode_prompt(model, prompt.text) for prompt in prompts]
    return Jobs(model, drafter, ids, run.suite.max_new_tokens, _say)


def _say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)


class BatchSizes(NamedTuple):
    """Sizes of the suite `batch`.

    Attributes:
        batch_size: rows at once where that is not what is measured.
        waves: prompts for each of `batch_size` rows, where many rows are compared with one.
        hashed: prompts whose outputs are compared in all ways.
        devices: virtual devices, which another process divides the rows over.
    """

    batch_size: int = 32
    waves: int = 8
    hashed: int = 256
    devices: int = 8


class Speed(NamedTuple):
    """Fixed batches and refilled slots.

    Attributes:
        fixed: tokens per second of `generate`, batch by batch.
        refilled: the report of the job.
    """

    fixed: float
    refilled: JobReport

    @property
    def ratio(self) -> float:
        """Speed of refilled slots over that of fixed batches."""
        return self.refilled.tokens_per_second / self.fixed


class Way(NamedTuple):
    """Outputs of one way to run the same job.

    Attributes:
        name: name of the way.
        digest: checksum of all tokens, in the order of lines.
        divergences: where rows leave those of the first way.
    """

    name: str
    digest: str
    divergences: tuple[Divergence, ...]


class BatchFigures(NamedTuple):
    """Figures of the suite `batch`.

    Attributes:
        num_prompts: prompts of the comparison with fixed batches.
        speeds: fixed batches and refilled slots, by way of decoding.
        one: jobs of one row at a time, by way of decoding.
        many: jobs of many rows: the same prompts, with the same capacity.
        ways: outputs of every way to run the same job.
    """

    num_prompts: int
    speeds: Mapping[str, Speed]
    one: Mapping[str, JobReport]
    many: Mapping[str, JobReport]
    ways: tuple[Way, ...]

    @property
    def agree(self) -> bool:
        """False if an output differs by more than a tie."""
        return all(each.is_tie for way in self.ways for each in way.divergences)


def measure_jobs(jobs: Jobs, sizes: BatchSizes, repeats: int, flags: Sequence[str]) -> BatchFigures:
    """Measures any model and drafter; `flags` name the same two for `jaxspec batch`."""
    runner, rows, size = JobRunner(jobs), rows_of(jobs.prompts), sizes.batch_size
    shared = rows[: sizes.waves * size]
    capacity = jobs.capacity_for(shared)
    ways = _ways(jobs, sizes, rows[: sizes.hashed], flags)
    rates: dict[int, dict[str, JobReport]] = {}
    for count in (1, size):
        warm = Job(shared[: 2 * count], count, capacity)  # a first, short job
        for name in DRAFTINGS:
            runner.decode(name, warm, 0)
        runner.reports.clear()
        asked = Job(shared, count, capacity)
        decode_in_turns(runner, list(DRAFTINGS), {0: asked}, repeats, advance=jobs.advance)
        rates[count] = {name: runner.median_report(name) for name in DRAFTINGS}
    speeds = {}
    for name in DRAFTINGS:
        methods = [f"fixed, {name}", f"refilled, {name}"]
        found = decode_in_turns(runner, methods, {0: Job(rows, size)}, repeats, 0, jobs.advance)
        fixed = found[methods[0]][0]
        speeds[name] = Speed(fixed.num_tokens / fixed.seconds, runner.median_report(methods[1]))
        release_programs()
    return BatchFigures(len(rows), speeds, rates[1], rates[size], ways)


def _ways(
    jobs: Jobs, sizes: BatchSizes, rows: Sequence[Row], flags: Sequence[str]
) -> tuple[Way, ...]:
    """Decodes the same rows in every way that must not matter."""
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    small, large = max(1, sizes.batch_size // 4), sizes.batch_size
    collected = partial(_collected, jobs)
    ways: dict[str, Callable[[], dict[int, list[int]]]] = {
        f"{small} rows at once, plain": partial(collected, rows, small, "never"),
        **{
            f"{size} row{'s' * (size > 1)} at once, drafted": partial(
                collected, rows, size, "always"
            )
            for size in (1, small, large)
        },
        "shuffled, drafted": partial(collected, shuffled, large, "always"),
        "guarded": partial(collected, rows, large, "auto"),
        "stopped on the way and resumed, drafted": partial(_resumed, jobs, rows, large),
        f"on {sizes.devices} virtual devices, drafted": partial(
            _on_devices, jobs, sizes, rows, flags
        ),
    }
    found: dict[str, dict[int, list[int]]] = {}
    for name, decode in ways.items():
        jobs.advance(f"outputs: {name}")
        found[name] = decode()
    first = next(iter(found.values()))
    return tuple(
        Way(name, digest_of_tokens(by_line), divergences_of(jobs.model, rows, first, by_line))
        for name, by_line in found.items()
    )


def _collected(
    jobs: Jobs, rows: Sequence[Row], size: int, drafting: DraftingMode
) -> dict[int, list[int]]:
    output = Collector()
    jobs.job(rows, size, drafting, output)
    return tokens_by_line(output.records)


def _resumed(jobs: Jobs, rows: Sequence[Row], size: int) -> dict[int, list[int]]:
    """Stops once a quarter of the records is there, and resumes."""
    output, enough = Collector(), max(1, len(rows) // 4)
    jobs.job(rows, size, "always", output, should_stop=lambda: len(output.records) >= enough)
    jobs.job(rows, size, "always", output)
    return tokens_by_line(output.records)


def _on_devices(
    jobs: Jobs, sizes: BatchSizes, rows: Sequence[Row], flags: Sequence[str]
) -> dict[int, list[int]]:
    """Returns the outputs of `jaxspec batch` in a process that sees several devices."""
    flag = f"--xla_force_host_platform_device_count={sizes.devices}"
    settings = {
        "--mesh": f"data={sizes.devices}",
        "--batch-size": sizes.batch_size,
        "--drafting": "always",
        "--max-new-tokens": jobs.max_new_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        lines = (json.dumps({"tokens": list(row.prompt or ())}) + "\n" for row in rows)
        source.write_text("".join(lines))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "jaxspec", "batch", source, out, *flags),
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
            raise ValueError(f"A job on {sizes.devices} virtual devices failed:\n{done.stderr}")
        records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return tokens_by_line(records)


def divergences_of(
    model: Model,
    rows: Sequence[Row],
    plain: Mapping[int, list[int]],
    other: Mapping[int, list[int]],
) -> tuple[Divergence, ...]:
    found = [
        divergence_of(
            model,
            row.line - 1,
            np.asarray(row.prompt),
            np.asarray(plain[row.line]),
            np.asarray(other[row.line]),
        )
        for row in rows
        if plain[row.line] != other[row.line]
    ]
    return tuple(divergence for divergence in found if divergence is not None)


def _ids(row: Row) -> list[int]:
    """Returns the ids of a row's prompt."""
    ids: Any = row.prompt or ()
    return list(ids)


def tokens_by_line(records: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    return {record["line"]: record["tokens"] for record in records}


def digest_of_tokens(tokens: Mapping[int, list[int]]) -> str:
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def _measure_batch(run: SuiteRun) -> Page:
    jobs, sizes = shipped_jobs(run), BatchSizes()
    figures = measure_jobs(jobs, sizes, run.repeats, SHIPPED_FLAGS)
    return batch_page(figures, jobs.about(), sizes)


def batch_page(figures: BatchFigures, about: str, sizes: BatchSizes) -> Page:
    """Returns the page of the suite `batch`."""
    digests = {way.digest for way in figures.ways}
    size = sizes.batch_size
    sections = [
        Section(text=[about]),
        Section(
            f"Refilled slots against fixed batches, {size} rows at once",
            [
                "Fixed: `generate`, batch by batch in the order of the file. tokens/s: emitted "
                "over wall time, prompts included, compiling left out. idle: share of the "
                "slots' steps without a running row. reading: share of the time in which prompts "
                "were read. "
                "host: share of the time in which the device waited for the host. tau: tokens per "
                "target pass of a row, bonus token INCLUDED."
            ],
            [
                *("", "fixed tokens/s", "refilled tokens/s", f"ratio (aim {_AIMS['refill']:g})"),
                *("idle", "reading", f"host (aim {_AIMS['host']:.0%})", "tau"),
                f"states, over the estimate (aim {_AIMS['memory']:g})",
            ],
            [_speed_cells(name, speed) for name, speed in figures.speeds.items()],
        ),
        Section(
            f"{size} rows over one",
            [
                "The same prompts with the same capacity. reading: share of the time in which "
                "prompts were read into slots, one at a time for any number of rows at once."
            ],
            [
                *("", "one row, tokens/s", "reading"),
                *(f"{size} rows, tokens/s", "reading", "ratio", "aim"),
            ],
            [_rows_over_one(name, one, figures.many[name]) for name, one in figures.one.items()],
        ),
        Section(
            "The same outputs",
            [
                f"{min(sizes.hashed, figures.num_prompts)} prompts in {len(figures.ways)} ways: "
                f"{len(digests)} hash{'' if len(digests) == 1 else 'es'} of all tokens. Where rows "
                f"leave the first way's, the gap is listed: a tie lies below {TIE_GAP:g}."
            ],
            ["way", "hash", "rows that differ", "ties of them"],
            [
                [
                    way.name,
                    f"`{way.digest}`",
                    str(len(way.divergences)),
                    str(sum(each.is_tie for each in way.divergences)),
                ]
                for way in figures.ways
            ],
            [line for way in figures.ways for line in divergence_lines(way.name, way.divergences)],
        ),
    ]
    return Page(sections, {"batch": figures, "machine": this_machine()}, figures.agree)


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


def _speed_cells(name: str, speed: Speed) -> list[str]:
    report = speed.refilled
    held, estimate = report.state_bytes_held, report.state_bytes_estimated
    return [
        name,
        f"{speed.fixed:.0f}",
        f"{report.tokens_per_second:.0f}",
        f"{speed.ratio:.2f}",
        f"{report.idle_fraction:.1%}",
        f"{report.read_fraction:.1%}",
        f"{report.host_fraction:.1%}",
        f"{report.counts.tau:.2f}",
        f"{held / 1e6:.1f} MB, {held / estimate:.3f}",
    ]


JOB_SUITES: Mapping[str, Suite] = {
    "batch": Suite(
        title="Decoding files of prompts",
        about="refilled slots against fixed batches, many rows over one, the same outputs",
        measure=_measure_batch,
        prompt_sets=(GSM8K,),
        prompts_per_set=1319,
        repeats=3,
        needs=NEEDS,
    ),
}
