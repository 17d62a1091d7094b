"""`jaxspec export tflite`: a model as a file for LiteRT."""

import argparse
import dataclasses
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.commands.export_options import (
    add_export_arguments,
    announce_export,
    check_flags,
    check_on_gpu,
    export_config,
    head_or_drafter,
    held_out,
    print_written,
)
from jaxspec.commands.options import add_drafter_arguments, load_model, refuse_unused
from jaxspec.commands.tune_profile import show_profile
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.decoding.request import encode_prompt
from jaxspec.drafters import LoadedDrafter
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.memory import check_phone_memory, phone_memory
from jaxspec.mobile.profile import export_kit, measure_here
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.report import compare_quantizations, quality_table
from jaxspec.progress import progress_bar
from jaxspec.tuning import load_acceptance, save_profile, save_tree, search_tree
from jaxspec.tuning.measuring import measure_acceptance, with_tree

REPORT_FILE = "quantization.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export tflite`."""
    parser.description = (
        "Writes a model as one .tflite for LiteRT, with its manifest and tokenizer. With --head or "
        "--drafter the file also holds speculative steps."
    )
    add_export_arguments(
        parser,
        *("--check-gpu", "--gpu-timeout", "--head", "--tree"),
        *("--prompts", "--limit", "--acceptance", "--threads"),
        settings=("check_gpu_ops", "verify", "levels", "drafts", "block_length", "bundle"),
    )
    parser.add_argument(
        "--phone-memory",
        type=float,
        metavar="GB",
        help="refuse a file that needs more on the phone, weights and caches together: on a CPU "
        "with a weight cache, or with --bundle gpu on a GPU",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--auto",
        action="store_true",
        help="time a latency kit on this machine, search the fastest tree, and export with it; "
        "needs --head, and --acceptance or --prompts",
    )
    group.add_argument(
        "--report",
        action="store_true",
        help="write every quantization in turn, compare them on --prompts, and keep no file",
    )
    add_drafter_arguments(parser, repeatable=False)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    config = export_config(args)
    _check_modes(args)
    check_flags(args)
    model = load_model(args)
    # A search looks as deep as the tree of its kit, and no deeper.
    drafter = head_or_drafter(args, model, EAGLE_PATHS if args.auto else None)
    announce_export(args, drafter, config)
    if model.config.diffusion is not None:
        why = f"for causal models, and {args.model} fills in masks."
        refuse_unused(args, ("phone_memory", "report", "auto"), why)
    if args.phone_memory is not None:
        _check_memory(args, model, drafter, config)
    if args.report:
        return _report(args, model, drafter, config)
    if args.auto:
        drafter = _tuned(args, model, drafter, config)
        if drafter is None:
            config = dataclasses.replace(config, levels=())  # only a head drafts level by level
    start = time.perf_counter()
    manifest = export(model, args.out, drafter, config)
    print_written(args.out / MODEL_FILE, start)
    print(f"signatures: {', '.join(manifest.signatures)}")
    return check_on_gpu(args, args.out / MODEL_FILE)


def _check_modes(args: argparse.Namespace) -> None:
    if args.auto:
        if args.head is None:
            raise ValueError("--auto: needs --head FOLDER, an EAGLE head.")
        if args.tree is not None:
            raise ValueError("--auto: searches a tree itself; leave --tree out.")
        if (args.acceptance is None) == (args.prompts is None):
            raise ValueError(
                "--auto: needs to know how often drafts are accepted: give --prompts FILE.jsonl to "
                "count that, or --acceptance FILE."
            )
        return
    refuse_unused(args, ("acceptance", "threads"), "needs --auto.")
    if args.report:
        if args.prompts is None:
            raise ValueError("--report: needs --prompts FILE.jsonl, held-out text.")
        refuse_unused(args, ("check_gpu",), "--report keeps no file to check; leave one out.")
        refuse_unused(args, ("quantization",), "--report writes every one; leave --quantize out.")
        return
    refuse_unused(args, ("prompts",), "needs --auto or --report.")


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


def _tuned(
    args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig
) -> LoadedDrafter | None:
    """Returns the head over the fastest tree on this machine; `None` if no tree pays."""
    acceptance = None
    if args.acceptance is not None:
        acceptance = load_acceptance(args.acceptance)
        if acceptance.head:  # published tables name no head
            acceptance.check_head(drafter.params)
    prompts = [] if args.prompts is None else held_out(args)
    with TemporaryDirectory() as folder, progress_bar(3) as advance:
        advance("writing a latency kit")
        export_kit(model, folder, drafter, config)
        profile = measure_here(Path(folder) / MODEL_FILE, args.threads or 1, advance=advance)
        advance("counting accepted drafts")
        if acceptance is None:
            acceptance = measure_acceptance(model, drafter, prompts)
    found = search_tree(acceptance, profile)
    best, plain = found.best, found.plain
    show_profile(profile)
    print(
        f"tree: {best.nodes} nodes (root excluded), tau {best.tau:.2f} (bonus included), "
        f"{best.tokens_per_second / plain.tokens_per_second:.2f} x plain, expected"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    save_profile(profile, args.out / "profile.json")
    save_tree(best, args.out / "tree.json", profile=profile.name, acceptance=acceptance.source)
    if not best.paths:
        print("Do not speculate here: no tree is worth its time. Exporting plain decoding.")
        return None
    return with_tree(drafter, best.paths)


def _report(args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig) -> int:
    texts = [encode_prompt(model, prompt) for prompt in held_out(args)]
    with progress_bar(len(QUANTIZATIONS)) as advance:
        found = compare_quantizations(model, texts, drafter, config, advance)
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
    Console(highlight=False).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    with replacing_files(args.out) as staging:
        rows = [row._asdict() for row in found]
        write_json(staging / REPORT_FILE, {"model": model.name, "quantizations": rows})
    print(f"wrote {args.out / REPORT_FILE}")
    return 0
