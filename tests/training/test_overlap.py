"""Losses between two laws: values and gradients by hand and in NumPy, and what training makes."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import (
    Diffusion,
    Network,
    init_dflash_params,
    init_eagle3_params,
    init_eagle_params,
    init_params,
)
from jaxspec.training.data import pack, pack_answers
from jaxspec.training.deer import Refinement
from jaxspec.training.dflash import AnchoredBlocks, layers_config
from jaxspec.training.eagle import FeatureRegression, HeadQuality, TrainingTimeTest
from jaxspec.training.lm import NextToken, SoftLabels, Taught
from jaxspec.training.loop import make_train_step
from jaxspec.training.optimizer import make_optimizer
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.settings import LOSSES, OptimizerSettings
from jaxspec.training.state import initial_state
from jaxspec.training.target import Observed, head_config

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
