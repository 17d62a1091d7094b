"""The stepwise decision: choosing masked positions of a canvas and their tokens.

The result of a pass over a canvas is a `Prediction`: one token and one score for each position.
Then `advance` makes the stepwise decision. It is deterministic, so drafting (decisions from an
older prediction) and verifying (the same decisions from a fresh one) share this one function and
this one order: scores in log space, at least float32, ties to the lowest position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.sampling import argmax_rows, at_least_float32
from jaxspec.core.types import Stop


class Canvas(NamedTuple):
    """One row's text while it is filled in, block by block.

    Attributes:
        tokens: prompt, then the positions to fill in, then padding.
        start: first position of the current block.
        step: decisions made in this block so far.
        num_masks: masks that this block began with.
        stop: a `Stop` code.
    """

    tokens: Int[Array, " positions"]
    start: Int[Array, ""]
    step: Int[Array, ""]
    num_masks: Int[Array, ""]
    stop: Int[Array, ""]


class Prediction(NamedTuple):
    """Tokens and scores that a pass predicts for consecutive positions, the window.

    Attributes:
        start: position of the first entry.
        tokens: the token that each position would get.
        scores: the order to fill them in, highest first.
        known: False for entries without a prediction.
        finite: False for entries whose logits were NaN, or without a possible token.
        likeliest: the best `Rules.num_likeliest` tokens of each position; `None` if that is 0.
        likeliest_logits: what they were chosen by: logits, over temperature and with noise where
            tokens are drawn; `None` like `likeliest`.
    """

    start: Int[Array, ""]
    tokens: Int[Array, " window"]
    scores: Float[Array, " window"]
    known: Bool[Array, " window"]
    finite: Bool[Array, " window"]
    likeliest: Int[Array, "window likeliest"] | None = None
    likeliest_logits: Float[Array, "window likeliest"] | None = None


class Evidence(NamedTuple):
    """Values that an order may be computed from.

    Attributes:
        logits: as the network gave them.
        warped: logits over temperature, which tokens are drawn from.
        tokens: the token drawn for each position.
        uniforms: a number in (0, 1) for each position, the same in every step.
    """

    logits: Float[Array, "window vocab"]
    warped: Float[Array, "window vocab"]
    tokens: Int[Array, " window"]
    uniforms: Float[Array, " window"]


def low_confidence(evidence: Evidence) -> Float[Array, " window"]:
    """The token's log-probability before temperature (LLaDA's `low_confidence` remasking)."""
    return _logprob_of(evidence.logits, evidence.tokens)


def maskgit_plus(evidence: Evidence) -> Float[Array, " window"]:
    """The token's log-probability after temperature (Dream)."""
    return _logprob_of(evidence.warped, evidence.tokens)


def entropy(evidence: Evidence) -> Float[Array, " window"]:
    """The negative entropy of the distribution (Dream)."""
    lower, odds = _odds_of_others(evidence.warped)
    total = jnp.sum(odds, axis=-1)
    # An impossible token adds nothing, where 0 * -inf would be NaN.
    parts = jnp.sum(jnp.where(odds > 0, odds * lower, 0.0), axis=-1)
    return parts / (1.0 + total) - jnp.log1p(total)


def topk_margin(evidence: Evidence) -> Float[Array, " window"]:
    """The logarithm of the likeliest token's lead in probability over the second (Dream)."""
    _, odds = _odds_of_others(evidence.warped)
    return jnp.log1p(-jnp.max(odds, axis=-1)) - jnp.log1p(jnp.sum(odds, axis=-1))


def random_order(evidence: Evidence) -> Float[Array, " window"]:
    """A random permutation of the positions (LLaDA's `random` remasking)."""
    return jnp.log(evidence.uniforms)


ORDERS: dict[str, Callable[[Evidence], Float[Array, " window"]]] = {
    "low_confidence": low_confidence,
    "random": random_order,
    "entropy": entropy,
    "topk_margin": topk_margin,
    "maskgit_plus": maskgit_plus,
}


def _odds_of_others(
    logits: Float[Array, "window vocab"],
) -> tuple[Float[Array, "window vocab"], Float[Array, "window vocab"]]:
    """Logits less the best one, and their exponentials; the best token itself has the odds 0.

    Scores computed from these differ where probabilities both round to 1.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_best = index == argmax_rows(logits)[:, None]
    lower = logits - jnp.max(logits, axis=-1, keepdims=True)
    return lower, jnp.where(is_best, 0.0, jnp.exp(lower))


def _logprob_of(logits: Float[Array, "window vocab"], tokens: Int[Array, " window"]) -> Array:
    """Log-probabilities from the odds of the other tokens: a difference would round to 0."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    is_other = jnp.arange(logits.shape[1])[None] != tokens[:, None]
    odds = jnp.where(is_other, logits - chosen, -jnp.inf)
    # Odds of a token far from the best one may overflow.
    return -jnp.logaddexp(0.0, jax.nn.logsumexp(odds, axis=-1))


