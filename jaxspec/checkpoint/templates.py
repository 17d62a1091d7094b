"""Chat templates: Jinja programs from outside, run in a sandbox in a process of their own.

The sandbox keeps a template from reaching anything but what it is handed. The process has little
time and memory for each rendering, so that no template runs for ever or fills the machine. It is
started with the first chat, and serves all later ones. Windows knows no such limits: there a
rendering has a minute, and its output and products are bounded, but not the rest of its memory.
"""

import atexit
import faulthandler
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sized
from typing import Any, BinaryIO

SECONDS = 2
"""Time of the processor for one rendering; a long conversation takes some thousandths."""
MEMORY = 1 << 30
"""Bytes for one rendering."""
_LONGEST = 1 << 26  # characters of a result


class TemplateFailure(Exception):
    """A template that refused what it was given, failed on it, or took too long.

    Attributes:
        refused: it says no, or does what the sandbox forbids; else it failed.
        line: of the template; `None` if it is not known.
    """

    def __init__(self, message: str, refused: bool = True, line: int | None = None):
        super().__init__(message)
        self.refused, self.line = refused, line


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Returns what a template makes of variables, which are plain JSON values.

    Raises:
        TemplateFailure: saying why.

    Example:
        >>> render("{% for role in roles %}{{ role }}: {% endfor %}", {"roles": ["user", "model"]})
        'user: model: '
    """
    with _LOCK:
        answer = _worker().ask({"source": source, "variables": variables})
    if "text" in answer:
        return answer["text"]
    raise TemplateFailure(answer["error"], answer["refused"], answer["line"])


class _Worker:
    """The process that renders."""

    def __init__(self):
        self.owner = os.getpid()
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115 (`end` closes it)
        # -P: modules next to this file are none of its own.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._notes,
        )

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer of the process, or what it died of."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        # The kernel ends it by the processor's time; this is for one that sleeps.
        timer = threading.Timer(30 * SECONDS, self._process.kill)
        timer.start()
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self._process.kill()
            self._process.wait()
            line = _last_line(self._notes)
            self.end()
            said = f"it takes more than {SECONDS} seconds, or {MEMORY >> 20} MiB"
            return {"error": said, "refused": True, "line": line}
        return json.loads(answer)

    @property
    def is_alive(self) -> bool:
        """False after it died, and in a process that was forked from the one it belongs to."""
        return self.owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """Ends the process."""
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._notes):
                if stream is not None:
                    stream.close()


def _last_line(notes: BinaryIO) -> int | None:
    """Returns the line of the template that a process was in when it died, if it is known.

    Args:
        notes: lines of the template with those of the program made of it, and then the traceback
            that `faulthandler` wrote, the latest call first.
    """
    notes.seek(0)
    lines, _, traceback = notes.read().decode(errors="replace").partition("\n")
    died = re.search(r'File "<template>", line (\d+)', traceback)
    if died is None:
        return None
    begun = [line for line, first in json.loads(lines) if first <= int(died[1])]
    return begun[-1] if begun else None


_LOCK = threading.Lock()
_workers: list[_Worker] = []


def _worker() -> _Worker:
    if not (_workers and _workers[0].is_alive):
        _workers[:] = [_Worker()]
    return _workers[0]


@atexit.register
def _end_worker() -> None:
    for worker in _workers:
        worker.end()


@functools.lru_cache(maxsize=32)
def _compiled(source: str):
    import datetime

    import jinja2
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.utils

    class _Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant said, for training; it prints its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PublicNamespace(jinja2.utils.Namespace):
        """Refuses the attributes that Python gives a meaning, which Jinja's own stores.

        Filters call `__html__` of what they are given, past the sandbox's check of calls.
        """

        def __init__(self, **values):
            super().__init__()
            for name, value in values.items():
                self[name] = value

        def __setitem__(self, name, value):
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is refused.")
            super().__setitem__(name, value)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Refuses products and powers that are too large before they are computed."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context, operator, left, right):
            swapped = operator == "*" and isinstance(left, int)
            value, times = (right, left) if swapped else (left, right)
            if operator == "*":
                size = len(value) if isinstance(value, Sized) else 0
            else:
                size = value.bit_length() if isinstance(value, int) else 0
            if isinstance(times, int) and size * times > _LONGEST:
                raise OverflowError
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML, which no model was trained on.
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace
    )
    return environment.from_string(source)


def _rendered(template: Any, variables: Mapping[str, Any]) -> str:
    """Returns what a template makes of variables.

    Raises:
        TemplateFailure: it makes too much.
    """
    pieces, size = [], 0
    stream = template.generate(variables)
    for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            place = stream.gi_yieldfrom.gi_frame.f_lineno
            line = template.get_corresponding_lineno(place)
            raise TemplateFailure(f"it makes more than {_LONGEST} characters", line=line)
    return "".join(pieces)


@functools.lru_cache(maxsize=1)
def _noted(source: str) -> Any:
    """Returns the template of a source, with its lines noted for `_last_line`."""
    _note([])
    template = _compiled(source)
    _note(template.debug_info)
    return template


def _note(lines: list[tuple[int, int]]) -> None:
    sys.stderr.seek(0)
    sys.stderr.truncate()
    sys.stderr.write(json.dumps(lines) + "\n")
    sys.stderr.flush()


def _line_of(error: BaseException) -> int | None:
    """Returns the line of the template in which an error was raised."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _answer(asked: bytes) -> dict[str, Any]:
    import jinja2

    try:
        question = json.loads(asked)
        return {"text": _rendered(_noted(question["source"]), question["variables"])}
    except TemplateFailure as error:
        return {"error": str(error), "refused": True, "line": error.line}
    except (MemoryError, RecursionError, OverflowError) as error:
        said = f"it goes too far ({type(error).__name__})"
        return {"error": said, "refused": True, "line": _line_of(error)}
    except jinja2.TemplateError as error:
        return {"error": str(error), "refused": True, "line": _line_of(error)}
    except Exception as error:
        return {"error": repr(error), "refused": False, "line": _line_of(error)}


def _limiter() -> Callable[[], None]:
    """Returns what gives the next rendering its time; memory is limited once."""
    try:
        import resource
    except ImportError:  # not a system of that kind: the other process watches the clock
        return lambda: None
    import jinja2  # noqa: F401 (before memory is limited)

    used = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    # The signal of the time's end: writes where the template was, then ends the process.
    faulthandler.register(signal.SIGXCPU, all_threads=False, chain=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, most))

    def limit() -> None:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        until = int(spent.ru_utime + spent.ru_stime) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))

    return limit


def _serve() -> None:
    """Answers questions, a line each, until there are no more."""
    faulthandler.enable(all_threads=False)
    limit = _limiter()
    for asked in sys.stdin.buffer:
        limit()
        sys.stdout.write(json.dumps(_answer(asked)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
