"""The suites `forms` and `forms-diffusion`: text of which every token can be foreseen.

`forms` drafts up to 32 tokens for a causal model, `forms-diffusion` lets a diffusion model draft
for itself. They train their models, where their folder lacks them: `forms` for two hours on two
cores. Each training is a command of `jaxspec`, which continues if it was interrupted.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks.forms import Form, forms
from benchmarks.harness import Advance, MethodFigures, Suite, SuiteRun
from benchmarks.page import Page, Section, drawing
from benchmarks.prompts import DATA_FOLDER, PROMPT_SETS
from benchmarks.runners import FileMethod
from benchmarks.suites.litert import (
    ABOUT_COLUMNS,
    ABOUT_QUANTIZED,
    decode_files,
    methods_section,
    open_file,
)
from jaxspec.checkpoint import Model, load, load_dflash, load_eagle, shipped_folders
from jaxspec.checkpoint.files import replacing_files
from jaxspec.commands.methods import DEER, DRAFT, EAGLE3_HEAD, EAGLE_HEAD, MADE_FOR
from jaxspec.core.tree import EAGLE_PATHS, chain_paths
from jaxspec.core.types import PyTree
from jaxspec.decoding.denoise import DenoiseConfig, measure_costs
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Metrics
from jaxspec.decoding.request import GenerationConfig, encode_prompt
from jaxspec.decoding.result import GenerationResult
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import (
    Deer,
    DFlash,
    DrafterLike,
    DraftModel,
    Eagle,
    PromptLookup,
    SuffixLookup,
    TokenRecycling,
)
from jaxspec.measure.compare import compare, divergence_of
from jaxspec.measure.comparison import (
    Comparison,
    ComparisonRow,
    divergence_lines,
    outputs_text,
    speedup_text,
)
from jaxspec.measure.figures import PLAIN, Figures, speedup_interval
from jaxspec.measure.timing import release_programs
from jaxspec.mobile.contents import ExportConfig
from jaxspec.models import DFlashHead, Eagle3Head, EagleHead, Network
from jaxspec.tuning.plots import check_plots

_LEARNED = {"train": 16000, "align": 4000}
"""Forms that the target learns, and those that its drafters' texts begin with."""
_NUM_TESTED = 64
_NEW_TOKENS = 160
_LONGEST = 32
_HIDDEN = 48
"""Tokens of the longest draft, and most that are hidden in training: a draft of 32 shows up to 39
masks, as it may begin anywhere in a block of 8."""
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
_FEWEST_DRAFTS = 30
"""Drafts that come to a place, at least, for its share of accepted ones to be drawn."""
_START = "demo-block-diffusion"
_TARGET, _HEAD, _HEAD3, _FILLING = "target", "eagle", "eagle3", "diffusion"
_DRAFT, _BLOCKS, _MARKOV = "draft", "dflash", "dflash-markov"
_LAST_STAGE, _WITH_HEAD = "stage II", "stage II, Markov head"
_STAGES = {
    "start": None,
    "stage I, scattered": "stage-1-scattered",
    "stage I, suffix": "stage-1-suffix",
    _LAST_STAGE: "stage-2",
    "stage II, hybrid loss": "stage-2-hybrid",
    _WITH_HEAD: "stage-2-markov",
}
"""Folders of drafters; `None`: the shipped model that alignment starts from."""

