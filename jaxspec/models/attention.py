"""Attention of a few new tokens over segments of keys: prefix, scratch, the tokens themselves.

The segments share one softmax but are never concatenated, neither keys nor scores: no cache is
copied. Heads lead throughout and the query heads that share a key head lie along the query axis:
plain batched products, no repeat of keys, no rank above 4.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.core.forms import exchangeable
from jaxspec.core.types import LayerKV
from jaxspec.models.linear import multiply_pairs


class Segment(NamedTuple):
    """Some keys and values, and which of them each token sees.

    Attributes:
        mask: one row per token, or a single row that holds for all of them.
    """

    kv: LayerKV
    mask: Bool[Array, "nodes_or_one places"]


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of sums, norms and softmaxes: float32, or wider if the network is."""
    return jnp.promote_types(dtype, jnp.float32)


@exchangeable
def attend(
    queries: Float[Array, "kv_heads group nodes head_dim"],
    segments: Sequence[Segment],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "kv_heads group nodes head_dim"]:
    """Softmax attention over all segments at once, returned in the queries' dtype.

    A token that sees nothing gets the mean of everything: finite, and meaningless.

    Args:
        queries: rotated, not scaled. `group` are the query heads of one key head.
        segments: at least one.
        scale: multiplies scores.
        softcap: c * tanh(score / c) before masking; `None`: left alone.
    """
    kv_heads, group, nodes, head_dim = queries.shape
    wide = at_least_float32(queries.dtype)
    folded = (queries * scale).reshape(kv_heads, group * nodes, head_dim)

    def scores(segment: Segment) -> Float[Array, "kv_heads group nodes places"]:
        columns = softcapped(multiply_pairs(folded, segment.kv.keys, wide), softcap)
        seen = columns.reshape(kv_heads, group, nodes, -1)
        return jnp.where(segment.mask[None, None], seen, jnp.finfo(seen.dtype).min)

    columns = [scores(segment) for segment in segments]
    # The maximum cancels in the quotient: it has no gradient.
    highest = jax.lax.stop_gradient(
        reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in columns])
    )
    weights = [jnp.exp(part - highest) for part in columns]
    products = [
        multiply_pairs(
            part.astype(queries.dtype).reshape(kv_heads, group * nodes, -1),
            segment.kv.values,
            wide,
        )
        for part, segment in zip(weights, segments, strict=True)
    ]
    # Dividing after the value product touches head_dim numbers a query instead of one per place.
    totals = reduce(jnp.add, [jnp.sum(part, axis=-1, keepdims=True) for part in weights])
    attended = reduce(jnp.add, products).reshape(queries.shape) / totals
    return attended.astype(queries.dtype)


def softcapped(values: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Draws values into -cap..cap by a tanh, as Gemma 2 does; `None`: left alone."""
    return values if cap is None else cap * jnp.tanh(values / cap)
