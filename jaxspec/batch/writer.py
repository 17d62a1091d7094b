"""The output of a job: a file of records, and next to it a file that says how far the job is.

`OUT.jsonl.progress` holds a line with the job's header, then a line for each record: where the
record ends in the output, its checksum, and which row it answers. A record counts when its entry is
whole and agrees with the output. Anything after the last such record was cut off by the end of a
process; resuming the job removes it. A finished output may be put into the order of the input
(`Writer.put_in_order`); the progress file stays as it is, and vouches for that order too.
"""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxspec.batch.header import header_differences
from jaxspec.checkpoint.files import MOST_JSON, as_path, parse_json
from jaxspec.core.checks import checked, shown

Key = tuple[int, int]
"""Line of the input and number of the sample: what a record answers."""


def progress_path(out: Path) -> Path:
    """Returns the path of the progress file next to an output."""
    return out.with_name(out.name + ".progress")


class OutputError(ValueError):
    """An output that cannot be written, or must not be."""


class Output(Protocol):
    """A place for a job's records."""

    @property
    def done(self) -> set[Key]:
        """Records that need not be decoded any more."""
        ...

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keeps records; once it returns, the end of the process does not lose them."""
        ...


class Collector:
    """An `Output` in memory.

    Attributes:
        records: all records, in the order in which rows finished.
        done: line and sample of each.

    Example:
        >>> output = Collector()
        >>> output.append([{"line": 1, "sample": 0, "text": "one"}])
        >>> output.done
        {(1, 0)}
    """

    def __init__(self):
        self.records: list[Mapping[str, Any]] = []
        self.done: set[Key] = set()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Output`.

        Raises:
            OutputError: a record says not which row it answers.
        """
        done = {_key(record) for record in checked("records", records, Sequence)}
        self.records += records
        self.done |= done


class Span(NamedTuple):
    """Place of a record in its output.

    Attributes:
        key: line and sample that the record answers.
        start: offset of its first byte.
        end: offset behind its last byte, which is a line's end.
    """

    key: Key
    start: int
    end: int


class OutputContents(NamedTuple):
    """Everything that counts in an output.

    Attributes:
        header: settings of its job.
        spans: records, in the order in which they lie there.
        progress_end: length of the part of the progress file that counts.
    """

    header: Mapping[str, Any]
    spans: list[Span]
    progress_end: int

    @property
    def end(self) -> int:
        """Length of the part of the output that counts."""
        return self.spans[-1].end if self.spans else 0


def read_contents(path: Path, out: BinaryIO, progress: BinaryIO) -> OutputContents | None:
    """Reads what counts in an output and checks every record; changes nothing.

    Args:
        path: name of the output, for messages.
        out: the output, at its beginning.
        progress: its progress file, at its beginning.

    Returns:
        `None` if the progress file does not begin with a whole header.

    Raises:
        OutputError: a record is not the one that was written, or the progress file is no job's.
    """
    lines = iter(partial(progress.readline, MOST_JSON), b"")
    first = next(lines, b"")
    if not _is_whole(first):
        return None
    header = _said(path, 1, first)
    entries, start, progress_end, size = [], 0, len(first), _size_of(out)
    for number, line in enumerate(lines, start=2):
        if not _is_whole(line):
            break
        end, checksum, *key = _said(path, number, line, start)
        if end > size:  # the disk kept the entry and not its record
            break
        entries.append(_Entry((key[0], key[1]), end - start, checksum))
        start, progress_end = end, progress_end + len(line)
    spans, wrong = _spans(out, entries)
    if wrong is not None:
        spans, still_wrong = _spans(out, sorted(entries))  # see `Writer.put_in_order`
        if still_wrong is not None:
            raise OutputError(
                f"{path} was changed after it was written: record {wrong} is not the one that was "
                "written. Give another name."
            )
    return OutputContents(header, spans, progress_end)


