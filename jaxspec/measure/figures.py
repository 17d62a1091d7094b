"""Figures over a set of prompts: pooled counts, ratios of totals, intervals over prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.decoding.denoise import Denoised
from jaxspec.decoding.metrics import Counts, repeated_ngrams
from jaxspec.decoding.result import Generation

PLAIN = "plain"
"""Name of plain decoding among methods."""
STEPWISE = "stepwise"
"""Name of a diffusion model's stepwise decoding among methods."""
NUM_RESAMPLES = 2000
LOW_REPETITION = 0.2
"""An output repeats little if less than this share of its 4-grams occurred in it before."""


class DecodedText(NamedTuple):
    """One output of a runtime other than `generate`, with the names of `Generation`.

    Attributes:
        prompt_tokens: ids of the prompt.
        tokens: ids emitted after it.
        finish_reason: "stop_token" or "length".
    """

    prompt_tokens: Sequence[int] | np.ndarray
    tokens: Sequence[int] | np.ndarray
    finish_reason: str = "length"


Output = Generation | Denoised | DecodedText
"""One output, of any way to decode."""


class Sample(NamedTuple):
    """One call of one method: a prompt, or a batch of them.

    Attributes:
        rows: outputs, one for a prompt.
        seconds: wall time of the call, prefill included and compilation left out; over repeats,
            their median.
        counts: counts of all rows together. `counts.tau` has the bonus token INCLUDED.
        logprob: the target's log-probability of the whole output, before any warping; `None` if
            it was not asked for.
        parts: seconds of parts of each step, by name, where a runtime shows them.
    """

    rows: tuple[Output, ...]
    seconds: float
    counts: Counts
    logprob: float | None = None
    parts: Mapping[str, Sequence[float]] = MappingProxyType({})

    @property
    def num_tokens(self) -> int:
        """Tokens that the seconds were spent on."""
        return self.counts.num_tokens

    @property
    def texts(self) -> list[list[int]]:
        """Ids emitted, by row."""
        return [[int(token) for token in row.tokens] for row in self.rows]

    @property
    def repeated_ngrams(self) -> float:
        """Share of 4-grams of the output that occurred in it before."""
        return repeated_ngrams(self.texts)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a method over a set of prompts; `Metrics` has the shared names.

    Attributes:
        num_prompts: prompts in the set.
        num_tokens: tokens emitted, counted by ids for every method.
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
        mean_logprob: the target's mean log-probability of an output token, before any warping;
            `None` if outputs were not scored.
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
    mean_logprob: float | None


def figures_of(samples: Sequence[Sample], plain: Sequence[Sample]) -> Figures:
    """Pools a method's samples, next to plain decoding of the same prompts in the same order.

    Args:
        samples: one for each prompt.
        plain: the baseline's samples of the same prompts.

    Example:
        >>> plain = Sample((DecodedText([1], [2, 3]),), 2.0, Counts(num_tokens=2, num_steps=2))
        >>> drafted = plain._replace(seconds=1.0, counts=Counts(num_tokens=2, num_steps=1))
        >>> figures = figures_of([drafted], [plain])
        >>> figures.mean_acceptance_length, figures.speedup
        (2.0, 2.0)
    """
    counts = sum((sample.counts for sample in samples), Counts())
    costs, plain_costs = _costs(samples), _costs(plain)
    seconds = float(costs[:, 0].sum())
    logprobs = [sample.logprob for sample in samples if sample.logprob is not None]
    return Figures(
        num_prompts=len(samples),
        num_tokens=counts.num_tokens,
        num_verify_steps=counts.num_steps,
        seconds=seconds,
        tokens_per_second=counts.num_tokens / seconds if seconds else 0.0,
        speedup=float(speedup(plain_costs.sum(axis=0), costs.sum(axis=0))),
        speedup_interval=speedup_interval(plain_costs, costs),
        mean_acceptance_length=counts.tau,
        mean_accepted_tokens=counts.mean_accepted_tokens,
        max_accepted_tokens=counts.max_accepted_tokens,
        acceptance_histogram=counts.accepted,
        acceptance_rate=counts.acceptance_rate,
        acceptance_per_position=counts.acceptance_per_position,
        repeated_ngrams=repeated_ngrams([row for sample in samples for row in sample.texts]),
        mean_logprob=sum(logprobs) / max(1, counts.num_tokens) if logprobs else None,
    )


