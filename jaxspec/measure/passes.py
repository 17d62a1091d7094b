"""Times of target passes over n tokens, compared with a pass over one token.

T(n) / T(1) decides whether drafting can pay. T(1) is set next to the time of reading the weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.cache import append, settled
from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import KVCache
from jaxspec.measure.machine import num_bytes, read_bandwidth
from jaxspec.measure.timing import time_in_turns
from jaxspec.models import Network

NUM_TOKENS = (1, 2, 4, 8, 16, 26, 32)
CAPACITY = 512
CONTEXT = 256
NUM_PASSES = 16
"""Passes of one timed loop."""


class PassCosts(NamedTuple):
    """Times of one network's passes.

    Attributes:
        embed_dim: width of the network.
        weight_bytes: bytes of all weights.
        bandwidth: bytes per second at which an array as large as the weights is read.
        seconds: median seconds of one pass, by number of tokens, the root included.

    Example:
        >>> costs = PassCosts(320, 10, 100.0, {1: 0.1, 8: 0.2})
        >>> costs.over_reading, costs.ratio(8)
        (1.0, 2.0)
    """

    embed_dim: int
    weight_bytes: int
    bandwidth: float
    seconds: dict[int, float]

    @property
    def over_reading(self) -> float:
        """Returns T(1) over the time of reading the weights once."""
        return self.seconds[1] * self.bandwidth / self.weight_bytes

    def ratio(self, num_tokens: int) -> float:
        """Returns T(num_tokens) / T(1)."""
        return self.seconds[num_tokens] / self.seconds[1]

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        ratios = {num_tokens: self.ratio(num_tokens) for num_tokens in self.seconds}
        return {**self._asdict(), "over_reading": self.over_reading, "ratios": ratios}


def measure_passes(
    network: Network,
    num_tokens: Sequence[int] = NUM_TOKENS,
    repeats: int = 15,
) -> PassCosts:
    """Times passes of several widths, in turns, each in a jitted loop as decoding runs them.

    A pass reads a cache of `CONTEXT` tokens, unembeds all its tokens and commits one of them. The
    next pass depends on the tokens it chose.

    Args:
        network: the target.
        num_tokens: widths of a pass, the root included; 1 must be among them.
        repeats: timed loops of each width.

    Example:
        >>> import jaxspec
        >>> costs = measure_passes(jaxspec.load("demo-draft").network, (1, 2), repeats=1)
        >>> costs.ratio(1)
        1.0
    """
    programs = {str(n): loop_of_passes(network, n) for n in num_tokens}
    seconds = time_in_turns(programs, repeats)
    weight_bytes = num_bytes(network.params)
    return PassCosts(
        embed_dim=network.embed_dim,
        weight_bytes=weight_bytes,
        bandwidth=read_bandwidth(weight_bytes),
        seconds={n: float(np.median(seconds[str(n)])) / NUM_PASSES for n in num_tokens},
    )


def loop_of_passes(network: Network, num_tokens: int) -> Callable[[], Any]:
    """Returns a program that runs `NUM_PASSES` passes over `num_tokens`; see `measure_passes`.

    Args:
        network: the target.
        num_tokens: width of a pass, the root included.

    Example:
        >>> import jaxspec
        >>> loop_of_passes(jaxspec.load("demo-draft").network, 2)().shape
        (1, 2)
    """

    def one_pass(network: Network, cache: KVCache, tokens: jax.Array):
        positions = cache.length + jnp.arange(num_tokens)
        hidden = network.forward(tokens, positions, causal(num_tokens), cache)
        chosen = argmax_rows(network.unembed(hidden.features))
        return append(cache, settled(hidden), 1), chosen

    @jax.jit
    def passes(network: Network, caches: KVCache, tokens: jax.Array):
        def step(_, carry):
            # A batch of one row, mapped as decoding maps it.
            return jax.vmap(partial(one_pass, network))(*carry)

        return jax.lax.fori_loop(0, NUM_PASSES, step, (caches, tokens))[1]

    cache = network.empty_cache(CAPACITY)._replace(length=jnp.int32(CONTEXT))
    caches = jax.tree.map(lambda array: array[None], cache)
    return partial(passes, network, caches, jnp.zeros((1, num_tokens), jnp.int32))
