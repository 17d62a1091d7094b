"""Penalties at every node of a tree are those of a plain loop over the node's text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.penalties import penalize
from jaxspec.core.proposal import tree_proposal
from jaxspec.core.tree import chain, tree_from_paths
from jaxspec.core.types import Context, Penalties, Warp
from tests.laws.penalties import RULES, penalized_by_hand

VOCAB, PLACES, NUM_PROMPT, STOP_IDS = 5, 16, 3, [0, 4]
TREES = {
    "the root alone": chain(0),
    "chain": chain(3),
    "tree": tree_from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
}


def context_of(text: np.ndarray) -> Context:
    tokens = np.full(PLACES, 1, np.int32)  # what follows the text means nothing
    tokens[: len(text)] = text
    stop_ids = jnp.array([*STOP_IDS, -1])
    none = (None, None)
    return Context(jnp.asarray(tokens), jnp.int32(len(text)), jnp.int32(9), stop_ids, Warp(), *none)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", TREES)
def test_every_node_is_penalized_for_its_own_text(shape, rule):
    tree, rng = TREES[shape], np.random.default_rng(0)
    nodes, rules = len(tree.parents), RULES[rule]

    @jax.jit
    def ours(logits, tokens, context, num_emitted):
        proposal = tree_proposal(tree, tokens, jnp.ones(nodes, bool), None)
        penalties = Penalties(**jax.tree.map(jnp.asarray, rules))
        return penalize(logits, penalties, context, num_emitted, proposal)

    for length in (NUM_PROMPT, 4, 9, 12):
        text = rng.integers(VOCAB, size=length)
        tokens = np.array([text[-1], *rng.integers(VOCAB, size=nodes - 1)])
        logits = rng.standard_normal((nodes, VOCAB)).astype(np.float32)
        found = ours(logits, tokens, context_of(text), jnp.int32(length - NUM_PROMPT))
        for node in range(nodes):
            path = tree.paths[node, 1 : tree.depths[node] + 1]
            whole = [*text, *tokens[path]]
            expected = penalized_by_hand(logits[node], whole, NUM_PROMPT, STOP_IDS, rules)
            np.testing.assert_allclose(found[node], expected, rtol=1e-6, atol=1e-6)
