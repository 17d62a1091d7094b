"""Decodes recorded from LLaDA's, Dream's and Fast-dLLM's own programs, canvas by canvas."""

import dataclasses
import gzip
import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import DenoiseConfig, SelfSpeculation, denoise_stream, load
from jaxspec.decoding.denoise import DenoiseResult, DenoiseStep

MASK = 300
LLADA = ("off1", "off6", "off11", "off16", "off21", "off26", "off31", "off36", "off3", "off17")
EXACT = (*(f"llada_tiny_mha/{case}" for case in LLADA), "llada_tiny_mha/edge_mask_predicted")
FAST = tuple(f"llada_tiny_mha/fast{number}" for number in (4, 9, 14, 19, 24, 29))
DREAM = tuple(f"dream/{number}" for number in (1, 6, 11, 16, 21))
DREAM_FAST = tuple(f"dream_fast/{number}" for number in (26, 31, 36))
WITH_SSD = tuple(f"llada_tiny_mha/{case}" for case in ("off1", "off11", "off16", "off26"))
WITH_SSD += tuple(f"llada_tiny_mha/{case}" for case in ("off3", "off17"))

CACHES = {
    "fast_dllm_generate_with_prefix_cache": "prefix",
    "fast_dllm_generate_with_dual_cache": "dual",
    "fast_dllm_dream_block_prefix_cache": "prefix",
    "fast_dllm_dream_block_dual_cache": "dual",
}


@pytest.fixture(scope="module")
def recorded(recorded_folder):
    """Models by name, and cases by id."""
    models, cases = {}, {}
    for name in ("llada_tiny_mha", "dream_tiny"):
        folder = recorded_folder("diffusion", name)
        models[name] = load(folder)
        listed = json.loads(gzip.decompress((folder / "cases.json.gz").read_bytes()))["cases"]
        cases |= {case["id"]: (models[name], case) for case in listed}
    return cases


def config_of(case: dict[str, Any]) -> DenoiseConfig:
    params = case["params"]
    length = params.get("gen_length", params.get("max_new_tokens"))
    is_dream = case["algo"].startswith(("dream", "fast_dllm_dream"))
    threshold = None
    if params.get("alg", "confidence_threshold") == "confidence_threshold":
        threshold = params.get("threshold")
    linear = is_dream and threshold is None
    return DenoiseConfig(
        max_new_tokens=length,
        block_length=params.get("block_length", length),
        steps=None if threshold else params["steps"],
        schedule="linear" if linear else "even",
        eps=params.get("eps", 1e-3),
        order=params["alg"] if linear else "low_confidence",
        threshold=threshold,
        guidance=params.get("cfg_scale", 0.0),
        cache=CACHES.get(case["algo"], "none"),
        stop_token_ids=(),
        allow_mask_token="edge" in case["id"],
    )


def decode(
    model, case, speculation=None, **settings
) -> tuple[DenoiseResult, list[list[DenoiseStep]]]:
    """The result, and each row's steps."""
    config = dataclasses.replace(config_of(case), **settings)
    steps, stream = [], denoise_stream(model, case["prompt"], config, speculation)
    while True:
        try:
            steps.append(next(stream))
        except StopIteration as ended:
            return ended.value, [list(row) for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("name", [*EXACT, *FAST, *DREAM, *DREAM_FAST])
def test_tokens_calls_and_canvases(recorded, name):
    model, case = recorded[name]
    result, steps = decode(model, case)
    assert len(result) == len(case["prompt"])
    for row, (found, canvases) in enumerate(zip(result, steps, strict=True)):
        length = len(case["prompt"][row])
        assert found.tokens.tolist() == case["output"][row][length:]
        assert found.num_calls == case["nfe"]
        before = [step.tokens.tolist() for step in canvases]
        if "trace" in case:
            assert before == [canvas[row][length:] for canvas in case["trace"]]
        if "history" in case:
            after = [*before[1:], found.tokens.tolist()]
            assert after == [canvas[row][length:] for canvas in case["history"]]


@pytest.fixture
def compiled_quickly():
    """Fifteen programs, when those above have been compiled as they will be used."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    "num_drafts", [1, 4, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 5))]
)
@pytest.mark.parametrize("name", WITH_SSD)
def test_drafts_and_what_becomes_of_them(recorded, name, num_drafts):
    model, case = recorded[name]
    expected = case["ssd"][str(num_drafts)]
    mask = model.config.diffusion.mask_token_id
    # A recorded draft may be the mask itself, which changes no canvas. The record then continues
    # with other places, and we with the same one.
    speculation = SelfSpeculation(num_drafts)
    (found,), (steps,) = decode(model, case, speculation, allow_mask_token=True)
    length = len(case["prompt"][0])
    assert found.tokens.tolist() == case["output"][0][length:]
    assert (found.num_calls, found.num_canvases) == (expected["nfe"], expected["rows"])
    first, *rounds = steps
    assert len(first.drafts) == 0
    assert [step.num_accepted for step in rounds] == expected["accepted_per_iteration"]
    for step, iteration in zip(rounds, expected["iterations"], strict=True):
        canvases = np.stack([step.tokens, *step.drafts])
        _, places = np.nonzero(canvases[1:] != canvases[:-1])
        tokens = canvases[-1][places]
        assert [[place + length, token] for place, token in zip(places, tokens, strict=True)] == [
            list(drafted)
            for drafted in itertools.takewhile(lambda one: one[1] != mask, iteration["draft"])
        ]
