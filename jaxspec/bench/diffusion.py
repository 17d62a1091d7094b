"""The suites `diffusion`, `diffusion-variants` and `diffusion-times` of `jaxspec bench --suite`.

Counts are taken on many prompts in one batch, as a row's passes do not depend on its neighbours;
times on the batch that is named.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.figures import LOW_REPETITION
from jaxspec.bench.machine import this_machine
from jaxspec.bench.page import bullets, table
from jaxspec.bench.results import MADE_BY
from jaxspec.bench.shipped import (
    SUITES,
    PromptSet,
    SuitePrompt,
    first_that_fit,
    read_prompt_set,
)
from jaxspec.bench.timing import release_programs, time_in_turns
from jaxspec.checkpoint import Model, load, shipped_models
from jaxspec.denoising import (
    DenoiseConfig,
    Denoised,
    DenoiseRequest,
    denoise,
    measure_costs,
    prepare_denoising,
)
from jaxspec.diffusion import SelfSpeculation
from jaxspec.generation import score
from jaxspec.metrics import repeated_ngrams
from jaxspec.models import Network
from jaxspec.progress import progress_bar

BLOCKS, BOTH_SIDES, JUDGE = "demo-block-diffusion", "demo-diffusion", "demo"
"""Two diffusion language models, and the causal one that says how likely their texts are."""
_NEW_TOKENS, _LONG, _SHORT = 128, 256, 64
_MOST_DRAFTS = 5
_DRAFTS = 4
_SAMPLES = 5
_ROOM = 320  # tokens that every prompt leaves of the context
_MATHS = "GSM8K"


class Setting(NamedTuple):
    """A model and how it decodes."""

    name: str
    model: str
    config: DenoiseConfig

    def having(self, **changes: Any) -> "Setting":
        return self._replace(config=dataclasses.replace(self.config, **changes))


_BLOCK_CAUSAL = Setting("causal over blocks, 8", BLOCKS, DenoiseConfig(_NEW_TOKENS))
_DUAL = Setting(
    "both sides, dual cache, block 8", BOTH_SIDES, DenoiseConfig(_NEW_TOKENS, 8, cache="dual")
)
_DUAL_32 = _DUAL.having(block_length=32)._replace(name="both sides, dual cache, block 32")
_UNCACHED = Setting("both sides, no cache, block 8", BOTH_SIDES, DenoiseConfig(_SHORT, 8))


class Texts(NamedTuple):
    """What one way to decode made of some prompts.

    still_different: of the texts that are not stepwise decoding's, those that are not either where
        both decode with passes of one shape.
    """

    name: str
    num_drafts: int
    rows: Sequence[Denoised]
    still_different: int = 0

    @property
    def num_calls(self) -> int:
        return sum(row.num_calls for row in self.rows)

    @property
    def bound(self) -> float:
        """What so many drafts can save of the calls, at most."""
        return self.num_drafts / (self.num_drafts + 1)

    @property
    def acceptance(self) -> float:
        """Kept over drafted decisions, along the path."""
        counts = np.arange(1 + max(len(row.drafted) - 1 for row in self.rows))
        drafted = sum(int(row.drafted @ counts[: len(row.drafted)]) for row in self.rows)
        kept = sum(int(row.accepted @ counts[: len(row.accepted)]) for row in self.rows)
        return kept / max(1, drafted)

    def saved(self, stepwise: "Texts", of: Sequence[int] | None = None) -> float:
        """Share of stepwise decoding's passes that these did without; `of` some prompts."""
        places = range(len(self.rows)) if of is None else of
        ours = sum(self.rows[place].num_calls for place in places)
        return 1 - ours / max(1, sum(stepwise.rows[place].num_calls for place in places))

    def num_same(self, stepwise: "Texts") -> int:
        pairs = zip(self.rows, stepwise.rows, strict=True)
        return sum(one.tokens.tolist() == other.tokens.tolist() for one, other in pairs)

    def agreement(self, stepwise: "Texts") -> float:
        """Share of the places of both texts that hold the same token."""
        same = total = 0
        for one, other in zip(self.rows, stepwise.rows, strict=True):
            both = min(len(one.tokens), len(other.tokens))
            same += int(np.sum(one.tokens[:both] == other.tokens[:both]))
            total += max(len(one.tokens), len(other.tokens))
        return same / max(1, total)


