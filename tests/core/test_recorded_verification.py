"""Trees and acceptance against values recorded from the published reference programs.

The references draw one uniform for each token they try; here each is given to the node that was
tried with it. Where they record the law of the next token, ours is read off `verify` by scanning
the uniform that draws it.
"""

import itertools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.proposal import tree_proposal
from jaxspec.core.sampling import warp_logits
from jaxspec.core.tree import EAGLE_PATHS, chain, traced_tree, tree_from_parents, tree_from_paths
from jaxspec.core.types import Proposal, Tree, Warp
from jaxspec.core.verify import (
    verify_chain,
    verify_deterministic,
    verify_greedy,
    verify_tree,
)
from tests.laws.enumeration import law_of_emitted

PROBABILITY = 2e-5  # tolerance of recorded float32 probabilities


@pytest.fixture(scope="module")
def eagle(recorded_folder):
    return recorded_folder("eagle")


def tree_from_rows(rows: np.ndarray) -> Tree:
    """The tree whose root-to-leaf paths are given as node numbers, padded with -1."""
    parents = [-1] * (rows.max() + 1)
    for row in rows:
        for parent, child in itertools.pairwise(row[row >= 0]):
            parents[child] = int(parent)
    return tree_from_parents(parents)


def by_node(rows: np.ndarray, values: np.ndarray, nodes: int) -> np.ndarray:
    """Returns one entry per node, from the references' entries per (leaf row, depth)."""
    used = rows >= 0
    found = np.zeros((nodes, *values.shape[2:]), values.dtype)
    found[rows[used]] = values[used]
    return found


def padded(array, shape: tuple[int, ...], value: float) -> np.ndarray:
    """Widened to a common shape, so that few programs serve many cases."""
    array = np.asarray(array)
    return np.pad(
        array,
        [(0, wide - narrow) for narrow, wide in zip(array.shape, shape, strict=True)],
        constant_values=value,
    )


@pytest.mark.parametrize(
    "name", ["eagle1_mc_sim_7b_63", "chain5", "asym6_a", "medusa_notebook_demo"]
)
def test_tree_arrays_equal_the_recorded_buffers(eagle, name):
    recorded = json.loads((eagle / "tree_buffers.json").read_text())[name]
    tree = tree_from_paths(recorded["choices"])
    buffers = recorded["eagle1_verify"]
    np.testing.assert_array_equal(tree.ancestors, np.array(buffers["tree_attn_mask"], bool))
    np.testing.assert_array_equal(tree.depths, buffers["tree_position_ids"])
    assert len(tree.parents) - 1 == recorded["num_nodes"]
    assert np.bincount(tree.depths)[1:].tolist() == recorded["nodes_per_depth"]
    leaves = np.flatnonzero((tree.children < 0).all(axis=1))
    assert sorted(tree.paths[leaves].tolist()) == sorted(buffers["retrieve_indices"])


def test_the_preset_is_the_recorded_tree(eagle):
    recorded = json.loads((eagle / "tree_buffers.json").read_text())["eagle1_mc_sim_7b_63"]
    assert [list(path) for path in EAGLE_PATHS] == recorded["sorted_choices"]


def test_greedy_acceptance_equals_the_recorded(eagle):
    arrays = np.load(eagle / "greedy_posterior.npz")
    cases = json.loads((eagle / "greedy_posterior.json").read_text())
    widest = max(case["vocab"] for case in cases)
    compiled = jax.jit(verify_greedy)
    for case in cases:
        key = case["key"]
        tree = tree_from_rows(arrays[f"{key}/retrieve_indices"])
        tokens = jnp.asarray(arrays[f"{key}/tree_tokens"], jnp.int32)
        proposal = tree_proposal(tree, tokens, jnp.ones(len(tokens), bool))
        logits = padded(arrays[f"{key}/node_logits"], (len(tokens), widest), -np.inf)
        verdict = compiled(proposal, jnp.asarray(logits))
        path = [node for node in verdict.path.tolist() if node >= 0]
        assert path == case["select_node_indices"], key
        assert verdict.num_emitted == case["accept_length"] + 1
        assert verdict.next_token == case["next_token"]


class Trial(NamedTuple):
    """One recorded verification, node by node. `path` is what the reference accepted."""

    proposal: Proposal
    target_logits: jax.Array
    uniforms: jax.Array
    path: list[int]
    law: np.ndarray


