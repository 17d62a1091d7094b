"""DEER and DFlash beyond the laws: caches, lengths, trees, and what they refuse."""

import dataclasses
import json
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import (
    CheckpointError,
    Model,
    Tokenizer,
    load,
    load_dflash,
    save,
    save_dflash,
)
from jaxspec.core.cache import append, empty_layer
from jaxspec.core.decode import Prompt
from jaxspec.core.loop import DecodePlan, decode
from jaxspec.core.masks import block_causal
from jaxspec.core.types import Context, Hidden, KVCache, Params, Recent, Warp
from jaxspec.decoding.request import prepare
from jaxspec.drafters import AdaptiveBlock, Deer, DFlash, DraftModel, LoadedDrafter
from jaxspec.drafters.block import Acceptance
from jaxspec.models import (
    DFlashHead,
    Diffusion,
    Network,
    dflash_taps,
    init_dflash_params,
    init_params,
)
from tests.checkpoint.networks import random_network
from tests.laws.drafters import PATHS, dflash_head, diffuser, network
from tests.laws.test_block_enumeration import TEXT, context_of
from tests.laws.test_enumeration import WARPS
from tests.measure.models import tiny_model

VOCAB = 24
BUCKET, BUDGET = 16, 20
PROMPT = [3, 7, 1, 19, 4]


def prompts_of(lengths: list[int]) -> Prompt:
    rows = len(lengths)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, BUCKET))
    return Prompt(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.array(lengths),
        room=jnp.full(rows, BUDGET),
        seed=jnp.zeros((rows, 2), jnp.int32),
        stop_ids=jnp.full((rows, 1), -1),
        warp=Warp(),
    )


@pytest.fixture(scope="module")
def target():
    return network(VOCAB)


@pytest.fixture(scope="module")
def model(target):
    return Model(target, name="tiny")


def drafted_with(model: Model, drafter: Deer, draft, **settings):
    config = GenerationConfig(max_new_tokens=20, **settings)
    prompts = [PROMPT, [9] * 12]
    return generate(model, prompts, config, LoadedDrafter(drafter, draft), return_trace=True)


@pytest.mark.parametrize("block", [4, 3])
def test_the_kept_blocks_equal_a_fresh_pass(target, block):
    """Exact: as if the drafter had read the finished blocks of the whole text at once."""
    draft = diffuser(target, block)
    drafter = Deer(3, chunk=8)
    plan = DecodePlan((64,), chunk=16)
    states = decode(Params(target, draft), prompts_of([5, 16, 1]), drafter=drafter, plan=plan)
    for row in range(3):
        cache = jax.tree.map(lambda leaf, row=row: leaf[row], states.draft.cache)
        tokens = states.context.tokens[row]
        places = tokens.shape[0]
        hidden = draft.forward(tokens, jnp.arange(places), block_causal(places, block), None)
        held = slice(int(cache.length))
        assert cache.length % block == 0
        assert cache.length > 16 - block
        for ours, theirs in zip(cache.layers, hidden.new_kv, strict=True):
            np.testing.assert_allclose(ours.keys[:, :, held], theirs.keys[:, :, held], atol=1e-5)
            np.testing.assert_allclose(ours.values[:, held], theirs.values[:, held], atol=1e-5)


@pytest.mark.parametrize("block", [4, 2])
def test_drafts_from_kept_blocks_are_those_of_the_whole_text(model, target, block):
    draft = diffuser(target, block)
    kept = drafted_with(model, Deer(3), draft)
    read_again = drafted_with(model, Deer(3, cache="none"), draft)
    for ours, theirs in zip(kept, read_again, strict=True):
        for one, other in zip(ours.trace, theirs.trace, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)


def proposal_of(drafter: Deer, target, draft, warp=WARPS["hot"]):
    context, params = context_of(warp, TEXT), Params(target, draft)
    state = drafter.init(params, Hidden(jnp.zeros((8, 1)), jnp.zeros((8, 0)), ()), context)
    return drafter.propose(params, jax.random.key(0), state, context)[0]


