"""The machine over tokens against a plain loop over the bytes of texts."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.core.grammar import NEVER, RowGrammar, is_closed, walk
from tests.laws.grammars import Machine

STATES = st.integers(0, 3)


@st.composite
def machines(draw) -> Machine:
    moves = draw(st.lists(st.dictionaries(st.sampled_from("abc"), STATES), min_size=4, max_size=4))
    return Machine(moves, draw(st.lists(STATES, min_size=1, max_size=2)))


vocabularies = st.lists(
    st.text("abc", min_size=0, max_size=3).map(str.encode), min_size=1, max_size=7
).map(lambda tokens: [b"", *tokens])


@settings(max_examples=200, deadline=None)
@given(machine=machines(), vocabulary=vocabularies, data=st.data())
def test_tokens_are_allowed_as_their_bytes_are(machine, vocabulary, data):
    grammar = machine.over_tokens(vocabulary)
    spelled = [token for token, text in enumerate(vocabulary) if text]
    tokens = data.draw(st.lists(st.sampled_from(spelled or [0]), max_size=4))
    room, stop_ids = data.draw(st.integers(1, 4)), [0, len(vocabulary) - 1]
    reached = np.asarray(walk(grammar, jnp.int32(0), jnp.array(tokens, jnp.int32)))
    state = int(reached[-1])
    text = b"".join(vocabulary[token] for token in tokens)
    fewest = machine.fewest(text, vocabulary)
    dead = fewest == np.inf or any(not vocabulary[token] for token in tokens)
    # The state of a text that cannot be completed is dead, unless the row begins with it.
    assert (state < 0) == (dead and bool(tokens))
    if state >= 0:
        assert int(grammar.least[state]) == min(fewest, NEVER)
    row = RowGrammar(grammar, jnp.int32(0), jnp.int32(room), jnp.array([*stop_ids, -1]))
    if not (dead and not tokens):
        found = row.allowed(jnp.array([state]), jnp.array([0]))[0]
        expected = machine.allowed(tokens, vocabulary, stop_ids, room)
        assert np.asarray(found).tolist() == expected.tolist()


def test_a_text_that_nothing_may_follow_is_closed():
    grammar = Machine([{"a": 1}, {"b": 2}, {}], ends=[1, 2]).over_tokens([b"", b"a", b"b", b"ab"])
    states = walk(grammar, jnp.int32(0), jnp.array([1, 2]))
    assert states.tolist() == [0, 1, 2]
    assert is_closed(grammar, states).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("machine", "guess"),
    [
        (Machine([{"a": 1}, {"b": 2}, {}], ends=[2]), 3),  # "ab" is the longest way
        (Machine([{"a": 1}, {"b": 2}, {}], ends=[1, 2]), 3),
        (Machine([{"a": 1, "b": 2}, {"b": 2}, {}], ends=[2]), -1),  # two ways part
        (Machine([{"a": 1}, {"b": 2}, {}], ends=[0, 2]), -1),  # the text may end here
    ],
)
def test_a_forced_text_is_guessed(machine, guess):
    grammar = machine.over_tokens([b"", b"a", b"b", b"ab"])
    assert int(grammar.guesses[0]) == guess
