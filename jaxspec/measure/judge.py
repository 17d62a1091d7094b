"""Runs a program that a model wrote, in a process of its own, to see whether its tests pass.

The process has little time and memory, and ends at once where it writes a file, starts a process,
calls foreign code by `ctypes` (numpy does when it is imported) or opens a socket. That stops
accidents, not an attacker: run what you have reason to distrust on a machine that you can lose.
"""

import contextlib
import importlib.util
import os
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

SECONDS = 5.0
"""Time of a program."""
MOST_MEMORY = 1 << 30
"""Bytes of address space that a program may have beyond what Python itself takes."""
_GRACE = 10.0  # for Python to start on a busy machine


def check_limits() -> None:
    """Refuses a system that does not limit processes, such as Windows.

    Raises:
        ValueError: it is one.
    """
    if not hasattr(os, "killpg") or importlib.util.find_spec("resource") is None:
        raise ValueError(
            "task: programs that a model wrote run in processes of little time and memory, which "
            "this system does not offer; judge them on Linux or macOS."
        )


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Returns True if a program runs to its end in time, and did nothing that is not allowed.

    Raises:
        ValueError: see `check_limits`.

    Example:
        >>> passes("assert 1 + 1 == 2"), passes("assert 1 + 1 == 3")
        (True, False)
    """
    check_limits()
    # Printed at the end: a program that leaves early has not passed, whatever its exit status.
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(Path(__file__).resolve()), word, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(
                program.encode("utf-8", "surrogatepass"), timeout=seconds + _GRACE
            )
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
    return said.split(b"\n")[-1] == word.encode()


_FORBIDDEN = (
    *("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.truncate", "os.putenv", "os.startfile", "pty.", "shutil."),
    *("ctypes.", "mmap.", "signal.", "webbrowser.", "fcntl.", "resource."),
)


def _forbid(event: str, args: tuple) -> None:
    writes = False
    if event == "open":
        _, mode, flags = args
        writes = bool(set(mode or "") & set("wax+")) or bool(
            flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
    if writes or event.startswith(_FORBIDDEN):
        os._exit(3)


def _run(word: str, seconds: float) -> None:
    """Runs the program on standard input, and says the word if it comes to its end."""
    import resource
    import threading

    out, source = os.dup(1), sys.stdin.buffer.read()
    # This process sees no package, so a file of it is run.
    runpy.run_path(str(Path(__file__).parents[1] / "bounded.py"))["bound_memory"](MOST_MEMORY)
    for limit, most in ((resource.RLIMIT_CPU, int(seconds) + 1), (resource.RLIMIT_FSIZE, 1 << 20)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    timer = threading.Timer(seconds, os._exit, [4])
    timer.daemon = True
    timer.start()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.addaudithook(_forbid)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "program", "exec"), module.__dict__)
    os.write(out, b"\n" + word.encode())
    os._exit(0)


if __name__ == "__main__":
    _run(sys.argv.pop(1), float(sys.argv.pop(1)))
