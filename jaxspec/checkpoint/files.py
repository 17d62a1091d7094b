"""Reading settings and replacing files: what every checkpoint format needs from the file system."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or written, as asked."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}): it is damaged or incomplete, fetch it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes indented JSON, keys in the given order."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replacing_files(folder: Path, obsolete: Sequence[str] = ()) -> Iterator[Path]:
    """Collects files in a temporary place, then moves them into `folder` when the block succeeds.

    If the block raises, or the process dies in it, `folder` is left as it was. Files of `folder`
    that are not replaced stay, except those that match a pattern of `obsolete`.

    Yields:
        The temporary folder to write into. Whole sub-folders may be written as well.
    """
    existed = folder.is_dir()
    if folder.exists() and not existed:
        raise CheckpointError(f"{folder} must be a folder to save into, but it is a file.")
    folder.mkdir(parents=True, exist_ok=True)
    for left_by_killed_process in folder.glob(".saving-*"):
        shutil.rmtree(left_by_killed_process, ignore_errors=True)
    # Inside the folder: renames are only atomic within one file system.
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield staging
        fresh = sorted(staging.iterdir())
        for path in fresh:
            _flush(path)
        stale = {path for pattern in obsolete for path in folder.glob(pattern)}
        for path in fresh:
            _replace(path, folder / path.name, staging)
        for path in stale - {folder / path.name for path in fresh}:
            path.rename(staging / f".replaced-{path.name}")
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(staging, ignore_errors=True)


def _flush(path: Path) -> None:
    # A rename that reaches the disk before the data would leave an empty file after a power cut.
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _replace(source: Path, target: Path, staging: Path) -> None:
    if target.is_dir():
        target.rename(staging / f".replaced-{target.name}")
    os.replace(source, target)
