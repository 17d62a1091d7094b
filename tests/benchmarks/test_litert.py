"""The suites `litert-NAME` on a tiny model in place of the shipped one."""

import dataclasses
import json
import re
import shutil

import jax
import pytest

import jaxspec
from benchmarks.__main__ import main
from benchmarks.harness import measure
from benchmarks.suites import SUITES
from jaxspec.tuning import calibrated_table
from tests.measure.models import filling_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from benchmarks import footprint
from benchmarks.footprint import RandomModel, measure_export, measure_opening
from benchmarks.suites import litert, litert_files
from benchmarks.suites.litert_files import measure_modelled
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.extra import missing_for_gpu

TINY = RandomModel(num_layers=2, embed_dim=16, mlp_dim=24, num_heads=2, vocab_size=64)
lacking = missing_for_gpu()


@pytest.fixture
def small(shipped, monkeypatch):
    """Everything small: short texts, few files."""
    for name, value in (("NEW_TOKENS", 6), ("PADDING", 16), ("CAPACITY", 96)):
        monkeypatch.setattr(litert, name, value)
    monkeypatch.setattr(litert_files, "CAPACITY", 96)
    monkeypatch.setattr(litert_files, "GPU_TOKENS", 4)
    return shipped


def run(name, data_folder, **settings):
    suite = SUITES[name]
    count = 1 if suite.prompt_sets else None
    page = measure(name, suite, data_folder, count, progress=False, **settings)
    json.dumps(page.as_dict(), allow_nan=False)
    return page


@pytest.mark.slow
def test_tokens(small, data_folder, monkeypatch):
    monkeypatch.setattr(litert, "SKIPS", "not-here")
    page = run("litert-tokens", data_folder)
    assert "not-here" in page.as_markdown()  # a missing set is reported
    assert page.agree
    files = page.as_dict()["files"]
    assert [file["quantization"] for file in files] == ["float32", "int8", "int4"]
    assert files[0]["replay"]["same_commits"] == files[0]["replay"]["num_steps"]
    assert [row[3] for row in page.sections[1].rows] == ["3 of 3"] * 3


@pytest.mark.slow
def test_speed_of_the_shipped_model(small, data_folder, tmp_path, capsys):
    argv = ["litert-speed", "--data-folder", str(data_folder), "--prompts-per-set", "1", "--json"]
    assert main([*argv, "--quantize", "int8", "--out", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["results"]) == set(figures["trees"]) == {"int8"}
    assert set(figures["step_ratios"]["int8"]) == {"EAGLE's tree", "searched tree"}
    assert figures["over_eagle"]["int8"] > 0
    assert (tmp_path / "litert-speed.md").is_file()


@pytest.mark.slow
def test_speed_of_a_model_and_prompts_of_ones_own(small, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"say": "one, two, one"}\n{"say": "abc"}\n')
    argv = ["litert-speed", "--model", str(small / "demo"), "--head", str(small / "demo-eagle")]
    argv += ["--tree", str(small / "demo-eagle" / "tree.json"), "--field", "say"]
    argv += ["--prompts", str(tmp_path / "prompts.jsonl"), "--quantize", "float32"]
    argv += ["--max-new-tokens", "6", "--out", str(tmp_path), "--json"]
    assert main(argv) == 0
    answer = json.loads(capsys.readouterr().out)
    for flag in ("--model demo", "--head demo-eagle", "--tree tree.json", "--field say"):
        assert flag in answer["command"]
    assert str(tmp_path) not in answer["command"]
    rows = {row["name"]: row for row in answer["results"]["float32"]}
    assert list(rows) == [
        "plain",
        *("EAGLE's tree: draft, verify, commit", "EAGLE's tree: step"),
        *("searched tree: draft, verify, commit", "searched tree: step"),
        "EAGLE-2 from the host",
    ]
    tau = {name: row["overall"]["mean_acceptance_length"] for name, row in rows.items()}
    assert tau["plain"] == 1
    assert all(row["divergences"] == [] for row in rows.values())
    assert min(tau.values()) >= 1
    assert tau["EAGLE's tree: draft, verify, commit"] == tau["EAGLE's tree: step"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "H"}, "of which model, prompts, tree is missing"),
        ({"limit": 3}, "of which model, prompts, head, tree is missing"),
        ({"quantize": "int5"}, "int5"),
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
        ({"chat": True}, "takes no chat"),
        ({"repeats": 2}, "takes no repeats"),
    ],
)
def test_settings_that_do_not_fit_are_refused(small, data_folder, settings, message):
    with pytest.raises(ValueError, match=message):
        measure("litert-speed", SUITES["litert-speed"], data_folder, progress=False, **settings)


