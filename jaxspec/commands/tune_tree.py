"""`jaxspec tune tree`: which draft tree gives the most tokens per second on a device."""

import argparse
import sys
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path as FilePath

from rich import box
from rich.console import Console
from rich.table import Table
from rich.tree import Tree as Drawing

from jaxspec.bench.prompts import FIELDS, read_prompts
from jaxspec.bench.tuning import (
    Prediction,
    measure_acceptance,
    measure_trees,
    prediction_errors,
)
from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.commands.options import add_model_arguments, announce, load_model
from jaxspec.commands.tune_profile import (
    add_tree_drafter_arguments,
    load_tree_drafter,
    named_drafter,
)
from jaxspec.core.tree import Path
from jaxspec.core.types import Drafter
from jaxspec.drafters.block import BlockSettings
from jaxspec.generation import GenerationConfig
from jaxspec.progress import progress_bar
from jaxspec.trees import (
    AcceptanceTable,
    Candidate,
    LatencyProfile,
    TreeSearch,
    calibration_sensitivity,
    load_acceptance,
    load_profile,
    probe_paths,
    save_acceptance,
    save_tree,
    search_tree,
    shipped_profiles,
    shipped_tables,
)
from jaxspec.trees.plots import check_plots, plot_cost, plot_predictions, plot_tree
from jaxspec.trees.search import TREE_FILE

SEARCH_FILE = "search.json"
_DEPTH = 5
_BLOCK_DEPTH = 8
"""Deeper ones cost little there, but the tree to measure with grows with its fourth power."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune tree`."""
    parser.description = (
        "Searches the draft tree with the most tokens per second, from a latency profile and an "
        "acceptance table. With MODEL, PROMPTS and a drafter the table is measured; with --measure "
        "the best trees are then decoded with, in turns. Give held-out rows of training text, "
        "never what you evaluate on."
    )
    add_model_arguments(parser, required=False)
    parser.add_argument("prompts", type=FilePath, nargs="?", metavar="PROMPTS.jsonl[.gz]")
    add_tree_drafter_arguments(parser)
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help=f"of `tune profile`, or one of {', '.join(shipped_profiles())}",
    )
    parser.add_argument(
        "--acceptance",
        metavar="FILE",
        help=f"a table measured before, or one of {', '.join(shipped_tables())}",
    )
    text = parser.add_argument_group("decoding")
    text.add_argument(
        "--field", help=f"where the prompt is (default: the first of {', '.join(FIELDS)})"
    )
    text.add_argument("--limit", type=int, metavar="N", help="so many prompts at most")
    text.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s"
    )
    text.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    text.add_argument("--seed", type=int, default=0, metavar="N")
    limits = parser.add_argument_group("limits of the search")
    for name, meaning in (
        ("nodes", "draft tokens, the root excluded (default: up to 25)"),
        ("depth", f"levels (default: up to {_DEPTH}; {_BLOCK_DEPTH} where a pass drafts a block)"),
        ("width", "nodes of a level (default: any)"),
        ("branch", "children of a node (default: up to 4)"),
    ):
        limits.add_argument(f"--max-{name}", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--measure", type=int, default=0, metavar="K", help="decode with the K best trees, in turns"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of --measure")
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="search again under other calibrations of the inferred table",
    )
    parser.add_argument(
        "--out",
        type=FilePath,
        metavar="FOLDER",
        help="write tree.json, search.json, tree.png and cost.png (acceptance.json if measured, "
        "predicted.png with --measure)",
    )
    parser.set_defaults(parser=parser, late_argument="prompts")


