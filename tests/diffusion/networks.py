"""Tiny diffusion networks whose every weight is random."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.models import Diffusion, ModelConfig, Network, param_shapes

MASK = 23
BLOCK = 4


def tiny_model(shift: bool = False, block: int | None = None, seed: int = 0) -> Model:
    config = ModelConfig(
        vocab_size=24,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=24,
        max_positions=128,
        diffusion=Diffusion(MASK, shift, block),
    )
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.5, leaf.dtype)

    return Model(Network(jax.tree.map(draw, param_shapes(config)), config), name="tiny")
