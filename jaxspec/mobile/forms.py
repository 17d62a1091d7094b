"""The forms that LiteRT takes, its GPU delegate included, of what a model does differently on XLA.

Each computes what the function it stands for does. A phone's GPU refuses a gather and a whole graph
for its sake, and its own cosines are off by 1e-3.
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
from jaxspec.models.attention import Segment, attend, softcapped
from jaxspec.models.config import Rope
from jaxspec.models.linear import multiply
from jaxspec.models.rope import rotations
from jaxspec.models.transformer import lookup_rows

_UNSEEN = -1e4


def litert_forms(num_positions: int) -> Mapping[Callable, Callable]:
    """What `core.forms.exchanged` takes, for texts of at most `num_positions` tokens."""
    return {
        argmax_rows: _argmax_rows,
        attend: _attend,
        lookup_ids: _lookup_ids,
        lookup_rows: _lookup_rows,
        multiply: _multiply,
        rotations: partial(_rotations, num_positions),
        sliding_window: _sliding_window,
        select_nodes: _select_nodes,
    }


def _argmax_rows(logits: Float[Array, "nodes vocab"]) -> Int[Array, " nodes"]:
    """One ARG_MAX, which takes the lowest index on ties on CPU and GPU alike."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _attend(
    queries: Float[Array, "kv_heads group nodes head_dim"],
    segments: Sequence[Segment],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "kv_heads group nodes head_dim"]:
    """One softmax over the scores of all segments side by side.

    Query heads stay folded into the rows, masks are repeated to fit. Were scores unfolded for the
    mask, the converter would merge that with the product, and of a product in which one key head
    serves several others a GPU computes the first only, without a word.

    Masks are sums, as a choice by a constant is refused. Half precision holds what is added.
    """
    kv_heads, group, nodes, head_dim = queries.shape
    folded = (queries * scale).reshape(kv_heads, group * nodes, head_dim)

    def scores(segment: Segment) -> Float[Array, "kv_heads rows slots"]:
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
    """A sum of integers: as floats, ids would be lost in half precision.

    The zeros and ones are floats at first, as GPUs make no others, and a constant factor of fewer
    axes than four ends in a program that GPUs cannot compile. The table is there for each index:
    of a product with one row of constant integers, GPUs in browsers compute the first row only.
    """
    here = jax.nn.one_hot(index, ids.shape[0], dtype=jnp.float32).astype(jnp.int32)
    tables = jnp.concatenate([ids.reshape(1, 1, 1, -1)] * len(index), axis=2)
    return jnp.sum(here[None, None] * tables, axis=3).reshape(-1)


def _lookup_rows(
    table: Float[Array, "rows width"], ids: Int[Array, " nodes"]
) -> Float[Array, "nodes width"]:
    """A product with one-hot rows: the converter makes it an EMBEDDING_LOOKUP, without a product.

    Ids must be rows of the table: on CPU any other ends the run with an error.
    """
    return jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype) @ table


def _select_nodes(
    new_kv: tuple[LayerKV, ...], pick: Float[Array, "length nodes"]
) -> tuple[LayerKV, ...]:
    """Heads side by side, so that one plain product serves all.

    A GPU that repeats `pick` for each head computes the first head only, without a word.
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
    """One FULLY_CONNECTED, whatever the number of rows."""
    kernel = kernel.T if turned else kernel
    return jnp.matmul(rows, kernel, preferred_element_type=dtype)


def _rotations(
    num_positions: int,
    rope: Rope,
    head_dim: int,
    max_positions: int,
    positions: Int[Array, " nodes"],
) -> tuple[Float[Array, "nodes pairs"], Float[Array, "nodes pairs"]]:
    """Read from a table that is computed here, once for all passes."""
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
    """A product, as GPUs take no logical operation; `_attend` reads masks as numbers.

    It has four axes: of a constant mask with fewer, a GPU reads the first row only.
    """
    behind = query_positions.reshape(1, 1, -1, 1) - key_positions.reshape(1, 1, 1, -1)
    near = jnp.less(behind, window).astype(jnp.float32)
    found = near * mask[None, None].astype(jnp.float32)
    return found.reshape(found.shape[2:])
