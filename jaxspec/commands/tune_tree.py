"""`jaxspec tune tree`: the draft tree that gives the most tokens per second on a device."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.tree import Tree as Drawing

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.checkpoint.trees import TREE_FILE
from jaxspec.commands.flags import add_flags, given
from jaxspec.commands.options import (
    add_drafter_argument,
    add_model_arguments,
    add_prompts_argument,
    announce,
    load_model,
    loaded_drafter_asked,
    note_other_model,
)
from jaxspec.core.tree import EAGLE_PATHS, Path
from jaxspec.core.types import Drafter
from jaxspec.decoding.request import GenerationConfig, PromptLike
from jaxspec.drafters import LoadedDrafter
from jaxspec.drafters.block import BlockSettings
from jaxspec.measure.prompts import FIELDS, read_prompts
from jaxspec.progress import progress_bar
from jaxspec.tuning import (
    AcceptanceTable,
    Candidate,
    LatencyProfile,
    TreeSearch,
    load_acceptance,
    load_profile,
    predict,
    probe_paths,
    save_acceptance,
    save_tree,
    search_tree,
    shipped_profiles,
    shipped_tables,
)
from jaxspec.tuning.latency import TableRow
from jaxspec.tuning.measuring import (
    CHAIN,
    SpeedPrediction,
    measure_acceptance,
    measure_exits,
    measure_trees,
    prediction_errors,
)
from jaxspec.tuning.plots import check_plots, draw_cost, draw_predictions, draw_tree, plot
from jaxspec.tuning.tree_search import table_row

SEARCH_FILE = "search.json"
_DEPTH = 5
_BLOCK_DEPTH = 8
"""Depth is cheap for drafters of blocks, but the tree to measure with grows with its 4th power."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune tree`."""
    parser.description = (
        "Searches the draft tree with the most tokens per second, from a latency profile and an "
        "acceptance table; with eagle and draft-model, and a profile of JAX, also the chain that "
        "ends early at the best threshold. MODEL, PROMPTS and --drafter measure the table; with "
        "--measure the best trees are then decoded with, in turns, and the fastest of them is "
        "written. Give held-out rows of training text, never the text that you evaluate on."
    )
    add_model_arguments(parser, required=False)
    add_prompts_argument(parser, required=False)
    add_drafter_argument(parser)
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help=f"a file of `tune profile`, or one of {', '.join(shipped_profiles())}",
    )
    parser.add_argument(
        "--acceptance",
        metavar="FILE",
        help=f"a table measured before, or one of {', '.join(shipped_tables())}",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="also print drafting, verification, tau and tokens/s of plain decoding, of EAGLE's "
        "own 25 nodes and of the fastest tree",
    )
    parser.add_argument(
        "--out",
        type=FilePath,
        metavar="FOLDER",
        help="write tree.json, search.json, tree.png and cost.png; acceptance.json if it is "
        "measured here; predicted.png with --measure",
    )
    text = parser.add_argument_group("decoding")
    text.add_argument(
        "--field", help=f"field of the prompt (default: the first of {', '.join(FIELDS)})"
    )
    for flag, default, meaning in (
        ("--limit", None, "read at most N prompts (default: all)"),
        ("--seed", 0, "seed of sampling (default: 0)"),
        ("--measure", 0, "decode with the N best trees, in turns (default: 0)"),
        ("--repeats", 3, "timed runs of --measure (default: 3)"),
    ):
        text.add_argument(flag, type=int, default=default, metavar="N", help=meaning)
    add_flags(text, GenerationConfig, ("max_new_tokens", "temperature"))
    limits = parser.add_argument_group("limits of the search")
    for name, meaning in (
        ("nodes", "draft tokens, the root excluded (default: up to 25)"),
        ("depth", f"levels (default: up to {_DEPTH}; {_BLOCK_DEPTH} if a pass drafts a block)"),
        ("width", "nodes of a level (default: no limit)"),
        ("branch", "children of a node (default: up to 4)"),
    ):
        limits.add_argument(f"--max-{name}", type=int, metavar="N", help=meaning)


