"""A measured suite as a part of `checkpoints/RESULTS.md`, and as plain values."""

import dataclasses
import json
from collections import Counter
from typing import Any

from jaxspec.bench.assisted import ASSISTED
from jaxspec.bench.assisted import PLAIN as TRANSFORMERS
from jaxspec.bench.batches import BatchFigures
from jaxspec.bench.compare import PLAIN
from jaxspec.bench.comparison import TIE_GAP, ComparisonRow
from jaxspec.bench.figures import LOW_REPETITION, Figures
from jaxspec.bench.page import bullets, table
from jaxspec.bench.shipped import (
    Assisted,
    AssistedRow,
    MethodSteps,
    Setting,
    SuiteResult,
    TargetResult,
)
from jaxspec.bench.table import (
    divergence_lines,
    divergences_as_dicts,
    findings,
    outputs_text,
    shares_text,
    speedup_text,
)

MADE_BY = "Made by this command, never by hand:\n"
_COLUMNS = {
    "outputs": "greedy outputs that equal our plain decoding's, token by token. A tie, listed with "
    f"its gap, leaves it where the target's two best logits lie within {TIE_GAP:g}. Sampled "
    "outputs differ by their nature, so at a temperature they are not compared.",
    "tau": "mean acceptance length: tokens per target pass, bonus token INCLUDED, so that plain "
    "decoding has 1. Also by category.",
    "tokens/s": "tokens emitted per second, one prompt at a time, the median of each prompt's "
    "runs. Reading the prompt counts, compiling does not.",
    "baseline": "plain decoding by the same library, measured in turns with the method.",
    "speed-up": "the baseline's time per token over the method's, over the same prompts [95 % "
    "bootstrap interval over prompts].",
    "repeated": "share of an output's 4-grams that it already held. A model that loops is easy to "
    "draft for.",
    "accepted": "share of drafted tokens that were accepted, along the path; bonus EXCLUDED.",
    "peak": "XLA's memory analysis of the program for the longest prompt, all weights included.",
    "low repetition": "the figures above over those prompts whose plain output (ours) repeats less "
    f"than {LOW_REPETITION:.0%} of its 4-grams.",
    "budget": "draft tokens of a step at most, the root EXCLUDED.",
    "drafting": "milliseconds of a step that drafting takes, all passes together.",
    "longest": "most draft tokens accepted in one step, bonus EXCLUDED.",
    "whole": "steps that accepted a chain as deep as any draft of the method, and all steps.",
    "share": "of a step's time, what drafting and the target's pass take.",
    "rows": "prompts decoded together: tokens per second of all of them, and in brackets how many "
    "times those of plain decoding of as many rows that is, and tau.",
    "building": "milliseconds of drafting that choosing a dynamic tree takes: what it takes longer "
    "than drafting over a static tree with the same passes of the head. A static tree is chosen "
    "beforehand.",
    "verification": "milliseconds of a step that the target's pass takes.",
    "step": "milliseconds of a whole step: drafting, verification and what is left, as committing. "
    "Steps are timed in a loop over 64 to 256 slots, medians, behind eight ids again and again: "
    "drafts that may end early are as long as they come there, which is not as on real text.",
}
_PARTS_OF_A_STEP = ("draft", "target", "step")
_SPEED_COLUMNS = ("tokens/s", "baseline", "speed-up [95 %]", "repeated")
# Methods, each with the name of its baseline.
_Rows = list[tuple[ComparisonRow | AssistedRow, str]]
_HOW_PASSES_ARE_COUNTED = (
    "For tau, a hook counts every call of the target's forward. The first reads the prompt and "
    "scores the first draft at once, so it is a step; ours reads the prompt up to its last token "
    "in a pass that is not counted, and then begins with a step as well."
)


def command_of(result: SuiteResult) -> str:
    """What to type to measure this again."""
    return (
        f"jaxspec bench --suite {result.name} --prompts-per-set {result.prompts_per_set} "
        f"--repeats {result.repeats}"
    )


def as_markdown(result: SuiteResult) -> str:
    """The whole part. Nothing in it depends on the day or the commit, or on where files lie."""
    parts = [
        f"# {result.suite.title}\n\n{MADE_BY}\n    {command_of(result)}",
        _prompts_part(result),
        "## What the columns say",
        bullets(*(f"**{name}**: {meaning}" for name, meaning in _COLUMNS.items())),
        *(_target_part(name, target) for name, target in result.targets.items()),
    ]
    if result.missing:
        parts.append(f"Not here, so not measured: {', '.join(result.missing)}.")
    return "\n\n".join(parts) + "\n"


