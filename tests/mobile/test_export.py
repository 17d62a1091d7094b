"""Exported files decode as JAX does: plain, by passes and commits, and by whole steps."""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, LayerSkip, TokenRecycling, generate, score
from jaxspec.checkpoint import CheckpointError, Model
from jaxspec.commands.mobile import loop_of
from jaxspec.commands.options import drafter_spec
from jaxspec.compilation import CompileClock
from jaxspec.core import masks
from jaxspec.core.sampling import warp_logits
from jaxspec.core.tree import tree_from_paths
from jaxspec.core.types import KVCache, Warp
from jaxspec.drafters import AdaptiveExit, DraftModel, Eagle, Eagle2, PromptLookup
from jaxspec.drafters.skip_sets import skips_of
from jaxspec.models import Eagle3Head, init_eagle3_params
from tests.measure.models import tiny_model
from tests.mobile.models import CONFIG, fill_buffers, half_of, successor_model
from tests.models.families import tiny

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import ExportConfig, MobileModel, export, read_manifest
from jaxspec.mobile.checks import every_loop
from jaxspec.mobile.convert import lower, to_flatbuffer
from jaxspec.mobile.drafts import DynamicDraft, ExitDraft, LookupDraft, TreeDraft
from jaxspec.mobile.loops import (
    HostAcceptance,
    Plain,
    Steps,
    Verified,
    best_loop,
    drafted_by,
    verify_drafts,
)
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.records import Signature

CAPACITY, NUM_NEW = 64, 40
SHAPES = ExportConfig(capacity=CAPACITY, prefill=(8,), quantization="float32")
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [40, 2, 2, 2, 17, 20]]
GREEDY = GenerationConfig(max_new_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def pair():
    return successor_model()


@pytest.fixture(scope="module")
def expected(pair):
    return [row.tokens.tolist() for row in generate(pair[0], PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def path(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(pair[0], folder, Eagle.of(pair[1], PATHS), replace(SHAPES, levels=(4,)))
    return folder / "model.tflite"


@pytest.fixture(scope="module")
def exported(path):
    return MobileModel(path, num_threads=1)


def test_plain_decoding_gives_the_same_tokens(exported, expected):
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        decoded = exported.generate(prompt, NUM_NEW, loop=Plain)
        assert decoded.tokens.tolist() == tokens
        assert set(decoded.counts) == {1}


def test_steps_give_the_same_tokens(exported, expected):
    counts = set()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        decoded = exported.generate(prompt, NUM_NEW)
        assert decoded.tokens.tolist() == tokens
        counts.update(decoded.counts)
    assert counts == {1, 2, 3, 4}  # from nothing accepted to the whole depth


@pytest.mark.parametrize("value", [np.nan, 1e30, -np.inf])
def test_new_buffers_may_hold_anything(path, expected, value):
    """Every signature of the file, in every way to decode with it."""
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected, strict=True)]
    ways = every_loop(read_manifest(path), NUM_NEW, known)
    assert len(ways) > 4
    for name, way in ways.items():
        file = MobileModel(path, num_threads=1)
        fill_buffers(file, value)
        decoded = way(file, PROMPTS[0])
        assert decoded.tokens.tolist() == expected[0], name
        assert name == "decode" or max(decoded.counts) > 1, name


DRAFTS = {
    "static tree": TreeDraft,
    "dynamic tree": lambda model: DynamicDraft(model, 6),
    "lookup": lambda model: LookupDraft(PromptLookup(3), CAPACITY),
}


@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_drafts_verified_by_the_host_give_the_same_tokens(exported, expected, name):
    counts = set()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        decoded = exported.generate(
            prompt, NUM_NEW, loop=lambda *to: Verified(to[0], DRAFTS[name](to[0]), to[1])
        )
        assert decoded.tokens.tolist() == tokens
        counts.update(decoded.counts)
    if name != "lookup":  # whether a text repeats itself is another matter
        assert max(counts) > 1


@pytest.mark.parametrize("name", ["dynamic tree", "lookup"])
def test_another_text_compiles_nothing_again(exported, name):
    """The time of a round would hold it; a loop is made anew for every text."""

    def generate_once():
        exported.generate(
            PROMPTS[0], 4, loop=lambda *to: Verified(to[0], DRAFTS[name](to[0]), to[1])
        )

    generate_once()
    with CompileClock() as compiling:
        generate_once()
    assert compiling.seconds == 0


def test_trees_grown_by_the_host_are_those_of_jax(pair, exported, expected):
    """Step by step; the file's first token comes with the prompt, so JAX begins behind it."""
    prompt, tokens = PROMPTS[0], expected[0]
    drafter = Eagle2.of(pair[1], num_nodes=6, depth=2, beam=4)
    config = GenerationConfig(max_new_tokens=NUM_NEW - 1)
    (row,) = generate(pair[0], [*prompt, tokens[0]], config, drafter, return_trace=True)
    drafts = []

    class Recorded(DynamicDraft):
        def __call__(self, text, recent):
            drafts.append(super().__call__(text, recent))
            return drafts[-1]

    exported.generate(prompt, NUM_NEW, loop=lambda *to: Verified(to[0], Recorded(to[0], 6), to[1]))
    for ours, theirs in zip(drafts[:-1], row.trace[:-1], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.tree.parents, theirs.parents)


def test_another_file_may_draft(pair, exported, expected, tmp_path):
    """The target itself as the draft model: every draft is right."""
    export(pair[0], tmp_path, config=replace(SHAPES, prefill=(4,)))
    draft = MobileModel(tmp_path / "model.tflite", num_threads=1)
    decoded = exported.generate(PROMPTS[0], NUM_NEW, loop=drafted_by(draft, 3))
    assert decoded.tokens.tolist() == expected[0]
    assert set(decoded.counts[1:-1]) == {4}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 47}, "another tokenizer"),
        ({"tokenizer": "x"}, "another tokenizer"),
        ({"capacity": 32}, "--capacity 64"),
    ],
)
def test_draft_models_that_cannot_draft_are_refused(exported, path, change, said):
    draft = MobileModel(path, num_threads=1)
    draft.manifest = replace(draft.manifest, **change)
    with pytest.raises(ValueError, match=f"^draft: .*{said}"):
        exported.generate(PROMPTS[1], 2, loop=drafted_by(draft, 3))


