"""Text that appears as it is decoded, coloured by who wrote it."""

import time
from collections import deque
from collections.abc import Iterable
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxspec.checkpoint import Tokenizer
from jaxspec.compilation import CompileClock
from jaxspec.generation import StreamStep

DRAFTED_STYLE = "green"
REFRESH_SECONDS = 0.05
# A model may write what a terminal would obey.
_VISIBLE_ESCAPE = {0x1B: "\u241b"}


class Sources:
    """Cuts streamed text into runs that the draft or the target wrote."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._drafted: deque[bool] = deque()  # of characters not streamed yet

    def push(self, step: StreamStep) -> list[tuple[str, bool]]:
        """The step's text in pieces, each with True if it was drafted and accepted."""
        if self._detokenizer is None:
            return []
        for token, drafted in zip(step.tokens, step.from_draft, strict=True):
            self._drafted.extend([bool(drafted)] * len(self._detokenizer.push([token])))
        # What is left at the end are incomplete characters, of whichever token came last.
        flags = [self._drafted.popleft() if self._drafted else False for _ in step.text]
        runs = groupby(zip(step.text, flags, strict=True), key=lambda pair: pair[1])
        return [("".join(character for character, _ in run), drafted) for drafted, run in runs]


class Pace:
    """Counts what a stream has given, and how fast."""

    def __init__(self):
        self.tokens: list[int] = []
        self.num_steps = 0
        self.num_drafted = 0
        self.first_token_seconds: float | None = None
        self._clock = CompileClock()
        self._start = 0.0

    def __enter__(self) -> "Pace":
        self._clock.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error) -> None:
        self._clock.__exit__(*error)

    def push(self, step: StreamStep) -> None:
        self.tokens.extend(step.tokens.tolist())
        self.num_steps += 1
        self.num_drafted += int(step.from_draft.sum())
        self.seconds = time.perf_counter() - self._start - self._clock.seconds
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self._start

    def __str__(self) -> str:
        if not self.tokens:
            return f"no tokens, {self._clock.seconds:.1f} s of compiling"
        return (
            f"{len(self.tokens)} tokens, {len(self.tokens) / self.seconds:.0f} tokens/s, "
            f"tau {len(self.tokens) / self.num_steps:.2f} (bonus included), "
            f"{self.num_drafted / len(self.tokens):.0%} drafted, "
            f"{self._clock.seconds:.1f} s of compiling left out"
        )


class LiveText:
    """A growing text, on a terminal with a status line below it; elsewhere just the text.

    Leaving the `with` block, also by an exception, keeps all the text on the screen.
    """

    def __init__(self, console: Console):
        self._console = console
        self._row = Text()
        self._live: Live | None = None
        self._any = False
        self._refreshed = 0.0

    def __enter__(self) -> "LiveText":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def push(self, pieces: Iterable[tuple[str, bool]], status: object) -> None:
        """Adds text, each piece with True if it was drafted, and renews the status line."""
        self._any = True
        if self._live is None:
            for text, _ in pieces:
                self._console.file.write(text)
            self._console.file.flush()
            return
        for text, drafted in pieces:
            self._row.append(text.translate(_VISIBLE_ESCAPE), DRAFTED_STYLE if drafted else None)
        # Only the last row stays under the status line's control; the others scroll away.
        *finished, self._row = self._row.wrap(self._console, self._console.width)
        for row in finished:
            self._console.print(row)
        now = time.perf_counter()
        if finished or now - self._refreshed > REFRESH_SECONDS:
            status_line = Text(str(status), style="dim", overflow="ellipsis", no_wrap=True)
            self._live.update(Group(self._row, status_line), refresh=True)
            self._refreshed = now

    def __exit__(self, *error) -> None:
        if self._live is not None:
            self._live.update(Text(), refresh=False)
            self._live.stop()
            if self._any:
                self._console.print(self._row)
        elif self._any:
            self._console.file.write("\n")
            self._console.file.flush()
