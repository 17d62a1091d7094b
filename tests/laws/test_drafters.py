"""The laws of decoding, over every drafter of the table.

One batch serves most of them: rows of different lengths, budgets, temperatures and stops, among
them a prompt of one token, a prompt that fills its bucket and a context that is filled to the last
place. It is decoded once per drafter, greedily and sampling.
"""

import dataclasses
import itertools
import logging
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jaxspec.core.decode import Prompt, prefill
from jaxspec.core.loop import DecodePlan, decode, decode_stream
from jaxspec.core.masks import causal
from jaxspec.core.sampling import warp_logits
from jaxspec.core.stopping import StopAutomaton, stop_automaton
from jaxspec.core.types import DecodeState, Drafter, Params, Stop, Warp
from jaxspec.drafters import NoDraft
from tests.laws.drafters import DRAFTERS, PLAIN, Case, marked, network
from tests.laws.grammars import Machine

VOCAB, BUCKET, BUDGET = 24, 16, 24
LENGTHS = [5, 12, 9, 1, BUCKET, 8, 8, 14]
ROOMS = [BUDGET, BUDGET, 7, BUDGET, BUDGET, 1, 0, BUDGET]
TEMPERATURES = [1.0, 0.6, 0.0, 1.0, 1.4, 1.0, 1.0, 0.8]
STOP_ID_ROW, COLD_ROW, FULL_ROW, STOP_STRING_ROW = 1, 2, 4, 7
TOKEN_BYTES = [bytes([97 + token]) * 2 for token in range(VOCAB)]  # aa, bb, cc, ...
EVERY = {"plain": PLAIN, **DRAFTERS}


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """Compiling takes longer than running here, and no law depends on how well it is done."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


greedy_and_sampled = pytest.mark.parametrize("mode", ["greedy", "sampled"])
every_drafter = pytest.mark.parametrize("name", marked(DRAFTERS))


@lru_cache
def target():
    """Two kinds of attention, so that positions and masks of trees matter twice."""
    return network(VOCAB, layer_types=("full", "sliding"), sliding_window=7, qk_norm=True)


class Request(NamedTuple):
    """Arguments of `decode` other than the models."""

    prompts: Prompt
    automaton: StopAutomaton


def exact_plan(drafter: Drafter, *smaller: int) -> DecodePlan:
    """Capacities without a place to spare: the longest row ends where the cache ends."""
    last = BUCKET + BUDGET + drafter.tree_shape[1] + 1
    return DecodePlan((*smaller, last), chunk=8, logprobs=True, warped_logprobs=True)


def growing_plan(drafter: Drafter) -> DecodePlan:
    return exact_plan(drafter, BUCKET + 8)


def run(name: str, request: Request, plan=growing_plan) -> DecodeState:
    case = EVERY[name]
    drafter = case.make()
    params = Params(target(), draft_params(name))
    states = decode(params, request.prompts, request.automaton, drafter=drafter, plan=plan(drafter))
    return jax.device_get(states._replace(key=()))


@lru_cache
def draft_params(name: str):
    return EVERY[name].draft(target())


def texts(states: DecodeState) -> list[list[int]]:
    """Each row's text, prompt included."""
    lengths = states.context.length.tolist()
    return [
        row[:length] for row, length in zip(states.context.tokens.tolist(), lengths, strict=True)
    ]


def stops(states: DecodeState) -> list[Stop]:
    return [Stop(stop) for stop in states.stop.tolist()]


@lru_cache
def free_request(mode: str) -> Request:
    """The batch without stops: no id matches, and the stop string cannot be spelled."""
    rows = len(LENGTHS)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (rows, BUCKET)).astype(np.int32)
    tokens[STOP_STRING_ROW] = np.tile(tokens[0, :4], BUCKET)[:BUCKET]  # a prompt that repeats
    warp = Warp()
    if mode == "sampled":
        warp = Warp(jnp.array(TEMPERATURES), top_p=jnp.full(rows, 0.95))
    prompts = Prompt(
        tokens=jnp.asarray(tokens),
        length=jnp.array(LENGTHS),
        room=jnp.array(ROOMS),
        seed=jnp.stack([jnp.full(rows, 7), jnp.arange(rows)], axis=1),
        stop_ids=jnp.full((rows, 2), -1),
        warp=warp,
    )
    return Request(prompts, stop_automaton([b"0123"], TOKEN_BYTES))