def uniforms_by_node(tree: Tree, path: list[int], recorded: np.ndarray) -> jax.Array:
    """Gives each recorded uniform to the node tried with it: siblings in order, level by level."""
    uniforms, left = np.full(len(tree.parents), np.nan), iter(recorded)
    for node, accepted in itertools.zip_longest(path, path[1:]):
        children = [child for child in np.asarray(tree.children)[node] if child >= 0]
        tried = children if accepted is None else children[: children.index(accepted) + 1]
        for child in tried:
            uniforms[child] = next(left)
    assert next(left, None) is None
    # A uniform that no decision may depend on is set so that a use of it would show.
    return jnp.asarray(np.where(np.isnan(uniforms), 0.0, uniforms))


@jax.jit
def outcome(proposal: Proposal, target_logits: jax.Array, uniforms: jax.Array):
    """Verifies by the rule of the reference program: node by node, from the root on."""
    rule = verify_deterministic
    if proposal.draft_logprobs is not None:
        rule = verify_chain if proposal.tree.children.shape[-1] == 1 else verify_tree
    verdict = rule(uniforms, proposal, target_logits)
    return verdict, law_of_emitted(rule, uniforms, proposal, target_logits)


def assert_same_trial(trial: Trial):
    verdict, law = outcome(trial.proposal, trial.target_logits, trial.uniforms)
    assert [node for node in verdict.path.tolist() if node >= 0] == trial.path
    np.testing.assert_allclose(law, trial.law, atol=PROBABILITY)


def test_sampled_siblings_are_accepted_as_recorded(eagle):
    arrays = np.load(eagle / "eagle1_stochastic_posterior.npz")
    cases = json.loads((eagle / "eagle1_stochastic_posterior.json").read_text())
    assert cases
    with jax.enable_x64(True):
        for case in cases:
            assert_same_trial(eagle1_trial(case, arrays))


