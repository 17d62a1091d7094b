"""Rows at once that fit into memory, by the shapes of states and XLA's analysis of the programs."""

from typing import Any, NamedTuple

from jaxspec.batch.guard import Chunk
from jaxspec.batch.plan import Group, most_rows
from jaxspec.batch.settings import JobSettings
from jaxspec.batch.slots import (
    Programs,
    bytes_in_one_memory,
    chunk_arguments,
    devices_in_one_memory,
    int32,
    placed_shapes,
    read_prompt,
    rejoin,
    run_chunk,
)
from jaxspec.checkpoint.memory import available_memory
from jaxspec.core.decode import Prefix
from jaxspec.core.types import DecodeState
from jaxspec.decoding.request import bucket_of
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
    programs: Programs,
    group: Group,
    settings: JobSettings,
    prefix: Prefix | None = None,
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
    size = asked or most_rows(len(group.rows) * programs.config.num_samples, parts)
    while True:
        shapes = placed_shapes(programs.shapes(group.capacity, size), programs.place)
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
    programs: Programs, group: Group, shapes: DecodeState, prefix: Prefix | None, rejoining: bool
) -> int:
    """Returns the bytes of one row that was read, and of the program that needs most scratch.

    The programs are reading the longest prompt, a chunk, and, if rows may draft again, rejoining.
    """
    params, drafter, place = programs.params, programs.drafter, programs.place
    settings = programs.row_settings(group.capacity)
    longest = programs.prompt_of(max(group.rows, key=lambda row: len(row.tokens)))
    reading = read_prompt.lower(params, longest, prefix, drafter=drafter, settings=settings)
    temporary, row = _bytes_of(reading)
    chunk = run_chunk.lower(
        params,
        shapes,
        programs.automaton,
        programs.grammar,
        *chunk_arguments(Chunk(True, 1), 1),
        drafter=drafter,
        place=place,
    )
    most = max(temporary, sum(_bytes_of(chunk)))
    if rejoining and programs.has_draft_state:
        bucket = bucket_of(max(programs.longest_text(row) for row in group.rows))
        again = rejoin.lower(params, shapes, int32(0), drafter=drafter, bucket=bucket, place=place)
        most = max(most, sum(_bytes_of(again)))
    devices = 1 if place is None else devices_in_one_memory(shapes.stop.sharding.device_set)
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
