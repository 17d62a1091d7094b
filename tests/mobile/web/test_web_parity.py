"""The page's engine, in Node on wasm, gives the tokens of LiteRT's CPU in Python."""

from functools import partial

import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import MobileModel
from jaxspec.mobile.loops import Plain, Steps

NUM_TOKENS = 140
PROMPTS = ("12 + 30 is 42, so", "a" * 70, "it's so: yes")
TIED = "the first of them"
"""In int8 a near tie turns within it, as kernels of wasm and of CPUs round differently."""


def decoded_here(page, prompts, num_tokens):
    """Tokens and counts of every function, by LiteRT's CPU."""
    file = MobileModel(page.folder / "model.tflite", num_threads=1)
    trees = file.manifest.trees
    loops = {"decode": Plain, **{name: partial(Steps, signature=name) for name in trees}}
    return {
        name: [file.generate(prompt, num_tokens, (), loop=loop) for prompt in prompts]
        for name, loop in loops.items()
    }


def check(page, node, prompts, num_tokens=NUM_TOKENS):
    task = {"folder": str(page.folder), "prompts": prompts, "numTokens": num_tokens}
    found = node("parity.mjs", {**task, "switching": True})
    expected = decoded_here(page, prompts, num_tokens)
    for name, texts in expected.items():
        for ours, theirs in zip(found["texts"][name], texts, strict=True):
            assert ours["tokens"] == theirs.tokens.tolist(), name
            assert len(ours["tokens"]) == num_tokens
    (switched,) = found["texts"]["switching"]
    assert switched["tokens"] == expected["decode"][0].tokens.tolist()
    assert found["selfTest"]["ok"], found["selfTest"]
    return found, expected


def test_the_heap_stays_as_it_is_over_500_steps(page_of, node):
    found = node("heap.mjs", {}, arguments=(str(page_of("int8").folder), "500"))
    assert found["before"]["wasm"] > 0
    assert found["growth"] <= 0.02
    # Every step has 8 caches, 8 kB each: kept, they would be 30 MB.
    assert found["after"]["javascript"] - found["before"]["javascript"] < 4e6


@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_every_tree_gives_the_same_tokens_in_node(page_of, node, quantization):
    page = page_of(quantization)
    prompts = [page.model.tokenizer.encode(text) for text in PROMPTS]
    found, expected = check(page, node, prompts)
    tied = {"folder": str(page.folder), "prompts": [page.model.tokenizer.encode(TIED)]}
    texts = node("parity.mjs", {**tied, "numTokens": NUM_TOKENS, "switching": False})["texts"]
    assert all(text[0]["tokens"] == texts["decode"][0]["tokens"] for text in texts.values())
    # Drafts are accepted, so that the trees do something.
    for name in page.profile["self_test"]["steps"]:
        if name != "decode":
            assert max(found["texts"][name][0]["counts"]) > 1
            # The page keeps of the last step what the budget leaves.
            assert found["texts"][name][0]["counts"][:-1] == list(expected[name][0].counts)[:-1]


def test_a_second_turn_reads_what_is_new(page_of, node):
    """And one that was stopped while its text was read leaves the conversation as it was."""
    page = page_of("float32")
    encode = page.model.tokenizer.encode
    tree = page.profile["trees"][0]["signature"]
    texts, num_tokens = ["so it is: yes, ", "a" * 100, " and on"], 24
    task = {"folder": str(page.folder), "texts": texts, "choice": tree, "numTokens": num_tokens}
    found = node("turns.mjs", {**task, "stopAt": 60})
    first, stopped, second = (found[name] for name in ("first", "stopped", "second"))
    prompt = encode(texts[0])
    assert first["read"] == len(prompt)
    assert stopped["reason"] == "unread"
    assert stopped["tokens"] == []
    assert 60 <= stopped["read"] < 100
    assert stopped["length"] == first["length"] == len(prompt) + num_tokens
    longer = [*prompt, *first["tokens"], *encode(texts[2])]
    loop = partial(Steps, signature=tree)
    file = MobileModel(page.folder / "model.tflite", num_threads=1)
    assert second["tokens"] == file.generate(longer, num_tokens, (), loop=loop).tokens.tolist()


@pytest.mark.parametrize("place", [0, 1])
def test_turns_continue_on_the_caches(page_of, node, place):
    """With plain decoding the head has read nothing of the answer, and does so first."""
    page = page_of("float32")
    choice = ("decode", page.profile["trees"][0]["signature"])[place]
    texts = ["so it is: yes, " * 4, " and on"]
    task = {"folder": str(page.folder), "texts": texts, "choice": choice, "numTokens": 24}
    found = node("turns.mjs", task)
    new, depth = len(page.model.tokenizer.encode(texts[1])), page.profile["depth"]
    unread = 24 if choice == "decode" else depth + 1
    assert new < found["second"]["read"] <= new + unread + 1
