"""Programs of a job of a causal model: read a prompt, run a chunk of steps, draft again."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import Group, capacity_needed, read_in, shared_prefix
from jaxspec.batch.rows import EncodedRow, Row, encode_rows, number_of
from jaxspec.batch.settings import AnyConfig, AnyDrafter, drafts_change_nothing
from jaxspec.batch.slots import (
    ChunkInfo,
    Item,
    SlotPrograms,
    batch_shapes,
    chunk_arguments,
    count_running,
    int32,
    put,
    repeat,
)
from jaxspec.core.cache import pad_caches
from jaxspec.core.decode import (
    Prefix,
    Prompt,
    begin,
    num_emitted,
    prefill,
    speculative_step,
)
from jaxspec.core.decode import read_prefix as read_prefix_of
from jaxspec.core.grammar import Grammar
from jaxspec.core.loop import CHUNK
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import (
    Context,
    DecodeState,
    Drafter,
    Hidden,
    Params,
    PyTree,
    ReadsFinished,
    Recent,
    Stop,
    Warp,
)
from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.grammars import languages_of
from jaxspec.decoding.request import (
    PENALTIES,
    GenerationConfig,
    automaton_of,
    bucket_of,
    check_request,
    grammar_asked,
    warps_of,
    with_rules_of,
)
from jaxspec.decoding.result import host_rows, text_of
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import NoDraft
from jaxspec.drafters.wrapped import Wrapped
from jaxspec.sharding import Placement, placement_of, shard_like

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


@dataclasses.dataclass(frozen=True)
class Dormant(Wrapped):
    """A drafter that does not read prompts: for rows that are decoded plainly."""

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        shapes = jax.eval_shape(super().init, params, prompt, context)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


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

    return batch_shapes(jax.eval_shape(padded, params, prompt), batch_size)


def sample_of(row: DecodeState, sample: Int[Array, ""]) -> DecodeState:
    """Returns the sample of a row's prompt with this number."""
    return row._replace(key=jax.random.fold_in(row.key, sample))


def free_rows(states: DecodeState) -> DecodeState:
    """Returns rows that have stopped."""
    rows = states.stop.shape
    context = states.context._replace(length=jnp.ones(rows, jnp.int32))
    return states._replace(context=context, stop=jnp.full(rows, Stop.LENGTH, jnp.int32))


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
    draft = put(states.draft, drafter.init(params, hidden, seen), index)
    states = states._replace(draft=draft)
    return states if place is None else place(states)


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
    fewest = jnp.maximum(count_running(states.stop) - wanted, 0)
    row_steps, length = jnp.sum(states.stats.num_steps), jnp.sum(states.context.length)

    def loop(method: Drafter, states: DecodeState, chosen: Bool[Array, ""]):
        step = partial(speculative_step, drafter=method, automaton=automaton, grammar=grammar)
        return repeat(step, params, states, lambda each: each.stop, chosen, limit, fewest)

    states, steps = loop(drafter, states, drafting)
    if drafter != NoDraft():
        plain, plain_steps = loop(NoDraft(), _as_plain(states), ~drafting)
        states, steps = _from_plain(plain, states, ~drafting), steps + plain_steps
    if place is not None:
        states = place(states)
    return states, ChunkInfo(
        without_caches(states),
        # Other buffers than those that are donated to the next chunk.
        states.stop,
        states.context.length,
        steps,
        jnp.sum(states.stats.num_steps) - row_steps,
        jnp.sum(states.context.length) - length,
    )


