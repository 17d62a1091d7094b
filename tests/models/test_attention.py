import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.types import LayerKV
from jaxspec.models.attention import Segment, attend

KV_HEADS, GROUP, NODES, DIM = 2, 3, 4, 8


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def segments():
    """A prefix with one mask for all, and the tokens' own with a mask each."""
    prefix = LayerKV(draw(KV_HEADS, DIM, 6, seed=1), draw(KV_HEADS, 6, DIM, seed=2))
    own = LayerKV(draw(KV_HEADS, DIM, NODES, seed=3), draw(KV_HEADS, NODES, DIM, seed=4))
    return [
        Segment(prefix, (jnp.arange(6) < 4)[None]),
        Segment(own, jnp.tril(jnp.ones((NODES, NODES), bool))),
    ]


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_attention_equals_a_loop_over_what_each_token_sees(softcap):
    queries, parts = draw(KV_HEADS, GROUP, NODES, DIM), segments()
    outputs = attend(queries, parts, 0.5, softcap)
    keys = np.concatenate([np.asarray(part.kv.keys) for part in parts], axis=2)
    values = np.concatenate([np.asarray(part.kv.values) for part in parts], axis=1)
    for k in range(KV_HEADS):
        for g in range(GROUP):
            for i in range(NODES):
                seen = [0, 1, 2, 3, *range(6, 7 + i)]
                scores = 0.5 * np.asarray(queries)[k, g, i] @ keys[k][:, seen]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores) / np.exp(scores).sum()
                np.testing.assert_allclose(
                    outputs[k, g, i], weights @ values[k][seen], rtol=1e-5, atol=1e-6
                )


def test_how_keys_are_divided_into_segments_does_not_matter():
    queries, (prefix, own) = draw(KV_HEADS, GROUP, NODES, DIM), segments()

    def part(start, stop):
        kv = LayerKV(prefix.kv.keys[:, :, start:stop], prefix.kv.values[:, start:stop])
        return Segment(kv, prefix.mask[:, start:stop])

    np.testing.assert_allclose(
        attend(queries, [part(0, 2), part(2, 6), own], 0.3),
        attend(queries, [prefix, own], 0.3),
        rtol=1e-5,
        atol=1e-6,
    )


def test_large_scores_do_not_overflow():
    outputs = attend(1e4 * draw(KV_HEADS, GROUP, NODES, DIM), segments(), 1.0)
    assert jnp.all(jnp.isfinite(outputs))


def test_no_array_has_more_than_four_axes():
    """Phones refuse more."""
    traced = jax.make_jaxpr(lambda queries: attend(queries, segments(), 1.0))(
        draw(KV_HEADS, GROUP, NODES, DIM)
    )
    assert max(var.aval.ndim for eqn in traced.eqns for var in eqn.outvars) <= 4


def test_half_precision_in_half_precision_out_with_a_float32_softmax():
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), segments())
    halves = [Segment(half.kv, part.mask) for half, part in zip(halves, segments(), strict=True)]
    queries = draw(KV_HEADS, GROUP, NODES, DIM).astype(jnp.bfloat16)
    outputs = attend(queries, halves, 1.0)
    chex.assert_type(outputs, jnp.bfloat16)
    exact = attend(queries.astype(jnp.float32), segments(), 1.0)
    assert jnp.mean(jnp.abs(outputs.astype(jnp.float32) - exact)) < 0.02
