"""Parts of the functions of an exported file: tensors by name, and caches among them.

A function takes the weights and a record of inputs and returns a record of outputs. State that
passes from call to call comes out as `o_NAME` and goes in as NAME. Tensors lead with an axis of 1.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core.forms import exchanged
from jaxspec.core.types import KVCache, LayerKV, Params
from jaxspec.mobile.forms import litert_forms
from jaxspec.models import Network

Record = dict[str, Array]
Shapes = dict[str, jax.ShapeDtypeStruct]
Function = Callable[[Params, Record], Record]


class Signature(NamedTuple):
    """One function of a file.

    Attributes:
        function: takes the weights and a record of inputs; returns a record of outputs.
        inputs: shape and dtype of each input.
    """

    function: Function
    inputs: Mapping[str, jax.ShapeDtypeStruct]


class Target(NamedTuple):
    """The target as a file reads it.

    Attributes:
        config: of the model.
        capacity: of the cache, in tokens; also the longest text.
        num_tokens: ids that may be emitted; those above pad the vocabulary.
        num_positions: positions that passes read, those of masks behind the text included.
    """

    config: Any
    capacity: int
    num_tokens: int
    num_positions: int


def unembed_rows(network: Network, target: Target, features: Array) -> Array:
    """Returns the logits of rows of features, without those that pad the vocabulary."""
    return network.unembed(features)[:, : target.num_tokens]


def read_cache(inputs: Record, prefix: str, num_layers: int, length: Array) -> KVCache:
    """Reads a cache from a record, where keys and values are [1, kv_heads, capacity, head_dim]."""
    layers = (
        LayerKV(inputs[f"{prefix}_k_{i}"][0].transpose(0, 2, 1), inputs[f"{prefix}_v_{i}"][0])
        for i in range(num_layers)
    )
    return KVCache(tuple(layers), length)


def cleared(inputs: Record, prefix: str, used: Array) -> Record:
    """Returns a record in which caches hold zeros from their place `used` on.

    Attention masks by sums, and a sum with what is not a number is none. So whatever a host's new
    buffers hold has to be left out once, by a choice, before a cache is read.
    """

    def kept(cache: Array) -> Array:
        places = np.arange(cache.shape[2], dtype=np.int32).reshape(1, 1, -1, 1)
        return jnp.where(jnp.less(places, used.reshape(1, 1, 1, 1)), cache, 0.0)

    caches = re.compile(rf"{prefix}_[kv]_\d+")
    return {
        name: kept(value) if caches.fullmatch(name) else value for name, value in inputs.items()
    }


def kv_record(layers: tuple[LayerKV, ...], prefix: str) -> Record:
    """Returns keys and values as a record lists them."""
    record = {}
    for i, layer in enumerate(layers):
        record[f"{prefix}_k_{i}"] = layer.keys.transpose(0, 2, 1)[None]
        record[f"{prefix}_v_{i}"] = layer.values[None]
    return record


def write_kv(inputs: Record, prefix: str, new_kv: tuple[LayerKV, ...], at: Array) -> Record:
    """Writes new tokens into caches from `at`; the host checks that there is room.

    Keys are written in the layout of the file: in the layout of `core.cache.write`, whole caches
    would be transposed twice in every call.
    """
    return {
        name: jax.lax.dynamic_update_slice(
            inputs[name], new, (0, 0, at, 0), allow_negative_indices=False
        )
        for name, new in kv_record(new_kv, prefix).items()
    }


def padded_rows(rows: Array, count: int) -> Array:
    """Returns rows with zeros behind them, `count` in all, as a record lists them."""
    return jnp.concatenate([rows, jnp.zeros((count - len(rows), rows.shape[1]))])[None]


def outgoing(state: Record) -> Record:
    """Renames state to the outputs that carry it to the next call."""
    return {f"o_{name}": value for name, value in state.items()}


def kv_inputs(target: Target, prefix: str = "kv", capacity: int | None = None) -> Shapes:
    """Returns the shapes of the caches of every layer."""
    config = target.config
    shape = (1, config.num_kv_heads, capacity or target.capacity, config.head_dim)
    names = (f"{prefix}_{kind}_{i}" for i in range(config.num_layers) for kind in "kv")
    return {name: floats(*shape) for name in names}


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an int32 input."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a float32 input."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def make_signature(
    target: Target,
    function: Function,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    forms: Mapping[Callable, Callable] | None = None,
) -> Signature:
    """Makes a signature whose function is traced in `forms`, by default those that LiteRT takes."""

    def traced(params: Params, record: Record) -> Record:
        with exchanged(forms or litert_forms(target.num_positions)):
            return function(params, record)

    return Signature(traced, inputs)
