"""Suites of diffusion language models: calls saved by drafting, variants, times.

Counts are taken on many prompts in one batch, as a row's passes do not depend on its neighbours;
times on the batch that is named.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Advance, Suite, SuiteRun
from benchmarks.page import Page, Section, drawing
from benchmarks.prompts import (
    GSM8K,
    HUMANEVAL,
    MBPP,
    PROMPT_SETS,
    SuitePrompt,
    first_that_fit,
    read_prompt_set,
)
from jaxspec.checkpoint import Model, load
from jaxspec.decoding.denoise import DenoiseConfig, Denoised, measure_costs
from jaxspec.decoding.generate import score
from jaxspec.decoding.metrics import Counts, repeated_ngrams
from jaxspec.diffusion import SelfSpeculation
from jaxspec.measure.compare import compare
from jaxspec.measure.comparison import (
    TIE_GAP,
    Comparison,
    Divergence,
    divergences_as_dicts,
    outputs_text,
    speedup_text,
)
from jaxspec.measure.denoising import DenoiseRunner, divergence_of_canvas
from jaxspec.measure.figures import LOW_REPETITION, STEPWISE, Sample
from jaxspec.measure.machine import this_machine
from jaxspec.measure.tasks import judged, read_task
from jaxspec.measure.timing import decode_in_turns, release_programs
from jaxspec.models import Network
from jaxspec.tuning.plots import check_plots

BLOCKS, BOTH_SIDES, JUDGE = "demo-block-diffusion", "demo-diffusion", "demo"
"""Two diffusion language models, and the causal one that judges how likely their texts are."""
_NEW_TOKENS, _LONG, _SHORT = 128, 256, 64
_MOST_DRAFTS = 5
_DRAFTS = 4
_SAMPLES = 5
_ROOM = 320  # tokens that every prompt leaves of the context
_MATHS = GSM8K.category
_AS_MANY = "as many as pay"
PLOT, DRAFTS_PLOT = "diffusion-throughput.svg", "diffusion-drafts.svg"
"""Files of the drawn speeds by the number of prompts at once, and of figures by N."""
_ROWS = 16
"""Prompts at once of a model that was asked for, which may be large; ours decode all at once."""
_FIRST = 5
"""Prompts of each set whose calls are counted apart, too."""


class Setting(NamedTuple):
    """A model and how it decodes.

    Attributes:
        name: what it is called on the page.
        model: name of the model.
        config: settings of decoding.
        num_prompts: prompts whose calls are counted; `None` for all.
        is_timed: where all are counted, they are timed one by one, too.
    """

    name: str
    model: str
    config: DenoiseConfig
    num_prompts: int | None = None
    is_timed: bool = True

    def having(self, **changes: Any) -> "Setting":
        """Returns the setting with other fields of its config."""
        return self._replace(config=dataclasses.replace(self.config, **changes))


_BLOCK_CAUSAL = Setting("causal over blocks", BLOCKS, DenoiseConfig(_NEW_TOKENS))
_DUAL = Setting(
    "both sides, dual cache, block 8", BOTH_SIDES, DenoiseConfig(_NEW_TOKENS, 8, cache="dual")
)
_DUAL_32 = _DUAL.having(block_length=32)._replace(
    name="both sides, dual cache, block 32", is_timed=False
)
_PREFIX = Setting(
    "both sides, prefix cache, block 8",
    BOTH_SIDES,
    DenoiseConfig(_NEW_TOKENS, 8, cache="prefix"),
    12,
)
_UNCACHED = Setting("both sides, no cache, block 8", BOTH_SIDES, DenoiseConfig(_SHORT, 8), 12)


class Texts(NamedTuple):
    """Texts of one way to decode some prompts.

    Attributes:
        name: name of the way.
        num_drafts: drafts of a pass at most.
        sample: the texts, with the time of the batch.
        stepwise: the same prompts decoded stepwise; `None` if these are they.
        divergences: of the texts that are not stepwise decoding's.
    """

    name: str
    num_drafts: int
    sample: Sample
    stepwise: Sample | None = None
    divergences: tuple[Divergence, ...] = ()

    @property
    def rows(self) -> tuple[Denoised, ...]:
        """The texts."""
        rows: Any = self.sample.rows
        return rows

    @property
    def num_calls(self) -> int:
        """Passes of the network, all texts together."""
        return self.sample.counts.num_steps

    @property
    def bound(self) -> float:
        """Largest share of the calls that the drafts can save."""
        return self.num_drafts / (self.num_drafts + 1)

    @property
    def acceptance(self) -> float:
        """Kept over drafted decisions, along the path."""
        return self.sample.counts.acceptance_rate

    def saved(self, of: Sequence[int] | None = None) -> float:
        """Returns the share of stepwise decoding's passes saved; `of` some prompts, or of all."""
        base: Any = (self.stepwise or self.sample).rows
        places = range(len(self.rows)) if of is None else of
        ours = sum(self.rows[place].num_calls for place in places)
        return 1 - ours / max(1, sum(base[place].num_calls for place in places))

    @property
    def num_same(self) -> int:
        """Texts that equal stepwise decoding's, token by token."""
        pairs = zip(self.sample.texts, (self.stepwise or self.sample).texts, strict=True)
        return sum(one == other for one, other in pairs)

    @property
    def num_wrong(self) -> int:
        """Texts that are not stepwise decoding's, and that no tie explains."""
        return sum(not each.is_tie for each in self.divergences)

    @property
    def agreement(self) -> float:
        """Share of the places of both texts that hold the same token."""
        same = total = 0
        for one, other in zip(self.sample.texts, (self.stepwise or self.sample).texts, strict=True):
            same += sum(a == b for a, b in zip(one, other, strict=False))
            total += max(len(one), len(other))
        return same / max(1, total)

    @property
    def same_texts(self) -> str:
        """Cell of a table: how many texts equal stepwise decoding's."""
        if self.stepwise is None:
            return "reference"
        return outputs_text(self.divergences, len(self.rows))

    def figures(self) -> dict[str, Any]:
        """Returns counts for JSON."""
        return {
            "name": self.name,
            "num_drafts": self.num_drafts,
            "num_prompts": len(self.rows),
            "num_same": self.num_same,
            "divergences": divergences_as_dicts(self.divergences),
            "num_calls": self.num_calls,
            "calls_saved": self.saved(),
            "acceptance": self.acceptance,
        }


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: str | None) -> Model:
    """Returns a model; the last one is kept, as it may be large."""
    return load(name, dtype)


