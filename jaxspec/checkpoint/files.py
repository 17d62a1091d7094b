"""Reading settings and replacing files: what every checkpoint format needs from the file system."""

import contextlib
import gzip
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from jaxspec.core.checks import FileName, Requirement, checked, shown

_STAGING = ".saving-"
_ORIGINALS = ".originals"
_JOURNAL = ".journal.json"


MOST_JSON = 1 << 24
"""Bytes of a file of settings, and of a line of a file of rows. Objects take fifty times theirs."""
MOST_TEXT = 1 << 28
"""Bytes of a file that is read as one text."""
MOST_UNPACKED = 100
"""Bytes that one byte of a gzipped file may unpack to. Rows of JSON unpack to 3 to 20 times."""
DEEPEST = 100
"""Levels of JSON: lists and objects within each other."""

_PIECE = 1 << 18  # bytes: a reader makes room for all that it is asked for, at once
_UNCOUNTED = 1 << 20  # bytes that any gzipped file may unpack to


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or written, as asked."""


def given(name: str, value: Any, hint: Any) -> Any:
    """Returns an argument, or an entry of a file, as `checked` does.

    Raises:
        CheckpointError: naming it, what it must be, and its value.

    Example:
        >>> given("max_positions", "100", int)
        Traceback (most recent call last):
            ...
        jaxspec.checkpoint.files.CheckpointError: max_positions must be a whole number, got '100'.
    """
    try:
        return checked(name, value, hint)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _is_path(text: str) -> bool:
    try:
        parts = [os.fsencode(part) for part in Path(text).parts]
    except UnicodeEncodeError:
        return False
    return 0 < len(text) <= 4096 and "\0" not in text and max(map(len, parts), default=0) < 256


_PATH = Annotated[
    FileName,
    Requirement("a path: not empty, without NUL, names of at most 255 bytes", _is_path),
]


def as_path(name: str, value: Any) -> Path:
    """Returns the path that an argument gives, with the home folder in place of `~`.

    Raises:
        CheckpointError: naming the argument, if that can be no path.

    Example:
        >>> as_path("folder", "a/b").name
        'b'
        >>> as_path("folder", None)
        Traceback (most recent call last):
            ...
        jaxspec.checkpoint.files.CheckpointError: folder must be a text or a path, got None.
    """
    text = given(name, value, _PATH)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # `~name` of nobody
        raise CheckpointError(f"{name} must be a path, got {shown(text)}: {error}") from None


def listed(problems: Sequence[str], most: int = 10) -> str:
    """Returns the first problems, each in a line of its own, and how many more there are."""
    lines = [f"\n  {problem:.300}" for problem in problems[:most]]
    more = len(problems) - most
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")


def parse_json(text: str | bytes) -> Any:
    """Returns what a JSON text says.

    Raises:
        ValueError: it is not JSON, or lists and objects lie deeper than `DEEPEST` in each other.

    Example:
        >>> parse_json('{"layers": [1, 2]}')
        {'layers': [1, 2]}
    """
    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        level = [value]
        for _ in range(DEEPEST + 1):
            level = [
                part
                for whole in level
                if isinstance(whole, (list, dict))
                for part in (whole.values() if isinstance(whole, dict) else whole)
            ]
            if not level:
                return value
    raise ValueError(f"more than {DEEPEST} lists or objects within each other")


def open_file(path: Path) -> io.BufferedReader:
    """Opens a file to read its bytes.

    Raises:
        CheckpointError: it is a device, a pipe or a socket, which need not have an end.
        OSError: it cannot be opened.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"{path} is a device or a pipe: write what it gives into a file.")
    return path.open("rb")


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """Reads a file, unpacked if its name ends in `.gz`.

    Raises:
        CheckpointError: it has more than `most` bytes, is no plain file, or cannot be unpacked.
        OSError: it cannot be opened.
    """
    pieces, size = [], 0
    for piece in _pieces(path):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise CheckpointError(
                f"{path} is larger than {most / 2**20:g} MiB, the most that is read of such a file."
            )
    return b"".join(pieces)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Reads a file of UTF-8 text. Line ends become single line feeds.

    Raises:
        CheckpointError: it is not UTF-8, or as for `read_bytes`.
        OSError: it cannot be opened.
    """
    try:
        text = read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise CheckpointError(f"{path}:{line}: not UTF-8 text ({error.reason}).") from None
    return with_line_feeds(text)


def with_line_feeds(text: str) -> str:
    """Returns a text with single line feeds for line ends of all kinds."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    r"""Yields the lines of a file, unpacked if its name ends in `.gz`, with numbers from 1.

    Raises:
        CheckpointError: a line has more than `MOST_JSON` bytes, the file is no plain file, or it
            cannot be unpacked.
        OSError: it cannot be opened.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> path.write_text("[1]\n[2]")
        7
        >>> list(read_lines(path))
        [(1, b'[1]\n'), (2, b'[2]')]
    """
    number, rest = 0, b""
    for piece in _pieces(path):
        end = piece.rfind(b"\n") + 1
        for line in io.BytesIO(rest + piece[:end]) if end else ():
            number += 1
            yield number, _bounded(line, f"{path}:{number}")
        rest = _bounded(piece[end:] if end else rest + piece, f"{path}:{number + 1}")
    if rest:
        yield number + 1, rest


def _bounded(line: bytes, place: str) -> bytes:
    if len(line) > MOST_JSON:
        raise CheckpointError(
            f"{place}: a line of more than {MOST_JSON / 2**20:g} MiB: give each row its own line."
        )
    return line


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields what a file holds in pieces; a gzipped file may not unpack to too much."""
    with open_file(path) as file:
        stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        size = 0
        try:
            while piece := stream.read(_PIECE):
                size += len(piece)
                if stream is not file and size > MOST_UNPACKED * file.tell() + _UNCOUNTED:
                    raise CheckpointError(
                        f"{path} unpacks to more than {MOST_UNPACKED} times its size: if that is "
                        "meant, unpack it and give the plain file."
                    )
                yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CheckpointError(
                f"{path} is cut off or damaged, the gzip stream is broken ({error}): fetch it "
                "again."
            ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
        CheckpointError: the file is missing or too large, is not JSON, or holds something else than
            an object.
    """
    try:
        if not path.is_file():
            missing = not path.exists()
            raise CheckpointError(f"{path} {'does not exist' if missing else 'is not a file'}.")
        value = parse_json(read_text(path, MOST_JSON))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): it is damaged or incomplete, fetch it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes indented JSON, keys in the given order."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_space(folder: Path, needed: int) -> None:
    """Refuses a folder on a disk that has no room for so many bytes more.

    Raises:
        CheckpointError: with both figures.

    Example:
        >>> check_space(Path(tempfile.gettempdir()), 0)
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"folder: {needed / 1e9:.2f} GB are to be written into {folder}, and its disk has "
            f"{free / 1e9:.2f} GB left: remove something there, or give a folder on another disk."
        )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names a file or folder in errors that do not say where, such as those of a full disk.

    Example:
        >>> with naming(Path("out")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        OSError: [Errno 28] No space left on device: 'out'
    """
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing_files(folder: Path, obsolete: Sequence[str] = ()) -> Iterator[Path]:
    """Collects files in a temporary place, then moves them into `folder` when the block succeeds.

    Files of `folder` that are not replaced stay, except those that match a pattern of `obsolete`.

    Guaranteed: if the block or the moving raises, whatever it is, `folder` is left as it was. If
    the process is killed, or undoing the moves fails as well, the old files are still there, if
    need be in the temporary folder: the next `replacing_files` or `recover_files` puts them back,
    and until then `check_whole` raises. One process at a time may write into a folder.

    Yields:
        The temporary folder to write into. Whole sub-folders may be written as well.

    Raises:
        CheckpointError: `folder` is a file.
    """
    existed = folder.is_dir()
    if folder.exists() and not existed:
        raise CheckpointError(f"{folder} must be a folder to save into, but it is a file.")
    folder.mkdir(parents=True, exist_ok=True)
    recover_files(folder)
    # Inside the folder: renames are only atomic within one file system.
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
    try:
        with naming(folder):
            yield staging
            _swap(staging, obsolete)
    except BaseException:
        # If this raises too, the originals in the temporary folder stay for `recover_files`.
        _undo(staging)
        shutil.rmtree(staging, ignore_errors=True)
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(staging, ignore_errors=True)


def recover_files(folder: str | Path) -> None:
    """Puts back what a killed `replacing_files` had moved away, and clears what it left.

    Example:
        >>> from jaxspec.checkpoint import recover_files
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.mkdir(f"{folder}/.saving-1234")  # A save was killed here.
        ...     recover_files(folder)
        ...     os.listdir(folder)
        []
    """
    for staging in as_path("folder", folder).glob(f"{_STAGING}*"):
        _undo(staging)
        shutil.rmtree(staging, ignore_errors=True)


def check_whole(folder: Path) -> None:
    """Refuses a folder in which files are being replaced, or were when the process was killed.

    Raises:
        CheckpointError: it may hold new files next to old ones.
    """
    if any(folder.glob(f"{_STAGING}*/{_JOURNAL}")):
        raise CheckpointError(
            f"{folder} holds a save that is not complete. If no process is saving there, it was "
            "killed: save into the folder again, or get back what it held before with "
            f"jaxspec.checkpoint.recover_files({str(folder)!r})."
        )


def _swap(staging: Path, obsolete: Sequence[str]) -> None:
    folder, originals, journal = staging.parent, staging / _ORIGINALS, staging / _JOURNAL
    fresh = sorted(staging.iterdir())
    for path in fresh:
        _flush(path)
    stale = {path.name for pattern in obsolete for path in folder.glob(pattern)}
    names = {path.name for path in fresh}
    old = sorted(name for name in names | stale if os.path.lexists(folder / name))
    originals.mkdir()
    # The journal lasts from before the first move to after the last: while it is there, the
    # originals count; when it is gone, the new files do.
    draft = journal.with_suffix(".draft")
    write_json(draft, {"added": sorted(names - set(old))})
    _flush(draft)
    os.replace(draft, journal)
    for name in old:
        os.replace(folder / name, originals / name)
    for path in fresh:
        os.replace(path, folder / path.name)
    journal.unlink()


def _undo(staging: Path) -> None:
    """Does nothing unless a swap began and did not end. May itself be interrupted and repeated."""
    folder, journal = staging.parent, staging / _JOURNAL
    if not journal.exists():
        return
    for name in _added(journal):
        _remove(folder / name)
    for original in sorted((staging / _ORIGINALS).iterdir()):
        _remove(folder / original.name)
        os.replace(original, folder / original.name)
    journal.unlink()


def _added(journal: Path) -> list[str]:
    """Returns the names that a swap added; a journal may be damaged, or somebody else's."""
    names = read_json(journal).get("added")
    if not isinstance(names, list) or not all(is_file_name(name) for name in names):
        raise CheckpointError(
            f"{journal}: added must be a list of file names. This is no journal of a save: move "
            f"{journal.parent} away; the files that it replaced are in {_ORIGINALS} within it."
        )
    return names


def is_file_name(name: Any) -> bool:
    """Returns whether a text names a file within a folder, and nothing outside.

    Example:
        >>> is_file_name("model.json"), is_file_name("../model.json"), is_file_name("..")
        (True, False, False)
    """
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not {"/", "\\", "\0"}.intersection(name)
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    # A rename that reaches the disk before the data would leave an empty file after a power cut.
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
