"""The result of a comparison: records, tables for people, plain values for JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxspec.decoding.denoise import DenoiseConfig
from jaxspec.decoding.request import GenerationConfig
from jaxspec.measure.figures import LOW_REPETITION, STEPWISE, Figures, Sample
from jaxspec.measure.machine import Machine
from jaxspec.measure.step import StepTimes

TIE_GAP = 1e-4
"""Two logits closer than this are a tie, which rounding may decide either way."""


class Divergence(NamedTuple):
    """The place at which a greedy output stops being the plain one.

    Attributes:
        prompt_index: the prompt's place in the list.
        position: place of the first token that differs, counted from the beginning of the output.
        plain_token: plain decoding's token there; `None` if its output had ended.
        drafted_token: the method's token there; `None` if its output had ended.
        gap: distance of the worse of the two from the target's best logit after the plain
            output's first `position` tokens; `None` if one output had ended. Of a diffusion model,
            see `jaxspec.measure.denoising.divergence_of_canvas`.
    """

    prompt_index: int
    position: int
    plain_token: int | None
    drafted_token: int | None
    gap: float | None

    @property
    def is_tie(self) -> bool:
        """True if rounding explains it: the gap is below `TIE_GAP`.

        Passes of different widths add up in different orders, so such a pair may come out either
        way.
        """
        return self.gap is not None and self.gap < TIE_GAP


class Failure(NamedTuple):
    """A prompt left out of every figure, and the reason."""

    prompt_index: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """Figures of one method.

    Attributes:
        name: the method's name in the call of `compare`.
        settings: the drafter in full; "plain decoding" for the first row.
        overall: figures over all prompts.
        low_repetition: figures over the prompts whose PLAIN output repeats less than
            `LOW_REPETITION` of its 4-grams; `None` if there are none.
        by_category: figures over the prompts of each category.
        num_identical: outputs equal to plain decoding's; `None` when a causal model samples.
        divergences: places where the other outputs leave plain decoding's, if they are compared.
        lossless: the output must be plain decoding's.
        first_token_seconds: time from the call of `stream` to its first token, compiled; median
            over repeats of one prompt of median length. `None` for a diffusion model.
        peak_bytes: arguments, results and scratch of the compiled program for the longest prompt,
            from XLA's memory analysis; weights of target and draft included.
        compile_seconds: tracing and compiling (or fetching from the cache) before the first run.
        samples: every prompt by itself.
    """

    name: str
    settings: str
    overall: Figures
    low_repetition: Figures | None
    by_category: Mapping[str, Figures]
    num_identical: int | None
    divergences: tuple[Divergence, ...]
    lossless: bool
    first_token_seconds: float | None
    peak_bytes: int
    compile_seconds: float
    samples: tuple[Sample, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`; `print`, rich and notebooks show it as tables.

    For a diffusion model, plain decoding is stepwise decoding, and a target pass is a call.

    Attributes:
        rows: one for each method, plain decoding first.
        config: the settings that all methods shared.
        seed: seed of sampling; prompt i has `seed + i`.
        repeats: timed runs of each prompt and method.
        failures: prompts that could not be decoded; they are in no figure.
        prompt_indices: the prompts that are, in the order of every row's `samples`.
        weight_bytes: bytes of the weights of the target.
        read_bandwidth: bytes per second at which an array as large as the weights was read.
        model: name of the target.
        dtype: type of its weights.
        machine: the machine of the measurement.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> comparison = jaxspec.compare(model, ["1, 2, 3, 1,"], {}, repeats=1, progress=False)
        >>> comparison["plain"].overall.mean_acceptance_length
        1.0
    """

    rows: tuple[ComparisonRow, ...]
    config: GenerationConfig | DenoiseConfig
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
        """Returns the row of a method by its name."""
        return {row.name: row for row in self.rows}[name]

    @property
    def plain(self) -> ComparisonRow:
        return self.rows[0]

    @property
    def is_of_diffusion(self) -> bool:
        """True if the model is a diffusion language model."""
        return self.plain.name == STEPWISE

    @property
    def ties(self) -> dict[str, list[Divergence]]:
        """Divergences that rounding explains, by method."""
        return {row.name: [d for d in row.divergences if d.is_tie] for row in self.rows}

    @property
    def differences(self) -> dict[str, list[Divergence]]:
        """Divergences that nothing explains: the method is broken there. By method."""
        return {
            row.name: [d for d in row.divergences if not d.is_tie and row.lossless]
            for row in self.rows
        }

    @property
    def outputs_agree(self) -> bool:
        """True if every output that is compared equals plain decoding's, ties aside."""
        return not any(self.differences.values())

    @property
    def bound_tokens_per_second(self) -> float:
        """Speed of plain decoding, one row at a time, if it only read the weights."""
        return self.read_bandwidth / self.weight_bytes

    def as_dict(self) -> dict[str, Any]:
        """Returns everything except the generated text, ready for JSON."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
            "read_bandwidth": self.read_bandwidth,
            "bound_tokens_per_second": self.bound_tokens_per_second,
            "machine": self.machine._asdict(),
            "config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "repeats": self.repeats,
            "num_prompts": len(self.prompt_indices) + len(self.failures),
            "failures": [failure._asdict() for failure in self.failures],
            "outputs_agree": self.outputs_agree,
            "low_repetition_below": LOW_REPETITION,
            "tie_gap": TIE_GAP,
            "rows": [_row_as_dict(self, row) for row in self.rows],
        }

    def __rich__(self) -> Group:
        return as_tables(self)

    def __repr__(self) -> str:
        """Returns the tables without colours, 100 characters wide."""
        text = StringIO()
        Console(file=text, width=100, color_system=None).print(as_tables(self))
        return text.getvalue().rstrip()


_SPEED_COLUMNS = ("tau", "rate", "tokens/s", "speed-up [95 %]")
_CALL_COLUMNS = ("calls", "saved")
_SPEED_NOTES = (
    "tau: tokens per target pass, bonus token INCLUDED.",
    "rate: share of the drafted tokens that were accepted, along the path; bonus EXCLUDED.",
)
_DIFFUSION_NOTES = (
    "tau: tokens per call of the network.",
    "rate: share of the drafted decisions that were kept.",
    "saved: share of stepwise decoding's calls.",
)
_SPEEDUP_NOTE = (
    "speed-up: {} decoding's time per token over the method's, over the same prompts [95 % "
    "bootstrap interval over prompts]. Prefill counts, compiling does not."
)
_LOGPROB_NOTE = "log-prob: the target's mean for an output token."
_SHARE_NOTE = (
    "draft, target: their shares of a step's time, one row, in a loop that repeats eight ids. "
    "Drafts that may end early have the length that they have there, not that of real prompts."
)


def as_tables(comparison: Comparison, steps: Mapping[str, StepTimes] | None = None) -> Group:
    """Returns a header, tables of speed, details and categories, and notes on the figures.

    Args:
        comparison: the result of `compare`.
        steps: times of a step's parts, of every row by its name. With them the table of speed
            says which share of a step drafting and the target's pass take, and holds the longest
            draft and the memory too.
    """
    parts: list[Any] = [Text(_header(comparison)), _speed_table(comparison, steps)]
    if comparison.plain.low_repetition is not None:
        parts.append(_low_repetition_table(comparison))
    parts.append(_detail_table(comparison))
    if comparison.plain.by_category:
        parts.append(_category_table(comparison))
    shares = (_SHARE_NOTE,) if steps else ()
    notes = (
        *_speed_notes(comparison),
        *shares,
        *_detail_notes(comparison),
        *findings(comparison),
    )
    return Group(*parts, *map(Text, notes))


def as_summary(comparison: Comparison) -> Group:
    """Returns the table of speed alone, and notes on its figures."""
    notes = (*_speed_notes(comparison), *findings(comparison))
    return Group(Text(_header(comparison)), _speed_table(comparison), *map(Text, notes))


def _speed_notes(comparison: Comparison) -> tuple[str, ...]:
    notes = _DIFFUSION_NOTES if comparison.is_of_diffusion else _SPEED_NOTES
    return (*notes, _SPEEDUP_NOTE.format(comparison.plain.name))


def _row_as_dict(comparison: Comparison, row: ComparisonRow) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(row, samples=()))
    del plain["samples"]
    plain["divergences"] = divergences_as_dicts(row.divergences)
    plain["prompts"] = [
        {
            "prompt_index": index,
            "num_tokens": sample.num_tokens,
            "seconds": sample.seconds,
            "mean_acceptance_length": sample.counts.tau,
            "repeated_ngrams": sample.repeated_ngrams,
            "finish_reason": sample.rows[0].finish_reason,
        }
        for index, sample in zip(comparison.prompt_indices, row.samples, strict=True)
    ]
    return plain


def divergences_as_dicts(divergences: Sequence[Divergence]) -> list[dict[str, Any]]:
    """Returns every field of each divergence, and `is_tie`, ready for JSON.

    Example:
        >>> divergences_as_dicts([Divergence(0, 3, 1, None, gap=None)])[0]["is_tie"]
        False
    """
    return [
        # JSON has no number for the gap of a decision that was not finite.
        {**one._asdict(), "gap": None if one.gap == float("inf") else one.gap, "is_tie": one.is_tie}
        for one in divergences
    ]


def _header(comparison: Comparison) -> str:
    config = comparison.config
    sampling = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    return (
        f"{comparison.model} ({comparison.dtype}, {comparison.weight_bytes / 1e6:.1f} MB) on "
        f"{comparison.machine}\n"
        f"{len(comparison.prompt_indices)} prompts one at a time, {sampling}, up to "
        f"{config.max_new_tokens} new tokens, median of {comparison.repeats}"
    )


def _table(title: str, *columns: str) -> Table:
    first, *others = columns
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in others:
        table.add_column(column, justify="right", overflow="fold", no_wrap="speed" in column)
    return table


def _speed_table(comparison: Comparison, steps: Mapping[str, StepTimes] | None = None) -> Table:
    joined = ("longest", "draft, target", "peak") if steps else ()
    if comparison.is_of_diffusion:
        joined = _CALL_COLUMNS
    table = _table("All prompts", "method", *_SPEED_COLUMNS, *joined, "outputs")
    for row in comparison.rows:
        cells = (_longest(row), shares_text(steps[row.name]), _peak(row)) if steps else ()
        if comparison.is_of_diffusion:
            cells = _call_cells(row.overall, comparison.plain.overall)
        outputs = _outputs(comparison, row)
        table.add_row(row.name, *_speed_cells(row.overall), *cells, outputs)
    return table


def _low_repetition_table(comparison: Comparison) -> Table:
    joined = _CALL_COLUMNS if comparison.is_of_diffusion else ()
    columns = (*_SPEED_COLUMNS, *joined, *_text_columns(comparison))
    table = _table(f"Low repetition (below {LOW_REPETITION:.0%})", "method", *columns)
    plain = comparison.plain.low_repetition
    for row in comparison.rows:
        found = row.low_repetition
        if found is not None and plain is not None:
            calls = _call_cells(found, plain) if joined else ()
            table.add_row(row.name, *_speed_cells(found), *calls, *_text_cells(found))
    return table


def _call_cells(figures: Figures, stepwise: Figures) -> tuple[str, ...]:
    """Returns passes of the network, and the share of stepwise decoding's that is saved."""
    calls, most = figures.num_verify_steps, stepwise.num_verify_steps
    return str(calls), f"{1 - calls / most:.0%}"


