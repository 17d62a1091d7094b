"""How much of what a device can multiply a run makes use of."""

import math
from typing import NamedTuple

import jax

from jaxspec.models import ModelConfig, param_shapes


class Efficiency(NamedTuple):
    """Turns a rate of tokens into a share of what the devices can do.

    flops_per_token: that training needs, see `flops_per_token`.
    peak: FLOP/s of all devices in the dtype used, as measured.
    """

    flops_per_token: float
    peak: float

    def utilisation(self, tokens_per_second: float) -> float:
        """Model FLOPs utilisation, 1 at the peak. Only the tokens handed over count."""
        return tokens_per_second * self.flops_per_token / self.peak


def flops_per_token(config: ModelConfig, length: int) -> float:
    """FLOPs that one token costs in training: 6 N + 12 L H Q T (PaLM, 2022, appendix B).

    N are the weights that a token is multiplied with: no embedding table, unless it is the head
    too, and of experts those that a token visits. L layers, H heads, Q their width, T = `length`
    tokens in a sequence, all of them counted as seen. A third is the forward pass.
    """
    weights = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
        names = {str(entry.key) for entry in path}
        if "kernel" not in names:
            continue
        share = 1.0
        if "experts" in names and "router" not in names:
            assert config.experts is not None
            share = config.experts.per_token / config.experts.num
        weights += share * math.prod(leaf.shape)
    if config.tied_head:
        weights += config.vocab_size * config.embed_dim
    attention = config.num_layers * config.num_heads * config.head_dim * length
    return 6 * weights + 12 * attention
