"""`python -m benchmarks SUITE`: measures a suite and writes its page.

Without a suite it lists them.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import measure
from benchmarks.page import RESULTS, publish
from benchmarks.prompts import DATA_FOLDER
from benchmarks.suites import SUITES
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.options import check_writable

_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"help": "a shipped model, a folder or a Hub id, where a suite takes one"},
    "folder": {"help": "where a suite that trains keeps its models"},
    "draft_model": {"help": "a smaller model that drafts"},
    "prompts": {"help": "a .jsonl file of your own prompts"},
    "field": {"help": "field of --prompts that holds the prompt"},
    "limit": {"type": int, "help": "prompts of --prompts at most"},
    "shuffle_seed": {"type": int, "help": "shuffle --prompts before --limit"},
    "dtype": {"help": "type of --model's weights, as float32"},
    "max_positions": {"type": int, "help": "longest text of --model, in tokens"},
    "head": {"help": "an EAGLE-1 or EAGLE-3 head for --model"},
    "tree": {"help": "tree of that head, from `jaxspec tune tree`"},
    "quantize": {"help": "weights of the files, as int4,int8"},
    "max_new_tokens": {"type": int, "help": "tokens of every output"},
    "rows": {"type": int, "help": "rows decoded together"},
    "steps": {"type": int, "help": "steps of a timed loop"},
    "dims": {"help": "embedding widths, as 320,768"},
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks`."""
    width = max(map(len, SUITES))
    lines = (f"  {name.ljust(width)}  {suite.about}" for name, suite in SUITES.items())
    found = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Measures a suite and writes its page. A suite refuses flags it does not take.",
        epilog="suites:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("suite", nargs="?", choices=tuple(SUITES), metavar="SUITE")
    found.add_argument(
        "--data-folder",
        type=Path,
        default=DATA_FOLDER,
        metavar="FOLDER",
        help="evaluation sets (default: data/eval of the repository)",
    )
    found.add_argument("--prompts-per-set", type=int, metavar="N", help="prompts of each set")
    found.add_argument("--repeats", type=int, metavar="N", help="timed runs of each method")
    found.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="folder of the pages (default: benchmarks/results)",
    )
    found.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write all figures; - for stdout"
    )
    for name, settings in _SETTINGS.items():
        found.add_argument(f"--{name.replace('_', '-')}", **settings)
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs one suite.

    Returns:
        0; 1 if outputs differ that must be equal; 2 for bad arguments or missing data.
    """
    args = parser().parse_args(argv)
    if args.suite is None:
        print(parser().format_help(), end="")
        return 0
    try:
        check_writable(args.json)
        # Results of hours must have a place to be written to.
        place = next(each for each in (args.out, *args.out.resolve().parents) if each.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ValueError(f"--out {args.out}: must be a folder that can be written to.")
        page = measure(
            args.suite,
            SUITES[args.suite],
            args.data_folder,
            args.prompts_per_set,
            args.repeats,
            **{name: getattr(args, name) for name in _SETTINGS},
        )
        publish(page, args.suite, args.out, args.json)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks: error: {error}", file=sys.stderr)
        return 2
    return 0 if page.agree else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