def settings_of(run: SuiteRun, *settings: Setting) -> list[Setting]:
    """Returns the settings to measure; if a model was asked for, those that fit it, with it.

    Raises:
        ValueError: that model is causal.
    """
    asked = run.settings.get("model")
    if asked is None:
        return [*settings]
    diffusion = _loaded(asked, run.settings.get("dtype")).config.diffusion
    if diffusion is None:
        raise ValueError(f"--model: {asked} is causal; give a diffusion language model.")
    kind = BOTH_SIDES if diffusion.block is None else BLOCKS
    return [setting._replace(model=asked) for setting in settings if setting.model == kind]


def _load(run: SuiteRun, setting: Setting) -> tuple[Model, list[SuitePrompt]]:
    """Loads a setting's model, and prompts; both models have one tokenizer and context."""
    model = _loaded(setting.model, run.settings.get("dtype"))
    return model, run.prompts(model, _ROOM)


def _maths(prompts: Sequence[SuitePrompt]) -> list[str]:
    return [prompt.text for prompt in prompts if prompt.category == _MATHS]


def decode(
    setting: Setting, model: Model, prompts: Sequence[Any], drafting: SelfSpeculation, name: str
) -> Texts:
    """Decodes prompts, all in one batch if the model is one of ours."""
    release_programs()
    runner = DenoiseRunner(model, {name: drafting}, setting.config)
    rows = max(1, len(prompts)) if setting.model in (BLOCKS, BOTH_SIDES) else _ROWS
    parts = [runner.decode(name, prompts[i : i + rows], 0) for i in range(0, len(prompts), rows)]
    sample = Sample(
        tuple(row for part in parts for row in part.rows),
        sum(part.seconds for part in parts),
        sum((part.counts for part in parts), Counts()),
    )
    return Texts(name, drafting.num_drafts, sample)


def next_to_stepwise(
    setting: Setting,
    model: Model,
    prompts: Sequence[str],
    drafting: Mapping[str, SelfSpeculation],
    advance: Advance = lambda _: None,
) -> tuple[Texts, list[Texts]]:
    """Decodes stepwise, and with lossless drafting in several ways."""
    advance(f"{setting.name}, {STEPWISE}")
    stepwise = decode(setting, model, prompts, SelfSpeculation(0), STEPWISE)
    found = []
    for name, speculation in drafting.items():
        advance(f"{setting.name}, {name}")
        texts = decode(setting, model, prompts, speculation, name)
        found.append(compared(setting, model, texts, stepwise))
    return stepwise, found


