"""Block drafts are lossless: every draft of `propose` itself, summed with its exact probability.

The drawing of tokens is replaced by given ones, each in turn; laws, tree and valid nodes are what
the drafter then states. Verification is measured as in `test_enumeration.py`, and the joint law of
the text must be the target's own to 1e-12. The published pseudo-code of DEER asks the drafter
again for the law behind each accepted token, and continues behind a rejection with what the target
said of the drafted text: each of the two must be caught. So must laws that leave out the token
before, where a Markov head knows it, and lengths that depend on a token that is then dropped.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.cache import empty_layer
from jaxspec.core.sampling import warp_logits
from jaxspec.core.types import Context, Hidden, KVCache, Params, Proposal, Recent, Warp
from jaxspec.core.verify import verify
from jaxspec.drafters import Deer, DFlash, block, growth
from jaxspec.models import DFlashHead
from tests.laws import enumeration
from tests.laws.drafters import dflash2_head, diffuser, dspark_head, network
from tests.laws.test_enumeration import EXACT, QUICK, WARPS, random_laws

VOCAB = 4
TEXT = [0, 2, 1, 1, 0]
CAPACITY = 24
WIDTH = 16
"""Of the target's states."""
TREE = ((0,), (1,), (0, 0), (1, 0), (1, 1))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@lru_cache
def target():
    with jax.ensure_compile_time_eval():
        return network(VOCAB)


@lru_cache
def drafter_network(block_size: int | None, shift: bool, rank: int):
    with jax.ensure_compile_time_eval():
        net = diffuser(network(VOCAB, seed=5), block_size, shift, rank)
        sharp = jax.tree.map(lambda leaf: 1.5 * leaf.astype(jnp.float64), net.params)
        return type(net)(sharp, net.config)


@lru_cache
def head_of(make: Callable[..., DFlashHead]) -> DFlashHead:
    with jax.ensure_compile_time_eval():
        head = make(network(VOCAB, seed=5))
        sharp = jax.tree.map(lambda leaf: 1.5 * leaf.astype(jnp.float64), head.params)
        return dataclasses.replace(head, params=sharp)


def unsure_head(target) -> DFlashHead:
    """Of confidence behind the text's last token, and behind tokens whose rows are like its row."""
    head = dspark_head(target)
    row = head.params["transitions"]["previous"]["embedding"][TEXT[-1]]
    confidence = {"kernel": jnp.pad(row, (WIDTH, 0))[:, None], "bias": jnp.zeros(1)}
    return dataclasses.replace(head, params=head.params | {"confidence": confidence})


class Block(NamedTuple):
    """One way to draft: the settings, whether the drafter is causal over blocks, and so on."""

    drafter: Deer
    block: int | None = 4
    shift: bool = True
    rank: int = 0

    @property
    def weights(self):
        return drafter_network(self.block, self.shift, self.rank)

    @property
    def draws(self) -> int:
        """Laws that a draft draws from."""
        return with_children(self.drafter) if self.rank else self.drafter.depth


class Sequential(NamedTuple):
    """One way to draft with a head whose laws depend on the token before."""

    drafter: DFlash
    make: Callable[..., DFlashHead]

    @property
    def weights(self):
        return head_of(self.make)

    @property
    def draws(self) -> int:
        """Laws that a draft draws from."""
        return with_children(self.drafter)


def with_children(drafter: Deer | DFlash) -> int:
    """The number of nodes of a static tree that have children."""
    return len(np.unique(drafter.tree.parents[1:]))