_RANK = 64
"""The rank of Markov heads."""
_COMMON = (
    "--template forms={{prompt}}{{answer}} --sequence-length 256 --dtype bfloat16 --warmup 40 "
    "--decay-fraction 0.5"
)
_ALIGN = (
    "train deer --target {folder}/target --data forms={folder}/align.jsonl --own-text 2000 "
    f"--texts {{folder}}/texts --rows 8 --block 16 {_COMMON}"
)
_STAGE_2 = (
    f" --start-from {{folder}}/stage-1-suffix --stage 2 --longest {_HIDDEN} --cuts all --steps 1200"
)
_LEARN = (
    "--target {folder}/target --data forms={folder}/align.jsonl --own-text 2000 --rows 8 "
    f"--steps 600 {_COMMON}"
)
_TRAININGS = {
    _TARGET: "train lm --data forms={folder}/train.jsonl --tokenizer {tokenizer} --layers 8 "
    "--embed-dim 320 --heads 5 --kv-heads 1 --head-dim 64 --mlp-dim 640 --rows 10 --steps 600 "
    f"--learning-rate 0.02 --adam-learning-rate 0.004 {_COMMON}",
    "stage-1-scattered": _ALIGN + " --start-from {start} --stage 1 --steps 300",
    "stage-1-suffix": _ALIGN
    + f" --start-from {{start}} --stage 1 --hide suffix --longest {_HIDDEN} --steps 300",
    "stage-2": _ALIGN + _STAGE_2,
    "stage-2-hybrid": f"{_ALIGN}{_STAGE_2} --loss hybrid",
    "stage-2-markov": f"{_ALIGN}{_STAGE_2} --markov {_RANK}",
    _HEAD: f"train eagle {_LEARN}",
    _HEAD3: f"train eagle --version 3 {_LEARN}",
    _BLOCKS: f"train dflash --block {_LONGEST + 1} --texts {{folder}}/texts {_LEARN}",
    _MARKOV: f"train dflash --start-from {{folder}}/{_BLOCKS} --markov {_RANK} "
    f"--texts {{folder}}/texts {_LEARN}",
    _DRAFT: "train lm --teacher {folder}/target --data forms={folder}/align.jsonl --own-text 2000 "
    "--own-text-weight 2 --soft-share 1 --layers 4 --embed-dim 192 --heads 3 --kv-heads 1 "
    f"--head-dim 64 --mlp-dim 512 --rows 8 --steps 600 {_COMMON}",
    _FILLING: "train masked --data forms={folder}/train.jsonl --start-from {start} --block 4 "
    f"--rows 8 --steps 900 {_COMMON}",
}
"""Commands by the folder that each makes, in their order."""
_COMMAND_FILE = "command.txt"
_CHAINS = (8, 16, 24, 32)
_TIMES_AS_DEEP = (1, 2, 4, 8)
"""Factors of the number of layers; see `deepened`."""
_FILLS_AS_DEEP = (4, 16, 32)
_PICTURED = 16
"""The same for the diffusion model, and the one whose speed and right records are drawn."""
_NUM_TIMED = 16
"""Forms that deeper models are timed on."""
_FILE_WEIGHTS = ("float32", "int8")
_FILE_CHAINS = (8, 16)
_NUM_IN_FILES = 20
_FILE_TOKENS = 96
_CAPACITY = 256
"""Weights, chains, forms, new tokens (fewer than any record has) and places of files for LiteRT."""
_DRAFTS = (1, 2, 3, 4)
_LOSSY = (1, 2, 4)
"""Drafts of the diffusion model, and k of its relaxed verification."""
PLOT, DEPTHS_PLOT = "forms-lossy.svg", "forms-depths.svg"


class Stage(NamedTuple):
    """A drafter on the way to its target.

    Attributes:
        name: the stage.
        metrics: of decoding the tested forms.
        interval: 95 % bootstrap interval of tau over forms; `None` for one form.
    """

    name: str
    metrics: Metrics
    interval: tuple[float, float] | None


def trainings(folder: Path) -> dict[str, list[str]]:
    """Returns the words of each training's command, by the folder that it makes."""
    places = shipped_folders()
    names = {"folder": folder, "tokenizer": places[MADE_FOR], "start": places[_START]}
    return {
        name: [*(word.format(**names) for word in command.split()), "--out", f"{folder / name}"]
        for name, command in _TRAININGS.items()
    }


def shown_trainings() -> dict[str, str]:
    """Returns the commands for people, with FORMS as the suites' folder."""
    folder, places = Path("FORMS"), shipped_folders()
    commands = {name: " ".join(words) for name, words in trainings(folder).items()}
    for path in (places[MADE_FOR], places[_START]):
        commands = {name: each.replace(str(path), path.name) for name, each in commands.items()}
    return {name: f"jaxspec {command}" for name, command in commands.items()}


