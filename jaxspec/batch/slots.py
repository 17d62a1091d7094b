"""The programs of a job: read a prompt, put its row into a slot, run a chunk of steps.

A slot is a row's place in the batch. The batch stays on the device from the first chunk to the
last: its arrays are donated to each program, which returns them changed in place. Everything that
differs from call to call (a slot's number, the number of steps, drafting) is an argument, so
nothing compiles twice. `Programs` binds them to what is the same for all rows.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import capacity_needed, read_in
from jaxspec.batch.rows import EncodedRow, number_of
from jaxspec.core.cache import pad_caches
from jaxspec.core.decode import (
    Prefix,
    Prompt,
    begin,
    num_emitted,
    num_likeliest,
    prefill,
    speculative_step,
)
from jaxspec.core.decode import read_prefix as read_prefix_of
from jaxspec.core.grammar import Grammar
from jaxspec.core.loop import CHUNK, run
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import (
    Context,
    DecodeState,
    Drafter,
    Hidden,
    Params,
    Proposal,
    PyTree,
    ReadsFinished,
    Recent,
    Stop,
    Warp,
)
from jaxspec.decoding.request import GenerationConfig, bucket_of, warps_of
from jaxspec.drafters import NoDraft
from jaxspec.sharding import Placement, shard_like

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


class RowSettings(NamedTuple):
    """Static settings of a row.

    Attributes:
        capacity: tokens that its cache and its text hold.
        logprobs: keep log-probabilities of emitted tokens.
        warped_logprobs: keep them after bias, penalties, temperature and filters, too.
    """

    capacity: int
    logprobs: bool = False
    warped_logprobs: bool = False


class ChunkInfo(NamedTuple):
    """Results of a chunk.

    Attributes:
        facts: the states without the parts that only the next step reads; other buffers.
        steps: steps of the batch.
        row_steps: steps, counted once for each row that was running.
        tokens: tokens emitted by all rows.
    """

    facts: DecodeState
    steps: Int[Array, ""]
    row_steps: Int[Array, ""]
    tokens: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Dormant:
    """A drafter that does not read prompts: for rows that are decoded plainly."""

    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.drafter.tree_shape

    @property
    def widths(self) -> tuple[int, ...]:
        return self.drafter.widths

    @property
    def num_likeliest(self) -> int:
        return num_likeliest(self.drafter)

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        shapes = jax.eval_shape(self.drafter.init, params, prompt, context)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]:
        return self.drafter.propose(params, key, state, context)


@partial(jax.jit, static_argnames=("drafter",))
def read_prefix(params: Params, tokens: Int[Array, " read"], *, drafter: Drafter) -> Prefix:
    """Reads the prefix that all prompts share, for the target."""
    return read_prefix_of(params.target, tokens, chunk=min(CHUNK, len(tokens)), taps=drafter.taps)


@partial(jax.jit, static_argnames=("drafter", "settings"))
def read_prompt(
    params: Params,
    prompt: Prompt,
    prefix: Prefix | None,
    *,
    drafter: Drafter,
    settings: RowSettings,
) -> DecodeState:
    """Returns the state of one row, without a batch axis, its cache as long as its bucket."""
    return begin(
        params,
        prompt,
        drafter=drafter,
        text_capacity=settings.capacity,
        chunk=min(CHUNK, prompt.tokens.shape[0]),
        logprobs=settings.logprobs,
        warped_logprobs=settings.warped_logprobs,
        prefix=prefix,
    )


def state_shapes(
    params: Params, prompt: Prompt, batch_size: int, *, drafter: Drafter, settings: RowSettings
) -> DecodeState:
    """Returns the shapes of the state of a batch, from any prompt."""

    def padded(params: Params, prompt: Prompt) -> DecodeState:
        row = read_prompt(params, prompt, None, drafter=drafter, settings=settings)
        return pad_caches(row, settings.capacity)

    row = jax.eval_shape(padded, params, prompt)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype), row
    )


def placed_shapes(shapes: DecodeState, place: Placement | None) -> DecodeState:
    """Returns the shapes with the shardings that `empty_states` gives them."""
    if place is None:
        return shapes
    shardings = empty_states.lower(shapes, place).compile().output_shardings
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


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


@partial(jax.jit, static_argnames=("shapes", "place"))
def empty_states(shapes: DecodeState, place: Placement | None = None) -> DecodeState:
    """Returns a batch whose slots are all free: rows that have stopped."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        return jnp.zeros(leaf.shape, leaf.dtype)

    states = jax.tree.map(zeros, shapes)
    rows = states.stop.shape
    context = states.context._replace(length=jnp.ones(rows, jnp.int32))
    states = states._replace(context=context, stop=jnp.full(rows, Stop.LENGTH, jnp.int32))
    return states if place is None else place(states)