class Measured(NamedTuple):
    """A measured suite.

    markdown: its part of the page. as_it_should: False if lossless texts differ.
    """

    markdown: str
    figures: dict[str, Any]
    as_it_should: bool


class Prompts(NamedTuple):
    """Of a suite, and where more may be read."""

    all: Sequence[SuitePrompt]
    data_folder: Path

    @property
    def maths(self) -> list[str]:
        return [prompt.text for prompt in self.all if prompt.category == _MATHS]


class Page(NamedTuple):
    """What a suite says: paragraphs of Markdown, and the rest of `Measured`."""

    paragraphs: list[str]
    figures: dict[str, Any]
    as_it_should: bool = True


Advance = Callable[[str], None]


class DiffusionSuite(NamedTuple):
    """What is measured together.

    title: of its part of the page.
    num_parts: how often `measure` says what it does.
    measure: gives what to write below title and command.
    """

    title: str
    prompt_sets: tuple[PromptSet, ...]
    prompts_per_set: int
    num_parts: int
    measure: Callable[[Prompts, Advance], Page]


def measure_diffusion(
    name: str, data_folder: Path, prompts_per_set: int, progress: bool = True
) -> Measured:
    """Measures a suite of `DIFFUSION_SUITES`.

    Args:
        name: of the suite.
        data_folder: where the files of its prompt sets are; they are read in place.
        prompts_per_set: prompts of each set at most.
        progress: show a bar where standard error is a terminal.

    Raises:
        ValueError: a number is below 1, or the data or a model are missing.
    """
    suite = DIFFUSION_SUITES[name]
    if prompts_per_set < 1:
        raise ValueError(f"prompts_per_set must be at least 1, got {prompts_per_set}.")
    missing = [each for each in (BLOCKS, BOTH_SIDES, JUDGE) if each not in shipped_models()]
    if missing:
        raise ValueError(
            f"Suite {name!r} measures models of checkpoints/ of the repository that are not here: "
            f"{', '.join(missing)}."
        )
    rows = {group: read_prompt_set(group, data_folder) for group in suite.prompt_sets}
    model = load(BLOCKS)
    fitting = [
        prompt
        for prompts in rows.values()
        for prompt in first_that_fit(prompts, model, _ROOM, prompts_per_set)
    ]
    with progress_bar(suite.num_parts, progress) as advance:
        page = suite.measure(Prompts(fitting, data_folder), advance)
    command = f"jaxspec bench --suite {name} --prompts-per-set {prompts_per_set}"
    heading = f"# {suite.title}\n\n{MADE_BY}\n    {command}"
    paragraphs = [heading, *page.paragraphs, f"{this_machine()}."]
    figures = {"suite": name, "command": command, **page.figures}
    return Measured("\n\n".join(paragraphs) + "\n", figures, page.as_it_should)


def decode(
    setting: Setting, model: Model, prompts: Sequence[Any], drafting: SelfSpeculation, name: str
) -> Texts:
    """Decodes all prompts in one batch."""
    release_programs()
    rows = denoise(model, prompts, setting.config, drafting)
    return Texts(name, drafting.num_drafts, tuple(rows))


def beside_stepwise(
    setting: Setting,
    model: Model,
    prompts: Sequence[str],
    drafting: Mapping[str, SelfSpeculation],
    advance: Advance = lambda _: None,
) -> tuple[Texts, list[Texts]]:
    """Stepwise decoding, and lossless drafting in several ways.

    Texts that differ are decoded again, both ways, with passes of one shape: where two slots or
    tokens are as close as rounding, kernels of different shapes may decide differently.
    """
    advance(f"{setting.name}, stepwise")
    stepwise = decode(setting, model, prompts, SelfSpeculation(0), "stepwise")
    found = []
    for name, speculation in drafting.items():
        advance(f"{setting.name}, {name}")
        texts = decode(setting, model, prompts, speculation, name)
        found.append(with_one_shape(setting, model, prompts, speculation, texts, stepwise))
    return stepwise, found


