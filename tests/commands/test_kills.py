"""Kills of long commands at random moments: nothing is half-written, the next run ends well."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxspec
from jaxspec.cli import main

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows lacks"
)
TEXT = "One and one are two, two and two are four, and four and four are eight.\n" * 40


def load_one(argv: list[str]) -> int:
    for _ in range(2):
        jaxspec.load(argv[1])
    return 0


def save_one(argv: list[str]) -> int:
    model = jaxspec.load(argv[1])
    for _ in range(10):
        jaxspec.save(model, argv[2])
    return 0


CALLS = {"load": load_one, "save": save_one}
"""Functions that are no commands, by the first word."""


class Work(NamedTuple):
    """A command, or a call of a function, that takes long.

    Attributes:
        argv: its words; `{model}`: a folder of a tiny model, `{text}`, `{rows}`: files of text.
        same: files of the result that are the same bytes after every run.
        parsed: files of the result that hold JSON, with figures that differ from run to run.
    """

    argv: str
    same: tuple[str, ...]
    parsed: tuple[str, ...] = ()


TRAIN = "--out out --state state --dtype float32 --sequence-length 32 --rows 2 --data t={text}"
WORKS = {
    "train lm": Work(
        f"train lm {TRAIN} --steps 60 --tokenizer {{model}} --embed-dim 16 --layers 1 --heads 2 "
        "--kv-heads 1 --head-dim 8 --mlp-dim 32 --max-positions 64",
        ("model.safetensors", "tokenizer.json"),
        ("config.json",),
    ),
    "train eagle": Work(
        f"train eagle {TRAIN} --steps 40 --target {{model}} --own-text 8 --decoding-prompts 2",
        ("model.safetensors",),
        ("config.json",),
    ),
    "export tflite": Work(
        "export tflite {model} out --quantize float32 --capacity 64 --prefill 8",
        ("model.tflite", "tokenizer.json"),
        ("manifest.json",),
    ),
    "batch": Work(
        "batch {rows} out/out.jsonl --model {model} --max-new-tokens 16 --batch-size 2 --resume",
        ("out.jsonl",),
    ),
    "tune tree": Work(
        "tune tree --profile galaxy-s25-adreno830-vicuna7b-q4 "
        "--acceptance eagle1-vicuna7b-tau-4.06-inferred --out out",
        ("tree.json",),
        ("search.json",),
    ),
    "tune skips": Work(
        "tune skips {model} --data t={text} --text given --rows 2 --prompt-tokens 8 "
        "--new-tokens 8 --evaluations 12 --out out",
        (),
        ("skips.json",),
    ),
    # A profile that is measured is written in the same way, but noise may end the measuring.
    "tune profile": Work(
        "tune profile --import galaxy-s25-adreno830-vicuna7b-q4 --out out/profile.json",
        ("profile.json",),
    ),
    "load": Work("load {model}", ()),
    "save": Work("save {model} out", ("model.safetensors", "tokenizer.json", "config.json")),
}
# Kills in a row, before the command is let end.
KILLS = [
    *((name, 3) for name in CALLS),
    *(pytest.param(name, 50, marks=pytest.mark.slow) for name in WORKS),
]


def run(argv: list[str], folder: Path) -> None:
    with (
        contextlib.chdir(folder),
        (folder / "said").open("a") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = CALLS.get(argv[0], main)(argv)
    os._exit(code)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def whole(folder: Path, work: Work) -> dict[str, bytes | None]:
    """The files that a reader would find, `None` for those that are not there."""
    found: dict[str, bytes | None] = {}
    for name in work.same:
        path = folder / "out" / name
        found[name] = path.read_bytes() if path.exists() else None
    for name in work.parsed:
        path = folder / "out" / name
        # Its figures differ from run to run.
        found[name] = b"JSON" if path.exists() and json.loads(path.read_text()) else None
    return found


@pytest.fixture(scope="module")
def places(model, tmp_path_factory) -> Callable[[str], list[str]]:
    """Fills the places of a command's words."""
    from tests.checkpoint.networks import random_network
    from tests.foreign import like_llama3

    made = tmp_path_factory.mktemp("texts")
    for file, field, length, count in (("text", "text", 400, 160), ("rows", "prompt", 20, 8)):
        lines = [json.dumps({field: TEXT[start : start + length]}) + "\n" for start in range(count)]
        (made / f"{file}.jsonl").write_text("".join(lines))
    tokenizer = like_llama3()
    config = model.config.replace(
        num_layers=4, layer_types=(), vocab_size=tokenizer.vocab_size, max_positions=256
    )
    jaxspec.save(jaxspec.checkpoint.Model(random_network(config), tokenizer), made / "model")
    names = {"model": made / "model", "text": made / "text.jsonl", "rows": made / "rows.jsonl"}
    return lambda words: words.format(**names).split()


