"""`jaxspec export`: a model as a file for phones."""

import argparse
import time
from pathlib import Path

from jaxspec.bench.compare import describe
from jaxspec.checkpoint import Model, load_eagle
from jaxspec.commands.options import (
    add_drafter_arguments,
    add_model_arguments,
    announce,
    load_model,
    make_drafter,
)
from jaxspec.core.types import Drafter
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.trees import load_tree, tree_of_head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export`."""
    parser.description = (
        "Writes a model as one .tflite for LiteRT, with its manifest and tokenizer beside it. With "
        "--drafter the file also holds whole speculative steps."
    )
    add_model_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write into")
    group = parser.add_argument_group("shapes")
    group.add_argument(
        "--slots", type=int, metavar="N", help="longest text, in tokens (default: 1024)"
    )
    group.add_argument(
        "--prefill", type=_sizes, metavar="N,...", help="prompt tokens per call (default: 64)"
    )
    group.add_argument(
        "--verify", type=_sizes, metavar="N,...", help="add verify_N and commit_N of these sizes"
    )
    group = parser.add_argument_group("EAGLE")
    group.add_argument("--head", metavar="FOLDER", help="draft with this EAGLE-1 or EAGLE-3 head")
    group.add_argument(
        "--tree",
        metavar="FILE",
        help="of `jaxspec tune tree`, or eagle-25; default: the one beside the head, else EAGLE's "
        "25 nodes",
    )
    parser.add_argument(
        "--any-ops",
        dest="check_gpu_ops",
        action="store_false",
        default=None,
        help="write the file even if a phone's GPU would refuse it, or compute it wrongly",
    )
    add_drafter_arguments(parser, repeatable=False)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    names = ("slots", "prefill", "verify", "check_gpu_ops")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = ExportConfig(**given)
    model = load_model(args)
    drafter = _drafter(args, model)
    announce(model=args.model, drafter=describe(drafter), config=config)
    start = time.perf_counter()
    manifest = export(model, args.out, drafter, config)
    path = args.out / MODEL_FILE
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - start:.0f} s")
    print(f"signatures: {', '.join(manifest.signatures)}")
    return 0


def _drafter(args: argparse.Namespace, model: Model) -> Drafter | LoadedDrafter | None:
    if args.head is None:
        if args.tree is not None:
            raise ValueError("--tree: needs --head FOLDER, the head that drafts over it.")
        return None if args.drafter is None else make_drafter(args.drafter, args, model)
    if args.drafter is not None:
        raise ValueError("Give either --head or --drafter, not both.")
    paths = tree_of_head(args.head) if args.tree is None else load_tree(args.tree)
    return Eagle.of(load_eagle(args.head, model.network), paths)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
