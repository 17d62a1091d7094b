"""`jaxspec train masked` on the command line: flags and a JSON file into settings."""

import argparse

from jaxspec.training.command import (
    MODEL_FLAGS,
    OPTIMIZER_FLAGS,
    RUN_FLAGS,
    add_model_arguments,
    add_optimizer_arguments,
    add_run_arguments,
    layers_from_text,
    plain_settings,
    run_trainer,
)
from jaxspec.training.settings import MaskedTrainingSettings, settings_from_json

_MASKED = {
    "block": "block",
    "shift": "shift",
    "start_from": "start_from",
    "keep_layers": "layers",
    "tokenizer": "tokenizer",
    "random_lengths": "random_lengths",
    "answers_only": "answers_only",
    "teacher": "teacher",
    "own_text_weight": "own_text_weight",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec train masked`; those left out keep the settings' defaults."""
    parser.description = (
        "Trains a diffusion language model, from random weights or from those of a causal model. "
        "Running the same command again resumes an interrupted run."
    )
    data, run = add_run_arguments(parser)
    data.add_argument("--tokenizer", help="folder with the tokenizer (default: of --start-from)")
    data.add_argument(
        "--answers-only",
        action="store_true",
        default=None,
        help="hide only what assistants say: fine-tuning",
    )
    data.add_argument(
        "--teacher", help="folder of the model, causal or diffusion, that writes --own-text"
    )
    data.add_argument(
        "--own-text",
        type=int,
        metavar="N",
        help="the teacher first writes N texts, which are read beside the sources",
    )
    data.add_argument("--own-text-weight", type=float, help="passes over them (default: 1)")
    run.add_argument("--start-from", help="folder of a causal or diffusion model to begin with")
    run.add_argument(
        "--keep-layers",
        type=layers_from_text,
        metavar="LAYER,...",
        help="of --start-from, in this order (default: all)",
    )
    run.add_argument(
        "--block",
        type=int,
        metavar="N",
        help="slots see their own block of N and all before it (default: 0, both sides)",
    )
    run.add_argument(
        "--shift",
        action=argparse.BooleanOptionalAction,
        help="outputs decide the next slot (default: as --start-from does it)",
    )
    run.add_argument(
        "--random-lengths", type=float, metavar="X", help="share of rows cut short (default: 0.01)"
    )
    add_model_arguments(parser)
    add_optimizer_arguments(parser)


def settings_from_arguments(args: argparse.Namespace) -> MaskedTrainingSettings:
    """The settings a command line asks for.

    Raises:
        ValueError: naming the flag or the field that is wrong.
    """
    sections = {"model": MODEL_FLAGS, "optimizer": OPTIMIZER_FLAGS}
    plain = plain_settings(args, RUN_FLAGS | _MASKED, sections)
    return settings_from_json(plain, MaskedTrainingSettings)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and writes the checkpoint; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training.train_masked import train_masked

    return run_trainer(train_masked, settings_from_arguments(args), args)
