"""LiteRT's GPU accelerator takes whole files and computes the same tokens, on any Vulkan driver."""

from dataclasses import replace

import numpy as np
import pytest

from jaxspec import DFlash, DraftModel, LayerSkip, PromptLookup, TokenRecycling, load
from jaxspec.checkpoint import load_eagle, shipped_folders
from jaxspec.drafters import Deer, Eagle, LoadedDrafter, NoDraft
from jaxspec.drafters.skip_sets import skips_of
from jaxspec.measure.comparison import Divergence
from tests.laws.drafters import dflash_head, diffuser
from tests.mobile.models import half_of, successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from benchmarks.gpu_passes import check_passes, compare_passes
from jaxspec.mobile import ExportConfig, MobileModel, export, read_manifest
from jaxspec.mobile import child as child_module
from jaxspec.mobile import gpu as gpu_module
from jaxspec.mobile import runtime as runtime_module
from jaxspec.mobile.checks import LoopCheck, compare_with_plain
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.gpu import GpuCheck, check_gpu
from jaxspec.mobile.profile import export_kit

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
SHAPES = ExportConfig(capacity=64, prefill=(16,), quantization="float32")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [40, 2, 2, 2, 17, 20], [11, 13]]

EVERY_LOOP = {
    *("decode", "step", "step_sampled", "draft, verify, commit", "verify_4, commit_4"),
    *("absorb, draft_2, verify, commit", "absorb, draft_4, verify, commit"),
}

lacking = missing_for_gpu()
needs_gpu = pytest.mark.skipif(lacking is not None, reason=f"GPU not checked: {lacking}")


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["float32", "int8", "int4", "int4-calibrated"])
def test_eagle_steps_run_whole_and_right(tmp_path, quantization):
    """The bundle for GPUs; float32 with every other signature, too."""
    model, head = successor_model()
    exact = quantization == "float32"
    every = {"bundle": "cpu", "levels": (2, 4), "verify": (4,), "prefill": (8, 16)}
    bundle = every if exact else {"bundle": "gpu"}
    config = replace(SHAPES, quantization=quantization, **bundle)
    manifest = export(model, tmp_path, Eagle.of(head, PATHS), config)
    checked = check_gpu(tmp_path / "model.tflite", PROMPTS, timeout=3000)
    assert checked.problems == ()
    assert set(checked.signatures) == set(manifest.signatures)
    by_name = {loop.name: loop for loop in checked.loops}
    steps = by_name["step"]
    assert {1, 2} <= set(steps.counts)
    assert max(steps.counts) >= 3
    if exact:
        assert set(by_name) == EVERY_LOOP
        assert all(loop.expected_counts == loop.counts for loop in checked.loops)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["cpu", "gpu"])
