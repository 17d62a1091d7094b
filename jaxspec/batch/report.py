"""How a job goes: counted while it runs, in figures whenever somebody asks."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.compilation import CompileClock


@dataclasses.dataclass(frozen=True)
class JobReport:
    """A job so far, or when it has ended.

    Attributes:
        num_records: records that the whole job has: samples of good rows, and bad rows.
        num_done: of these, there now; those of an earlier process included.
        num_resumed: of these, there when this process began.
        num_errors: bad rows of the job.
        num_decoded: records of good rows that this process made.
        num_tokens: emitted in this process.
        seconds: that this process took so far, once prompts were token ids; compiling left out.
        compile_seconds: spent compiling.
        host_seconds: between the first chunk of a group and the last, in which the device had
            neither a prompt to read nor a chunk to run. Where a chunk ended before its
            predecessor's records were written, all of that writing.
        read_seconds: in which prompts were read and put into slots, the host's part of it included,
            and in which drafters read what rows had emitted without them.
        num_steps: of the batch.
        num_drafted_steps: of these, with drafts; the others were plain.
        row_steps: of rows that were running.
        slot_steps: of rows that were running or not.
        prefix_tokens: that all prompts share and that were read once.
        batch: rows at once, the most of any group.
        slots: tokens that each row's cache holds, by group.
        state_bytes_foretold: of caches and states, the most of any group, from shapes.
        state_bytes_held: the same of the arrays that were there.
        scratch_bytes: that the compiled programs need besides, and a row that was read, by XLA's
            memory analysis; 0 where it does not say.
        speedup: what drafting brings by the guard's books, as `Guard.speedup`; `None` without it.
        interrupted: the job was asked to stop and has not come to its end.
    """

    num_records: int = 0
    num_done: int = 0
    num_resumed: int = 0
    num_errors: int = 0
    num_decoded: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    host_seconds: float = 0.0
    read_seconds: float = 0.0
    num_steps: int = 0
    num_drafted_steps: int = 0
    row_steps: int = 0
    slot_steps: int = 0
    prefix_tokens: int = 0
    batch: int = 0
    slots: tuple[int, ...] = ()
    state_bytes_foretold: int = 0
    state_bytes_held: int = 0
    scratch_bytes: int = 0
    speedup: float | None = None
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time, prompts included and compiling left out."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        """Tokens per target pass of a row, the bonus token INCLUDED."""
        return self.num_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of the slots' steps that no running row made."""
        return 1 - self.row_steps / self.slot_steps if self.slot_steps else 0.0

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
        """Until the end, at the pace of the rows decoded so far; `None` before the first.

        Bad rows are done at once and say nothing of the pace.
        """
        if not self.num_decoded:
            return None
        return self.seconds / self.num_decoded * (self.num_records - self.num_done)

    def as_dict(self) -> dict[str, Any]:
        """Every figure, ready for JSON."""
        derived = ("tokens_per_second", "tau", "idle_fraction", "host_fraction", "read_fraction")
        derived += ("drafted_fraction",)
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        parts = [
            f"{self.num_done} of {self.num_records} records",
            f"{self.tokens_per_second:.0f} tokens/s",
            f"{self.tau:.2f} tokens per target pass (bonus included)",
            f"{self.batch} rows at once, {self.idle_fraction:.0%} of their slots idle",
            f"host {self.host_fraction:.1%}",
        ]
        if self.num_errors:
            parts.insert(1, f"{self.num_errors} of them errors")
        return ", ".join(parts)


class Watch:
    """How long a stretch was, once it is over; compiling left out."""

    seconds: float = 0.0


class Books:
    """A job's counters, from which a `JobReport` is made."""

    def __init__(self, clock: CompileClock):
        self._clock = clock
        self._start = self._now()
        self._worked_until: float | None = None
        self._host_seconds = self._read_seconds = 0.0
        self._counts: dict[str, int] = dict.fromkeys(
            ("num_tokens", "num_steps", "num_drafted_steps", "row_steps", "slot_steps"), 0
        )
        self._sizes: dict[str, int] = dict.fromkeys(
            ("batch", "state_bytes_foretold", "state_bytes_held", "scratch_bytes"), 0
        )
        self._slots: list[int] = []
        self.num_records = self.num_resumed = self.num_written = self.num_errors = 0
        self.num_decoded = 0
        self.prefix_tokens = 0
        self.interrupted = False

    def begin_group(self, batch: int, slots: int, foretold: int, held: int, scratch: int) -> None:
        """Notes what a group takes. What came before its first chunk was between no chunks."""
        self._slots.append(slots)
        for name, value in (
            ("batch", batch),
            ("state_bytes_foretold", foretold),
            ("state_bytes_held", held),
            ("scratch_bytes", scratch),
        ):
            self._sizes[name] = max(self._sizes[name], value)
        self._worked_until = None

    @contextmanager
    def reading(self) -> Iterator[Watch]:
        """Around work of the device that is no step."""
        with self.stepping() as watch:
            yield watch
        self._read_seconds += watch.seconds

    @contextmanager
    def stepping(self) -> Iterator[Watch]:
        """Around a chunk."""
        start, watch = self._now(), Watch()
        if self._worked_until is not None:
            self._host_seconds += start - self._worked_until
        yield watch
        self._worked_until = self._now()
        watch.seconds = self._worked_until - start

    @contextmanager
    def writing(self, chunk: Any) -> Iterator[None]:
        """Around what the host does while `chunk` is made."""
        start = self._now()
        yield
        if chunk.is_ready():
            self._host_seconds += self._now() - start

    def count(self, steps: int, row_steps: int, tokens: int, batch: int, drafting: bool) -> None:
        """Books a chunk."""
        self._counts["num_tokens"] += tokens
        self._counts["num_steps"] += steps
        self._counts["num_drafted_steps"] += steps * drafting
        self._counts["row_steps"] += row_steps
        self._counts["slot_steps"] += steps * batch

    def report(self, speedup: float | None) -> JobReport:
        return JobReport(
            num_records=self.num_records,
            num_done=self.num_resumed + self.num_written,
            num_resumed=self.num_resumed,
            num_errors=self.num_errors,
            num_decoded=self.num_decoded,
            seconds=self._now() - self._start,
            compile_seconds=self._clock.seconds,
            host_seconds=self._host_seconds,
            read_seconds=self._read_seconds,
            prefix_tokens=self.prefix_tokens,
            slots=tuple(self._slots),
            speedup=speedup,
            interrupted=self.interrupted,
            **self._counts,
            **self._sizes,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._clock.seconds