def test_a_command_says_which_draft_model_it_refuses(path):
    spec = drafter_spec(f"draft-model:model={path}")
    assert spec is not None
    loop = loop_of(argparse.Namespace(drafter=spec, loop=None, threads=1))
    target = MobileModel(path, num_threads=1)
    target.manifest = replace(target.manifest, tokenizer="x")
    with pytest.raises(ValueError, match=re.escape(f"--drafter {spec.text}: draft: ")):
        target.generate(PROMPTS[1], 2, loop=loop)


@pytest.mark.parametrize("loop", [Plain, Steps, None], ids=["plain", "step_sampled", "verified"])
def test_samples_have_the_law_of_the_target(pair, exported, loop):
    """Frequencies of the first two tokens, of 4 likely ones each, next to the network's own law."""
    warp = Warp(temperature=np.float32(1.5), top_k=np.int32(3))
    if loop is None:
        loop = verify_drafts
    prompt, draws = PROMPTS[1], 400
    seen = np.zeros(CONFIG.vocab_size)
    seconds = Counter()
    for seed in range(draws):
        first, second = exported.generate(prompt, 2, loop=loop, warp=warp, seed=seed).tokens
        seen[first] += 1
        seconds[int(first), int(second)] += 1
    law = _law(pair[0], prompt, warp)
    chi2 = sum((seen[t] - draws * law[t]) ** 2 / (draws * law[t]) for t in np.flatnonzero(law))
    assert chi2 < 13.8  # 2 degrees of freedom: 1 in 1000
    assert not seen[law == 0].any()
    chi2, cells = 0.0, 0
    for first in np.flatnonzero(law):
        joint = law[first] * _law(pair[0], [*prompt, int(first)], warp)
        for second in np.flatnonzero(joint):
            expected = draws * joint[second]
            chi2 += (seconds[int(first), int(second)] - expected) ** 2 / expected
            cells += 1
    assert cells == 9
    assert chi2 < 26.1  # 8 degrees of freedom: 1 in 1000


def _law(model, tokens, warp):
    logits = score(model, tokens).logits[-1:]
    warp = jax.tree.map(jnp.asarray, warp)
    return np.asarray(jax.nn.softmax(warp_logits(jnp.asarray(logits), warp)))[0]


HALF = np.float32(0.5)


