"""The page in headless Chromium, by clicks and keys: what it shows, stores, sends and refuses."""

import contextlib
import functools
import hashlib
import http.server
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.cli import main
from jaxspec.mobile import MobileModel
from jaxspec.mobile.loops import Plain, Steps
from jaxspec.mobile.web import choose_trees
from jaxspec.tuning import load_profile, search_tree
from tests.mobile.web.conftest import served
from tests.mobile.web.models import CAPACITY, page_model, table_of

TEXT = "12 + 30 is 42, so"
NUM_TOKENS = 64
pytestmark = pytest.mark.slow


def bare_server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Any web server, which sends none of our headers."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


@pytest.fixture(scope="session")
def page(page_of):
    return page_of("int8")


@pytest.fixture(scope="session")
def url(page) -> Iterator[str]:
    with served(page.folder) as address:
        yield address


@pytest.fixture
def changed(page, tmp_path):
    """The address of a copy of the page, whose profile and files a test changes."""
    with contextlib.ExitStack() as stack:

        def change(changes=None, files=None, server=None) -> str:
            folder = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
            shutil.copytree(page.folder, folder)
            profile = page.profile
            for name, value in (changes or {}).items():
                profile[name] = value
            (folder / "profile.json").write_text(json.dumps(profile))
            for name, data in (files or {}).items():
                if data is None:
                    (folder / name).unlink()
                else:
                    (folder / name).write_bytes(data)
            return stack.enter_context(served(folder, server))

        yield change


def tokens_here(page, prompt, num_tokens, signature=None):
    file = MobileModel(page.folder / "model.tflite", num_threads=1)
    loop = Plain if signature is None else partial(Steps, signature=signature)
    return file.generate(prompt, num_tokens, (), loop=loop).tokens.tolist()


def bad(answer) -> str:
    """The one thing that the page says, and that it stays usable."""
    (said,) = [line for line in answer["notices"] if "COOP" not in line]
    assert not answer["problems"]
    return said


@pytest.mark.parametrize("accelerator", ["wasm", "webgpu"])
def test_a_visit(browser, page_of, accelerator, tmp_path):
    """Loads, tests itself, measures, answers as Python does, is stopped, continues, comes back.

    In float32, as int8 gives other numbers on a GPU, and where a text is read again.
    """
    page = page_of("float32")
    with served(page.folder) as url:
        visit(browser, page, url, accelerator, tmp_path)


def visit(browser, page, url, accelerator, tmp_path):
    encode = page.model.tokenizer.encode
    trees = [tree["signature"] for tree in page.profile["trees"]]
    texts: list[dict[str, Any]] = [
        {"text": TEXT, "choice": choice, "tokens": NUM_TOKENS, "fresh": True}
        for choice in ("decode", *trees, "auto")
    ]
    texts.append({"text": " and on", "choice": trees[0], "tokens": 24})  # a second turn
    texts.append(
        {"text": "a long one", "choice": "decode", "tokens": 900, "stopAfter": 4, "fresh": True}
    )
    chat = {"text": "what is it?", "mode": "chat", "tokens": 16, "choice": trees[0], "fresh": True}
    texts += [chat, {**chat, "text": "and that?", "fresh": False}]
    download = tmp_path / "profile.json"
    seen = browser("visit", url, accelerator=accelerator, texts=texts, download=str(download))
    assert not seen["problems"]
    assert min(seen["paints"]) < 1000  # milliseconds
    first = seen["first"]
    assert first["accelerator"] == accelerator
    assert first["from"] == "network"
    assert "passed" in first["test"]
    assert first["candidates"] == 1 + len(trees)
    assert first["overflow"] <= 0, "a narrow screen scrolls sideways"
    assert first["notices"] == []
    assert first["folded"], "the model's controls are folded away"
    assert seen["errors"] == [], "lines of LiteRT's log are no errors"

    *alike, second, stopped, chat_first, chat_second = seen["texts"]
    expected = tokens_here(page, encode(TEXT), NUM_TOKENS)
    for said in alike:
        assert said["ids"] == expected
        assert said["text"] == page.model.tokenizer.decode(expected)
        assert said["reason"] == "length"
    assert alike[0]["drafted"] == 0
    assert all(said["drafted"] > 0 for said in alike[1:-1])
    longer = [*encode(TEXT), *expected, *encode(" and on")]
    assert second["ids"] == tokens_here(page, longer, 24, trees[0])
    assert stopped["reason"] == "stopped"
    assert 0 < len(stopped["ids"]) < 900
    asked = encode("u:what is it?.a:")
    assert chat_first["ids"] == tokens_here(page, asked, 16, trees[0])
    asked += [*chat_first["ids"], *encode(".u:and that?.a:")]
    assert chat_second["ids"] == tokens_here(page, asked, 16, trees[0])
    assert all(said["elements"] == 0 for said in seen["texts"])

    panel = seen["panel"]
    assert panel["nodes"] == 1 + page.profile["trees"][0]["nodes"]
    assert panel["bars"] == 1 + page.profile["depth"]
    assert "times plain decoding" in panel["speed"]

    models = [address for _, address in seen["requests"] if address.endswith("model.tflite")]
    assert len(models) == 1, "the second visit reads it from storage"
    assert seen["second"]["from"] == "storage"
    assert "download" in seen["deleted"]
    nothing_sent(seen["requests"], url)

    imported = tmp_path / "imported.json"
    assert main(["tune", "profile", "--import", str(download), "--out", str(imported)]) == 0
    profile = load_profile(imported)
    assert accelerator in profile.runtime
    assert {timing.size for timing in profile.target} == {1, 2, 4}
    table = table_of(page_model()[1])
    here = search_tree(table, profile, max_nodes=3).best_draft.paths
    assert here in choose_trees(table, profile), "the next export has the tree for this device"