def without_caches(states: DecodeState) -> DecodeState:
    """Returns the part of the states that records are made from."""
    context = states.context._replace(cache=(), recent=(), warp=(), stop_ids=())
    return states._replace(context=context, draft=(), key=(), automaton=(), grammar=())


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
class TextPrograms(SlotPrograms):
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

    @property
    def num_samples(self) -> int:
        return self.config.num_samples

    @property
    def max_new_tokens(self) -> int:
        return int(np.asarray(self.config.max_new_tokens))

    @property
    def drafts(self) -> bool:
        return self.drafter != NoDraft()

    @property
    def reads_texts(self) -> bool:
        return isinstance(self.drafter, ReadsFinished) and self.drafts_change_nothing

    @property
    def drafts_change_nothing(self) -> bool:
        return drafts_change_nothing(self.model, self.config, None)

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
        return min(len(row.tokens) + self.max_new_tokens, self.model.max_positions)

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

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow]:
        return encode_rows(self.model, rows)

    def read_prefix(self, rows: Sequence[EncodedRow]) -> tuple[int, Prefix | None]:
        tokens = shared_prefix(rows, CHUNK)
        if not len(tokens):
            return 0, None
        return len(tokens), read_prefix(self.params, tokens, drafter=self.drafter)

    free, sample_of = staticmethod(free_rows), staticmethod(sample_of)

    def lowered(
        self, group: Group, shapes: DecodeState, prefix: Prefix | None, rejoining: bool
    ) -> tuple[Any, list[Any]]:
        params, drafter, place = self.params, self.drafter, self.place
        longest = self.prompt_of(max(group.rows, key=lambda row: len(row.tokens)))
        settings = self.row_settings(group.capacity)
        reading = read_prompt.lower(params, longest, prefix, drafter=drafter, settings=settings)
        chunk = run_chunk.lower(
            params,
            shapes,
            self.automaton,
            self.grammar,
            *chunk_arguments(Chunk(True, 1), 1),
            drafter=drafter,
            place=place,
        )
        changing = [chunk]
        if rejoining and self.has_draft_state:
            bucket = bucket_of(max(self.longest_text(row) for row in group.rows))
            changing.append(
                rejoin.lower(params, shapes, int32(0), drafter=drafter, bucket=bucket, place=place)
            )
        return reading, changing

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
        assert isinstance(self.drafter, ReadsFinished)
        draft = self.drafter.with_texts(self.params.draft, texts)
        if draft is not None:
            self.params = self.params._replace(draft=shard_like(self.model.params, draft))
        return draft is not None

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

    def records(self, items: Sequence[Item], facts: DecodeState) -> list[dict[str, Any]]:
        tokenizer, stop = self.model.tokenizer, self.config.stop_strings
        hosts = host_rows(facts, [len(item.row.tokens) for item in items])
        records = []
        for item, host in zip(items, hosts, strict=True):
            text = text_of(tokenizer, host.tokens, host.finish_reason, stop)
            record = item.record(text, host.tokens, host.finish_reason, host.counts)
            for name in ("logprobs", "warped_logprobs"):
                values = getattr(host, name)
                if values is not None:
                    # JSON has no infinity.
                    record[name] = [
                        float(f"{value:.7g}") if np.isfinite(value) else None for value in values
                    ]
            records.append(record)
        return records


def text_programs(
    model: "Model", config: AnyConfig | None, drafter: AnyDrafter, seed: int
) -> TextPrograms:
    """Checks settings, and returns the programs for a causal model.

    Raises:
        ValueError: the settings do not fit the model, or are not one number for all rows.
    """
    if isinstance(config, DenoiseConfig) or isinstance(drafter, SelfSpeculation):
        raise ValueError(
            f"config: {model.name} is causal; give a GenerationConfig, and a drafter of "
            "jaxspec.drafters."
        )
    config = config or GenerationConfig()
    loaded = check_request(model, config, drafter, seed)
    for field in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *PENALTIES):
        if np.ndim(getattr(config, field)):
            raise ValueError(f"{field} must be one number for the whole job, got several.")
    languages = languages_of(config.choices, config.regex, config.json_schema) or ()
    if len(languages) > 1:
        raise ValueError(
            f"{languages[0].setting} must be one for the whole job, got {len(languages)}, one for "
            "each prompt; give `generate` these prompts, or a job for each."
        )
    config = with_rules_of(model, config)
    return TextPrograms(
        model=model,
        config=config,
        seed=seed,
        params=Params(model.network, loaded.params),
        drafter=loaded.drafter,
        automaton=automaton_of(model, config),
        grammar=grammar_asked(model, config, 1)[0],
        place=placement_of(model.params),
    )
