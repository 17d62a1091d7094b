"""`jaxspec demo`: the shipped models decode built-in prompts, plain and speculatively."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from jaxspec.checkpoint import Model, load, shipped_models
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.live import DRAFTED_STYLE, VISIBLE_ESCAPE, waiting
from jaxspec.commands.methods import EVERY_METHOD, MADE_FOR
from jaxspec.commands.options import add_drafter_argument, announce, make_drafter, remark
from jaxspec.commands.picture import check_picture, write_picture
from jaxspec.commands.race import Recording, coloured, record, replay, slowdown
from jaxspec.core.loop import round_up
from jaxspec.decoding.denoise import DEFAULT_BLOCK, DenoiseConfig, denoise
from jaxspec.decoding.generate import generate
from jaxspec.decoding.profile import PROMPTS
from jaxspec.decoding.request import GenerationConfig
from jaxspec.diffusion import SelfSpeculation
from jaxspec.measure.compare import compare, describe
from jaxspec.measure.comparison import Comparison, as_summary
from jaxspec.measure.figures import PLAIN, STEPWISE

BLOCKS = "demo-block-diffusion"
"""The diffusion model of the demo."""
_DRAFTS = (2, 4)
_NEXT = """\
Next:
  jaxspec generate demo "def add(a, b):" --drafter eagle:head=demo-eagle
  jaxspec demo --all      every method, on every prompt
  jaxspec bench MODEL PROMPTS.jsonl --drafter lookup      your own model and prompts"""
FIRST_METHODS = ("prompt lookup", "EAGLE-1, searched tree")
"""Methods that are shown without `--all`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec demo`."""
    parser.description = (
        "Decodes a built-in prompt with the shipped models: plainly, with prompt lookup and with "
        "an EAGLE head; then with a diffusion model, stepwise and with its own decisions drafted. "
        "A terminal shows them side by side, slowed down, with the causal model's accepted draft "
        "tokens coloured. "
        "Then they are timed on three prompts. Needs no network."
    )
    parser.add_argument("-m", "--model", default=MADE_FOR, help=f"target (default: {MADE_FOR})")
    add_drafter_argument(parser, repeatable=True)
    parser.add_argument(
        *("--max-new-tokens", "--max-tokens"),
        type=int,
        default=96,
        metavar="N",
        help="tokens per prompt (default: 96)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed runs of each (default: 3)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every method that comes with the package for the target, on all three prompts",
    )
    parser.add_argument(
        "--slow",
        type=float,
        metavar="X",
        help="slow the race down by this factor (default: plain decoding takes 4 seconds)",
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        help="write the causal model's race of the first prompt as an animated picture",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Shows the demo; returns 1 if the outputs differ."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}.")
    if args.slow is not None and not 1 <= args.slow < math.inf:
        raise ValueError(f"--slow must be a number from 1 (as fast as it ran), got {args.slow:g}.")
    console = Console(highlight=False, stderr=args.json)
    in_turns = args.json or not console.is_terminal
    if args.slow is not None and in_turns and not args.svg:
        raise ValueError("--slow: the race needs a terminal, and no --json; leave --slow out.")
    if args.svg:
        check_picture(args.svg)
    names = [args.model]
    # Further drafters are for the target alone.
    if args.model == MADE_FOR and not args.drafter and BLOCKS in shipped_models():
        names.append(BLOCKS)
    shown = [_show_model(console, load(name), args, in_turns) for name in names]
    if args.json:
        first, *others = [_as_json(*each) for each in shown]
        print(json.dumps(first | {"diffusion": others[0] if others else None}))
    else:
        console.print(_NEXT, soft_wrap=True)
    agree = all(comparison.outputs_agree for *_, comparison in shown)
    return 0 if agree else EXIT_DIFFERENT


def _show_model(
    console: Console, model: Model, args: argparse.Namespace, in_turns: bool
) -> tuple[Model, list[dict[str, "MethodOutput"]], Comparison]:
    """Shows the methods of one model, then times them."""
    config, drafters = _asked(args, model)
    announce(
        args, model=model.name, config=config, drafters=", ".join(map(describe, drafters.values()))
    )
    undrafted = STEPWISE if model.is_diffusion else PLAIN
    methods = {undrafted: None, **drafters}
    if model.is_diffusion or not in_turns:
        _legend(console, model)
    outputs = []
    for number, prompt in enumerate(PROMPTS if args.all else PROMPTS[:1], start=1):
        _heading(console, f"prompt {number} of {len(PROMPTS)}" if args.all else "prompt")
        console.print(Text(prompt))
        shown = methods if in_turns else {undrafted: None}  # at once; the others race it
        outputs.append({})
        for name, method in shown.items():
            _heading(console, name)
            outputs[-1][name] = show(console, model, prompt, config, method)
        pictured = args.svg and number == 1 and not model.is_diffusion
        if in_turns and not pictured:
            continue
        recordings = record(model, prompt, config, methods)
        slowed = args.slow or slowdown(recordings[0])
        if pictured:
            write_picture(Path(args.svg), model.name, prompt, recordings, slowed)
        if not in_turns:
            race(console, recordings, slowed)
    _heading(console, f"timing {model.name}: every method on {len(PROMPTS)} prompts, in turns")
    comparison = compare(model, PROMPTS, drafters, config, repeats=args.repeats)
    if not args.json:
        console.print(as_summary(comparison))
    _say_whether_identical(console, undrafted, comparison)
    return model, outputs, comparison


def _asked(args: argparse.Namespace, model: Model) -> tuple[Any, dict[str, Any]]:
    """Returns the settings of decoding, and the methods apart from the one that does not draft."""
    if model.is_diffusion:
        if args.drafter:
            raise ValueError(
                f"--drafter: not for diffusion language models, and {model.name} is one."
            )
        if args.svg and args.model != MADE_FOR:
            raise ValueError(f"--svg: a race of causal models, and {args.model} is none.")
        diffusion = model.config.diffusion
        block = (diffusion and diffusion.block) or DEFAULT_BLOCK
        config = DenoiseConfig(max_new_tokens=round_up(args.max_new_tokens, block))
        counts = [count for count in _DRAFTS if count < config.max_new_tokens]
        return config, {f"{count} drafted": SelfSpeculation(count) for count in counts}
    names = EVERY_METHOD if args.all else FIRST_METHODS
    made = {name: EVERY_METHOD[name](model) for name in names}
    for spec in filter(None, args.drafter or []):
        made[spec.text] = make_drafter(spec, args, model)
    drafters = {name: drafter for name, drafter in made.items() if drafter is not None}
    left_out = [name for name in made if name not in drafters]
    if left_out:
        remark(left_out=", ".join(left_out))
    return GenerationConfig(max_new_tokens=args.max_new_tokens), drafters


@dataclasses.dataclass(frozen=True)
class MethodOutput:
    """The output of one method for one prompt; a canvas does not say which tokens were drafted."""

    text: str
    tokens: list[int]
    from_draft: list[bool] | None = None


def show(console: Console, model: Model, prompt: str, config: Any, method: Any) -> MethodOutput:
    """Prints the output of one method for one prompt, with its counts."""
    with waiting("compiling, once for this kind of request ..."):
        if model.is_diffusion:
            (row,), drafted = denoise(model, [prompt], config, method), None
            figures = f"{row.num_calls} passes, {row.tokens_per_call:.2f} tokens per pass"
        else:
            (row,) = generate(model, prompt, config, method)
            drafted = row.from_draft.tolist()
            figures = (
                f"{len(row.tokens)} tokens in {row.metrics.num_verify_steps} passes: "
                f"tau {row.metrics.mean_acceptance_length:.2f} (bonus included)"
            )
    text = row.text or ""
    console.print(Text(text.translate(VISIBLE_ESCAPE)), soft_wrap=True)
    console.print(Text(f"({figures})", style="dim"))
    return MethodOutput(text, row.tokens.tolist(), drafted)


def race(console: Console, recordings: Sequence[Recording], slowed: float) -> None:
    """Shows all methods side by side, and then the text of the fastest.

    Args:
        console: console of a terminal.
        recordings: the steps of the methods, the one that does not draft first.
        slowed: seconds on the screen for each second of decoding.
    """
    _heading(console, "the same text by every method, each alone, its time replayed")
    replay(console, recordings, slowed)
    fastest = min(recordings, key=lambda recording: recording.seconds)
    _heading(console, f"the text, by the fastest: {fastest.name}")
    console.print(coloured(fastest.steps))


def _legend(console: Console, model: Model) -> None:
    if model.is_diffusion:
        console.print(
            f"{model.name} is a diffusion language model: it fills in masks, the surest first, and "
            "drafts its own next decisions. A pass checks them all."
        )
        return
    legend = Text("Accepted draft tokens are ")
    legend.append("coloured", DRAFTED_STYLE)
    console.print(legend.append("; all other tokens are the target's own."))


def _heading(console: Console, title: str) -> None:
    if console.is_terminal:
        console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
    else:
        console.print(Text(f"# {title}"), soft_wrap=True)


def _say_whether_identical(console: Console, undrafted: str, comparison: Comparison) -> None:
    if comparison.outputs_agree:
        num_ties = sum(map(len, comparison.ties.values()))
        exactly = "identical to" if not num_ties else "the same, ties aside, as"
        said, style = f"All outputs are {exactly} {undrafted} decoding's.", "bold green"
    else:
        said, style = f"OUTPUTS DIFFER from {undrafted} decoding's: see above.", "bold red"
    console.print(Text(said, style=style))


def _as_json(
    model: Model, outputs: list[dict[str, MethodOutput]], comparison: Comparison
) -> dict[str, Any]:
    return {
        "model": model.name,
        "outputs_agree": comparison.outputs_agree,
        "prompts": [
            {
                "prompt": prompt,
                "outputs": {name: dataclasses.asdict(output) for name, output in by_name.items()},
            }
            for prompt, by_name in zip(PROMPTS, outputs, strict=False)  # those that were shown
        ],
        "comparison": comparison.as_dict(),
    }
