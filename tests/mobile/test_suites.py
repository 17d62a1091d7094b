"""The suites `litert-NAME` on a tiny model in place of the shipped one: what their pages say."""

import json
import shutil

import jax
import pytest

import jaxspec
from jaxspec.bench.page import write_part
from jaxspec.checkpoint import hub, save_eagle
from jaxspec.cli import main
from jaxspec.models import EagleHead, init_eagle_params
from jaxspec.trees import calibrated_table, save_acceptance
from tests.bench.models import filling_model, tiny_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import footprint, suites
from jaxspec.mobile.export import ExportConfig
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.footprint import RandomModel, measure_export, measure_opening
from jaxspec.mobile.modelled import measure_modelled
from jaxspec.mobile.suites import LITERT_SUITES, measure_litert

TINY = RandomModel(num_layers=2, embed_dim=16, mlp_dim=24, num_heads=2, vocab_size=64)
lacking = missing_for_gpu()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A package folder with a tiny `demo` and head, and the prompts of all suites."""
    root = tmp_path_factory.mktemp("root")
    model = tiny_model()
    jaxspec.save(model, root / "checkpoints" / "demo")
    config = model.config.replace(num_layers=1, layer_types=())
    head = EagleHead(init_eagle_params(config, False, jax.random.key(0)), config, False)
    folder = root / "checkpoints" / "demo-eagle"
    save_eagle(head, folder)
    (folder / "tree.json").write_text('{"paths": [[0], [1], [0, 0]]}')
    save_acceptance(calibrated_table(), folder / "acceptance.json")
    row = {"question": "1 + 1?", "prompt": "def f", "text": "Add.", "test_list": ["f(1)"]}
    for suite in LITERT_SUITES.values():
        for group in suite.prompt_sets:
            path = root / "eval" / group.file.removesuffix(".gz")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**row, "turns": ["2 + 2?"]}) + "\n")
    return root


@pytest.fixture
def shipped(root, monkeypatch):
    """Everything small: short texts, few files, prompts that are not compressed."""
    monkeypatch.setattr(hub, "_PACKAGE", root / "jaxspec")
    for name, value in (("NEW_TOKENS", 6), ("_PADDING", 16), ("_SLOTS", 96), ("_GPU_TOKENS", 4)):
        monkeypatch.setattr(suites, name, value)
    for name, suite in LITERT_SUITES.items():
        groups = tuple(g._replace(file=g.file.removesuffix(".gz")) for g in suite.prompt_sets)
        monkeypatch.setitem(suites.LITERT_SUITES, name, suite._replace(prompt_sets=groups))
    return root / "eval"


@pytest.mark.slow
def test_tokens(shipped):
    parts = []
    measured = measure_litert("litert-tokens", shipped, 1, parts.append)
    assert measured.as_it_should
    assert measured.markdown.startswith(f"# {LITERT_SUITES['litert-tokens'].title}\n")
    assert "jaxspec bench --suite litert-tokens --prompts-per-set 1" in measured.markdown
    assert "demo-skips is not here" in measured.markdown
    assert "3 of 3" in measured.markdown
    files = measured.figures["files"]
    assert [file["quantization"] for file in files] == ["float32", "int8", "int4"]
    assert files[0]["replay"]["same_commits"] == files[0]["replay"]["num_steps"]
    json.dumps(measured.figures)


@pytest.mark.slow
def test_speed_by_its_command(shipped, tmp_path, capsys):
    out = tmp_path / "page.md"
    write_part("# Other\n\nkept", out)
    argv = ["bench", "--suite", "litert-speed", "--data-folder", str(shipped), "--json"]
    assert main([*argv, "--prompts-per-set", "1", "--out", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["results"]) == set(figures["trees"]) == {"int4", "int8"}
    page = out.read_text()
    assert page.startswith("# Other\n\nkept\n\n# Speculative decoding on LiteRT\n")
    assert page.count("step / (draft + verify + commit) = ") == 4
    assert "19.18 tokens/s" in page


@pytest.mark.slow
def test_diffusion_models(shipped, root, monkeypatch):
    """One of the two is not here, which is said."""
    monkeypatch.setattr(suites, "_FILLED", {suites.BLOCKS: 8, suites.BOTH_SIDES: 8})
    monkeypatch.setattr(suites, "_ROUNDS", (1, 2))
    monkeypatch.setattr(suites, "_CANVAS", 64)
    folder = root / "checkpoints" / suites.BLOCKS
    jaxspec.save(filling_model(suites.BLOCKS, 8), folder)
    try:
        measured = measure_litert("litert-diffusion", shipped, 1)
    finally:
        shutil.rmtree(folder)
    assert measured.as_it_should
    assert f"{suites.BOTH_SIDES} is not here, so left out." in measured.markdown
    for rows in (measured.figures[f"{suites.BLOCKS}, {name}"] for name in ("float32", "int8")):
        assert [row["drafts"] for row in rows] == [0, 1, 2]
        assert rows[0]["calls_saved"] == 0
        assert rows[0]["cost_ratio"] == 1


@pytest.mark.slow
def test_drafting_with_skipped_layers(shipped, root, monkeypatch):
    monkeypatch.setattr(suites, "_DRAFTED", (1, 2))
    skips = {"num_layers": 1, "attention": [0], "mlp": []}
    found = {**skips, "num_speculative_tokens": 2, "threshold": 0.5}
    folder = root / "checkpoints" / suites.SKIPS
    folder.mkdir()
    (folder / "skips.json").write_text(json.dumps(found))
    parts = []
    try:
        measured = measure_litert("litert-skips", shipped, 1, parts.append)
    finally:
        shutil.rmtree(folder)
    assert measured.as_it_should
    assert len(parts) == LITERT_SUITES["litert-skips"].num_parts - 3 * 2
    assert set(measured.figures["results"]) == {"float32", "int8", "int4"}
    for plain, *drafted in measured.figures["results"].values():
        assert plain["tau"] == plain["speedup"] == 1
        assert [row["nodes"] for row in drafted] == [1, 2]
        assert all(row["tau"] >= 1 for row in drafted)
    assert "bonus token included" in measured.markdown
    json.dumps(measured.figures)


@pytest.mark.slow
def test_files(shipped, monkeypatch):
    """Children load no tiny `demo`, so their exports are of random weights."""

    def exported(folder, model, head, config):
        return measure_export(folder, TINY, None, config)

    monkeypatch.setattr(suites, "measure_export", exported)
    monkeypatch.setattr(suites, "BUNDLES", ("gpu",))
    kept = {name: suites.QUANTIZATIONS[name] for name in ("float32", "int4-block32")}
    monkeypatch.setattr(suites, "QUANTIZATIONS", kept)
    measured = measure_litert("litert-files", shipped, 1)
    (entry,) = measured.figures["files"]
    places = {"CPU", "CPU, weight cache", *(() if lacking else ("GPU",))}
    assert set(entry["opened"]) == places
    assert entry["size"] / entry["weight_bytes"] > 0.9
    assert "bonus token included" in measured.markdown
    assert lacking is None or lacking in measured.markdown


@pytest.mark.slow
def test_scale(shipped, monkeypatch):
    sizes = (TINY, RandomModel(num_layers=8, embed_dim=512, mlp_dim=1024, num_heads=8))
    monkeypatch.setattr(suites, "_SIZES", sizes)
    measured = measure_litert("litert-scale", shipped, 1)
    assert len(measured.figures["exports"]) == 4
    assert measured.figures["slopes"]["float32"][0] > 1


@pytest.mark.slow
def test_gpu(shipped):
    if lacking is not None:
        pytest.skip(f"GPU not checked: {lacking}")
    measured = measure_litert("litert-gpu", shipped, 1)
    assert measured.as_it_should, measured.markdown
    assert "16 of 16 tokens" in measured.markdown or "8 of 8 tokens" in measured.markdown


@pytest.mark.slow
def test_modelled_steps_take_tau_from_the_table():
    table = calibrated_table()
    found = measure_modelled(TINY, table, "int8", slots=128, repeats=3)
    plain, eagle, searched = found.steps
    assert (plain.nodes, plain.tau) == (0, 1.0)
    assert (eagle.nodes, round(eagle.tau, 2)) == (25, 4.06)
    assert searched.nodes == found.search.best_draft.nodes > 0
    assert all(step.step_seconds > 0 for step in found.steps)


@pytest.mark.slow
def test_children_that_fail_are_one_error(tmp_path):
    with pytest.raises(ValueError, match=r"measuring failed \(exit code 1\): .*does not exist"):
        measure_opening(tmp_path / "none.tflite")
    with pytest.raises(ValueError, match="slots must be at most"):
        measure_export(tmp_path, TINY, None, ExportConfig(slots=4096))


def test_children_that_hang_are_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint, "_TIMEOUT", 0.01)
    with pytest.raises(ValueError, match="measuring took longer than 0 s"):
        measure_opening(tmp_path / "none.tflite")


def test_a_random_model_has_the_size_it_says():
    model, head = TINY.make()
    again, _ = TINY.make()
    for one, other in zip(*map(jax.tree.leaves, (model.params, again.params)), strict=True):
        assert (one == other).all()
    assert footprint._num_weights(model, None) == 2 * (4 * 16 * 16 + 3 * 16 * 24) + 2 * 64 * 16 + (
        5 * 16
    )
    assert head.config.num_layers == 1


def test_what_a_suite_lacks_is_named(shipped, monkeypatch, tmp_path, capsys):
    argv = ["bench", "--suite", "litert-tokens", "--out", str(tmp_path / "x.md")]
    assert main([*argv, "--prompts-per-set", "0"]) == 2
    assert "prompts_per_set must be at least 1" in capsys.readouterr().err
    assert main([*argv, "--data-folder", str(tmp_path)]) == 2
    assert "gsm8k/test.jsonl is not there" in capsys.readouterr().err
    monkeypatch.setattr(hub, "_PACKAGE", tmp_path / "jaxspec")
    assert main(argv) == 2
    assert "measures demo with the head demo-eagle" in capsys.readouterr().err
