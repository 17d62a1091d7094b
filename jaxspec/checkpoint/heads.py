"""The one loader and the one writer of heads that draft for a target: EAGLE and DFlash."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from safetensors.numpy import save

from jaxspec.checkpoint.files import CheckpointError, as_path, replacing_files, write_json
from jaxspec.checkpoint.hub import Model, check_is_model
from jaxspec.checkpoint.huggingface import as_dtype
from jaxspec.checkpoint.memory import check_head_fits
from jaxspec.checkpoint.names import (
    Rule,
    Tensor,
    check_counts,
    copy_out,
    match_tensors,
    placements_by,
)
from jaxspec.checkpoint.params import leaves_by_path, read_params, shapes_by_path
from jaxspec.checkpoint.safetensors import SINGLE
from jaxspec.core.types import PyTree
from jaxspec.models.config import ModelConfig
from jaxspec.models.storage import kept_like, unscaled
from jaxspec.models.transformer import Network


def load_head_params(
    rules: tuple[Rule, ...],
    config: ModelConfig,
    init: Callable[[PRNGKeyArray], PyTree],
    stored: Mapping[str, Tensor],
    target: Network,
    dtype: Any = None,
    not_needed: tuple[str, ...] = (),
) -> PyTree:
    """Reads the parameters of a head.

    Args:
        rules: the table of the tensors' names.
        config: the shape of the head's layers.
        init: makes random parameters; only their shapes are used.
        stored: the tensors of the file by name.
        target: the network to draft for.
        dtype: dtype of the parameters; `None`: the target's, and its form of matrices.
        not_needed: names of tensors that files may hold and that are not read.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape; the first ones of each
            kind are listed. Or the head does not fit into memory.
        ValueError: `dtype` is none that weights can have.
    """
    wanted = np.dtype(target.dtype) if dtype is None else as_dtype(dtype)
    check_counts(rules, config, stored)
    shapes = jax.eval_shape(init, jax.random.key(0))
    sizes = shapes_by_path(shapes)
    placed = placements_by(rules, config, sizes)
    matched = match_tensors(placed, sizes, stored, not_needed)
    check_head_fits(2 * wanted.itemsize * sum(map(math.prod, sizes.values())))
    if dtype is not None:
        return read_params(shapes, placed, matched, wanted)
    return kept_like(read_params(shapes, placed, matched, wanted), target.params)


def network_of(target: Network | Model) -> Network:
    """Returns the network of a target that is given as a model or as its network.

    Raises:
        ValueError: it is something else, or a network of one's own.
    """
    if isinstance(target, Network):
        return target
    if not isinstance(target, Model):
        check_is_model(target, "target")
    return target.known_network


def check_target(facts: Iterable[tuple[str, Any, Any]], problems: Sequence[str] = ()) -> None:
    """Refuses a head that was made for another target.

    Args:
        facts: name, value in config.json and value of the target, of each fact.
        problems: further differences, described.

    Raises:
        CheckpointError: something differs; all of it is listed.
    """
    found = [
        f"{name} is {theirs} in config.json, {ours} in the target"
        for name, theirs, ours in facts
        if theirs != ours
    ] + [*problems]
    if found:
        raise CheckpointError(f"The head is for another target: {'; '.join(found)}.")


def write_head(
    folder: str | Path,
    raw: dict[str, Any],
    params: PyTree,
    rules: tuple[Rule, ...],
    config: ModelConfig,
    dtype: Any = None,
    more: Mapping[str, np.ndarray] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors of a head, and what lies beside them.

    Args:
        folder: made if it is not there; an interruption leaves it as it was.
        raw: the contents of config.json.
        params: the head's parameters.
        rules: the table of the tensors' names.
        config: the shape of the head's layers.
        dtype: dtype to store the weights in; `None`: the one they have.
        more: further tensors by name, stored as they are.
        beside: contents of further JSON files by name.
    """
    folder = as_path("folder", folder)
    asked = None if dtype is None else as_dtype(dtype)
    params = unscaled(params)
    leaves = leaves_by_path(params)
    tensors = dict(more or {})
    for path, group in placements_by(rules, config, shapes_by_path(params)).items():
        leaf = np.asarray(leaves[path])
        wanted = leaf.dtype if asked is None else asked
        for placement in group:
            tensors[placement.name] = copy_out(placement, leaf, wanted)
    with replacing_files(folder) as staging:
        for name, contents in {"config.json": raw, **(beside or {})}.items():
            write_json(staging / name, contents)
        # Not `save_file`, whose files only their owner may read.
        (staging / SINGLE).write_bytes(save(tensors))