BLOCKS = {
    "chain": Block(Deer(3)),
    "chain, both sides": Block(Deer(3, sep_token_id=1), None, shift=False),
    "chain, nothing kept": Block(Deer(2, cache="none"), 2),
    "colder than the target": Block(Deer(2, temperature=0.5)),
    "two passes": Block(Deer(3, steps=2)),
    "tree": Block(Deer(2, TREE)),
}
SEQUENTIAL = {
    "dspark": Sequential(DFlash(3, taps=(1,)), dspark_head),
    "dspark, confidence": Sequential(DFlash(3, taps=(1,), confidence=0.5), unsure_head),
    "dspark, tree": Sequential(DFlash(2, TREE, taps=(1,), confidence=0.5), unsure_head),
    "deer": Block(Deer(3), rank=2),
    "deer, tree": Block(Deer(2, TREE), rank=2),
    "dflash 2": Sequential(DFlash(3, taps=(1,)), dflash2_head),
    "dflash 2, tree": Sequential(DFlash(2, TREE, taps=(1,)), dflash2_head),
}
FIXED = {
    "arg-max chain": Block(Deer(3, temperature=0.0)),
    "arg-max tree": Block(Deer(2, TREE, temperature=0.0), None),
    "dynamic tree": Block(Deer(3, num_nodes=5, branch=2)),
    "dynamic tree, Markov head": Block(Deer(3, num_nodes=5, branch=2), rank=2),
}


def context_of(warp: Warp, text: list[int], stop_id: int = -1, tapped: int = 0) -> Context:
    nothing = jnp.zeros((4, tapped))
    recent = Recent(jnp.zeros(4, jnp.int32), nothing[:, :0], nothing, jnp.int32(0))
    cache = KVCache((empty_layer(1, 1, CAPACITY, jnp.dtype("float32")),), jnp.int32(len(text) - 1))
    tokens = jnp.zeros(CAPACITY, jnp.int32).at[: len(text)].set(jnp.array(text))
    return Context(
        tokens, jnp.int32(len(text)), jnp.int32(9), jnp.array([stop_id]), warp, cache, recent
    )


def propose(case: Block | Sequential, context: Context, key=None) -> Proposal:
    params = Params(target(), case.weights)
    taps = jax.random.normal(jax.random.key(2), (8, context.recent.taps.shape[1]))
    prompt = Hidden(jnp.zeros((8, 1)), taps, ())
    state = case.drafter.init(params, prompt, context)
    state = jax.tree.map(jnp.asarray, state)
    if state.cache is not None:
        padding = CAPACITY - state.cache.layers[0].values.shape[1]
        layers = tuple(
            type(layer)(
                jnp.pad(layer.keys, ((0, 0), (0, 0), (0, padding))),
                jnp.pad(layer.values, ((0, 0), (0, padding), (0, 0))),
            )
            for layer in state.cache.layers
        )
        state = state._replace(cache=KVCache(layers, state.cache.length))
    key = jax.random.key(0) if key is None else key
    return case.drafter.propose(params, key, state, context)[0]


def given(choices: jax.Array) -> Callable:
    """`choose_children` that draws the given tokens, one row of `choices` for each position."""
    drawn = 0

    def choose(key, logits, warp, branch):
        nonlocal drawn
        rows = slice(drawn, drawn + logits.shape[0])
        drawn = rows.stop
        logprobs = jax.nn.log_softmax(warp_logits(logits, warp), axis=-1)
        return choices[rows, :branch], logprobs

    return choose


class Drafted(NamedTuple):
    """Every draft that may happen, and what the drafter says of it. The first axis counts."""

    choices: np.ndarray
    proposals: Proposal
    probability: np.ndarray


def every_draft(case: Block | Sequential, context: Context, monkeypatch) -> Drafted:
    """Draws of a law are without replacement; `Block` shares one by all parents of a depth."""
    positions, branch = case.draws, case.drafter.max_branch
    draws = list(itertools.permutations(range(VOCAB), branch))
    choices = np.array(list(itertools.product(draws, repeat=positions)))

    def one(choices):
        with monkeypatch.context() as patch:
            for module in (block, growth):
                patch.setattr(module, "choose_children", given(choices))
            return propose(case, context)

    proposals = jax.jit(jax.vmap(one), compiler_options=QUICK)(choices)
    proposals = jax.tree.map(np.asarray, proposals)
    laws = np.exp(proposals.draft_logprobs)
    probability = np.ones(len(choices))
    rows = np.arange(len(choices))
    for position in range(positions):
        left, unused = laws[:, position].copy(), np.ones((len(choices), VOCAB))
        for rank in range(branch):
            # If a law has no token left, unused ones stand in, the lowest first or any other.
            empty = left.sum(1, keepdims=True) <= 0
            now = np.where(empty, unused, left)
            token = choices[:, position, rank]
            probability *= now[rows, token] / now.sum(1)
            left[rows, token] = unused[rows, token] = 0
    return Drafted(choices, proposals, probability)


