"""Joins the outputs of a job's shards into one file, in the order of the input."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxspec.batch.header import header_differences
from jaxspec.batch.settings import Shard, parse_shard
from jaxspec.batch.writer import (
    OutputError,
    Span,
    progress_path,
    read_contents,
    record_in,
    write_whole,
)
from jaxspec.checkpoint.files import as_path, parse_json
from jaxspec.core.checks import Natural, checked, shown


class _Part(NamedTuple):
    """The output of one shard, opened.

    Attributes:
        path: name of the output.
        file: the output.
        shard: the part of the job's rows that it answers.
        header: settings of the job, without the shard.
        spans: places of the records.
    """

    path: Path
    file: BinaryIO
    shard: Shard
    header: Mapping[str, Any]
    spans: list[Span]


def merge(out: str | Path, parts: Sequence[str | Path]) -> int:
    """Joins the outputs of all shards of a job; leaves them as they are.

    The records are those that one process would have written, sorted by line and sample. The output
    is written under a temporary name and then renamed, so it is whole or not there.

    Args:
        out: the new output.
        parts: one output for each shard, in any order.

    Returns:
        The number of records.

    Raises:
        OutputError: `out` is there already or cannot be written; a part is missing, given twice,
            not finished, changed, or of another job. Nothing is written then.

    Example:
        >>> import tempfile
        >>> from jaxspec.batch import Writer
        >>> folder = Path(tempfile.mkdtemp())
        >>> for shard in (Shard(1, 2), Shard(2, 2)):
        ...     header = {"num_rows": 2, "num_samples": 1, "shard": str(shard)}
        ...     with Writer(folder / f"{shard.index}.jsonl", header) as output:
        ...         output.append([{"line": shard.index, "sample": 0}])
        >>> merge(folder / "out.jsonl", [folder / "2.jsonl", folder / "1.jsonl"])
        2
    """
    out = as_path("out", out)
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise OutputError(f"parts: give a list of outputs, got {shown(parts)}.")
    paths = [as_path(f"parts[{index}]", part) for index, part in enumerate(parts)]
    if not paths:
        raise OutputError("parts: give the outputs of all shards, got none.")
    if out.exists():
        raise OutputError(f"{out} is there already; give another name.")
    if not out.parent.is_dir():
        raise OutputError(f"{out}: the output must be a file in a folder that exists.")
    with contextlib.ExitStack() as stack:
        opened = [_open(path, stack) for path in paths]
        _check_one_job(opened)
        _check_complete(opened)
        for part in opened:
            _check_finished(part)
        found = sorted(
            ((span, part.file) for part in opened for span in part.spans),
            key=lambda each: each[0].key,
        )
        write_whole(out, (record_in(file, span) for span, file in found))
    return len(found)


def _open(path: Path, stack: contextlib.ExitStack) -> _Part:
    """Opens a part for reading, and checks every record.

    Raises:
        OutputError: it is not the output of a job.
    """
    progress = progress_path(path)
    for each in (path, progress):
        if not each.is_file():
            raise OutputError(
                f"{each} is missing: a shard is the output of jaxspec batch --shard I/N, with its "
                f"{progress.name} next to it."
            )
    file = stack.enter_context(path.open("rb"))
    with progress.open("rb") as entries:
        contents = read_contents(path, file, entries)
    shard = None if contents is None else contents.header.get("shard")
    if contents is None or not isinstance(shard, str):
        raise OutputError(f"{progress} is damaged or not of jaxspec batch; decode the shard again.")
    header = {name: value for name, value in contents.header.items() if name != "shard"}
    try:
        return _Part(path, file, parse_shard(shard), header, contents.spans)
    except ValueError as error:
        raise OutputError(f"{progress}: {error}") from None


def _check_one_job(parts: Sequence[_Part]) -> None:
    """Refuses shards of different jobs."""
    first, *others = parts
    for part in others:
        ours = {**part.header, "number of shards": part.shard.num}
        different = header_differences({**first.header, "number of shards": first.shard.num}, ours)
        if different:
            raise OutputError(
                f"{part.path} is not of the same job as {first.path}: "
                f"{different.replace(' there and ', ' in the first and ')}. Merge the shards of "
                "one job."
            )


def _check_complete(parts: Sequence[_Part]) -> None:
    """Refuses a set of shards that is not each of them once."""
    num, counts = parts[0].shard.num, Counter(part.shard.index for part in parts)
    doubled = [index for index, count in sorted(counts.items()) if count > 1]
    if doubled:
        listed = _listed(doubled, len(doubled), num)
        raise OutputError(f"{listed} given more than once; give each once.")
    if len(counts) < num:  # however large that number
        missing = (index for index in range(1, num + 1) if index not in counts)
        listed = _listed(missing, num - len(counts), num)
        raise OutputError(f"{listed} missing; give the outputs of all shards.")


def _check_finished(part: _Part) -> None:
    """Refuses a shard that does not answer all of its rows.

    A row has either all of its samples or one record that says why there are none.
    """
    try:
        in_all, whole = (
            checked(name, part.header.get(name), Natural) for name in ("num_rows", "num_samples")
        )
    except ValueError as error:
        raise OutputError(f"{progress_path(part.path)} is not of a job: {error}") from None
    num_rows = len(part.shard.rows_of(range(in_all)))
    samples: dict[int, list[Span]] = defaultdict(list)
    for span in part.spans:
        samples[span.key[0]].append(span)
    finished = sum(
        len(spans) == whole or _says_why(record_in(part.file, spans[0]))
        for spans in samples.values()
    )
    if finished < num_rows:
        raise OutputError(
            f"{part.path} is not finished: {finished} of the {num_rows} rows of shard {part.shard} "
            "are there; give its command again with --resume."
        )


def _says_why(record: bytes) -> bool:
    """Returns whether a record says why its row has no samples."""
    try:
        value = parse_json(record)
    except ValueError:
        return False
    return isinstance(value, dict) and "error" in value


def _listed(indices: Iterable[int], count: int, num: int) -> str:
    """Names `count` shards as the subject of a sentence."""
    some = ", ".join(f"{index}/{num}" for index in islice(indices, 8))
    more = f" and {count - 8} more" if count > 8 else ""
    return f"shard {some} is" if count == 1 else f"shards {some}{more} are"