def with_one_shape(
    setting: Setting,
    model: Model,
    prompts: Sequence[str],
    speculation: SelfSpeculation,
    texts: Texts,
    stepwise: Texts,
) -> Texts:
    """`texts`, those that are not stepwise decoding's decoded again with passes of one shape."""
    different = [
        prompt
        for prompt, one, other in zip(prompts, texts.rows, stepwise.rows, strict=True)
        if one.tokens.tolist() != other.tokens.tolist()
    ]
    if not different:
        return texts
    fixed = dataclasses.replace(speculation, deterministic=True, costs=None)
    again = decode(setting, model, different, fixed, texts.name)
    theirs = decode(setting, model, different, fixed.stepwise, texts.name)
    return texts._replace(still_different=len(different) - again.num_same(theirs))


def _chains() -> dict[str, SelfSpeculation]:
    return {f"N = {count}": SelfSpeculation(count) for count in range(1, _MOST_DRAFTS + 1)}


def _measure_calls(prompts: Prompts, advance: Advance) -> Page:
    texts = [prompt.text for prompt in prompts.all]
    maths = [place for place, prompt in enumerate(prompts.all) if prompt.category == _MATHS]
    parts = [_what_columns_say()]
    figures: dict[str, Any] = {}
    right, samples = True, {}
    looked_up = {f"N = {_DRAFTS}, looked up": SelfSpeculation(_DRAFTS, lookup=True)}
    for setting, chosen in (
        (_BLOCK_CAUSAL, texts),
        (_DUAL, texts),
        (_DUAL_32, texts),
        (_UNCACHED, _spread(texts, 12)),
        (_BLOCK_CAUSAL.having(max_new_tokens=_LONG), _spread(texts, 9)),
        (_DUAL.having(max_new_tokens=_LONG), _spread(texts, 9)),
    ):
        model = load(setting.model)
        long, whole = setting.config.max_new_tokens == _LONG, chosen is texts
        ways = {f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS)} if long else _chains()
        ways |= looked_up if whole else {}
        stepwise, found = beside_stepwise(setting, model, chosen, ways, advance)
        low = [
            place for place, row in enumerate(stepwise.rows) if _repetition(row) < LOW_REPETITION
        ]
        speeds = {}
        if whole:
            advance(f"{setting.name}, times")
            speeds = _speeds(setting, model, prompts.maths[0])
        subsets = (maths if whole else None, low)
        title = f"## {setting.name}, {setting.config.max_new_tokens} tokens, {len(chosen)} prompts"
        share = f"Low repetition: {len(low)} of {len(chosen)} prompts."
        repeated = np.mean([_repetition(row) for row in stepwise.rows])
        parts += [title, _calls_table(stepwise, found, subsets, speeds)]
        parts.append(f"{share} Repeated 4-grams: {repeated:.0%}. {_refresh_bound(setting)}".strip())
        right &= all(texts_.still_different == 0 for texts_ in found)
        if setting.config.cache != "dual":
            pairs = zip(chosen, stepwise.rows, strict=True)
            samples.setdefault(setting.model, _samples(setting, _spread(list(pairs), _SAMPLES)))
        key = f"{setting.name}, {setting.config.max_new_tokens} tokens"
        figures[key] = [_as_dict(each, stepwise, subsets, speeds) for each in (stepwise, *found)]
    parts += samples.values()
    return Page(parts, {"settings": figures}, right)


def _samples(setting: Setting, pairs: Sequence[tuple[str, Denoised]]) -> str:
    """Prompts and what a model wrote behind them, as they are."""
    parts = [f"## Texts by {setting.model}", f"Stepwise, exact ({setting.name}), up to a stop id."]
    for prompt, row in pairs:
        # Indented: no line of a text is a heading of the page.
        parts += [indent(prompt, "    ", bool), "goes on:", indent(str(row.text), "    ", bool)]
    return "\n\n".join(parts)