class Runs:
    """Runs of one command, each in a process of its own."""

    def __init__(self, name: str, places: Callable[[str], list[str]]):
        if name.startswith("export"):
            pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
        self.work = WORKS[name]
        self.argv = places(self.work.argv)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])

    def begin(self, folder: Path) -> multiprocessing.process.BaseProcess:
        (folder / "out").mkdir(parents=True, exist_ok=True)
        process = self.context.Process(target=run, args=(self.argv, folder))
        process.start()
        return process

    def end(self, folder: Path) -> dict[str, bytes | None]:
        process = self.begin(folder)
        process.join()
        assert process.exitcode == 0, (folder / "said").read_text()[-2000:]
        return whole(folder, self.work)


@pytest.mark.parametrize(("name", "kills"), KILLS)
def test_killed_at_random_moments(name, kills, places, tmp_path):
    runs = Runs(name, places)
    [read] = places("{model}")
    before = files_in(Path(read).parent)
    runs.end(tmp_path / "warm")
    start = time.monotonic()
    expected = runs.end(tmp_path / "alone")
    lasts = time.monotonic() - start
    assert None not in expected.values()
    moments = random.Random(0)
    killed = tmp_path / "killed"
    for turn in range(kills):
        process = runs.begin(killed)
        process.join(moments.uniform(0, lasts))
        if process.exitcode is None:
            (process.terminate if turn % 2 else process.kill)()
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL, -signal.SIGTERM)
        for file, data in whole(killed, runs.work).items():
            # A job's output grows; everything else is there as a whole or not at all.
            assert data is None or data == expected[file] or name == "batch"
    assert runs.end(killed) == expected
    # Nothing stays of what was killed, and nothing that is read was written.
    assert sorted(os.listdir(killed / "out")) == sorted(os.listdir(tmp_path / "alone" / "out"))
    assert files_in(Path(read).parent) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKS if name not in CALLS])
def test_a_disk_that_is_full(name, places, tmp_path):
    """One line says which file and why; the next run ends well.

    Files cannot grow past half of the largest result, so a write fails some way into a file.
    """
    resource = pytest.importorskip("resource")
    runs = Runs(name, places)
    expected = runs.end(tmp_path / "alone")
    full = tmp_path / "full"
    results = (tmp_path / "alone" / "out" / name for name in (*runs.work.same, *runs.work.parsed))
    largest = max(path.stat().st_size for path in results) // 2
    (full / "out").mkdir(parents=True)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    found = subprocess.run(
        [sys.executable, "-m", "jaxspec", *runs.argv],
        cwd=full,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2, found.stderr[-2000:]
    prefix = "jaxspec: error: "
    [said] = (line for line in found.stderr.splitlines() if line.startswith(prefix))
    assert "File too large" in said
    assert str(full) in said or said.startswith(f"{prefix}out")
    if not name.startswith("train"):  # Orbax's threads print their own.
        assert "Traceback" not in found.stderr
    for file, data in whole(full, runs.work).items():
        assert data in (None, expected[file])
    assert runs.end(full) == expected
