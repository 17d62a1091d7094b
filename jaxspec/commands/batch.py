"""`jaxspec batch`: a file of prompts in, a file of records out."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxspec import batch
from jaxspec.batch import JobReport
from jaxspec.batch.rows import PROMPT_FIELDS
from jaxspec.bench.compare import describe
from jaxspec.commands import EXIT_INTERRUPTED
from jaxspec.commands.options import (
    add_drafter_arguments,
    add_generation_arguments,
    announce,
    check_writable,
    generation_config,
    load_model,
    make_drafter,
)

_EVERY = 2.0
"""Seconds between lines that say how the job goes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec batch`."""
    parser.description = (
        "Decodes every prompt of a file and appends a record for each to another. Slots are "
        "refilled as rows finish. A row's output depends on the settings, the seed and its id, not "
        "on order, batch size, or how often the job was stopped and resumed. Ctrl-C finishes the "
        "rows that run; a second one stops at once. Either way --resume goes on."
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl[.gz]", help="a prompt per line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="a record per line")
    parser.add_argument(
        "--model", default="demo", metavar="MODEL", help="folder, shipped name or Hub id"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights")
    parser.add_argument("--max-positions", type=int, metavar="N", help="longest text, in tokens")
    parser.add_argument(
        "--field", help=f"where the prompt is (default: the first of {', '.join(PROMPT_FIELDS)})"
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same job stopped, if it did"
    )
    group = parser.add_argument_group("how the job runs; no output depends on it")
    for flag, meaning in (
        ("--batch", "rows at once; auto: what helps and fits into memory (default)"),
        ("--slots", "tokens that each row's cache holds; auto: what rows need (default)"),
    ):
        group.add_argument(flag, type=_count, metavar="auto|N", help=meaning)
    group.add_argument(
        "--drafting",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: where the time that chunks take says it is faster, if greedy in float32",
    )
    group.add_argument(
        "--expected-speedup",
        type=float,
        metavar="X",
        help="of drafting with this many rows, as measured before: what auto begins with",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the job's figures; - or nothing for standard output",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lines on standard error that say how the job goes (default: on a terminal)",
    )
    add_generation_arguments(parser)
    add_drafter_arguments(parser, repeatable=False)


def run(args: argparse.Namespace) -> int:
    """Decodes as the arguments say; 130 if Ctrl-C ended it before its time."""
    report = decode_file(args)
    ended = "interrupted" if report.interrupted else "done"
    print(f"{ended}: {report}", file=sys.stderr)
    if args.json is not None:
        text = json.dumps(report.as_dict(), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if report.interrupted:
        print("the same command with --resume goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def decode_file(args: argparse.Namespace) -> JobReport:
    """Reads, decodes and writes; every mistake is found before the output is begun."""
    config = generation_config(args)
    check_writable(args.json)
    if args.input.resolve() == args.output.resolve():
        raise ValueError(f"{args.output}: the output must not be the input.")
    rows = batch.read_rows(args.input, args.field, args.chat)
    model = load_model(args)
    drafter = None if args.drafter is None else make_drafter(args.drafter, args, model)
    guard = batch.GuardSettings(expected=args.expected_speedup)
    header = batch.job_header(model, rows, config, drafter, args.seed)
    with batch.Writer(args.output, header, args.resume) as writer, _draining() as interrupts:
        announce(
            model=args.model,
            prompts=f"{len(rows)} of {args.input}",
            drafter=describe(drafter),
            config=config,
            seed=args.seed,
        )
        if writer.done:
            print(f"resuming: {len(writer.done)} records are there", file=sys.stderr)
        return batch.run(
            model,
            rows,
            writer,
            config,
            drafter,
            args.seed,
            batch=args.batch,
            slots=args.slots,
            drafting=args.drafting,
            guard=guard,
            should_stop=lambda: bool(interrupts),
            progress=_Progress(args.progress),
        )


@contextmanager
def _draining() -> Iterator[list[int]]:
    """Collects the first Ctrl-C; the second is one as ever."""
    interrupts: list[int] = []

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("finishing the rows that run; Ctrl-C again stops at once", file=sys.stderr)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which alone hears of signals
        yield interrupts
        return
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class _Progress:
    """Prints a line now and then."""

    def __init__(self, shown: bool | None):
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._last = time.monotonic()

    def __call__(self, report: JobReport) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < _EVERY:
            return
        self._last = now
        eta = report.eta_seconds
        left = "" if eta is None else f", {_duration(eta)} left"
        print(f"{report}{left}", file=sys.stderr)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be auto or a number from 1, got {text!r}.")
    return int(text)
