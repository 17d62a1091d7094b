"""One job on several processes, on one host or many: who takes part, and who is still there.

Process 0 is the coordinator. It listens at HOST:PORT, hears who comes and with which version, and
keeps a line open to each: what travels on it are small JSON messages. JAX's own service, which
accelerators of several hosts need, listens one port higher. Each process decodes its share of the
rows on its own devices; nothing waits for anything until all of them are done.

A line that closes means that a process is gone. Then process 0 tells the others, and all of them
end at once, as if they had been killed: records are safe by then, and the job can be resumed.
Nothing on these lines is secret or signed: use a network that you trust.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxspec.batch.writer import Key, differences, version_in_use

EXIT_LOST = 2
_RESUME = "Records that were written are safe: start all processes again with --resume."
_HELLO_SECONDS = 10.0
_LONGEST_WAIT = 1e6
"""Seconds, more than a week."""
_LONGEST_MESSAGE = 1 << 30
_PACKAGE = Path(__file__).resolve().parents[1]

Message = dict[str, Any]


class HostError(ValueError):
    """A process that did not come, is gone, or does not belong to the job."""


def code_in_use() -> dict[str, str]:
    """What must be the same in all processes before anything is loaded."""
    checksum = 0
    for path in sorted(_PACKAGE.rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return {
        "jaxspec": version_in_use(),
        "code of jaxspec": f"{checksum:08x}",
        "jax": jax.__version__,
    }


class Line:
    """A connection to another process: a JSON object each way now and then."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that loses its power says nothing: ask after half a minute.
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends one; a line that is closed swallows it, and whoever listens notices."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None where the line is closed or what comes is none."""
        try:
            self._connection.settimeout(seconds)
            message = json.loads(self._stream.readline(_LONGEST_MESSAGE))
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Closes both ways."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._connection.close()