def as_dict(result: SuiteResult) -> dict[str, Any]:
    """Every figure, ready for JSON."""
    return {
        "suite": result.name,
        "command": command_of(result),
        "outputs_agree": result.outputs_agree,
        "missing": list(result.missing),
        "targets": {name: _target_as_dict(target) for name, target in result.targets.items()},
    }


def _target_as_dict(target: TargetResult) -> dict[str, Any]:
    return {
        "num_params": target.num_params,
        "draft_params": dict(target.draft_params),
        "left_out": list(target.left_out),
        "settings": {
            label: {
                "comparison": setting.comparison.as_dict(),
                "transformers": _assisted_as_dict(setting.assisted),
                "steps": {name: steps_as_dict(steps) for name, steps in setting.steps.items()},
                "batches": {
                    str(size): {name: _batch_as_dict(figures) for name, figures in methods.items()}
                    for size, methods in setting.batches.items()
                },
            }
            for label, setting in target.settings.items()
        },
    }


def _batch_as_dict(figures: BatchFigures) -> dict[str, Any]:
    return {**figures._asdict(), "divergences": divergences_as_dicts(figures.divergences)}


def steps_as_dict(steps: MethodSteps) -> dict[str, Any]:
    """Plain values, in seconds per step."""
    seconds = {f"{name}_seconds": getattr(steps.times, name) for name in _PARTS_OF_A_STEP}
    return {
        "nodes_without_root": steps.nodes,
        "tokens_in_target_pass": steps.times.width,
        "building_seconds": steps.building,
        **seconds,
    }


def _assisted_as_dict(assisted: Assisted | str) -> dict[str, Any]:
    if isinstance(assisted, str):
        return {"left_out": assisted}
    rows = [
        {**dataclasses.asdict(row), "divergences": divergences_as_dicts(row.divergences)}
        for row in assisted.rows
    ]
    return {"versions": assisted.versions, "rows": rows}


def _prompts_part(result: SuiteResult) -> str:
    counts = {
        name: Counter(prompt.category for prompt in target.prompts)
        for name, target in result.targets.items()
    }
    rows = [
        [
            group.category,
            f"`{group.file}`",
            f"`{json.dumps(group.template)}`",
            ", ".join(group.of) or "all",
            *(str(count[group.category]) for count in counts.values()),
        ]
        for group in result.suite.prompt_sets
    ]
    return (
        f"Of each row of the table the first {result.prompts_per_set} prompts that leave room in "
        "the context for all new tokens; longer ones are passed over, and the last columns say how "
        "many were left. Where a model was trained on such text, a prompt has its shape up to "
        "where the answer begins; see its `recipe.md`. Braces hold fields of a row.\n\n"
    ) + table(
        ["category", "file", "prompt", "rows of category", *(f"prompts, {n}" for n in counts)], rows
    )


def _target_part(name: str, target: TargetResult) -> str:
    sizes = [f"{target.num_params:,} parameters"]
    sizes += [f"{method}: {count:,}" for method, count in target.draft_params.items()]
    parts = [_setting_part(name, label, setting) for label, setting in target.settings.items()]
    if target.left_out:
        left_out = "; ".join(target.left_out)
        parts.append(
            f"Left out, as their heads or sets are not here or for another target: {left_out}."
        )
    return "\n\n".join([f"## {name}", f"{'; '.join(sizes)}.", *parts])


def _setting_part(target: str, label: str, setting: Setting) -> str:
    comparison, assisted = setting.comparison, setting.assisted
    config = comparison.config
    sampling = f"temperature {config.temperature:g}, top-p {config.top_p:g}, seed {comparison.seed}"
    facts = [
        f"{len(comparison.prompt_indices)} prompts, {sampling if config.temperature else 'greedy'},"
        f" up to {config.max_new_tokens} new tokens, ended by the model's own end tokens; "
        f"{comparison.dtype}, runs of each timed: {comparison.repeats}.",
        f"{comparison.machine}.",
        *(f"{row.name}: `{row.settings}`." for row in comparison.rows[1:]),
    ]
    rows: _Rows = [(row, PLAIN) for row in comparison.rows]
    lines = findings(comparison)
    if isinstance(assisted, str):
        facts.append(f"Rows of `transformers` are left out: {assisted}.")
    else:
        rows += [(row, TRANSFORMERS) for row in assisted.rows]
        facts.append(
            f"{TRANSFORMERS} and {ASSISTED}: {assisted.versions}; the same weights, prompt ids and "
            "end tokens; the assistant is the draft model, as `transformers` sets it by default. "
            f"{_HOW_PASSES_ARE_COUNTED}"
        )
        for row in assisted.rows:
            lines += divergence_lines(row.name, row.divergences)
    parts = [f"### {target}, {label}", bullets(*facts), _all_prompts_table(rows, setting)]
    low = comparison.plain.low_repetition
    if low is not None:
        share = f"{low.num_prompts} of {len(comparison.prompt_indices)} prompts"
        parts += [f"Low repetition: {share}.", _low_repetition_table(rows)]
    else:
        parts.append("Low repetition: no prompt.")
    parts += ["Steps, on average:", _steps_table(setting)]
    parts += ["By category, and what it takes:", _detail_table(setting)]
    if setting.batches:
        parts += [
            "Rows decoded together, the same prompts in batches of so many: tokens/s of all rows "
            "(speed-up over plain decoding of the same batches [95 % over batches, where there is "
            "more than one]; tau):",
            _batch_table(setting),
        ]
        for size, methods in setting.batches.items():
            for method, figures in methods.items():
                lines += divergence_lines(f"{method}, {size} rows", figures.divergences)
    return "\n\n".join([*parts, bullets(*lines)])


