"""Losses between two laws: values and gradients by hand and in NumPy, and what training makes."""

import argparse
import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.commands import train_deer, train_dflash, train_eagle, train_lm
from jaxspec.models import (
    Diffusion,
    Network,
    init_dflash_params,
    init_eagle3_params,
    init_eagle_params,
    init_params,
)
from jaxspec.training.data import pack, pack_answers
from jaxspec.training.deer import DeerTrainer, Refinement
from jaxspec.training.dflash import AnchoredBlocks, DFlashTrainer, layers_config
from jaxspec.training.eagle import (
    EagleTrainer,
    FeatureRegression,
    HeadQuality,
    TrainingTimeTest,
)
from jaxspec.training.lm import LMTrainer, NextToken, SoftLabels, Taught
from jaxspec.training.loop import make_train_step
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.settings import (
    LOSSES,
    OWN_TEXT,
    DeerTrainingSettings,
    DFlashTrainingSettings,
    EagleTrainingSettings,
    LMTrainingSettings,
    OptimizerSettings,
    settings_from_json,
)
from jaxspec.training.state import initial_state
from jaxspec.training.target import Observed, head_config
from jaxspec.training.tokenizer import MASK, RESERVED
from jaxspec.training.train import train
from tests.training.runs import CONFIG, DRAFTING, QUIET, write_model, write_sums

MASK_TOKEN = RESERVED.index(MASK)

# Values and gradients


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def reference(loss, draft_logits, target_logits, ids, counted, decay=3.0):
    """The losses of each place and the gradient of their sum, by their formulas in float64."""
    q, p = softmax(draft_logits), softmax(target_logits)[..., ids]
    coverage, smaller = p.sum(-1, keepdims=True), np.minimum(p, q)
    overlap = smaller.sum(-1, keepdims=True)
    from_overlap = np.where(q < p, q, 0.0) - q * np.where(q < p, q, 0.0).sum(-1, keepdims=True)
    if loss == "cross-entropy":
        return -(p / coverage * np.log(q)).sum(-1), q - p / coverage
    if loss == "overlap":
        return -np.log(overlap)[..., 0], -from_overlap / overlap
    share = np.exp(-decay * overlap[counted].mean())
    values = share * (p * np.log(p / q)).sum(-1) + (1 - share) * (1 - overlap[..., 0])
    return values, share * (q * coverage - p) - (1 - share) * from_overlap


def laws(scale=2.0, vocab=12, ids=(0, 3, 4, 7, 8, 11)):
    rng = np.random.default_rng(0)
    draft = scale * rng.standard_normal((3, 4, len(ids)))
    return draft, 2.0 * rng.standard_normal((3, 4, vocab)), list(ids)


def found_of(draft, target, ids):
    total = jax.nn.logsumexp(target, axis=-1)
    return match(draft, target[..., jnp.asarray(ids)], total)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ids", [(0, 3, 4, 7, 8, 11), tuple(range(12))], ids=["some", "all"])