class Subsets(NamedTuple):
    """Places in a list of prompts.

    Attributes:
        low_repetition: places of the prompts whose PLAIN output repeats less than
            `LOW_REPETITION` of its 4-grams.
        by_category: places of each category's prompts, in order of appearance.
    """

    low_repetition: list[int]
    by_category: dict[str, list[int]]


def subsets_of(plain: Sequence[Sample], categories: Sequence[str | None]) -> Subsets:
    """Returns the subsets of prompts that were decoded plainly.

    Args:
        plain: plain decoding's samples.
        categories: each prompt's category, or `None`.

    Example:
        >>> looping = Sample((DecodedText([1], [2] * 9),), 1.0, Counts())
        >>> subsets_of([looping, looping], ["chat", None])
        Subsets(low_repetition=[], by_category={'chat': [0]})
    """
    by_category = {}
    for place, category in enumerate(categories):
        if category is not None:
            by_category.setdefault(category, []).append(place)
    low = [place for place, each in enumerate(plain) if each.repeated_ngrams < LOW_REPETITION]
    return Subsets(low, by_category)


class SubsetFigures(NamedTuple):
    """A method's figures over all prompts and over `Subsets`; `None` for an empty one."""

    overall: Figures
    low_repetition: Figures | None
    by_category: dict[str, Figures]


def figures_of_subsets(
    samples: Sequence[Sample], baseline: Sequence[Sample], subsets: Subsets
) -> SubsetFigures:
    """Pools a method's samples over each subset, next to its baseline's of the same prompts.

    Example:
        >>> sample = Sample((DecodedText([1], [2, 3]),), 1.0, Counts(num_tokens=2, num_steps=2))
        >>> found = figures_of_subsets([sample], [sample], subsets_of([sample], ["chat"]))
        >>> found.by_category["chat"].speedup
        1.0
    """

    def figures(places: Sequence[int]) -> Figures:
        return figures_of([samples[i] for i in places], [baseline[i] for i in places])

    return SubsetFigures(
        overall=figures(range(len(samples))),
        low_repetition=figures(subsets.low_repetition) if subsets.low_repetition else None,
        by_category={name: figures(places) for name, places in subsets.by_category.items()},
    )


def speedup_interval(
    plain: Float[np.ndarray, "prompts 2"],
    method: Float[np.ndarray, "prompts 2"],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Returns a 95 % percentile bootstrap interval, over prompts, of the ratio of times per token.

    Prompts are drawn with replacement, each with both of its runs. So an effect of a prompt on
    both methods cancels.

    Args:
        plain: seconds and tokens of each prompt, decoded plainly.
        method: seconds and tokens of each prompt, decoded with the method.
        num_resamples: draws of a whole set of prompts.
        seed: seed of the draws.

    Returns:
        The 2.5 % and 97.5 % quantiles; `None` for fewer than two prompts.

    Example:
        >>> plain = np.asarray([[2.0, 10.0], [4.0, 10.0]])
        >>> speedup_interval(plain, plain / [2.0, 1.0])
        (2.0, 2.0)
    """
    if len(plain) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(plain), size=(num_resamples, len(plain)))
    ratios = speedup(plain[draws].sum(axis=1), method[draws].sum(axis=1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def speedup(plain: Float[np.ndarray, "*set 2"], method: Float[np.ndarray, "*set 2"]) -> np.ndarray:
    """Returns plain decoding's time per token over a method's, from summed seconds and tokens.

    Example:
        >>> float(speedup(np.asarray([2.0, 10.0]), np.asarray([1.0, 10.0])))
        2.0
    """
    per_token = plain[..., 0] / np.maximum(plain[..., 1], 1)
    return per_token / (method[..., 0] / np.maximum(method[..., 1], 1))


def _costs(samples: Sequence[Sample]) -> Float[np.ndarray, "prompts 2"]:
    """Returns seconds and tokens of each prompt."""
    return np.asarray([(sample.seconds, sample.num_tokens) for sample in samples], np.float64)
