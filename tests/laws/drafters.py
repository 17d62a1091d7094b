"""Every drafting method under test: ONE table. A new method adds a row, and obeys every law."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.core.types import Drafter, PyTree
from jaxspec.drafters import DraftModel, NoDraft, PromptLookup
from jaxspec.models import ModelConfig, Network, init_params


class Case(NamedTuple):
    """One drafting method.

    make: builds the drafter afresh: equal settings, another object.
    draft: its weights, made to fit a target well enough that some drafts are accepted.
    """

    make: Callable[[], Drafter]
    draft: Callable[[Network], PyTree] = lambda target: ()


def network(vocab_size: int, num_layers: int = 2, seed: int = 0, **settings) -> Network:
    """A small random network, confident enough to repeat itself now and then."""
    config = ModelConfig(
        vocab_size=vocab_size,
        embed_dim=16,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=32,
        max_positions=512,
        **settings,
    )
    return Network(init_params(config, jax.random.key(seed)), config)


def blurred(target: Network, size: float = 0.05) -> Network:
    """The target with noise on its weights: a draft model that is right most of the time."""
    leaves, structure = jax.tree.flatten(target.params)
    keys = jax.random.split(jax.random.key(99), len(leaves))
    noisy = [
        leaf + size * jnp.std(leaf) * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return Network(jax.tree.unflatten(structure, noisy), target.config)


PLAIN = Case(NoDraft)

DRAFTERS: dict[str, Case] = {
    "lookup": Case(lambda: PromptLookup(num_speculative_tokens=3)),
    "draft model, chain": Case(lambda: DraftModel(num_speculative_tokens=3), blurred),
    "draft model, tree": Case(
        lambda: DraftModel(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))), blurred
    ),
}
