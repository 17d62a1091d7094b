"""Grammars as machines over tokens: the tokens that may follow each node of a tree.

A grammar is a regular language of texts. Each row stands in a state of its machine, and the state
of a node is that of the row, moved on by the tokens of the path to the node. So each node allows
the tokens that plain decoding allows after that text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.types import Context, Tree

_SILENT = 0
_DEAD = -1
NEVER = 2**30
"""The fewest tokens to the end where there is no way to it."""
_MOST_FORCED = 128
"""Tokens of a state whose text may be forced; more are sure to part."""


class Grammar(NamedTuple):
    """A machine that reads tokens. Tokens that move it alike are of one kind.

    Attributes:
        table: `table[state, kind]` is the state after a token of that kind; -1 where no text of the
            language goes on so.
        kinds: the kind of each token id; 0 are tokens that spell nothing, such as stop ids.
        ends: True in states where the text is one of the language.
        closed: True where moreover no longer text of the language begins with it.
        least: fewest tokens from each state to the end of a text.
        guesses: the longest token of each state whose text is forced; -1 where nothing is.
    """

    table: Int[Array, "states kinds"]
    kinds: Int[Array, " vocab"]
    ends: Bool[Array, " states"]
    closed: Bool[Array, " states"]
    least: Int[Array, " states"]
    guesses: Int[Array, " states"]


class RowGrammar(NamedTuple):
    """A grammar, and a row that obeys it.

    Attributes:
        state: of the row's text.
        room: tokens that may still be emitted.
        stop_ids: ids that end the row; -1 where unused.
    """

    grammar: Grammar
    state: Int[Array, ""]
    room: Int[Array, ""]
    stop_ids: Int[Array, " stop_ids"]

    def after(self, states: Int[Array, "*nodes"], tokens: Int[Array, "*nodes"]):
        """Returns the states after one more token each; -1 for texts that the grammar forbids."""
        grammar = self.grammar
        return jnp.where(states < 0, _DEAD, grammar.table[states, grammar.kinds[tokens]])

    def at_nodes(self, tree: Tree, tokens: Int[Array, " nodes"]) -> Int[Array, " nodes"]:
        """Returns the state of each node; the root is the last token of the row's text."""
        states = jnp.broadcast_to(self.state, tokens.shape)
        for level in range(1, tree.paths.shape[1]):
            node = jnp.asarray(tree.paths)[:, level]
            moved = self.after(states, tokens[jnp.maximum(node, 0)])
            states = jnp.where(node >= 0, moved, states)
        return states

    def allowed(
        self, states: Int[Array, " nodes"], depths: Int[Array, " nodes"]
    ) -> Bool[Array, "nodes vocab"]:
        """Returns the tokens that may follow nodes.

        A token must leave room to end the text, as long as there was such room before it. A stop
        id may follow a text of the language. After a text that the grammar forbids every token may:
        nothing is emitted there.

        Args:
            states: of the nodes.
            depths: of the nodes; 0 is the root.
        """
        table, kinds, ends, _, least, _ = self.grammar
        after = table[states]
        left = self.room - depths
        fits = (least[after] < left[:, None]) | (least[states] > left)[:, None]
        dead = (states < 0)[:, None]
        goes_on = (((after >= 0) & fits) | dead)[:, kinds]
        stops = jnp.where(kinds[self.stop_ids] == _SILENT, ends[states, None], False)
        spelled = after[:, kinds[self.stop_ids]]
        stops = stops | ((spelled >= 0) & ends[spelled]) | dead
        ids = jnp.where(self.stop_ids < 0, len(kinds), self.stop_ids)
        return goes_on.at[:, ids].set(stops, mode="drop")

    def keep(
        self,
        logits: Float[Array, "nodes drafted"],
        states: Int[Array, " nodes"],
        depth: int | Int[Array, ""],
        bias: Float[Array, " drafted"] | None = None,
        ids: Int[Array, " drafted"] | None = None,
    ) -> Float[Array, "nodes drafted"]:
        """Returns a drafter's logits with -inf for tokens that may not follow nodes of one depth.

        Where that leaves none, they are returned as they are: a drafter has to choose some token.

        Args:
            logits: of the nodes.
            states: of the nodes.
            depth: of the nodes.
            bias: what is added to the logits later.
            ids: the id of each logit; `None`: its place.
        """
        allowed = self.allowed(states, jnp.full(states.shape, depth))
        allowed = allowed if ids is None else allowed[:, ids]
        left = logits > -jnp.inf if bias is None else logits + bias > -jnp.inf
        some = jnp.any(allowed & left, axis=-1, keepdims=True)
        return jnp.where(allowed | ~some, logits, -jnp.inf)


def grammar_of(context: Context, grammar: Grammar | None, state: Array | None) -> RowGrammar | None:
    """Returns the grammar of a row; `None` without one."""
    if grammar is None or state is None:
        return None
    return RowGrammar(grammar, state, context.room, context.stop_ids)