@dataclass(frozen=True)
class Rules:
    """Static settings of decisions.

    Attributes:
        block: positions per block.
        order: a key of `ORDERS`.
        mask_token_id: of the model.
        num_tokens: ids from this one on are never chosen: the tokenizer does not know them.
        allow_mask_token: the mask may be chosen like any token, as in the published programs. A
            position that gets it stays masked and open to later decisions; no other position is
            filled in instead.
        opens_with_first: the first decision of a block fills in its first position, whatever the
            order.
        num_likeliest: tokens that predictions list for each position.
    """

    block: int
    order: str
    mask_token_id: int
    num_tokens: int
    allow_mask_token: bool = False
    opens_with_first: bool = False
    num_likeliest: int = 0


def predict(
    rules: Rules,
    logits: Float[Array, "window vocab"],
    start: Int[Array, ""],
    key: PRNGKeyArray,
    temperature: Float[Array, ""] | None,
) -> Prediction:
    """Draws a token for each position and scores it.

    Noise depends on the row's key and the position alone, so every pass over a row draws with the
    same noise, and a decision is a function of the canvas.

    Args:
        rules: static settings.
        logits: of consecutive positions, the first of which is `start`.
        start: see `logits`.
        key: of the row.
        temperature: `None` takes the likeliest tokens; so does 0.
    """
    logits = at_least_float32(logits)
    window, vocab = logits.shape
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, start + jnp.arange(window))
    index = jnp.arange(vocab)
    possible = index < rules.num_tokens
    if not rules.allow_mask_token:
        possible = possible & (index != rules.mask_token_id)
    warped = noisy = logits
    if temperature is not None:
        hot = temperature > 0
        warped = logits / jnp.where(hot, temperature, 1.0)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), logits.dtype))(keys)
        noisy = warped + jnp.where(hot, noise, 0.0)
    choice = jnp.where(possible[None], noisy, -jnp.inf)
    tokens = argmax_rows(choice)
    uniforms = jnp.zeros(window, logits.dtype)
    if rules.order == "random":
        tiny = jnp.finfo(logits.dtype).tiny
        draw = jax.vmap(lambda key: jax.random.uniform(key, (), logits.dtype, minval=tiny))
        # Apart from the noise of the tokens.
        uniforms = draw(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 1))
    # A maximum does not show every NaN: XLA drops them from long rows on CPUs.
    finite = jnp.isfinite(jnp.max(choice, axis=-1)) & ~jnp.any(jnp.isnan(logits), axis=-1)
    scores = ORDERS[rules.order](Evidence(logits, warped, tokens, uniforms))
    best = (None, None)
    if rules.num_likeliest:
        best = jax.lax.top_k(choice, rules.num_likeliest)[::-1]
    return Prediction(start, tokens, scores, jnp.ones(window, bool), finite, *best)


def nothing_known(rules: Rules, window: int, dtype: jnp.dtype) -> Prediction:
    """Returns the empty prediction that a row has before its first pass."""
    none, tokens = jnp.zeros(window, bool), jnp.zeros(window, jnp.int32)
    best = (None, None)
    if rules.num_likeliest:
        shape = window, rules.num_likeliest
        best = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, dtype)
    return Prediction(jnp.int32(0), tokens, jnp.zeros(window, dtype), none, none, *best)


def places(
    scores: Float[Array, " window"], eligible: Bool[Array, " window"]
) -> Int[Array, " window"]:
    """Returns each eligible position's rank, 0 for the first; ties go to the lowest position.

    Positions that are not eligible rank behind all that are.
    """
    index = jnp.arange(scores.shape[0])
    higher = scores[None, :] > scores[:, None]
    earlier = (scores[None, :] == scores[:, None]) & (index[None, :] < index[:, None])
    before = jnp.sum((higher | earlier) & eligible[None, :], axis=1)
    return jnp.where(eligible, before, scores.shape[0]).astype(jnp.int32)


class Pace(Protocol):
    """A rule for how many positions each step fills in. Its arrays are traced scalars per row."""

    def num_steps(self, block: int) -> Int[Array, ""] | int:
        """Returns the steps after which a block is over, whatever it holds."""
        ...

    def fills(
        self,
        canvas: Canvas,
        order: Int[Array, " window"],
        scores: Float[Array, " window"],
        num_left: Int[Array, ""],
    ) -> Bool[Array, " window"]:
        """Returns the positions to fill in; those that are not eligible are ignored."""
        ...


