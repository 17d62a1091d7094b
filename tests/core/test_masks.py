"""Masks against their definitions, token by token."""

import jax.numpy as jnp
import pytest

from jaxspec.core import masks


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_causal_sees_itself_and_before(num_tokens):
    mask = masks.causal(num_tokens)
    for query in range(num_tokens):
        for key in range(num_tokens):
            assert mask[query, key] == (key <= query)


def test_bidirectional_sees_everything():
    assert masks.bidirectional(5).shape == (5, 5)
    assert masks.bidirectional(5).all()


@pytest.mark.parametrize("block", [1, 3, 8])
def test_block_causal_sees_its_own_block_and_those_before(block):
    mask = masks.block_causal(8, block)
    for query in range(8):
        for key in range(8):
            assert mask[query, key] == (key // block <= query // block)


def test_documents_do_not_see_each_other():
    documents = jnp.array([4, 4, 1, 1, 1, 4])
    mask = masks.same_document(documents)
    for query in range(6):
        for key in range(6):
            assert mask[query, key] == (documents[query] == documents[key])


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_sees_that_many_tokens_itself_included_and_all_ahead(window):
    queries, keys = jnp.array([9, 4, 11]), jnp.arange(12)
    mask = masks.sliding_window(jnp.ones((1, 12), bool), queries, keys, window)
    for row, query in enumerate(queries.tolist()):
        seen = [key for key in range(12) if mask[row, key]]
        assert seen == list(range(max(0, query - window + 1), 12))
