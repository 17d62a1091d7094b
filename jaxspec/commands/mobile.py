"""Flags of `jaxspec generate` for exported files, and their meaning."""

import argparse
from typing import TYPE_CHECKING

from jaxspec.commands.options import refuse_unused
from jaxspec.drafters import DraftModel, PromptLookup

if TYPE_CHECKING:
    from jaxspec.mobile import MobileModel
    from jaxspec.mobile.loops import Caller, HostAcceptance, Loop, LoopOf

_ONLY_LITERT = ("loop", "threads", "weight_cache")
_ONLY_JAX = ("dtype", "weights", "max_positions", "mesh")
LOOPS = ("plain", "verify", "step")


def add_mobile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--runtime` and the flags that belong to it."""
    group = parser.add_argument_group("LiteRT")
    group.add_argument(
        "--runtime",
        choices=("jax", "litert"),
        default="jax",
        help="litert: MODEL is a .tflite of `jaxspec export tflite` (default: jax)",
    )
    group.add_argument(
        "--loop",
        choices=LOOPS,
        help="plain: decode; verify: draft, verify_N, accept here, commit_N, or draft_1 and "
        "accept_N; step: whole steps (default: steps if the file has them and they can do what "
        "is asked)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    group.add_argument(
        "--weight-cache",
        metavar="FILE",
        help="keep packed weights there: signatures share them",
    )


def check_runtime(args: argparse.Namespace) -> None:
    """Refuses flags that the chosen runtime would ignore.

    Raises:
        ValueError: naming the flags.
    """
    if args.runtime == "jax":
        refuse_unused(args, _ONLY_LITERT, "needs --runtime litert.")
        return
    refuse_unused(args, ("drafting",), "needs --runtime jax; --loop says how files decode.")
    refuse_unused(args, _ONLY_JAX, "fixed when the file was exported; leave it out.")


def open_mobile(args: argparse.Namespace) -> "MobileModel":
    """Opens the file that `MODEL` names, with the tokenizer in its folder."""
    from jaxspec.mobile import MobileModel

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}.")
    return MobileModel(args.model, num_threads=args.threads, weight_cache=args.weight_cache)


def loop_of(args: argparse.Namespace) -> "LoopOf | None":
    """Chooses how to decode; drafts that are made on the host need `verify_N`.

    Raises:
        ValueError: for a drafter that is part of files, or flags that contradict each other.
    """
    from jaxspec.mobile.drafts import LookupDraft
    from jaxspec.mobile.loops import Plain, Verified, drafted_by, verify_drafts, whole_steps
    from jaxspec.mobile.runtime import MobileModel

    if args.drafter is None:
        loops: dict[str | None, LoopOf] = {
            "plain": Plain,
            "verify": verify_drafts,
            "step": whole_steps,
        }
        return loops.get(args.loop)
    if args.loop not in (None, "verify"):
        raise ValueError(f"--drafter {args.drafter.text}: drafts here, so --loop must be verify.")
    settings = args.drafter.settings
    if args.drafter.name == "lookup":
        lookup = PromptLookup(**settings)
        return lambda model, acceptance: Verified(
            model, LookupDraft(lookup, model.manifest.capacity), acceptance
        )
    if args.drafter.name == "draft-model":
        source = settings.get("model")
        if source is None:
            raise ValueError(
                "--drafter draft-model needs draft-model:model=FILE, of an exported model."
            )
        if others := sorted(settings.keys() - {"model", "num_speculative_tokens"}):
            raise ValueError(
                f"--drafter {args.drafter.text}: on LiteRT draft-model has model and "
                f"num_speculative_tokens; leave {', '.join(others)} out."
            )
        count = settings.get("num_speculative_tokens", DraftModel.num_speculative_tokens)
        drafted = drafted_by(MobileModel(source, num_threads=args.threads), count)

        def loop(model: "Caller", acceptance: "HostAcceptance") -> "Loop":
            try:
                return drafted(model, acceptance)
            except ValueError as error:
                raise ValueError(f"--drafter {args.drafter.text}: {error}") from error

        return loop
    raise ValueError(
        f"--drafter {args.drafter.text}: it is part of a file (`jaxspec export`); leave it out."
    )
