"""Text that appears while it is decoded; accepted draft tokens are coloured.

Rich's own `Live` shows no more than a screen. `LiveText` prints finished rows above it instead, so
that a long text scrolls away as in any terminal.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.status import Status
from rich.text import Text

from jaxspec.checkpoint import Tokenizer
from jaxspec.compilation import CompileClock
from jaxspec.decoding.generate import StreamStep
from jaxspec.decoding.metrics import Counts

DRAFTED_STYLE = "green"
REFRESH_SECONDS = 0.05
# A model may write control sequences of terminals.
VISIBLE_ESCAPE = {0x1B: "\u241b"}
_TAB_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Shown:
    """The text that a session printed, and True if Ctrl-C ended it."""

    text: str
    interrupted: bool


def waiting_for_first(steps: Iterator[StreamStep], message: str) -> Iterator[StreamStep]:
    """Yields the same steps; shows a message on standard error until the first one."""
    with waiting(message):
        first = next(steps, None)
    if first is not None:
        yield first
        yield from steps


def waiting(message: str) -> Status:
    """Shows a message during a `with` block if standard error is a terminal."""
    return Console(stderr=True).status(Text(message, style="dim"))


class Sources:
    """Cuts streamed text into pieces that come from the draft or from the target."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._held: deque[tuple[str, bool]] = deque()  # characters not streamed yet

    def push(self, step: StreamStep) -> list[tuple[str, bool]]:
        """Returns the text of a step in pieces, each with True if it was drafted and accepted."""
        if self._detokenizer is None:
            return []
        for token, drafted in zip(step.tokens, step.from_draft, strict=True):
            text = self._detokenizer.push([token])
            self._held.extend((character, bool(drafted)) for character in text)
        # Incomplete characters are left at the end; they count as the target's.
        flags = [self._held.popleft()[1] if self._held else False for _ in step.text]
        if step.finish_reason is not None:
            # The rest is a stop string and no part of the text.
            self._detokenizer.finish()
            self._held.clear()
        return _runs(zip(step.text, flags, strict=True))

    def rest(self) -> list[tuple[str, bool]]:
        """Returns the text that an interrupted stream still held back, in pieces as of `push`."""
        if self._detokenizer is None:
            return []
        incomplete = [(character, False) for character in self._detokenizer.finish()]
        pieces = _runs([*self._held, *incomplete])
        self._held.clear()
        return pieces


def _runs(characters: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    runs = groupby(characters, key=lambda pair: pair[1])
    return [("".join(character for character, _ in run), drafted) for drafted, run in runs]


class StreamClock:
    """Counts and times the steps of a stream, as a context manager.

    Attributes:
        counts: tokens, steps and accepted draft tokens so far.
        seconds: time from the start to the last step, without compiling.
    """

    def __init__(self):
        self.counts, self.seconds = Counts(), 0.0
        self._compiling = CompileClock()
        self._start = 0.0

    def __enter__(self) -> "StreamClock":
        self._compiling.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error) -> None:
        self._compiling.__exit__(*error)

    def push(self, step: StreamStep) -> None:
        """Adds a step that has just come."""
        self.seconds = time.perf_counter() - self._start - self._compiling.seconds
        self.counts += Counts(
            num_tokens=len(step.tokens), num_steps=1, num_from_draft=int(step.from_draft.sum())
        )

    def __str__(self) -> str:
        counts, compiling = self.counts, f"{self._compiling.seconds:.1f} s of compiling"
        if not counts.num_tokens:
            return f"no tokens, {compiling}"
        return (
            f"{counts.num_tokens} tokens, {counts.num_tokens / self.seconds:.0f} tokens/s, "
            f"tau {counts.tau:.2f} (bonus included), "
            f"{counts.num_from_draft / counts.num_tokens:.0%} drafted, {compiling} left out"
        )


def append_coloured(text: Text, pieces: Iterable[tuple[str, bool]]) -> Text:
    """Adds pieces, each with True if it was drafted, to the text and returns the text."""
    for piece, drafted in pieces:
        text.append(piece.translate(VISIBLE_ESCAPE), DRAFTED_STYLE if drafted else None)
    return text


class LiveText:
    """A growing text with a status line below it; without a terminal only the text.

    All text stays on the screen when the `with` block ends, also by an exception.
    """

    def __init__(self, console: Console):
        self._console = console
        self._line = Text()  # the text from the start of the last row, with trailing spaces
        self._row = Text()  # the last row as it is shown
        self._live: Live | None = None
        self._any = False
        self._refreshed = 0.0

    def __enter__(self) -> "LiveText":
        return self

    def push(self, pieces: Iterable[tuple[str, bool]], status: object) -> None:
        """Adds text, each piece with True if it was drafted, and renews the status line."""
        self._any = True
        if not self._console.is_terminal:
            for text, _ in pieces:
                self._console.file.write(text)
            self._console.file.flush()
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        append_coloured(self._line, pieces)
        # Only the last row stays under the status line's control; the others scroll away.
        finished = self._finished_rows()
        for row in finished:
            self._console.print(row)
        now = time.perf_counter()
        if finished or now - self._refreshed > REFRESH_SECONDS:
            status_line = Text(str(status), style="dim", overflow="ellipsis", no_wrap=True)
            self._live.update(Group(self._row, status_line), refresh=True)
            self._refreshed = now

    def _finished_rows(self) -> list[Text]:
        """Removes the rows that no later text can change from the line and returns them."""
        *ended, self._line = self._line.split(allow_blank=True)
        finished = [row for line in ended for row in line.wrap(self._console, self._console.width)]
        self._line.expand_tabs(_TAB_SIZE)
        # Wrapping trims spaces at the right edge; trailing spaces wait for the next word.
        shown = self._line.copy()
        shown.rstrip()
        *full, self._row = shown.wrap(self._console, self._console.width)
        self._line = self._line[len(shown) - len(self._row) :]
        return finished + full

    def __exit__(self, *error) -> None:
        if self._live is not None:
            self._live.update(Text(), refresh=False)
            self._live.stop()
            self._console.print(self._row)
        elif self._any:
            self._console.file.write("\n")
            self._console.file.flush()
