"""The law of shards: their merge is what one process writes, and a wrong merge writes nothing."""

import hashlib
import itertools
import json
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.batch import OutputError, Shard, Writer, merge, parse_shard
from jaxspec.batch import writer as writer_module
from jaxspec.cli import main
from jaxspec.commands import batch as command
from tests.batch.conftest import PROMPTS, files_up_to


def hashes(path: Path) -> list[str]:
    """Hashes of all records, by line and sample: one process writes them as rows finish."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records.sort(key=lambda record: (record["line"], record["sample"]))
    return [hashlib.sha256(json.dumps(record).encode()).hexdigest() for record in records]


def keys(path: Path) -> list[tuple[int, int]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(record["line"], record["sample"]) for record in map(json.loads, lines)]


@pytest.fixture(scope="module")
def job(folder, tmp_path_factory):
    """Decodes a shard of a file with empty lines, ids, and rows that are bad in two ways."""
    place = tmp_path_factory.mktemp("job")
    rows: list = [{"prompt": prompt, "id": f"r{i}"} for i, prompt in enumerate(PROMPTS)]
    lines = [*map(json.dumps, rows[:4]), "", "not json", *map(json.dumps, rows[4:])]
    lines.insert(3, json.dumps({"prompt": [5, 9999]}))
    source = place / "in.jsonl"
    source.write_text("\n".join(lines) + "\n")
    flags = ["--model", folder, "--max-new-tokens", "12", "--temperature", "0.8", "--seed", "3"]
    flags += ["--num-samples", "2", "--drafter", "lookup", "--batch-size", "4"]

    def decode(out: str, *more: str, name: str = "in.jsonl") -> Path:
        assert main(["batch", str(place / name), str(place / out), *flags, *more]) in (0, 2)
        return place / out

    return decode


@pytest.fixture(scope="module")
def whole(job):
    """The output of one process."""
    return job("whole.jsonl")


NUMS = (1, 2, 3, 5, 12)
"""Numbers of shards of ten rows."""


@pytest.fixture(scope="module")
def shards(job):
    """All shards, by their number."""
    return {
        num: [job(f"{i}-of-{num}.jsonl", "--shard", f"{i}/{num}") for i in range(1, num + 1)]
        for num in NUMS
    }


@pytest.mark.parametrize("num", NUMS)
def test_merged_shards_are_what_one_process_writes(num, shards, whole, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    before = {path: path.read_bytes() for path in shards[num]}
    assert main(["batch", "--merge", str(out), *map(str, shards[num])]) == 0
    assert "merged: 18 records" in capsys.readouterr().err
    assert hashes(out) == hashes(whole)
    assert keys(out) == sorted(keys(whole))
    assert sorted(tmp_path.iterdir()) == [out]
    assert before == {path: path.read_bytes() for path in shards[num]}


def test_a_finished_output_of_one_process_merges_alone(whole, tmp_path):
    assert merge(tmp_path / "out.jsonl", [whole]) == 18
    assert keys(tmp_path / "out.jsonl") == sorted(keys(whole))


def test_the_order_of_parts_changes_no_byte(shards, tmp_path):
    merged = set()
    for i, parts in enumerate(itertools.permutations(shards[3])):
        merge(tmp_path / f"{i}.jsonl", parts)
        merged.add((tmp_path / f"{i}.jsonl").read_bytes())
    assert len(merged) == 1


def test_every_row_is_in_one_shard():
    rng = random.Random(0)
    for _ in range(50):
        num, rows = rng.randint(1, 9), list(range(rng.randint(0, 30)))
        parts = [Shard(index, num).rows_of(rows) for index in range(1, num + 1)]
        assert sorted(itertools.chain(*parts)) == rows
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "text", ["3/2", "0/2", "1/0", "-1/2", "a/2", "1", "1/2/3", "", "1.5/2", "/", "²/3", " 1/2"]
)
def test_shards_that_are_none_are_refused(text, tmp_path, capsys):
    with pytest.raises(ValueError, match="shard must be I/N with I from 1 to N, such as 3/8, got"):
        parse_shard(text)
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n')
    with pytest.raises(SystemExit) as ended:
        main(["batch", str(source), str(tmp_path / "out.jsonl"), f"--shard={text}"])
    assert ended.value.code == 2
    assert "--shard: shard must be I/N" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_arguments_of_another_type_are_named(tmp_path):
    calls = [
        (lambda: parse_shard(None), "shard must be a text, got None"),
        (lambda: merge(None, []), "out must be a text or a path, got None"),
        (lambda: merge(tmp_path / "a", [None]), r"parts\[0\] must be a text or a path, got None"),
        (lambda: merge(tmp_path / "a", "bc"), "parts: give a list of outputs, got 'bc'"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def refused(match: str, out: Path, parts: list[Path]) -> None:
    before = {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match=match) as raised:
        merge(out, parts)
    assert "\n" not in str(raised.value)
    assert before == {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}


@pytest.fixture
def parts(shards, tmp_path):
    """Copies of three shards."""
    copies = [tmp_path / path.name for path in shards[3]]
    for path, copy in zip(shards[3], copies, strict=True):
        shutil.copy(path, copy)
        shutil.copy(writer_module.progress_path(path), writer_module.progress_path(copy))
    return copies


def test_missing_and_doubled_shards_are_named(parts, tmp_path):
    out = tmp_path / "out.jsonl"
    refused("shard 2/3 is missing; give the outputs of all", out, [parts[0], parts[2]])
    refused("shards 1/3, 3/3 are missing", out, [parts[1]])
    refused("shard 1/3 is given more than once", out, [*parts, parts[0]])
    refused("none.jsonl is missing", out, [*parts, tmp_path / "none.jsonl"])
    writer_module.progress_path(parts[1]).unlink()
    refused("2-of-3.jsonl.progress is missing", out, parts)


def test_a_billion_shards_are_not_counted_one_by_one(tmp_path):
    part, header = tmp_path / "a.jsonl", {"num_rows": 1, "num_samples": 1, "shard": "3/999999999"}
    with writer_module.Writer(part, header):
        pass
    message = "shards 1/9{9}, 2/9{9}, 4/9{9}, .* and 999999990 more are missing"
    refused(message, tmp_path / "out.jsonl", [part])


def test_an_output_that_is_there_is_left_alone(parts, tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    refused("out.jsonl is there already; give another name", tmp_path / "out.jsonl", parts)
    refused("3-of-3.jsonl is there already", parts[2], parts)
    with pytest.raises(OutputError, match="in a folder that exists"):
        merge(tmp_path / "missing" / "out.jsonl", parts)


def cut(path: Path, num_records: int) -> None:
    """Leaves what a process leaves that is killed in the middle of a record."""
    data = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(data[:num_records]) + data[num_records][:9])
    progress = writer_module.progress_path(path)
    entries = progress.read_bytes().splitlines(keepends=True)
    progress.write_bytes(b"".join(entries[: num_records + 1]) + entries[num_records + 1][:5])


def test_an_unfinished_shard_is_refused_at_every_record(parts, job, tmp_path):
    out, data = tmp_path / "out.jsonl", parts[1].read_bytes()
    progress = writer_module.progress_path(parts[1])
    entries = progress.read_bytes()
    for num_records in range(data.count(b"\n")):
        parts[1].write_bytes(data)
        progress.write_bytes(entries)
        cut(parts[1], num_records)
        refused(r"2-of-3.jsonl is not finished: \d of the 3 rows of shard 2/3 are", out, parts)


def test_an_unfinished_shard_is_resumed_and_merges(job, shards, whole, tmp_path):
    unfinished = job("again.jsonl", "--shard", "2/3")
    cut(unfinished, 2)
    job("again.jsonl", "--shard", "2/3", "--resume")
    merge(tmp_path / "out.jsonl", [shards[3][0], unfinished, shards[3][2]])
    assert hashes(tmp_path / "out.jsonl") == hashes(whole)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--seed", "4"], "seed is 3 in the first and 4 here"),
        (["--max-new-tokens", "13"], "config.max_new_tokens is 12 in the first and 13 here"),
        (["--drafting", "never"], "drafting is drafted in the first and plain here"),
        (["--chat"], "rows is .* in the first and .* here"),
    ],
)
def test_shards_of_different_jobs_are_refused(flags, match, job, parts, tmp_path):
    other = job(f"other{flags[0]}.jsonl", "--shard", "3/3", *flags)
    said = f"{other.name} is not of the same job as {parts[0]}: .*{match}"
    refused(said, tmp_path / "out.jsonl", [*parts[:2], other])


def test_shards_of_another_number_are_refused(shards, tmp_path):
    different = [shards[2][0], shards[3][1]]
    refused("number of shards is 2 in the first and 3 here", tmp_path / "out.jsonl", different)


def test_another_shard_does_not_resume_an_output(parts):
    with parts[0].open("rb") as out, writer_module.progress_path(parts[0]).open("rb") as progress:
        contents = writer_module.read_contents(parts[0], out, progress)
    with pytest.raises(OutputError, match="another job: shard is 1/3 there and 2/3 here"):
        Writer(parts[0], {**contents.header, "shard": "2/3"}, resume=True)


def test_changed_and_foreign_outputs_are_refused(parts, tmp_path):
    out, data = tmp_path / "out.jsonl", parts[0].read_bytes()
    parts[0].write_bytes(data.replace(b'"sample": 0', b'"sample": 7', 1))
    refused("1-of-3.jsonl was changed after it was written: record", out, parts)
    parts[0].write_bytes(data)
    foreign = tmp_path / "foreign.jsonl"
    with Writer(foreign, {"seed": 0}) as writer:
        writer.append([{"line": 1, "sample": 0}])
    refused("foreign.jsonl.progress is damaged or not of jaxspec batch", out, [foreign, *parts])
    header = {"shard": "one of two"}
    with Writer(tmp_path / "no_shard.jsonl", header) as writer:
        writer.append([{"line": 1, "sample": 0}])
    refused(r"no_shard.jsonl.progress: shard must be I/N", out, [tmp_path / "no_shard.jsonl"])
    writer_module.progress_path(foreign).write_bytes(b"no header")
    refused("foreign.jsonl.progress is damaged or not of jaxspec batch", out, [foreign, *parts])


def test_a_merge_on_a_full_disk_leaves_no_file(parts, tmp_path):
    out = tmp_path / "out.jsonl"
    with files_up_to(100):
        refused(r"out.jsonl: cannot be written \(File too large\). Make room", out, parts)


def test_a_merge_takes_no_other_argument(parts, tmp_path, capsys):
    merging = ["batch", "--merge", str(tmp_path / "out.jsonl"), *map(str, parts)]
    for more, said in (
        (["--resume", "--seed", "2"], "leave out seed, resume"),
        (["--capacity", "64"], "leave out capacity"),
    ):
        assert main([*merging, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["batch", "--merge", str(tmp_path / "out.jsonl")]) == 2
    assert "give OUT and the outputs of all shards" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["batch", "--resume"])
    assert "give IN.jsonl and OUT.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_process_of_a_cluster_decodes_its_shard(job, shards, monkeypatch):
    """As `jax.distributed` numbers it."""
    joined = []
    monkeypatch.setattr(command.jax.distributed, "initialize", lambda **_: joined.append(1))
    monkeypatch.setattr(command.jax, "process_index", lambda: 1)
    monkeypatch.setattr(command.jax, "process_count", lambda: 3)
    out = job("of-cluster.jsonl", "--distributed")
    assert joined == [1]
    assert hashes(out) == hashes(shards[3][1])


def test_without_a_cluster_the_flag_for_one_is_refused(tmp_path, capsys, monkeypatch):
    def fails(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(command.jax.distributed, "initialize", fails)
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n')
    argv = ["batch", str(source), str(tmp_path / "out.jsonl"), "--model", "demo"]
    assert main([*argv, "--distributed"]) == 2
    assert "cannot be joined (coordinator_address should be defined.)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.slow
def test_processes_of_a_cluster_wait_for_one_another(folder, environment, tmp_path):
    """The first has one short row and the second a long one; JAX reads what Slurm would set."""
    (tmp_path / "in.jsonl").write_text('[1]\n"a long row"\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    slurm = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
    }
    started = []
    for index, max_new_tokens in enumerate(("1", "900")):
        words = [sys.executable, "-m", "jaxspec", "batch", "in.jsonl", f"out-{index}.jsonl"]
        words += ["--model", folder, "--max-new-tokens", max_new_tokens]
        words += ["--distributed", "--verbose"]
        own = {**environment, **slurm, "SLURM_PROCID": str(index)}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(words, cwd=tmp_path, env=own, stderr=pipe, stdout=pipe, text=True)
        )
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for index, text in enumerate(said):
        assert f"shard {index + 1}/2" in text
        assert keys(tmp_path / f"out-{index}.jsonl") == [(index + 1, 0)]
