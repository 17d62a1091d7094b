"""A network from, and into, an Orbax folder: any `ModelConfig`, any sharding, exact dtypes.

The folder holds `network.json` (the config) and `params` (what Orbax writes).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.config import prepared_for
from jaxspec.checkpoint.files import CheckpointError, read_json, write_json
from jaxspec.checkpoint.memory import check_network_fits
from jaxspec.models.config import (
    Diffusion,
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from jaxspec.models.transformer import Network, param_shapes
from jaxspec.sharding import check_divides, param_sharding, shares_of_memory

CONFIG = "network.json"
PARAMS = "params"
_RECORDS = {
    record.__name__: record
    for record in (
        ModelConfig,
        Rope,
        Experts,
        Diffusion,
        LinearScaling,
        DynamicScaling,
        Llama3Scaling,
        YarnScaling,
        LongRopeScaling,
    )
}


def holds_orbax(folder: Path) -> bool:
    """Whether a folder was written by `write_orbax`."""
    return (folder / CONFIG).is_file() and (folder / PARAMS).is_dir()


def write_orbax(network: Network, folder: Path) -> None:
    """Writes the config and the weights, in the dtype they have, into an existing folder."""
    import orbax.checkpoint

    write_json(folder / CONFIG, _to_record(network.config))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), network.params)


def load_orbax(
    folder: Path,
    dtype: np.dtype | None = None,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
) -> Network:
    """Reads what `write_orbax` wrote.

    Args:
        folder: the folder.
        dtype: of the weights; None: as stored.
        max_positions: longest text to prepare for; None: as stored.
        mesh: to put the weights on, see `jaxspec.sharding`; None: one device.

    Raises:
        CheckpointError: a part is missing or damaged, or the weights do not fit the config or the
            memory, or their positions do not reach as far as `max_positions`.
        ValueError: the mesh does not divide the network.
    """
    import orbax.checkpoint

    config = _from_record(read_json(folder / CONFIG), folder / CONFIG)
    if max_positions is not None:
        config = prepared_for(config, max_positions)
    if mesh is not None:
        check_divides(config, mesh)
    path = (folder / PARAMS).absolute()
    wanted = param_shapes(config)
    # All at once, unless told otherwise; it wants more than the largest leaf takes in float32.
    at_once = 1 + 4 * max(leaf.size for leaf in jax.tree.leaves(wanted)) // 10**9
    with orbax.checkpoint.StandardCheckpointer(restore_concurrent_gb=at_once) as checkpointer:
        try:
            stored = checkpointer.metadata(path).item_metadata.tree
            target = dtype or np.dtype(stored["norm"]["scale"].dtype)
            _check_shapes(path, wanted, stored)
            check_network_fits(config, target, shares_of_memory(mesh))
            params = checkpointer.restore(path, _on_devices(wanted, target, mesh))
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and its storage raise many kinds for damaged files.
            raise CheckpointError(f"{path} cannot be read as an Orbax folder: {error}") from error
    return Network(params, config)


def _on_devices(wanted: Any, dtype: np.dtype, mesh: Mesh | None) -> Any:
    """What to restore, and where each leaf goes."""
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf_on_devices(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = "/".join(entry.key for entry in path)
        place = alone if mesh is None else param_sharding(name, leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(leaf_on_devices, wanted)


def _check_shapes(path: Path, wanted: Any, stored: Any) -> None:
    # Orbax itself cuts or pads an array that has another shape than asked for.
    shapes = [
        {jax.tree_util.keystr(key): tuple(leaf.shape) for key, leaf in flat}
        for flat in (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (wanted, stored))
    ]
    different = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
    if different:
        lines = "".join(
            f"\n  {name}: {shapes[1].get(name, 'absent')}, not {shapes[0].get(name, 'known')}"
            for name in sorted({name for name, _ in different})
        )
        raise CheckpointError(f"The weights in {path} do not fit {CONFIG}:{lines}")


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
