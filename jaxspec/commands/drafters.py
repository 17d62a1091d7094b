"""`jaxspec drafters`: the drafters that `--drafter` can name, and their settings."""

import argparse
import inspect

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.commands.options import DRAFTERS, settings_of
from jaxspec.core.checks import meant, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxspec drafters`."""
    parser.description = (
        "Lists the drafters that --drafter can name, or the settings of one. They are given as "
        "--drafter NAME:SETTING=VALUE,SETTING=VALUE."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a drafter")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each drafter, or the settings of one."""
    if args.name is None:
        width = max(map(len, DRAFTERS))
        for name, kind in DRAFTERS.items():
            print(f"{name:{width}}  {_summary(kind.method)}")
        return 0
    if args.name not in DRAFTERS:
        there = meant(args.name, DRAFTERS) or f"; there are {', '.join(DRAFTERS)}."
        raise ValueError(f"no drafter is called {shown(args.name)}{there}")
    kind = DRAFTERS[args.name]
    console = Console(highlight=False)
    console.print(_summary(kind.method))
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("setting", "type", "default", "meaning"):
        table.add_column(column)
    for name, setting in settings_of(args.name).items():
        default = "" if setting.default is None else f"{setting.default}"
        table.add_row(name, setting.needed, default, setting.meaning)
    console.print(table)
    print(f"Example: --drafter {kind.example}")
    return 0


def _summary(method: type) -> str:
    return inspect.cleandoc(method.__doc__ or "").partition("\n")[0].replace("`", "")
