"""The programs of a job: read a prompt, put its row into a slot, run a chunk of steps.

A batch of rows stays on the device from the first chunk to the last. Its arrays are given to each
program and come back changed in place; what differs from call to call, a slot's number, how many
steps, whether to draft, is an argument. So nothing compiles twice.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.core.cache import pad_slots
from jaxspec.core.decode import Prefix, Prompt, begin, prefill, speculative_step
from jaxspec.core.decode import read_prefix as read_prefix_of
from jaxspec.core.loop import run
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import (
    Context,
    DecodeState,
    Drafter,
    Hidden,
    Params,
    Proposal,
    PyTree,
    Recent,
    Stop,
)
from jaxspec.drafters import NoDraft

CHUNK = 256
"""Tokens of a prompt that are read in one pass."""

Place = Callable[[DecodeState], DecodeState]
"""Puts states where they belong, inside a program and outside of one: a mesh's constraint."""


class RowSettings(NamedTuple):
    """What is static about a row.

    slots: of its cache and its text.
    """

    slots: int
    logprobs: bool = False
    warped_logprobs: bool = False


class ChunkInfo(NamedTuple):
    """What a chunk was.

    facts: the states without what only the next step reads; not the same buffers.
    steps: that were made.
    row_steps: the same, counted once for each row that was running.
    tokens: emitted by all rows.
    """

    facts: DecodeState
    steps: Int[Array, ""]
    row_steps: Int[Array, ""]
    tokens: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Dormant:
    """A drafter that leaves prompts unread: for rows that are decoded plainly."""

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

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        shapes = jax.eval_shape(self.drafter.init, params, prompt, context)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]:
        return self.drafter.propose(params, key, state, context)


@partial(jax.jit, static_argnames=("drafter",))
def read_prefix(params: Params, tokens: Int[Array, " read"], *, drafter: Drafter) -> Prefix:
    """Reads what all prompts begin with, for the target."""
    return read_prefix_of(params.target, tokens, chunk=min(CHUNK, len(tokens)), taps=drafter.taps)


def _begin(
    params: Params,
    prompt: Prompt,
    prefix: Prefix | None,
    drafter: Drafter,
    settings: RowSettings,
) -> DecodeState:
    return begin(
        params,
        prompt,
        drafter=drafter,
        text_slots=settings.slots,
        chunk=min(CHUNK, prompt.tokens.shape[0]),
        logprobs=settings.logprobs,
        warped_logprobs=settings.warped_logprobs,
        prefix=prefix,
    )


@partial(jax.jit, static_argnames=("drafter", "settings"))
def read_prompt(
    params: Params,
    prompt: Prompt,
    prefix: Prefix | None,
    *,
    drafter: Drafter,
    settings: RowSettings,
) -> DecodeState:
    """One row, without a batch axis, its cache as long as its bucket."""
    return _begin(params, prompt, prefix, drafter, settings)


def state_shapes(
    params: Params, prompt: Prompt, batch: int, *, drafter: Drafter, settings: RowSettings
) -> DecodeState:
    """`jax.ShapeDtypeStruct`s of a batch; takes no memory. Any prompt will do."""

    def padded(params: Params, prompt: Prompt) -> DecodeState:
        return pad_slots(_begin(params, prompt, None, drafter, settings), settings.slots)

    row = jax.eval_shape(padded, params, prompt)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape), leaf.dtype), row)


