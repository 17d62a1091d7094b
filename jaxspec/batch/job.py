"""`run`: decodes the rows of a job in slots that are refilled as rows finish.

The host and the device take turns in one place only: after a chunk of steps the host looks at which
rows have stopped, and puts others into their slots. What it does with finished rows, text, checks
and writing, it does while the next chunk runs.
"""

import dataclasses
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from jaxspec.batch.guard import Chunk, Guard, GuardSettings
from jaxspec.batch.plan import (
    SHARE_OF_MEMORY,
    Group,
    group_rows,
    most_rows,
    read_in,
    round_up,
    shared_prefix,
    slots_needed,
)
from jaxspec.batch.report import Books, JobReport
from jaxspec.batch.rows import EncodedRow, Row, digest_of, encode_rows, number_of
from jaxspec.batch.slots import (
    CHUNK,
    ChunkInfo,
    Dormant,
    Place,
    RowSettings,
    devices_in_one_memory,
    empty_states,
    insert,
    num_bytes,
    placed_shapes,
    read_prefix,
    read_prompt,
    rejoin,
    run_chunk,
    state_shapes,
)
from jaxspec.batch.writer import Output, version_in_use
from jaxspec.bench.compare import describe
from jaxspec.checkpoint.memory import available_memory
from jaxspec.compilation import CompileClock
from jaxspec.core.decode import Prefix, Prompt
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import DecodeState, Drafter, Params, PyTree, Stop, Warp
from jaxspec.drafters import LoadedDrafter, NoDraft
from jaxspec.generation import (
    GenerationConfig,
    automaton_of,
    bucket_of,
    check_request,
    text_of,
    warps_of,
)
from jaxspec.result import HostRow, host_rows
from jaxspec.sharding import Placement, on_mesh_of, placement_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

LONGEST_CHUNK = 32
"""Steps after which the host looks, if no row stops before."""
_REFILL_SHARE = 16
"""A chunk ends when one slot in so many is free."""

_SAMPLED = 64
"""Numbers of each array that a header vouches for."""

Drafting = Literal["auto", "always", "never"]


def job_header(
    model: "Model",
    rows: Sequence[Row],
    config: GenerationConfig | None = None,
    drafter: Drafter | LoadedDrafter | None = None,
    seed: int = 0,
    *,
    drafting: Drafting = "auto",
    slots: int | None = None,
) -> dict[str, Any]:
    """What decides a job's records, as plain values: what a job that is resumed must share.

    Arguments are those of `run`. Not in it: how many rows at once, devices, and, where outputs are
    the same either way, whether steps draft. These decide how fast it is.
    """
    config = config or GenerationConfig()
    weights = drafter.params if isinstance(drafter, LoadedDrafter) else ()
    steps = "plain" if drafter is None or drafting == "never" else "drafted"
    # Slots hold what drafts overhang, so those decide which rows fit.
    either = slots is None and _drafts_change_nothing(model, config)
    return {
        "format": 3,
        "jaxspec": version_in_use(),
        "model": model.name,
        "architecture": repr(model.config),
        "dtype": str(np.dtype(model.network.dtype)),
        "weights": _sample_of(model.network),
        "tokenizer": _checksum_of(model.tokenizer),
        "stop_token_ids": list(model.stop_token_ids),
        "drafter": describe(drafter),
        "draft_weights": _sample_of(weights),
        "config": {name: repr(value) for name, value in dataclasses.asdict(config).items()},
        "drafting": "either" if either else steps,
        "slots": None if slots is None else round_up(slots),
        "seed": seed,
        "num_rows": len(rows),
        "rows": digest_of(rows),
    }


def _sample_of(weights: PyTree) -> str:
    """A checksum of some numbers of every array: other weights are noticed, and little is read."""
    checksum = 0
    for leaf in jax.tree.leaves(weights):
        some = leaf[(0,) * (leaf.ndim - 1)][:_SAMPLED] if leaf.ndim else leaf
        checksum = zlib.crc32(np.asarray(some).tobytes(), checksum)
    return f"{checksum:08x}"