@pytest.mark.parametrize(
    ("warp", "named"),
    [
        (Warp(bias=np.zeros(48, np.float32)), "bias"),
        (Warp(temperature=HALF, top_p=HALF), "top_p"),
        (Warp(temperature=HALF, min_p=HALF), "min_p"),
        (Warp(temperature=HALF, top_k=np.int32(49)), "top_k"),
        (Warp(temperature=np.float32(0)), "temperature"),
    ],
)
def test_steps_refuse_what_they_would_ignore(exported, warp, named):
    with pytest.raises(ValueError, match=f"^{named}: whole steps .* at most 48, nothing else"):
        exported.generate(PROMPTS[1], 2, loop=Steps, warp=warp)
    assert best_loop(exported.manifest, warp) is verify_drafts


class Reads(MobileModel):
    """Counts the tokens of prompts that it reads."""

    def __init__(self, path):
        super().__init__(path, num_threads=1)
        self.count = 0

    def call(self, signature, **inputs):
        if signature.startswith("prefill"):
            self.count += int(inputs["count"][0])
        super().call(signature, **inputs)


def test_a_chat_reads_only_what_is_new(path):
    """The next turn holds the last one and its answer."""
    reads = Reads(path)
    decoded = reads.generate(PROMPTS[0], 20)
    longer = [*PROMPTS[0], *decoded.tokens.tolist(), 5, 6]
    reads.count = 0
    again = reads.generate(longer, 10)
    assert reads.count <= 2 + 1 + 4  # the new tokens, the pending one, and the last round
    fresh = MobileModel(path, num_threads=1).generate(longer, 10)
    assert again.tokens.tolist() == fresh.tokens.tolist()
    assert again.counts == fresh.counts  # so the head has read what it had to


@pytest.mark.parametrize("name", ["dynamic tree", "lookup"])
def test_a_turn_that_left_the_head_behind_is_read_in_the_next(path, name):
    """Drafts of the host do without the head, which has yet to see all but the first prompt."""
    reads = Reads(path)
    decoded = reads.generate(
        PROMPTS[0], 20, loop=lambda *to: Verified(to[0], DRAFTS[name](to[0]), to[1])
    )
    longer = [*PROMPTS[0], *decoded.tokens.tolist(), 5, 6]
    reads.count = 0
    reads.generate(longer, 1)
    missed = 20 if name == "lookup" else 0
    assert missed < reads.count <= missed + 2 + 1 + 4


def test_a_text_does_not_go_on_in_the_caches_of_another(path):
    file = MobileModel(path, num_threads=1)
    one = file.stream(PROMPTS[0])
    next(one)
    next(file.stream(PROMPTS[1]))
    with pytest.raises(ValueError, match="stream: another text was begun"):
        next(one)


def test_steps_accept_what_jax_accepts(pair, exported, expected):
    """Step by step. The file's first token comes with the prompt, so JAX begins behind it."""
    prompt, tokens = PROMPTS[0], expected[0]
    drafter = Eagle.of(pair[1], PATHS)
    config = GenerationConfig(max_new_tokens=NUM_NEW - 1)
    (row,) = generate(pair[0], [*prompt, tokens[0]], config, drafter, return_trace=True)
    theirs = [len(step.path) for step in row.trace]
    ours = exported.generate(prompt, NUM_NEW).counts[1:]
    assert list(ours[:-1]) == theirs[:-1]  # the budget cuts the last


def test_a_head_of_taps_and_few_tokens(pair, expected, tmp_path):
    """EAGLE-3, which drafts from a part of the vocabulary."""
    ids = jnp.arange(0, 48, 3, dtype=jnp.int32)
    config = CONFIG.replace(num_layers=1, layer_types=(), vocab_size=len(ids))
    params = init_eagle3_params(config, 2 * CONFIG.embed_dim, jax.random.key(3))
    head = Eagle3Head(params, config, (0, 1), CONFIG.vocab_size, ids)
    export(pair[0], tmp_path, Eagle.of(head, PATHS), SHAPES)
    drafting = MobileModel(tmp_path / "model.tflite", num_threads=1)
    decoded = [drafting.generate(prompt, NUM_NEW) for prompt in PROMPTS]
    assert [each.tokens.tolist() for each in decoded] == expected


def test_the_smallest_shapes(pair, expected, tmp_path):
    """Prompts read one by one, a tree of one node, room for hardly more than the text.

    The last part of the longer prompt does not fit behind the others: it begins among them.
    """
    for size, capacity in ((1, CAPACITY), (8, 2 * 8 + 5)):
        shapes = replace(SHAPES, capacity=capacity, prefill=(size,))
        export(pair[0], tmp_path, Eagle.of(pair[1], ((0,),)), shapes)
        file = MobileModel(tmp_path / "model.tflite", num_threads=1)
        decoded = file.generate(PROMPTS[0], 10)
        assert decoded.tokens.tolist() == expected[0][:10]
        assert max(decoded.counts) == 2
        longer = [*PROMPTS[0], *expected[0][:6]]
        (row,) = generate(pair[0], longer, GenerationConfig(max_new_tokens=4))
        assert file.generate(longer, 4).tokens.tolist() == row.tokens.tolist()


