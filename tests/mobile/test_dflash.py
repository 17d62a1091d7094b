"""DFlash on LiteRT: whole steps, and drafts that the host verifies, against the same in JAX."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.core.types import Warp
from jaxspec.drafters import AdaptiveBlock, DFlash, LoadedDrafter
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.models import DFlashHead, init_dflash_params
from tests.laws.drafters import dflash2_head, dflash_head, dspark_head
from tests.mobile.models import CONFIG, fill_buffers, successor_model

pytest.importorskip("litert_converter", reason="needs the extra `mobile`")
pytest.importorskip("ai_edge_litert", reason="needs the extra `mobile`")

MOST = 40
PROMPTS = ([3, 7, 1, 19, 4, 9, 11], [5] * 20, list(range(2, 33)))
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
SHAPES = ExportConfig(capacity=96, prefill=(16,), quantization="float32")


def other_shape(target) -> DFlashHead:
    """A head of two taps, whose layers are not the target's; one sees a window."""
    kinds = ("sliding", "full", "full")
    config = CONFIG.replace(
        num_layers=3, layer_types=kinds, sliding_window=6, num_kv_heads=1, qk_norm=True
    )
    params = init_dflash_params(config, 2 * CONFIG.embed_dim, jax.random.key(5))
    return DFlashHead(params, config, (0, 1), 0, 4)


HEADS = {
    "chain": (DFlash(3, taps=(1,)), partial(dflash_head, seed=8)),
    "tree": (DFlash(3, PATHS, taps=(1,)), partial(dflash_head, seed=8)),
    "anchor predicts": (
        DFlash(4, (*PATHS, (0, 0, 0)), taps=(1,)),
        partial(dflash_head, anchor_predicts=True, causal=True),
    ),
    "other shape": (DFlash(3, taps=(0, 1)), other_shape),
}


@pytest.fixture(scope="module")
def model():
    return successor_model()[0]


def drafter_of(model, name: str = "chain", **settings) -> LoadedDrafter:
    method, head = HEADS[name]
    return LoadedDrafter(replace(method, **settings), head(model.network))


def opened(folder):
    from jaxspec.mobile.runtime import MobileModel

    file = MobileModel(folder / MODEL_FILE, num_threads=1)
    fill_buffers(file, np.nan)
    return file


@pytest.mark.parametrize("name", HEADS)
def test_rounds_on_litert_are_those_in_jax(model, tmp_path, name):
    """The same drafts, and as many accepted in every round, of texts one after the other."""
    from jaxspec.mobile.drafts import TreeDraft
    from jaxspec.mobile.loops import Verified, whole_steps

    drafted = []

    class Recorded(TreeDraft):
        def __call__(self, text, recent):
            drafted.append(super().__call__(text, recent))
            return drafted[-1]

    def by_host(file, acceptance):
        return Verified(file, Recorded(file), acceptance)

    drafter = drafter_of(model, name)
    manifest = export(model, tmp_path, drafter, SHAPES)
    assert manifest.paths == (drafter.drafter.paths or ((0,), (0, 0), (0, 0, 0)))
    file, counts = opened(tmp_path), []
    config = GenerationConfig(max_new_tokens=MOST - 1, stop_token_ids=())
    for prompt in PROMPTS:
        drafted.clear()
        texts = [file.generate(prompt, MOST, (), loop) for loop in (whole_steps, by_host)]
        # LiteRT chooses the first token with the prompt, and counts it as a round.
        first, *others = texts[0].tokens.tolist()
        (row,) = generate(model, [*prompt, first], config, drafter, return_trace=True)
        emitted = [1, *(len(step.emitted) for step in row.trace)]
        for decoded in texts:
            assert decoded.tokens.tolist() == [first, *others] == [first, *row.tokens.tolist()]
            # The budget cuts the last round, there behind the acceptance and here before it.
            assert list(decoded.counts[:-1]) == emitted[:-1]
            assert len(decoded.counts) == len(emitted)
        for ours, theirs in zip(drafted, row.trace, strict=True):
            np.testing.assert_array_equal(ours.tokens[theirs.valid], theirs.tokens[theirs.valid])
        counts += emitted
    assert max(counts) > 1  # some drafts were accepted


