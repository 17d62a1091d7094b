"""Files compared with JAX: texts, logits and traces, and that what differs is noticed."""

import dataclasses

import numpy as np
import pytest

from jaxspec import GenerationConfig, LayerSkip, generate, load
from jaxspec.checkpoint import load_eagle, shipped_folders
from jaxspec.decoding.result import Trace
from jaxspec.drafters import Eagle
from jaxspec.drafters.skip_sets import skips_of
from jaxspec.measure.comparison import TIE_GAP, Divergence
from tests.mobile.models import successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from benchmarks.litert_parity import (
    QUANTIZED_TIE_GAP,
    FileParity,
    LoopParity,
    Replay,
    compare_with_jax,
    logits_error,
    replay,
)
from jaxspec.mobile import ExportConfig, MobileModel, export

PATHS = ((0,), (1,), (0, 0), (1, 0))
PROMPTS = [[3, 1, 4, 1, 5], [7]]
CAPACITY, NUM_NEW = 48, 20


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """The model, a file of it, JAX's texts, and its traces from the second token on."""
    model, head = successor_model()
    drafter = Eagle.of(head, PATHS)
    folder = tmp_path_factory.mktemp("exported")
    shapes = ExportConfig(capacity=CAPACITY, prefill=(8,), quantization="float32")
    export(model, folder, drafter, shapes)
    config = GenerationConfig(max_new_tokens=NUM_NEW, stop_token_ids=())
    texts = [row.tokens.tolist() for row in generate(model, PROMPTS, config)]
    longer = [[*prompt, text[0]] for prompt, text in zip(PROMPTS, texts, strict=True)]
    rest = dataclasses.replace(config, max_new_tokens=NUM_NEW - 1)
    traces = [row.trace for row in generate(model, longer, rest, drafter, return_trace=True)]
    return model, MobileModel(folder / "model.tflite", num_threads=1), texts, traces


def test_a_file_does_every_step_of_a_trace_again(setup):
    _, file, texts, traces = setup
    done = replay(file, PROMPTS, texts, traces)
    assert done.num_steps == sum(map(len, traces)) > 8
    assert done.same_drafts == done.same_commits == done.num_steps
    assert max(len(step.path) for trace in traces for step in trace) == 3


@pytest.mark.parametrize("fault", ["draft", "emitted", "path"])
def test_a_trace_of_something_else_is_noticed(setup, fault):
    """One step of the first trace is changed; the second trace stays."""
    _, file, texts, traces = setup
    at = next(i for i, step in enumerate(traces[0]) if len(step.path) < 3)
    step = traces[0][at]
    changed = {
        # This token is not accepted anyway.
        "draft": {"tokens": np.where(np.arange(5) == 4, (step.tokens + 1) % 48, step.tokens)},
        "emitted": {"emitted": (step.emitted + 1) % 48},
        "path": {"path": np.arange(4)},
    }[fault]
    steps = list(traces[0])
    steps[at] = dataclasses.replace(step, **changed)
    done = replay(file, PROMPTS, texts, [Trace(steps), traces[1]])
    if fault == "draft":
        assert done.same_drafts == done.num_steps - 1
        assert done.same_commits == done.num_steps
    else:
        assert done.same_commits == at + len(traces[1])


def test_logits_are_those_of_jax(setup):
    model, file, texts, _ = setup
    assert 0 < logits_error(model, file, PROMPTS, texts) < 5e-5


def parted(gap: float, tie_gap: float = TIE_GAP) -> LoopParity:
    """A loop one of whose two texts leaves its reference."""
    return LoopParity("step", 2, (1, 2, 1, 1), (Divergence(1, 7, 3, 4, gap),), tie_gap)


RIGHT = FileParity("head", "float32", (parted(0.9e-4),), Replay(9, 9, 9), 5e-5)
QUANTIZED = RIGHT._replace(
    quantization="int8", replay=None, logits_error=None, loops=(parted(0.05, QUANTIZED_TIE_GAP),)
)


@pytest.mark.parametrize(
    ("file", "exact"),
    [
        (RIGHT, True),
        (RIGHT._replace(loops=(parted(1.1e-4),)), False),
        (RIGHT._replace(replay=Replay(9, 8, 9)), False),
        (RIGHT._replace(replay=Replay(9, 9, 8)), False),
        (RIGHT._replace(logits_error=6e-5), False),
        (QUANTIZED, True),
        (QUANTIZED._replace(loops=(parted(0.2, QUANTIZED_TIE_GAP),)), False),
    ],
)
def test_every_difference_makes_a_file_inexact(file, exact):
    assert file.exact == exact


@pytest.mark.slow
def test_the_shipped_model_decodes_alike_in_all_its_ways():
    """At the default capacity; fewer bits are compared with `decode` of the same file."""
    if not {"demo", "demo-eagle"} <= set(shipped_folders()):
        pytest.skip("needs checkpoints/demo and checkpoints/demo-eagle, which are not here")
    model = load("demo")
    head = load_eagle("demo-eagle", model.network)
    drafters = {"head": Eagle.of(head)}
    texts = ("How many are 3 + 4?\n", "def add(a, b):\n", "Once upon a time")
    prompts = [model.tokenizer.encode(text) for text in texts]
    for file in compare_with_jax(model, drafters, prompts, 32, capacity=1024):
        assert file.exact, file
        assert all(loop.tau > 1.5 for loop in file.loops[1:])


@pytest.mark.slow
def test_files_of_every_kind_are_compared():
    model, head = successor_model()
    drafters = {
        "head": Eagle.of(head, PATHS),
        "skips": LayerSkip(skips_of(2, attention=[1], mlp=[0]), 3),
    }
    said = []
    quantizations = ("float32", "int8")
    files = list(compare_with_jax(model, drafters, PROMPTS, 12, quantizations, 80, said.append))
    assert [(file.drafter, file.quantization) for file in files] == [
        (name, quantization) for name in drafters for quantization in quantizations
    ]
    assert len(said) == 1 + len(files)
    for file in files:
        by_host, exits = "draft, verify, commit", []
        if file.drafter == "skips":
            by_host, exits = "draft_1, accept", ["step_exit"]
        names = ["decode", by_host, *exits, "step"]
        assert [loop.name for loop in file.loops] == names
        assert file.exact
        assert all(loop.divergences == () for loop in file.loops)
        plain, verified, same_drafts, *whole = (loop.tau for loop in file.loops)
        assert plain == 1
        assert verified == same_drafts > 1
        assert all(tau >= verified for tau in whole)
        assert (file.replay is None) == (file.quantization == "int8")
        if file.replay is not None:
            assert file.replay.same_drafts == file.replay.num_steps
            assert file.logits_error < 5e-5
