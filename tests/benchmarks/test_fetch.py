"""Fetching the data sets: what is written is what was expected, or nothing is."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from benchmarks import fetch
from benchmarks.fetch import SETS, DataSet, FetchError

ROWS = [{"task_id": number, "text": f"row {number}"} for number in range(1, 7)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS)
PART = "".join(json.dumps(row) + "\n" for row in ROWS[1:4])


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def upstream(tmp_path):
    """A file as it is published: with CRLF between its rows, not compressed."""
    path = tmp_path / "published.jsonl"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    return path


def whole(upstream, **changes) -> DataSet:
    one = DataSet("eval/a/a.jsonl.gz", upstream.as_uri(), checksum(TEXT), "MIT")
    return one._replace(**changes)


def files_in(folder) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_is_downloaded_once(upstream, tmp_path, packed):
    if packed:
        upstream.write_bytes(gzip.compress(TEXT.encode()))
    folder, wanted = tmp_path / "data", whole(upstream)
    assert fetch.fetch(wanted, folder)
    assert files_in(folder) == ["eval/a/a.jsonl.gz"]
    assert gzip.decompress((folder / wanted.path).read_bytes()).decode() == TEXT
    upstream.unlink()
    assert not fetch.fetch(wanted, folder)


def test_a_set_may_be_a_part_of_the_published_rows(upstream, tmp_path):
    wanted = whole(upstream, sha256=checksum(PART), tasks=((2, 3), (4, 4)))
    fetch.fetch(wanted, tmp_path / "first")
    assert gzip.decompress((tmp_path / "first" / wanted.path).read_bytes()).decode() == PART
    # A copy of a data folder holds that part alone.
    assert fetch.fetch(wanted, tmp_path / "second", tmp_path / "first")
    assert (tmp_path / "second" / wanted.path).read_bytes() == (
        tmp_path / "first" / wanted.path
    ).read_bytes()


def test_another_text_is_refused_and_nothing_is_written(upstream, tmp_path):
    upstream.write_text(TEXT + "{}\n")
    folder = tmp_path / "data"
    for source in (None, tmp_path):
        (tmp_path / "eval/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "eval/a/a.jsonl.gz").write_bytes(gzip.compress(b"other"))
        with pytest.raises(FetchError, match="is not the expected file"):
            fetch.fetch(whole(upstream), folder, source)
        assert not folder.exists()


@pytest.mark.parametrize("damaged", [b"\x1f\x8bcut off", b"not rows"])
def test_a_damaged_file_is_refused(upstream, tmp_path, damaged):
    upstream.write_bytes(damaged)
    wanted = whole(upstream, tasks=((1, 9),))
    with pytest.raises(FetchError, match="cannot be read"):
        fetch.fetch(wanted, tmp_path / "data")


def test_a_damaged_file_in_the_folder_is_found(upstream, tmp_path):
    wanted = whole(upstream)
    fetch.fetch(wanted, tmp_path)
    (tmp_path / wanted.path).write_bytes(gzip.compress(b"changed"))
    with pytest.raises(FetchError, match="is not the expected file"):
        fetch.fetch(wanted, tmp_path)


def test_the_command_fetches_what_can_be_had_and_says_what_cannot(
    upstream, tmp_path, monkeypatch, capsys
):
    absent = whole(upstream)._replace(path="b.gz", address=(tmp_path / "none").as_uri())
    monkeypatch.setattr(fetch, "SETS", (absent, whole(upstream)))
    assert fetch.main(["--folder", str(tmp_path / "data")]) == 1
    assert files_in(tmp_path / "data") == ["eval/a/a.jsonl.gz"]
    said = capsys.readouterr()
    assert "licence: MIT" in said.out
    assert "cannot be fetched" in said.err


def test_sets_have_places_addresses_and_checksums():
    assert len({one.path for one in SETS}) == len(SETS)
    for one in SETS:
        assert one.path.startswith(("eval/", "train/"))
        assert one.path.endswith(".gz")
        assert one.address.startswith("https://")
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.licence


def test_fetched_sets_are_the_expected_ones():
    """Sets that are there have the contents that their checksums name."""
    folder = Path(__file__).resolve().parents[2] / "data"
    if not folder.is_dir():
        pytest.skip("needs data: run `python -m benchmarks.fetch`")
    present = [one for one in SETS if (folder / one.path).is_file()]
    assert present
    assert not any(fetch.fetch(one, folder) for one in present)
