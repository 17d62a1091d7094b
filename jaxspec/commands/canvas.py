"""`jaxspec generate` with a diffusion language model: a canvas that is filled in."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.commands.flags import add_flags, given
from jaxspec.commands.interrupts import go_on
from jaxspec.commands.live import DRAFTED_STYLE, VISIBLE_ESCAPE, Shown, waiting
from jaxspec.commands.options import announce, refuse_unused
from jaxspec.decoding.denoise import DenoiseConfig, DenoiseStep, denoise_stream
from jaxspec.decoding.profile import with_costs
from jaxspec.decoding.request import GenerationConfig, PromptLike, encode_prompt
from jaxspec.diffusion import SelfSpeculation

if TYPE_CHECKING:
    from jaxspec.mobile import MobileModel

COMPILING = "compiling, once for this kind of request ..."
MEASURING_COSTS = "measuring what drafts cost, once for this machine, model and settings ..."
MOST_DRAFTS = 5
"""Drafts where nobody says how many."""
_MASK = "░"
_MASK_STYLE = "dim"
_Step = TypeVar("_Step")
_Result = TypeVar("_Result")


_OF_GENERATION = tuple(field.name for field in dataclasses.fields(GenerationConfig))
_OF_CAUSAL_MODELS = (*_OF_GENERATION, "drafter", "drafting")
_SHARED = ("max_new_tokens", "temperature", "stop_token_ids")
_OWN = tuple(field.name for field in dataclasses.fields(DenoiseConfig) if field.name not in _SHARED)
_DRAFTING = ("num_drafts", "branch", "lookup", "lossy_top_k")
_NOT_READ = {
    "causal": ((*_OWN, *_DRAFTING), "for diffusion language models, {} is causal."),
    "diffusion": (
        [name for name in _OF_CAUSAL_MODELS if name not in _SHARED],
        "not for diffusion language models, and {} is one.",
    ),
    "exported diffusion": (
        [
            name
            for name in (*_OF_CAUSAL_MODELS, "loop", *_OWN, *_DRAFTING)
            if name not in ("max_new_tokens", "stop_token_ids", "num_drafts")
        ],
        "not for a file of a diffusion language model, which decodes as it was exported ({}).",
    ),
}
"""Flags that each kind of model does not read, and the reason for the error message."""


def add_diffusion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that only diffusion language models read."""
    group = parser.add_argument_group("diffusion language models")
    add_flags(group, DenoiseConfig, _OWN)
    most = "0; for an exported file, the most that it can draft"
    options = {"num_drafts": {"flag": "--drafts", "default": most}}
    add_flags(group, SelfSpeculation, _DRAFTING, options=options)


def check_kind(args: argparse.Namespace, kind: str, read: Sequence[str] = ()) -> None:
    """Refuses flags that a kind of model does not read, except those that this command reads.

    Raises:
        ValueError: such flags are given; the message names them.
    """
    names, why = _NOT_READ[kind]
    unread = [name for name in names if hasattr(args, name) and name not in read]
    refuse_unused(args, unread, why.format(args.model))


