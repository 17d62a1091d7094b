"""The shipped model's page: tokens, the cost of the page's loop, and a GPU that takes all of it."""

import shutil

import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.checkpoint import load, load_eagle, shipped_heads, shipped_models
from jaxspec.decoding.profile import PROMPTS
from jaxspec.drafters import Eagle
from jaxspec.mobile import ExportConfig, MobileModel, web
from jaxspec.mobile.loops import Plain
from jaxspec.tuning import load_acceptance
from tests.mobile.web.conftest import Page, served
from tests.mobile.web.test_web_parity import check

pytestmark = pytest.mark.slow
LARGEST_OVERHEAD = 0.05


@pytest.fixture(scope="module")
def demo(vendored, tmp_path_factory) -> Page:
    if "demo" not in shipped_models() or "demo-eagle" not in shipped_heads():
        pytest.skip("needs checkpoints/demo and checkpoints/demo-eagle, which are not here")
    model = load("demo")
    head = load_eagle("demo-eagle", model.network)
    table = load_acceptance(shipped_heads()["demo-eagle"] / "acceptance.json")
    folder = tmp_path_factory.mktemp("demo-page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "vendor", lambda target: shutil.copytree(vendored, target))
        trees = web.choose_trees(table)
        config = ExportConfig(prefill=web.PREFILL)
        web.export_web(model, folder, Eagle.of(head), trees, table, config)
    return Page(folder, model)


def test_every_tree_gives_the_tokens_of_python(demo, node):
    """The first of the prompts holds a near tie, where the kernels of wasm and of CPUs part."""
    prompts = [demo.model.tokenizer.encode(prompt) for prompt in PROMPTS[1:]]
    check(demo, node, prompts)


def test_it_answers_the_questions_that_the_page_offers(demo):
    """In the page's 8 bits, by plain decoding."""
    offered, chat = demo.profile["examples"], demo.profile["chat"]
    file = MobileModel(demo.folder / "model.tflite", num_threads=1)
    answers = []
    for each in offered:
        assert each["mode"] == "chat"
        prompt = file.tokenizer.encode(chat["open"] + each["text"] + chat["reply"], False)
        text = file.tokenizer.decode(file.generate(prompt, 128, loop=Plain).tokens)
        answers.append(text.rpartition("#### ")[2])
    assert answers == ["100", "30", "20"]


def test_the_loop_of_the_page_costs_little(demo, node):
    found = node("overhead.mjs", {}, arguments=(str(demo.folder), "1"))
    assert set(found) == {"decode", *(tree["signature"] for tree in demo.profile["trees"])}
    for name, each in found.items():
        assert each["overhead"] <= LARGEST_OVERHEAD, (name, each)


def test_the_heap_is_as_estimated(demo, node):
    """Refusals before loading rest on the estimate. A heap grows by a fifth of itself at a time."""
    found = node("heap.mjs", {}, arguments=(str(demo.folder), "500"))
    before, after = (sum(found[when].values()) for when in ("before", "after"))
    assert after <= 1.02 * before
    estimated = demo.profile["heap_bytes"]
    assert estimated / 1.25 <= found["after"]["wasm"] <= 1.25 * estimated


def test_a_gpu_passes_the_self_test(demo, browser):
    """Siblings of a head with a reduced vocabulary were once the same token in browsers."""
    assert any(len(set(tree["parents"])) < tree["nodes"] for tree in demo.profile["trees"])
    with served(demo.folder) as url:
        seen = browser("load", url, accelerator="webgpu")
    assert seen["notices"] == []
    assert seen["accelerator"] == "webgpu"
    assert "passed" in seen["test"]
