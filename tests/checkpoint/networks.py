"""Networks with random weights, made without compiling anything."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models import ModelConfig, Network, param_shapes


def random_network(config: ModelConfig, dtype: str = "float32") -> Network:
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), dtype), param_shapes(config)
    )
    return Network(params, config)


def assert_same_network(one: Network, other: Network) -> None:
    assert one.config == other.config
    chex.assert_trees_all_equal(one.params, other.params, strict=True)