def test_passes_and_commits_equal_the_network(pair, exported):
    """Logits of a tree behind a prompt; then a committed path against the same text as a prompt."""
    network, prompt = pair[0].network, PROMPTS[0]
    exported.prefill(prompt)
    tree, tokens = tree_from_paths(PATHS), np.arange(9, dtype=np.int32)
    positions = len(prompt) + tree.depths
    inputs = {"tokens": tokens, "positions": positions, "visible": tree.ancestors.astype(np.int32)}
    exported.call("verify_9", **inputs, length=[len(prompt)])

    hidden = network.forward(
        jnp.array(prompt), jnp.arange(len(prompt)), masks.causal(len(prompt)), None
    )
    cache = KVCache(hidden.new_kv, jnp.int32(len(prompt)))
    ours = network.forward(
        jnp.array(tokens), jnp.array(positions), jnp.array(tree.ancestors), cache
    )
    logits = network.unembed(ours.features)
    np.testing.assert_allclose(exported.read("verify_9", "logits")[0], logits, atol=5e-5)
    np.testing.assert_array_equal(exported.read("verify_9", "choices")[0], logits.argmax(-1))

    path = [0, 1, 4]  # the root, its first child, that one's first
    exported.call("commit_9", path=path + [-1] * 6, count=[3], length=[len(prompt)])
    assert exported.read("commit_9", "o_length") == len(prompt) + 3
    exported.call("decode", pending=[11], length=[len(prompt) + 3])
    after = exported.read("decode", "logits")
    exported.prefill([*prompt, *tokens[path], 11])
    np.testing.assert_allclose(exported.read("prefill_8", "logits"), after, atol=5e-5)


def test_decoding_goes_on_to_the_end_of_the_context(exported):
    plain = exported.generate(PROMPTS[1], 1000, loop=Plain)
    assert len(plain.tokens) == CAPACITY - len(PROMPTS[1])
    assert plain.finish_reason == "length"
    assert exported.generate(PROMPTS[1], 1000).tokens.tolist() == plain.tokens.tolist()


def test_stop_ids_end_a_text(exported, expected):
    stop = expected[0][5]
    decoded = exported.generate(PROMPTS[0], NUM_NEW, stop_token_ids=[stop])
    assert decoded.tokens.tolist() == expected[0][: expected[0].index(stop) + 1]
    assert decoded.finish_reason == "stop_token"


CHAIN = ((0,), (0, 0))


@pytest.mark.parametrize(
    "drafter",
    [
        lambda model, head: Eagle.of(head, CHAIN, threshold=0.2),
        lambda model, head: DraftModel.of(half_of(model), 2, threshold=0.2),
    ],
    ids=["eagle", "draft model"],
)
def test_a_file_of_a_chain_that_ends_early_says_that_it_drafts_the_whole(drafter, pair, tmp_path):
    shapes = replace(SHAPES, bundle="gpu")
    said = "ends no chain early, so threshold=0.2 is left out, and each step drafts all 2 tokens"
    with pytest.warns(UserWarning, match=said):
        manifest = export(pair[0], tmp_path, drafter(*pair), shapes)
    assert manifest.drafter["threshold"] == 0
    assert manifest.paths == CHAIN


def test_layers_skipped_give_the_same_tokens(pair, expected, tmp_path):
    skip = skips_of(2, attention=[1], mlp=[0])
    export(pair[0], tmp_path, LayerSkip(skip, 3), SHAPES)
    skipping = MobileModel(tmp_path / "model.tflite", num_threads=1)
    decoded = [skipping.generate(prompt, NUM_NEW) for prompt in PROMPTS]
    assert [each.tokens.tolist() for each in decoded] == expected
    assert max(count for each in decoded for count in each.counts) > 1


EXITS = {
    "constant": LayerSkip(skips_of(2, [1], [0]), 4, threshold=0.3, adaptive=None),
    "paper": LayerSkip(skips_of(2, [1], [0]), 4, 0.3, AdaptiveExit(0.6, step=0.2)),
    "released": LayerSkip(
        skips_of(2, [0, 1], [1]), 3, 0.3, AdaptiveExit(0.5, step=0.2, rule="released")
    ),
}