def drafting_asked(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of drafting that the flags give; `--limit` is none of them."""
    return {name: getattr(args, name) for name in _DRAFTING if getattr(args, name) is not None}


def canvas_settings(
    args: argparse.Namespace, num_drafts: int = 0
) -> tuple[DenoiseConfig, SelfSpeculation]:
    """Returns the settings of filling in, and of drafting, that the flags give.

    Args:
        args: the arguments.
        num_drafts: drafts without `--drafts`, where the text has as many tokens.

    Raises:
        ValueError: a setting is out of range, or has no meaning without `--drafts`.
    """
    config = DenoiseConfig(**given(args, DenoiseConfig))
    most = min(num_drafts, config.max_new_tokens - 1)
    drafting = {"num_drafts": most, **drafting_asked(args)}
    if not drafting["num_drafts"]:
        refuse_unused(args, (*_DRAFTING[1:], "drafting"), "needs --drafts N.")
    return config, SelfSpeculation(**drafting)


def costs_text(costs: Sequence[float]) -> str:
    """Returns a line that says what drafts cost.

    Args:
        costs: of passes with 0, 1, ... drafts, at least two.

    Example:
        >>> costs_text([2.0, 3.0, 4.0])
        'a pass with 1 to 2 drafts takes 1.5, 2.0 times as long as one without'
    """
    most = len(costs) - 1
    drafts = "1 draft" if most == 1 else f"1 to {most} drafts"
    times = ", ".join(f"{cost / costs[0]:.1f}" for cost in costs[1:])
    return f"a pass with {drafts} takes {times} times as long as one without"


class CanvasResult(NamedTuple):
    """A finished canvas.

    Attributes:
        text: its text; `None` without a tokenizer.
        tokens: its tokens.
        figures: figures for people.
        facts: the settings, then the result, ready for JSON.
    """

    text: str | None
    tokens: list[int]
    figures: str
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CanvasSession:
    """A diffusion language model with everything that stays the same from prompt to prompt.

    Attributes:
        model: the model or the exported file.
        fill_in: decodes one prompt; shows the canvas if the console is a terminal.
    """

    model: "Model | MobileModel"
    fill_in: Callable[[PromptLike, Console], CanvasResult]

    def show(self, prompt: PromptLike) -> Shown:
        """Prints the text; a terminal shows the canvas until then."""
        try:
            result = self.fill_in(prompt, Console(highlight=False))
        except KeyboardInterrupt:
            go_on()
            print("interrupted", file=sys.stderr)
            return Shown("", True)
        print(result.tokens if result.text is None else result.text)
        print(f"done: {len(result.tokens)} tokens, {result.figures}", file=sys.stderr)
        return Shown(result.text or "", False)

    def as_json(self, prompt: PromptLike) -> dict[str, Any]:
        """Returns the settings and the result, ready for JSON."""
        return self.fill_in(prompt, Console(highlight=False, stderr=True)).facts


def canvas_session(args: argparse.Namespace, model: Model) -> CanvasSession:
    """Opens a session with a diffusion language model, as the arguments say.

    Raises:
        ValueError: a flag is not for these models, or a setting is out of range.
    """
    check_kind(args, "diffusion", read=("drafting",))
    diffusion = model.config.diffusion
    assert diffusion is not None, "told apart before"

    auto = args.drafting == "auto"
    config, speculation = canvas_settings(args, MOST_DRAFTS if auto else 0)
    if args.drafting == "never":
        speculation = SelfSpeculation(0)
    drafting = {**drafting_asked(args), "num_drafts": speculation.num_drafts}
    drafter = f"{speculation.num_drafts} of the model's next decisions"
    announce(args, model=args.model, drafter=drafter, config=config, seed=args.seed)

    def draw(steps: list[DenoiseStep | None]) -> Text:
        (step,) = steps
        assert step is not None, "a stream of one row ends with it"
        return draw_canvas(model.tokenizer, diffusion.mask_token_id, step)

    def fill_in(prompt: PromptLike, console: Console) -> CanvasResult:
        ways, chosen = speculation, drafting
        if auto:
            with waiting(MEASURING_COSTS):
                ways = with_costs(model, prompt, config, speculation)
            assert ways.costs is not None, "just measured"
            print(costs_text(ways.costs), file=sys.stderr)
            chosen = {**drafting, "costs": ways.costs}
        stream = denoise_stream(model, [prompt], config, ways, args.seed)
        (row,) = _watch(stream, draw, console, COMPILING)
        rate = row.acceptance_rate
        drafted = "" if rate is None else f", {rate:.0%} of drafts kept"
        values = {
            "model": model.name,
            "config": dataclasses.asdict(config),
            "drafting": chosen,
            "seed": args.seed,
            "prompt_tokens": row.prompt_tokens,
            **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
        }
        return CanvasResult(
            text=row.text,
            tokens=row.tokens.tolist(),
            figures=f"{row.num_calls} passes over {row.num_canvases} canvases, "
            f"{row.tokens_per_call:.2f} tokens per pass{drafted}",
            facts={
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in values.items()
            },
        )

    return CanvasSession(model, fill_in)


def litert_canvas_session(args: argparse.Namespace, model: "MobileModel") -> CanvasSession:
    """Opens a session with an exported diffusion language model, on LiteRT.

    Raises:
        ValueError: a flag was fixed by the export, or is not for these models.
    """
    from jaxspec.mobile import fill_in_stream

    check_kind(args, "exported diffusion")
    diffusion, tokenizer = model.manifest.diffusion, model.tokenizer
    assert diffusion is not None, "told apart before"
    announce(args, model=args.model, runtime=f"LiteRT, {model.manifest.quantization}", **diffusion)
    count = DenoiseConfig.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens

    def draw(tokens: np.ndarray) -> Text:
        step = DenoiseStep(tokens, tokens[:0], 0)
        return draw_canvas(tokenizer, diffusion["mask_token_id"], step)

    def fill_in(prompt: PromptLike, console: Console) -> CanvasResult:
        ids = encode_prompt(model, prompt)
        stream = fill_in_stream(model, ids, count, args.stop_token_ids, args.num_drafts)
        filled = _watch(stream, draw, console, "reading the prompt ...")
        tokens = filled.tokens.tolist()
        text = None if tokenizer is None else tokenizer.decode(tokens)
        return CanvasResult(
            text=text,
            tokens=tokens,
            figures=f"{filled.num_calls} passes, "
            f"{len(tokens) / max(1, filled.num_calls):.2f} tokens per pass",
            facts={
                "model": model.name,
                "runtime": "litert",
                "prompt": prompt,
                "text": text,
                "tokens": tokens,
                "counts": filled.counts,
                "finish_reason": filled.finish_reason,
            },
        )

    return CanvasSession(model, fill_in)


def _watch(
    stream: Generator[_Step, None, _Result],
    draw: Callable[[_Step], Text],
    console: Console,
    message: str,
) -> _Result:
    """Runs a stream to its end and returns its result; a terminal shows each step in place."""
    try:
        with waiting(message):
            step = next(stream)
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while True:
                if console.is_terminal:
                    live.update(draw(step), refresh=True)
                step = next(stream)
    except StopIteration as ended:
        return ended.value


def draw_canvas(tokenizer: Tokenizer | None, mask_token_id: int, step: DenoiseStep) -> Text:
    """Draws a canvas: decided tokens as text, drafted tokens coloured, masks as blocks."""
    latest = step.drafts[-1] if len(step.drafts) else step.tokens

    def style(pair: tuple[int, int]) -> str | None:
        token, decided = pair
        if token == mask_token_id:
            return _MASK_STYLE
        return DRAFTED_STYLE if token != decided else None

    shown = Text()
    pairs = zip(latest.tolist(), step.tokens.tolist(), strict=True)
    # Neighbours are decoded together, because a character may have several tokens.
    for kind, run in itertools.groupby(pairs, style):
        ids = [token for token, _ in run]
        if kind == _MASK_STYLE:
            text = _MASK * len(ids)
        elif tokenizer is None:
            text = "".join(f"{token} " for token in ids)
        else:
            text = tokenizer.decode(ids)
        shown.append(text.translate(VISIBLE_ESCAPE), kind)
    return shown
