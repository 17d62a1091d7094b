"""Prefill and the speculative step, for a batch of rows at their own pace.

Everything is written for one row and mapped here. The step itself sees the batch in one place
only: it picks the width of the target pass, the smallest of the drafter's widths that holds every
row's valid nodes. That choice is a `switch` outside any map, so that narrow passes really are
cheap, and its branches only READ the cache: each returns the few accepted rows, which are then
committed in place.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxspec import native
from jaxspec.core import masks
from jaxspec.core.cache import append, pad_caches, select_path, settled
from jaxspec.core.forms import is_exchanged
from jaxspec.core.grammar import Grammar, RowGrammar, grammar_of, is_closed, walk
from jaxspec.core.penalties import penalize
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.sampling import at_least_float32, likeliest_tokens, warp_logits
from jaxspec.core.stopping import StopAutomaton, cut_emitted
from jaxspec.core.types import (
    AsksLikeliest,
    Context,
    DecodeState,
    Drafter,
    Emitted,
    Hidden,
    Info,
    KVCache,
    LanguageModel,
    LayerKV,
    Params,
    Proposal,
    PyTree,
    Recent,
    Stats,
    Stop,
    Verdict,
    Warp,
)
from jaxspec.core.verify import verify, verify_greedy

NATIVE_CHUNK = 32


class Prompt(NamedTuple):
    """The request of one row, or of several that differ in their randomness only: see `samples_of`.

    Attributes:
        tokens: right-padded to a bucket; `length` >= 1 of them are real.
        room: `max_new_tokens`, or less where the context ends.
        seed: numbers that name the randomness: a seed, then what tells the prompt from others of
            that seed. A row depends on these and its sample's number alone, not on its neighbours.
        grammar: the state of the grammar that the row begins in; `None` without one.
    """

    tokens: Int[Array, " bucket"]
    length: Int[Array, ""]
    room: Int[Array, ""]
    seed: Int[Array, " numbers"]
    stop_ids: Int[Array, " stop_ids"]
    warp: Warp
    grammar: Int[Array, ""] | None = None


class Prefix(NamedTuple):
    """Tokens that several prompts begin with, read once. Every one of them is real.

    Attributes:
        layers: their keys and values, as many places as tokens.
    """

    features: Float[Array, "read embed"]
    taps: Float[Array, "read tapped"]
    layers: tuple[LayerKV, ...]


def prefill(
    model: LanguageModel,
    tokens: Int[Array, " bucket"],
    length: Int[Array, ""],
    *,
    chunk: int,
    taps: tuple[int, ...] = (),
    prefix: Prefix | None = None,
) -> tuple[Hidden, KVCache]:
    """Runs a prompt through a model, `chunk` tokens at a time; the last token stays pending.

    With a `prefix`, which must be shorter than the prompt, only what follows it is run.

    Returns:
        Features (and taps) of every place of the bucket, and a cache of `length - 1` tokens with
        as many places as the bucket. Places from `length - 1` on mean nothing. `new_kv` is empty.
    """

    def forward(tokens, positions, mask, cache) -> Hidden:
        return model.forward(tokens, positions, mask, cache, taps=taps)

    chunk = places_at_once(model, chunk)
    hidden, layers = in_chunks(forward, tokens, model.empty_cache, chunk, length - 1, prefix)
    return hidden, KVCache(layers, length - 1)


def read_prefix(
    model: LanguageModel, tokens: Int[Array, " read"], *, chunk: int, taps: tuple[int, ...] = ()
) -> Prefix:
    """Reads what several prompts begin with, at most `chunk` tokens at a time."""
    hidden, cache = prefill(model, tokens, jnp.int32(len(tokens) + 1), chunk=chunk, taps=taps)
    return Prefix(hidden.features, hidden.taps, cache.layers)


def places_at_once(model: Any, chunk: int) -> int:
    """Returns how many places of a prompt to read at once, at most `chunk`.

    Native products of few places cost as little for each as those of many, and of a short prompt
    less padding is read. They are of float32 networks, on one device. Experts are all read for
    every chunk, so chunks of theirs stay large.
    """
    is_native = (
        jax.default_backend() == "cpu"
        and native.status().instructions is not None
        and not is_exchanged()
        and getattr(model, "dtype", None) == jnp.float32
        and getattr(getattr(model, "config", None), "experts", None) is None
    )
    return min(chunk, NATIVE_CHUNK) if is_native else chunk


def in_chunks(
    forward: Callable[..., Hidden],
    inputs: PyTree,
    empty_cache: Callable[[int], KVCache],
    chunk: int,
    length: Int[Array, ""],
    prefix: Prefix | None = None,
) -> tuple[Hidden, tuple[LayerKV, ...]]:
    """Reads a sequence causally, `chunk` places at a time, until `length` of them are read.

    Args:
        forward: gets a part of `inputs`, its positions, a mask and the cache so far.
        inputs: arrays with one entry per place of the sequence.
        empty_cache: makes a cache of that capacity.
        chunk: at most; of a longer sequence it is the largest number that divides both.
        length: places that mean something. Chunks behind those of all rows are not read.
        prefix: what the sequence begins with, if that has been read; only the rest is read.

    Returns:
        Features and taps of every place, and their keys and values, which `new_kv` leaves out.
    """
    bucket = jax.tree.leaves(inputs)[0].shape[0]
    if prefix is None and bucket <= chunk:
        hidden = forward(inputs, jnp.arange(bucket), masks.causal(bucket), None)
        return hidden._replace(new_kv=()), hidden.new_kv
    read = 0 if prefix is None else prefix.features.shape[0]
    rest = bucket - read
    chunk = rest if rest <= chunk else math.gcd(rest, chunk)

    def read_chunk(start: Int[Array, ""], cache: KVCache) -> tuple[Hidden, KVCache]:
        part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, chunk), inputs)
        hidden = forward(part, start + jnp.arange(chunk), masks.causal(chunk), cache)
        return hidden, append(cache, settled(hidden), chunk)

    def advance(index, carry):
        cache, *found = carry
        start = read + index * chunk
        hidden, cache = read_chunk(start, cache)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return cache, *map(put, found, (hidden.features, hidden.taps))

    if prefix is None:
        cache = empty_cache(bucket)
    else:
        cache = pad_caches(KVCache(prefix.layers, jnp.int32(read)), bucket)
    shapes = jax.eval_shape(read_chunk, jnp.int32(0), cache)[0]
    found = [
        jnp.zeros((bucket, each.shape[1]), each.dtype) for each in (shapes.features, shapes.taps)
    ]
    if prefix is not None:
        found = [
            each.at[:read].set(known)
            for each, known in zip(found, (prefix.features, prefix.taps), strict=True)
        ]
    num_chunks = jnp.clip(-(-(largest_of_rows(length) - read) // chunk), 0, rest // chunk)
    cache, features, taps = jax.lax.fori_loop(0, num_chunks, advance, (cache, *found))
    return Hidden(features, taps, ()), cache.layers


def begin(
    params: Params,
    prompt: Prompt,
    *,
    drafter: Drafter,
    text_capacity: int,
    chunk: int,
    logprobs: bool = False,
    warped_logprobs: bool = False,
    prefix: Prefix | None = None,
) -> DecodeState:
    """Prefills one row and the drafter's state; of a prompt whose `prefix` was read, the rest.

    `text_capacity` must hold the prompt, all that may be emitted, and one step's overhang.
    """
    hidden, cache = prefill(
        params.target,
        prompt.tokens,
        prompt.length,
        chunk=chunk,
        taps=drafter.taps,
        prefix=prefix,
    )
    nodes, depth = drafter.tree_shape
    branch = num_likeliest(drafter)
    assert text_capacity >= prompt.tokens.shape[0] + depth + 1, "no headroom for one step"
    tokens = jnp.pad(prompt.tokens, (0, text_capacity - prompt.tokens.shape[0]))
    recent = Recent(
        tokens=jnp.zeros(depth + 1, jnp.int32),
        features=jnp.zeros((depth + 1, hidden.features.shape[-1]), hidden.features.dtype),
        taps=jnp.zeros((depth + 1, hidden.taps.shape[-1]), hidden.taps.dtype),
        count=jnp.int32(0),
        likeliest=jnp.full((nodes, branch), -1, jnp.int32) if branch else None,
    )
    context = Context(
        tokens, prompt.length, prompt.room, prompt.stop_ids, prompt.warp, cache, recent
    )
    none = jnp.zeros(text_capacity, jnp.float32)
    return DecodeState(
        context=context,
        draft=drafter.init(params, hidden, context),
        key=named_key(prompt.seed),
        stop=jnp.where(prompt.room > 0, Stop.RUNNING, Stop.LENGTH).astype(jnp.int32),
        automaton=jnp.int32(0),
        emitted=Emitted(
            from_draft=jnp.zeros(text_capacity, bool),
            logprobs=none if logprobs else None,
            warped_logprobs=none if warped_logprobs else None,
        ),
        stats=Stats(
            num_steps=jnp.int32(0),
            accepted=jnp.zeros(depth + 1, jnp.int32),
            drafted=jnp.zeros(depth + 1, jnp.int32),
            num_nodes=jnp.int32(0),
        ),
        grammar=prompt.grammar,
    )


def num_likeliest(drafter: Drafter) -> int:
    """Returns the tokens for each node in `Recent.likeliest`; 0 for drafters that do not ask."""
    return drafter.num_likeliest if isinstance(drafter, AsksLikeliest) else 0


def named_key(seed: Int[Array, " numbers"]) -> PRNGKeyArray:
    """Returns the key that numbers name: the first makes it, the others are folded in."""
    key = jax.random.key(seed[0])
    for number in seed[1:]:
        key = jax.random.fold_in(key, number)
    return key


def samples_of(state: DecodeState, num_samples: int) -> DecodeState:
    """The rows, stacked, that continue one prompt: its state, each with its own randomness."""

    def sample(number: Int[Array, ""]) -> DecodeState:
        return state._replace(key=jax.random.fold_in(state.key, number))

    return jax.vmap(sample)(jnp.arange(num_samples))


class _Outcome(NamedTuple):
    """Results of a target pass of any width: of one shape, whatever the width."""

    verdict: Verdict
    path_kv: tuple[LayerKV, ...]
    features: Float[Array, "levels embed"]
    taps: Float[Array, "levels tapped"]
    likeliest: Int[Array, "nodes branch"] | None
    failures: Int[Array, " levels"]
    logprobs: "_Logprobs | None"
    warped_logprobs: "_Logprobs | None"


class _Logprobs(NamedTuple):
    """The target's log-probabilities: of the emitted tokens, and of the drafted ones."""

    emitted: Float[Array, " levels"]
    nodes: Float[Array, " nodes"]