def run(args: argparse.Namespace) -> int:
    """Searches, measures if asked to, prints and writes the result."""
    if args.model is None and (args.acceptance is None or args.measure):
        return args.parser.error("give --acceptance FILE, or MODEL, PROMPTS and --drafter.")
    if args.model is not None and args.prompts is None and (not args.acceptance or args.measure):
        return args.parser.error("give PROMPTS.jsonl to decode.")
    if args.model is None and args.drafter is not None:
        return args.parser.error("--drafter needs MODEL, to draft for.")
    if args.measure < 0 or args.repeats < 1:
        raise ValueError("--measure must be at least 0 and --repeats at least 1.")
    if args.out:
        check_plots()
    profile = load_profile(args.profile)
    acceptance = load_acceptance(args.acceptance) if args.acceptance else None
    setting = None if args.model is None else _setting(args)
    if setting is not None and acceptance is not None:
        acceptance.check_head(setting.drafter.params)
    if setting is not None:
        note_other_model(profile, setting.model)
    if acceptance is None:
        assert setting is not None, "asked for above"
        acceptance = _measure_acceptance(args, setting, profile)
    if not profile.ends_chains and (acceptance.exits or _ends_chains(setting)):
        print(
            "NOTE: chains that end early are left out: only JAX ends them, and --profile is of "
            f"{profile.runtime or 'no runtime that it names'}.",
            file=sys.stderr,
        )
    found = search_tree(
        acceptance,
        profile,
        max_nodes=args.max_nodes,
        max_depth=args.max_depth,
        max_width=args.max_width,
        max_branch=args.max_branch,
        num_best=max(10, args.measure) + 1,  # plain decoding may be one of them
        early_exit=profile.ends_chains,
    )
    predictions = []
    if args.measure:
        assert setting is not None, "asked for above"
        predictions = _measure_speeds(args, setting, found)
    best = _fastest(found, predictions)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    comparison = _compare(found.plain, best, acceptance, profile)
    _show(console, found, best, acceptance, predictions, comparison.shares)
    if args.table:
        _show_comparison(console, comparison, profile)
    if args.out:
        _write(args.out, found, best, acceptance, predictions, comparison, not args.acceptance)
    return 0


def _fastest(found: TreeSearch, predictions: Sequence[SpeedPrediction]) -> Candidate:
    """Returns the fastest tree: as measured, or as predicted where none was decoded with."""
    trees = [each for each in predictions if each.predicted.paths]
    if not trees:
        return found.best_draft
    return max(trees, key=lambda each: each.measured.tokens_per_second).predicted


class _Comparison(NamedTuple):
    """The fastest tree next to plain decoding and to EAGLE's own tree of 25 nodes.

    Attributes:
        rows: plain decoding, EAGLE's tree unless it is left out, the fastest tree.
        shares: of the accepted drafts of EAGLE's tree: on the path of first choices, next to it.
        left_out: the reason why EAGLE's tree is not there.
    """

    rows: tuple[TableRow, ...]
    shares: tuple[float, float] | None = None
    left_out: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        shares = None
        if self.shares is not None:
            shares = dict(zip(("on_main_path", "next_to_it"), self.shares, strict=True))
        return {
            "table": [dataclasses.asdict(row) for row in self.rows],
            "accepted_of_eagle_25": shares,
            "eagle_25_left_out": self.left_out,
        }


def _compare(
    plain: Candidate, best: Candidate, acceptance: AcceptanceTable, profile: LatencyProfile
) -> _Comparison:
    kind = "chain, which ends early" if best.threshold else "tree"
    rows = {"plain decoding": plain, f"the fastest {kind}": best}
    shares = left_out = None
    try:
        eagle = predict(EAGLE_PATHS, acceptance, profile)
        shares = acceptance.shares(EAGLE_PATHS)
        rows = {"plain decoding": plain, "EAGLE's 25 nodes": eagle, **rows}
    except ValueError as error:
        left_out = str(error)
    listed = (table_row(name, tree, acceptance, profile) for name, tree in rows.items())
    return _Comparison(tuple(listed), shares, left_out)


