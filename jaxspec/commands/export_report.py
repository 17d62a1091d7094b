"""`jaxspec export report`: the quantizations of a file, compared on held-out text."""

import argparse
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.commands.export_options import (
    add_export_arguments,
    announce_export,
    check_flags,
    export_config,
    held_out,
)
from jaxspec.commands.options import add_drafter_argument, drafter_asked, load_model
from jaxspec.decoding.request import encode_prompt
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.report import compare_quantizations, quality_table
from jaxspec.progress import progress_bar

REPORT_FILE = "quantization.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export report`."""
    parser.description = (
        "Writes a .tflite in every quantization in turn and compares them on --prompts. Keeps "
        f"{REPORT_FILE}, and no file."
    )
    add_export_arguments(parser, "--limit", settings=("bundle",), required="--prompts")
    add_drafter_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compares as the arguments say."""
    # Every quantization is compared; texts are read for the calibrated ones.
    read = {} if args.calibration is None else {"quantization": "int4-calibrated"}
    config = export_config(args, **read)
    check_flags(args)
    model = load_model(args)
    if model.config.diffusion is not None:
        raise ValueError(f"export report: for causal models, and {args.model} fills in masks.")
    drafter = drafter_asked(args, model)
    announce_export(args, drafter, config)
    texts = [encode_prompt(model, prompt) for prompt in held_out(args)]
    args.out.mkdir(parents=True, exist_ok=True)
    with progress_bar(len(QUANTIZATIONS)) as advance:
        found = compare_quantizations(model, texts, drafter, config, advance, args.out)
    table = Table(
        title=f"{len(texts)} held-out texts; tau is tokens per step, bonus included",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    columns, rows = quality_table(found)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    with replacing_files(args.out) as staging:
        rows = [row._asdict() for row in found]
        write_json(staging / REPORT_FILE, {"model": model.name, "quantizations": rows})
    print(f"wrote {args.out / REPORT_FILE}")
    return 0
