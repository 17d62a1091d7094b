"""A network from, and into, a folder in the Hugging Face layout."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.config import config_from_json, config_to_json, model_type
from jaxspec.checkpoint.files import read_json, write_json
from jaxspec.checkpoint.memory import check_network_fits
from jaxspec.checkpoint.names import Placement, copy_into, copy_out, match_tensors, placements
from jaxspec.checkpoint.safetensors import (
    SINGLE,
    StoredTensor,
    TensorToWrite,
    find_tensors,
    float_dtype,
    read_tensor,
    write_safetensors,
)
from jaxspec.models.transformer import Network, param_shapes
from jaxspec.progress import progress_bar
from jaxspec.sharding import check_divides, param_sharding, put, shares_of_memory

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# XLA takes a NumPy buffer as it is, without a copy, when it is aligned like this.
_ALIGNMENT = 64
# Weights, from which on loading takes long enough to watch.
_LARGE = 500_000_000


def as_dtype(dtype: Any) -> np.dtype:
    """A dtype that weights can have, from its name or any NumPy or JAX spelling.

    Raises:
        ValueError: it is not one of `DTYPES`.
    """
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return DTYPES[name]


def load_network(
    folder: Path,
    dtype: Any = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
) -> Network:
    """Reads config.json and the safetensors beside it.

    Holds the weights in their final dtype, and of the files one tensor at a time.

    Args:
        folder: in the Hugging Face layout.
        dtype: of the weights; None: as stored on accelerators, float32 on CPUs, which do not
            compute in 16 bits.
        max_positions: as for `config_from_json`.
        mesh: to put each tensor on as it is read, see `jaxspec.sharding`; None: one device.

    Raises:
        ValueError: the mesh does not divide the network.
        CheckpointError: the folder does not hold one complete, consistent network of a known
            family, or it does not fit into memory.
    """
    raw = read_json(folder / "config.json")
    config = config_from_json(raw, max_positions)
    stored = find_tensors(folder)
    shapes = param_shapes(config)
    leaves = {path: leaf.shape for path, leaf in leaves_by_path(shapes).items()}
    placed = placements(model_type(raw), config, leaves)
    matched = match_tensors(placed, leaves, stored, config.tied_head)
    target = _default_dtype(matched) if dtype is None else as_dtype(dtype)
    if mesh is not None:
        check_divides(config, mesh)
    check_network_fits(config, target, shares_of_memory(mesh))

    arrays = {}
    large = sum(leaf.size for leaf in jax.tree.leaves(shapes)) > _LARGE
    with progress_bar(len(leaves), shown=large) as advance:
        for path, shape in leaves.items():
            advance("loading weights")
            leaf = _aligned_empty(shape, target)
            for placement in placed[path]:
                copy_into(placement, leaf, read_tensor(matched[placement.name]))
            # Waiting keeps the host from running ahead with leaves that a device has yet to take.
            arrays[path] = jax.block_until_ready(
                jax.device_put(leaf)
                if mesh is None
                else put(leaf, param_sharding(path, shape, mesh))
            )
    return Network(jax.tree.unflatten(jax.tree.structure(shapes), arrays.values()), config)


def write_network(
    network: Network, folder: Path, dtype: Any = None, token_ids: dict[str, Any] | None = None
) -> None:
    """Writes config.json and model.safetensors.

    Args:
        network: what to write.
        folder: must exist. Interruption is the caller's affair: see `replacing_files`.
        dtype: to store the weights in; None: the one they have.
        token_ids: `bos_token_id` and so on. Readers fill in ids of their own for those not given,
            so they are written as null.

    Raises:
        CheckpointError: no Hugging Face family describes the network.
    """
    raw = config_to_json(network.config)
    target = np.dtype(network.dtype) if dtype is None else as_dtype(dtype)
    params = leaves_by_path(network.params)
    leaves = {path: leaf.shape for path, leaf in params.items()}
    placed = placements(raw["model_type"], network.config, leaves)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | (token_ids or {})
    write_json(folder / "config.json", {**raw, **ids, "torch_dtype": target.name})

    held: dict[str, np.ndarray] = {}  # the one leaf that was fetched last

    def fetch(path: str) -> np.ndarray:
        if path not in held:
            held.clear()
            held[path] = np.asarray(params[path])
        return held[path]

    def to_write(placement: Placement) -> TensorToWrite:
        shape = placement.stored_shape(leaves[placement.path])
        return TensorToWrite(
            placement.name, shape, lambda: copy_out(placement, fetch(placement.path), target)
        )

    tensors = [to_write(placement) for group in placed.values() for placement in group]
    write_safetensors(folder / SINGLE, tensors, target)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of nested dictionaries by path, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in flat}


def _default_dtype(stored: dict[str, StoredTensor]) -> np.dtype:
    if jax.default_backend() == "cpu":
        return DTYPES["float32"]
    largest = max(stored.values(), key=lambda tensor: tensor.num_bytes)
    name = float_dtype(largest).name
    return DTYPES.get(name, DTYPES["float32"])


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
