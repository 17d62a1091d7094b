"""Verification is lossless: proven by enumeration, in float64, on `core.verify` itself.

Every draft, every decision, every emitted token of a tiny vocabulary is summed with its exact
probability (see `enumeration.py`); the joint law of the text must be the target's own to 1e-12.
The same checker must catch the classical mistakes, planted one by one.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import verify as rules
from jaxspec.core.cache import empty_layer
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.penalties import penalize
from jaxspec.core.proposal import choose_children, tree_proposal
from jaxspec.core.sampling import inverse_cdf, warp_logits
from jaxspec.core.tree import chain, tree_from_paths
from jaxspec.core.types import Context, Hidden, LayerKV, Penalties, Tree, Warp
from jaxspec.drafters import growth
from jaxspec.drafters.vocabularies import SharedTokens
from tests.core.table_model import TableModel
from tests.laws import enumeration
from tests.laws.grammars import Machine
from tests.laws.penalties import RULES, penalized_by_hand

VOCAB = 4
EXACT = 1e-12
# Compiling takes longer than running here.
QUICK = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0}

CHAIN = chain(3)
# Three siblings, and two below the one in the middle.
SIBLINGS = tree_from_paths([(0,), (1,), (2,), (1, 0), (1, 1)])
TREES = {"chain": CHAIN, "siblings": SIBLINGS}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def random_laws(seed: int, warp: Warp, depth: int = 3, vocab: int = VOCAB) -> list[np.ndarray]:
    """A random autoregressive law: one table for each length of prefix, warped."""
    return [warped(logits, warp) for logits in random_logits(seed, depth, vocab)]


def random_logits(seed: int, depth: int = 3, vocab: int = VOCAB) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(vocab,) * (length + 1) for length in range(depth + 1)]
    return [1.5 * rng.standard_normal(shape) for shape in shapes]


def warped(logits: np.ndarray, warp: Warp) -> np.ndarray:
    return np.asarray(law_of(logits.reshape(-1, logits.shape[-1]), warp)).reshape(logits.shape)


@jax.jit
def law_of(logits, warp):
    return jax.nn.softmax(warp_logits(logits, warp), axis=-1)


WARPS = {
    "plain": Warp(temperature=jnp.float32(1.0)),
    "hot": Warp(temperature=jnp.float32(1.7)),
    "cold": Warp(temperature=jnp.float32(0.5)),
    "greedy row": Warp(temperature=jnp.float32(0.0)),
    "top-k": Warp(temperature=jnp.float32(1.0), top_k=jnp.int32(2)),
    "top-p": Warp(temperature=jnp.float32(0.8), top_p=jnp.float32(0.7)),
    "min-p": Warp(temperature=jnp.float32(1.2), min_p=jnp.float32(0.4)),
    "banned": Warp(temperature=jnp.float32(1.0), bias=jnp.array([0, -jnp.inf, 0.5, 0])),
}


class Outcome(NamedTuple):
    """Deviation of the text's law from the target's, and whether decisions were in order.

    deviation: the largest difference of any probability of the joint law.
    consistent: every verdict was what its cell of the uniforms asks for.
    """

    deviation: float
    consistent: bool


def compiled(verify, tree: Tree):
    """Measures every draft at once. One program for each kind of proposal."""

    def one(tokens, valid, draft_logprobs, target_logits, key):
        proposal = tree_proposal(tree, tokens, valid, draft_logprobs)
        return enumeration.measure(verify, tree, proposal, target_logits, key)

    return jax.jit(jax.vmap(one), compiler_options=QUICK)


@lru_cache
def honest(shape: str, rule: str):
    return compiled(getattr(rules, rule), TREES[shape])


NODE_BY_NODE = {"chain": "verify_chain", "siblings": "verify_tree"}
"""Published rules that judge each node by itself, by the shape that they are for."""


def judge_each(
    shape: str,
    target: enumeration.Laws,
    drafts: enumeration.Drafts,
    stated: enumeration.Laws | None,
    logits: jax.Array | None = None,
) -> list[Outcome]:
    """Judges every rule that applies to the drafts; arguments are those of `judge`."""
    names = ["verify_deterministic"]
    if stated is not None:
        names = ["verify_traversal", NODE_BY_NODE[shape]]
    return [
        judge(honest(shape, name), TREES[shape], target, drafts, stated, logits) for name in names
    ]


def judge(
    measure: Callable,
    tree: Tree,
    target: enumeration.Laws,
    drafts: enumeration.Drafts,
    stated: enumeration.Laws | None,
    logits: jax.Array | None = None,
) -> Outcome:
    """Compares the law of the text with the target's own.

    Args:
        measure: from `compiled`.
        tree: its tree.
        target: the target's laws.
        drafts: every draft that may happen.
        stated: the laws that the drafter says it draws from; `None`: its drafts are deterministic,
            and each of them alone must keep the law.
        logits: of the target at the nodes of each draft; `None`: those of its laws.
    """
    measured = measured_on(measure, tree, target, drafts, stated, logits)
    expected = enumeration.autoregressive_law(target[: tree.paths.shape[1]])
    groups = [slice(None)] if stated is not None else [[row] for row in range(len(drafts.tokens))]
    laws = [
        enumeration.emitted_law(
            tree,
            enumeration.Drafts(*(field[group] for field in drafts)),
            enumeration.Measured(*(field[group] for field in measured)),
            target,
        )
        for group in groups
    ]
    possible = drafts.probability > 0
    return Outcome(
        max(np.abs(law - expected).max() for law in laws), measured.consistent[possible].all()
    )


def measured_on(
    measure: Callable,
    tree: Tree,
    target: enumeration.Laws,
    drafts: enumeration.Drafts,
    stated: enumeration.Laws | None,
    logits: jax.Array | None = None,
) -> enumeration.Measured:
    """Measures a rule on every draft; arguments are those of `judge`."""
    given = arguments(tree, target, drafts, stated, logits)
    keys = jax.random.split(jax.random.key(0), len(drafts.tokens))
    return jax.tree.map(np.asarray, measure(*given, keys))


def arguments(
    tree: Tree,
    target: enumeration.Laws,
    drafts: enumeration.Drafts,
    stated: enumeration.Laws | None,
    logits: jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | jax.Array]:
    """Arguments of a rule for each draft: tokens, valid nodes, laws of drafts, logits."""
    nodes = range(len(tree.parents))
    with np.errstate(divide="ignore"):
        if logits is None:
            logits = np.log(enumeration.laws_at(tree, target, drafts.tokens, nodes))
        logprobs = None
        if stated is not None:
            expanded = np.unique(tree.parents[1:])
            logprobs = np.log(enumeration.laws_at(tree, stated, drafts.tokens, expanded))
    return drafts.tokens, drafts.valid, logprobs, logits


def assert_lossless(outcomes: list[Outcome]):
    for outcome in outcomes:
        assert outcome.consistent
        assert outcome.deviation < EXACT


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_sampled_drafts_keep_the_law(shape, warp):
    tree = TREES[shape]
    target, draft = random_laws(0, WARPS[warp]), random_laws(1, WARPS[warp])
    drafts = enumeration.sampled_drafts(tree, draft)
    assert_lossless(judge_each(shape, target, drafts, draft))


@pytest.mark.parametrize("draws", [60, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_judging_paths_accepts_no_fewer_tokens_than_judging_nodes(shape, draws):
    """In the mean over all drafts and decisions, for every one of so many pairs of laws."""
    gains = [
        gain
        for first in range(0, draws, ROWS_OF_LAWS)
        for gain in gains_by_paths(shape, range(first, min(first + ROWS_OF_LAWS, draws)))
    ]
    assert len(gains) == draws
    assert min(gains) > -EXACT
    assert np.mean(gains) > 1e-3


ROWS_OF_LAWS = 60
"""Pairs of laws that are measured in one call."""


def gains_by_paths(shape: str, seeds: range) -> list[float]:
    """Returns the tokens that judging paths accepts more, for a random pair of laws each."""
    tree = TREES[shape]
    given, probabilities = [], []
    for seed in seeds:
        warp = WARPS[["plain", "hot", "cold", "top-k", "top-p"][seed % 5]]
        target, draft = (random_laws(2 * seed + which, warp, vocab=3) for which in (100, 101))
        drafts = enumeration.sampled_drafts(tree, draft)
        given.append(arguments(tree, target, drafts, draft))
        probabilities.append(drafts.probability)
    stacked = [np.concatenate(each) for each in zip(*given, strict=True)]
    keys = jax.random.split(jax.random.key(0), len(stacked[0]))
    by_path, by_node = (
        np.asarray(honest(shape, rule)(*stacked, keys).weights) @ np.asarray(tree.depths)
        for rule in ("verify_traversal", NODE_BY_NODE[shape])
    )
    pieces = np.split(by_path - by_node, np.cumsum([len(each) for each in probabilities])[:-1])
    return [float(p @ gain) for p, gain in zip(probabilities, pieces, strict=True)]


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_target_and_draft_may_be_warped_differently(shape):
    tree = TREES[shape]
    target, draft = random_laws(2, WARPS["hot"]), random_laws(3, WARPS["top-k"])
    drafts = enumeration.sampled_drafts(tree, draft)
    assert_lossless(judge_each(shape, target, drafts, draft))


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_a_draft_equal_to_the_target_keeps_the_law(shape):
    tree, laws = TREES[shape], random_laws(4, WARPS["plain"])
    drafts = enumeration.sampled_drafts(tree, laws)
    assert_lossless(judge_each(shape, laws, drafts, laws))


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_laws_that_exclude_each_other_keep_the_law(shape):
    """The draft never proposes what the target may say: everything is rejected."""
    tree = TREES[shape]
    target = random_laws(5, Warp(bias=jnp.array([0, 0, -jnp.inf, -jnp.inf])))
    draft = random_laws(6, Warp(bias=jnp.array([-jnp.inf, -jnp.inf, 0, 0])))
    drafts = enumeration.sampled_drafts(tree, draft)
    assert_lossless(judge_each(shape, target, drafts, draft))


def test_a_single_possible_token_leaves_fillers_among_its_siblings():
    """A law with one token cannot give two siblings: the second is a filler and is skipped."""
    target = random_laws(7, WARPS["plain"])
    draft = random_laws(8, WARPS["greedy row"])
    drafts = enumeration.sampled_drafts(SIBLINGS, draft)
    assert_lossless(judge_each("siblings", target, drafts, draft))


def without(nodes: list[int], where: np.ndarray) -> np.ndarray:
    """Valid nodes of each draft: some are not valid where a condition holds."""
    return ~(where[:, None] & np.isin(np.arange(len(SIBLINGS.parents)), nodes))


def by_all_before(tokens: np.ndarray) -> np.ndarray:
    """Each node's validity depends on the one before it: an ancestor, a sibling or one below it."""
    order = [0, 1, 2, 4, 5, 3]
    valid = np.ones(tokens.shape, bool)
    valid[:, order[1:]] = tokens[:, order[:-1]] != 2
    return valid


