"""Rows at once that fit into memory, by the shapes of states and XLA's analysis of the programs."""

from typing import Any, NamedTuple

import jax

from jaxspec.batch.plan import Group, most_rows
from jaxspec.batch.settings import JobSettings
from jaxspec.batch.slots import SlotPrograms, bytes_in_one_memory, devices_in_one_memory
from jaxspec.checkpoint.memory import available_memory
from jaxspec.sharding import Placement

_SHARE_OF_MEMORY = 0.8
"""Share of the available memory that a job takes; the rest is for what no analysis predicts."""


class Fit(NamedTuple):
    """Rows at once, and the bytes that they take.

    Attributes:
        batch_size: rows at once.
        states: bytes of caches and states.
        scratch: bytes that the compiled programs need in addition.
    """

    batch_size: int
    states: int
    scratch: int


def parts_of(place: Placement | None) -> int:
    """Returns the number of parts into which a mesh divides the rows."""
    return 1 if place is None else place.data_axis_size


def fit_batch(
    programs: SlotPrograms,
    group: Group,
    settings: JobSettings,
    prefix: Any = None,
    *,
    rejoining: bool = False,
) -> Fit:
    """Chooses the rows at once that fit into memory together with the compiled programs.

    Each part of a mesh gets the same number of rows.

    Args:
        programs: programs of the job.
        group: the rows.
        settings: `batch_size` and `memory` count.
        prefix: the prefix that all prompts share.
        rejoining: rows may be decoded plainly and then draft again.

    Raises:
        ValueError: not even one row fits, or not the number asked for.
    """
    parts, asked = parts_of(programs.place), settings.batch_size
    size = asked or most_rows(len(group.rows) * programs.num_samples, parts)
    while True:
        shapes = programs.placed_shapes(group.capacity, size)
        held = bytes_in_one_memory(shapes)
        # A compilation is not tried where the states alone are too large.
        usable = _usable(settings.memory)
        fits = usable is None or held <= usable
        scratch = _scratch_bytes(programs, group, shapes, prefix, rejoining) if fits else 0
        needed = held + scratch
        # Asked again: compiled programs and their making have taken memory.
        usable = _usable(settings.memory)
        if usable is None or needed <= usable:
            return Fit(size, held, scratch)
        if size <= parts or asked is not None:
            raise ValueError(
                f"batch_size: {size} rows of capacity {group.capacity} need {needed / 1e6:.1f} MB, "
                f"and {usable / 1e6:.1f} MB may be used. Decode fewer rows at once, shorter "
                "prompts, or fewer new tokens."
            )
        # Every try compiles; the bytes needed grow with the rows.
        fitting = max(1, int(size * usable / needed))
        size = min(size // 2, 1 << (fitting.bit_length() - 1))
        size = max(1, size // parts) * parts


def _usable(memory: int | None) -> int | None:
    """Returns the bytes that may be taken: those given, or else most of those available now."""
    if memory is not None:
        return memory
    available = available_memory()
    return None if available is None else int(_SHARE_OF_MEMORY * available)


def _scratch_bytes(
    programs: SlotPrograms, group: Group, shapes: Any, prefix: Any, rejoining: bool
) -> int:
    """Returns the bytes of one row that was read, and of the program that needs most scratch."""
    reading, changing = programs.lowered(group, shapes, prefix, rejoining)
    temporary, row = _bytes_of(reading)
    most = max(temporary, *(sum(_bytes_of(program)) for program in changing))
    first = jax.tree.leaves(shapes)[0]
    devices = 1 if programs.place is None else devices_in_one_memory(first.sharding.device_set)
    return devices * (row + most)


def _bytes_of(lowered: Any) -> tuple[int, int]:
    """Returns the bytes that a program takes on each device, by XLA's analysis.

    The first number is what it takes while it runs, the second its results, except those in the
    place of donated arguments. Later calls find the same compiled program.
    """
    memory = lowered.compile().memory_analysis()
    if memory is None:
        return 0, 0
    given = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes, given
