"""`jaxspec generate` with a diffusion language model: a canvas that fills in."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.commands.live import DRAFTED_STYLE, VISIBLE_ESCAPE, Shown, waiting
from jaxspec.commands.options import OF_DRAFTERS, announce
from jaxspec.denoising import (
    DenoiseConfig,
    Denoised,
    DenoiseResult,
    DenoiseStep,
    denoise_stream,
)
from jaxspec.diffusion import SelfSpeculation
from jaxspec.generation import GenerationConfig, PromptLike, encode_prompt

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


_OF_GENERATION = tuple(field.name for field in dataclasses.fields(GenerationConfig))
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


@dataclasses.dataclass(frozen=True)
class CanvasSession:
    """A diffusion language model with everything that stays the same from prompt to prompt.

    drafting: arguments of `SelfSpeculation`.
    """

    model: Model
    config: DenoiseConfig
    drafting: Mapping[str, Any]
    seed: int

    def show(self, prompt: PromptLike) -> Shown:
        """Prints what was filled in; on a terminal the canvas is to be seen until then."""
        try:
            row = self._fill_in(prompt, Console(highlight=False))
        except KeyboardInterrupt:
            return _interrupted()
        print(row.text if row.text is not None else row.tokens.tolist())
        rate = row.acceptance_rate
        drafted = "" if rate is None else f", {rate:.0%} of drafts kept"
        print(
            f"done: {len(row.tokens)} tokens, {row.num_calls} passes over {row.num_canvases} "
            f"canvases, {row.tokens_per_call:.2f} tokens per pass{drafted}",
            file=sys.stderr,
        )
        return Shown(row.text or "", False)

    def as_json(self, prompt: PromptLike) -> dict[str, Any]:
        """One object: the settings, then what was filled in and how."""
        row = self._fill_in(prompt, Console(highlight=False, stderr=True))
        values = {
            "model": self.model.name,
            "config": dataclasses.asdict(self.config),
            "drafting": self.drafting,
            "seed": self.seed,
            "prompt_tokens": row.prompt_tokens.tolist(),
            **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
        }
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }

    def _fill_in(self, prompt: PromptLike, console: Console) -> Denoised:
        speculation = SelfSpeculation(**self.drafting)
        with waiting(COMPILING):
            stream = denoise_stream(self.model, [prompt], self.config, speculation, self.seed)
            steps = _Steps(stream)
            first = next(steps, None)
        (row,) = _watch(self.model, first, steps, console)
        return row


def canvas_session(args: argparse.Namespace, model: Model) -> CanvasSession:
    """What the arguments ask of a diffusion language model.

    Raises:
        ValueError: naming flags that mean nothing here, or settings that are out of range.
    """
    names = [name for name in _OF_GENERATION if name not in _SHARED]
    names += [*_OF_CAUSAL_MODELS, "mesh"]
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        raise ValueError(
            f"{_flags(given)}: not for diffusion language models, and {args.model} is one."
        )
    values = {name: getattr(args, name) for name in (*_SHARED, *_OWN)}
    config = DenoiseConfig(**{name: value for name, value in values.items() if value is not None})
    drafting = {name: getattr(args, name) for name in _DRAFTING}
    drafting = {name: value for name, value in drafting.items() if value is not None}
    if drafting and not args.drafts:
        raise ValueError(f"{_flags(drafting)}: needs --drafts N.")
    session = CanvasSession(model, config, {"num_drafts": args.drafts or 0, **drafting}, args.seed)
    SelfSpeculation(**session.drafting)
    drafter = f"{args.drafts or 0} of its own decisions"
    announce(model=args.model, drafter=drafter, config=config, seed=args.seed)
    return session


@dataclasses.dataclass(frozen=True)
class LitertCanvasSession:
    """The same with an exported file, on LiteRT.

    num_drafts: `None`: the most that the file can.
    """

    model: "MobileModel"
    max_new_tokens: int
    stop_token_ids: Sequence[int] | None
    num_drafts: int | None

    def show(self, prompt: PromptLike) -> Shown:
        """Prints what was filled in; on a terminal the canvas is to be seen until then."""
        try:
            filled = self._fill_in(prompt, Console(highlight=False))
        except KeyboardInterrupt:
            return _interrupted()
        text = self._text(filled)
        print(filled.tokens.tolist() if text is None else text)
        print(
            f"done: {len(filled.tokens)} tokens, {filled.num_calls} passes, "
            f"{len(filled.tokens) / max(1, filled.num_calls):.2f} tokens per pass",
            file=sys.stderr,
        )
        return Shown(text or "", False)

    def as_json(self, prompt: PromptLike) -> dict[str, Any]:
        """One object: the settings, then what was filled in and how."""
        filled = self._fill_in(prompt, Console(highlight=False, stderr=True))
        return {
            "model": self.model.name,
            "runtime": "litert",
            "prompt": prompt,
            "text": self._text(filled),
            "tokens": filled.tokens.tolist(),
            "counts": filled.counts,
            "finish_reason": filled.finish_reason,
        }

    def _text(self, filled: "Filled") -> str | None:
        tokenizer = self.model.tokenizer
        return None if tokenizer is None else tokenizer.decode(filled.tokens.tolist())

    def _fill_in(self, prompt: PromptLike, console: Console) -> "Filled":
        from jaxspec.mobile import fill_in_stream

        diffusion = self.model.manifest.diffusion
        assert diffusion is not None, "told apart before"
        ids = encode_prompt(self.model, prompt)
        stream = fill_in_stream(
            self.model, ids, self.max_new_tokens, self.stop_token_ids, self.num_drafts
        )
        try:
            with Live(console=console, transient=True, auto_refresh=False) as live:
                while True:
                    tokens = next(stream)
                    if console.is_terminal:
                        step = DenoiseStep(tokens, tokens[:0], 0)
                        shown = _canvas(self.model.tokenizer, diffusion["mask_token_id"], step)
                        live.update(shown, refresh=True)
        except StopIteration as ended:
            return ended.value


def litert_canvas_session(args: argparse.Namespace, model: "MobileModel") -> LitertCanvasSession:
    """What the arguments ask of an exported diffusion language model.

    Raises:
        ValueError: naming flags that were fixed by the export or mean nothing here.
    """
    taken = ("max_new_tokens", "stop_token_ids")
    names = [name for name in _OF_GENERATION if name not in taken]
    names += [*_OWN, *_DRAFTING, *_OF_CAUSAL_MODELS, "loop"]
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        raise ValueError(
            f"{_flags(given)}: not for a file of a diffusion language model, which fills in as it "
            "was exported."
        )
    assert model.manifest.diffusion is not None, "told apart before"
    announce(
        model=args.model,
        runtime=f"LiteRT, {model.manifest.quantization}",
        **model.manifest.diffusion,
    )
    count = DenoiseConfig.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    return LitertCanvasSession(model, count, args.stop_token_ids, args.drafts)


def _interrupted() -> Shown:
    print("interrupted", file=sys.stderr)
    return Shown("", True)


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
