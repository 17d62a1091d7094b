"""A network from, and into, a folder in the Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.config import config_from_json, config_to_json, model_type
from jaxspec.checkpoint.files import read_json, write_json
from jaxspec.checkpoint.folder import CONFIG
from jaxspec.checkpoint.memory import check_network_fits
from jaxspec.checkpoint.names import (
    TABLES,
    TIED_HEAD,
    TensorPlacement,
    check_counts,
    copy_out,
    match_tensors,
    placements,
)
from jaxspec.checkpoint.params import (
    leaves_by_path,
    matrices_as_stored,
    read_params,
    shapes_by_path,
    unread_params,
)
from jaxspec.checkpoint.safetensors import (
    SINGLE,
    TensorToWrite,
    find_tensors,
    float_dtype,
    write_safetensors,
)
from jaxspec.core.checks import shown
from jaxspec.models.storage import STORAGES, stored_as, widened
from jaxspec.models.transformer import Network, param_shapes
from jaxspec.sharding import check_divides, shares_of_memory

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

FILES = "files"
"""In place of a form of `STORAGES`: weights stay in their files, for `jaxspec.mobile.export`."""


def as_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype that weights can have, from its name or any NumPy or JAX spelling.

    Raises:
        ValueError: it is not one of `DTYPES`.
    """
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}.")
    return DTYPES[name]


def load_network(
    folder: Path,
    dtype: Any = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    raw: Mapping[str, Any] | None = None,
    weights: str | None = None,
) -> Network:
    """Reads config.json and the safetensors next to it.

    Holds the weights in their final dtype, and one tensor of the files at a time.

    Args:
        folder: in the Hugging Face layout.
        dtype: dtype of the weights; `None`: as stored on accelerators, float32 on CPUs, which do
            not compute in 16 bits.
        max_positions: as for `config_from_json`.
        mesh: to put each tensor on as it is read, see `jaxspec.sharding`; `None`: one device.
        raw: the contents of config.json, if they were read already.
        weights: the form in which matrices are kept, as for `jaxspec.load`.

    Raises:
        ValueError: the mesh does not divide the network, or `weights` is no form for it.
        CheckpointError: the folder does not hold one complete, consistent network of a known
            family, or it does not fit into memory.
    """
    raw = read_json(folder / CONFIG) if raw is None else raw
    config = config_from_json(raw, max_positions)
    stored = find_tensors(folder)
    check_counts(TABLES[model_type(raw)], config, stored)
    shapes = param_shapes(config)
    leaves = shapes_by_path(shapes)
    placed = placements(model_type(raw), config, leaves)
    matched = match_tensors(placed, leaves, stored, TIED_HEAD if config.tied_head else ())
    largest = float_dtype(max(matched.values(), key=lambda tensor: tensor.num_bytes))
    target = dtype_of_network(largest, dtype)
    if weights == FILES:
        return Network(unread_params(shapes, placed, matched, target), config)
    if mesh is not None:
        check_divides(config, mesh)
    if weights is None and dtype is None and matrices_as_stored(target, largest, mesh):
        weights = "bfloat16"
    matrices = dtype_of_matrices(weights, target)
    check_network_fits(config, target, shares_of_memory(mesh), matrices)
    params = read_params(shapes, placed, matched, target, mesh, matrices)
    return Network(stored_as(params, "int8") if weights == "int8" else params, config)


def write_network(
    network: Network, folder: Path, dtype: Any = None, token_ids: dict[str, Any] | None = None
) -> None:
    """Writes config.json and model.safetensors.

    Matrices of int8 are written as the numbers that they stand for, in float32; read with
    `weights="int8"`, they become the same integers.

    Args:
        network: what to write.
        folder: must exist. Interruption is the caller's affair: see `replacing_files`.
        dtype: to store the weights in; `None`: the one they have.
        token_ids: `bos_token_id` and so on. Readers fill in their own ids for those not given,
            so they are written as null.

    Raises:
        CheckpointError: no Hugging Face family describes the network.
    """
    raw, network = config_to_json(network.config), widened(network)
    target = np.dtype(network.dtype) if dtype is None else as_dtype(dtype)
    params = leaves_by_path(network.params)
    leaves = shapes_by_path(network.params)
    placed = placements(raw["model_type"], network.config, leaves)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | (token_ids or {})
    write_json(folder / CONFIG, {**raw, **ids, "torch_dtype": target.name})

    held: dict[str, np.ndarray] = {}  # the one leaf that was fetched last

    def fetch(path: str) -> np.ndarray:
        if path not in held:
            held.clear()
            held[path] = np.asarray(params[path])
        return held[path]

    def to_write(placement: TensorPlacement) -> TensorToWrite:
        shape = placement.stored_shape(leaves[placement.path])
        return TensorToWrite(
            placement.name, shape, lambda: copy_out(placement, fetch(placement.path), target)
        )

    tensors = [to_write(placement) for group in placed.values() for placement in group]
    write_safetensors(folder / SINGLE, tensors, target)


def dtype_of_network(stored: np.dtype, asked: Any) -> np.dtype:
    """Returns the dtype asked for, or else the stored one where the device computes in it."""
    if asked is not None:
        return as_dtype(asked)
    narrow = jax.default_backend() != "cpu"
    return DTYPES.get(stored.name if narrow else "float32", DTYPES["float32"])


def dtype_of_matrices(weights: str | None, dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which matrices are read for a network of `dtype`.

    Raises:
        ValueError: `weights` is unknown or wider than `dtype`.
    """
    if weights is None:
        return dtype
    if weights not in STORAGES:
        known = ", ".join((*STORAGES, FILES))
        raise ValueError(f"weights must be one of {known}, got {shown(weights)}.")
    read = DTYPES.get(weights, dtype)
    if read.itemsize > dtype.itemsize:
        raise ValueError(f"weights={weights!r} is wider than dtype={dtype.name!r}: use that dtype.")
    return read