class Processes:
    """The processes of a job, as one of them sees them.

    Attributes:
        index: of this one.
        num: of all.
        early: those that were asked to stop before their share was done; known after `finish`.
    """

    def __init__(self, index: int, num: int, lines: Mapping[int, Line]):
        self.index, self.num = index, num
        self.early: list[int] = []
        self._lines = dict(lines)
        self._inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._leaving = threading.Event()
        self._gone = {other: threading.Event() for other in lines}
        for other in lines:
            threading.Thread(target=self._listen, args=(other,), daemon=True).start()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def share(self, rows: list) -> list:
        """The rows that fall to this process."""
        return rows[self.index :: self.num]

    def agree(self, header: Mapping[str, Any]) -> None:
        """Tells process 0 that this one is ready; process 0 waits until all are.

        Args:
            header: of the job, from `job_header`.

        Raises:
            HostError: the settings of two processes differ.
        """
        if not self.is_first:
            self._lines[0].send(header=dict(header))
            return
        header = json.loads(json.dumps(header))
        for other, message in self._from_each("header").items():
            different = differences(message, header, "in process 0")
            if different:
                self.stop(
                    f"process {other} was given another job: {different}. Give all processes the "
                    "same settings."
                )

    def begin(self, done: set[Key]) -> set[Key]:
        """Waits until process 0 has the output.

        Args:
            done: records that need not be made any more; what process 0 gives counts.

        Returns:
            What process 0 gave.
        """
        if self.is_first:
            for line in self._lines.values():
                line.send(begin=sorted(done))
            return done
        return {(line, sample) for line, sample in self._from_each("begin")[0]}

    def finish(self, report: Mapping[str, Any]) -> list[Message]:
        """Waits until every share is done; gives process 0 the reports, the others none.

        The others go on when process 0 has what it needs of them: see `leave`.

        Args:
            report: of this one: its number as `process`, whether it was `interrupted`, and more.
        """
        if self.is_first:
            others = self._from_each("done")
            reports = [dict(report), *(others[other] for other in sorted(others))]
            self.early = [one["process"] for one in reports if one["interrupted"]]
            return reports
        self._lines[0].send(done=dict(report))
        self.early = self._from_each("leave")[0]
        return []

    def leave(self) -> None:
        """Ends the job in order: process 0, whom all depend on, is the last."""
        self._leaving.set()
        if self.is_first:
            for line in self._lines.values():
                line.send(leave=self.early)
            for gone in self._gone.values():
                gone.wait(_HELLO_SECONDS)
            jax.distributed.shutdown()
            return
        jax.distributed.shutdown()
        for line in self._lines.values():
            line.close()

    def stop(self, why: str) -> NoReturn:
        """Ends the job everywhere.

        Raises:
            HostError: always, here; the other processes say the same and end.
        """
        self._leaving.set()
        for line in self._lines.values():
            line.send(stop=why)
        raise HostError(why)

    def fail(self, error: BaseException) -> None:
        """Says that this process cannot go on."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        why = f"process {self.index} failed: {what}. {_RESUME}"
        for line in self._lines.values():
            line.send(stop=why)

    def end_at_once(self, why: str) -> None:
        """Says why, in sentences, and ends this process, unless it is leaving anyway.

        Not by an exception: the main thread may be inside a program for long, and JAX ends a
        process whose coordinator is gone from within, before Python could say anything.
        """
        if not self._leaving.is_set():
            sys.stderr.write(f"jaxspec: error: {why}\n")
            sys.stderr.flush()
        os._exit(EXIT_LOST)

    def _listen(self, other: int) -> None:
        line = self._lines[other]
        while (message := line.receive()) is not None:
            if "stop" in message:
                self._tell_the_others(other, message["stop"])
                self.end_at_once(message["stop"])
            self._inbox.put((other, message))
        self._gone[other].set()
        if not self._leaving.is_set():
            who = "process 0, the coordinator," if other == 0 else f"process {other}"
            why = f"{who} is gone: it was killed, or its host cannot be reached. {_RESUME}"
            self._tell_the_others(other, why)
            self.end_at_once(why)

    def _tell_the_others(self, source: int, why: str) -> None:
        for other, line in self._lines.items():
            if other != source:
                line.send(stop=why)

    def _from_each(self, topic: str) -> dict[int, Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._lines):
            other, message = self._inbox.get()
            found[other] = message[topic]
        return found


@contextlib.contextmanager
def joined(
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    seconds: float = 300.0,
    facts: Mapping[str, str] | None = None,
) -> Iterator[Processes]:
    """Takes part in a job under `jax.distributed`, before anything else is asked of JAX.

    Args:
        coordinator: HOST:PORT of process 0; PORT + 1 must be free as well.
        num_processes: of the job.
        process_id: of this one, from 0.
        seconds: to wait for the others, at least 1.
        facts: that must agree; None: `code_in_use`.

    Raises:
        HostError: an argument is wrong, nobody answers there, not all came in time, or two
            processes differ in version.
    """
    host, port = _checked(coordinator, num_processes, process_id, seconds)
    facts = code_in_use() if facts is None else facts
    if process_id == 0:
        lines = _gathered(host, port, num_processes, facts, seconds)
    else:
        lines = {0: _reached(host, port, num_processes, process_id, facts, seconds)}
    processes = Processes(process_id, num_processes, lines)
    _speak_when_aborted(processes)
    try:
        _initialize(host, port + 1, num_processes, process_id, seconds)
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    processes.leave()


def _initialize(host: str, port: int, num_processes: int, process_id: int, seconds: float) -> None:
    """Starts JAX's own service, or joins it.

    Raises:
        HostError: it cannot be.
    """
    # Without this, JAX ends all processes when one is gone, and does not say which.
    jax.config.update("jax_enable_recoverability", True)
    # It would take SIGTERM for itself, and nobody here asks it whether that came.
    jax.config.update("jax_enable_preemption_service", False)
    address = f"{_bracketed(host)}:{port}"
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            initialization_timeout=round(seconds),
            coordinator_bind_address=address,
        )
    except RuntimeError as error:
        raise HostError(
            f"coordinator: JAX's own service at {address} cannot be had ({error}); give process 0 "
            "a port of which the next one is free as well."
        ) from error


def _checked(
    coordinator: str, num_processes: int, process_id: int, seconds: float
) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise HostError(f"coordinator must be HOST:PORT of process 0, got {coordinator!r}.")
    if num_processes < 1:
        raise HostError(f"num_processes must be at least 1, got {num_processes}.")
    if not 0 <= process_id < num_processes:
        raise HostError(f"process_id must be in 0..{num_processes - 1}, got {process_id}.")
    if not 1 <= seconds <= _LONGEST_WAIT:
        raise HostError(f"join_seconds must be in 1..{_LONGEST_WAIT:g}, got {seconds:g}.")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(
            f"coordinator: there is no host {host!r} ({error.strerror or error}); give the address "
            "of process 0."
        ) from error
    return host, int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _gathered(
    host: str, port: int, num_processes: int, facts: Mapping[str, str], seconds: float
) -> dict[int, Line]:
    """Process 0 waits for all others."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        # Seen to be free, for JAX.
        socket.create_server((host, port + 1), family=family).close()
        server = socket.create_server((host, port), family=family, backlog=num_processes)
    except OSError as error:
        raise HostError(
            f"coordinator: process 0 cannot listen at {host}:{port} and the port after it "
            f"({error.strerror or error}); give an address of its own machine, and a free port."
        ) from error
    lines: dict[int, Line] = {}
    until = time.monotonic() + seconds
    try:
        with server:
            while len(lines) < num_processes - 1:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, num_processes)) - set(lines))
                    raise HostError(
                        f"{_listed(missing)} of {num_processes} did not come to {host}:{port} "
                        f"within {seconds:g} s; start them, or wait longer with --join-seconds."
                    ) from None
                line = Line(connection)
                hello = line.receive(_HELLO_SECONDS)
                if hello is None or hello.get("job") != "jaxspec":
                    line.close()  # not one of ours
                    continue
                other = hello["process"]
                why = _refusal(hello, num_processes, lines, facts)
                if why is not None:
                    line.send(refused=why)
                    line.close()
                    raise HostError(why)
                lines[other] = line
    except HostError as error:
        for line in lines.values():
            line.send(refused=str(error))
            line.close()
        raise
    for line in lines.values():
        line.send(welcome=True)
    return lines