# Rules of validity: a node's may depend on all that was known before its own token was drawn, see
# `Proposal.valid`.
EARLY_EXITS = {
    ("chain", "the text alone"): lambda tokens: np.arange(4)[None, :] < 3,
    ("chain", "the token before"): lambda tokens: np.roll(tokens, 1, axis=1) != 2,
    ("siblings", "the text alone"): lambda tokens: np.arange(6)[None, :] < 3,
    ("siblings", "an earlier sibling"): lambda tokens: without([2], tokens[:, 1] == 2),
    ("siblings", "an earlier sibling, for a whole subtree"): lambda tokens: without(
        [2, 4, 5], tokens[:, 1] == 2
    ),
    ("siblings", "what is below an earlier sibling"): lambda tokens: without(
        [3], tokens[:, 4] == tokens[:, 1]
    ),
    ("siblings", "all that was drawn before"): by_all_before,
}


@pytest.mark.parametrize(("shape", "exit_rule"), EARLY_EXITS)
def test_a_draft_that_stops_early_keeps_the_law(shape, exit_rule):
    tree = TREES[shape]
    target, draft = random_laws(9, WARPS["plain"]), random_laws(10, WARPS["plain"])
    drafts = enumeration.sampled_drafts(tree, draft, EARLY_EXITS[shape, exit_rule])
    assert not drafts.valid.all()
    assert_lossless(judge_each(shape, target, drafts, draft))