@pytest.mark.parametrize("name", EXITS)
def test_drafts_end_where_those_of_jax_end(name, pair, expected, tmp_path):
    """Ended by the host and in the graph: as many tokens in every round, and as many drafted."""
    drafter = EXITS[name]
    manifest = export(pair[0], tmp_path, drafter, SHAPES)
    assert manifest.sizes("verify") == drafter.widths
    assert manifest.sizes("accept") == drafter.widths[1:]
    assert manifest.drafter["threshold"] == drafter.threshold
    file = MobileModel(tmp_path / "model.tflite", num_threads=1)
    fill_buffers(file, np.nan)
    drafted, lengths = [], set()

    class Recorded(ExitDraft):
        def __call__(self, text, recent):
            proposal = super().__call__(text, recent)
            drafted.append(int(proposal.valid.sum()) - 1)
            return proposal

    def by_host(model, acceptance):
        return Verified(model, Recorded(model), acceptance)

    for prompt, text in zip(PROMPTS, expected, strict=True):
        # The file's first token comes with the prompt, and JAX cuts its last rounds.
        config = GenerationConfig(max_new_tokens=NUM_NEW - 1, stop_token_ids=())
        (row,) = generate(pair[0], [*prompt, text[0]], config, drafter, return_trace=True)
        rounds = [1, *(len(step.emitted) for step in row.trace)]
        for loop in (by_host, verify_drafts, partial(Steps, signature="step_exit")):
            decoded = file.generate(prompt, NUM_NEW, (), loop)
            assert decoded.tokens.tolist() == text
            assert list(decoded.counts[:-1]) == rounds[:-1]
        whole = file.generate(prompt, NUM_NEW, ())
        assert whole.tokens.tolist() == text
        assert len(whole.counts) <= len(rounds)
        theirs = [int(step.valid.sum()) - 1 for step in row.trace]
        before_the_end = [n for n, left in zip(theirs, _left(rounds), strict=True) if left > 5]
        assert drafted[: len(before_the_end)] == before_the_end
        lengths.update(before_the_end)
        drafted.clear()
    assert len(lengths) > 1


def test_drafts_of_the_host_alone_are_accepted(pair, expected, tmp_path):
    """Every place holds the target's own token, and some of them are drafts; up to the capacity."""
    export(pair[0], tmp_path, EXITS["constant"], SHAPES)
    file, prompt, text = MobileModel(tmp_path), PROMPTS[0], expected[0]
    longest = file.manifest.sizes("accept")[-1] - 1
    for drafted in range(longest + 1):
        assert file.prefill(prompt) == text[0]
        tokens = text[: longest + 1]
        file.call(f"accept_{longest + 1}", tokens=tokens, drafted=[drafted], length=[len(prompt)])
        kept = text[1 : drafted + 2]
        assert file.read(f"accept_{longest + 1}", "o_count").tolist() == [len(kept)]
        assert file.read(f"accept_{longest + 1}", "o_tokens")[0, : len(kept)].tolist() == kept
        assert file.read(f"accept_{longest + 1}", "o_pending").tolist() == kept[-1:]
    with pytest.raises(ValueError, match=f"accept_2 writes 2 rows from {CAPACITY - 1} on"):
        file.call("accept_2", length=[CAPACITY - 1])
    by_chains = file.generate(prompt, CAPACITY, (), verify_drafts)
    assert by_chains.tokens.tolist() == file.generate(prompt, CAPACITY, (), Plain).tokens.tolist()
    assert len(prompt) + len(by_chains.tokens) == CAPACITY


def _left(rounds):
    """Tokens that may be emitted before each round but the first."""
    return [NUM_NEW - sum(rounds[:at]) for at in range(1, len(rounds))]


REPEATING = [*[5, 6, 7, 8, 9] * 2, 5, 6]
OWN_STEPS = {
    "draft model": lambda model: DraftModel.of(half_of(model), 3),
    "draft model, tree": lambda model: DraftModel.of(half_of(model), paths=PATHS),
    "lookup": lambda model: PromptLookup(3),
    "lookup, recent": lambda model: PromptLookup(2, max_ngram=3, match="recent"),
}


