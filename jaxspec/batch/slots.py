"""Slots of a job: places of rows in a batch, which stays on the device from its first chunk on.

The arrays of the batch are donated to each program, which returns them changed in place. Everything
that differs from call to call (a slot's number, the number of steps, drafting) is an argument, so
nothing compiles twice. `SlotPrograms` is what a job asks of the programs of a model, causal
(`jaxspec.batch.texts`) or not (`jaxspec.batch.canvases`).
"""

import abc
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import Group
from jaxspec.batch.rows import EncodedRow, Row
from jaxspec.batch.settings import JobSettings
from jaxspec.core.loop import run
from jaxspec.core.types import Params, PyTree, StateT, StepFn, Stop
from jaxspec.decoding.metrics import ROW_FIGURES, Counts, Metrics
from jaxspec.sharding import Placement


class ChunkInfo(NamedTuple):
    """Results of a chunk.

    Attributes:
        facts: the part of the states that records are made from; other buffers.
        stop: `Stop` codes of the rows.
        length: tokens of each row's text so far, its prompt included.
        steps: steps of the batch.
        row_steps: steps, counted once for each row that was running.
        tokens: tokens emitted by all rows.
    """

    facts: Any
    stop: Int[Array, " rows"]
    length: Int[Array, " rows"]
    steps: Int[Array, ""]
    row_steps: Int[Array, ""]
    tokens: Int[Array, ""]


class Item(NamedTuple):
    """A record that is to be made."""

    row: EncodedRow
    sample: int

    def record(
        self, text: str | None, tokens: np.ndarray, finish_reason: str, counts: Counts
    ) -> dict[str, Any]:
        """Returns what every record of a text holds."""
        metrics = Metrics.of([counts], [tokens.tolist()])
        return {
            "line": self.row.line,
            "id": self.row.id,
            "sample": self.sample,
            "text": text,
            "tokens": tokens.tolist(),
            "finish_reason": finish_reason,
            "num_prompt_tokens": len(self.row.tokens),
            "metrics": {name: getattr(metrics, name) for name in ROW_FIGURES},
        }


class SlotPrograms(abc.ABC):
    """Programs of a job, bound to what is the same for all rows.

    Attributes:
        place: layout of the states on the model's mesh; `None` on one device.
    """

    place: Placement | None

    @property
    def num_samples(self) -> int:
        """Records of each row."""
        return 1

    @property
    def has_draft_state(self) -> bool:
        """True if a row that was decoded plainly must `rejoin` before it drafts."""
        return False

    @property
    def reads_texts(self) -> bool:
        """True if the drafter reads what rows have emitted, and no output depends on it."""
        return False

    @property
    @abc.abstractmethod
    def max_new_tokens(self) -> int:
        """Tokens that a row emits, at most."""

    @property
    @abc.abstractmethod
    def drafts(self) -> bool:
        """True if steps may draft."""

    @property
    @abc.abstractmethod
    def drafts_change_nothing(self) -> bool:
        """See `jaxspec.batch.settings.drafts_change_nothing`."""

    @abc.abstractmethod
    def encode(self, rows: Sequence[Row]) -> list[EncodedRow]:
        """Returns the token ids of every row; a prompt that cannot be read becomes an error."""

    @abc.abstractmethod
    def need_of(self, row: EncodedRow) -> int:
        """Returns the tokens that a row's slot must hold."""

    @abc.abstractmethod
    def shapes(self, capacity: int, batch_size: int) -> Any:
        """Returns the shapes of the states of a batch."""

    @staticmethod
    @abc.abstractmethod
    def free(states: Any) -> Any:
        """Makes rows that have stopped of states that are all zeros."""

    @staticmethod
    def sample_of(row: Any, sample: Int[Array, ""]) -> Any:
        """Returns the sample of a row's prompt with this number; here there is one."""
        del sample
        return row

    @abc.abstractmethod
    def lowered(
        self, group: Group, shapes: Any, prefix: Any, rejoining: bool
    ) -> tuple[Any, list[Any]]:
        """Returns the program that reads the longest prompt, and those that change the states.

        They are not compiled. `rejoining`: rows may draft after they were decoded plainly.
        """

    @abc.abstractmethod
    def read(self, row: EncodedRow, prefix: Any, capacity: int, drafting: bool) -> Any:
        """Returns the state of one row, without a batch axis."""

    @abc.abstractmethod
    def run(self, states: Any, chunk: Chunk, wanted: int) -> tuple[Any, ChunkInfo]:
        """Runs a chunk, which ends early once `wanted` rows have stopped."""

    @abc.abstractmethod
    def records(self, items: Sequence[Item], facts: Any) -> list[dict[str, Any]]:
        """Returns the records of rows that have stopped."""

    def read_prefix(self, rows: Sequence[EncodedRow]) -> tuple[int, Any]:
        """Reads what all prompts begin with; returns its length too. Here it is not shared."""
        del rows
        return 0, None

    def insert(self, states: Any, row: Any, slot: int, sample: int) -> Any:
        """Puts a row into a slot, and waits until it is there."""
        numbers = int32(slot), int32(sample)
        states = insert(states, row, *numbers, sample_of=self.sample_of, place=self.place)
        # One row at a time next to the batch: `fitting` counts no more.
        return jax.block_until_ready(states)

    def rejoin(self, states: Any, slot: int, length: int) -> Any:
        """Lets the drafter read a row's text of `length` tokens; without draft states, nothing."""
        del slot, length
        return states

    def add_texts(self, texts: Sequence[np.ndarray]) -> bool:
        """Gives finished texts to the drafter; False: it asks for them again, with more."""
        del texts
        return True

    def empty(self, capacity: int, batch_size: int) -> Any:
        """Returns a batch whose slots are all free."""
        return empty_states(self.shapes(capacity, batch_size), self.free, self.place)

    def placed_shapes(self, capacity: int, batch_size: int) -> Any:
        """Returns the shapes of the states of a batch, with the shardings of `empty`."""
        shapes = self.shapes(capacity, batch_size)
        if self.place is None:
            return shapes
        compiled = empty_states.lower(shapes, self.free, self.place).compile()
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            compiled.output_shardings,
        )


