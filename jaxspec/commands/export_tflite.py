"""`jaxspec export tflite`: a model as a file for LiteRT."""

import argparse
import time
from typing import Any

from jaxspec.checkpoint import Model
from jaxspec.commands.export_options import (
    add_export_arguments,
    announce_export,
    check_flags,
    check_on_gpu,
    export_config,
    load_unread,
    print_written,
)
from jaxspec.commands.options import add_drafter_argument, drafter_asked, refuse_unused
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.memory import check_phone_memory, phone_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export tflite`."""
    parser.description = (
        "Writes a model as one .tflite for LiteRT, with its manifest and tokenizer. With --drafter "
        "the file also holds speculative steps."
    )
    add_export_arguments(
        parser,
        *("--check-gpu", "--gpu-timeout"),
        settings=(
            *("quantization", "check_gpu_ops", "verify", "levels"),
            *("drafts", "block_length", "bundle"),
        ),
    )
    parser.add_argument(
        "--phone-memory",
        type=float,
        metavar="GB",
        help="refuse a file that needs more on the phone, weights and caches together: on a CPU "
        "with a weight cache, or with --bundle gpu on a GPU",
    )
    add_drafter_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    config = export_config(args)
    check_flags(args)
    model = load_unread(args)
    drafter = drafter_asked(args, model)
    announce_export(args, drafter, config)
    if model.config.diffusion is not None:
        why = f"for causal models, and {args.model} fills in masks."
        refuse_unused(args, ("phone_memory",), why)
    if args.phone_memory is not None:
        _check_memory(args, model, drafter, config)
    start = time.perf_counter()
    manifest = export(model, args.out, drafter, config)
    print_written(args.out / MODEL_FILE, start)
    print(f"signatures: {', '.join(manifest.signatures)}")
    return check_on_gpu(args, args.out / MODEL_FILE)


def _check_memory(
    args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig
) -> None:
    needed = phone_memory(model, drafter, config)
    on_gpu = config.bundle == "gpu"
    where = "a GPU, which holds weights once for each use" if on_gpu else "a CPU with weight cache"
    print(
        f"on the phone, {where}: {needed.total / 1e9:.2f} GB, {needed.caches / 1e9:.2f} GB of it "
        "caches"
    )
    check_phone_memory(needed, int(1e9 * args.phone_memory))