def test_values_and_gradients_are_those_of_the_formulas(loss, ids):
    draft, target, ids = laws(ids=ids)
    counted = np.arange(12).reshape(3, 4) % 3 > 0
    expected, slope = reference(loss, draft, target, ids, counted)

    def total(draft):
        values = losses_of(loss, found_of(draft, jnp.asarray(target), ids), jnp.asarray(counted))
        return jnp.sum(values), values

    (_, values), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(draft))
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def test_two_tokens_by_hand():
    """The draft says 1/4 and 3/4, the target 1/2 and 1/2: 3/4 of the drawn tokens are accepted."""
    draft = jnp.log(jnp.array([[0.25, 0.75]]))
    counted = jnp.array([True])

    def value(loss, draft):
        return losses_of(loss, match(draft, jnp.zeros((1, 2))), counted)[0]

    assert float(match(draft, jnp.zeros((1, 2))).overlap[0]) == pytest.approx(0.75)
    # A higher first logit moves 0.25 x 0.75 of the probability to where the target has more.
    value_of, slope = jax.value_and_grad(partial(value, "overlap"))(draft)
    assert float(value_of) == pytest.approx(-np.log(0.75), rel=1e-6)
    moved = 0.25 * 0.75
    np.testing.assert_allclose(slope, [[-moved / 0.75, moved / 0.75]], rtol=1e-5)
    share = np.exp(-3 * 0.75)
    divergence = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    value_of, slope = jax.value_and_grad(partial(value, "hybrid"))(draft)
    assert float(value_of) == pytest.approx(share * divergence + (1 - share) * 0.25, rel=1e-5)
    pull = share * 0.25 + (1 - share) * moved
    np.testing.assert_allclose(slope, [[-pull, pull]], rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_laws_are_the_minimum(loss):
    _, target, ids = laws(ids=tuple(range(12)))
    target, counted = jnp.asarray(target), jnp.ones((3, 4), bool)

    def total(draft):
        return jnp.mean(losses_of(loss, found_of(draft, target, ids), counted))

    least, slope = jax.value_and_grad(total)(target)
    assert float(jnp.max(jnp.abs(slope))) < 1e-6
    rng = np.random.default_rng(1)
    for size in (1e-2, 0.3, 3.0):
        other = target + size * rng.standard_normal(target.shape)
        assert float(total(other)) > float(least)
    if loss != "cross-entropy":
        assert float(least) == pytest.approx(0.0, abs=1e-6)


def test_a_draft_without_any_overlap_still_learns():
    """In float32 the probabilities are 0; their logarithms, and so the gradient, are not."""
    draft, target = jnp.array([[300.0, 0.0]]), jnp.array([[0.0, 300.0]])

    def value(draft):
        return losses_of("overlap", match(draft, target), jnp.array([True]))[0]

    least, slope = jax.value_and_grad(value)(draft)
    # The smaller probability of either token is exp(-300).
    assert float(least) == pytest.approx(300 - np.log(2), rel=1e-6)
    np.testing.assert_allclose(slope, [[0.5, -0.5]], atol=1e-6)


def test_what_cannot_be_drafted_is_lost_and_asks_for_nothing():
    """The target's law over tokens 0 and 1 is 1/4 and 1/4; the other half can never be accepted."""
    target = jnp.log(jnp.array([[0.25, 0.25, 0.5]]))
    total = jax.nn.logsumexp(target, axis=-1)

    def value(draft):
        found = match(draft, target[:, :2], total)
        return losses_of("overlap", found, jnp.array([True]))[0]

    enough = jnp.log(jnp.array([[0.3, 0.7]]))
    least, slope = jax.value_and_grad(value)(enough)
    assert float(least) == pytest.approx(np.log(2), rel=1e-6)
    np.testing.assert_allclose(slope, 0.0, atol=1e-7)
    # A logit of -inf says the same as leaving the token out.
    masked = jnp.concatenate([enough, jnp.full((1, 1), -jnp.inf)], axis=1)
    for loss in LOSSES[1:]:

        def whole(draft, loss=loss):
            return losses_of(loss, match(draft, target), jnp.array([True]))[0]

        narrow = losses_of(loss, match(enough, target[:, :2], total), jnp.array([True]))[0]
        wide, slope = jax.value_and_grad(whole)(masked)
        assert float(wide) == pytest.approx(float(narrow), rel=1e-6)
        assert np.isfinite(slope).all()


def test_each_depth_has_its_own_weight_of_the_divergence():
    draft, target, ids = laws()
    counted = np.ones((3, 4), bool)
    found = found_of(jnp.asarray(draft), jnp.asarray(target), ids)
    apart = losses_of("hybrid", found, jnp.asarray(counted), axes=(0,))
    for depth in range(4):
        alone, _ = reference("hybrid", draft[:, depth], target[:, depth], ids, counted[:, depth])
        np.testing.assert_allclose(apart[:, depth], alone, rtol=1e-5)


# Training


LENGTH, BLOCK, MASK_ID = 24, 4, 9
OPTIMIZER = OptimizerSettings("adamw", learning_rate=0.01, warmup_steps=1)


@pytest.fixture(scope="module")
def target(tiny_config):
    """A network with laws that are far from even."""
    params = init_params(tiny_config, jax.random.key(0))
    kernel = 8.0 * params["head"]["kernel"]
    return Network({**params, "head": {"kernel": kernel}}, tiny_config)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(10, 97, size).astype(np.int32) for size in (22, 11, 9, 17)]


def cases(name, target, texts):
    """Returns what makes an objective of a loss, its first weights, and a batch."""
    config, key = head_config(target.config), jax.random.key(7)
    answers, ids = pack_answers(texts, (6, 4, 1, 12), LENGTH), jnp.arange(0, 97, 2)
    if name == "lm":
        params = init_params(target.config, key)
        student = NextToken(target.config)
        batch = Taught(pack(texts, LENGTH), target)
        return lambda loss: SoftLabels(student, 1.0, loss), params, batch
    if name == "eagle-1":
        make = partial(FeatureRegression, config, noise=0.0, token_weight=1.0)
        batch = Observed(pack(texts, LENGTH), target, ids)
        return lambda loss: make(loss=loss), init_eagle_params(config, True, key), batch
    if name == "eagle-3":
        config, taps = config.replace(vocab_size=len(ids)), (0, 1)
        make = partial(TrainingTimeTest, config, taps, num_unrolled=2)
        params = init_eagle3_params(config, 2 * target.embed_dim, key)
        batch = Observed(pack(texts, LENGTH), target, ids)
        return lambda loss: make(loss=loss), params, batch
    if name == "dflash":
        config, taps = layers_config(target.config, 1, 24), (0, 1)
        make = partial(AnchoredBlocks, config, taps, MASK_ID, BLOCK, 99, 2.0)
        params = init_dflash_params(config, 2 * target.embed_dim, key)
        return lambda loss: make(loss=loss), params, Observed(answers, target)
    config = target.config.replace(diffusion=Diffusion(MASK_ID, True, 4))
    answers = pack_answers(texts, (6, 4, 1, 12), LENGTH, 4, MASK_ID)
    make = partial(Refinement, config, 8, cuts="all")
    return lambda loss: make(loss=loss), init_params(config, key), Observed(answers, target)


