"""The devices of a run and its plan on them: dtype, length, the devices' peak.

Batches are spread over the devices and weights lie whole on each; see `jaxspec.sharding`. XLA adds
up the gradients of the devices: no other code knows how many there are.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.checkpoint.files import (
    CheckpointError,
    given,
    read_json,
    replacing_files,
    write_json,
)
from jaxspec.core.checks import Positive
from jaxspec.sharding import make_mesh, on_every_device, spread_rows
from jaxspec.training.loop import TrainStep
from jaxspec.training.settings import DTYPES, Dtype, RunSettings
from jaxspec.training.state import TrainState

_FILE = "plan.json"
_ROUNDS = 5
# Sizes of products, their least time in seconds, and calls of a burst, in measuring the peak.
_SMALLEST, _LARGEST = 512, 8192
_ENOUGH_SECONDS = 0.01
_BURST = 8
_MOST_STEPS = 2**31 - 1  # they are counted in 32 bits


class RunPlan(NamedTuple):
    """Length, dtype and devices' peak of a run on this machine.

    Attributes:
        num_steps: updates in all.
        dtype: dtype of the operands of products.
        peak: FLOP/s that the devices reach in that dtype.
    """

    num_steps: int
    dtype: str
    peak: float


def make_plan(
    settings: RunSettings,
    state_folder: Path,
    device: str,
    time_step: Callable[[tuple[str, ...]], Mapping[str, float]],
    measure_peak: Callable[[str], float],
) -> RunPlan:
    """Measures what the settings leave open, once per state folder, and keeps it in `plan.json`.

    Args:
        settings: settings of the run.
        state_folder: state folder of the run.
        device: name of the devices; on others, the peak is measured again.
        time_step: from dtypes to the seconds that an update takes in each.
        measure_peak: from a dtype to FLOP/s.

    Raises:
        CheckpointError: `plan.json` is damaged.
        ValueError: the minutes are too many.
    """
    path = state_folder / _FILE
    known: dict[str, Any] = _read_plan(path) if path.exists() else {}
    if settings.dtype == "auto" and "dtype" not in known:
        seconds = dict(time_step(DTYPES))
        dtype = min(seconds, key=lambda name: seconds[name])
        known = {"seconds_per_step": seconds[dtype], "dtype": dtype, "seconds_by_dtype": seconds}
    elif settings.minutes is not None and "seconds_per_step" not in known:
        known = {"seconds_per_step": time_step((settings.dtype,))[settings.dtype]}
    dtype = known["dtype"] if settings.dtype == "auto" else settings.dtype
    if known.get("peak_device") != device:
        known |= {"peak_device": device, "peak": measure_peak(dtype)}
    with replacing_files(state_folder) as staging:
        write_json(staging / _FILE, known)
    num_steps = settings.num_steps
    if num_steps is None:
        assert settings.minutes is not None
        fitting = settings.minutes * 60 / known["seconds_per_step"]
        if fitting > _MOST_STEPS:
            raise ValueError(
                f"minutes must be for at most {_MOST_STEPS:,} steps, got {settings.minutes:g}, and "
                f"by {path} a step takes {known['seconds_per_step']:g} s."
            )
        num_steps = max(1, round(fitting))
    return RunPlan(num_steps, dtype, known["peak"])


def _read_plan(path: Path) -> dict[str, Any]:
    """Returns what `make_plan` kept; older plans hold less."""
    try:
        known = read_json(path)
        # Entries that were measured together are there together.
        for name, hint, beside in (
            ("dtype", Dtype, "dtype"),
            ("seconds_per_step", Positive, "dtype"),
            ("peak", Positive, "peak_device"),
        ):
            if name in known or beside in known:
                known[name] = given(f"{path}: {name}", known.get(name), hint)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Delete this file, and the run goes on with a new plan, which may be of "
            "another length or dtype."
        ) from None
    return known


def seconds_per_step(
    train_steps: Mapping[str, TrainStep], state: TrainState, batches: Callable[[int], Any]
) -> dict[str, float]:
    """Returns the median time of an update by each of several programs, without compilation.

    They train the same state in turns, so that a drift of the machine's speed falls on all.
    """
    for train_step in train_steps.values():
        state, _ = jax.block_until_ready(train_step(state, batches(0)))
    seconds = {name: [] for name in train_steps}
    for turn in range(1, _ROUNDS + 1):
        for name, train_step in train_steps.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(train_step(state, batches(turn)))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def data_mesh(num_devices: int | None = None) -> Mesh:
    """Returns a mesh for rows over this process's devices; `None`: over all of them.

    >>> data_mesh(1).size
    1

    Raises:
        ValueError: there are fewer devices.
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
    """Returns number and kind of the devices, such as `2 x cpu`."""
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"


def matmul_peak(mesh: Mesh, dtype: str) -> float:
    """Returns the most FLOP/s that all devices together reach with a product of large matrices.

    Products grow until one takes long enough to hide the cost of a call; the fastest counts. Takes
    about a second.

    Args:
        mesh: devices of the run.
        dtype: dtype of the operands, "float32" or "bfloat16"; sums are float32.
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
    """Returns seconds per product, the better of single calls and of a burst of queued calls."""
    rows = spread_rows(mesh, jnp.ones((mesh.size * size, size), dtype))
    kernel = jax.device_put(jnp.ones((size, size), dtype), on_every_device(mesh))

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([_product(rows, kernel, rows.sharding) for _ in range(count)])
        return (time.perf_counter() - start) / count

    seconds(1)  # compiles
    single = min(seconds(1) for _ in range(3))
    return single if single > _ENOUGH_SECONDS else min(single, seconds(_BURST))
