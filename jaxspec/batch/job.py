"""`run`: decodes the rows of a job in slots that are refilled as rows finish.

The host and the device take turns in one place only: after a chunk of steps the host looks at which
rows have stopped, and puts others into their slots. Text, checks and writing of finished rows are
done while the next chunk runs.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxspec.batch.canvases import canvas_programs
from jaxspec.batch.fitting import Fit, fit_batch, parts_of
from jaxspec.batch.guard import Chunk, Guard
from jaxspec.batch.plan import Group, group_rows, most_rows, read_in
from jaxspec.batch.report import Counters, JobReport, job_bar
from jaxspec.batch.rows import EncodedRow, Row, checked_id, rows_of, with_fields_of
from jaxspec.batch.settings import AnyConfig, AnyDrafter, JobSettings
from jaxspec.batch.slots import ChunkInfo, Item, SlotPrograms, bytes_in_one_memory, has_guard
from jaxspec.batch.texts import text_programs
from jaxspec.batch.writer import Collector, Output
from jaxspec.checkpoint.hub import check_is_model
from jaxspec.compilation import CompileClock
from jaxspec.core.checks import checked, shown
from jaxspec.core.loop import round_up
from jaxspec.core.types import Stop
from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import PromptLike, config_and_drafter, config_of
from jaxspec.sharding import on_mesh_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

LONGEST_CHUNK = 32
"""Steps after which the host looks, if no row stops before."""
_REFILL_SHARE = 16
"""A chunk ends when one slot in 16 is free."""
_OF_ROWS = {"line": int, "error": str | None, "source": bytes | None}
"""Fields of a row besides its prompt and its id."""
_LEAD = 16
"""Tokens of its prompt that lead a finished row's output, where a drafter reads it."""


def run(
    model: "Model",
    rows: Sequence[Row],
    output: Output,
    config: AnyConfig | None = None,
    drafter: AnyDrafter = None,
    seed: int = 0,
    settings: JobSettings | None = None,
    *,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[JobReport], None] | None = None,
) -> JobReport:
    """Decodes rows and gives their records to `output`, in the order in which they finish.

    A row's tokens are those of `generate`, or of `denoise`, with the same config, drafter and seed,
    whatever else is in the job: its randomness depends on `seed`, its id and the number of its
    sample.

    Args:
        model: a model from `load`, causal or of diffusion; its weights may lie on a mesh.
        rows: rows from `read_rows` or `rows_of`, or some of them.
        output: a `Writer` or a `Collector`; records that it has are not decoded again.
        config: settings of decoding, one number of each kind for all rows: a `GenerationConfig`,
            or a `DenoiseConfig` for a diffusion model.
        drafter: see `generate`; for a diffusion model a `SelfSpeculation`, see `denoise`.
        seed: seed of the randomness.
        settings: settings of the job.
        should_stop: asked between chunks; once it returns True, running rows are finished, no other
            is begun, and the report says `interrupted`.
        progress: receives a report after every chunk.

    Raises:
        ValueError: the settings do not fit the model, as for `generate`, or are not one number for
            all rows; two rows have one line; the mesh does not divide `batch_size`;
            `guard.expected` is given where there is no guard; or nothing fits into `memory`.
        OutputError: a record could not be written.

    Example:
        >>> import jaxspec
        >>> from jaxspec import batch
        >>> model, output = jaxspec.load("demo"), batch.Collector()
        >>> rows = batch.rows_of(["Two and two", "Once upon a time"])
        >>> report = batch.run(model, rows, output, jaxspec.GenerationConfig(max_new_tokens=8))
        >>> sorted((record["line"], len(record["tokens"])) for record in output.records)
        [(1, 8), (2, 8)]
    """
    settings = _settings_of("settings", settings)
    for name, function in (("should_stop", should_stop), ("progress", progress)):
        if not (function is None or callable(function)):
            raise ValueError(f"{name} must be a function or None, got {shown(function)}.")
    if not (hasattr(output, "done") and hasattr(output, "append")):
        raise ValueError(
            "output must be a Writer or a Collector, such as batch.Writer(path, header), got "
            f"{shown(output)}."
        )
    programs = check_job(model, rows, config, drafter, seed, settings)
    with CompileClock() as clock, on_mesh_of(model.params):
        if programs.reads_texts:
            programs.add_texts(())
        capacity = None if settings.capacity is None else round_up(settings.capacity)
        encoded = [_within(row, programs, capacity) for row in programs.encode(rows)]
        job = _Job(
            programs=programs,
            settings=settings,
            output=output,
            counters=Counters(clock),
            guard=Guard(settings.guard, LONGEST_CHUNK, programs.max_new_tokens)
            if has_guard(programs, settings)
            else None,
            unread=[] if programs.reads_texts else None,
            sources={row.line: row.source for row in rows if row.source is not None},
            should_stop=should_stop or (lambda: False),
            progress=progress or (lambda report: None),
        )
        _run(job, encoded, capacity)
        return job.report()