def train_missing(folder: Path, names: Sequence[str], advance: Advance) -> None:
    """Writes the forms, and trains each of the named models that is not in the folder yet.

    Raises:
        ValueError: a model in the folder was made by another command, or a training failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_files(folder) as staging:
        for split, number in _LEARNED.items():
            rows = [json.dumps(form._asdict()) for form in forms(split, number)]
            (staging / f"{split}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    shown, start = shown_trainings(), load(_START).digest
    for name, words in trainings(folder).items():
        if name not in names:
            continue
        made_by = folder / name / _COMMAND_FILE
        # The shipped model may be another one than it was.
        origin = f"\n{_START}: {start}" if "{start}" in _TRAININGS[name] else ""
        if made_by.exists():
            if made_by.read_text() != shown[name] + origin:
                raise ValueError(
                    f"folder: {folder / name} was made by another command than the suite's, or "
                    f"from another {_START}: remove it and the folders behind it, or name another "
                    "folder."
                )
            continue
        advance(f"training {name}")
        states = ["--state", f"{folder / 'states' / name}"]
        ended = subprocess.run([sys.executable, "-m", "jaxspec", *words, *states], check=False)
        if ended.returncode:
            raise ValueError(f"The training of {folder / name} failed; its message is above.")
        made_by.write_text(shown[name] + origin)


def deepened(model: Model, times: int) -> Model:
    """Returns a model with `times` as many layers, whose new layers add nothing.

    Their last products have weights of zero, so the texts are the same ones, to the last bit. Their
    other weights are copies: a pass computes and reads what it does in a model of that size.
    """
    layers = model.config.num_layers
    params = dict(model.network.params)
    for index in range(layers, layers * times):
        layer = jax.tree.map(jnp.copy, params[f"layer_{index % layers}"])
        attention = {**layer["attention"], "out": _zeros(layer["attention"]["out"])}
        mlp = {**layer["mlp"], "down": _zeros(layer["mlp"]["down"])}
        params[f"layer_{index}"] = {**layer, "attention": attention, "mlp": mlp}
    config = model.config
    config = config.replace(num_layers=layers * times, layer_types=config.layer_types * times)
    return dataclasses.replace(model, network=Network(params, config))


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)


def decode_greedily(
    target: Model,
    drafters: Mapping[str, DrafterLike],
    prompts: Sequence[str],
    max_new_tokens: int,
) -> dict[str, GenerationResult]:
    """Decodes prompts with every drafter, all prompts together.

    Raises:
        ValueError: a text differs from plain decoding's by more than a tie.
    """
    found = {}
    for name, drafter in {PLAIN: None, **drafters}.items():
        release_programs()
        found[name] = generate(target, list(prompts), drafter, max_new_tokens=max_new_tokens)
    plain = found.pop(PLAIN)
    for name, result in found.items():
        for index, (one, other) in enumerate(zip(plain, result, strict=True)):
            divergence = divergence_of(target, index, one.prompt_tokens, one.tokens, other.tokens)
            if divergence is not None and not divergence.is_tie:
                (line,) = divergence_lines(name, [divergence])
                raise ValueError(f"A drafter changed the text. {line}")
    return found


def as_stage(name: str, result: GenerationResult) -> Stage:
    """Returns a stage's figures, with an interval of tau."""
    counts = np.asarray([(row.metrics.num_steps, row.metrics.num_tokens) for row in result])
    # Plain decoding takes a pass for each token, so its passes over the stage's are tau.
    plain = counts[:, [1, 1]]
    return Stage(name, result.metrics, speedup_interval(plain, counts))


def measure_filling(
    model: Model,
    tested: Sequence[Form],
    repeats: int,
    progress: bool,
    lossy: Sequence[int] = (),
) -> Comparison:
    """Compares self-speculative with stepwise decoding of a diffusion model.

    Args:
        model: it.
        tested: forms to decode.
        repeats: of each text.
        progress: show a bar.
        lossy: k of relaxed verification, to compare as well.
    """
    prompts = [form.prompt for form in tested]
    config = DenoiseConfig(max_new_tokens=_NEW_TOKENS)
    most = SelfSpeculation(max(_DRAFTS))
    costs = measure_costs(model, prompts[0], config, most)
    ways = {f"N = {count}": SelfSpeculation(count) for count in _DRAFTS}
    ways["N = 4, as many as pay"] = dataclasses.replace(most, costs=costs)
    for k in lossy:
        ways[f"N = 4, top {k}, LOSSY"] = dataclasses.replace(most, lossy_top_k=k)
    return compare(model, prompts, ways, config, repeats=repeats, progress=progress)


def fill_deeper(filling: Model, tested: Sequence[Form], progress: bool) -> dict[int, Comparison]:
    """Compares ways to decode with a diffusion model of several depths, by their factors.

    The one that is drawn decodes all forms, and with lossy drafts, too.
    """
    found = {}
    for times in _FILLS_AS_DEEP:
        model = deepened(filling, times)
        drawn = times == _PICTURED
        chosen, lossy = (tested, _LOSSY) if drawn else (tested[:_NUM_TIMED], ())
        found[times] = measure_filling(model, chosen, 1, progress, lossy)
    return found


def count_right(model: Model, row: ComparisonRow, tested: Sequence[Form]) -> int:
    """Returns how many texts of a method are the records of their forms."""
    assert model.tokenizer is not None  # trained with one
    texts = [model.tokenizer.decode(sample.texts[0]) for sample in row.samples]
    return sum(text == form.answer for text, form in zip(texts, tested, strict=True))


