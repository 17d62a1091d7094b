"""`jaxspec export kit`: passes of several sizes, and a script that times them on a phone."""

import argparse
import time

from jaxspec.commands.export_options import (
    add_export_arguments,
    announce_export,
    check_flags,
    check_on_gpu,
    export_config,
    head_asked,
    load_unread,
    print_written,
)
from jaxspec.commands.options import add_drafter_argument
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.drafters import LoadedDrafter, NoDraft
from jaxspec.mobile.export import MODEL_FILE
from jaxspec.mobile.profile import SCRIPT_FILE, export_kit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export kit`."""
    parser.description = (
        "Writes target and draft passes of several sizes as one .tflite, and a script that times "
        "them on a phone through adb; `jaxspec tune profile --import` reads the times. A search "
        "of a tree by them looks as deep as the drafter's (default: EAGLE's 25 nodes). Without "
        "--drafter, passes with layers left out are timed in place of draft passes, for `jaxspec "
        "tune skips`."
    )
    flags = ("--check-gpu", "--gpu-timeout")
    add_export_arguments(parser, *flags, settings=("quantization", "check_gpu_ops"))
    add_drafter_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    config = export_config(args)
    check_flags(args)
    model = load_unread(args)
    drafter = LoadedDrafter(NoDraft(), ())
    if args.drafter is not None:
        drafter = head_asked(args, model, EAGLE_PATHS)
    announce_export(args, drafter, config)
    start, path = time.perf_counter(), args.out / MODEL_FILE
    manifest = export_kit(model, args.out, drafter, config)
    print_written(path, start)
    print(f"signatures: {', '.join(manifest.signatures)}")
    print(f"on a phone: {args.out / SCRIPT_FILE} cpu 1 > kit.txt; then tune profile --import")
    return check_on_gpu(args, path)