def nothing_sent(requests, url):
    """Files of the page are fetched, and nothing else happens."""
    for method, address in requests:
        parts = urlsplit(address)
        if parts.scheme in ("data", "blob"):
            continue
        assert (method, f"{parts.scheme}://{parts.netloc}/") == ("GET", url)
        assert not parts.query


def test_plain_decoding_is_picked_where_it_is_fastest(browser, page, changed):
    """The tiny model's calls all cost about the same, so a step is made out to give less."""
    trees = page.profile["trees"]
    for tokens, best in ((0.1, "decode"), (90.0, trees[-1]["signature"])):
        described = [{**tree, "tokens_per_step": 0.1} for tree in trees]
        described[-1]["tokens_per_step"] = tokens
        seen = browser("load", changed({"trees": described}))
        assert seen["best"] == best


def test_a_damaged_model_is_refused(browser, page, changed):
    data = bytearray((page.folder / "model.tflite").read_bytes())
    data[len(data) // 2] ^= 1
    seen = browser("load", changed(files={"model.tflite": bytes(data)}))
    assert "checksum" in bad(seen)
    assert seen["load"] == "Try again"
    assert seen["retry"]


def test_a_short_file_is_refused(browser, page, changed):
    data = (page.folder / "model.tflite").read_bytes()
    seen = browser("load", changed(files={"model.tflite": data[: len(data) // 2]}))
    assert "it ended after" in bad(seen)
    assert seen["retry"]


def test_a_failed_download_is_said(browser, changed):
    seen = browser("load", changed(files={"model.tflite": None}))
    assert "could not be downloaded: the server answered 404" in bad(seen)
    assert seen["retry"]


def test_no_profile_is_said(browser, changed):
    seen = browser("load", changed(files={"profile.json": None}, server=bare_server))
    assert "profile.json, which describes the model, cannot be read" in bad(seen)


@pytest.mark.parametrize("accelerator", ["wasm", "webgpu"])
def test_a_self_test_that_differs_is_believed(browser, page, changed, accelerator):
    """Wrong on wasm there is nothing left; wrong on WebGPU wasm is tried, and it is wrong here."""
    test = page.profile["self_test"]
    name = page.profile["trees"][0]["signature"]
    tokens = [*test["steps"][name]]
    tokens[2] = (tokens[2] + 1) % 48
    steps = {**test["steps"], name: tokens}
    seen = browser(
        "load", changed({"self_test": {**test, "steps": steps}}), accelerator=accelerator
    )
    said = [line for line in seen["notices"] if "self-test failed" in line]
    assert f"of {name} gave token" in said[0]
    assert "cannot be trusted" in said[-1]
    if accelerator == "webgpu":
        assert "continues with wasm" in said[0]
        assert len(said) == 2
    assert seen["retry"]


def test_no_self_test_is_said(browser, changed):
    seen = browser("load", changed({"self_test": None}))
    assert "no self-test" in bad(seen)
    assert seen["ready"]


def test_without_webgpu_the_cpu_does_it(browser, url):
    seen = browser("load", url, accelerator="auto", noWebGpu=True)
    assert "no WebGPU" in bad(seen)
    assert seen["accelerator"] == "wasm"
    assert "threads" in seen["facts"] or os.cpu_count() == 1


def test_without_headers_one_thread_does_it(browser, page):
    with served(page.folder, bare_server) as address:
        seen = browser("load", address)
    (said,) = seen["notices"]
    assert "SharedArrayBuffer" in said
    assert seen["ready"]
    assert "threads" not in seen["facts"]


def test_an_insecure_address_has_no_storage(browser, url):
    """As a phone sees a page of another machine over http."""
    seen = browser("load", url.replace("127.0.0.1", "phone.test"), accelerator="auto")
    said = " ".join(seen["notices"])
    assert "secure addresses only" in said
    assert "SharedArrayBuffer" in said
    assert "no storage" in said
    assert seen["ready"]


def test_full_storage_is_said(browser, url):
    seen = browser("load", url, quota=20000)
    assert "storage is full" in bad(seen)
    assert seen["ready"]


def test_too_much_for_the_heap_is_refused_beforehand(browser, changed):
    seen = browser("load", changed({"heap_bytes": 3 << 30}))
    said = bad(seen)
    assert "3221 MB" in said
    assert "2080 MB" in said
    assert not [address for _, address in seen["requests"] if address.endswith(".tflite")]


def test_bad_text_leaves_the_page_usable(browser, page, url):
    texts = [
        {"text": "a" * (CAPACITY + 44)},
        {"text": "what about \u00fc and \u4e2d?"},
        {"text": "half \ud83d of it"},
        {"text": "<img src=x onerror=alert>"},
        {"text": "fine", "tokens": 8},
    ]
    seen = browser("load", url, texts=texts)
    long, unknown, half, markup, fine = seen["texts"]
    assert f"{CAPACITY + 44} tokens" in long["notices"][0]
    assert f"below {CAPACITY}" in long["notices"][0]
    assert "no tokens for" in unknown["notices"][0]
    assert '"\u00fc", "\u4e2d"' in unknown["notices"][0]
    assert half["notices"]
    assert '"<"' in markup["notices"][0]
    assert not seen["problems"]
    assert len(fine["ids"]) == 8
    assert seen["still"]


def test_a_damaged_tokenizer_is_refused(browser, page, changed):
    data = (page.folder / "tokenizer.json").read_bytes().replace(b'"a"', b'"z"', 1)
    seen = browser("load", changed(files={"tokenizer.json": data}))
    said = bad(seen)
    assert "tokenizer.json" in said
    assert "checksum" in said
    assert seen["retry"]


def test_a_missing_runtime_is_said(browser, page, changed):
    url = changed(files={path: None for path in litert_files(page)})
    seen = browser("load", url)
    assert "LiteRT.js could not be started" in bad(seen)
    assert seen["retry"]


def litert_files(page) -> list[str]:
    wasm = page.folder / "vendor" / "litert" / "wasm"
    return [str(path.relative_to(page.folder)) for path in wasm.iterdir()]


def test_without_relaxed_simd_one_thread_does_it(browser, page, changed):
    """As in Safari: LiteRT.js then refuses threads, whatever the server sends."""
    refuse = b"""
    const given = WebAssembly.instantiate;
    WebAssembly.instantiate = (bytes, ...rest) => (bytes.length < 64 && bytes.includes(123)
      ? Promise.reject(new Error("no relaxed SIMD")) : given(bytes, ...rest));
    """
    worker = (page.folder / "worker.js").read_bytes()
    seen = browser("load", changed(files={"worker.js": refuse + worker}))
    (said,) = seen["notices"]
    assert "relaxed SIMD" in said
    assert seen["ready"]
    assert "threads" not in seen["facts"]
    assert any("compat" in address for _, address in seen["requests"])


def test_denied_storage_is_said(browser, page, changed):
    deny = b"""
    Object.defineProperty(self, "caches", {get() { throw new DOMException("", "SecurityError"); }});
    """
    worker = (page.folder / "worker.js").read_bytes()
    seen = browser("load", changed(files={"worker.js": deny + worker}), noStorage=True)
    assert "no storage" in bad(seen)
    assert seen["ready"]


def test_a_damaged_stored_file_is_downloaded_again(browser, page, url):
    visits = [{"url": url, "damage": True}, {"url": url}, {"url": url}]
    seen = browser("again", url, visits=visits)
    assert [visit["from"] for visit in seen["visits"]] == ["network", "network", "storage"]
    assert not seen["problems"]


def test_pages_of_one_server_keep_their_own_models(browser, page, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(page.folder, tmp_path / name)
    with served(tmp_path, bare_server) as address:
        one, two = (f"{address}{name}/" for name in ("one", "two"))
        visits = [{"url": one}, {"url": two}, {"url": one, "remove": True}, {"url": two}]
        seen = browser("again", one, visits=visits)["visits"]
    assert [visit["from"] for visit in seen] == ["network", "network", "storage", "storage"]


def test_an_example_begins_a_text_of_its_own(browser, page, changed):
    """Offered before the model is there, and usable then; bars are shares, and the tree scrolls."""
    examples = [{"mode": "chat", "text": "what is 6 * 7?"}, {"mode": "text", "text": TEXT}]
    tree = page.profile["trees"][-1]["signature"]
    texts = [{"text": "something else", "choice": tree, "tokens": NUM_TOKENS}]
    seen = browser("example", changed({"examples": examples}), texts=texts, example=2)
    assert seen["before"] == [[each["text"], True] for each in examples]
    assert seen["after"] == [[each["text"], False] for each in examples]
    assert seen["asked"] == [TEXT]
    expected = tokens_here(page, page.model.tokenizer.encode(TEXT), NUM_TOKENS)
    assert seen["ids"] == expected
    for name in ("histogram", "time"):
        assert sum(seen["widths"][name]) == pytest.approx(100, abs=0.5)
    assert max(seen["widths"]["candidates"]) == 100
    assert seen["scrolls"] > 0
    assert seen["scrollBar"] > 4  # pixels
    assert not seen["problems"]


def test_it_looks_well_on_any_screen_and_is_used_without_a_mouse(browser, page, url):
    """WCAG 2.2 AA: contrast of text 4.5, of what marks a control or a bar 3; targets 24 pixels."""
    deepest = max(page.profile["trees"], key=lambda tree: tree["nodes"])["signature"]
    texts = [{"text": TEXT, "choice": deepest, "tokens": NUM_TOKENS}]
    seen = browser("look", url, texts=texts, widths=[320, 1200])
    assert len(seen["looks"]) == 4
    for look in seen["looks"]:
        where = (look["width"], look["scheme"])
        assert len(look["texts"]) > 40, where
        assert [each for each in look["texts"] if each["contrast"] < 4.5] == [], where
        assert [each for each in look["texts"] if each["size"] < 11] == [], where
        assert [each for each in look["edges"] if each["contrast"] < 3] == [], where
        assert look["unnamed"] == look["small"] == [], where
        assert look["overflow"] <= 0, where
    controls = {"accelerator", "delete", "log", "prompt", "send", "new", "mode", "tokens"}
    controls |= {"choice", "tree", "measure", "profile"}
    assert controls - set(seen["reached"]) == set()


def test_the_policy_refuses_what_the_page_does_not_do(browser, url):
    elsewhere = url.replace("127.0.0.1", "phone.test")
    seen = browser("policy", url, elsewhere=elsewhere)
    assert seen["page"] == seen["worker"] == "connect-src"
    assert not seen["markup"]["ran"]
    assert set(seen["markup"]["found"]) == {"script-src-elem", "script-src-attr", "style-src-attr"}


def test_what_the_model_writes_is_text(browser, page, changed):
    """Its tokens are made to read as markup; those of the prompt stay."""
    source = json.loads((page.folder / "tokenizer.json").read_text())
    vocabulary = source["model"]["vocab"]
    source["model"]["vocab"] = {
        text if text in {*TEXT, "\u0120"} else f"<b>{text}</b>": place
        for text, place in vocabulary.items()
    }
    data = json.dumps(source).encode()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files = {**page.profile["files"], "tokenizer.json": entry}
    url = changed({"files": files}, {"tokenizer.json": data})
    tree = page.profile["trees"][0]["signature"]
    seen = browser("load", url, texts=[{"text": TEXT, "choice": tree, "tokens": NUM_TOKENS}])
    (said,) = seen["texts"]
    assert said["text"].count("<b>") > 10
    assert said["elements"] == 0


def test_a_failure_in_the_middle_is_survived(browser, page, changed):
    engine = (page.folder / "engine.js").read_text()
    call = "const outputs = await signature.run(given);"
    assert engine.count(call) == 1
    broken = engine.replace(call, f"if (self.broken) throw new Error('out of memory'); {call}")
    url = changed(files={"engine.js": broken.encode()})
    seen = browser("broken", url, texts=[{"text": TEXT, "tokens": 24}])
    assert "out of memory" in seen["refused"]["notices"][0]
    assert seen["prompt"] == TEXT
    assert seen["second"]["ids"] == seen["first"]["ids"]
    assert "begins anew" in seen["divider"]


def test_another_accelerator_is_taken_and_remembered(browser, page_of):
    page = page_of("float32")
    texts = [{"text": TEXT, "choice": page.profile["trees"][0]["signature"], "tokens": 24}]
    with served(page.folder) as url:
        seen = browser("switch", url, texts=texts)
    expected = tokens_here(page, page.model.tokenizer.encode(TEXT), 24)
    assert seen["switched"]["accelerator"] == seen["again"]["accelerator"] == "webgpu"
    assert seen["switched"]["ids"] == expected
    assert seen["again"]["from"] == "storage"
    assert seen["again"]["alike"], "what was measured is kept"
    assert not seen["problems"]


def test_a_gpu_in_software_is_left_out(browser, url):
    seen = browser("load", url, accelerator="auto")
    assert "computed by the CPU" in bad(seen)
    assert seen["accelerator"] == "wasm"