def has_guard(programs: SlotPrograms, settings: JobSettings) -> bool:
    """Returns True where a guard decides whether steps draft."""
    return settings.drafting == "auto" and programs.drafts and programs.drafts_change_nothing


def batch_shapes(row: PyTree, batch_size: int) -> PyTree:
    """Returns the shapes of a batch, from those of a row."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype), row
    )


@partial(jax.jit, static_argnames=("shapes", "free", "place"))
def empty_states(
    shapes: StateT, free: Callable[[StateT], StateT], place: Placement | None = None
) -> StateT:
    """Returns a batch whose slots are all free: `free` makes rows that have stopped of zeros."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    states = free(jax.tree.map(zeros, shapes))
    return states if place is None else place(states)


@partial(jax.jit, static_argnames=("sample_of", "place"), donate_argnames=("states",))
def insert(
    states: Any,
    row: Any,
    index: Int[Array, ""],
    sample: Int[Array, ""],
    *,
    sample_of: Callable[[Any, Array], Any],
    place: Placement | None = None,
) -> Any:
    """Puts a row into a slot, as the sample of its prompt with this number."""
    states = put(states, sample_of(row, sample), index)
    return states if place is None else place(states)


def put(whole: PyTree, part: PyTree, index: Int[Array, ""]) -> PyTree:
    """Writes a row's arrays into the beginning of its slot in those of a batch."""

    def put(array: Array, row: Array) -> Array:
        row = row[tuple(slice(size) for size in array.shape[1:])]
        start = (index, *[jnp.int32(0)] * row.ndim)
        return jax.lax.dynamic_update_slice(array, row[None].astype(array.dtype), start)

    return jax.tree.map(put, whole, part)


def bytes_in_one_memory(arrays: PyTree) -> int:
    """Returns the bytes of arrays, or of their shapes, in one memory.

    That is the memory of a device, or of the host that virtual devices share. A key is two numbers
    of 32 bits.
    """

    def of(leaf: Any) -> int:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        size = 8 if is_key else np.dtype(leaf.dtype).itemsize
        if leaf.sharding is None:
            return leaf.size * size
        share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * size
        return share * devices_in_one_memory(leaf.sharding.device_set)

    return sum(of(leaf) for leaf in jax.tree.leaves(arrays))


def devices_in_one_memory(devices: Collection[jax.Device]) -> int:
    """Returns the number of devices that share the memory of `available_memory`."""
    return len(devices) if next(iter(devices)).platform == "cpu" else 1


def count_running(stop: Int[Array, " rows"]) -> Int[Array, ""]:
    """Returns the number of rows that have not stopped."""
    return jnp.sum(stop == Stop.RUNNING, dtype=jnp.int32)


def repeat(
    step: StepFn,
    params: Params,
    states: Any,
    stop_of: Callable[[Any], Array],
    chosen: Bool[Array, ""],
    limit: Int[Array, ""],
    fewest: Int[Array, ""],
) -> tuple[Any, Int[Array, ""]]:
    """Repeats a step of a chunk; returns the states and the number of steps.

    Args:
        step: of a batch.
        params: weights.
        states: the batch.
        stop_of: returns the `Stop` codes of its rows.
        chosen: False: no step at all.
        limit: most steps.
        fewest: rows, at least 0; the chunk ends when no more than these are running.
    """

    def counted(params: Params, carry):
        states, count = carry
        states, info = step(params, states)
        return (states, count + 1), info

    def continues(carry) -> Bool[Array, ""]:
        states, count = carry
        return chosen & (count < limit) & (count_running(stop_of(states)) > fewest)

    return run(counted, params, (states, jnp.int32(0)), continues)


def chunk_arguments(chunk: Chunk, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns typed arguments: with Python's own numbers the loop would compile once more."""
    return np.asarray(chunk.drafting), int32(chunk.limit), int32(wanted)


def int32(number: int | np.integer) -> np.ndarray:
    return np.asarray(number, np.int32)