@partial(jax.jit, static_argnames=("place",), donate_argnames=("states",))
def insert(
    states: DecodeState,
    row: DecodeState,
    index: Int[Array, ""],
    sample: Int[Array, ""],
    *,
    place: Placement | None = None,
) -> DecodeState:
    """Puts a row into a slot, as the sample of its prompt with this number."""
    row = row._replace(key=jax.random.fold_in(row.key, sample))
    states = _put(states, row, index)
    return states if place is None else place(states)


@partial(jax.jit, static_argnames=("drafter", "bucket", "place"), donate_argnames=("states",))
def rejoin(
    params: Params,
    states: DecodeState,
    index: Int[Array, ""],
    *,
    drafter: Drafter,
    bucket: int,
    place: Placement | None = None,
) -> DecodeState:
    """Lets a row that was decoded plainly draft again: the drafter reads its text like a prompt.

    `bucket` must hold the text.
    """
    context = jax.tree.map(lambda leaf: leaf[index], states.context._replace(cache=()))
    cache_length = states.context.cache.length[index]
    whole = jnp.pad(context.tokens, (0, max(0, bucket - context.tokens.shape[0])))
    tokens = whole[:bucket]
    hidden, cache = prefill(
        params.target, tokens, cache_length + 1, chunk=min(CHUNK, bucket), taps=drafter.taps
    )
    forgotten = context.recent._replace(count=jnp.zeros_like(context.recent.count))
    seen = context._replace(tokens=whole, cache=cache, recent=forgotten)
    draft = _put(states.draft, drafter.init(params, hidden, seen), index)
    states = states._replace(draft=draft)
    return states if place is None else place(states)


def _put(whole: PyTree, part: PyTree, index: Int[Array, ""]) -> PyTree:
    """Writes a row's arrays into the beginning of its slot in those of a batch."""

    def put(array: Array, row: Array) -> Array:
        row = row[tuple(slice(size) for size in array.shape[1:])]
        start = (index, *[jnp.int32(0)] * row.ndim)
        return jax.lax.dynamic_update_slice(array, row[None].astype(array.dtype), start)

    return jax.tree.map(put, whole, part)