class _Made(NamedTuple):
    """The models that the suite trained."""

    target: Model
    head: EagleHead | Eagle3Head
    head3: EagleHead | Eagle3Head
    blocks: DFlashHead
    markov: DFlashHead
    draft: Model
    stages: Mapping[str, Model]

    @classmethod
    def read(cls, folder: Path) -> "_Made":
        """Reads them from the suite's folder."""
        target = load(folder / _TARGET)
        stages = {
            name: load(_START if place is None else folder / place)
            for name, place in _STAGES.items()
        }
        head, head3 = (load_eagle(folder / name, target) for name in (_HEAD, _HEAD3))
        blocks, markov = (load_dflash(folder / name, target) for name in (_BLOCKS, _MARKOV))
        return cls(target, head, head3, blocks, markov, load(folder / _DRAFT), stages)

    @property
    def aligned(self) -> Model:
        """The drafter of the last stage."""
        return self.stages[_LAST_STAGE]

    @property
    def with_head(self) -> Model:
        """The drafter of the last stage that has a Markov head."""
        return self.stages[_WITH_HEAD]

    def methods(self) -> dict[str, DrafterLike]:
        """Returns the drafters that are compared on the forms."""
        eagle = {
            f"EAGLE-1, chain of {n}": Eagle.of(self.head, chain_paths(n)) for n in (4, *_CHAINS)
        }
        deer = {f"DEER, chain of {n}": Deer.of(self.aligned, block=n) for n in (4, *_CHAINS)}
        passes = {
            f"DEER, chain of 16, {n} passes": Deer.of(self.aligned, block=16, steps=n)
            for n in (2, 3)
        }
        return {
            "prompt lookup": PromptLookup(),
            "suffix lookup": SuffixLookup(),
            "token recycling": TokenRecycling(),
            "draft model, chain of 4": DraftModel.of(self.draft, 4),
            "draft model, chain of 16": DraftModel.of(self.draft, 16),
            **eagle,
            "EAGLE-1, 25 nodes": Eagle.of(self.head, EAGLE_PATHS),
            "EAGLE-3, chain of 4": Eagle.of(self.head3, chain_paths(4)),
            "EAGLE-3, chain of 16": Eagle.of(self.head3, chain_paths(16)),
            **{f"DFlash, chain of {n}": DFlash.of(self.blocks, block=n) for n in (16, _LONGEST)},
            **{
                f"DFlash with a Markov head, chain of {n}": DFlash.of(self.markov, block=n)
                for n in (16, _LONGEST)
            },
            **deer,
            **passes,
            "DEER, tree of 16": Deer.of(self.aligned, block=16, num_nodes=16),
            **{
                f"DEER with a Markov head, chain of {n}": Deer.of(self.with_head, block=n)
                for n in (4, 16, _LONGEST)
            },
        }

    def longest(self) -> dict[str, DrafterLike]:
        """Returns the drafters whose acceptance is shown by depth."""
        more: dict[str, DrafterLike] = {
            "DFlash with a Markov head": DFlash.of(self.markov, block=_LONGEST),
            "DEER with a Markov head": Deer.of(self.with_head, block=_LONGEST),
        }
        return more | _chains_of(self, _LONGEST)

    def measure_deeper(self, prompts: Sequence[str], progress: bool) -> dict[int, Comparison]:
        """Compares methods on targets of several depths, by their factors."""
        config, found = GenerationConfig(max_new_tokens=_NEW_TOKENS), {}
        # A target with other layers is another one by its digest.
        drafters: dict[str, DrafterLike] = {
            "EAGLE-1, chain of 4": Eagle.of(self.head, chain_paths(4), any_target=True),
            "EAGLE-1, chain of 16": Eagle.of(self.head, chain_paths(16), any_target=True),
            "DFlash with a Markov head, chain of 16": DFlash.of(
                self.markov, block=16, any_target=True
            ),
            "DEER, chain of 16": Deer.of(self.aligned, block=16, any_target=True),
            "DEER with a Markov head, chain of 16": Deer.of(
                self.with_head, block=16, any_target=True
            ),
        }
        for times in _TIMES_AS_DEEP:
            target = deepened(self.target, times)
            found[times] = compare(target, prompts, drafters, config, repeats=1, progress=progress)
        return found

    def measure_files(
        self, prompts: Sequence[str]
    ) -> dict[str, tuple[Mapping[str, FileMethod], list[MethodFigures]]]:
        """Decodes with files for LiteRT, by their weights."""
        ids, found = [encode_prompt(self.target, prompt) for prompt in prompts], {}
        for weights in _FILE_WEIGHTS:
            shapes = ExportConfig(capacity=_CAPACITY, quantization=weights, check_gpu_ops=False)
            methods, files = {}, {}
            with TemporaryDirectory() as folder:
                for n in _FILE_CHAINS:
                    drafters = {
                        f"EAGLE-1, chain of {n}": Eagle.of(self.head, chain_paths(n)),
                        f"DEER, chain of {n}": Deer.of(self.aligned, block=n),
                    }
                    for name, drafter in drafters.items():
                        files[name] = open_file(folder, name, self.target, drafter, shapes)
                        methods[name] = FileMethod(name, n, steps=True)
                found[weights] = methods, decode_files(files, methods, ids, _FILE_TOKENS)
        return found


