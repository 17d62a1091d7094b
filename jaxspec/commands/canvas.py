"""`jaxspec generate` with a diffusion language model: a canvas that fills in."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxspec.checkpoint import Model
from jaxspec.commands import EXIT_INTERRUPTED
from jaxspec.commands.live import DRAFTED_STYLE, waiting
from jaxspec.commands.options import announce
from jaxspec.denoising import (
    DenoiseConfig,
    Denoised,
    DenoiseResult,
    DenoiseStep,
    denoise_stream,
)
from jaxspec.diffusion import SelfSpeculation
from jaxspec.generation import GenerationConfig

COMPILING = "compiling, once for this kind of request ..."
_MASK = "░"
# A model may write what a terminal would obey.
_VISIBLE_ESCAPE = {0x1B: "\u241b"}


def add_diffusion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what is asked of diffusion language models only."""
    group = parser.add_argument_group("diffusion language models")
    group.add_argument("--block-length", type=int, metavar="N", help="slots filled in before more")
    group.add_argument("--steps", type=int, metavar="N", help="decisions; default: one per token")
    group.add_argument("--schedule", choices=("even", "linear"), help="default: even")
    group.add_argument("--order", metavar="NAME", help="default: low_confidence")
    group.add_argument("--threshold", type=float, metavar="P", help="fill in all this sure; lossy")
    group.add_argument("--guidance", type=float, metavar="W", help="classifier-free; 0: off")
    group.add_argument("--cache", metavar="NAME", help="none, blocks, prefix or dual")
    group.add_argument(
        "--drafts", type=int, metavar="N", help="decisions drafted ahead; default: 0"
    )


_SHARED = ("max_new_tokens", "temperature", "stop_token_ids")
_OWN = ("block_length", "steps", "schedule", "order", "threshold", "guidance", "cache")


def check_none_given(args: argparse.Namespace) -> None:
    """Refuses, for a causal model, what it would ignore.

    Raises:
        ValueError: naming the flags.
    """
    given = [name for name in (*_OWN, "drafts") if getattr(args, name) is not None]
    if given:
        raise ValueError(f"{_flags(given)}: for diffusion language models, {args.model} is causal.")


def fill_in(args: argparse.Namespace, model: Model, prompt: str | None) -> int:
    """Fills in one continuation, showing the canvas on a terminal.

    Raises:
        ValueError: naming flags that mean nothing here, or what `denoise` refuses.
    """
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = [name for name in names if getattr(args, name) is not None and name not in _SHARED]
    given += ["drafter"] * (args.drafter is not None) + ["chat"] * args.chat
    if given or prompt is None:
        raise ValueError(
            f"{_flags(given or ['chat'])}: not for diffusion language models, and {args.model} is "
            "one."
        )
    given = {name: getattr(args, name) for name in (*_SHARED, *_OWN)}
    config = DenoiseConfig(**{name: value for name, value in given.items() if value is not None})
    speculation = None if args.drafts is None else SelfSpeculation(args.drafts)
    drafter = f"{args.drafts or 0} of its own decisions"
    announce(model=args.model, drafter=drafter, config=config, seed=args.seed)
    console = Console(highlight=False, stderr=args.json)
    try:
        with waiting(COMPILING):
            steps = _Steps(denoise_stream(model, prompt, config, speculation, args.seed))
            first = next(steps, None)
        result = _watch(model, first, steps, console)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    (row,) = result
    if args.json:
        print(json.dumps(_as_json(row, config, args), ensure_ascii=False))
        return 0
    print(row.text if row.text is not None else row.tokens.tolist())
    drafted = "" if row.acceptance_rate is None else f", {row.acceptance_rate:.0%} of drafts kept"
    print(
        f"done: {len(row.tokens)} tokens, {row.num_calls} passes over {row.num_canvases} canvases, "
        f"{row.tokens_per_call:.2f} tokens per pass{drafted}",
        file=sys.stderr,
    )
    return 0


class _Steps:
    """The steps of a stream, and then its result."""

    def __init__(self, stream: Generator[list[DenoiseStep | None], None, DenoiseResult]):
        self._stream = stream
        self.result: DenoiseResult | None = None

    def __iter__(self) -> Iterator[DenoiseStep]:
        return self

    def __next__(self) -> DenoiseStep:
        try:
            (step,) = next(self._stream)
        except StopIteration as ended:
            self.result = ended.value
            raise
        assert step is not None, "a stream of one row ends with it"
        return step


def _flags(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _watch(
    model: Model, first: DenoiseStep | None, steps: _Steps, console: Console
) -> DenoiseResult:
    """Shows each canvas in place of the one before, on a terminal only, and leaves none."""
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for step in itertools.chain([] if first is None else [first], steps):
                live.update(_canvas(model, step), refresh=True)
    else:
        for _ in steps:
            pass  # Nobody looks.
    assert steps.result is not None, "the stream has ended"
    return steps.result


def _canvas(model: Model, step: DenoiseStep) -> Text:
    """Decided tokens as text, drafted ones coloured, masks as blocks."""
    diffusion = model.config.diffusion
    assert diffusion is not None, "told apart before"
    latest = step.drafts[-1] if len(step.drafts) else step.tokens
    shown = Text()
    for token, decided in zip(latest.tolist(), step.tokens.tolist(), strict=True):
        if token == diffusion.mask_token_id:
            shown.append(_MASK, "dim")
            continue
        text = f"{token} " if model.tokenizer is None else model.tokenizer.decode([token])
        shown.append(text.translate(_VISIBLE_ESCAPE), DRAFTED_STYLE if token != decided else None)
    return shown


def _as_json(row: Denoised, config: DenoiseConfig, args: argparse.Namespace) -> dict[str, Any]:
    values = {
        "model": args.model,
        "config": dataclasses.asdict(config),
        "drafts": args.drafts or 0,
        "seed": args.seed,
        "prompt_tokens": row.prompt_tokens.tolist(),
        **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
    }
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