def decode(
    model: "Model",
    prompts: PromptLike | Iterable[PromptLike],
    config: AnyConfig | None = None,
    drafter: AnyDrafter = None,
    seed: int = 0,
    job: JobSettings | None = None,
    *,
    progress: bool = True,
    **settings: Any,
) -> list[Mapping[str, Any]]:
    """Decodes prompts in memory, in the slots of a job, and returns its records in their order.

    Unlike `generate` it refills the place of a row that has ended, so prompts may be many and their
    outputs of very different lengths. A prompt that cannot be used gives a record with `error`.

    Args:
        model: see `run`.
        prompts: see `generate`.
        config: see `run`.
        drafter: see `run`.
        seed: see `run`.
        job: how it runs.
        progress: draw a bar on terminals; elsewhere say how far it is once a minute.
        settings: fields of the config, in place of its own.

    Returns:
        For each prompt its records, one for each sample; `line` counts prompts from 1.

    Raises:
        ValueError: as `run` does.
        TypeError: a setting is no field of the config.

    Example:
        >>> import jaxspec
        >>> from jaxspec import batch
        >>> model = jaxspec.load("demo")
        >>> records = batch.decode(model, ["Two and two", "Once upon a time"], max_new_tokens=8)
        >>> [(record["line"], len(record["tokens"])) for record in records]
        [(1, 8), (2, 8)]
    """
    output = Collector()
    given: Any = config
    method: Any = drafter
    check_is_model(model)
    job = _settings_of("job", job)
    if model.is_diffusion:
        given = config_of(given, settings, DenoiseConfig)
    else:
        given, method = config_and_drafter(given, method, settings)
    with job_bar(progress) as show:
        run(model, rows_of(prompts), output, given, method, seed, job, progress=show)
    return sorted(output.records, key=itemgetter("line", "sample"))


def _settings_of(name: str, settings: JobSettings | None) -> JobSettings:
    settings = JobSettings() if settings is None else settings
    if not isinstance(settings, JobSettings):
        raise ValueError(f"{name} must be a JobSettings, got {shown(settings)}.")
    return settings


def _check_field(row: Row, check: Callable[..., Any], *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"rows: of {shown(row)} the {error}") from None


def check_job(
    model: "Model",
    rows: Sequence[Row],
    config: AnyConfig | None,
    drafter: AnyDrafter,
    seed: int,
    settings: JobSettings,
) -> SlotPrograms:
    """Checks the arguments of `run`, before there is an output.

    Returns:
        The programs of the job.

    Raises:
        ValueError: as `run` does, except for too little memory.

    Example:
        >>> import jaxspec
        >>> from jaxspec import batch
        >>> model, rows = jaxspec.load("demo"), batch.rows_of(["Two and two"])
        >>> check_job(model, rows, jaxspec.GenerationConfig(), None, 0, JobSettings()).drafts
        False
    """
    check_is_model(model)
    _ = model.known_network  # refuses one of your own
    # Their types decide, so one row of each kind is looked at: a job may have millions.
    kinds: dict[Any, Any] = {}
    for row in checked("rows", rows, Sequence):
        if not isinstance(row, Row):
            raise ValueError(
                f"rows must be rows of read_rows(path) or rows_of(prompts), got one {shown(row)}."
            )
        kinds[type(row.line), type(row.error), type(row.source)] = row
        _check_field(row, checked_id, row.id)
    for row in kinds.values():
        for name, hint in _OF_ROWS.items():
            _check_field(row, checked, name, getattr(row, name), hint)
    programs_for = canvas_programs if model.is_diffusion else text_programs
    programs = programs_for(model, config, drafter, seed)
    if settings.drafting == "never" and programs.drafts:
        programs = programs_for(model, config, None, seed)
    # Records are known by the line that they answer.
    lines = Counter(row.line for row in rows)
    line, count = max(lines.items(), key=itemgetter(1), default=(0, 0))
    if count > 1:
        raise ValueError(f"rows: {count} of them have the line {line}; give each its own.")
    guard, size = settings.guard, settings.batch_size
    expects = guard is not None and guard.expected is not None
    if expects and not has_guard(programs, settings):
        raise ValueError(
            "guard.expected (--expected-speedup) needs a guard. There is one in float32 with a "
            "drafter and drafting='auto', for causal models if decoding is greedy; else leave it "
            "out."
        )
    parts = parts_of(programs.place)
    if size is not None and size % parts:
        raise ValueError(
            f"batch_size: {size} rows cannot be divided over data={parts} of the mesh; give a "
            f"multiple of {parts}."
        )
    return programs


