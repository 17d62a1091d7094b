"""`jaxspec tune profile`: what passes cost on this device, or on one measured elsewhere."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.bench.step import SLOTS
from jaxspec.bench.tuning import BATCHES, LEVELS, TOKENS, measure_profile
from jaxspec.checkpoint import Model, load, load_dflash, load_eagle
from jaxspec.checkpoint.files import read_json
from jaxspec.commands.options import (
    add_model_arguments,
    announce,
    check_writable,
    load_model,
    refuse_unused,
    sizes,
)
from jaxspec.drafters import Deer, DFlash, DraftModel, Eagle, LoadedDrafter
from jaxspec.mobile.profile import WEB_KEY, read_kit_log, read_web_profile
from jaxspec.progress import progress_bar
from jaxspec.trees import LatencyProfile, Timing, load_profile, save_profile, shipped_profiles
from jaxspec.trees.plots import check_plots, plot_latency

_OF_MEASURING = (
    *("head", "draft_model", "deer", "dflash", "block", "dtype", "max_positions"),
    *("tokens", "batches", "levels", "slots", "repeats", "steps"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune profile`."""
    parser.description = (
        "Times target passes by their tokens (the root included) and draft passes by their nodes, "
        "as `tune tree` needs them; or reads a profile that was measured on another device."
    )
    add_model_arguments(parser, required=False)
    add_tree_drafter_arguments(parser)
    parser.add_argument(
        "--import",
        dest="source",
        metavar="FILE",
        help="read a profile instead: a file, what the script of `export --latency-kit` printed, "
        "what a page of `export --web` measured, "
        f"or one of {', '.join(shipped_profiles())}",
    )
    parser.add_argument(
        "--tokens",
        type=sizes,
        default=TOKENS,
        metavar="N,...",
        help=f"of target passes (default: {','.join(map(str, TOKENS))})",
    )
    parser.add_argument(
        "--batches",
        type=sizes,
        default=BATCHES,
        metavar="N,...",
        help=f"nodes of draft passes (default: {','.join(map(str, BATCHES))})",
    )
    parser.add_argument(
        "--levels",
        type=sizes,
        default=LEVELS,
        metavar="N,...",
        help="of the trees whose first draft pass is timed, which also reads what the last step "
        f"emitted (default: {','.join(map(str, LEVELS))})",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=SLOTS,
        metavar="N",
        help="of the caches, which passes read: as many as prompt and output take together "
        "(default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=64, metavar="N", help="in a timed loop (default: %(default)s)"
    )
    parser.add_argument("--name", default="", help="of the profile")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw latency against budget, over that of one token, beside the shipped profiles",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(parser=parser)


