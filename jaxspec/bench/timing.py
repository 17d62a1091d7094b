"""Wall time of programs that are compared: in turns, compiled beforehand, waited for."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

_MANY_MAPPINGS = 30_000  # of the 65,530 that Linux allows a process by default


def release_programs() -> None:
    """Lets go of all compiled programs, if there are very many.

    On CPUs each holds memory mappings, and a process that has used up those it may have dies
    compiling. What is needed again is compiled again: call it between groups of measurements.
    """
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > _MANY_MAPPINGS:
        jax.clear_caches()


def time_in_turns(
    programs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, Float[np.ndarray, " repeats"]]:
    """Times each program `repeats` times, one after the other in rounds.

    A machine's speed drifts; in rounds the drift falls on all programs alike, and a ratio of
    medians stays fair. The first, untimed run of each compiles it.

    Returns:
        Seconds of every run, by program.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    names, seconds = list(programs), {name: np.zeros(repeats) for name in programs}
    for turn in range(repeats):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            seconds[name][turn] = time.perf_counter() - start
    return seconds