@partial(jax.jit, static_argnames=("drafter", "place"), donate_argnames=("states",))
def run_chunk(
    params: Params,
    states: DecodeState,
    automaton: StopAutomaton | None,
    grammar: Grammar | None,
    drafting: Bool[Array, ""],
    limit: Int[Array, ""],
    wanted: Int[Array, ""],
    *,
    drafter: Drafter,
    place: Placement | None = None,
) -> tuple[DecodeState, ChunkInfo]:
    """Runs some steps of all rows.

    There are two loops, one that drafts and a plain one, and one of them runs: a branch around a
    loop would copy caches. Greedy outputs of both are the same up to rounding.

    Args:
        params: target and drafter.
        states: donated.
        automaton: stop strings.
        grammar: of the texts that rows may emit.
        drafting: runs the loop that drafts.
        limit: most steps.
        wanted: number of rows that end the chunk once they have stopped.
        drafter: static.
        place: static; the layout of the new states on a mesh.
    """
    before = _running(states)
    row_steps, length = jnp.sum(states.stats.num_steps), jnp.sum(states.context.length)

    def loop(method: Drafter, states: DecodeState, chosen: Bool[Array, ""]):
        def step(params: Params, carry):
            states, count = carry
            states, info = speculative_step(
                params, states, drafter=method, automaton=automaton, grammar=grammar
            )
            return (states, count + 1), info

        def continues(carry) -> Bool[Array, ""]:
            states, count = carry
            running = _running(states)
            return chosen & (count < limit) & (running > 0) & (before - running < wanted)

        return run(step, params, (states, jnp.int32(0)), continues)

    states, steps = loop(drafter, states, drafting)
    if drafter != NoDraft():
        plain, plain_steps = loop(NoDraft(), _as_plain(states), ~drafting)
        states, steps = _from_plain(plain, states, ~drafting), steps + plain_steps
    if place is not None:
        states = place(states)
    return states, ChunkInfo(
        without_caches(states),
        steps,
        jnp.sum(states.stats.num_steps) - row_steps,
        jnp.sum(states.context.length) - length,
    )


def without_caches(states: DecodeState) -> DecodeState:
    """Returns the part of the states that records are made from."""
    context = states.context._replace(cache=(), recent=(), warp=(), stop_ids=())
    return states._replace(context=context, draft=(), key=(), automaton=(), grammar=())


def _running(states: DecodeState) -> Int[Array, ""]:
    return jnp.sum(states.stop == Stop.RUNNING, dtype=jnp.int32)


def _as_plain(states: DecodeState) -> DecodeState:
    """Returns the same rows in the form that plain decoding carries."""
    context, stats = states.context, states.stats
    recent = Recent(
        tokens=context.recent.tokens[:, :1],
        features=context.recent.features[:, :1],
        taps=context.recent.taps[:, :1, :0],
        count=context.recent.count,
    )
    # One entry for all emitted tokens: penalties count them.
    stats = stats._replace(
        accepted=num_emitted(stats.accepted)[:, None], drafted=stats.drafted[:, :1]
    )
    return states._replace(context=context._replace(recent=recent), draft=(), stats=stats)


def _from_plain(plain: DecodeState, drafted: DecodeState, chosen: Bool[Array, ""]) -> DecodeState:
    """Returns rows to the form with drafts. A drafter has not seen plain steps: see `rejoin`."""
    recent = drafted.context.recent
    count = jnp.where(chosen, 0, recent.count)
    return plain._replace(
        context=plain.context._replace(recent=recent._replace(count=count)),
        draft=drafted.draft,
        stats=plain.stats._replace(
            accepted=drafted.stats.accepted.at[:, :1].add(
                plain.stats.accepted - num_emitted(drafted.stats.accepted)[:, None]
            ),
            drafted=drafted.stats.drafted.at[:, :1].set(plain.stats.drafted),
        ),
    )