def _detail_table(comparison: Comparison) -> Table:
    columns = ("longest", "compiling", "peak", "first token", *_text_columns(comparison))
    if comparison.is_of_diffusion:
        columns = ("longest", "compiling", "peak", *_text_columns(comparison))
    table = _table("Details", "method", *columns)
    for row in comparison.rows:
        first = row.first_token_seconds
        table.add_row(
            row.name,
            _longest(row),
            f"{row.compile_seconds:.1f} s",
            _peak(row),
            *(() if first is None else (f"{first * 1e3:.1f} ms",)),
            *_text_cells(row.overall),
        )
    return table


def _text_columns(comparison: Comparison) -> tuple[str, ...]:
    return ("repeated",) if comparison.is_of_diffusion else ("repeated", "log-prob")


def _speed_cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.mean_acceptance_length:.2f}",
        f"{figures.acceptance_rate:.0%}",
        f"{figures.tokens_per_second:.0f}",
        speedup_text(figures),
    )


def _longest(row: ComparisonRow) -> str:
    return str(row.overall.max_accepted_tokens)


def _peak(row: ComparisonRow) -> str:
    return f"{row.peak_bytes / 1e6:.1f} MB"


def shares_text(times: StepTimes) -> str:
    """Returns the shares of a step that drafting and the target's pass take.

    Example:
        >>> shares_text(StepTimes(step=0.004, draft=0.001, target=0.002, width=1.0))
        '25%, 50%'
    """
    return f"{times.draft / times.step:.0%}, {times.target / times.step:.0%}"