def deviation(
    drafted: Drafted, tree, target: enumeration.Laws, stated: np.ndarray | None = None
) -> float:
    """Returns the text's deviation from the target's law; `stated` replaces the stated laws."""
    proposals = drafted.proposals
    if stated is not None:
        proposals = proposals._replace(draft_logprobs=stated)
    tokens = proposals.tokens
    with np.errstate(divide="ignore"):
        logits = np.log(enumeration.laws_at(tree, target, tokens, range(tokens.shape[1])))

    def one(proposal, logits, key):
        return enumeration.measure(verify, tree, proposal, logits, key)

    keys = jax.random.split(jax.random.key(0), len(tokens))
    measured = jax.jit(jax.vmap(one), compiler_options=QUICK)(proposals, logits, keys)
    measured = jax.tree.map(np.asarray, measured)
    possible = drafted.probability > 0
    assert stated is not None or measured.consistent[possible].all()
    drafts = enumeration.Drafts(tokens, proposals.valid, drafted.probability)
    law = enumeration.emitted_law(tree, drafts, measured, target)
    expected = enumeration.autoregressive_law(target[: tree.paths.shape[1]])
    return np.abs(law - expected).max()


def static_tree(proposals: Proposal):
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), proposals.tree)


@pytest.mark.parametrize(
    ("name", "warp"),
    [
        ("chain", "hot"),
        ("two passes", "plain"),
        ("tree", "hot"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("chain", "top-p"),
                ("chain, both sides", "top-k"),
                ("chain, nothing kept", "banned"),
                ("colder than the target", "hot"),
                ("tree", "greedy row"),
            )
        ),
    ],
)
def test_sampled_blocks_keep_the_law(name, warp, monkeypatch):
    case, warp = BLOCKS[name], WARPS[warp]
    drafted = every_draft(case, context_of(warp, TEXT), monkeypatch)
    np.testing.assert_allclose(drafted.probability.sum(), 1, atol=EXACT)
    laws = random_laws(20, warp, case.drafter.depth, VOCAB)
    assert deviation(drafted, static_tree(drafted.proposals), laws) < EXACT


def test_judging_whole_paths_where_parents_share_a_draw_is_caught(monkeypatch):
    """Such a rule looks at one draw twice. An unused row says that each parent has its own."""
    case, warp = BLOCKS["tree"], WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT), monkeypatch)
    stated = np.pad(drafted.proposals.draft_logprobs, ((0, 0), (0, 1), (0, 0)))
    laws = random_laws(20, warp, case.drafter.depth, VOCAB)
    assert deviation(drafted, static_tree(drafted.proposals), laws, stated) > 1e-4


@pytest.mark.parametrize(
    ("name", "warp"),
    [
        ("deer", "hot"),
        ("dspark, confidence", "hot"),
        ("dflash 2, tree", "plain"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("deer, tree", "hot"),
                ("dspark", "top-p"),
                ("dspark, tree", "hot"),
                ("dflash 2", "top-k"),
                ("dflash 2", "banned"),
                ("dflash 2, tree", "greedy row"),
            )
        ),
    ],
)
def test_laws_that_depend_on_the_token_before_keep_the_law(name, warp, monkeypatch):
    case, warp = SEQUENTIAL[name], WARPS[warp]
    drafted = every_draft(case, context_of(warp, TEXT, tapped=WIDTH), monkeypatch)
    np.testing.assert_allclose(drafted.probability.sum(), 1, atol=EXACT)
    valid = drafted.proposals.valid
    assert valid.all() == (getattr(case.drafter, "confidence", None) is None)
    assert valid[:, 1].all()
    laws = random_laws(25, warp, case.drafter.depth, VOCAB)
    assert deviation(drafted, static_tree(drafted.proposals), laws) < EXACT


