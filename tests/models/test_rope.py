import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from jaxspec.models.rope import inverse_frequencies, rotate, rotations

HEAD = 16
PLAIN = [10_000.0 ** (-2 * i / HEAD) for i in range(HEAD // 2)]


def frequencies(scaling, max_positions=4096):
    return inverse_frequencies(Rope(scaling=scaling), HEAD, max_positions)


def test_unscaled_frequencies_are_powers_of_the_base():
    turns, factor = frequencies(None)
    np.testing.assert_allclose(turns, PLAIN, rtol=1e-6)
    assert factor == 1.0
    assert turns.dtype == np.float32


def test_a_fraction_rotates_the_first_dimensions_only():
    turns, _ = inverse_frequencies(Rope(theta=100.0, fraction=0.25), HEAD, 64)
    np.testing.assert_allclose(turns, [1.0, 0.1], rtol=1e-6)
    heads = np.random.default_rng(0).normal(size=(5, 2, 3, HEAD)).astype(np.float32)
    cosines, sines = rotations(Rope(fraction=0.25), HEAD, 64, jnp.arange(5))
    turned = rotate(jnp.asarray(heads), cosines, sines)
    np.testing.assert_array_equal(turned[..., 4:], heads[..., 4:])
    assert np.abs(turned[1:, ..., :4] - heads[1:, ..., :4]).max() > 0.1


def test_rotation_is_of_the_pairs_of_the_two_halves():
    heads = np.zeros((1, 1, 1, 4), np.float32)
    heads[..., 0] = 1.0
    cosines, sines = rotations(Rope(), 4, 64, jnp.array([2]))
    turned = rotate(jnp.asarray(heads), cosines, sines)
    np.testing.assert_allclose(turned[0, 0, 0], [math.cos(2), 0, math.sin(2), 0], atol=1e-6)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, HEAD)).astype(np.float32)

    def score(query_position, key_position):
        positions = jnp.array([query_position, key_position])
        both = jnp.asarray(np.stack([query, key]))[:, None, None]
        turned = rotate(both, *rotations(Rope(), HEAD, 64, positions))[:, 0, 0]
        return turned[0] @ turned[1]

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)


def test_linear_divides_all():
    turns, _ = frequencies(LinearScaling(8.0))
    np.testing.assert_allclose(turns, np.array(PLAIN) / 8, rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    factor, low, high, original = 8.0, 1.0, 4.0, 1024
    expected = []
    for turn in PLAIN:
        wavelength = 2 * math.pi / turn
        smooth = (original / wavelength - low) / (high - low)
        if wavelength > original / low:
            expected.append(turn / factor)
        elif wavelength < original / high:
            expected.append(turn)
        else:
            expected.append((1 - smooth) * turn / factor + smooth * turn)
    assert len({round(e / p, 4) for e, p in zip(expected, PLAIN, strict=True)}) >= 3
    turns, attention = frequencies(Llama3Scaling(factor, low, high, original))
    np.testing.assert_allclose(turns, expected, rtol=1e-6)
    assert attention == 1.0


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_over_dimensions(truncate):
    factor, original = 4.0, 512

    def dimension(rotations):
        return HEAD * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(10_000.0))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, turn in enumerate(PLAIN):
        slow = min(max((i - max(low, 0)) / (min(high, HEAD - 1) - max(low, 0)), 0), 1)
        expected.append(turn / factor * slow + turn * (1 - slow))
    turns, attention = frequencies(YarnScaling(factor, original, truncate=truncate))
    np.testing.assert_allclose(turns, expected, rtol=1e-6)
    assert attention == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factors():
    assert frequencies(YarnScaling(4.0, 512, attention_factor=0.7))[1] == 0.7
    both = YarnScaling(4.0, 512, mscale=0.5, mscale_all_dim=0.25)
    expected = (0.05 * math.log(4) + 1) / (0.025 * math.log(4) + 1)
    assert frequencies(both)[1] == pytest.approx(expected)
    cosines, _ = rotations(Rope(scaling=YarnScaling(4.0, 512)), HEAD, 64, jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(cosines, 0.1 * math.log(4) + 1, rtol=1e-6)


@pytest.mark.parametrize(("max_positions", "table"), [(64, 0), (65, 1)])
def test_longrope_chooses_one_table_by_the_longest_text(max_positions, table):
    tables = (tuple(1.0 + 0.1 * i for i in range(8)), tuple(2.0 + i for i in range(8)))
    scaling = LongRopeScaling(*tables, factor=4.0, original_max_positions=64)
    turns, attention = frequencies(scaling, max_positions)
    np.testing.assert_allclose(turns, np.array(PLAIN) / tables[table], rtol=1e-6)
    assert attention == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    given = LongRopeScaling(*tables, 4.0, 64, attention_factor=1.5)
    assert frequencies(given, max_positions)[1] == 1.5


def test_dynamic_gives_each_position_the_base_of_a_text_that_ends_there():
    original, factor = 32, 2.0
    rope = Rope(scaling=DynamicScaling(factor, original))
    positions = np.array([0, 5, 31, 32, 100])
    expected = []
    for position in positions:
        length = max(position + 1, original)
        growth = factor * length / original - (factor - 1)
        theta = 10_000.0 * growth ** (HEAD / (HEAD - 2))
        expected.append([position * theta ** (-2 * i / HEAD) for i in range(HEAD // 2)])
    cosines, sines = rotations(rope, HEAD, 4096, jnp.asarray(positions))
    np.testing.assert_allclose(cosines, np.cos(expected), atol=1e-4)
    np.testing.assert_allclose(sines, np.sin(expected), atol=1e-4)
    one_pair = rotations(Rope(scaling=DynamicScaling(2.0, 4)), 2, 64, jnp.array([9]))
    np.testing.assert_allclose(one_pair[0], math.cos(9), atol=1e-5)


def test_angles_are_float32_for_half_precision_heads():
    heads = jnp.ones((1, 1, 1, HEAD), jnp.bfloat16)
    cosines, sines = rotations(Rope(), HEAD, 200_000, jnp.array([100_003]))
    exact = 100_003 * np.array(PLAIN)
    np.testing.assert_allclose(cosines[0], np.cos(exact), atol=0.02)
    assert cosines.dtype == jnp.float32
    assert rotate(heads, cosines, sines).dtype == jnp.bfloat16