@pytest.mark.parametrize(("quantization", "name"), [("float32", "tree"), ("int8", "chain")])
def test_every_way_of_a_file_gives_its_own_plain_text(model, tmp_path, quantization, name):
    from jaxspec.mobile.checks import compare_with_plain

    shapes = replace(SHAPES, quantization=quantization, verify=(1,), prefill=(4, 16))
    export(model, tmp_path, drafter_of(model, name), shapes)
    file = opened(tmp_path)
    checks = compare_with_plain(file, file, PROMPTS, MOST)
    assert [check.name for check in checks] == [
        *("decode", "step", "draft, verify, commit", "verify_1, commit_1", "step_sampled"),
    ]
    assert all(not check.divergences for check in checks)
    taken = {check.name: len(check.counts) for check in checks}
    assert taken["step"] == taken["draft, verify, commit"] < taken["decode"]


def test_a_chat_goes_on_with_the_heads_cache(model, tmp_path):
    """The next turn reads what is new, and the rounds are those of a file that reads all."""
    export(model, tmp_path, drafter_of(model), SHAPES)
    file = opened(tmp_path)
    text = [*PROMPTS[0], *file.generate(PROMPTS[0], 20, ()).tokens.tolist(), 5, 6]
    again, fresh = file.generate(text, 20, ()), opened(tmp_path).generate(text, 20, ())
    assert (again.tokens.tolist(), again.counts) == (fresh.tokens.tolist(), fresh.counts)


def test_chains_are_drawn_at_a_temperature_and_trees_are_not(model, tmp_path):
    for name, settings, draws in [
        ("chain", {}, True),
        ("chain", {"temperature": 0.0}, False),
        ("tree", {}, False),
    ]:
        manifest = export(model, tmp_path, drafter_of(model, name, **settings), SHAPES)
        assert ("draft_uniforms" in manifest.signatures["step_sampled"]["inputs"]) == draws
        warp = Warp(np.float32(0.9), top_k=np.int32(4))
        counts = opened(tmp_path).generate(PROMPTS[0], MOST, (), warp=warp, seed=3).counts
        assert max(counts) > 1


def test_a_file_for_gpus_has_few_functions(model, tmp_path):
    manifest = export(model, tmp_path, drafter_of(model), replace(SHAPES, bundle="gpu"))
    assert set(manifest.signatures) == {"prefill_16", "decode", "step"}


def test_what_no_file_drafts_is_refused(model, tmp_path):
    def refused(said, head=None, **settings):
        drafter = drafter_of(model, **settings)
        if head is not None:
            drafter = drafter._replace(params=head)
        with pytest.raises(ValueError, match=said):
            export(model, tmp_path, drafter, SHAPES)

    refused("exported DFlash drafts every block in one pass, without steps; leave that", steps=2)
    refused("without num_nodes", num_nodes=4)
    refused("without adaptive", adaptive=AdaptiveBlock())
    refused("without confidence", confidence=0.5)
    refused("without temperature", paths=PATHS, temperature=0.5)
    for parts in (dspark_head, dflash2_head):
        refused("a Markov head, a path selector or convolutions", parts(model.network))
    head = drafter_of(model).params
    short = replace(head, config=head.config.replace(max_positions=32))
    refused("capacity must be at most the head's 32 positions, got 96", short)
    assert not list(tmp_path.iterdir())


def test_what_would_be_written_past_the_end_is_refused(model, tmp_path):
    export(model, tmp_path, drafter_of(model), SHAPES)
    file = opened(tmp_path)
    with pytest.raises(ValueError, match="length: draft writes 4 rows from 93 on"):
        file.call("draft", count=[1], length=[94])
    with pytest.raises(ValueError, match="length: step writes 4 rows from 93 on"):
        file.call("step", length=[93])
    plain = file.generate(PROMPTS[2], 90, ())
    assert len(plain.tokens) == SHAPES.capacity - len(PROMPTS[2])


def test_the_memory_on_a_phone_counts_the_heads_layers_and_caches(model):
    """Three layers, with one head of keys each; one pass of them in `step`, one in `draft`."""
    from jaxspec.mobile.memory import phone_memory

    drafter = drafter_of(model, "other shape")
    alone, both = (phone_memory(model, given, SHAPES) for given in (None, drafter))
    own = 4 * sum(leaf.size for leaf in jax.tree.leaves(drafter.params.params) if leaf.ndim > 1)
    assert both.products - alone.products == own
    # Keys and values of 4 numbers, twice, as input and output take turns.
    assert both.caches - alone.caches == 2 * SHAPES.capacity * 3 * 2 * 4 * 4
    output = 4 * model.params["head"]["kernel"].size
    on_gpu = replace(SHAPES, bundle="gpu")
    # Three functions read the whole file, and `step` has a draft pass.
    assert phone_memory(model, drafter, on_gpu).repeated == 2 * both.products + own + output
