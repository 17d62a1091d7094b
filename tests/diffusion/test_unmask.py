"""Decisions: one order, exact counts, ends of blocks and rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.core.types import Stop
from jaxspec.diffusion.unmask import (
    ORDERS,
    Canvas,
    EvenPace,
    LinearPace,
    Prediction,
    Rules,
    ThresholdPace,
    advance,
    linear_shares,
    places,
    predict,
)

MASK, BLOCK, LENGTH = 9, 4, 3
RULES = Rules(block=BLOCK, order="low_confidence", mask_token_id=MASK, num_tokens=10)
PROMPT = (1, 2, 3)


def canvas(*filled: int, step: int = 0, num_masks: int = BLOCK) -> Canvas:
    tokens = jnp.asarray([*PROMPT, *filled, 0, 0], jnp.int32)
    return Canvas(
        tokens, jnp.int32(LENGTH), jnp.int32(step), jnp.int32(num_masks), jnp.int32(Stop.RUNNING)
    )


def prediction(tokens, scores, start: int = LENGTH) -> Prediction:
    every = jnp.ones(len(tokens), bool)
    return Prediction(
        jnp.int32(start),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(scores, jnp.float32),
        every,
        every,
    )


def decide(before, said, pace=None, rules=RULES, stop_ids=(-1,), blocks: int = 2, cut: int = 0):
    """`cut` places of the last block were not asked for."""
    end = jnp.int32(LENGTH + blocks * BLOCK)
    pace = EvenPace(jnp.int32(BLOCK)) if pace is None else pace
    return advance(
        rules, pace, jnp.asarray(stop_ids), jnp.int32(LENGTH), end - cut, end, before, said
    )


def text(after: Canvas, blocks: int = 2) -> list[int]:
    return after.tokens[LENGTH : LENGTH + blocks * BLOCK].tolist()


def test_ties_go_to_the_lowest_place():
    scores = jnp.asarray([-1.0, -0.5, -0.5, -3.0, -0.5])
    eligible = jnp.asarray([True, False, True, True, True])
    assert places(scores, eligible).tolist() == [2, 5, 0, 3, 1]


def test_the_surest_place_of_the_current_block_comes_first():
    M = MASK
    said = prediction([4, 5, 6, 7, 8, 8, 8, 8], [-3, -1, -2, -4, -0.1, 0, 0, 0])
    after = decide(canvas(*[M] * 8), said)
    assert text(after) == [M, 5, M, M, M, M, M, M]
    assert (after.start, after.step, after.stop) == (LENGTH, 1, Stop.RUNNING)
    last = decide(canvas(4, 5, M, 7, M, M, M, M, step=3), said)
    assert text(last) == [4, 5, 6, 7, M, M, M, M]
    assert (last.start, last.step, last.num_masks) == (LENGTH + BLOCK, 0, BLOCK)


@pytest.mark.parametrize(("steps", "counts"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (4, [1] * 4)])
def test_masks_are_spread_over_the_steps(steps, counts):
    after = canvas(*[MASK] * 8)
    said = prediction([4, 5, 6, 7] + [8] * 4, [-3, -1, -2, -4, -1, -1, -1, -1])
    filled = []
    for _ in counts:
        before = text(after).count(MASK)
        after = decide(after, said, EvenPace(jnp.int32(steps)))
        filled.append(before - text(after).count(MASK))
    assert filled == counts
    assert after.start == LENGTH + BLOCK


def test_time_that_runs_linearly():
    """floor(masks * (1 - s/t)), where 16 equal steps to a thousandth give 0 first: 0.999."""
    shares = linear_shares(16, 1e-3, most=16)
    assert shares.dtype == np.float32
    assert np.floor(np.float32(16) * shares[0]) == 0
    assert shares[-1] == 1.0
    pace = LinearPace(jnp.asarray([0.3, 1.0], jnp.float32))
    after = decide(canvas(*[MASK] * 8), prediction([4] * 8, [-1.0] * 8), pace)
    assert text(after) == [4, *[MASK] * 7]
    assert text(decide(after, prediction([5] * 8, [-1.0] * 8), pace)) == [4, 5, 5, 5, *[MASK] * 4]


@pytest.mark.parametrize("eps", [1e-3, 0.5])
@pytest.mark.parametrize("steps", [4, 5, 7, 64, 3000])
def test_of_more_steps_than_masks_those_that_fill_in_nothing_are_left_out(steps, eps):
    def fills(shares, masks):
        for share in shares:
            count = int(np.floor(np.float32(masks) * share))
            masks -= count
            yield count

    every, left = linear_shares(steps, eps, most=steps), linear_shares(steps, eps, most=4)
    assert len(every) == steps
    assert len(left) <= 4
    for masks in range(1, 5):
        assert [*filter(None, fills(left, masks))] == [*filter(None, fills(every, masks))]


def test_a_threshold_fills_in_what_is_sure_and_one_at_least():
    pace = ThresholdPace(jnp.log(0.5))
    said = prediction([4, 5, 6, 7, 8, 8, 8, 8], np.log([0.6, 0.4, 0.9, 0.2, 0.9, 0.9, 0.9, 0.9]))
    assert text(decide(canvas(*[MASK] * 8), said, pace)) == [4, MASK, 6, *[MASK] * 5]
    unsure = said._replace(scores=jnp.log(jnp.full(8, 0.1)))
    assert text(decide(canvas(*[MASK] * 8), unsure, pace)) == [4, *[MASK] * 7]


def test_the_end_of_a_text():
    M, said = MASK, prediction([8, 5, 6, 7, 4, 4, 4, 4], [-1, -2, -3, -4, -1, -1, -1, -1])
    # A stop id behind a mask may yet turn out to stand after another one.
    behind = decide(canvas(M, 8, M, M, M, M, M, M), prediction([5] * 8, [-9.0] * 4 + [0] * 4))
    assert decide(canvas(M, M, 8, M, M, M, M, M), said, stop_ids=(8, -1)).stop == Stop.TOKEN
    assert behind.stop == Stop.RUNNING
    last = canvas(1, 1, 1, 1, 1, 1, M, 1)._replace(start=jnp.int32(LENGTH + BLOCK))
    assert decide(last, said).stop == Stop.LENGTH
    # A last place that will be cut is not waited for, nor does it end a text that is not whole.
    two = canvas(1, 1, 1, 1, 1, 1, M, M)._replace(start=jnp.int32(LENGTH + BLOCK))
    first, second = (prediction([4] * 8, [-9] * 6 + scores) for scores in ([-1, -2], [-2, -1]))
    assert decide(two, first, cut=1).stop == Stop.LENGTH
    assert decide(two, first).stop == decide(two, second, cut=1).stop == Stop.RUNNING
    broken = said._replace(finite=jnp.arange(8) != 2)
    stopped = decide(canvas(*[M] * 8), broken)
    assert (stopped.stop, text(stopped)) == (Stop.NOT_FINITE, [M] * 8)
    assert text(decide(stopped, said)) == [M] * 8


@pytest.mark.parametrize("pace", [EvenPace(jnp.int32(BLOCK)), ThresholdPace(jnp.log(0.5))])
def test_a_mask_that_is_chosen_stays_open_and_is_not_made_up_for(pace):
    """The block ends all the same, where Fast-dLLM's own loop would not."""
    rules = Rules(BLOCK, "low_confidence", MASK, 10, allow_mask_token=True)
    said = prediction([MASK, 5, 6, 7] + [8] * 4, [-1, -2, -3, -4, -1, -1, -1, -1])
    after = canvas(*[MASK] * 8)
    for _ in range(BLOCK):
        after = decide(after, said, pace, rules)
    assert text(after) == [MASK] * 8  # always the surest
    assert after.start == LENGTH + BLOCK


