"""One gradient of each trainer in float32 agrees with the same in float64.

Guards against wrong sums in the compiler. They appear when it optimises (see `tests/test_jax.py`),
which the quick tests leave out, so this test is slow, and runs as users run. float32 rounds each
operation to 6e-8; sums over a few thousand terms of a tiny model give relative errors near 1e-6 of
the gradient's norm (measured). The tolerance is 1e-4; a wrong sum is far above it.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.types import PyTree
from jaxspec.models import Diffusion
from jaxspec.sharding import spread_rows
from jaxspec.training.deer import DeerTrainer
from jaxspec.training.dflash import DFlashTrainer
from jaxspec.training.eagle import EagleTrainer
from jaxspec.training.lm import LMTrainer
from jaxspec.training.masked import MaskedTrainer
from jaxspec.training.plan import data_mesh
from jaxspec.training.settings import (
    AnswersSettings,
    DeerTrainingSettings,
    DFlashTrainingSettings,
    DraftingSettings,
    EagleTrainingSettings,
    LMTrainingSettings,
    MaskedTrainingSettings,
)
from jaxspec.training.sources import read_source
from jaxspec.training.tokenizer import MASK, RESERVED
from jaxspec.training.train import Run
from tests.training.runs import CONFIG, QUIET, write_model, write_sums

TINY = CONFIG.replace(vocab_size=279)
TOLERANCE = 1e-4
COMMON = {"num_steps": 1, "minutes": None, "sequence_length": 32, "rows_per_batch": 4}
# Settings of each trainer that are not common to all; folders by their names.
CASES = {
    "lm": (LMTrainer, LMTrainingSettings, {"model": TINY, "tokenizer": "target"}),
    "lm-teacher": (LMTrainer, LMTrainingSettings, {"model": TINY, "teacher": "target"}),
    # Another seed than the teacher's: at equal laws the overlap has no gradient.
    "lm-overlap": (
        LMTrainer,
        LMTrainingSettings,
        {"model": TINY, "teacher": "target", "loss": "overlap", "seed": 1},
    ),
    "lm-drop": (
        LMTrainer,
        LMTrainingSettings,
        {"model": TINY, "tokenizer": "target", "layer_drop": 0.5, "early_exit": 0.5},
    ),
    "masked": (MaskedTrainer, MaskedTrainingSettings, {"start_from": "target"}),
    "masked-block": (MaskedTrainer, MaskedTrainingSettings, {"start_from": "target", "block": 4}),
    "eagle-1": (EagleTrainer, EagleTrainingSettings, {"sources_weight": 1.0, "draft_vocab": 48}),
    "eagle-1-hybrid": (
        EagleTrainer,
        EagleTrainingSettings,
        {"sources_weight": 1.0, "draft_vocab": 48, "loss": "hybrid"},
    ),
    "eagle-3": (
        EagleTrainer,
        EagleTrainingSettings,
        {"sources_weight": 1.0, "version": 3, "taps": (0, 1), "num_unrolled": 2},
    ),
    "deer-1": (DeerTrainer, DeerTrainingSettings, {"start_from": "diffusion"}),
    "deer-2": (
        DeerTrainer,
        DeerTrainingSettings,
        {"start_from": "diffusion", "stage": 2, "cuts": "all", "longest": 8},
    ),
    "deer-2-overlap": (
        DeerTrainer,
        DeerTrainingSettings,
        {"start_from": "diffusion", "stage": 2, "cuts": "all", "longest": 8, "loss": "overlap"},
    ),
    "dflash": (
        DFlashTrainer,
        DFlashTrainingSettings,
        {"layers": 1, "taps": (0, 1), "block": 4, "anchors": 8},
    ),
    "dflash-hybrid": (
        DFlashTrainer,
        DFlashTrainingSettings,
        {"layers": 1, "taps": (0, 1), "block": 4, "anchors": 8, "loss": "hybrid"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float64")
    write_model(folder / "target", TINY)
    diffusion = Diffusion(RESERVED.index(MASK), True, 4)
    write_model(folder / "diffusion", TINY.replace(diffusion=diffusion))
    answers = [{"prompt": f"{a} and {a} make", "answer": f" {2 * a}, {a} and"} for a in range(21)]
    text = "".join(json.dumps(answer) + "\n" for answer in answers)
    (folder / "answers.jsonl").write_text(text)
    return folder


def draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets objectives draw the same numbers in both precisions, those of float32."""
    uniform, randint = jax.random.uniform, jax.random.randint
    bernoulli = jax.random.bernoulli

    def narrow(p):
        return jnp.asarray(p, jnp.float32)

    monkeypatch.setattr(jax.random, "uniform", partial(uniform, dtype=jnp.float32))
    monkeypatch.setattr(jax.random, "randint", partial(randint, dtype=jnp.int32))
    monkeypatch.setattr(
        jax.random, "bernoulli", lambda key, p, *shape: bernoulli(key, narrow(p), *shape)
    )


def task_of(name: str, folder):
    """The first weights and the first batch of a trainer, and its objective."""
    trainer, kind, changes = CASES[name]
    source = write_sums(folder)
    folders = {
        field: str(folder / value) if value in ("target", "diffusion") else value
        for field, value in changes.items()
    }
    if issubclass(kind, DraftingSettings):
        folders |= {"target": str(folder / "target"), "decoding_prompts": 0}
    if issubclass(kind, AnswersSettings):
        folders["answers"] = str(folder / "answers.jsonl")
    trainer = trainer(kind((source,), **{**COMMON, **folders}))
    run = Run(trainer.settings, folder / name, None, data_mesh(1), {}, QUIET)
    run.state_folder.mkdir(exist_ok=True)
    task = trainer.task(run, trainer.open(run), [read_source(source)])
    rows = task.corpus.batches(4, 0)(0)
    return task, task.as_batch(spread_rows(run.mesh, rows))


def widened(tree: PyTree) -> PyTree:
    def widen(leaf):
        array = np.asarray(leaf)
        return array.astype(np.float64) if array.dtype == np.float32 else array

    return jax.tree.map(widen, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_agrees_with_that_in_float64(name, folder, monkeypatch):
    task, batch = task_of(name, folder)
    params = task.first_params()
    draw_alike(monkeypatch)

    def differentiate(params, batch):
        # A new function for each precision: compilations of the other must not be found.
        objective = task.objective("float32")
        function = jax.jit(
            jax.value_and_grad(lambda p, b: objective(p, b, jax.random.key(5)), has_aux=True)
        )
        (loss, metrics), gradient = function(params, batch)
        return jax.device_get((loss, metrics["tokens"], gradient))

    loss, tokens, gradient = differentiate(params, batch)
    with jax.enable_x64(True):
        exact_loss, exact_tokens, exact = differentiate(widened(params), widened(batch))
    kinds = {leaf.dtype for leaf in jax.tree.leaves((exact_loss, exact))}
    assert kinds == {np.dtype(np.float64)}
    assert tokens == exact_tokens > 0
    assert abs(loss - exact_loss) < TOLERANCE * abs(exact_loss)
    squares = [np.sum(leaf**2) for leaf in jax.tree.leaves(exact)]
    errors = [
        np.sum((one - other) ** 2)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True)
    ]
    assert sum(squares) > 0
    assert sum(errors) ** 0.5 < TOLERANCE * sum(squares) ** 0.5
