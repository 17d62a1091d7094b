"""A target's states: computed with every batch, or once, and then read by memory map."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console

from jaxspec.checkpoint.files import recover_files, replacing_files
from jaxspec.core.masks import causal, same_document
from jaxspec.models import Network
from jaxspec.training.data import Rows, Sequences, in_order
from jaxspec.training.report import progress_bar
from jaxspec.training.run import Corpus, Run
from jaxspec.training.settings import RunSettings


class TargetStates(NamedTuple):
    """What a target makes of sequences.

    features: after its final norm: what its output head reads.
    taps: the inputs of the tapped layers side by side; of width 0 for EAGLE-1.
    """

    features: Float[Array, "*rows length embed"]
    taps: Float[Array, "*rows length tapped"]


class StoredStates(NamedTuple):
    """The same of rows of text, on disk until they are read."""

    features: Float[np.ndarray, "rows length embed"]
    taps: Float[np.ndarray, "rows length tapped"]


def target_states(
    target: Network, sequences: Sequences, taps: tuple[int, ...] = ()
) -> TargetStates:
    """One pass of the target over rows of documents, which do not see each other."""

    def read(tokens, segments, positions) -> TargetStates:
        mask = causal(len(tokens)) & same_document(segments)
        hidden = target.forward(tokens, positions, mask, None, taps=taps)
        return TargetStates(hidden.features, hidden.taps)

    return jax.lax.stop_gradient(jax.vmap(read)(*map(jnp.asarray, sequences)))


def with_states(
    run: Run[RunSettings],
    corpus: Corpus[Rows],
    observe: Callable[[Rows], TargetStates],
    joined: Callable[[Rows, StoredStates], Any],
) -> Corpus[Any]:
    """The corpus with the target's states, from files beside the run's other ones.

    Args:
        run: whose text it is.
        corpus: whose rows are observed.
        observe: see `cached_states`.
        joined: rows with their states.
    """
    folder, rows_per_batch = run.state_folder / "features", run.settings.rows_per_batch

    def seen(kind: str, texts: dict[str, Rows]) -> dict[str, Any]:
        # By number: a source's name may hold any character.
        parts = {f"{kind}-{i}": rows for i, rows in enumerate(texts.values()) if len(rows.tokens)}
        states = cached_states(observe, parts, rows_per_batch, folder, run.console)
        names = [name for name, rows in texts.items() if len(rows.tokens)]
        return {
            name: joined(parts[part], states[part]) for name, part in zip(names, parts, strict=True)
        }

    return Corpus(
        seen("train", corpus.train), seen("validation", corpus.validation), corpus.weights
    )


def cached_states(
    observe: Callable[[Rows], TargetStates],
    parts: Mapping[str, Rows],
    rows_per_batch: int,
    folder: Path,
    console: Console,
) -> dict[str, StoredStates]:
    """The states that a target gives rows of text, in the dtype they were computed in.

    The states lie in one folder per part, which appears when it is complete; parts that are there
    are not computed again.

    Args:
        observe: computes the states of a batch of rows.
        parts: rows by name.
        rows_per_batch: of each call of `observe`.
        folder: where; what lies there must come from the same rows and target.
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
        name: StoredStates(*map(np.asarray, _open(folder / name, shapes[name], "r")))
        for name in parts
    }


def _shapes(observe: Callable, part: Any, rows_per_batch: int) -> TargetStates:
    """What the states of all rows look like."""
    batch = type(part)(*(np.zeros((rows_per_batch, field.shape[1]), np.int32) for field in part))
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