def eagle1_trial(case: dict, arrays) -> Trial:
    key = case["key"]
    tokens = arrays[f"{key}/tree_candidates"][0]
    candidates = arrays[f"{key}/candidates"]
    tree = tree_from_paths(
        EAGLE_PATHS
        if case["tree"].startswith("eagle1")
        else [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
    )
    leaves = np.flatnonzero((tree.children < 0).all(axis=1))
    rows = tree.paths[leaves][np.lexsort(leaf_order(tree, leaves))]
    np.testing.assert_array_equal(np.where(rows >= 0, tokens[rows], -1), candidates)
    warp = Warp(
        temperature=jnp.float64(case["temperature"]),
        top_p=jnp.float64(case["top_p"]) if case["top_p"] else None,
    )
    logits = by_node(rows, arrays[f"{key}/logits"].astype(np.float64), len(tokens))
    path = [int(node) for node in rows[case["best_candidate"]][: case["accept_length"] + 1]]
    laws = arrays[f"{key}/draft_probs_concat"].astype(np.float64)
    return Trial(
        proposal=tree_proposal(
            tree,
            jnp.asarray(tokens),
            jnp.ones(len(tokens), bool),
            jnp.log(laws / laws.sum(axis=1, keepdims=True)),
        ),
        target_logits=warp_logits(jnp.asarray(logits), warp),
        uniforms=uniforms_by_node(tree, path, arrays[f"{key}/uniforms"]),
        path=path,
        law=arrays[f"{key}/sample_p_corrected"],
    )


def leaf_order(tree: Tree, leaves: np.ndarray) -> list[np.ndarray]:
    """Sort keys of the references' leaf rows: by node numbers from the root, ends last."""
    paths = np.where(tree.paths[leaves] < 0, len(tree.parents), tree.paths[leaves])
    return list(paths.T[::-1])


def test_deterministic_siblings_are_accepted_as_recorded(eagle):
    arrays = np.load(eagle / "eagle2_stochastic_posterior.npz")
    cases = json.loads((eagle / "eagle2_stochastic_posterior.json").read_text())
    assert cases
    with jax.enable_x64(True):
        for case in cases:
            assert_same_trial(eagle2_trial(case, arrays))


def eagle2_trial(case: dict, arrays, nodes: int = 40, branch: int = 10) -> Trial:
    """A dynamic tree: nodes are the distinct prefixes of the candidates, in the order of rows."""
    candidates = arrays[f"{case['key']}/candidates"]
    depth = candidates.shape[1] - 1
    prefixes = [()]
    for length in range(1, depth + 1):
        for row in candidates:
            prefix = tuple(row[1 : length + 1].tolist())
            if prefix[-1] >= 0 and prefix not in prefixes:
                prefixes.append(prefix)
    index = {prefix: node for node, prefix in enumerate(prefixes)}
    rows = np.array(
        [
            [index.get(tuple(row[1 : length + 1].tolist()), -1) for length in range(depth + 1)]
            for row in candidates
        ]
    )
    unused = nodes - len(prefixes)
    parents = [-1, *(index[prefix[:-1]] for prefix in prefixes[1:]), *[0] * unused]
    tokens = [candidates[0, 0], *(prefix[-1] for prefix in prefixes[1:]), *[0] * unused]
    valid = jnp.arange(nodes) < len(prefixes)
    tree = traced_tree(jnp.array(parents, jnp.int32), valid, depth, branch)
    logits = by_node(rows, arrays[f"{case['key']}/logits"].astype(np.float64), nodes)
    path = [int(node) for node in rows[case["best_candidate"]][: case["accept_length"] + 1]]
    return Trial(
        proposal=Proposal(jnp.array(tokens), tree, valid, None, jnp.zeros(nodes, jnp.int32)),
        target_logits=jnp.asarray(logits) / case["temperature"],
        uniforms=uniforms_by_node(tree, path, arrays[f"{case['key']}/uniforms"]),
        path=path,
        law=arrays[f"{case['key']}/sample_p"],
    )


def test_the_chain_rule_of_draft_and_verify_is_the_recorded_one(recorded_folder):
    folder = recorded_folder("draft_verify")
    arrays = np.load(folder / "dv_sampling_accept.npz")
    cycles = json.loads((folder / "dv_sampling_accept.json").read_text())[0]["cycles"]
    longest = max(cycle["drafted"] for cycle in cycles)
    with jax.enable_x64(True):
        for cycle in cycles:
            assert_same_trial(draft_verify_trial(cycle, arrays, longest))


def draft_verify_trial(cycle: dict, arrays, longest: int) -> Trial:
    """A chain of up to `longest` tokens; the unused ones are not valid."""
    key, drafted = cycle["key"], cycle["drafted"]
    vocab = arrays[f"{key}/p"].shape[-1]
    tokens, uniforms = np.zeros(longest + 1, int), np.zeros(longest + 1)
    laws, targets = np.full((longest, vocab), 1 / vocab), np.ones((longest + 1, vocab))
    tokens[1 : drafted + 1] = arrays[f"{key}/draft_tokens"]
    uniforms[1 : drafted + 1] = arrays[f"{key}/uniforms"][:drafted]
    laws[:drafted] = arrays[f"{key}/q"]
    targets[: drafted + 1] = arrays[f"{key}/p"]
    return Trial(
        proposal=tree_proposal(
            chain(longest),
            jnp.asarray(tokens),
            jnp.arange(longest + 1) <= drafted,
            jnp.log(jnp.asarray(laws)),
        ),
        target_logits=jnp.log(jnp.asarray(targets)),
        uniforms=jnp.asarray(uniforms),
        path=list(range(cycle["accepted"] + 1)),
        law=arrays[f"{key}/p"][-1] if cycle["fully_accepted"] else arrays[f"{key}/residual"],
    )


@pytest.mark.parametrize("rule", [verify_chain, verify_tree, verify_deterministic])
def test_speculative_sampling_draws_what_the_definition_draws(recorded_folder, rule):
    """Every rule that applies to a chain gives the same tokens from the same numbers."""
    cases = json.loads((recorded_folder("diffusion") / "spec_sampling.json").read_text())
    if rule is verify_deterministic:
        cases = [case for case in cases if case["mode"] == "argmax_draft_point_mass"]
    assert cases
    nodes = 1 + max(len(case["draft"]) for case in cases)
    vocab = max(len(law) for case in cases for law in case["p"])
    compiled = jax.jit(rule)
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        for case in cases:
            tokens = padded([0, *case["draft"]], (nodes,), 0)
            proposal = tree_proposal(
                chain(nodes - 1),
                jnp.asarray(tokens),
                jnp.arange(nodes) <= len(case["draft"]),
                jnp.log(jnp.asarray(padded(case["q"], (nodes - 1, vocab), 0))),
            )
            uniforms = padded([case["u_next"], *case["u_accept"]], (nodes,), 0.5)
            target_logits = jnp.log(jnp.asarray(padded(case["p"], (nodes, vocab), 0)))
            verdict = compiled(jnp.asarray(uniforms), proposal, target_logits)
            assert verdict.num_emitted - 1 == case["n_accepted"]
            assert verdict.next_token == case["next_token"]
