"""`jaxspec generate` with a diffusion language model: a canvas that fills in."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.commands import EXIT_INTERRUPTED
from jaxspec.commands.live import DRAFTED_STYLE, VISIBLE_ESCAPE, waiting
from jaxspec.commands.options import OF_DRAFTERS, announce
from jaxspec.denoising import (
    DenoiseConfig,
    Denoised,
    DenoiseResult,
    DenoiseStep,
    denoise_stream,
)
from jaxspec.diffusion import SelfSpeculation
from jaxspec.generation import GenerationConfig, encode_prompt

if TYPE_CHECKING:
    from jaxspec.mobile import Filled, MobileModel

COMPILING = "compiling, once for this kind of request ..."
_MASK = "░"
_MASK_STYLE = "dim"


def add_diffusion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what is asked of diffusion language models only."""
    group = parser.add_argument_group("diffusion language models")
    group.add_argument("--block-length", type=int, metavar="N", help="slots filled in before more")
    group.add_argument("--steps", type=int, metavar="N", help="decisions; default: one per token")
    group.add_argument("--schedule", choices=("even", "linear"), help="default: even")
    group.add_argument("--order", metavar="NAME", help="default: low_confidence")
    group.add_argument("--threshold", type=float, metavar="P", help="fill in all this sure; lossy")
    group.add_argument("--guidance", type=float, metavar="W", help="classifier-free; 0: off")
    group.add_argument(
        "--cache", metavar="NAME", help="none, blocks, prefix or dual; the last two: approximate"
    )
    group.add_argument(
        "--drafts",
        type=int,
        metavar="N",
        help="decisions drafted ahead; default: 0, with --runtime litert the most that it can",
    )
    group.add_argument("--branch", type=int, metavar="K", help="draft a tree; default: 1, a chain")
    group.add_argument(
        "--lookup", action="store_true", default=None, help="draft from the text itself, too"
    )
    group.add_argument(
        "--lossy-top-k", type=int, metavar="K", help="keep drafts among the K likeliest; lossy"
    )


_SHARED = ("max_new_tokens", "temperature", "stop_token_ids")
_OWN = ("block_length", "steps", "schedule", "order", "threshold", "guidance", "cache")
_DRAFTING = ("branch", "lookup", "lossy_top_k")
_OF_CAUSAL_MODELS = ("drafter", *OF_DRAFTERS)


def check_none_given(args: argparse.Namespace) -> None:
    """Refuses, for a causal model, what it would ignore.

    Raises:
        ValueError: naming the flags.
    """
    names = (*_OWN, "drafts", *_DRAFTING)
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        raise ValueError(f"{_flags(given)}: for diffusion language models, {args.model} is causal.")


def fill_in(args: argparse.Namespace, model: Model, prompt: str | None) -> int:
    """Fills in one continuation, showing the canvas on a terminal.

    Raises:
        ValueError: naming flags that mean nothing here, or what `denoise` refuses.
    """
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = [name for name in names if getattr(args, name) is not None and name not in _SHARED]
    given += [name for name in _OF_CAUSAL_MODELS if getattr(args, name) is not None]
    given += ["chat"] * args.chat
    if given or prompt is None:
        raise ValueError(
            f"{_flags(given or ['chat'])}: not for diffusion language models, and {args.model} is "
            "one."
        )
    given = {name: getattr(args, name) for name in (*_SHARED, *_OWN)}
    config = DenoiseConfig(**{name: value for name, value in given.items() if value is not None})
    drafting = {name: getattr(args, name) for name in _DRAFTING}
    drafting = {name: value for name, value in drafting.items() if value is not None}
    if drafting and not args.drafts:
        raise ValueError(f"{_flags(drafting)}: needs --drafts N.")
    drafting = {"num_drafts": args.drafts or 0, **drafting}
    speculation = SelfSpeculation(**drafting)
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
        print(json.dumps(_as_json(row, config, drafting, args), ensure_ascii=False))
        return 0
    print(row.text if row.text is not None else row.tokens.tolist())
    drafted = "" if row.acceptance_rate is None else f", {row.acceptance_rate:.0%} of drafts kept"
    print(
        f"done: {len(row.tokens)} tokens, {row.num_calls} passes over {row.num_canvases} canvases, "
        f"{row.tokens_per_call:.2f} tokens per pass{drafted}",
        file=sys.stderr,
    )
    return 0


