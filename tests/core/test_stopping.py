"""Ends of rows: the automaton against a byte search, the cut against a plain loop."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.core.stopping import StopAutomaton, cut_emitted, stop_automaton
from jaxspec.core.types import Stop

# Few letters, so that strings overlap themselves and each other.
texts = st.text("ab\n", min_size=1, max_size=4).map(str.encode)
pieces = st.text("ab\n", max_size=3).map(str.encode)


def walk(automaton: StopAutomaton, tokens: Sequence[int]) -> list[bool]:
    """After each token: has a stop string been completed?"""
    table, kinds = map(np.asarray, automaton)
    state, done = 0, []
    for token in tokens:
        state = table[state, kinds[token]]
        done.append(bool(state == len(table) - 1))
    return done


@given(
    strings=st.lists(texts, min_size=1, max_size=3),
    vocabulary=st.lists(pieces, min_size=1, max_size=6),
    data=st.data(),
)
def test_the_automaton_finds_what_a_byte_search_finds(strings, vocabulary, data):
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12))
    found = []
    for end in range(1, len(tokens) + 1):
        spelled = b"".join(vocabulary[token] for token in tokens[:end])
        found.append(any(string in spelled for string in strings))
    assert walk(stop_automaton(strings, vocabulary), tokens) == found


def test_a_string_may_end_in_the_middle_of_a_token():
    vocabulary = [b"Fin", b"al ans", b"wer: 4", b""]
    automaton = stop_automaton([b"answer:"], vocabulary)
    assert walk(automaton, [0, 1, 3, 2]) == [False, False, False, True]
    assert walk(automaton, [0, 2, 1]) == [False, False, False]


def test_characters_of_several_bytes_may_be_split_over_tokens():
    euro = "€".encode()
    vocabulary = [euro[:1], euro[1:2], euro[2:], b"x"]
    automaton = stop_automaton([euro], vocabulary)
    assert walk(automaton, [3, 0, 1, 2]) == [False, False, False, True]
    assert walk(automaton, [0, 1, 3, 2]) == [False] * 4


def test_long_stop_strings_are_quick_and_endless_ones_refused():
    spelled = [bytes([byte]) for byte in range(256)]
    began = time.monotonic()
    automaton = stop_automaton([b"ab" * 2000, b"b" * 3000], spelled)
    assert time.monotonic() - began < 5
    assert walk(automaton, [ord("b")] * 3000)[-2:] == [False, True]
    with pytest.raises(ValueError, match="stop: strings of 1000000 bytes in all, at most 16384"):
        stop_automaton([b"a" * 1_000_000], spelled)


def test_the_size_of_the_table_is_that_of_what_tokens_do_not_of_the_vocabulary():
    """Most tokens move the states as others do."""
    words = [b"y" * (1 + i % 8) if i < 8 else b"%d" % i for i in range(4096)]
    began = time.monotonic()
    automaton = stop_automaton([b"y" * 16_383], words)
    assert time.monotonic() - began < 2
    assert automaton.table.nbytes < 1 << 26
    assert walk(automaton, [7] * 2048)[-2:] == [False, True]
    text = np.random.default_rng(0).integers(0, 256, 16_000, np.uint8).tobytes()
    tokens = [text[start : start + 3] for start in range(0, 16_000, 3)]
    with pytest.raises(ValueError, match="stop: these strings make a machine of 16002 states"):
        stop_automaton([text], tokens)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop: an empty stop string"):
        stop_automaton([b"end", b""], [b"a"])


VOCABULARY = [b"a", b"b", b"ab", b"", b"\n", b"ba"]
AUTOMATON = stop_automaton([b"abb", b"\n\n"], VOCABULARY)
LENGTH = 5


def plain_cut(emitted, failures, closes, count, room, stop_ids, strings, state):
    """The rule, token by token: how many are kept, why the row ends, where the automaton is."""
    table, kinds = map(np.asarray, AUTOMATON)
    for kept in range(count):
        if failures[kept]:
            return kept, failures[kept], state
        state = table[state, kinds[emitted[kept]]] if strings else state
        if strings and state == len(table) - 1:
            return kept + 1, Stop.STRING, state
        if emitted[kept] in stop_ids:
            return kept + 1, Stop.TOKEN, state
        if closes[kept]:
            return kept + 1, Stop.GRAMMAR, state
        if kept + 1 == room:
            return kept + 1, Stop.LENGTH, state
    return count, Stop.RUNNING, state


compiled_cut = jax.jit(cut_emitted)


@settings(max_examples=300)
@given(
    emitted=st.lists(st.integers(0, 5), min_size=LENGTH, max_size=LENGTH),
    failures=st.lists(
        st.sampled_from([0, 0, 0, Stop.NOT_FINITE, Stop.NO_TOKEN]), min_size=LENGTH, max_size=LENGTH
    ),
    closes=st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    count=st.integers(1, LENGTH),
    room=st.integers(1, 8),
    stop_ids=st.lists(st.integers(-1, 5), min_size=2, max_size=2),
    strings=st.booleans(),
    state=st.integers(0, len(AUTOMATON.table) - 2),
)
def test_cutting_a_step_equals_reading_it_token_by_token(
    emitted, failures, closes, count, room, stop_ids, strings, state
):
    ending = compiled_cut(
        jnp.array(emitted),
        jnp.array(failures),
        jnp.int32(count),
        jnp.int32(room),
        jnp.array(stop_ids),
        AUTOMATON if strings else None,
        jnp.int32(state),
        jnp.array(closes),
    )
    expected = plain_cut(emitted, failures, closes, count, room, stop_ids, strings, state)
    assert tuple(map(int, ending)) == tuple(map(int, expected))


def cut(emitted, count, room=9, stop_ids=(-1,), failures=(), automaton=None):
    """A step's tokens, padded; by keyword what a test is about."""
    padded = jnp.array([*emitted, *[0] * (LENGTH - len(emitted))])
    failures = jnp.array([*failures, *[0] * (LENGTH - len(failures))], jnp.int32)
    return compiled_cut(
        padded, failures, jnp.int32(count), jnp.int32(room), jnp.array(stop_ids), automaton,
        jnp.int32(0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "kept", "stop"),
    [
        ({"emitted": [1, 2, 3], "count": 3}, 3, Stop.RUNNING),
        ({"emitted": [1, 4, 3], "count": 3, "stop_ids": (4,)}, 2, Stop.TOKEN),
        ({"emitted": [1, 2, 4], "count": 3, "stop_ids": (4,)}, 3, Stop.TOKEN),  # the bonus
        ({"emitted": [1, 2, 4], "count": 2, "stop_ids": (4,)}, 2, Stop.RUNNING),  # rejected
        ({"emitted": [1, 2, 3], "count": 3, "room": 2}, 2, Stop.LENGTH),
        ({"emitted": [1, 4, 3], "count": 3, "room": 2, "stop_ids": (4,)}, 2, Stop.TOKEN),
        ({"emitted": [2, 1, 0, 0], "count": 4, "automaton": AUTOMATON}, 2, Stop.STRING),
        ({"emitted": [2, 1], "count": 1, "automaton": AUTOMATON}, 1, Stop.RUNNING),
        ({"emitted": [1, 2], "count": 2, "failures": [Stop.NOT_FINITE] * 5}, 0, Stop.NOT_FINITE),
        ({"emitted": [1, 2], "count": 2, "failures": [0, Stop.NO_TOKEN]}, 1, Stop.NO_TOKEN),
        ({"emitted": [1, 2], "count": 2, "failures": [0, 0, Stop.NO_TOKEN]}, 2, Stop.RUNNING),
    ],
)
def test_cuts_by_eye(step, kept, stop):
    ending = cut(**step)
    assert (int(ending.count), Stop(int(ending.stop))) == (kept, stop)
