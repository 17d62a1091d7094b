"""Recipe and loss curve of trained weights, for people to read."""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.training.settings import (
    DECODING,
    OWN_TEXT,
    TAU,
    DraftingSettings,
    RunSettings,
)
from jaxspec.training.sources import described

PALM_FLOPS = (
    "6 x weights in products + 12 x layers x heads x head dim x sequence length, PaLM, appendix B"
)
"""Name of what `efficiency.flops_per_token` counts, in recipes."""
OVERLAP = "overlap: chance that a token that is drawn from the draft's law is accepted."
OVERLAP_AT = "overlap_at_D: chance that a token that is drawn at depth D is accepted there."
"""Meaning of figures of several trainers, in recipes."""
_HOW_TO_ASK = (
    "A text is `<|bos|>`, the text, `<|eos|>`. To ask for an answer, give a prompt in the shape of "
    "the text column, up to where the answer begins. The weight says how many passes are made over "
    "a source while one of weight 1 is passed once."
)


class RecipeNotes(NamedTuple):
    """Parts of a recipe that differ from trainer to trainer.

    Attributes:
        cost: what the FLOPs of a token are made of.
        meaning: meaning of the figures.
        about: what was trained; "" where the weights speak for themselves.
        read: paragraphs about what was read in addition to the sources.
        held_out: what the figures were measured on.
        drafts: what decoding verified in a pass; "" where validation does not decode.
        metric: name of the metric to draw.
        label: name of that metric in the picture.
    """

    cost: str
    meaning: str
    about: str = ""
    read: Sequence[str] = ()
    held_out: str = "text"
    drafts: str = ""
    metric: str = "nats"
    label: str = "nats per token"


def recipe_of(
    settings: RunSettings,
    sha256: Mapping[str, str],
    metrics: Mapping[str, Any],
    command: str,
    notes: RecipeNotes,
) -> str:
    """Returns the recipe of trained weights in Markdown: command, data, licences, figures.

    Args:
        settings: settings of the run.
        sha256: fingerprints of what it read, by name.
        metrics: figures, as in `metrics.json`.
        command: command line that repeats the run.
        notes: parts of this trainer.
    """
    validation = dict(metrics["validation"])
    decoding = validation.pop(DECODING, None)
    lines = [
        *_training(settings, metrics, command, notes.cost),
        *_paragraphs(notes.about),
        "## Data",
        "",
        *_sources(settings, sha256, metrics),
        *_paragraphs(*notes.read),
        f"## Figures on the held-out {notes.held_out}",
        "",
        *_table(validation),
        *_paragraphs(notes.meaning),
    ]
    if decoding is not None:
        assert isinstance(settings, DraftingSettings)
        lines += _decoded(decoding, settings.decoding_prompts, notes.drafts)
    return "\n".join(lines)


def texts_read(
    settings: RunSettings, sha256: Mapping[str, str], metrics: Mapping[str, Any], weight: float
) -> list[str]:
    """Returns the paragraphs of a recipe about what a run of a whole model read.

    Args:
        settings: settings of the run.
        sha256: fingerprints of what it read, by name.
        metrics: figures of the run.
        weight: passes over the texts of a teacher.
    """
    written = (
        "the teacher wrote itself (a causal one half greedily and half at temperature 1, a "
        "diffusion model greedily)"
    )
    models = [
        f"{name}: `{folder}`, whose files have the SHA-256 `{sha256[name]}`."
        for name, folder in settings.models_read.items()
    ]
    return [*models, *generated_texts(settings, metrics, written, weight), _HOW_TO_ASK]


def generated_texts(
    settings: RunSettings, metrics: Mapping[str, Any], written: str, weight: float | None = None
) -> list[str]:
    """Returns the paragraphs of a recipe about texts that a model wrote; none without such texts.

    Args:
        settings: settings of the run.
        metrics: figures of the run.
        written: who wrote them, and how.
        weight: passes over them, if that was asked for.
    """
    if not settings.own_text:
        return []
    tokens = f"{metrics['tokens_of_one_pass'][OWN_TEXT]:,} tokens for training"
    return [
        f"{OWN_TEXT}: {settings.own_text:,} texts ({tokens}"
        + ("" if weight is None else f", weight {weight:g}")
        + f") that {written}, each from the beginning of a training document. One in twenty is "
        "held out."
    ]


def _paragraphs(*texts: str) -> list[str]:
    """Returns the texts that are not empty as lines, an empty line behind each."""
    return [line for text in texts if text for line in (text, "")]


def _decoded(decoding: Mapping[str, float], prompts: int, drafts: str) -> list[str]:
    """Returns the section about decoding held-out beginnings."""
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
    """Returns the section about the command, the run in figures, and the machine."""
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


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def as_command(arguments: Sequence[str]) -> str:
    """Returns a command line that a shell reads back as these arguments.

    >>> as_command(["train", "lm", "--data", "notes=my notes.txt"])
    "jaxspec train lm --data 'notes=my notes.txt'"
    """
    return shlex.join(["jaxspec", *arguments])


def draw_losses(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    metric: str,
    label: str,
) -> None:
    """Draws a metric by step, training and validation; nothing where matplotlib is not installed.

    Where validation decoded, its tau is drawn too, on a second axis.

    Args:
        path: file to write.
        records: records of a `History`.
        metric: name of the metric in the records; those without it leave a gap.
        label: name of the metric in the picture.
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
        [record.get(metric, math.nan) for record in training],
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
            [record["validation"].get(source, {}).get(metric, math.nan) for record in validations],
            marker=".",
            label=f"{source}, held out",
        )
    axes.set(xlabel="step", ylabel=label)
    axes.legend()
    if decoded:
        second = axes.twinx()
        second.plot(
            [record["step"] for record in decoded],
            [record["validation"][DECODING].get(TAU, math.nan) for record in decoded],
            color="0.2",
            linestyle=":",
            marker="x",
        )
        second.set_ylabel("tau, bonus included (crosses)")
    figure.savefig(path, dpi=90)
