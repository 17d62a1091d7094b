"""Decoding prompts with several methods in turns, by any runtime."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from jaxspec.measure.figures import Sample
from jaxspec.measure.timing import in_turns

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


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