def placed_shapes(shapes: DecodeState, place: Place | None) -> DecodeState:
    """The shapes with the shardings that `empty_states` gives them."""
    if place is None:
        return shapes
    shardings = empty_states.lower(shapes, place).compile().output_shardings
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def num_bytes(arrays: PyTree) -> int:
    """Bytes of arrays, or of their shapes, in one memory: of a device, or of virtual ones' host.

    A key is two numbers of 32 bits.
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
    """How many of them share the memory that `available_memory` tells of."""
    return len(devices) if next(iter(devices)).platform == "cpu" else 1


@partial(jax.jit, static_argnames=("shapes", "place"))
def empty_states(shapes: DecodeState, place: Place | None = None) -> DecodeState:
    """A batch of rows that have stopped, all of them free slots."""

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
    place: Place | None = None,
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
    place: Place | None = None,
) -> DecodeState:
    """Lets a row draft that has gone on plainly: the drafter reads its text as if it were a prompt.

    `bucket` must hold the text.
    """
    context = jax.tree.map(lambda leaf: leaf[index], states.context._replace(cache=()))
    cache_length = states.context.cache.length[index]
    slots = context.tokens.shape[0]
    tokens = jnp.pad(context.tokens, (0, max(0, bucket - slots)))[:bucket]
    hidden, cache = prefill(
        params.target, tokens, cache_length + 1, chunk=min(CHUNK, bucket), taps=drafter.taps
    )
    whole = jnp.pad(context.tokens, (0, max(0, bucket - slots)))
    seen = context._replace(tokens=whole, cache=cache, recent=_forgotten(context.recent))
    draft = _put(states.draft, drafter.init(params, hidden, seen), index)
    states = states._replace(draft=draft)
    return states if place is None else place(states)


def _put(whole: PyTree, part: PyTree, index: Int[Array, ""]) -> PyTree:
    """Writes a row's arrays into those of a batch, from each one's beginning, as far as they go."""

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
    drafting: Bool[Array, ""],
    limit: Int[Array, ""],
    wanted: Int[Array, ""],
    *,
    drafter: Drafter,
    place: Place | None = None,
) -> tuple[DecodeState, ChunkInfo]:
    """Some steps of all rows.

    Two loops, of which one runs: a branch around a loop would copy caches. Whether it is the one
    that drafts or the plain one, greedy outputs are the same up to rounding.

    Args:
        params: target and drafter.
        states: given away.
        automaton: stop strings.
        drafting: which loop.
        limit: steps at most.
        wanted: rows that, once they have stopped, end the chunk.
        drafter: static.
        place: static; where the new states belong.
    """
    before = _running(states)
    row_steps, length = jnp.sum(states.stats.num_steps), jnp.sum(states.context.length)

    def loop(method: Drafter, states: DecodeState, chosen: Bool[Array, ""]):
        def step(params: Params, carry):
            states, count = carry
            states, info = speculative_step(params, states, drafter=method, automaton=automaton)
            return (states, count + 1), info

        def goes_on(carry) -> Bool[Array, ""]:
            states, count = carry
            running = _running(states)
            return chosen & (count < limit) & (running > 0) & (before - running < wanted)

        return run(step, params, (states, jnp.int32(0)), goes_on)

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
    """What a record is made of."""
    context = states.context._replace(cache=(), recent=(), warp=(), stop_ids=())
    return states._replace(context=context, draft=(), key=(), automaton=())


def _running(states: DecodeState) -> Int[Array, ""]:
    return jnp.sum(states.stop == Stop.RUNNING, dtype=jnp.int32)


def _as_plain(states: DecodeState) -> DecodeState:
    """The same rows as plain decoding carries them."""
    context, stats = states.context, states.stats
    recent = Recent(
        tokens=context.recent.tokens[:, :1],
        features=context.recent.features[:, :1],
        taps=context.recent.taps[:, :1, :0],
        count=context.recent.count,
    )
    stats = stats._replace(accepted=stats.accepted[:, :1], drafted=stats.drafted[:, :1])
    return states._replace(context=context._replace(recent=recent), draft=(), stats=stats)


def _from_plain(plain: DecodeState, drafted: DecodeState, chosen: Bool[Array, ""]) -> DecodeState:
    """Back again. A drafter knows nothing of plain steps: see `rejoin`."""
    recent = drafted.context.recent
    count = jnp.where(chosen, 0, recent.count)
    return plain._replace(
        context=plain.context._replace(recent=recent._replace(count=count)),
        draft=drafted.draft,
        stats=plain.stats._replace(
            accepted=drafted.stats.accepted.at[:, :1].set(plain.stats.accepted),
            drafted=drafted.stats.drafted.at[:, :1].set(plain.stats.drafted),
        ),
    )


def _forgotten(recent: Recent) -> Recent:
    return recent._replace(count=jnp.zeros_like(recent.count))
