"""Grammars as machines over tokens: the tokens that may follow each node of a tree.

A grammar is a regular language of texts. Each row stands in a state of its machine, and the state
of a node is that of the row, moved on by the tokens of the path to the node. So each node allows
the tokens that plain decoding allows after that text.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.types import Context, Tree

SILENT = 0
"""The kind of tokens that spell nothing."""
_DEAD = -1
NEVER = 2**30
"""The fewest tokens to the end where there is no way to it."""
_MOST_FORCED = 128
"""Tokens of a state whose text may be forced; more are sure to part."""
MOST_ENTRIES = 1 << 25
"""Entries of a machine's table, at most: states times tokens that move them differently; 128 MB."""


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
        return _moved(self.grammar, states, tokens)

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
        stops = jnp.where(kinds[self.stop_ids] == SILENT, ends[states, None], False)
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
        state = _moved(grammar, state, token)
        return state, state

    _, reached = jax.lax.scan(advance, state, tokens)
    return jnp.concatenate([state[None], reached])


def _moved(grammar: Grammar, states: Array, tokens: Array) -> Array:
    return jnp.where(states < 0, _DEAD, grammar.table[states, grammar.kinds[tokens]])


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

    Raises:
        TooManyEntries: the machine would be too large.

    Example:
        The language "a" or "ab", with the tokens "", "a", "b", "ab":

        >>> by_byte = np.full((3, 256), -1)
        >>> by_byte[0, ord("a")], by_byte[1, ord("b")] = 1, 2
        >>> ends = np.array([False, True, True])
        >>> grammar = grammar_over_tokens(by_byte, ends, [b"", b"a", b"b", b"ab"])
        >>> grammar.table[0][grammar.kinds].tolist(), grammar.least.tolist()
        ([-1, 1, -1, 2], [1, 0, 0])
    """
    moves, kinds = read_tokens(by_byte, token_bytes)
    least = _fewest_tokens(moves, ends)
    moves = np.where((moves >= 0) & (least[moves] < NEVER), moves, _DEAD)
    return Grammar(
        jnp.asarray(moves, jnp.int32),
        jnp.asarray(kinds, jnp.int32),
        jnp.asarray(ends),
        jnp.asarray(ends & (moves < 0).all(axis=1)),
        jnp.asarray(least, jnp.int32),
        jnp.asarray(_forced_tokens(moves, kinds, ends, token_bytes), jnp.int32),
    )


class TooManyEntries(ValueError):
    """A machine over tokens that would take too much memory; the message says how much."""


def trie_of(texts: Iterable[bytes], most: int) -> tuple[list[dict[int, int]], set[int]] | None:
    """Returns a tree of texts: the node after each byte from each node, and nodes that end a text.

    Node 0 is the empty text, and nodes come after those that lead to them. `None` if there would be
    more than `most`.

    Example:
        >>> trie_of([b"ab", b"b"], most=9)
        ([{97: 1, 98: 3}, {98: 2}, {}, {}], {2, 3})
    """
    follow: list[dict[int, int]] = [{}]
    ends = set()
    for text in texts:
        node = 0
        for byte in text:
            after = follow[node].setdefault(byte, len(follow))
            if after == len(follow):
                if after == most:
                    return None
                follow.append({})
            node = after
        ends.add(node)
    return follow, ends


def read_tokens(by_byte: np.ndarray, token_bytes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns `[states, kinds]`, the state after a token of each kind, and the kind of each token.

    Most beginnings of tokens move all states as others do, so only different moves are followed.
    Kind 0 are tokens that spell nothing; they lead nowhere.

    Raises:
        TooManyEntries: there are too many different moves.
    """
    num_states = len(by_byte)
    # Each row is a move: the state after it, by the state before. One more state is dead.
    steps = np.full((256, num_states + 1), num_states, np.int32)
    steps[:, :-1] = np.where(by_byte < 0, num_states, by_byte).T
    weights = np.random.default_rng(0).integers(1, 2**62, num_states + 1, np.int64)
    moves = [np.arange(num_states + 1, dtype=np.int32)]
    number_of = {int(weights @ moves[0]): 0}
    lengths = np.array([len(token) for token in token_bytes])
    longest = lengths.max()
    padded = b"".join(token.ljust(longest, b"\0") for token in token_bytes)
    padded = np.frombuffer(padded, np.uint8).reshape(len(token_bytes), longest)
    numbers = np.zeros(len(token_bytes), int)
    for place in range(longest):
        (longer,) = np.nonzero(lengths > place)
        pairs, inverse = np.unique(
            numbers[longer] * 256 + padded[longer, place], return_inverse=True
        )
        reached = np.zeros(len(pairs), int)
        for index, (number, byte) in enumerate(zip(*divmod(pairs, 256), strict=True)):
            move = steps[byte][moves[number]]
            # The sum with random weights tells moves apart.
            reached[index] = number_of.setdefault(int(weights @ move), len(moves))
            if reached[index] == len(moves):
                if len(moves) * num_states >= MOST_ENTRIES:
                    raise TooManyEntries(
                        f"a machine of {num_states} states whose tokens move it in {len(moves)} "
                        f"ways or more; at most {MOST_ENTRIES} entries are possible"
                    )
                moves.append(move)
        numbers[longer] = reached[inverse]
    used, kinds = np.unique(numbers[lengths > 0], return_inverse=True)
    silent = np.full(num_states, num_states, np.int32)
    table = np.stack([silent, *(moves[number][:-1] for number in used)], axis=1)
    kind_of = np.full(len(token_bytes), SILENT)
    kind_of[lengths > 0] = 1 + kinds
    return np.where(table == num_states, _DEAD, table), kind_of


