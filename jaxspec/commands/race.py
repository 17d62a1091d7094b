"""A race: methods decode alone, one after another; their times are replayed side by side."""

import dataclasses
import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxspec.checkpoint import Model
from jaxspec.commands.canvas import draw_canvas
from jaxspec.commands.live import REFRESH_SECONDS, append_coloured
from jaxspec.decoding.denoise import DenoiseStep, denoise_stream
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import PromptLike
from jaxspec.decoding.result import GenerationResult
from jaxspec.measure.denoising import DenoiseRunner
from jaxspec.progress import progress_bar

_SHOWN_SECONDS = 4.0
_TIMED_RUNS = 3
_PANEL_WIDTH = 40  # holds the figures below a panel
_NARROWEST = 16
_BORDERS = 2


class RecordedStep(NamedTuple):
    """A step of a method.

    Attributes:
        counts: counts of all steps so far, this one included.
        seconds: time from the start of decoding to the end of this step, without compiling.
        pieces: the text of the step, each piece with True if it was drafted and accepted.
        canvas: of a diffusion model, the whole text after the step, masks shown; else `None`.
    """

    counts: Counts
    seconds: float
    pieces: Sequence[tuple[str, bool]]
    canvas: Text | None = None


@dataclasses.dataclass(frozen=True)
class Recording:
    """All steps of one method."""

    name: str
    steps: Sequence[RecordedStep]

    @property
    def seconds(self) -> float:
        """Time of all steps, without compiling."""
        return self.steps[-1].seconds

    def until(self, seconds: float) -> Sequence[RecordedStep]:
        """Returns the steps that had come after this many seconds of the method's decoding."""
        return self.steps[: bisect_right(self.steps, seconds, key=lambda step: step.seconds)]


def record(
    model: Model,
    prompt: PromptLike,
    config: Any,
    methods: Mapping[str, Any],
) -> list[Recording]:
    """Decodes a prompt with every method, one after another, and records its steps.

    Each clock counts its own method's decoding only, prefill included. Every method first decodes
    everything once, so that compiling is outside all clocks. A text is written by one compiled
    program, whose steps get equal shares of its time, the median of three runs.
    """
    recorded = _canvas_recording if model.is_diffusion else _text_recording
    with progress_bar(len(methods)) as advance:
        for name, method in methods.items():
            advance(f"first run of {name}: compiles, kept for the next time")
            recorded(name, model, prompt, config, method)
    # No bar from here on: it would take time from the methods.
    return [recorded(name, model, prompt, config, method) for name, method in methods.items()]


def _text_recording(
    name: str, model: Model, prompt: PromptLike, config: Any, method: Any
) -> Recording:
    runs = [generate(model, prompt, config, method) for _ in range(_TIMED_RUNS)]
    seconds = np.median([run.metrics.seconds or 0.0 for run in runs])
    return recording_of(name, runs[0], float(seconds))


def recording_of(name: str, result: GenerationResult, seconds: float) -> Recording:
    """Returns the steps of a result of one row, with equal shares of these seconds.

    Every step ends with the target's own token.
    """
    (row,) = result
    detokenizer = row.tokenizer.detokenizer() if row.tokenizer else None
    ends: list[int] = (np.flatnonzero(~row.from_draft) + 1).tolist()
    if not ends or ends[-1] < len(row.tokens):
        ends.append(len(row.tokens))  # the budget ended among accepted tokens
    steps, counts, start = [], Counts(), 0
    for number, end in enumerate(ends, start=1):
        tokens, drafted = row.tokens[start:end].tolist(), row.from_draft[start:end].tolist()
        counts += Counts(num_tokens=len(tokens), num_steps=1, num_from_draft=sum(drafted))
        pieces = []
        if detokenizer is not None:
            pieces = [
                (detokenizer.push([token]), flag)
                for token, flag in zip(tokens, drafted, strict=True)
            ]
            if end == len(row.tokens):
                pieces.append((detokenizer.finish(), False))
        steps.append(RecordedStep(counts, seconds * number / len(ends), pieces))
        start = end
    return Recording(name, steps)


def _canvas_recording(
    name: str, model: Model, prompt: PromptLike, config: Any, method: Any
) -> Recording:
    """Records the text that the next step begins with, after each step."""
    runner = DenoiseRunner(model, {name: method}, config)
    runs = [runner.decode(name, prompt, seed=0) for _ in range(_TIMED_RUNS)]
    seconds = float(np.median([run.seconds for run in runs]))
    (row,) = runs[0].rows
    stream = denoise_stream(model, [prompt], config, method)
    given = [step for (step,) in stream if step is not None]
    diffusion, recorded, kept = model.config.diffusion, [], 0
    assert diffusion is not None, "told apart before"
    mask = diffusion.mask_token_id
    ends = [*(step.tokens for step in given[1:]), row.tokens]
    for number, (step, tokens) in enumerate(zip(given, ends, strict=True), start=1):
        kept += step.num_accepted
        counts = Counts(int(np.sum(tokens != mask)), number, num_from_draft=kept)
        canvas = draw_canvas(model.tokenizer, mask, DenoiseStep(tokens, step.drafts[:0], 0))
        recorded.append(RecordedStep(counts, seconds * number / len(given), [], canvas))
    return Recording(name, recorded)


