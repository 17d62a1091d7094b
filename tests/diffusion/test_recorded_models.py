"""Diffusion checkpoints in their published formats, and the logits recorded from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import load, save
from jaxspec.models import Diffusion

MODELS = {"llada_tiny_mha": Diffusion(300), "dream_tiny": Diffusion(300, shift=True)}


@pytest.fixture(scope="module", params=sorted(MODELS))
def folder(request, recorded_folder):
    return recorded_folder("diffusion", request.param)


@jax.jit
def logits_of(network, tokens):
    count = tokens.shape[0]
    everything = jnp.ones((count, count), bool)
    return network.unembed(network.forward(tokens, jnp.arange(count), everything, None).features)


def test_logits(folder):
    model = load(folder)
    assert model.config.diffusion == MODELS[folder.name]
    recorded = np.load(folder / "forward.npz")
    expected = recorded["logits" if "logits" in recorded else "logits_unshifted"]
    for tokens, rows in zip(recorded["input_ids"], expected, strict=True):
        np.testing.assert_allclose(logits_of(model.network, tokens), rows, atol=1e-4)


def test_what_is_saved_loads_as_the_same_network(folder, tmp_path):
    model = load(folder)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert again.stop_token_ids == model.stop_token_ids == (301,)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
