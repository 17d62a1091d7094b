"""Batches of rows, plainly and with drafters: what sharing a pass leaves of a speed-up."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.bench.compare import PLAIN, find_divergence
from jaxspec.bench.comparison import Divergence
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import Model
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, PromptLike, generate, prepare
from jaxspec.result import GenerationResult


class BatchFigures(NamedTuple):
    """One method on one batch.

    tokens_per_second: emitted by all rows, prefill included and compilation left out; of the median
        of the repeats.
    mean_acceptance_length: tau, tokens per target pass of a row, bonus INCLUDED.
    idle_fraction: share of row-steps spent on rows that had ended.
    divergences: rows that are not plain decoding's of the same batch.
    """

    tokens_per_second: float
    mean_acceptance_length: float
    idle_fraction: float
    divergences: tuple[Divergence, ...]


def measure_batches(
    model: Model,
    prompts: Sequence[PromptLike],
    methods: Mapping[str, Drafter | LoadedDrafter],
    config: GenerationConfig,
    batches: Sequence[int],
    repeats: int,
    seed: int = 0,
) -> dict[int, dict[str, BatchFigures]]:
    """Decodes the first prompts together, in turns; by rows of the batch and by method.

    Prompts are repeated where there are fewer than rows. Plain decoding is always measured, and
    what the other methods emit is compared with what it does.

    Raises:
        ValueError: a number is below 1, or the rows would be sampled.
    """
    if min((*batches, repeats), default=1) < 1:
        raise ValueError(f"batches and repeats must be at least 1, got {batches} and {repeats}.")
    if np.any(config.temperature):
        raise ValueError("config: temperature must be 0: rows are compared with plain decoding's.")
    every = {PLAIN: None, **methods}
    found = {}
    for size in batches:
        rows = [prompts[index % len(prompts)] for index in range(size)]
        release_programs()
        results = {
            name: generate(model, rows, config, method, seed) for name, method in every.items()
        }
        seconds = {name: [] for name in every}
        for _ in range(repeats):
            for name, method in every.items():
                results[name] = generate(model, rows, config, method, seed)
                seconds[name].append(results[name].metrics.seconds)
        plain = results[PLAIN]
        found[size] = {
            name: BatchFigures(
                result.metrics.num_tokens / float(np.median(seconds[name])),
                result.metrics.mean_acceptance_length,
                result.metrics.idle_fraction,
                _divergences(model, rows, config, plain, result),
            )
            for name, result in results.items()
        }
    return found


def _divergences(
    model: Model,
    rows: Sequence[PromptLike],
    config: GenerationConfig,
    plain: GenerationResult,
    result: GenerationResult,
) -> tuple[Divergence, ...]:
    found = (
        find_divergence(model, prepare(model, prompt, config, None, 0), index, expected, row)
        for index, (prompt, expected, row) in enumerate(zip(rows, plain, result, strict=True))
    )
    return tuple(divergence for divergence in found if divergence is not None)
