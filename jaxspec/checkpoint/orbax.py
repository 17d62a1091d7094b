"""A network from, and into, an Orbax folder: any `ModelConfig`, any sharding, exact dtypes.

The folder holds `network.json` (the config) and `params` (what Orbax writes).
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.config import prepared_for
from jaxspec.checkpoint.files import CheckpointError, listed, read_json, write_json
from jaxspec.checkpoint.folder import ORBAX_CONFIG, ORBAX_PARAMS
from jaxspec.checkpoint.huggingface import dtype_of_matrices, dtype_of_network
from jaxspec.checkpoint.memory import check_network_fits
from jaxspec.checkpoint.params import matrices_as_stored
from jaxspec.models import config as records
from jaxspec.models.storage import stored_as
from jaxspec.models.transformer import Network, param_shapes
from jaxspec.sharding import check_divides, param_sharding, shares_of_memory

# The records that describe a network, by name.
_RECORDS: dict[str, Any] = {
    name: kind for name, kind in vars(records).items() if dataclasses.is_dataclass(kind)
}


def write_orbax(network: Network, folder: Path) -> None:
    """Writes the config and the weights, in the dtype they have, into an existing folder."""
    import orbax.checkpoint

    write_json(folder / ORBAX_CONFIG, _to_record(network.config))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / ORBAX_PARAMS).absolute(), network.params)


def load_orbax(
    folder: Path,
    dtype: Any = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    weights: str | None = None,
) -> Network:
    """Reads what `write_orbax` wrote.

    Args:
        folder: the folder.
        dtype: dtype of the network; `None`: as stored on accelerators, float32 on CPUs.
        max_positions: longest text to prepare for; `None`: as stored.
        mesh: to put the weights on, see `jaxspec.sharding`; `None`: one device.
        weights: the form in which matrices are kept, as for `jaxspec.load`; matrices that are
            stored in int8 stay that unless it says otherwise.

    Raises:
        CheckpointError: a part is missing or damaged, or the weights do not fit the config or the
            memory, or their positions do not reach as far as `max_positions`.
        ValueError: the mesh does not divide the network, or `weights` is no form for it.
    """
    import orbax.checkpoint

    described = folder / ORBAX_CONFIG
    config = _from_record(read_json(described), described)
    if not isinstance(config, records.ModelConfig):
        raise CheckpointError(
            f"{described} must describe a ModelConfig, and its type is {type(config).__name__}."
        )
    if max_positions is not None:
        config = prepared_for(config, max_positions)
    if mesh is not None:
        check_divides(config, mesh)
    path = (folder / ORBAX_PARAMS).absolute()
    stored = _stored_leaves(path)
    num_layers = sum(name.startswith("layer_") for name in stored)
    if config.num_layers > num_layers:
        raise CheckpointError(
            f"The weights in {path} do not fit {ORBAX_CONFIG}, by which there are "
            f"{config.num_layers} layers: they have {num_layers}."
        )
    wanted = param_shapes(config)
    # Orbax restores all at once unless it is given a limit, which must exceed the largest leaf
    # in float32.
    at_once = 1 + 4 * max(leaf.size for leaf in jax.tree.leaves(wanted)) // 10**9
    with orbax.checkpoint.StandardCheckpointer(restore_concurrent_gb=at_once) as checkpointer:
        try:
            largest = max(jax.tree.leaves(stored), key=lambda leaf: math.prod(leaf.shape))
            whole = largest.dtype == np.int8
            target = dtype_of_network(np.dtype(stored["norm"]["scale"].dtype), dtype)
            kept = np.dtype(largest.dtype)
            if weights is None and dtype is None and matrices_as_stored(target, kept, mesh):
                weights = "bfloat16"
            matrices = kept if whole else dtype_of_matrices(weights, target)
            wanted = jax.eval_shape(partial(_in_form, dtype=target, matrices=matrices), wanted)
            _check_shapes(path, wanted, stored)
            check_network_fits(config, target, shares_of_memory(mesh), matrices)
            params = checkpointer.restore(path, _on_devices(wanted, mesh))
        except CheckpointError:
            raise
        except Exception as error:
            raise _unreadable(path, error) from error
    if weights == "int8" or (whole and weights is not None):
        params = stored_as(params, weights)
    return Network(params, config)


def _stored_leaves(path: Path) -> Mapping[str, Any]:
    """Returns the shape and dtype of each leaf, by the layer or part that it is in."""
    import orbax.checkpoint

    try:
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            return checkpointer.metadata(path).item_metadata.tree
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    # Orbax and its storage raise many kinds for damaged files.
    return CheckpointError(f"{path} cannot be read as an Orbax folder: {error}")


def _in_form(params: Any, dtype: np.dtype, matrices: np.dtype) -> Any:
    """Casts parameters. Scales of int8 stay float32: in fewer bits they are other numbers."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return params if matrices == dtype else stored_as(params, matrices.name)


def _on_devices(wanted: Any, mesh: Mesh | None) -> Any:
    """Describes each leaf to restore: its shape, its dtype and its devices."""
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf_on_devices(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = "/".join(entry.key for entry in path)
        place = alone if mesh is None else param_sharding(name, leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(leaf_on_devices, wanted)


def _check_shapes(path: Path, wanted: Any, stored: Any) -> None:
    # Orbax itself cuts or pads an array that has another shape than asked for.
    shapes = [
        {jax.tree_util.keystr(key): tuple(leaf.shape) for key, leaf in flat}
        for flat in (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (wanted, stored))
    ]
    different = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
    if different:
        problems = [
            f"{name}: {shapes[1].get(name, 'absent')}, not {shapes[0].get(name, 'known')}"
            for name in sorted({name for name, _ in different})
        ]
        raise CheckpointError(f"The weights in {path} do not fit {ORBAX_CONFIG}:{listed(problems)}")


def _to_record(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _to_record(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    return list(value) if isinstance(value, tuple) else value


def _from_record(value: Any, path: Path) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, Mapping):
        return value
    fields = {name: _from_record(part, path) for name, part in value.items() if name != "type"}
    try:
        return _RECORDS[value["type"]](**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not describe a network: {error!r}.") from error