def _text_cells(figures: Figures) -> tuple[str, ...]:
    logprob = () if figures.mean_logprob is None else (f"{figures.mean_logprob:.2f}",)
    return f"{figures.repeated_ngrams:.0%}", *logprob


def speedup_text(figures: Figures) -> str:
    """Returns a speed-up and its interval, in the width of a cell."""
    if figures.speedup_interval is None:
        return f"{figures.speedup:.2f}"
    low, high = figures.speedup_interval
    return f"{figures.speedup:.2f} [{low:.2f}, {high:.2f}]"


def _outputs(comparison: Comparison, row: ComparisonRow) -> str:
    if row.num_identical is None:
        return "sampled"
    if row is comparison.plain:
        return "baseline"
    if not row.lossless:
        return f"{row.num_identical} of {len(row.samples)} same, lossy"
    return outputs_text(row.divergences, len(row.samples))


def outputs_text(divergences: Sequence[Divergence], num_prompts: int) -> str:
    """Returns how many greedy outputs equal plain decoding's, in the width of a cell.

    Example:
        >>> outputs_text([Divergence(0, 3, 1, 2, gap=1e-6)], num_prompts=5)
        '4 of 5 same, 1 tied'
    """
    num_ties = sum(divergence.is_tie for divergence in divergences)
    num_differences = len(divergences) - num_ties
    parts = [f"{num_prompts - len(divergences)} of {num_prompts} same"]
    parts += [f"{num_ties} tied"] if num_ties else []
    parts += [f"{num_differences} DIFFER"] if num_differences else []
    return ", ".join(parts)


