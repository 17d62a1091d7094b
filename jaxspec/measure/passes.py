"""Times of target passes over n tokens: T(n) / T(1) decides whether drafting can pay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.cache import append, settled
from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import KVCache
from jaxspec.measure.timing import time_in_turns
from jaxspec.models import Network

NUM_TOKENS = (1, 2, 4, 8, 16, 26, 32)
CAPACITY = 512
CONTEXT = 256
NUM_PASSES = 16
"""Passes of one timed loop."""


def measure_passes(
    network: Network,
    num_tokens: Sequence[int] = NUM_TOKENS,
    repeats: int = 15,
) -> dict[int, float]:
    """Times passes of several widths, in turns, each in a jitted loop as decoding runs them.

    A pass reads a cache of `CONTEXT` tokens, unembeds all its tokens and commits one of them. The
    next pass depends on the tokens it chose.

    Args:
        network: the target.
        num_tokens: widths of a pass, the root included.
        repeats: timed loops of each width.

    Returns:
        Median seconds of one pass, by width.

    Example:
        >>> import jaxspec
        >>> list(measure_passes(jaxspec.load("demo-draft").network, (1, 2), repeats=1))
        [1, 2]
    """
    programs = {str(n): loop_of_passes(network, n) for n in num_tokens}
    seconds = time_in_turns(programs, repeats)
    return {n: float(np.median(seconds[str(n)])) / NUM_PASSES for n in num_tokens}


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
