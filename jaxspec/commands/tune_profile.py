"""`jaxspec tune profile`: pass times of this device, or of one measured elsewhere."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import read_json
from jaxspec.commands.options import (
    add_drafter_argument,
    add_model_arguments,
    announce,
    check_writable,
    flags_of_names,
    load_model,
    loaded_drafter_asked,
    sizes,
)
from jaxspec.measure.step import CAPACITY
from jaxspec.mobile.profile import WEB_KEY, read_kit_log, read_web_profile
from jaxspec.progress import progress_bar
from jaxspec.tuning import LatencyProfile, Timing, load_profile, save_profile, shipped_profiles
from jaxspec.tuning.plots import check_plots, draw_latency, plot
from jaxspec.tuning.profiling import BATCHES, LEVELS, TOKENS, measure_profile

_OF_MEASURING = (
    *("drafter", "dtype", "weights", "max_positions"),
    *("tokens", "batches", "levels", "capacity", "repeats", "steps"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune profile`."""
    parser.description = (
        "Times target passes by tokens (the root included) and draft passes by nodes, for `tune "
        "tree`. Or reads a profile that was measured on another device, for `tune tree` or `tune "
        "skips`."
    )
    add_model_arguments(parser, required=False)
    add_drafter_argument(parser)
    parser.add_argument(
        "--import",
        dest="source",
        metavar="FILE",
        help="read a profile instead of measuring: a profile file, the output of the script of "
        "`export kit`, the file of a page of `export web`, "
        f"or one of {', '.join(shipped_profiles())}",
    )
    for flag, default, meaning in (
        ("--tokens", TOKENS, "tokens of target passes"),
        ("--batches", BATCHES, "nodes of draft passes"),
        ("--levels", LEVELS, "levels of the trees whose first draft pass is timed"),
    ):
        parser.add_argument(
            flag,
            type=sizes,
            default=default,
            metavar="N,...",
            help=f"{meaning} (default: {','.join(map(str, default))})",
        )
    for flag, default, meaning in (
        (
            "--capacity",
            CAPACITY,
            "tokens that the caches hold: the length of a prompt and its output",
        ),
        ("--repeats", 9, "timed runs of each loop"),
        ("--steps", 64, "steps of a timed loop"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    parser.add_argument("--name", default="", help="name of the profile")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the profile")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw target times by budget, together with the shipped profiles",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measures or reads a profile, and prints it."""
    if (args.model is None) == (args.source is None):
        return args.parser.error("give MODEL to measure, or --import FILE.")
    if args.source is not None:
        given = [n for n in _OF_MEASURING if getattr(args, n) != args.parser.get_default(n)]
        if given:
            raise ValueError(f"{flags_of_names(given)}: --import measures nothing; leave this out.")
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
        plot(args.plot, draw_latency, [profile, *(each for each in others if each != profile)])
        print(f"wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps(profile.as_dict(), indent=2))
    else:
        show_profile(profile)
    return 0


def _read(source: str) -> LatencyProfile:
    """Reads a profile, the file of a page, or the log of a phone's benchmark tool (not JSON)."""
    if not Path(source).is_file():
        return load_profile(source)
    with Path(source).open("rb") as file:
        is_json = file.read(1 << 16).lstrip().startswith(b"{")
    if not is_json:
        return read_kit_log(source)
    return read_web_profile(source) if WEB_KEY in read_json(Path(source)) else load_profile(source)


def _measure(args: argparse.Namespace) -> LatencyProfile:
    model: Model = load_model(args)
    drafter = loaded_drafter_asked(args, model)
    announce(
        args, model=args.model, drafter=drafter.drafter, tokens=args.tokens, batches=args.batches
    )
    programs = len({1, *args.tokens}) + 2 * len({1, *args.batches}) + len({1, *args.levels})
    with progress_bar(programs + 2) as advance:
        return measure_profile(
            model,
            drafter,
            tokens=args.tokens,
            batches=args.batches,
            levels=args.levels,
            capacity=args.capacity,
            num_steps=args.steps,
            repeats=args.repeats,
            name=args.name,
            advance=advance,
        )


def show_profile(profile: LatencyProfile) -> None:
    """Prints all times, each also divided by that of one token or node."""
    console = Console(highlight=False)
    console.print(f"{profile.name}: {profile.device}, {profile.runtime}, {profile.dtype}")
    console.print(f"quantization of weights: {profile.quantization}. {profile.source}")
    console.print(_table("target passes: tokens, the root included", profile.target))
    if profile.partial is not None:
        sets = dataclasses.asdict(profile.partial)
        of_layers = sets.pop("num_layers")
        listed = (f"{n.replace('_', ' ')} {1e3 * t:.3f} ms" for n, t in sets.items())
        console.print(f"a draft token of the model's {of_layers} layers: {', '.join(listed)}")
    if not profile.draft:
        return
    console.print(_table("draft passes: nodes", profile.draft))
    if profile.first_draft:
        title = "first draft pass of a step: levels of the tree"
        console.print(_table(title, profile.first_draft))
    if profile.one_pass:
        block = int(min(profile.max_levels, profile.max_tokens - 1))
        costs = ",".join(f"{name}={cost:g}" for name, cost in profile.block_costs(block).items())
        console.print(f"blocks of {block} with adaptive=1: {costs}")
        return
    slowest = max(timing.seconds for timing in profile.draft if timing.size <= 4)
    console.print(
        f"of draft passes of up to 4 nodes, the slowest takes "
        f"{slowest / profile.draft[0].seconds:.2f} times as long as that of one"
    )


def _table(title: str, timings: tuple[Timing, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("size", "ms", "+- ms", "over size 1"):
        table.add_column(column, justify="right")
    for timing in timings:
        table.add_row(
            str(timing.size),
            f"{1e3 * timing.seconds:.3f}",
            "" if timing.spread is None else f"{1e3 * timing.spread:.3f}",
            f"{timing.seconds / timings[0].seconds:.2f}",
        )
    return table
