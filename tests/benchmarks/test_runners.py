"""Every runner emits the tokens of the public function that it wraps, and counts its passes."""

import pytest

import jaxspec
from benchmarks.runners import (
    ASSISTED,
    TRANSFORMERS,
    FileMethod,
    FillRunner,
    LitertRunner,
    Pass,
    TransformersRunner,
    counts_of_passes,
)
from benchmarks.suites.jobs import Job, JobRunner, Jobs
from jaxspec import DenoiseConfig, GenerationConfig, PromptLookup, SelfSpeculation, generate
from jaxspec.batch.rows import rows_of
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.measure.compare import JaxRunner
from jaxspec.measure.denoising import DenoiseRunner
from tests.measure.models import filling_model

IDS = [5, 6, 7, 5, 6, 7, 5, 6]
CONFIG = GenerationConfig(max_new_tokens=8, stop_token_ids=())


def test_jax_decodes_as_generate_does(model):
    runner = JaxRunner(model, {"plain": None, "lookup": PromptLookup(2)}, CONFIG)
    expected = generate(model, IDS, CONFIG)
    for method in ("plain", "lookup"):
        sample = runner.decode(method, IDS, 0)
        assert sample.texts == [row.tokens.tolist() for row in expected]
    metrics = generate(model, IDS, CONFIG, PromptLookup(2)).metrics
    assert sample.counts.num_steps == metrics.num_verify_steps
    assert sample.counts.tau == metrics.mean_acceptance_length
    assert sample.counts.accepted == metrics.acceptance_histogram


def test_jax_decodes_batches(model):
    runner = JaxRunner(model, {"plain": None}, CONFIG, carry=False)
    sample = runner.decode("plain", [IDS, IDS[:5]], 0)
    assert sample.texts == [
        generate(model, ids, CONFIG)[0].tokens.tolist() for ids in (IDS, IDS[:5])
    ]
    assert sample.num_tokens == 16


def test_a_drafter_that_learns_is_carried_on(model):
    """From prompt to prompt, and not where that is turned off."""
    from jaxspec.drafters import AdaptiveExit, LayerSkip
    from jaxspec.models import Skips

    depth = model.network.num_layers
    skips = LayerSkip(Skips((False,) * depth, (True,) * depth), 4, 0.0, AdaptiveExit())
    for carry in (True, False):
        runner = JaxRunner(model, {"skips": skips}, CONFIG, carry)
        runner.decode("skips", IDS, 0)
        assert (runner.methods["skips"] is skips) is not carry


@pytest.mark.parametrize("block", [4, None])
def test_diffusion_models_decode_as_denoise_does(block):
    model = filling_model("filling", block)
    config = DenoiseConfig(8, 4, stop_token_ids=())
    drafting = SelfSpeculation(2)
    runner = DenoiseRunner(model, {"drafted": drafting}, config)
    prompts = [IDS, IDS[:5]]
    sample, expected = runner.decode("drafted", prompts, 0), None
    expected = jaxspec.denoise(model, prompts, config, drafting)
    assert sample.texts == [row.tokens.tolist() for row in expected]
    assert sample.counts.num_steps == sum(row.num_calls for row in expected)
    assert sample.num_tokens == 16


def test_jobs_decode_as_generate_does(model):
    drafter = LoadedDrafter(PromptLookup(2), ())
    jobs = Jobs(model, drafter, [IDS, IDS[:5], IDS[:7]], 8, lambda _: None)
    runner, rows = JobRunner(jobs), rows_of(jobs.prompts)
    expected = [generate(model, ids, jobs.config)[0].tokens.tolist() for ids in jobs.prompts]
    for method in ("plain", "drafted", "fixed, plain", "fixed, drafted", "refilled, drafted"):
        sample = runner.decode(method, Job(rows, 2), 0)
        assert sample.texts == expected
        assert sample.num_tokens == sum(map(len, expected))
    assert runner.median_report("plain").num_done == 3
    assert "plain" not in runner.reports


def test_passes_tell_what_was_drafted_and_kept():
    # Two drafted and one of them kept; then four drafted and two kept.
    found = counts_of_passes(3, 5, [Pass(0, 5), Pass(4, 5)])
    assert found.drafted == (0, 0, 1, 0, 1)
    assert found.accepted == (0, 1, 1, 0, 0)
    assert found.tau == 2.5
    assert (found.num_nodes, found.num_from_draft) == (6, 3)


def test_transformers_emit_our_tokens(model, checkpoints):
    pytest.importorskip("torch", reason="needs the extra `parity`")
    pytest.importorskip("transformers", reason="needs the extra `parity`")
    runner = TransformersRunner(model, checkpoints / "demo", checkpoints / "demo-draft", 8)
    expected = generate(model, IDS, GenerationConfig(max_new_tokens=8))[0].tokens.tolist()
    plain, assisted = (runner.decode(method, IDS, 0) for method in (TRANSFORMERS, ASSISTED))
    assert plain.texts == assisted.texts == [expected]
    assert plain.counts.tau == 1.0
    # The assistant has the target's own weights.
    assert assisted.counts.tau > 1.0
    assert assisted.counts.num_from_draft + assisted.counts.num_steps == 8


class TestFiles:
    """Files for LiteRT."""

    @pytest.fixture(autouse=True)
    def _needs_litert(self):
        pytest.importorskip("litert_converter", reason="needs the extra `mobile`")
        pytest.importorskip("ai_edge_litert", reason="needs the extra `mobile`")

    @pytest.mark.slow
    def test_files_decode_as_generate_does(self, model, head, tmp_path):
        from benchmarks.suites.litert import decode_files, open_file
        from jaxspec.mobile import ExportConfig
        from jaxspec.mobile.drafts import TreeDraft

        shapes = ExportConfig(capacity=48, prefill=(8,), quantization="float32")
        drafter = Eagle.of(head, ((0,), (1,), (0, 0)))
        files = {"tree": open_file(tmp_path, "tree", model, drafter, shapes)}
        methods = {
            "plain": FileMethod("tree"),
            "verify": FileMethod("tree", 3, TreeDraft),
            "step": FileMethod("tree", 3, steps=True),
        }
        runner = LitertRunner(files, methods, 8)
        expected = generate(model, IDS, CONFIG)[0].tokens.tolist()
        for method in methods:
            sample = runner.decode(method, IDS, 0)
            assert sample.texts == [expected]
            assert sample.num_tokens == 7  # the first comes with the prompt
            assert len(sample.parts["round"]) == sample.counts.num_steps
            assert sample.seconds == sum(sample.parts["round"])
        assert runner.decode("plain", IDS, 0).counts.tau == 1.0
        rows = decode_files(files, {"step": methods["step"]}, [IDS, IDS[:5]], 8)
        assert [row.name for row in rows] == ["plain", "step"]
        assert all(row.divergences == () for row in rows)

    @pytest.mark.slow
    def test_files_of_diffusion_models_decode_as_denoise_does(self, tmp_path):
        from benchmarks.suites.litert import open_file
        from jaxspec.mobile import ExportConfig

        model = filling_model("filling", 8)
        shapes = ExportConfig(capacity=64, quantization="float32", drafts=(1,), block_length=8)
        runner = FillRunner(open_file(tmp_path, "file", model, None, shapes), 8)
        config = DenoiseConfig(8, 8, stop_token_ids=())
        (expected,) = jaxspec.denoise(model, IDS, config)
        for drafts in ("0", "1"):
            assert runner.decode(drafts, IDS, 0).texts == [expected.tokens.tolist()]
