"""llama.cpp and OpenVINO decode a model of ours from files of ours."""

import dataclasses
import importlib.util

import pytest

import jaxspec
from benchmarks import openvino
from benchmarks.llama_cpp import LlamaCppMethod, LlamaCppRunner, why_not_here, write_gguf
from jaxspec import GenerationConfig

MISSING = why_not_here()


@pytest.mark.skipif(MISSING is not None, reason="needs the extra `llama-cpp`")
def test_llama_cpp_emits_our_tokens(tmp_path):
    """With and without its own drafts; in float32, as some processors round rows to bfloat16."""
    model, draft = jaxspec.load("demo"), jaxspec.load("demo-draft")
    ids = [int(token) for token in model.tokenizer.encode("What is 2 + 3?\n")]
    ours = jaxspec.generate(model, [ids], GenerationConfig(max_new_tokens=24))[0]
    methods = {
        "plain": LlamaCppMethod("f32"),
        "draft model": LlamaCppMethod("f32", "model"),
        "n-gram": LlamaCppMethod("f32", "n-gram"),
    }
    with LlamaCppRunner(model, methods, tmp_path, 2, 24, draft) as runner:
        for name in methods:
            assert runner.decode(name, ids, 0).texts == [ours.tokens.tolist()], name
        assert runner.decode("plain", ids, 0).counts.tau == 1.0
        assert runner.decode("draft model", ids, 0).counts.tau > 1.0
        # A pass that read other than the tokens after the context would be an error.
        for tokens in ([5], [6, 7], [7, 8, 9, 10, 11, 12]):
            assert runner.pass_seconds("plain", ids, tokens) > 0
        assert runner.token_seconds("plain", ids, 30) > 0


@pytest.mark.skipif(openvino.why_not_here() is not None, reason="needs the extra `openvino`")
@pytest.mark.parametrize("length", [24, 200])
def test_openvino_emits_our_tokens(tmp_path, length):
    """With and without its own drafts, up to the limit and up to the end of the answer."""
    model, draft = jaxspec.load("demo"), jaxspec.load("demo-draft")
    ids = [int(token) for token in model.tokenizer.encode("What is 2 + 3?\n")]
    ours = jaxspec.generate(model, [ids], GenerationConfig(max_new_tokens=length))[0]
    methods = {
        "plain": openvino.OpenVinoMethod("f32"),
        "draft model": openvino.OpenVinoMethod("f32", drafts=True),
    }
    runner = openvino.OpenVinoRunner(model, methods, tmp_path, 2, length, draft)
    for name in methods:
        sample = runner.decode(name, ids, 0)
        assert sample.texts == [ours.tokens.tolist()], name
        assert sample.rows[0].finish_reason == ours.finish_reason
        assert (sample.counts.tau > 1.0) == methods[name].drafts


@pytest.mark.skipif(MISSING is not None, reason="needs the extra `llama-cpp`")
def test_a_model_of_another_family_is_refused(model, tmp_path):
    config = model.config.replace(qk_norm=True)
    other = dataclasses.replace(model, network=dataclasses.replace(model.network, config=config))
    with pytest.raises(ValueError, match="must be a Llama with a tokenizer, not qwen3"):
        write_gguf(other, tmp_path / "model.gguf", "f32")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_here() == "xllamacpp and gguf cannot be imported; install the extra `llama-cpp`"
    assert openvino.why_not_here() == (
        "openvino_genai cannot be imported; install the extra `openvino`"
    )
