"""Kills of long commands at random moments: nothing is half-written, the next run ends well."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxspec.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows lacks"),
]
KILLS = 10
"""In a row, before the command is let end."""
TEXT = "One and one are two, two and two are four, and four and four are eight.\n" * 40


class Work(NamedTuple):
    """A command that takes long.

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
}


def run(argv: list[str], folder: Path) -> None:
    with (
        contextlib.chdir(folder),
        (folder / "said").open("a") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = main(argv)
    os._exit(code)


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
    import jaxspec
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


@pytest.mark.parametrize("name", WORKS)
def test_killed_at_random_moments(name, places, tmp_path):
    if name.startswith("export"):
        pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
    work = WORKS[name]
    argv = places(work.argv)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def begin(folder: Path) -> multiprocessing.process.BaseProcess:
        (folder / "out").mkdir(parents=True, exist_ok=True)
        process = context.Process(target=run, args=(argv, folder))
        process.start()
        return process

    def end(folder: Path) -> dict[str, bytes | None]:
        process = begin(folder)
        process.join()
        assert process.exitcode == 0, (folder / "said").read_text()[-2000:]
        return whole(folder, work)

    end(tmp_path / "warm")
    start = time.monotonic()
    expected = end(tmp_path / "alone")
    lasts = time.monotonic() - start
    assert None not in expected.values()
    moments = random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(KILLS):
        process = begin(killed)
        process.join(moments.uniform(0, lasts))
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        for file, data in whole(killed, work).items():
            # A job's output grows; everything else is there as a whole or not at all.
            assert data is None or data == expected[file] or name == "batch"
    assert end(killed) == expected
    assert not list((killed / "out").glob(".saving-*"))