def _show_comparison(console: Console, comparison: _Comparison, profile: LatencyProfile) -> None:
    table = Table(
        title="budgets exclude the root, tau includes the bonus token; times of a step in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for column in ("budget", "drafting", "verification", "tau", "tokens/s", "x plain"):
        table.add_column(column, justify="right")
    plain = comparison.rows[0].tokens_per_second
    published = (dataclasses.replace(r, name=f"published: {r.name}") for r in profile.published)
    for row in (*comparison.rows, *published):
        table.add_row(
            row.name,
            str(row.nodes),
            f"{1e3 * row.draft_seconds:.2f}",
            f"{1e3 * row.target_seconds:.2f}",
            f"{row.tau:.2f}",
            f"{row.tokens_per_second:.2f}",
            f"{row.tokens_per_second / plain:.2f}",
        )
    console.print(table)
    if comparison.left_out is not None:
        console.print(f"EAGLE's 25 nodes are left out. {comparison.left_out}")


class _Setting(NamedTuple):
    """Arguments of the measurements."""

    model: Model
    drafter: LoadedDrafter
    prompts: Sequence[PromptLike]
    config: GenerationConfig


def _setting(args: argparse.Namespace) -> _Setting:
    prompts = []
    if args.prompts is not None:
        prompts = [row.prompt for row in read_prompts(args.prompts, args.field, args.limit)]
    model = load_model(args)
    drafter = loaded_drafter_asked(args, model)
    config = GenerationConfig(**given(args, GenerationConfig))
    announce(args, model=args.model, prompts=len(prompts), drafter=drafter.drafter, config=config)
    return _Setting(model, drafter, prompts, config)


def _ends_chains(setting: _Setting | None) -> bool:
    """True if the drafter can end a chain early."""
    return setting is not None and hasattr(setting.drafter.drafter, "threshold")


def _measure_acceptance(
    args: argparse.Namespace, setting: _Setting, profile: LatencyProfile
) -> AcceptanceTable:
    depth = _depth_to_measure(setting.drafter.drafter, args.max_depth)
    paths = probe_paths(depth, args.max_branch or 4)
    how: Any = {"seed": args.seed}
    ends_early = profile.ends_chains and _ends_chains(setting)
    with progress_bar(len(setting.prompts) * (1 + ends_early)) as advance:
        table = measure_acceptance(*setting, paths=paths, advance=advance, **how)
        if not ends_early:
            return table
        longest = args.max_depth or CHAIN
        exits = measure_exits(*setting, length=longest, advance=advance, **how)
        return dataclasses.replace(table, exits=exits)


def _measure_speeds(
    args: argparse.Namespace, setting: _Setting, found: TreeSearch
) -> list[SpeedPrediction]:
    """Decodes with the best trees and plainly."""
    trees = [candidate for candidate in found.ranking if candidate.paths]
    chosen = [*trees[: args.measure], found.plain]
    with progress_bar(len(setting.prompts)) as advance:
        measured = measure_trees(
            setting.model,
            setting.drafter,
            [candidate.paths for candidate in chosen],
            setting.prompts,
            setting.config,
            thresholds=[candidate.threshold for candidate in chosen],
            repeats=args.repeats,
            seed=args.seed,
            advance=advance,
        )
    return [SpeedPrediction(*pair) for pair in zip(chosen, measured, strict=True)]


def _depth_to_measure(drafter: Drafter, asked: int | None) -> int:
    """Returns the levels of the tree that acceptance is counted with.

    Raises:
        ValueError: more levels are asked for than a block has.
    """
    if not isinstance(drafter, BlockSettings):
        return asked or _DEPTH
    if asked is not None and asked > drafter.block:
        raise ValueError(
            f"--max-depth must be at most the block of the drafter, {drafter.block}, got {asked}."
        )
    return asked or min(_BLOCK_DEPTH, drafter.block)


def _show(
    console: Console,
    found: TreeSearch,
    best: Candidate,
    acceptance: AcceptanceTable,
    predictions: Sequence[SpeedPrediction],
    shares: tuple[float, float] | None,
) -> None:
    console.print(f"latency: {found.profile}")
    console.print(f"acceptance: {acceptance.source}")
    if shares is not None:
        main, neighbours = shares
        console.print(
            f"accepted drafts of EAGLE's 25 nodes (bonus excluded): {main + neighbours:.0%} on the "
            f"path of first choices ({main:.0%}) and next to it ({neighbours:.0%})"
        )
    limits = ", ".join(f"{name} {value}" for name, value in vars(found.limits).items())
    console.print(f"searched {found.num_shapes} shapes within {limits}")
    console.print(_ranking(found, predictions))
    if predictions:
        errors = prediction_errors(predictions)
        console.print(
            f"predicted against measured tokens/s of {errors.num_trees} trees: off by "
            f"{errors.median:.1%} in the median, {errors.worst:.1%} at worst; speed-up over plain "
            f"decoding, in which a change of the machine's speed since the profile cancels: "
            f"{errors.speedup_median:.1%} and {errors.speedup_worst:.1%}"
        )
    console.print(_drawing(best, acceptance))
    speeds = {each.predicted: each.measured.tokens_per_second for each in predictions}
    if not speeds:
        speeds = {each: each.tokens_per_second for each in (found.plain, best)}
    if speeds[found.plain] >= speeds[best]:
        console.print(
            f"Do not speculate here: plain decoding is faster than the best tree "
            f"({speeds[best]:.2f} tokens/s)."
        )


def _ranking(found: TreeSearch, predictions: Sequence[SpeedPrediction]) -> Table:
    table = Table(
        title="trees, fastest first; nodes exclude the root, tau includes the bonus token; chains "
        "with a threshold end early",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("nodes", "depth", "threshold", "tau", "ms/step", "tokens/s", "x plain"):
        table.add_column(column, justify="right")
    measured_of = {each.predicted: each for each in predictions}
    if predictions:
        for column in ("tau measured", "tokens/s measured", "error"):
            table.add_column(column, justify="right")
    for each in found.ranking:
        row = [
            str(each.nodes),
            str(each.depth),
            f"{each.threshold:g}" if each.threshold else "",
            f"{each.tau:.3f}",
            f"{1e3 * each.step_seconds:.2f}",
            f"{each.tokens_per_second:.2f}",
            f"{each.tokens_per_second / found.plain.tokens_per_second:.2f}",
        ]
        if each in measured_of:
            measured = measured_of[each].measured
            row += [f"{measured.tau:.3f}", f"{measured.tokens_per_second:.2f}"]
            row.append(f"{measured_of[each].error:+.1%}")
        elif predictions:
            row += ["", "", ""]
        table.add_row(*row)
    return table


def _drawing(best: Candidate, acceptance: AcceptanceTable) -> Drawing:
    """Draws the tree for the terminal: ranks and chances of acceptance."""
    root = Drawing(f"root ({best.nodes} nodes below)")
    branches: dict[Path, Drawing] = {(): root}
    for path in sorted(best.paths, key=lambda path: (len(path), path)):
        label = f"rank {path[-1]}, accepted {acceptance.chance(path, best.threshold):.0%}"
        branches[path] = branches[path[:-1]].add(label)
    return root


def _write(
    folder: FilePath,
    found: TreeSearch,
    best: Candidate,
    acceptance: AcceptanceTable,
    predictions: Sequence[SpeedPrediction],
    comparison: _Comparison,
    measured_here: bool,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"profile": found.profile, "acceptance": acceptance.source, "head": acceptance.head}
    # Even if plain decoding is faster: this file is for decoding with a draft.
    save_tree(best, folder / TREE_FILE, **facts)
    measured = [prediction.as_dict() for prediction in predictions]
    errors = prediction_errors(predictions)._asdict() if predictions else None
    with replacing_files(folder) as staging:
        entry = {**found.as_dict(), **comparison.as_dict()}
        entry |= {"measured": measured, "errors_of_prediction": errors}
        write_json(staging / SEARCH_FILE, entry)
    if measured_here:
        save_acceptance(acceptance, folder / "acceptance.json")
    size = (7.5, 1.5 + 1.1 * best.depth)
    plot(folder / "tree.png", draw_tree, best, acceptance, size=size)
    speeds = [(each.predicted.nodes, each.measured.tokens_per_second) for each in predictions]
    plot(folder / "cost.png", draw_cost, found, speeds)
    pictures = ["tree.png", "cost.png"]
    if predictions:
        pairs = [
            (each.predicted.tokens_per_second, each.measured.tokens_per_second)
            for each in predictions
        ]
        plot(folder / "predicted.png", draw_predictions, pairs, size=(4.8, 4.5))
        pictures.append("predicted.png")
    print(f"wrote {', '.join((TREE_FILE, SEARCH_FILE, *pictures))} in {folder}", file=sys.stderr)
