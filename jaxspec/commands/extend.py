"""`jaxspec extend`: a diffusion drafter goes on with a text by itself, block after block."""

import argparse
import json
import sys

from rich.console import Console
from rich.text import Text

from jaxspec.commands.options import (
    add_drafter_arguments,
    add_model_arguments,
    announce,
    drafter_asked,
    load_model,
)
from jaxspec.drafters import LoadedDrafter
from jaxspec.regeneration import Regenerated, regenerate

_STYLES = ("green", "cyan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec extend`."""
    parser.description = (
        "Lets the drafter of --drafter deer:model=... extend a text alone, block after block, and "
        "says what MODEL, the target, thinks of it beside its own continuation. Nothing is "
        "verified: this shows a drafter, it is no way to decode."
    )
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text, or - for standard input")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: likeliest")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_drafter_arguments(parser, repeatable=False)


def run(args: argparse.Namespace) -> int:
    """Writes blocks and shows them."""
    if args.drafter is None:
        raise ValueError("--drafter deer:model=MODEL is needed: the diffusion model that writes.")
    model = load_model(args)
    drafter = drafter_asked(args, model)
    if not isinstance(drafter, LoadedDrafter):
        raise ValueError(f"--drafter {args.drafter.text} has no weights to write with; give deer.")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    announce(target=args.model, drafter=drafter.drafter)
    found = regenerate(
        model,
        drafter,
        prompt,
        args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
    )
    if args.json:
        print(json.dumps(_as_dict(found)))
        return 0
    console = Console(highlight=False)
    text = Text(prompt)
    assert model.tokenizer is not None
    shown = model.tokenizer.detokenizer()
    for number, block in enumerate(found.blocks):
        text.append(shown.push(block.tolist()), _STYLES[number % len(_STYLES)])
    text.append(shown.finish())
    console.print(text)
    console.print(
        f"{len(found.tokens)} tokens in {len(found.blocks)} blocks of {found.block}. The target's "
        f"mean log-probability of them is {found.logprob:.3f}; of its own "
        f"{len(found.target_tokens)} tokens, {found.target_logprob:.3f}."
    )
    return 0


def _as_dict(found: Regenerated) -> dict:
    return {
        "prompt_tokens": found.prompt_tokens.tolist(),
        "tokens": found.tokens.tolist(),
        "block": found.block,
        "text": found.text,
        "target_mean_logprob": found.logprob,
        "target_mean_logprob_of_its_own": found.target_logprob,
        "target_tokens": found.target_tokens.tolist(),
    }