def compared(setting: Setting, model: Model, texts: Texts, stepwise: Texts) -> Texts:
    """Compares texts with stepwise ones; a difference is listed with its gap."""
    release_programs()
    found = [
        divergence_of_canvas(
            model, index, one.prompt_tokens.tolist(), setting.config, other.tokens, one.tokens
        )
        for index, (one, other) in enumerate(zip(texts.rows, stepwise.rows, strict=True))
    ]
    divergences = tuple(each for each in found if each is not None)
    return texts._replace(stepwise=stepwise.sample, divergences=divergences)


def _chains() -> dict[str, SelfSpeculation]:
    return {f"N = {count}": SelfSpeculation(count) for count in range(1, _MOST_DRAFTS + 1)}


def _draft_counts() -> str:
    costs = (1.0,) * (_MOST_DRAFTS + 1)
    *others, most = map(str, SelfSpeculation(_MOST_DRAFTS, costs=costs).draft_counts)
    return f"{', '.join(others)} or {most}"


def _ways(setting: Setting) -> dict[str, SelfSpeculation]:
    """Returns the ways to draft of which calls are counted."""
    if setting.config.max_new_tokens == _LONG:
        return {f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
    looked_up = {f"N = {_DRAFTS}, looked up": SelfSpeculation(_DRAFTS, lookup=True)}
    return _chains() | (looked_up if setting.num_prompts is None else {})


def _measure_calls(run: SuiteRun) -> Page:
    check_plots()
    sections, samples, figures, right = [_columns()], {}, {}, True
    plots: dict[str, Any] = {}
    long_ones = [
        each.having(max_new_tokens=_LONG)._replace(num_prompts=9) for each in (_BLOCK_CAUSAL, _DUAL)
    ]
    settings = settings_of(run, _BLOCK_CAUSAL, _DUAL, _DUAL_32, _PREFIX, _UNCACHED, *long_ones)
    timed = [each.is_timed for each in settings if each.num_prompts is None]
    parts = sum(1 + len(_ways(each)) for each in settings) + sum(timed)
    with run.steps(parts) as advance:
        for setting in settings:
            count = setting.num_prompts
            model, prompts = _load(run, setting)
            whole = count is None
            chosen = prompts if count is None else _spread(prompts, count)
            texts = [prompt.text for prompt in chosen]
            stepwise, found = next_to_stepwise(setting, model, texts, _ways(setting), advance)
            repeated = [_repetition(row) for row in stepwise.rows]
            low = [place for place, share in enumerate(repeated) if share < LOW_REPETITION]
            maths = [place for place, each in enumerate(chosen) if each.category == _MATHS]
            subsets = (maths if whole else None, low)
            title = f"{setting.name}, {setting.config.max_new_tokens} tokens"
            every = (stepwise, *found)
            note = f"Low repetition: {len(low)} of {len(chosen)} prompts. "
            note += f"Repeated 4-grams: {np.mean(repeated):.0%}.{_refresh_bound(setting)}"
            if whole:
                places = found[_MOST_DRAFTS - 1].sample.counts.acceptance_per_position
                note += f" N = {_MOST_DRAFTS}: of the passes that drafted so far, "
                note += f"{', '.join(f'{share:.0%}' for share in places)} kept the drafts up to "
                note += f"place 1, 2, ... N = {_DRAFTS} saves "
                note += f"{found[_DRAFTS - 1].saved(_first_of_each(chosen)):.1%} of the calls of "
                note += f"the first {_FIRST} prompts of each set."
            sections.append(
                Section(
                    f"{title}, {len(chosen)} prompts",
                    columns=[
                        *("decoding", "same texts", "calls", "calls saved", "at most"),
                        *(f"saved, {_MATHS}", "saved, low repetition", "accepted"),
                    ],
                    rows=[_calls_row(each, subsets) for each in every],
                )
            )
            sections.append(Section(text=[note.strip()]))
            times = None
            if whole and setting.is_timed:
                advance(f"{setting.name}, times")
                times, costs = _compare_times(setting, model, texts)
                right &= times.outputs_agree
                sections.append(_section_of_times(title, times, costs))
                if not plots:
                    drawn = partial(plot_drafts, setting.name, found[:_MOST_DRAFTS], times)
                    plots[DRAFTS_PLOT] = drawn
            right &= all(each.num_wrong == 0 for each in found)
            if setting.config.cache not in ("prefix", "dual"):
                pairs = list(zip(texts, stepwise.rows, strict=True))
                samples.setdefault(setting.model, samples_of(setting, _spread(pairs, _SAMPLES)))
            figures[title] = [
                {
                    **each.figures(),
                    "calls_saved_maths": None if subsets[0] is None else each.saved(maths),
                    "calls_saved_low_repetition": each.saved(low) if low else None,
                    "repeated_ngrams": float(np.mean([_repetition(row) for row in each.rows])),
                }
                for each in every
            ]
            if times is not None:
                figures[f"{title}, times"] = times.as_dict()
    machine = Section(text=[f"{this_machine()}."])
    return Page([*sections, *samples.values(), machine], {"settings": figures}, right, plots)


def _first_of_each(prompts: Sequence[SuitePrompt]) -> list[int]:
    """Returns the places of the first prompts of each set."""
    seen: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        seen.setdefault(prompt.category, []).append(place)
    return [place for places in seen.values() for place in places[:_FIRST]]


def plot_drafts(title: str, chains: Sequence[Texts], times: Comparison, path: Path) -> None:
    """Draws calls saved and speed by the number of drafts, and how many drafts are kept by place.

    Args:
        title: of the picture.
        chains: texts with 1, 2, ... drafts.
        times: stepwise decoding and the same chains, one prompt at a time.
        path: file to write.
    """
    counts = [each.num_drafts for each in chains]
    speeds = [row.overall.speedup for row in times.rows[1 : len(chains) + 1]]
    places = chains[-1].sample.counts.acceptance_per_position
    with drawing(path) as axes:
        axes.plot(counts, [each.saved() for each in chains], "o-", label="calls saved")
        axes.plot(counts, [each.bound for each in chains], ":", label="at most, N / (N + 1)")
        axes.plot(counts, speeds, "s-", label="speed over stepwise, one prompt")
        axes.plot(
            range(1, len(places) + 1), places, "^-", label=f"kept up to place N of {counts[-1]}"
        )
        axes.set(title=title, xlabel="N, drafts of a pass", xticks=counts)
        axes.set_ylim(0, max(1.2, *(1.1 * speed for speed in speeds)))


def _columns() -> Section:
    meanings = {
        "same texts": "texts that equal stepwise decoding's token by token, many prompts in one "
        f"batch. A tie leaves it where a decision's gap is below {TIE_GAP:g}.",
        "calls": "passes of the network, all texts together.",
        "at most": "N / (N + 1): the largest share of the calls that N drafts can save.",
        "accepted": "share of drafted decisions that were kept; the decision that each pass adds "
        "without a draft EXCLUDED.",
        "c_b / c_1": "time of a pass with N drafts over that of a stepwise pass, of one prompt. "
        "Calls saved pay where they outweigh it.",
        _AS_MANY: f"{_draft_counts()} drafts by these costs and the acceptance so far; measuring "
        "the costs is not counted.",
        "low repetition": "prompts whose stepwise text repeats less than "
        f"{LOW_REPETITION:.0%} of its 4-grams.",
    }
    return Section(notes=[f"**{name}**: {meaning}" for name, meaning in meanings.items()])


def samples_of(setting: Setting, pairs: Sequence[tuple[str, Denoised]]) -> Section:
    """Returns prompts and a model's texts after them, unchanged."""
    text = [f"Stepwise, exact ({setting.name}), up to a stop id."]
    for prompt, row in pairs:
        # Indented: no line of a text is a heading of the page.
        text += [indent(prompt, "    ", bool), "continues:", indent(str(row.text), "    ", bool)]
    return Section(f"Texts by {setting.model}", text)


_Item = TypeVar("_Item")


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Returns `count` items, evenly from all of them."""
    return list(items[:: max(1, len(items) // count)][:count])


def _repetition(row: Denoised) -> float:
    return repeated_ngrams([row.tokens.tolist()])


def _compare_times(
    setting: Setting, model: Model, prompts: Sequence[str]
) -> tuple[Comparison, tuple[float, ...]]:
    """Times all numbers of drafts, one prompt at a time; returns the costs of passes, too."""
    most = SelfSpeculation(_MOST_DRAFTS)
    seconds = measure_costs(model, _median(prompts), setting.config, most)
    ways = {**_chains(), _AS_MANY: dataclasses.replace(most, costs=seconds)}
    costs = tuple(cost / seconds[0] for cost in seconds)
    return compare(model, prompts, ways, setting.config, progress=False), costs


def _median(prompts: Sequence[str]) -> str:
    return sorted(prompts, key=len)[len(prompts) // 2]


def _section_of_times(title: str, times: Comparison, costs: Sequence[float]) -> Section:
    calls = times.plain.overall.num_verify_steps
    return Section(
        f"{title}, one prompt at a time",
        [f"{len(times.prompt_indices)} prompts, median of {times.repeats} runs, in turns."],
        ["decoding", "same texts", "calls saved", "tokens/s", "over stepwise [95 %]", "c_b / c_1"],
        [
            [
                row.name,
                outputs_text(row.divergences, len(row.samples)),
                f"{1 - row.overall.num_verify_steps / calls:.1%}",
                f"{row.overall.tokens_per_second:.0f}",
                speedup_text(row.overall),
                f"{costs[index]:.2f}" if index < len(costs) else "",
            ]
            for index, row in enumerate(times.rows)
        ],
    )


def _refresh_bound(setting: Setting) -> str:
    config = setting.config
    if config.cache not in ("prefix", "dual"):
        return ""
    assert config.block_length is not None, "set above"
    bound = (
        " Each block begins with a pass over the whole canvas, which no draft saves: of "
        f"{config.block_length} passes of a block {config.block_length - 1} can be drafted for, so "
        f"at most {1 - 1 / config.block_length:.0%} of the calls."
    )
    if config.cache == "dual":
        bound += " The suite `diffusion-times` measures that pass's share of the time."
    return bound


def _calls_row(texts: Texts, subsets: tuple[Sequence[int] | None, Sequence[int]]) -> list[str]:
    maths, low = subsets
    cells = [texts.name, texts.same_texts, str(texts.num_calls), *[""] * 5]
    if texts.stepwise is not None:
        cells[3:] = [
            f"{texts.saved():.1%}",
            f"{texts.bound:.0%}",
            "" if maths is None else f"{texts.saved(maths):.1%}",
            f"{texts.saved(low):.1%}" if low else "no prompt",
            f"{texts.acceptance:.0%}",
        ]
    return cells


_VARIANTS = {
    f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS),
    f"N = {_DRAFTS}, looked up": SelfSpeculation(_DRAFTS, lookup=True),
    "N = 3, two successors each": SelfSpeculation(3, branch=2),
    **{
        f"N = {_DRAFTS}, top {k}, LOSSY": SelfSpeculation(_DRAFTS, lossy_top_k=k)
        for k in (1, 2, 4, 8, 16)
    },
}
_THRESHOLDS = (0.5, 0.7, 0.9, 0.95)


def _measure_variants(run: SuiteRun) -> Page:
    # Texts of another tokenizer have no probability by the judge.
    judge = load(JUDGE) if run.settings.get("model") is None else None
    figures, right, maths = {}, True, []
    lossless = {name: way for name, way in _VARIANTS.items() if way.lossy_top_k is None}
    sections = []
    settings = settings_of(run, _BLOCK_CAUSAL, _DUAL)
    # Each is decoded with 0 to 3 examples too, in two ways in bfloat16, and answers tasks.
    parts = 7 + len(_TASK_FILES) + len(_VARIANTS) + 2 * len(_THRESHOLDS)
    with run.steps(len(settings) * parts) as advance:
        for setting in settings:
            model, prompts = _load(run, setting)
            maths = _maths(prompts)
            stepwise, drafted = next_to_stepwise(setting, model, maths, lossless, advance)
            right &= all(each.num_wrong == 0 for each in drafted)
            found = [stepwise, *drafted]
            for name, speculation in _VARIANTS.items():
                if name not in lossless:
                    advance(f"{setting.name}, {name}")
                    found.append(decode(setting, model, maths, speculation, name))
            for threshold in _THRESHOLDS:
                # A threshold is lossy by itself; drafting for it is not.
                name = f"threshold {threshold}, LOSSY"
                other = setting.having(threshold=threshold)._replace(name=f"{setting.name}, {name}")
                ways = {f"{name}, N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
                alone, drafted = next_to_stepwise(other, model, maths, ways, advance)
                right &= all(each.num_wrong == 0 for each in drafted)
                found += [alone._replace(name=name), *drafted]
            against = {"stepwise": stepwise.sample, "divergences": ()}
            found = [stepwise, *(each._replace(**against) for each in found[1:])]
            rows = [_variant(each, judge) for each in found]
            columns = ["decoding", "calls", "calls saved", "canvases", "same texts", "agreement"]
            lines = [
                [
                    row["name"],
                    str(row["num_calls"]),
                    f"{row['calls_saved']:.1%}",
                    str(row["num_canvases"]),
                    f"{row['num_same']} of {len(maths)}",
                    f"{row['agreement']:.1%}",
                    "" if row["mean_logprob"] is None else f"{row['mean_logprob']:.2f}",
                ]
                for row in rows
            ]
            sections.append(Section(setting.name, columns=[*columns, "log-prob"], rows=lines))
            figures[setting.name] = rows
        about = (
            f"{len(maths)} prompts of {_MATHS}, {_NEW_TOKENS} tokens. **Agreement**: share of "
            "places at which both texts hold the same token."
        )
        if judge is not None:
            about += f" **Log-prob**: mean of a text's tokens by the causal model {JUDGE}."
        shots, figures["shots"], same = _measure_shots(run, advance)
        halves, figures["bfloat16"] = _measure_half(run, advance)
        answers, figures["answers"], alike = _measure_answers(run, advance)
    sections = [Section(text=[about]), *sections, shots, halves, answers]
    right = right and same and alike
    return Page([*sections, Section(text=[f"{this_machine()}."])], figures, right)


def _variant(texts: Texts, judge: Model | None) -> dict[str, Any]:
    mean = None
    if judge is not None:
        mean = float(np.mean(np.concatenate([_logprobs(judge, row) for row in texts.rows])))
    return {
        **texts.figures(),
        "num_canvases": sum(row.num_canvases for row in texts.rows),
        "agreement": texts.agreement,
        "mean_logprob": mean,
    }


def _logprobs(judge: Model, row: Denoised) -> np.ndarray:
    """Returns another model's log-probability of each token of a text after its prompt."""
    tokens = [*row.prompt_tokens.tolist(), *row.tokens.tolist()]
    logits = score(judge, tokens).logits[len(row.prompt_tokens) - 1 : -1]
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
    return np.take_along_axis(logprobs, np.asarray(row.tokens)[:, None], axis=1)[:, 0]


def _measure_shots(run: SuiteRun, advance: Advance) -> tuple[Section, list[dict[str, Any]], bool]:
    """Puts 0 to 3 questions with their answers, the last of the file, before each prompt."""
    solved = GSM8K._replace(template="{question}\n{answer}\n\n")
    examples = [row.text for row in read_prompt_set(solved, run.data_folder)]
    examples = sorted(examples[len(examples) // 2 :], key=len)[:3]
    rows, figures, right = [], [], True
    for setting in settings_of(run, _BLOCK_CAUSAL, _DUAL):
        model, prompts = _load(run, setting)
        for shots in range(4):
            advance(f"{setting.name}, {shots} shots")
            texts = ["".join(examples[:shots]) + prompt for prompt in _maths(prompts)[:8]]
            ways = {f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
            stepwise, (drafted,) = next_to_stepwise(setting, model, texts, ways)
            costs = measure_costs(model, texts[0], setting.config, SelfSpeculation(_DRAFTS))
            right &= drafted.num_wrong == 0
            saved, ratio = drafted.saved(), costs[-1] / costs[0]
            length = int(np.mean([len(row.prompt_tokens) for row in stepwise.rows]))
            cells = [setting.name, str(shots), str(length), drafted.same_texts, f"{saved:.1%}"]
            rows.append([*cells, f"{ratio:.2f}", f"{1 / ((1 - saved) * ratio):.2f}"])
            figures.append({"setting": setting.name, "shots": shots, "calls_saved": saved})
            figures[-1] |= {"cost_ratio": ratio, "prompt_tokens": length}
    columns = ["setting", "examples", "prompt tokens", "same texts", "calls saved", "c_5 / c_1"]
    columns += ["expected speed-up"]
    return Section("Examples before the prompt", columns=columns, rows=rows), figures, right


def _measure_half(run: SuiteRun, advance: Advance) -> tuple[Section, list[dict[str, Any]]]:
    """Measures how often texts differ in bfloat16: a rate, not a claim."""
    rows, figures = [], []
    for setting in settings_of(run, _BLOCK_CAUSAL, _DUAL):
        model, prompts = _load(run, setting)
        maths = _maths(prompts)
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
        half = dataclasses.replace(model, network=Network(weights, model.config))
        for fixed in (False, True):
            advance(f"{setting.name}, bfloat16{', one shape' * fixed}")
            drafting = SelfSpeculation(_DRAFTS, deterministic=fixed)
            without = drafting.stepwise if fixed else SelfSpeculation(0)
            stepwise = decode(setting, half, maths, without, STEPWISE)
            drafted = decode(setting, half, maths, drafting, "drafted")
            drafted = drafted._replace(stepwise=stepwise.sample)
            different = len(drafted.rows) - drafted.num_same
            shape = "all of one shape" if fixed else "as many canvases as needed"
            cells = [setting.name, shape, f"{different} of {len(drafted.rows)}"]
            rows.append([*cells, f"{1 - drafted.agreement:.2%}"])
            figures.append({"setting": setting.name, "deterministic": fixed})
            figures[-1] |= {"different_texts": different, "agreement": drafted.agreement}
    columns = ["setting", "passes", "texts that differ", "tokens that differ"]
    return Section("bfloat16", columns=columns, rows=rows), figures


_TASK_FILES = {"gsm8k": GSM8K.file, "mbpp": MBPP.file, "humaneval": HUMANEVAL.file}
_QUESTIONS = 5
"""Questions of a task for each prompt of a set."""


def _measure_answers(run: SuiteRun, advance: Advance) -> tuple[Section, list[dict[str, Any]], bool]:
    """Counts right answers: drafts without loss must not change one."""
    ways = {
        STEPWISE: SelfSpeculation(0),
        f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS),
        **{name: way for name, way in _VARIANTS.items() if way.lossy_top_k in (1, 4)},
    }
    rows, figures, right = [], [], True
    for setting in settings_of(run, _BLOCK_CAUSAL, _DUAL):
        model, _ = _load(run, setting)
        for task, file in _TASK_FILES.items():
            advance(f"{setting.name}, {task}")
            questions = read_task(task, run.data_folder / file)
            asked = [SuitePrompt(task, each.prompt) for each in questions]
            count = _QUESTIONS * run.prompts_per_set
            fitting = first_that_fit(asked, model, _ROOM, count)
            chosen = {each.text for each in fitting}
            questions = [each for each in questions if each.prompt in chosen][: len(fitting)]
            prompts = [each.prompt for each in questions]
            texts = {name: decode(setting, model, prompts, way, name) for name, way in ways.items()}
            drafted = compared(setting, model, texts[f"N = {_DRAFTS}"], texts[STEPWISE])
            right &= drafted.num_wrong == 0
            written = {name: [row.text or "" for row in each.rows] for name, each in texts.items()}
            verdicts = judged(task, questions, written)
            counts = {name: sum(right_ones) for name, right_ones in verdicts.items()}
            rows.append([setting.name, task, str(len(questions)), *map(str, counts.values())])
            figures.append({"setting": setting.name, "task": task, "right": counts})
    text = f"The first questions of each file that fit, {_NEW_TOKENS} tokens; programs are run."
    columns = ["setting", "task", "questions", *ways]
    return Section("Right answers", [text], columns, rows), figures, right


def _measure_times(run: SuiteRun) -> Page:
    check_plots()
    text = (
        f"The first prompts of {_MATHS}, in batches; seconds are medians, compiling left out, "
        f"measured in turns. **{_AS_MANY.capitalize()}**: drafts {_draft_counts()} "
        "decisions by measured costs and the acceptance so far; measuring the "
        "costs is not counted. **Accepted**: share of drafted decisions that were kept. **Peak**: "
        "XLA's memory analysis of the program, weights included."
    )
    sections, figures, right = [Section(text=[text])], {}, True
    speeds: dict[str, dict[str, dict[int, float]]] = {}
    settings = settings_of(run, _BLOCK_CAUSAL, _DUAL, _UNCACHED.having(max_new_tokens=32))
    with run.steps(sum(len(_batches(each)) for each in settings)) as advance:
        for setting in settings:
            repeats = 5 if setting.name == _BLOCK_CAUSAL.name else 3
            model, prompts = _load(run, setting)
            maths, rows = _maths(prompts), []
            # No more than there are: a batch that is called 16 must have 16 prompts.
            for batch in sorted({min(batch, len(maths)) for batch in _batches(setting)}):
                advance(f"{setting.name}, {batch} prompts")
                release_programs()
                timed = _time_batch(setting, model, maths[:batch], repeats)
                figures[f"{setting.name}, batch {batch}"] = [each.figures() for each in timed]
                for each in timed:
                    drawn = speeds.setdefault(setting.name, {}).setdefault(each.texts.name, {})
                    drawn[batch] = each.tokens_per_second
                right &= all(each.texts.num_wrong == 0 for each in timed)
                rows += [[str(batch), *each.cells()] for each in timed]
            columns = ["prompts", "decoding", "same texts", "s", "tokens/s", "x stepwise"]
            columns += ["calls saved", "at most", "accepted", "c_b / c_1", "peak"]
            title = f"{setting.name}, {setting.config.max_new_tokens} tokens"
            sections.append(Section(title, columns=columns, rows=rows))
            if setting.config.cache == "dual":
                share = _share_of_first_passes(setting, model, maths[0])
                figures[f"{setting.name}, first passes"] = share
                text = (
                    "Passes over the whole canvas, one for each block, take "
                    f"{share:.0%} of stepwise decoding's time of one prompt. No draft saves them: "
                    f"at most {1 / share:.2f} x."
                )
                sections.append(Section(text=[text]))
    sections.append(Section(text=[f"{this_machine()}."]))
    first = settings[0].name
    return Page(sections, figures, right, {PLOT: partial(plot_throughput, first, speeds[first])})


def plot_throughput(title: str, speeds: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draws tokens per second of every way to decode by the number of prompts at once."""
    with drawing(path) as axes:
        for name, found in speeds.items():
            axes.plot([*found], [*found.values()], "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*next(iter(speeds.values()))], map(str, next(iter(speeds.values()))))
        axes.set(title=title, xlabel="prompts at once", ylabel="tokens/s", ylim=(0, None))


def _batches(setting: Setting) -> tuple[int, ...]:
    return (1, 4) if setting.name == _UNCACHED.name else (1, 2, 4, 8, 16)


class Timed(NamedTuple):
    """One way to decode a batch.

    Attributes:
        texts: its texts, with their time.
        costs: times of a pass over that of a stepwise one: of as many drafts as the way has, or
            of all numbers of drafts where as many are taken as pay.
        peak_bytes: bytes that the program holds at once.
    """

    texts: Texts
    costs: tuple[float, ...]
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all texts over the time of the batch."""
        return self.texts.sample.num_tokens / self.texts.sample.seconds

    @property
    def speedup(self) -> float:
        """Stepwise decoding's time over this one's."""
        base = self.texts.stepwise or self.texts.sample
        return base.seconds / self.texts.sample.seconds

    def cells(self) -> list[str]:
        """Returns the cells of a row of the table."""
        texts, drafted = self.texts, ["", "", ""]
        if texts.num_drafts:
            drafted = [f"{texts.saved():.1%}", f"{texts.bound:.0%}", f"{texts.acceptance:.0%}"]
        return [
            texts.name,
            texts.same_texts,
            f"{texts.sample.seconds:.2f}",
            f"{self.tokens_per_second:.0f}",
            f"{self.speedup:.2f}",
            *drafted,
            ", ".join(f"{cost:.2f}" for cost in self.costs),
            f"{self.peak_bytes / 1e6:.1f} MB",
        ]

    def figures(self) -> dict[str, Any]:
        """Returns all figures for JSON."""
        return {
            **self.texts.figures(),
            "seconds": self.texts.sample.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "costs": self.costs,
            "peak_bytes": self.peak_bytes,
        }


def _time_batch(
    setting: Setting, model: Model, prompts: Sequence[str], repeats: int
) -> list[Timed]:
    """Times stepwise, drafted and adaptive decoding of one batch."""
    drafting = SelfSpeculation(_MOST_DRAFTS)
    seconds = measure_costs(model, prompts, setting.config, drafting)
    costs = tuple(cost / seconds[0] for cost in seconds)
    ways = {STEPWISE: SelfSpeculation(0), **_chains()}
    ways[_AS_MANY] = dataclasses.replace(drafting, costs=costs)
    runner = DenoiseRunner(model, ways, setting.config)
    for name in ways:
        runner.decode(name, prompts, 0)
    timed = decode_in_turns(runner, list(ways), {0: list(prompts)}, repeats)
    stepwise = Texts(STEPWISE, 0, timed[STEPWISE][0])
    found = []
    for name, way in ways.items():
        texts = stepwise
        if name != STEPWISE:
            texts = Texts(name, way.num_drafts, timed[name][0])
            texts = compared(setting, model, texts, stepwise)
        own = costs if way.costs else costs[way.num_drafts : way.num_drafts + 1]
        found.append(Timed(texts, own, runner.request(name, list(prompts)).peak_bytes()))
    return found


def _share_of_first_passes(setting: Setting, model: Model, prompt: str) -> float:
    """Returns the share of stepwise time of the passes over the whole canvas, which open blocks."""
    config = setting.config
    assert config.block_length is not None, "set above"
    whole = dataclasses.replace(config, cache="none")
    (opening,) = measure_costs(model, prompt, whole, SelfSpeculation(0))
    (average,) = measure_costs(model, prompt, config, SelfSpeculation(0))
    return opening / (config.block_length * average)


_NEEDS = (BLOCKS, BOTH_SIDES, JUDGE)
_TAKES = {"model": None, "dtype": None}
DIFFUSION_SUITES: Mapping[str, Suite] = {
    "diffusion": Suite(
        title="Diffusion language models: calls saved by drafting",
        about="calls of the network that drafting saves diffusion language models",
        measure=_measure_calls,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        needs=_NEEDS,
        takes=_TAKES,
    ),
    "diffusion-variants": Suite(
        title="Diffusion language models: other drafts, and what is lossy",
        about="other drafts, what is lossy, right answers, examples before the prompt, bfloat16",
        measure=_measure_variants,
        prompt_sets=PROMPT_SETS[:1],
        prompts_per_set=20,
        needs=_NEEDS,
        takes=_TAKES,
    ),
    "diffusion-times": Suite(
        title="Diffusion language models: time and memory",
        about="time and memory of diffusion language models, by rows decoded together",
        measure=_measure_times,
        prompt_sets=PROMPT_SETS[:1],
        prompts_per_set=16,
        needs=_NEEDS,
        takes=_TAKES,
    ),
}
