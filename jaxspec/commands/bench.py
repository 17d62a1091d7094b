"""`jaxspec bench`: drafters against plain decoding, over a file of prompts or a fixed suite."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec.batch.guard_suite import GUARD_SUITES, measure_guard_suite, plot_curve, plot_place
from jaxspec.batch.guard_suite import as_dict as guard_as_dict
from jaxspec.batch.suite import BATCH_SUITES, measure_batch_suite
from jaxspec.batch.suite import as_dict as batch_as_dict
from jaxspec.bench.compare import compare, describe
from jaxspec.bench.diffusion import DIFFUSION_SUITES, measure_diffusion
from jaxspec.bench.page import write_part
from jaxspec.bench.prompts import FIELDS, read_prompts
from jaxspec.bench.results import as_dict, as_markdown, steps_as_dict
from jaxspec.bench.shipped import EVERY_METHOD, SUITES, measure, time_steps
from jaxspec.bench.table import as_tables
from jaxspec.checkpoint import load_eagle
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.options import (
    EVERY_DRAFTER,
    add_drafter_arguments,
    add_generation_arguments,
    add_mesh_argument,
    add_model_arguments,
    announce,
    check_writable,
    drafter_spec,
    generation_config,
    load_model,
    make_drafter,
    mesh_asked,
    refuse_unread,
)
from jaxspec.generation import encode_prompt
from jaxspec.mobile.comparison import compare_on_litert, num_parts
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.suites import LITERT_SUITES, measure_litert
from jaxspec.progress import progress_bar
from jaxspec.trees import load_tree
from jaxspec.trees.plots import check_plots

_NEW_TOKENS = 64
"""Of each text on LiteRT."""
_PROMPTS_OF_SUITES = ("data_folder", "prompts_per_set")
_OF_LITERT = ("head", "tree", "quantize")
_PLACES = ("model", "prompts", "runtime", "out", "json", "debug")
_LITERT_SETTINGS = (
    *_OF_LITERT,
    *("max_new_tokens", "field", "limit", "shuffle_seed", "dtype", "max_positions"),
)
"""What rows on LiteRT depend on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec bench`."""
    parser.description = (
        "Decodes every prompt plainly and with each drafter, in turns, and prints a table. "
        "Exits with 1 if a greedy output differs from plain decoding's by more than a tie. "
        "With --suite, what is decoded and how is fixed, and the tables go to a file."
    )
    add_model_arguments(parser, required=False)
    add_mesh_argument(parser)
    parser.add_argument("prompts", type=Path, nargs="?", metavar="PROMPTS.jsonl[.gz]")
    add_suite_arguments(parser)
    parser.add_argument(
        "--field", help=f"where the prompt is (default: the first of {', '.join(FIELDS)})"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="so many prompts at most")
    parser.add_argument("--shuffle-seed", type=int, metavar="N", help="shuffle before --limit")
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all figures; - or nothing for standard output",
    )
    add_generation_arguments(parser)
    add_drafter_arguments(parser, repeatable=True)
    add_litert_arguments(parser)
    parser.set_defaults(parser=parser, late_argument="prompts")


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--suite` and its settings."""
    suites = {**SUITES, **DIFFUSION_SUITES, **LITERT_SUITES, **BATCH_SUITES, **GUARD_SUITES}
    counts = ", ".join(f"{suite.prompts_per_set} of {name}" for name, suite in suites.items())
    group = parser.add_argument_group("suite, in place of MODEL and PROMPTS")
    group.add_argument("--suite", choices=tuple(suites), help="measure the models shipped here")
    group.add_argument(
        "--data-folder",
        type=Path,
        default=Path("../shared/data/eval"),
        metavar="FOLDER",
        help="of the suite's prompts (default: %(default)s)",
    )
    group.add_argument(
        "--out",
        type=Path,
        default=Path("checkpoints/RESULTS.md"),
        metavar="FILE.md",
        help="page whose part on this suite is replaced (default: %(default)s)",
    )
    group.add_argument(
        "--prompts-per-set", type=int, metavar="N", help=f"prompts of each file (default: {counts})"
    )


def add_litert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--runtime litert` and its settings."""
    group = parser.add_argument_group(
        "LiteRT: plain decoding, EAGLE's tree, a searched one and EAGLE-2 from the host, 1 thread"
    )
    group.add_argument(
        "--runtime", choices=("jax", "litert"), default="jax", help="default: %(default)s"
    )
    group.add_argument("--head", metavar="FOLDER", help="an EAGLE-1 or EAGLE-3 head")
    group.add_argument(
        "--tree", type=Path, metavar="FILE", help="the searched tree, of `tune tree`"
    )
    group.add_argument(
        "--quantize", default="int4,int8", metavar="NAME,...", help="default: %(default)s"
    )


