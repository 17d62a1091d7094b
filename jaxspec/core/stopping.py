"""Ends of a row: a stop id or string, a grammar, the token budget, or no token to choose."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core.grammar import SILENT, TooManyEntries, read_tokens, trie_of
from jaxspec.core.types import Stop

_FEWEST_STATES, _FEWEST_KINDS = 16, 256
_MOST_BYTES = 1 << 14  # of the strings


class StopAutomaton(NamedTuple):
    """Stop strings as a machine over tokens (Aho-Corasick over the bytes that tokens spell).

    Attributes:
        table: `table[state, kind]` is the state after a token of that kind; the last state means "a
            stop string has been completed" and is never left. States and kinds are powers of two,
            so that programs are few: some are unused.
        kinds: the kind of each token id.
    """

    table: Int[Array, "states kinds"]
    kinds: Int[Array, " vocab"]


def stop_automaton(strings: Sequence[bytes], token_bytes: Sequence[bytes]) -> StopAutomaton:
    """Builds the automaton on the host.

    Args:
        strings: non-empty byte strings, any of which ends a row.
        token_bytes: the bytes each token id spells; empty for special tokens, which spell nothing.

    Raises:
        ValueError: for an empty stop string, or strings that would take too much memory.
    """
    if any(not string for string in strings):
        raise ValueError("stop: an empty stop string would end every row at once; remove it.")
    if (length := sum(map(len, strings))) > _MOST_BYTES:
        raise ValueError(
            f"stop: strings of {length} bytes in all, at most {_MOST_BYTES} are possible: give "
            "fewer or shorter ones."
        )
    by_byte = _byte_automaton(strings)
    done = by_byte.shape[0] - 1
    try:
        moves, kinds = read_tokens(by_byte, token_bytes)
    except TooManyEntries as error:
        raise ValueError(f"stop: these strings make {error}: give fewer or shorter ones.") from None
    moves[:, SILENT] = np.arange(done + 1)
    last = max(_FEWEST_STATES, 1 << done.bit_length()) - 1
    size = max(_FEWEST_KINDS, 1 << (moves.shape[1] - 1).bit_length())
    table = np.full((last + 1, size), last, np.int32)
    table[:done, : moves.shape[1]] = np.where(moves[:done] == done, last, moves[:done])
    return StopAutomaton(jnp.asarray(table), jnp.asarray(kinds, jnp.int32))


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Aho-Corasick transitions `[states, 256]`; the last state absorbs every completed string."""
    trie = trie_of(strings, most=_MOST_BYTES + 1)
    assert trie is not None, "no more nodes than bytes and the root"
    follow, complete = trie
    done = len(follow)
    table = np.full((done + 1, 256), done, np.int32)
    # The state of the longest proper suffix of each node that begins a string.
    shorter = np.zeros(done, np.int32)
    level = [0]
    while level:
        for state in level:
            table[state] = table[shorter[state]] if state else 0
            for byte, after in follow[state].items():
                shorter[after] = table[state, byte]
                # A text ends where a shorter string ends.
                if table[state, byte] != done:
                    table[state, byte] = done if after in complete else after
        level = [
            after
            for state in level
            for after in follow[state].values()
            if after not in complete and shorter[after] != done
        ]
    return table


class Ending(NamedTuple):
    """The tokens of one step that a row keeps, and why it ended, if it did."""

    count: Int[Array, ""]
    stop: Int[Array, ""]
    automaton: Int[Array, ""]


def cut_emitted(
    emitted: Int[Array, " length"],
    failures: Int[Array, " length"],
    count: Int[Array, ""],
    room: Int[Array, ""],
    stop_ids: Int[Array, " stop_ids"],
    automaton: StopAutomaton | None,
    automaton_state: Int[Array, ""],
    closes: Bool[Array, " length"] | None = None,
) -> Ending:
    """Cuts a step's tokens at the first reason to stop; a stop id or string is kept whole.

    Args:
        emitted: tokens of this step, in order.
        failures: reasons why no token could be chosen, such as logits that are not finite: what
            stands there is not emitted. `Stop.RUNNING` where one was chosen.
        count: how many of `emitted` verification granted.
        room: how many may still be emitted.
        stop_ids: ids that end the row, padded with -1.
        automaton: the stop strings, `None` without any.
        automaton_state: where the row stands in the automaton.
        closes: True for tokens that complete a text of the grammar which nothing may follow; `None`
            without one.
    """
    order = jnp.arange(emitted.shape[0])
    is_stop = jnp.any(emitted[:, None] == stop_ids[None, :], axis=1)
    if automaton is None:
        completes = jnp.zeros_like(is_stop)
        visited = jnp.broadcast_to(automaton_state, (emitted.shape[0] + 1,))
    else:
        done = automaton.table.shape[0] - 1

        def advance(state, kind):
            state = automaton.table[state, kind]
            return state, state

        _, reached = jax.lax.scan(advance, automaton_state, automaton.kinds[emitted])
        completes = reached == done
        visited = jnp.concatenate([automaton_state[None], reached])

    # If one token is both, the string counts: its text is to be cut.
    closed = Stop.RUNNING if closes is None else jnp.where(closes, Stop.GRAMMAR, Stop.RUNNING)
    reasons = jnp.where(completes, Stop.STRING, jnp.where(is_stop, Stop.TOKEN, closed))
    never = emitted.shape[0] + 1  # past any number of tokens a step can give
    ends = (reasons != Stop.RUNNING) & (order < count)
    end = jnp.min(jnp.where(ends, order + 1, never))
    failed = (failures != Stop.RUNNING) & (order < count)
    bad = jnp.min(jnp.where(failed, order, never))
    kept = jnp.minimum(jnp.minimum(count, room), jnp.minimum(end, bad))

    last = emitted.shape[0] - 1
    stop = jnp.where(kept == bad, failures[jnp.minimum(kept, last)], Stop.RUNNING)
    stop = jnp.where(kept == room, Stop.LENGTH, stop)
    stop = jnp.where(kept == end, reasons[jnp.maximum(kept - 1, 0)], stop)
    return Ending(kept.astype(jnp.int32), stop.astype(jnp.int32), visited[kept].astype(jnp.int32))