class _Shipped(NamedTuple):
    """The models of `demo`, which draft on the questions."""

    target: Model
    head: EagleHead | Eagle3Head
    head3: EagleHead | Eagle3Head
    draft: Model
    aligned: Model

    @classmethod
    def read(cls) -> "_Shipped":
        """Reads them from the checkpoints of the package."""
        target = load(MADE_FOR)
        head, head3 = (load_eagle(name, target) for name in (EAGLE_HEAD, EAGLE3_HEAD))
        return cls(target, head, head3, load(DRAFT), load(DEER))

    def methods(self) -> dict[str, DrafterLike]:
        """Returns drafters that are compared on the questions, with names as on the forms."""
        return {
            f"{name}, chain of {length}": drafter
            for length in (4, 16)
            for name, drafter in _chains_of(self, length).items()
        }

    def longest(self) -> dict[str, DrafterLike]:
        """Returns the drafters whose acceptance is shown by depth."""
        return _chains_of(self, _LONGEST)


def _chains_of(models: _Made | _Shipped, length: int) -> dict[str, DrafterLike]:
    """Returns the drafters that both targets have, each with chains of one length."""
    paths = chain_paths(length)
    return {
        "DEER": Deer.of(models.aligned, block=length),
        "EAGLE-1": Eagle.of(models.head, paths),
        "EAGLE-3": Eagle.of(models.head3, paths),
        "draft model": DraftModel.of(models.draft, length),
    }


def _measure(run: SuiteRun) -> Page:
    check_plots()
    folder, new_tokens = Path(run.settings["folder"]), run.suite.max_new_tokens
    tested = [*forms("test", _NUM_TESTED)]
    prompts = [form.prompt for form in tested]
    trained = [name for name in _TRAININGS if name != _FILLING]
    with run.steps(len(trained) + 6) as advance:
        train_missing(folder, trained, advance)
        made, demo = _Made.read(folder), _Shipped.read()
        given = {"repeats": run.repeats, "progress": run.progress}
        advance("methods")
        config = GenerationConfig(max_new_tokens=_NEW_TOKENS)
        compared = compare(made.target, prompts, made.methods(), config, **given)
        advance("questions")
        asked = run.prompts(demo.target, new_tokens)
        questions, tasks = [each.text for each in asked], [each.category for each in asked]
        config = GenerationConfig(max_new_tokens=new_tokens)
        on_questions = compare(
            demo.target, questions, demo.methods(), config, categories=tasks, **given
        )
        advance("deeper targets")
        deeper = made.measure_deeper(prompts[:_NUM_TIMED], run.progress)
        advance("LiteRT")
        in_files = made.measure_files(prompts[:_NUM_IN_FILES])
        advance("stages")
        drafters = {name: Deer.of(each, block=16) for name, each in made.stages.items()}
        found = decode_greedily(made.target, drafters, prompts, _NEW_TOKENS)
        stages = [as_stage(name, result) for name, result in found.items()]
        advance("depths")
        depths = {
            "forms": decode_greedily(made.target, made.longest(), prompts, _NEW_TOKENS),
            f"{len(questions)} questions": decode_greedily(
                demo.target, demo.longest(), questions, new_tokens
            ),
        }
    accepted = {
        group: {name: result.metrics for name, result in results.items()}
        for group, results in depths.items()
    }
    right = count_right(made.target, compared.plain, tested)
    sections = [
        _section_of_methods(compared, right),
        _section_of_tasks(on_questions, compared),
        _section_of_deeper(
            "Larger targets",
            f"The same target with more layers{_ABOUT_DEEPENED} Drafters are the same.",
            deeper,
        ),
        *_sections_of_files(in_files),
        _section_of_stages(stages),
        _section_of_depths(accepted),
        _section_of_lengths(accepted),
        _section_of_trainings(trained),
    ]
    figures = {
        "methods": compared.as_dict(),
        "questions": on_questions.as_dict(),
        "deeper": {str(times): each.as_dict() for times, each in deeper.items()},
        "litert": {weights: rows for weights, (_, rows) in in_files.items()},
        "stages": stages,
        "depths": accepted,
        "right": right,
    }
    agree = all(each.outputs_agree for each in (compared, on_questions, *deeper.values()))
    # Quantized weights may turn near ties, as `litert-tokens` lists them.
    agree &= not any(row.divergences for row in in_files["float32"][1])
    return Page(sections, figures, agree, {DEPTHS_PLOT: partial(plot_depths, accepted)})


