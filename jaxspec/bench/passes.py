"""What a target pass over n tokens costs beside a pass over one.

`python -m jaxspec.bench.passes [--json]`: T(n) / T(1) for 12-layer Llamas with random weights, and
T(1) beside the time that reading the weights takes. These ratios decide whether drafting can pay.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.bench.machine import num_bytes, read_bandwidth, this_machine
from jaxspec.bench.timing import time_in_turns
from jaxspec.core.cache import append, settled
from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import KVCache
from jaxspec.models import ModelConfig, Network, init_params
from jaxspec.progress import progress_bar

NUM_TOKENS = (1, 2, 4, 8, 16, 26, 32)
NUM_SLOTS = 512
CONTEXT = 256
# Largest T(1) over the reading time, T(8) / T(1) and T(26) / T(1) to be content with, by width.
AIMS = {320: (1.3, 2.1, 3.5), 768: (1.3, 1.6, 2.7)}


class PassCosts(NamedTuple):
    """One network's figures.

    seconds: of one pass, median, by number of tokens, the root included.
    bandwidth: bytes per second at which an array as large as the weights is read.
    """

    embed_dim: int
    weight_bytes: int
    bandwidth: float
    seconds: dict[int, float]

    @property
    def over_reading(self) -> float:
        """T(1) over the time to read the weights once."""
        return self.seconds[1] * self.bandwidth / self.weight_bytes

    def ratio(self, num_tokens: int) -> float:
        """T(num_tokens) / T(1)."""
        return self.seconds[num_tokens] / self.seconds[1]

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        ratios = {num_tokens: self.ratio(num_tokens) for num_tokens in self.seconds}
        return {**self._asdict(), "over_reading": self.over_reading, "ratios": ratios}


def llama(embed_dim: int) -> Network:
    """A 12-layer Llama with heads of 64, one key head per five or six, and random weights."""
    config = ModelConfig(
        vocab_size=4096,
        embed_dim=embed_dim,
        num_layers=12,
        num_heads=embed_dim // 64,
        num_kv_heads=1 if embed_dim < 768 else 2,
        head_dim=64,
        mlp_dim=3 * embed_dim,
        max_positions=NUM_SLOTS,
        tied_head=True,
    )
    return Network(init_params(config, jax.random.key(0)), config)


def measure_passes(
    network: Network,
    num_tokens: Sequence[int] = NUM_TOKENS,
    num_passes: int = 16,
    repeats: int = 15,
) -> PassCosts:
    """Times passes of several widths, in turns, each in a jitted loop as decoding runs them.

    A pass reads a cache of `CONTEXT` tokens, unembeds all its tokens, and its successor depends on
    what it chose; it commits one token.
    """
    programs = {str(n): _program(network, n, num_passes) for n in num_tokens}
    seconds = time_in_turns(programs, repeats)
    weight_bytes = num_bytes(network.params)
    return PassCosts(
        embed_dim=network.embed_dim,
        weight_bytes=weight_bytes,
        bandwidth=read_bandwidth(weight_bytes),
        seconds={n: float(np.median(seconds[str(n)])) / num_passes for n in num_tokens},
    )


def _program(network: Network, num_tokens: int, num_passes: int) -> Callable[[], Any]:
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

        return jax.lax.fori_loop(0, num_passes, step, (caches, tokens))[1]

    cache = network.empty_cache(NUM_SLOTS)._replace(length=jnp.int32(CONTEXT))
    caches = jax.tree.map(lambda array: array[None], cache)
    return partial(passes, network, caches, jnp.zeros((1, num_tokens), jnp.int32))


def _table(costs: Sequence[PassCosts]) -> Table:
    table = Table(title=f"Passes over {NUM_SLOTS} slots, float32, one row; n tokens, root included")
    table.add_column("embed", justify="right")
    table.add_column("weights", justify="right")
    table.add_column("T(1)", justify="right")
    table.add_column("T(1) / reading", justify="right")
    for n in NUM_TOKENS[1:]:
        table.add_column(f"T({n})/T(1)", justify="right")
    for cost in costs:
        table.add_row(
            str(cost.embed_dim),
            f"{cost.weight_bytes / 1e6:.1f} MB",
            f"{1e3 * cost.seconds[1]:.2f} ms",
            f"{cost.over_reading:.2f}",
            *(f"{cost.ratio(n):.2f}" for n in NUM_TOKENS[1:]),
        )
    return table


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser("python -m jaxspec.bench.passes", description=__doc__)
    parser.add_argument("--dim", type=int, action="append", help="embedding width; repeatable")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each width")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    machine = this_machine()
    costs = []
    dims = args.dim or list(AIMS)
    with progress_bar(len(dims)) as advance:
        for dim in dims:
            advance(f"width {dim}")
            costs.append(measure_passes(llama(dim), repeats=args.repeats))
    if args.json:
        figures = {"machine": machine._asdict(), "passes": [c.as_dict() for c in costs]}
        print(json.dumps({**figures, "aims": AIMS}, indent=2))
        return
    console = Console()
    console.print(str(machine))
    console.print(_table(costs))
    for cost in costs:
        aims = AIMS.get(cost.embed_dim)
        if aims:
            console.print(
                f"width {cost.embed_dim}: content with T(1) / reading <= {aims[0]}, "
                f"T(8) / T(1) <= {aims[1]}, T(26) / T(1) <= {aims[2]}"
            )
    if machine.busy:
        console.print("NOTE: something else was running, so do not trust these times.")


if __name__ == "__main__":
    main()
