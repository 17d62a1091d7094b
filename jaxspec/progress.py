"""A progress bar for long work on terminals; elsewhere one line a minute."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_A_LINE = 60
_running: dict[object, str] = {}
"""Progress of each bar, the outermost first."""


def how_far() -> str:
    """Returns how far the outermost bar is; "" where there is none.

    Example:
        >>> with progress_bar(2, shown=False) as advance:
        ...     advance("the first part")
        ...     how_far()
        '0 of 2 done, now the first part'
    """
    return next(iter(_running.values()), "")


def error_console() -> "Console":
    """Returns a console on standard error, in notebooks too: a status there needs ipywidgets."""
    # Here, because `import jaxspec` does without it.
    from rich.console import Console

    return Console(stderr=True, force_jupyter=False)


@contextmanager
def progress_bar(total: int, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Yields `advance(doing)`: call it before each of `total` parts, saying what it is.

    Or `advance(doing, done, total)`, where several parts may be done at once. Goes to standard
    error: a bar on a terminal, elsewhere a line a minute at most. An interruption gets a note.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    on_terminal = console.is_terminal
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not (shown and on_terminal),
        transient=True,
    ) as bar:
        task, key = bar.add_task("", total=total), object()
        done, said = -1, time.monotonic()

        def advance(doing: str, completed: int | None = None, of: int = total) -> None:
            nonlocal done, said
            done = done + 1 if completed is None else completed
            bar.update(task, completed=done, total=of, description=doing)
            _running[key] = f"{done} of {of} done, now {doing}"
            if shown and not on_terminal and time.monotonic() - said >= _SECONDS_A_LINE:
                print(_running[key], file=sys.stderr, flush=True)
                said = time.monotonic()

        _running[key] = ""
        try:
            yield advance
        except KeyboardInterrupt as interruption:
            if _running[key]:
                interruption.add_note(_running[key])
            raise
        finally:
            del _running[key]