def _category_table(comparison: Comparison) -> Table:
    table = _table("By category", "method", "category", "prompts", "tau", "speed-up [95 %]")
    for category in comparison.plain.by_category:
        for row in comparison.rows[1:]:
            figures = row.by_category[category]
            tau = f"{figures.mean_acceptance_length:.2f}"
            table.add_row(row.name, category, str(figures.num_prompts), tau, speedup_text(figures))
    return table


def _detail_notes(comparison: Comparison) -> list[str]:
    low = comparison.plain.low_repetition
    return [
        "longest: most draft tokens accepted in one pass, bonus token EXCLUDED.",
        "repeated: share of 4-grams that the output already held. Low repetition: the "
        f"{low.num_prompts if low else 0} of {comparison.plain.overall.num_prompts} prompts whose "
        f"{comparison.plain.name} output repeats less than {LOW_REPETITION:.0%}.",
        "peak: XLA's memory analysis of the program for the longest prompt, weights included.",
        *(() if comparison.is_of_diffusion else (_LOGPROB_NOTE,)),
    ]


def findings(comparison: Comparison) -> list[str]:
    """Returns notes on how far the figures can be trusted, and everything that went wrong."""
    plain, bound = comparison.plain.overall, comparison.bound_tokens_per_second
    lines = [
        f"{comparison.plain.name.capitalize()} decoding reaches "
        f"{plain.tokens_per_second / bound:.0%} of its memory bound of {bound:.0f} tokens/s: "
        f"{comparison.weight_bytes / 1e6:.1f} MB of weights read at "
        f"{comparison.read_bandwidth / 1e9:.1f} GB/s, as measured here."
    ]
    if comparison.machine.busy:
        lines.append(
            f"NOTE: the load was {comparison.machine.load:.1f} on {comparison.machine.cores} "
            "cores: something else was running, so do not trust these times."
        )
    for row in comparison.rows:
        lines.extend(divergence_lines(row.name, row.divergences) if row.lossless else ())
    lines.extend(f"FAILED: prompt {index}: {reason}" for index, reason in comparison.failures)
    return lines


def divergence_lines(name: str, divergences: Sequence[Divergence]) -> list[str]:
    """Returns a line for each output of a method that left the plain one; ties come first.

    Example:
        >>> divergence_lines("lookup", [Divergence(0, 3, 1, 2, gap=1e-6)])
        ['TIE: lookup, prompt 0, token 3: 2 instead of 1, gap 1e-06']
    """
    return [
        f"{'TIE' if divergence.is_tie else 'DIFFERENT'}: {name}, {_divergence(divergence)}"
        for divergence in sorted(divergences, key=lambda divergence: not divergence.is_tie)
    ]


def _divergence(divergence: Divergence) -> str:
    where = f"prompt {divergence.prompt_index}, token {divergence.position}"
    differs = f"{divergence.drafted_token} instead of {divergence.plain_token}"
    if None in (divergence.plain_token, divergence.drafted_token):
        differs = "one output ends there and the other continues"
    return f"{where}: {differs}" + ("" if divergence.gap is None else f", gap {divergence.gap:.2g}")
