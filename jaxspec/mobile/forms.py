"""Replacements of functions that LiteRT or its GPU delegate does not take as XLA does.

Each computes the same as the function that it replaces. A phone's GPU refuses a whole graph for one
gather, and its cosines are wrong by 1e-3.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import select_nodes
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import sliding_window
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import LayerKV
from jaxspec.drafters.growth import lookup_ids
from jaxspec.drafters.lookup import place_of_match, tokens_from
from jaxspec.drafters.recycling import learned, successors
from jaxspec.models.attention import Segment, attend, softcapped
from jaxspec.models.config import Rope
from jaxspec.models.linear import multiply
from jaxspec.models.rope import rotations
from jaxspec.models.transformer import lookup_rows

_UNSEEN = -1e4


def litert_forms(num_positions: int) -> Mapping[Callable, Callable]:
    """Returns the argument of `core.forms.exchanged`, for texts of up to `num_positions` tokens."""
    return {
        argmax_rows: _argmax_rows,
        attend: _attend,
        learned: _learned,
        lookup_ids: _lookup_ids,
        lookup_rows: _lookup_rows,
        multiply: _multiply,
        place_of_match: _place_of_match,
        rotations: partial(_rotations, num_positions),
        sliding_window: _sliding_window,
        select_nodes: _select_nodes,
        successors: _successors,
        tokens_from: _tokens_from,
    }


def _argmax_rows(logits: Float[Array, "nodes vocab"]) -> Int[Array, " nodes"]:
    """Becomes one ARG_MAX, which takes the lowest index on ties on CPU and GPU alike."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _attend(
    queries: Float[Array, "kv_heads group nodes head_dim"],
    segments: Sequence[Segment],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "kv_heads group nodes head_dim"]:
    """Computes one softmax over the scores of all segments side by side.

    Query heads stay folded into the rows, and masks are repeated to fit. If scores were unfolded
    for the mask, the converter would merge that with the product; where one key head serves
    several query heads, a GPU then computes the first only, in silence.

    Masks are added, as GPUs refuse a choice by a constant. The added numbers fit into half
    precision.
    """
    kv_heads, group, nodes, head_dim = queries.shape
    folded = (queries * scale).reshape(kv_heads, group * nodes, head_dim)

    def scores(segment: Segment) -> Float[Array, "kv_heads rows capacity"]:
        columns = softcapped(jnp.einsum("pnd,pdf->pnf", folded, segment.kv.keys), softcap)
        unseen = (1.0 - segment.mask.astype(columns.dtype)) * _UNSEEN
        rows = unseen if len(unseen) == 1 else jnp.concatenate([unseen] * group)
        return columns + rows[None]

    weights = jax.nn.softmax(jnp.concatenate([scores(each) for each in segments], axis=-1), axis=-1)
    ends = np.cumsum([each.kv.keys.shape[-1] for each in segments])
    parts = jnp.split(weights, ends[:-1], axis=-1)
    products = [
        jnp.einsum("pns,psd->pnd", part, segment.kv.values)
        for part, segment in zip(parts, segments, strict=True)
    ]
    return reduce(jnp.add, products).reshape(queries.shape)


def _lookup_ids(ids: Int[Array, " table"], index: Int[Array, " taken"]) -> Int[Array, " taken"]:
    """Sums integers: as floats, ids would be lost in half precision.

    The zeros and ones are floats at first, as GPUs make no others. A constant factor needs four
    axes, or GPUs cannot compile it. The table is repeated for each index: of a product with one row
    of constant integers, GPUs in browsers compute the first row only.
    """
    here = jax.nn.one_hot(index, ids.shape[0], dtype=jnp.float32).astype(jnp.int32)
    tables = jnp.concatenate([ids.reshape(1, 1, 1, -1)] * len(index), axis=2)
    return jnp.sum(here[None, None] * tables, axis=3).reshape(-1)


def _lookup_rows(
    table: Float[Array, "rows width"], ids: Int[Array, " nodes"]
) -> Float[Array, "nodes width"]:
    """Multiplies one-hot rows, which the converter turns into an EMBEDDING_LOOKUP.

    Ids must be rows of the table; on a CPU any other id ends the run with an error.
    """
    return jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype) @ table


def _successors(
    table: Float[Array, "vocab branch"], tokens: Int[Array, " nodes"]
) -> Int[Array, "nodes branch"]:
    """Reads a table of ids plus 1, as floats, see `mobile.signatures.recycling`."""
    known = (tokens >= 0).astype(table.dtype)
    rows = _lookup_rows(table, jnp.maximum(tokens, 0)) * known[:, None]
    return rows.astype(jnp.int32) - 1


