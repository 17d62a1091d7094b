"""Parts of the page that work by themselves, in Node: the choice, the timing, the tokenizer."""

import json
import shutil

import numpy as np
import pytest

from jaxspec.checkpoint import load_tokenizer
from tests.mobile.web.models import CHARACTERS

TREES = [
    {"signature": "step_1", "tokens_per_step": 1.8},
    {"signature": "step_2", "tokens_per_step": 2.6},
]
STEEP = {"decode": 2.0, "step_1": 4.0, "step_2": 7.0}  # milliseconds, as wasm has them
FLAT = {"decode": 2.0, "step_1": 2.6, "step_2": 3.0}


def times(milliseconds):
    return {name: {"median": value, "spread": 0.1} for name, value in milliseconds.items()}


@pytest.fixture(scope="module")
def ask(node, vendored, tmp_path_factory):
    """Runs `choose.mjs` on the page's own modules."""
    from jaxspec.mobile.web import PAGE_FOLDER

    folder = tmp_path_factory.mktemp("modules")
    for path in (*PAGE_FOLDER.glob("*.js"), PAGE_FOLDER / "package.json"):
        shutil.copyfile(path, folder / path.name)
    shutil.copytree(vendored, folder / "vendor")

    def run(tokenizer=None, **task):
        if tokenizer is not None:
            tokenizer.backend.save(str(folder / "tokenizer.json"))
        return node("choose.mjs", {"folder": str(folder), **task})

    return run


def test_it_takes_what_gives_most_tokens_per_second(ask):
    assert ask(trees=TREES, times=times(STEEP))["first"] == "decode"
    assert ask(trees=TREES, times=times(FLAT))["first"] == "step_2"
    between = {"decode": 2.0, "step_1": 3.0, "step_2": 6.0}
    assert ask(trees=TREES, times=times(between))["first"] == "step_1"


def test_speeds_are_tokens_over_time(ask):
    speeds = ask(trees=TREES, times=times(FLAT))["speeds"]
    assert speeds == pytest.approx({"decode": 500, "step_1": 1800 / 2.6, "step_2": 2600 / 3})


def test_drafts_that_fail_end_speculation_and_a_slow_device_does_not(ask):
    failing = [{"tokens": 1}] * 128
    found = ask(trees=TREES, times=times(FLAT), observed=failing)
    assert found["changes"][-1] == "decode"
    throttled = [{"tokens": 2.6, "slowness": 3}] * 256
    found = ask(trees=TREES, times=times(FLAT), observed=throttled)
    assert found["changes"] == []
    assert found["speeds"]["step_2"] == pytest.approx(2600 / 9, rel=0.01)


def test_it_changes_rarely(ask):
    draws = np.random.default_rng(0)
    noisy = [{"tokens": int(count)} for count in draws.integers(1, 5, 640)]
    assert len(ask(trees=TREES, times=times(FLAT), observed=noisy)["changes"]) <= 10


def test_warm_up_does_not_count(ask):
    """The first 20 calls take three times as long, as before a compiler has done its work."""
    measured = ask(trees=TREES, times=times(STEEP))["measured"]
    assert {name: each["median"] for name, each in measured.items()} == pytest.approx(STEEP)


TEXTS = (
    "Question: how many?\nAnswer: 12 * 3 = 36",
    "def f(x):\n\treturn x  # 2024",
    "  two  blanks ",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f44d\U0001f3fd e\u0301",
    "I'll they've 'quoted' ok's",
    "<|user|>hi<|end|>",
    "\u00a0\u2028 \u0130\u0131 \ufb01",
    "0123456789",
    "\n\n\n",
    "x",
)


def test_the_tokenizer_is_that_of_python(ask):
    from jaxspec.checkpoint import shipped_models

    if "demo" not in shipped_models():
        pytest.skip("needs checkpoints/demo, which is not here")
    tokenizer = load_tokenizer(shipped_models()["demo"])
    for text, found in zip(TEXTS, ask(tokenizer, texts=list(TEXTS))["texts"], strict=True):
        assert found["ids"] == tokenizer.encode(text, special_tokens=False), text
        assert found["special"] == tokenizer.encode(text)
        assert found["text"] == tokenizer.decode(found["ids"])


def test_the_tokenizer_is_that_of_python_on_evaluation_prompts(ask, data_folder):
    from jaxspec.checkpoint import shipped_models
    from jaxspec.measure.prompts import read_prompts

    if "demo" not in shipped_models():
        pytest.skip("needs checkpoints/demo, which is not here")
    tokenizer = load_tokenizer(shipped_models()["demo"])
    folder = data_folder("eval")
    texts = [
        row.prompt
        for path in sorted(folder.rglob("*.jsonl*"))
        for row in read_prompts(path, None, 40)
        if isinstance(row.prompt, str)
    ]
    assert len(texts) >= 40
    for text, found in zip(texts, ask(tokenizer, texts=texts)["texts"], strict=True):
        assert found["ids"] == tokenizer.encode(text, special_tokens=False)


def test_characters_without_tokens_are_named(ask):
    from tests.mobile.web.models import page_model

    tokenizer = page_model()[0].tokenizer
    texts = [CHARACTERS, "a\u00fcb\u4e2d", json.loads('"half \\ud83d of it"')]
    fine, odd, half = ask(tokenizer, texts=texts)["texts"]
    assert fine["ids"] == list(range(48))
    assert '"\u00fc", "\u4e2d"' in odd["error"]
    assert "half a character" in half["error"]
