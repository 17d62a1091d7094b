"""The harness: suites as data, methods measured in turns by any runtime, a page for each."""

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.page import Page
from benchmarks.prompts import DATA_FOLDER, PromptSet, SuitePrompt, first_that_fit, read_prompt_set
from jaxspec.checkpoint import Model, shipped_folders, shipped_heads, shipped_models
from jaxspec.drafters import DrafterLike
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import Figures, Sample, figures_of_subsets, subsets_of
from jaxspec.measure.timing import Runner, decode_in_turns
from jaxspec.progress import progress_bar

Advance = Callable[[str], None]
"""Told what is measured next."""
P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A set of measurements that share a page.

    To measure a further method, add an entry to `methods`; a further model, one to `models`.

    Attributes:
        title: heading of the page.
        about: one line for the list of suites.
        measure: measures the suite.
        prompt_sets: its prompts; `()` if it takes none.
        prompts_per_set: prompts of each set, unless another number is asked for.
        repeats: timed runs, unless another number is asked for; `None` if it takes no number.
        needs: shipped models and heads without which nothing can be measured.
        takes: further settings by name, with their defaults.
        models: shipped targets of `methods`; those that are missing are left out.
        methods: makes drafters, by name, for a target; `None` where a method is not for it.
        temperatures: temperatures by name; 0 is greedy. Every method is measured at each.
        assistant: shipped model that `transformers` drafts with, greedily; `None` leaves
            `transformers` out.
        max_new_tokens: tokens of every output at most.
        top_p: nucleus of sampling.
        seed: seed of sampling.
        batches: numbers of rows decoded together, greedily; `()` for none.
        batch_methods: the methods that `batches` are measured with, next to plain decoding.
    """

    title: str
    about: str
    measure: Callable[["SuiteRun"], Page]
    prompt_sets: tuple[PromptSet, ...] = ()
    prompts_per_set: int = 0
    repeats: int | None = None
    needs: tuple[str, ...] = ()
    takes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    models: tuple[str, ...] = ()
    methods: Mapping[str, Callable[[Model], DrafterLike | None]] = dataclasses.field(
        default_factory=dict
    )
    temperatures: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"greedy": 0.0})
    assistant: str | None = None
    max_new_tokens: int = 128
    top_p: float = 1.0
    seed: int = 0
    batches: tuple[int, ...] = ()
    batch_methods: tuple[str, ...] = ()


class SuiteRun(NamedTuple):
    """One run of a suite.

    Attributes:
        suite: the suite.
        data_folder: folder of its prompts; they are read in place.
        prompts_per_set: prompts of each set at most.
        repeats: timed runs of each method.
        settings: further settings by name, as `Suite.takes`.
        progress: show a bar where standard error is a terminal.
    """

    suite: Suite
    data_folder: Path
    prompts_per_set: int
    repeats: int
    settings: Mapping[str, Any]
    progress: bool = True

    def prompts(
        self,
        model: Model,
        room: int,
        prompt_sets: Sequence[PromptSet] | None = None,
        at_most: int | None = None,
    ) -> list[SuitePrompt]:
        """Returns prompts that leave `room` tokens of the model's context.

        Args:
            model: the target.
            room: tokens.
            prompt_sets: their sets; `None` for all of the suite.
            at_most: prompts of each set, where that is fewer than `prompts_per_set`.
        """
        count = min(self.prompts_per_set, at_most or self.prompts_per_set)
        return [
            prompt
            for group in (self.suite.prompt_sets if prompt_sets is None else prompt_sets)
            for prompt in first_that_fit(
                read_prompt_set(group, self.data_folder), model, room, count
            )
        ]

    def steps(self, count: int) -> Any:
        """Returns a bar of `count` steps; enter it for what each step calls."""
        return progress_bar(count, self.progress)


def measure(
    name: str,
    suite: Suite,
    data_folder: Path = DATA_FOLDER,
    prompts_per_set: int | None = None,
    repeats: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> Page:
    """Measures a suite.

    Args:
        name: name of the suite.
        suite: the suite.
        data_folder: folder of the evaluation sets.
        prompts_per_set: prompts of each set at most; `None` for the suite's own number.
        repeats: timed runs of each method; `None` for the suite's own number.
        progress: show a bar where standard error is a terminal.
        settings: further settings that the suite takes; `None` for its own.

    Raises:
        ValueError: the suite does not take a setting, a number is below 1, or data or models are
            missing.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    numbers = {"prompts_per_set": (prompts_per_set, bool(suite.prompt_sets))}
    numbers["repeats"] = (repeats, suite.repeats is not None)
    unknown = given.keys() - suite.takes.keys()
    unknown |= {key for key, (number, taken) in numbers.items() if number is not None and not taken}
    if unknown:
        raise ValueError(
            f"Suite {name!r} takes no {', '.join(sorted(unknown))}; leave that out. It takes "
            f"{', '.join(_taken(suite)) or 'no setting'}."
        )
    for key, (number, _) in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{key} must be at least 1, got {number}.")
    if "model" not in given:
        _check_shipped(name, suite)
    if "prompts" not in given:
        for group in suite.prompt_sets:
            read_prompt_set(group, data_folder)
    run = SuiteRun(
        suite,
        data_folder,
        suite.prompts_per_set if prompts_per_set is None else prompts_per_set,
        (suite.repeats or 1) if repeats is None else repeats,
        {**suite.takes, **given},
        progress,
    )
    words = [f"python -m benchmarks {name}"]
    if suite.prompt_sets and "prompts" not in given:
        words.append(f"--prompts-per-set {run.prompts_per_set}")
    if suite.repeats is not None:
        words.append(f"--repeats {run.repeats}")
    words += [f"--{key.replace('_', '-')} {_word(value)}" for key, value in given.items()]
    page = suite.measure(run)
    today = datetime.date.today().isoformat()
    return page._replace(title=suite.title, command=" ".join(words), date=today)


