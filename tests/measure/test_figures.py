"""Speed-ups are ratios of totals, and their intervals cover what they should."""

import numpy as np
import pytest

from jaxspec.measure.figures import speedup_interval


def costs(seconds, tokens=None):
    seconds = np.asarray(seconds, float)
    tokens = np.full(seconds.shape, 10.0) if tokens is None else np.asarray(tokens, float)
    return np.stack([seconds, tokens], axis=-1)


def test_a_constant_ratio_has_no_width():
    plain = np.asarray([1.0, 5.0, 0.2, 40.0])
    assert speedup_interval(costs(plain), costs(plain / 3)) == pytest.approx((3.0, 3.0))


def test_one_prompt_has_no_interval():
    assert speedup_interval(costs([1.0]), costs([0.5])) is None


def test_long_prompts_weigh_more_than_short_ones():
    plain, method = costs([1.0] * 50 + [100.0] * 50), costs([2.0] * 50 + [50.0] * 50)
    low, high = speedup_interval(plain, method)
    assert 1.9 < low < 5050 / 2600 < high < 2.0  # the mean of ratios would be 1.25


def test_time_is_counted_per_token():
    plain, method = costs([1.0, 1.0], [10, 10]), costs([1.0, 1.0], [20, 20])
    assert speedup_interval(plain, method) == pytest.approx((2.0, 2.0))


def test_the_interval_covers_the_true_ratio_about_19_times_in_20():
    random = np.random.default_rng(1)
    truth, num_prompts, covered = 1.5, 40, 0
    for trial in range(200):
        plain = random.gamma(4.0, 1.0, num_prompts)
        method = plain / truth * random.gamma(25.0, 1 / 25, num_prompts)
        low, high = speedup_interval(costs(plain), costs(method), num_resamples=400, seed=trial)
        covered += low <= truth <= high
    # 190 expected; percentile intervals over 40 prompts cover a little less than they say.
    assert 172 <= covered <= 199
