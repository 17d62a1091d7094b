"""Measures a suite's methods over its prompts: one by one, in batches, and in `transformers`.

This is `Suite.measure` of every suite that is a table of drafting methods.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import MethodFigures, SuiteRun, measure_methods
from benchmarks.page import Page, Section
from benchmarks.prompts import SuitePrompt
from benchmarks.runners import ASSISTED, TRANSFORMERS, TransformersRunner, why_not_here
from jaxspec.checkpoint import Model, load, shipped_models
from jaxspec.core.types import Params, PyTree
from jaxspec.decoding.request import GenerationConfig, PromptLike, prepare
from jaxspec.drafters import DrafterLike, Eagle, Eagle2, LoadedDrafter, loaded_drafter
from jaxspec.measure.compare import (
    JaxRunner,
    compare,
    find_divergence,
)
from jaxspec.measure.comparison import (
    TIE_GAP,
    Comparison,
    ComparisonRow,
    Divergence,
    divergence_lines,
    findings,
    outputs_text,
    shares_text,
    speedup_text,
)
from jaxspec.measure.figures import LOW_REPETITION, PLAIN, Figures, Sample
from jaxspec.measure.step import (
    StepTimes,
    begin_and_propose,
    draft_loop,
    repeat_drafting,
    repetitive_prompt,
    time_steps,
)
from jaxspec.measure.timing import release_programs, time_in_turns
from jaxspec.progress import progress_bar

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
    "share": "shares of a step's time that drafting and the target's pass take.",
    "rows": "prompts decoded together: tokens per second of all of them, and in brackets the ratio "
    "to plain decoding of as many rows, and tau.",
    "building": "milliseconds of drafting that choosing a dynamic tree takes: the difference to "
    "drafting over a static tree with the same passes of the head. A static tree is chosen "
    "beforehand.",
    "verification": "milliseconds of a step that the target's pass takes.",
    "step": "milliseconds of a whole step: drafting, verification and the rest, as committing. "
    "Steps are timed in a loop with a capacity of 64 to 256 places, medians, on a text that "
    "repeats eight ids: drafts that may end early have the length that they have there, not that "
    "of real text.",
}
_SPEED_COLUMNS = ("tokens/s", "baseline", "speed-up [95 %]", "repeated")
_HOW_PASSES_ARE_COUNTED = (
    "For tau, a hook counts every call of the target's forward. The first reads the prompt and "
    "scores the first draft at once, so it is a step; ours reads the prompt up to its last token "
    "in a pass that is not counted, and then begins with a step as well."
)
_Row = ComparisonRow | MethodFigures


class MethodSteps(NamedTuple):
    """Times of a method's steps and their parts.

    Attributes:
        nodes: nodes of the largest draft, the root EXCLUDED.
        times: seconds of a step and of its parts.
        building: seconds of a draft that choosing a dynamic tree takes; `None` if it is static.
    """

    nodes: int
    times: StepTimes
    building: float | None


class Assisted(NamedTuple):
    """Both methods of `transformers` on the prompts of one greedy comparison.

    Attributes:
        rows: figures; speed-ups are over `transformers` decoding plainly, divergences from OUR
            plain decoding.
        versions: the versions that decoded.
    """

    rows: tuple[MethodFigures, ...]
    versions: str


class TemperatureFigures(NamedTuple):
    """Measurements at one of a suite's `temperatures`.

    Attributes:
        comparison: our methods.
        assisted: `transformers`, or why it is left out.
        steps: times of a step's parts, of every row of the comparison, by its name.
        batches: figures by rows decoded together and by method.
    """

    comparison: Comparison
    assisted: Assisted | str
    steps: Mapping[str, MethodSteps]
    batches: Mapping[int, Mapping[str, MethodFigures]] = MappingProxyType({})

    @property
    def outputs_agree(self) -> bool:
        """True if every greedy output equals our plain decoding's, in batches too, ties aside."""
        rows = () if isinstance(self.assisted, str) else self.assisted.rows
        together = (row for methods in self.batches.values() for row in methods.values())
        others = (divergence for row in (*rows, *together) for divergence in row.divergences)
        return self.comparison.outputs_agree and all(divergence.is_tie for divergence in others)