def _refusal(
    hello: Message, num_processes: int, lines: Mapping[int, Line], facts: Mapping[str, str]
) -> str | None:
    other = hello["process"]
    if hello["num_processes"] != num_processes:
        return (
            f"process {other} was told of {hello['num_processes']} processes, process 0 of "
            f"{num_processes}; give all the same num_processes."
        )
    if other in lines or not 0 < other < num_processes:
        return f"two processes have the process_id {other}; give each its own."
    different = differences(hello["facts"], facts, "in process 0")
    if different:
        return (
            f"mixed versions: process {other} differs from process 0: {different}. Install the "
            "same everywhere."
        )
    return None


def _listed(indices: list[int]) -> str:
    names = ", ".join(map(str, indices))
    return f"process {names}" if len(indices) == 1 else f"processes {names}"


def _reached(
    host: str,
    port: int,
    num_processes: int,
    process_id: int,
    facts: Mapping[str, str],
    seconds: float,
) -> Line:
    """Another process finds process 0, which may be there only later."""
    until = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise HostError(
                    f"coordinator: nobody answers at {host}:{port} ({error.strerror or error}) "
                    f"after {seconds:g} s; is that the address of process 0, and does it run?"
                ) from error
            time.sleep(0.2)
    line = Line(connection)
    line.send(job="jaxspec", process=process_id, num_processes=num_processes, facts=dict(facts))
    answer = line.receive(seconds + _HELLO_SECONDS)
    if answer is not None and "refused" in answer:
        raise HostError(answer["refused"])
    if answer is None or "welcome" not in answer:
        raise HostError(
            f"coordinator: what answers at {host}:{port} is not process 0 of a job, or it has "
            "ended; give the address of process 0."
        )
    return line


def _speak_when_aborted(processes: Processes) -> None:
    """Gives a reason where JAX aborts the process, as it does once its coordinator is gone.

    Python's own handlers run between two of its instructions, which there never comes; this one is
    called by the system.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(
        lambda number: processes.end_at_once(
            f"process 0, the coordinator, is gone: JAX gave this process up. {_RESUME}"
        )
    )
    _kept_alive.append(handler)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not a POSIX system
        ctypes.CDLL(None).signal(signal.SIGABRT, handler)


_kept_alive: list[Any] = []
"""Handlers that the system knows."""
