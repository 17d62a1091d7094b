"""What goes beside trained weights for a person to read: the recipe and the loss curve."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec.training.data import described
from jaxspec.training.settings import (
    DECODING,
    OWN_TEXT,
    TARGET,
    TAU,
    AnswersSettings,
    DeerTrainingSettings,
    DFlashTrainingSettings,
    EagleTrainingSettings,
    LMTrainingSettings,
    MaskedTrainingSettings,
    RunSettings,
)


def write_recipe(
    path: Path,
    settings: LMTrainingSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
) -> None:
    """How the weights came about: command, data, licences, figures.

    Args:
        path: the file to write.
        settings: of the run.
        fingerprints: SHA-256 by source, as `data.fingerprint` gives it.
        metrics: as in `metrics.json`.
        command: how to repeat it.
    """
    cost = (
        "6 x weights in products + 12 x layers x heads x head dim x sequence length, PaLM, "
        "appendix B" + (", and the teacher's forward pass" if settings.teacher else "")
    )
    names = {name for figures in metrics["validation"].values() for name in figures}
    lines = [
        *_training(settings, metrics, command, cost),
        *_text_read(settings, fingerprints, metrics),
        "## Figures on the held-out text",
        "",
        *_table(metrics["validation"]),
        "nats: cross-entropy per token. top1: share of tokens that were the most likely one."
        + (
            " agreement: share of tokens where the teacher's most likely token is this model's too."
            if "agreement" in names
            else ""
        ),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_masked_recipe(
    path: Path,
    settings: MaskedTrainingSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
) -> None:
    """How a diffusion model came about; arguments as for `write_recipe`."""
    block = settings.block
    cost = (
        "6 x weights in products + 12 x layers x heads x head dim x sequence length, PaLM, "
        "appendix B" + (", twice, for a masked and a clean copy of the text" if block else "")
    )
    sees = f"its own block of {block} slots and all before it" if block else "both sides"
    lines = [
        *_training(settings, metrics, command, cost),
        f"A diffusion language model; a slot sees {sees}.",
        "",
        *_text_read(settings, fingerprints, metrics),
        "## Figures on the held-out text",
        "",
        *_table(metrics["validation"]),
        "nats: upper bound of the negative log-likelihood per token, from one draw of hidden slots "
        "per text. top1: share of the hidden tokens that were the most likely one.",
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def _text_read(
    settings: LMTrainingSettings | MaskedTrainingSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
) -> list[str]:
    """The sources, the models and the texts that they wrote."""
    return [
        "## Data",
        "",
        *_sources(settings, fingerprints, metrics),
        *_models_read(settings, fingerprints),
        *_own_text(settings, metrics),
        "A text is `<|bos|>`, the text, `<|eos|>`. To ask for an answer, give a prompt in the "
        "shape of the text column, up to where the answer begins. The weight says how many passes "
        "are made over a source while one of weight 1 is passed once.",
        "",
    ]


def write_head_recipe(
    path: Path,
    settings: EagleTrainingSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
) -> None:
    """How an EAGLE head came about; arguments as for `write_recipe`."""
    cost = (
        "6 x the head's weights in products + 12 x heads x head dim x sequence length"
        + (f", unrolled {settings.num_unrolled} times" if settings.version == 3 else "")
        + ", and the output head; the target's forward pass "
        + ("left out, since it was made once" if settings.cache_features else "included")
    )
    validation = dict(metrics["validation"])
    decoding = validation.pop(DECODING, None)
    lines = [
        *_training(settings, metrics, command, cost),
        f"An EAGLE-{settings.version} head for the target in `{settings.target}`, whose files "
        f"have the SHA-256 `{fingerprints[TARGET]}`. It drafts from "
        f"{metrics['draft_vocab']:,} of {metrics['target_vocab']:,} tokens, which make up "
        f"{100 * metrics['draft_vocab_coverage']:.2f} % of the text it learned from.",
        "",
        "## Data",
        "",
        *_sources(settings, fingerprints, metrics),
        *_own_text_of_target(settings, metrics),
        "## Figures on the held-out text",
        "",
        *_table(validation),
        "loss: what was trained for, without noise. topK_at_D: share of places where the target's "
        "choice is among the K likeliest tokens of the draft's depth D, the draft before it being "
        "fed the true text; tokens that cannot be drafted count as missed.",
        "",
    ]
    tree = f"the tree of {len(settings.paths)} nodes (its root not counted) in `training.json`"
    lines += _decoded(decoding, settings.decoding_prompts, f"over {tree}")
    path.write_text("\n".join(lines), encoding="utf-8")


def write_deer_recipe(
    path: Path,
    settings: DeerTrainingSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
) -> None:
    """How a drafter was aligned with its target; arguments as for `write_recipe`."""
    cost = (
        "6 x weights in products + 12 x layers x heads x head dim x sequence length, PaLM, "
        "appendix B"
    )
    stage = (
        "I, continuation distillation"
        if settings.stage == 1
        else f"II, refinement (the last 1 to {settings.longest} slots hidden, alpha "
        f"{settings.alpha:g}, {'' if settings.normalise else 'not '}normalised)"
    )
    lines = [
        *_training(settings, metrics, command, cost),
        f"A drafter of blocks (DEER) for the target in `{settings.target}`, whose files have the "
        f"SHA-256 `{fingerprints[TARGET]}`, from the diffusion model in `{settings.start_from}` "
        f"(`{fingerprints['start_from']}`). Stage {stage}.",
        "",
        *_answers_read(
            settings,
            fingerprints,
            metrics,
            "nats: cross-entropy of a hidden token. top1: share of them that were the most likely "
            "one.",
            f"blocks of {settings.block} tokens",
        ),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_dflash_recipe(
    path: Path,
    settings: DFlashTrainingSettings,
    taps: Sequence[int],
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
) -> None:
    """How a DFlash head came about; `taps` are the layers it reads, others as `write_recipe`."""
    cost = (
        "for each token of text, 6 x the weights that make context of it; for each slot of a "
        "block, 6 x the layers' weights in products + 12 x layers x heads x head dim x (sequence "
        "length + block); for each mask, 4 x those of the target's output head; the target's "
        "forward pass "
        + (
            "left out, since it was made once"
            if settings.cache_features
            else "up to the last layer read included"
        )
    )
    lines = [
        *_training(settings, metrics, command, cost),
        f"A DFlash head of {settings.layers} layers for the target in `{settings.target}`, whose "
        f"files have the SHA-256 `{fingerprints[TARGET]}`. It reads the inputs of the target's "
        f"layers {', '.join(map(str, taps))}. Blocks of {settings.block} slots, the pending token "
        f"counted, from {settings.anchors} anchors a sequence; the i-th mask weighs "
        f"exp(-(i - 1) / {settings.decay:g}).",
        "",
        *_answers_read(
            settings,
            fingerprints,
            metrics,
            "nats: cross-entropy of a masked token, all weighing the same. top1_at_D: share of "
            "the D-th masks whose token was the most likely one.",
            f"drafts of {settings.block - 1} tokens",
        ),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def _answers_read(
    settings: AnswersSettings,
    fingerprints: Mapping[str, str],
    metrics: Mapping[str, Any],
    meaning: str,
    drafts: str,
) -> list[str]:
    """What a drafter learned from, and its figures on what was held out of that.

    Args:
        settings: of the run.
        fingerprints: by source.
        metrics: of the run.
        meaning: of the figures.
        drafts: what decoding verified in a pass.
    """
    validation = dict(metrics["validation"])
    decoding = validation.pop(DECODING, None)
    if settings.answers is None:
        answers = (
            f"{settings.own_text:,} texts that the target wrote itself, half greedily and half at "
            "temperature 1, each from the beginning of a training document; one in twenty is held "
            "out"
        )
    else:
        answers = (
            f"the answers in `{settings.answers}`, whose SHA-256 is `{fingerprints['answers']}`; "
            "one in twenty is held out"
        )
    return [
        "## Data",
        "",
        *_sources(settings, fingerprints, metrics),
        f"What it learned from: {answers}. The sources gave prompts only.",
        "",
        "## Figures on the held-out answers",
        "",
        *_table(validation),
        meaning,
        "",
        *_decoded(decoding, settings.decoding_prompts, drafts),
    ]


def _decoded(decoding: Mapping[str, float] | None, prompts: int, drafts: str) -> list[str]:
    """What decoding held-out beginnings gave; nothing where it was not asked for."""
    if decoding is None:
        return []
    shares = ", ".join(f"{value:.3f}" for name, value in decoding.items() if name != TAU)
    return [
        "## Figures of decoding",
        "",
        f"tau = {decoding[TAU]:.3f} tokens per target pass, the bonus token INCLUDED: "
        f"at most {prompts} held-out beginnings, greedily, with the weights as stored, {drafts}. "
        f"Share of passes that accepted a token at depth 1, 2, ...: {shares}.",
        "",
    ]


def _training(
    settings: RunSettings, metrics: Mapping[str, Any], command: str, cost: str
) -> list[str]:
    """The command, the run in figures, and what it ran on."""
    rate = metrics["tokens_per_second"]
    return [
        "# Recipe",
        "",
        "```",
        command or "(called from Python; the settings are in training.json)",
        "```",
        "",
        f"{metrics['parameters']:,} parameters; {metrics['steps']:,} updates of "
        f"{settings.rows_per_batch} sequences of {settings.sequence_length} tokens "
        f"({metrics['tokens_trained']:,} tokens, padding included) in {metrics['minutes']} minutes"
        + (f", {rate:,} tokens/s" if rate else "")
        + (
            f", {100 * metrics['utilisation']:.1f} % of a measured peak of "
            f"{metrics['peak_gflops_per_second']:,} GFLOP/s (at {metrics['flops_per_token']:,} "
            f"FLOPs a token, {metrics['flops_per_token'] * metrics['tokens_trained']:.3g} in all: "
            f"{cost})"
            if rate
            else ""
        )
        + f", on {metrics['device']}, products in {metrics['dtype']}. jax {jax.__version__}, "
        f"Python {sys.version.split()[0]}. "
        "Weights are stored in bfloat16; every setting is in `training.json`.",
        "",
    ]


def _sources(
    settings: RunSettings, fingerprints: Mapping[str, str], metrics: Mapping[str, Any]
) -> list[str]:
    tokens = metrics["tokens_of_one_pass"]
    rows = [
        f"| {source.name} | {source.origin or source.path} | {source.licence or 'unknown'} "
        f"| {source.weight:g} | "
        + (f"{tokens[source.name]:,} " if source.name in tokens else "prompts only ")
        + f"| `{_in_table(json.dumps(source.template)[1:-1])}` | {source.split} "
        f"| `{fingerprints[source.name]}` |"
        for source in map(described, settings.sources)
    ]
    return [
        "| source | origin | licence | weight | tokens of one pass | text | held out "
        "| SHA-256 of the file, or of the sorted list of files with theirs |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _table(validation: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = sorted({name for figures in validation.values() for name in figures})
    return [
        "| source | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *(
            f"| {source} | " + " | ".join(f"{values[name]:.3f}" for name in names) + " |"
            for source, values in validation.items()
        ),
        "",
    ]


def _own_text_of_target(settings: EagleTrainingSettings, metrics: Mapping[str, Any]) -> list[str]:
    if not settings.own_text:
        return []
    tokens = metrics["tokens_of_one_pass"][OWN_TEXT]
    return [
        f"{OWN_TEXT}: {settings.own_text:,} texts ({tokens:,} tokens for training) that the target "
        "wrote itself, half greedily and half at temperature 1, each from the beginning of a "
        "training document. One in twenty is held out.",
        "",
    ]


def _models_read(
    settings: LMTrainingSettings | MaskedTrainingSettings, fingerprints: Mapping[str, str]
) -> list[str]:
    lines = []
    for name, folder in settings.models_read.items():
        lines += [f"{name}: `{folder}`, whose files have the SHA-256 `{fingerprints[name]}`.", ""]
    return lines


def _own_text(
    settings: LMTrainingSettings | MaskedTrainingSettings, metrics: Mapping[str, Any]
) -> list[str]:
    if not settings.own_text:
        return []
    tokens = metrics["tokens_of_one_pass"][OWN_TEXT]
    return [
        f"{OWN_TEXT}: {settings.own_text:,} texts ({tokens:,} tokens for training, weight "
        f"{settings.own_text_weight:g}) that the teacher wrote itself (a causal one half greedily "
        "and half at temperature 1, a diffusion model greedily), each from the beginning of a "
        "training document. One in twenty is held out.",
        "",
    ]


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def as_command(arguments: Sequence[str]) -> str:
    """A command line that a shell reads back as these arguments."""
    return shlex.join(["jaxspec", *arguments])


def progress_bar(title: str, console: Console) -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
    )


def draw_losses(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    metric: str = "nats",
    label: str = "nats per token",
) -> None:
    """A metric by step, training and validation; nothing where matplotlib is not installed.

    Where validation decoded, its tau is drawn too, on an axis of its own.

    Args:
        path: the file to write.
        records: as in `History`.
        metric: its name in the records.
        label: its name in the picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    training = [record for record in records if "loss" in record]
    axes.plot(
        [record["step"] for record in training],
        [record[metric] for record in training],
        color="0.7",
        linewidth=1,
        label="training batch",
    )
    validations = [record for record in records if "validation" in record]
    decoded = [record for record in validations if DECODING in record["validation"]]
    for source in validations[-1]["validation"] if validations else ():
        if source == DECODING:
            continue
        axes.plot(
            [record["step"] for record in validations],
            [record["validation"][source][metric] for record in validations],
            marker=".",
            label=f"{source}, held out",
        )
    axes.set(xlabel="step", ylabel=label)
    axes.legend()
    if decoded:
        beside = axes.twinx()
        beside.plot(
            [record["step"] for record in decoded],
            [record["validation"][DECODING][TAU] for record in decoded],
            color="0.2",
            linestyle=":",
            marker="x",
        )
        beside.set_ylabel("tau, bonus included (crosses)")
    figure.savefig(path, dpi=90)