def speculative_step(
    params: Params,
    states: DecodeState,
    *,
    drafter: Drafter,
    automaton: StopAutomaton | None = None,
    grammar: Grammar | None = None,
) -> tuple[DecodeState, Info]:
    """One draft, one target pass, one verification, one commit, for every row of a batch.

    Greedy if the rows' `warp.temperature` is `None`. Rows that have stopped emit nothing.

    Raises:
        ValueError: the drafter's proposals are not of the shape that it says.
    """
    keys = jax.vmap(jax.random.fold_in)(states.key, states.stats.num_steps)
    keys = jax.vmap(partial(jax.random.split, num=2))(keys)

    def propose(key: PRNGKeyArray, state: DecodeState) -> tuple[Proposal, PyTree]:
        context = state.context
        context = context._replace(grammar=grammar_of(context, grammar, state.grammar))
        return drafter.propose(params, key, state.draft, context)

    proposals, drafts = jax.vmap(propose)(keys[:, 0], states)
    _check_shapes(proposals, drafter.tree_shape)
    proposals = jax.vmap(_fit_room)(proposals, states)
    states = states._replace(draft=drafts)

    widths = drafter.widths
    order = jnp.arange(1, proposals.tokens.shape[1] + 1)
    needed = jnp.max(jnp.where(proposals.valid, order, 0))
    branches = [
        jax.vmap(partial(_target_pass, params.target, width, drafter, grammar)) for width in widths
    ]
    if len(branches) == 1:
        outcome = branches[0](keys[:, 1], proposals, states)
        width = jnp.int32(widths[0])
    else:
        index = jnp.sum(needed > jnp.asarray(widths[:-1]))
        outcome = jax.lax.switch(index, branches, keys[:, 1], proposals, states)
        width = jnp.asarray(widths, jnp.int32)[index]
    advance = partial(_advance, automaton=automaton, grammar=grammar)
    return jax.vmap(advance, in_axes=(0, 0, 0, None))(states, proposals, outcome, width)