def run(args: argparse.Namespace) -> int:
    """Searches, measures if asked to, shows and writes."""
    if args.model is None and (args.acceptance is None or args.measure):
        return args.parser.error("give --acceptance FILE, or MODEL, PROMPTS and a drafter.")
    if args.model is not None and args.prompts is None and (not args.acceptance or args.measure):
        return args.parser.error("give PROMPTS.jsonl to decode.")
    if args.model is None and (named_drafter(args) or args.block is not None):
        return args.parser.error(
            "--head, --draft-model, --deer, --dflash and --block need MODEL, to draft for."
        )
    if args.measure < 0 or args.repeats < 1:
        raise ValueError("--measure must be at least 0 and --repeats at least 1.")
    if args.out:
        check_plots()
    profile = load_profile(args.profile)
    given = load_acceptance(args.acceptance) if args.acceptance else None
    prompts, model, drafter = [], None, None
    config = GenerationConfig(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    if args.model is not None:
        if args.prompts is not None:
            prompts = [row.prompt for row in read_prompts(args.prompts, args.field, args.limit)]
        model = load_model(args)
        drafter = load_tree_drafter(args, model)
        announce(model=args.model, prompts=len(prompts), drafter=drafter.drafter, config=config)
    if given is None:
        assert model is not None
        assert drafter is not None
        depth = _depth_to_measure(drafter.drafter, args.max_depth)
        with progress_bar(len(prompts)) as advance:
            acceptance = measure_acceptance(
                model,
                drafter,
                prompts,
                config,
                paths=probe_paths(depth, args.max_branch or 4),
                seed=args.seed,
                advance=advance,
            )
    else:
        acceptance = given
        if drafter is not None:
            acceptance.check_head(drafter.params)
    found = search_tree(
        acceptance,
        profile,
        max_nodes=args.max_nodes,
        max_depth=args.max_depth,
        max_width=args.max_width,
        max_branch=args.max_branch,
        num_best=max(10, args.measure) + 1,  # plain decoding may be one of them
    )
    predictions: list[Prediction] = []
    if args.measure:
        trees = [candidate for candidate in found.ranking if candidate.paths]
        chosen = [*trees[: args.measure], found.plain]
        assert model is not None
        assert drafter is not None
        with progress_bar(len(prompts)) as advance:
            measured = measure_trees(
                model,
                drafter,
                [candidate.paths for candidate in chosen],
                prompts,
                config,
                repeats=args.repeats,
                seed=args.seed,
                advance=advance,
            )
        predictions = list(starmap(Prediction, zip(chosen, measured, strict=True)))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    _show(console, found, acceptance, predictions)
    if args.sensitivity and acceptance.counts:
        console.print("--sensitivity: left out, as this table was counted, not inferred.")
    elif args.sensitivity:
        console.print(_sensitivity(profile, found))
    if args.out:
        _write(args.out, found, acceptance, predictions, measured_here=given is None)
    return 0


def _depth_to_measure(drafter: Drafter, asked: int | None) -> int:
    """Levels of the tree that acceptance is counted with.

    Raises:
        ValueError: more are asked for than a block has.
    """
    if not isinstance(drafter, BlockSettings):
        return asked or _DEPTH
    if asked is not None and asked > drafter.block:
        raise ValueError(f"--max-depth must be at most --block, {drafter.block}, got {asked}.")
    return asked or min(_BLOCK_DEPTH, drafter.block)


def _show(
    console: Console,
    found: TreeSearch,
    acceptance: AcceptanceTable,
    predictions: Sequence[Prediction],
) -> None:
    console.print(f"latency: {found.profile}")
    console.print(f"acceptance: {acceptance.source}")
    if acceptance.counts:
        main, neighbours = acceptance.shares()
        console.print(
            f"accepted drafts (bonus excluded): {main:.0%} on the path of first choices, "
            f"{neighbours:.0%} beside it"
        )
    limits = ", ".join(f"{name} {value}" for name, value in found.limits._asdict().items())
    console.print(
        f"searched {found.num_shapes} shapes within {limits}; {found.num_grid_trees} trees in the "
        "paper's grid; draft passes no wider than the profile's widest"
    )
    for reason in found.left_out:
        console.print(f"left out: {reason}")
    console.print(_ranking(found, predictions))
    if predictions:
        errors = prediction_errors(predictions)
        console.print(
            f"predicted beside measured tokens/s of {errors.num_trees} trees: off by "
            f"{errors.median:.1%} in the median, {errors.worst:.1%} at worst; speed-up over plain "
            f"decoding, where a change of the machine's own speed since the profile cancels: "
            f"{errors.speedup_median:.1%} and {errors.speedup_worst:.1%}"
        )
    console.print(_drawing(found.best_draft, acceptance))
    if not found.best.paths:
        console.print(
            f"Do not speculate here: no tree is worth its time, the best has "
            f"{found.best_draft.tokens_per_second:.2f} tokens/s."
        )


def _ranking(found: TreeSearch, predictions: Sequence[Prediction]) -> Table:
    table = Table(
        title="trees, fastest first; nodes exclude the root, tau includes the bonus token",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("nodes", "depth", "tau", "ms/step", "tokens/s", "x plain"):
        table.add_column(column, justify="right")
    by_paths = {each.predicted.paths: each for each in predictions}
    if predictions:
        for column in ("tau measured", "tokens/s measured", "error"):
            table.add_column(column, justify="right")
    table.add_column("found by")
    for each in found.ranking:
        row = [
            str(each.nodes),
            str(each.depth),
            f"{each.tau:.3f}",
            f"{1e3 * each.step_seconds:.2f}",
            f"{each.tokens_per_second:.2f}",
            f"{each.tokens_per_second / found.plain.tokens_per_second:.2f}",
        ]
        if each.paths in by_paths:
            measured = by_paths[each.paths].measured
            row += [f"{measured.tau:.3f}", f"{measured.tokens_per_second:.2f}"]
            row.append(f"{by_paths[each.paths].error:+.1%}")
        elif predictions:
            row += ["", "", ""]
        table.add_row(*row, ", ".join(each.found_by))
    return table


def _drawing(best: Candidate, acceptance: AcceptanceTable) -> Drawing:
    """The tree in the terminal: ranks, and the chance that each node is accepted."""
    root = Drawing(f"root ({best.nodes} nodes below)")
    branches: dict[Path, Drawing] = {(): root}
    for path in sorted(best.paths, key=lambda path: (len(path), path)):
        label = f"rank {path[-1]}, accepted {acceptance.chance(path):.0%}"
        branches[path] = branches[path[:-1]].add(label)
    return root


def _sensitivity(profile: LatencyProfile, found: TreeSearch) -> Table:
    table = Table(
        title="the same search if the inferred rates were others: its best tree, and the one above",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    columns = ("rates by rank", "tau of EAGLE's tree", "decay", "nodes", "depth", "tau", "tokens/s")
    for column in (*columns, "tau, tree above", "tokens/s, tree above"):
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in calibration_sensitivity(profile, found.best.paths, min(12, found.limits.nodes)):
        table.add_row(
            row.shape,
            f"{row.tau:.2f}",
            f"{row.decay:.2f}",
            str(row.best.nodes),
            str(row.best.depth),
            f"{row.best.tau:.2f}",
            f"{row.best.tokens_per_second:.2f}",
            f"{row.chosen.tau:.2f}",
            f"{row.chosen.tokens_per_second:.2f}",
        )
    return table


def _write(
    folder: FilePath,
    found: TreeSearch,
    acceptance: AcceptanceTable,
    predictions: Sequence[Prediction],
    measured_here: bool,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"profile": found.profile, "acceptance": acceptance.source, "head": acceptance.head}
    # Where plain decoding is faster still, the best of the trees: who asks for a draft gets one.
    save_tree(found.best_draft, folder / TREE_FILE, **facts)
    measured = [prediction.as_dict() for prediction in predictions]
    errors = prediction_errors(predictions)._asdict() if predictions else None
    with replacing_files(folder) as staging:
        entry = {**found.as_dict(), "measured": measured, "errors_of_prediction": errors}
        write_json(staging / SEARCH_FILE, entry)
    if measured_here:
        save_acceptance(acceptance, folder / "acceptance.json")
    plot_tree(found.best_draft, acceptance, folder / "tree.png")
    pictures = ["tree.png", "cost.png"]
    speeds = [(each.predicted.nodes, each.measured.tokens_per_second) for each in predictions]
    plot_cost(found, folder / "cost.png", speeds)
    if predictions:
        plot_predictions(
            [
                (each.predicted.tokens_per_second, each.measured.tokens_per_second)
                for each in predictions
            ],
            folder / "predicted.png",
        )
        pictures.append("predicted.png")
    print(f"wrote {', '.join((TREE_FILE, SEARCH_FILE, *pictures))} in {folder}", file=sys.stderr)
