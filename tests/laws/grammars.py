"""Grammars by a plain loop over bytes: the reference of `core.grammar`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.core.grammar import Grammar, grammar_over_tokens


class Machine(NamedTuple):
    """A machine over bytes that a person can read.

    moves: from each state, the state after a letter; other letters are refused.
    ends: states in which a text may end.
    """

    moves: Sequence[Mapping[str, int]]
    ends: Sequence[int]

    def over_tokens(self, token_bytes: Sequence[bytes]) -> Grammar:
        table = np.full((len(self.moves), 256), -1)
        for state, after in enumerate(self.moves):
            for letter, reached in after.items():
                table[state, ord(letter)] = reached
        return grammar_over_tokens(
            table, np.isin(np.arange(len(self.moves)), list(self.ends)), token_bytes
        )

    def read(self, text: bytes, state: int | None = 0) -> int | None:
        """Returns the state after a text; `None` where it is refused."""
        for letter in text.decode():
            state = None if state is None else self.moves[state].get(letter)
        return state

    def fewest(self, text: bytes, token_bytes: Sequence[bytes]) -> float:
        """Returns the fewest tokens with which a text is completed, by trying all of them."""
        states = {self.read(text)} - {None}
        for count in range(len(self.moves) + 1):
            if states & {*self.ends}:
                return count
            states = {self.read(token, state) for state in states for token in token_bytes if token}
            states -= {None}
        return np.inf

    def allowed(
        self,
        tokens: Sequence[int],
        token_bytes: Sequence[bytes],
        stop_ids: Sequence[int],
        room: int,
    ) -> np.ndarray:
        """Returns the tokens that may follow emitted ones, when `room` more may be emitted."""
        everything = np.ones(len(token_bytes), bool)
        if any(not token_bytes[token] for token in tokens):
            return everything
        text = b"".join(token_bytes[token] for token in tokens)
        if self.fewest(text, token_bytes) == np.inf:
            return everything
        fits = self.fewest(text, token_bytes) <= room
        found = ~everything
        for token, spelled in enumerate(token_bytes):
            after = self.fewest(text + spelled, token_bytes)
            if token in stop_ids:
                found[token] = after == 0
            elif spelled:
                found[token] = after <= room - 1 if fits else after < np.inf
        return found
