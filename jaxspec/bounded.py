"""Work on what comes from outside, in a process of its own that has little time and memory.

This file is also the program of that process. It imports nothing of the package, so that it starts
at once.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO


class Ended(Exception):
    """An answer would have taken too much, so its process was ended.

    Attributes:
        notes: text that the process wrote on standard error; where it ended comes last.
    """

    def __init__(self, notes: str):
        super().__init__("ended")
        self.notes = notes


class Bounded:
    """A process that answers questions one by one, started with the first.

    Questions and answers are plain JSON values. No question takes it for ever or fills the machine:
    it ends instead, and the next one starts it anew. Memory is bounded on Linux
    only. Windows knows no limits: there an answer has some time.

    Example:
        >>> from jaxspec.checkpoint import rendering
        >>> process = Bounded(rendering.__file__, seconds=2, memory=1 << 30)
        >>> process.ask({"source": "{{ 2 + 3 }}", "variables": {}})
        {'text': '5'}
    """

    def __init__(self, program: str, seconds: int, memory: int):
        """Starts nothing yet.

        Args:
            program: a file of Python that imports nothing of the package. Its function `answer`
                takes a question.
            seconds: time of the processor for each answer.
            memory: bytes for all answers.
        """
        self._program, self._seconds, self._memory = program, seconds, memory
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._process: subprocess.Popen | None = None
        self._notes: BinaryIO | None = None
        atexit.register(self._end)

    @property
    def bounds(self) -> str:
        """Time and memory of an answer, as messages say them."""
        return f"{self._seconds} seconds, or {self._memory >> 20} MiB"

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer.

        Raises:
            Ended: it would take too much time or memory.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            # The kernel ends it by the processor's time; this is for one that sleeps.
            timer = threading.Timer(30 * self._seconds, process.kill)
            timer.start()
            answer, notes = b"", ""
            try:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                timer.cancel()
                if not answer.endswith(b"\n"):  # also after an interrupt: it may still answer
                    notes = self._end()
        if not answer.endswith(b"\n"):
            raise Ended(notes)
        return json.loads(answer)

    def _running(self) -> subprocess.Popen:
        """Returns the process; another one after it died, and in a fork of its owner."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._end()
            self._owner = os.getpid()
            self._notes = tempfile.TemporaryFile()  # noqa: SIM115 (`_end` closes it)
            bounds = (f"{self._seconds}", f"{self._memory}")
            # -P: modules next to this file are none of its own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", __file__, self._program, *bounds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._notes,
            )
        return self._process

    def _end(self) -> str:
        """Ends the process; returns what it wrote on standard error."""
        if self._process is None or self._notes is None or self._owner != os.getpid():
            return ""
        self._process.kill()
        self._process.wait()
        self._notes.seek(0)
        notes = self._notes.read().decode(errors="replace")
        for stream in (self._process.stdin, self._process.stdout, self._notes):
            if stream is not None:
                stream.close()
        self._process = self._notes = None
        return notes


def bound_memory(memory: int) -> None:
    """Lets this process take so many bytes more than it has, and leave no core file.

    Memory is limited where the system says how much there is in use: on Linux.
    """
    import resource

    limits = [(resource.RLIMIT_CORE, 0)]
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limits.append((resource.RLIMIT_AS, used + memory))
    for limit, most in limits:
        with contextlib.suppress(ValueError, OSError):  # it has less already, or no such limit
            resource.setrlimit(limit, (most, most))


def _limiter(seconds: int, memory: int) -> Callable[[], None]:
    """Returns what gives the next answer its time; memory is limited once."""
    try:
        import resource
    except ImportError:  # not a system of that kind: the other process watches the clock
        return lambda: None

    # The signal of the time's end: writes where the program was, then ends the process.
    faulthandler.register(signal.SIGXCPU, all_threads=False, chain=True)
    bound_memory(memory)

    def limit() -> None:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        until = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))

    return limit


def _serve(program: str, seconds: int, memory: int) -> None:
    """Answers questions, a line each, until there are no more."""
    faulthandler.enable(all_threads=False)
    answer = runpy.run_path(program)["answer"]
    limit = _limiter(seconds, memory)
    for asked in sys.stdin.buffer:
        limit()
        sys.stdout.write(json.dumps(answer(json.loads(asked))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
