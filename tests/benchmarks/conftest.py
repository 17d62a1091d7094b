"""A tiny model in place of the shipped ones, and files of prompts for every suite."""

import gzip
import json
from pathlib import Path

import jax
import pytest

import jaxspec
from benchmarks.suites import SUITES
from jaxspec.checkpoint import save_eagle
from jaxspec.measure.step import StepTimes
from jaxspec.models import EagleHead, init_eagle_params
from jaxspec.tuning import calibrated_table, save_acceptance

ONE, TWO = "How many are 1 + 1?", "How many are 2 + 3?"
# All but the first have 17 to 32 bytes, so that their programs are the same.
ROWS = {
    "gsm8k/test.jsonl.gz": [
        {"question": "x" * 3000, "answer": "1"},
        {"question": ONE, "answer": "2"},
        {"question": TWO, "answer": "5"},
    ],
    "humaneval/HumanEval.jsonl.gz": [
        {"prompt": "def add_one(number):\n", "test": "def check(f): ...", "entry_point": "add_one"}
    ],
    "mbpp/test.jsonl.gz": [
        {"text": "Add.\r\n", "test_list": ["f(1)", "f(2)"]},
        {"text": "Subtract.", "test_list": ["f()"]},
    ],
    "eagle_prompts/gsm8k_question.jsonl.gz": [{"turns": [ONE]}, {"turns": [TWO]}],
    "spec_bench/question.jsonl.gz": [
        {"category": "roleplay", "turns": [ONE]},
        {"category": "summarization", "turns": [TWO]},
    ],
}
TIMES = StepTimes(step=0.008, draft=0.002, target=0.005, width=4.0)


@pytest.fixture(scope="session")
def head(model) -> EagleHead:
    config = model.config.replace(num_layers=1)
    return EagleHead(init_eagle_params(config, True, jax.random.key(0)), config)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    for file, rows in ROWS.items():
        path = folder / file
        path.parent.mkdir()
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    files = {Path(group.file) for suite in SUITES.values() for group in suite.prompt_sets}
    # Those that lie beside the suites are read where they are.
    assert {str(file) for file in files if not file.is_absolute()} <= set(ROWS)
    return folder


@pytest.fixture(scope="session")
def checkpoints(model, head, tmp_path_factory) -> Path:
    """Folder of the tiny target, draft model, head and set of layers to skip."""
    root = tmp_path_factory.mktemp("root") / "checkpoints"
    for name in ("demo", "demo-draft"):
        jaxspec.save(model, root / name)
    save_eagle(head, root / "demo-eagle")
    (root / "demo-eagle" / "tree.json").write_text('{"paths": [[0], [1], [0, 0]]}')
    save_acceptance(calibrated_table(), root / "demo-eagle" / "acceptance.json")
    skips = {"num_layers": 1, "attention": [0], "mlp": []}
    (root / "demo-skips").mkdir()
    found = {**skips, "num_speculative_tokens": 2, "threshold": 0.5}
    (root / "demo-skips" / "skips.json").write_text(json.dumps(found))
    return root


@pytest.fixture
def shipped(checkpoints, monkeypatch) -> Path:
    """Has the tiny models in place of the shipped ones."""
    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", checkpoints.parent / "jaxspec")
    return checkpoints
