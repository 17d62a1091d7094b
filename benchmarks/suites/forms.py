"""The suite `forms`: drafts of up to 32 tokens, where every token of the text can be foreseen.

It trains a target of its own and drafters for it, where its folder lacks them: about an hour on two
cores. Each training is a command of `jaxspec`, which continues if it was interrupted.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.forms import Form, forms
from benchmarks.harness import Advance, Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import DATA_FOLDER, PROMPT_SETS
from jaxspec.checkpoint import Model, load, load_eagle, shipped_folders
from jaxspec.checkpoint.files import replacing_files
from jaxspec.commands.methods import DEER, DRAFT, EAGLE3_HEAD, EAGLE_HEAD, MADE_FOR
from jaxspec.decoding.denoise import DenoiseConfig, measure_costs
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Metrics
from jaxspec.decoding.request import GenerationConfig
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import Deer, DrafterLike, DraftModel, Eagle, PromptLookup, SuffixLookup
from jaxspec.measure.compare import compare
from jaxspec.measure.comparison import Comparison, divergence_lines, outputs_text, speedup_text
from jaxspec.measure.figures import speedup_interval
from jaxspec.measure.timing import release_programs

_LEARNED = {"train": 16000, "align": 4000}
"""Forms that the target learns, and those that its drafters' texts begin with."""
_NUM_TESTED = 64
_NEW_TOKENS = 160
_LONGEST = 32
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
_START = "demo-block-diffusion"
_TARGET, _HEAD, _FILLING = "target", "eagle", "diffusion"
_STAGES = {
    "start": None,
    "stage I, scattered": "stage-1-scattered",
    "stage I, suffix": "stage-1-suffix",
    "stage II": "stage-2",
}
"""Folders of drafters; `None`: the shipped model that alignment starts from."""

_SPEED = "--dtype bfloat16 --warmup 40 --decay-fraction 0.5"
_TEXT = "--template forms={{prompt}}{{answer}} --sequence-length 256"
_ALIGN = (
    f"train deer --target {{folder}}/{_TARGET} --data forms={{folder}}/align.jsonl {_TEXT} "
    f"--own-text 2000 --texts {{folder}}/texts --rows 8 --block 16 {_SPEED}"
)
_TRAININGS = {
    _TARGET: "train lm --data forms={folder}/train.jsonl --tokenizer {tokenizer} --layers 8 "
    "--embed-dim 320 --heads 5 --kv-heads 1 --head-dim 64 --mlp-dim 640 --rows 10 --steps 600 "
    f"--learning-rate 0.02 --adam-learning-rate 0.004 {_TEXT} {_SPEED}",
    "stage-1-scattered": f"{_ALIGN} --start-from {{start}} --stage 1 --steps 300",
    "stage-1-suffix": f"{_ALIGN} --start-from {{start}} --stage 1 --hide suffix --longest 32 "
    "--steps 300",
    "stage-2": f"{_ALIGN} --start-from {{folder}}/stage-1-suffix --stage 2 --longest 32 "
    "--cuts all --steps 900",
    _HEAD: f"train eagle --target {{folder}}/{_TARGET} --data forms={{folder}}/align.jsonl {_TEXT} "
    f"--own-text 2000 --rows 8 --steps 600 {_SPEED}",
    _FILLING: f"train masked --data forms={{folder}}/train.jsonl {_TEXT} --start-from {{start}} "
    f"--block 8 --rows 8 --steps 900 {_SPEED}",
}
"""Commands by the folder that each makes, in their order."""
_DRAFTS = (1, 2, 3, 4)
_LOSSY = (1, 2, 4)


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
        name: [*command.format(**names).split(), "--out", f"{folder / name}"]
        for name, command in _TRAININGS.items()
    }


