"""Figures of speculative decoding; each docstring says whether the bonus token counts."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of decoding, which add up over steps, rows, prompts and jobs: `first + second`.

    Attributes:
        num_tokens: tokens emitted.
        num_steps: target passes, counted once per row that took part.
        num_nodes: verified draft tokens; every node of a tree counts, its root does not.
        num_from_draft: emitted tokens that were drafted.
        accepted: entry i: steps that accepted i draft tokens, bonus EXCLUDED.
        drafted: entry i: steps whose draft was i tokens deep.

    Example:
        >>> steps = [Counts(num_tokens=3, num_steps=1), Counts(num_tokens=2, num_steps=1)]
        >>> sum(steps, Counts()).tau
        2.5
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_from_draft: int = 0
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.num_tokens + other.num_tokens,
            self.num_steps + other.num_steps,
            self.num_nodes + other.num_nodes,
            self.num_from_draft + other.num_from_draft,
            _summed(self.accepted, other.accepted),
            _summed(self.drafted, other.drafted),
        )

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per target pass, bonus INCLUDED; 0 without a pass."""
        return _ratio(self.num_tokens, self.num_steps)

    @property
    def mean_accepted_tokens(self) -> float:
        """Accepted draft tokens per target pass, bonus EXCLUDED.

        Spec-Bench prints a figure under nearly this name that includes it.
        """
        return _ratio(self.num_from_draft, self.num_steps)

    @property
    def max_accepted_tokens(self) -> int:
        """Most draft tokens accepted in one step, bonus EXCLUDED."""
        return max((i for i, steps in enumerate(self.accepted) if steps), default=0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens along the path.

        A step whose deepest node had depth 4 drafted 4.
        """
        return _ratio(_weighted(self.accepted), _weighted(self.drafted))

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Entry i: of the steps that drafted to depth i + 1, the share that accepted it."""
        reached = np.cumsum(self.accepted[::-1])[::-1][1:]
        offered = np.cumsum(self.drafted[::-1])[::-1][1:]
        return tuple(map(_ratio, reached, offered))


@dataclasses.dataclass(frozen=True)
class Metrics(Counts):
    """Counts of one call of `generate`, or of one row of it, and the time that it took.

    Attributes:
        idle_fraction: share of row-steps spent on rows that had already finished.
        repeated_ngrams: share of 4-grams of the output that occurred in it before; a small model
            that loops is easy to draft for.
        seconds: wall time without compilation; `None` for a row of a batch.
        compile_seconds: time spent compiling in this call; `None` for a row of a batch.

    Example:
        >>> counts = Counts(num_tokens=5, num_steps=2)
        >>> metrics = Metrics.of([counts], [[7, 8, 7, 9, 1]], seconds=0.5)
        >>> metrics.tau, metrics.tokens_per_second
        (2.5, 10.0)
    """

    idle_fraction: float = 0.0
    repeated_ngrams: float = 0.0
    seconds: float | None = None
    compile_seconds: float | None = None

    @classmethod
    def of(
        cls,
        counts: Sequence[Counts],
        tokens: Sequence[Sequence[int]],
        seconds: float | None = None,
        compile_seconds: float | None = None,
    ) -> "Metrics":
        """Adds up rows that were decoded together.

        Args:
            counts: counters of each row.
            tokens: ids that each row emitted.
            seconds: see `Metrics`.
            compile_seconds: see `Metrics`.
        """
        total = sum(counts, Counts())
        row_steps = max((row.num_steps for row in counts), default=0) * len(counts)
        idle = _ratio(row_steps - total.num_steps, row_steps)
        return cls(
            **vars(total),
            idle_fraction=idle,
            repeated_ngrams=repeated_ngrams(tokens),
            seconds=seconds,
            compile_seconds=compile_seconds,
        )

    @property
    def counts(self) -> Counts:
        """The counters alone."""
        return Counts() + self

    @property
    def num_verify_steps(self) -> int:
        """Target passes, counted once per row that took part."""
        return self.num_steps

    @property
    def num_draft_tokens(self) -> int:
        """Verified draft tokens; every node of a tree counts, its root does not."""
        return self.num_nodes

    @property
    def mean_acceptance_length(self) -> float:
        """Alias of `tau`: tokens per target pass, the bonus token INCLUDED."""
        return self.tau

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Entry i: steps that accepted i draft tokens, the bonus token EXCLUDED."""
        return self.accepted

    @property
    def drafted_histogram(self) -> tuple[int, ...]:
        """Entry i: steps whose draft was i tokens deep."""
        return self.drafted

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens over wall time: prefill included, compilation left out."""
        return self.num_tokens / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by its name, ready for JSON."""
        return {name: getattr(self, name) for name in _FIGURES}


ROW_FIGURES = (
    *("num_tokens", "num_verify_steps", "num_draft_tokens"),
    *("mean_acceptance_length", "acceptance_rate"),
)
"""Figures that a record or a table row of one continuation holds."""
_FIGURES = (
    "num_tokens",
    "num_verify_steps",
    "num_draft_tokens",
    "mean_acceptance_length",
    "mean_accepted_tokens",
    "max_accepted_tokens",
    "acceptance_rate",
    "acceptance_per_position",
    "acceptance_histogram",
    "drafted_histogram",
    "idle_fraction",
    "repeated_ngrams",
    "seconds",
    "compile_seconds",
    "tokens_per_second",
)


def repeated_ngrams(rows: Sequence[Sequence[int]], n: int = 4) -> float:
    """Returns the share of n-grams that occurred earlier in their row; 0 for short rows.

    Example:
        >>> repeated_ngrams([[1, 2, 1, 2, 1]], n=2)
        0.5
    """
    repeated = total = 0
    for row in rows:
        grams = Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
        total += sum(grams.values())
        repeated += sum(grams.values()) - len(grams)
    return repeated / total if total else 0.0


def _summed(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of two histograms, entry by entry."""
    return tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=0))


def _weighted(histogram: tuple[int, ...]) -> int:
    """Sum of i over the steps that a histogram counts at entry i."""
    return sum(i * steps for i, steps in enumerate(histogram))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
