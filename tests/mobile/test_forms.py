"""The forms that LiteRT takes compute what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import masks
from jaxspec.core.cache import select_nodes
from jaxspec.core.forms import exchangeable, exchanged
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import KVCache, LayerKV
from jaxspec.drafters.growth import lookup_ids
from jaxspec.drafters.lookup import place_of_match, tokens_from
from jaxspec.mobile.forms import litert_forms
from jaxspec.models import Llama3Scaling, Rope, lookup_rows
from jaxspec.models.attention import Segment, attend
from jaxspec.models.linear import multiply
from jaxspec.models.rope import rotations

CAPACITY = 32


def test_a_form_holds_within_its_context_only():
    @exchangeable
    def double(number):
        return 2 * number

    with exchanged({double: lambda number: number + number + 1}):
        assert double(3) == 7
        with exchanged({}):
            assert double(3) == 6
    assert double(3) == 6


def _cases():
    draws = np.random.default_rng(0)
    floats = jnp.asarray(draws.normal(size=(5, 7)), jnp.float32)
    ties = jnp.asarray(draws.integers(0, 3, (20, 7)), jnp.float32)
    queries = jnp.asarray(draws.normal(size=(2, 2, 4, 3)), jnp.float32)
    prefix, own = (
        LayerKV(
            jnp.asarray(draws.normal(size=(2, 3, capacity)), jnp.float32),
            jnp.asarray(draws.normal(size=(2, capacity, 3)), jnp.float32),
        )
        for capacity in (6, 4)
    )
    segments = (Segment(prefix, jnp.arange(6)[None] < 5), Segment(own, masks.causal(4)))
    layer = LayerKV(
        jnp.asarray(draws.normal(size=(2, 3, 5)), jnp.float32),
        jnp.asarray(draws.normal(size=(2, 5, 3)), jnp.float32),
    )
    text = jnp.array([4, 1, 2, 4, 1, 2, 4, 1, 2, 4, 1, 2])
    rope = Rope(5000.0, 0.5, Llama3Scaling(4.0, 1.0, 4.0, 16))
    return {
        "argmax_rows": lambda: argmax_rows(ties),
        "lookup_ids": lambda: lookup_ids(jnp.array([5, 7, 90_000_001]), jnp.array([2, 0])),
        "place_of_match, none": lambda: place_of_match(text, jnp.int32(3), 2, False),
        "place_of_match, first": lambda: place_of_match(text, jnp.int32(9), 3, False),
        "place_of_match, recent": lambda: place_of_match(text, jnp.int32(9), 3, True),
        "tokens_from": lambda: tokens_from(text, jnp.int32(9), jnp.int32(7), 4),
        "lookup_rows": lambda: lookup_rows(floats, jnp.array([4, 0, 0])),
        "multiply": lambda: multiply(floats[:, :5], floats),
        "rotations": lambda: rotations(rope, 8, 64, jnp.array([0, 3, CAPACITY - 1])),
        "select_nodes": lambda: select_nodes((layer,), jax.nn.one_hot(jnp.array([2, 0, -1]), 5)),
        "attend": lambda: attend(queries, segments, 0.7),
        "attend, capped": lambda: attend(queries, segments[1:], 0.7, 2.0),
    }


@pytest.mark.parametrize("name", sorted(_cases()))
def test_each_form_computes_what_it_stands_for(name):
    compute = _cases()[name]
    with exchanged(litert_forms(CAPACITY)):
        other = compute()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), compute(), other
    )


def test_a_whole_pass_is_the_same(tiny_network):
    tokens = jnp.array([3, 1, 4], jnp.int32)
    cache = KVCache(tiny_network.empty_cache(CAPACITY).layers, jnp.int32(2))

    def logits():
        hidden = tiny_network.forward(tokens, 2 + jnp.arange(3), masks.causal(3), cache)
        return tiny_network.unembed(hidden.features)

    with exchanged(litert_forms(CAPACITY)):
        other = logits()
    np.testing.assert_allclose(logits(), other, atol=1e-5)
