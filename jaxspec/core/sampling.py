"""Warpers and draws. One definition serves the target and every drafter.

Nothing here sorts: on a CPU a sort of one row of logits costs more than a small model's pass. A
filter is a threshold, found exactly by bisection over the bits of the logits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from jaxspec import native
from jaxspec.core.forms import exchangeable
from jaxspec.core.narrow import NarrowCall
from jaxspec.core.types import Warp

Logits = Float[Array, "nodes vocab"]


def at_least_float32(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Promotes half precisions; float64 stays, for tests with exact probabilities."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def likeliest_tokens(logits: Logits, warp: Warp, num_tokens: int) -> Int[Array, "nodes tokens"]:
    """Returns the likeliest tokens of each row, best first; of the warp, the bias is applied.

    Example:
        >>> likeliest_tokens(jnp.array([[0.0, 3.0, 1.0]]), Warp(), 2).tolist()
        [[1, 2]]
    """
    if warp.bias is not None:
        logits = logits + warp.bias.astype(logits.dtype)[None, :]
    return jax.lax.top_k(logits, num_tokens)[1].astype(jnp.int32)


def warp_logits(
    logits: Logits, warp: Warp, penalize: Callable[[Logits], Logits] | None = None
) -> Logits:
    """Applies bias, penalties, temperature, top-k, top-p and min-p, in that order, to each row.

    The order is the one of Hugging Face `generate`. Tokens tied with the last one that a filter
    keeps are kept as well.

    Args:
        logits: one row for each node.
        warp: what to apply.
        penalize: applies what depends on the text of each node; see `core.penalties`.

    Returns:
        Logits with -inf for what was filtered out; not normalised.
    """
    logits = at_least_float32(logits)
    if warp.bias is not None:
        logits = logits + warp.bias.astype(logits.dtype)[None, :]
    if penalize is not None:
        logits = penalize(logits)
    if warp.temperature is not None:
        # The best logit keeps its value, so a row of NaN or -inf makes no distribution.
        best = jnp.max(logits, axis=-1, keepdims=True)
        only_best = jnp.where(_is_argmax(logits), best, -jnp.inf)
        # Below 1e-30 only the arg-max has probability, and the quotient would overflow.
        heated = logits / jnp.maximum(warp.temperature, 1e-30)
        logits = jnp.where(warp.temperature > 0, heated, only_best)
    if warp.top_k is not None:
        logits = keep_top_k(logits, warp.top_k)
    if warp.top_p is not None:
        logits = keep_top_p(logits, warp.top_p)
    if warp.min_p is not None:
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= best + jnp.log(warp.min_p), logits, -jnp.inf)
    return logits


def keep_top_k(logits: Logits, top_k: Int[Array, ""]) -> Logits:
    """Keeps the `top_k` largest logits of each row; 0 keeps all of them."""
    kept = _smallest_set(logits, jnp.ones_like(logits), top_k.astype(logits.dtype))
    return jnp.where(kept | (top_k == 0), logits, -jnp.inf)


def keep_top_p(logits: Logits, top_p: Float[Array, ""]) -> Logits:
    """Keeps the fewest likeliest tokens whose probabilities add up to `top_p` or more.

    1 keeps all of them.
    """
    kept = _smallest_set(logits, jax.nn.softmax(logits, axis=-1), top_p.astype(logits.dtype))
    return jnp.where(kept | (top_p >= 1), logits, -jnp.inf)


def _smallest_set(
    logits: Logits, weights: Float[Array, "nodes vocab"], least: Float[Array, ""]
) -> Bool[Array, "nodes vocab"]:
    """Marks each row's largest logits, as few as weigh `least`, ties with the last included."""
    keys = _ordered_bits(logits)
    return keys >= _narrow_threshold(None, (), (keys, weights, least))


def _threshold(_static: None, _weights: tuple[()], row: tuple[Array, Array, Array]) -> Array:
    """Returns each row's largest threshold whose keys, those not below it, weigh `least` or more.

    Sets it bit by bit from the top: 32 passes over the row, whatever the vocabulary.
    """
    keys, weights, least = row

    def try_bit(index: Int[Array, ""], threshold: UInt[Array, "nodes 1"]):
        raised = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= raised, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(weight >= least, raised, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((keys.shape[0], 1), jnp.uint32))


def _native_threshold(_static: None, _weights: tuple[()], rows: tuple[Array, Array, Array]):
    keys, weights, least = rows
    shape = (*keys.shape[:2], 1)
    return native.call(
        "threshold",
        jax.ShapeDtypeStruct(shape, jnp.uint32),
        keys,
        weights,
        jnp.broadcast_to(least[:, None, None], shape),
        workers=native.num_cores(),
    )


def _has_native_threshold(_static: None, _weights: tuple[()], rows) -> bool:
    return rows[1].dtype == rows[2].dtype == jnp.float32


_narrow_threshold = NarrowCall(
    "narrow_threshold", _threshold, _native_threshold, _has_native_threshold
)


def _ordered_bits(logits: Logits) -> UInt[Array, "nodes vocab"]:
    """Unsigned integers that sort as the logits do, at float32 resolution.

    NaN of either sign comes out on top, so that no filter hides it.
    """
    # Adding 0.0 turns -0.0 into 0.0: equal numbers need equal bits.
    bits = jax.lax.bitcast_convert_type(logits.astype(jnp.float32) + 0.0, jnp.uint32)
    negative = (bits >> 31).astype(bool) & ~jnp.isnan(logits)
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


@exchangeable
def argmax_rows(logits: Logits) -> Int[Array, " nodes"]:
    """Each row's largest entry, the lowest index on ties.

    Two vector reductions: XLA's own argmax is a scalar loop on CPU.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.min(jnp.where(logits == best, index, logits.shape[-1]), axis=-1)
    return jnp.minimum(first, logits.shape[-1] - 1)  # a row of NaN equals nothing


def _is_argmax(logits: Logits) -> Bool[Array, "nodes vocab"]:
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return index == argmax_rows(logits)[:, None]


def inverse_cdf(weights: Float[Array, " vocab"], uniform: Float[Array, ""]) -> Int[Array, ""]:
    """Draws an index with probability proportional to `weights` from a uniform in [0, 1)."""
    cumulative = jnp.cumsum(weights)
    index = jnp.arange(weights.shape[0])
    # XLA sums in blocks, so the sums may rise or dip where a weight is 0: such an index is never
    # meant. Nor is one past the last weight, where the product has rounded up to the total.
    reached = (cumulative > uniform * cumulative[-1]) & (weights > 0)
    first = jnp.min(jnp.where(reached, index, weights.shape[0]))
    return jnp.minimum(first, jnp.max(jnp.where(weights > 0, index, 0))).astype(jnp.int32)


def draw_without_replacement(
    key: PRNGKeyArray, logprobs: Float[Array, "nodes vocab"], count: int
) -> Int[Array, "nodes count"]:
    """Draws `count` distinct tokens from each row's distribution, in order, one after the other.

    Gumbel top-k (Kool et al. 2019). Where fewer tokens have probability, the rest of the row is
    filled with impossible ones, which verification skips.
    """
    noise = jax.random.gumbel(key, logprobs.shape, logprobs.dtype)
    return jax.lax.top_k(logprobs + noise, count)[1]