def law_after(draft, target, level: int, token: int):
    """Returns the law of a place after a token, from a pass over the text and three masks."""
    mask = draft.config.masking.mask_token_id
    canvas = jnp.array([*TEXT, *([mask] * 3)])
    hidden = draft.forward(canvas, jnp.arange(8), block_causal(8, 4), None)
    features = hidden.features[len(TEXT) - 1 + level][None]
    alone = draft.unembed(features).at[:, mask].set(-jnp.inf)
    logits = draft.follow(alone, features, jnp.array([token]))[0]
    return jax.nn.log_softmax(logits[: target.vocab_size])


def sharpened(draft):
    """Returns a drafter whose Markov head says more."""
    sharp = jax.tree.map(lambda table: 4 * table, draft.params["transitions"])
    return Network({**draft.params, "transitions": sharp}, draft.config)


def test_a_dynamic_tree_with_a_markov_head_holds_the_most_probable_paths(target):
    """A plain loop over all paths whose every token is one of the likeliest after the one before.

    A token of the same place has other chances below other parents.
    """
    draft, depth, branch, num_nodes = sharpened(diffuser(target, 4, rank=4)), 3, 3, 7
    paths, front = {}, {(): 0.0}
    for level in range(depth):
        longer = {}
        for path, score in front.items():
            law = law_after(draft, target, level, path[-1] if path else TEXT[-1])
            for token in np.argsort(-np.asarray(law))[:branch].tolist():
                longer[(*path, token)] = score + float(law[token])
        paths |= longer
        front = longer
    expected = set(sorted(paths, key=paths.get, reverse=True)[:num_nodes])
    assert {len(path) for path in expected} == {1, 2, 3}

    method = Deer(depth, num_nodes=num_nodes, branch=branch, cache="none")
    proposal = proposal_of(method, target, draft)
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.tree.parents)
    found = {0: ()}
    for node in range(1, num_nodes + 1):
        found[node] = (*found[int(parents[node])], int(tokens[node]))
    assert set(found.values()) - {()} == expected


@pytest.mark.parametrize("more", [-2, 0, 2])
@pytest.mark.parametrize("tree", [{}, {"paths": PATHS}, {"num_nodes": 5}])
def test_a_markov_head_drafts_whatever_ids_the_drafter_has_more_or_fewer(target, more, tree):
    """As where a mask and a separator follow the target's tokens."""
    draft = diffuser(network(VOCAB + more), 4, rank=4)
    proposal = proposal_of(Deer(3, cache="none", **tree), target, draft)
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.tree.parents)
    assert (tokens[1:] != draft.config.masking.mask_token_id).all()
    assert (tokens < min(VOCAB, VOCAB + more)).all()
    if "num_nodes" in tree:
        assert proposal.draft_logprobs is None
        return
    assert proposal.draft_logprobs.shape[1] == VOCAB
    laws = np.asarray(proposal.draft_logprobs)[np.asarray(proposal.law_row)]
    for node, parent in enumerate(parents[1:], 1):
        above = int(proposal.tree.depths[parent])
        expected = law_after(draft, target, above, int(tokens[parent]))
        known = len(expected)
        hot = jax.nn.softmax(expected / WARPS["hot"].temperature)
        np.testing.assert_allclose(np.exp(laws[node][:known]), hot, atol=1e-5)
        assert (laws[node][known:] < -1e9).all()


@pytest.fixture
def sizes(target, monkeypatch) -> list[int]:
    """Tokens of every pass of a diffusion model that is traced, those over the prompt first."""
    sizes = []
    forward = type(target).forward

    def noted(self, tokens, *args, **kwargs):
        if self.config.diffusion is not None:
            sizes.append(tokens.shape[0])
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", noted)
    return sizes


def trace(drafter: Deer, target, draft, places: int) -> None:
    plan = DecodePlan((places,), chunk=16)
    jax.eval_shape(
        partial(decode, drafter=drafter, plan=plan), Params(target, draft), prompts_of([5])
    )


