"""The cache: a commit writes exactly the path, and nothing before it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import cache as caches
from jaxspec.core.types import KVCache, LayerKV

KV_HEADS, HEAD_DIM, CAPACITY, NODES, LAYERS = 2, 4, 12, 5, 2


def random_layers(seed: int, capacity: int, dtype=jnp.float32) -> tuple[LayerKV, ...]:
    keys = jax.random.split(jax.random.key(seed), 2 * LAYERS)
    return tuple(
        LayerKV(
            jax.random.normal(keys[2 * i], (KV_HEADS, HEAD_DIM, capacity), dtype),
            jax.random.normal(keys[2 * i + 1], (KV_HEADS, capacity, HEAD_DIM), dtype),
        )
        for i in range(LAYERS)
    )


def place(layers: tuple[LayerKV, ...], index: int) -> list[np.ndarray]:
    """Returns the keys and values at one place, layer by layer."""
    return [
        np.asarray(array, np.float32)
        for layer in layers
        for array in (layer.keys[:, :, index], layer.values[:, index, :])
    ]


def assert_same_place(ours, our_index, theirs, their_index):
    for left, right in zip(place(ours, our_index), place(theirs, their_index), strict=True):
        np.testing.assert_array_equal(left, right)


def test_an_empty_layer_has_the_layout_of_a_cache():
    layer = caches.empty_layer(KV_HEADS, HEAD_DIM, CAPACITY, jnp.dtype("bfloat16"))
    assert layer.keys.shape == (KV_HEADS, HEAD_DIM, CAPACITY)
    assert layer.values.shape == (KV_HEADS, CAPACITY, HEAD_DIM)
    assert layer.keys.dtype == layer.values.dtype == jnp.bfloat16
    assert caches.capacity_of(KVCache((layer,), jnp.int32(0))) == CAPACITY


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_selecting_a_path_is_exact(dtype):
    new = random_layers(0, NODES, dtype)
    path = [0, 3, 1, 4]
    chosen = jax.jit(caches.select_path)(new, jnp.array(path))
    assert chosen[0].keys.dtype == dtype
    for index, node in enumerate(path):
        assert_same_place(chosen, index, new, node)


def test_padding_of_a_path_selects_zeros():
    chosen = caches.select_path(random_layers(0, NODES), jnp.array([0, 2, -1]))
    assert all((array == 0).all() for array in place(chosen, 2))


def commit(cache, new_kv, path, count):
    """Commits as a decoding step does: selects the accepted path, then appends it."""
    return caches.append(cache, caches.select_path(new_kv, path), count)


@pytest.mark.parametrize("length", [0, 4])
def test_commit_keeps_the_path_and_all_that_came_before(length):
    before = KVCache(random_layers(1, CAPACITY), jnp.int32(length))
    new, path, count = random_layers(2, NODES), [0, 2, 4], 2
    after = jax.jit(commit)(before, new, jnp.array([*path, -1]), jnp.int32(count))
    assert after.length == length + count
    for index in range(length):
        assert_same_place(after.layers, index, before.layers, index)
    for step in range(count):
        assert_same_place(after.layers, length + step, new, path[step])
    for index in range(length + len(path) + 1, CAPACITY):
        assert_same_place(after.layers, index, before.layers, index)


def test_a_commit_of_nothing_changes_nothing_that_counts():
    before = KVCache(random_layers(1, CAPACITY), jnp.int32(6))
    after = commit(before, random_layers(2, NODES), jnp.array([0, 1]), jnp.int32(0))
    assert after.length == 6
    for index in range(6):
        assert_same_place(after.layers, index, before.layers, index)


def test_append_then_append_is_one_append():
    new = random_layers(3, NODES)
    head = jax.tree.map(lambda array: array, new)
    empty = KVCache(random_layers(1, CAPACITY), jnp.int32(1))
    once = caches.append(empty, head, NODES)
    # Only three of the first append count; the second overwrites the rest.
    first = caches.append(empty, head, 3)
    rest = caches.select_path(new, jnp.array([3, 4]))
    twice = caches.append(first, rest, 2)
    assert once.length == twice.length == 1 + NODES
    for index in range(1 + NODES):
        assert_same_place(once.layers, index, twice.layers, index)


@pytest.mark.parametrize("batch", [None, 3])
def test_padding_widens_every_cache_and_nothing_else(batch):
    cache = KVCache(random_layers(4, CAPACITY), jnp.int32(CAPACITY))
    state = {"target": cache, "other": jnp.arange(CAPACITY), "nested": (cache, ())}
    if batch is not None:
        state = jax.tree.map(lambda array: jnp.stack([array] * batch), state)
    wide = caches.pad_caches(state, CAPACITY + 8)
    assert wide["other"].shape == state["other"].shape
    for ours, theirs in ((wide["target"], state["target"]), (wide["nested"][0], state["target"])):
        np.testing.assert_array_equal(ours.length, theirs.length)
        for layer, narrow in zip(ours.layers, theirs.layers, strict=True):
            assert layer.keys.shape[-3:] == (KV_HEADS, HEAD_DIM, CAPACITY + 8)
            assert layer.values.shape[-3:] == (KV_HEADS, CAPACITY + 8, HEAD_DIM)
            np.testing.assert_array_equal(layer.keys[..., :CAPACITY], narrow.keys)
            np.testing.assert_array_equal(layer.values[..., :CAPACITY, :], narrow.values)
