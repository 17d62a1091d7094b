"""Ends of a row: a stop id or string, a grammar, the token budget, or no token to choose."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core.types import Stop

_FEWEST_STATES = 16
_MOST_BYTES, _MOST_ENTRIES = 1 << 14, 1 << 29  # of the strings; of the table, 2 GB


class StopAutomaton(NamedTuple):
    """Stop strings as a machine over tokens (Aho-Corasick over the bytes that tokens spell).

    Attributes:
        table: `table[state, token]` is the state after the token; the last state means "a stop
            string has been completed" and is never left. Their number is a power of two, so that
            programs are few: those before the last may be unused.
    """

    table: Int[Array, "states vocab"]


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
    if (size := len(by_byte) * len(token_bytes)) > _MOST_ENTRIES:
        raise ValueError(
            f"stop: these strings make a table of {size:.1e} entries over {len(token_bytes)} "
            f"tokens, at most {_MOST_ENTRIES:.1e} are possible: give fewer or shorter ones."
        )
    longest = max(1, max(map(len, token_bytes)))
    spelled = np.zeros((len(token_bytes), longest), np.uint8)
    lengths = np.asarray([len(token) for token in token_bytes])
    for token, text in enumerate(token_bytes):
        spelled[token, : len(text)] = np.frombuffer(text, np.uint8)
    state = np.repeat(np.arange(done + 1, dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for position in range(longest):
        (longer,) = np.nonzero(lengths > position)
        state[:, longer] = by_byte[state[:, longer], spelled[None, longer, position]]
    last = max(_FEWEST_STATES, 1 << done.bit_length()) - 1
    table = np.full((last + 1, len(token_bytes)), last, np.int32)
    table[:done] = np.where(state[:done] == done, last, state[:done])
    return StopAutomaton(jnp.asarray(table))


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Aho-Corasick transitions `[states, 256]`; the last state absorbs every completed string."""
    complete = frozenset(strings)
    prefixes = sorted({string[:end] for string in strings for end in range(len(string))}, key=len)
    index = {prefix: state for state, prefix in enumerate(prefixes)}
    done = len(prefixes)
    further: list[list[tuple[int, int]]] = [[] for _ in prefixes]
    for text in (*prefixes[1:], *strings):
        if text[:-1] in index:
            further[index[text[:-1]]].append((text[-1], done if text in complete else index[text]))
    table = np.full((done + 1, 256), done, np.int32)
    shorter = np.zeros(done, np.int32)  # the state of the longest proper suffix that is a prefix
    for state, prefix in enumerate(prefixes):
        if len(prefix) > 1:
            shorter[state] = table[shorter[index[prefix[:-1]]], prefix[-1]]
        row = table[shorter[state]].copy() if state else np.zeros(256, np.int32)
        for byte, next_state in further[state]:
            # A text ends where a shorter string ends.
            row[byte] = done if row[byte] == done else next_state
        table[state] = row
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

        def advance(state, token):
            state = automaton.table[state, token]
            return state, state

        _, reached = jax.lax.scan(advance, automaton_state, emitted)
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
