"""Ctrl-C: the process ends within two seconds, wherever it is, and says what is done.

Python raises `KeyboardInterrupt` in the main thread once that runs Python again. While XLA compiles
or a program runs, that may take minutes. So another thread hears of the signal too, by
`signal.set_wakeup_fd`, and ends the process if the exception was not raised in time. What follows
the exception, such as the end of a `with` block, may wait too: a second Ctrl-C ends it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from jaxspec.progress import how_far
from jaxspec.start import EXIT_INTERRUPTED, end_at_once

GRACE = 1.0
"""Seconds in which Python may raise `KeyboardInterrupt`."""
_AGAIN = b"\0"
"""Tells the other thread of a second Ctrl-C; no signal has this number."""
_told: list[Callable[[], str]] = []
_unwinding = threading.Event()


class Told(KeyboardInterrupt):
    """An interruption of which the user knows what was done."""


@contextlib.contextmanager
def telling(done: Callable[[], str]) -> Iterator[None]:
    """Says what was done if the block is interrupted; `done` may run in another thread."""
    _told.append(done)
    try:
        yield
    except KeyboardInterrupt:
        say_interrupted()
        raise Told from None
    finally:
        _told.remove(done)


def go_on() -> None:
    """Tells that an interruption is dealt with, so that the next one is not the second one."""
    _unwinding.clear()


def say_interrupted(interruption: KeyboardInterrupt | None = None) -> None:
    """Prints that the command was interrupted, and what it has done, or how far its bar was."""
    told = [done() for done in _told]
    # The exception has ended the bars that it passed. The outermost one was the last to note.
    noted = getattr(interruption, "__notes__", ())[-1:] or (how_far(),)
    print("interrupted", *filter(None, told or noted), sep=": ", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending_soon() -> Iterator[None]:
    """Ends the process within two seconds of a Ctrl-C in the block that Python does not notice."""
    is_main = threading.current_thread() is threading.main_thread()
    listening = signal.getsignal(signal.SIGINT)
    if not is_main or listening not in (signal.default_int_handler, end_at_once):
        yield  # someone else listens, or nobody is to
        return
    heard, noticed = socket.socketpair(), threading.Event()
    heard[1].setblocking(False)

    def notice(number: int, frame: object) -> None:
        noticed.set()
        if _unwinding.is_set():
            heard[1].send(_AGAIN)
            return
        _unwinding.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while numbers := heard[0].recv(64):
            if _AGAIN in numbers or (signal.SIGINT in numbers and not noticed.wait(GRACE)):
                _end()
            noticed.clear()

    def drop(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            _end()  # raised in a deletion or a callback, and nobody else would hear of it
        shown(dropped)

    watcher, shown = threading.Thread(target=watch, daemon=True), sys.unraisablehook
    sys.unraisablehook = drop
    before = signal.set_wakeup_fd(heard[1].fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, notice)
    watcher.start()
    try:
        yield
    finally:
        go_on()
        sys.unraisablehook = shown
        signal.signal(signal.SIGINT, listening)
        signal.set_wakeup_fd(before)
        heard[1].close()
        watcher.join()
        heard[0].close()


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                stream.write("\x1b[?25h\n")  # the cursor, which a bar may have hidden
            stream.flush()
    say_interrupted()
    os._exit(EXIT_INTERRUPTED)
