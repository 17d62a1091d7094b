"""Figures about speculative decoding, each with its convention in its name's docstring."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What one call of `generate`, or one row of it, did and how long it took.

    Attributes:
        num_tokens: tokens emitted.
        num_verify_steps: target passes in which the row took part (summed over rows).
        num_draft_tokens: draft tokens verified; every node of a tree counts, its root does not.
        mean_acceptance_length: tau, tokens per target pass, the bonus token INCLUDED.
        mean_accepted_tokens: accepted draft tokens per target pass, the bonus token EXCLUDED.
            (Spec-Bench prints a figure under nearly this name that includes it.)
        max_accepted_tokens: most draft tokens accepted in one step, bonus excluded.
        acceptance_rate: accepted / drafted, counted along the path: a step whose deepest node had
            depth 4 drafted 4.
        acceptance_per_position: entry i: of the steps that drafted to depth i + 1, the share that
            accepted a token there.
        acceptance_histogram: entry i: steps that accepted i draft tokens, bonus excluded.
        drafted_histogram: entry i: steps whose draft was i tokens deep.
        idle_fraction: share of row-steps spent on rows that had already finished.
        repeated_ngrams: share of 4-grams of the output that occurred in it before; a small model
            that loops is easy to draft for.
        seconds: wall time, compilation left out; `None` for a row of a batch.
        compile_seconds: time spent compiling in this call; `None` for a row of a batch.
    """

    num_tokens: int
    num_verify_steps: int
    num_draft_tokens: int
    mean_acceptance_length: float
    mean_accepted_tokens: float
    max_accepted_tokens: int
    acceptance_rate: float
    acceptance_per_position: tuple[float, ...]
    acceptance_histogram: tuple[int, ...]
    drafted_histogram: tuple[int, ...]
    idle_fraction: float
    repeated_ngrams: float
    seconds: float | None = None
    compile_seconds: float | None = None

    @property
    def tau(self) -> float:
        """Alias of `mean_acceptance_length`: bonus included."""
        return self.mean_acceptance_length

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens over wall time, prefill included and compilation left out."""
        return self.num_tokens / self.seconds if self.seconds else None

    def as_dict(self) -> dict:
        """Every field and `tokens_per_second`, ready for JSON."""
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


def repeated_ngrams(rows: Sequence[Sequence[int]], n: int = 4) -> float:
    """Share of n-grams that already occurred earlier in their own row; 0 for short rows."""
    repeated = total = 0
    for row in rows:
        grams = Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
        total += sum(grams.values())
        repeated += sum(grams.values()) - len(grams)
    return repeated / total if total else 0.0


def metrics_of(
    rows: Sequence[Sequence[int]],
    num_steps: Sequence[int],
    num_nodes: Sequence[int],
    accepted: np.ndarray,
    drafted: np.ndarray,
    num_from_draft: int,
    seconds: float | None = None,
    compile_seconds: float | None = None,
) -> Metrics:
    """Adds up rows.

    Args:
        rows: each row's emitted tokens.
        num_steps: each row's target passes.
        num_nodes: each row's verified draft tokens.
        accepted: `[rows, depth + 1]` histogram of accepted draft tokens per step.
        drafted: `[rows, depth + 1]` histogram of drafted depth per step.
        num_from_draft: emitted tokens that were drafted.
        seconds: see `Metrics`.
        compile_seconds: see `Metrics`.
    """
    steps, tokens = int(np.sum(num_steps)), sum(len(row) for row in rows)
    accepted, drafted = accepted.sum(axis=0), drafted.sum(axis=0)
    depths = np.arange(accepted.size)
    reached = accepted[::-1].cumsum()[::-1][1:]
    offered = drafted[::-1].cumsum()[::-1][1:]
    slots = int(np.max(num_steps, initial=0)) * len(rows)
    return Metrics(
        num_tokens=tokens,
        num_verify_steps=steps,
        num_draft_tokens=int(np.sum(num_nodes)),
        mean_acceptance_length=_ratio(tokens, steps),
        mean_accepted_tokens=_ratio(num_from_draft, steps),
        max_accepted_tokens=int(np.max(depths[accepted > 0], initial=0)),
        acceptance_rate=_ratio(float(accepted @ depths), float(drafted @ depths)),
        acceptance_per_position=tuple(map(_ratio, reached, offered)),
        acceptance_histogram=tuple(map(int, accepted)),
        drafted_histogram=tuple(map(int, drafted)),
        idle_fraction=_ratio(slots - steps, slots),
        repeated_ngrams=repeated_ngrams(rows),
        seconds=seconds,
        compile_seconds=compile_seconds,
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