@pytest.mark.parametrize("name", OWN_STEPS)
def test_steps_of_other_drafters_are_those_of_jax(name, pair, tmp_path):
    """Token by token and round by round, whatever new buffers hold; also verified by the host."""
    drafter = OWN_STEPS[name](pair[0])
    manifest = export(pair[0], tmp_path, drafter, SHAPES)
    has_draft = name.startswith("draft")
    assert ("draft" in manifest.signatures) == has_draft
    file = MobileModel(tmp_path / "model.tflite", num_threads=1)
    fill_buffers(file, np.nan)
    counts = []
    for prompt in (*PROMPTS, REPEATING):
        text = file.generate(prompt, NUM_NEW, (), Plain).tokens.tolist()
        (plain,) = generate(pair[0], prompt, replace(GREEDY, stop_token_ids=()))
        assert text == plain.tokens.tolist()
        config = GenerationConfig(max_new_tokens=NUM_NEW - 1, stop_token_ids=())
        (row,) = generate(pair[0], [*prompt, text[0]], config, drafter, return_trace=True)
        rounds = [1, *(len(step.emitted) for step in row.trace)]
        ways = {"step": Steps, **({"verify": verify_drafts} if has_draft else {})}
        for loop in ways.values():
            decoded = file.generate(prompt, NUM_NEW, (), loop)
            assert decoded.tokens.tolist() == text
            assert list(decoded.counts[:-1]) == rounds[:-1]
        warp = Warp(temperature=np.float32(1), top_k=np.int32(1))  # one outcome
        assert file.generate(prompt, NUM_NEW, (), Steps, warp).tokens.tolist() == text
        counts += rounds
    assert max(counts) > 2


def test_a_chat_goes_on_with_a_draft_model(pair, tmp_path):
    export(pair[0], tmp_path, DraftModel.of(half_of(pair[0]), 3), SHAPES)
    reads = Reads(tmp_path / "model.tflite")
    decoded = reads.generate(PROMPTS[0], 20)
    longer = [*PROMPTS[0], *decoded.tokens.tolist(), 5, 6]
    reads.count = 0
    again = reads.generate(longer, 10)
    assert reads.count <= 2 + 1 + 4
    fresh = MobileModel(tmp_path / "model.tflite", num_threads=1).generate(longer, 10)
    assert (again.tokens.tolist(), again.counts) == (fresh.tokens.tolist(), fresh.counts)


def test_draft_models_that_no_file_holds_are_refused(pair, tmp_path):
    small = half_of(pair[0])
    short = replace(small.network, config=small.config.replace(max_positions=32))
    with pytest.raises(ValueError, match="capacity must be at most the draft model's 32 positions"):
        export(pair[0], tmp_path, DraftModel.of(Model(short), 2), SHAPES)
    sparse = Model(tiny("qwen3_moe"))
    with pytest.raises(ValueError, match="drafter: mixtures of experts cannot be exported"):
        export(pair[0], tmp_path, DraftModel.of(sparse, 2), SHAPES)


@pytest.mark.parametrize("bundle", ["cpu", "gpu"])
def test_recycled_tokens_are_those_of_jax(bundle, pair, expected, tmp_path):
    """Token by token and step by step; a second text begins with an empty table."""
    drafter = TokenRecycling(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    manifest = export(pair[0], tmp_path, drafter, replace(SHAPES, bundle=bundle))
    assert manifest.sizes("verify") == ()
    assert "draft" not in manifest.signatures
    recycling = MobileModel(tmp_path / "model.tflite", num_threads=1)
    fill_buffers(recycling, np.nan)
    for prompt, text in zip(PROMPTS, expected, strict=True):
        decoded = recycling.generate(prompt, NUM_NEW, ())
        assert decoded.tokens.tolist() == text
        # The file's first token comes with the prompt.
        config = GenerationConfig(max_new_tokens=NUM_NEW - 1, stop_token_ids=())
        (row,) = generate(pair[0], [*prompt, text[0]], config, drafter)
        assert len(decoded.counts) - 1 == row.metrics.counts.num_steps < NUM_NEW - 1
        again = recycling.generate(prompt, NUM_NEW, ())
        assert (again.tokens.tolist(), again.counts) == (text, decoded.counts)
        if bundle == "cpu":
            # With one candidate, sampling has one outcome.
            warp = Warp(temperature=np.float32(1), top_k=np.int32(1))
            drawn = recycling.generate(prompt, NUM_NEW, (), Steps, warp)
            assert drawn.tokens.tolist() == text


def test_a_text_is_read_anew_after_other_calls(exported, expected):
    """Calls of a host's own leave another text in the caches than that of the last stream."""
    for between in (
        lambda: exported.prefill(PROMPTS[1]),
        lambda: exported.call("decode", pending=[1], length=[0]),
    ):
        assert exported.generate(PROMPTS[0], NUM_NEW, ()).tokens.tolist() == expected[0]
        between()
        assert exported.generate(PROMPTS[0], NUM_NEW, ()).tokens.tolist() == expected[0]


def test_the_manifest_says_what_the_file_is(exported, path):
    manifest = exported.manifest
    assert manifest == read_manifest(path) == read_manifest(path.parent)
    assert (path.parent / "manifest.json").read_text().strip() == manifest.to_json()
    assert manifest.paths == PATHS
    assert manifest.sizes("verify") == (9,)
    assert manifest.signatures["step"]["outputs"]["o_tokens"] == {"shape": [1, 4], "dtype": "int32"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "incomplete"),
        (lambda data: data[:-100], "incomplete"),
        (lambda data: data.replace(b"successors", b"sucessorss"), "damaged"),
        (lambda data: b"", "empty"),
        (lambda data: b"TFL3" * 100, "not made by"),
    ],
)
def test_damaged_files_are_refused(path, tmp_path, damage, said):
    (tmp_path / "x.tflite").write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        MobileModel(tmp_path / "x.tflite")