SURE = 0.5


def of_nodes(tokens: np.ndarray, raw: enumeration.Laws) -> tuple[np.ndarray, np.ndarray]:
    """Largest probability of each node's law in a chain, and the node's own; 1 at the root."""
    drafted = tokens[:, 1:]
    laws = enumeration.laws_at(CHAIN, raw, tokens, range(drafted.shape[1]))
    own = np.take_along_axis(laws, drafted[..., None], axis=2)[..., 0]
    return tuple(
        np.pad(part, ((0, 0), (1, 0)), constant_values=1) for part in (laws.max(axis=2), own)
    )


def ended(sure: np.ndarray) -> np.ndarray:
    return np.cumprod(sure, axis=1).astype(bool)


def a_place_later(sure: np.ndarray) -> np.ndarray:
    return np.pad(sure[:, :-1], ((0, 0), (1, 0)), constant_values=True)


# Ends of a chain by what was known before the draw of the first token that is missing.
EXITS = {
    "after a flat law": lambda largest, own: ended(a_place_later(largest)),
    "before a flat law": lambda largest, own: ended(largest),
    "after an improbable token": lambda largest, own: ended(a_place_later(own)),
}


def judge_exit(warp: str, rule: Callable) -> list[Outcome]:
    """Tokens are drawn from the warped law, and the chain ends by the law before any warping."""
    raw = random_laws(10, WARPS["plain"])
    return judge_chains(
        warp, lambda tokens: rule(*(chances >= SURE for chances in of_nodes(tokens, raw)))
    )


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("rule", EXITS)
def test_an_exit_by_what_was_known_before_the_draw_keeps_the_law(rule, warp):
    assert_lossless(judge_exit(warp, EXITS[rule]))


