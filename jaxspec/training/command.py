"""`jaxspec train lm` on the command line: flags and a JSON file into settings."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec.checkpoint.files import read_json
from jaxspec.training.data import (
    KNOWN_SOURCES,
    EveryNth,
    LastCharacters,
    Source,
    default_mixture,
)
from jaxspec.training.report import as_command
from jaxspec.training.settings import (
    DTYPES,
    OPTIMIZERS,
    LMTrainingSettings,
    RunSettings,
    default_state_folder,
    settings_from_json,
    settings_to_json,
)

# Flags by the section and field of the settings that they set.
RUN_FLAGS = {
    "steps": "num_steps",
    "minutes": "minutes",
    "sequence_length": "sequence_length",
    "rows": "rows_per_batch",
    "dtype": "dtype",
    "seed": "seed",
    "own_text": "own_text",
}
_LM = {
    "layer_drop": "layer_drop",
    "early_exit": "early_exit",
    "tokenizer": "tokenizer",
    "start_from": "start_from",
    "teacher": "teacher",
    "soft_share": "soft_share",
    "own_text_weight": "own_text_weight",
}
MODEL_FLAGS = {
    "vocab_size": "vocab_size",
    "embed_dim": "embed_dim",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "mlp_dim": "mlp_dim",
    "max_positions": "max_positions",
}
TARGET_FLAGS = {"target": "target", "decoding_prompts": "decoding_prompts"}
ANSWERS_FLAGS = TARGET_FLAGS | {"answers": "answers", "texts": "texts"}
_OWN_TEXT = 4000  # texts, where answers are needed and none are given
OPTIMIZER_FLAGS = {
    "optimizer": "name",
    "learning_rate": "learning_rate",
    "adam_learning_rate": "adam_learning_rate",
    "weight_decay": "weight_decay",
    "warmup": "warmup_steps",
    "decay_fraction": "decay_fraction",
    "clip": "clip",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec train lm`. Those left out keep the settings' defaults."""
    parser.description = (
        "Trains a small Llama-format model, or a draft model that learns a teacher's "
        "distributions. Running the same command again resumes an interrupted run."
    )
    data, run = add_run_arguments(parser)
    data.add_argument("--tokenizer", help="folder with a tokenizer to share")
    run.add_argument("--layer-drop", type=float, help="chance to leave out the last sub-layers")
    run.add_argument("--early-exit", type=float, help="share of sequences that exit early")
    run.add_argument("--start-from", help="folder with weights to begin with")
    run.add_argument("--teacher", help="folder with the network to learn from")
    run.add_argument("--soft-share", type=float, help="weight of the teacher's distributions")
    run.add_argument(
        "--own-text",
        type=int,
        metavar="N",
        help="the teacher first writes N texts, which are read beside the sources",
    )
    run.add_argument("--own-text-weight", type=float, help="passes over them (default: 1)")
    add_model_arguments(parser)
    add_optimizer_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser):
    """Declares what every trainer takes: folders, text, length; returns two groups to add to."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--state", type=Path, help="folder to resume from (default: user cache)")
    parser.add_argument("--config", type=Path, help="JSON file of settings; flags go before it")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-folder",
        type=Path,
        help="holds gsm8k/train.jsonl.gz and mbpp/train.jsonl.gz; with Python's own standard "
        "library they make the default mixture",
    )
    data.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a source; repeatable. {', '.join(KNOWN_SOURCES)} have their template and split; "
        "other names read .txt, .jsonl (field 'text', or --template) and folders of .py",
    )
    data.add_argument("--weight", action="append", default=[], metavar="NAME=NUMBER")
    data.add_argument("--template", action="append", default=[], metavar="NAME=TEXT")
    data.add_argument("--sequence-length", type=int)
    data.add_argument("--rows", type=int, help="sequences of one update")

    run = parser.add_argument_group("run")
    length = run.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of updates, timed at the beginning")
    length.add_argument("--steps", type=int, help="updates")
    run.add_argument("--seed", type=int)
    run.add_argument(
        "--dtype", choices=("auto", *DTYPES), help="of products; auto, the default: the faster one"
    )
    run.add_argument("--devices", type=int, help="that share every batch (default: all)")
    return data, run


def add_decoding_argument(run) -> None:
    """Declares how many prompts validation decodes, in the group that `add_run_arguments` gave."""
    run.add_argument(
        "--decoding-prompts",
        type=int,
        metavar="N",
        help="held-out prompts that every validation decodes, for tau (default: 8)",
    )


def add_answers_arguments(data) -> None:
    """Declares which answers of a target are read, in the group that `add_run_arguments` gave."""
    answers = data.add_mutually_exclusive_group()
    answers.add_argument(
        "--own-text",
        type=int,
        metavar="N",
        help="the target first writes N texts, each from the beginning of a document "
        f"(default: {_OWN_TEXT})",
    )
    answers.add_argument(
        "--answers", metavar="FILE", help="JSON Lines of 'prompt' and the target's 'answer'"
    )
    data.add_argument(
        "--texts", metavar="FOLDER", help="where the target's texts lie, for several runs"
    )


def add_cache_argument(run) -> None:
    """Declares whether states are kept, in the group that `add_run_arguments` gave."""
    run.add_argument(
        "--cache-features",
        action="store_true",
        default=None,
        help="keep the target's states on disk instead of computing them with every batch",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    for flag in MODEL_FLAGS:
        model.add_argument(spelled(flag), type=int)


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--optimizer", choices=OPTIMIZERS)
    optimizer.add_argument("--warmup", type=int, help="steps")
    for flag in ("learning_rate", "adam_learning_rate", "decay_fraction", "weight_decay", "clip"):
        optimizer.add_argument(spelled(flag), type=float)


def settings_from_arguments(args: argparse.Namespace) -> LMTrainingSettings:
    """The settings a command line asks for.

    Raises:
        ValueError: naming the flag or the field that is wrong.
    """
    sections = {"model": MODEL_FLAGS, "optimizer": OPTIMIZER_FLAGS}
    return settings_from_json(plain_settings(args, RUN_FLAGS | _LM, sections))


def plain_settings(
    args: argparse.Namespace,
    top: Mapping[str, str],
    sections: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The settings of a command line as plain values: the JSON file's, and flags before them.

    Args:
        args: parsed.
        top: fields of the settings by flag.
        sections: the same for settings within them, by their name.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    plain: dict[str, Any] = {} if args.config is None else dict(read_json(args.config))
    sources = sources_from_arguments(args)
    if sources:
        plain["sources"] = settings_to_json(RunSettings(sources))["sources"]
    if not plain.get("sources"):
        raise ValueError("No text to train on: give --data-folder FOLDER or --data NAME=PATH.")
    given = {flag: value for flag, value in vars(args).items() if value is not None}
    if "steps" in given:
        plain["minutes"] = None
    if "minutes" in given:
        plain["num_steps"] = None
    plain |= {field: given[flag] for flag, field in top.items() if flag in given}
    for section, fields in sections.items():
        changes = {field: given[flag] for flag, field in fields.items() if flag in given}
        plain[section] = {**plain.get(section, {}), **changes}
    return plain


def plain_answers_settings(args: argparse.Namespace, top: Mapping[str, str]) -> dict[str, Any]:
    """`plain_settings` of a trainer that reads answers; `top` holds the flags of its own."""
    plain = plain_settings(
        args, {**RUN_FLAGS, **ANSWERS_FLAGS, **top}, {"optimizer": OPTIMIZER_FLAGS}
    )
    if "target" not in plain:
        raise ValueError("No target to draft for: give --target FOLDER.")
    if plain.get("answers") is None:
        plain.setdefault("own_text", _OWN_TEXT)
    return plain


def layers_from_text(text: str) -> tuple[int, ...]:
    """Layers, as `0,1,2` on the command line."""
    return tuple(int(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and writes the checkpoint; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training.train import train_lm

    return run_trainer(train_lm, settings_from_arguments(args), args)


def run_trainer(
    trainer: Callable[..., Any], settings: RunSettings, args: argparse.Namespace
) -> int:
    """Shows the settings and trains; 0 when the folder is written."""
    console = Console(stderr=True)
    console.print_json(json.dumps(settings_to_json(settings)))
    state = args.state or default_state_folder(settings, args.out.name)
    trainer(
        settings,
        state,
        args.out,
        num_devices=args.devices,
        command=as_command(sys.argv[1:]),
        console=console,
    )
    return 0


def sources_from_arguments(args: argparse.Namespace) -> tuple[Source, ...]:
    """The sources that `--data-folder`, `--data`, `--weight` and `--template` name, maybe none."""
    named = (
        {} if args.data_folder is None else {s.name: s for s in default_mixture(args.data_folder)}
    )
    for name, path in _pairs("--data", args.data):
        # A text file is one document: held out by documents, it would be read to the end.
        split = LastCharacters() if path.endswith((".txt", ".txt.gz")) else EveryNth()
        unknown = Source(name, path, split=split)
        named[name] = dataclasses.replace(KNOWN_SOURCES.get(name, unknown), path=path)
    for flag, field, kind in (("--weight", "weight", float), ("--template", "template", str)):
        for name, text in _pairs(flag, getattr(args, field)):
            if name not in named:
                raise ValueError(f"{flag} {name}: there is no such source; got {sorted(named)}.")
            named[name] = dataclasses.replace(named[name], **{field: kind(text)})
    return tuple(named.values())


def _pairs(flag: str, entries: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not (name and equals and text):
            raise ValueError(f"{flag} must be NAME=..., got {entry!r}.")
        pairs.append((name, text))
    return pairs


def spelled(flag: str) -> str:
    return "--" + flag.replace("_", "-")
