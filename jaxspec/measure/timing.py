"""Wall times of programs and of methods that are compared: in turns, without compiling."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from jaxspec.measure.figures import Sample

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
_MANY_MAPPINGS = 30_000  # of the 65,530 that Linux allows a process by default


def release_programs() -> None:
    """Releases all compiled programs if there are very many.

    On CPUs each program holds memory mappings. A process that has used up its mappings dies when
    it compiles. Released programs are compiled again when they are needed: call this between
    groups of measurements.

    Example:
        >>> release_programs()
    """
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > _MANY_MAPPINGS:
        jax.clear_caches()


def in_turns(names: Sequence[str], count: int, repeats: int) -> Iterator[tuple[int, str]]:
    """Yields the order of timed calls: every name on every item, in rotating order.

    A machine's speed drifts. In turns the drift falls on all names alike, so that ratios of their
    times stay fair.

    Args:
        names: methods or programs.
        count: items, for example prompts, that every name is run on.
        repeats: rounds over all items.

    Returns:
        Pairs of an item's index and a name.

    Example:
        >>> list(in_turns(["a", "b"], count=2, repeats=1))
        [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for repeat in range(repeats):
        for item in range(count):
            for place in range(len(names)):
                yield item, names[(item + repeat + place) % len(names)]


def time_in_turns(
    programs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, Float[np.ndarray, " repeats"]]:
    """Times each program `repeats` times, in turns (`in_turns`).

    The first, untimed run of each compiles it. Each result is waited for.

    Args:
        programs: functions without arguments, by name.
        repeats: timed runs of each.

    Returns:
        Seconds of every run, by program.

    Example:
        >>> seconds = time_in_turns({"nothing": lambda: None}, repeats=3)
        >>> seconds["nothing"].shape
        (3,)
    """
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _, name in in_turns(list(programs), 1, repeats):
        start = time.perf_counter()
        jax.block_until_ready(programs[name]())
        seconds[name].append(time.perf_counter() - start)
    return {name: np.asarray(times) for name, times in seconds.items()}


class Runner(Protocol[P_contra]):
    """Decodes with methods that are known by name."""

    def decode(self, method: str, prompt: P_contra, seed: int) -> Sample:
        """Decodes one prompt (or one batch) once."""
        ...


def decode_in_turns(
    runner: Runner[P],
    methods: Sequence[str],
    prompts: Mapping[int, P],
    repeats: int,
    seed: int = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[int, Sample]]:
    """Decodes every prompt with every method, in rotating order.

    Args:
        runner: decodes; its programs should be compiled already.
        methods: names that the runner knows.
        prompts: prompts by index.
        repeats: timed runs of each prompt and method.
        seed: seed of sampling; prompt i has `seed + i`.
        advance: called before each run.

    Returns:
        Samples by method and index: those of the last run, with the median of the seconds.

    Example:
        >>> from jaxspec.decoding.metrics import Counts
        >>> class Copies:
        ...     def decode(self, method, prompt, seed):
        ...         return Sample((), float(len(prompt)), Counts(num_tokens=len(prompt)))
        >>> found = decode_in_turns(Copies(), ["plain"], {7: "abc"}, repeats=2)
        >>> found["plain"][7].seconds
        3.0
    """
    indices = list(prompts)
    runs: dict[str, dict[int, list[Sample]]] = {name: {i: [] for i in indices} for name in methods}
    for place, method in in_turns(methods, len(indices), repeats):
        advance(f"decoding with {method}")
        index = indices[place]
        runs[method][index].append(runner.decode(method, prompts[index], seed + index))
    return {
        method: {
            index: samples[-1]._replace(
                seconds=float(np.median([each.seconds for each in samples]))
            )
            for index, samples in by_index.items()
        }
        for method, by_index in runs.items()
    }
