"""`jaxspec train eagle` on the command line: flags and a JSON file into settings."""

import argparse

from jaxspec.training.command import (
    OPTIMIZER_FLAGS,
    RUN_FLAGS,
    TARGET_FLAGS,
    add_cache_argument,
    add_decoding_argument,
    add_optimizer_arguments,
    add_run_arguments,
    layers_from_text,
    plain_settings,
    run_trainer,
)
from jaxspec.training.settings import (
    EAGLE_VERSIONS,
    EagleTrainingSettings,
    settings_from_json,
)
from jaxspec.trees import load_tree

OWN_TEXT_DEFAULT = 2000
_HEAD = {
    "version": "version",
    "sources_weight": "sources_weight",
    "draft_vocab": "draft_vocab",
    "noise": "noise",
    "token_weight": "token_weight",
    "unroll": "num_unrolled",
    "decay": "decay",
    "taps": "taps",
    "cache_features": "cache_features",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec train eagle`; those left out keep the settings' defaults."""
    parser.description = (
        "Trains a head that drafts from a target's hidden states, on text that the target writes "
        "itself. Running the same command again resumes an interrupted run."
    )
    parser.add_argument("--target", help="folder of the model that the head is to draft for")
    data, run = add_run_arguments(parser)
    data.add_argument(
        "--own-text",
        type=int,
        metavar="N",
        help="the target first writes N texts, each from the beginning of a document "
        f"(default: {OWN_TEXT_DEFAULT})",
    )
    data.add_argument(
        "--sources-weight",
        type=float,
        metavar="X",
        help="read the sources too: passes over one of weight 1 (default: 0, prompts only)",
    )
    add_cache_argument(run)
    add_decoding_argument(run)
    head = parser.add_argument_group("head")
    head.add_argument("--version", type=int, choices=EAGLE_VERSIONS, help="default: 1")
    head.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft from the N most frequent tokens (default: 0, all)",
    )
    head.add_argument(
        "--tree",
        metavar="FILE",
        help="the tree that validation decodes with: a file of `jaxspec tune tree`, a JSON list of "
        "rank paths, or eagle-25 (the default: EAGLE's 25 nodes, the root not counted)",
    )
    head.add_argument("--noise", type=float, help="EAGLE-1: on the states read, at 512 tokens")
    head.add_argument("--token-weight", type=float, help="EAGLE-1: of the tokens' cross-entropy")
    head.add_argument("--unroll", type=int, metavar="N", help="EAGLE-3: passes of the head")
    head.add_argument("--decay", type=float, help="EAGLE-3: weight of a pass over the one before")
    head.add_argument(
        "--taps",
        type=layers_from_text,
        metavar="LAYER,...",
        help="EAGLE-3: layers whose inputs to read",
    )
    add_optimizer_arguments(parser)


def settings_from_arguments(args: argparse.Namespace) -> EagleTrainingSettings:
    """The settings a command line asks for.

    Raises:
        ValueError: naming the flag or the field that is wrong.
    """
    plain = plain_settings(args, RUN_FLAGS | TARGET_FLAGS | _HEAD, {"optimizer": OPTIMIZER_FLAGS})
    if "target" not in plain:
        raise ValueError("No target to draft for: give --target FOLDER.")
    plain.setdefault("own_text", OWN_TEXT_DEFAULT)
    if args.tree is not None:
        plain["paths"] = [list(path) for path in load_tree(args.tree)]
    return settings_from_json(plain, EagleTrainingSettings)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and writes the head; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training.train_eagle import train_eagle

    return run_trainer(train_eagle, settings_from_arguments(args), args)
