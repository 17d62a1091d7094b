"""`jaxspec generate`: one prompt, or a chat."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.console import Console

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import MOST_TEXT, read_text
from jaxspec.commands.canvas import (
    COMPILING,
    MOST_DRAFTS,
    CanvasSession,
    add_diffusion_arguments,
    canvas_session,
    check_kind,
    litert_canvas_session,
)
from jaxspec.commands.interrupts import go_on
from jaxspec.commands.live import (
    LiveText,
    Shown,
    Sources,
    StreamClock,
    waiting,
    waiting_for_first,
)
from jaxspec.commands.mobile import add_mobile_arguments, check_runtime, loop_of, open_mobile
from jaxspec.commands.options import (
    add_drafter_argument,
    add_generation_arguments,
    add_mesh_argument,
    add_model_arguments,
    announce,
    check_writable,
    drafter_asked,
    generation_config,
    load_model,
    mesh_asked,
    refuse_unused,
)
from jaxspec.commands.parser import add_place
from jaxspec.decoding.generate import StreamStep, generate, stream
from jaxspec.decoding.profile import DraftingMode, DraftingProfile, profile_asked
from jaxspec.decoding.request import GenerationConfig, PromptLike
from jaxspec.decoding.result import Generation, GenerationResult
from jaxspec.drafters import DrafterLike
from jaxspec.measure.compare import describe
from jaxspec.start import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from jaxspec.mobile import MobileModel
    from jaxspec.mobile.loops import LoopOf

# `generate` returns when everything is decoded.
MEASURING = "measuring whether drafting pays, once for this machine, model and drafter ..."
COMPILING_AND_DECODING = "compiling, once for this kind of request, then decoding ..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec generate`."""
    parser.description = (
        "Continues a prompt and prints the text while it is decoded. On a terminal, accepted draft "
        "tokens are coloured. Ctrl-C ends the text and keeps what was printed."
    )
    add_model_arguments(parser)
    add_place(
        parser,
        "prompt",
        *("-p", "--prompt"),
        metavar="PROMPT",
        help="text, or - for standard input",
        required=False,
    )
    add_drafter_argument(parser)
    add_generation_arguments(parser)
    parser.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from a file")
    parser.add_argument(
        "--chat", action="store_true", help="talk in turns, with the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of the text"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page that steps through the decode; records warped log-probabilities, "
        "and prints the text at the end",
    )
    parser.add_argument(
        "--drafting",
        choices=get_args(DraftingMode),
        help="auto: draft where that is measured to be faster, once for this machine, model and "
        f"drafter; with a diffusion model, as many of {MOST_DRAFTS} or --drafts as pay (default: "
        "always)",
    )
    add_mesh_argument(parser)
    add_mobile_arguments(parser)
    add_diffusion_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generates as the arguments say."""
    config = generation_config(args)
    if args.chat and (args.json or args.html or config.num_samples != 1):
        raise ValueError("--chat: cannot be combined with --json, --html or --num-samples.")
    if args.html is not None:
        check_writable(args.html, "--html")
        if args.html.exists() and not args.html.is_file():
            raise ValueError(f"--html {args.html}: is a device or a pipe; give a file.")
        config = dataclasses.replace(config, warped_logprobs=True)  # for the nodes of the page
    if args.system is not None and not args.chat:
        raise ValueError("--system: needs --chat.")
    prompt = _prompt(args)
    if prompt is None and not args.chat:
        args.parser.error(
            "PROMPT is missing, behind MODEL: give a text, - for standard input, --file FILE, or "
            "--chat."
        )
    check_runtime(args)
    if args.runtime == "litert":
        refuse_unused(args, ("html",), "LiteRT records no steps: decode the model it was made of.")
        loop, file = loop_of(args), open_mobile(args)
        if file.manifest.diffusion is not None:
            return answer(litert_canvas_session(args, file), args, prompt)
        check_kind(args, "causal")
        return answer(_mobile_session(args, config, file, loop), args, prompt)
    model = load_model(args, mesh_asked(args))
    if model.config.diffusion is not None:
        refuse_unused(
            args,
            ("html",),
            f"shows draft trees, and {args.model} is a diffusion language model: a terminal shows "
            "its canvas while it fills, and jaxspec.denoise_stream gives it step by step.",
        )
        return answer(canvas_session(args, model), args, prompt)
    check_kind(args, "causal")
    drafter = drafter_asked(args, model)
    if drafter is None:
        refuse_unused(args, ("drafting",), "needs --drafter.")
    announce(args, model=args.model, drafter=describe(drafter), config=config, seed=args.seed)
    drafting = _drafting_asked(args, model, config, drafter)
    return answer(Session(model, config, drafter, args.seed, drafting, args.html), args, prompt)


def _drafting_asked(
    args: argparse.Namespace, model: Model, config: GenerationConfig, drafter: DrafterLike | None
) -> DraftingMode | DraftingProfile:
    """Returns the choice of `--drafting`; for "auto" it prints what was measured."""
    mode = args.drafting or "always"
    with waiting(MEASURING):
        profile = profile_asked(mode, model, drafter, config, config.num_samples)
    if profile is None:
        return mode
    print(profile, file=sys.stderr)
    return profile


def answer(session: "AnySession", args: argparse.Namespace, prompt: str | None) -> int:
    """Answers a prompt or a chat, in the form that the arguments ask for."""
    if args.chat or prompt is None:
        return chat(session, args.system, prompt)
    if args.json:
        print(json.dumps(session.as_json(prompt), ensure_ascii=False))
    elif isinstance(session, Session) and (session.config.num_samples > 1 or session.html):
        session.print_samples(prompt)
    elif session.show(prompt).interrupted:
        return EXIT_INTERRUPTED
    return 0


def _mobile_session(
    args: argparse.Namespace,
    config: GenerationConfig,
    model: "MobileModel",
    loop: "LoopOf | None",
) -> "MobileSession":
    announce(
        args,
        model=args.model,
        runtime=f"LiteRT, {model.manifest.quantization}",
        drafter=model.manifest.drafter if args.drafter is None else args.drafter.text,
        loop=args.loop or "best",
        config=config,
        seed=args.seed,
    )
    return MobileSession(model, config, None, args.seed, loop=loop)


def _prompt(args: argparse.Namespace) -> str | None:
    if args.file is not None and args.prompt is not None:
        raise ValueError("Give either PROMPT or --file, not both.")
    if args.file is not None:
        return read_text(args.file)
    if args.prompt != "-":
        return args.prompt
    return _bounded(sys.stdin.read(MOST_TEXT + 1), "standard input")


def _bounded(text: str, what: str) -> str:
    if len(text) > MOST_TEXT:
        raise ValueError(
            f"PROMPT: {what} is longer than {MOST_TEXT} characters, the most that is read."
        )
    return text


@dataclasses.dataclass(frozen=True)
class Session:
    """A model with everything that stays the same from prompt to prompt.

    Attributes:
        html: file for the page that steps through the decode; `None`: no page.
    """

    model: Any
    config: GenerationConfig
    drafter: DrafterLike | None
    seed: int
    drafting: DraftingMode | DraftingProfile = "always"
    html: Path | None = None

    def show(self, prompt: PromptLike) -> Shown:
        """Prints a continuation while it is decoded, and its figures on standard error."""
        console = Console(highlight=False)
        sources, text, interrupted = Sources(self.model.tokenizer), "", False
        with StreamClock() as clock, LiveText(console) as live:
            reason = None
            try:
                for step in waiting_for_first(self.stream(prompt), COMPILING):
                    clock.push(step)
                    reason = step.finish_reason
                    text += step.text
                    live.push(sources.push(step), clock)
            except KeyboardInterrupt:
                go_on()
                interrupted = True
                held = sources.rest()
                text += "".join(piece for piece, _ in held)
                live.push(held, clock)
        ended = "interrupted" if interrupted else "done"
        print(f"{ended}: {clock}", file=sys.stderr)
        if reason == "length":
            print(self._limit(clock.counts.num_tokens), file=sys.stderr)
        return Shown(text, interrupted)

    def _limit(self, num_tokens: int) -> str:
        """Says which limit has cut a text off."""
        if num_tokens >= np.max(self.config.max_new_tokens):
            return f"cut off by --max-new-tokens {self.config.max_new_tokens}"
        return "cut off by the end of the model's context"

    def stream(self, prompt: PromptLike) -> Iterator[StreamStep]:
        """Decodes step by step."""
        return stream(self.model, prompt, self.config, self.drafter, self.seed, self.drafting)

    def _generate(self, prompt: PromptLike) -> GenerationResult:
        with waiting(COMPILING_AND_DECODING):
            result = generate(
                self.model,
                prompt,
                self.config,
                self.drafter,
                self.seed,
                return_trace=self.html is not None,
                drafting=self.drafting,
            )
        if self.html is not None:
            result.save_html(self.html)
            print(f"wrote {self.html}", file=sys.stderr)
        return result

    def print_samples(self, prompt: PromptLike) -> None:
        """Prints one continuation, or several one after the other, when all are decoded."""
        result = self._generate(prompt)
        for row in result:
            if len(result) > 1:
                print(f"--- sample {row.sample_index} ({row.finish_reason})")
            print(row.text)
        print(
            f"done: {result.metrics.num_tokens} tokens, "
            f"{result.metrics.tokens_per_second:.0f} tokens/s, "
            f"tau {result.metrics.tau:.2f} (bonus included)",
            file=sys.stderr,
        )
        if len(result) == 1 and result[0].finish_reason == "length":
            print(self._limit(len(result[0].tokens)), file=sys.stderr)

    def as_json(self, prompt: PromptLike) -> dict[str, Any]:
        """Returns the settings and the continuation (or a list of `samples`), ready for JSON."""
        result = self._generate(prompt)
        settings = {
            "model": self.model.name,
            "drafter": describe(self.drafter),
            "drafting": _drafting_as_json(self.drafting),
            "config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "prompt": prompt,
        }
        samples = [_sample_as_json(row) for row in result]
        if self.config.num_samples == 1:
            return {**settings, **samples[0], "metrics": result.metrics.as_dict()}
        return {**settings, "samples": samples, "metrics": result.metrics.as_dict()}


@dataclasses.dataclass(frozen=True)
class MobileSession(Session):
    """The same on LiteRT.

    Attributes:
        loop: the loop of decoding; `None`: the best one of the file.
    """

    loop: "LoopOf | None" = None

    def stream(self, prompt: PromptLike) -> Iterator[StreamStep]:
        from jaxspec.mobile.text import stream_text

        return stream_text(self.model, prompt, self.config, self.loop, self.seed)

    def print_samples(self, prompt: PromptLike) -> None:
        """Streams; LiteRT refuses more than one sample."""
        self.show(prompt)

    def as_json(self, prompt: PromptLike) -> dict[str, Any]:
        """Returns the settings, the continuation and the figures of the stream, ready for JSON."""
        with StreamClock() as clock:
            steps = []
            for step in self.stream(prompt):
                clock.push(step)
                steps.append(step)
        return {
            "model": self.model.name,
            "runtime": "litert",
            "config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "prompt": prompt,
            "text": "".join(step.text for step in steps),
            "tokens": [int(token) for step in steps for token in step.tokens],
            "from_draft": [bool(drafted) for step in steps for drafted in step.from_draft],
            "finish_reason": steps[-1].finish_reason if steps else "length",
            "metrics": {
                "num_tokens": clock.counts.num_tokens,
                "num_rounds": clock.counts.num_steps,
                "tokens_per_round_bonus_included": clock.counts.tau,
                "seconds": clock.seconds,
            },
        }


def _drafting_as_json(drafting: DraftingMode | DraftingProfile) -> Any:
    if not isinstance(drafting, DraftingProfile):
        return drafting
    facts = dataclasses.asdict(drafting)
    return {**facts, "speedup": drafting.speedup, "drafts": drafting.drafts}


def _sample_as_json(row: Generation) -> dict[str, Any]:
    values = {
        "text": row.text,
        "tokens": row.tokens,
        "from_draft": row.from_draft,
        "finish_reason": row.finish_reason,
        "logprobs": row.logprobs,
        "warped_logprobs": row.warped_logprobs,
    }
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in values.items()
        if value is not None
    }


AnySession = Session | CanvasSession


def chat(session: AnySession, system: str | None, first: str | None) -> int:
    """Reads turns from standard input and answers them until it ends.

    Ctrl-C during an answer ends that answer; at the prompt it ends the chat.

    Raises:
        ValueError: the model has no chat template.
    """
    tokenizer = session.model.tokenizer
    if tokenizer is None or not tokenizer.templates:
        raise ValueError(
            f"--chat: {session.model.name} has no chat template; leave --chat out and give plain "
            "text, or put a chat_template.jinja into the model's folder."
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    turn = first if first is not None else _read_turn()
    while turn is not None:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": session.show(messages).text})
        turn = _read_turn()
    return 0


def _read_turn() -> str | None:
    """Reads the next non-empty line; `None` at the end of the input."""
    while True:
        if sys.stdin.isatty():
            try:
                line = input("> ")
            except EOFError:
                return None
        else:
            line = _bounded(sys.stdin.readline(MOST_TEXT + 1), "a line of standard input")
            if not line:
                return None
        if line.strip():
            return line.removesuffix("\n")
