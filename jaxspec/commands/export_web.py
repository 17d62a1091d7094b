"""`jaxspec export web`: a page that runs a model in a browser."""

import argparse
import time
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import Model, find_head
from jaxspec.commands.export_options import (
    add_acceptance_arguments,
    add_export_arguments,
    announce_export,
    check_flags,
    export_config,
    head_asked,
    held_out,
)
from jaxspec.commands.options import add_drafter_argument, load_model, note_other_model
from jaxspec.drafters import LoadedDrafter
from jaxspec.mobile.web import HEAP_LIMIT, PREFILL, choose_trees, export_web
from jaxspec.progress import progress_bar
from jaxspec.tuning import AcceptanceTable, load_acceptance, load_profile, load_tree
from jaxspec.tuning.measuring import measure_acceptance

ACCEPTANCE_FILE = "acceptance.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export web`."""
    parser.description = (
        "Writes a page that runs a model and its EAGLE head in a browser; needs npm. Serve it by "
        f"`jaxspec serve`. It counts accepted drafts on --prompts, or reads --acceptance or the "
        f"head's {ACCEPTANCE_FILE}."
    )
    settings = ("quantization", "check_gpu_ops")
    add_export_arguments(parser, settings=settings, out="FOLDER")
    add_drafter_argument(parser, required=True)
    add_acceptance_arguments(parser, required=False)
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="result of `tune profile`: add the tree that is fastest on its device",
    )


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    config = export_config(args, prefill=PREFILL)
    check_flags(args)
    model = load_model(args)
    drafter = head_asked(args, model)
    announce_export(args, drafter, config)
    profile = None if args.profile is None else load_profile(args.profile)
    note_other_model(profile, model)
    tree = args.drafter.settings.get("tree")
    given = None if tree is None else load_tree(tree)
    start = time.perf_counter()
    with progress_bar(5) as advance:
        acceptance = _acceptance(args, model, drafter, advance)
        trees = choose_trees(acceptance, profile, given)
        written = export_web(model, args.out, drafter, trees, acceptance, config, advance)
    table = Table(title="trees, the root excluded; tau includes the bonus token", box=box.SIMPLE)
    for column in ("function", "nodes", "depth", "tau expected"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for tree in written.profile["trees"]:
        cells = (tree["nodes"], tree["depth"], f"{tree['tokens_per_step']:.2f}")
        table.add_row(tree["signature"], *map(str, cells))
    console = Console(highlight=False)
    console.print(table)
    for part, size in written.payload.items():
        console.print(f"{size / 1e6:8.2f} MB  {part}")
    heap = written.profile["heap_bytes"]
    if heap > HEAP_LIMIT:
        console.print(
            f"wasm needs about {heap / 2**30:.1f} GiB and has 2: the page will refuse it."
        )
    print(f"{args.out}: {time.perf_counter() - start:.0f} s; now: jaxspec serve {args.out}")
    return 0


def _acceptance(
    args: argparse.Namespace, model: Model, drafter: LoadedDrafter, advance: Callable[[str], None]
) -> AcceptanceTable:
    """Counts a table, or reads the one that is given, or the one in the head's folder."""
    advance("counting accepted drafts")
    if args.prompts is not None:
        return measure_acceptance(model, drafter, held_out(args))
    of_head = find_head(args.drafter.settings["head"]) / ACCEPTANCE_FILE
    if args.acceptance is None and not of_head.is_file():
        raise ValueError(
            f"--acceptance: no {ACCEPTANCE_FILE} lies in the head's folder, so give --prompts "
            "FILE.jsonl to count accepted drafts, or --acceptance FILE."
        )
    return load_acceptance(args.acceptance or of_head)
