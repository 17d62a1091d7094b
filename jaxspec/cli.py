"""The command line. `COMMANDS` lists the commands; each command has its own module."""

import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax

import jaxspec
from jaxspec.commands import EXIT_ERROR
from jaxspec.commands.interrupts import Told, ending_soon, say_interrupted
from jaxspec.commands.parser import Parser, settle
from jaxspec.start import EXIT_INTERRUPTED


class Command(NamedTuple):
    """A command of `jaxspec`.

    Attributes:
        words: words of the command, such as ("train", "lm").
        summary: one line for the list of commands.
        module: module with `add_arguments(parser)` and `run(args) -> exit code`. It is imported
            only when the command is called.
        example: arguments of a command line for the help and for errors.
    """

    words: tuple[str, ...]
    summary: str
    module: str
    example: str = ""


def _command(words: str, summary: str, example: str = "") -> Command:
    module = f"jaxspec.commands.{words.replace(' ', '_')}"
    return Command(tuple(words.split()), summary, module, example)


_EAGLE, _TEXT = "--drafter eagle:head=demo-eagle", "--data stdlib=stdlib"
COMMANDS = (
    _command("demo", "decode built-in prompts plain and speculatively"),
    _command("generate", "continue a prompt, or chat", f'demo "Two and two is" {_EAGLE}'),
    _command("batch", "decode a file of prompts", "in.jsonl out.jsonl --model demo --resume"),
    _command("bench", "measure drafters against plain decoding", f"demo prompts.jsonl {_EAGLE}"),
    _command("drafters", "list drafters and their settings", "eagle"),
    _command("train lm", "train a small language or draft model", f"{_TEXT} --out my-draft"),
    _command("train eagle", "train an EAGLE head", f"{_TEXT} --target demo --out my-head"),
    _command("train masked", "train a diffusion model", f"{_TEXT} --out my-model"),
    _command(
        "train deer",
        "align a drafter of blocks",
        f"{_TEXT} --target demo --start-from demo-block-diffusion --out my-deer",
    ),
    _command("train dflash", "train a DFlash head", f"{_TEXT} --target demo --out my-head"),
    _command(
        "tune skips",
        "search layers to skip in drafting",
        f"demo {_TEXT} --rows 8 --out my-skips",
    ),
    _command("tune profile", "time passes on a device", f"demo {_EAGLE} --out profile.json"),
    _command(
        "tune tree",
        "search the fastest draft tree",
        f"demo held-out.jsonl {_EAGLE} --profile profile.json",
    ),
    _command("export tflite", "write a file for LiteRT", f"demo phone {_EAGLE}"),
    _command(
        "export tuned",
        "write one with the best tree",
        f"demo phone {_EAGLE} --prompts held-out.jsonl",
    ),
    _command("export report", "compare quantizations", "demo report --prompts held-out.jsonl"),
    _command("export litertlm", "write one for LiteRT-LM", "demo phone"),
    _command("export web", "write a page for browsers", f"demo page {_EAGLE}"),
    _command("export kit", "write passes to be timed", f"demo kit {_EAGLE}"),
    _command("serve", "serve an exported page", "page"),
    _command("info", "describe this installation"),
)

GROUPS = {
    "train": "train a model or a drafter",
    "tune": "fit drafting to a machine",
    "export": "write a model as a file for phones",
}
"""Summaries of the commands that have subcommands."""
_WITHOUT_SETTINGS = ("drafters", "serve", "info")
"""Commands that have no settings for `--verbose` to print."""
_ALSO = {
    **{command.words[-1]: " ".join(command.words) for command in COMMANDS},
    **dict.fromkeys(("run", "complete", "decode", "stream"), "generate"),
    **dict.fromkeys(("eval", "benchmark", "compare", "measure"), "bench"),
    **{"chat": "generate MODEL --chat", "help": "--help", "version": "--version"},
    **dict.fromkeys(("methods", "list", "ls"), "drafters"),
    **{"models": "info", "convert": "export", "litert": "export tflite"},
}
"""Words that are no commands, and what to type for each."""