def test_orders():
    logits = jnp.log(jnp.asarray([[0.5, 0.4, 0.1, 1e-9], [0.4, 0.2, 0.2, 0.2]]))
    key = jax.random.key(0)

    def scores(order, temperature=None):
        rules = Rules(BLOCK, order, mask_token_id=3, num_tokens=4)
        said = predict(rules, logits, jnp.int32(0), key, temperature)
        return np.exp(said.scores)

    assert ORDERS.keys() == {"low_confidence", "maskgit_plus", "entropy", "topk_margin", "random"}
    np.testing.assert_allclose(scores("low_confidence"), [0.5, 0.4], atol=1e-6)
    np.testing.assert_allclose(scores("maskgit_plus"), [0.5, 0.4], atol=1e-6)
    np.testing.assert_allclose(scores("topk_margin"), [0.1, 0.2], atol=1e-6)
    law = np.asarray([[0.5, 0.4, 0.1], [0.4, 0.2, 0.4]])
    entropies = [np.sum(law[0] * np.log(law[0])), 0.4 * np.log(0.4) + 0.6 * np.log(0.2)]
    np.testing.assert_allclose(np.log(scores("entropy")), entropies, atol=1e-6)
    # Dream's confidence is after temperature, LLaDA's before.
    tempered = 0.5**2 / (0.5**2 + 0.4**2 + 0.1**2)
    hot = jnp.float32(0.5)
    assert scores("maskgit_plus", hot)[0] in (
        pytest.approx(tempered, abs=1e-6),
        pytest.approx(tempered * 0.8**2, abs=1e-6),
        pytest.approx(tempered * 0.2**2, abs=1e-6),
    )
    assert len(set(scores("random").tolist())) == 2


def test_sure_tokens_are_told_apart():
    """At a probability of 1 - 1e-9 and 1 - 1e-12, which in float32 are both 1."""
    logits = jnp.asarray([[20.7, 0.0, -jnp.inf], [27.6, 0.0, -jnp.inf], [20.7, -jnp.inf, 0.0]])
    rules = Rules(BLOCK, "low_confidence", mask_token_id=2, num_tokens=3, allow_mask_token=True)
    said = predict(rules, logits, jnp.int32(0), jax.random.key(0), None)
    np.testing.assert_allclose(said.scores, [-np.exp(-20.7), -np.exp(-27.6), -np.exp(-20.7)], 1e-5)
    assert places(said.scores, jnp.ones(3, bool)).tolist() == [1, 0, 2]


def test_tokens_are_drawn_from_the_tempered_law_without_the_mask():
    logits = jnp.asarray([0.0, 1.0, 2.0, 9.0])
    rules = Rules(BLOCK, "low_confidence", mask_token_id=3, num_tokens=4)
    many = jnp.tile(logits, (4000, 1))
    said = predict(rules, many, jnp.int32(7), jax.random.key(1), jnp.float32(2.0))
    law = np.exp([0.0, 0.5, 1.0])
    counts = np.bincount(said.tokens, minlength=4)
    assert counts[3] == 0
    assert stats.chisquare(counts[:3], law / law.sum() * 4000).pvalue > 1e-4
    # The noise of a place is the same wherever the window begins.
    later = predict(rules, many[:10], jnp.int32(9), jax.random.key(1), jnp.float32(2.0))
    assert later.tokens.tolist() == said.tokens[2:12].tolist()