def test_a_pass_reads_no_more_than_a_few_blocks(target, sizes):
    """The text is not read again: the width of a pass does not depend on its length."""
    for draft in (diffuser(target, 4), diffuser(target, None)):
        steps = []
        for places in (64, 256):
            sizes.clear()
            trace(Deer(3), target, draft, places)
            assert sizes[0] <= 16 + 3
            steps.append(sizes[1:])
        assert steps[0] == steps[1]
        assert max(steps[0]) <= 3 * 4


def test_a_step_runs_one_pass_of_the_smallest_size_that_is_enough(model, target, monkeypatch):
    """It has 4, 8 or 12 places, from the last block that is not kept to the masks' last one."""
    sizes, forward = [], type(target).forward

    def noted(self, tokens, *args, **kwargs):
        if self.config.diffusion is not None:
            jax.debug.callback(partial(sizes.append, tokens.shape[0]), ordered=True)
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", noted)
    # Settings of no other test, whose programs would not say what they run.
    drafter = LoadedDrafter(Deer(3, chunk=96), diffuser(target, 4))
    config = GenerationConfig(max_new_tokens=20)
    (row,) = generate(model, PROMPT, config, drafter, return_trace=True)
    jax.effects_barrier()
    lengths = len(PROMPT) + np.cumsum([0, *(len(step.emitted) for step in row.trace[:-1])])
    kept = (np.array([lengths[0], *lengths[:-1]]) - 1) // 4 * 4
    ends = -(-(lengths + 3) // 4) * 4
    assert sizes[1:] == (ends - kept).tolist()
    assert len(set(sizes[1:])) > 1
    sizes.clear()
    batch = generate(model, [PROMPT, [9] * 12], config, drafter, return_trace=True)
    jax.effects_barrier()
    assert len(sizes) == 1 + max(len(row.trace) for row in batch)


def test_every_denoising_step_is_a_pass(target, sizes):
    """Five positions in four steps are two, one, one and one, each of 8, 12 or 16 places."""
    trace(Deer(5, steps=4), target, diffuser(target, 4), 64)
    assert sizes[1:] == [8, 12, 16] * 4


def test_an_adaptive_row_stops_drafting_and_tries_again(model, target):
    """A drafter that is never right: no drafts, but for one token ever more seldom."""
    hopeless = diffuser(network(VOCAB, seed=9), 4)
    # Without features all logits are equal: the first token that is not banned is drafted.
    nothing = jax.tree.map(jnp.zeros_like, hopeless.params["norm"])
    hopeless = type(hopeless)({**hopeless.params, "norm": nothing}, hopeless.config)
    settings = AdaptiveBlock(memory=0.0, token_cost=0.3, explore=3)
    config = GenerationConfig(max_new_tokens=20, banned_token_ids=(0,))
    (plain,) = generate(model, PROMPT, config)
    assert 1 not in plain.tokens
    drafter = LoadedDrafter(Deer(3, adaptive=settings), hopeless)
    rows = generate(model, PROMPT, config, drafter, return_trace=True)
    assert rows[0].tokens.tolist() == plain.tokens.tolist()
    offered = [int(step.valid.sum()) - 1 for step in rows[0].trace]
    # Rates begin at 0.8; one failure takes the first to 0.
    assert offered[:13] == [3, 0, 0, 0, 1, *[0] * 6, 1, 0]
    assert {step.width for step in rows[0].trace} == {1, 2, 4}


def test_the_length_with_the_most_tokens_per_cost():
    """Checked by hand: rates 0.9, 0.5, 0.1 and costs 1.2 + 0.1 m."""
    drafter = Deer(3, adaptive=AdaptiveBlock(draft_cost=0.2, token_cost=0.1))
    rates = jnp.array([0.9, 0.5, 0.1])
    worth = [1.0, 1.9 / 1.3, 2.35 / 1.4, 2.395 / 1.5]
    context = prompt_context()
    _, length, wait = drafter._length(acceptance(rates), context)
    assert length == int(np.argmax(worth)) == 2
    assert wait == 0


def test_a_row_that_waits_drafts_the_next_best_length_at_last():
    """Checked by hand: with rates 0.1 a draft is worth at most 1.1 / 1.3 of a plain step."""
    drafter = Deer(3, adaptive=AdaptiveBlock(draft_cost=0.2, token_cost=0.1, patience=20))
    rates, context = jnp.full(3, 0.1), prompt_context()

    def chosen(**facts):
        _, length, wait = drafter._length(acceptance(rates, **facts), context)
        return int(length), int(wait)

    assert chosen(wait=8, idle=7) == (0, 8)
    assert chosen(wait=8, idle=8) == (1, 8)
    assert chosen(wait=8, offered=1) == (0, 16)  # in vain
    assert chosen(wait=16, offered=1) == (0, 20)
    assert chosen(wait=0, offered=1) == (0, 8)  # what paid until now
    # Three drafted tokens of three would cost 4.1 plain steps.
    drafter = Deer(3, adaptive=AdaptiveBlock(draft_cost=2.8, token_cost=0.1))
    assert chosen(wait=8, idle=8) == (0, 8)


@pytest.mark.parametrize(
    ("tree", "nodes", "token_cost", "expected"),
    [
        ({"paths": ((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0))}, [3, 5, 6], 0.3, 0),
        # Up to 2 on the first level, twice as many on the next; 7 in all.
        ({"num_nodes": 7, "branch": 2}, [2, 6, 7], 0.1, 1),
    ],
)
def test_a_level_of_a_tree_costs_as_much_as_its_nodes(tree, nodes, token_cost, expected):
    """By hand, as above. With a node for each level both would draft two levels."""
    drafter = Deer(3, adaptive=AdaptiveBlock(draft_cost=0.2, token_cost=token_cost), **tree)
    rates, tokens = jnp.array([0.9, 0.5, 0.1]), np.array([1.9, 2.35, 2.395])
    worth = [1, *(tokens / (1.2 + token_cost * np.array(nodes)))]
    _, length, _ = drafter._length(acceptance(rates), prompt_context())
    assert length == int(np.argmax(worth)) == expected
    assert np.argmax([1, *(tokens / (1.2 + token_cost * np.arange(1, 4)))]) == 2


def test_rates_learn_from_what_was_tried_only():
    """Two of three offered were accepted: the first two rates rise, the third falls."""
    drafter = Deer(4, adaptive=AdaptiveBlock(memory=0.5))
    context = prompt_context()
    context = context._replace(recent=context.recent._replace(count=jnp.int32(3)))
    rates, *_ = drafter._length(acceptance(jnp.full(4, 0.8), offered=3), context)
    np.testing.assert_allclose(rates, [0.9, 0.9, 0.4, 0.8])


def acceptance(rates, offered=0, idle=0, wait=8) -> Acceptance:
    return Acceptance(rates, jnp.int32(offered), jnp.int32(idle), jnp.int32(wait))


def prompt_context():
    return context_of(Warp(), TEXT)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block": 0}, "block must be at least 1"),
        ({"steps": 9}, "steps must be at most block"),
        ({"steps": 2, "num_nodes": 4}, "steps must be 1 for a tree"),
        ({"paths": ((0,),), "num_nodes": 4}, "exclude each other"),
        ({"paths": ()}, "without a node"),
        ({"block": 1, "paths": ((0,), (0, 0))}, "2 levels deep"),
        ({"num_nodes": 0}, "num_nodes must be at least 1"),
        ({"block": 1, "num_nodes": 9, "branch": 4}, "num_nodes must be at most 4"),
        ({"num_nodes": 4096, "branch": 100_000}, "branch: 100000 tokens .* at most 1048576"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"cache": "dual"}, "cache must be one of"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        Deer(**settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"memory": 1.5}, "memory"),
        ({"token_cost": -0.1}, "token_cost"),
        ({"explore": 0}, "explore"),
        ({"explore": 8, "patience": 7}, "patience must be at least explore"),
    ],
)
def test_adaptive_settings_that_mean_nothing_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        AdaptiveBlock(**settings)


