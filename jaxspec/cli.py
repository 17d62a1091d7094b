"""The command line. `COMMANDS` lists the verbs; each lives in a module of its own."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jaxspec
from jaxspec.commands import EXIT_ERROR, EXIT_INTERRUPTED


class Command(NamedTuple):
    """A verb.

    words: how it is called, such as ("train", "lm").
    summary: one line for the list of verbs.
    module: has `add_arguments(parser)` and `run(args) -> exit code`; imported when it is called.
    """

    words: tuple[str, ...]
    summary: str
    module: str


COMMANDS = (
    Command(("demo",), "decode built-in prompts plain and speculatively", "jaxspec.commands.demo"),
    Command(("generate",), "continue a prompt, or chat", "jaxspec.commands.generate"),
    Command(("batch",), "decode a file of prompts", "jaxspec.commands.batch"),
    Command(("extend",), "let a diffusion drafter write blocks", "jaxspec.commands.extend"),
    Command(("bench",), "measure drafters against plain decoding", "jaxspec.commands.bench"),
    Command(("train", "lm"), "train a small language or draft model", "jaxspec.training.command"),
    Command(("train", "eagle"), "train an EAGLE head", "jaxspec.training.eagle_command"),
    Command(("train", "masked"), "train a diffusion model", "jaxspec.training.masked_command"),
    Command(("train", "deer"), "align a drafter of blocks", "jaxspec.training.deer_command"),
    Command(("train", "dflash"), "train a DFlash head", "jaxspec.training.dflash_command"),
    Command(("tune", "skips"), "search layers to skip in drafting", "jaxspec.commands.tune_skips"),
    Command(("tune", "profile"), "time passes on a device", "jaxspec.commands.tune_profile"),
    Command(("tune", "tree"), "search the fastest draft tree", "jaxspec.commands.tune_tree"),
    Command(("export",), "write a model as a file for phones", "jaxspec.commands.export"),
    Command(("serve",), "serve an exported page", "jaxspec.commands.serve"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    0: done. 1: greedy outputs differed (`bench`, `demo`). 2: bad arguments or input, said in one
    line. 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character is no reason to stop.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = build_parser(argv)
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one run: `generate MODEL --json PROMPT` splits them.
    late = getattr(args, "late_argument", None)
    if late and len(rest) == 1 and not rest[0].startswith("-") and getattr(args, late) is None:
        setattr(args, late, rest[0])
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, FloatingPointError) as error:
        if args.debug:
            raise
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}; check the path and its permissions."
        print("jaxspec: error:", " ".join(said.split()), file=sys.stderr)
        return EXIT_ERROR


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all verbs; only those named in `argv` are imported for their arguments."""
    parser = argparse.ArgumentParser(prog="jaxspec", description=jaxspec.__doc__)
    parser.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {"": top}
    for command in COMMANDS:
        *group, name = command.words
        heading = " ".join(group)
        if heading not in groups:
            summary = ", ".join(c.words[-1] for c in COMMANDS if c.words[:-1] == tuple(group))
            inner = top.add_parser(heading, help=f"{heading} one of: {summary}")
            groups[heading] = inner.add_subparsers(metavar="WHAT", required=True)
        leaf = groups[heading].add_parser(name, help=command.summary, parents=[common])
        if set(command.words) <= set(argv):
            module = importlib.import_module(command.module)
            module.add_arguments(leaf)
            leaf.set_defaults(run=module.run)
    return parser
