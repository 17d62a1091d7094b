"""`jaxspec bench`: drafters against plain decoding, over a file of prompts."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from jaxspec.bench.compare import compare, describe
from jaxspec.bench.prompts import FIELDS, read_prompts
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.options import (
    add_drafter_arguments,
    add_generation_arguments,
    add_model_arguments,
    announce,
    check_writable,
    drafter_spec,
    generation_config,
    load_model,
    make_drafter,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec bench`."""
    parser.description = (
        "Decodes every prompt plainly and with each drafter, in turns, and prints a table. "
        "Exits with 1 if a greedy output differs from plain decoding's by more than a tie."
    )
    add_model_arguments(parser)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl[.gz]")
    parser.add_argument(
        "--field", help=f"where the prompt is (default: the first of {', '.join(FIELDS)})"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="so many prompts at most")
    parser.add_argument("--shuffle-seed", type=int, metavar="N", help="shuffle before --limit")
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - for standard output")
    add_generation_arguments(parser)
    add_drafter_arguments(parser, repeatable=True)


def run(args: argparse.Namespace) -> int:
    """Measures as the arguments say; 1 if greedy outputs differ."""
    config = generation_config(args)
    check_writable(args.json)
    rows = read_prompts(args.prompts, args.field, args.limit, args.shuffle_seed)
    specs = filter(None, args.drafter or [drafter_spec("lookup")])
    drafters = {spec.text: make_drafter(spec, args) for spec in specs}
    model = load_model(args)
    announce(
        model=args.model,
        prompts=f"{len(rows)} of {args.prompts}",
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
    Console(stderr=args.json == "-", highlight=False).print(comparison)
    if args.json is not None:
        text = json.dumps(comparison.as_dict(), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
            print(f"wrote {args.json}", file=sys.stderr)
    return 0 if comparison.outputs_agree else EXIT_DIFFERENT
