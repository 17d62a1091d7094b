"""`jaxspec batch`: what it says, writes and refuses, and that no kill loses anything."""

import contextlib
import datetime
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest

import jaxspec
from jaxspec import GenerationConfig
from jaxspec.batch.rows import read_rows
from jaxspec.batch.writer import progress_path
from jaxspec.cli import main
from jaxspec.commands import batch as command
from tests.batch.conftest import PROMPTS, files_up_to


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def argv(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    return ["batch", str(prompts), str(out), "--model", folder, "--max-new-tokens", "20"]


def records_in(path) -> list[dict]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda r: (r["line"], r["sample"]))


def fails(capsys, argv, code: int = 2) -> str:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("jaxspec: error:")]
    return line


def test_a_file_of_prompts_becomes_a_file_of_records(argv, model, capsys):
    assert main([*argv, "--batch-size", "3", "--json", "--progress"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["num_done"] == figures["num_records"] == 8
    assert figures["batch_size"] == 3
    assert "done: 8 of 8 records" in err
    rows = jaxspec.generate(model, PROMPTS, GenerationConfig(max_new_tokens=20))
    assert [record["tokens"] for record in records_in(argv[2])] == [r.tokens.tolist() for r in rows]
    assert [record["text"] for record in records_in(argv[2])] == rows.texts

    before = Path(argv[2]).read_bytes()
    assert "is there already" in fails(capsys, argv)
    said = fails(capsys, [*argv[:-1], "21", "--resume"])
    assert "another job: config.max_new_tokens is 20 there and 21 here. Give" in said
    assert "seed is 0 there and 1 here" in fails(capsys, [*argv, "--seed", "1", "--resume"])
    assert main([*argv, "--resume", "--batch-size", "auto"]) == 0
    assert "resuming: 8 records" in capsys.readouterr().err
    assert Path(argv[2]).read_bytes() == before


def test_what_cannot_be_a_job_is_refused_before_anything_is_written(argv, capsys, tmp_path):
    name, source, out, *rest = argv
    before = Path(source).read_bytes()
    assert "the output must not be the input" in fails(capsys, [name, source, source, *rest])
    for place in (source, out, out + ".progress"):
        assert "the file of --json must not be" in fails(capsys, [*argv, "--json", place])
    assert not Path(out).exists()
    taken = Path(out + ".progress")
    taken.write_bytes(before)
    assert "must not be the input" in fails(capsys, [name, str(taken), out, *rest, "--resume"])
    assert taken.read_bytes() == before
    taken.unlink()
    assert "the output must be a file" in fails(capsys, [name, source, ".", *rest])
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    fails(capsys, [name, str(tmp_path / "one"), out, *rest])
    folders = [name, source, str(tmp_path / "no" / "out.jsonl"), *rest]
    assert "in a folder that exists" in fails(capsys, folders)
    assert "No such file" in fails(capsys, [name, str(tmp_path / "none.jsonl"), out, *rest])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "holds no prompts" in fails(capsys, [name, str(empty), out, *rest])
    assert "top_k" in fails(capsys, [*argv, "--top-k", "999", "--temperature", "1"])
    assert not list(Path(out).parent.glob(f"{Path(out).name}*"))
    for wrong in (["--batch-size", "0"], ["--capacity", "many"], ["--drafting", "sometimes"]):
        with pytest.raises(SystemExit):
            main([*argv, *wrong])
    assert Path(source).read_bytes() == before


def test_a_full_disk_ends_in_one_line_and_the_same_command_goes_on(argv, capsys, tmp_path):
    whole, out = tmp_path / "whole.jsonl", Path(argv[2])
    argv += ["--batch-size", "3", "--logprobs"]
    assert main([*argv[:2], str(whole), *argv[3:]]) == 0
    capsys.readouterr()
    header = len(progress_path(whole).read_bytes().splitlines()[0])
    size = (header + whole.stat().st_size) // 2
    assert header < size < whole.stat().st_size
    with files_up_to(size):
        said = fails(capsys, [*argv, "--resume"])
    kept = len(records_in(out))
    assert 0 < kept < 8
    assert f"{out}: cannot be written (File too large); {kept} records are safe there." in said
    assert said.endswith("Make room, then give the same command with --resume.")
    assert main([*argv, "--resume"]) == 0
    assert f"resuming: {kept} records are there" in capsys.readouterr().err
    assert records_in(out) == records_in(whole)


def test_an_output_that_may_not_be_written_is_said_in_one_line(argv, capsys, closed_folder):
    name, source, _, *rest = argv
    out = closed_folder / "out.jsonl"
    said = fails(capsys, [name, source, str(out), *rest])
    reason = "(Permission denied|Read-only file system)"
    assert re.search(f"{out}.progress cannot be written: {reason}. Give another place", said)


def test_ctrl_c_keeps_the_records_that_are_there_and_resume_makes_the_rest(
    argv, capsys, monkeypatch
):
    @contextlib.contextmanager
    def impatient(shown):
        def progress(report):
            if report.num_done == 2:
                raise KeyboardInterrupt

        yield progress

    with monkeypatch.context() as patch:
        patch.setattr(command, "job_bar", impatient)
        assert main([*argv, "--batch-size", "2"]) == 130
    err = capsys.readouterr().err
    assert err.startswith("interrupted: 2 of 8 records")
    assert "the same command with --resume continues" in err
    assert len(err.splitlines()) == 1
    assert len(records_in(argv[2])) == 2
    assert main([*argv, "--batch-size", "2", "--resume"]) == 0
    assert [record["line"] for record in records_in(argv[2])] == list(range(1, 9))


def test_records_hold_the_fields_of_their_line(argv, capsys, prompts):
    """Names of ours are ours: a field of the input that has one becomes `input_NAME`."""
    lines = [
        {"text": "abc", "label": {"a": [1]}, "id": "one"},
        "xyz",
        {"question": "abc", "tokens": 3, "input_tokens": 4, "error": None},
        {"prompt": "half \ud800", "tag": "\ud800"},
        {"label": 5},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{oops\r\n")
    assert main([*argv, "--max-new-tokens", "4"]) == 0
    named, bare, clash, half, without, broken = records_in(argv[2])
    assert {**named, **lines[0], "text": named["text"]} == named
    assert (named["input_text"], "input_id" in named) == ("abc", False)
    assert list(named)[:3] == ["label", "input_text", "line"]
    assert bare["prompt"] == "xyz"
    assert (clash["input_tokens"], clash["input_input_tokens"]) == (4, 3)
    assert clash["input_error"] is None
    assert len(clash["tokens"]) == 4
    assert "error" not in clash
    assert (half["tag"], "error" in half) == ("\ud800", True)
    assert (without["label"], "error" in without) == (5, True)
    assert broken.keys() == {"line", "id", "sample", "error"}


def test_fields_are_passed_on_by_resumed_and_merged_jobs(argv, capsys, prompts, tmp_path):
    lines = [{"question": prompt, "number": i} for i, prompt in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, parts = Path(argv[2]), [str(tmp_path / f"part-{i}.jsonl") for i in (1, 2)]
    assert main([*argv, "--batch-size", "2", "--in-order"]) == 0
    for i, part in enumerate(parts, start=1):
        shard = [*argv[:2], part, *argv[3:], "--batch-size", "2", "--shard", f"{i}/2"]
        assert main(shard) == 0
        before = Path(part).read_bytes()
        # A field that decides no output may change, as before.
        prompts.write_text(prompts.read_text().replace('"number"', '"num"'))
        assert main([*shard, "--resume"]) == 0
        assert Path(part).read_bytes() == before
        prompts.write_text(prompts.read_text().replace('"num"', '"number"'))
    merged = tmp_path / "merged.jsonl"
    assert main(["batch", "--merge", str(merged), *parts]) == 0
    assert outputs(merged) == outputs(whole)
    found = [json.loads(line) for line in merged.read_text().splitlines()]
    assert [(row["number"], row["question"]) for row in found] == [*enumerate(PROMPTS)]


def test_in_order_is_the_order_of_the_input_and_resumes(argv, capsys, tmp_path):
    plain = tmp_path / "plain.jsonl"
    argv += ["--batch-size", "3", "--num-samples", "2", "--temperature", "1"]
    argv += ["--stop-token-ids", ",".join(map(str, range(40)))]  # rows end at many lengths
    assert main([*argv[:2], str(plain), *argv[3:]]) == 0
    assert main([*argv, "--in-order"]) == 0
    out, unsorted = Path(argv[2]), [json.loads(line) for line in plain.read_text().splitlines()]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    keys = [(record["line"], record["sample"]) for record in found]
    assert keys == [(line, sample) for line in range(1, 9) for sample in (0, 1)]
    assert keys != [(record["line"], record["sample"]) for record in unsorted]
    assert outputs(out) == outputs(plain)
    before = out.read_bytes()
    for more in (["--resume"], ["--resume", "--in-order"]):
        assert main([*argv, *more]) == 0
        assert out.read_bytes() == before
    # A job that was finished without the flag is put into order by the same command with it.
    assert main([*argv[:2], str(plain), *argv[3:], "--resume", "--in-order"]) == 0
    assert outputs(plain) == outputs(out)
    assert [json.loads(line)["line"] for line in plain.read_text().splitlines()] == [
        line for line, _ in keys
    ]


def test_limits_that_cut_records_are_said(argv, capsys):
    assert main(argv) == 0
    assert "8 cut off by max_new_tokens or the context" in capsys.readouterr().err


def test_a_split_of_datasets_is_an_input(argv, capsys, monkeypatch, tmp_path):
    """With a stand-in that has the two functions of `datasets` that are called."""
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        if split == "none":
            raise ValueError("Unknown split" + 1000 * "!")
        return [{"question": "abc", "when": datetime.date(2026, 1, 2)}, {"question": "xyz"}]

    stub = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=None)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    name, _, out, *rest = argv
    assert main([name, "hf:owner/set:main:test", out, *rest]) == 0
    assert asked == [("owner/set", "main", "test")]
    first, second = records_in(out)
    assert (first["question"], first["when"], second["question"]) == ("abc", "2026-01-02", "xyz")
    other = str(tmp_path / "other.jsonl")
    for wrong in ("hf:owner/set", "hf::test", "hf:a:b:c:d"):
        assert "give hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT" in fails(
            capsys, [name, wrong, other, *rest]
        )
    said = fails(capsys, [name, "hf:owner/set:none", other, *rest])
    assert "hf:owner/set:none: datasets cannot load it: Unknown split" in said
    assert said.count("!") == 300 - len("Unknown split")
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = fails(capsys, [name, "hf:owner/set:test", other, *rest])
    assert "needs the extra `datasets`" in said
    assert not Path(other).exists()


def test_a_folder_of_datasets_is_an_input(argv, tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    name, _, out, *rest = argv
    made = datasets.Dataset.from_list([{"prompt": "abc", "n": 1}, {"prompt": "xyz", "n": 2}])
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "splits"))
    for number, folder in enumerate(("one", "splits")):
        place = f"{out}{number}"
        assert main([name, f"hf:{tmp_path / folder}:test", place, *rest]) == 0
        assert [(row["prompt"], row["n"]) for row in records_in(place)] == [("abc", 1), ("xyz", 2)]


class SavedSplit(list):
    """Rows with the attribute of `datasets.Dataset` that is read."""

    split = None


@pytest.mark.parametrize(
    ("splits", "own", "asked", "said"),
    [
        (["train", "test"], None, "test", None),
        (["train", "test"], None, "dev", "the folder has no split 'dev', only train, test."),
        (None, None, "test", None),
        (None, "test", "test", None),
        (None, "train", "test", "the folder has no split 'test', only train."),
        (None, None, "main:test", "a saved folder has no configurations, got 'main'."),
        (["test"], None, "main:test", "a saved folder has no configurations, got 'main'."),
    ],
)
def test_a_saved_folder_has_the_split_that_is_asked_for(
    monkeypatch, tmp_path, splits, own, asked, said
):
    made = SavedSplit([{"prompt": "abc"}])
    made.split = own
    held = made if splits is None else dict.fromkeys(splits, made)
    stub = types.SimpleNamespace(load_from_disk=lambda folder: held)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    (tmp_path / ("state.json" if splits is None else "dataset_dict.json")).touch()
    path = f"hf:{tmp_path}:{asked}"
    if said is None:
        assert [row.prompt for row in read_rows(path)] == ["abc"]
        return
    with pytest.raises(ValueError, match=re.escape(f"{path}: datasets cannot load it: {said}")):
        read_rows(path)


def test_a_file_without_a_good_row_is_a_failure(argv, capsys):
    assert main([*argv, "--field", "answer"]) == 2
    err = capsys.readouterr().err
    assert "8 of 8 records, 8 of them errors" in err
    assert f"every row was bad: {argv[2]} says why of each" in err
    assert all("answer" in record["error"] for record in records_in(argv[2]))


def outputs(path) -> list[tuple]:
    """Returns the fields that may not change; the steps of a row depend on when a guard decided."""
    kept = ("line", "sample", "tokens", "text", "finish_reason", "error")
    return [tuple(record.get(name) for name in kept) for record in records_in(path)]


def run_job(argv: list[str], environment: dict[str, str]) -> None:
    """Runs in a separate process."""
    os.environ.update(environment)
    sys.exit(main(argv))


@pytest.mark.slow
def test_killed_at_twenty_moments_it_loses_doubles_and_changes_nothing(
    folder, environment, tmp_path
):
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": f"row {i} " * (1 + i % 2), "id": f"r{i}"}) for i in range(300)]
    source.write_text("\n".join([*lines, "bad"]) + "\n")
    settings = ["--temperature", "0.8", "--num-samples", "2", "--max-new-tokens", "24"]
    settings += ["--drafter", "lookup", "--batch-size", "4", "--resume"]
    # Processes of a server that has imported all but begun nothing: imports take half of a start.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(out: Path) -> multiprocessing.Process:
        words = ["batch", str(source), str(out), "--model", folder, *settings]
        process = context.Process(target=run_job, args=(words, environment))
        process.start()
        return process

    def end(process: multiprocessing.Process) -> int:
        process.join()
        return process.exitcode

    whole = tmp_path / "whole.jsonl"
    assert end(start(whole)) == 0
    rng, kills, tries = random.Random(0), 0, 0
    while kills < 20:
        out = tmp_path / f"out{tries}.jsonl"
        tries += 1
        while True:
            before = out.stat().st_size if out.exists() else 0
            process = start(out)
            # From its very beginning, or once it writes, some time on.
            if rng.random() < 0.8:
                while process.is_alive() and (not out.exists() or out.stat().st_size <= before):
                    time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
            if end(process) == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            kills += 1
            if kills >= 20:
                assert end(start(out)) == 0
                break
        assert outputs(out) == outputs(whole)
        assert len(records_in(out)) == 601
