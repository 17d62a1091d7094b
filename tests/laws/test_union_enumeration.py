"""Two drafters in one proposal are lossless: `joined` itself, over every draft of the head.

Lookup's draft is given, the head's is drawn; each draft of it is judged with its exact probability,
as in `test_enumeration.py`. Which of the two is verified may depend on the text, not on the draw.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import verify as rules
from jaxspec.core.proposal import chain_proposal, tree_proposal
from jaxspec.core.tree import chain, tree_from_paths
from jaxspec.core.types import Proposal
from jaxspec.drafters import union
from tests.laws import enumeration
from tests.laws.test_enumeration import EXACT, QUICK, VOCAB, WARPS, Outcome, random_laws

HEADS = {
    "chain": chain(2),
    # More parents than levels, and as many: paths are judged in either.
    "tree": tree_from_paths([(0,), (1,), (0, 0), (1, 0)]),
    "thin tree": tree_from_paths([(0,), (1,), (2,), (1, 0)]),
}
SHORT, LONG = [1, 2, 1], [1, 2, 1, 0, 3]
"""Tokens of lookup: fewer nodes than trees have, or more; deeper than any of them."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def looked_up(tokens: list[int], drafted: int) -> Proposal:
    """A chain of which the first tokens are valid."""
    nodes = np.arange(len(tokens) + 1)
    return chain_proposal(jnp.array([0, *tokens]), jnp.asarray(nodes <= drafted))


@lru_cache
def measured_by(head: str, nodes: int, looks: bool) -> Callable:
    """Measures verification of every draft of a head, next to a chain of lookup."""
    every, law = jnp.ones(len(HEADS[head].parents), bool), jnp.zeros((1, VOCAB))
    drawn = tree_proposal(HEADS[head], every.astype(int), every, law)
    proposal = union.joined(jnp.asarray(looks), looked_up([0] * (nodes - 1), 0), drawn)
    tree = jax.tree.map(np.asarray, proposal.tree)

    def one(proposal, logits, key):
        return enumeration.measure(rules.verify, tree, proposal, logits, key)

    return jax.jit(jax.vmap(one), compiler_options=QUICK)


def judge(
    head: str,
    found: Proposal,
    target: enumeration.Laws,
    laws: enumeration.Laws,
    looks: np.ndarray | bool,
) -> Outcome:
    """Compares the law of the text with the target's own.

    Args:
        head: name of the drafter that draws.
        found: the draft of lookup.
        target: the target's laws.
        laws: those that the head draws from.
        looks: whether lookup drafts, for each draft of the head.
    """
    tree = HEADS[head]
    drafts = enumeration.sampled_drafts(tree, laws)
    looks = np.broadcast_to(looks, len(drafts.tokens))
    with np.errstate(divide="ignore"):
        parents = np.unique(tree.parents[1:])
        logprobs = np.log(enumeration.laws_at(tree, laws, drafts.tokens, parents))
    joint, consistent = 0.0, True
    for choice in np.unique(looks):

        def joined(tokens, logprobs, choice=choice):
            drawn = tree_proposal(tree, tokens, jnp.ones(len(tokens), bool), logprobs)
            return union.joined(jnp.asarray(choice), found, drawn)

        proposals = jax.vmap(joined)(drafts.tokens, logprobs)
        whole = jax.tree.map(lambda leaf: np.asarray(leaf[0]), proposals.tree)
        tokens, valid = np.asarray(proposals.tokens), np.asarray(proposals.valid)
        with np.errstate(divide="ignore"):
            logits = np.log(enumeration.laws_at(whole, target, tokens, range(tokens.shape[1])))
        keys = jax.random.split(jax.random.key(0), len(tokens))
        measure = measured_by(head, len(found.tokens), bool(choice))
        measured = jax.tree.map(np.asarray, measure(proposals, logits, keys))
        shares = drafts.probability * (looks == choice)
        some = enumeration.Drafts(tokens, valid, shares)
        joint += enumeration.emitted_law(whole, some, measured, target)
        consistent &= measured.consistent[shares > 0].all()
    expected = enumeration.autoregressive_law(target[: whole.paths.shape[1]])
    return Outcome(np.abs(joint - expected).max(), consistent)


def of_length(tokens: list[int], warp: str, seed: int) -> tuple[enumeration.Laws, enumeration.Laws]:
    """The target's laws, as deep as the union's tree, and the head's."""
    return random_laws(seed, WARPS[warp], len(tokens)), random_laws(seed + 1, WARPS[warp])


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("looks", [True, False], ids=["lookup drafts", "the head drafts"])
@pytest.mark.parametrize("head", HEADS)
def test_the_law_is_kept_whoever_drafts(head, looks, warp):
    target, laws = of_length(SHORT, warp, 30)
    outcome = judge(head, looked_up(SHORT, 3), target, laws, looks)
    assert outcome.consistent
    assert outcome.deviation < EXACT


@pytest.mark.parametrize("drafted", [5, 2, 0])
@pytest.mark.parametrize("looks", [True, False], ids=["lookup drafts", "the head drafts"])
def test_the_law_is_kept_where_lookup_has_more_nodes(looks, drafted):
    target, laws = of_length(LONG, "hot", 32)
    outcome = judge("tree", looked_up(LONG, drafted), target, laws, looks)
    assert outcome.consistent
    assert outcome.deviation < EXACT


@pytest.mark.parametrize("head", HEADS)
def test_a_choice_by_what_was_drawn_is_caught(head):
    target, laws = of_length(SHORT, "plain", 34)
    drawn = enumeration.sampled_drafts(HEADS[head], laws).tokens[:, 1]
    outcome = judge(head, looked_up(SHORT, 3), target, laws, drawn == 2)
    assert outcome.deviation > 1e-3


def flat(chain: Proposal, like: jax.Array) -> jax.Array:
    return jnp.full((len(chain.tokens) - 1, VOCAB), -jnp.log(VOCAB))


@pytest.mark.parametrize("head", HEADS)
def test_lookup_that_says_it_drew_is_caught(head, monkeypatch):
    monkeypatch.setattr(union, "_certain", flat)
    target, laws = of_length(SHORT, "plain", 40)
    outcome = judge(head, looked_up(SHORT, len(SHORT)), target, laws, True)
    assert outcome.deviation > 1e-3 or not outcome.consistent
