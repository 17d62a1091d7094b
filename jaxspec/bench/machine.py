"""What a measurement was taken on: no figure without it."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.timing import time_in_turns
from jaxspec.core.types import PyTree
from jaxspec.models.linear import multiply, num_cores


class Machine(NamedTuple):
    """Device and versions.

    device: kind of the default device; for a CPU its model name.
    cores: host cores that this process may use.
    load: how many processes wanted to run, over the last minute before the measurement; `None`
        where the system does not say.
    """

    platform: str
    device: str
    cores: int
    load: float | None
    jax: str
    python: str

    @property
    def busy(self) -> bool:
        """True if others were using the machine, so that times are inflated."""
        return self.load is not None and self.load > self.cores

    def __str__(self) -> str:
        load = "" if self.load is None else f", load {self.load:.1f}"
        return (
            f"{self.device} ({self.platform}, {self.cores} cores{load}), "
            f"jax {self.jax}, Python {self.python}"
        )


def this_machine() -> Machine:
    """Describes the machine and the device that arrays go to by default."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    return Machine(
        platform=device.platform,
        device=_cpu_name() if on_cpu else device.device_kind,
        cores=num_cores(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        jax=jax.__version__,
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# A kernel of a layer of a small model: what a pass reads at a time.
_ROWS_READ, _COLUMNS_READ = 320, 1280


def num_bytes(tree: PyTree) -> int:
    """Bytes of all arrays in a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def read_bandwidth(size: int, repeats: int = 5) -> float:
    """Bytes per second at which the device reads an array of `size` bytes again and again.

    Read by a sum and by products with one row, a layer's worth at a time; the fastest counts.
    """
    shape = (_ROWS_READ, _COLUMNS_READ)
    num_parts = max(1, size // (4 * _ROWS_READ * _COLUMNS_READ))
    parts = tuple(jnp.ones(shape, jnp.float32) for _ in range(num_parts))

    def again(read_all: Callable[..., jax.Array]) -> Callable[[], jax.Array]:
        # Every reading depends on the one before, or XLA would read once.
        loop = jax.jit(lambda parts: jax.lax.fori_loop(0, 20, lambda _, x: read_all(parts, x), 0.0))
        return lambda: loop(parts)

    def by_sum(parts, total):
        return jnp.sum(jnp.stack([jnp.sum(part * (1 + 1e-30 * total)) for part in parts]))

    def by_product(parts, total):
        row = jnp.ones((1, _ROWS_READ)) + 1e-30 * total
        return jnp.sum(jnp.stack([jnp.sum(multiply(row, part)) for part in parts]))

    seconds = time_in_turns({"sum": again(by_sum), "product": again(by_product)}, repeats)
    fastest = min(float(np.min(times)) for times in seconds.values())
    return 20 * sum(part.nbytes for part in parts) / fastest
