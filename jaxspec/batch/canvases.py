"""Programs of a job of a diffusion model: put masks after a prompt, run a chunk of rounds."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import Group, read_in
from jaxspec.batch.rows import EncodedRow, Row, encode_rows, number_of
from jaxspec.batch.settings import AnyConfig, AnyDrafter, drafts_change_nothing
from jaxspec.batch.slots import (
    ChunkInfo,
    Item,
    SlotPrograms,
    batch_shapes,
    chunk_arguments,
    count_running,
    repeat,
)
from jaxspec.core.types import Params, Stop
from jaxspec.decoding.denoise import (
    DenoiseConfig,
    canvas_size_of,
    check_no_mask,
    denoise_prompts,
    denoised_rows,
    plan_denoising,
)
from jaxspec.diffusion.passes import DenoisePlan
from jaxspec.diffusion.self_speculative import (
    DenoiseOutcome,
    DenoisePrompt,
    begin,
    denoise_step,
    outcome_of,
    round_without_drafts,
)
from jaxspec.diffusion.speculation import STEPWISE, DenoiseState, SelfSpeculation
from jaxspec.sharding import Placement, placement_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


@partial(jax.jit, static_argnames=("plan", "speculation"))
def read_prompt(
    params: Params, prompt: DenoisePrompt, *, plan: DenoisePlan, speculation: SelfSpeculation
) -> DenoiseState:
    """Returns the state of one row, without a batch axis."""
    return begin(params, prompt, plan=plan, speculation=speculation)


def free_canvases(states: DenoiseState) -> DenoiseState:
    """Returns rows that have stopped."""
    stop = jnp.full_like(states.canvas.stop, Stop.LENGTH)
    # No share of nothing: it would be the batch's.
    trials = jnp.ones_like(states.trials)
    return states._replace(canvas=states.canvas._replace(stop=stop), trials=trials)


@partial(jax.jit, static_argnames=("plan", "speculation", "place"), donate_argnames=("states",))
def run_chunk(
    params: Params,
    states: DenoiseState,
    drafting: Bool[Array, ""],
    limit: Int[Array, ""],
    wanted: Int[Array, ""],
    *,
    plan: DenoisePlan,
    speculation: SelfSpeculation,
    place: Placement | None = None,
) -> tuple[DenoiseState, ChunkInfo]:
    """Runs some rounds of all rows: with drafts or, in a loop of their own, without.

    Args:
        params: the network.
        states: donated.
        drafting: runs the loop that drafts.
        limit: most rounds.
        wanted: number of rows that end the chunk once they have stopped.
        plan: static.
        speculation: static.
        place: static; the layout of the new states on a mesh.
    """
    fewest = jnp.maximum(count_running(states.canvas.stop) - wanted, 0)
    calls = jnp.sum(states.stats.num_calls)
    length = jnp.sum(_lengths(plan, states))

    def loop(step: Callable, states: DenoiseState, chosen: Bool[Array, ""]):
        return repeat(step, params, states, lambda each: each.canvas.stop, chosen, limit, fewest)

    drafted = partial(denoise_step, plan=plan, speculation=speculation)
    states, count = loop(drafted, states, drafting)
    if speculation.num_drafts:
        without = partial(round_without_drafts, plan, speculation)
        states, more = loop(without, states, ~drafting)
        count = count + more
    if place is not None:
        states = place(states)
    lengths = _lengths(plan, states)
    return states, ChunkInfo(
        outcome_of(states),
        states.canvas.stop,
        lengths,
        count,
        jnp.sum(states.stats.num_calls) - calls,
        jnp.sum(lengths) - length,
    )


def _lengths(plan: DenoisePlan, states: DenoiseState) -> Int[Array, " rows"]:
    """Returns the tokens of each row's text: decided positions, up to a stop id."""
    tokens, row = states.canvas.tokens, states.row
    positions = jnp.arange(plan.canvas_size)[None]
    of_text = (positions >= row.length[:, None]) & (positions < row.wanted[:, None])
    is_end = of_text & jnp.any(tokens[:, :, None] == row.stop_ids[:, None, :], axis=2)
    first = jnp.where(jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1), plan.canvas_size)
    counted = of_text & (positions <= first[:, None]) & (tokens != plan.rules.mask_token_id)
    return row.length + jnp.sum(counted, axis=1, dtype=jnp.int32)