@dataclasses.dataclass
class Programs:
    """Calls the programs of a job; numbers that change from call to call are typed arguments.

    Attributes:
        model: the target.
        config: settings of decoding.
        seed: seed of the randomness.
        params: weights of target and drafter. `add_texts` changes those of the drafter.
        drafter: the method, static.
        automaton: stop strings.
        grammar: of the texts that rows may emit; `None` for any text.
        place: layout of the states on the target's mesh; `None` on one device.
    """

    model: "Model"
    config: GenerationConfig
    seed: int
    params: Params
    drafter: Drafter
    automaton: StopAutomaton | None
    grammar: Grammar | None
    place: Placement | None

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
        return bool(jax.tree.leaves(self.shapes(CHUNK, 1).draft))

    def row_settings(self, capacity: int) -> RowSettings:
        return RowSettings(capacity, self.config.logprobs, self.config.warped_logprobs)

    def shapes(self, capacity: int, batch_size: int) -> DecodeState:
        """Returns the shapes of the state of a batch."""
        prompt = self.prompt_of(EncodedRow(0, 0, np.zeros(1, np.int32)))
        settings = self.row_settings(capacity)
        return state_shapes(
            self.params, prompt, batch_size, drafter=self.drafter, settings=settings
        )

    def longest_text(self, row: EncodedRow) -> int:
        """Returns the tokens of a row's prompt and of the longest output."""
        wanted = len(row.tokens) + int(np.asarray(self.config.max_new_tokens))
        return min(wanted, self.model.max_positions)

    def need_of(self, row: EncodedRow) -> int:
        """Returns the tokens that a row's cache must hold."""
        num_tokens, depth = len(row.tokens), self.drafter.tree_shape[1]
        room = self.longest_text(row) - num_tokens
        return capacity_needed(num_tokens, room, self.model.max_positions, depth)

    def prompt_of(self, row: EncodedRow) -> Prompt:
        length = len(row.tokens)
        tokens = np.zeros(read_in(length), np.int32)
        tokens[:length] = row.tokens
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "length": int32(length),
            "room": int32(self.longest_text(row) - length),
            "seed": np.asarray([self.seed, number_of(row.id)], np.int32),
            "stop_ids": self.stop_ids,
            "grammar": None if self.grammar is None else int32(0),
        }
        return Prompt(**arrays, warp=self.warp)

    def read_prefix(self, tokens: np.ndarray) -> Prefix | None:
        """Reads the prefix that all prompts share; `None` if there is none."""
        if not len(tokens):
            return None
        return read_prefix(self.params, tokens, drafter=self.drafter)

    def empty(self, capacity: int, batch_size: int) -> DecodeState:
        """Returns a batch whose slots are all free."""
        return empty_states(self.shapes(capacity, batch_size), self.place)

    def read(
        self, row: EncodedRow, prefix: Prefix | None, capacity: int, drafting: bool
    ) -> DecodeState:
        """Reads a prompt; the drafter reads it only if it is to draft."""
        return read_prompt(
            self.params,
            self.prompt_of(row),
            prefix,
            drafter=self.drafter if drafting else Dormant(self.drafter),
            settings=self.row_settings(capacity),
        )

    def add_texts(self, texts: Sequence[np.ndarray]) -> bool:
        """Gives texts to a drafter that reads them; False: it asks for them again, with more."""
        assert isinstance(self.drafter, ReadsFinished)
        draft = self.drafter.with_texts(self.params.draft, texts)
        if draft is not None:
            self.params = self.params._replace(draft=shard_like(self.model.params, draft))
        return draft is not None

    def insert(self, states: DecodeState, row: DecodeState, slot: int, sample: int) -> DecodeState:
        """Puts a row into a slot, and waits until it is there."""
        states = insert(states, row, int32(slot), int32(sample), place=self.place)
        # One row at a time next to the batch: `fitting` counts no more.
        jax.block_until_ready(states.stop)
        return states

    def rejoin(self, states: DecodeState, slot: int, length: int) -> DecodeState:
        """Lets the drafter read a row's text of `length` tokens."""
        return rejoin(
            self.params,
            states,
            int32(slot),
            drafter=self.drafter,
            bucket=bucket_of(length),
            place=self.place,
        )

    def run(self, states: DecodeState, chunk: Chunk, wanted: int) -> tuple[DecodeState, ChunkInfo]:
        """Runs a chunk, which ends early once `wanted` rows have stopped."""
        return run_chunk(
            self.params,
            states,
            self.automaton,
            self.grammar,
            *chunk_arguments(chunk, wanted),
            drafter=self.drafter,
            place=self.place,
        )


def chunk_arguments(chunk: Chunk, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns typed arguments: with Python's own numbers the loop would compile once more."""
    return np.asarray(chunk.drafting), int32(chunk.limit), int32(wanted)


def int32(number: int | np.integer) -> np.ndarray:
    return np.asarray(number, np.int32)
