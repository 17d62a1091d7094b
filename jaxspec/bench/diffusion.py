"""The suites `diffusion`, `diffusion-variants` and `diffusion-times` of `jaxspec bench --suite`.

Counts are taken on many prompts in one batch, as a row's passes do not depend on its neighbours;
times on the batch that is named.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
        different = [
            prompt
            for prompt, one, other in zip(prompts, texts.rows, stepwise.rows, strict=True)
            if one.tokens.tolist() != other.tokens.tolist()
        ]
        if different:
            fixed = dataclasses.replace(speculation, deterministic=True)
            again = decode(setting, model, different, fixed, name)
            theirs = decode(setting, model, different, fixed.stepwise, name)
            texts = texts._replace(still_different=len(different) - again.num_same(theirs))
        found.append(texts)
    return stepwise, found


def _chains(most: int = _MOST_DRAFTS) -> dict[str, SelfSpeculation]:
    return {f"N = {count}": SelfSpeculation(count) for count in range(1, most + 1)}


def _measure_calls(prompts: Prompts, advance: Advance) -> Page:
    texts = [prompt.text for prompt in prompts.all]
    maths = [place for place, prompt in enumerate(prompts.all) if prompt.category == _MATHS]
    parts = [_what_columns_say()]
    figures: dict[str, Any] = {}
    right = True
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
        key = f"{setting.name}, {setting.config.max_new_tokens} tokens"
        figures[key] = [_as_dict(each, stepwise, subsets, speeds) for each in (stepwise, *found)]
    return Page(parts, {"settings": figures}, right)


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """So many of all, evenly."""
    return list(texts[:: max(1, len(texts) // count)][:count])


def _repetition(row: Denoised) -> float:
    return repeated_ngrams([row.tokens.tolist()])


def _speeds(setting: Setting, model: Model, prompt: str) -> dict[int, tuple[float, float]]:
    """Of one prompt by number of drafts: tokens a second, and a pass's time over a stepwise one."""
    costs = measure_costs(model, prompt, setting.config, SelfSpeculation(_MOST_DRAFTS))
    found = {}
    for count in range(_MOST_DRAFTS + 1):
        request = prepare_denoising(model, prompt, setting.config, SelfSpeculation(count), 0)
        seconds = float(np.median(time_in_turns({"": request.denoise}, 3)[""]))
        (row,) = request.result(request.denoise())
        found[count] = len(row.tokens) / seconds, costs[count] / costs[0]
    return found


def _refresh_bound(setting: Setting) -> str:
    config = setting.config
    if config.cache != "dual":
        return ""
    assert config.block_length is not None, "set above"
    return (
        "Each block begins with a pass over the whole canvas, which no draft saves: of "
        f"{config.block_length} passes of a block {config.block_length - 1} can be drafted for, so "
        f"at most {1 - 1 / config.block_length:.0%} of the calls, and what the whole canvas costs "
        "bounds the time."
    )


_Subsets = tuple[Sequence[int] | None, Sequence[int]]


def _calls_table(
    stepwise: Texts, found: Sequence[Texts], subsets: _Subsets, speeds: Mapping[int, Any]
) -> str:
    columns = ["decoding", "same texts", "calls", "calls saved", "at most", f"saved, {_MATHS}"]
    columns += ["saved, low repetition", "accepted", "tokens/s", "c_b / c_1"]
    return table(
        columns, [_calls_row(each, stepwise, subsets, speeds) for each in (stepwise, *found)]
    )


def _calls_row(
    texts: Texts, stepwise: Texts, subsets: _Subsets, speeds: Mapping[int, Any]
) -> list[str]:
    maths, low = subsets
    if texts is stepwise:
        cells = ["reference", f"{texts.num_calls}", "", "", "", "", ""]
    else:
        same = f"{texts.num_same(stepwise)} of {len(texts.rows)}"
        if texts.num_same(stepwise) < len(texts.rows):
            same += f", {texts.still_different} differ in passes of one shape"
        bound = texts.num_drafts / (texts.num_drafts + 1)
        cells = [same, f"{texts.num_calls}", f"{texts.saved(stepwise):.1%}", f"{bound:.0%}"]
        cells += ["" if maths is None else f"{texts.saved(stepwise, maths):.1%}"]
        cells += [f"{texts.saved(stepwise, low):.1%}" if low else "no prompt"]
        cells += [f"{texts.acceptance:.0%}"]
    known = speeds if "looked" not in texts.name else {}
    tokens, ratio = known.get(texts.num_drafts, (None, None))
    cells += ["" if tokens is None else f"{tokens:.0f}", "" if ratio is None else f"{ratio:.2f}"]
    return [texts.name, *cells]


