"""The devices of a run: how many, under which name, and how fast they multiply.

Batches are spread over them and weights lie whole on each; see `jaxspec.sharding`. XLA
adds up the gradients of the devices by itself: no other code knows how many there are.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.sharding import make_mesh, on_every_device, spread_rows

_SMALLEST, _LARGEST = 512, 8192
_ENOUGH_SECONDS = 0.01
_BURST = 8


def data_mesh(num_devices: int | None = None) -> Mesh:
    """A mesh for rows alone over this process's devices; None: over all of them.

    Raises:
        ValueError: there are not so many.
    """
    devices = jax.local_devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"num_devices must be in 1..{len(devices)}, the {devices[0].platform} devices here; "
            f"got {count}."
        )
    return make_mesh(devices=devices[:count])


def device_name(mesh: Mesh) -> str:
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def matmul_peak(mesh: Mesh, dtype: str) -> float:
    """The most FLOP/s that all devices together reach with a product of large matrices.

    Products grow until one takes long enough to hide what a call costs; the fastest counts. Takes
    about a second.

    Args:
        mesh: of the run.
        dtype: of the operands, "float32" or "bfloat16"; sums are float32.
    """
    best, size = 0.0, _SMALLEST
    while True:
        seconds = _seconds_of_product(mesh, dtype, size)
        best = max(best, 2 * mesh.size * size**3 / seconds)
        if seconds > _ENOUGH_SECONDS or size == _LARGEST:
            return best
        size *= 2


@partial(jax.jit, static_argnames="sharding")
def _product(rows, kernel, sharding):
    outputs = jnp.matmul(rows, kernel, precision="highest", preferred_element_type=jnp.float32)
    return jax.lax.with_sharding_constraint(outputs, sharding)


def _seconds_of_product(mesh: Mesh, dtype: str, size: int) -> float:
    """Per product: the best of single calls and of a burst, which a queue of work runs through."""
    rows = spread_rows(mesh, jnp.ones((mesh.size * size, size), dtype))
    kernel = jax.device_put(jnp.ones((size, size), dtype), on_every_device(mesh))

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([_product(rows, kernel, rows.sharding) for _ in range(count)])
        return (time.perf_counter() - start) / count

    seconds(1)  # compiles
    single = min(seconds(1) for _ in range(3))
    return single if single > _ENOUGH_SECONDS else min(single, seconds(_BURST))
