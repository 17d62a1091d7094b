"""Shared parts of the commands of `jaxspec train`: flags of settings and of text, and the run."""

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from jaxspec.checkpoint.files import read_json
from jaxspec.commands.flags import add_flags, flag_of, given
from jaxspec.commands.interrupts import telling
from jaxspec.core.checks import shown
from jaxspec.models import ModelConfig
from jaxspec.training.report import as_command
from jaxspec.training.settings import (
    OptimizerSettings,
    RunSettings,
    check_names,
    default_state_folder,
    required,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.sources import (
    DATA_FOLDER,
    KNOWN_SOURCES,
    EveryNth,
    LastCharacters,
    Source,
    default_mixture,
)
from jaxspec.tuning import load_tree

Settings = TypeVar("Settings", bound=RunSettings)
_COUNTED = ("layers", "heads", "kv_heads")
_MODEL = ("vocab_size", "embed_dim", "head_dim", "mlp_dim", "max_positions")
_COUNTS = {f"num_{name}": {"flag": f"--{name.replace('_', '-')}"} for name in _COUNTED}


@dataclasses.dataclass(frozen=True)
class TrainVerb(Generic[Settings]):
    """A command of `jaxspec train`.

    Attributes:
        trainer: module and name of the trainer, which is imported when it runs: optax and Orbax
            take a moment.
        settings: class of its settings.
        description: for the help.
        own_text: number of texts that a model writes if no flag and no file says otherwise.
    """

    trainer: str
    settings: type[Settings]
    description: str
    own_text: int = 0

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the flags; those left out keep the settings' defaults."""
        parser.description = (
            f"{self.description} Running the same command again resumes an interrupted run."
        )
        parser.add_argument(
            "--out", type=Path, required=True, metavar="FOLDER", help="folder for the result"
        )
        parser.set_defaults(needed=required(self.settings))
        parser.add_argument(
            "--state", type=Path, help="folder to resume from (default: user cache)"
        )
        parser.add_argument(
            "--config", type=Path, help="JSON file of settings; a flag wins over the file"
        )
        parser.add_argument(
            "--devices", type=int, metavar="N", help="devices that share every batch (default: all)"
        )
        add_source_arguments(parser)
        common = {field.name for field in dataclasses.fields(RunSettings)}
        others = {field.name for field in dataclasses.fields(self.settings)} - common
        own = {"own_text": {"default": self.own_text}}
        add_flags(parser.add_argument_group("run"), self.settings, common, options=own)
        add_flags(parser.add_argument_group("training"), self.settings, others)
        if "model" in others:
            model = parser.add_argument_group("model")
            names = (*_MODEL, *_COUNTS)
            add_flags(model, ModelConfig, names, section="model", options=_COUNTS)
        optimizer = parser.add_argument_group("optimizer")
        add_flags(optimizer, OptimizerSettings, section="optimizer")

    def settings_from_arguments(self, args: argparse.Namespace) -> Settings:
        """Returns the settings of a command line: those of flags, then of the file, then defaults.

        Raises:
            ValueError: naming the flag or the field that is wrong.
        """
        plain: dict[str, Any] = {} if args.config is None else dict(read_json(args.config))
        # Before the default text is looked for.
        check_names(self.settings, plain, f"--config {args.config}: {self.settings.__name__}")
        if not (args.data_folder or args.data or plain.get("sources")):
            args = argparse.Namespace(**{**vars(args), "data_folder": DATA_FOLDER})
        sources = sources_from_arguments(args)
        if sources:
            plain["sources"] = settings_to_json(RunSettings(sources))["sources"]
        flags = given(args, self.settings)
        if "num_steps" in flags:
            plain["minutes"] = None
        if "minutes" in flags:
            plain["num_steps"] = None
        if "paths" in flags:
            flags["paths"] = [list(path) for path in load_tree(flags["paths"])]
        plain |= flags
        for section, settings in (("model", ModelConfig), ("optimizer", OptimizerSettings)):
            inner, of_file = given(args, settings, section), plain.get(section, {})
            # A value that is no section is refused with the rest of the file.
            if inner and isinstance(of_file, Mapping):
                plain[section] = {**of_file, **inner}
        if self.own_text and plain.get("answers") is None:
            plain.setdefault("own_text", self.own_text)
        for name in required(self.settings):
            if name not in plain:
                raise ValueError(f"{name} is missing: give {flag_of(self.settings, name)}.")
        try:
            return settings_from_json(plain, self.settings)
        except ValueError as error:
            if args.config is None:
                raise
            raise ValueError(f"--config {args.config}, or a flag: {error}") from None

    def run(self, args: argparse.Namespace) -> int:
        """Trains as the arguments say; 0 when the folder is written."""
        from jaxspec.training import train

        module, name = self.trainer.split(":")
        trainer = getattr(importlib.import_module(module), name)
        settings = self.settings_from_arguments(args)
        console = Console(stderr=True)
        if args.verbose:
            console.print_json(json.dumps(settings_to_json(settings)))
        with telling(lambda: "the same command continues from the last state that was saved"):
            train.train(
                trainer(settings),
                args.state or default_state_folder(settings, args.out.name),
                args.out,
                num_devices=args.devices,
                command=as_command(sys.argv[1:]),
                console=console,
            )
        return 0


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of text, which `sources_from_arguments` reads."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-folder",
        type=Path,
        help="holds gsm8k/train.jsonl.gz and mbpp/train.jsonl.gz; with Python's own standard "
        f"library they make the default mixture (default without --data: {DATA_FOLDER})",
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


def sources_from_arguments(args: argparse.Namespace) -> tuple[Source, ...]:
    """Returns the sources that `--data-folder`, `--data`, `--weight` and `--template` name.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    named = (
        {} if args.data_folder is None else {s.name: s for s in default_mixture(args.data_folder)}
    )
    for name, path in _pairs("--data", args.data):
        # A text file is one document: held out by documents, it would be read to the end.
        split = LastCharacters() if path.endswith((".txt", ".txt.gz")) else EveryNth()
        unknown = Source(name, path, split=split)
        named[name] = dataclasses.replace(KNOWN_SOURCES.get(name, unknown), path=path)
    readers: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
        ("--weight", "weight", _as_number),
        ("--template", "template", _with_line_feeds),
    )
    for flag, field, read in readers:
        for name, text in _pairs(flag, getattr(args, field)):
            if name not in named:
                raise ValueError(
                    f"{flag} {name:.80}: there is no such source; got {shown(sorted(named))}."
                )
            named[name] = dataclasses.replace(named[name], **{field: read(text)})
    return tuple(named.values())


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--weight must be NAME=NUMBER, got {shown(text)} for the number."
        ) from None


def _with_line_feeds(template: str) -> str:
    r"""Returns a template as a shell passes it, with line feeds for `\n`; `\\` is a backslash."""
    return re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", template)


def _pairs(flag: str, entries: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not (name and equals and text):
            raise ValueError(f"{flag} must be NAME=..., got {shown(entry)}.")
        pairs.append((name, text))
    return pairs
