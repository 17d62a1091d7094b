"""`jaxspec export tuned`: a file for LiteRT with the tree that is fastest on this machine."""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files
from jaxspec.commands.export_options import (
    add_acceptance_arguments,
    add_export_arguments,
    announce_export,
    check_flags,
    export_config,
    head_asked,
    held_out,
    print_written,
)
from jaxspec.commands.options import add_drafter_argument, load_model
from jaxspec.commands.tune_profile import show_profile
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.drafters import LoadedDrafter
from jaxspec.mobile.calibration import Calibration
from jaxspec.mobile.contents import ExportConfig, in_one_dtype
from jaxspec.mobile.export import MODEL_FILE, calibrated, export
from jaxspec.mobile.profile import export_kit, measure_here
from jaxspec.progress import progress_bar
from jaxspec.tuning import load_acceptance, save_profile, save_tree, search_tree
from jaxspec.tuning.measuring import measure_acceptance, with_tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export tuned`."""
    parser.description = (
        "Times a latency kit on this machine, searches the fastest tree of an EAGLE head, and "
        "writes a .tflite with it, next to profile.json and tree.json. `export tflite --drafter "
        "eagle:head=HEAD,tree=tree.json` writes further files with that tree."
    )
    settings = ("quantization", "check_gpu_ops")
    add_export_arguments(parser, "--threads", settings=settings)
    add_drafter_argument(parser, required=True)
    add_acceptance_arguments(parser, required=True)


def run(args: argparse.Namespace) -> int:
    """Searches and exports as the arguments say."""
    config = export_config(args)
    check_flags(args)
    if args.drafter is not None and "tree" in args.drafter.settings:
        raise ValueError("--drafter: leave out tree, which is searched here.")
    model = load_model(args)
    # A search looks as deep as the tree of its kit, and no deeper.
    drafter = head_asked(args, model, EAGLE_PATHS)
    announce_export(args, drafter, config)
    with replacing_files(args.out) as staging:
        drafter, calibration = _tuned(args, model, drafter, config, staging)
        start = time.perf_counter()
        manifest = export(model, staging, drafter, config, calibration)
    print_written(args.out / MODEL_FILE, start)
    print(f"signatures: {', '.join(manifest.signatures)}")
    return 0


def _tuned(
    args: argparse.Namespace,
    model: Model,
    drafter: LoadedDrafter,
    config: ExportConfig,
    folder: Path,
) -> tuple[LoadedDrafter | None, Calibration | None]:
    """Returns the head over the fastest tree on this machine, and the kit's calibration.

    Profile and tree are written into the folder.

    The head is `None` if no tree pays, the calibration if the quantization asks for none.
    """
    acceptance = None
    if args.acceptance is not None:
        acceptance = load_acceptance(args.acceptance)
        if acceptance.head:  # published tables name no head
            acceptance.check_head(drafter.params)
    prompts = [] if args.prompts is None else held_out(args)
    with TemporaryDirectory(dir=folder) as kit, progress_bar(3) as advance:
        advance("writing a latency kit")
        calibration = calibrated(in_one_dtype(model)[0], config, folder)
        export_kit(model, kit, drafter, config, calibration)
        profile = measure_here(Path(kit) / MODEL_FILE, args.threads or 1, advance=advance)
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
    save_profile(profile, folder / "profile.json")
    save_tree(best, folder / "tree.json", profile=profile.name, acceptance=acceptance.source)
    if not best.paths:
        print("Do not speculate here: no tree is worth its time. Exporting plain decoding.")
        return None, calibration
    return with_tree(drafter, best.paths), calibration
