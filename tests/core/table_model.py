"""A language model that is a table: the next token depends on the last one alone."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.core.cache import empty_layer
from jaxspec.core.types import Hidden, KVCache, LayerKV


@partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=[])
@dataclass(frozen=True)
class TableModel:
    """A `LanguageModel` whose laws are known in advance. Its cache holds nothing of use.

    table: `table[token]` are the logits of the token after it.
    """

    table: jax.Array

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    @property
    def embed_dim(self) -> int:
        return self.table.shape[1]

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()) -> Hidden:
        nodes = tokens.shape[0]
        return Hidden(self.table[tokens], jnp.zeros((nodes, 0)), (_nothing(nodes),))

    def unembed(self, features: jax.Array) -> jax.Array:
        return features

    def empty_cache(self, capacity: int) -> KVCache:
        return KVCache((_nothing(capacity),), jnp.int32(0))


def _nothing(capacity: int) -> LayerKV:
    return empty_layer(1, 1, capacity, jnp.dtype("float32"))