class TargetFigures(NamedTuple):
    """Measurements of one target.

    Attributes:
        num_params: weights of the target.
        draft_params: weights of each method that has some, by its name.
        num_prompts: prompts that were decoded, by category.
        settings: measurements by the names of the suite's `temperatures`.
        left_out: methods whose heads or sets are not here, or are for another target.
    """

    num_params: int
    draft_params: Mapping[str, int]
    num_prompts: Mapping[str, int]
    settings: Mapping[str, TemperatureFigures]
    left_out: tuple[str, ...]


def measure_suite_methods(run: SuiteRun) -> Page:
    """Measures every method of a suite on every target that is here; the result is its page."""
    suite, here = run.suite, shipped_models()
    targets = {name: _measure_target(run, name) for name in suite.models if name in here}
    missing = [name for name in suite.models if name not in here]
    sections = [
        _prompts_section(run, targets),
        Section("Columns", notes=[f"**{name}**: {text}" for name, text in _COLUMNS.items()]),
        *(part for name, target in targets.items() for part in _target_sections(name, target)),
    ]
    if missing:
        sections.append(Section(text=[f"Not here, so not measured: {', '.join(missing)}."]))
    settings = [each for target in targets.values() for each in target.settings.values()]
    agree = all(setting.outputs_agree for setting in settings)
    return Page(sections, {"missing": missing, "targets": targets}, agree)


def _measure_target(run: SuiteRun, target: str) -> TargetFigures:
    suite, model = run.suite, load(target)
    prompts = run.prompts(model, suite.max_new_tokens)
    texts = [prompt.text for prompt in prompts]
    made = {method: make(model) for method, make in suite.methods.items()}
    drafters = {name: drafter for name, drafter in made.items() if drafter is not None}
    settings = {}
    for label, temperature in suite.temperatures.items():
        config = GenerationConfig(
            max_new_tokens=suite.max_new_tokens,
            temperature=temperature,
            top_p=suite.top_p if temperature else 1.0,
        )
        comparison = compare(
            model,
            texts,
            drafters,
            config,
            repeats=run.repeats,
            seed=suite.seed,
            categories=[prompt.category for prompt in prompts],
            progress=run.progress,
        )
        if suite.assistant is None:
            assisted = "this suite compares our own methods"
        elif temperature:
            assisted = "they are measured greedily only"
        else:
            assisted = _assisted(run, suite.assistant, model, prompts, comparison)
        times = time_steps(model, drafters, config, run.repeats, run.progress)
        steps = {
            name: _with_building(model, drafters.get(name), each, run.repeats)
            for name, each in times.items()
        }
        together = {}
        if not temperature and suite.batches:
            chosen = {name: drafters[name] for name in suite.batch_methods if name in drafters}
            together = measure_batches(
                model, texts, chosen, config, suite.batches, run.repeats, run.progress
            )
        settings[label] = TemperatureFigures(comparison, assisted, steps, together)
    loaded = {name: each for name, each in drafters.items() if isinstance(each, LoadedDrafter)}
    return TargetFigures(
        num_params=num_params(model.params),
        draft_params={name: num_params(drafter.params) for name, drafter in loaded.items()},
        num_prompts=Counter(prompt.category for prompt in prompts),
        settings=settings,
        left_out=tuple(name for name, drafter in made.items() if drafter is None),
    )


def num_params(params: PyTree) -> int:
    """Returns the number of weights in a pytree; of a head, those that it does not share."""
    own = getattr(params, "params", params)
    return sum(leaf.size for leaf in jax.tree.leaves(own))


