"""The output of a job on several processes: a part for each, which the first one puts together."""

import contextlib
import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.batch.writer import PROGRESS, Key, OutputError, Writer, progress_path

_AT_ONCE = 1024
"""Records that are in memory at the same time while parts are put together."""


class Record(NamedTuple):
    """Where a record lies in a part."""

    key: Key
    part: Path
    start: int
    size: int


def part_path(out: Path, index: int, num: int) -> Path:
    """The output of one process, beside the whole one's."""
    return out.with_name(f"{out.name}.part-{index}-of-{num}")


def part_header(header: Mapping[str, Any], index: int, num: int) -> dict[str, Any]:
    """The settings of a part: the job's, and whose part it is."""
    return {**header, "part": f"{index} of {num}"}


def check_parts(out: Path, num: int, resume: bool) -> None:
    """Refuses parts that this job would leave lying there.

    `num` is of its processes, 0 for a job that makes no parts.

    Raises:
        OutputError: parts are there, of another number of processes, or of a job that is not
            resumed.
    """
    pattern = f"{glob.escape(out.name)}.part-*-of-*"
    for path in sorted(out.parent.glob(pattern)):
        if path.name.endswith(PROGRESS):
            continue
        theirs = path.name.rpartition("-")[2]
        if theirs != str(num):
            raise OutputError(
                f"{path} is of a job with {theirs} processes; start as many, with --distributed "
                "and --resume, or take its parts away."
            )
        if not resume:
            raise OutputError(f"{path} is there already; resume that job with --resume.")


def put_together(writer: Writer, header: Mapping[str, Any], num: int) -> int:
    """Appends the records of all parts to the whole output, by line and sample; drops the parts.

    Returns:
        How many records were appended.

    Raises:
        OutputError: a part is not there, is damaged, or is still being written, or the whole output
            cannot be; all parts are then kept.
    """
    paths = [part_path(writer.path, index, num) for index in range(num)]
    found: list[Record] = []
    for index, path in enumerate(paths):
        if not path.is_file():
            raise OutputError(
                f"{path} is not to be seen from process 0: the output must lie in a folder that "
                "all processes share."
            )
        # Opened as its process does: what counts is what the progress beside it vouches for.
        with Writer(path, part_header(header, index, num), resume=True):
            found += _records_of(path)
    left = sorted(record for record in found if record.key not in writer.done)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in paths}
        for first in range(0, len(left), _AT_ONCE):
            records = []
            for record in left[first : first + _AT_ONCE]:
                files[record.part].seek(record.start)
                records.append(json.loads(files[record.part].read(record.size)))
            try:
                writer.append(records)
            except OutputError as error:
                raise OutputError(f"{error} All others are safe in the parts beside it.") from error
    for path in paths:
        path.unlink()
        progress_path(path).unlink()
    return len(left)


def _records_of(path: Path) -> list[Record]:
    found, start = [], 0
    with path.open("rb") as file:
        for line in file:
            record = json.loads(line)
            found.append(Record((record["line"], record["sample"]), path, start, len(line)))
            start += len(line)
    return found