def test_drafters_that_cannot_draft_are_refused(model, target):
    config, prompt = GenerationConfig(max_new_tokens=4), [1, 2]

    def refused(drafter, draft, named):
        with pytest.raises(ValueError, match=named):
            generate(model, prompt, config, LoadedDrafter(drafter, draft))

    refused(Deer(3), target, "has no mask")
    refused(Deer(3), (), "needs a diffusion model")
    refused(DraftModel(3), diffuser(target, 4), "DraftModel needs a causal model")
    refused(Deer(3), diffuser(network(VOCAB + 1), 4), "vocabulary")
    refused(
        Deer(600), diffuser(target, 4), "up to 600 tokens at once, and the context of .* holds 512"
    )
    refused(Deer(3, cache="blocks"), diffuser(target, None), "sees both")
    refused(Deer(3, cache="prefix"), diffuser(target, 4), "causal over blocks")
    refused(Deer(3, sep_token_id=VOCAB), diffuser(target, 4), "sep_token_id")
    refused(Deer(4, steps=2), diffuser(target, 4, rank=2), "steps must be 1, got 2")
    refused(Deer(3, num_nodes=24, branch=24), diffuser(target, 4), "narrower tree")
    for causal in (model, tiny_model()):
        with pytest.raises(ValueError, match=r"this one has no mask.* there is DraftModel"):
            Deer.of(causal)
    with pytest.raises(ValueError, match="paths must be a sequence, got 5"):
        Deer.of(Model(diffuser(target, 4)), paths=5)
    with pytest.raises(ValueError, match="sep must be a text, got 5"):
        Deer.of(Model(diffuser(target, 4)), sep=5)
    with pytest.raises(ValueError, match=r"no token '\[SEP\]'"):
        Deer.of(Model(diffuser(target, 4)), sep="[SEP]")
    with pytest.raises(ValueError, match=r"no token '\[MASK\]'"):
        Deer.of(model, mask="[MASK]")
    with pytest.raises(ValueError, match=r"mask: 'a' is a token of ordinary text of tiny; give"):
        Deer.of(tiny_model(), mask="a")
    with pytest.raises(ValueError, match=r"mask: .* names its mask; leave it out"):
        Deer.of(Model(diffuser(target, 4)), mask="[MASK]")
    with pytest.raises(ValueError, match="temperature and num_nodes exclude each other"):
        Deer(3, num_nodes=2, temperature=0.5)


