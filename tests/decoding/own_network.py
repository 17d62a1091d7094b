"""A network of someone else's: two layers of attention that share nothing with `jaxspec.models`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.masks import causal
from jaxspec.core.types import Hidden, KVCache, LayerKV

KEY, VALUE, LAYERS = 4, 6, 2
"""Widths of keys and values, which differ, and the number of layers."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights"],
    meta_fields=["vocab_size", "embed_dim", "fault"],
)
@dataclass(frozen=True)
class OwnNetwork:
    """A `LanguageModel` whose keys are narrower than its values, over positions as sines.

    Attributes:
        fault: what it does wrong: "mask" (every token of a pass sees the others), "positions"
            (counts the places of a pass), "width" (features are one number too narrow), "length"
            (sees the whole cache), "scratch" (reads it last), "writes" (changes its weights); "" is
            no fault.
    """

    weights: dict[str, Any]
    vocab_size: int
    embed_dim: int
    fault: str = ""

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()) -> Hidden:
        nodes = len(tokens)
        if self.fault == "writes":
            self.weights["embedding"] = self.weights["embedding"] * 1.0
        if self.fault == "mask":
            mask = jnp.ones_like(mask)
        if self.fault == "positions":
            positions = jnp.arange(nodes)
        inputs = self.weights["embedding"][tokens] + _waves(positions, self.embed_dim)
        new_kv = []
        for index in range(LAYERS):
            layer = self.weights["layers"][index]
            own = LayerKV((inputs @ layer["keys"]).T[None], (inputs @ layer["values"])[None])
            new_kv.append(own)
            seen = [(own, mask[:, mask.shape[1] - nodes :])]
            if scratch is not None:
                seen.insert(0, (scratch[index], mask[:, : mask.shape[1] - nodes]))
            if self.fault == "scratch":
                seen[-1:] = [(own, mask[:, :nodes])]
            if cache is not None:
                places = jnp.arange(cache.layers[index].values.shape[1])
                filled = places < (len(places) if self.fault == "length" else cache.length)
                whole = jnp.broadcast_to(filled[None], (nodes, len(places)))
                seen.insert(0, (cache.layers[index], whole))
            keys = jnp.concatenate([kv.keys[0] for kv, _ in seen], axis=1)
            values = jnp.concatenate([kv.values[0] for kv, _ in seen], axis=0)
            visible = jnp.concatenate([part for _, part in seen], axis=1)
            scores = jnp.where(visible, inputs @ layer["queries"] @ keys, -1e9)
            inputs = inputs + jax.nn.softmax(scores, axis=-1) @ values @ layer["out"]
        features = inputs[:, 1:] if self.fault == "width" else inputs
        return Hidden(features, jnp.zeros((nodes, 0)), tuple(new_kv))

    def unembed(self, features):
        return features @ self.weights["head"][: features.shape[1]]

    def empty_cache(self, capacity: int) -> KVCache:
        layer = LayerKV(jnp.zeros((1, KEY, capacity)), jnp.zeros((1, capacity, VALUE)))
        return KVCache((layer,) * LAYERS, jnp.int32(0))


def own_network(seed: int = 0, vocab_size: int = 31, fault: str = "") -> OwnNetwork:
    """Returns a random one, of 12 numbers for each token."""
    width, rng = 12, np.random.default_rng(seed)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    layers = [
        {
            "queries": 0.3 * drawn(width, KEY),
            "keys": 0.3 * drawn(width, KEY),
            "values": drawn(width, VALUE),
            "out": drawn(VALUE, width),
        }
        for _ in range(LAYERS)
    ]
    weights = {
        "embedding": drawn(vocab_size, width),
        "layers": layers,
        "head": drawn(width, vocab_size),
    }
    return OwnNetwork(weights, vocab_size, width, fault)


def greedy_by_full_passes(network: Any, prompt: list[int], count: int) -> list[int]:
    """Returns the likeliest continuation, from one pass over the whole text for each token."""
    text, size = list(prompt), len(prompt) + count

    @jax.jit
    def logits_of(tokens):
        hidden = network.forward(tokens, jnp.arange(size), causal(size), None)
        return network.unembed(hidden.features)

    for _ in range(count):
        padded = np.zeros(size, np.int32)
        padded[: len(text)] = text
        text.append(int(np.argmax(logits_of(padded)[len(text) - 1])))
    return text[len(prompt) :]


def _waves(positions, width: int):
    rates = 0.3 ** jnp.arange(width // 2)
    angles = positions[:, None] * rates[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