@pytest.mark.parametrize("name", ["deer", "dspark", "dflash 2"])
def test_laws_without_the_token_before_are_caught(name, monkeypatch):
    """As if the block were drawn from its marginals, or from laws after other tokens."""
    case, warp = SEQUENTIAL[name], WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT, tapped=WIDTH), monkeypatch)
    laws, tree = random_laws(26, warp, 3, VOCAB), static_tree(drafted.proposals)
    stated = drafted.proposals.draft_logprobs
    assert deviation(drafted, tree, laws, stated) < EXACT
    first = np.broadcast_to(stated[:1], stated.shape)
    mixed = np.concatenate([stated[:, :1], first[:, 1:]], axis=1)
    assert deviation(drafted, tree, laws, mixed) > 1e-3


def test_dropping_a_token_for_its_own_sake_is_caught(monkeypatch):
    """Confidence knows the token before a place. If it knew the drawn one, that would be a bias."""
    case, warp = SEQUENTIAL["dspark"], WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT, tapped=WIDTH), monkeypatch)
    laws, tree = random_laws(27, warp, 3, VOCAB), static_tree(drafted.proposals)
    tokens = drafted.proposals.tokens
    keeps = np.array([True, False, True, True])

    def dropped(decided_by: np.ndarray) -> Drafted:
        kept = np.logical_and.accumulate(keeps[decided_by], axis=1)
        valid = np.concatenate([np.ones((len(tokens), 1), bool), kept], axis=1)
        return drafted._replace(proposals=drafted.proposals._replace(valid=valid))

    assert deviation(dropped(tokens[:, :-1]), tree, laws) < EXACT
    assert deviation(dropped(tokens[:, 1:]), tree, laws) > 1e-3


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_blocks_with_a_stop_id_inside_keep_the_law(name, monkeypatch):
    case, warp = BLOCKS[name], WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT, stop_id=2), monkeypatch)
    # Nothing is offered behind a stop id.
    assert not drafted.proposals.valid.all()
    assert drafted.proposals.valid[:, :2].all()
    laws = random_laws(21, warp, case.drafter.depth, VOCAB)
    assert deviation(drafted, static_tree(drafted.proposals), laws) < EXACT


@pytest.mark.parametrize("warp", ["hot", pytest.param("top-k", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FIXED)
def test_deterministic_blocks_keep_the_law(name, warp):
    case, warp = FIXED[name], WARPS[warp]
    proposal = jax.jit(partial(propose, case))(context_of(warp, TEXT))
    assert proposal.draft_logprobs is None
    proposals = jax.tree.map(lambda leaf: np.asarray(leaf)[None], proposal)
    laws = random_laws(22, warp, case.drafter.depth, VOCAB)
    drafted = Drafted(np.zeros((1, 0)), proposals, np.ones(1))
    assert deviation(drafted, static_tree(proposals), laws) < EXACT


@pytest.mark.parametrize("name", ["arg-max tree", "dynamic tree"])
def test_filters_leave_the_likeliest_as_they_are(name):
    """Behind a filter siblings would be any tokens, as all but the best are impossible."""
    warps = (WARPS["hot"], WARPS["hot"]._replace(top_k=jnp.int32(1)))
    drafts = [propose(FIXED[name], context_of(warp, TEXT)).tokens for warp in warps]
    np.testing.assert_array_equal(*drafts)


def test_tokens_are_drawn_from_the_stated_laws():
    """Enumeration leaves out the draw itself, which is tested here."""
    case, context = BLOCKS["two passes"], context_of(WARPS["hot"], TEXT)
    keys = jax.random.split(jax.random.key(1), 4096)
    proposals = jax.jit(jax.vmap(partial(propose, case, context)))(keys)
    tokens = np.asarray(proposals.tokens)[:, 1:]
    laws = np.exp(np.asarray(proposals.draft_logprobs))
    drawn = np.eye(VOCAB)[tokens]
    # The mean of draws is the mean of their laws, within five standard errors.
    assert np.abs((drawn - laws).mean(axis=0)).max() < 5 * 0.5 / np.sqrt(len(keys))
    assert laws[:, 2].std(axis=0).max() > 1e-3  # the second pass has seen the first's tokens


def requeried(case: Block, warp: Warp, drafted: Drafted) -> np.ndarray:
    """The published pseudo-code's laws: of the first position behind the text and y_1..y_(i-1)."""
    by_prefix = {}
    again = jax.jit(partial(propose, case))
    for length in range(case.drafter.depth):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            proposal = again(context_of(warp, [*TEXT, *prefix]))
            by_prefix[prefix] = np.asarray(proposal.draft_logprobs)[0]
    rows = drafted.choices[:, :, 0].tolist()
    return np.array([[by_prefix[tuple(row[:i])] for i in range(len(row))] for row in rows])


def test_asking_the_drafter_again_is_caught(monkeypatch):
    case, warp = Block(Deer(2)), WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT), monkeypatch)
    laws = random_laws(23, warp, 2, VOCAB)
    tree = static_tree(drafted.proposals)
    assert deviation(drafted, tree, laws) < EXACT
    assert deviation(drafted, tree, laws, requeried(case, warp, drafted)) > 1e-3