def _check_shapes(proposals: Proposal, tree_shape: tuple[int, int]) -> None:
    """Refuses, while tracing, what would be cut, broadcast or clamped without a word."""
    nodes, depth = tree_shape
    for name, array, width in (
        ("tokens", proposals.tokens, nodes),
        ("valid", proposals.valid, nodes),
        ("law_row", proposals.law_row, nodes),
        ("tree.parents", proposals.tree.parents, nodes),
        ("tree.paths", proposals.tree.paths, depth + 1),
    ):
        if array.ndim == 0 or array.shape[-1] != width:
            raise ValueError(
                f"The drafter's tree_shape is {tree_shape}; its proposal's {name} must have a last "
                f"axis of {width}, and its shape is {array.shape}."
            )


def _fit_room(proposal: Proposal, state: DecodeState) -> Proposal:
    """Drops nodes too deep to be emitted; of stopped rows, all nodes but the root."""
    room = jnp.where(state.stop == Stop.RUNNING, state.context.room, 1)
    depths = proposal.tree.depths
    return proposal._replace(valid=(proposal.valid & (depths < room)) | (depths == 0))


def narrow(proposal: Proposal, width: int) -> Proposal:
    """The first `width` nodes of a proposal whose other nodes are all invalid."""
    tree = proposal.tree
    kept = jax.tree.map(lambda array: array[:width], tree)
    kept = kept._replace(
        ancestors=tree.ancestors[:width, :width],
        children=jnp.where(kept.children < width, kept.children, -1),
    )
    return Proposal(
        tokens=proposal.tokens[:width],
        tree=kept,
        valid=proposal.valid[:width],
        draft_logprobs=proposal.draft_logprobs,
        law_row=proposal.law_row[:width],
    )


