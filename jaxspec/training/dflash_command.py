"""`jaxspec train dflash` on the command line: flags and a JSON file into settings."""

import argparse

from jaxspec.training.command import (
    add_answers_arguments,
    add_cache_argument,
    add_decoding_argument,
    add_optimizer_arguments,
    add_run_arguments,
    layers_from_text,
    plain_answers_settings,
    run_trainer,
)
from jaxspec.training.settings import DFlashTrainingSettings, settings_from_json

_HEAD = {
    "layers": "layers",
    "mlp_dim": "mlp_dim",
    "taps": "taps",
    "block": "block",
    "anchors": "anchors",
    "gamma": "gamma",
    "cache_features": "cache_features",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec train dflash`; those left out keep the settings' defaults."""
    parser.description = (
        "Trains a head that drafts whole blocks from a target's hidden states (DFlash), on answers "
        "of that target. Running the same command again resumes an interrupted run."
    )
    parser.add_argument("--target", help="folder of the model that the head is to draft for")
    data, run = add_run_arguments(parser)
    add_answers_arguments(data)
    add_cache_argument(run)
    add_decoding_argument(run)
    head = parser.add_argument_group("head")
    head.add_argument("--layers", type=int, metavar="N", help="default: 2")
    head.add_argument("--mlp-dim", type=int, metavar="N", help="default: as the target's")
    head.add_argument(
        "--taps",
        type=layers_from_text,
        metavar="LAYER,...",
        help="layers of the target whose inputs to read (default: as many as --layers, evenly)",
    )
    head.add_argument(
        "--block", type=int, metavar="N", help="slots, the pending token counted (default: 8)"
    )
    head.add_argument(
        "--anchors", type=int, metavar="N", help="blocks of a sequence in an update (default: 32)"
    )
    head.add_argument(
        "--gamma", type=float, help="how slowly weights fall within a block (default: 7/16 of it)"
    )
    add_optimizer_arguments(parser)


def settings_from_arguments(args: argparse.Namespace) -> DFlashTrainingSettings:
    """The settings a command line asks for.

    Raises:
        ValueError: naming the flag or the field that is wrong.
    """
    return settings_from_json(plain_answers_settings(args, _HEAD), DFlashTrainingSettings)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and writes the head; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training.train_dflash import train_dflash

    return run_trainer(train_dflash, settings_from_arguments(args), args)
