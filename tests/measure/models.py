"""A random network that reads bytes, and drafters that break its outputs."""

import dataclasses

import jax.numpy as jnp
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import NoDraft
from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.core.proposal import chain_proposal
from jaxspec.models import Diffusion, ModelConfig
from tests.checkpoint.networks import random_network

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ' ' }}"
    "{% endfor %}a:"
)


def tiny_model(templates: dict[str, str] | None = None) -> Model:
    """One layer, one token per byte, texts of up to 2048 tokens, no stop id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    config = ModelConfig(
        vocab_size=len(alphabet),
        embed_dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=32,
        max_positions=2048,
    )
    tokenizer = Tokenizer(backend, {}, {"default": TEMPLATE} if templates is None else templates)
    return Model(random_network(config), tokenizer, "tiny")


def filling_model(name: str, block: int | None) -> Model:
    """The same as a diffusion language model; one of the bytes is its mask."""
    model = tiny_model()
    own = Diffusion(model.vocab_size - 1, block=block)
    network = random_network(model.config.replace(diffusion=own, max_positions=512))
    return dataclasses.replace(model, network=network, name=name)


@dataclasses.dataclass(frozen=True)
class WrongRoot(NoDraft):
    """Lies about the pending token, so that the target answers to another text."""

    def propose(self, params, key, state, context):
        del params, key, context
        return chain_proposal(jnp.zeros(1, jnp.int32), jnp.ones(1, bool)), state