def fill_in_litert(args: argparse.Namespace, model: "MobileModel", prompt: str | None) -> int:
    """The same with an exported file, on LiteRT.

    Raises:
        ValueError: naming flags that were fixed by the export or mean nothing here, or what
            `jaxspec.mobile.fill_in` refuses.
    """
    from jaxspec.mobile import fill_in_stream

    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    taken = ("max_new_tokens", "stop_token_ids")
    given = [name for name in names if getattr(args, name) is not None and name not in taken]
    given += [
        name
        for name in (*_OWN, *_DRAFTING, *_OF_CAUSAL_MODELS, "loop")
        if getattr(args, name) is not None
    ]
    given += ["chat"] * args.chat
    if given or prompt is None:
        raise ValueError(
            f"{_flags(given or ['chat'])}: not for a file of a diffusion language model, which "
            "fills in as it was exported."
        )
    diffusion = model.manifest.diffusion
    assert diffusion is not None, "told apart before"
    count = DenoiseConfig.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    announce(model=args.model, runtime=f"LiteRT, {model.manifest.quantization}", **diffusion)
    ids = encode_prompt(model, prompt)
    stream = fill_in_stream(model, ids, count, args.stop_token_ids, args.drafts)
    console = Console(highlight=False, stderr=args.json)
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while True:
                tokens = next(stream)
                if console.is_terminal:
                    step = DenoiseStep(tokens, tokens[:0], 0)
                    shown = _canvas(model.tokenizer, diffusion["mask_token_id"], step)
                    live.update(shown, refresh=True)
    except StopIteration as ended:
        filled: Filled = ended.value
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    tokens = filled.tokens.tolist()
    text = None if model.tokenizer is None else model.tokenizer.decode(tokens)
    if args.json:
        values = {"model": model.name, "runtime": "litert", "prompt": prompt, "text": text}
        values |= {"tokens": tokens, "counts": filled.counts}
        print(json.dumps({**values, "finish_reason": filled.finish_reason}, ensure_ascii=False))
        return 0
    print(tokens if text is None else text)
    print(
        f"done: {len(tokens)} tokens, {filled.num_calls} passes, "
        f"{len(tokens) / max(1, filled.num_calls):.2f} tokens per pass",
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
    diffusion = model.config.diffusion
    assert diffusion is not None, "told apart before"
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for step in itertools.chain([] if first is None else [first], steps):
                live.update(_canvas(model.tokenizer, diffusion.mask_token_id, step), refresh=True)
    else:
        for _ in steps:
            pass  # Nobody looks.
    assert steps.result is not None, "the stream has ended"
    return steps.result


def _canvas(tokenizer: Tokenizer | None, mask_token_id: int, step: DenoiseStep) -> Text:
    """Decided tokens as text, drafted ones coloured, masks as blocks."""
    latest = step.drafts[-1] if len(step.drafts) else step.tokens

    def style(pair: tuple[int, int]) -> str | None:
        token, decided = pair
        if token == mask_token_id:
            return _MASK_STYLE
        return DRAFTED_STYLE if token != decided else None

    shown = Text()
    pairs = zip(latest.tolist(), step.tokens.tolist(), strict=True)
    # Neighbours are decoded together: a character may take several tokens.
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


def _as_json(
    row: Denoised, config: DenoiseConfig, drafting: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    values = {
        "model": args.model,
        "config": dataclasses.asdict(config),
        "drafting": drafting,
        "seed": args.seed,
        "prompt_tokens": row.prompt_tokens.tolist(),
        **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
    }
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