def _taken(suite: Suite) -> list[str]:
    numbers = ["prompts_per_set"] * bool(suite.prompt_sets)
    return [*numbers, *["repeats"] * (suite.repeats is not None), *suite.takes]


def _word(value: Any) -> str:
    """Returns a setting as it is typed; folders and files by their names alone."""
    return Path(value).name if "/" in str(value) else str(value)


def _check_shipped(name: str, suite: Suite) -> None:
    here = {*shipped_models(), *shipped_heads(), *shipped_heads("dflash"), *shipped_folders()}
    missing = [each for each in suite.needs if each not in here]
    if missing:
        raise ValueError(
            f"Suite {name!r} measures {', '.join(missing)}, which should be in checkpoints/ of the "
            "repository and is not there."
        )
    if suite.models and not here.intersection(suite.models):
        raise ValueError(
            f"None of the models of suite {name!r} is here: {', '.join(suite.models)}. "
            "They are in checkpoints/ of the repository."
        )


class MethodFigures(NamedTuple):
    """Figures of one method, with fields as in `ComparisonRow`.

    Attributes:
        name: name of the method.
        overall: figures over all prompts; speed-ups are over the first method of the table.
        low_repetition: figures over the prompts whose reference repeats little; `None` if there
            are none.
        by_category: figures over the prompts of each category.
        divergences: where greedy outputs leave the reference's.
        parts: seconds of parts of each step, by name, over all prompts.
    """

    name: str
    overall: Figures
    low_repetition: Figures | None
    by_category: Mapping[str, Figures]
    divergences: tuple[Divergence, ...]
    parts: Mapping[str, Sequence[float]] = {}


def measure_methods(
    runner: Runner[P],
    methods: Sequence[str],
    prompts: Mapping[int, P],
    repeats: int = 1,
    *,
    seed: int = 0,
    categories: Sequence[str | None] | None = None,
    warm: Sequence[int] | None = None,
    reference: Sequence[Sample] | None = None,
    compare: Callable[[int, Sample, Sample], Sequence[Divergence]] | None = None,
    advance: Advance = lambda _: None,
) -> dict[str, MethodFigures]:
    """Decodes prompts with every method in turns and pools figures.

    Args:
        runner: decodes.
        methods: names; the first is the baseline of speed-ups.
        prompts: prompts, or batches of them, by index.
        repeats: timed runs of each prompt and method.
        seed: seed of sampling.
        categories: each prompt's category.
        warm: indices of prompts that each method decodes first, untimed; `None` for the first
            prompt alone.
        reference: samples whose outputs are compared with and whose repetition chooses subsets;
            `None` for the baseline's.
        compare: finds divergences of a prompt from its index, the reference and a sample; `None`
            counts other tokens as a divergence without a gap.
        advance: told what is measured next.

    Returns:
        Figures by method, in the order of `methods`.
    """
    for index in [next(iter(prompts))] if warm is None else warm:
        for method in methods:
            advance(f"first run of {method}")
            runner.decode(method, prompts[index], seed + index)
    decoded = decode_in_turns(runner, methods, prompts, repeats, seed, advance)
    samples = {method: list(by_index.values()) for method, by_index in decoded.items()}
    base = samples[methods[0]]
    expected = base if reference is None else reference
    subsets = subsets_of(expected, categories or [None] * len(prompts))
    return {
        method: MethodFigures(
            method,
            **figures_of_subsets(found, base, subsets)._asdict(),
            divergences=tuple(
                divergence
                for index, one, other in zip(prompts, expected, found, strict=True)
                for divergence in (compare or token_divergences)(index, one, other)
            ),
            parts=_joined(found),
        )
        for method, found in samples.items()
    }


def token_divergences(index: int, expected: Sample, sample: Sample) -> list[Divergence]:
    """Returns a divergence, without a gap, for each row whose tokens are not the expected ones."""
    found = []
    for one, other in zip(expected.texts, sample.texts, strict=True):
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
            tokens = [row[at] if at < len(row) else None for row in (one, other)]
            found.append(Divergence(index, at, *tokens, gap=None))
    return found


def _joined(samples: Sequence[Sample]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, seconds in sample.parts.items():
            parts.setdefault(name, []).extend(seconds)
    return parts
