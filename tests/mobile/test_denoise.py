"""Exported diffusion language models fill in masks as JAX does, stepwise and by whole rounds."""

from dataclasses import replace

import numpy as np
import pytest

from jaxspec import DenoiseConfig, SelfSpeculation, denoise
from jaxspec.drafters import PromptLookup
from tests.diffusion.networks import BLOCK, MASK, tiny_model
from tests.mobile.models import fill_buffers

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import ExportConfig, MobileModel, export, fill_in, fill_in_stream
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.gpu import check_gpu

CAPACITY, NUM_NEW = 48, 12
SHAPES = ExportConfig(
    capacity=CAPACITY, prefill=(8,), quantization="float32", drafts=(1, 3), block_length=BLOCK
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 2, 2, 17, 20, 11, 8, 9]]
CONFIG = DenoiseConfig(max_new_tokens=NUM_NEW, block_length=BLOCK, stop_token_ids=())
KINDS = {
    "both sides": {},
    "both sides, shifted": {"shift": True},
    "blocks": {"block": BLOCK},
    "blocks, shifted": {"block": BLOCK, "shift": True},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(**KINDS[request.param], seed=1)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(model, folder, config=SHAPES)
    return MobileModel(folder / "model.tflite", num_threads=1)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_same_tokens_as_jax(model, exported, num_drafts):
    for prompt in PROMPTS:
        (stepwise,) = denoise(model, prompt, CONFIG)
        fill_buffers(exported, np.nan)
        found = fill_in(exported, prompt, NUM_NEW, (), num_drafts)
        assert found.tokens.tolist() == stepwise.tokens.tolist()
        assert found.finish_reason == "length"
        if num_drafts == 0:
            assert found.counts == (1,) * stepwise.num_calls


def test_rounds_keep_drafts(model, exported):
    counts = [n for prompt in PROMPTS for n in fill_in(exported, prompt, NUM_NEW, ()).counts]
    assert max(counts) > 1
    calls = sum(row.num_calls for row in denoise(model, PROMPTS, CONFIG, SelfSpeculation(3)))
    assert len(counts) == pytest.approx(calls, abs=1)


def test_a_text_ends_with_its_first_stop_id(model, exported):
    (whole,) = denoise(model, PROMPTS[0], CONFIG)
    stop = int(whole.tokens[BLOCK])
    (cut,) = denoise(model, PROMPTS[0], replace(CONFIG, stop_token_ids=(stop,)))
    for num_drafts in (0, 3):
        found = fill_in(exported, PROMPTS[0], NUM_NEW, (stop,), num_drafts)
        assert found.tokens.tolist() == cut.tokens.tolist()
        assert found.finish_reason == "stop_token"
        assert len(found.counts) <= cut.num_calls


def test_the_canvas_fills(exported):
    stream = fill_in_stream(exported, PROMPTS[1], NUM_NEW, ())
    left = [int(np.sum(canvas == MASK)) for canvas in stream]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_the_manifest_says_how_it_fills_in(model, exported):
    diffusion = model.config.diffusion
    assert exported.manifest.diffusion == {
        "mask_token_id": MASK,
        "shift": diffusion.shift,
        "block": BLOCK,
        "causal": diffusion.block is not None,
    }
    assert exported.manifest.sizes("round") == (1, 3)


def test_what_a_file_cannot_fill_in_is_said(exported):
    for call, said in (
        ({"max_new_tokens": 10}, r"max_new_tokens must be a multiple of the block \(4\), got 10"),
        ({"num_drafts": 2}, r"num_drafts: this file has rounds of \[1, 3\] drafts.*--drafts 2"),
        (
            {"max_new_tokens": 64},
            r"its 2 tokens and 64 new ones need a capacity of \d+, and this file has 48",
        ),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, MASK]}, "not the mask"),
    ):
        arguments = {"prompt": [1, 2], "max_new_tokens": NUM_NEW, **call}
        with pytest.raises(ValueError, match=said):
            fill_in(exported, **arguments)
    with pytest.raises(ValueError, match="fills in masks"):
        exported.generate([1, 2])


@pytest.mark.parametrize(
    ("network", "values", "said"),
    [
        ({}, {"verify": (4,)}, "verify: for causal models"),
        ({}, {"drafts": (8,)}, r"drafts: a round decides within two blocks \(8 tokens\), got 8"),
        (
            {},
            {"capacity": 7, "prefill": (4,)},
            r"capacity must be at least two blocks \(8\), got 7",
        ),
        ({"block": BLOCK}, {"block_length": 8}, "block_length must be 4"),
        ({"block": BLOCK}, {"prefill": (6,)}, r"multiples of the network's block \(4\), got 6"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, network, values, said):
    with pytest.raises(ValueError, match=said):
        export(tiny_model(**network), tmp_path, config=replace(SHAPES, **values))
    assert not list(tmp_path.iterdir())


def test_other_drafters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="drafts its own decisions, so leave PromptLookup out"):
        export(tiny_model(), tmp_path, PromptLookup(), SHAPES)


lacking = missing_for_gpu()


@pytest.mark.slow
@pytest.mark.skipif(lacking is not None, reason=f"GPU not checked: {lacking}")
def test_the_gpu_takes_all_of_it_and_computes_the_same(model, tmp_path):
    manifest = export(model, tmp_path, config=replace(SHAPES, drafts=(3,)))
    checked = check_gpu(tmp_path / "model.tflite", PROMPTS, NUM_NEW, timeout=3000)
    assert checked.problems == ()
    assert set(checked.signatures) == set(manifest.signatures)
    by_name = {loop.name: loop for loop in checked.loops}
    assert set(by_name) == {"denoise", "round_3"}
    assert set(by_name["denoise"].counts) == {1}
    assert max(by_name["round_3"].counts) > 1