class EvenPace(NamedTuple):
    """Spreads the masks of a block over its steps; the first steps take the remainder."""

    steps: Int[Array, ""]

    def num_steps(self, block):
        del block  # The steps are given.
        return self.steps

    def fills(self, canvas, order, scores, num_left):
        del scores, num_left  # A number decides, whatever the confidence.
        extra = canvas.step < canvas.num_masks % self.steps
        return order < canvas.num_masks // self.steps + extra


class LinearPace(NamedTuple):
    """Dream's pace: time runs from 1 to `eps`; a step from t to s fills in floor(masks (1 - s/t)).

    Attributes:
        shares: 1 - s/t of each step, in float32 as published, since a product may lie next to a
            whole number; the last step fills in all that is left.
    """

    shares: Float[Array, " steps"]

    def num_steps(self, block):
        del block  # The steps are given.
        return self.shares.shape[-1]

    def fills(self, canvas, order, scores, num_left):
        del scores  # A number decides, whatever the confidence.
        share = self.shares[jnp.minimum(canvas.step, self.shares.shape[-1] - 1)]
        return order < jnp.floor(num_left.astype(jnp.float32) * share).astype(jnp.int32)


class ThresholdPace(NamedTuple):
    """Fast-dLLM's pace: the surest position, and all above a threshold. LOSSY.

    Attributes:
        log_threshold: least score that is filled in, a log-probability.
    """

    log_threshold: Float[Array, ""]

    def num_steps(self, block):
        return block  # Each step fills in one at least.

    def fills(self, canvas, order, scores, num_left):
        del canvas, num_left  # Confidence decides, whatever the number.
        return (order == 0) | (scores >= self.log_threshold)