@pytest.mark.parametrize("name", ["lm", "eagle-1", "eagle-3", "dflash", "deer"])
def test_the_overlap_rises_with_either_loss(name, target, texts):
    objective_of, params, batch = cases(name, target, texts)
    measured = objective_of("overlap")
    if name.startswith("eagle"):
        measured = HeadQuality(measured, depth=1, top_k=2)

    @jax.jit
    def overlap(params):
        metrics = measured(params, batch, jax.random.key(0))[1]
        return metrics["overlap"] if "overlap" in metrics else metrics["overlap_at_1"]

    before = float(overlap(params))
    for loss in LOSSES[1:]:
        step = make_train_step(objective_of(loss), OPTIMIZER, 30)
        state = initial_state(jax.tree.map(jnp.copy, params), make_optimizer(OPTIMIZER, 30))
        for _ in range(30):
            state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        assert float(overlap(state.params)) > 1.2 * before, loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a diffusion model that shares its tokenizer, and text."""
    folder = tmp_path_factory.mktemp("overlap")
    write_model(folder / "target", CONFIG)
    write_model(folder / "diffusion", CONFIG.replace(diffusion=Diffusion(MASK_TOKEN, True, 4)))
    return folder


RUNS = {
    "lm": (LMTrainer, LMTrainingSettings, {"model": CONFIG, "teacher": "target"}),
    "eagle": (
        EagleTrainer,
        EagleTrainingSettings,
        {"draft_vocab": 48, "paths": ((0,), (0, 0)), "cache_features": True},
    ),
    "dflash": (
        DFlashTrainer,
        DFlashTrainingSettings,
        {"layers": 1, "taps": (0, 1), "block": 4, "anchors": 8, "cache_features": True},
    ),
    "deer": (DeerTrainer, DeerTrainingSettings, {"start_from": "diffusion", "stage": 2}),
}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_has_one_loss_and_says_so(name, folder):
    trainer, kind, changes = RUNS[name]
    values = {**DRAFTING, "num_steps": 2, "loss": "hybrid", "dtype": "bfloat16", **changes}
    for field in ("teacher", "start_from"):
        if field in values:
            values[field] = str(folder / values[field])
    if name == "lm":
        del values["decoding_prompts"]
    else:
        values |= {"target": str(folder / "target"), "decoding_prompts": 0}
    settings = kind((write_sums(folder),), **values)
    state, out = folder / name / "state", folder / name / "out"
    trained = train(trainer(settings), state, out, console=QUIET)
    figures = trained.metrics["validation"][OWN_TEXT]
    shown = [value for metric, value in figures.items() if metric.startswith("overlap")]
    assert shown
    assert all(0 < value <= 1 for value in shown)
    stored = json.loads((out / "training.json").read_text())
    assert stored["loss"] == "hybrid"
    assert settings_from_json(stored, kind) == settings
    assert "is accepted" in (out / "recipe.md").read_text()
    other = dataclasses.replace(settings, loss="overlap")
    with pytest.raises(ValueError, match="loss: 'hybrid' before, 'overlap' now"):
        train(trainer(other), state, console=QUIET)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (train_lm, ["--teacher", "t"]),
        (train_eagle, ["--target", "t"]),
        (train_dflash, ["--target", "t"]),
        (train_deer, ["--target", "t", "--start-from", "d", "--stage", "2"]),
    ],
)
def test_one_flag_says_it_to_every_trainer(command, flags, capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = ["--out", "x", "--data", "notes=notes.txt", *flags]
    assert command.settings_from_arguments(parser.parse_args(flags)).loss == "cross-entropy"
    for loss in LOSSES:
        args = parser.parse_args([*flags, "--loss", loss])
        assert command.settings_from_arguments(args).loss == loss
    with pytest.raises(SystemExit):
        parser.parse_args([*flags, "--loss", "total"])
    assert "--loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (train_lm, [], "name one (--teacher FOLDER), or leave it out"),
        (
            train_deer,
            ["--target", "t", "--start-from", "d"],
            "loss is a setting of stage 2: leave it out in stage 1",
        ),
    ],
)
def test_text_alone_has_no_law_to_match(command, flags, message):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(
        ["--out", "x", "--data", "notes=notes.txt", "--loss", "overlap", *flags]
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        command.settings_from_arguments(args)
