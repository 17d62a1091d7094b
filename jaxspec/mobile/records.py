"""What functions of an exported file are made of: tensors by name, and caches among them.

A function takes the weights and a record of inputs, and returns a record of outputs. State that
goes from call to call comes out as `o_NAME` and goes in as NAME. Tensors lead with an axis of 1.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.forms import exchanged
from jaxspec.core.types import KVCache, LayerKV, Params
from jaxspec.mobile.forms import litert_forms
from jaxspec.models import Network

Record = dict[str, Array]
Function = Callable[[Params, Record], Record]


class Signature(NamedTuple):
    """One function of a file, and what it takes.

    function: of the weights and of a record of inputs; gives a record of outputs.
    inputs: shape and dtype of each.
    """

    function: Function
    inputs: Mapping[str, jax.ShapeDtypeStruct]


class Target(NamedTuple):
    """How a file reads its target.

    slots: of the cache; also the longest text.
    num_tokens: ids that may be emitted; those above pad the vocabulary.
    """

    config: Any
    slots: int
    num_tokens: int


def unembed_rows(network: Network, target: Target, features: Array) -> Array:
    return network.unembed(features)[:, : target.num_tokens]


def read_cache(inputs: Record, prefix: str, num_layers: int, length: Array) -> KVCache:
    """Layers from a record. There both keys and values lie as [1, kv_heads, slots, head_dim]."""
    layers = (
        LayerKV(inputs[f"{prefix}_k_{i}"][0].transpose(0, 2, 1), inputs[f"{prefix}_v_{i}"][0])
        for i in range(num_layers)
    )
    return KVCache(tuple(layers), length)


def kv_record(layers: tuple[LayerKV, ...], prefix: str) -> Record:
    record = {}
    for i, layer in enumerate(layers):
        record[f"{prefix}_k_{i}"] = layer.keys.transpose(0, 2, 1)[None]
        record[f"{prefix}_v_{i}"] = layer.values[None]
    return record


def write_kv(inputs: Record, prefix: str, new_kv: tuple[LayerKV, ...], at: Array) -> Record:
    """Caches with new slots from `at`; the host owes the room.

    Keys are written as they lie in the file: as `core.cache.write` has them, whole caches would be
    turned over twice in every call.
    """
    return {
        name: jax.lax.dynamic_update_slice(
            inputs[name], new, (0, 0, at, 0), allow_negative_indices=False
        )
        for name, new in kv_record(new_kv, prefix).items()
    }


def outgoing(state: Record) -> Record:
    return {f"o_{name}": value for name, value in state.items()}


def kv_inputs(target: Target, prefix: str = "kv", slots: int | None = None):
    config = target.config
    shape = (1, config.num_kv_heads, slots or target.slots, config.head_dim)
    names = (f"{prefix}_{kind}_{i}" for i in range(config.num_layers) for kind in "kv")
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def make_signature(
    target: Target, function: Function, inputs: Mapping[str, jax.ShapeDtypeStruct]
) -> Signature:
    def traced(params: Params, record: Record) -> Record:
        with exchanged(litert_forms(target.slots)):
            return function(params, record)

    return Signature(traced, inputs)