def _all_prompts_table(rows: _Rows, setting: Setting) -> str:
    categories = list(setting.comparison.plain.by_category)
    headings = [f"{category} tau" for category in categories]
    return table(
        ["method", "outputs", "tau", *headings, *_SPEED_COLUMNS],
        [
            [
                row.name,
                _outputs(row, setting),
                f"{row.overall.mean_acceptance_length:.2f}",
                *(f"{row.by_category[name].mean_acceptance_length:.2f}" for name in categories),
                *_speed_cells(row.overall, baseline),
            ]
            for row, baseline in rows
        ],
    )


def _detail_table(setting: Setting) -> str:
    categories = list(setting.comparison.plain.by_category)
    return table(
        [
            *("method", "accepted", "longest", "whole", "share"),
            *(f"{name} speed-up [95 %]" for name in categories),
            "peak",
        ],
        [
            [
                row.name,
                f"{row.overall.acceptance_rate:.0%}",
                str(row.overall.max_accepted_tokens),
                _whole_drafts(row.overall),
                shares_text(setting.steps[row.name].times),
                *(speedup_text(row.by_category[name]) for name in categories),
                f"{row.peak_bytes / 1e6:.1f} MB",
            ]
            for row in setting.comparison.rows
        ],
    )


def _whole_drafts(figures: Figures) -> str:
    histogram = figures.acceptance_histogram
    return f"{histogram[-1]} of {sum(histogram)}" if len(histogram) > 1 else ""


def _batch_table(setting: Setting) -> str:
    """Tokens per second of all rows, how many times plain decoding's that is, and tau."""
    sizes = list(setting.batches)

    def cell(each: BatchFigures) -> str:
        between = each.speedup_interval
        interval = "" if between is None else f" [{between[0]:.2f}, {between[1]:.2f}]"
        tau = each.mean_acceptance_length
        return f"{each.tokens_per_second:.0f} ({each.speedup:.2f}x{interval}; {tau:.2f})"

    names = list(setting.batches[sizes[0]])
    return table(
        ["method", *(f"{size} row{'s' * (size > 1)}" for size in sizes)],
        [[name, *(cell(setting.batches[size][name]) for size in sizes)] for name in names],
    )


def _low_repetition_table(rows: _Rows) -> str:
    return table(
        ["method", "tau", "longest", "whole", *_SPEED_COLUMNS],
        [
            [
                row.name,
                f"{low.mean_acceptance_length:.2f}",
                str(low.max_accepted_tokens),
                _whole_drafts(low),
                *_speed_cells(low, baseline),
            ]
            for row, baseline in rows
            if (low := row.low_repetition) is not None
        ],
    )


def _steps_table(setting: Setting) -> str:
    def cells(row: ComparisonRow) -> list[str]:
        steps = setting.steps[row.name]
        parts = (steps.times.draft, steps.building, steps.times.target, steps.times.step)
        return [
            row.name,
            str(steps.nodes),
            *("" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in parts),
            f"{row.overall.mean_acceptance_length:.2f}",
            f"{row.overall.tokens_per_second:.0f}",
        ]

    columns = ["budget", "drafting", "building", "verification", "step", "tau", "tokens/s"]
    return table(["method", *columns], [cells(row) for row in setting.comparison.rows])


def _speed_cells(figures: Figures, baseline: str) -> tuple[str, ...]:
    return (
        f"{figures.tokens_per_second:.0f}",
        baseline,
        speedup_text(figures),
        f"{figures.repeated_ngrams:.0%}",
    )


def _outputs(row: ComparisonRow | AssistedRow, setting: Setting) -> str:
    if row is setting.comparison.plain:
        return "reference"
    if setting.comparison.plain.num_identical is None:
        return "not compared"
    return outputs_text(row.divergences, row.overall.num_prompts)