MANIFEST = Manifest("1", "m", "int8", 64, 9, (1,), None, None, ((0,),), {"step": {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence, got 5"),
        ({"trees": None}, "trees must be a mapping, got None"),
        ({"trees": {"step_2": [5]}}, r"trees\['step_2'\]\[0\] must be a sequence, got 5"),
        ({"paths": [["a"]]}, r"paths\[0\]\[0\] must be a whole number, got 'a'"),
        ({"signatures": {"step": 5}}, r"signatures\['step'\] must be a mapping, got 5"),
        ({"capacity": None}, "capacity must be a whole number, got None"),
        ({"checksum": 5}, "checksum must be a text, got 5"),
        ({"checksum": "0"}, "checksum must be 64 hexadecimal digits, got '0'"),
    ],
)
def test_a_damaged_manifest_is_named(change, message, tmp_path):
    path = tmp_path / "x.tflite"
    text = MANIFEST.to_json()
    assert Manifest.from_json(text) == MANIFEST
    path.write_text(json.dumps(json.loads(text) | change, separators=(",", ":")))
    with pytest.raises(CheckpointError, match=rf"x\.tflite: .*{message}.*export again"):
        read_manifest(path)


def test_a_manifest_of_too_many_levels_is_refused(tmp_path):
    path = tmp_path / "x.tflite"
    path.write_text(MANIFEST.to_json()[:-1] + ',"more":' + "[" * 200_000)
    with pytest.raises(CheckpointError, match=r"x\.tflite is damaged or incomplete"):
        read_manifest(path)


def test_mistakes_are_named(pair, exported, path, tmp_path):
    with pytest.raises(CheckpointError, match="another tokenizer"):
        MobileModel(path, tokenizer=tiny_model().tokenizer)
    with pytest.raises(CheckpointError, match="does not exist"):
        MobileModel(tmp_path)
    with pytest.raises(ValueError, match="more capacity"):
        exported.generate([1] * CAPACITY)
    with pytest.raises(ValueError, match="ids must be in"):
        exported.generate([48])
    with pytest.raises(ValueError, match=r"start must be in 0\.\.1, got 2"):
        exported.prefill([1, 2], 2)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -5"):
        exported.generate([1], -5)
    with pytest.raises(ValueError, match="not verify_3"):
        exported.call("verify_3")
    with pytest.raises(ValueError, match=r"decode: its inputs are .*pending.*, and not token"):
        exported.call("decode", token=[1], length=[1])
    with pytest.raises(ValueError, match=r"decode: its outputs are .*logits, .*, and not logit"):
        exported.read("decode", "logit")
    with pytest.raises(ValueError, match=r"draft_4 writes 4 nodes from 5 on, .* room for 8"):
        exported.call("draft_4", length=[8], drafted=[5])
    with pytest.raises(ValueError, match="writes 4 rows from 61 on"):
        exported.call("step", length=[CAPACITY - 3])
    with pytest.raises(ValueError, match="give where decode writes"):
        exported.call("decode", pending=[1])
    with pytest.raises(ValueError, match=r"positions: must be below the capacity .*, 64, got 64"):
        exported.call("verify_9", positions=[56, *range(57, 65)], length=[56])
    with pytest.raises(ValueError, match="num_nodes must be at most 280, which a beam of 26"):
        DynamicDraft(exported, 281, beam=26)
    with pytest.raises(ValueError, match="--verify 12"):
        Verified(exported, LookupDraft(PromptLookup(11), CAPACITY), HostAcceptance(Warp()))
    with pytest.raises(ValueError, match="capacity must be at most"):
        export(pair[0], tmp_path, config=replace(SHAPES, capacity=1000))
    with pytest.raises(ValueError, match="baked in"):
        export(pair[0], tmp_path, LayerSkip(), SHAPES)
    with pytest.raises(ValueError, match="Eagle2 cannot be exported"):
        export(pair[0], tmp_path, Eagle2.of(pair[1]), SHAPES)
    with pytest.raises(ValueError, match="sizes must be in"):
        ExportConfig(capacity=8, prefill=(9,))
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxspec-decoding\[mobile\]'"):
        MobileModel(path)


def test_lookup_gets_a_pass_of_its_size(pair):
    from jaxspec.drafters import LoadedDrafter
    from jaxspec.mobile.contents import _signatures
    from jaxspec.mobile.records import Target

    target = Target(pair[0].config, CAPACITY, 48, CAPACITY)
    functions, paths = _signatures(target, LoadedDrafter(PromptLookup(2), ()), SHAPES)
    assert {"step", "step_sampled", "verify_3", "commit_3"} < set(functions)
    assert paths == ((0,), (0, 0))
    few = replace(SHAPES, bundle="gpu")
    functions, _ = _signatures(target, LoadedDrafter(PromptLookup(2), ()), few)
    assert set(functions) == {"prefill_8", "decode", "step"}


DENSE = ["mistral", "gemma2", "gemma3", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "granite"]


@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family_decodes_as_in_jax(family, tmp_path):
    """Windows of 4 and 5 tokens: shorter than a part of the prompt, and than text and drafts."""
    model = Model(tiny(family), name=family)
    drafter = LayerSkip(skips_of(3, attention=[1], mlp=[0]), 3)
    export(model, tmp_path, drafter, replace(SHAPES, capacity=40, bundle="gpu"))
    prompt = [5, 17, 40, 8, 22, 53, 3, 9, 31, 12, 44]
    config = GenerationConfig(max_new_tokens=16, stop_token_ids=())
    (row,) = generate(model, prompt, config)
    file = MobileModel(tmp_path / "model.tflite", num_threads=1)
    for loop in (Plain, Steps):
        assert file.generate(prompt, 16, (), loop).tokens.tolist() == row.tokens.tolist()


def test_what_the_converter_refuses_is_named_with_its_scope():
    def rounded(weights, inputs):
        with jax.named_scope("Layer"):
            return {"out": jax.lax.reduce_precision(inputs["rows"], 5, 10)}

    signature = Signature(rounded, {"rows": jax.ShapeDtypeStruct((2, 8), jnp.float32)})
    with pytest.raises(ValueError, match=r"nothing for .*reduce_precision.* at .*Layer/reduce_"):
        to_flatbuffer({"rounded": lower({}, signature)}, {})


def test_mixtures_of_experts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model: mixtures of experts cannot be exported"):
        export(Model(tiny("qwen3_moe"), name="experts"), tmp_path, config=SHAPES)
    assert not list(tmp_path.iterdir())


def test_what_cannot_draft_or_decode_as_a_file_does_is_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="drafts, block_length: for diffusion language models"):
        export(pair[0], tmp_path, config=replace(SHAPES, drafts=(2,)))
    other = tiny("llama")  # of another width than the head
    with pytest.raises(ValueError, match=r"^drafter: the head is for another target"):
        export(Model(other, name="other"), tmp_path, Eagle.of(pair[1], PATHS), SHAPES)
    assert not list(tmp_path.iterdir())


def test_another_file_does_not_find_this_files_packed_weights(pair, tmp_path):
    """Two exports to one place, one cache for both: each decodes by its own weights."""
    other = Model(replace(pair[0].network, params=jax.tree.map(np.negative, pair[0].params)))
    read = {}
    for name, model in (("one", pair[0]), ("other", other)):
        export(model, tmp_path, config=SHAPES)
        for cache in (None, tmp_path / "weights.cache"):
            file = MobileModel(tmp_path / "model.tflite", num_threads=1, weight_cache=cache)
            file.prefill(PROMPTS[0])
            read[name, cache is None] = file.read("prefill_8", "logits")
    assert not np.allclose(read["one", True], read["other", True])
    for name in ("one", "other"):
        np.testing.assert_array_equal(read[name, True], read[name, False])