def _as_dict(
    texts: Texts, stepwise: Texts, subsets: _Subsets, speeds: Mapping[int, Any]
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
        "speed": speeds.get(texts.num_drafts) if "looked" not in texts.name else None,
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
    for setting in (_BLOCK_CAUSAL, _DUAL):
        model = load(setting.model)
        advance(f"{setting.name}, stepwise")
        stepwise = decode(setting, model, maths, SelfSpeculation(0), "stepwise")
        found = [stepwise]
        for name, speculation in _VARIANTS.items():
            advance(f"{setting.name}, {name}")
            found.append(decode(setting, model, maths, speculation, name))
        for threshold in _THRESHOLDS:
            advance(f"{setting.name}, threshold {threshold}")
            other = setting.having(threshold=threshold)
            for count in (0, _DRAFTS):
                name = f"threshold {threshold}, LOSSY" + (f", N = {count}" if count else "")
                found.append(decode(other, model, maths, SelfSpeculation(count), name))
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
    return Page(parts, figures)


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
    rows, figures = [], []
    for setting in (_BLOCK_CAUSAL, _DUAL):
        model = load(setting.model)
        for shots in range(4):
            advance(f"{setting.name}, {shots} shots")
            texts = ["".join(examples[:shots]) + prompt for prompt in prompts.maths[:8]]
            stepwise, (drafted,) = beside_stepwise(
                setting, model, texts, {f"N = {_DRAFTS}": SelfSpeculation(_DRAFTS)}
            )
            costs = measure_costs(model, texts[0], setting.config, SelfSpeculation(_DRAFTS))
            saved, ratio = drafted.saved(stepwise), costs[-1] / costs[0]
            length = int(np.mean([len(row.prompt_tokens) for row in stepwise.rows]))
            same = f"{drafted.num_same(stepwise)} of {len(texts)}"
            gain = 1 / ((1 - saved) * ratio)
            cells = [setting.name, str(shots), str(length), same, f"{saved:.1%}", f"{ratio:.2f}"]
            rows.append([*cells, f"{gain:.2f}"])
            figures.append({"setting": setting.name, "shots": shots, "calls_saved": saved})
            figures[-1] |= {"cost_ratio": ratio, "prompt_tokens": length}
    columns = ["setting", "examples", "prompt tokens", "same texts", "calls saved", "c_5 / c_1"]
    return Page([table([*columns, "expected speed-up"], rows)], {"shots": figures})


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
        f"{_DRAFTS} decisions by measured costs and what was kept so far; measuring the costs is "
        "not counted. **Peak**: XLA's memory analysis of the program, weights included."
    ]
    for setting, batches, repeats in (
        (_BLOCK_CAUSAL, (1, 2, 4, 8, 16), 5),
        (_DUAL, (1, 4, 16), 3),
        (_UNCACHED.having(max_new_tokens=32), (1, 4), 3),
    ):
        model, rows = load(setting.model), []
        for batch in batches:
            advance(f"{setting.name}, {batch} prompts")
            release_programs()
            timed = _time_batch(setting, model, prompts.maths[:batch], repeats)
            figures[f"{setting.name}, batch {batch}"] = timed
            rows += [
                [
                    str(batch),
                    each["name"],
                    f"{each['seconds']:.2f}",
                    f"{each['tokens_per_second']:.0f}",
                    f"{each['speedup']:.2f}",
                    f"{each['calls_saved']:.1%}",
                    each["costs"],
                    f"{each['peak_bytes'] / 1e6:.1f} MB",
                ]
                for each in timed
            ]
        columns = ["prompts", "decoding", "s", "tokens/s", "x stepwise", "calls saved"]
        columns += ["c_b / c_1", "peak"]
        title = f"## {setting.name}, {setting.config.max_new_tokens} tokens"
        parts += [title, table(columns, rows)]
    return Page(parts, figures)


def _time_batch(
    setting: Setting, model: Model, prompts: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Stepwise, drafted and adaptive decoding of one batch."""
    drafting = SelfSpeculation(_DRAFTS)
    costs = measure_costs(model, prompts, setting.config, drafting)
    ways = {
        "stepwise": SelfSpeculation(0),
        **{f"N = {n}": SelfSpeculation(n) for n in (1, 2, _DRAFTS) if n <= _DRAFTS},
        "as pays": dataclasses.replace(drafting, costs=costs),
    }
    requests = {
        name: prepare_denoising(model, prompts, setting.config, speculation, 0)
        for name, speculation in ways.items()
    }
    seconds = time_in_turns({name: each.denoise for name, each in requests.items()}, repeats)
    results = {name: each.result(each.denoise()) for name, each in requests.items()}
    stepwise = Texts("stepwise", 0, tuple(results["stepwise"]))
    base = float(np.median(seconds["stepwise"]))
    found = []
    for name, request in requests.items():
        texts = Texts(name, ways[name].num_drafts, tuple(results[name]))
        taken = float(np.median(seconds[name]))
        ratios = ", ".join(f"{cost / costs[0]:.2f}" for cost in costs)
        ratio = f"{costs[ways[name].num_drafts] / costs[0]:.2f}"
        found.append(
            {
                "name": name,
                "seconds": taken,
                "tokens_per_second": sum(len(row.tokens) for row in texts.rows) / taken,
                "speedup": base / taken,
                "calls_saved": texts.saved(stepwise),
                "costs": ratios if ways[name].costs else ratio,
                "peak_bytes": peak_bytes(request),
                "num_same": texts.num_same(stepwise),
            }
        )
    return found


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
        2 * (1 + len(_VARIANTS) + len(_THRESHOLDS)) + 12,
        _measure_variants,
    ),
    "diffusion-times": DiffusionSuite(
        "Diffusion language models: time and memory", _PROMPTS[:1], 16, 10, _measure_times
    ),
}
