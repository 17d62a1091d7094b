"""The output of a job: one line per record, appended, and beside it how far the job has come.

`OUT.jsonl.progress` holds a line of settings, then for each record where it ends in the output and
its checksum. A record counts when its line there is whole and agrees with the output; whatever
follows the last such record was cut off by the end of a process, and is cut away when the job is
taken up again.
"""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Protocol

Key = tuple[int, int]
"""Line of the input and number of the sample: what a record answers."""
PROGRESS = ".progress"


def progress_path(out: Path) -> Path:
    """Where it lies beside the output how far the job has come."""
    return out.with_name(out.name + PROGRESS)


class OutputError(ValueError):
    """An output that cannot be written, or must not be."""


class Output(Protocol):
    """Where a job's records go."""

    @property
    def done(self) -> set[Key]:
        """What need not be decoded any more."""
        ...

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keeps records; once it returns, the end of the process does not lose them."""
        ...


class Collector:
    """An `Output` in memory."""

    def __init__(self):
        self.records: list[Mapping[str, Any]] = []
        self.done: set[Key] = set()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Output`."""
        self.records += records
        self.done |= {_key(record) for record in records}


class Writer:
    """An `Output` in a file, as a context manager. Nothing that is there is ever overwritten.

    A job that fails before its first record leaves no file behind, so that its name is free.

    Args:
        path: of the output.
        header: the job's settings, from `job_header`, or any plain JSON.
        resume: take up what an earlier process of the same job left. Without an output there,
            the job begins.

    Raises:
        OutputError: there is an output and `resume` is False, or it is of a job with another
            header, or was changed, or another process writes it, or it cannot be written.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], resume: bool = False):
        self.path = Path(path)
        self.progress_path = progress_path(self.path)
        self.done: set[Key] = set()
        there = [p for p in (self.path, self.progress_path) if p.exists()]
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise OutputError(f"{path}: the output must be a file in a folder that exists.")
        if there and not resume:
            raise OutputError(
                f"{there[0]} is there already; resume that job with --resume, or give another name."
            )
        if there == [self.path] and self.path.stat().st_size:
            raise OutputError(
                f"{path} has no {self.progress_path.name} beside it, so it is not the output of a "
                "job that can be resumed; give another name."
            )
        self._files: dict[Path, BinaryIO] = {}
        self._is_new, self._end, self._entries_end = False, 0, 0
        try:
            self._progress = self._opened(self.progress_path)
            self._lock()
            # From here on nobody else writes either file, or takes it away.
            self._is_new = not there and not _size_of(self._progress)
            if not (resume or self._is_new):
                raise OutputError(f"{path}: another process has begun it; give another name.")
            self._out = self._opened(self.path)
            self._begin(json.loads(json.dumps(header)))
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def close(self) -> None:
        """Ends writing; records that were appended are safe without it."""
        # The progress last, as its lock is for both.
        for file in reversed(self._files.values()):
            with contextlib.suppress(OSError):
                file.close()

    def _abandon(self) -> None:
        """Ends writing; files that were begun here and hold no record go."""
        if self._is_new and not self._end:
            # While they are locked: nobody else has begun to write them.
            for path in reversed(self._files):
                with contextlib.suppress(OSError):
                    path.unlink()
        self.close()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Output`.

        Raises:
            OutputError: the records could not be written; those before them are safe.
        """
        if not records:
            return
        lines, entries, end = [], [], self._end
        for record in records:
            line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
            end += len(line)
            lines.append(line)
            entries.append(_entry([end, zlib.crc32(line), *_key(record)]))
        try:
            # The record first: an entry vouches for what is in the output.
            _write(self._out, b"".join(lines))
            _write(self._progress, b"".join(entries))
        except OSError as error:
            # What stays after all is cut away when the job is taken up again.
            with contextlib.suppress(OSError):
                self._cut_back()
            raise OutputError(
                f"{self.path}: {_reason(error)}; {len(self.done)} records are safe there. Make "
                "room, then give the same command with --resume."
            ) from error
        self._end = end
        self._entries_end += sum(map(len, entries))
        self.done |= {_key(record) for record in records}

    def _opened(self, path: Path) -> BinaryIO:
        """For updating, never truncated: what is there may be another job's."""
        try:
            self._files[path] = _open(path)
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written: {error.strerror}. Give another place for the output."
            ) from error
        return self._files[path]

    def _lock(self) -> None:
        """Locks what lies at the path of the progress, not what another one took away from there.

        Raises:
            OutputError: another process has the lock, or had it until now.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._progress, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return  # a file system without locks
            raise OutputError(f"{self.path}: another process is writing it.") from error
        try:
            in_place = os.path.samestat(
                os.fstat(self._progress.fileno()), self.progress_path.stat()
            )
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise OutputError(
                f"{self.path}: another process was writing it and took it away; try again."
            )

    def _begin(self, header: Mapping[str, Any]) -> None:
        lines = self._progress.read().splitlines(keepends=True)
        if not lines or not _is_whole(lines[0]):
            entry = _entry(header)
            # A process that ended this early had written a part of this line and no record.
            if _size_of(self._out) or not entry.startswith(b"".join(lines)):
                raise OutputError(
                    f"{self.progress_path} is damaged or no job's, so how far the job came is not "
                    "known; give another name."
                )
            with self._said():
                self._cut_back()
                _write(self._progress, entry)
            self._entries_end = self._progress.tell()
            return
        self._check_header(json.loads(lines[0][9:]), header)
        self._entries_end = len(lines[0])
        for line in lines[1:]:
            if not self._take(line):
                break
        with self._said():
            self._cut_back()

    def _check_header(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        different = differences(theirs, ours)
        if different:
            raise OutputError(
                f"{self.path} is of another job: {different}. Give that job's settings, "
                "or another name."
            )

    def _take(self, line: bytes) -> bool:
        """Counts one entry in; False where the job came no further."""
        if not _is_whole(line):
            return False
        end, checksum, *key = json.loads(line[9:])
        if end > _size_of(self._out):  # the disk kept the entry and not its record
            return False
        record = self._out.read(end - self._end)
        if zlib.crc32(record) != checksum:
            raise OutputError(
                f"{self.path} was changed after it was written: record {len(self.done) + 1} is not "
                "what was put there. Give another name."
            )
        self._end, self._entries_end = end, self._entries_end + len(line)
        self.done.add((key[0], key[1]))
        return True

    def _cut_back(self) -> None:
        """Takes away what follows the last record that counts."""
        for file, end in ((self._out, self._end), (self._progress, self._entries_end)):
            file.truncate(end)
            file.seek(end)

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{self.path}: {_reason(error)}. Make room, or give another place."
            ) from error


def version_in_use() -> str:
    """Of this package, as headers and processes compare it."""
    try:
        return version("jaxspec")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], here: str = "here") -> str:
    """What two headers say otherwise, in words; none if they are the same."""
    pairs = {name: (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    for name, (there, own) in list(pairs.items()):
        if isinstance(there, Mapping) and isinstance(own, Mapping):
            del pairs[name]
            inner = {**there, **own}
            pairs |= {f"{name}.{key}": (there.get(key), own.get(key)) for key in inner}
    return "; ".join(
        f"{name} is {there!s:.200} there and {own!s:.200} {here}"
        for name, (there, own) in pairs.items()
        if there != own
    )


def _open(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    os.fsync(file.fileno())


def _entry(value: Any) -> bytes:
    """A line that shows whether it is whole: a checksum, then JSON."""
    text = json.dumps(value).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n") and line[:8] == b"%08x" % zlib.crc32(line[9:-1])


def _key(record: Mapping[str, Any]) -> Key:
    return record["line"], record["sample"]


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return f"cannot be written ({error.strerror or error})"