def _measure_filling(run: SuiteRun) -> Page:
    check_plots()
    folder, tested = Path(run.settings["folder"]), [*forms("test", _NUM_TESTED)]
    with run.steps(3) as advance:
        train_missing(folder, [_FILLING], advance)
        filling = load(folder / _FILLING)
        advance("a diffusion model by itself")
        filled = measure_filling(filling, tested, run.repeats, run.progress, _LOSSY)
        advance("larger diffusion models")
        deeper = fill_deeper(filling, tested, run.progress)
    drawn = deeper[_PICTURED]
    right, right_of_drawn = (
        {row.name: count_right(filling, row, tested) for row in each.rows}
        for each in (filled, drawn)
    )
    sections = [
        _section_of_filling(
            "A diffusion model by itself",
            f"Forms and records as on the page of `forms`. The model fills in the records of "
            f"{_NUM_TESTED} forms that nothing was trained on: stepwise, and with drafts of its "
            f"own. One at a time, median of {filled.repeats}. {filled.machine}.",
            filled,
            right,
        ),
        _section_of_deeper(
            "Larger diffusion models",
            f"The same model with more layers{_ABOUT_DEEPENED} Every text is stepwise decoding's.",
            deeper,
        ),
        _section_of_filling(
            f"A diffusion model of {drawn.weight_bytes / 1e6:.0f} MB",
            f"The one with {_PICTURED} times as many layers, with lossy drafts, too. One run.",
            drawn,
            right_of_drawn,
        ),
        _section_of_trainings([_FILLING]),
    ]
    figures = {
        "diffusion": filled.as_dict(),
        "deeper": {str(times): each.as_dict() for times, each in deeper.items()},
        "right": right,
        "right, deeper": right_of_drawn,
    }
    agree = all(each.outputs_agree for each in (filled, *deeper.values()))
    return Page(sections, figures, agree, {PLOT: partial(plot_lossy, drawn, right_of_drawn)})


def _section_of_methods(compared: Comparison, right: int) -> Section:
    lines = [line for row in compared.rows for line in divergence_lines(row.name, row.divergences)]
    return Section(
        "Methods",
        [
            "Each form is a few lines; the record after it is one line of JSON with fixed keys and "
            f"copied values. {len(compared.prompt_indices)} forms that nothing was trained on, "
            f"greedy, one at a time, up to {_NEW_TOKENS} new tokens, median of {compared.repeats}. "
            f"The target's own records are right in {right} of them. {compared.machine}.",
            "DEER's drafters began as a model of general text and had 1,500 updates, the last "
            "1,200 with or without a Markov head. The other drafters began with random weights and "
            "had 600; the Markov head of DFlash had 600 more, over the DFlash head. All learned "
            "from texts that the target wrote, of which many begin within a form, and the draft "
            f"model from right records too. DFlash was trained on drafts of {_LONGEST}.",
        ],
        ["method", "outputs", "tau", "longest", "tokens/s", "over plain [95 %]", "repeated"],
        [
            [
                row.name,
                outputs_text(row.divergences, len(row.samples)),
                f"{row.overall.mean_acceptance_length:.2f}",
                f"{row.overall.max_accepted_tokens}",
                f"{row.overall.tokens_per_second:.0f}",
                speedup_text(row.overall),
                f"{row.overall.repeated_ngrams:.0%}",
            ]
            for row in compared.rows
        ],
        [
            "**tau**: tokens per target pass, bonus token INCLUDED.",
            "**longest**: most draft tokens accepted in one pass, bonus token EXCLUDED.",
            "**repeated**: share of the output's 4-grams that occurred in it before.",
            *lines,
        ],
    )


def _section_of_tasks(on_questions: Comparison, on_forms: Comparison) -> Section:
    def cells(model: str, task: str, row: ComparisonRow, figures: Figures) -> list[str]:
        return [
            *(model, task, row.name),
            f"{figures.mean_acceptance_length:.2f}",
            f"{figures.max_accepted_tokens}",
            speedup_text(figures),
            f"{figures.repeated_ngrams:.0%}",
        ]

    _, *drafted = on_questions.rows
    megabytes = [each.weight_bytes / 1e6 for each in (on_questions, on_forms)]
    rows = [
        cells(f"{MADE_FOR}, {megabytes[0]:.0f} MB", task, row, row.by_category[task])
        for task in drafted[0].by_category
        for row in drafted
    ]
    rows += [
        cells(f"of forms, {megabytes[1]:.0f} MB", "forms", each, each.overall)
        for each in (on_forms[row.name] for row in drafted)
    ]
    return Section(
        "Targets, tasks and methods",
        [
            f"The methods that both targets have: {MADE_FOR} answers "
            f"{len(on_questions.prompt_indices)} questions with the drafters that ship, the target "
            f"of the forms those above. Greedy, one at a time, median of {on_questions.repeats}; "
            f"{MADE_FOR} writes up to {on_questions.config.max_new_tokens} new tokens. Speed-ups "
            f"are over plain decoding by the same target. {on_questions.machine}.",
        ],
        ["target", "task", "method", "tau", "longest", "over plain [95 %]", "repeated"],
        rows,
    )