def _assisted(
    run: SuiteRun,
    assistant: str,
    model: Model,
    prompts: Sequence[SuitePrompt],
    comparison: Comparison,
) -> Assisted | str:
    """Measures `transformers` on the prompts of a greedy comparison, or says why it cannot."""
    reason = why_not_here()
    if reason is not None:
        return reason
    folders, plain = shipped_models(), comparison.plain.samples
    ids = {
        index: [int(token) for token in sample.rows[0].prompt_tokens]
        for index, sample in zip(comparison.prompt_indices, plain, strict=True)
    }
    runner = TransformersRunner(
        model, folders[model.name], folders[assistant], run.suite.max_new_tokens
    )

    config = comparison.config
    assert isinstance(config, GenerationConfig), "the target is causal"

    def compare_with_ours(index: int, ours: Sample, theirs: Sample) -> Sequence[Divergence]:
        request = prepare(model, ids[index], config, None, run.suite.seed)
        found = find_divergence(model, request, index, ours.rows[0], theirs.rows[0])
        return () if found is None else (found,)

    with progress_bar(2 * len(ids) * (1 + run.repeats), run.progress) as advance:
        rows = measure_methods(
            runner,
            runner.methods,
            ids,
            run.repeats,
            categories=[prompts[index].category for index in ids],
            warm=list(ids),
            reference=plain,
            compare=compare_with_ours,
            advance=advance,
        )
    return Assisted(tuple(rows.values()), runner.versions)


def measure_batches(
    model: Model,
    prompts: Sequence[PromptLike],
    methods: Mapping[str, DrafterLike],
    config: GenerationConfig,
    batches: Sequence[int],
    repeats: int,
    progress: bool = True,
) -> dict[int, dict[str, MethodFigures]]:
    """Decodes all prompts in batches, in turns, and compares with plain decoding's batches.

    A batch takes its prompts from all over the list, so that each has some of every kind. The first
    prompts come twice where the last batch would not be full. Plain decoding is always measured.

    Args:
        model: the target.
        prompts: prompts.
        methods: drafters by name.
        config: greedy settings.
        batches: numbers of rows decoded together.
        repeats: timed runs of each batch.
        progress: show a bar where standard error is a terminal.

    Returns:
        Figures over batches, by number of rows and by method.

    Raises:
        ValueError: a number is below 1, or the rows would be sampled.
    """
    if min((*batches, repeats), default=1) < 1:
        raise ValueError(f"batches and repeats must be at least 1, got {batches} and {repeats}.")
    if config.temperature != 0:
        raise ValueError("config: temperature must be 0: rows are compared with plain decoding's.")
    runner = JaxRunner(model, {PLAIN: None, **methods}, config, carry=False)
    found = {}
    for size in batches:
        release_programs()
        groups = batch_indices(len(prompts), size)
        rows = {number: [prompts[i] for i in group] for number, group in enumerate(groups)}
        shapes = {}  # the first run of a program is slower, so one batch of each shape comes first
        for number, batch in rows.items():
            shape = prepare(model, batch, config, None, 0).prompts.tokens.shape
            shapes.setdefault(shape, number)

        def compare_rows(
            number: int, plain: Sample, other: Sample, groups: Any = groups
        ) -> list[Divergence]:
            pairs = zip(groups[number], plain.rows, other.rows, strict=True)
            every = (
                find_divergence(
                    model, prepare(model, prompts[index], config, None, 0), index, one, two
                )
                for index, one, two in pairs
            )
            return [divergence for divergence in every if divergence is not None]

        parts = len(runner.methods) * (len(shapes) + repeats * len(rows))
        with progress_bar(parts, progress) as advance:
            found[size] = measure_methods(
                runner,
                list(runner.methods),
                rows,
                repeats,
                warm=list(shapes.values()),
                compare=compare_rows,
                advance=advance,
            )
    return found