def slowdown(plain: Recording) -> float:
    """Returns the factor by which to slow a race down, so that plain decoding takes 4 seconds.

    A slower race is shown as fast as it ran: the factor is at least 1.
    """
    return max(1.0, round(_SHOWN_SECONDS / plain.seconds, 1))


def replay(console: Console, recordings: Sequence[Recording], slowed: float) -> None:
    """Shows the recordings on a terminal until the last one has ended, and leaves the end visible.

    Args:
        console: console of a terminal.
        recordings: at least one recording.
        slowed: seconds on the screen for each second of decoding.
    """
    start, seconds = time.perf_counter(), 0.0
    last = max(recording.seconds for recording in recordings)
    with Live(console=console, auto_refresh=False) as live:
        while seconds < last:
            seconds = min(last, (time.perf_counter() - start) / slowed)
            live.update(Race(recordings, seconds, slowed), refresh=True)
            time.sleep(REFRESH_SECONDS)


@dataclasses.dataclass(frozen=True)
class Race:
    """All recordings at one time: a line with the clock, and a grid of panels.

    Attributes:
        recordings: the recordings.
        seconds: time of every method's own decoding.
        slowed: seconds on the screen for each second of decoding.
    """

    recordings: Sequence[Recording]
    seconds: float
    slowed: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        speed = "as fast as it ran"
        if self.slowed != 1:
            speed = f"{self.slowed:g} times slower than it ran"
        clock = Text(f"replay of measured times, {speed}: {self.seconds:.3f} s")
        rows_of_clock = clock.wrap(console, options.max_width)
        yield from rows_of_clock
        height = options.max_height - len(rows_of_clock)
        num_columns = columns_that_fit(len(self.recordings), options.max_width, height)
        num_rows = math.ceil(len(self.recordings) / num_columns)
        width = options.max_width // num_columns
        longest = max(
            len(_wrapped(recording.steps, console, width)) for recording in self.recordings
        )
        num_lines = max(1, min(longest, height // num_rows - _BORDERS))
        panels = [
            self._panel(recording, console, width, num_lines) for recording in self.recordings
        ]
        grid = Table.grid()
        for first in range(0, len(panels), num_columns):
            grid.add_row(*panels[first : first + num_columns])
        yield grid

    def _panel(self, recording: Recording, console: Console, width: int, num_lines: int) -> Panel:
        steps = recording.until(self.seconds)
        title, figures, border = recording.name, "", "dim"
        if steps:
            figures = _figures(steps[-1])
        if len(steps) == len(recording.steps):
            title, border = f"{title}: {recording.seconds:.3f} s", "bold"
        return Panel(
            Text("\n").join(_wrapped(steps, console, width)[-num_lines:]),
            title=Text(title, overflow="ellipsis"),
            subtitle=Text(figures, overflow="ellipsis") if figures else None,
            title_align="left",
            subtitle_align="left",
            border_style=border,
            padding=0,
            width=width,
            height=num_lines + _BORDERS,
        )


def columns_that_fit(num_panels: int, width: int, height: int) -> int:
    """Returns as many columns as are wide enough; more if the screen is too low for those."""
    wide, most = (max(1, min(num_panels, width // of)) for of in (_PANEL_WIDTH, _NARROWEST))
    for num_columns in range(wide, most):
        if math.ceil(num_panels / num_columns) * (1 + _BORDERS) <= height:
            return num_columns
    return most


def coloured(steps: Iterable[RecordedStep]) -> Text:
    """Returns the text of the steps, accepted draft tokens coloured; of canvases, the last."""
    text = Text()
    for step in steps:
        if step.canvas is not None:
            text = step.canvas
        append_coloured(text, step.pieces)
    return text


def _wrapped(steps: Iterable[RecordedStep], console: Console, width: int) -> list[Text]:
    return [*coloured(steps).wrap(console, width - _BORDERS)]


def _figures(step: RecordedStep) -> str:
    counts = step.counts
    if not counts.num_tokens:
        return "no tokens"
    tau = f"tau {counts.tau:.2f}" if step.canvas is None else f"{counts.tau:.2f} per pass"
    return (
        f"{counts.num_tokens / step.seconds:.0f} tokens/s, {tau}, "
        f"{counts.num_from_draft / counts.num_tokens:.0%} drafts"
    )