def test_a_prompt_that_does_not_fit_is_named(small, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one, two, one"}\n')
    settings = {
        "model": str(small / "demo"),
        "head": str(small / "demo-eagle"),
        "tree": str(small / "demo-eagle" / "tree.json"),
        "prompts": str(tmp_path / "prompts.jsonl"),
        "max_positions": 12,
    }
    with pytest.raises(ValueError, match=r"a prompt has 13 tokens, .* 12 can draft after 10"):
        measure("litert-speed", SUITES["litert-speed"], progress=False, **settings)


@pytest.mark.slow
def test_diffusion_models(small, data_folder, monkeypatch):
    """One of the two is not here."""
    monkeypatch.setattr(litert, "FILLED", {litert.BLOCKS: 8, litert.BOTH_SIDES: 8})
    monkeypatch.setattr(litert, "ROUNDS", (1, 2))
    monkeypatch.setattr(litert, "CANVAS", 64)
    folder = small / litert.BLOCKS
    jaxspec.save(filling_model(litert.BLOCKS, 8), folder)
    try:
        page = run("litert-diffusion", data_folder)
    finally:
        shutil.rmtree(folder)
    assert page.agree
    for rows in (page.figures[f"{litert.BLOCKS}, {name}"] for name in ("float32", "int8")):
        assert [row["drafts"] for row in rows] == [0, 1, 2]
        assert rows[0]["calls_saved"] == 0
        assert rows[0]["cost_ratio"] == 1
    assert f"{litert.BOTH_SIDES}, float32" not in page.figures


@pytest.mark.slow
def test_drafting_without_a_head(small, data_folder, monkeypatch):
    monkeypatch.setattr(litert, "DRAFTED", (1, 2))
    monkeypatch.setattr(litert, "ENDED_EARLY", (2,))
    page = run("litert-skips", data_folder)
    assert page.agree
    results = page.figures["results"]
    assert set(results) == {"float32", "int8", "int4"}
    for plain, *drafted in results.values():
        assert plain.overall.mean_acceptance_length == plain.overall.speedup == 1
        assert all(row.overall.mean_acceptance_length >= 1 for row in drafted)
    nodes = [row[1] for row in page.sections[1].rows]
    assert nodes == ["0", "1", "2", "2", "2", "3", "5", "4"]
    taus = {row.name: row.overall.mean_acceptance_length for row in results["float32"]}
    exits = [f"demo-skips, 2 drafted: {by}" for by in ("step_exit", "draft_1, accept")]
    assert taus[exits[0]] == taus[exits[1]]  # the host's rule is that of the graph
    assert taus["demo-draft: step"] > 2  # an exact copy of the target


@pytest.mark.slow
def test_files(small, data_folder, monkeypatch):
    """Children load no tiny `demo`, so their exports are of random weights."""

    def exported(folder, model, head, config):
        return measure_export(folder, TINY, None, config)

    monkeypatch.setattr(litert_files, "measure_export", exported)
    monkeypatch.setattr(litert_files, "BUNDLES", ("gpu",))
    kept = {name: litert_files.QUANTIZATIONS[name] for name in ("float32", "int4-block32")}
    monkeypatch.setattr(litert_files, "QUANTIZATIONS", kept)
    page = run("litert-files", data_folder)
    (entry,) = page.figures["files"]
    assert set(entry["opened"]) == {"CPU", "CPU, weight cache", *(() if lacking else ("GPU",))}
    assert entry["size"] / entry["weight_bytes"] > 0.9


@pytest.mark.slow
def test_scale(small, data_folder, monkeypatch):
    sizes = (TINY, RandomModel(num_layers=8, embed_dim=512, mlp_dim=1024, num_heads=8))
    monkeypatch.setattr(litert_files, "SIZES", sizes)
    page = run("litert-scale", data_folder)
    assert len(page.figures["exports"]) == 4
    assert page.figures["slopes"]["float32"][0] > 1


@pytest.mark.slow
def test_gpu(small, data_folder):
    if lacking is not None:
        pytest.skip(f"GPU not checked: {lacking}")
    page = run("litert-gpu", data_folder)
    assert page.agree, page.figures["notes"]
    passes = (re.search(r"after (\d+) of (\d+) tokens", note) for note in page.figures["notes"])
    (counts,) = (found.groups() for found in passes if found)
    assert counts[0] == counts[1] != "0"


@pytest.mark.slow
def test_modelled_steps_take_tau_from_the_table():
    found = measure_modelled(TINY, calibrated_table(), "int8", capacity=128, repeats=3)
    plain, eagle, searched = found.steps
    assert (plain.nodes, plain.tau) == (0, 1.0)
    assert (eagle.nodes, round(eagle.tau, 2)) == (25, 4.06)
    assert searched.nodes == len(found.paths) > 0
    assert all(step.step_seconds > 0 for step in found.steps)


@pytest.mark.slow
def test_children_that_fail_are_one_error(tmp_path):
    with pytest.raises(ValueError, match=r"measuring failed \(exit code 1\): .*does not exist"):
        measure_opening(tmp_path / "none.tflite")
    with pytest.raises(ValueError, match="capacity must be at most"):
        measure_export(tmp_path, TINY, None, ExportConfig(capacity=4096))


def test_children_that_hang_are_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint, "_TIMEOUT", 0.01)
    with pytest.raises(ValueError, match="measuring took longer than 0 s"):
        measure_opening(tmp_path / "none.tflite")


def test_a_random_model_has_the_size_it_says():
    model, head = TINY.make()
    again, _ = TINY.make()
    for one, other in zip(*map(jax.tree.leaves, (model.params, again.params)), strict=True):
        assert (one == other).all()
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 24) + 2 * 64 * 16 + 5 * 16
    assert footprint._num_weights(model, None) == weights
    assert head.config.num_layers == 1


def test_models_that_are_missing_are_named(tmp_path, monkeypatch, data_folder):

    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec")
    with pytest.raises(ValueError, match="demo, demo-eagle"):
        measure("litert-tokens", SUITES["litert-tokens"], data_folder)
    suite = dataclasses.replace(SUITES["litert-skips"], needs=("demo-skips",))
    with pytest.raises(ValueError, match="demo-skips"):
        measure("litert-skips", suite, data_folder)