_ABOUT_DEEPENED = (
    ", whose last products have weights of zero, so that the text stays the same. Their other "
    "weights are copies of the layers' before, so a pass costs what it costs in a model of that "
    "size."
)


def _section_of_deeper(title: str, about: str, deeper: Mapping[int, Comparison]) -> Section:
    def cells(times: int, compared: Comparison) -> list[str]:
        plain, *drafted = compared.rows
        return [
            f"{times}",
            f"{compared.weight_bytes / 1e6:.0f} MB",
            f"{len(compared.prompt_indices)}",
            f"{plain.overall.tokens_per_second:.0f}",
            *(speedup_text(row.overall) for row in drafted if row.lossless),
        ]

    (first, *_) = deeper.values()
    plain, *drafted = first.rows
    return Section(
        title,
        [f"{about} One run; speed-ups over {plain.name} decoding by the same model [95 %]."],
        [
            *("times the layers", "weights", "forms", f"{plain.name}, tokens/s"),
            *(row.name for row in drafted),
        ],
        [cells(times, compared) for times, compared in deeper.items()],
    )


def _sections_of_files(
    found: Mapping[str, tuple[Mapping[str, FileMethod], Sequence[MethodFigures]]],
) -> list[Section]:
    about = (
        f"Files for LiteRT on the CPU with 1 thread, {_NUM_IN_FILES} of the forms, {_FILE_TOKENS} "
        f"new tokens. {ABOUT_COLUMNS} {ABOUT_QUANTIZED}"
    )
    tables = [
        methods_section(f"On LiteRT, {weights}", rows, methods)
        for weights, (methods, rows) in found.items()
    ]
    return [tables[0]._replace(text=[about]), *tables[1:]]


def _section_of_stages(stages: Sequence[Stage]) -> Section:
    def cells(stage: Stage) -> list[str]:
        reached = _reached(stage.metrics)
        interval = "" if stage.interval is None else " [{:.2f}, {:.2f}]".format(*stage.interval)
        return [
            stage.name,
            f"{stage.metrics.tau:.2f}{interval}",
            f"{stage.metrics.max_accepted_tokens}",
            *(f"{reached[place] / reached[0]:.2f}" for place in (1, 4, 8, 16)),
        ]

    return Section(
        "What each stage of alignment brings",
        [
            "The same forms, chains of 16. Stage I hides a random share of an answer's tokens "
            '("scattered"), or all of its end ("suffix"). Stage II begins with the second and '
            f"hides ends of 1 to {_HIDDEN} tokens, with cross-entropy, with the hybrid loss, or "
            "with cross-entropy and a Markov head. Updates: 300 in stage I, 1,200 in stage II."
        ],
        ["drafter", "tau [95 %]", "longest", "1st accepted", "4th", "8th", "16th"],
        [cells(stage) for stage in stages],
        [
            "**tau**: bonus token INCLUDED; the interval is of the bootstrap over forms.",
            "**1st, 4th ...**: share of steps that accepted the token there and all before it.",
        ],
    )


def _reached(metrics: Metrics) -> Int[np.ndarray, " lengths"]:
    """Returns the number of steps that accepted so many draft tokens or more."""
    return np.cumsum(metrics.accepted[::-1])[::-1]


def _section_of_depths(depths: Mapping[str, Mapping[str, Metrics]]) -> Section:
    def cells(prompts: str, name: str, metrics: Metrics) -> list[str]:
        reached = _reached(metrics)
        given = [
            f"{reached[depth] / reached[depth - 1]:.2f}" if reached[depth - 1] else "-"
            for depth in _DEPTHS
        ]
        return [prompts, name, f"{metrics.tau:.2f}", f"{metrics.max_accepted_tokens}", *given]

    return Section(
        "Acceptance by depth",
        [
            f"Chains of {_LONGEST}, greedy. A column is a place in the draft: the share accepted "
            "there, of the drafts whose tokens before it were all accepted; -: there were none. A "
            "draft that the text's end cuts counts as not accepted behind it. demo-deer, which "
            "drafts on the questions, was trained on hidden ends of up to 16 tokens."
        ],
        ["prompts", "drafter", "tau", "longest", *map(str, _DEPTHS)],
        [
            cells(prompts, name, metrics)
            for prompts, found in depths.items()
            for name, metrics in found.items()
        ],
    )


