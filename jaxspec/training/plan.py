"""What a run finds out before its first step, and keeps: dtype, length, the devices' peak."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.checkpoint.files import read_json, replacing_files, write_json
from jaxspec.training.loop import TrainStep
from jaxspec.training.settings import DTYPES, RunSettings
from jaxspec.training.state import TrainState

_FILE = "plan.json"
_ROUNDS = 5


class Plan(NamedTuple):
    """How a run goes on this machine.

    num_steps: updates in all.
    dtype: of products.
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
) -> Plan:
    """Measures what the settings leave open, once per state folder: answers lie in `plan.json`.

    Args:
        settings: of the run.
        state_folder: of the run.
        device: what the run is on; on another, the peak is measured again.
        time_step: seconds that an update takes, by dtype.
        measure_peak: FLOP/s in a dtype.
    """
    path = state_folder / _FILE
    known: dict[str, Any] = read_json(path) if path.exists() else {}
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
        num_steps = max(1, round(settings.minutes * 60 / known["seconds_per_step"]))
    return Plan(num_steps, dtype, known["peak"])


def seconds_per_step(
    train_steps: Mapping[str, TrainStep], state: TrainState, batches: Callable[[int], Any]
) -> dict[str, float]:
    """Median time of an update by each of several programs, compilation excluded.

    They train the same state in turns: a machine's speed drifts, and so the drift falls on all.
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
