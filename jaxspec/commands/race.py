"""A race: methods that decoded alone, one after another, replayed side by side on one clock."""

import dataclasses
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.commands.live import REFRESH_SECONDS, Pace, Sources, Tally, append_coloured
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, PromptLike, StreamStep, stream
from jaxspec.progress import progress_bar

_SHOWN_SECONDS = 4.0
_PANEL_WIDTH = 40  # holds the figures below a panel
_NARROWEST = 16
_BORDERS = 2


class RecordedStep(NamedTuple):
    """A step of a stream.

    tally: everything that the stream had given with it; its seconds say when.
    pieces: the text that it added, each piece with True if it was drafted and accepted.
    """

    tally: Tally
    pieces: Sequence[tuple[str, bool]]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A stream from its start to its end."""

    name: str
    steps: Sequence[RecordedStep]

    @property
    def tally(self) -> Tally:
        return self.steps[-1].tally

    def until(self, seconds: float) -> Sequence[RecordedStep]:
        """The steps that were there after so many seconds of the method's own decoding."""
        return self.steps[: bisect_right(self.steps, seconds, key=lambda s: s.tally.seconds)]


def record(
    model: Model,
    prompt: PromptLike,
    config: GenerationConfig,
    methods: Mapping[str, Drafter | LoadedDrafter | None],
) -> list[Recording]:
    """Decodes a prompt with every method, alone on the machine, and keeps when each step came.

    So a clock counts nothing but its own method's decoding, the prompt included. Every method
    decodes everything once beforehand: what is new then compiles, outside all clocks.
    """
    with progress_bar(len(methods)) as advance:
        for name, drafter in methods.items():
            advance(f"first run of {name}: compiles, kept for the next time")
            deque(stream(model, prompt, config, drafter), maxlen=0)
    # No bar moves from here on: it would take its time from the method's.
    return [
        _recording(name, model.tokenizer, stream(model, prompt, config, drafter))
        for name, drafter in methods.items()
    ]


def _recording(name: str, tokenizer: Tokenizer | None, steps: Iterable[StreamStep]) -> Recording:
    given, tallies = [], []
    with Pace() as pace:
        for step in steps:
            pace.push(step)
            given.append(step)
            tallies.append(pace.tally)
    sources = Sources(tokenizer)
    return Recording(name, [*map(RecordedStep, tallies, map(sources.push, given))])


def slowdown(plain: Recording) -> float:
    """How many times slower a race must be shown to be seen: plain decoding takes 4 seconds.

    One that takes longer is shown as fast as it ran.
    """
    return max(1.0, round(_SHOWN_SECONDS / plain.tally.seconds, 1))


def replay(console: Console, recordings: Sequence[Recording], slowed: float) -> None:
    """Shows the recordings on a terminal until the last has ended, and leaves that there.

    Args:
        console: of a terminal.
        recordings: at least one.
        slowed: seconds on the screen for each second of decoding.
    """
    start, seconds = time.perf_counter(), 0.0
    last = max(recording.tally.seconds for recording in recordings)
    with Live(console=console, auto_refresh=False) as live:
        while seconds < last:
            seconds = min(last, (time.perf_counter() - start) / slowed)
            live.update(Race(recordings, seconds, slowed), refresh=True)
            time.sleep(REFRESH_SECONDS)


@dataclasses.dataclass(frozen=True)
class Race:
    """All recordings at one time: a line for the clock, and panels in a grid that fits.

    seconds: of every method's own decoding.
    slowed: seconds on the screen for each of them.
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
            figures = _figures(steps[-1].tally)
        if len(steps) == len(recording.steps):
            title, border = f"{title}: {recording.tally.seconds:.3f} s", "bold"
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
    """Columns of a grid: as many as are wide enough, more where a screen is too low for those."""
    wide, most = (max(1, min(num_panels, width // of)) for of in (_PANEL_WIDTH, _NARROWEST))
    for num_columns in range(wide, most):
        if math.ceil(num_panels / num_columns) * (1 + _BORDERS) <= height:
            return num_columns
    return most


def coloured(steps: Iterable[RecordedStep]) -> Text:
    """The text of the steps, accepted draft tokens coloured."""
    text = Text()
    for step in steps:
        append_coloured(text, step.pieces)
    return text


def _wrapped(steps: Iterable[RecordedStep], console: Console, width: int) -> list[Text]:
    return [*coloured(steps).wrap(console, width - _BORDERS)]


def _figures(tally: Tally) -> str:
    if not tally.num_tokens:
        return "no tokens"
    return (
        f"{tally.tokens_per_second:.0f} tokens/s, tau {tally.tau:.2f}, {tally.drafted:.0%} drafts"
    )
