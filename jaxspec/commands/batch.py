"""`jaxspec batch`: a file of prompts in, a file of records out."""

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec import batch
from jaxspec.batch import JobReport, Row
from jaxspec.batch.hosts import Processes, joined
from jaxspec.batch.parts import check_parts, part_header, part_path, put_together
from jaxspec.batch.rows import PROMPT_FIELDS
from jaxspec.batch.writer import progress_path
from jaxspec.bench.compare import describe
from jaxspec.commands import EXIT_ERROR, EXIT_INTERRUPTED
from jaxspec.commands.options import (
    add_drafter_arguments,
    add_generation_arguments,
    add_mesh_argument,
    announce,
    check_writable,
    drafter_asked,
    generation_config,
    load_model,
    mesh_asked,
    refuse_unused,
)
from jaxspec.core.loop import SLOTS_MULTIPLE

_REQUIRED = ("coordinator", "num_processes", "process_id")
_OF_SHARES = ("num_records", "num_done", "num_resumed", "num_errors", "num_tokens")
"""What adds up over processes."""
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
    add_mesh_argument(parser)
    parser.add_argument(
        "--field", help=f"where the prompt is (default: the first of {', '.join(PROMPT_FIELDS)})"
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same job stopped, if it did"
    )
    group = parser.add_argument_group(
        "how the job runs; outputs do not depend on it, except for --slots, "
        "whose rows that do not fit become errors, and for --drafting when sampling or in 16 bits"
    )
    for flag, meaning in (
        ("--batch", "rows at once; auto: what helps and fits into memory (default)"),
        (
            "--slots",
            "cache slots: tokens that each row's cache holds, rounded up to a multiple of "
            f"{SLOTS_MULTIPLE}; auto: what rows need (default)",
        ),
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
        help="of drafting with this many rows, as measured before: what auto begins with where it "
        "decides",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the job's figures; - or nothing for standard output. Of several processes the "
        "first writes those of all",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lines on standard error that say how the job goes (default: on a terminal)",
    )
    add_distributed_arguments(parser)
    add_generation_arguments(parser)
    add_drafter_arguments(parser, repeatable=False)