def _said(path: Path, number: int, line: bytes, start: int = 0) -> Any:
    """Returns what a whole line of a progress file says: first the header, then entries.

    Raises:
        OutputError: something else under the right checksum, or a record that ends before `start`.
    """
    try:
        value = parse_json(line[9:])
    except ValueError:
        value = None
    if number == 1:
        good = isinstance(value, dict)
    else:
        good = isinstance(value, list) and list(map(type, value)) == 4 * [int] and value[0] >= start
    if not good:
        raise OutputError(
            f"{progress_path(path)}:{number}: no job writes such a line. Give another name for the "
            f"output than {path.name}."
        )
    return value


class _Entry(NamedTuple):
    """An entry of a progress file, for one record."""

    key: Key
    size: int
    checksum: int


def _spans(out: BinaryIO, entries: Sequence[_Entry]) -> tuple[list[Span], int | None]:
    """Returns the places of records that lie in this order, and the number of one that does not."""
    spans, start = [], 0
    out.seek(0)
    for number, entry in enumerate(entries, start=1):
        if zlib.crc32(out.read(entry.size)) != entry.checksum:
            return spans, number
        spans.append(Span(entry.key, start, start + entry.size))
        start += entry.size
    return spans, None


class Writer:
    """An `Output` in a file, as a context manager. It never overwrites a file.

    A job that fails before its first record leaves no file behind, so its name is free.

    Args:
        path: path of the output.
        header: settings of the job, from `job_header`, or any plain JSON.
        resume: continue the output of an earlier process of the same job. Without an output there,
            the job begins.

    Raises:
        OutputError: there is an output and `resume` is False, or it belongs to a job with another
            header, or was changed, or another process writes it, or it cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "out.jsonl"
        >>> with Writer(path, {"seed": 0}) as output:
        ...     output.append([{"line": 1, "sample": 0, "text": "one"}])
        >>> with Writer(path, {"seed": 0}, resume=True) as output:
        ...     output.done
        {(1, 0)}
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], resume: bool = False):
        self.path = as_path("path", path)
        checked("header", header, Mapping)
        try:
            plain = json.loads(json.dumps(header, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise OutputError(f"header must be plain JSON, as of job_header: {error}.") from None
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
                f"{path} has no {self.progress_path.name} next to it, so it is not the output of a "
                "job that can be resumed; give another name."
            )
        self._is_new = not there
        self._end = self._progress_end = 0
        self._files: dict[Path, BinaryIO] = {}
        try:
            # Whoever creates the progress file has begun the job.
            new = os.O_EXCL if self._is_new else 0
            self._progress = self._open(self.progress_path, new)
            self._lock()
            self._out = self._open(self.path)
            self._begin(plain)
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
        # The progress file last: its lock is for both.
        for file in reversed(self._files.values()):
            with contextlib.suppress(OSError):
                file.close()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Output`.

        Raises:
            OutputError: the records could not be written, or one is none that JSON can hold; those
                before them are safe.
        """
        if not checked("records", records, Sequence):
            return
        lines, entries, end = [], [], self._end
        for record in records:
            key, line = _key(record), _line_of(record)
            end += len(line)
            lines.append(line)
            entries.append(_entry([end, zlib.crc32(line), *key]))
        try:
            # The record first: an entry vouches for a record that is in the output.
            _write(self._out, b"".join(lines))
            _write(self._progress, b"".join(entries))
        except OSError as error:
            # Resuming the job removes whatever stays after all.
            with contextlib.suppress(OSError):
                self._cut_back()
            raise OutputError(
                f"{self.path}: {_reason(error)}; {len(self.done)} records are safe there. Make "
                "room, then give the same command with --resume."
            ) from error
        self._end = end
        self._progress_end += sum(map(len, entries))
        self.done |= {_key(record) for record in records}

    def put_in_order(self) -> None:
        """Puts the records of a finished job into the order of the input, by line and sample.

        The output is written anew under a temporary name, which is then renamed: at any moment one
        of the two is there as a whole, and `--resume` takes either. No record can be appended then.

        Raises:
            OutputError: it cannot be written; the output is as it was.
        """
        with self.progress_path.open("rb") as progress:
            self._out.seek(0)
            contents = read_contents(self.path, self._out, progress)
        assert contents is not None, "this writer has written the header"
        spans = sorted(contents.spans, key=lambda span: span.key)
        self._out.close()

        def records() -> Iterator[bytes]:
            with self.path.open("rb") as out:
                for span in spans:
                    yield record_in(out, span)

        if spans != contents.spans:
            write_whole(self.path, records())

    def _abandon(self) -> None:
        """Ends writing, and removes files that were begun here and hold no record."""
        if self._is_new and not self._end:
            # Still locked: no other process has begun to write them.
            for path in reversed(self._files):
                with contextlib.suppress(OSError):
                    path.unlink()
        self.close()

    def _open(self, path: Path, flags: int = 0) -> BinaryIO:
        """Opens for updating and never truncates: the file may belong to another job."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
            self._files[path] = os.fdopen(descriptor, "r+b", buffering=0)
        except FileExistsError as error:
            raise OutputError(
                f"{self.path}: another process has begun it; give another name."
            ) from error
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written: {error.strerror}. Give another place for the output."
            ) from error
        return self._files[path]

    def _lock(self) -> None:
        """Locks both files, by the progress file; the end of the process frees them.

        Raises:
            OutputError: another process has the lock, or had it and removed the file.
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
            self._is_new = False  # the other process's now
            raise OutputError(f"{self.path}: another process is writing it.") from error
        if not os.fstat(self._progress.fileno()).st_nlink:
            raise OutputError(
                f"{self.path}: another process was writing it and removed it; try again."
            )

    def _begin(self, header: Mapping[str, Any]) -> None:
        """Reads what an earlier process left, or writes the header."""
        entry = _entry(header)
        begun = self._progress.read(len(entry) + 1)
        self._progress.seek(0)
        contents = read_contents(self.path, self._out, self._progress)
        if contents is not None:
            different = header_differences(contents.header, header)
            if different:
                raise OutputError(
                    f"{self.path} is of another job: {different}. Give that job's settings, "
                    "or another name."
                )
            self.done = {span.key for span in contents.spans}
            self._end, self._progress_end = contents.end, contents.progress_end
        # A process that ended this early had written a part of this line and no record.
        elif _size_of(self._out) or not entry.startswith(begun):
            raise OutputError(
                f"{self.progress_path} is damaged or no job's, so how far the job came is not "
                "known; give another name."
            )
        try:
            self._cut_back()
            if contents is None:
                _write(self._progress, entry)
                self._progress_end = len(entry)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _cut_back(self) -> None:
        """Removes whatever follows the last record that counts."""
        for file, end in ((self._out, self._end), (self._progress, self._progress_end)):
            file.truncate(end)
            file.seek(end)


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Writes a new file under a temporary name, then renames it; a failure leaves no file.

    Raises:
        OutputError: it cannot be written.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise _cannot_write(path, error) from error