@lru_cache
def request(mode: str) -> Request:
    """The batch with stops that plain decoding is known to meet."""
    free = free_request(mode)
    rows = texts(run("plain", free))
    stop_id = first_new(rows[STOP_ID_ROW], LENGTHS[STOP_ID_ROW])
    # Half a token, a whole one, half a token; so it ends in the middle of one.
    middle = LENGTHS[STOP_STRING_ROW] + 9
    spelled = b"".join(TOKEN_BYTES[token] for token in rows[STOP_STRING_ROW][middle : middle + 3])
    return Request(
        free.prompts._replace(stop_ids=free.prompts.stop_ids.at[STOP_ID_ROW, 1].set(stop_id)),
        stop_automaton([spelled[1:5]], TOKEN_BYTES),
    )


def first_new(text: list[int], start: int) -> int:
    """The first token, some way into what was emitted, that was not emitted before."""
    return next(text[i] for i in range(start + 4, len(text)) if text[i] not in text[start:i])


@lru_cache
def decoded(name: str, mode: str) -> DecodeState:
    return run(name, request(mode))


def assert_same_rows(ours: DecodeState, theirs: DecodeState):
    assert texts(ours) == texts(theirs)
    assert stops(ours) == stops(theirs)


@greedy_and_sampled
def test_plain_decoding_stops_where_a_reader_would(mode):
    """Reading the text without stops token by token gives the text with stops."""
    free, asked = texts(run("plain", free_request(mode))), request(mode)
    table, kinds = map(np.asarray, asked.automaton)
    expected, reasons = [], []
    for row, text in enumerate(free):
        state, reason, end = 0, Stop.LENGTH, LENGTHS[row]
        for token in text[LENGTHS[row] :]:
            state, end = table[state, kinds[token]], end + 1
            if token in asked.prompts.stop_ids[row]:
                reason = Stop.TOKEN
            elif state == len(table) - 1:
                reason = Stop.STRING
            if reason != Stop.LENGTH:
                break
        expected.append(text[:end])
        reasons.append(reason)
    plain = decoded("plain", mode)
    assert texts(plain) == expected
    assert stops(plain) == reasons
    assert set(reasons) == {Stop.TOKEN, Stop.STRING, Stop.LENGTH}
    assert len(expected[FULL_ROW]) == BUCKET + BUDGET


@every_drafter
def test_greedy_output_equals_plain_decoding(name):
    ours, plain = decoded(name, "greedy"), decoded("plain", "greedy")
    assert_same_rows(ours, plain)
    for row, text in enumerate(texts(plain)):
        new = slice(LENGTHS[row], len(text))
        for facts in ("logprobs", "warped_logprobs"):
            np.testing.assert_allclose(
                getattr(ours.emitted, facts)[row, new],
                getattr(plain.emitted, facts)[row, new],
                atol=1e-4,
            )
    assert ours.stats.num_steps.sum() < plain.stats.num_steps.sum()  # something was accepted


@every_drafter
def test_counters_account_for_every_token(name):
    states = decoded(name, "sampled")
    for row, text in enumerate(texts(states)):
        emitted = len(text) - LENGTHS[row]
        steps, accepted = states.stats.num_steps[row], states.stats.accepted[row]
        assert accepted.sum() == states.stats.drafted[row].sum() == steps
        granted = int(np.dot(accepted, np.arange(len(accepted)))) + steps
        # Verification grants what a stop then cuts from the last block.
        assert emitted <= granted <= emitted + len(accepted) - 1
        drafted = states.emitted.from_draft[row, LENGTHS[row] : len(text)]
        assert steps - 1 <= np.sum(~drafted) <= steps


@every_drafter
def test_a_row_at_temperature_0_is_greedy_among_rows_that_sample(name):
    greedy, sampled = texts(decoded("plain", "greedy")), texts(decoded(name, "sampled"))
    assert sampled[COLD_ROW] == greedy[COLD_ROW]