_TOO_MUCH: dict[type[BaseException], str] = {
    RecursionError: "something lies within too many levels of other things; --debug shows where.",
    MemoryError: "the memory is not enough; take smaller files, models or requests.",
}
_ADVICE: dict[int | None, str] = {
    errno.EACCES: "check the permissions of the file and of its folder",
    errno.ENOSPC: "make room on its disk",
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
    try:
        try:
            with ending_soon():
                return _run(argv)
        finally:
            # A reader that has closed our output is noticed here, and not at exit.
            sys.stdout.flush()
    except KeyboardInterrupt as interruption:
        if not isinstance(interruption, Told):
            say_interrupted(interruption)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(nowhere, stream.fileno())
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's answer to a closed pipe
            return 0
        raise
    except (
        *(ValueError, OSError, FloatingPointError, RecursionError, MemoryError),
        jax.errors.JaxRuntimeError,  # most often a program that needs more memory than there is
    ) as error:
        if "--debug" in argv:
            raise
        said = _TOO_MUCH.get(type(error)) or str(error)
        if isinstance(error, OSError) and error.filename is not None:
            advice = _ADVICE.get(error.errno, "check the path")
            said = f"{error.filename}: {error.strerror}; {advice}."
        print("jaxspec: error:", " ".join(said.split()), file=sys.stderr)
        return EXIT_ERROR


def _run(argv: Sequence[str]) -> int:
    parser = build_parser(argv)
    if not argv:
        parser.print_help()
        return 0
    if argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        parser.error(f"the command comes first, then {argv[0]}.")
    if len(argv[0].split()) > 1:
        said = f'generate demo "{argv[0]:.200}"'
        parser.error(f"a prompt needs a command and a model: jaxspec {said}")
    args, rest = parser.parse_known_args(argv)
    settle(args.parser, args, rest)
    return args.run(args)


def command_line() -> NoReturn:
    """Runs the command line of this process and ends it."""
    warnings.formatwarning = lambda message, *_: f"jaxspec: warning: {message}\n"
    code = main()
    if code == EXIT_INTERRUPTED:
        # Without waiting for programs that still run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def build_parser(argv: Sequence[str]) -> Parser:
    """Builds the parser of all commands; imports only the modules of those named in `argv`."""
    description = str(jaxspec.__doc__).partition("\n")[0]
    parser = Parser(
        prog="jaxspec",
        description=description,
        epilog="`jaxspec COMMAND --help` lists the arguments of a command. Example: jaxspec demo",
    )
    parser.example, parser.also = "jaxspec demo", _ALSO
    parser.add_argument(
        "--version",
        action="version",
        version=f"jaxspec {jaxspec.__version__}",
        help="print the version and exit",
    )
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {"": top}
    for command in COMMANDS:
        *group, name = command.words
        heading = " ".join(group)
        example = " ".join(("jaxspec", *command.words, command.example)).rstrip()
        if heading not in groups:
            names = [c.words[-1] for c in COMMANDS if c.words[:-1] == tuple(group)]
            said = f"{GROUPS[heading]}: {', '.join(names)}"
            inner = top.add_parser(heading, help=said, epilog=f"Example: {example}")
            inner.example = example
            inner.also = {
                word: command.removeprefix(f"{heading} ")
                for word, command in _ALSO.items()
                if command.startswith(f"{heading} ")
            }
            groups[heading] = inner.add_subparsers(metavar="|".join(names), required=True)
        leaf = groups[heading].add_parser(name, help=command.summary, epilog=f"Example: {example}")
        leaf.example = example
        if set(command.words) <= set(argv):
            module = importlib.import_module(command.module)
            module.add_arguments(leaf)
            if name not in _WITHOUT_SETTINGS:
                said = "print the settings too"
                leaf.add_argument("-v", "--verbose", action="store_true", help=said)
            leaf.add_argument("--debug", action="store_true", help="show the traceback of an error")
            leaf.set_defaults(run=module.run, parser=leaf)
            leaf.use_short_usage()
    return parser