def record_in(file: BinaryIO, span: Span) -> bytes:
    """Returns the bytes of a record."""
    file.seek(span.start)
    return file.read(span.end - span.start)


def _line_of(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half a character, which JSON can hold and UTF-8 cannot
        return json.dumps(record).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise OutputError(
            f"records: that of line {record['line']}, sample {record['sample']} is none that JSON "
            f"can hold ({error}); give plain values and finite numbers."
        ) from None


def _size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    os.fsync(file.fileno())


def _entry(value: Any) -> bytes:
    """Returns a line that shows whether it is whole: a checksum, then JSON."""
    text = json.dumps(value).encode()
    return b"%08x " % zlib.crc32(text) + text + b"\n"


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n") and line[:8] == b"%08x" % zlib.crc32(line[9:-1])


def _key(record: Mapping[str, Any]) -> Key:
    """Returns what a record answers.

    Raises:
        OutputError: it does not say so.
    """
    known = isinstance(record, Mapping)
    line, sample = (record.get(name) if known else None for name in ("line", "sample"))
    if not (isinstance(line, int) and isinstance(sample, int)):
        raise OutputError(
            "records: each must be a dictionary with the whole numbers `line` and `sample`, got "
            f"{shown(record)}."
        )
    return line, sample


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path}: {_reason(error)}. Make room, or give another place.")


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return f"cannot be written ({error.strerror or error})"
