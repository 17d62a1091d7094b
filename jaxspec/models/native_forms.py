"""The native forms of an attention and of a gated MLP, for batches of rows; see `narrow`."""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec import native
from jaxspec.core.narrow import ABSENT, MAX_ROWS, NATIVE_WEIGHTS
from jaxspec.core.types import LayerKV, PyTree
from jaxspec.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxspec.models.transformer import (
        AttentionRow,
        AttentionWeights,
        MLPRow,
        MLPWeights,
        Weights,
    )


def _native_dtypes(weights: PyTree, rows: PyTree) -> bool:
    """Says whether native code reads these: activations in float32, weights that or narrower."""
    return all(leaf.dtype in (jnp.float32, jnp.bool_) for leaf in jax.tree.leaves(rows)) and all(
        leaf.dtype in NATIVE_WEIGHTS for leaf in jax.tree.leaves(weights)
    )


def _operands(weights: "Weights", width: int) -> tuple[Any, Any, Any]:
    """A kernel as a matrix, its scales and its bias, as native calls take them."""
    scale, bias = (
        ABSENT if vector is None else vector.reshape(-1).astype(jnp.float32)
        for vector in (weights.scale, weights.bias)
    )
    return weights.kernel.reshape(width, -1), scale, bias


def _or_absent(array: Array | None) -> Any:
    return ABSENT if array is None else array.astype(jnp.float32)


def _stream(
    weights: "AttentionWeights | MLPWeights", rows: "AttentionRow | MLPRow"
) -> tuple[Any, Any, Any]:
    """The norms around a sub-layer and what it is added to, as native calls take them."""
    return _or_absent(weights.norm), _or_absent(weights.post_norm), _or_absent(rows.base)


def attention_fits(config: ModelConfig, weights: "AttentionWeights", rows: "AttentionRow") -> bool:
    batch, tokens = rows.inputs.shape[:2]
    fits = batch * tokens <= MAX_ROWS and config.head_dim <= 512 and config.num_groups <= 64
    # Native norms are of one head.
    return fits and not config.joint_qk_norm and _native_dtypes(weights, rows)


def native_attention(config, weights, rows: "AttentionRow"):
    batch, tokens, width = rows.inputs.shape
    group, kv_heads, head_dim = config.num_groups, config.num_kv_heads, config.head_dim
    places, segments = tokens, []
    for kv, mask in ((rows.prefix, rows.visible.prefix), (rows.scratch, rows.visible.scratch)):
        if kv is None or mask is None or not mask.size:
            segments += [ABSENT, ABSENT, jnp.zeros((0, 0, 0), bool)]
        else:
            segments += [kv.keys, kv.values, mask]
            places += mask.shape[-1]
    heads, attended = kv_heads * (group + 2) * head_dim, kv_heads * group * head_dim
    queries = max(16 // group, 1) * group
    work = batch * tokens * (width + heads + attended)
    work += native.num_cores() * queries * (-(-places // 16) * 16 + 2 * head_dim)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs, keys, values, _ = native.call(
        "attention",
        (
            shape((batch, tokens, config.embed_dim)),
            shape((batch, kv_heads, head_dim, tokens)),
            shape((batch, kv_heads, tokens, head_dim)),
            shape((work,)),
        ),
        rows.inputs,
        *_stream(weights, rows),
        *_operands(weights.qkv, width),
        _or_absent(weights.q_norm),
        _or_absent(weights.k_norm),
        *_operands(weights.out, attended),
        *(rows.rotation or (ABSENT.reshape(1, 1, 0),) * 2),
        *segments,
        rows.visible.own,
        group=group,
        eps=np.float32(config.norm_eps),
        factor=np.float32(config.residual_scale),
        plus_one=int(config.norm_plus_one),
        scale=np.float32(config.score_scale),
        softcap=np.float32(config.attention_softcap or 0),
        workers=native.num_cores(),
    )
    return outputs, LayerKV(keys, values)


def mlp_fits(config: ModelConfig, weights: "MLPWeights", rows: "MLPRow") -> bool:
    del config
    batch, tokens = rows.inputs.shape[:2]
    return batch * tokens <= MAX_ROWS and _native_dtypes(weights, rows)


def native_mlp(config, weights: "MLPWeights", rows: "MLPRow"):
    width, hidden = rows.inputs.shape[-1], config.mlp_dim
    flat = rows.inputs.reshape(-1, width)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs, _ = native.call(
        "mlp",
        (shape(flat.shape), shape((flat.shape[0], width + 2 * hidden))),
        flat,
        *_stream(weights, rows),
        *_operands(weights.gate_up, width),
        *_operands(weights.down, hidden),
        activation=0 if config.activation == "silu" else 1,
        eps=np.float32(config.norm_eps),
        factor=np.float32(config.residual_scale),
        plus_one=int(config.norm_plus_one),
        workers=native.num_cores(),
    )
    return outputs.reshape(rows.inputs.shape)
