"""Batches of rows, plainly and with drafters: what sharing a pass leaves of a speed-up."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import Model
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, PromptLike, generate


class BatchFigures(NamedTuple):
    """One method on one batch.

    tokens_per_second: emitted by all rows, prefill included and compilation left out; of the median
        of the repeats.
    mean_acceptance_length: tau, tokens per target pass of a row, bonus INCLUDED.
    idle_fraction: share of row-steps spent on rows that had ended.
    """

    tokens_per_second: float
    mean_acceptance_length: float
    idle_fraction: float


def measure_batches(
    model: Model,
    prompts: Sequence[PromptLike],
    methods: Mapping[str, Drafter | LoadedDrafter | None],
    config: GenerationConfig,
    batches: Sequence[int],
    repeats: int,
    seed: int = 0,
) -> dict[int, dict[str, BatchFigures]]:
    """Decodes the first prompts together, in turns; by rows of the batch and by method.

    Prompts are repeated where there are fewer than rows.

    Raises:
        ValueError: a number is below 1.
    """
    if min((*batches, repeats), default=1) < 1:
        raise ValueError(f"batches and repeats must be at least 1, got {batches} and {repeats}.")
    found = {}
    for size in batches:
        rows = [prompts[index % len(prompts)] for index in range(size)]
        release_programs()
        results = {
            name: generate(model, rows, config, method, seed) for name, method in methods.items()
        }
        seconds = {name: [] for name in methods}
        for _ in range(repeats):
            for name, method in methods.items():
                results[name] = generate(model, rows, config, method, seed)
                seconds[name].append(results[name].metrics.seconds)
        found[size] = {
            name: BatchFigures(
                result.metrics.num_tokens / float(np.median(seconds[name])),
                result.metrics.mean_acceptance_length,
                result.metrics.idle_fraction,
            )
            for name, result in results.items()
        }
    return found
