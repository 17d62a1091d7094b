"""Wall time of programs that are compared: in turns, compiled beforehand, waited for."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float


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