@pytest.mark.parametrize("warp", ["plain", "hot", "cold", "banned"])
def test_throwing_an_improbable_token_away_is_caught(warp):
    """An exit by a token's own probability, once it is drawn, that does not keep the token."""
    assert_caught(judge_exit(warp, lambda largest, own: ended(own)))


def grown(
    tokens: np.ndarray, raw: list[np.ndarray], warp: Warp, threshold: float, **settings
) -> tuple[np.ndarray, np.ndarray]:
    """Valid nodes and stated laws of `grow_chain`, made to draw these tokens.

    Its draft model reads the tokens before from the scratch, as attention does.
    """
    key, size = jax.random.key(0), tokens.shape[1] - 1
    tables = jnp.concatenate([jnp.asarray(table.reshape(-1, VOCAB)) for table in raw])
    starts = jnp.asarray(np.cumsum([0, *(table.size // VOCAB for table in raw[:-1])]))
    keys = jax.random.key_data(jax.random.split(key, size))

    def one(drawn):
        def forward(depth, token, feature, mask, scratch):
            seen = jnp.where(mask[0], jnp.append(scratch[0].values[0, :, 0], token), 0)
            places = jnp.append(jnp.arange(size), depth)
            prefix = jnp.sum(jnp.where(places > 0, seen * float(VOCAB) ** (depth - places), 0))
            row = tables[starts[depth] + prefix.astype(int)]
            own = LayerKV(token[None, None].astype(float), token[None, :, None].astype(float))
            return Hidden(row[None], jnp.zeros((1, 0)), (own,))

        def choose(own_key, logits, warp, branch):
            _, laws = choose_children(own_key, logits, warp, branch)
            place = jnp.argmax(jnp.all(keys == jax.random.key_data(own_key)[None], axis=1))
            return drawn[1 + place][None, None], laws

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(growth, "choose_children", choose)
            grown = growth.grow_chain(
                size,
                jnp.int32(size + 1),
                threshold,
                key,
                drawn[0],
                growth.DraftLaw(lambda features: features, warp, VOCAB),
                tables[:1],
                forward,
                (empty_layer(1, 1, size, jnp.dtype("float64")),),
                **settings,
            )
        return grown

    chain = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jnp.asarray(tokens, jnp.int32)))
    proposal, valid = chain.proposal, chain.proposal.valid
    assert (valid.sum(axis=1) == chain.count + 1).all()
    assert (proposal.tokens == tokens)[valid].all()
    return valid, np.exp(proposal.draft_logprobs)


def of_the_last_token(before, law, choice):
    return law[choice]


# Settings of `grow_chain`, a threshold, and the confidence that they mean.
CONFIDENCES = {
    "of the draft": ({"least": 0.6}, 0.25, lambda largest, own: np.cumprod(largest, axis=1)),
    "of the last token": (
        {"begun": False, "confidence": of_the_last_token, "least": 0.0},
        0.3,
        lambda largest, own: own,
    ),
}


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", CONFIDENCES)
def test_chains_that_end_early_keep_the_law(name, warp):
    """The drafting code itself: nodes that it offers, and the laws that it states for them."""
    settings, threshold, confidence = CONFIDENCES[name]
    draft, raw = random_laws(10, WARPS[warp]), random_laws(10, WARPS["plain"])

    def valid(tokens):
        drawn, laws = grown(tokens, random_logits(10), WARPS[warp], threshold, **settings)
        sure = confidence(*of_nodes(tokens, raw))
        worth = sure >= settings["least"] * threshold
        assert (drawn == ended(a_place_later(sure >= threshold) & worth)).all()
        expected = enumeration.laws_at(CHAIN, draft, tokens, range(3))
        np.testing.assert_allclose(laws[drawn[:, 1:]], expected[drawn[:, 1:]], atol=EXACT)
        return drawn

    assert_lossless(judge_chains(warp, valid))


def judge_chains(warp: str, valid: Callable) -> list[Outcome]:
    target, draft = random_laws(9, WARPS[warp]), random_laws(10, WARPS[warp])
    drafts = enumeration.sampled_drafts(CHAIN, draft, valid)
    assert len(set(drafts.valid.sum(axis=1).tolist())) > 1
    return judge_each("chain", target, drafts, draft)


@pytest.mark.parametrize("warp", ["plain", "hot", "cold", "banned"])
def test_a_chain_that_drops_tokens_for_their_own_probability_is_caught(warp):
    """What `grow_chain` does if its confidence reads the token and it may still drop it."""
    settings = {"confidence": of_the_last_token, "least": 1.0}
    assert_caught(
        judge_chains(
            warp, lambda tokens: grown(tokens, random_logits(10), WARPS[warp], SURE, **settings)[0]
        )
    )


@pytest.mark.parametrize("gap", [1, 2, 4])
def test_an_unused_sibling_between_used_ones_keeps_the_law(gap):
    """The siblings after it were drawn knowing its token, used or not."""
    target, draft = random_laws(11, WARPS["plain"]), random_laws(12, WARPS["plain"])
    drafts = enumeration.sampled_drafts(SIBLINGS, draft, lambda tokens: np.arange(6) != gap)
    assert_lossless(judge_each("siblings", target, drafts, draft))


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_each_deterministic_draft_keeps_the_law(shape, warp):
    target, drafts = random_laws(13, WARPS[warp]), deterministic_drafts(TREES[shape])
    assert_lossless(judge_each(shape, target, drafts, None))


PROMPT, EMITTED = [1, 2], [3, 1]


def penalized_laws(raw: list[np.ndarray], rules: dict) -> list[np.ndarray]:
    """Laws whose every prefix was penalized by a plain loop over its whole text."""
    tables = [np.empty_like(table) for table in raw]
    for table, found in zip(raw, tables, strict=True):
        for prefix in np.ndindex(table.shape[:-1]):
            text = [*PROMPT, *EMITTED, *prefix]
            found[prefix] = penalized_by_hand(table[prefix], text, len(PROMPT), [0], rules)
    return [warped(table, WARPS["plain"]) for table in tables]


def penalized_at_nodes(
    tree: Tree, raw: list[np.ndarray], tokens: np.ndarray, rules: dict
) -> jax.Array:
    """Logits at the nodes of each draft, penalized by `core.penalties`."""
    text = jnp.array([*PROMPT, *EMITTED, 0, 0])
    row = Context(text, jnp.int32(4), jnp.int32(9), jnp.array([0, -1]), Warp(), None, None)
    penalties = Penalties(**jax.tree.map(jnp.asarray, rules))

    def at_nodes(tokens, logits):
        # The root is the last token of the text.
        tokens = tokens.at[0].set(EMITTED[-1])
        proposal = tree_proposal(tree, tokens, jnp.ones(len(tokens), bool), None)
        return penalize(logits, penalties, row, jnp.int32(len(EMITTED)), proposal)

    logits = enumeration.laws_at(tree, raw, tokens, range(len(tree.parents)))
    return jax.jit(jax.vmap(at_nodes))(tokens, logits)


@pytest.mark.parametrize("rule", ["all", "repetition", "frequency", "bigrams", "a minimum"])
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_penalties_keep_the_law(shape, rule):
    assert_lossless(judge_penalized(shape, RULES[rule]))


def judge_penalized(shape: str, rules: dict) -> list[Outcome]:
    tree, draft = TREES[shape], random_laws(1, WARPS["plain"])
    rng = np.random.default_rng(11)
    raw = [rng.standard_normal((VOCAB,) * (length + 1)) for length in range(4)]
    drafts = enumeration.sampled_drafts(tree, draft)
    logits = penalized_at_nodes(tree, raw, drafts.tokens, rules)
    return judge_each(shape, penalized_laws(raw, rules), drafts, draft, logits)


def without_paths(tree: Tree) -> Tree:
    return tree._replace(
        ancestors=np.eye(len(tree.parents), dtype=bool) & False,
        paths=np.where(np.arange(tree.paths.shape[1]) == 0, 0, -1) + 0 * tree.paths,
    )


def of_the_parent(tree: Tree) -> Tree:
    parents = np.maximum(tree.parents, 0)
    return tree._replace(
        ancestors=np.asarray(tree.ancestors)[parents],
        paths=np.asarray(tree.paths)[parents],
        depths=np.asarray(tree.depths)[parents],
    )


@pytest.mark.parametrize("fault", [without_paths, of_the_parent])
@pytest.mark.parametrize("rule", ["frequency", "bigrams"])
def test_penalties_of_another_text_are_caught(fault, rule, monkeypatch):
    module, right = sys.modules[__name__], penalize

    def wrong(logits, penalties, context, num_emitted, proposal):
        proposal = proposal._replace(tree=jax.tree.map(jnp.asarray, fault(CHAIN)))
        return right(logits, penalties, context, num_emitted, proposal)

    monkeypatch.setattr(module, "penalize", wrong)
    assert_caught(judge_penalized("chain", RULES[rule]))


# Tokens are a stop id, "a", "b" and "ab"; the language is (a b | b a*)* with a "b" at its end.
SPELLED = [b"", b"a", b"b", b"ab"]
MACHINE = Machine([{"a": 1, "b": 2}, {"b": 2}, {"a": 2, "b": 0}], ends=[2])
GRAMMAR_ROOMS = {"room enough": 9, "the end is near": 3}


def constrained_laws(raw: list[np.ndarray], room: int) -> list[np.ndarray]:
    """Laws whose every prefix obeys the machine by a plain loop over its bytes."""
    tables = [np.full_like(table, -np.inf) for table in raw]
    for table, found in zip(raw, tables, strict=True):
        for prefix in np.ndindex(table.shape[:-1]):
            allowed = MACHINE.allowed(prefix, SPELLED, [0], room - len(prefix))
            found[prefix][allowed] = table[prefix][allowed]
    return [warped(table, WARPS["plain"]) for table in tables]


def constrained_at_nodes(
    tree: Tree, raw: list[np.ndarray], tokens: np.ndarray, room: int
) -> jax.Array:
    """Logits at the nodes of each draft, as `core.grammar` allows them."""
    row = RowGrammar(
        MACHINE.over_tokens(SPELLED), jnp.int32(0), jnp.int32(room), jnp.array([0, -1])
    )

    def at_nodes(tokens, logits):
        allowed = row.allowed(row.at_nodes(tree, tokens), jnp.asarray(tree.depths))
        return jnp.where(allowed, logits, -jnp.inf)

    logits = enumeration.laws_at(tree, raw, tokens, range(len(tree.parents)))
    return jax.jit(jax.vmap(at_nodes))(tokens, logits)


def judge_constrained(shape: str, room: int, stated: bool = True) -> list[Outcome]:
    tree = TREES[shape]
    rng = np.random.default_rng(12)
    raw = [rng.standard_normal((VOCAB,) * (length + 1)) for length in range(4)]
    draft = random_laws(1, WARPS["plain"]) if stated else None
    drafts = enumeration.sampled_drafts(tree, draft) if stated else deterministic_drafts(tree)
    logits = constrained_at_nodes(tree, raw, drafts.tokens, room)
    return judge_each(shape, constrained_laws(raw, room), drafts, draft, logits)


@pytest.mark.parametrize("room", GRAMMAR_ROOMS)
@pytest.mark.parametrize("shape", ["chain", "siblings"])
@pytest.mark.parametrize("stated", [True, False], ids=["sampled", "deterministic"])
def test_a_grammar_keeps_the_law(shape, room, stated):
    assert_lossless(judge_constrained(shape, GRAMMAR_ROOMS[room], stated))


def states_of_parents(row: RowGrammar, tree: Tree, tokens: jax.Array) -> jax.Array:
    return at_every_node(row, tree, tokens)[np.maximum(tree.parents, 0)]


def states_of_the_text(row: RowGrammar, tree: Tree, tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(row.state, tokens.shape)


at_every_node = RowGrammar.at_nodes


@pytest.mark.parametrize("fault", [states_of_parents, states_of_the_text])
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_a_grammar_of_another_text_is_caught(shape, fault, monkeypatch):
    monkeypatch.setattr(RowGrammar, "at_nodes", fault)
    assert_caught(judge_constrained(shape, GRAMMAR_ROOMS["room enough"]))


def laws_of_another_vocabulary() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Laws over the tokens that a draft model of five ids shares, and its own of those tokens."""
    ids, shared = jnp.array([4, 0, 2, 0]), jnp.array([True, False, True, True])
    draft = SharedTokens(TableModel(jnp.eye(5)), ids, shared)
    rng = np.random.default_rng(13)
    shapes = [(VOCAB,) * length + (5,) for length in range(4)]
    raw = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]
    drawn = [jax.nn.softmax(draft.unembed(table.reshape(-1, 5))) for table in raw]
    drawn = [law.reshape(*table.shape[:-1], VOCAB) for law, table in zip(drawn, raw, strict=True)]
    whole = [jnp.where(shared, jax.nn.softmax(table)[..., ids], 0.0) for table in raw]
    return [np.asarray(law) for law in drawn], [np.asarray(law) for law in whole]


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_drafts_of_another_vocabulary_keep_the_law(shape):
    tree, target = TREES[shape], random_laws(14, WARPS["plain"])
    draft, _ = laws_of_another_vocabulary()
    drafts = enumeration.sampled_drafts(tree, draft)
    assert_lossless(judge_each(shape, target, drafts, draft))


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_a_law_of_shared_tokens_that_is_not_renormalised_is_caught(shape):
    tree, target = TREES[shape], random_laws(14, WARPS["plain"])
    draft, stated = laws_of_another_vocabulary()
    drafts = enumeration.sampled_drafts(tree, draft)
    assert_caught(judge_each(shape, target, drafts, stated))


def deterministic_drafts(tree: Tree) -> enumeration.Drafts:
    """Some drafts, duplicates among siblings included, some of them with unused nodes."""
    rng = np.random.default_rng(0)
    shape = (24, len(tree.parents))
    tokens, valid = rng.integers(0, VOCAB, shape), rng.random(shape) < 0.8
    tokens[0] = 1  # all siblings alike
    valid[:12] = True
    valid[:, 0] = True
    return enumeration.Drafts(tokens, valid, np.ones(len(tokens)))


class Fault(NamedTuple):
    """A planted mistake, and where it is looked for.

    change: given pytest's `monkeypatch`, breaks a piece of `core.verify` and returns the verifier
        to judge.
    """

    shape: str
    change: Callable
    deterministic: bool = False


def patched(name: str, piece: Callable, rule: str = "verify_traversal") -> Callable:
    def change(monkeypatch):
        monkeypatch.setattr(rules, name, piece)
        return getattr(rules, rule)

    return change


def target_instead_of_residual(uniform, target, draft):
    return inverse_cdf(target, uniform)


def bonus_ignores_temperature(uniform, target, draft):
    bonus = jnp.sum(draft) == 0
    unheated = target**1.7  # what the "hot" target was before warping
    return inverse_cdf(jnp.where(bonus, unheated, jnp.maximum(target - draft, 0)), uniform)


def bonus_from_the_draft(monkeypatch):
    def verify(uniforms, proposal, target_logits):
        verdict = rules.verify(uniforms, proposal, target_logits)
        drafted = inverse_cdf(jnp.exp(proposal.draft_logprobs[-1]), uniforms[0])
        kept_all = verdict.num_emitted == verdict.path.shape[0]
        return verdict._replace(next_token=jnp.where(kept_all, drafted, verdict.next_token))

    return verify


def bonus_dropped(monkeypatch):
    def verify(uniforms, proposal, target_logits):
        verdict = rules.verify(uniforms, proposal, target_logits)
        kept_all = verdict.num_emitted == verdict.path.shape[0]
        return verdict._replace(num_emitted=verdict.num_emitted - kept_all)

    return verify


def one_uniform_decides_twice(monkeypatch):
    def verify(uniforms, proposal, target_logits):
        return rules.verify(uniforms.at[2].set(uniforms[1]), proposal, target_logits)

    return verify


FAULTS = {
    "chain: residual forgotten": Fault(
        "chain", patched("_draw_residual", target_instead_of_residual, "verify_chain")
    ),
    "chain: bonus ignores temperature": Fault(
        "chain", patched("_draw_residual", bonus_ignores_temperature, "verify_chain")
    ),
    "chain: bonus drawn from the draft": Fault("chain", bonus_from_the_draft),
    "chain: bonus dropped": Fault("chain", bonus_dropped),
    "chain: one uniform decides twice": Fault("chain", one_uniform_decides_twice),
    "tree: residual not renormalised": Fault(
        "siblings",
        patched("_residual", lambda target, draft: jnp.maximum(target - draft, 0.0), "verify_tree"),
    ),
    "tree: sibling not removed": Fault(
        "siblings", patched("_without", lambda law, token: law, "verify_tree")
    ),
    "tree: sibling removed, law not renormalised": Fault(
        "siblings", patched("_without", lambda law, token: law.at[token].set(0.0), "verify_tree")
    ),
    "paths of a chain: rest of a rejection renormalised": Fault(
        "chain", patched("_rest_after", rules._residual)
    ),
    "paths: rest of a rejection not divided": Fault(
        "siblings", patched("_rest_after", lambda owed, draft: jnp.maximum(owed - draft, 0.0))
    ),
    "paths: rest of a rejection renormalised": Fault(
        "siblings", patched("_rest_after", rules._residual)
    ),
    "paths: rejection forgotten": Fault("siblings", patched("_rest_after", lambda owed, _: owed)),
    "paths: sibling not removed": Fault("siblings", patched("_without", lambda law, _: law)),
    "deterministic: rejected children not struck": Fault(
        "siblings",
        patched("_draw_residual", target_instead_of_residual, "verify_deterministic"),
        deterministic=True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    fault = FAULTS[name]
    tree = TREES[fault.shape]
    target, draft = random_laws(14, WARPS["hot"]), random_laws(15, WARPS["hot"])
    if fault.deterministic:
        drafts, stated = deterministic_drafts(tree), None
    else:
        drafts, stated = enumeration.sampled_drafts(tree, draft), draft
    measure = compiled(fault.change(monkeypatch), tree)
    assert_caught([judge(measure, tree, target, drafts, stated)])


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_a_dishonest_draft_law_is_caught(shape):
    tree = TREES[shape]
    target, stated = random_laws(16, WARPS["plain"]), random_laws(17, WARPS["plain"])
    really = random_laws(17, WARPS["hot"])
    drafts = enumeration.sampled_drafts(tree, really)
    assert_caught(judge_each(shape, target, drafts, stated))


@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_dropping_nodes_for_their_own_tokens_is_caught(shape):
    tree = TREES[shape]
    target, draft = random_laws(18, WARPS["plain"]), random_laws(19, WARPS["plain"])
    drafts = enumeration.sampled_drafts(tree, draft, lambda tokens: tokens != 2)
    assert_caught(judge_each(shape, target, drafts, draft))


def assert_caught(outcomes: list[Outcome]):
    for outcome in outcomes:
        assert outcome.deviation > 1e-3 or not outcome.consistent
