"""The machine that a measurement was taken on: no figure without it."""

import os
import platform
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import native
from jaxspec.core.types import PyTree
from jaxspec.measure.timing import time_in_turns
from jaxspec.models.linear import multiply
from jaxspec.native import num_cores


class Machine(NamedTuple):
    """Device and versions.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        device: kind of the default device; for a CPU its model name.
        cores: host cores that this process may use.
        load: mean number of processes that wanted to run, over the last minute before the
            measurement; `None` where the system does not say.
        jax: version of JAX.
        python: version of Python.
        products: the code that multiplies few rows on a CPU, see `jaxspec.native`; "" elsewhere.
    """

    platform: str
    device: str
    cores: int
    load: float | None
    jax: str
    python: str
    products: str = ""

    @property
    def busy(self) -> bool:
        """True if others were using the machine, so that times are inflated."""
        return self.load is not None and self.load > self.cores

    def __str__(self) -> str:
        load = "" if self.load is None else f", load {self.load:.1f}"
        return (
            f"{self.device} ({self.platform}, {self.cores} cores{load}), "
            f"jax {self.jax}, Python {self.python}{self.products and f', {self.products}'}"
        )


def this_machine() -> Machine:
    """Describes the machine and the device that arrays go to by default.

    Example:
        >>> this_machine().jax == jax.__version__
        True
    """
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    return Machine(
        platform=device.platform,
        device=native.processor() if on_cpu else device.device_kind,
        cores=num_cores(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        jax=jax.__version__,
        python=platform.python_version(),
        products=native.status().reason if on_cpu else "",
    )


# A kernel of a layer of a small model: what a pass reads at a time.
_ROWS_READ, _COLUMNS_READ = 320, 1280


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays in a pytree.

    Example:
        >>> num_bytes({"a": np.zeros(3, np.float32)})
        12
    """
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def read_bandwidth(size: int, repeats: int = 5) -> float:
    """Returns the bytes per second at which the device reads an array again and again.

    The array is read by a sum and by products with one row, in pieces as large as a layer's
    weights; the fastest way counts.

    Args:
        size: bytes of the array.
        repeats: timed loops of each way.

    Example:
        >>> read_bandwidth(10_000_000, repeats=1) > 0
        True
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
