"""The loop: it learns, it resumes to the bit, it stops when figures are not finite."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxspec.checkpoint import CheckpointError
from jaxspec.models import Network, init_params
from jaxspec.training.data import Sequences, pack
from jaxspec.training.lm import NextToken, SoftLabels, Taught
from jaxspec.training.loop import (
    DivergedError,
    History,
    fit,
    make_evaluation,
    make_train_step,
)
from jaxspec.training.optimizer import (
    cosine,
    decays,
    make_optimizer,
    matrix_axes,
)
from jaxspec.training.settings import OPTIMIZERS, OptimizerSettings, TrainingPace
from jaxspec.training.state import StateKeeper, initial_state
from tests.training.runs import CONFIG as BASE
from tests.training.runs import QUIET

CONFIG = BASE.replace(vocab_size=24, max_positions=32)


def batches(step: int) -> Sequences:
    """Texts that count up from a random start."""
    rng = np.random.default_rng(step)
    texts = [(rng.integers(24) + np.arange(8)) % 24 for _ in range(8)]
    return pack([text.astype(np.int32) for text in texts], 16)


def begin(optimizer: OptimizerSettings):
    params = init_params(CONFIG, jax.random.key(0))
    return initial_state(params, make_optimizer(optimizer, 1))


ADAMW = OptimizerSettings("adamw", learning_rate=0.01)


@pytest.fixture(scope="module")
def adamw_step():
    """Compiled once for all tests that only need some training step."""
    return make_train_step(NextToken(CONFIG), ADAMW, 20)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_falls(name, tmp_path):
    optimizer = OptimizerSettings(name, learning_rate=0.01, adam_learning_rate=0.01)
    history = History(tmp_path / "history.jsonl")
    fit(
        make_train_step(NextToken(CONFIG), optimizer, 80),
        begin(optimizer),
        batches,
        80,
        history=history,
        console=QUIET,
    )
    losses = [record["loss"] for record in history.records]
    assert losses[0] > 2.5
    # Eight tokens counting up: only the first step of a document is left to chance.
    assert losses[-1] < 0.5


@pytest.mark.parametrize("kept", ["", "{", '{"step": 3, "validation": {"web": {"loss": 1.0}'])
def test_a_history_survives_being_killed_while_it_is_written(kept, tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    whole = [{"step": step, "seconds": 0.5 * step} for step in (1, 2)]
    text = "".join(json.dumps(record) + "\n" for record in whole) + kept
    path.write_text(text)
    history = History(path)
    assert history.records == whole

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            history.rewind(1)
    assert path.read_text() == text
    History(path).rewind(1)
    assert History(path).records == whole[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": \n', "Expecting value"),
        ("5\n", "must be an object, got 5"),
        ("5", "must be an object, got 5"),
        ("{}\n", "lacks step, seconds"),
        ('{"step": "a", "seconds": 1}\n', "step must be a whole number"),
        ('{"step": 1, "seconds": NaN}\n', "seconds must be a finite number"),
        ('{"step": 1, "seconds": 1, "loss": 1}\n', "lacks tokens_per_second"),
        ('{"step": 1, "seconds": 1, "top1": "a"}\n', "top1 must be a number"),
        ('{"step": 1, "seconds": 1, "validation": {"web": 5}}\n', "must be a mapping"),
    ],
)
def test_a_damaged_history_is_named_with_its_line(line, message, tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "seconds": 0.5}\n' + line)
    with pytest.raises(CheckpointError, match=rf"history\.jsonl:2 is no record .*{message}"):
        History(path)


def test_figures_that_are_not_finite_are_read_again(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.add(step=1, seconds=0.5, validation={"web": {"nats": math.inf}})
    assert History(history.path).records == history.records


def test_learning_rate_rises_then_falls():
    settings = OptimizerSettings(warmup_steps=4, final_fraction=0.1)
    rates = np.array([cosine(1.0, settings, 20)(step) for step in range(21)])
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert np.all(np.diff(rates[4:]) < 0)
    np.testing.assert_allclose(rates[[12, 20]], [0.55, 0.1], rtol=1e-6)


def test_a_late_decay_leaves_the_length_of_a_run_open():
    settings = OptimizerSettings(warmup_steps=4, decay_fraction=0.25)
    short, long = (
        np.array([cosine(1.0, settings, length)(step) for step in range(20)])
        for length in (20, 400)
    )
    np.testing.assert_array_equal(short[:16], long[:16])
    assert np.all(short[4:16] == 1.0)
    assert np.all(np.diff(short[15:]) < 0)


def test_only_matrices_of_layers_decay_and_are_orthogonalised():
    params = init_params(CONFIG, jax.random.key(0))
    layer = ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")
    expected = {f"layer_{i}/{part}/kernel" for i in range(2) for part in layer}

    def names(tree, is_leaf=None):
        flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
        paths = [path for path, leaf in flat if leaf]
        return {jax.tree_util.keystr(path, simple=True, separator="/") for path in paths}

    assert names(decays(params)) == expected
    axes = matrix_axes(params)
    assert names(axes, lambda leaf: isinstance(leaf, MuonDimensionNumbers)) == expected
    # Heads are orthogonalised apart on the way in and together on the way out.
    attention = axes["layer_0"]["attention"]
    assert attention["qkv"]["kernel"] == MuonDimensionNumbers(0, 3)
    assert attention["out"]["kernel"] == MuonDimensionNumbers((0, 1, 2), 3)


def test_documents_in_one_row_do_not_see_each_other():
    params = init_params(CONFIG, jax.random.key(1))
    alone = pack([np.arange(6, dtype=np.int32)], 16)
    together = pack([np.arange(6, dtype=np.int32), np.full(5, 7, np.int32)], 16)
    evaluate = make_evaluation(NextToken(CONFIG))
    other = pack([np.full(5, 7, np.int32)], 16)
    parts = [evaluate(params, [batch])["nats"] for batch in (alone, other)]
    # Five predictions in the one document, four in the other.
    assert evaluate(params, [together])["nats"] == pytest.approx(
        (5 * parts[0] + 4 * parts[1]) / 9, rel=1e-5
    )


def test_every_token_but_the_first_of_a_document_is_learned():
    packed = pack([np.arange(n, dtype=np.int32) for n in (9, 4, 2)], 16)
    params = init_params(CONFIG, jax.random.key(0))
    _, metrics = jax.jit(NextToken(CONFIG))(params, packed, jax.random.key(0))
    assert metrics["tokens"] == 8 + 3 + 1


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    params = init_params(CONFIG, jax.random.key(0))
    objective = SoftLabels(NextToken(CONFIG), soft_share=1.0)
    batch = Taught(batches(0), Network(params, CONFIG))
    differentiate = jax.jit(jax.grad(objective, has_aux=True))
    gradient, metrics = differentiate(params, batch, jax.random.key(0))
    assert metrics["agreement"] == 1
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradient)) < 1e-6


def test_layer_drop_leaves_out_later_layers_only():
    objective = jax.jit(NextToken(CONFIG, layer_drop=0.9))
    params = init_params(CONFIG, jax.random.key(0))

    def losses(params):
        return {float(objective(params, batches(0), jax.random.key(i))[0]) for i in range(4)}

    silent = jax.tree.map(jnp.zeros_like, params["layer_0"])
    assert len(losses({**params, "layer_0": silent})) > 1
    assert len(losses({**params, "layer_1": silent})) == 1


def test_an_early_exit_leaves_out_all_layers_from_one_on():
    objective = jax.jit(NextToken(CONFIG, early_exit=0.5))
    params = init_params(CONFIG, jax.random.key(0))

    def losses(params):
        return {float(objective(params, batches(0), jax.random.key(i))[0]) for i in range(4)}

    # Both layers are there or the second one is missing; the first is never left out.
    assert len(losses(params)) > 1
    assert len(losses({**params, "layer_1": jax.tree.map(jnp.zeros_like, params["layer_1"])})) == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_state(tmp_path, adamw_step):
    def poisoned(state, batch):
        if int(state.step) == 12:
            broken = state.params["norm"]["scale"].at[0].set(jnp.nan)
            params = {**state.params, "norm": {"scale": broken}}
            state = state._replace(params=params)
        return adamw_step(state, batch)

    keeper = StateKeeper(tmp_path / "states")
    with pytest.raises(DivergedError, match=r"Step 13: .* is nan"):
        fit(
            poisoned,
            begin(ADAMW),
            batches,
            20,
            keeper=keeper,
            pace=TrainingPace(save_seconds=1e-9),
            console=QUIET,
        )
    kept = keeper.restore(begin(ADAMW))
    assert int(kept.step) == 12
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(kept.params))
    keeper.close()


def test_weights_that_are_not_finite_are_not_kept(tmp_path, adamw_step):
    def poisoned(state, batch):
        state, metrics = adamw_step(state, batch)
        params = {**state.params, "norm": {"scale": state.params["norm"]["scale"] * jnp.inf}}
        return state._replace(params=params), metrics

    keeper = StateKeeper(tmp_path / "states")
    with pytest.raises(DivergedError, match=r"not finite in norm\.scale"):
        fit(poisoned, begin(ADAMW), batches, 1, keeper=keeper, console=QUIET)
    assert keeper.latest_step is None
    keeper.close()


def test_a_state_past_the_end_is_refused(adamw_step):
    state = begin(ADAMW)._replace(step=jnp.asarray(9, jnp.int32))
    with pytest.raises(ValueError, match=r"num_steps is 8, but .* step 9"):
        fit(adamw_step, state, batches, 8, console=QUIET)


def test_a_keeper_has_the_last_two_states_while_there_is_room(tmp_path, monkeypatch):
    state = begin(ADAMW)
    keeper = StateKeeper(tmp_path / "states")
    assert keeper.restore(state) is None
    for step in range(1, 5):
        keeper.save(state._replace(step=jnp.asarray(step, jnp.int32)))
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["3", "4"]
    assert int(keeper.restore(state).step) == 4
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device: .*states"):
        keeper.save(state._replace(step=jnp.asarray(5, jnp.int32)))
    assert int(keeper.restore(state).step) == 4
    keeper.close()


def _cut(folder: Path) -> None:
    for path in (folder / "default" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda folder: shutil.rmtree(folder / "default"),
        lambda folder: (folder / "default" / "_METADATA").write_text("5"),
        lambda folder: (folder / "_CHECKPOINT_METADATA").write_text("5"),
    ],
)
def test_a_damaged_state_is_named(damage, tmp_path):
    state, folder = begin(ADAMW), tmp_path / "states"
    keeper = StateKeeper(folder)
    keeper.save(state._replace(step=jnp.asarray(3, jnp.int32)))
    keeper.close()
    damage(folder / "3")
    with pytest.raises(CheckpointError, match=r"states.* cannot be read .* delete its folder"):
        StateKeeper(folder).restore(state)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        PermissionError("no"),
        OSError(5, "Input/output error"),
        ValueError("RESOURCE_EXHAUSTED: no room"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"),
    ],
    ids=repr,
)
def test_a_state_is_not_called_damaged_where_the_machine_is_at_fault(error, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    state, keeper = begin(ADAMW), StateKeeper(tmp_path / "states")
    keeper.save(state)
    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(type(error)) as raised:
        keeper.restore(state)
    assert raised.value is error


def test_a_file_is_no_folder_of_states(tmp_path):
    (tmp_path / "states").write_text("x")
    with pytest.raises(CheckpointError, match="states must be a folder of states, and is a file"):
        StateKeeper(tmp_path / "states")


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """The run below, once left alone and once killed while it works, ends with equal bits."""
    steps = 60
    killed, alone = tmp_path / "killed", tmp_path / "alone"
    process, other = run_slowly(killed, steps, pause=0.05), run_slowly(alone, steps, pause=0.0)
    deadline = time.monotonic() + 120
    while len(saved_steps(killed)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert 0 < max(saved_steps(killed)) < steps

    assert run_slowly(killed, steps, pause=0.0).wait(timeout=120) == 0
    assert other.wait(timeout=120) == 0
    resumed, whole = np.load(killed / "final.npz"), np.load(alone / "final.npz")
    assert resumed.files == whole.files
    assert all(resumed[name].tobytes() == whole[name].tobytes() for name in whole.files)
    # The figures continue without a gap or a repeat.
    records = [json.loads(line) for line in (killed / "history.jsonl").open()]
    assert [record["step"] for record in records] == list(range(10, steps + 1, 10))


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "states").glob("*") if path.name.isdigit()]


def run_slowly(folder: Path, steps: int, pause: float) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.test_loop", str(folder), str(steps), str(pause)],
        cwd=Path(__file__).resolve().parents[2],
    )


def main(folder: Path, steps: int, pause: float) -> None:
    """Trains as a process of its own, saving every few steps; what the test above kills."""
    train_step = make_train_step(NextToken(CONFIG, layer_drop=0.2), ADAMW, steps)

    def slowly(state, batch):
        time.sleep(pause)
        return train_step(state, batch)

    keeper = StateKeeper(folder / "states")
    state = fit(
        slowly,
        begin(ADAMW),
        batches,
        steps,
        keeper=keeper,
        history=History(folder / "history.jsonl"),
        pace=TrainingPace(save_seconds=0.1),
        console=QUIET,
    )
    keeper.close()
    np.savez(folder / "final.npz", *jax.tree.leaves(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_disk_that_is_full_is_said_with_the_file(tmp_path):
    path = tmp_path / "history.jsonl"
    history = History(path)
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*history\.jsonl"):
        history.add(step=1, seconds=0.5)
