"""Acceptance by sums and products decides as the verification of `core` does, drawn or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.proposal import chain_proposal, tree_proposal
from jaxspec.core.tree import chain, eagle_tree, tree_from_parents
from jaxspec.core.verify import verify_deterministic, verify_greedy, verify_traversal
from jaxspec.mobile.acceptance import accept_drawn, accept_greedy, accept_sampled

TREES = {
    "eagle": eagle_tree(),
    "chain": chain(4),
    "one node": chain(1),
    "uneven": tree_from_parents([-1, 0, 0, 1, 1, 2, 3]),
}
VOCAB = 12


@pytest.mark.parametrize("name", sorted(TREES))
def test_it_decides_as_greedy_verification(name):
    tree, draws = TREES[name], np.random.default_rng(0)
    nodes, rounds = len(tree.parents), 300
    # Siblings differ: rank r of a parent is its shuffled vocabulary's entry r. Few tokens, and
    # choices taken from the children half of the time, make every depth of acceptance occur.
    ranked = draws.permuted(np.tile(np.arange(VOCAB), (rounds, nodes, 1)), axis=-1)
    parents = np.maximum(tree.parents, 0)
    tokens = ranked[:, parents, tree.ranks].astype(np.int32)
    choices = draws.integers(0, VOCAB, (rounds, nodes)).astype(np.int32)
    choices = np.where(draws.random((rounds, nodes)) < 0.6, ranked[:, :, 0], choices)

    def both(tokens, choices):
        logits = jax.nn.one_hot(choices, VOCAB)
        proposal = tree_proposal(tree, tokens, jnp.ones(nodes, bool))
        return accept_greedy(tree, tokens, choices), verify_greedy(proposal, logits)

    decided = jax.jit(jax.vmap(both))(tokens, choices.astype(np.int32))
    ours, theirs = jax.tree.map(np.asarray, decided)
    np.testing.assert_array_equal(ours.count, theirs.num_emitted)
    np.testing.assert_array_equal(ours.last, theirs.next_token)
    one_hot = theirs.path[:, :, None] == np.arange(nodes)
    np.testing.assert_array_equal(ours.path, one_hot)
    for row, count in enumerate(ours.count):
        path = theirs.path[row, 1:count]
        emitted = [*tokens[row, path], theirs.next_token[row]]
        assert ours.tokens[row].tolist() == [*emitted, *[0] * (tree.paths.shape[1] - count)]
    assert set(ours.count.tolist()) == set(range(1, tree.paths.shape[1] + 1))


@pytest.mark.parametrize("name", sorted(TREES))
def test_it_samples_as_the_verification_of_deterministic_children(name):
    """The same uniforms give the same verdict: far from where rounding decides."""
    tree, draws = TREES[name], np.random.default_rng(0)
    nodes, rounds = len(tree.parents), 2000
    ranked = draws.permuted(np.tile(np.arange(VOCAB), (rounds, nodes, 1)), axis=-1)
    tokens = ranked[:, np.maximum(tree.parents, 0), tree.ranks].astype(np.int32)
    # Drafts are likely, some tokens are impossible, and some laws are a draft alone.
    logits = draws.normal(size=(rounds, nodes, VOCAB)).astype(np.float32)
    likely = ranked[:, :, :1]
    boosted = np.take_along_axis(logits, likely, 2) + 3.0 * draws.random((rounds, nodes, 1))
    np.put_along_axis(logits, likely, boosted, 2)
    logits[draws.random(logits.shape) < 0.2] = -1e4
    uniforms = draws.random((rounds, nodes)).astype(np.float32)

    def both(tokens, logits, uniforms):
        proposal = tree_proposal(tree, tokens, jnp.ones(nodes, bool))
        ours = accept_sampled(tree, tokens, uniforms, jax.nn.softmax(logits))
        return ours, verify_deterministic(uniforms, proposal, logits)

    ours, theirs = jax.tree.map(np.asarray, jax.jit(jax.vmap(both))(tokens, logits, uniforms))
    np.testing.assert_array_equal(ours.count, theirs.num_emitted)
    np.testing.assert_array_equal(ours.last, theirs.next_token)
    np.testing.assert_array_equal(ours.path, theirs.path[:, :, None] == np.arange(nodes))
    for row, count in enumerate(ours.count):
        emitted = [*tokens[row, theirs.path[row, 1:count]], theirs.next_token[row]]
        assert ours.tokens[row].tolist() == [*emitted, *[0] * (tree.paths.shape[1] - count)]
    assert set(ours.count.tolist()) == set(range(1, tree.paths.shape[1] + 1))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_drawn_chains_are_accepted_as_by_block_verification(length):
    """The same uniforms give the same verdict: far from where rounding decides."""
    draws, rounds = np.random.default_rng(length), 2000
    logits = 2.0 * draws.normal(size=(rounds, length + 1, VOCAB)).astype(np.float32)
    drafts = logits[:, :-1] + draws.normal(size=(rounds, length, VOCAB)).astype(np.float32)
    logits[draws.random(logits.shape) < 0.2] = -1e4
    drafts[draws.random(drafts.shape) < 0.2] = -1e4
    drafts[::10] = logits[::10, :-1]  # nothing is left behind equal laws
    noise = draws.gumbel(size=drafts.shape)
    drawn = np.argmax(drafts + noise, axis=-1)
    tokens = np.concatenate([np.zeros((rounds, 1), int), drawn], axis=1).astype(np.int32)
    uniforms = draws.random((rounds, length + 1)).astype(np.float32)

    def both(tokens, logits, drafts, uniforms):
        laws = jax.nn.log_softmax(drafts)
        proposal = chain_proposal(tokens, jnp.ones(length + 1, bool), laws)
        ours = accept_drawn(tokens, uniforms, jax.nn.softmax(logits), jax.nn.softmax(drafts))
        return ours, verify_traversal(uniforms, proposal, logits)

    decided = jax.jit(jax.vmap(both))(tokens, logits, drafts, uniforms)
    ours, theirs = jax.tree.map(np.asarray, decided)
    np.testing.assert_array_equal(ours.count, theirs.num_emitted)
    np.testing.assert_array_equal(ours.last, theirs.next_token)
    np.testing.assert_array_equal(ours.path, theirs.path[:, :, None] == np.arange(length + 1))
    for row, count in enumerate(ours.count):
        emitted = [*tokens[row, 1:count], theirs.next_token[row]]
        assert ours.tokens[row].tolist() == [*emitted, *[0] * (length + 1 - count)]
    assert set(ours.count.tolist()) == set(range(1, length + 2))
