"""A comparison as tables for people and as plain values for JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxspec.bench.comparison import TIE_GAP, Comparison, ComparisonRow, Divergence
from jaxspec.bench.figures import LOW_REPETITION, Figures
from jaxspec.bench.step import StepTimes

_SPEED_COLUMNS = ("tau", "accepted", "rate", "tokens/s", "speed-up [95 %]")
_SPEED_NOTES = (
    "tau: tokens per target pass, bonus token INCLUDED.",
    "accepted: draft tokens accepted per target pass, bonus token EXCLUDED.",
    "rate: accepted / drafted, along the path.",
    "speed-up: plain decoding's time per token over the method's, over the same prompts [95 % "
    "bootstrap interval over prompts]. Prefill counts, compiling does not.",
)
_SHARE_NOTE = (
    "draft, target: what they take of a step's time, one row, in a loop behind eight ids again and "
    "again: drafts that may end early are as long as they come there, which is not as on prompts."
)


def as_text(comparison: Comparison, width: int = 100) -> str:
    """The tables without colours, `width` characters wide."""
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(as_tables(comparison))
    return text.getvalue().rstrip()


def as_tables(comparison: Comparison, steps: Mapping[str, StepTimes] | None = None) -> Group:
    """Header, tables of speed, of details and of categories, and what the figures mean.

    With `steps`, of every row by its name, the table of speed says what drafting and the target's
    pass take of a step, and holds the longest draft and the memory too.
    """
    parts = [Text(_header(comparison)), _speed_table(comparison, steps)]
    if comparison.plain.low_repetition is not None:
        parts.append(_low_repetition_table(comparison))
    parts.append(_detail_table(comparison))
    if comparison.plain.by_category:
        parts.append(_category_table(comparison))
    shares = (_SHARE_NOTE,) if steps else ()
    notes = (*_SPEED_NOTES, *shares, *_detail_notes(comparison), *findings(comparison))
    return Group(*parts, *map(Text, notes))


def as_summary(comparison: Comparison) -> Group:
    """The table of speed alone, and what its figures mean."""
    notes = (*_SPEED_NOTES, *findings(comparison))
    return Group(Text(_header(comparison)), _speed_table(comparison), *map(Text, notes))


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Plain values: the settings, the machine, every row and every prompt."""
    return {
        "model": comparison.model,
        "dtype": comparison.dtype,
        "weight_bytes": comparison.weight_bytes,
        "read_bandwidth": comparison.read_bandwidth,
        "bound_tokens_per_second": comparison.bound_tokens_per_second,
        "machine": comparison.machine._asdict(),
        "config": dataclasses.asdict(comparison.config),
        "seed": comparison.seed,
        "repeats": comparison.repeats,
        "num_prompts": len(comparison.prompt_indices) + len(comparison.failures),
        "failures": [failure._asdict() for failure in comparison.failures],
        "outputs_agree": comparison.outputs_agree,
        "low_repetition_below": LOW_REPETITION,
        "tie_gap": TIE_GAP,
        "rows": [_row_as_dict(comparison, row) for row in comparison.rows],
    }


def _row_as_dict(comparison: Comparison, row: ComparisonRow) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(row, trials=()))
    del plain["trials"]
    plain["divergences"] = divergences_as_dicts(row.divergences)
    plain["prompts"] = [
        {
            "prompt_index": index,
            "num_tokens": trial.num_tokens,
            "seconds": trial.seconds,
            "mean_acceptance_length": trial.generation.metrics.mean_acceptance_length,
            "repeated_ngrams": trial.generation.metrics.repeated_ngrams,
            "finish_reason": trial.generation.finish_reason,
        }
        for index, trial in zip(comparison.prompt_indices, row.trials, strict=True)
    ]
    return plain


def divergences_as_dicts(divergences: Sequence[Divergence]) -> list[dict[str, Any]]:
    """Every field of each, and whether it is a tie."""
    return [{**divergence._asdict(), "is_tie": divergence.is_tie} for divergence in divergences]


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
        table.add_column(column, justify="right", overflow="fold")
    return table


def _speed_table(comparison: Comparison, steps: Mapping[str, StepTimes] | None = None) -> Table:
    joined = ("longest", "draft, target", "peak") if steps else ()
    table = _table("All prompts", "method", *_SPEED_COLUMNS, *joined, "outputs")
    for row in comparison.rows:
        cells = (_longest(row), shares_text(steps[row.name]), _peak(row)) if steps else ()
        outputs = _outputs(comparison, row)
        table.add_row(row.name, *_speed_cells(row.overall), *cells, outputs)
    return table


def _low_repetition_table(comparison: Comparison) -> Table:
    columns = (*_SPEED_COLUMNS, "repeated", "log-prob")
    table = _table(f"Low repetition (below {LOW_REPETITION:.0%})", "method", *columns)
    for row in comparison.rows:
        if row.low_repetition is not None:
            cells = _text_cells(row.low_repetition)
            table.add_row(row.name, *_speed_cells(row.low_repetition), *cells)
    return table