def _target_pass(
    target: LanguageModel,
    width: int,
    drafter: Drafter,
    grammar: Grammar | None,
    key: PRNGKeyArray,
    proposal: Proposal,
    state: DecodeState,
) -> _Outcome:
    """Scores the first `width` nodes, verifies them, and keeps what lies on the accepted path."""
    num_nodes = len(proposal.tokens)
    proposal = narrow(proposal, width)
    tree, context = proposal.tree, state.context
    hidden = target.forward(
        proposal.tokens,
        context.length - 1 + tree.depths,
        tree.ancestors & proposal.valid[None, :],
        context.cache,
        taps=drafter.taps,
    )
    logits = at_least_float32(target.unembed(hidden.features))
    rules = _rules(state, proposal, grammar_of(context, grammar, state.grammar))
    warped = warp_logits(logits, context.warp, rules)
    if context.warp.temperature is None:
        verdict = verify_greedy(proposal, warped)
    else:
        # The width is that of the batch's longest draft, and a row's numbers are its own.
        uniforms = jax.random.uniform(key, (num_nodes,), warped.dtype)[:width]
        verdict = verify(uniforms, proposal, warped)

    path = jnp.maximum(verdict.path, 0)
    emitted = _emitted_tokens(proposal, verdict)

    def logprobs_of(asked: Array | None, scores: Float[Array, "nodes vocab"]) -> _Logprobs | None:
        if asked is None:
            return None

        def along(rows: Float[Array, "n vocab"], tokens: Int[Array, " n"]) -> Float[Array, " n"]:
            chosen = jnp.take_along_axis(rows, tokens[:, None], axis=1)[:, 0]
            return chosen - jax.nn.logsumexp(rows, axis=-1)

        # Those of nodes are for traces alone: a loop that keeps none does not compute them.
        nodes = along(scores[jnp.maximum(tree.parents, 0)], proposal.tokens)
        return _Logprobs(along(scores[path], emitted), jnp.pad(nodes, (0, num_nodes - width)))

    likeliest = None
    if branch := num_likeliest(drafter):
        found = likeliest_tokens(logits, context.warp, branch)
        found = jnp.where(proposal.valid[:, None], found, -1)
        likeliest = jnp.pad(found, ((0, num_nodes - width), (0, 0)), constant_values=-1)

    # A maximum does not show every NaN: XLA drops them from long rows on CPUs.
    is_number = ~jnp.any(jnp.isnan(logits), axis=-1)
    chosen = jnp.isfinite(jnp.max(warped, axis=-1)) & is_number
    failures = jnp.where(chosen, Stop.RUNNING, Stop.NOT_FINITE)
    if rules is not None or context.warp.bias is not None:
        forbidden = is_number & jnp.isfinite(jnp.max(logits, axis=-1))
        failures = jnp.where(forbidden & ~chosen, Stop.NO_TOKEN, failures)
    return _Outcome(
        verdict=verdict,
        path_kv=select_path(settled(hidden), verdict.path),
        features=hidden.features[path],
        taps=hidden.taps[path],
        likeliest=likeliest,
        failures=failures[path],
        logprobs=logprobs_of(state.emitted.logprobs, logits),
        warped_logprobs=logprobs_of(state.emitted.warped_logprobs, warped),
    )