@pytest.mark.parametrize(
    ("own_block", "sep_token_id", "num_masks"), [(None, None, 3), (4, None, 6), (4, 0, 3)]
)
def test_more_masks_than_in_training_warn(target, own_block, sep_token_id, num_masks):
    """Three tokens are drafted; the last block of 4, if seen whole, may hold 3 masks more."""

    def check(window):
        draft = diffuser(target, own_block)
        diffusion = dataclasses.replace(draft.config.diffusion, window=window)
        draft = Network(draft.params, draft.config.replace(diffusion=diffusion))
        Deer(3, sep_token_id=sep_token_id).check_fit(Params(target, draft))

    with pytest.warns(UserWarning, match=f"up to {num_masks} masks, .* ends of up to"):
        check(num_masks - 1)
    with warnings.catch_warnings(action="error"):
        check(num_masks)


def test_dflash_heads_of_another_target_are_refused(model, target):
    head, config = dflash_head(target), GenerationConfig(max_new_tokens=2)

    def refused(drafter, draft, named):
        with pytest.raises(ValueError, match=named):
            generate(model, [1, 2], config, LoadedDrafter(drafter, draft))

    refused(DFlash(3), target, "needs a head")
    refused(DFlash(3, taps=(0,)), head, "taps must be the head's")
    refused(DFlash(3, taps=(1,)), dflash_head(network(VOCAB + 1)), "its vocabulary is 25")
    lacking = dataclasses.replace(head, taps=(7,))
    refused(DFlash(3, taps=(7,)), lacking, r"layers \[7\], and the target has 2")
    with pytest.warns(UserWarning, match="trained on 3"):
        generate(model, [1, 2], config, DFlash.of(head, 5))


