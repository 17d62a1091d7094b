"""A tiny target and a head that drafts for it, of random weights, with drafts that stand."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.models import EagleHead, ModelConfig, Network, init_eagle_params, init_params

CONFIG = ModelConfig(
    vocab_size=48,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    max_positions=96,
)
LLAMA_7B = ModelConfig(
    vocab_size=32000,
    embed_dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_dim=11008,
    max_positions=4096,
)


def successor_model() -> tuple[Model, EagleHead]:
    """Every token has four likely successors; the layers choose, and the head half knows which.

    Column v of the output head is the sum of the embeddings of the tokens that v may follow.
    """
    params = jax.tree.map(np.array, init_params(CONFIG, jax.random.key(1)))
    draws = np.random.default_rng(1)
    table = params["embed"]["embedding"] / np.linalg.norm(
        params["embed"]["embedding"], axis=1, keepdims=True
    )
    params["embed"]["embedding"] = table
    orders = [draws.permutation(CONFIG.vocab_size) for _ in range(4)]
    shares = (1.0, 0.9, 0.8, 0.7)
    params["head"]["kernel"] = sum(
        share * table[order].T for share, order in zip(shares, orders, strict=True)
    ).astype(np.float32)
    for layer in range(CONFIG.num_layers):
        for part, name in (("attention", "out"), ("mlp", "down")):
            params[f"layer_{layer}"][part][name]["kernel"] *= 0.15
    config = CONFIG.replace(num_layers=1, layer_types=())
    head = jax.tree.map(np.array, init_eagle_params(config, False, jax.random.key(2)))
    width = CONFIG.embed_dim
    noise = 0.05 * draws.standard_normal((width, width))
    head["fc"]["kernel"] = np.concatenate([4.0 * np.eye(width), noise]).astype(np.float32)
    for part, name in (("attention", "out"), ("mlp", "down")):
        head[part][name]["kernel"] *= 0.15
    network = Network(jax.tree.map(jax.numpy.asarray, params), CONFIG)
    return Model(network, name="successors"), EagleHead(
        jax.tree.map(jax.numpy.asarray, head), config, False
    )


def half_of(model: Model) -> Model:
    """A draft model that often agrees: the target's first layer."""
    params = {name: leaf for name, leaf in model.params.items() if name != "layer_1"}
    config = CONFIG.replace(num_layers=1, layer_types=())
    return Model(replace(model.network, params=params, config=config), name="half")


def fill_buffers(file: Any, value: float) -> None:
    """Fills every float state of a file with a number, as a host's new buffers hold anything."""
    for signature, described in file.manifest.signatures.items():
        for name, entry in described["inputs"].items():
            if entry["dtype"] == "float32":
                for buffer in file._state(signature, name):
                    buffer.write(np.full(entry["shape"], value, np.float32))
