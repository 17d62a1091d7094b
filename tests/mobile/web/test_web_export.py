"""Files that `export web` writes, its refusals, and the use of its page's profile."""

import dataclasses
import hashlib
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.cli import main
from jaxspec.core.tree import chain, tree_from_paths
from jaxspec.drafters import Eagle
from jaxspec.mobile import ExportConfig, MobileModel, calibration, export, web
from jaxspec.mobile.acceptance import accept_greedy
from jaxspec.mobile.export import calibrated
from jaxspec.mobile.profile import read_web_profile
from jaxspec.tuning import LatencyProfile, Timing
from tests.measure.models import TEMPLATE, tiny_model
from tests.mobile.web.models import TREES, page_model, table_of


@pytest.mark.parametrize("levels", [4, 6])
def test_further_rows_are_zeros(levels):
    """A tree that gives more rows than it needs decides the same."""
    tree = tree_from_paths(((0,), (1,), (0, 0), (0, 0, 0)))
    tokens = jnp.asarray([5, 1, 2, 3, 4], jnp.int32)
    choices = jnp.asarray([1, 3, 9, 8, 7], jnp.int32)
    found = jax.tree.map(np.asarray, accept_greedy(tree, tokens, choices, levels))
    assert found.count == 3
    assert found.last == 8
    assert found.tokens.tolist() == [1, 3, 8, *[0] * (levels - 3)]
    assert found.path.argmax(1)[:3].tolist() == [0, 1, 3]
    assert not found.path[3:].any()


def test_trees_are_few_small_and_include_a_chain():
    table = table_of(page_model()[1])
    trees = web.choose_trees(table)
    assert 2 <= len(trees) <= web.MAX_TREES
    assert [len(paths) for paths in trees] == sorted(len(paths) for paths in trees)
    assert chain(4).parents.tolist() in [tree_from_paths(paths).parents.tolist() for paths in trees]
    assert max(map(len, trees)) <= 8


def test_the_tree_for_a_device_is_among_them():
    """A larger tree than the usual ones pays if a wide pass costs nothing."""
    flat = LatencyProfile(
        "flat", (Timing(1, 1.0), Timing(16, 1.01)), (Timing(1, 0.01), Timing(4, 0.01))
    )
    table = table_of(page_model()[1])
    assert max(map(len, web.choose_trees(table, flat))) > 8
    given = ((0,), (1,), (2,))
    assert given in web.choose_trees(table, given=given)


def test_a_chat_is_described_by_what_surrounds_messages():
    tokenizer = tiny_model().tokenizer
    found = web.chat_affixes(tokenizer)
    assert found == {"open": "u:", "reply": " a:", "turn": " u:"}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    joined = "{open}one{reply}two{turn}three{reply}".format(**found)
    assert joined == tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        None,
        TEMPLATE + "{{ messages | length }}",  # earlier text changes with later messages
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'] | upper }}",
    ],
)
def test_other_templates_are_left_out(template):
    templates = {} if template is None else {"default": template}
    assert web.chat_affixes(tiny_model(templates).tokenizer) is None