def _detail_table(comparison: Comparison) -> Table:
    columns = ("longest", "first token", "compiling", "peak", "repeated", "log-prob")
    table = _table("Details", "method", *columns)
    for row in comparison.rows:
        table.add_row(
            row.name,
            _longest(row),
            f"{row.first_token_seconds * 1e3:.1f} ms",
            f"{row.compile_seconds:.1f} s",
            _peak(row),
            *_text_cells(row.overall),
        )
    return table


def _speed_cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.mean_acceptance_length:.2f}",
        f"{figures.mean_accepted_tokens:.2f}",
        f"{figures.acceptance_rate:.0%}",
        f"{figures.tokens_per_second:.0f}",
        speedup_text(figures),
    )


def _longest(row: ComparisonRow) -> str:
    return str(row.overall.max_accepted_tokens)


def _peak(row: ComparisonRow) -> str:
    return f"{row.peak_bytes / 1e6:.1f} MB"


def shares_text(times: StepTimes) -> str:
    """What drafting and the target's pass take of a step."""
    return f"{times.draft / times.step:.0%}, {times.target / times.step:.0%}"


def _text_cells(figures: Figures) -> tuple[str, ...]:
    return f"{figures.repeated_ngrams:.0%}", f"{figures.mean_logprob:.2f}"


def speedup_text(figures: Figures) -> str:
    """A speed-up and its interval, in the width of a cell."""
    if figures.speedup_interval is None:
        return f"{figures.speedup:.2f}"
    low, high = figures.speedup_interval
    return f"{figures.speedup:.2f} [{low:.2f}, {high:.2f}]"


def _outputs(comparison: Comparison, row: ComparisonRow) -> str:
    if row.num_identical is None:
        return "sampled"
    return "baseline" if row is comparison.plain else outputs_text(row.divergences, len(row.trials))


def outputs_text(divergences: Sequence[Divergence], num_prompts: int) -> str:
    """How many greedy outputs are plain decoding's, in the width of a cell."""
    num_ties = sum(divergence.is_tie for divergence in divergences)
    num_differences = len(divergences) - num_ties
    parts = [f"{num_prompts - len(divergences)} of {num_prompts} same"]
    parts += [f"{num_ties} tied"] if num_ties else []
    parts += [f"{num_differences} DIFFER"] if num_differences else []
    return ", ".join(parts)


def _category_table(comparison: Comparison) -> Table:
    columns = [f"{row.name}: tau, speed-up" for row in comparison.rows[1:]]
    table = _table("By category", "category", "prompts", *columns)
    for category, figures in comparison.plain.by_category.items():
        cells = [
            f"{row.by_category[category].mean_acceptance_length:.2f}, "
            f"{speedup_text(row.by_category[category])}"
            for row in comparison.rows[1:]
        ]
        table.add_row(category, str(figures.num_prompts), *cells)
    return table


def _detail_notes(comparison: Comparison) -> list[str]:
    low = comparison.plain.low_repetition
    return [
        "longest: most draft tokens accepted in one pass, bonus token EXCLUDED.",
        "repeated: share of 4-grams that the output already held. Low repetition: the "
        f"{low.num_prompts if low else 0} of {comparison.plain.overall.num_prompts} prompts whose "
        f"plain output repeats less than {LOW_REPETITION:.0%}.",
        "log-prob: the target's mean for an output token. peak: XLA's memory analysis of the "
        "program for the longest prompt, weights included.",
    ]


def findings(comparison: Comparison) -> list[str]:
    """What this measurement says of its own worth, and everything that went wrong in it."""
    plain, bound = comparison.plain.overall, comparison.bound_tokens_per_second
    lines = [
        f"Plain decoding reaches {plain.tokens_per_second / bound:.0%} of its memory bound of "
        f"{bound:.0f} tokens/s: {comparison.weight_bytes / 1e6:.1f} MB of weights read at "
        f"{comparison.read_bandwidth / 1e9:.1f} GB/s, as measured here."
    ]
    if comparison.machine.busy:
        lines.append(
            f"NOTE: the load was {comparison.machine.load:.1f} on {comparison.machine.cores} "
            "cores: something else was running, so do not trust these times."
        )
    for row in comparison.rows:
        lines.extend(divergence_lines(row.name, row.divergences))
    lines.extend(f"FAILED: prompt {index}: {reason}" for index, reason in comparison.failures)
    return lines


def divergence_lines(name: str, divergences: Sequence[Divergence]) -> list[str]:
    """One line for each output of a method that left the plain one; those that matter come last."""
    return [
        f"{'TIE' if divergence.is_tie else 'DIFFERENT'}: {name}, {_divergence(divergence)}"
        for divergence in sorted(divergences, key=lambda divergence: not divergence.is_tie)
    ]


def _divergence(divergence: Divergence) -> str:
    where = f"prompt {divergence.prompt_index}, token {divergence.position}"
    if divergence.gap is None:
        return f"{where}: one output ends there and the other goes on"
    return (
        f"{where}: {divergence.drafted_token} instead of {divergence.plain_token}, "
        f"{divergence.gap:.2g} below the best logit"
    )