def _checksum_of(tokenizer: "Tokenizer | None") -> str | None:
    """Of how it splits texts and renders chats."""
    if tokenizer is None:
        return None
    parts = [tokenizer.backend.to_str(), *sorted(tokenizer.templates.items())]
    parts += sorted(tokenizer.special_tokens.items())
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def run(
    model: "Model",
    rows: Sequence[Row],
    output: Output,
    config: GenerationConfig | None = None,
    drafter: Drafter | LoadedDrafter | None = None,
    seed: int = 0,
    *,
    batch: int | None = None,
    slots: int | None = None,
    drafting: Drafting = "auto",
    guard: GuardSettings | None = None,
    memory: int | None = None,
    place: Place | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[JobReport], None] | None = None,
) -> JobReport:
    """Decodes rows and gives their records to `output`, in the order in which they finish.

    A row's tokens are those of `generate` with the same config, drafter and seed, whatever else is
    in the job: its randomness has the name of `seed`, its id and the number of its sample.

    Args:
        model: the target, from `load`; its weights may lie on a mesh.
        rows: from `read_rows` or `rows_of`, or any part of them.
        output: a `Writer` or a `Collector`; what it has already is not decoded again.
        config: how to decode, one number of each kind for all rows.
        drafter: as for `generate`.
        seed: of the randomness.
        batch: rows at once, a multiple of the parts that a mesh divides them into; `None`: as many
            as help and as fit into memory.
        slots: cache slots: tokens that a row's cache holds, rounded up to a multiple of 64; rows
            that need more become errors. `None`: what they need.
        drafting: "auto" lets a guard decide from the time that chunks take, where that changes no
            output: for greedy decoding in float32. "always" drafts, "never" does not.
        guard: settings of the guard; what it is to expect, only where there is one.
        memory: bytes that caches, states and scratch may take; `None`: most of what is available.
        place: where states belong, see `slots.Place`; `None`: where the model's mesh says.
        should_stop: asked between chunks; once it says True, rows that run are finished, no other
            is begun, and the report says `interrupted`.
        progress: told how the job goes after every chunk.

    Raises:
        ValueError: the settings do not fit the model, as for `generate`, or are not one number for
            all rows; two rows have one line; `batch` or `slots` is below 1, or the mesh does not
            divide `batch`; `drafting` is none of the three, or `guard.expected` is given where
            there is no guard; or nothing fits into `memory`.
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
    config = config or GenerationConfig()
    place = place or placement_of(model.params)
    loaded = check_job(
        model,
        rows,
        config,
        drafter,
        seed,
        batch=batch,
        slots=slots,
        drafting=drafting,
        guard=guard,
        place=place,
    )
    is_guarded = _is_guarded(model, config, loaded, drafting)
    slots = None if slots is None else round_up(slots)
    encoded = [
        _checked_slots(row, slots, model, config, loaded) for row in encode_rows(model, rows)
    ]
    good = [row for row in encoded if row.error is None]
    bad = [row for row in encoded if row.error is not None]
    parts = _parts_of(place)
    with CompileClock() as clock, on_mesh_of(model.params):
        books = Books(clock)
        most_tokens = _whole(config.max_new_tokens)
        job = _Job(
            model=model,
            config=config,
            seed=seed,
            params=Params(model.network, loaded.params),
            drafter=loaded.drafter,
            automaton=automaton_of(model, config),
            output=output,
            books=books,
            guard=Guard(guard, LONGEST_CHUNK, most_tokens) if is_guarded else None,
            place=place,
            should_stop=should_stop or (lambda: False),
            progress=progress or (lambda report: None),
        )
        samples = range(config.num_samples)
        keys = {(row.line, 0) for row in bad}
        keys |= {(row.line, sample) for row in good for sample in samples}
        books.num_records, books.num_errors = len(keys), len(bad)
        books.num_resumed = len(keys & output.done)
        # Of all rows, not of those that are left: what is resumed is read as it would have been.
        prefix = job.read_prefix(shared_prefix(good, CHUNK))
        left = [row for row in good if job.items_of([row])]
        groups = group_rows(
            left,
            most_tokens,
            model.config.max_positions,
            loaded.drafter,
            batch or most_rows(len(left) * len(samples), parts),
            slots,
        )
        if batch is not None and groups:
            # Of the most slots: if that fits, so do all, and else nothing is begun.
            _fit_batch(job, groups[-1], batch, memory, prefix)
        job.keep([_error(row) for row in bad if (row.line, 0) not in output.done])
        for group in groups:
            if books.interrupted or job.should_stop():
                books.interrupted = True
                break
            fit = _fit_batch(job, group, batch, memory, prefix)
            _Batch(job, group, fit, prefix).run()
        return job.report()


def check_job(
    model: "Model",
    rows: Sequence[Row],
    config: GenerationConfig,
    drafter: Drafter | LoadedDrafter | None,
    seed: int,
    *,
    batch: int | None,
    slots: int | None,
    drafting: Drafting,
    guard: GuardSettings | None,
    place: Place | None = None,
) -> LoadedDrafter:
    """What `run` asks of its arguments, for who wants to know before there is an output.

    Returns:
        The drafter with its weights; `NoDraft` where no step is to draft.

    Raises:
        ValueError: as `run` does, but for what does not fit into memory.
    """
    loaded = check_request(model, config, drafter, seed)
    _check_one_for_all(config)
    _check_lines(rows)
    for name, value in (("batch", batch), ("slots", slots)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if drafting not in ("auto", "always", "never"):
        raise ValueError(f"drafting must be 'auto', 'always' or 'never', got {drafting!r}.")
    if drafting == "never":
        loaded = LoadedDrafter(NoDraft(), ())
    is_guarded = _is_guarded(model, config, loaded, drafting)
    if guard is not None and guard.expected is not None and not is_guarded:
        raise ValueError(
            "guard.expected (--expected-speedup) needs a guard. There is one for greedy "
            "decoding in float32 with a drafter and drafting='auto'; else leave it out."
        )
    parts = _parts_of(place or placement_of(model.params))
    if batch is not None and batch % parts:
        raise ValueError(
            f"batch: {batch} rows cannot be divided over data={parts} of the mesh; give a multiple "
            f"of {parts}."
        )
    return loaded


def _is_guarded(
    model: "Model", config: GenerationConfig, loaded: LoadedDrafter, drafting: Drafting
) -> bool:
    drafts = loaded.drafter != NoDraft()
    return drafting == "auto" and drafts and _drafts_change_nothing(model, config)


def _check_one_for_all(config: GenerationConfig) -> None:
    for field in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p"):
        if np.ndim(getattr(config, field)):
            raise ValueError(f"{field} must be one number for the whole job, got several.")


def _check_lines(rows: Sequence[Row]) -> None:
    """Records are known by the line that they answer."""
    lines = Counter(row.line for row in rows)
    line, count = max(lines.items(), key=itemgetter(1), default=(0, 0))
    if count > 1:
        raise ValueError(f"rows: {count} of them have the line {line}; give each its own.")


def _drafts_change_nothing(model: "Model", config: GenerationConfig) -> bool:
    """Drawn tokens depend on what was drafted, and 16 bits round coarsely."""
    return np.dtype(model.network.dtype) == np.float32 and not np.any(config.temperature)


def _checked_slots(
    row: EncodedRow,
    slots: int | None,
    model: "Model",
    config: GenerationConfig,
    loaded: LoadedDrafter,
) -> EncodedRow:
    if row.error is not None or slots is None:
        return row
    needed = slots_needed(
        len(row.tokens),
        _whole(config.max_new_tokens),
        model.config.max_positions,
        loaded.drafter.tree_shape[1],
    )
    if needed <= slots:
        return row
    error = (
        f"the prompt has {len(row.tokens)} tokens and needs {needed} slots with what is to be "
        f"emitted, but slots is {slots}."
    )
    return row._replace(tokens=row.tokens[:0], error=error)


def _error(row: EncodedRow) -> dict[str, Any]:
    return {"line": row.line, "id": row.id, "sample": 0, "error": row.error}


def _whole(value: Any) -> int:
    """A number that may be one for each prompt of `generate`, and was found to be one for all."""
    return int(value)


class _Item(NamedTuple):
    """A record that is to be made."""

    row: EncodedRow
    sample: int


_OF_METRICS = (
    *("num_tokens", "num_verify_steps", "num_draft_tokens"),
    *("mean_acceptance_length", "acceptance_rate"),
)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What stays the same from group to group, and the books."""

    model: "Model"
    config: GenerationConfig
    seed: int
    params: Params
    drafter: Drafter
    automaton: StopAutomaton | None
    output: Output
    books: Books
    guard: Guard | None
    place: Place | None
    should_stop: Callable[[], bool]
    progress: Callable[[JobReport], None]

    @cached_property
    def warp(self) -> Warp:
        def one(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(self.config, name)], dtype)

        return jax.tree.map(itemgetter(0), warps_of(self.model, self.config, one, 1))

    @cached_property
    def stop_ids(self) -> np.ndarray:
        asked = self.config.stop_token_ids
        ids = self.model.stop_token_ids if asked is None else asked
        return np.asarray([*ids] or [-1], np.int32)

    @cached_property
    def has_draft_state(self) -> bool:
        """False for drafters that read nothing but the text in front of them."""
        shapes = self.shapes(Group(CHUNK, ()), 1)
        return bool(jax.tree.leaves(shapes.draft))

    def row_settings(self, slots: int) -> RowSettings:
        return RowSettings(slots, self.config.logprobs, self.config.warped_logprobs)

    def shapes(self, group: Group, batch: int) -> DecodeState:
        """Of the states of so many rows."""
        prompt = self.prompt_of(EncodedRow(0, 0, np.zeros(1, np.int32)))
        return state_shapes(
            self.params,
            prompt,
            batch,
            drafter=self.drafter,
            settings=self.row_settings(group.slots),
        )

    def read_prefix(self, tokens: np.ndarray) -> Prefix | None:
        self.books.prefix_tokens = len(tokens)
        if not len(tokens):
            return None
        return read_prefix(self.params, tokens, drafter=self.drafter)

    def items_of(self, rows: Sequence[EncodedRow]) -> list[_Item]:
        """What is left to decode; samples of a prompt follow one another."""
        return [
            _Item(row, sample)
            for row in rows
            for sample in range(self.config.num_samples)
            if (row.line, sample) not in self.output.done
        ]

    def longest_text(self, row: EncodedRow) -> int:
        """Tokens of a row's prompt and of all that it may emit."""
        wanted = len(row.tokens) + _whole(self.config.max_new_tokens)
        return min(wanted, self.model.config.max_positions)

    def prompt_of(self, row: EncodedRow) -> Prompt:
        length = len(row.tokens)
        tokens = np.zeros(read_in(length), np.int32)
        tokens[:length] = row.tokens
        room = self.longest_text(row) - length
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "length": np.asarray(length, np.int32),
            "room": np.asarray(room, np.int32),
            "seed": np.asarray([self.seed, number_of(row.id)], np.int32),
            "stop_ids": self.stop_ids,
        }
        return Prompt(**arrays, warp=self.warp)

    def record(self, item: _Item, host: HostRow) -> dict[str, Any]:
        stop_strings = self.config.stop_strings
        facts: dict[str, Any] = {
            "line": item.row.line,
            "id": item.row.id,
            "sample": item.sample,
            "text": text_of(self.model.tokenizer, host.tokens, host.finish_reason, stop_strings),
            "tokens": host.tokens.tolist(),
            "finish_reason": host.finish_reason,
            "num_prompt_tokens": len(item.row.tokens),
        }
        for name in ("logprobs", "warped_logprobs"):
            values = getattr(host, name)
            if values is not None:
                facts[name] = [float(f"{value:.7g}") for value in values]
        metrics = host.metrics()
        facts["metrics"] = {name: getattr(metrics, name) for name in _OF_METRICS}
        return facts

    def keep(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.output.append(records)
        self.books.num_written += len(records)

    def report(self) -> JobReport:
        return self.books.report(None if self.guard is None else self.guard.speedup)


class _Fit(NamedTuple):
    """How many rows at once, and the bytes they take."""

    size: int
    states: int
    scratch: int


def _parts_of(place: Place | None) -> int:
    return place.data_axis_size if isinstance(place, Placement) else 1


def _fit_batch(
    job: _Job, group: Group, batch: int | None, memory: int | None, prefix: Prefix | None
) -> _Fit:
    """Rows at once that fit into memory, with what the compiled programs need besides.

    On a mesh each of its parts gets as many.

    Raises:
        ValueError: not even one row does, or not the number asked for.
    """
    parts = _parts_of(job.place)
    size = batch or most_rows(len(group.rows) * job.config.num_samples, parts)
    while True:
        shapes = placed_shapes(job.shapes(group, size), job.place)
        held = num_bytes(shapes)
        # A compilation is not tried where the states alone are too large.
        usable = _usable(memory)
        fits = usable is None or held <= usable
        scratch = _scratch_bytes(job, group, shapes, prefix) if fits else 0
        needed = held + scratch
        # Asked again: what compiled programs and their making take is no longer there.
        usable = _usable(memory)
        if usable is None or needed <= usable:
            return _Fit(size, held, scratch)
        if size <= parts or batch is not None:
            raise ValueError(
                f"batch: {size} rows of {group.slots} slots need {needed / 1e6:.1f} MB, and "
                f"{usable / 1e6:.1f} MB may be used. Decode fewer rows at once, shorter prompts, "
                "or fewer new tokens."
            )
        # Every try compiles; what is needed grows with the rows.
        fitting = max(1, int(size * usable / needed))
        size = min(size // 2, 1 << (fitting.bit_length() - 1))
        size = max(1, size // parts) * parts


def _usable(memory: int | None) -> int | None:
    """Bytes that may be taken: those given, or else most of what is available now."""
    if memory is not None:
        return memory
    available = available_memory()
    return None if available is None else int(SHARE_OF_MEMORY * available)


def _scratch_bytes(job: _Job, group: Group, shapes: DecodeState, prefix: Prefix | None) -> int:
    """The row of the longest prompt, and what reading it, a chunk or rejoining takes, if more."""
    settings = job.row_settings(group.slots)
    longest = job.prompt_of(max(group.rows, key=lambda row: len(row.tokens)))
    read = _bytes_of(
        read_prompt.lower(job.params, longest, prefix, drafter=job.drafter, settings=settings)
    )
    chunk = _bytes_of(
        run_chunk.lower(
            job.params,
            shapes,
            job.automaton,
            *_chunk_arguments(Chunk(True, 1), 1),
            drafter=job.drafter,
            place=job.place,
        )
    )
    rejoining = _ProgramBytes(0, 0)
    if job.guard is not None and job.has_draft_state:
        text = max(job.longest_text(row) for row in group.rows)
        rejoining = _bytes_of(
            rejoin.lower(
                job.params,
                shapes,
                _int32(0),
                drafter=job.drafter,
                bucket=bucket_of(text),
                place=job.place,
            )
        )
    devices = 1 if job.place is None else devices_in_one_memory(shapes.stop.sharding.device_set)
    return devices * (
        read.given + max(read.temporary, *(sum(program) for program in (chunk, rejoining)))
    )


class _ProgramBytes(NamedTuple):
    """On each device: while a program runs, and of what it gives that is not put in place."""

    temporary: int
    given: int


def _bytes_of(lowered: Any) -> _ProgramBytes:
    """By XLA's analysis; calls find the same compiled program."""
    memory = lowered.compile().memory_analysis()
    if memory is None:
        return _ProgramBytes(0, 0)
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return _ProgramBytes(memory.temp_size_in_bytes, given)


def _chunk_arguments(chunk: Chunk, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Typed, as Python's own numbers would compile the loop once more."""
    return (
        np.asarray(chunk.drafting),
        np.asarray(chunk.limit, np.int32),
        np.asarray(wanted, np.int32),
    )


class _Finished(NamedTuple):
    """Rows of a batch that have stopped, and what they emitted."""

    items: list[_Item]
    facts: DecodeState


class _Batch:
    """The slots of one group, from the first row to the last."""

    def __init__(self, job: _Job, group: Group, fit: _Fit, prefix: Prefix | None):
        self.job, self.prefix, size = job, prefix, fit.size
        self.settings = job.row_settings(group.slots)
        self.queue = deque(job.items_of(group.rows))
        self.states = empty_states(job.shapes(group, size), job.place)
        held = num_bytes(self.states)
        job.books.begin_group(size, group.slots, fit.states, held, fit.scratch)
        self.items: list[_Item | None] = [None] * size
        self.lengths = np.zeros(size, np.int32)
        # Rows whose drafter has not seen all of their text.
        self.stale = np.zeros(size, bool)
        self.finished: _Finished | None = None
        self.latest: tuple[EncodedRow, bool, DecodeState] | None = None

    def run(self) -> None:
        job, books = self.job, self.job.books
        while True:
            if job.should_stop():
                books.interrupted = bool(self.queue) or books.interrupted
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
        drafting = drafting or not self.job.has_draft_state
        num_tokens = 0
        with self.job.books.reading() as watch:
            for slot in free:
                item = self.queue.popleft()
                self.states = insert(
                    self.states,
                    self._read(item.row, drafting),
                    _int32(slot),
                    _int32(item.sample),
                    place=self.job.place,
                )
                # One row at a time beside the batch: `_scratch_bytes` counts no more.
                jax.block_until_ready(self.states.stop)
                self.items[slot] = item
                self.lengths[slot] = len(item.row.tokens)
                self.stale[slot] = not drafting
                num_tokens += read_in(len(item.row.tokens))
        if free and self.job.guard is not None and self.job.has_draft_state:
            self.job.guard.book_reading(drafting, len(free), num_tokens, watch.seconds)

    def _read(self, row: EncodedRow, drafting: bool) -> DecodeState:
        """A row behind its prompt; samples of one prompt share it."""
        if self.latest is not None and self.latest[:2] == (row, drafting):
            return self.latest[2]
        self.latest = None
        state = read_prompt(
            self.job.params,
            self.job.prompt_of(row),
            self.prefix,
            drafter=self.job.drafter if drafting else Dormant(self.job.drafter),
            settings=self.settings,
        )
        if self.job.config.num_samples > 1:
            self.latest = (row, drafting, state)
        return state

    def _rejoin(self) -> None:
        """Lets drafters read what rows emitted without them."""
        if self.job.has_draft_state:
            for slot in np.flatnonzero(self.stale):
                if self.items[slot] is not None:
                    self.states = rejoin(
                        self.job.params,
                        self.states,
                        _int32(slot),
                        drafter=self.job.drafter,
                        bucket=bucket_of(int(self.lengths[slot])),
                        place=self.job.place,
                    )
            jax.block_until_ready(self.states.stop)
        self.stale[:] = False

    def _run_chunk(self, chunk: Chunk) -> None:
        job, books = self.job, self.job.books
        extra = 0.0
        if chunk.drafting and self.stale.any():
            with books.reading() as watch:
                self._rejoin()
            extra = watch.seconds
        # Without rows to put into free slots there is nothing to come back for.
        wanted = max(1, len(self.items) // _REFILL_SHARE) if self.queue else len(self.items)
        with books.stepping() as watch:
            self.states, info = run_chunk(
                job.params,
                self.states,
                job.automaton,
                *_chunk_arguments(chunk, wanted),
                drafter=job.drafter,
                place=job.place,
            )
            if self.finished is not None:
                with books.writing(info.steps):
                    self._keep_finished()
            info: ChunkInfo = jax.device_get(info)
        steps, row_steps, tokens = int(info.steps), int(info.row_steps), int(info.tokens)
        drafted = chunk.drafting and job.drafter != NoDraft()
        books.count(steps, row_steps, tokens, len(self.items), drafted)
        if not chunk.drafting:
            self.stale[:] = True
        self.lengths = np.array(info.facts.context.length)
        stopped = np.asarray(info.facts.stop) != Stop.RUNNING
        slots = [slot for slot, item in enumerate(self.items) if item and stopped[slot]]
        if job.guard is not None:
            job.guard.book(
                chunk.drafting,
                steps,
                row_steps,
                tokens,
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
        if self.finished is None:
            return
        items, facts = self.finished
        self.finished = None
        hosts = host_rows(facts, [len(item.row.tokens) for item in items])
        self.job.keep(
            [self.job.record(item, host) for item, host in zip(items, hosts, strict=True)]
        )
        self.job.books.num_decoded += len(items)


def _int32(number: int | np.integer) -> np.ndarray:
    return np.asarray(number, np.int32)