def _within(row: EncodedRow, programs: SlotPrograms, capacity: int | None) -> EncodedRow:
    """Returns the row, or its error where it does not fit into a given capacity."""
    if row.error is not None or capacity is None or (needed := programs.need_of(row)) <= capacity:
        return row
    error = (
        f"the prompt has {len(row.tokens)} tokens and needs a capacity of {needed} with its "
        f"output, but capacity is {capacity}."
    )
    return row._replace(tokens=row.tokens[:0], error=error)


class _Job(NamedTuple):
    """Everything that the groups of a job share.

    Attributes:
        unread: texts of finished rows that the drafter has not read; `None` if it reads none.
        sources: lines of the input, by number.
    """

    programs: SlotPrograms
    settings: JobSettings
    output: Output
    counters: Counters
    guard: Guard | None
    unread: list[np.ndarray] | None
    sources: Mapping[int, bytes]
    should_stop: Callable[[], bool]
    progress: Callable[[JobReport], None]

    def items_of(self, rows: Sequence[EncodedRow]) -> list[Item]:
        """Returns the records that are left to decode; samples of a prompt follow one another."""
        return [
            Item(row, sample)
            for row in rows
            for sample in range(self.programs.num_samples)
            if (row.line, sample) not in self.output.done
        ]

    def fit(self, group: Group, prefix: Any) -> Fit:
        rejoining = self.guard is not None
        return fit_batch(self.programs, group, self.settings, prefix, rejoining=rejoining)

    def keep(self, records: Sequence[dict[str, Any]]) -> None:
        self.output.append([with_fields_of(self.sources.get(r["line"]), r) for r in records])
        self.counters.add(num_done=len(records))

    def report(self) -> JobReport:
        return self.counters.report(None if self.guard is None else self.guard.speedup)


def _run(job: _Job, rows: Sequence[EncodedRow], capacity: int | None) -> None:
    """Decodes rows group by group, after the records of bad rows are written."""
    programs, output, counters = job.programs, job.output, job.counters
    good = [row for row in rows if row.error is None]
    bad = [row for row in rows if row.error is not None]
    samples = range(programs.num_samples)
    keys = {(row.line, 0) for row in bad}
    keys |= {(row.line, sample) for row in good for sample in samples}
    resumed = len(keys & output.done)
    counters.note(num_records=len(keys), num_errors=len(bad), num_resumed=resumed, num_done=resumed)
    # Shared by all rows, those that are done too: a resumed job reads prompts as it did before.
    num_shared, prefix = programs.read_prefix(good)
    counters.note(prefix_tokens=num_shared)
    left = [row for row in good if job.items_of([row])]
    asked = job.settings.batch_size
    size = asked or most_rows(len(left) * len(samples), parts_of(programs.place))
    groups = group_rows(left, programs.need_of, size, capacity)
    if asked is not None and groups:
        # The largest capacity first: if that fits, all groups do, and else nothing is begun.
        job.fit(groups[-1], prefix)
    job.keep([_error(row) for row in bad if (row.line, 0) not in output.done])
    for group in groups:
        if job.report().interrupted or job.should_stop():
            counters.note(interrupted=True)
            break
        _Batch(job, group, job.fit(group, prefix), prefix).run()


def _error(row: EncodedRow) -> dict[str, Any]:
    return {"line": row.line, "id": row.id, "sample": 0, "error": row.error}


class _Finished(NamedTuple):
    """Rows of a batch that have stopped, and their part of its states."""

    items: list[Item]
    facts: Any


