"""Passes of the target: `prefill_N`, `decode`, `verify_N` and `commit_N`."""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.cache import select_path
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import Hidden, Params
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    cleared,
    floats,
    ints,
    kv_inputs,
    kv_record,
    make_signature,
    outgoing,
    padded_rows,
    read_cache,
    unembed_rows,
    write_kv,
)
from jaxspec.models import lookup_rows


def decode_signature(target: Target) -> Signature:
    """Makes `decode`, one token of plain decoding: `pending` goes in, its successor comes out."""

    def decode(params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        cache = read_cache(inputs, "kv", target.config.num_layers, length)
        hidden = params.target.forward(inputs["pending"], inputs["length"], masks.causal(1), cache)
        logits = unembed_rows(params.target, target, hidden.features)
        return {
            "o_pending": argmax_rows(logits),
            "o_length": inputs["length"] + 1,
            "logits": logits,
            **outgoing(write_kv(inputs, "kv", hidden.new_kv, length)),
        }

    return make_signature(
        target, decode, {"pending": ints(1), "length": ints(1), **kv_inputs(target)}
    )


class FillsPrompts(Protocol):
    """A step whose state is filled while the prompt is read."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that it reads."""
        ...

    def prefill_inputs(self, target: Target) -> Shapes:
        """Returns the further inputs of `prefill_N`."""
        ...

    def prefilled(
        self, target: Target, params: Params, inputs: Record, hidden: Hidden, pending: Array
    ) -> Record:
        """Returns the further outputs of `prefill_N`, from the target's states of the prompt."""
        ...


class CarriesStates(Protocol):
    """A step whose head reads the target's states at the tokens of the last step."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that it reads."""
        ...

    @property
    def levels(self) -> int:
        """Number of rows of the states."""
        ...

    @property
    def width(self) -> int:
        """Numbers of each state."""
        ...

    def read(self, hidden: Hidden) -> Array:
        """Returns the states that the head reads."""
        ...


def prefill_signature(target: Target, size: int, drafting: FillsPrompts | None = None) -> Signature:
    """Makes `prefill_N`, which reads `count` <= `size` tokens of a prompt behind the cached ones.

    Padding follows them; it is written and later overwritten. The caches behind them come out as
    zeros, so that a host need not empty its buffers. `logits` and `o_pending` belong to the last
    token.
    """

    def prefill(params: Params, inputs: Record) -> Record:
        length, prompt, last = inputs["length"][0], inputs["prompt"][0], inputs["count"] - 1
        inputs = cleared(inputs, "kv", length)
        cache = read_cache(inputs, "kv", target.config.num_layers, length)
        positions = length + np.arange(size, dtype=np.int32)
        taps = () if drafting is None else drafting.taps
        hidden = params.target.forward(prompt, positions, masks.causal(size), cache, taps=taps)
        logits = unembed_rows(params.target, target, lookup_rows(hidden.features, last))
        pending = argmax_rows(logits)
        outputs = {
            "o_pending": pending,
            "o_length": inputs["length"] + inputs["count"],
            "logits": logits,
            **outgoing(write_kv(inputs, "kv", hidden.new_kv, length)),
        }
        if drafting is None:
            return outputs
        return outputs | drafting.prefilled(target, params, inputs, hidden, pending)

    inputs = {"prompt": ints(1, size), "count": ints(1), "length": ints(1), **kv_inputs(target)}
    if drafting is not None:
        inputs |= drafting.prefill_inputs(target)
    return make_signature(target, prefill, inputs)


def verify_signature(target: Target, size: int, drafting: CarriesStates | None = None) -> Signature:
    """Makes `verify_N`, which scores `size` tokens of any tree; the cache is only read.

    Inputs: `positions`, the position of each token in the text; `visible`, 1 where a token (row)
    sees another (column), itself included. Outputs: `choices`, the target's own token after each.
    The states that a head reads, `new_states`, pass to `commit_N`.
    """
    taps = () if drafting is None else drafting.taps

    def verify(params: Params, inputs: Record) -> Record:
        cache = read_cache(inputs, "kv", target.config.num_layers, inputs["length"][0])
        hidden = params.target.forward(
            inputs["tokens"][0],
            inputs["positions"][0],
            inputs["visible"][0, 0] > 0,
            cache,
            taps=taps,
        )
        logits = unembed_rows(params.target, target, hidden.features)
        outputs = {"logits": logits[None], "choices": argmax_rows(logits)[None]}
        if drafting is None:
            outputs["features"] = hidden.features[None]
        else:
            outputs["o_new_states"] = drafting.read(hidden)[None]
        return outputs | outgoing(kv_record(hidden.new_kv, "new"))

    inputs = {
        "tokens": ints(1, size),
        "positions": ints(1, size),
        "visible": ints(1, 1, size, size),
        "length": ints(1),
    }
    return make_signature(target, verify, {**inputs, **kv_inputs(target)})


def commit_signature(target: Target, size: int, drafting: CarriesStates | None = None) -> Signature:
    """Makes `commit_N`, which writes the nodes on a path of `verify_N` into the cache.

    Inputs: `path`, where `path[d]` is the accepted node of depth d and -1 past the last one;
    `count`, the number of nodes on it. With a head the states on the path come out too, as `draft`
    and `absorb` take them.
    """

    def commit(params: Params, inputs: Record) -> Record:
        del params
        length, path = inputs["length"][0], inputs["path"][0]
        new_kv = read_cache(inputs, "new", target.config.num_layers, length).layers
        # The converter refuses a choice among one node, and there is nothing to choose.
        path_kv = new_kv if size == 1 else select_path(new_kv, path)
        outputs = {
            "o_length": inputs["length"] + inputs["count"],
            **outgoing(write_kv(inputs, "kv", path_kv, length)),
        }
        if drafting is not None and size == 1:
            outputs["o_states"] = padded_rows(inputs["new_states"][0], drafting.levels)
        elif drafting is not None:
            missing = jnp.full(max(0, drafting.levels - size), -1, jnp.int32)
            states_path = jnp.concatenate([path, missing])[: drafting.levels]
            rows = jax.nn.one_hot(states_path, size, dtype=jnp.float32)
            outputs["o_states"] = (rows @ inputs["new_states"][0])[None]
        return outputs

    inputs = {"path": ints(1, size), "count": ints(1), "length": ints(1), **kv_inputs(target)}
    inputs |= kv_inputs(target, "new", size)
    if drafting is not None:
        inputs["new_states"] = floats(1, size, drafting.width)
    return make_signature(target, commit, inputs)
