"""`jaxspec batch`: a file of prompts in, a file of records out."""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax

from jaxspec import batch
from jaxspec.batch import JobReport
from jaxspec.batch.report import job_bar
from jaxspec.batch.settings import drafts_change_nothing
from jaxspec.batch.writer import progress_path
from jaxspec.commands import EXIT_ERROR
from jaxspec.commands.canvas import (
    MOST_DRAFTS,
    add_diffusion_arguments,
    canvas_settings,
    check_kind,
)
from jaxspec.commands.flags import add_flags, given
from jaxspec.commands.interrupts import telling
from jaxspec.commands.options import (
    add_drafter_argument,
    add_generation_arguments,
    add_loading_arguments,
    add_mesh_argument,
    announce,
    check_writable,
    drafter_asked,
    generation_config,
    load_model,
    mesh_asked,
    write_figures,
)
from jaxspec.commands.parser import BY_FLAG, add_place
from jaxspec.core.checks import shown
from jaxspec.measure.compare import describe
from jaxspec.measure.prompts import FIELDS

_LONGEST_WAIT = 7 * 24 * 3600
"""Seconds that a process of `--distributed` waits for the others at its end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec batch`."""
    parser.description = (
        "Decodes every prompt of a file and appends a record for each to another. Slots are "
        "refilled as rows finish. A row's output depends on the settings, the seed and its id, not "
        "on order, batch size, or how often the job was stopped and resumed. A record holds the "
        "fields of its line too. Ctrl-C keeps the records that are there, and --resume continues "
        "the job."
    )
    for name, flags, metavar, kind, meaning in (
        (
            "input",
            ("-i", "--input"),
            "IN.jsonl[.gz]",
            str,
            "a prompt per line; or hf:NAME[:CONFIG]:SPLIT of `datasets`",
        ),
        ("output", ("-o", "--out", "--output"), "OUT.jsonl", Path, "a record per line"),
    ):
        add_place(parser, name, *flags, metavar=metavar, help=meaning, kind=kind, required=False)
    parser.add_argument("-m", "--model", metavar="MODEL", help="folder, shipped name or Hub id")
    parser.set_defaults(needed=("input", "output", "model"))  # without --merge
    add_drafter_argument(parser)
    add_generation_arguments(parser)
    parser.add_argument(
        "--field",
        help=f"name of the prompt's field (default: the first of {', '.join(FIELDS)})",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the same job, if it has begun"
    )
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="put the records into the order of the input when all are there; without it they stay "
        "in the order in which they were finished",
    )
    group = parser.add_argument_group(
        "how the job runs",
        "auto is the default. Outputs do not depend on it, except for --capacity, whose rows that "
        "do not fit become errors, and for --drafting when sampling or in 16 bits. A diffusion "
        "language model drafts only if --drafts N or --drafting auto is given.",
    )
    auto = {"type": _count, "metavar": "auto|N"}
    counts = {"batch_size": auto, "capacity": auto}
    add_flags(group, batch.JobSettings, (*counts, "drafting"), options=counts)
    expected = {"expected": {"flag": "--expected-speedup"}}
    add_flags(group, batch.GuardSettings, expected, options=expected)
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
        help="say on standard error how far the job is: a bar on a terminal (the default there), "
        "else a line a minute",
    )
    group = parser.add_argument_group(
        "several processes, on one host or many",
        "Each decodes a shard of the rows into its own output, and --merge joins the outputs.",
    )
    shards = group.add_mutually_exclusive_group()
    shards.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="decode rows I, I + N, I + 2N, ... of the input, I from 1 to N",
    )
    shards.add_argument(
        "--distributed",
        action="store_true",
        help="join jax.distributed, which finds the processes of TPU pods, Slurm and MPI jobs, and "
        "decode the shard of this process",
    )
    shards.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar=("OUT", "PART"),
        help="join the outputs of all shards in OUT, in the order of the input; no other argument",
    )
    add_mesh_argument(parser)
    add_loading_arguments(parser)
    add_diffusion_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Decodes or merges; 2 if no row was good."""
    if args.merge is not None:
        return _merge(args)
    if args.input is None or args.output is None:
        args.parser.error("give IN.jsonl and OUT.jsonl, or --merge OUT PART [PART ...].")
    if args.model is None:
        args.parser.error("--model MODEL is missing.")
    return _show(args, _decode(args))


def _merge(args: argparse.Namespace) -> int:
    given = [
        name
        for name, value in vars(args).items()
        if name not in ("merge", "verbose", "debug")
        and not name.endswith(BY_FLAG)
        and value != args.parser.get_default(name)
    ]
    if given:
        raise ValueError(f"--merge takes no other argument; leave out {', '.join(given)}.")
    out, *parts = args.merge
    if not parts:
        raise ValueError("--merge: give OUT and the outputs of all shards.")
    print(f"merged: {batch.merge(out, parts)} records in {out}", file=sys.stderr)
    return 0


def _show(args: argparse.Namespace, report: JobReport) -> int:
    """Prints how a job went, and writes its figures where `--json` asks for them."""
    print(f"done: {report}", file=sys.stderr)
    write_figures(report.as_dict(), args.json)
    if 0 < report.num_records == report.num_errors:
        print(f"every row was bad: {args.output} says why of each", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _decode(args: argparse.Namespace) -> JobReport:
    """Reads, decodes and writes; a mistake found before the first record leaves no output."""
    config: batch.AnyConfig = generation_config(args)
    check_writable(args.json)
    _check_paths(args.input, args.output, args.json)
    guard = batch.GuardSettings(**given(args, batch.GuardSettings))
    settings = batch.JobSettings(**given(args, batch.JobSettings), guard=guard)
    rows = batch.read_rows(args.input, args.field, args.chat)
    shard = _joined() if args.distributed else args.shard or batch.Shard()
    model = load_model(args, mesh_asked(args))
    drafter: batch.AnyDrafter
    if model.is_diffusion:
        check_kind(args, "diffusion", read=("drafting",))
        auto = args.drafting == "auto"
        config, drafter = canvas_settings(args, MOST_DRAFTS if auto else 0)
        if auto and args.num_drafts is None and not drafts_change_nothing(model, config, drafter):
            raise ValueError(
                "--drafting auto: times decide between drafting and not drafting, and the texts of "
                "this job may depend on that; give --drafts N, and every round drafts."
            )
    else:
        check_kind(args, "causal")
        drafter = drafter_asked(args, model)
    batch.check_job(model, rows, config, drafter, args.seed, settings)
    header = batch.job_header(model, rows, config, drafter, args.seed, settings, shard)
    rows = shard.rows_of(rows)
    with batch.Writer(args.output, header, args.resume) as writer:
        announce(
            args,
            model=args.model,
            prompts=f"{len(rows)} of {args.input}, shard {shard}",
            drafter=describe(drafter),
            config=config,
            seed=args.seed,
            drafting=settings.drafting,
            mesh=args.mesh or "one device",
        )
        if writer.done:
            print(f"resuming: {len(writer.done)} records are there", file=sys.stderr)
        latest = batch.JobReport()

        def done() -> str:
            report = dataclasses.replace(latest, num_done=len(writer.done))
            return f"{report}; the same command with --resume continues"

        shown = sys.stderr.isatty() if args.progress is None else args.progress
        with telling(done), job_bar(shown) as show:

            def progress(report: JobReport) -> None:
                nonlocal latest
                latest = report
                show(report)

            report = batch.run(
                model, rows, writer, config, drafter, args.seed, settings, progress=progress
            )
        if args.in_order:
            writer.put_in_order()
        return report


def _joined() -> batch.Shard:
    """Joins `jax.distributed`, and returns the shard of this process.

    The runtime of accelerators that several hosts share asks for it; nothing else here does.
    """
    try:
        # Processes leave together, so those that are done wait for the longest shard.
        jax.distributed.initialize(shutdown_timeout_seconds=_LONGEST_WAIT)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"--distributed: jax.distributed cannot be joined ({error}); give --shard I/N instead."
        ) from error
    return batch.Shard(jax.process_index() + 1, jax.process_count())


def _check_paths(source: str, out: Path, figures: str | None) -> None:
    """Refuses a file with two roles, before anything is written."""
    if not out.name:
        raise ValueError(f"{out}: the output must be a file, and this is a folder.")
    if out.suffix == ".gz":
        raise ValueError(f"{out}: the output is plain text, appended line by line; leave out .gz.")
    given = {
        "the input": Path(source),
        "the output": out,
        "the output's progress": progress_path(out),
    }
    if figures not in (None, "-"):
        given["the file of --json"] = Path(figures)
    named: dict[Path, str] = {}
    for what, path in given.items():
        try:
            place = path.resolve()
        except RuntimeError:  # before Python 3.13
            raise ValueError(f"{path}: {what} is a link that leads back to itself.") from None
        other = named.setdefault(place, what)
        if other != what:
            raise ValueError(f"{path}: {what} must not be {other}.")


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    # Python reads no numbers of thousands of digits.
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be auto or a number from 1 to 999999999, got {shown(text)}."
        )
    return int(text)


def _shard(text: str) -> batch.Shard:
    try:
        return batch.parse_shard(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
