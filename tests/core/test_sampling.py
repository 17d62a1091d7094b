"""Warpers against a plain reference that sorts; draws against the laws they claim."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.sampling import (
    argmax_rows,
    at_least_float32,
    draw_without_replacement,
    inverse_cdf,
    warp_logits,
)
from jaxspec.core.types import Warp

VOCAB = 40
ALMOST_ONE = 1 - 2.0**-24  # the largest uniform in float32


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def warped_law(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """The law after bias, temperature, top-k, top-p and min-p, by sorting, in float64."""
    logits = logits.astype(np.float64) + (0 if bias is None else bias)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    logits = logits / temperature
    if top_k > 0:
        logits = np.where(logits >= np.sort(logits)[-min(top_k, len(logits))], logits, -np.inf)
    if top_p < 1:
        law = softmax(logits)
        order = np.argsort(-law, kind="stable")
        enough = np.searchsorted(np.cumsum(law[order]), top_p)
        logits = np.where(law >= law[order[min(enough, len(law) - 1)]], logits, -np.inf)
    law = softmax(logits)
    if min_p > 0:
        law = np.where(law >= min_p * law.max(), law, 0.0)
    return law / law.sum()


def law(logits: np.ndarray, warp: Warp) -> np.ndarray:
    return np.asarray(jax.nn.softmax(warp_logits(jnp.asarray(logits), warp), axis=-1))


def random_logits(seed: int, rows: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def with_ties(seed: int) -> np.ndarray:
    """Logits in steps of one half: many equal ones, zeros of both signs among them."""
    logits = np.round(random_logits(seed) * 2) / 2
    return np.where((logits == 0) & (np.arange(VOCAB) % 2 == 0), -0.0, logits).astype(np.float32)


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": VOCAB},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 0.6, "top_p": 0.83},
    {"temperature": 1.0, "min_p": 0.11},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.77, "min_p": 0.03},
]


def make_warp(settings: dict[str, float]) -> Warp:
    dtypes = {"top_k": jnp.int32}
    return Warp(
        **{
            name: jnp.asarray(value, dtypes.get(name, jnp.float32))
            for name, value in settings.items()
        }
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("draw", [random_logits, with_ties])
def test_warping_equals_the_sorting_reference(draw, settings):
    logits = draw(0)
    expected = np.stack([warped_law(row, **settings) for row in logits])
    ours = law(logits, make_warp(settings))
    np.testing.assert_array_equal(ours > 0, expected > 0)
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_without_a_temperature_only_the_bias_acts():
    logits, bias = random_logits(1), np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    np.testing.assert_array_equal(warp_logits(jnp.asarray(logits), Warp()), logits)
    np.testing.assert_array_equal(
        warp_logits(jnp.asarray(logits), Warp(bias=jnp.asarray(bias))), logits + bias
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_banned_tokens_have_no_probability(temperature):
    logits = random_logits(2)
    bias = np.zeros(VOCAB, np.float32)
    bias[np.argmax(logits, axis=1)] = -np.inf
    bias[3] = 4.0
    warp = make_warp({"temperature": temperature, "top_k": 7})._replace(bias=jnp.asarray(bias))
    expected = [warped_law(row, temperature, top_k=7, bias=bias) for row in logits]
    ours = law(logits, warp)
    assert (ours[:, np.isinf(bias)] == 0).all()
    np.testing.assert_allclose(ours, np.stack(expected), atol=2e-6)


def test_rows_of_a_batch_have_settings_of_their_own():
    rows = [
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 9, "top_p": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    ]
    logits = np.stack([random_logits(seed) for seed in range(len(rows))])
    warps = jax.tree.map(lambda *values: jnp.stack(values), *map(make_warp, rows))
    ours = jax.nn.softmax(jax.vmap(warp_logits)(jnp.asarray(logits), warps), axis=-1)
    for row, settings in enumerate(rows):
        expected = np.stack([warped_law(one, **settings) for one in logits[row]])
        np.testing.assert_allclose(ours[row], expected, atol=2e-6)


@pytest.mark.parametrize("name", ["llama_gqa_dev", "qwen3_dev"])
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("probs_t07", {"temperature": 0.7}),
        ("probs_t07_k20_p09", {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
        ("probs_p05", {"temperature": 1.0, "top_p": 0.5}),
        ("probs_minp01", {"temperature": 1.0, "min_p": 0.1}),
    ],
)
def test_warping_equals_the_recorded_laws(recorded_folder, name, key, settings):
    recorded = np.load(recorded_folder("checkpoints", name) / "oracle.npz")
    ours = law(recorded["logits"][20:24], make_warp(settings))
    np.testing.assert_array_equal(ours > 0, recorded[key] > 0)
    np.testing.assert_allclose(ours, recorded[key], atol=1e-6)


def test_half_precisions_are_promoted_and_float64_is_kept():
    assert at_least_float32(jnp.zeros(3, jnp.bfloat16)).dtype == jnp.float32
    assert at_least_float32(jnp.zeros(3, jnp.float32)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert at_least_float32(jnp.zeros(3, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_row_without_a_law_is_not_made_into_one(bad, temperature):
    """The decoder looks for such rows after warping; they must still be seen there."""
    warp = make_warp({"temperature": temperature})
    warped = warp_logits(jnp.full((1, VOCAB), bad, jnp.float32), warp)
    assert not jnp.isfinite(jnp.max(warped))


def test_argmax_takes_the_lowest_of_equals_and_stays_in_range():
    inf, nan = np.inf, np.nan
    rows = [[1, 3, 3, 2], [-inf, -inf, -inf, -inf], [nan, 1, 2, 3], [-0.0, 0.0, -1, -1]]
    chosen = argmax_rows(jnp.array(rows)).tolist()
    assert chosen[:2] + chosen[3:] == [1, 0, 0]
    assert 0 <= chosen[2] < 4
    logits = with_ties(3)
    np.testing.assert_array_equal(argmax_rows(jnp.asarray(logits)), np.argmax(logits, axis=1))


def test_inverse_cdf_by_eye():
    weights = jnp.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])  # not normalised
    uniforms = jnp.array([0.0, 0.2499, 0.25, 0.7499, 0.75, ALMOST_ONE])
    drawn = [int(inverse_cdf(weights, uniform)) for uniform in uniforms]
    assert drawn == [1, 1, 3, 3, 4, 4]


def test_inverse_cdf_never_draws_a_token_without_weight():
    """Uniforms that hit the partial sums exactly: there the order of summation shows."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        weights = rng.random(1000, dtype=np.float32) * (rng.random(1000) < 0.5)
        weights = jnp.asarray(weights, jnp.float32)
        sums = np.asarray(jnp.cumsum(weights), np.float64)
        uniforms = np.append(sums / sums[-1], [0.0, ALMOST_ONE]).astype(np.float32)
        uniforms = uniforms[uniforms < 1]
        drawn = jax.vmap(inverse_cdf, (None, 0))(weights, jnp.asarray(uniforms))
        assert (weights[drawn] > 0).all()


