"""What a drafter in training is worth: tokens per target pass on held-out beginnings."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.types import PyTree
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, generate
from jaxspec.training.data import Batches, Sequences
from jaxspec.training.loop import Validation
from jaxspec.training.own_text import beginnings
from jaxspec.training.settings import DECODING, TAU


def decoding_of(
    model: Model,
    held_out: Mapping[str, Sequences],
    num_prompts: int,
    seed: int,
    drafter_of: Callable[[PyTree], LoadedDrafter],
) -> Callable[[PyTree], Validation] | None:
    """A function of weights: figures of greedy decoding with their drafter.

    Args:
        model: the target.
        held_out: packed documents by source.
        num_prompts: how many beginnings of them to decode, at most.
        seed: draws the beginnings.
        drafter_of: a drafter of weights.

    Returns:
        The function; `tau_with_bonus` counts tokens per target pass, the bonus token included.
        None where there is nothing to decode.
    """
    sources = tuple(rows for rows in held_out.values() if len(rows.tokens))
    if not (num_prompts and sources):
        return None
    count = min(num_prompts, sum(len(rows.tokens) for rows in sources))
    rows = Batches(sources, (1.0,) * len(sources), count, seed)(0)
    rng = np.random.default_rng((seed, 3))
    prompts, new_tokens = beginnings(rows, model.config.max_positions, rng)
    config = GenerationConfig(max_new_tokens=new_tokens)

    def decode(params: PyTree) -> Validation:
        metrics = generate(model, prompts, config, drafter_of(params)).metrics
        shares = enumerate(metrics.acceptance_per_position, start=1)
        figures = {f"accepted_at_{depth}": share for depth, share in shares}
        return {DECODING: {TAU: metrics.mean_acceptance_length, **figures}}

    return decode