def test_published_taps_of_dflash():
    assert dflash_taps(36, 5) == (2, 10, 18, 26, 34)
    assert dflash_taps(8, 1) == (5,)
    with pytest.raises(ValueError, match="no 5 different ones"):
        dflash_taps(6, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    target = network(VOCAB)
    config = target.config.replace(qk_norm=True, num_layers=3, layer_types=("full",) * 3)
    params = init_dflash_params(config, 32, jax.random.key(1))
    head = DFlashHead(params, config, (1, 1), VOCAB - 1, 5, 2)
    folder = tmp_path_factory.mktemp("dflash")
    save_dflash(head, folder)
    return head, folder, target


def test_a_dflash_head_comes_back_as_it_was_saved(saved):
    head, folder, target = saved
    again = load_dflash(folder, target)
    assert dataclasses.replace(again, params=()) == dataclasses.replace(head, params=())
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


def test_a_dflash_head_is_not_loaded_for_another_target(saved):
    _, folder, _ = saved
    with pytest.raises(CheckpointError, match="vocab_size is 24 in config"):
        load_dflash(folder, network(VOCAB + 1))


def test_a_dflash_block_sees_the_context_through_its_cache(target):
    """Features of a block are the same whether the context came at once or in two parts."""
    head = dflash_head(target)
    taps = jax.random.normal(jax.random.key(0), (6, 16))
    embedded = target.embed(jnp.array([3, VOCAB - 1, VOCAB - 1]))
    positions, seen = jnp.arange(6, 9), jnp.ones((3, 3), bool)

    def features(parts):
        cache = head.empty_cache(8)
        for part in parts:
            at = cache.length + jnp.arange(len(part))
            cache = append(cache, head.remember(part, at), len(part))
        return head.forward(embedded, positions, seen, cache).features

    once, twice = features([taps]), features([taps[:4], taps[4:]])
    np.testing.assert_allclose(once, twice, atol=1e-5)
    assert np.abs(once - features([taps[:5]])).max() > 1e-3


def test_a_checkpoint_in_the_layout_of_a_causal_model_is_told_its_mask(tmp_path):
    """Open-dCoder's are: both sides seen, outputs shifted, a mask among the added tokens."""
    target = tiny_model()
    config = target.config.replace(vocab_size=target.vocab_size + 1, qkv_bias=True)
    save(Model(random_network(config), with_tokens("[MASK]"), "reader"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    loaded = Deer.of(load(tmp_path), 4, mask="[MASK]", sep="Ċ")
    assert loaded.params.config.diffusion == Diffusion(target.vocab_size, shift=True)
    assert loaded.drafter.sep_token_id == target.tokenizer.token_id("Ċ")
    config = GenerationConfig(max_new_tokens=12)
    (row,) = generate(target, "abcabc", config, loaded)
    assert row.tokens.tolist() == generate(target, "abcabc", config)[0].tokens.tolist()


def test_a_drafter_that_was_trained_with_a_separator_drafts_with_it(tmp_path):
    reader = tiny_model()
    diffusion = Diffusion(reader.tokenizer.token_id("Ġ"), shift=True, separator=9)
    network = Network(reader.params, reader.config.replace(diffusion=diffusion))
    save(dataclasses.replace(reader, network=network), tmp_path)
    drafter = load(tmp_path)
    assert Deer.of(drafter, 4).drafter.sep_token_id == 9
    assert Deer.of(drafter, 4, sep="").drafter.sep_token_id is None
    assert Deer.of(drafter, 4, sep="Ċ").drafter.sep_token_id == reader.tokenizer.token_id("Ċ")


def with_tokens(*added: str) -> Tokenizer:
    tokenizer = tiny_model().tokenizer
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(list(added))
    return Tokenizer(backend, {}, {})


def test_a_drafter_may_also_know_a_mask():
    model = tiny_model()
    network = Network(
        model.params,
        model.config.replace(diffusion=Diffusion(3, shift=True)),
    )
    config = GenerationConfig(max_new_tokens=4)
    more = LoadedDrafter(Deer(3), network, with_tokens("[MASK]"))
    assert len(generate(model, "abc", config, more)[0].tokens) == 4
    # But not the other way round: a token of the target that the drafter does not know.
    knows_more = dataclasses.replace(model, tokenizer=with_tokens("[MORE]"))
    with pytest.raises(ValueError, match="its tokenizer differs"):
        generate(knows_more, "abc", config, LoadedDrafter(Deer(3), network, model.tokenizer))


def laws_after(drafter, draft, target, tokens, taps) -> np.ndarray:
    """Probabilities of a draft after a text in a row with room for twelve tokens more."""
    size = len(tokens)
    recent = Recent(jnp.zeros(4, jnp.int32), jnp.zeros((4, 0)), taps[:4], jnp.int32(0))
    cache = KVCache((empty_layer(1, 1, size + 12, jnp.dtype("float32")),), jnp.int32(size - 1))
    text = jnp.concatenate([tokens, jnp.zeros(12, jnp.int32)])
    warp = Warp(temperature=jnp.float32(1))
    context = Context(text, jnp.int32(size), jnp.int32(9), jnp.array([-1]), warp, cache, recent)
    prompt = Hidden(jnp.zeros((size + 12, 1)), jnp.pad(taps, ((0, 12), (0, 0))), ())
    params = Params(target, draft)
    state = drafter.init(params, prompt, context)
    proposal, _ = drafter.propose(params, jax.random.key(0), state, context)
    return np.exp(proposal.draft_logprobs)


@pytest.mark.parametrize("kind", ["none", "blocks", "prefix", "dflash"])
def test_behind_its_positions_a_drafter_looks_at_the_last_ones_only(target, kind):
    few = {"num_layers": 1, "layer_types": ("full",), "max_positions": 16}
    config = target.config.replace(**few)
    if kind == "dflash":
        config = config.replace(qk_norm=True)
        params = init_dflash_params(config, 16, jax.random.key(6))
        draft, drafter = DFlashHead(params, config, (1,), VOCAB - 1, 4), DFlash(3, taps=(1,))
    else:
        diffusion = Diffusion(VOCAB - 1, True, 4 if kind == "blocks" else None)
        config = config.replace(diffusion=diffusion)
        draft = Network(init_params(config, jax.random.key(5)), config)
        drafter = Deer(3, cache=kind)
    tokens = jax.random.randint(jax.random.key(1), (36,), 0, VOCAB - 1)
    taps = jax.random.normal(jax.random.key(2), (36, 16))

    def with_others(part: slice) -> np.ndarray:
        others = tokens.at[part].set(5), taps.at[part].set(0.5)
        return laws_after(drafter, draft, target, *others)

    laws = with_others(slice(0))
    np.testing.assert_allclose(with_others(slice(18)), laws, atol=1e-6)
    assert np.abs(with_others(slice(24, 34)) - laws).max() > 1e-3


def test_texts_that_may_pass_the_drafters_positions_warn_once(model):
    draft = diffuser(model.network, 4)
    few = Network(draft.params, draft.config.replace(max_positions=16))
    drafter = LoadedDrafter(Deer(3), few)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            check_lengths(model, drafter, 12)
    assert [str(warning.message)[:51] for warning in seen] == [
        "drafter: it was made for texts of 16 tokens, and a "
    ]
    with warnings.catch_warnings(action="error"):
        check_lengths(model, drafter, 11)


def check_lengths(model, drafter, new_tokens):
    prepare(model, [PROMPT], GenerationConfig(max_new_tokens=new_tokens), drafter, 0)


def test_texts_past_the_drafters_positions_are_the_targets(model):
    draft = diffuser(model.network, 4)
    few = Network(draft.params, draft.config.replace(max_positions=16))
    config = GenerationConfig(max_new_tokens=30)
    plain = generate(model, [PROMPT], config)
    with pytest.warns(UserWarning, match="drafts from the last 16 tokens"):
        fast = generate(model, [PROMPT], config, LoadedDrafter(Deer(3), few))
    assert fast[0].tokens.tolist() == plain[0].tokens.tolist()
