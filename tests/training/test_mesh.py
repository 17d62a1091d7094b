"""A run on several devices is the run on one, but for rounding."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.huggingface import write_network
from jaxspec.models import Network, init_params
from jaxspec.sharding import on_every_device, spread_rows
from jaxspec.training.data import Sequences
from jaxspec.training.lm import LMTrainer, NextToken
from jaxspec.training.plan import data_mesh
from jaxspec.training.settings import LMTrainingSettings, OptimizerSettings, TrainingPace
from jaxspec.training.sources import LastRows, Source
from jaxspec.training.tokenizer import loaded_tokenizer, train_tokenizer
from jaxspec.training.train import train
from tests.training.runs import CONFIG as BASE
from tests.training.runs import QUIET, losses_in

STEPS = 6
CONFIG = BASE.replace(vocab_size=300, max_positions=32)


def settings(folder: Path, **changes) -> LMTrainingSettings:
    path = folder / "sums.jsonl"
    rows = [{"text": f"{a} and {b} make {a + b}"} for a in range(12) for b in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": CONFIG,
        "num_steps": STEPS,
        "minutes": None,
        "sequence_length": 32,
        "rows_per_batch": 8,
        "layer_drop": 0.2,
        "dtype": "float32",
        "optimizer": OptimizerSettings("adamw", learning_rate=0.01),
        "pace": TrainingPace(save_seconds=1e-9, record_steps=1),
    }
    return LMTrainingSettings(
        (Source("sums", str(path), split=LastRows(16)),), **{**values, **changes}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Weights at the end and losses by step, of runs in a process that sees eight devices."""
    folder = tmp_path_factory.mktemp("devices")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags.strip()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.test_mesh", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: np.load(path) for path in folder.glob("*.npz")}


def assert_close(one, other):
    assert one.files == other.files
    for name in one.files:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_eight_devices_train_as_one_does(runs):
    assert len(runs["one"]["losses"]) == STEPS
    np.testing.assert_allclose(runs["one"]["losses"], runs["eight"]["losses"], rtol=1e-4)
    assert_close(runs["one"], runs["eight"])


def test_every_device_does_its_share_alone(runs):
    assert runs["work"]["eight"] < runs["work"]["one"] / 6


def test_a_run_goes_on_where_its_devices_left_off(runs):
    for name in runs["eight"].files:
        assert runs["resumed"][name].tobytes() == runs["eight"][name].tobytes()
    assert_close(runs["resumed_on_one"], runs["eight"])


def test_batches_that_cannot_be_divided_are_refused(runs):
    message = str(runs["refused"]["message"])
    assert "rows_per_batch must be a multiple of the number of devices (8), got 6" in message


def main(folder: Path) -> None:
    """The runs, in a process of their own: a student learns from a teacher."""
    teacher = folder / "teacher"
    teacher.mkdir()
    tokenizer = train_tokenizer(["twelve and twenty make thirty two"], CONFIG.vocab_size)
    loaded_tokenizer(tokenizer, CONFIG.max_positions).write(teacher)
    config = CONFIG.replace(vocab_size=tokenizer.get_vocab_size())
    write_network(Network(init_params(config, jax.random.key(0)), config), teacher)
    student = settings(folder, teacher=str(teacher))

    def run(name: str, state: str, num_devices: int) -> None:
        trained = train(LMTrainer(student), folder / state, num_devices=num_devices, console=QUIET)
        assert trained.metrics["device"] == f"{num_devices} x cpu"
        flat = jax.tree_util.tree_leaves_with_path(trained.result.params)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}
        losses = np.asarray(losses_in(folder / state))
        np.savez(folder / f"{name}.npz", losses=losses, **arrays)

    def flops(num_devices: int) -> float:
        """Returns the operations of one device for the gradient of a batch."""
        mesh = data_mesh(num_devices)
        batch = spread_rows(mesh, Sequences(*np.ones((3, 8, 32), np.int32)))
        params = jax.device_put(init_params(CONFIG, jax.random.key(0)), on_every_device(mesh))
        gradient = jax.jit(jax.grad(NextToken(CONFIG), has_aux=True))
        compiled = gradient.lower(params, batch, jax.random.key(0)).compile()
        return compiled.cost_analysis()["flops"]

    np.savez(folder / "work.npz", one=flops(1), eight=flops(8))
    run("one", "state-one", 1)
    run("eight", "state", 8)
    shutil.rmtree(folder / "state" / "states" / str(STEPS))
    shutil.copytree(folder / "state", folder / "state-moved")
    run("resumed", "state", 8)
    run("resumed_on_one", "state-moved", 1)
    try:
        train(LMTrainer(settings(folder, rows_per_batch=6)), folder / "never", console=QUIET)
    except ValueError as error:
        np.savez(folder / "refused.npz", message=str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
