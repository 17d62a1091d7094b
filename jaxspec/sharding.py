"""Models, caches and rows over a mesh of devices: tensor parallel and data parallel at once.

A mesh has two axes. Rows of a batch lie over "data"; heads, hidden units of MLPs, the vocabulary
and experts of a model lie over "model". One table assigns them. XLA does the rest: each block ends
in one sum over "model", and rows of different devices meet only where a drafter takes the best
nodes of a level of its tree.

A model carries its mesh with its weights: `mesh_of` finds it, and compiled functions are called
`on` it. There a few functions take another form (`core.forms`) that keeps every axis of a weight in
its place: an axis that is merged into another cannot stay divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxspec.core.checks import shown
from jaxspec.core.forms import exchanged
from jaxspec.core.loop import placed
from jaxspec.core.types import LayerKV, PyTree
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import activate, mix_experts, project

DATA, MODEL = "data", "model"

Axes = tuple[str | None, ...]
T = TypeVar("T")

MESH_AXES: Mapping[str | None, str] = {
    "rows": DATA,
    "heads": MODEL,
    "hidden": MODEL,
    "vocabulary": MODEL,
    "experts": MODEL,
}
"""Axis of the mesh for each logical axis; all others are whole on every device."""

PARAM_AXES: Mapping[tuple[str, int], Axes] = {
    ("embed/embedding", 2): ("vocabulary", None),
    ("head/kernel", 2): (None, "vocabulary"),
    ("vocabulary/table", 2): (None, "vocabulary"),
    ("qkv/kernel", 4): (None, "heads", None, None),
    ("qkv/bias", 3): ("heads", None, None),
    ("out/kernel", 4): ("heads", None, None, None),
    ("gate_up/kernel", 3): (None, None, "hidden"),
    ("gate_up/bias", 2): (None, "hidden"),
    ("down/kernel", 2): ("hidden", None),
    # Experts: whole ones on each device, or a part of every one where their number is not divided.
    ("gate_up/kernel", 4): ("experts", None, None, "hidden"),
    ("down/kernel", 3): ("experts", "hidden", None),
}
"""Logical axes of weights, by the end of their name and their rank; all others are whole.

"heads" are key heads, each with the query heads that share it.
"""

CACHE_AXES: Axes = ("rows", "heads", None, None)
"""Logical axes of a batch's keys and values, in the cache of any model."""


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh of two axes, "data" and "model".

    Args:
        data: parts into which the rows of a batch are divided; `None`: as many as there are devices
            for.
        model: parts into which heads, MLPs, vocabulary and experts are divided.
        devices: the mesh takes the first of these; `None`: of all devices of this process.

    Raises:
        ValueError: a size is below 1, or the mesh does not divide the devices.

    Example:
        >>> make_mesh(data=1, model=1).axis_names
        ('data', 'model')
    """
    devices = jax.local_devices() if devices is None else devices
    kind = f"the {len(devices)} {devices[0].platform} devices here"
    if model < 1 or (data is not None and data < 1):
        raise ValueError(f"mesh: sizes count from 1, got data={data}, model={model}.")
    if data is None:
        data = max(1, len(devices) // model)
    if len(devices) % (data * model):
        raise ValueError(
            f"mesh: data={data},model={model} takes {data * model} devices, which must divide "
            f"{kind}; choose sizes whose product is one of {_divisors(len(devices))}."
        )
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), (DATA, MODEL))


def parse_mesh(text: str) -> Mesh:
    """Reads "data=2,model=4"; an axis left out is 1.

    Raises:
        ValueError: the text says something else, or as for `make_mesh`.

    Example:
        >>> dict(parse_mesh("data=1").shape)
        {'data': 1, 'model': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in (DATA, MODEL) or axis in sizes or not _is_size(size):
            raise ValueError(f"mesh must be like data=2,model=4, got {shown(text)}.")
        sizes[axis] = int(size)
    return make_mesh(sizes.get(DATA, 1), sizes.get(MODEL, 1))


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) < 10  # Python reads no numbers of thousands of digits


def check_divides(config: ModelConfig, mesh: Mesh) -> None:
    """Refuses a mesh that a target cannot be divided over.

    Key heads are not copied: a mesh has at most as many devices on its axis "model" as there are
    key heads. Rows over "data" use the other devices. A vocabulary that is not divided is whole on
    every device.

    Raises:
        ValueError: the axis "model" does not divide the key heads, the hidden units of the MLPs,
            or the experts and their hidden units.
    """
    parts = mesh.shape[MODEL]
    sizes = {"key heads": config.num_kv_heads}
    sparse = [config.sparse_layer(layer) for layer in range(config.num_layers)]
    if not all(sparse):
        sizes["hidden units of its MLPs"] = config.mlp_dim
    if any(sparse) and config.experts is not None and config.experts.num % parts:
        sizes["hidden units of its experts"] = config.experts.mlp_dim
    for what, size in sizes.items():
        if size % parts:
            raise ValueError(
                f"mesh: model={parts} does not divide the {size} {what}; choose model from "
                f"{_divisors(size)}, and data=N for the other devices."
            )