def _section_of_lengths(depths: Mapping[str, Mapping[str, Metrics]]) -> Section:
    edges = [0, 1, 4, 8, 16, 24, _LONGEST]
    parts = [(low, high - 1) for low, high in itertools.pairwise(edges)]
    parts.append((_LONGEST, _LONGEST))

    def cells(prompts: str, name: str, metrics: Metrics) -> list[str]:
        steps = np.asarray(metrics.accepted)
        shares = [steps[low : high + 1].sum() / steps.sum() for low, high in parts]
        return [prompts, name, *(f"{share:.0%}" for share in shares)]

    return Section(
        "Accepted lengths",
        [f"Shares of the steps that accepted so many of {_LONGEST} drafted tokens."],
        [
            *("prompts", "drafter"),
            *(f"{low}" if low == high else f"{low}-{high}" for low, high in parts),
        ],
        [
            cells(prompts, name, metrics)
            for prompts, found in depths.items()
            for name, metrics in found.items()
        ],
    )


def plot_lossy(compared: Comparison, right: Mapping[str, int], path: Path) -> None:
    """Draws the share of right records of every way to decode by its speed."""
    with drawing(path) as axes:
        for row in compared.rows:
            share = right[row.name] / len(row.samples)
            axes.plot(row.overall.speedup, share, "o" if row.lossless else "x", label=row.name)
        axes.set(xlabel="times as fast as stepwise decoding", ylabel="share of records right")


def plot_depths(depths: Mapping[str, Mapping[str, Metrics]], path: Path) -> None:
    """Draws acceptance by the place in the draft, of places that enough drafts came to."""
    names = [*dict.fromkeys(itertools.chain(*depths.values()))]
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    with drawing(path) as axes:
        for (prompts, found), style in zip(depths.items(), ("-", ":"), strict=True):
            for name, metrics in found.items():
                reached = _reached(metrics)
                places = [
                    place
                    for place in range(1, len(reached))
                    if reached[place - 1] >= _FEWEST_DRAFTS
                ]
                shares = [reached[place] / reached[place - 1] for place in places]
                label = f"{name}, {prompts}"
                axes.plot(places, shares, style, color=colours[name], label=label)
        axes.set(xlabel="place in the draft", ylabel="accepted there, if all before it were")


def _section_of_filling(
    title: str, about: str, compared: Comparison, right: Mapping[str, int]
) -> Section:
    stepwise = compared.plain.overall.num_verify_steps
    return Section(
        title,
        [about],
        [
            *("decoding", "texts", "calls saved", "accepted", "tokens/s", "over stepwise [95 %]"),
            "records right",
        ],
        [
            [
                row.name,
                f"{row.num_identical} of {len(row.samples)} same",
                f"{1 - row.overall.num_verify_steps / stepwise:.0%}",
                f"{row.overall.acceptance_rate:.0%}",
                f"{row.overall.tokens_per_second:.0f}",
                speedup_text(row.overall),
                f"{right[row.name]} of {len(row.samples)}",
            ]
            for row in compared.rows
        ],
        [
            "**calls saved**: of stepwise decoding's passes; N drafts save N / (N + 1) at most.",
            "**accepted**: share of drafted decisions that were kept; the one that each pass adds "
            "without a draft EXCLUDED.",
            "**records right**: every field as in the form.",
        ],
    )


def _section_of_trainings(names: Sequence[str]) -> Section:
    shown = shown_trainings()
    return Section(
        "Trainings",
        [
            "The suite writes train.jsonl and align.jsonl into its folder, here FORMS "
            "(`benchmarks/forms.py`), and runs these commands, unless they were run before:",
            "\n".join(["```", *(shown[name] for name in names), "```"]),
        ],
    )


_FOLDER = {"folder": str(DATA_FOLDER.parent / "forms")}
FORM_SUITES: Mapping[str, Suite] = {
    "forms": Suite(
        title="Drafts of up to 32 tokens where the text can be foreseen",
        about="every method on forms and their records, with stages of DEER's alignment; trains",
        measure=_measure,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        repeats=3,
        needs=(MADE_FOR, _START, DEER, DRAFT, EAGLE_HEAD, EAGLE3_HEAD),
        takes=_FOLDER,
    ),
    "forms-diffusion": Suite(
        title="A diffusion model that drafts for itself where the text can be foreseen",
        about="calls, time and right records of a diffusion model, lossy drafts too; trains",
        measure=_measure_filling,
        repeats=3,
        needs=(_START,),
        takes=_FOLDER,
    ),
}
