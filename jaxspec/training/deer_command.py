"""`jaxspec train deer` on the command line: flags and a JSON file into settings."""

import argparse

from jaxspec.training.command import (
    add_answers_arguments,
    add_decoding_argument,
    add_optimizer_arguments,
    add_run_arguments,
    plain_answers_settings,
    run_trainer,
)
from jaxspec.training.settings import CUTS, DEER_STAGES, DeerTrainingSettings, settings_from_json

_DEER = {
    "start_from": "start_from",
    "stage": "stage",
    "separator": "separator",
    "longest": "longest",
    "alpha": "alpha",
    "normalise": "normalise",
    "cuts": "cuts",
    "block": "block",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec train deer`; those left out keep the settings' defaults."""
    parser.description = (
        "Aligns a diffusion model with the causal model that it is to draft for (DEER), on answers "
        "of that model: stage 1 first, then stage 2 from its result. Running the same command "
        "again resumes an interrupted run."
    )
    parser.add_argument("--target", help="folder of the model to draft for")
    parser.add_argument("--start-from", help="folder of the diffusion model to align")
    data, run = add_run_arguments(parser)
    add_answers_arguments(data)
    run.add_argument("--stage", type=int, choices=DEER_STAGES, help="default: 1")
    run.add_argument(
        "--separator",
        action=argparse.BooleanOptionalAction,
        help="[SEP] where an answer is cut, for drafters that see both sides (default)",
    )
    run.add_argument("--longest", type=int, help="stage 2: hidden slots at most (default: 96)")
    run.add_argument("--alpha", type=float, help="stage 2: weight of a slot over the next one")
    run.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="stage 2: divide by the sum of weights (default)",
    )
    run.add_argument(
        "--cuts",
        choices=CUTS,
        help="stage 2: cut an answer at one place (default), or in all, for drafters that are "
        "causal over blocks: twice the work for as many ends as there is room for",
    )
    run.add_argument(
        "--block", type=int, help="tokens of the drafts that validation decodes with (default: 8)"
    )
    add_decoding_argument(run)
    add_optimizer_arguments(parser)


def settings_from_arguments(args: argparse.Namespace) -> DeerTrainingSettings:
    """The settings a command line asks for.

    Raises:
        ValueError: naming the flag or the field that is wrong.
    """
    plain = plain_answers_settings(args, _DEER)
    if "start_from" not in plain:
        raise ValueError("No diffusion model to align: give --start-from FOLDER.")
    return settings_from_json(plain, DeerTrainingSettings)


def run(args: argparse.Namespace) -> int:
    """Trains as the arguments say and writes the drafter; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training.train_deer import train_deer

    return run_trainer(train_deer, settings_from_arguments(args), args)
