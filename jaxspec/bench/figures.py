"""Figures over a set of prompts: pooled counts, ratios of totals, intervals over prompts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.metrics import metrics_of
from jaxspec.result import Generation

NUM_RESAMPLES = 2000
LOW_REPETITION = 0.2


class Trial(NamedTuple):
    """One prompt, decoded by one method.

    seconds: the median over repeats, prefill included and compilation left out.
    logprob: the target's log-probability of the whole output, before any warping.
    """

    generation: Generation
    seconds: float
    logprob: float

    @property
    def num_tokens(self) -> int:
        return len(self.generation.tokens)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a method did with a set of prompts; see `Metrics` for the shared names.

    Attributes:
        num_prompts: prompts in the set.
        num_tokens: tokens emitted; of every method counted in the same way, by ids.
        num_verify_steps: target passes.
        seconds: sum over prompts of the median time.
        tokens_per_second: prefill included, compilation left out.
        speedup: plain decoding's time per token over this method's, both summed over the same
            prompts. Where outputs are identical that is the ratio of total times.
        speedup_interval: 95 % bootstrap interval of `speedup` over prompts; `None` for one prompt.
        mean_acceptance_length: tau, tokens per target pass, bonus INCLUDED.
        mean_accepted_tokens: accepted draft tokens per target pass, bonus EXCLUDED.
        max_accepted_tokens: most draft tokens accepted in one step, bonus EXCLUDED.
        acceptance_histogram: entry i: steps that accepted i draft tokens, bonus EXCLUDED.
        acceptance_rate: accepted / drafted along the path.
        acceptance_per_position: entry i: acceptance at depth i + 1 where something was drafted.
        repeated_ngrams: share of 4-grams of an output that occurred in it before.
        mean_logprob: the target's mean log-probability of an output token, before any warping.
    """

    num_prompts: int
    num_tokens: int
    num_verify_steps: int
    seconds: float
    tokens_per_second: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    mean_acceptance_length: float
    mean_accepted_tokens: float
    max_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    acceptance_rate: float
    acceptance_per_position: tuple[float, ...]
    repeated_ngrams: float
    mean_logprob: float


def figures_of(trials: Sequence[Trial], plain: Sequence[Trial]) -> Figures:
    """Pools a method's trials, beside plain decoding of the same prompts in the same order."""
    rows = [trial.generation for trial in trials]
    pooled = metrics_of(
        rows=[row.tokens.tolist() for row in rows],
        num_steps=[row.metrics.num_verify_steps for row in rows],
        num_nodes=[row.metrics.num_draft_tokens for row in rows],
        accepted=np.stack([row.metrics.acceptance_histogram for row in rows]),
        drafted=np.stack([row.metrics.drafted_histogram for row in rows]),
        num_from_draft=int(sum(row.from_draft.sum() for row in rows)),
        seconds=sum(trial.seconds for trial in trials),
    )
    costs, plain_costs = _costs(trials), _costs(plain)
    return Figures(
        num_prompts=len(trials),
        num_tokens=pooled.num_tokens,
        num_verify_steps=pooled.num_verify_steps,
        seconds=float(costs[:, 0].sum()),
        tokens_per_second=pooled.tokens_per_second or 0.0,
        speedup=float(speedup(plain_costs.sum(axis=0), costs.sum(axis=0))),
        speedup_interval=speedup_interval(plain_costs, costs),
        mean_acceptance_length=pooled.mean_acceptance_length,
        mean_accepted_tokens=pooled.mean_accepted_tokens,
        max_accepted_tokens=pooled.max_accepted_tokens,
        acceptance_histogram=pooled.acceptance_histogram,
        acceptance_rate=pooled.acceptance_rate,
        acceptance_per_position=pooled.acceptance_per_position,
        repeated_ngrams=pooled.repeated_ngrams,
        mean_logprob=sum(trial.logprob for trial in trials) / max(1, pooled.num_tokens),
    )


class Subsets(NamedTuple):
    """Places in a list of prompts.

    low_repetition: of the prompts whose PLAIN output repeats less than `LOW_REPETITION` of its
        4-grams.
    by_category: of each category's prompts, in order of appearance.
    """

    low_repetition: list[int]
    by_category: dict[str, list[int]]


def subsets_of(plain: Sequence[Trial], categories: Sequence[str | None]) -> Subsets:
    """The subsets of prompts that were decoded plainly."""
    by_category = {}
    for place, category in enumerate(categories):
        if category is not None:
            by_category.setdefault(category, []).append(place)
    repetitions = [trial.generation.metrics.repeated_ngrams for trial in plain]
    low = [place for place, share in enumerate(repetitions) if share < LOW_REPETITION]
    return Subsets(low, by_category)


class SubsetFigures(NamedTuple):
    """A method's figures over all prompts and over `Subsets`; `None` for an empty one."""

    overall: Figures
    low_repetition: Figures | None
    by_category: dict[str, Figures]


def figures_of_subsets(
    trials: Sequence[Trial], baseline: Sequence[Trial], subsets: Subsets
) -> SubsetFigures:
    """Pools a method's trials over each subset, beside its baseline's of the same prompts."""

    def figures(places: Sequence[int]) -> Figures:
        return figures_of([trials[i] for i in places], [baseline[i] for i in places])

    return SubsetFigures(
        overall=figures(range(len(trials))),
        low_repetition=figures(subsets.low_repetition) if subsets.low_repetition else None,
        by_category={name: figures(places) for name, places in subsets.by_category.items()},
    )


def speedup_interval(
    plain: Float[np.ndarray, "prompts 2"],
    method: Float[np.ndarray, "prompts 2"],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % percentile bootstrap over prompts of the ratio of times per token.

    Prompts are drawn with replacement, each with both of its runs, so that what a prompt does to
    both methods cancels.

    Args:
        plain: seconds and tokens of each prompt, decoded plainly.
        method: the same, of the method.
        num_resamples: draws of a whole set of prompts.
        seed: of the draws.

    Returns:
        The 2.5 % and 97.5 % quantiles; `None` for fewer than two prompts.
    """
    if len(plain) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(plain), size=(num_resamples, len(plain)))
    ratios = speedup(plain[draws].sum(axis=1), method[draws].sum(axis=1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def speedup(plain: Float[np.ndarray, "*set 2"], method: Float[np.ndarray, "*set 2"]) -> np.ndarray:
    """Plain decoding's time per token over a method's, from summed seconds and tokens."""
    per_token = plain[..., 0] / np.maximum(plain[..., 1], 1)
    return per_token / (method[..., 0] / np.maximum(method[..., 1], 1))


def _costs(trials: Sequence[Trial]) -> Float[np.ndarray, "prompts 2"]:
    return np.asarray([(trial.seconds, trial.num_tokens) for trial in trials], np.float64)