_Item = TypeVar("_Item")


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """So many of all, evenly."""
    return list(items[:: max(1, len(items) // count)][:count])


def _repetition(row: Denoised) -> float:
    return repeated_ngrams([row.tokens.tolist()])


def _speeds(setting: Setting, model: Model, prompt: str) -> dict[str, tuple[float, float]]:
    """Of one prompt by way of decoding: tokens a second, and a pass's time over a stepwise one."""
    costs = measure_costs(model, prompt, setting.config, SelfSpeculation(_MOST_DRAFTS))
    found = {}
    for name, speculation in {"stepwise": SelfSpeculation(0), **_chains()}.items():
        request = prepare_denoising(model, prompt, setting.config, speculation, 0)
        seconds = float(np.median(time_in_turns({"": request.denoise}, 3)[""]))
        (row,) = request.result(request.denoise())
        found[name] = len(row.tokens) / seconds, costs[speculation.num_drafts] / costs[0]
    return found


def _refresh_bound(setting: Setting) -> str:
    config = setting.config
    if config.cache != "dual":
        return ""
    assert config.block_length is not None, "set above"
    return (
        "Each block begins with a pass over the whole canvas, which no draft saves: of "
        f"{config.block_length} passes of a block {config.block_length - 1} can be drafted for, so "
        f"at most {1 - 1 / config.block_length:.0%} of the calls. The suite `diffusion-times` says "
        "what that pass takes of the time."
    )


_Subsets = tuple[Sequence[int] | None, Sequence[int]]


def _calls_table(
    stepwise: Texts, found: Sequence[Texts], subsets: _Subsets, speeds: Mapping[str, Any]
) -> str:
    columns = ["decoding", "same texts", "calls", "calls saved", "at most", f"saved, {_MATHS}"]
    columns += ["saved, low repetition", "accepted", "tokens/s", "c_b / c_1"]
    return table(
        columns, [_calls_row(each, stepwise, subsets, speeds) for each in (stepwise, *found)]
    )


def _calls_row(
    texts: Texts, stepwise: Texts, subsets: _Subsets, speeds: Mapping[str, Any]
) -> list[str]:
    maths, low = subsets
    if texts is stepwise:
        cells = ["reference", f"{texts.num_calls}", "", "", "", "", ""]
    else:
        same = _same_texts(texts, stepwise)
        cells = [same, f"{texts.num_calls}", f"{texts.saved(stepwise):.1%}", f"{texts.bound:.0%}"]
        cells += ["" if maths is None else f"{texts.saved(stepwise, maths):.1%}"]
        cells += [f"{texts.saved(stepwise, low):.1%}" if low else "no prompt"]
        cells += [f"{texts.acceptance:.0%}"]
    tokens, ratio = speeds.get(texts.name, (None, None))
    cells += ["" if tokens is None else f"{tokens:.0f}", "" if ratio is None else f"{ratio:.2f}"]
    return [texts.name, *cells]


def _same_texts(texts: Texts, stepwise: Texts) -> str:
    same = f"{texts.num_same(stepwise)} of {len(texts.rows)}"
    if texts.num_same(stepwise) == len(texts.rows):
        return same
    return f"{same}, {texts.still_different} differ in passes of one shape"


def _as_dict(
    texts: Texts, stepwise: Texts, subsets: _Subsets, speeds: Mapping[str, Any]
) -> dict[str, Any]:
    maths, low = subsets
    return {
        "name": texts.name,
        "num_drafts": texts.num_drafts,
        "num_prompts": len(texts.rows),
        "num_same": texts.num_same(stepwise),
        "still_different": texts.still_different,
        "num_calls": texts.num_calls,
        "calls_saved": texts.saved(stepwise),
        "calls_saved_maths": None if maths is None else texts.saved(stepwise, maths),
        "calls_saved_low_repetition": texts.saved(stepwise, low) if low else None,
        "acceptance": texts.acceptance,
        "repeated_ngrams": float(np.mean([_repetition(row) for row in texts.rows])),
        "speed": speeds.get(texts.name),
    }


def _what_columns_say() -> str:
    meanings = {
        "same texts": "that equal stepwise decoding's token by token, all prompts in one batch; "
        "those that do not are decoded again with passes of one shape.",
        "calls": "passes of the network that the texts took, all together.",
        "at most": "N / (N + 1): what N drafts can save of the calls.",
        "accepted": "share of drafted decisions that were kept; the decision that each pass adds "
        "without a draft EXCLUDED.",
        "tokens/s": f"of the first {_MATHS} prompt by itself, compiling left out.",
        "c_b / c_1": "time of a pass with N drafts over that of a stepwise pass, one prompt. Calls "
        "saved pay where they outweigh it.",
        "low repetition": "prompts whose stepwise text repeats less than "
        f"{LOW_REPETITION:.0%} of its 4-grams.",
    }
    return bullets(*(f"**{name}**: {meaning}" for name, meaning in meanings.items()))


def _measure_variants(prompts: Prompts, advance: Advance) -> Page:
    maths, judge = prompts.maths, load(JUDGE)
    parts = [
        f"{len(maths)} prompts of {_MATHS}, {_NEW_TOKENS} tokens. **Agreement**: share of places "
        "at which both texts hold the same token. **Log-prob**: mean of a text's tokens by the "
        f"causal model {JUDGE}."
    ]
    figures: dict[str, Any] = {}
    lossless = {name: way for name, way in _VARIANTS.items() if way.lossy_top_k is None}
    right = True
    for setting in (_BLOCK_CAUSAL, _DUAL):
        model = load(setting.model)
        stepwise, drafted = beside_stepwise(setting, model, maths, lossless, advance)
        right &= all(each.still_different == 0 for each in drafted)
        found = [stepwise, *drafted]
        for name, speculation in _VARIANTS.items():
            if name not in lossless:
                advance(f"{setting.name}, {name}")
                found.append(decode(setting, model, maths, speculation, name))
        for threshold in _THRESHOLDS:
            # Lossy by itself; drafting for it is not.
            name = f"threshold {threshold}, LOSSY"
            other = setting.having(threshold=threshold)._replace(name=f"{setting.name}, {name}")
            ways = {f"{name}, N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
            alone, drafted = beside_stepwise(other, model, maths, ways, advance)
            right &= all(each.still_different == 0 for each in drafted)
            found += [alone._replace(name=name), *drafted]
        rows = [_variant(each, stepwise, judge) for each in found]
        columns = ["decoding", "calls", "calls saved", "canvases", "same texts", "agreement"]
        lines = [
            [
                row["name"],
                str(row["num_calls"]),
                f"{row['calls_saved']:.1%}",
                str(row["num_canvases"]),
                f"{row['num_same']} of {len(maths)}",
                f"{row['agreement']:.1%}",
                f"{row['mean_logprob']:.2f}",
            ]
            for row in rows
        ]
        parts += [f"## {setting.name}", table([*columns, "log-prob"], lines)]
        figures[setting.name] = rows
    shots = _measure_shots(prompts, advance)
    halves = _measure_half(prompts, advance)
    parts += ["## Examples before the prompt", *shots.paragraphs]
    parts += ["## bfloat16", *halves.paragraphs]
    figures |= {**shots.figures, **halves.figures}
    return Page(parts, figures, right and shots.as_it_should)


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


def _variant(texts: Texts, stepwise: Texts, judge: Model) -> dict[str, Any]:
    logprobs = [_logprobs(judge, row) for row in texts.rows]
    return {
        "name": texts.name,
        "num_calls": texts.num_calls,
        "num_canvases": sum(row.num_canvases for row in texts.rows),
        "calls_saved": texts.saved(stepwise),
        "num_same": texts.num_same(stepwise),
        "agreement": texts.agreement(stepwise),
        "mean_logprob": float(np.mean(np.concatenate(logprobs))),
    }


def _logprobs(judge: Model, row: Denoised) -> np.ndarray:
    """Of each token of a text behind its prompt, by another model."""
    tokens = [*row.prompt_tokens.tolist(), *row.tokens.tolist()]
    logits = score(judge, tokens).logits[len(row.prompt_tokens) - 1 : -1]
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
    return np.take_along_axis(logprobs, np.asarray(row.tokens)[:, None], axis=1)[:, 0]


def _measure_shots(prompts: Prompts, advance: Advance) -> Page:
    """0 to 3 questions with their answers before each prompt, the last ones of the same file."""
    solved = SUITES["shipped"].prompt_sets[0]._replace(template="{question}\n{answer}\n\n")
    examples = [row.text for row in read_prompt_set(solved, prompts.data_folder)]
    examples = sorted(examples[len(examples) // 2 :], key=len)[:3]
    rows, figures, right = [], [], True
    for setting in (_BLOCK_CAUSAL, _DUAL):
        model = load(setting.model)
        for shots in range(4):
            advance(f"{setting.name}, {shots} shots")
            texts = ["".join(examples[:shots]) + prompt for prompt in prompts.maths[:8]]
            stepwise, (drafted,) = beside_stepwise(
                setting, model, texts, {f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
            )
            costs = measure_costs(model, texts[0], setting.config, SelfSpeculation(_DRAFTS))
            right &= drafted.still_different == 0
            saved, ratio = drafted.saved(stepwise), costs[-1] / costs[0]
            length = int(np.mean([len(row.prompt_tokens) for row in stepwise.rows]))
            same = _same_texts(drafted, stepwise)
            gain = 1 / ((1 - saved) * ratio)
            cells = [setting.name, str(shots), str(length), same, f"{saved:.1%}", f"{ratio:.2f}"]
            rows.append([*cells, f"{gain:.2f}"])
            figures.append({"setting": setting.name, "shots": shots, "calls_saved": saved})
            figures[-1] |= {"cost_ratio": ratio, "prompt_tokens": length}
    columns = ["setting", "examples", "prompt tokens", "same texts", "calls saved", "c_5 / c_1"]
    return Page([table([*columns, "expected speed-up"], rows)], {"shots": figures}, right)


def _measure_half(prompts: Prompts, advance: Advance) -> Page:
    """How often texts differ where weights and activations are bfloat16: a rate, not a claim."""
    rows, figures = [], []
    for setting in (_BLOCK_CAUSAL, _DUAL):
        model = load(setting.model)
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
        half = dataclasses.replace(model, network=Network(weights, model.config))
        for fixed in (False, True):
            advance(f"{setting.name}, bfloat16{', one shape' * fixed}")
            drafting = SelfSpeculation(_DRAFTS, deterministic=fixed)
            without = drafting.stepwise if fixed else SelfSpeculation(0)
            stepwise = decode(setting, half, prompts.maths, without, "stepwise")
            drafted = decode(setting, half, prompts.maths, drafting, "drafted")
            different = len(drafted.rows) - drafted.num_same(stepwise)
            agreement = drafted.agreement(stepwise)
            shape = "all of one shape" if fixed else "as many canvases as needed"
            cells = [setting.name, shape, f"{different} of {len(drafted.rows)}"]
            rows.append([*cells, f"{1 - agreement:.2%}"])
            figures.append({"setting": setting.name, "deterministic": fixed})
            figures[-1] |= {"different_texts": different, "agreement": agreement}
    columns = ["setting", "passes", "texts that differ", "tokens that differ"]
    return Page([table(columns, rows)], {"bfloat16": figures})


def _measure_times(prompts: Prompts, advance: Advance) -> Page:
    figures: dict[str, Any] = {}
    parts = [
        f"The first prompts of {_MATHS}, so many at a time; seconds are medians, compiling left "
        "out, measured in turns. **As pays**: drafts 0 to "
        f"{_MOST_DRAFTS} decisions by measured costs and what was kept so far; measuring the costs "
        "is not counted. **Accepted**: share of drafted decisions that were kept. **Peak**: XLA's "
        "memory analysis of the program, weights included."
    ]
    right = True
    for setting, batches, repeats in (
        (_BLOCK_CAUSAL, (1, 2, 4, 8, 16), 5),
        (_DUAL, (1, 2, 4, 8, 16), 3),
        (_UNCACHED.having(max_new_tokens=32), (1, 4), 3),
    ):
        model, rows = load(setting.model), []
        # Of as many as there are: what is called a batch of 16 must be one.
        for batch in sorted({min(batch, len(prompts.maths)) for batch in batches}):
            advance(f"{setting.name}, {batch} prompts")
            release_programs()
            timed = _time_batch(setting, model, prompts.maths[:batch], repeats)
            figures[f"{setting.name}, batch {batch}"] = [each.as_dict() for each in timed]
            right &= all(each.texts.still_different == 0 for each in timed)
            rows += [[str(batch), *each.cells()] for each in timed]
        columns = ["prompts", "decoding", "same texts", "s", "tokens/s", "x stepwise"]
        columns += ["calls saved", "at most", "accepted", "c_b / c_1", "peak"]
        title = f"## {setting.name}, {setting.config.max_new_tokens} tokens"
        parts += [title, table(columns, rows)]
        if setting.config.cache == "dual":
            share = _share_of_first_passes(setting, model, prompts.maths[0])
            figures[f"{setting.name}, first passes"] = share
            parts.append(
                f"Passes over the whole canvas, one for each block, take {share:.0%} of stepwise "
                f"decoding's time of one prompt. No draft saves them: at most {1 / share:.2f} x."
            )
    return Page(parts, figures, right)


class Timed(NamedTuple):
    """One way to decode a batch.

    costs: of a pass over a stepwise one; with as many drafts as pay, of all numbers of drafts.
    """

    texts: Texts
    stepwise: Texts
    seconds: float
    stepwise_seconds: float
    costs: tuple[float, ...]
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return sum(len(row.tokens) for row in self.texts.rows) / self.seconds

    @property
    def speedup(self) -> float:
        return self.stepwise_seconds / self.seconds

    def cells(self) -> list[str]:
        """Of a row of the table."""
        texts, saved = self.texts, self.texts.saved(self.stepwise)
        drafted = ["", "", ""]
        if texts.num_drafts:
            drafted = [f"{saved:.1%}", f"{texts.bound:.0%}", f"{texts.acceptance:.0%}"]
        return [
            texts.name,
            _same_texts(texts, self.stepwise) if texts.num_drafts else "reference",
            f"{self.seconds:.2f}",
            f"{self.tokens_per_second:.0f}",
            f"{self.speedup:.2f}",
            *drafted,
            ", ".join(f"{cost:.2f}" for cost in self.costs),
            f"{self.peak_bytes / 1e6:.1f} MB",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.texts.name,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "calls_saved": self.texts.saved(self.stepwise),
            "acceptance": self.texts.acceptance,
            "costs": self.costs,
            "peak_bytes": self.peak_bytes,
            "num_same": self.texts.num_same(self.stepwise),
            "still_different": self.texts.still_different,
        }


def _time_batch(
    setting: Setting, model: Model, prompts: Sequence[str], repeats: int
) -> list[Timed]:
    """Stepwise, drafted and adaptive decoding of one batch."""
    drafting = SelfSpeculation(_MOST_DRAFTS)
    seconds = measure_costs(model, prompts, setting.config, drafting)
    costs = tuple(cost / seconds[0] for cost in seconds)
    ways = {"stepwise": SelfSpeculation(0), **_chains()}
    ways["as pays"] = dataclasses.replace(drafting, costs=costs)
    requests = {
        name: prepare_denoising(model, prompts, setting.config, speculation, 0)
        for name, speculation in ways.items()
    }
    timed = time_in_turns({name: each.denoise for name, each in requests.items()}, repeats)
    texts = {
        name: Texts(name, ways[name].num_drafts, tuple(each.result(each.denoise())))
        for name, each in requests.items()
    }
    stepwise = texts["stepwise"]
    return [
        Timed(
            with_one_shape(setting, model, prompts, way, texts[name], stepwise),
            stepwise,
            float(np.median(timed[name])),
            float(np.median(timed["stepwise"])),
            costs if way.costs else costs[way.num_drafts : way.num_drafts + 1],
            peak_bytes(requests[name]),
        )
        for name, way in ways.items()
    ]


def _share_of_first_passes(setting: Setting, model: Model, prompt: str) -> float:
    """What passes over the whole canvas, which open blocks, take of stepwise decoding's time."""
    config = setting.config
    assert config.block_length is not None, "set above"
    whole = dataclasses.replace(config, cache="none")
    (opening,) = measure_costs(model, prompt, whole, SelfSpeculation(0))
    (average,) = measure_costs(model, prompt, config, SelfSpeculation(0))
    return opening / (config.block_length * average)


def peak_bytes(request: DenoiseRequest) -> int:
    """What the program of a call of `denoise` holds at once, by its compiler."""
    memory: Any = request.compiled().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


_PROMPTS: tuple[PromptSet, ...] = SUITES["shipped"].prompt_sets

DIFFUSION_SUITES: Mapping[str, DiffusionSuite] = {
    "diffusion": DiffusionSuite(
        "Diffusion language models: calls saved by drafting", _PROMPTS, 20, 34, _measure_calls
    ),
    "diffusion-variants": DiffusionSuite(
        "Diffusion language models: other drafts, and what is lossy",
        _PROMPTS[:1],
        20,
        2 * (1 + len(_VARIANTS) + 2 * len(_THRESHOLDS)) + 12,
        _measure_variants,
    ),
    "diffusion-times": DiffusionSuite(
        "Diffusion language models: time and memory", _PROMPTS[:1], 16, 12, _measure_times
    ),
}
