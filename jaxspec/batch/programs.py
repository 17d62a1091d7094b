"""The programs of `slots`, bound to everything that is the same for all rows of a job."""

import dataclasses
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import read_in
from jaxspec.batch.rows import EncodedRow, number_of
from jaxspec.batch.slots import (
    ChunkInfo,
    Dormant,
    RowSettings,
    empty_states,
    insert,
    read_prefix,
    read_prompt,
    rejoin,
    run_chunk,
    state_shapes,
)
from jaxspec.core.decode import Prefix, Prompt
from jaxspec.core.loop import CHUNK
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import DecodeState, Drafter, Params, Warp
from jaxspec.decoding.request import GenerationConfig, bucket_of, warps_of
from jaxspec.sharding import Placement

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


@dataclasses.dataclass(frozen=True)
class Programs:
    """Calls the programs of a job; numbers that change from call to call are typed arguments.

    Attributes:
        model: the target.
        config: settings of decoding.
        seed: seed of the randomness.
        params: weights of target and drafter.
        drafter: the method, static.
        automaton: stop strings.
        place: layout of the states on the target's mesh; `None` on one device.
    """

    model: "Model"
    config: GenerationConfig
    seed: int
    params: Params
    drafter: Drafter
    automaton: StopAutomaton | None
    place: Placement | None

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
        wanted = len(row.tokens) + int(np.asarray(self.config.max_new_tokens))
        return min(wanted, self.model.config.max_positions)

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
        }
        return Prompt(**arrays, warp=self.warp)

    def read_prefix(self, tokens: np.ndarray) -> Prefix | None:
        """Reads the prefix that all prompts share; `None` if there is none."""
        if not len(tokens):
            return None
        return read_prefix(self.params, tokens, drafter=self.drafter)

    def empty(self, capacity: int, batch_size: int) -> DecodeState:
        """Returns a batch whose slots are all free."""
        return empty_states(self.shapes(capacity, batch_size), self.place)

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

    def insert(self, states: DecodeState, row: DecodeState, slot: int, sample: int) -> DecodeState:
        """Puts a row into a slot, and waits until it is there."""
        states = insert(states, row, int32(slot), int32(sample), place=self.place)
        # One row at a time next to the batch: `fitting` counts no more.
        jax.block_until_ready(states.stop)
        return states

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
            *chunk_arguments(chunk, wanted),
            drafter=self.drafter,
            place=self.place,
        )


def chunk_arguments(chunk: Chunk, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns typed arguments: with Python's own numbers the loop would compile once more."""
    return np.asarray(chunk.drafting), int32(chunk.limit), int32(wanted)


def int32(number: int | np.integer) -> np.ndarray:
    return np.asarray(number, np.int32)