def train_missing(folder: Path, advance: Advance) -> None:
    """Writes the forms, and trains each model that is not in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_files(folder) as staging:
        for split, number in _LEARNED.items():
            rows = [json.dumps(form._asdict()) for form in forms(split, number)]
            (staging / f"{split}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    for name, words in trainings(folder).items():
        if not (folder / name / "config.json").exists():
            advance(f"training {name}")
            states = ["--state", f"{folder / 'states' / name}"]
            subprocess.run([sys.executable, "-m", "jaxspec", *words, *states], check=True)


def measure_stages(
    target: Model, folders: Mapping[str, Path], prompts: Sequence[str], block: int
) -> list[Stage]:
    """Decodes prompts greedily with the drafter of each stage, in chains of `block`."""
    found = []
    for name, folder in folders.items():
        release_programs()
        drafter = Deer.of(load(folder), block=block)
        result = generate(target, list(prompts), drafter, max_new_tokens=_NEW_TOKENS)
        pairs = np.asarray([(row.metrics.num_steps, row.metrics.num_tokens) for row in result])
        alone = np.stack([pairs[:, 1]] * 2, axis=1)
        found.append(Stage(name, result.metrics, speedup_interval(alone, pairs)))
    return found


def measure_depths(
    target: Model, drafters: Mapping[str, DrafterLike], prompts: Sequence[str], new_tokens: int
) -> dict[str, Metrics]:
    """Decodes prompts greedily over long chains; returns figures by drafter."""
    found = {}
    for name, drafter in drafters.items():
        release_programs()
        result = generate(target, list(prompts), drafter, max_new_tokens=new_tokens)
        found[name] = result.metrics
    return found


def measure_filling(
    model: Model, tested: Sequence[Form], repeats: int, progress: bool
) -> tuple[Comparison, dict[str, int]]:
    """Compares self-speculative with stepwise decoding of a diffusion model.

    Returns:
        The comparison, and how many records are right, by method.
    """
    prompts = [form.prompt for form in tested]
    config = DenoiseConfig(max_new_tokens=_NEW_TOKENS)
    most = SelfSpeculation(max(_DRAFTS))
    costs = measure_costs(model, prompts[0], config, most)
    ways = {f"N = {count}": SelfSpeculation(count) for count in _DRAFTS}
    ways["N = 4, as many as pay"] = dataclasses.replace(most, costs=costs)
    for k in _LOSSY:
        ways[f"N = 4, top {k}, LOSSY"] = dataclasses.replace(most, lossy_top_k=k)
    compared = compare(model, prompts, ways, config, repeats=repeats, progress=progress)
    assert model.tokenizer is not None  # trained with one
    right = {
        row.name: sum(
            model.tokenizer.decode(sample.texts[0]).strip() == form.answer.strip()
            for sample, form in zip(row.samples, tested, strict=True)
        )
        for row in compared.rows
    }
    return compared, right


def _chain(length: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * depth for depth in range(1, length + 1))


def _measure(run: SuiteRun) -> Page:
    folder = Path(run.settings["model"])
    with run.steps(len(_TRAININGS) + 5) as advance:
        train_missing(folder, advance)
        target, demo = load(folder / _TARGET), load(MADE_FOR)
        tested = [*forms("test", _NUM_TESTED)]
        prompts = [form.prompt for form in tested]
        config = GenerationConfig(max_new_tokens=_NEW_TOKENS)
        head, aligned = load_eagle(folder / _HEAD, target), load(folder / _STAGES["stage II"])
        advance("methods")
        methods: dict[str, Any] = {
            "prompt lookup": PromptLookup(),
            "suffix lookup": SuffixLookup(),
            **{f"EAGLE-1, chain of {n}": Eagle.of(head, _chain(n)) for n in (4, 8, 16)},
            **{f"DEER, chain of {n}": Deer.of(aligned, block=n) for n in (8, 16, 32)},
            "DEER, chain of 16, 2 passes": Deer.of(aligned, block=16, steps=2),
            "DEER, tree of 16": Deer.of(aligned, block=16, num_nodes=16),
        }
        compared = compare(
            target, prompts, methods, config, repeats=run.repeats, progress=run.progress
        )
        advance("a diffusion model by itself")
        filled, right = measure_filling(load(folder / _FILLING), tested, run.repeats, run.progress)
        advance("stages")
        places = {
            name: shipped_folders()[_START] if each is None else folder / each
            for name, each in _STAGES.items()
        }
        stages = measure_stages(target, places, prompts, block=16)
        advance("depths")
        in_forms = {
            "DEER": Deer.of(aligned, block=_LONGEST),
            "EAGLE-1": Eagle.of(head, _chain(_LONGEST)),
        }
        on_questions = {
            "DEER": Deer.of(load(DEER), block=_LONGEST),
            "EAGLE-1": Eagle.of(load_eagle(EAGLE_HEAD, demo), _chain(_LONGEST)),
            "EAGLE-3": Eagle.of(load_eagle(EAGLE3_HEAD, demo), _chain(_LONGEST)),
            "draft model": DraftModel.of(load(DRAFT), _LONGEST),
        }
        questions = [each.text for each in run.prompts(demo, run.suite.max_new_tokens)]
        depths = {
            "forms": measure_depths(target, in_forms, prompts, _NEW_TOKENS),
            f"{len(questions)} questions": measure_depths(
                demo, on_questions, questions, run.suite.max_new_tokens
            ),
        }
    sections = [
        _section_of_methods(compared),
        _section_of_stages(stages),
        _section_of_depths(depths),
        _section_of_lengths(depths["forms"]),
        _section_of_filling(filled, right),
        _section_of_trainings(folder),
    ]
    found = {
        "methods": compared.as_dict(),
        "stages": stages,
        "depths": depths,
        "diffusion": filled.as_dict(),
        "right": right,
    }
    return Page(sections, found, compared.outputs_agree and filled.outputs_agree)


def _section_of_methods(compared: Comparison) -> Section:
    lines = [line for row in compared.rows for line in divergence_lines(row.name, row.divergences)]
    return Section(
        "Methods",
        [
            "Each form is a few lines; the record after it is one line of JSON with fixed keys and "
            f"copied values. {len(compared.prompt_indices)} forms that nothing was trained on, "
            f"greedy, one at a time, up to {compared.config.max_new_tokens} new tokens, median of "
            f"{compared.repeats}. {compared.machine}."
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


def _section_of_stages(stages: Sequence[Stage]) -> Section:
    def cells(stage: Stage) -> list[str]:
        low, high = stage.interval or (stage.metrics.tau, stage.metrics.tau)
        shares = stage.metrics.acceptance_per_position
        return [
            stage.name,
            f"{stage.metrics.tau:.2f} [{low:.2f}, {high:.2f}]",
            f"{stage.metrics.max_accepted_tokens}",
            *(f"{shares[place - 1]:.2f}" for place in (1, 4, 8, 16)),
        ]

    return Section(
        "What each stage of alignment brings",
        [
            "The same forms, chains of 16. Stage I hides a random share of an answer's tokens "
            '("scattered"), or all of its end ("suffix"). Stage II begins with the second and '
            "hides ends of 1 to 32 tokens."
        ],
        ["drafter", "tau [95 %]", "longest", "1st accepted", "4th", "8th", "16th"],
        [cells(stage) for stage in stages],
        [
            "**tau**: bonus token INCLUDED; the interval is of the bootstrap over forms.",
            "**1st, 4th ...**: share of steps that accepted the token there and all before it.",
        ],
    )


def _section_of_depths(depths: Mapping[str, Mapping[str, Metrics]]) -> Section:
    def cells(prompts: str, name: str, metrics: Metrics) -> list[str]:
        shares = (1.0, *metrics.acceptance_per_position)
        given = [
            f"{shares[depth] / shares[depth - 1]:.2f}" if shares[depth - 1] > 0 else "-"
            for depth in _DEPTHS
        ]
        return [prompts, name, f"{metrics.tau:.2f}", f"{metrics.max_accepted_tokens}", *given]

    return Section(
        "Acceptance by depth",
        [
            f"Chains of {_LONGEST}, greedy. A column is a place in the draft: the share accepted "
            "there, of the drafts whose tokens before it were all accepted; -: there were none."
        ],
        ["prompts", "drafter", "tau", "longest", *map(str, _DEPTHS)],
        [
            cells(prompts, name, metrics)
            for prompts, found in depths.items()
            for name, metrics in found.items()
        ],
    )


def _section_of_lengths(depths: Mapping[str, Metrics]) -> Section:
    edges = [0, 1, 4, 8, 16, 24, _LONGEST]
    parts = [(low, high - 1) for low, high in itertools.pairwise(edges)]
    parts.append((_LONGEST, _LONGEST))

    def cells(name: str, metrics: Metrics) -> list[str]:
        steps = np.asarray(metrics.accepted)
        shares = [steps[low : high + 1].sum() / steps.sum() for low, high in parts]
        return [name, *(f"{share:.0%}" for share in shares)]

    return Section(
        "Accepted lengths",
        [f"Shares of the steps that accepted so many of {_LONGEST} drafted tokens, in the forms."],
        ["drafter", *(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)],
        [cells(name, metrics) for name, metrics in depths.items()],
    )


def _section_of_filling(compared: Comparison, right: Mapping[str, int]) -> Section:
    stepwise = compared.plain.overall.num_verify_steps
    return Section(
        "A diffusion model by itself",
        [
            "It learned the same forms, and fills in the records of the same tests: stepwise, and "
            f"with drafts of its own. One at a time, median of {compared.repeats}. "
            f"{compared.machine}."
        ],
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


def _section_of_trainings(folder: Path) -> Section:
    commands = [" ".join(["jaxspec", *words]) for words in trainings(Path("FORMS")).values()]
    for path in (shipped_folders()[MADE_FOR], shipped_folders()[_START]):
        commands = [command.replace(str(path), path.name) for command in commands]
    return Section(
        "Trainings",
        [
            f"The suite writes {folder.name}/train.jsonl and align.jsonl (`benchmarks/forms.py`), "
            "and runs these commands, unless their folders are there:",
            "\n".join(["```", *commands, "```"]),
        ],
    )


FORM_SUITES: Mapping[str, Suite] = {
    "forms": Suite(
        title="Drafts of up to 32 tokens where the text can be foreseen",
        about="DEER, EAGLE and lookup on forms and their records, with stages of alignment; trains",
        measure=_measure,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        repeats=3,
        needs=(MADE_FOR, _START, DEER, DRAFT, EAGLE_HEAD, EAGLE3_HEAD),
        takes={"model": str(DATA_FOLDER.parent / "forms")},
    )
}