@greedy_and_sampled
@every_drafter
def test_a_row_alone_decodes_as_it_does_in_a_batch(name, mode):
    together, asked = texts(decoded(name, mode)), request(mode)
    for row in (0, STOP_ID_ROW, FULL_ROW, STOP_STRING_ROW):
        alone = jax.tree.map(itemgetter(slice(row, row + 1)), asked.prompts)
        assert texts(run(name, asked._replace(prompts=alone))) == [together[row]]


@greedy_and_sampled
@every_drafter
def test_neighbours_do_not_matter(name, mode):
    """Rows at other places, some of their neighbours gone, the others with other temperatures."""
    together, asked = texts(decoded(name, mode)), request(mode)
    rows = len(LENGTHS)
    order = np.roll(np.arange(rows), 3)
    watched = order % 2 == 0
    prompts = jax.tree.map(lambda leaf: leaf[order], asked.prompts)
    prompts = prompts._replace(room=jnp.where(watched, prompts.room, prompts.room // 3))
    ours = texts(run(name, asked._replace(prompts=prompts)))
    for place in np.flatnonzero(watched):
        assert ours[place] == together[order[place]]


@greedy_and_sampled
@every_drafter
def test_a_fresh_but_equal_drafter_compiles_nothing(name, mode, caplog):
    run(name, request(mode))  # Not kept from before: programs may have been released since.
    before = decode._cache_size()
    other = request(mode)
    prompts = other.prompts._replace(tokens=(other.prompts.tokens + 1) % VOCAB)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        run(name, other._replace(prompts=prompts))
    assert decode._cache_size() == before
    assert not [record for record in caplog.messages if record.startswith("Compiling jit(decode)")]


# Token 0 spells nothing and is the stop id; each other one is a letter.
LETTERS = [b"", *(bytes([97 + token]) for token in range(1, VOCAB))]


def letters(pick: slice, state: int) -> dict[str, int]:
    return {letter.decode(): state for letter in LETTERS[1:][pick]}


MACHINE = Machine(
    [
        letters(slice(0, 9), 1) | letters(slice(6, 9), 0),
        letters(slice(4, 14), 2) | letters(slice(10, 12), 1),
        letters(slice(None, None, 2), 0) | letters(slice(12, 16), 2) | letters(slice(16, 23), 3),
        {},
    ],
    ends=[2, 3],
)


@lru_cache
def constrained(name: str) -> DecodeState:
    """The batch where every text obeys the machine; every other row is greedy."""
    prompts = free_request("sampled").prompts
    rows = len(LENGTHS)
    heat = prompts.warp.temperature * (jnp.arange(rows) % 2)
    prompts = prompts._replace(
        stop_ids=prompts.stop_ids.at[:, 0].set(0),
        warp=prompts.warp._replace(temperature=heat),
        grammar=jnp.zeros(rows, jnp.int32),
    )
    drafter = EVERY[name].make()
    states = decode(
        Params(target(), draft_params(name)),
        prompts,
        None,
        MACHINE.over_tokens(LETTERS),
        drafter=drafter,
        plan=growing_plan(drafter),
    )
    return jax.device_get(states._replace(key=()))


@pytest.mark.parametrize("name", ["plain", *marked(DRAFTERS)])
def test_every_text_obeys_a_grammar(name):
    states = constrained(name)
    ended = set()
    for row, text in enumerate(texts(states)):
        emitted, stop = text[LENGTHS[row] :], stops(states)[row]
        reached = MACHINE.read(b"".join(LETTERS[token] for token in emitted))
        if ROOMS[row] >= MACHINE.fewest(b"", LETTERS):
            assert reached in MACHINE.ends
            assert (stop == Stop.GRAMMAR) == (reached == 3)
        assert (stop == Stop.TOKEN) == (0 in emitted)
        assert 0 not in emitted[:-1]
        ended.add(stop)
    assert ended >= {Stop.TOKEN, Stop.LENGTH, Stop.GRAMMAR}


@every_drafter
def test_greedy_text_under_a_grammar_equals_plain_decoding(name):
    ours, plain = texts(constrained(name)), texts(constrained("plain"))
    assert ours[::2] == plain[::2]


def test_a_call_is_one_program():
    """Prefill, every step and every growth of the cache: one compilation, one dispatch."""
    asked, drafter = request("greedy"), NoDraft()
    plan = growing_plan(drafter)
    call = partial(decode, drafter=drafter, plan=plan)
    program = jax.make_jaxpr(call)(Params(target(), ()), asked.prompts, asked.automaton)
    assert [equation.params["name"] for equation in program.eqns] == ["decode"]


@every_drafter
def test_one_capacity_decodes_as_growing_ones_do(name):
    assert_same_rows(in_one_capacity(name), decoded(name, "greedy"))


@lru_cache
def in_one_capacity(name: str) -> DecodeState:
    return run(name, request("greedy"), exact_plan)


@partial(jax.jit, static_argnames="taps")
def fresh(tokens, length, taps=()):
    return prefill(target(), tokens, length, chunk=tokens.shape[0], taps=taps)


@pytest.mark.parametrize("name", marked(EVERY))
def test_the_cache_equals_a_fresh_prefill(name):
    states = in_one_capacity(name)
    for row, length in enumerate(states.context.length):
        text = jnp.asarray(states.context.tokens[row, : BUCKET + BUDGET])
        _, expected = fresh(text, length)
        assert states.context.cache.length[row] == expected.length == length - 1
        for ours, theirs in zip(states.context.cache.layers, expected.layers, strict=True):
            held = slice(length - 1)
            np.testing.assert_allclose(
                ours.keys[row][:, :, held], theirs.keys[:, :, held], atol=1e-5
            )
            np.testing.assert_allclose(ours.values[row][:, held], theirs.values[:, held], atol=1e-5)


@pytest.mark.parametrize("mode", [pytest.param("greedy", marks=pytest.mark.slow), "sampled"])
@every_drafter
def test_the_host_loop_decodes_as_the_device_loop_does(name, mode):
    """Step by step: proposals are sound, accepted nodes valid, and emitted tokens appended."""
    case, asked = DRAFTERS[name], request(mode)
    drafter = case.make()
    params = Params(target(), draft_params(name))
    stream = decode_stream(
        params, asked.prompts, asked.automaton, drafter=drafter, plan=growing_plan(drafter)
    )
    rows = range(len(LENGTHS))
    seen = [asked.prompts.tokens[row, : LENGTHS[row]].tolist() for row in rows]
    _, nothing_yet = next(stream)
    assert nothing_yet is None
    for states, info in stream:
        recent, info = jax.device_get((states.context.recent, info))
        for row in rows:
            path = [node for node in info.verdict.path[row] if node >= 0]
            valid, count = info.proposal.valid[row], info.count[row]
            parents = info.proposal.tree.parents[row]
            assert valid[path].all()
            assert not any(
                valid[node] and not valid[parents[node]] for node in range(1, len(valid))
            )
            assert info.proposal.tokens[row, 0] == seen[row][-1]
            assert np.flatnonzero(valid).max() < info.width[row]
            emitted = info.emitted[row, :count].tolist()
            seen[row] += emitted
            assert recent.count[row] == count
            assert recent.tokens[row, :count].tolist() == emitted
    final = jax.device_get(states._replace(key=()))
    assert texts(final) == seen
    assert_same_rows(final, decoded(name, mode))


@pytest.mark.parametrize("name", ["draft model, chain", "draft model, tree"])
def test_a_draft_model_states_the_laws_it_has(name):
    """Cache, scratch and tree masks aside: one pass over the text and a path gives the same law."""
    drafter, asked = DRAFTERS[name].make(), request("sampled")
    draft = draft_params(name)
    params = Params(target(), draft)
    stream = decode_stream(
        params, asked.prompts, asked.automaton, drafter=drafter, plan=growing_plan(drafter)
    )
    states, _ = next(stream)
    for _ in range(3):  # deep enough for caches to have been written to
        before = texts(jax.device_get(states._replace(key=())))
        states, info = next(stream)
    proposal = jax.device_get(info.proposal)
    tree = drafter.tree
    expanded = np.unique(tree.parents[1:])
    running = [row for row in range(len(LENGTHS)) if ROOMS[row] > 3]
    sequences, rows, ends = [], [], []
    for row, node in itertools.product(running, expanded):
        path = tree.paths[node, 1 : tree.depths[node] + 1]
        sequence = [*before[row], *proposal.tokens[row, path].tolist()]
        sequences.append(sequence + [0] * (BUCKET + BUDGET - len(sequence)))
        rows.append(row)
        ends.append(len(sequence) - 1)
    warps = jax.tree.map(itemgetter(np.array(rows)), asked.prompts.warp)
    expected = laws_after(draft, jnp.array(sequences), jnp.array(ends), warps)
    stated = proposal.draft_logprobs[running].reshape(-1, VOCAB)
    np.testing.assert_allclose(np.exp(stated), expected, atol=1e-5)


@jax.jit
def laws_after(network, sequences, ends, warps):
    """Each sequence's warped law of the token after position `ends`."""

    def one(tokens, end, warp):
        count = tokens.shape[0]
        hidden = network.forward(tokens, jnp.arange(count), causal(count), None)
        logits = network.unembed(hidden.features[end][None])
        return jax.nn.softmax(warp_logits(logits, warp)[0])

    return jax.vmap(one)(sequences, ends, warps)


@every_drafter
def test_split_budgets_concatenate(name):
    """Greedy: some tokens, then the rest from the text so far, are the tokens of one call."""
    asked = free_request("greedy")
    whole, first = texts(run(name, asked)), 6
    short = asked._replace(
        prompts=asked.prompts._replace(room=jnp.minimum(first, jnp.array(ROOMS)))
    )
    head = run(name, short)
    fits = [row for row in range(len(LENGTHS)) if len(texts(head)[row]) <= BUCKET]
    assert len(fits) > 3
    again = asked.prompts._replace(
        tokens=jnp.asarray(head.context.tokens[:, :BUCKET]),
        length=jnp.minimum(head.context.length, BUCKET),
        room=jnp.array(ROOMS) - (head.context.length - jnp.array(LENGTHS)),
    )
    both = texts(run(name, asked._replace(prompts=again)))
    assert [both[row] for row in fits] == [whole[row] for row in fits]


@dataclasses.dataclass(frozen=True)
class Listener(NoDraft):
    """Drafts nothing; keeps all that it is told of the target, prompt first."""

    @property
    def taps(self) -> tuple[int, ...]:
        return (1, 0)

    def init(self, params, prompt, context):
        room = ((0, BUDGET), (0, 0))
        return jnp.pad(prompt.features, room), jnp.pad(prompt.taps, room)

    def propose(self, params, key, state, context):
        recent = context.recent
        # Row i of `recent` describes the position before the i-th token of the last step.
        start = context.length - 1 - recent.count
        news = (recent.features, recent.taps)
        heard = tuple(
            jnp.where(
                recent.count > 0, jax.lax.dynamic_update_slice_in_dim(old, new, start, 0), old
            )
            for old, new in zip(state, news, strict=True)
        )
        proposal, _ = super().propose(params, key, (), context)
        return proposal, heard


def test_a_drafter_hears_the_features_of_every_committed_position():
    """The prompt's come at once, the rest step by step: the same as in one pass over the text."""
    asked, drafter = request("greedy"), Listener()
    states = decode(
        Params(target(), ()),
        asked.prompts,
        asked.automaton,
        drafter=drafter,
        plan=growing_plan(drafter),
    )
    for row, text in enumerate(texts(states)):
        tokens = states.context.tokens[row, : BUCKET + BUDGET]
        hidden, _ = fresh(tokens, len(text), taps=drafter.taps)
        # The features of the last step are still in `recent`.
        heard = len(text) - 2
        for ours, theirs in zip(states.draft, (hidden.features, hidden.taps), strict=True):
            np.testing.assert_allclose(ours[row, :heard], theirs[:heard], atol=1e-5)


# --- Sampling, end to end: the law of what a driver emits -------------------------------------

SMALL_VOCAB, DRAWS, ROWS = 4, 131_072, 8192
SAMPLED_PROMPT = [0, 1, 2, 0, 1]
FALSE_ALARMS = 1e-3  # how often a correct sampler fails; the seeds are fixed


@lru_cache
def small_target():
    return network(SMALL_VOCAB, seed=3)


class Draws(NamedTuple):
    """Four tokens after the prompt, drawn very often, and how many drafts were accepted."""

    tokens: np.ndarray
    accepted: np.ndarray


def sampled_four(drafter: Drafter, draft) -> Draws:
    plan = DecodePlan((8 + 4 + drafter.tree_shape[1] + 1,), chunk=8)
    prompt = jnp.array([*SAMPLED_PROMPT, 0, 0, 0])
    tokens, accepted = [], 0
    for call in range(DRAWS // ROWS):
        prompts = Prompt(
            tokens=jnp.broadcast_to(prompt, (ROWS, 8)),
            length=jnp.full(ROWS, len(SAMPLED_PROMPT)),
            room=jnp.full(ROWS, 4),
            seed=jnp.stack([jnp.full(ROWS, call), jnp.arange(ROWS)], axis=1),
            stop_ids=jnp.full((ROWS, 1), -1),
            warp=Warp(temperature=jnp.full(ROWS, 0.8), top_k=jnp.full(ROWS, 3)),
        )
        states = decode(Params(small_target(), draft), prompts, drafter=drafter, plan=plan)
        tokens.append(np.asarray(states.context.tokens)[:, len(SAMPLED_PROMPT) :][:, :4])
        accepted += np.asarray(states.stats.accepted).sum(axis=0)
    return Draws(np.concatenate(tokens), accepted)


@lru_cache
def law_of_four() -> np.ndarray:
    """The target's own law of four tokens after the prompt, warped."""
    grid = np.stack(np.meshgrid(*[np.arange(SMALL_VOCAB)] * 3, indexing="ij"), -1).reshape(-1, 3)
    rows = jnp.asarray([[*SAMPLED_PROMPT, *tail] for tail in grid.tolist()])

    def logits(tokens):
        length = tokens.shape[0]
        hidden = small_target().forward(tokens, jnp.arange(length), causal(length), None)
        return small_target().unembed(hidden.features[-4:])

    scores = np.asarray(jax.vmap(logits)(rows), np.float64) / 0.8
    cut = np.sort(scores, axis=-1)[..., -3:-2]
    weights = np.where(scores >= cut, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    laws = weights / weights.sum(axis=-1, keepdims=True)
    joint = laws[:, 3]
    for step in range(3):
        joint = joint * laws[np.arange(len(grid)), step, grid[:, step]][:, None]
    return joint.reshape((SMALL_VOCAB,) * 4)


def fit(drawn: np.ndarray, first: int) -> float:
    """Returns the chance of a worse chi-square of two neighbours under the target's law."""
    expected = DRAWS * law_of_four().sum(axis=tuple({0, 1, 2, 3} - {first, first + 1}))
    observed = np.zeros_like(expected)
    np.add.at(observed, tuple(drawn[:, first : first + 2].T), 1)
    possible = expected > 0
    assert (observed[~possible] == 0).all()
    assert (expected[possible] > 5).all()
    statistic = np.sum((observed[possible] - expected[possible]) ** 2 / expected[possible])
    return chi2.sf(statistic, possible.sum() - 1)


def drawn_from(name: str):
    """These draws take long; in the quick tests, enumeration vouches for the other drafters."""
    quick = name in ("plain", "draft model, tree")
    return name if quick else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [drawn_from(name) for name in EVERY])
def test_sampled_tokens_have_the_law_of_the_target(name):
    """Pairs of tokens inside the first step and across steps; 131 072 draws see 1 % of bias."""
    case: Case = EVERY[name]
    draws = sampled_four(case.make(), case.draft(small_target()))
    assert name == "plain" or (draws.accepted > DRAWS / 100).sum() > 1  # kept some, refused some
    assert min(fit(draws.tokens, first) for first in range(3)) > FALSE_ALARMS


@dataclasses.dataclass(frozen=True)
class Liar(type(DRAFTERS["draft model, chain"].make())):
    """Says that its tokens came from a slightly flatter law than they did."""

    def propose(self, params, key, state, context):
        proposal, state = super().propose(params, key, state, context)
        flatter = jax.nn.log_softmax(0.93 * proposal.draft_logprobs, axis=-1)
        return proposal._replace(draft_logprobs=flatter), state


def test_a_dishonest_drafter_is_caught_by_the_same_test():
    case = DRAFTERS["draft model, chain"]
    draws = sampled_four(Liar(num_speculative_tokens=3), case.draft(small_target()))
    assert min(fit(draws.tokens, first) for first in range(3)) < FALSE_ALARMS
