"""What a comparison found: one row per method, and where greedy outputs differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxspec.bench.figures import Figures, Trial
from jaxspec.bench.machine import Machine
from jaxspec.generation import GenerationConfig

TIE_GAP = 1e-4


class Divergence(NamedTuple):
    """Where a greedy output stops being the plain one.

    position: of the first token that differs, counted from the beginning of the output.
    plain_token, drafted_token: the two tokens there; `None` where one output had ended.
    gap: how far the worse of the two lies below the target's best logit after the plain output's
        first `position` tokens; `None` if one output had ended.
    """

    prompt_index: int
    position: int
    plain_token: int | None
    drafted_token: int | None
    gap: float | None

    @property
    def is_tie(self) -> bool:
        """True if rounding explains it: both tokens are the target's best within `TIE_GAP`.

        So the gap between its two best logits is below that as well. Passes of different widths
        add up in different orders, and such a pair may come out either way.
        """
        return self.gap is not None and self.gap < TIE_GAP


class Failure(NamedTuple):
    """A prompt left out of every figure."""

    prompt_index: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One method.

    Attributes:
        name: as it was called by whoever compared.
        settings: the drafter in full; "plain" for plain decoding.
        overall: figures over all prompts.
        low_repetition: over the prompts whose PLAIN output repeats less than `LOW_REPETITION` of
            its 4-grams; `None` if there are none.
        by_category: over the prompts of each category.
        num_identical: outputs equal to plain decoding's; `None` when sampling.
        divergences: the others (greedy only).
        first_token_seconds: from the call of `stream` to its first token, compiled; median over
            repeats of one prompt of median length.
        peak_bytes: arguments, results and scratch of the compiled program for the longest prompt,
            from XLA's memory analysis; weights of target and draft included.
        compile_seconds: tracing and compiling (or fetching from the cache) before the first run.
        trials: every prompt by itself.
    """

    name: str
    settings: str
    overall: Figures
    low_repetition: Figures | None
    by_category: Mapping[str, Figures]
    num_identical: int | None
    divergences: tuple[Divergence, ...]
    first_token_seconds: float
    peak_bytes: int
    compile_seconds: float
    trials: tuple[Trial, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; `str` and rich print it as tables.

    Attributes:
        rows: plain decoding first.
        config: the settings all methods shared.
        failures: prompts that could not be decoded; they are in no figure.
        prompt_indices: the prompts that are, in the order of every row's `trials`.
        weight_bytes: of the target.
        read_bandwidth: bytes per second at which an array as large as the weights was read.
    """

    rows: tuple[ComparisonRow, ...]
    config: GenerationConfig
    seed: int
    repeats: int
    failures: tuple[Failure, ...]
    prompt_indices: tuple[int, ...]
    model: str
    dtype: str
    weight_bytes: int
    read_bandwidth: float
    machine: Machine

    def __getitem__(self, name: str) -> ComparisonRow:
        """The row of a method by its name."""
        return {row.name: row for row in self.rows}[name]

    @property
    def plain(self) -> ComparisonRow:
        return self.rows[0]

    @property
    def ties(self) -> dict[str, list[Divergence]]:
        """Divergences that rounding explains, by method."""
        return {row.name: [d for d in row.divergences if d.is_tie] for row in self.rows}

    @property
    def differences(self) -> dict[str, list[Divergence]]:
        """Divergences that nothing explains: the method is broken there. By method."""
        return {row.name: [d for d in row.divergences if not d.is_tie] for row in self.rows}

    @property
    def outputs_agree(self) -> bool:
        """True if every greedy output equals plain decoding's, ties aside."""
        return not any(self.differences.values())

    @property
    def bound_tokens_per_second(self) -> float:
        """Of plain decoding one row at a time, if it did nothing but read the weights."""
        return self.read_bandwidth / self.weight_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything but the generated text, ready for JSON."""
        from jaxspec.bench.table import as_dict

        return as_dict(self)

    def __rich__(self):
        from jaxspec.bench.table import as_tables

        return as_tables(self)

    def __str__(self) -> str:
        from jaxspec.bench.table import as_text

        return as_text(self)