def _rules(
    state: DecodeState, proposal: Proposal, grammar: RowGrammar | None
) -> Callable[[Array], Array] | None:
    """Returns a function that applies penalties and the grammar to the logits of the nodes."""
    penalties, tree = state.context.warp.penalties, proposal.tree
    if penalties is None and grammar is None:
        return None

    def apply(logits: Float[Array, "nodes vocab"]) -> Float[Array, "nodes vocab"]:
        if penalties is not None:
            emitted = num_emitted(state.stats.accepted)
            logits = penalize(logits, penalties, state.context, emitted, proposal)
        if grammar is not None:
            allowed = grammar.allowed(grammar.at_nodes(tree, proposal.tokens), tree.depths)
            logits = jnp.where(allowed, logits, -jnp.inf)
        return logits

    return apply


def num_emitted(accepted: Int[Array, "*rows levels"]) -> Int[Array, "*rows"]:
    """Returns the tokens that steps emitted, from `Stats.accepted`, before a step that was cut."""
    return accepted @ (1 + jnp.arange(accepted.shape[-1], dtype=accepted.dtype))


def _emitted_tokens(proposal: Proposal, verdict: Verdict) -> Int[Array, " levels"]:
    """The accepted tokens, then the target's own; what follows means nothing."""
    accepted = proposal.tokens[jnp.maximum(jnp.roll(verdict.path, -1), 0)]
    order = jnp.arange(verdict.path.shape[0])
    return jnp.where(order == verdict.num_emitted - 1, verdict.next_token, accepted)


def _advance(
    state: DecodeState,
    proposal: Proposal,
    outcome: _Outcome,
    width: Int[Array, ""],
    *,
    automaton: StopAutomaton | None,
    grammar: Grammar | None,
) -> tuple[DecodeState, Info]:
    """Writes one row's verdict into its text, cache and counters."""
    context, verdict = state.context, outcome.verdict
    running = state.stop == Stop.RUNNING
    tokens = _emitted_tokens(proposal, verdict)
    visited = closes = None
    if grammar is not None and state.grammar is not None:
        visited = walk(grammar, state.grammar, tokens)
        closes = is_closed(grammar, visited[1:])
    ending = cut_emitted(
        tokens,
        outcome.failures,
        verdict.num_emitted,
        context.room,
        context.stop_ids,
        automaton,
        state.automaton,
        closes,
    )
    count = jnp.where(running, ending.count, 0)
    num_accepted = verdict.num_emitted - 1

    def write_text(text: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            text, new.astype(text.dtype), context.length, axis=0
        )

    def write_fact(fact: Array | None, new: _Logprobs | None) -> Array | None:
        return None if fact is None or new is None else write_text(fact, new.emitted)

    def at_nodes(facts: _Logprobs | None) -> Array | None:
        return None if facts is None else facts.nodes

    from_draft = jnp.arange(tokens.shape[0]) < num_accepted
    drafted = jnp.max(jnp.where(proposal.valid, proposal.tree.depths, 0))
    levels = jnp.arange(tokens.shape[0])
    stats = Stats(
        num_steps=state.stats.num_steps + running,
        accepted=state.stats.accepted + (running & (levels == num_accepted)),
        drafted=state.stats.drafted + (running & (levels == drafted)),
        num_nodes=state.stats.num_nodes
        + jnp.where(running, jnp.sum(proposal.valid, dtype=jnp.int32) - 1, 0),
    )
    state = DecodeState(
        context=Context(
            tokens=write_text(context.tokens, tokens),
            length=context.length + count,
            # Nobody drafts for a row that has stopped.
            room=jnp.where(running & (ending.stop == Stop.RUNNING), context.room - count, 0),
            stop_ids=context.stop_ids,
            warp=context.warp,
            cache=append(context.cache, outcome.path_kv, count),
            recent=Recent(tokens, outcome.features, outcome.taps, count, outcome.likeliest),
        ),
        draft=state.draft,
        key=state.key,
        stop=jnp.where(running, ending.stop, state.stop),
        automaton=jnp.where(running, ending.automaton, state.automaton),
        emitted=Emitted(
            from_draft=write_text(state.emitted.from_draft, from_draft),
            logprobs=write_fact(state.emitted.logprobs, outcome.logprobs),
            warped_logprobs=write_fact(state.emitted.warped_logprobs, outcome.warped_logprobs),
        ),
        stats=stats,
        grammar=None if visited is None else jnp.where(running, visited[count], visited[0]),
    )
    info = Info(
        proposal=proposal,
        verdict=verdict,
        emitted=tokens,
        count=count,
        width=width,
        logprobs=at_nodes(outcome.logprobs),
        warped_logprobs=at_nodes(outcome.warped_logprobs),
    )
    return state, info
