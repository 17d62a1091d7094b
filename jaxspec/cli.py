"""The command line. `COMMANDS` lists the verbs; each verb has its own module."""

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

    Attributes:
        words: words of the verb, such as ("train", "lm").
        summary: one line for the list of verbs.
        module: module with `add_arguments(parser)` and `run(args) -> exit code`. It is imported
            only when the verb is called.
    """

    words: tuple[str, ...]
    summary: str
    module: str


COMMANDS = (
    Command(("demo",), "decode built-in prompts plain and speculatively", "jaxspec.commands.demo"),
    Command(("generate",), "continue a prompt, or chat", "jaxspec.commands.generate"),
    Command(("batch",), "decode a file of prompts", "jaxspec.commands.batch"),
    Command(("bench",), "measure drafters against plain decoding", "jaxspec.commands.bench"),
    Command(("train", "lm"), "train a small language or draft model", "jaxspec.commands.train_lm"),
    Command(("train", "eagle"), "train an EAGLE head", "jaxspec.commands.train_eagle"),
    Command(("train", "masked"), "train a diffusion model", "jaxspec.commands.train_masked"),
    Command(("train", "deer"), "align a drafter of blocks", "jaxspec.commands.train_deer"),
    Command(("train", "dflash"), "train a DFlash head", "jaxspec.commands.train_dflash"),
    Command(("tune", "skips"), "search layers to skip in drafting", "jaxspec.commands.tune_skips"),
    Command(("tune", "profile"), "time passes on a device", "jaxspec.commands.tune_profile"),
    Command(("tune", "tree"), "search the fastest draft tree", "jaxspec.commands.tune_tree"),
    Command(("export", "tflite"), "write a file for LiteRT", "jaxspec.commands.export_tflite"),
    Command(("export", "tuned"), "write one with the best tree", "jaxspec.commands.export_tuned"),
    Command(("export", "report"), "compare quantizations", "jaxspec.commands.export_report"),
    Command(("export", "litertlm"), "write one for LiteRT-LM", "jaxspec.commands.export_litertlm"),
    Command(("export", "web"), "write a page for browsers", "jaxspec.commands.export_web"),
    Command(("export", "kit"), "write passes to be timed", "jaxspec.commands.export_kit"),
    Command(("serve",), "serve an exported page", "jaxspec.commands.serve"),
    Command(("info",), "describe this installation", "jaxspec.commands.info"),
)

GROUPS = {
    "train": "train a model or a drafter",
    "tune": "fit drafting to a machine",
    "export": "write a model as a file for phones",
}
"""Summaries of the verbs that have sub-verbs."""


_TOO_MUCH: dict[type[BaseException], str] = {
    RecursionError: "something lies within too many levels of other things; --debug shows where.",
    MemoryError: "the memory is not enough; take smaller files, models or requests.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    0: success. 1: outputs differed (`bench`, `demo`, checks of `export`). 2: bad arguments or
    input, explained in one line. 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    jaxspec.use_persistent_cache()
    parser = build_parser(argv)
    args, rest = parser.parse_known_args(argv)
    # argparse wants positional arguments together; `generate MODEL --json PROMPT` separates them.
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
        # The reader of our output has closed it. Python's flush at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, FloatingPointError, RecursionError, MemoryError) as error:
        if args.debug:
            raise
        said = _TOO_MUCH.get(type(error)) or str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = (
                f"{error.filename}: {error.strerror}; check the path, its permissions and the room "
                "on its disk."
            )
        print("jaxspec: error:", " ".join(said.split()), file=sys.stderr)
        return EXIT_ERROR


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Builds the parser of all verbs; imports only the modules of those named in `argv`."""
    description = str(jaxspec.__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="jaxspec",
        description=description,
        epilog="`jaxspec COMMAND --help` lists the arguments of a command.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"jaxspec {jaxspec.__version__}",
        help="print the version and exit",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {"": top}
    for command in COMMANDS:
        *group, name = command.words
        heading = " ".join(group)
        if heading not in groups:
            names = ", ".join(c.words[-1] for c in COMMANDS if c.words[:-1] == tuple(group))
            inner = top.add_parser(heading, help=f"{GROUPS[heading]}: {names}")
            groups[heading] = inner.add_subparsers(metavar="COMMAND", required=True)
        leaf = groups[heading].add_parser(name, help=command.summary, parents=[common])
        if set(command.words) <= set(argv):
            module = importlib.import_module(command.module)
            module.add_arguments(leaf)
            leaf.set_defaults(run=module.run)
    return parser