def run_litert(args: argparse.Namespace) -> int:
    """Measures the paper's comparison on LiteRT, and writes its part of the page `--out`."""
    if args.prompts is None or args.head is None or args.tree is None:
        return args.parser.error(
            "--runtime litert: give MODEL, PROMPTS.jsonl, --head FOLDER and --tree FILE."
        )
    _refuse_foreign(args, (*_LITERT_SETTINGS, *_PLACES), "--runtime litert has no use for")
    check_writable(args.json)
    check_writable(args.out, "--out")
    new_tokens = _NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
    if new_tokens < 2:
        raise ValueError(
            "--max-new-tokens must be at least 2, as the first comes with the prompt, got "
            f"{new_tokens}."
        )
    quantizations = args.quantize.split(",")
    for name in quantizations:
        check_quantization(name)
    rows = read_prompts(Path(args.prompts), args.field, args.limit, args.shuffle_seed)
    searched = load_tree(args.tree)
    model = load_model(args)
    prompts = [encode_prompt(model, row.prompt) for row in rows]
    slots = min(1024, model.config.max_positions)
    longest = max(map(len, prompts))
    if longest > slots - 2:
        raise ValueError(
            f"{args.prompts}: a prompt has {longest} tokens, and a file of {slots} slots can draft "
            f"behind {slots - 2} at most; leave it out."
        )
    head = load_eagle(args.head, model.network)
    with progress_bar(num_parts(quantizations)) as advance:
        comparison = compare_on_litert(
            model,
            head,
            dict.fromkeys(quantizations, searched),
            prompts,
            new_tokens,
            slots,
            advance,
        )
    publish(comparison.as_markdown(_litert_command(args, model.name)), comparison.as_dict(), args)
    return 0


def _litert_command(args: argparse.Namespace, model: str) -> str:
    """What gives the same rows, with files by their names."""
    words = ["jaxspec", "bench", model, args.prompts.name, "--runtime", "litert"]
    for name in _LITERT_SETTINGS:
        value = getattr(args, name)
        if value != args.parser.get_default(name):
            named = Path(value).name if name in ("head", "tree") else str(value)
            words += [f"--{name.replace('_', '-')}", named]
    return shlex.join(words)


def _refuse_foreign(args: argparse.Namespace, known: Iterable[str], why: str) -> None:
    """Ends the program if other flags than these are given."""
    _refuse(args, vars(args).keys() - set(known), why)


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Ends the program if any of these flags is given."""
    given = [name for name in names if getattr(args, name) != args.parser.get_default(name)]
    if given:
        args.parser.error(f"{why} {', '.join(sorted(given))}; leave that out.")


def run_litert_suite(args: argparse.Namespace) -> int:
    """Measures a LiteRT suite and writes its part of the page."""
    suite = LITERT_SUITES[args.suite]
    count = _prompts_asked(args, suite.prompts_per_set)
    with progress_bar(suite.num_parts) as advance:
        measured = measure_litert(args.suite, args.data_folder, count, advance)
    publish(measured.markdown, measured.figures, args)
    return 0 if measured.as_it_should else EXIT_DIFFERENT


def run_diffusion_suite(args: argparse.Namespace) -> int:
    """Measures a suite of diffusion language models and writes its part of the page."""
    suite = DIFFUSION_SUITES[args.suite]
    count = _prompts_asked(args, suite.prompts_per_set)
    measured = measure_diffusion(args.suite, args.data_folder, count)
    publish(measured.markdown, measured.figures, args)
    return 0 if measured.as_it_should else EXIT_DIFFERENT


def run_batch_suite(args: argparse.Namespace) -> int:
    """Measures the suite of jobs and writes its part of the page."""
    suite = BATCH_SUITES[args.suite]
    suite = suite._replace(prompts_per_set=_prompts_asked(args, suite.prompts_per_set))
    figures, markdown = measure_batch_suite(suite, args.data_folder, args.repeats)
    publish(markdown, batch_as_dict(figures), args)
    return 0 if figures.as_it_should else EXIT_DIFFERENT


def run_guard_suite(args: argparse.Namespace) -> int:
    """Measures the guard's curve, writes its part of the page, and draws it."""
    check_plots()
    suite = GUARD_SUITES[args.suite]
    suite = suite._replace(prompts_per_set=_prompts_asked(args, suite.prompts_per_set))
    figures, markdown = measure_guard_suite(suite, args.data_folder, args.repeats)
    publish(markdown, guard_as_dict(figures), args)
    place = plot_place(args.out)
    plot_curve(figures.curve, place)
    print(f"wrote {place}", file=sys.stderr)
    return 0


