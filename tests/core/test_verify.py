"""Greedy verification against a plain walk; what every rule shares. Laws: tests/laws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.proposal import chain_proposal, tree_proposal
from jaxspec.core.tree import chain, tree_from_parents, tree_from_paths
from jaxspec.core.types import Proposal, Tree
from jaxspec.core.verify import (
    verify,
    verify_chain,
    verify_deterministic,
    verify_greedy,
    verify_traversal,
    verify_tree,
)

ALMOST_ONE = 1 - 2.0**-24  # the largest uniform in float32
TREE = tree_from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
# One parent in each level, so that it has as many distributions as levels.
THIN = tree_from_paths([(0,), (1,), (0, 0), (0, 0, 0)])


def longest_agreed_path(tree: Tree, tokens, valid, choices) -> list[int]:
    """The deepest path of tokens the target would choose; the lowest node on ties."""
    best = [0]
    for node in range(1, len(tokens)):
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parents[node])
        agreed = all(
            valid[child] and tokens[child] == choices[parent]
            for parent, child in itertools.pairwise(path)
        )
        if agreed and len(path) > len(best):
            best = path
    return best


greedy = jax.jit(jax.vmap(lambda tokens, valid, logits: verify_greedy(
    tree_proposal(TREE, tokens, valid), logits
)))  # fmt: skip


def test_greedy_takes_the_longest_path_the_target_agrees_with():
    """Few tokens, so that siblings often agree with the target more than once."""
    rng = np.random.default_rng(0)
    rows, nodes, vocab = 400, len(TREE.parents), 3
    tokens = rng.integers(0, vocab, (rows, nodes))
    valid = rng.random((rows, nodes)) < 0.8
    valid[:, 0] = True
    logits = rng.normal(size=(rows, nodes, vocab)).astype(np.float32)
    verdicts = greedy(tokens, valid, logits)
    lengths = []
    for row in range(rows):
        choices = np.argmax(logits[row], axis=1)
        path = longest_agreed_path(TREE, tokens[row], valid[row], choices)
        padded = [*path, *[-1] * (TREE.paths.shape[1] - len(path))]
        assert verdicts.path[row].tolist() == padded
        assert verdicts.num_emitted[row] == len(path)
        assert verdicts.next_token[row] == choices[path[-1]]
        lengths.append(len(path))
    assert set(lengths) == {1, 2, 3, 4}


def random_proposal(rng, tree: Tree, vocab: int, sampled: bool) -> Proposal:
    nodes = len(tree.parents)
    tokens = jnp.asarray(rng.integers(0, vocab, nodes), jnp.int32)
    valid = jnp.asarray(rng.random(nodes) < 0.6).at[0].set(True)
    laws = None
    if sampled:
        shape = (len(np.unique(np.asarray(tree.parents)[1:])), vocab)
        laws = jax.nn.log_softmax(jnp.asarray(rng.normal(size=shape), jnp.float32), axis=-1)
    return tree_proposal(tree, tokens, valid, laws)


RULES = {
    "greedy": (lambda uniforms, proposal, logits: verify_greedy(proposal, logits), TREE, False),
    "chain": (verify_chain, chain(4), True),
    "deterministic": (verify_deterministic, TREE, False),
    "siblings": (verify_tree, TREE, True),
    "paths of a chain": (verify_traversal, chain(4), True),
    "paths of a tree": (verify_traversal, TREE, True),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_unused_node_is_never_accepted(rule):
    """Also with uniforms that accept whatever can be accepted."""
    function, tree, sampled = RULES[rule]
    function = jax.jit(function)
    rng = np.random.default_rng(0)
    accepted = 0
    for _ in range(60):
        proposal = random_proposal(rng, tree, 3, sampled)
        nodes = len(tree.parents)
        logits = jnp.asarray(rng.normal(size=(nodes, 3)), jnp.float32)
        uniforms = jnp.asarray(rng.random(nodes) * rng.choice([0, 1]), jnp.float32)
        verdict = function(uniforms, proposal, logits)
        path = [node for node in verdict.path.tolist() if node >= 0]
        assert len(path) == verdict.num_emitted
        assert path[0] == 0
        assert all(proposal.valid[node] for node in path)
        assert all(tree.parents[child] == parent for parent, child in itertools.pairwise(path))
        accepted += len(path) - 1
    assert accepted > 0


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
@pytest.mark.parametrize("rule", [name for name in RULES if name != "greedy"])
def test_tokens_the_target_excludes_are_never_emitted(rule, uniform):
    """At the ends of the unit interval too, drafted or not."""
    function, tree, sampled = RULES[rule]
    function = jax.jit(function)
    rng = np.random.default_rng(1)
    for _ in range(40):
        proposal = random_proposal(rng, tree, 4, sampled)
        nodes = len(tree.parents)
        allowed = rng.random((nodes, 4)) < 0.5
        allowed[np.arange(nodes), rng.integers(0, 4, nodes)] = True
        logits = jnp.where(allowed, jnp.asarray(rng.normal(size=(nodes, 4)), jnp.float32), -jnp.inf)
        verdict = function(jnp.full(nodes, uniform, jnp.float32), proposal, logits)
        path = [node for node in verdict.path.tolist() if node >= 0]
        tokens = [*proposal.tokens[jnp.array(path)].tolist()[1:], int(verdict.next_token)]
        assert all(allowed[node, token] for node, token in zip(path, tokens, strict=True))


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
@pytest.mark.parametrize("rule", [name for name in RULES if name != "greedy"])
def test_a_node_that_no_token_may_follow_is_nobody_elses_affair(rule, bad):
    """Nodes elsewhere are judged as if it were sound."""
    function, tree, sampled = RULES[rule]
    function, decided = jax.jit(function), 0
    rng = np.random.default_rng(6)
    for _ in range(60):
        proposal = random_proposal(rng, tree, 3, sampled)
        nodes = len(tree.parents)
        logits = rng.normal(size=(nodes, 3))
        uniforms = jnp.asarray(rng.random(nodes), jnp.float32)
        leaf = nodes - 1
        right = function(uniforms, proposal, jnp.asarray(logits, jnp.float32))
        logits[leaf] = bad
        found = function(uniforms, proposal, jnp.asarray(logits, jnp.float32))
        assert found.path.tolist() == right.path.tolist()
        if leaf not in right.path.tolist():
            assert found.next_token == right.next_token
            decided += 1
    assert decided > 10


def test_the_rule_follows_from_the_structure_of_the_proposal():
    """Verdicts under one law of uniforms differ between the rules, and `verify` takes the right."""
    rng = np.random.default_rng(2)
    cases = [(tree, True, verify_traversal) for tree in (chain(4), TREE, THIN)]
    cases += [(tree, False, verify_deterministic) for tree in (chain(4), TREE)]
    for tree, sampled, expected in cases:
        rules = jax.jit(verify), jax.jit(expected)
        for _ in range(10):
            proposal = random_proposal(rng, tree, 3, sampled)
            nodes = len(tree.parents)
            logits = jnp.asarray(rng.normal(size=(nodes, 3)), jnp.float32)
            uniforms = jnp.asarray(rng.random(nodes), jnp.float32)
            ours, theirs = (rule(uniforms, proposal, logits) for rule in rules)
            assert jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs) == (True,) * 3


def test_parents_that_share_a_draw_are_judged_from_the_root_on():
    """There is one distribution for each depth then; see `Proposal.law_row`."""
    rng = np.random.default_rng(5)
    rules = jax.jit(verify), jax.jit(verify_tree)
    for _ in range(10):
        proposal = random_proposal(rng, TREE, 3, sampled=True)
        laws = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(3, 3)), jnp.float32), axis=-1)
        depths = jnp.maximum(proposal.tree.depths - 1, 0)
        proposal = proposal._replace(draft_logprobs=laws, law_row=depths)
        logits = jnp.asarray(rng.normal(size=(len(depths), 3)), jnp.float32)
        uniforms = jnp.asarray(rng.random(len(depths)), jnp.float32)
        ours, theirs = (rule(uniforms, proposal, logits) for rule in rules)
        assert jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs) == (True,) * 3


def test_a_chain_and_a_thin_tree_are_verified_alike():
    """The ratio test is the sibling rule with one sibling: same uniforms, same verdicts."""
    rng = np.random.default_rng(3)
    chain_rule, tree_rule = jax.jit(verify_chain), jax.jit(verify_tree)
    for _ in range(40):
        proposal = random_proposal(rng, chain(4), 3, sampled=True)
        logits = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
        uniforms = jnp.asarray(rng.random(5), jnp.float32)
        as_chain = chain_rule(uniforms, proposal, logits)
        as_tree = tree_rule(uniforms, proposal, logits)
        assert as_chain.path.tolist() == as_tree.path.tolist()
        assert as_chain.next_token == as_tree.next_token


def test_a_root_alone_is_plain_sampling():
    logits = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
    proposal = chain_proposal(jnp.array([1]), jnp.ones(1, bool))
    for uniform, token in [(0.0, 0), (0.19, 0), (0.21, 1), (0.69, 1), (0.71, 2)]:
        verdict = verify(jnp.array([uniform]), proposal, logits)
        assert verdict.path.tolist() == [0]
        assert verdict.num_emitted == 1
        assert verdict.next_token == token


def test_logits_in_half_precision_are_scored_in_float32():
    """Rounded to bfloat16 on input is one thing; 1 - p in bfloat16 would be another."""
    rng = np.random.default_rng(4)
    compiled = jax.jit(verify)
    for _ in range(20):
        proposal = random_proposal(rng, TREE, 8, sampled=False)
        nodes = len(TREE.parents)
        logits = jnp.asarray(rng.normal(size=(nodes, 8)), jnp.bfloat16)
        uniforms = jnp.asarray(rng.random(nodes), jnp.float32)
        half = compiled(uniforms, proposal, logits)
        single = compiled(uniforms, proposal, logits.astype(jnp.float32))
        assert jax.tree.map(lambda a, b: bool((a == b).all()), half, single) == (True,) * 3


def test_laws_of_a_tree_are_found_by_their_parents():
    tree = tree_from_parents([-1, 0, 0, 2, 2, 3])
    proposal = tree_proposal(tree, jnp.arange(6), jnp.ones(6, bool), jnp.zeros((3, 9)))
    # The laws of nodes 0, 2 and 3, in that order.
    assert proposal.law_row.tolist() == [0, 0, 0, 1, 1, 2]