def test_inverse_cdf_has_the_law_of_its_weights():
    weights = random_logits(4, rows=1)[0] ** 2
    uniforms = (np.arange(200_000) + 0.5) / 200_000
    drawn = jax.vmap(inverse_cdf, (None, 0))(
        jnp.asarray(weights), jnp.asarray(uniforms, jnp.float32)
    )
    shares = np.bincount(drawn, minlength=VOCAB) / len(uniforms)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=2e-5)


def test_siblings_are_drawn_one_by_one_without_replacement():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    draws = 60_000
    rows = jnp.broadcast_to(jnp.log(probs).astype(jnp.float32), (draws, 4))
    drawn = np.asarray(draw_without_replacement(jax.random.key(0), rows, 2))
    chi_square = 0.0
    for first, second in itertools.permutations(range(4), 2):
        expected = draws * probs[first] * probs[second] / (1 - probs[first])
        observed = np.sum((drawn[:, 0] == first) & (drawn[:, 1] == second))
        chi_square += (observed - expected) ** 2 / expected
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert chi_square < 31.3  # 11 degrees of freedom: a correct sampler fails 1 time in 10^3.


def test_fillers_come_after_every_possible_token():
    logprobs = jnp.log(jnp.array([[0.0, 0.4, 0.0, 0.6], [0.0, 0.0, 1.0, 0.0]]))
    drawn = np.asarray(draw_without_replacement(jax.random.key(1), logprobs, 3))
    assert set(drawn[0, :2]) == {1, 3}
    assert drawn[1, 0] == 2
    assert all(len(set(row)) == 3 for row in drawn.tolist())


def test_sampling_does_not_sort():
    """On a CPU one sort of a row of logits costs more than a small model's pass."""
    warp = make_warp({"temperature": 0.8, "top_k": 12, "top_p": 0.77, "min_p": 0.03})

    def draw(logits, uniforms):
        return jax.vmap(inverse_cdf)(jax.nn.softmax(warp_logits(logits, warp), -1), uniforms)

    program = jax.jit(draw).lower(jnp.zeros((5, 512)), jnp.zeros(5)).compile().as_text()
    assert " sort(" not in program
