"""What goes beside trained weights for a person to read: the recipe and the loss curve."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.training.data import described
from jaxspec.training.settings import OWN_TEXT, LMTrainingSettings


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
    sources = [
        f"| {source.name} | {source.origin or source.path} | {source.licence or 'unknown'} "
        f"| {source.weight:g} | {metrics['tokens_of_one_pass'][source.name]:,} "
        f"| `{_in_table(json.dumps(source.template)[1:-1])}` | {source.split} "
        f"| `{fingerprints[source.name]}` |"
        for source in map(described, settings.sources)
    ]
    names = sorted({name for figures in metrics["validation"].values() for name in figures})
    figures = [
        f"| {source} | " + " | ".join(f"{values[name]:.3f}" for name in names) + " |"
        for source, values in metrics["validation"].items()
    ]
    rate = metrics["tokens_per_second"]
    lines = [
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
            "FLOPs a token: 6 x weights in products + 12 x layers x heads x head dim x sequence "
            "length, PaLM, appendix B"
            + (", and the teacher's forward pass" if settings.teacher else "")
            + ")"
            if rate
            else ""
        )
        + f", on {metrics['device']}, products in {metrics['dtype']}. jax {jax.__version__}, "
        f"Python {sys.version.split()[0]}. "
        "Weights are stored in bfloat16; every setting is in `training.json`.",
        "",
        "## Data",
        "",
        "| source | origin | licence | weight | tokens of one pass | text | held out "
        "| SHA-256 of the file, or of the sorted list of files with theirs |",
        "|---|---|---|---|---|---|---|---|",
        *sources,
        "",
        *_own_text(settings, metrics),
        "A text is `<|bos|>`, the text, `<|eos|>`. To ask for an answer, give a prompt in the "
        "shape of the text column, up to where the answer begins. The weight says how many passes "
        "are made over a source while one of weight 1 is passed once.",
        "",
        "## Figures on the held-out text",
        "",
        "| source | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *figures,
        "",
        "nats: cross-entropy per token. top1: share of tokens that were the most likely one."
        + (
            " agreement: share of tokens where the teacher's most likely token is this model's too."
            if "agreement" in names
            else ""
        ),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def _own_text(settings: LMTrainingSettings, metrics: Mapping[str, Any]) -> list[str]:
    if not settings.own_text:
        return []
    tokens = metrics["tokens_of_one_pass"][OWN_TEXT]
    return [
        f"{OWN_TEXT}: {settings.own_text:,} texts ({tokens:,} tokens for training, weight "
        f"{settings.own_text_weight:g}) that the teacher wrote itself, half greedily and half at "
        "temperature 1, each from the beginning of a training document. One in twenty is held "
        "out.",
        "",
    ]


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def as_command(arguments: Sequence[str]) -> str:
    """A command line that a shell reads back as these arguments."""
    return shlex.join(["jaxspec", *arguments])


def draw_losses(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """The loss by step, training and validation; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    training = [record for record in records if "loss" in record]
    axes.plot(
        [record["step"] for record in training],
        [record["nats"] for record in training],
        color="0.7",
        linewidth=1,
        label="training batch",
    )
    validations = [record for record in records if "validation" in record]
    for source in validations[-1]["validation"] if validations else ():
        axes.plot(
            [record["step"] for record in validations],
            [record["validation"][source]["nats"] for record in validations],
            marker=".",
            label=f"{source}, held out",
        )
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.savefig(path, dpi=90)
