"""An output loses, doubles and overwrites nothing."""

import errno
import json
import math
import zlib

import pytest

from jaxspec.batch import Collector, OutputError, Writer
from jaxspec.batch import writer as writer_module

HEADER = {"model": "m", "config": {"long": "x" * 300, "top_k": "0"}, "seed": 0}


def record(line: int, sample: int = 0) -> dict:
    return {"line": line, "sample": sample, "text": f"é {line}" * line}


def records_in(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def test_what_is_appended_is_there_and_is_not_done_again(path):
    with Writer(path, HEADER) as writer:
        writer.append([record(1), record(2)])
        assert writer.done == {(1, 0), (2, 0)}
    with Writer(path, HEADER, resume=True) as writer:
        assert writer.done == {(1, 0), (2, 0)}
        writer.append([record(3, sample=1)])
    assert records_in(path) == [record(1), record(2), record(3, 1)]


def test_a_collector_has_the_same_face():
    collector = Collector()
    collector.append([record(1)])
    assert (collector.done, collector.records) == ({(1, 0)}, [record(1)])


@pytest.mark.parametrize("part", ["", ".progress"])
def test_cut_anywhere_it_keeps_what_is_whole_and_goes_on(path, part, tmp_path):
    """A process may end after any byte of either file: the output first, its progress second."""
    with Writer(path, HEADER) as writer:
        writer.append([record(1)])
        writer.append([record(2), record(3)])
    out = path.read_bytes()
    progress_path = path.with_name(path.name + ".progress")
    progress = progress_path.read_bytes()
    header_end = progress.index(b"\n") + 1
    cut = out if part == "" else progress
    for end in range(header_end if part else 0, len(cut) + 1, 3):
        path.write_bytes(out[:end] if part == "" else out)
        progress_path.write_bytes(progress if part == "" else progress[:end])
        with Writer(path, HEADER, resume=True) as writer:
            done = sorted(writer.done)
            assert done == [(line, 0) for line in range(1, len(done) + 1)]
            writer.append([record(line) for line in range(1, 4) if (line, 0) not in done])
        assert records_in(path) == [record(1), record(2), record(3)]


def test_cut_within_its_header_it_begins_again(path):
    with Writer(path, HEADER):
        pass
    progress_path = path.with_name(path.name + ".progress")
    whole = progress_path.read_bytes()
    for end in range(len(whole)):
        progress_path.write_bytes(whole[:end])
        with Writer(path, HEADER, resume=True) as writer:
            assert not writer.done
        assert progress_path.read_bytes() == whole


def refused(path, match, header=HEADER, resume=True):
    before = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    with pytest.raises(OutputError, match=match):
        Writer(path, header, resume)
    assert before == {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


def test_what_is_not_this_jobs_is_refused_and_left_alone(path):
    path.write_text("mine\n")
    refused(path, "is there already", resume=False)
    refused(path, "not the output of a job")
    path.unlink()
    with Writer(path, HEADER) as writer:
        writer.append([record(1), record(2)])
    refused(path, "is there already.*--resume", resume=False)
    refused(path, "another job: seed is 0 there and 1 here", {**HEADER, "seed": 1})
    refused(path, "another job: extra is None there", {**HEADER, "extra": 2})
    other = {**HEADER, "config": {**HEADER["config"], "top_k": "7"}}
    refused(path, "another job: config.top_k is 0 there and 7 here. Give", other)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\\u00e9", b"\\u00e8").replace("é".encode(), "è".encode(), 1))
    refused(path, "changed after it was written: record 1")


@pytest.mark.parametrize(
    ("name", "header", "records", "message"),
    [
        (None, HEADER, [], "path must be a text or a path, got None"),
        ("a\0", HEADER, [], "path must be a path: not empty, without NUL"),
        ("a", 5, [], "header must be of type Mapping, got 5"),
        ("a", {"a": object()}, [], "header must be plain JSON"),
        ("a", HEADER, None, "records must be of type Sequence, got None"),
        ("a", HEADER, [None], "records: each must be a dictionary .*, got None"),
        ("a", HEADER, [{}], "records: each must be a dictionary .*, got {}"),
        ("a", HEADER, [{**record(1), "x": math.inf}], "records: that of line 1, sample 0 is none"),
    ],
)
def test_what_is_no_output_and_no_record_is_refused(name, header, records, message, tmp_path):
    path = tmp_path / name if name == "a" else name
    with pytest.raises(ValueError, match=message), Writer(path, header) as writer:
        writer.append(records)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("foreign", [b'"a prompt"\n', b"no end of line"])
def test_a_file_that_only_has_the_name_of_progress_is_left_alone(path, foreign):
    path.with_name(path.name + ".progress").write_bytes(foreign)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(OutputError, match="no job's"):
        Writer(path, HEADER, resume=True)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert after == {**before, path.name: b""}


def test_a_line_that_no_job_writes_is_refused(path):
    Writer(path, HEADER).close()
    progress = path.with_name(path.name + ".progress")
    line = b"[1]"
    progress.write_bytes(progress.read_bytes() + f"{zlib.crc32(line):08x} ".encode() + line + b"\n")
    refused(path, rf"progress:2: no job writes .* another name for the output than {path.name}\.$")


def test_one_process_at_a_time(path):
    with Writer(path, HEADER):
        refused(path, "another process")


@pytest.mark.parametrize("was_there", [False, True])
def test_a_job_that_fails_before_its_first_record_leaves_its_name_free(path, was_there):
    if was_there:
        Writer(path, HEADER).close()
    before = sorted(path.parent.iterdir())
    with pytest.raises(ValueError, match="mistake"), Writer(path, HEADER, was_there):
        raise ValueError("mistake")
    assert sorted(path.parent.iterdir()) == before


def test_a_job_that_fails_later_keeps_its_records(path):
    writer = Writer(path, HEADER)
    writer.append([record(1)])
    with pytest.raises(ValueError, match="mistake"), writer:
        raise ValueError("mistake")
    with Writer(path, HEADER, resume=True) as writer:
        assert writer.done == {(1, 0)}


def test_places_that_cannot_be_written(path, tmp_path):
    with pytest.raises(OutputError, match="in a folder that exists"):
        Writer(tmp_path / "missing" / "out.jsonl", HEADER)
    with pytest.raises(OutputError, match="in a folder that exists"):
        Writer(tmp_path, HEADER)
    progress = path.with_name(path.name + ".progress")
    progress.mkdir()
    refused(path, f"{progress} cannot be written: Is a directory. Give another place")


@pytest.mark.parametrize("allowed", [0, 10, 120])
def test_a_full_disk_is_said_and_loses_nothing(path, monkeypatch, allowed):
    with Writer(path, HEADER) as writer:
        writer.append([record(1)])
        left = allowed

        def write(file, data):
            nonlocal left
            file.write(data[:left])
            left -= min(left, len(data))
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "_write", write)
            with pytest.raises(OutputError, match=r"disk is full; 1 records are safe.*--resume"):
                writer.append([record(2), record(3), record(4)])
        assert writer.done == {(1, 0)}
    with Writer(path, HEADER, resume=True) as writer:
        assert writer.done == {(1, 0)}
        writer.append([record(2)])
    assert records_in(path) == [record(1), record(2)]


def test_a_file_that_another_process_has_just_taken_away_is_not_written(path, monkeypatch):
    """It was opened while the other was there, and locked once that had failed and left."""
    first, lock = Writer(path, HEADER), Writer._lock

    def late(self):
        first.__exit__(ValueError)
        lock(self)

    monkeypatch.setattr(Writer, "_lock", late)
    with pytest.raises(OutputError, match="removed it; try again"):
        Writer(path, HEADER, resume=True)
    assert not list(path.parent.iterdir())


def test_a_job_that_came_and_went_before_a_file_was_opened_is_left_alone(path, monkeypatch):
    opened = Writer._open

    def late(self, *args):
        monkeypatch.setattr(Writer, "_open", opened)
        with Writer(path, HEADER) as first:
            first.append([record(1)])
        return opened(self, *args)

    monkeypatch.setattr(Writer, "_open", late)
    with pytest.raises(OutputError, match="another process has begun it"):
        Writer(path, {**HEADER, "seed": 1})
    assert records_in(path) == [record(1)]
    with Writer(path, HEADER, resume=True) as writer:
        assert writer.done == {(1, 0)}


def test_an_output_that_cannot_be_opened_leaves_no_progress(path, tmp_path):
    path.symlink_to(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        Writer(path, HEADER)
    assert list(tmp_path.iterdir()) == [path]


def test_a_rest_that_cannot_be_cut_away_is_said(path, monkeypatch):
    with Writer(path, HEADER) as writer:
        writer.append([record(1)])

    def fails(self):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Writer, "_cut_back", fails)
    with pytest.raises(OutputError, match=r"cannot be written \(Input/output error\)"):
        Writer(path, HEADER, resume=True)
    assert records_in(path) == [record(1)]


def test_a_finished_output_is_put_in_order_and_ends_of_the_process_lose_nothing(path, monkeypatch):
    """Before the new file has the name, the old one counts; afterwards the new one does."""

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    records = [record(3), record(1, 1), record(1), record(2)]
    with Writer(path, HEADER) as writer:
        writer.append(records)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(type(path), "replace", no_room)
            with pytest.raises(OutputError, match="disk is full"):
                writer.put_in_order()
    assert path.read_bytes() == before
    for _ in range(2):
        with Writer(path, HEADER, resume=True) as writer:
            assert len(writer.done) == 4
            writer.put_in_order()
        assert records_in(path) == [record(1), record(1, 1), record(2), record(3)]
    swapped = path.read_bytes().replace(b"1", b"7")
    path.write_bytes(swapped)
    with pytest.raises(OutputError, match="was changed after it was written"):
        Writer(path, HEADER, resume=True)
