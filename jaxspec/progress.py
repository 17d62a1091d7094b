"""A progress bar for what takes longer than two seconds, where somebody is watching."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields `advance(doing)`: call it before each of `total` parts, saying what it is.

    Goes to standard error, and only to a terminal.
    """
    # Here, because `import jaxspec` does without it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not (shown and console.is_terminal)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=hidden, transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        started = False

        def advance(doing: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=doing)
            started = True

        yield advance