def partition(axes: Axes, shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """Returns the partition of an array with these logical axes.

    An axis of the mesh divides the first logical axis that it can; other axes are whole.

    Args:
        axes: one for each of the leading dimensions of `shape`.
        shape: of the array.
        mesh: a mesh, or its abstract form while a program is traced.
    """
    free, spec = set(mesh.axis_names), []
    for axis, size in zip(axes, shape, strict=False):
        over = MESH_AXES.get(axis)
        divided = over in free and size % mesh.shape[over] == 0
        spec.append(over if divided else None)
        free -= {over} if divided else set()
    return PartitionSpec(*spec)


def param_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a weight, by the last two parts of its name, which "/" joins."""
    end = "/".join(name.split("/")[-2:])
    axes = PARAM_AXES.get((end, len(shape)), ())
    return NamedSharding(mesh, partition(axes, shape, mesh))


def put(array: np.ndarray, sharding: NamedSharding) -> Array:
    """Puts an array of the host on its shards: each device receives its part and no more."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def shard(weights: T, mesh: Mesh) -> T:
    """Puts weights of any model or head on a mesh; those that lie there already stay.

    Weights that the mesh does not divide, such as the one key head of a small draft model, are
    whole on every device.
    """

    def place(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        name = "/".join(_entry_name(entry) for entry in path)
        return jax.device_put(leaf, param_sharding(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, weights)


def on_every_device(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def spread_rows(mesh: Mesh, batch: PyTree) -> PyTree:
    """Puts the first axis of a batch over "data", an equal part on each device.

    If "data" does not divide the rows, all of them are on every device, and the work is repeated.
    """

    def place(leaf: Any) -> Array:
        return jax.device_put(leaf, NamedSharding(mesh, partition(("rows",), np.shape(leaf), mesh)))

    return jax.tree.map(place, batch)


def mesh_of(weights: PyTree) -> Mesh | None:
    """Returns the mesh of weights; `None` for those of a single device."""
    for leaf in jax.tree.leaves(weights):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (DATA, MODEL):
            mesh: Any = sharding.mesh
            return mesh
    return None


def shard_like(target: PyTree, weights: T) -> T:
    """Puts weights on the mesh of a target's weights, if those lie on one."""
    mesh = mesh_of(target)
    return weights if mesh is None else shard(weights, mesh)


def shares_of_memory(mesh: Mesh | None, *, rows: bool = False) -> int:
    """Returns the separate memories over which a model is divided, or, for `rows`, their caches."""
    if mesh is None or mesh.devices.flat[0].platform == "cpu":
        return 1
    return mesh.size if rows else mesh.shape[MODEL]


def placement_of(weights: PyTree) -> "Placement | None":
    """Returns the layout of rows for weights on a mesh; `None` for those of a single device."""
    mesh = mesh_of(weights)
    return None if mesh is None else Placement(mesh)


def on_mesh_of(weights: PyTree) -> AbstractContextManager[None]:
    """Traces and calls programs within it for the mesh of the weights, if there is one."""
    mesh = mesh_of(weights)
    return nullcontext() if mesh is None else on(mesh)


@dataclass(frozen=True)
class Placement:
    """Lays out a batch of rows on a mesh: rows over "data", their caches over "model" too.

    It works on arrays and, as a constraint, inside a program.
    """

    mesh: Mesh

    @property
    def data_axis_size(self) -> int:
        """Number of parts into which rows are divided."""
        return self.mesh.shape[DATA]

    def __call__(self, states: T) -> T:
        """Returns the same states, laid out."""

        def pin(array: Array, axes: Axes) -> Array:
            spec = partition(axes, array.shape, self.mesh)
            return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

        def place(node: Any) -> Any:
            if isinstance(node, LayerKV):
                return LayerKV(*(pin(array, CACHE_AXES) for array in node))
            return pin(node, ("rows",))

        return jax.tree.map(place, states, is_leaf=lambda node: isinstance(node, LayerKV))


@contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Traces and calls programs within it for this mesh.

    The mesh is part of a compiled program's key, so the forms are too.
    """
    forms: dict[Any, Any] = {placed: Placement(mesh)}
    if mesh.shape[MODEL] > 1:
        forms |= {project: _project, mix_experts: _mix_experts}
    with jax.set_mesh(mesh), exchanged(forms):
        yield


def _project(
    inputs: Float[Array, "nodes *ins"], kernel: Float[Array, "*ins_and_outs"]
) -> Float[Array, "nodes *outs"]:
    return jnp.tensordot(inputs, kernel, axes=inputs.ndim - 1)


def _mix_experts(
    config: ModelConfig,
    inputs: Float[Array, "nodes embed"],
    weights: Float[Array, "nodes chosen"],
    chosen: Array,
    gate_up: Float[Array, "experts embed 2 hidden"],
    down: Float[Array, "experts hidden embed"],
) -> Float[Array, "nodes embed"]:
    """Every device runs all tokens through its own experts, one after the other."""
    num, parts = gate_up.shape[0], jax.sharding.get_abstract_mesh().shape[MODEL]
    parts = parts if num % parts == 0 else 1
    one_hot = jax.nn.one_hot(chosen, num, dtype=inputs.dtype)
    shares = jnp.einsum("nk,nke->en", weights, one_hot)
    gate_up, down, shares = (
        array.reshape(parts, num // parts, *array.shape[1:]) for array in (gate_up, down, shares)
    )

    def add_expert(i: Any, totals: Float[Array, "parts nodes embed"]) -> Array:
        ups, downs, share = (
            jax.lax.dynamic_index_in_dim(array, i, axis=1, keepdims=False)
            for array in (gate_up, down, shares)
        )
        hidden = jnp.einsum("nd,pdtf->pntf", inputs, ups)
        hidden = activate(config, hidden[:, :, 0]) * hidden[:, :, 1]
        return totals + share[:, :, None] * jnp.einsum("pnf,pfd->pnd", hidden, downs)

    totals = jnp.zeros((parts, *inputs.shape), inputs.dtype)
    return jnp.sum(jax.lax.fori_loop(0, num // parts, add_expert, totals), axis=0)


def _entry_name(entry: Any) -> str:
    """Returns the name of a step on the path to a leaf: a key, a field's name, an index."""
    for field in ("key", "name", "idx"):
        if hasattr(entry, field):
            return str(getattr(entry, field))
    return str(entry)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