class _Batch:
    """The slots of one group, from the first row to the last."""

    def __init__(self, job: _Job, group: Group, fit: Fit, prefix: Any):
        self.job, self.programs, self.prefix = job, job.programs, prefix
        self.capacity, size = group.capacity, fit.batch_size
        self.queue = deque(job.items_of(group.rows))
        self.states = self.programs.empty(group.capacity, size)
        job.counters.begin_group(
            group.capacity,
            batch_size=size,
            state_bytes_estimated=fit.states,
            state_bytes_held=bytes_in_one_memory(self.states),
            scratch_bytes=fit.scratch,
        )
        self.items: list[Item | None] = [None] * size
        self.lengths = np.zeros(size, np.int32)
        # Rows whose drafter has not seen all of their text.
        self.stale = np.zeros(size, bool)
        self.finished: _Finished | None = None
        self.latest: tuple[EncodedRow, bool, Any] | None = None

    def run(self) -> None:
        job = self.job
        while True:
            if job.should_stop():
                if self.queue:
                    job.counters.note(interrupted=True)
                self.queue.clear()
            chunk = Chunk(True, LONGEST_CHUNK) if job.guard is None else job.guard.choose()
            self._fill(chunk.drafting)
            if not any(self.items):
                break
            self._run_chunk(chunk)
            job.progress(job.report())
        self._keep_finished()
        job.progress(job.report())

    def _fill(self, drafting: bool) -> None:
        """Puts rows into free slots, and waits for them."""
        free = [slot for slot, item in enumerate(self.items) if item is None][: len(self.queue)]
        drafting = drafting or not self.programs.has_draft_state
        num_tokens = 0
        with self.job.counters.reading() as watch:
            for slot in free:
                item = self.queue.popleft()
                self.states = self.programs.insert(
                    self.states, self._read(item.row, drafting), slot, item.sample
                )
                self.items[slot] = item
                self.lengths[slot] = len(item.row.tokens)
                self.stale[slot] = not drafting
                num_tokens += read_in(len(item.row.tokens))
        if free and self.job.guard is not None and self.programs.has_draft_state:
            self.job.guard.book_reading(drafting, len(free), num_tokens, watch.seconds)

    def _read(self, row: EncodedRow, drafting: bool) -> Any:
        """Returns the state of a row behind its prompt; samples of one prompt share it."""
        if self.latest is not None and self.latest[:2] == (row, drafting):
            return self.latest[2]
        self.latest = None
        state = self.programs.read(row, self.prefix, self.capacity, drafting)
        if self.job.programs.num_samples > 1:
            self.latest = (row, drafting, state)
        return state

    def _rejoin(self) -> None:
        """Lets drafters read the tokens that rows emitted without them."""
        if self.programs.has_draft_state:
            for slot in np.flatnonzero(self.stale):
                if self.items[slot] is not None:
                    length = int(self.lengths[slot])
                    self.states = self.programs.rejoin(self.states, int(slot), length)
            jax.block_until_ready(self.states)
        self.stale[:] = False

    def _run_chunk(self, chunk: Chunk) -> None:
        job, counters = self.job, self.job.counters
        extra = 0.0
        if chunk.drafting and self.stale.any():
            with counters.reading() as watch:
                self._rejoin()
            extra = watch.seconds
        # Without rows for free slots there is no reason to end the chunk early.
        wanted = max(1, len(self.items) // _REFILL_SHARE) if self.queue else len(self.items)
        with counters.stepping() as watch:
            self.states, info = self.programs.run(self.states, chunk, wanted)
            if self.finished is not None:
                with counters.writing(info.steps):
                    self._keep_finished()
            info: ChunkInfo = jax.device_get(info)
        steps, row_steps, tokens = int(info.steps), int(info.row_steps), int(info.tokens)
        drafted = chunk.drafting and self.programs.drafts
        counters.add(
            counts=Counts(num_tokens=tokens, num_steps=row_steps),
            num_steps=steps,
            num_drafted_steps=steps * drafted,
            slot_steps=steps * len(self.items),
        )
        if not chunk.drafting:
            self.stale[:] = True
        self.lengths = np.array(info.length)
        stopped = np.asarray(info.stop) != Stop.RUNNING
        slots = [slot for slot, item in enumerate(self.items) if item and stopped[slot]]
        if job.guard is not None:
            job.guard.book(
                chunk.drafting,
                steps,
                row_steps,
                # A stop id that is filled in late may cut a text off.
                max(tokens, row_steps),
                watch.seconds,
                extra,
                num_stopped=len(slots),
                waiting=bool(self.queue),
            )
        if slots:
            facts = jax.tree.map(lambda leaf: leaf[np.asarray(slots)], info.facts)
            items = [item for slot in slots if (item := self.items[slot])]
            self.finished = _Finished(items, facts)
            for slot in slots:
                self.items[slot] = None

    def _keep_finished(self) -> None:
        """Writes the records of finished rows."""
        if self.finished is None:
            return
        items, facts = self.finished
        self.finished = None
        records = self.programs.records(items, facts)
        self.job.keep(records)
        if (unread := self.job.unread) is not None:
            pairs = zip(items, records, strict=True)
            unread += [
                np.append(item.row.tokens[-_LEAD:], np.asarray(record["tokens"], np.int32))
                for item, record in pairs
            ]
            if self.programs.add_texts(unread):
                unread.clear()
        num_cut = sum(record["finish_reason"] == "length" for record in records)
        self.job.counters.add(num_decoded=len(items), num_cut=num_cut)
