"""The report of a job, and the counters from which it is made while the job runs."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from jaxspec.compilation import CompileClock
from jaxspec.decoding.metrics import Counts
from jaxspec.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class JobReport:
    """A job so far, or when it has ended.

    Attributes:
        num_records: records that the whole job has: samples of good rows, and bad rows.
        num_done: records that are there now; those of an earlier process included.
        num_resumed: records that were there when this process began.
        num_errors: bad rows of the job.
        num_decoded: records of good rows that this process made.
        num_cut: those of them that `max_new_tokens` or the model's context cut off.
        counts: tokens emitted in this process, and target passes, counted once for each running
            row. `counts.tau` is tokens per target pass, the bonus token INCLUDED.
        seconds: time of this process from the moment when prompts were token ids; compiling left
            out.
        compile_seconds: time spent compiling.
        host_seconds: time between the first chunk of a group and the last in which the device had
            neither a prompt to read nor a chunk to run. Where a chunk ended before its
            predecessor's records were written, all of that writing.
        read_seconds: time in which prompts were read and put into slots, the host's part of it
            included, and in which drafters read what rows had emitted without them.
        num_steps: steps of the batch.
        num_drafted_steps: steps of the batch with drafts; the others were plain.
        slot_steps: steps, counted once for each slot, whether its row was running or not.
        prefix_tokens: tokens that all prompts share and that were read once.
        batch_size: rows at once, the most of any group.
        capacities: tokens that each row's cache holds, by group.
        state_bytes_estimated: bytes of caches and states by their shapes, the most of any group.
        state_bytes_held: the same of the arrays that were there.
        scratch_bytes: bytes that the compiled programs need in addition, and a row that was read,
            by XLA's memory analysis; 0 where it does not say.
        speedup: tokens per second with drafts over those without, as `Guard.speedup` estimates it;
            `None` without a guard.
        interrupted: the job was asked to stop and has not come to its end.
    """

    num_records: int = 0
    num_done: int = 0
    num_resumed: int = 0
    num_errors: int = 0
    num_decoded: int = 0
    num_cut: int = 0
    counts: Counts = dataclasses.field(default_factory=Counts)
    seconds: float = 0.0
    compile_seconds: float = 0.0
    host_seconds: float = 0.0
    read_seconds: float = 0.0
    num_steps: int = 0
    num_drafted_steps: int = 0
    slot_steps: int = 0
    prefix_tokens: int = 0
    batch_size: int = 0
    capacities: tuple[int, ...] = ()
    state_bytes_estimated: int = 0
    state_bytes_held: int = 0
    scratch_bytes: int = 0
    speedup: float | None = None
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time, prompts included and compiling left out."""
        return self.counts.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of the slots' steps that no running row made."""
        return 1 - self.counts.num_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def host_fraction(self) -> float:
        """Share of the time in which the device waited for the host."""
        return self.host_seconds / self.seconds if self.seconds else 0.0

    @property
    def read_fraction(self) -> float:
        """Share of the time in which prompts were read and put into slots."""
        return self.read_seconds / self.seconds if self.seconds else 0.0

    @property
    def drafted_fraction(self) -> float:
        """Share of steps that drafted."""
        return self.num_drafted_steps / self.num_steps if self.num_steps else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time until the end, at the pace of the rows decoded so far; `None` before the first.

        Bad rows are done at once and say nothing about the pace.
        """
        if not self.num_decoded:
            return None
        return self.seconds / self.num_decoded * (self.num_records - self.num_done)

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure, ready for JSON.

        Example:
            >>> JobReport(counts=Counts(num_tokens=5, num_steps=2)).as_dict()["tau"]
            2.5
        """
        fields = dataclasses.asdict(self)
        del fields["counts"]
        derived = ("tokens_per_second", "idle_fraction", "host_fraction", "read_fraction")
        return {
            **fields,
            "num_tokens": self.counts.num_tokens,
            "row_steps": self.counts.num_steps,
            "tau": self.counts.tau,
            **{name: getattr(self, name) for name in (*derived, "drafted_fraction")},
        }

    def __str__(self) -> str:
        parts = [
            f"{self.num_done} of {self.num_records} records",
            f"{self.tokens_per_second:.0f} tokens/s",
            f"{self.counts.tau:.2f} tokens per target pass (bonus included)",
            f"{self.batch_size} rows at once, {self.idle_fraction:.0%} of their slots idle",
            f"host {self.host_fraction:.1%}",
        ]
        if self.num_errors:
            parts.insert(1, f"{self.num_errors} of them errors")
        if self.num_cut:
            parts.append(f"{self.num_cut} cut off by max_new_tokens or the context")
        return ", ".join(parts)


@contextmanager
def job_bar(shown: bool = True) -> Iterator[Callable[[JobReport], None]]:
    """Yields a `progress` for `run` that draws a bar on terminals; see `progress_bar`."""
    with progress_bar(1, shown) as advance:

        def progress(report: JobReport) -> None:
            eta = report.eta_seconds
            left = "" if eta is None else f", {timedelta(seconds=round(eta))} left"
            doing = f"{report.tokens_per_second:.0f} tokens/s, tau {report.counts.tau:.2f}{left}"
            advance(doing, report.num_done, report.num_records)

        yield progress


class Watch:
    """Length of a stretch of time in seconds, once it is over; compiling left out."""

    seconds: float = 0.0


class Counters:
    """A job's counters while it runs."""

    def __init__(self, clock: CompileClock):
        self._clock = clock
        self._start = self._now()
        self._worked_until: float | None = None
        self._report = JobReport()

    def note(self, **values: Any) -> None:
        """Sets fields of the report."""
        self._report = dataclasses.replace(self._report, **values)

    def add(self, **amounts: Any) -> None:
        """Adds to fields of the report."""
        self.note(**{name: getattr(self._report, name) + more for name, more in amounts.items()})

    def begin_group(self, capacity: int, **sizes: int) -> None:
        """Notes the size of a group. The time before its first chunk is between no chunks."""
        self.add(capacities=(capacity,))
        self.note(**{name: max(getattr(self._report, name), size) for name, size in sizes.items()})
        self._worked_until = None

    @contextmanager
    def reading(self) -> Iterator[Watch]:
        """Times work of the device that is no step."""
        with self.stepping() as watch:
            yield watch
        self.add(read_seconds=watch.seconds)

    @contextmanager
    def stepping(self) -> Iterator[Watch]:
        """Times a chunk."""
        start, watch = self._now(), Watch()
        if self._worked_until is not None:
            self.add(host_seconds=start - self._worked_until)
        yield watch
        self._worked_until = self._now()
        watch.seconds = self._worked_until - start

    @contextmanager
    def writing(self, chunk: Any) -> Iterator[None]:
        """Times what the host does while `chunk`, an array, is computed."""
        start = self._now()
        yield
        if chunk.is_ready():
            self.add(host_seconds=self._now() - start)

    def report(self, speedup: float | None = None) -> JobReport:
        """Returns the job so far."""
        return dataclasses.replace(
            self._report,
            seconds=self._now() - self._start,
            compile_seconds=self._clock.seconds,
            speedup=speedup,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._clock.seconds
