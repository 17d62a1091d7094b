"""EAGLE drafting against recorded generations, draft by draft."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model, load_eagle
from jaxspec.core.decode import prefill
from jaxspec.core.loop import DecodePlan, decode
from jaxspec.core.masks import causal
from jaxspec.core.tree import EAGLE_PATHS, tree_from_parents
from jaxspec.core.types import Params
from jaxspec.drafters import Eagle, Eagle2
from tests.laws.test_drafters import free_request
from tests.models.test_eagle import first, golden, third  # noqa: F401  (fixtures)


def chain(length: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * depth for depth in range(1, length + 1))


def siblings(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(count))


CHAIN5 = chain(5)


@pytest.mark.parametrize("case", ["eagle1_mc_sim_7b_63/2", "chain5/2"])
def test_recorded_drafts_of_eagle1(golden, first, case):  # noqa: F811
    """The same tokens at every node, as many accepted, from the first step to the last."""
    recorded = json.loads((golden / "eagle1_generate_greedy.json").read_text())[case]
    target, folder = first
    paths = CHAIN5 if case.startswith("chain") else EAGLE_PATHS
    drafter = Eagle.of(load_eagle(folder, target), paths)
    # The reference lets the target choose a token before it drafts for the first time.
    start = len(recorded["prompt"]) + 1
    (row,) = generate(
        Model(target, None),
        recorded["output"][:start],
        GenerationConfig(max_new_tokens=len(recorded["output"]) - start + 8),
        drafter,
        return_trace=True,
    )
    assert row.tokens.tolist()[: len(recorded["output"]) - start] == recorded["output"][start:]
    for ours, theirs in zip(row.trace, recorded["steps"], strict=False):
        within = ours.valid  # the last step may be cut short by the budget
        assert ours.tokens[within].tolist() == np.array(theirs["tree_candidates"])[within].tolist()
        assert len(ours.path) - 1 == theirs["accept_length"]
    assert len(row.trace) >= len(recorded["steps"])


@pytest.mark.parametrize(
    ("file", "heads"), [("eagle2_generate_greedy", "first"), ("eagle3_generate_greedy", "third")]
)
def test_recorded_dynamic_trees(golden, request, file, heads):  # noqa: F811
    """The same tokens, in the same tree, as many accepted, in every step."""
    ((_, recorded),) = json.loads((golden / f"{file}.json").read_text()).items()
    target, folder = request.getfixturevalue(heads)
    drafter = Eagle2.of(
        load_eagle(folder, target),
        num_nodes=recorded["total_token"] - 1,
        depth=recorded["depth"],
        beam=recorded["top_k"],
    )
    start = len(recorded["prompt"]) + 1
    rest = recorded["output"][start:]
    # Room for a whole tree after the last recorded token, so that no step is cut short.
    config = GenerationConfig(max_new_tokens=len(rest) + recorded["depth"] + 2)
    (row,) = generate(
        Model(target, None), recorded["output"][:start], config, drafter, return_trace=True
    )
    assert row.tokens.tolist()[: len(rest)] == rest
    for ours, theirs in zip(row.trace, recorded["steps"], strict=False):
        assert ours.tokens.tolist() == theirs["draft_tokens"]
        ancestors = tree_from_parents(ours.parents.tolist()).ancestors
        assert ancestors.tolist() == np.array(theirs["tree_mask"], bool).tolist()
        assert len(ours.path) - 1 == theirs["accept_length"]
    assert len(row.trace) >= len(recorded["steps"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda head: Eagle.of(head, chain(513)), "513 levels deep, but the head has 512 posit"),
        (lambda head: Eagle.of(head, siblings(65)), "takes rank 64, but the head drafts from 64"),
        (lambda head: Eagle2.of(head, beam=65), "takes rank 64, but the head drafts from 64"),
    ],
)
def test_trees_too_large_for_the_head_are_refused(first, make, message):  # noqa: F811
    target, folder = first
    drafter = make(load_eagle(folder, target))
    with pytest.raises(ValueError, match=message):
        generate(Model(target, None), [1, 2, 3], GenerationConfig(4), drafter)


def test_true_states_replace_predicted_ones(first):  # noqa: F811
    """After any number of steps the head's cache is that of a fresh pass over the whole text."""
    target, folder = first
    head = load_eagle(folder, target)
    drafter = Eagle(CHAIN5)
    request = free_request("greedy")
    plan = DecodePlan((64,), chunk=16)
    states = decode(
        Params(target, head), request.prompts, request.automaton, drafter=drafter, plan=plan
    )

    @jax.jit
    def fresh_pass(tokens):
        length = len(tokens)
        hidden, _ = prefill(target, tokens, jnp.int32(length), chunk=length)
        return head.forward(
            target.embed(tokens[1:]),
            hidden.features[:-1],
            jnp.arange(length - 1),
            causal(length - 1),
            None,
        )

    for row in range(3):
        length = int(states.context.length[row])
        fresh = fresh_pass(states.context.tokens[row, :length])
        known = int(states.draft.cache.length[row])
        assert length - 1 - drafter.tree_shape[1] - 1 <= known < length
        kept = states.draft.cache.layers[0].values[row][:, :known]
        np.testing.assert_allclose(kept, fresh.new_kv[0].values[:, :known], atol=1e-4)