@dataclasses.dataclass
class CanvasPrograms(SlotPrograms):
    """Programs of a job of a diffusion language model.

    Attributes:
        model: the model.
        config: settings of filling in.
        seed: seed of the randomness.
        plan: static settings, without a size of canvases.
        speculation: settings of drafting.
        place: see `SlotPrograms`.
    """

    model: "Model"
    config: DenoiseConfig
    seed: int
    plan: DenoisePlan
    speculation: SelfSpeculation
    place: Placement | None

    free = staticmethod(free_canvases)

    @property
    def params(self) -> Params:
        """Weights of the network."""
        return Params(self.model.network, ())

    @property
    def max_new_tokens(self) -> int:
        return self.plan.max_new

    @property
    def drafts(self) -> bool:
        return self.speculation.num_drafts > 0

    @property
    def drafts_change_nothing(self) -> bool:
        return drafts_change_nothing(self.model, self.config, self.speculation)

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow]:
        def check(ids: Sequence[int]) -> None:
            check_no_mask(self.model, ids, "the prompt")

        return encode_rows(self.model, rows, self.max_new_tokens, check)

    def need_of(self, row: EncodedRow) -> int:
        return canvas_size_of(self.plan, len(row.tokens))

    def shapes(self, capacity: int, batch_size: int) -> DenoiseState:
        prompt = self._prompt_of(EncodedRow(0, 0, np.zeros(1, np.int32)), capacity)
        row = read_prompt.eval_shape(self.params, prompt, **self._static(capacity))
        return batch_shapes(row, batch_size)

    def lowered(
        self, group: Group, shapes: DenoiseState, prefix: Any, rejoining: bool
    ) -> tuple[Any, list[Any]]:
        del prefix, rejoining
        longest = max(group.rows, key=lambda row: len(row.tokens))
        prompt = self._prompt_of(longest, group.capacity)
        static = self._static(group.capacity)
        reading = read_prompt.lower(self.params, prompt, **static)
        arguments = chunk_arguments(Chunk(True, 1), 1)
        chunk = run_chunk.lower(self.params, shapes, *arguments, **static, place=self.place)
        return reading, [chunk]

    def read(self, row: EncodedRow, prefix: Any, capacity: int, drafting: bool) -> DenoiseState:
        del prefix, drafting
        return read_prompt(self.params, self._prompt_of(row, capacity), **self._static(capacity))

    def run(
        self, states: DenoiseState, chunk: Chunk, wanted: int
    ) -> tuple[DenoiseState, ChunkInfo]:
        static = self._static(states.canvas.tokens.shape[1])
        arguments = chunk_arguments(chunk, wanted)
        return run_chunk(self.params, states, *arguments, **static, place=self.place)

    def records(self, items: Sequence[Item], facts: DenoiseOutcome) -> list[dict[str, Any]]:
        prompts = [item.row.tokens for item in items]
        texts = denoised_rows(self.model.tokenizer, self.plan, prompts, facts)
        return [
            item.record(row.text, row.tokens, row.finish_reason, row.counts)
            for item, row in zip(items, texts, strict=True)
        ]

    def _static(self, capacity: int) -> dict[str, Any]:
        return {"plan": self.plan.sized(capacity), "speculation": self.speculation}

    def _prompt_of(self, row: EncodedRow, capacity: int) -> DenoisePrompt:
        temperature = np.full(1, self.config.temperature, np.float32)
        ids = [row.tokens.tolist()]
        # Prompts of one padded length share a program. Only one cache makes a pass over them.
        padded = capacity
        if self.plan.cache == "blocks":
            padded = min(read_in(len(row.tokens)), capacity)
        one = denoise_prompts(
            self.model, self.config, self.plan, ids, temperature, self.seed, padded
        )
        prompt = jax.tree.map(lambda leaf: leaf[0], one)
        return prompt._replace(seed=np.asarray([self.seed, number_of(row.id)], np.int32))


def canvas_programs(
    model: "Model", config: AnyConfig | None, drafter: AnyDrafter, seed: int
) -> CanvasPrograms:
    """Checks settings, and returns the programs for a diffusion language model.

    Raises:
        ValueError: the settings do not fit the model, or are not one number for all rows.
    """
    config, speculation = config or DenoiseConfig(), drafter or STEPWISE
    if not (isinstance(config, DenoiseConfig) and isinstance(speculation, SelfSpeculation)):
        raise ValueError(
            f"config: {model.name} is a diffusion language model; give a DenoiseConfig, and a "
            "SelfSpeculation as the drafter."
        )
    if np.ndim(config.temperature):
        raise ValueError("temperature must be one number for the whole job, got several.")
    plan = plan_denoising(model, config, speculation, seed)
    return CanvasPrograms(model, config, seed, plan, speculation, placement_of(model.params))