def judged(target: np.ndarray, stated: np.ndarray, token: int) -> np.ndarray:
    """The law of what one position emits: the drafted token, or a draw from the residual."""
    accepted = 1 if target[token] >= stated[token] else target[token] / stated[token]
    residual = np.maximum(target - stated, 0)
    law = (1 - accepted) * residual / max(residual.sum(), 1e-300)
    law[token] += accepted
    return law


def going_on(drafted: Drafted, target: enumeration.Laws, stated: np.ndarray, reread: bool) -> float:
    """Deviation of the published program: it continues after a rejection, without a bonus token.

    Its one target pass has read the drafted tokens; `reread`: it reads what was emitted instead.
    """
    law = np.zeros((VOCAB,) * stated.shape[1])
    drafts = zip(drafted.choices[:, :, 0], stated, drafted.probability, strict=True)
    for tokens, rows, chance in drafts:
        for text in np.ndindex(law.shape):
            seen = text if reread else tuple(tokens)
            emitted = (
                judged(target[i][seen[:i]], rows[i], tokens[i])[token]
                for i, token in enumerate(text)
            )
            law[text] += chance * math.prod(emitted)
    return np.abs(law - enumeration.autoregressive_law(target[: law.ndim])).max()


def test_going_on_behind_a_rejection_is_caught(monkeypatch):
    """Its later positions are judged by what the target says behind tokens that were rejected."""
    case, warp = Block(Deer(2)), WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT), monkeypatch)
    laws = random_laws(23, warp, 2, VOCAB)
    stated = np.exp(drafted.proposals.draft_logprobs)
    assert deviation(drafted, static_tree(drafted.proposals), laws) < EXACT
    assert going_on(drafted, laws, stated, reread=True) < EXACT
    assert going_on(drafted, laws, stated, reread=False) > 1e-3
    # As published, with both faults.
    again = np.exp(requeried(case, warp, drafted))
    assert going_on(drafted, laws, again, reread=False) > 1e-3


def test_laws_of_the_first_of_two_passes_are_caught(monkeypatch):
    """The second pass's tokens come from laws that know the first's."""
    case, warp = Block(Deer(2, steps=2)), WARPS["hot"]
    drafted = every_draft(case, context_of(warp, TEXT), monkeypatch)
    one_pass = every_draft(Block(Deer(2)), context_of(warp, TEXT), monkeypatch)
    laws = random_laws(24, warp, 2, VOCAB)
    tree = static_tree(drafted.proposals)
    assert deviation(drafted, tree, laws) < EXACT
    assert deviation(drafted, tree, laws, one_pass.proposals.draft_logprobs) > 1e-3
