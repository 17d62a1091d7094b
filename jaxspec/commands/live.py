"""Text that appears as it is decoded, coloured by who wrote it."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.status import Status
from rich.text import Text

from jaxspec.checkpoint import Tokenizer
from jaxspec.compilation import CompileClock
from jaxspec.generation import StreamStep

DRAFTED_STYLE = "green"
REFRESH_SECONDS = 0.05
# A model may write what a terminal would obey.
VISIBLE_ESCAPE = {0x1B: "\u241b"}
_TAB_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a stream put on the screen."""

    text: str
    interrupted: bool


def waiting_for_first(steps: Iterator[StreamStep], message: str) -> Iterator[StreamStep]:
    """The same steps, with a message on standard error until the first is there."""
    with waiting(message):
        first = next(steps, None)
    if first is not None:
        yield first
        yield from steps


def waiting(message: str) -> Status:
    """Shows a message, if standard error is a terminal, for as long as its `with` block runs."""
    return Console(stderr=True).status(Text(message, style="dim"))


class Sources:
    """Cuts streamed text into runs that the draft or the target wrote."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._held: deque[tuple[str, bool]] = deque()  # characters not streamed yet

    def push(self, step: StreamStep) -> list[tuple[str, bool]]:
        """The step's text in pieces, each with True if it was drafted and accepted."""
        if self._detokenizer is None:
            return []
        for token, drafted in zip(step.tokens, step.from_draft, strict=True):
            text = self._detokenizer.push([token])
            self._held.extend((character, bool(drafted)) for character in text)
        # What is left at the end are incomplete characters, of whichever token came last.
        flags = [self._held.popleft()[1] if self._held else False for _ in step.text]
        if (
            step.finish_reason is not None
        ):  # what is still held is a stop string: no part of the text
            self._detokenizer.finish()
            self._held.clear()
        return _runs(zip(step.text, flags, strict=True))

    def rest(self) -> list[tuple[str, bool]]:
        """What a stream that was interrupted still held back, in pieces like those of `push`."""
        if self._detokenizer is None:
            return []
        incomplete = [(character, False) for character in self._detokenizer.finish()]
        pieces = _runs([*self._held, *incomplete])
        self._held.clear()
        return pieces


def _runs(characters: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    runs = groupby(characters, key=lambda pair: pair[1])
    return [("".join(character for character, _ in run), drafted) for drafted, run in runs]


class Tally(NamedTuple):
    """What a stream had given by some time.

    num_drafted: tokens that were drafted and accepted.
    seconds: from the start to the last token, compiling left out.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tau(self) -> float:
        """Tokens per step, bonus token included."""
        return self.num_tokens / self.num_steps

    @property
    def drafted(self) -> float:
        """Share of the tokens."""
        return self.num_drafted / self.num_tokens


class Pace:
    """Counts what a stream has given, and how fast."""

    def __init__(self):
        self.tally = Tally()
        self._clock = CompileClock()
        self._start = 0.0

    def __enter__(self) -> "Pace":
        self._clock.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error) -> None:
        self._clock.__exit__(*error)

    def push(self, step: StreamStep) -> None:
        self.tally = Tally(
            num_tokens=self.tally.num_tokens + len(step.tokens),
            num_steps=self.tally.num_steps + 1,
            num_drafted=self.tally.num_drafted + int(step.from_draft.sum()),
            seconds=time.perf_counter() - self._start - self._clock.seconds,
        )

    def __str__(self) -> str:
        tally = self.tally
        if not tally.num_tokens:
            return f"no tokens, {self._clock.seconds:.1f} s of compiling"
        return (
            f"{tally.num_tokens} tokens, {tally.tokens_per_second:.0f} tokens/s, "
            f"tau {tally.tau:.2f} (bonus included), {tally.drafted:.0%} drafted, "
            f"{self._clock.seconds:.1f} s of compiling left out"
        )


def append_coloured(text: Text, pieces: Iterable[tuple[str, bool]]) -> Text:
    """Adds pieces, each with True if it was drafted, to the text, and returns it."""
    for piece, drafted in pieces:
        text.append(piece.translate(VISIBLE_ESCAPE), DRAFTED_STYLE if drafted else None)
    return text


class LiveText:
    """A growing text, on a terminal with a status line below it; elsewhere just the text.

    Leaving the `with` block, also by an exception, keeps all the text on the screen.
    """

    def __init__(self, console: Console):
        self._console = console
        self._line = Text()  # from the start of the last row, with the spaces that no row shows
        self._row = Text()  # the last row, as it is shown
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
        """Takes the rows that no later text can change out of the line."""
        *ended, self._line = self._line.split(allow_blank=True)
        finished = [row for line in ended for row in line.wrap(self._console, self._console.width)]
        self._line.expand_tabs(_TAB_SIZE)
        # Wrapping trims spaces at the right edge; those at the end must wait for the next word.
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
