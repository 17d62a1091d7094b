"""A target's states on disk: computed once, read by memory map."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxspec.checkpoint.files import recover_files, replacing_files
from jaxspec.training.data import SeenSequences, Sequences, in_order
from jaxspec.training.eagle import TargetStates
from jaxspec.training.report import progress_bar


def cached_states(
    observe: Callable[[Sequences], TargetStates],
    parts: Mapping[str, Sequences],
    rows_per_batch: int,
    folder: Path,
    console: Console,
) -> dict[str, SeenSequences]:
    """Sequences with the states that a target gives them, in the dtype they were computed in.

    The states lie in one folder per part, which appears when it is complete; parts that are there
    are not computed again.

    Args:
        observe: computes the states of a batch of rows.
        parts: sequences by name.
        rows_per_batch: of each call of `observe`.
        folder: where; what lies there must come from the same sequences and target.
        console: where progress goes.

    Raises:
        ValueError: the disk has no room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover_files(folder)
    shapes = {name: _shapes(observe, part, rows_per_batch) for name, part in parts.items()}
    missing = {name: parts[name] for name in parts if not (folder / name).is_dir()}
    _check_room(folder, sum(_num_bytes(shapes[name]) for name in missing))
    num_batches = sum(-(-len(part.tokens) // rows_per_batch) for part in missing.values())
    with progress_bar("the target's states", console) as bar:
        task = bar.add_task("", total=num_batches)
        for name, part in missing.items():
            with replacing_files(folder) as staging:
                (staging / name).mkdir()
                arrays = _open(staging / name, shapes[name], "w+")
                start = 0
                for batch in in_order(part, rows_per_batch):
                    for array, values in zip(arrays, observe(batch), strict=True):
                        rows = array[start : start + rows_per_batch]
                        rows[:] = np.asarray(values)[: len(rows)]
                    start += rows_per_batch
                    bar.advance(task)
                for array in arrays:
                    if isinstance(array, np.memmap):
                        array.flush()
    return {
        # As plain arrays over the maps: JAX takes no subclasses.
        name: SeenSequences(*part, *map(np.asarray, _open(folder / name, shapes[name], "r")))
        for name, part in parts.items()
    }


def _shapes(observe, part: Sequences, rows_per_batch: int) -> TargetStates:
    """What the states of all rows look like."""
    batch = Sequences(*(np.zeros((rows_per_batch, field.shape[1]), np.int32) for field in part))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(part.tokens), *leaf.shape[1:]), leaf.dtype),
        jax.eval_shape(observe, batch),
    )


def _open(folder: Path, shapes: TargetStates, mode) -> list[np.ndarray]:
    # A map of no bytes cannot be made.
    return [
        np.memmap(folder / name, shape.dtype, mode, shape=shape.shape)
        if shape.size
        else np.zeros(shape.shape, shape.dtype)
        for name, shape in zip(TargetStates._fields, shapes, strict=True)
    ]


def _num_bytes(shapes: TargetStates) -> int:
    return sum(shape.size * shape.dtype.itemsize for shape in shapes)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"The target's states take {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} "
            "GB are free: leave out cache_features (--cache-features), read less, or choose "
            "another state folder (--state)."
        )
