"""The KV cache. Forward passes return new keys and values; `append` is the only writer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.forms import exchangeable
from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree

KEY_PLACES_AXIS = 2  # LayerKV.keys: [kv_heads, head_dim, capacity]
VALUE_PLACES_AXIS = 1  # LayerKV.values: [kv_heads, capacity, head_dim]


def empty_layer(kv_heads: int, head_dim: int, capacity: int, dtype: jnp.dtype) -> LayerKV:
    """A layer's cache of zeros."""
    return LayerKV(
        jnp.zeros((kv_heads, head_dim, capacity), dtype),
        jnp.zeros((kv_heads, capacity, head_dim), dtype),
    )


def capacity_of(cache: KVCache) -> int:
    return cache.layers[0].values.shape[VALUE_PLACES_AXIS]


def select_path(new_kv: tuple[LayerKV, ...], path: Int[Array, " length"]) -> tuple[LayerKV, ...]:
    """Gathers the path's nodes, in order. Entries of -1 give zeros."""
    nodes, dtype = new_kv[0].values.shape[VALUE_PLACES_AXIS], new_kv[0].values.dtype
    return select_nodes(new_kv, jax.nn.one_hot(path, nodes, dtype=dtype))


@exchangeable
def select_nodes(
    new_kv: tuple[LayerKV, ...], pick: Float[Array, "length nodes"]
) -> tuple[LayerKV, ...]:
    """Gathers nodes by sums over one-hot rows: exact, and no gather on any device.

    As products these take longer: on CPUs each is a call, two for every layer.
    """
    return tuple(
        LayerKV(
            jnp.sum(layer.keys[:, :, None, :] * pick[None, None], axis=-1),
            jnp.sum(layer.values[:, None, :, :] * pick[None, :, :, None], axis=-2),
        )
        for layer in new_kv
    )


def settled(hidden: Hidden) -> tuple[LayerKV, ...]:
    """The pass's keys and values, zero where its features are not finite.

    This ties what will be written to the pass's last result. XLA orders by data alone: a write that
    needed only a layer's own keys could come before the layer has read the cache, and XLA would
    copy whole caches to keep the two apart.
    """
    finite = jnp.all(jnp.isfinite(hidden.features), axis=-1)
    return tuple(
        LayerKV(
            jnp.where(finite[None, None, :], layer.keys, 0),
            jnp.where(finite[None, :, None], layer.values, 0),
        )
        for layer in hidden.new_kv
    )


def write(layer: LayerKV, new: LayerKV, start: Int[Array, ""] | int) -> LayerKV:
    """Writes consecutive places from `start`. The caller owes the room: XLA clamps the start."""
    return LayerKV(
        jax.lax.dynamic_update_slice_in_dim(layer.keys, new.keys, start, KEY_PLACES_AXIS),
        jax.lax.dynamic_update_slice_in_dim(layer.values, new.values, start, VALUE_PLACES_AXIS),
    )


def append(cache: KVCache, new_kv: tuple[LayerKV, ...], count: Int[Array, ""] | int) -> KVCache:
    """Writes all of `new_kv` at `length`, then counts the first `count` of them in.

    What lies past the new length means nothing, so rejected rows, stopped rows (`count` 0) and
    padding need no select and no clean-up.
    """
    layers = tuple(
        write(layer, new, cache.length) for layer, new in zip(cache.layers, new_kv, strict=True)
    )
    return KVCache(layers, cache.length + count)


def append_within(
    cache: KVCache, new_kv: tuple[LayerKV, ...], count: Int[Array, ""] | int
) -> KVCache:
    """`append` for passes that reach past the last place; what is counted in must fit."""
    rows = min(new_kv[0].values.shape[VALUE_PLACES_AXIS], capacity_of(cache))
    start = jnp.minimum(cache.length, capacity_of(cache) - rows)

    def place(array: Array, new: Array, axis: int) -> Array:
        held = jax.lax.dynamic_slice_in_dim(array, start, rows, axis)
        wide = jnp.concatenate([held, jnp.zeros_like(held)], axis)
        new = jax.lax.slice_in_dim(new, 0, rows, axis=axis)
        # Places that were in use stay, what does not fit behind them is dropped.
        wide = jax.lax.dynamic_update_slice_in_dim(wide, new, cache.length - start, axis)
        kept = jax.lax.slice_in_dim(wide, 0, rows, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(array, kept, start, axis)

    layers = tuple(
        LayerKV(
            place(layer.keys, new.keys, KEY_PLACES_AXIS),
            place(layer.values, new.values, VALUE_PLACES_AXIS),
        )
        for layer, new in zip(cache.layers, new_kv, strict=True)
    )
    return KVCache(layers, cache.length + count)


def pad_caches(state: PyTree, capacity: int) -> PyTree:
    """Widens every `KVCache` in `state`, batched or not, to `capacity` places."""

    def widen(array: Array, axis: int) -> Array:
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, capacity - array.shape[axis])
        return jnp.pad(array, padding)

    def grow(node: PyTree) -> PyTree:
        if not isinstance(node, KVCache):
            return node
        # Counted from the end, so that a leading batch axis does not matter.
        layers = tuple(
            LayerKV(
                widen(layer.keys, KEY_PLACES_AXIS - 3 + layer.keys.ndim),
                widen(layer.values, VALUE_PLACES_AXIS - 3 + layer.values.ndim),
            )
            for layer in node.layers
        )
        return KVCache(layers, node.length)

    return jax.tree.map(grow, state, is_leaf=lambda node: isinstance(node, KVCache))