def walk(
    grammar: Grammar, state: Int[Array, ""], tokens: Int[Array, " length"]
) -> Int[Array, " length+1"]:
    """Returns the states before the first token, and after each."""

    def advance(state, token):
        state = jnp.where(state < 0, _DEAD, grammar.table[state, grammar.kinds[token]])
        return state, state

    _, reached = jax.lax.scan(advance, state, tokens)
    return jnp.concatenate([state[None], reached])


def is_closed(grammar: Grammar, states: Int[Array, " states"]) -> Bool[Array, " states"]:
    """Returns True where the text is one of the language and no longer one begins with it."""
    return (states >= 0) & grammar.closed[states]


def grammar_over_tokens(
    by_byte: np.ndarray, ends: np.ndarray, token_bytes: Sequence[bytes]
) -> Grammar:
    """Builds the machine over tokens from one over bytes, on the host.

    States from which no text can be ended with the tokens that there are lead nowhere.

    Args:
        by_byte: `[states, 256]`, the state after each byte; -1 where there is none.
        ends: True in states where a text is one of the language.
        token_bytes: the bytes that each id spells; empty for ids that may not be emitted.

    Example:
        The language "a" or "ab", with the tokens "", "a", "b", "ab":

        >>> by_byte = np.full((3, 256), -1)
        >>> by_byte[0, ord("a")], by_byte[1, ord("b")] = 1, 2
        >>> ends = np.array([False, True, True])
        >>> grammar = grammar_over_tokens(by_byte, ends, [b"", b"a", b"b", b"ab"])
        >>> grammar.table[0][grammar.kinds].tolist(), grammar.least.tolist()
        ([-1, 1, -1, 2], [1, 0, 0])
    """
    # Bytes that move every state alike are one, so most tokens of the inside of a text are one, too.
    columns, classes = np.unique(by_byte, axis=1, return_inverse=True)
    class_of = bytes(classes.reshape(-1).astype(np.uint8))
    number_of = {b"": _SILENT}
    numbers = np.array(
        [number_of.setdefault(token.translate(class_of), len(number_of)) for token in token_bytes]
    )
    spelled, alike = _alike(_walk_bytes(columns, list(number_of)[1:]))
    moves = np.column_stack([np.full(len(by_byte), _DEAD), spelled])
    kinds = np.concatenate([[_SILENT], 1 + alike])[numbers]
    least = _fewest_tokens(moves, ends)
    moves = np.where((moves >= 0) & (least[moves] < NEVER), moves, _DEAD)
    guesses = [
        _forced_token(np.flatnonzero(moves[state, kinds] >= 0), token_bytes) if not end else _DEAD
        for state, end in enumerate(ends)
    ]
    return Grammar(
        jnp.asarray(moves, jnp.int32),
        jnp.asarray(kinds, jnp.int32),
        jnp.asarray(ends),
        jnp.asarray(ends & (moves < 0).all(axis=1)),
        jnp.asarray(least, jnp.int32),
        jnp.asarray(guesses, jnp.int32),
    )


def _walk_bytes(step: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Returns `[states, texts]`, the state after each text; -1 where it cannot be read."""
    num_states, num_classes = step.shape
    # One more state is dead, and every byte keeps it so.
    step = np.vstack([np.where(step < 0, num_states, step), np.full(num_classes, num_states)])
    lengths = np.array([len(text) for text in texts], int)
    longest = max(lengths, default=0)
    padded = np.frombuffer(b"".join(text.ljust(longest, b"\0") for text in texts), np.uint8)
    padded = padded.reshape(len(texts), longest)
    table = np.repeat(np.arange(num_states)[:, None], len(texts), axis=1)
    for place in range(longest):
        (longer,) = np.nonzero(lengths > place)
        table[:, longer] = step[table[:, longer], padded[None, longer, place]]
    return np.where(table == num_states, _DEAD, table)


def _alike(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different columns of a table, and which of them each column is."""
    # Sums with random weights tell columns apart; sorting whole columns takes minutes.
    weights = np.random.default_rng(0).integers(1, 2**62, len(table), np.int64)
    _, first, inverse = np.unique(weights @ table, return_index=True, return_inverse=True)
    assert (table[:, first][:, inverse] == table).all(), "two columns have one sum"
    return table[:, first], inverse


def _fewest_tokens(moves: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the fewest tokens from each state to the end of a text; `NEVER` where there is none."""
    least = np.where(ends, 0, NEVER)
    while True:
        through = np.where(moves >= 0, least[moves], NEVER).min(axis=1) + 1
        nearer = np.minimum(least, through)
        if (nearer == least).all():
            return least
        least = nearer


def _forced_token(ids: np.ndarray, token_bytes: Sequence[bytes]) -> int:
    """Returns the longest of tokens that all begin it; -1 where they part."""
    if not 0 < len(ids) <= _MOST_FORCED:
        return _DEAD
    longest = max(ids.tolist(), key=lambda token: len(token_bytes[token]))
    text = token_bytes[longest]
    return longest if all(text.startswith(token_bytes[token]) for token in ids) else _DEAD
