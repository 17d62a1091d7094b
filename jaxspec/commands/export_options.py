"""Flags that several subcommands of `jaxspec export` share, and their meaning."""

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import Model, load
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.flags import add_flags, given
from jaxspec.commands.options import add_model_arguments, announce, make_drafter
from jaxspec.commands.parser import add_place
from jaxspec.core.tree import Path as RankPath
from jaxspec.drafters import LoadedDrafter
from jaxspec.measure.compare import describe
from jaxspec.measure.prompts import read_prompts
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.gpu import TIMEOUT, check_gpu
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.tuning import shipped_tables
from jaxspec.tuning.measuring import with_tree

_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--prompts": {
        "type": Path,
        "metavar": "FILE.jsonl",
        "help": "held-out text, on which drafts are counted or files compared",
    },
    "--limit": {"type": int, "metavar": "N", "help": "read at most N of the --prompts"},
    "--acceptance": {
        "metavar": "FILE",
        "help": "how often drafts are accepted: a table that was counted before, or one of "
        f"{', '.join(shipped_tables())}",
    },
    "--threads": {"type": int, "metavar": "N", "help": "of the CPU (default: 1)"},
    "--check-gpu": {
        "action": "store_true",
        "help": "then compile the file with LiteRT's GPU accelerator (any Vulkan driver) and "
        "compare its tokens, in a child process",
    },
    "--gpu-timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": f"for all of --check-gpu (default: {TIMEOUT:.0f})",
    },
}


def add_export_arguments(
    parser: argparse.ArgumentParser,
    *flags: str,
    settings: Collection[str] = ("quantization",),
    out: str = "OUT",
    required: str | None = None,
) -> None:
    """Declares the model, the folder to write into, settings of files, and `flags`.

    Args:
        parser: the parser of a subcommand.
        flags: flags of `_FLAGS`.
        settings: fields of `ExportConfig`, besides the capacity, the sizes of prefill and the
            texts of calibration.
        out: name of the folder in the help.
        required: a flag of `_FLAGS` that must be given.
    """
    add_model_arguments(parser)
    add_place(parser, "out", *("-o", "--out"), metavar=out, help="folder to write into", kind=Path)
    add_flags(parser, ExportConfig, ("capacity", "prefill", "calibration", *settings))
    for flag in flags:
        parser.add_argument(flag, **_FLAGS[flag])
    if required is not None:
        parser.add_argument(required, **_FLAGS[required], required=True)


def add_acceptance_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declares `--acceptance` and `--prompts`, of which one may be given, and `--limit`."""
    group = parser.add_mutually_exclusive_group(required=required)
    for flag in ("--acceptance", "--prompts"):
        group.add_argument(flag, **_FLAGS[flag])
    parser.add_argument("--limit", **_FLAGS["--limit"])


def check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that would be ignored, and values that are out of range.

    Raises:
        ValueError: naming the flag.
    """
    values = vars(args).items()
    asked = {name for name, value in values if value is not None and value is not False}
    if "limit" in asked and "prompts" not in asked:
        raise ValueError("--limit: needs --prompts FILE.jsonl.")
    if "threads" in asked and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}.")
    if "gpu_timeout" in asked and not args.gpu_timeout > 0:
        raise ValueError(f"--gpu-timeout must be above 0 seconds, got {args.gpu_timeout:g}.")
    if "gpu_timeout" in asked and "check_gpu" not in asked:
        raise ValueError("--gpu-timeout: needs --check-gpu.")
    if "check_gpu" in asked and (lacking := missing_for_gpu()) is not None:
        raise ValueError(f"--check-gpu: {lacking}.")


def export_config(args: argparse.Namespace, **defaults: Any) -> ExportConfig:
    """Makes the settings that are asked for; other flags keep `defaults` or the usual values.

    Raises:
        ValueError: naming the setting that is out of range.
    """
    return ExportConfig(**{**defaults, **given(args, ExportConfig)})


def load_unread(args: argparse.Namespace) -> Model:
    """Loads the target for commands that only export it: weights stay in files until written.

    A calibration decodes with the model, so it is then loaded as a whole.
    """
    form = QUANTIZATIONS.get(given(args, ExportConfig).get("quantization", ""))
    weights = args.weights if form is not None and form.calibrated else args.weights or "files"
    return load(args.model, args.dtype, args.max_positions, weights=weights)


def head_asked(
    args: argparse.Namespace, model: Model, otherwise: Sequence[RankPath] | None = None
) -> LoadedDrafter:
    """Loads the EAGLE head of `--drafter` over its tree.

    Args:
        args: with `--drafter`.
        model: the target.
        otherwise: the tree of a drafter without the setting `tree`; `None`: that of `Eagle.of`.

    Raises:
        ValueError: the drafter is no EAGLE head over a static tree, or as `make_drafter` raises.
    """
    spec = args.drafter
    if spec is None or spec.name != "eagle":
        given = "none" if spec is None else spec.text
        raise ValueError(
            f"--drafter: must be an EAGLE head over a static tree, eagle:head=HEAD, got {given}."
        )
    made = make_drafter(spec, args, model)
    assert isinstance(made, LoadedDrafter), "a head has weights"
    return made if otherwise is None or "tree" in spec.settings else with_tree(made, otherwise)


def announce_export(args: argparse.Namespace, drafter: Any, config: ExportConfig) -> None:
    """Prints the resolved settings on standard error."""
    announce(args, model=args.model, drafter=describe(drafter), config=config)


def held_out(args: argparse.Namespace) -> list[Any]:
    """Reads the prompts of `--prompts`."""
    return [row.prompt for row in read_prompts(args.prompts, None, args.limit)]


def print_written(path: Path, start: float) -> None:
    """Prints the size of a written file, and the seconds since `start`."""
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - start:.0f} s")


def check_on_gpu(args: argparse.Namespace, path: Path) -> int:
    """Runs `--check-gpu` if it is asked for, and returns the exit code."""
    if not args.check_gpu:
        return 0
    checked = check_gpu(path, timeout=TIMEOUT if args.gpu_timeout is None else args.gpu_timeout)
    print(checked)
    return EXIT_DIFFERENT if checked.problems else 0
