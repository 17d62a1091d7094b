"""Kills and full disks at all moments of an output: nothing is lost, doubled or changed."""

import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.batch import OutputError, Shard, Writer, merge, writer
from tests.batch.conftest import files_up_to

HEADER = {"model": "m", "config": {"long": "x" * 300}, "num_rows": 4, "num_samples": 1}
LINES = range(1, 5)
SHARDS = (Shard(1, 2), Shard(2, 2))


def record(line: int) -> dict:
    return {"line": line, "sample": 0, "text": f"é {line} " * 20}


def decode_on_two(out: Path) -> Iterator[int]:
    """Writes what two processes write, and merges it; yields each line that is decoded."""
    parts = [out.with_name(f"part-{shard.index}.jsonl") for shard in SHARDS]
    for shard, path in zip(SHARDS, parts, strict=True):
        with Writer(path, {**HEADER, "shard": str(shard)}, resume=True) as part:
            for line in shard.rows_of(LINES):
                if (line, 0) not in part.done:
                    part.append([record(line)])
                    yield line
    if not out.exists():
        merge(out, parts)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    """The files of a job that nothing befell."""
    folder = tmp_path_factory.mktemp("whole")
    assert sorted(decode_on_two(folder / "out.jsonl")) == list(LINES)
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [record(line) for line in LINES]
    return files_in(folder)


CHANGING = {"open", "write", "writelines", "truncate", "unlink", "replace"}
"""Calls of the system after which files may be others than before."""


def decode_until(out: Path, moment: int) -> None:
    """Is killed before a call that changes files, after `moment` others.

    Whatever is written is written in two halves.
    """
    count, write = 0, writer._write

    def write_halves(file, data):
        write(file, data[: len(data) // 2])
        write(file, data[len(data) // 2 :])

    def watch(_, event, function):
        nonlocal count
        if event == "c_call" and function.__name__ in CHANGING:
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    writer._write = write_halves
    sys.setprofile(watch)
    list(decode_on_two(out))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows has not")
def test_killed_anywhere_from_the_header_to_the_merge(expected, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    left = set()
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        process = context.Process(target=decode_until, args=(folder / "out.jsonl", moment))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        left.add(frozenset(files_in(folder).items()))
        list(decode_on_two(folder / "out.jsonl"))
        assert files_in(folder) == expected
    # Each record leaves two states, a half and the whole, and so does its entry after it.
    assert len(left) > 4 * len(LINES), "calls that change files were not seen"


def test_full_at_any_byte_from_the_header_to_the_merge(expected, tmp_path):
    """Rows decoded before are not decoded again."""
    size = max(len(data) for data in expected.values())
    decoded = set()
    for limit in range(0, size, 29):
        folder = tmp_path / str(limit)
        folder.mkdir()
        before = []
        said = r"cannot be written \(File too large\).* Make room"
        with files_up_to(limit), pytest.raises(OutputError, match=said) as raised:
            before.extend(decode_on_two(folder / "out.jsonl"))
        merging = f"{folder / 'out.jsonl'}: cannot" in str(raised.value)
        assert merging == (len(before) == len(LINES))
        assert not list(folder.glob("out.jsonl*"))
        after = list(decode_on_two(folder / "out.jsonl"))
        assert sorted(before + after) == list(LINES)
        assert files_in(folder) == expected
        decoded.add(len(before))
    assert {0, len(LINES)} < decoded, "only at its beginning or at its end"
