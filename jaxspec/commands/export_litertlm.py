"""`jaxspec export litertlm`: a model as a file for the LiteRT-LM runtime."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.export_options import (
    add_export_arguments,
    announce_export,
    check_flags,
    export_config,
    held_out,
    load_unread,
    print_written,
)
from jaxspec.commands.options import (
    add_drafter_argument,
    drafter_asked,
    refuse_unused,
)
from jaxspec.mobile.litertlm import export_litertlm
from jaxspec.mobile.litertlm_check import PROMPTS, check_litertlm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export litertlm`."""
    parser.description = (
        "Writes a model as a .litertlm for the LiteRT-LM runtime, which can run one drafter, "
        "layer-skip with a fixed set."
    )
    add_export_arguments(parser, "--prompts", "--limit", "--threads")
    parser.add_argument(
        "--check-lm",
        action="store_true",
        help="then decode with it by LiteRT-LM's CPU backend, with and without its drafter, in a "
        "child process; --prompts replaces the built-in prompts",
    )
    add_drafter_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    config = export_config(args)
    check_flags(args)
    if not args.check_lm:
        refuse_unused(args, ("prompts", "threads"), "needs --check-lm.")
    model = load_unread(args)
    drafter = drafter_asked(args, model)
    announce_export(args, drafter, config)
    start = time.perf_counter()
    path = export_litertlm(model, args.out, drafter, config)
    print_written(path, start)
    if not args.check_lm:
        return 0
    prompts: Sequence[Any] = PROMPTS if args.prompts is None else held_out(args)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--prompts: --check-lm takes texts only, and there is a chat.")
    checked = check_litertlm(path, prompts, threads=args.threads or 1)
    print(checked)
    return EXIT_DIFFERENT if checked.problems else 0
