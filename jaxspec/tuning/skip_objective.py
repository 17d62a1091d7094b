"""The objective of the search for skip sets: expected seconds per token, without decoding.

From the drafts of a set at every position s of fixed text (`skip_text`) follow

    a(s, k)   True if the k-th drafted token is the whole network's choice at its place,
    c(s, k)   its probability in the draft, before any warping,
    D(s)      tokens drafted: up to the first k with c(s, k) below the threshold, at most K,
    A(s)      tokens accepted: a(s, 1) ... a(s, A) are all True, A <= D.

Decoding moves from s to s + A(s) + 1. Over the positions at which steps begin, a step emits
tau = 1 + mean A(s) tokens, the bonus token included, and takes

    mean D(s) * t(z) + mean T(w(D(s) + 1)) seconds.

A mean over all positions would be too good: steps begin after rejected drafts, at difficult places.

A draft of at most k < K tokens is the beginning of one of at most K. So the best length up to K and
the best threshold follow from the same pass.

t(z) is the time of a draft token: one part per kept attention, one part per kept MLP, and the rest.
T(w) is the time of a target pass of the width w that holds a draft and its root. Both are measured
once (`skip_costs`), so the score of a set depends on the text alone and is reproducible.

Approximations:

- The drafter reads the text instead of its own draft. If the text is the network's own greedy
  continuation, the two are equal up to the first rejection, so A is exact; D is approximate after a
  wrong token. On other text, drafts are teacher-forced.
- The threshold is constant, and only passes are counted as costs.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxspec.checkpoint import Model
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Metrics
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import LayerSkip
from jaxspec.models import Network, Skips
from jaxspec.tuning.skip_costs import Costs
from jaxspec.tuning.skip_text import FixedText, TextDrafts, Tokens, Window


class SkipScore(NamedTuple):
    """Expected or measured speed of decoding with one set.

    Attributes:
        seconds_per_token: the objective; lower is better.
        num_speculative_tokens: length of the longest draft, the best of those tried.
        threshold: threshold of the exit, the best of those tried.
        tau: tokens emitted per step, the bonus token INCLUDED.
        drafted: tokens drafted per step.
        agreement: share of the drafted tokens, up to the longest draft tried, that are the whole
            network's choice at their place; `None` if decoding was timed.
    """

    seconds_per_token: float
    num_speculative_tokens: int
    threshold: float
    tau: float
    drafted: float
    agreement: float | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, the bonus token EXCLUDED."""
        return (self.tau - 1) / self.drafted


def score_of(
    drafts: TextDrafts,
    counted: Bool[np.ndarray, "rows starts"],
    seconds_per_draft_token: float,
    costs: Costs,
    lengths: Sequence[int],
    thresholds: Sequence[float],
) -> SkipScore:
    """Computes the formula above, at the best length and threshold.

    Args:
        drafts: drafts from every position of each row: arrays `[rows, starts, depth]`.
        counted: True for drafts that fit into their row; decoding begins at the first.
        seconds_per_draft_token: t(z).
        costs: costs of target passes.
        lengths: lengths of the longest draft to try.
        thresholds: thresholds of the exit to try.
    """
    matching = np.cumprod(drafts.agrees, axis=2).sum(axis=2)
    agreement = float(np.mean(np.asarray(drafts.agrees)[counted]))

    def at(length: int, threshold: float) -> SkipScore:
        continues = np.cumprod(drafts.confidence[..., : length - 1] >= threshold, axis=2)
        drafted = 1 + continues.sum(axis=2)
        emitted = 1 + np.minimum(matching, drafted)
        begins = step_starts(emitted, counted)
        tau, drafted = float(np.mean(emitted[begins])), drafted[begins]
        passes = costs.target_pass(drafted + 1, LayerSkip(None, length).widths)
        seconds = float(np.mean(drafted * seconds_per_draft_token + passes))
        return SkipScore(seconds / tau, length, threshold, tau, float(np.mean(drafted)), agreement)

    settings = itertools.product(lengths, thresholds)
    return min(itertools.starmap(at, settings), key=lambda score: score.seconds_per_token)


def step_starts(
    emitted: Int[np.ndarray, "rows starts"], counted: Bool[np.ndarray, "rows starts"]
) -> Bool[np.ndarray, "rows starts"]:
    """Marks the positions at which steps begin: the last start plus the tokens that it emitted.

    Example:
        >>> emitted = np.array([[2, 1, 1, 3]])
        >>> step_starts(emitted, np.ones((1, 4), bool))
        array([[ True, False,  True,  True]])
    """
    begins = np.zeros_like(counted)
    rooms = counted.sum(axis=1).tolist()
    for row, (steps, room) in enumerate(zip(emitted.tolist(), rooms, strict=True)):
        start = 0
        while start < room:
            begins[row, start] = True
            start += steps[start]
    return begins


class ExpectedSeconds:
    """The deterministic objective: maps a set to its `SkipScore`. One program serves all sets.

    Raises:
        ValueError: no draft of `depth` tokens fits into the text, or a threshold is outside [0, 1].
    """

    def __init__(
        self,
        target: Network,
        window: Window,
        costs: Costs,
        depth: int,
        thresholds: Sequence[float],
    ):
        for threshold in thresholds:
            if not 0 <= threshold <= 1:
                raise ValueError(f"threshold must be in [0, 1], got {threshold}.")
        self.text, self.costs = FixedText(target, window, depth), costs
        self.thresholds = tuple(thresholds)

    def __call__(self, skip: Skips) -> SkipScore:
        kept = [len(part) - sum(part) for part in skip]
        return score_of(
            self.text.drafts(skip),
            self.text.counted,
            self.costs.draft_token(*kept),
            self.costs,
            range(1, self.text.depth + 1),
            self.thresholds,
        )


class MeasuredSeconds:
    """The objective of the paper: measured seconds per token of decoding. Each set is compiled.

    It is noisy and depends on the machine. The fastest of `repeats` runs counts.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        depth: int,
        threshold: float,
        repeats: int = 2,
    ):
        self.model, self.prompts, self.repeats = model, list(prompts), repeats
        self.config = GenerationConfig(max_new_tokens=max_new_tokens)
        self.settings = {"num_speculative_tokens": depth, "threshold": threshold}
        LayerSkip(None, **self.settings)  # raises for settings out of range

    def __call__(self, skip: Skips) -> SkipScore:
        drafter = LayerSkip(skip, **self.settings, adaptive=None)

        def decode_all() -> list[Metrics]:
            # One prompt at a time: the search is for one sequence.
            return [
                generate(self.model, prompt, self.config, drafter).metrics
                for prompt in self.prompts
            ]

        runs = [decode_all() for _ in range(self.repeats)]
        # Programs of hundreds of sets would not fit into memory.
        jax.clear_caches()
        num_tokens, num_steps, num_drafted = (
            sum(getattr(metrics, name) for metrics in runs[0])
            for name in ("num_tokens", "num_verify_steps", "num_draft_tokens")
        )
        seconds = min(sum(metrics.seconds or 0.0 for metrics in run) for run in runs)
        return SkipScore(
            seconds / num_tokens,
            self.settings["num_speculative_tokens"],
            self.settings["threshold"],
            num_tokens / num_steps,
            num_drafted / num_steps,
        )