def add_distributed_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--distributed` and what belongs to it."""
    group = parser.add_argument_group(
        "several processes, on one host or many: the same command for each, with its own number; "
        "each decodes its share of the rows, and process 0 puts the output together"
    )
    group.add_argument("--distributed", action="store_true", help="this is one of them")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; the next port is used as well"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="of the job")
    group.add_argument("--process-id", type=int, metavar="I", help="of this one, from 0")
    group.add_argument(
        "--join-seconds", type=float, metavar="S", help="to wait for the others (default: 300)"
    )


def run(args: argparse.Namespace) -> int:
    """Decodes as the arguments say; 130 if Ctrl-C ended it too early, 2 if no row was good."""
    if args.distributed:
        missing = [flag for flag in _REQUIRED if getattr(args, flag) is None]
        if missing:
            flags = ", ".join("--" + flag.replace("_", "-") for flag in missing)
            raise ValueError(f"--distributed: give {flags} as well.")
        seconds = 300.0 if args.join_seconds is None else args.join_seconds
        with joined(
            args.coordinator, args.num_processes, args.process_id, seconds=seconds
        ) as processes:
            return show(args, *decode_file(args, processes))
    refuse_unused(args, (*_REQUIRED, "join_seconds"), "needs --distributed.")
    return show(args, *decode_file(args))


def show(args: argparse.Namespace, report: JobReport, figures: dict[str, Any] | None) -> int:
    """Says how a job went, and where `--json` asks for it, in figures.

    `figures` are `None` where another process has them; that one says whether any row was good.
    """
    ended = "interrupted" if report.interrupted else "done"
    print(f"{ended}: {report}", file=sys.stderr)
    if args.json is not None and figures is not None:
        text = json.dumps(figures, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if report.interrupted:
        print("the same command with --resume goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if figures is not None and 0 < figures["num_records"] == figures["num_errors"]:
        print(f"every row was bad: {args.output} says why of each", file=sys.stderr)
        return EXIT_ERROR
    return 0


def decode_file(
    args: argparse.Namespace, processes: Processes | None = None
) -> tuple[JobReport, dict[str, Any] | None]:
    """Reads, decodes and writes; a mistake found before the first record leaves no output.

    With `processes` only a share of the rows, and process 0 puts all shares together.

    Returns:
        How it went here, and the figures of the whole job; only process 0 has them.
    """
    config = generation_config(args)
    check_writable(args.json)
    _check_paths(args.input, args.output, args.json)
    rows = batch.read_rows(args.input, args.field, args.chat)
    model = load_model(args, mesh_asked(args))
    drafter = drafter_asked(args, model)
    settings: dict[str, Any] = {
        "batch": args.batch,
        "slots": args.slots,
        "drafting": args.drafting,
        "guard": batch.GuardSettings(expected=args.expected_speedup),
    }
    batch.check_job(model, rows, config, drafter, args.seed, **settings)
    header = batch.job_header(
        model, rows, config, drafter, args.seed, drafting=args.drafting, slots=args.slots
    )

    def decode(rows: list[Row], writer: batch.Writer) -> JobReport:
        announce(
            model=args.model,
            prompts=f"{len(rows)} of {args.input}",
            drafter=describe(drafter),
            config=config,
            seed=args.seed,
            drafting=args.drafting,
            mesh=args.mesh or "one device",
        )
        if writer.done:
            print(f"resuming: {len(writer.done)} records are there", file=sys.stderr)
        with _draining() as interrupts:
            return batch.run(
                model,
                rows,
                writer,
                config,
                drafter,
                args.seed,
                **settings,
                should_stop=lambda: bool(interrupts),
                progress=_Progress(args.progress),
            )

    if processes is not None:
        return decode_share(args, processes, rows, header, decode)
    check_parts(args.output, 0, args.resume)
    with batch.Writer(args.output, header, args.resume) as writer:
        report = decode(rows, writer)
        return report, report.as_dict()


def _check_paths(source: Path, out: Path, figures: str | None) -> None:
    """Refuses a file that would be two things, before anything is written."""
    if out.suffix == ".gz":
        raise ValueError(f"{out}: the output is plain text, appended line by line; leave out .gz.")
    given = {"the input": source, "the output": out, "the output's progress": progress_path(out)}
    if figures not in (None, "-"):
        given["the file of --json"] = Path(figures)
    named: dict[Path, str] = {}
    for what, path in given.items():
        other = named.setdefault(path.resolve(), what)
        if other != what:
            raise ValueError(f"{path}: {what} must not be {other}.")


def decode_share(
    args: argparse.Namespace,
    processes: Processes,
    rows: list[Row],
    header: dict[str, Any],
    decode: Callable[[list[Row], batch.Writer], JobReport],
) -> tuple[JobReport, dict[str, Any] | None]:
    """Decodes the rows of this process into a part; process 0 then puts the parts together.

    Returns:
        See `decode_file`.
    """
    index, num = processes.index, processes.num
    with contextlib.ExitStack() as stack:
        whole = None
        if processes.is_first:
            check_parts(args.output, num, args.resume)
        # Before there is an output: what another process finds wrong leaves its name free.
        processes.agree(header)
        if processes.is_first:
            whole = stack.enter_context(batch.Writer(args.output, header, args.resume))
        done = processes.begin(set() if whole is None else whole.done)
        path, settings = part_path(args.output, index, num), part_header(header, index, num)
        # Whether parts may be there already, process 0 has said.
        with batch.Writer(path, settings, resume=True) as part:
            part.done |= done
            report = decode(processes.share(rows), part)
        reports = processes.finish({"process": index, **report.as_dict()})
        figures = figures_of_all(reports) if reports else None
        if processes.early:
            early = ", ".join(map(str, processes.early))
            print(f"stopped early: process {early}", file=sys.stderr)
            return dataclasses.replace(report, interrupted=True), figures
        if whole is not None:
            count = put_together(whole, header, num)
            print(f"put together: {count} records of {num} processes", file=sys.stderr)
        return report, figures


def figures_of_all(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a job on several processes: of all together, then of each."""
    total = {name: sum(one[name] for one in reports) for name in _OF_SHARES}
    longest = max(one["seconds"] for one in reports)
    return {
        **total,
        "seconds": longest,
        "tokens_per_second": total["num_tokens"] / longest if longest else 0.0,
        "interrupted": any(one["interrupted"] for one in reports),
        "processes": list(reports),
    }


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