def batch_indices(num_prompts: int, size: int) -> list[list[int]]:
    """Returns indices of prompts by batch: as many batches as hold all of them."""
    count = -(-num_prompts // size)
    return [[(first + count * row) % num_prompts for row in range(size)] for first in range(count)]


def _prompts_section(run: SuiteRun, targets: Mapping[str, TargetFigures]) -> Section:
    return Section(
        text=[
            f"Of each row of the table the first {run.prompts_per_set} prompts that leave room in "
            "the context for all new tokens. Longer ones are passed over; the last columns give "
            "the number of prompts left. Where a model was trained on such text, a prompt has its "
            "shape up to where the answer begins; see its `recipe.md`. Braces hold fields of a row."
        ],
        columns=[
            *("category", "file", "prompt", "rows of category"),
            *(f"prompts, {name}" for name in targets),
        ],
        rows=[
            [
                group.category,
                f"`{group.file}`",
                f"`{json.dumps(group.template)}`",
                ", ".join(group.of) or "all",
                *(str(target.num_prompts.get(group.category, 0)) for target in targets.values()),
            ]
            for group in run.suite.prompt_sets
        ],
    )


def _target_sections(name: str, target: TargetFigures) -> list[Section]:
    sizes = [f"{target.num_params:,} parameters"]
    sizes += [f"{method}: {count:,}" for method, count in target.draft_params.items()]
    sections = [Section(name, [f"{'; '.join(sizes)}."])]
    for label, setting in target.settings.items():
        sections += _setting_sections(f"{name}, {label}", setting)
    if target.left_out:
        left_out = "; ".join(target.left_out)
        text = f"Left out, as their heads or sets are not here or for another target: {left_out}."
        sections.append(Section(text=[text]))
    return sections


def _setting_sections(title: str, setting: TemperatureFigures) -> list[Section]:
    comparison, assisted = setting.comparison, setting.assisted
    config, categories = comparison.config, list(comparison.plain.by_category)
    assert isinstance(config, GenerationConfig), "the target is causal"
    sampling = f"temperature {config.temperature:g}, top-p {config.top_p:g}, seed {comparison.seed}"
    facts = [
        f"{len(comparison.prompt_indices)} prompts, {sampling if config.temperature else 'greedy'},"
        f" up to {config.max_new_tokens} new tokens, ended by the model's own end tokens; "
        f"{comparison.dtype}, runs of each timed: {comparison.repeats}.",
        f"{comparison.machine}.",
        *(f"{row.name}: `{row.settings}`." for row in comparison.rows[1:]),
    ]
    rows: list[tuple[_Row, str]] = [(row, PLAIN) for row in comparison.rows]
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
    low = [(row.low_repetition, row, base) for row, base in rows if row.low_repetition]
    num_low = low[0][0].num_prompts if low else 0
    sections = [
        Section(title, notes=facts, level=3),
        Section(
            columns=[
                "method",
                "outputs",
                "tau",
                *(f"{c} tau" for c in categories),
                *_SPEED_COLUMNS,
            ],
            rows=[
                [
                    row.name,
                    _outputs(row, setting),
                    f"{row.overall.mean_acceptance_length:.2f}",
                    *(f"{row.by_category[c].mean_acceptance_length:.2f}" for c in categories),
                    *_speed_cells(row.overall, base),
                ]
                for row, base in rows
            ],
        ),
        Section(
            text=[f"Low repetition: {num_low} of {len(comparison.prompt_indices)} prompts."],
            columns=["method", "tau", "longest", "whole", *_SPEED_COLUMNS] if low else [],
            rows=[
                [
                    row.name,
                    f"{figures.mean_acceptance_length:.2f}",
                    str(figures.max_accepted_tokens),
                    _whole_drafts(figures),
                    *_speed_cells(figures, base),
                ]
                for figures, row, base in low
            ],
        ),
        Section(
            text=["Steps, on average:"],
            columns=[
                *("method", "budget", "drafting", "building", "verification", "step"),
                *("tau", "tokens/s"),
            ],
            rows=[_step_cells(row, setting.steps[row.name]) for row in comparison.rows],
        ),
        Section(
            text=["By category, with memory and shares of a step:"],
            columns=[
                *("method", "accepted", "longest", "whole", "share"),
                *(f"{name} speed-up [95 %]" for name in categories),
                "peak",
            ],
            rows=[
                [
                    row.name,
                    f"{row.overall.acceptance_rate:.0%}",
                    str(row.overall.max_accepted_tokens),
                    _whole_drafts(row.overall),
                    shares_text(setting.steps[row.name].times),
                    *(speedup_text(row.by_category[name]) for name in categories),
                    f"{row.peak_bytes / 1e6:.1f} MB",
                ]
                for row in comparison.rows
            ],
        ),
    ]
    if setting.batches:
        sections.append(_batch_section(setting.batches))
        for size, methods in setting.batches.items():
            for method, row in methods.items():
                lines += divergence_lines(f"{method}, {size} rows", row.divergences)
    return [*sections, Section(notes=lines)]


def _batch_section(batches: Mapping[int, Mapping[str, MethodFigures]]) -> Section:
    def cell(figures: Figures) -> str:
        speed, tau = figures.tokens_per_second, figures.mean_acceptance_length
        return f"{speed:.0f} ({speedup_text(figures).replace(' ', 'x ', 1)}; {tau:.2f})"

    return Section(
        text=[
            "Rows decoded together, the same prompts in batches: tokens/s of all rows (speed-up "
            "over plain decoding of the same batches [95 % over batches, where there is more than "
            "one]; tau):"
        ],
        columns=["method", *(f"{size} row{'s' * (size > 1)}" for size in batches)],
        rows=[
            [name, *(cell(batches[size][name].overall) for size in batches)]
            for name in next(iter(batches.values()))
        ],
    )


def _with_building(
    model: Model, method: DrafterLike | None, times: StepTimes, repeats: int
) -> MethodSteps:
    loaded = loaded_drafter(method)
    drafter, building = loaded.drafter, None
    if isinstance(drafter, Eagle2):
        params = Params(model.network, loaded.params)
        building = measure_tree_building(params, drafter, repeats=max(5, repeats))
    return MethodSteps(drafter.tree_shape[0] - 1, times, building)


def measure_tree_building(
    params: Params, drafter: Eagle2, num_steps: int = 24, repeats: int = 15
) -> float:
    """Returns the seconds per step that a drafter takes to choose its tree, at any temperature.

    Its drafts and greedy drafts over a static tree with the same passes of the head are run in
    turns; the result is the difference of their times.
    """
    prompts = repetitive_prompt(params.target.vocab_size)
    drafts = {}
    for name, method in (("dynamic", drafter), ("static", same_passes(drafter))):
        states, _ = begin_and_propose(params, prompts, drafter=method)
        drafting = repeat_drafting(states, num_steps)
        drafts[name] = partial(draft_loop, params, states.draft, drafting, drafter=method)
    times = time_in_turns(drafts, repeats)
    return float(np.median(times["dynamic"] - times["static"])) / num_steps


def same_passes(drafter: Eagle2) -> Eagle:
    """Returns a static tree whose draft passes have as many nodes as those of a dynamic one.

    Its paths are chains below the likeliest tokens.

    Example:
        >>> same_passes(Eagle2(num_nodes=4, depth=1, beam=2)).paths
        ((0,), (1,), (0, 0), (1, 0))
    """
    levels = range(drafter.depth + 1)
    paths = [(rank, *[0] * level) for level in levels for rank in range(drafter.beam)]
    return Eagle(tuple(paths), drafter.taps, drafter.chunk)


def _step_cells(row: ComparisonRow, steps: MethodSteps) -> list[str]:
    parts = (steps.times.draft, steps.building, steps.times.target, steps.times.step)
    return [
        row.name,
        str(steps.nodes),
        *("" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in parts),
        f"{row.overall.mean_acceptance_length:.2f}",
        f"{row.overall.tokens_per_second:.0f}",
    ]


def _speed_cells(figures: Figures, baseline: str) -> tuple[str, ...]:
    speed, repeated = figures.tokens_per_second, figures.repeated_ngrams
    return f"{speed:.0f}", baseline, speedup_text(figures), f"{repeated:.0%}"


def _whole_drafts(figures: Figures) -> str:
    histogram = figures.acceptance_histogram
    return f"{histogram[-1]} of {sum(histogram)}" if len(histogram) > 1 else ""


def _outputs(row: _Row, setting: TemperatureFigures) -> str:
    if row is setting.comparison.plain:
        return "reference"
    if setting.comparison.plain.num_identical is None:
        return "not compared"
    return outputs_text(row.divergences, row.overall.num_prompts)
