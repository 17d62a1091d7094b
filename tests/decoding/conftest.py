"""A tiny model whose tokens are bytes."""

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import Model, Tokenizer
from jaxspec.models import ModelConfig, Network, init_params


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte, so that one character may take several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({letter: token for token, letter in enumerate(letters)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def byte_model(tokenizer):
    """A random network."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        embed_dim=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=16,
        max_positions=64,
    )
    return Model(Network(init_params(config, jax.random.key(0)), config), tokenizer)