def test_layers_skipped_run_whole_and_right(tmp_path, bundle):
    """The larger bundle with drafts that end early, on the host and in the graph."""
    model, _ = successor_model()
    drafter = LayerSkip(skips_of(2, attention=[1], mlp=[0]), 3, threshold=0.3)
    export(model, tmp_path, drafter, replace(SHAPES, bundle=bundle))
    checked = check_gpu(tmp_path / "model.tflite", PROMPTS[:2], timeout=3000)
    assert checked.problems == ()
    names = {loop.name for loop in checked.loops}
    assert ({"step_exit", "draft_1, accept", "accept_2", "accept_4"} <= names) == (bundle == "cpu")


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["float32", "int4"])
def test_a_kit_without_a_head_runs_whole(tmp_path, quantization):
    """Also the passes with layers left out."""
    model, _ = successor_model()
    shapes = replace(SHAPES, quantization=quantization)
    manifest = export_kit(model, tmp_path, LoadedDrafter(NoDraft(), ()), shapes)
    checked = check_gpu(tmp_path / "model.tflite", PROMPTS[:2], timeout=3000)
    assert checked.problems == ()
    assert set(checked.signatures) == set(manifest.signatures)
    assert "partial_no_mlp" in checked.signatures


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["cpu", "gpu"])
def test_tokens_recycled_run_whole_and_right(tmp_path, bundle):
    model, _ = successor_model()
    drafter = TokenRecycling(((0,), (1,), (0, 0), (0, 0, 0)))
    export(model, tmp_path, drafter, replace(SHAPES, bundle=bundle))
    assert check_gpu(tmp_path / "model.tflite", PROMPTS[:2], timeout=3000).problems == ()


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bundle", "quantization"),
    [("cpu", "float32"), ("gpu", "float32"), ("gpu", "int8"), ("gpu", "int4")],
)
@pytest.mark.parametrize("name", ["draft model", "lookup", "dflash"])
def test_other_steps_run_whole_and_right(tmp_path, name, bundle, quantization):
    model, _ = successor_model()
    drafters = {
        "draft model": lambda: DraftModel.of(half_of(model), paths=PATHS),
        "lookup": lambda: PromptLookup(3),
        "dflash": lambda: DFlash.of(dflash_head(model.network, seed=8), paths=PATHS),
    }
    shapes = replace(SHAPES, bundle=bundle, quantization=quantization)
    export(model, tmp_path, drafters[name](), shapes)
    prompts = [PROMPTS[0], [5, 6, 7, 8, 9] * 2]
    checked = check_gpu(tmp_path / "model.tflite", prompts, timeout=3000)
    assert checked.problems == ()
    (steps,) = [loop for loop in checked.loops if loop.name == "step"]
    assert max(steps.counts) > 1


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize("method", [Deer(4), Deer(4, num_nodes=6, branch=3)])
def test_block_drafts_run_whole_and_right(tmp_path, method, quantization):
    """A chain in whole steps, a tree that the host makes of what `draft_block_N` gives."""
    model, _ = successor_model()
    drafter = LoadedDrafter(method, diffuser(model.network, 4))
    shapes = replace(SHAPES, quantization=quantization, bundle="gpu")
    manifest = export(model, tmp_path, drafter, shapes)
    assert manifest.sizes("draft_block") == drafter.drafter.window_sizes(4)[-1:]
    # The second does not fit into one window with its draft.
    checked = check_gpu(tmp_path / "model.tflite", [PROMPTS[0], PROMPTS[0] * 2], timeout=3000)
    assert checked.problems == ()
    (rounds,) = [loop for loop in checked.loops if loop.name.startswith("draft_block")]
    assert max(rounds.counts) > 1


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_the_shipped_model_runs_whole_and_right(tmp_path, quantization):
    """With its head over its searched tree, as it is shipped; float32 with every signature."""
    if not {"demo", "demo-eagle"} <= set(shipped_folders()):
        pytest.skip("needs checkpoints/demo and checkpoints/demo-eagle, which are not here")
    model = load("demo")
    head = load_eagle("demo-eagle", model.network)
    drafter = Eagle.of(head)
    bundle = "cpu" if quantization == "float32" else "gpu"
    shapes = ExportConfig(
        capacity=1024, prefill=(8, 64), bundle=bundle, quantization=quantization, verify=(8,)
    )
    export(model, tmp_path, drafter, shapes)
    texts = ("How many are 3 + 4?\n", "def add(a, b):\n", "Once upon a time", "1, 2, 3, 4,")
    prompts = [model.tokenizer.encode(text) for text in texts]
    checked = check_gpu(tmp_path / "model.tflite", prompts, 16, 3000)
    assert checked.problems == ()
    (steps,) = [loop for loop in checked.loops if loop.name == "step"]
    assert len(set(steps.counts)) > 2
    if quantization != "int8":
        known = [model.tokenizer.encode(text * 4) for text in texts]
        assert check_passes(tmp_path / "model.tflite", known, 3000) == (32, 32)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A file with signatures of every kind."""
    model, head = successor_model()
    folder = tmp_path_factory.mktemp("everything")
    config = replace(SHAPES, levels=(2, 4), verify=(4,), prefill=(8, 16))
    export(model, folder, Eagle.of(head, PATHS), config)
    return folder / "model.tflite"


class Watched(MobileModel):
    """On the CPU, in place of a GPU: notes what is called; one output may be wrong."""

    wrong = ("", "", 0)

    def __init__(self, path):
        super().__init__(path, num_threads=1)
        self.called = set()

    def call(self, signature, **inputs):
        self.called.add(signature)
        super().call(signature, **inputs)

    def read(self, signature, output):
        values = np.array(super().read(signature, output))
        if (signature, output) == self.wrong[:2]:
            values[0, ..., self.wrong[2] :] = 0
        return values


def test_every_signature_is_run(everything):
    ours, reference = Watched(everything), MobileModel(everything, num_threads=1)
    prompts = gpu_module._some_prompts(ours.manifest)
    assert {8, 16, 19} <= set(map(len, prompts))
    checks = compare_with_plain(ours, reference, prompts, 16)
    assert {check.name for check in checks} == EVERY_LOOP
    assert ours.called == set(ours.manifest.signatures)
    assert GpuCheck((), True, "", tuple(checks)).problems == ()
    (verified,) = [check for check in checks if check.name == "verify_4, commit_4"]
    assert set(verified.counts) == {1, 4}


@pytest.mark.parametrize("wrong", [("draft", "drafted", 1), ("draft_4", "children", 0)])
def test_wrong_drafts_are_noticed(everything, wrong):
    """Though all texts are right."""
    ours, reference = Watched(everything), MobileModel(everything, num_threads=1)
    ours.wrong = wrong
    checks = compare_with_plain(ours, reference, PROMPTS[:2], 16)
    (problem,) = GpuCheck((), True, "", tuple(checks)).problems
    assert problem.endswith("its rounds emit more or fewer tokens than on the CPU")
    assert wrong[0] in problem


def test_passes_over_known_text_are_compared(everything):
    ours, reference = Watched(everything), MobileModel(everything, num_threads=1)
    size = ours.manifest.sizes("verify")[-1]
    texts = [[*PROMPTS[0], *PROMPTS[2]], [*PROMPTS[0], 7]]
    assert compare_passes(ours, reference, texts) == (2 * size, 2 * size)
    ours.wrong = (f"verify_{size}", "choices", size - 1)  # the last token of each text
    assert compare_passes(ours, reference, texts) == (2 * size, 2 * size - 2)


def test_what_is_wrong_is_listed():
    loops = (LoopCheck("step", 2, (1, 3), (Divergence(1, 7, 3, 4, None),)),)
    checked = GpuCheck(("decode", "step"), False, "plain decoding on the CPU", loops)
    assert checked.problems == (
        "a part of it falls back to the CPU",
        "step: prompt 1 differs from plain decoding on the CPU at token 7",
    )
    assert "NOT fully" in str(checked)
    assert "1 of 2 texts equal" in str(checked)


class TestWhatFails:
    """A child that crashes, hangs or cannot start ends in one clear error."""

    @pytest.fixture
    def path(self, tmp_path):
        export(successor_model()[0], tmp_path, config=replace(SHAPES, bundle="gpu"))
        return tmp_path / "model.tflite"

    @pytest.fixture
    def child(self, monkeypatch):
        """Any Python in place of the child."""
        monkeypatch.setattr(gpu_module, "missing_for_gpu", lambda: None)
        run = child_module.subprocess.run

        def instead(code):
            def started(_, **settings):
                return run([child_module.sys.executable, "-S", "-c", code], **settings)

            monkeypatch.setattr(child_module.subprocess, "run", started)

        return instead

    def test_crashes_and_silence_are_errors(self, path, child):
        child("import os; os.write(2, b'GATHER_ND: no'); os.abort()")
        with pytest.raises(ValueError, match=r"exit code -6\): GATHER_ND: no"):
            check_gpu(path)
        child("import time; time.sleep(60)")
        with pytest.raises(ValueError, match="took longer than 0 s"):
            check_gpu(path, timeout=0.2)
        child("pass")
        with pytest.raises(ValueError, match="it said nothing"):
            check_gpu(path)

    def test_what_the_machine_lacks_is_named(self, path, monkeypatch):
        monkeypatch.setattr(gpu_module, "missing_for_gpu", lambda: "there is no Vulkan driver")
        with pytest.raises(ValueError, match="cannot be checked here: there is no Vulkan driver"):
            check_gpu(path)

    def test_what_would_end_the_process_is_not_opened(self, path, monkeypatch):
        """Blocks, without a check of their own."""
        blocks = replace(read_manifest(path), quantization="int4-block32")
        monkeypatch.setattr(runtime_module, "read_manifest", lambda _: blocks)
        with pytest.raises(ValueError, match="int4-block32 ends the process"):
            MobileModel(path, accelerator="gpu")

    def test_a_missing_driver_is_named_before_opening(self, path, monkeypatch):
        monkeypatch.setattr(runtime_module, "missing_for_gpu", lambda: "there is no Vulkan driver")
        with pytest.raises(ValueError, match=r"accelerator: .*: there is no Vulkan driver"):
            MobileModel(path, accelerator="gpu")