def _prompts_asked(args: argparse.Namespace, default: int) -> int:
    return default if args.prompts_per_set is None else args.prompts_per_set


def publish(markdown: str, figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Puts a part into the page `--out`, and shows it; with all figures where `--json` says."""
    write_part(markdown, args.out)
    print(f"wrote {args.out}", file=sys.stderr)
    print(markdown, end="", file=sys.stderr if args.json == "-" else sys.stdout)
    write_figures(figures, args.json)


def run(args: argparse.Namespace) -> int:
    """Measures as the arguments say; 1 if greedy outputs differ."""
    if args.runtime == "litert":
        return run_litert(args)
    return run_prompts(args) if args.suite is None else run_suite(args)


def run_suite(args: argparse.Namespace) -> int:
    """Measures a suite and writes its page."""
    settings = ["suite", "out", "json", "debug"]
    if args.suite in {**SUITES, **BATCH_SUITES, **GUARD_SUITES}:
        settings.append("repeats")
    others = {**DIFFUSION_SUITES, **LITERT_SUITES}
    if "repeats" in settings or others[args.suite].prompt_sets:
        settings += _PROMPTS_OF_SUITES
    _refuse_foreign(args, settings, f"--suite {args.suite} fixes")
    check_writable(args.json)
    check_writable(args.out, "--out")
    if args.suite in DIFFUSION_SUITES:
        return run_diffusion_suite(args)
    if args.suite in BATCH_SUITES:
        return run_batch_suite(args)
    if args.suite in GUARD_SUITES:
        return run_guard_suite(args)
    if args.suite not in SUITES:
        return run_litert_suite(args)
    suite = SUITES[args.suite]
    count = _prompts_asked(args, suite.prompts_per_set)
    result = measure(args.suite, args.data_folder, count, args.repeats)
    publish(as_markdown(result), as_dict(result), args)
    return 0 if result.outputs_agree else EXIT_DIFFERENT


def run_prompts(args: argparse.Namespace) -> int:
    """Measures the drafters asked for over a file of prompts."""
    path = None if args.prompts is None else Path(args.prompts)
    if path is None:
        return args.parser.error("give MODEL and PROMPTS.jsonl, or --suite.")
    _refuse(args, (*_PROMPTS_OF_SUITES, "out"), "without --suite there is no use for")
    _refuse(args, _OF_LITERT, "without --runtime litert there is no use for")
    config = generation_config(args)
    check_writable(args.json)
    rows = read_prompts(path, args.field, args.limit, args.shuffle_seed)
    specs = [spec for spec in args.drafter or [drafter_spec("lookup")] if spec is not None]
    refuse_unread(args, specs)
    model = load_model(args, mesh_asked(args))
    drafters = {}
    for spec in specs:
        if spec.text != EVERY_DRAFTER:
            drafters[spec.text] = make_drafter(spec, args, model)
            continue
        made = {name: make(model) for name, make in EVERY_METHOD.items()}
        drafters |= {name: drafter for name, drafter in made.items() if drafter is not None}
        left_out = [name for name, drafter in made.items() if drafter is None]
        announce(left_out=", ".join(left_out) or "nothing")
    announce(
        model=args.model,
        prompts=f"{len(rows)} of {path}",
        drafters={name: describe(drafter) for name, drafter in drafters.items()},
        config=config,
        seed=args.seed,
    )
    prompts = [row.prompt for row in rows]
    if args.chat:
        prompts = [
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
    categories = [row.category for row in rows]
    comparison = compare(
        model,
        prompts,
        drafters,
        config,
        repeats=args.repeats,
        seed=args.seed,
        categories=categories if any(categories) else None,
    )
    every = any(spec.text == EVERY_DRAFTER for spec in specs)
    steps = time_steps(model, drafters, config, args.repeats) if every else {}
    tables = as_tables(comparison, {name: each.times for name, each in steps.items()})
    width = None if sys.stdout.isatty() else 120
    Console(stderr=args.json == "-", highlight=False, width=width).print(tables)
    of_steps = {name: steps_as_dict(each) for name, each in steps.items()}
    write_figures({**comparison.as_dict(), "steps": of_steps}, args.json)
    return 0 if comparison.outputs_agree else EXIT_DIFFERENT


def write_figures(figures: dict[str, Any], path: str | None) -> None:
    """Writes all figures to where `--json` says, if it does."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
