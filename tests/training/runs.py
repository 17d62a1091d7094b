"""Parts that tests of runs share: a small target with random weights, a run that is killed."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxspec.checkpoint.files import replacing_files
from jaxspec.checkpoint.huggingface import write_network
from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, Network, init_params
from jaxspec.training.loop import make_train_step
from jaxspec.training.settings import DraftingSettings, OptimizerSettings, TrainingPace
from jaxspec.training.sources import LastRows, Source
from jaxspec.training.tokenizer import loaded_tokenizer, train_tokenizer
from jaxspec.training.train import Trainer, train

QUIET = Console(file=io.StringIO())
CONFIG = ModelConfig(
    vocab_size=280,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    max_positions=64,
    tied_head=True,
)
DRAFTING = {
    "num_steps": 40,
    "minutes": None,
    "sequence_length": 32,
    "rows_per_batch": 4,
    "dtype": "float32",
    "own_text": 40,
    "optimizer": OptimizerSettings("muon", 0.02, 0.01, warmup_steps=5),
    "pace": TrainingPace(record_steps=1),
    "decoding_prompts": 2,
}
"""Settings of a short run of any trainer of drafters."""
_TEXTS = [f"{a} and {b} make {a + b}" for a in range(9) for b in range(9)]


def write_model(folder: Path, config: ModelConfig) -> None:
    """A model with random weights and a tokenizer of the text that `write_sums` writes."""
    tokenizer = train_tokenizer(_TEXTS, config.vocab_size)
    network = Network(init_params(config, jax.random.key(0)), config)
    with replacing_files(folder) as staging:
        write_network(network, staging, "float32")
        loaded_tokenizer(tokenizer, config.max_positions).write(staging)


def write_sums(folder: Path) -> Source:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in _TEXTS))
    return Source("sums", str(path), split=LastRows(8))


def losses_in(state: Path) -> list[float]:
    """Returns the losses that a run recorded in its state folder."""
    records = map(json.loads, (state / "history.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def assert_stored_in_bfloat16(stored: PyTree, trained: PyTree) -> None:
    for loaded, given in zip(jax.tree.leaves(stored), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(loaded, given.astype("bfloat16").astype("float32"))


def assert_a_killed_run_ends_with_the_same_bits(
    trainer: Callable[..., Trainer],
    settings: DraftingSettings,
    whole: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills a run before its eighth update and resumes it.

    Args:
        trainer: makes the trainer of settings.
        settings: of it.
        whole: what the run wrote that was never killed.
        folder: for files.
        monkeypatch: for what kills it.
    """

    def killed(*args):
        step = make_train_step(*args)

        def or_stop(state, batch):
            if int(state.step) == 7:
                raise KeyboardInterrupt
            return step(state, batch)

        return or_stop

    saving = dataclasses.replace(settings, pace=TrainingPace(save_seconds=1e-9))
    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.training.train.make_train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(trainer(saving), folder / "state", console=QUIET)
    assert sorted(path.name for path in (folder / "state" / "states").iterdir())[-1] == "7"
    train(trainer(settings), folder / "state", folder / "out", console=QUIET)
    again, before = (path / "model.safetensors" for path in (folder / "out", whole))
    assert again.read_bytes() == before.read_bytes()
