"""Checkpoints with outcomes recorded from the reference implementation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load

FOLDERS = ("llama_gqa_dev", "qwen3_dev")


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, recorded_folder):
    return recorded_folder("checkpoints", request.param)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def recorded(folder):
    return json.loads((folder / "oracle.json").read_text())


def test_logits_and_hidden_states(folder, model):
    """Every layer's input, the normed output and the logits of 48 tokens."""
    arrays = np.load(folder / "oracle.npz")
    tokens = jnp.asarray(arrays["input_ids"][0])
    num_tokens, num_layers = len(tokens), model.config.num_layers

    @jax.jit
    def run(network, tokens):
        causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        positions = jnp.arange(num_tokens)
        taps = tuple(range(num_layers))
        hidden = network.forward(tokens, positions, causal, None, taps=taps)
        return hidden, network.unembed(hidden.features)

    hidden, logits = run(model.network, tokens)
    expected = arrays["hidden_states"]
    taps = hidden.taps.reshape(num_tokens, num_layers, -1).transpose(1, 0, 2)
    np.testing.assert_allclose(taps, expected[:-1], atol=2e-4)
    np.testing.assert_allclose(hidden.features, expected[-1], atol=2e-4)
    np.testing.assert_allclose(logits, arrays["logits"], atol=2e-4)


def test_stops(recorded, model):
    assert model.stop_token_ids == {"llama_gqa_dev": (510,), "qwen3_dev": (499,)}[recorded["name"]]


def test_tokenization(recorded, model):
    table = model.tokenizer.token_bytes()
    for case in recorded["tokenization"]:
        assert model.tokenizer.encode(case["text"]) == case["ids"]
        ids = model.tokenizer.encode(case["text"], special_tokens=False)
        assert ids == case["ids_no_special"]
        assert model.tokenizer.decode(case["ids"]) == case["decoded"]
        assert b"".join(table[token_id] for token_id in case["ids"]).decode() == case["decoded"]
        stream = model.tokenizer.detokenizer()
        pieces = [stream.push([token_id]) for token_id in case["ids"]]
        assert "".join(pieces) + stream.finish() == case["decoded"]


def test_chats(recorded, model):
    for case in recorded["chat"]:
        options = {"add_generation_prompt": case["add_generation_prompt"], **case["extra"]}
        assert model.tokenizer.render_chat(case["messages"], **options) == case["text"]
        assert model.tokenizer.encode_chat(case["messages"], **options) == case["ids"]
