"""Batches of rows, plainly and with drafters: what sharing a pass leaves of a speed-up."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.bench.compare import PLAIN, find_divergence
from jaxspec.bench.comparison import Divergence
from jaxspec.bench.figures import speedup, speedup_interval
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import Model
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, PromptLike, generate, prepare
from jaxspec.progress import progress_bar
from jaxspec.result import GenerationResult


class BatchFigures(NamedTuple):
    """One method, with so many rows at once.

    tokens_per_second: emitted by all rows, prefill included and compilation left out; medians of
        the repeats.
    speedup: over plain decoding of the same batches.
    speedup_interval: 95 % bootstrap interval over batches; `None` for fewer than two.
    mean_acceptance_length: tau, tokens per target pass of a row, bonus INCLUDED.
    idle_fraction: share of row-steps spent on rows that had ended.
    divergences: rows that are not plain decoding's of the same batch.
    """

    tokens_per_second: float
    speedup: float
    speedup_interval: tuple[float, float] | None
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
    progress: bool = True,
) -> dict[int, dict[str, BatchFigures]]:
    """Decodes all prompts, so many together, in turns; by rows of a batch and by method.

    A batch takes its prompts from all over the list, so that each has some of every kind; the first
    prompts come twice where the last batch would not be full. Plain decoding is always measured,
    and what the other methods emit is compared with what it does.

    Raises:
        ValueError: a number is below 1, or the rows would be sampled.
    """
    if min((*batches, repeats), default=1) < 1:
        raise ValueError(f"batches and repeats must be at least 1, got {batches} and {repeats}.")
    if np.any(config.temperature):
        raise ValueError("config: temperature must be 0: rows are compared with plain decoding's.")
    every = {PLAIN: None, **methods}
    names, found = list(every), {}
    with progress_bar(len(batches) * repeats, progress) as advance:
        for size in batches:
            groups = _groups(len(prompts), size)
            release_programs()
            batches_of_each_shape = {}
            for group in groups:
                rows = [prompts[i] for i in group]
                shape = prepare(model, rows, config, None, seed).prompts.tokens.shape
                batches_of_each_shape.setdefault(shape, rows)
            for rows, method in product(batches_of_each_shape.values(), every.values()):
                generate(model, rows, config, method, seed)  # the first run of a program is slower
            runs: dict[str, list[list[GenerationResult]]] = {name: [] for name in names}
            for repeat in range(repeats):
                advance(f"{size} rows at once")
                for name in names:
                    runs[name].append([])
                for turn, group in enumerate(groups):
                    rows = [prompts[i] for i in group]
                    for place in range(len(names)):
                        name = names[(turn + repeat + place) % len(names)]
                        result = generate(model, rows, config, every[name], seed)
                        runs[name][-1].append(result)
            plain = runs[PLAIN]
            found[size] = {
                name: _figures(model, prompts, groups, config, plain, results)
                for name, results in runs.items()
            }
    return found


def _groups(num_prompts: int, size: int) -> list[list[int]]:
    """Indices of prompts by batch: as many batches as hold all of them."""
    count = -(-num_prompts // size)
    return [[(first + count * row) % num_prompts for row in range(size)] for first in range(count)]


def _figures(
    model: Model,
    prompts: Sequence[PromptLike],
    groups: Sequence[Sequence[int]],
    config: GenerationConfig,
    plain: Sequence[Sequence[GenerationResult]],
    runs: Sequence[Sequence[GenerationResult]],
) -> BatchFigures:
    """Of one method: `plain` and `runs` hold results by repeat and batch."""
    base, costs = _costs(plain), _costs(runs)
    seconds, tokens = costs.sum(axis=0)
    metrics = [result.metrics for result in runs[-1]]
    steps = sum(each.num_verify_steps for each in metrics)
    row_steps = sum(each.num_verify_steps / (1 - each.idle_fraction) for each in metrics)
    return BatchFigures(
        tokens_per_second=float(tokens / seconds),
        speedup=float(speedup(base.sum(axis=0), costs.sum(axis=0))),
        speedup_interval=speedup_interval(base, costs),
        mean_acceptance_length=sum(each.num_tokens for each in metrics) / max(steps, 1),
        idle_fraction=float(1 - steps / row_steps) if row_steps else 0.0,
        divergences=tuple(
            divergence
            for group, expected, result in zip(groups, plain[-1], runs[-1], strict=True)
            for divergence in _divergences(model, prompts, group, config, expected, result)
        ),
    )


def _costs(runs: Sequence[Sequence[GenerationResult]]) -> Float[np.ndarray, "batches 2"]:
    """Seconds, the median of the repeats, and tokens of each batch."""
    return np.asarray(
        [
            (
                np.median([result.metrics.seconds for result in repeats]),
                repeats[-1].metrics.num_tokens,
            )
            for repeats in zip(*runs, strict=True)
        ],
        np.float64,
    )


def _divergences(
    model: Model,
    prompts: Sequence[PromptLike],
    group: Sequence[int],
    config: GenerationConfig,
    plain: GenerationResult,
    result: GenerationResult,
) -> tuple[Divergence, ...]:
    found = (
        find_divergence(
            model, prepare(model, prompts[index], config, None, 0), index, expected, row
        )
        for index, expected, row in zip(group, plain, result, strict=True)
    )
    return tuple(divergence for divergence in found if divergence is not None)