def _learned(
    table: Float[Array, "vocab branch"],
    tokens: Int[Array, " places"],
    likeliest: Int[Array, "places branch"],
    known: Bool[Array, " places"],
) -> Float[Array, "vocab branch"]:
    """Multiplies one-hot rows, as a table of floats may not be written to in random places.

    The constant has four axes: of one with fewer, a GPU reads the first row only.
    """
    later = np.triu(np.ones((1, 1, len(tokens), len(tokens)), np.float32), k=1)
    same = jnp.equal(tokens.reshape(1, 1, -1, 1), tokens.reshape(1, 1, 1, -1)).astype(jnp.float32)
    counted = known.astype(jnp.float32)
    again = jnp.sum(same * later * counted.reshape(1, 1, 1, -1), axis=3).reshape(-1)
    here = jax.nn.one_hot(tokens, table.shape[0], dtype=jnp.float32)
    here = here * (counted * jax.nn.relu(1.0 - again))[:, None]
    rows = (likeliest + 1).astype(jnp.float32)
    return table * (1.0 - jnp.sum(here, axis=0))[:, None] + here.T @ rows


def _place_of_match(
    tokens: Int[Array, " places"], length: Int[Array, ""], most: int, recent: bool
) -> Int[Array, ""]:
    """Multiplies zeros and ones; matches are exact in texts of up to 2^17 tokens."""
    size = tokens.shape[0]
    places = np.arange(size, dtype=np.int32).reshape(1, 1, 1, size)
    ends = _lookup_ids(tokens, length - 1 - np.arange(most, dtype=np.int32))
    text = tokens.reshape(1, 1, 1, size)
    matches = jnp.less(places, length.reshape(1, 1, 1, 1)).astype(jnp.float32)
    lengths = jnp.zeros((1, 1, 1, size), jnp.float32)
    for back in range(most):
        # The first places, before which the text is too short, hold anything.
        before = jnp.concatenate([text[..., : back + 1], text[..., : size - back - 1]], axis=3)
        same = jnp.equal(before, ends[back].reshape(1, 1, 1, 1)).astype(jnp.float32)
        matches = matches * same * jnp.asarray(places > back, jnp.float32)
        lengths = lengths + matches
    later = jnp.asarray(places / size if recent else 0.0 * places, jnp.float32)
    place = _argmax_rows((lengths + later).reshape(1, size))
    found = jnp.minimum(jnp.max(lengths, axis=3), 1.0).astype(jnp.int32).reshape(1)
    return (found * place + (1 - found) * length.reshape(1))[0]


def _tokens_from(
    tokens: Int[Array, " places"], length: Int[Array, ""], start: Int[Array, ""], count: int
) -> Int[Array, " count"]:
    places = start + np.arange(count, dtype=np.int32)
    inside = jnp.less(places, length.reshape(1)).astype(jnp.float32).astype(jnp.int32)
    return inside * (_lookup_ids(tokens, places) + 1) - 1


def _select_nodes(
    new_kv: tuple[LayerKV, ...], pick: Float[Array, "length nodes"]
) -> tuple[LayerKV, ...]:
    """Lays heads side by side, so that one plain product serves all.

    A GPU that repeats `pick` for each head computes the first head only, in silence.
    """

    def picked(rows: Float[Array, "nodes kv_heads head_dim"]):
        nodes, heads, dim = rows.shape
        return (pick @ rows.reshape(nodes, heads * dim)).reshape(len(pick), heads, dim)

    return tuple(
        LayerKV(
            picked(layer.keys.transpose(2, 0, 1)).transpose(1, 2, 0),
            picked(layer.values.transpose(1, 0, 2)).transpose(1, 0, 2),
        )
        for layer in new_kv
    )


def _multiply(
    rows: Float[Array, "rows in"],
    kernel: Float[Array, "in out"],
    dtype: jnp.dtype | None = None,
    *,
    turned: bool = False,
) -> Float[Array, "rows out"]:
    """Becomes one FULLY_CONNECTED, whatever the number of rows."""
    kernel = kernel.T if turned else kernel
    return jnp.matmul(rows, kernel, preferred_element_type=dtype)


def _rotations(
    num_positions: int,
    rope: Rope,
    head_dim: int,
    max_positions: int,
    positions: Int[Array, " nodes"],
) -> tuple[Float[Array, "nodes pairs"], Float[Array, "nodes pairs"]]:
    """Reads a table that is computed here, once for all passes."""
    with jax.ensure_compile_time_eval(), exchanged({}):
        every = jnp.arange(num_positions, dtype=jnp.int32)
        table = jnp.concatenate(rotations(rope, head_dim, max_positions, every), -1)
    rows = _lookup_rows(table, positions)
    return rows[:, : rows.shape[-1] // 2], rows[:, rows.shape[-1] // 2 :]


def _sliding_window(
    mask: Bool[Array, "#queries keys"],
    query_positions: Int[Array, " queries"],
    key_positions: Int[Array, " keys"],
    window: int,
) -> Float[Array, "queries keys"]:
    """Multiplies, as GPUs take no logical operation; `_attend` reads masks as numbers.

    The product has four axes: of a constant mask with fewer, a GPU reads the first row only.
    """
    behind = query_positions.reshape(1, 1, -1, 1) - key_positions.reshape(1, 1, 1, -1)
    near = jnp.less(behind, window).astype(jnp.float32)
    found = near * mask[None, None].astype(jnp.float32)
    return found.reshape(found.shape[2:])