def linear_shares(steps: int, eps: float, most: int) -> np.ndarray:
    """Returns the `shares` of a `LinearPace`, in float32 from both ends as `torch.linspace` does.

    Of more steps than there are masks, those that fill in nothing are left out.

    Args:
        steps: of a block.
        eps: end of time.
        most: masks that a step may find.

    Example:
        >>> linear_shares(4, 0.001, most=4).tolist()[-1], len(linear_shares(10**9, 0.001, most=4))
        (1.0, 1)
    """
    one, end = np.float32(1), np.float32(eps)
    width = (end - one) / np.float32(steps)
    # The earlier steps fill in less than one of `most`.
    index = np.arange(max(0, steps - 2 * most), steps + 1)
    forward = one + width * index.astype(np.float32)
    backward = end - width * (steps - index).astype(np.float32)
    times = np.where(index < (steps + 1) // 2, forward, backward).astype(np.float32)
    shares = one - times[1:] / times[:-1]
    shares[-1] = 1.0
    return shares if steps <= most else shares[np.float32(most) * shares >= 1]


def _may_be_filled(rules: Rules, canvas: Canvas, prediction: Prediction) -> Bool[Array, " window"]:
    """True for positions of a prediction that are masks of the current block, or before it."""
    window = prediction.tokens.shape[0]
    inside = jax.lax.dynamic_slice_in_dim(canvas.tokens, prediction.start, window)
    positions = prediction.start + jnp.arange(window)
    return (inside == rules.mask_token_id) & (positions < canvas.start + rules.block)


def with_another_last(
    rules: Rules, before: Canvas, decided: Canvas, prediction: Prediction, rank: Int[Array, ""]
) -> tuple[Prediction, Bool[Array, ""]]:
    """Returns the prediction that puts another position last in a decision.

    Args:
        rules: static settings.
        before: a canvas.
        decided: what `advance` makes of it with this prediction.
        prediction: of both.
        rank: how many ranks behind the decision's last position the other one stands; 0 changes
            nothing.

    Returns:
        The prediction, and whether such a position exists.
    """
    order = places(prediction.scores, _may_be_filled(rules, before, prediction))
    num_filled = jnp.sum(before.tokens != decided.tokens)
    chosen = order == num_filled - 1 + rank
    chosen = chosen & _may_be_filled(rules, before, prediction)
    scores = jnp.where(chosen, jnp.inf, prediction.scores)
    return prediction._replace(scores=scores), jnp.any(chosen) | (rank == 0)


def look_up(rules: Rules, canvas: Canvas, prediction: Prediction) -> Prediction:
    """Returns the prediction with tokens that the text itself suggests.

    A position whose two predecessors are filled in takes the token that followed the same two
    tokens earlier in the row; of several such tokens, the latest.
    """
    text, positions = canvas.tokens, prediction.start + jnp.arange(prediction.tokens.shape[0])
    every = jnp.arange(text.shape[0])
    one, two = jnp.roll(text, 1), jnp.roll(text, 2)
    usable = (every >= 2) & (one != rules.mask_token_id) & (two != rules.mask_token_id)
    same = (one[None] == one[positions][:, None]) & (two[None] == two[positions][:, None])
    known = usable & (text != rules.mask_token_id)
    earlier = same & known[None] & (every[None] < positions[:, None]) & usable[positions][:, None]
    latest = jnp.max(jnp.where(earlier, every[None], -1), axis=1)
    tokens = jnp.where(latest >= 0, text[latest], prediction.tokens)
    return prediction._replace(tokens=tokens)


def covers(prediction: Prediction, canvas: Canvas, block: int) -> Bool[Array, ""]:
    """Returns whether a prediction is known for every position of the canvas's current block."""
    positions = prediction.start + jnp.arange(prediction.tokens.shape[0])
    inside = (positions >= canvas.start) & (positions < canvas.start + block) & prediction.known
    return jnp.sum(inside) == block


def places_filled(
    rules: Rules, pace: Pace, canvas: Canvas, said: Prediction
) -> Bool[Array, " window"]:
    """Returns the positions of a prediction that the stepwise decision takes their tokens for."""
    eligible = _may_be_filled(rules, canvas, said)
    order = places(said.scores, eligible)
    fills = pace.fills(canvas, order, said.scores, jnp.sum(eligible))
    if not rules.allow_mask_token:
        # All that a schedule has left over.
        fills = fills | (canvas.step + 1 >= pace.num_steps(rules.block))
    if rules.opens_with_first:
        first = said.start + jnp.arange(said.tokens.shape[0]) == canvas.start
        fills = jnp.where(canvas.step == 0, first, fills)
    return fills & eligible


def advance(
    rules: Rules,
    pace: Pace,
    stop_ids: Int[Array, " stop_ids"],
    length: Int[Array, ""],
    wanted: Int[Array, ""],
    end: Int[Array, ""],
    canvas: Canvas,
    prediction: Prediction,
) -> Canvas:
    """Makes the stepwise decision: fills in the next positions, and opens a block after the last.

    A row that has stopped stays as it is. A row stops when its last block is over, when no mask is
    left before `wanted`, or when a stop id stands before every mask: the text after it will be cut,
    so it need not be filled in.

    Args:
        rules: static settings.
        pace: number of positions to fill in.
        stop_ids: ids that end a text, padded with -1.
        length: of the prompt.
        wanted: the position after the last one that was asked for.
        end: the position after the last block, which may lie past `wanted`.
        canvas: must be covered by `prediction`, see `covers`.
        prediction: fresh for this canvas, or an older one when drafting.
    """
    mask, block = rules.mask_token_id, rules.block
    window = prediction.tokens.shape[0]
    positions = prediction.start + jnp.arange(window)
    eligible = _may_be_filled(rules, canvas, prediction)
    fills = places_filled(rules, pace, canvas, prediction)
    is_last = canvas.step + 1 >= pace.num_steps(block)
    finite = jnp.all(prediction.finite | ~eligible)
    # Not by writing the window into the canvas: XLA on CPUs does that position by position, in the
    # same memory from which it still reads what the ranks of the other positions depend on.
    everywhere = jnp.arange(canvas.tokens.shape[0])
    entry = jnp.clip(everywhere - prediction.start, 0, window - 1)
    here = (positions[entry] == everywhere) & fills[entry]
    tokens = jnp.where(here, prediction.tokens[entry], canvas.tokens)

    def masks_in(start: Int[Array, ""]) -> Int[Array, ""]:
        of_block = (everywhere >= start) & (everywhere < start + block)
        return jnp.sum((tokens == mask) & of_block, dtype=jnp.int32)

    is_over = is_last | (masks_in(canvas.start) == 0)
    following = canvas.start + block

    first_mask = jnp.min(jnp.where((tokens == mask) & (everywhere >= length), everywhere, end))
    ends = jnp.any(tokens[:, None] == stop_ids[None, :], axis=1) & (everywhere >= length)
    first_end = jnp.min(jnp.where(ends, everywhere, end))
    is_last_block = is_over & (following >= end)
    stop = jnp.where(is_last_block | (first_mask >= wanted), Stop.LENGTH, Stop.RUNNING)
    stop = jnp.where((first_end < first_mask) & (first_end < end), Stop.TOKEN, stop)
    moved = Canvas(
        tokens=tokens,
        start=jnp.where(is_over, following, canvas.start),
        step=jnp.where(is_over, 0, canvas.step + 1),
        num_masks=jnp.where(is_over, masks_in(following), canvas.num_masks),
        stop=stop.astype(jnp.int32),
    )
    broken = canvas._replace(stop=jnp.int32(Stop.NOT_FINITE))
    running = canvas.stop == Stop.RUNNING

    def choose(moved: Array, broken: Array, stopped: Array) -> Array:
        return jnp.where(running, jnp.where(finite, moved, broken), stopped)

    return jax.tree.map(choose, moved, broken, canvas)