def test_the_folder_is_whole(page_of):
    page = page_of("int8")
    profile, files = page.profile, {path.name for path in page.folder.iterdir()}
    assert {*web.PAGE_FILES, "model.tflite", "kit.tflite", "profile.json"} <= files
    assert {"manifest.json", "tokenizer.json", "vendor"} <= files
    assert set(profile["files"]) == {"model.tflite", "kit.tflite", "tokenizer.json"}
    for package in ("litert", "tokenizers", "hashes"):
        assert (page.folder / "vendor" / package / "LICENSE").is_file()
    for name, entry in profile["files"].items():
        data = (page.folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert [len(tree["paths"]) for tree in profile["trees"]] == [len(paths) for paths in TREES]
    for tree in profile["trees"]:
        paths = tuple(map(tuple, tree["paths"]))
        assert tree["parents"] == tree_from_paths(paths).parents.tolist()
        assert tree["tokens_per_step"] == pytest.approx(table_of(page_model()[1]).tau(paths))
        assert tree["depth"] <= profile["depth"]
    assert profile["chat"] == {"open": "u:", "reply": ".a:", "turn": ".u:"}
    assert profile["examples"] == [], "its 48 characters hold no capitals"
    assert profile["heap_bytes"] > profile["files"]["model.tflite"]["bytes"]


def test_the_self_test_has_a_whole_path_of_every_tree(page_of):
    page = page_of("int8")
    test, file = page.profile["self_test"], MobileModel(page.folder / "model.tflite", num_threads=1)
    assert set(test["steps"]) == {"decode", *(tree["signature"] for tree in page.profile["trees"])}
    plain = file.generate(test["prompt"], 40, ()).tokens.tolist()
    for name, tokens in test["steps"].items():
        assert tokens == plain[: len(tokens)], name


def test_a_page_loads_nothing_from_elsewhere(page_of):
    folder = page_of("int8").folder
    for name in web.PAGE_FILES:
        text = (folder / name).read_text()
        places = [word for word in ("http://", "https://", "//cdn") if word in text]
        # Names of XML's vocabulary are no addresses.
        assert places in ([], ["http://"]), name
        assert text.count("http://") == text.count("http://www.w3.org/2000/svg"), name
        assert "innerHTML" not in text
        assert "eval(" not in text
    assert '"@litertjs/' not in (folder / "vendor/litert/index.js").read_text()


def timings(path, **changes):
    names = ("decode", "verify_2", "commit_2", "verify_4", "commit_4", "absorb", "draft_1")
    entry = {
        "jaxspec_web": 1,
        "model": "demo",
        "quantization": "int8",
        "levels": 3,
        "device": "a browser",
        "runtime": "LiteRT.js, wasm, 2 threads",
        "seconds": {name: [0.001 * (1 + at), 0.0001] for at, name in enumerate(names)},
        **changes,
    }
    path.write_text(json.dumps(entry))
    return path


def test_what_a_page_measured_is_a_profile(tmp_path, capsys):
    source = timings(tmp_path / "measured.json")
    profile = read_web_profile(source)
    assert [(each.size, each.seconds) for each in profile.target] == [
        (1, pytest.approx(0.001)),
        (2, pytest.approx(0.005)),
        (4, pytest.approx(0.009)),
    ]
    assert [each.size for each in profile.first_draft] == [1, 3]
    assert profile.device == "a browser"
    assert main(["tune", "profile", "--import", str(source)]) == 0
    assert "wasm, 2 threads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jaxspec_web": 2}, "another version"),
        ({"seconds": {"decode": 3}}, r"is damaged .seconds\['decode'\] must be 2 entries, got 3"),
        ({"seconds": {"decode": ["NaN", 0]}}, "is damaged .seconds.* must be a finite number"),
        ({"levels": 1.5}, "is damaged .levels must be a whole number, got 1.5"),
        ({"model": None}, "is damaged .model must be a text, got None"),
        ({"seconds": {}}, "was not timed|was timed"),
    ],
)
def test_other_measurements_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_web_profile(timings(tmp_path / "measured.json", **changes))


def test_a_page_and_its_kit_are_calibrated_once(tmp_path, monkeypatch):
    """Both files hold the same numbers, and the texts are written and read once."""
    found = []

    def counted(*arguments):
        found.append(calibrated(*arguments))
        return found[-1]

    for module in (web, sys.modules["jaxspec.mobile.export"]):
        monkeypatch.setattr(module, "calibrated", counted)
    monkeypatch.setattr(web, "vendor", lambda target: target.mkdir())
    for name in ("find_self_test", "_payload"):
        monkeypatch.setattr(web, name, lambda path: {})
    for name, value in (("NUM_TEXTS", 6), ("LENGTH", 24)):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(web, "_KIT_TOKENS", (2,))
    monkeypatch.setattr(web, "_KIT_NODES", (1,))
    model, head = page_model()
    config = ExportConfig(capacity=64, prefill=(8,), quantization="int4-calibrated")
    web.export_web(model, tmp_path, Eagle.of(head), TREES[:1], table_of(head), config)
    assert len(found) == 1
    files = [(tmp_path / name).read_bytes() for name in ("model.tflite", "kit.tflite")]
    assert found[0].rounded
    for each in found[0].rounded.values():
        assert all(each.numbers.tobytes() in data for data in files)


def test_without_npm_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=r"install Node\.js"):
        web.vendor(tmp_path)


def test_a_failing_npm_is_quoted(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'no such registry' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ValueError, match="no such registry"):
        web.vendor(tmp_path / "vendor")


def test_pages_need_a_head_and_a_tokenizer(tmp_path):
    model, head = page_model()
    table = table_of(head)
    silent = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer"):
        web.export_web(silent, tmp_path, Eagle.of(head), TREES, table)
    with pytest.raises(ValueError, match="only an EAGLE head"):
        export(model, tmp_path, config=ExportConfig(capacity=32, prefill=(8,), trees=TREES))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["web", "demo"], "are required: --drafter"),
        (["tflite", "demo", "out", "--profile", "x"], "unknown flag --profile"),
        (
            ["web", "demo", "p", "--drafter", "eagle:head=h", "--bundle", "gpu"],
            "unknown flag --bundle",
        ),
        (
            ["web", "demo", "p", "--drafter", "eagle:head=h", "--threads", "1"],
            "unknown flag --threads",
        ),
        (
            ["kit", "demo", "p", "--drafter", "eagle:head=h", "--verify", "4"],
            "unknown flag --verify",
        ),
    ],
)
def test_flags_of_other_files_are_unknown(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(["export", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