def add_tree_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the drafters that draft over any static tree; one of them is to be named."""
    group = parser.add_argument_group("drafter").add_mutually_exclusive_group()
    group.add_argument(
        "--head", metavar="FOLDER", help="of an EAGLE-1 or EAGLE-3 head, or a shipped name"
    )
    group.add_argument("--draft-model", metavar="MODEL", help="folder, shipped name or Hub id")
    group.add_argument(
        "--deer", metavar="MODEL", help="a diffusion model that drafts a block in one pass"
    )
    group.add_argument("--dflash", metavar="FOLDER", help="of a DFlash head, or a shipped name")
    parser.add_argument(
        "--block", type=int, metavar="N", help="positions of a draft of --deer or --dflash"
    )


def load_tree_drafter(args: argparse.Namespace, model: Model) -> LoadedDrafter:
    """The drafter that was named.

    Raises:
        ValueError: a flag would be ignored, or a setting is out of range.
    """
    if args.head or args.draft_model:
        refuse_unused(args, ("block",), "needs --deer or --dflash.")
    if args.head:
        return Eagle.of(load_eagle(args.head, model.network))
    if args.draft_model:
        return DraftModel.of(load(args.draft_model, dtype=args.dtype))
    if args.deer:
        block = Deer.block if args.block is None else args.block
        return Deer.of(load(args.deer, dtype=args.dtype), block)
    if args.dflash:
        return DFlash.of(load_dflash(args.dflash, model.network), args.block)
    return args.parser.error(
        "name the drafter: --head FOLDER, --draft-model MODEL, --deer MODEL or --dflash FOLDER."
    )


def named_drafter(args: argparse.Namespace) -> str | None:
    """What a flag of `add_tree_drafter_arguments` names."""
    return args.head or args.draft_model or args.deer or args.dflash


def run(args: argparse.Namespace) -> int:
    """Measures or reads a profile, and shows it."""
    if (args.model is None) == (args.source is None):
        return args.parser.error("give MODEL to measure, or --import FILE.")
    if args.source is not None:
        _refuse_measuring(args)
    check_writable(args.out, "--out")
    check_writable(args.plot, "--plot")
    if args.plot:
        check_plots()
    if args.repeats < 2 or args.steps < 1:
        raise ValueError("--repeats must be at least 2, for a spread, and --steps at least 1.")
    profile = _read(args.source) if args.source else _measure(args)
    if args.source and args.name:
        profile = dataclasses.replace(profile, name=args.name)
    if args.out:
        save_profile(profile, args.out)
        print(f"wrote {args.out}", file=sys.stderr)
    if args.plot:
        others = [load_profile(name) for name in shipped_profiles()]
        plot_latency([profile, *(other for other in others if other != profile)], args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps(profile.as_dict(), indent=2))
    else:
        show_profile(profile)
    return 0


def _refuse_measuring(args: argparse.Namespace) -> None:
    given = [n for n in _OF_MEASURING if getattr(args, n) != args.parser.get_default(n)]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags}: --import measures nothing; leave that out.")


def _read(source: str) -> LatencyProfile:
    """A profile, what a page measured, or the log of a phone's benchmark tool, which is no JSON."""
    if not Path(source).is_file():
        return load_profile(source)
    if not Path(source).read_bytes().lstrip().startswith(b"{"):
        return read_kit_log(source)
    return read_web_profile(source) if WEB_KEY in read_json(Path(source)) else load_profile(source)


def _measure(args: argparse.Namespace) -> LatencyProfile:
    model = load_model(args)
    drafter = load_tree_drafter(args, model)
    announce(model=args.model, drafter=drafter.drafter, tokens=args.tokens, batches=args.batches)
    programs = len({1, *args.tokens}) + 2 * len({1, *args.batches}) + len({1, *args.levels})
    with progress_bar(programs + 2) as advance:
        return measure_profile(
            model,
            drafter,
            tokens=args.tokens,
            batches=args.batches,
            levels=args.levels,
            slots=args.slots,
            num_steps=args.steps,
            repeats=args.repeats,
            name=args.name,
            advance=advance,
        )


def show_profile(profile: LatencyProfile) -> None:
    """Prints all times, each beside that of one token or node."""
    console = Console(highlight=False)
    console.print(f"{profile.name}: {profile.device}, {profile.runtime}, {profile.dtype}")
    console.print(f"weights quantised: {profile.quantisation}. {profile.source}")
    console.print(_table("target passes: tokens, the root included", profile.target))
    console.print(_table("draft passes: nodes", profile.draft))
    if profile.first_draft:
        title = "a step's first draft pass: levels of the tree"
        console.print(_table(title, profile.first_draft))
    flat = max(timing.seconds for timing in profile.draft if timing.size <= 4)
    console.print(
        f"of draft passes of up to 4 nodes, the slowest takes "
        f"{flat / profile.draft[0].seconds:.2f} times as long as that of one"
    )


def _table(title: str, timings: tuple[Timing, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("size", "ms", "+- ms", "over size 1"):
        table.add_column(column, justify="right")
    for size, seconds, spread in timings:
        table.add_row(
            str(size),
            f"{1e3 * seconds:.3f}",
            "" if spread is None else f"{1e3 * spread:.3f}",
            f"{seconds / timings[0].seconds:.2f}",
        )
    return table