def with_room(grammar: Grammar) -> Grammar:
    """Returns the same machine with as many states and kinds as the next powers of two.

    What is added leads nowhere. So other texts of about the same size share a program.
    """
    states, kinds = (max(32, 1 << (size - 1).bit_length()) for size in grammar.table.shape)
    more = states - grammar.table.shape[0]

    def longer(array: Array, filler: int | bool) -> Array:
        return jnp.pad(array, (0, more), constant_values=filler)

    added = ((0, more), (0, kinds - grammar.table.shape[1]))
    return Grammar(
        jnp.pad(grammar.table, added, constant_values=_DEAD),
        grammar.kinds,
        longer(grammar.ends, False),
        longer(grammar.closed, False),
        longer(grammar.least, NEVER),
        longer(grammar.guesses, _DEAD),
    )


def _fewest_tokens(moves: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the fewest tokens from each state to the end of a text, or `NEVER`."""
    after = [np.unique(row[row >= 0]) for row in moves]
    before = np.repeat(np.arange(len(moves)), [len(states) for states in after])
    after = np.concatenate(after)
    order = np.argsort(after, kind="stable")
    before = np.split(before[order], np.searchsorted(after[order], np.arange(1, len(moves))))
    least = np.where(ends, 0, NEVER)
    reached, length = np.flatnonzero(ends), 0
    while len(reached):
        length += 1
        near = np.unique(np.concatenate([before[state] for state in reached]))
        reached = near[least[near] == NEVER]
        least[reached] = length
    return least


def _forced_tokens(
    moves: np.ndarray, kinds: np.ndarray, ends: np.ndarray, token_bytes: Sequence[bytes]
) -> list[int]:
    """Returns the longest token of each state, if all its tokens begin that one; -1 elsewhere."""
    sizes, forced = np.bincount(kinds, minlength=moves.shape[1]), []
    ids_of = np.split(np.argsort(kinds, kind="stable"), np.cumsum(sizes)[:-1])
    for after, end in zip(moves, ends, strict=True):
        forced.append(_DEAD)
        if not end and 0 < sizes[after >= 0].sum() <= _MOST_FORCED:
            ids = [token for kind in np.flatnonzero(after >= 0) for token in ids_of[kind].tolist()]
            longest = max(ids, key=lambda token: len(token_bytes[token]))
            if all(token_bytes[longest].startswith(token_bytes[token]) for token in ids):
                forced[-1] = longest
    return forced
