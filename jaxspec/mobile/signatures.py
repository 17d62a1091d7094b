"""What an exported file computes: passes and whole steps of one row, at fixed shapes.

Every function takes the weights and a record of inputs by name, and returns a record of outputs.
State that goes from call to call comes out as `o_NAME` and goes in as NAME. Tensors lead with an
axis of 1. In contrast to `core`, `length` counts the cached tokens: the pending one is not in it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.cache import select_nodes, select_path
from jaxspec.core.forms import exchanged
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.tree import chain
from jaxspec.core.types import Hidden, KVCache, LayerKV, Params, Tree, Warp
from jaxspec.drafters import Eagle, LayerSkip
from jaxspec.drafters.growth import extend, grow_tree
from jaxspec.mobile.acceptance import accept_greedy
from jaxspec.mobile.forms import litert_forms
from jaxspec.models import Network, lookup_rows

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


def decode_signature(target: Target) -> Signature:
    """One token of plain decoding: `pending` in, its successor out."""

    def decode(params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        cache = _cache(inputs, "kv", target.config.num_layers, length)
        hidden = params.target.forward(inputs["pending"], inputs["length"], masks.causal(1), cache)
        logits = _unembed(params.target, target, hidden.features)
        return {
            "o_pending": argmax_rows(logits),
            "o_length": inputs["length"] + 1,
            "logits": logits,
            **_outgoing(_write(inputs, "kv", hidden.new_kv, length)),
        }

    return _signature(target, decode, {"pending": _ints(1), "length": _ints(1), **_kv(target)})


def prefill_signature(target: Target, size: int, drafting: "EagleStep | None" = None) -> Signature:
    """Reads `count` <= `size` tokens of a prompt behind the cached ones.

    What follows them is padding: it is written, and then means nothing. `logits` and `o_pending`
    are of the last token. With an EAGLE head the token after these must be known: `following`, any
    for the last part of a prompt, whose successor is not.
    """

    def prefill(params: Params, inputs: Record) -> Record:
        length, prompt, last = inputs["length"][0], inputs["prompt"][0], inputs["count"] - 1
        cache = _cache(inputs, "kv", target.config.num_layers, length)
        positions = length + np.arange(size, dtype=np.int32)
        taps = () if drafting is None else drafting.drafter.taps
        hidden = params.target.forward(prompt, positions, masks.causal(size), cache, taps=taps)
        logits = _unembed(params.target, target, lookup_rows(hidden.features, last))
        pending = argmax_rows(logits)
        outputs = {
            "o_pending": pending,
            "o_length": inputs["length"] + inputs["count"],
            "logits": logits,
            **_outgoing(_write(inputs, "kv", hidden.new_kv, length)),
        }
        if drafting is None:
            return outputs
        # Pair t joins the state at t with the token after it.
        head, read = params.draft, drafting.read(hidden)
        pairs = head.forward(
            params.target.embed(jnp.concatenate([prompt[1:], inputs["following"]])),
            head.states_of(read, read),
            positions,
            masks.causal(size),
            _cache(inputs, "head", 1, length),
        )
        rest = drafting.levels - 1
        states = lookup_rows(read, last)
        return outputs | {
            "o_tokens": jnp.concatenate([pending, jnp.zeros(rest, jnp.int32)])[None],
            "o_states": jnp.concatenate([states, jnp.zeros((rest, states.shape[1]))])[None],
            **_outgoing(_write(inputs, "head", pairs.new_kv, length)),
        }

    inputs = {"prompt": _ints(1, size), "count": _ints(1), "length": _ints(1), **_kv(target)}
    if drafting is not None:
        inputs |= {"following": _ints(1), **drafting.head_kv(target)}
    return _signature(target, prefill, inputs)


def verify_signature(target: Target, size: int) -> Signature:
    """Scores `size` tokens of any tree; the cache is only read.

    positions: of each token in the text. visible: 1 where a token (row) sees another (column),
    itself included. `choices` are the target's own tokens after each.
    """

    def verify(params: Params, inputs: Record) -> Record:
        cache = _cache(inputs, "kv", target.config.num_layers, inputs["length"][0])
        hidden = params.target.forward(
            inputs["tokens"][0], inputs["positions"][0], inputs["visible"][0, 0] > 0, cache
        )
        logits = _unembed(params.target, target, hidden.features)
        outputs = {
            "logits": logits[None],
            "choices": argmax_rows(logits)[None],
            "features": hidden.features[None],
        }
        return outputs | _outgoing(_record(hidden.new_kv, "new"))

    inputs = {
        "tokens": _ints(1, size),
        "positions": _ints(1, size),
        "visible": _ints(1, 1, size, size),
        "length": _ints(1),
    }
    return _signature(target, verify, {**inputs, **_kv(target)})


def commit_signature(target: Target, size: int) -> Signature:
    """Writes the nodes on a path of `verify_N` into the cache.

    path: `path[d]` is the accepted node of depth d, -1 past the last; `count` of them count.
    """

    def commit(params: Params, inputs: Record) -> Record:
        del params
        length = inputs["length"][0]
        new_kv = _cache(inputs, "new", target.config.num_layers, length).layers
        path_kv = select_path(new_kv, inputs["path"][0])
        return {
            "o_length": inputs["length"] + inputs["count"],
            **_outgoing(_write(inputs, "kv", path_kv, length)),
        }

    inputs = {"path": _ints(1, size), "count": _ints(1), "length": _ints(1), **_kv(target)}
    return _signature(target, commit, {**inputs, **_kv(target, "new", size)})


class EagleStep:
    """A whole greedy step with an EAGLE head over the drafter's static tree.

    Carried: `tokens[:count]`, what the last step emitted, and `states[:count]`, what the head reads
    of the target where they were emitted: the pairs that the head has yet to absorb.
    """

    def __init__(self, drafter: Eagle, head: Any):
        self.drafter, self.tree, self.head_config = drafter, drafter.tree, head.config
        self.levels = drafter.tree_shape[1] + 1
        self.width = len(drafter.taps or (0,)) * head.config.embed_dim

    def read(self, hidden: Hidden) -> Array:
        """What a head makes its states of: EAGLE-3 of taps, EAGLE-1 of features."""
        return hidden.taps if self.drafter.taps else hidden.features

    def head_kv(self, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
        return _kv(target._replace(config=self.head_config), "head")

    def signature(self, target: Target) -> Signature:
        inputs = {
            "tokens": _ints(1, self.levels),
            "count": _ints(1),
            "length": _ints(1),
            "pending": _ints(1),
            "states": jax.ShapeDtypeStruct((1, self.levels, self.width), jnp.float32),
        }
        inputs |= {**_kv(target), **self.head_kv(target)}
        return _signature(target, partial(self._step, target), inputs)

    def _step(self, target: Target, params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        absorbed, root_state = self._absorb(params, inputs)
        head_cache = _cache(absorbed, "head", 1, length)
        tokens = self._draft(params, inputs, head_cache, root_state, target)
        hidden, path, outputs = _verify_and_commit(
            params.target, target, self.tree, tokens, inputs, self.drafter.taps
        )
        states = path @ self.read(hidden)
        return outputs | {"o_states": states[None], **_outgoing(absorbed)}

    def _absorb(self, params: Params, inputs: Record) -> tuple[Record, Array]:
        """Caches the pairs that the last step made known, from the target's true states."""
        head, states = params.draft, inputs["states"][0]
        start = inputs["length"][0] - inputs["count"][0]
        hidden = head.forward(
            params.target.embed(inputs["tokens"][0]),
            head.states_of(states, states),
            start + np.arange(self.levels, dtype=np.int32),
            masks.causal(self.levels),
            _cache(inputs, "head", 1, start),
        )
        absorbed = _write(inputs, "head", hidden.new_kv, start)
        return absorbed, lookup_rows(hidden.features, inputs["count"] - 1)

    def _draft(
        self, params: Params, inputs: Record, cache: KVCache, state: Array, target: Target
    ) -> Array:
        head = params.draft

        def forward(level, tokens, states, mask, scratch) -> Hidden:
            position, embedded = inputs["length"] + (level - 1), params.target.embed(tokens)
            return head.forward(embedded, states, position, mask, cache, scratch=scratch)

        return grow_tree(
            self.tree,
            jax.random.key(0),  # nothing is drawn
            inputs["pending"][0],
            Warp(),
            state,
            lambda states: head.unembed(params.target, states),
            forward,
            target.num_tokens,
            head.draft_ids,
        ).tokens


class LayerSkipStep:
    """A whole greedy step in which the target drafts a chain with a baked set of layers skipped.

    The draft always has its full length: a graph without control flow cannot end it early.
    """

    def __init__(self, drafter: LayerSkip):
        if drafter.skip is None:
            raise ValueError(
                "drafter: an exported LayerSkip needs its set baked in: skip=Skips(...)."
            )
        self.skip = drafter.skip
        self.tree = chain(drafter.num_speculative_tokens)
        self.levels = drafter.num_speculative_tokens + 1

    def signature(self, target: Target) -> Signature:
        inputs = {"length": _ints(1), "pending": _ints(1), **_kv(target)}
        return _signature(target, partial(self._step, target), inputs)

    def _step(self, target: Target, params: Params, inputs: Record) -> Record:
        cache = _cache(inputs, "kv", target.config.num_layers, inputs["length"][0])
        token, tokens, scratch = inputs["pending"], [inputs["pending"]], None
        for drafted in range(self.levels - 1):
            hidden = params.target.forward(
                token,
                inputs["length"] + drafted,
                jnp.ones((1, drafted + 1), bool),
                cache,
                scratch=scratch,
                skip=self.skip,
            )
            scratch = extend(scratch, hidden.new_kv)
            token = argmax_rows(_unembed(params.target, target, hidden.features))
            tokens.append(token)
        *_, outputs = _verify_and_commit(
            params.target, target, self.tree, jnp.concatenate(tokens), inputs, ()
        )
        return outputs


def _verify_and_commit(
    network: Network,
    target: Target,
    tree: Tree,
    tokens: Array,
    inputs: Record,
    taps: tuple[int, ...],
) -> tuple[Hidden, Array, Record]:
    """The second half of any step. The path comes out as one-hot rows."""
    length = inputs["length"][0]
    hidden = network.forward(
        tokens,
        length + tree.depths,
        jnp.asarray(tree.ancestors),
        _cache(inputs, "kv", target.config.num_layers, length),
        taps=taps,
    )
    choices = argmax_rows(_unembed(network, target, hidden.features))
    accepted = accept_greedy(tree, tokens, choices)
    path_kv = select_nodes(hidden.new_kv, accepted.path)
    return (
        hidden,
        accepted.path,
        {
            "o_tokens": accepted.tokens[None],
            "o_count": accepted.count[None],
            "o_length": (length + accepted.count)[None],
            "o_pending": accepted.last[None],
            **_outgoing(_write(inputs, "kv", path_kv, length)),
        },
    )


def _unembed(network: Network, target: Target, features: Array) -> Array:
    return network.unembed(features)[:, : target.num_tokens]


def _cache(inputs: Record, prefix: str, num_layers: int, length: Array) -> KVCache:
    """Layers from a record. There both keys and values lie as [1, kv_heads, slots, head_dim]."""
    layers = (
        LayerKV(inputs[f"{prefix}_k_{i}"][0].transpose(0, 2, 1), inputs[f"{prefix}_v_{i}"][0])
        for i in range(num_layers)
    )
    return KVCache(tuple(layers), length)


def _record(layers: tuple[LayerKV, ...], prefix: str) -> Record:
    record = {}
    for i, layer in enumerate(layers):
        record[f"{prefix}_k_{i}"] = layer.keys.transpose(0, 2, 1)[None]
        record[f"{prefix}_v_{i}"] = layer.values[None]
    return record


def _write(inputs: Record, prefix: str, new_kv: tuple[LayerKV, ...], at: Array) -> Record:
    """Caches with new slots from `at`; the host owes the room.

    Keys are written as they lie in the file: as `core.cache.write` has them, whole caches would be
    turned over twice in every call.
    """
    return {
        name: jax.lax.dynamic_update_slice(
            inputs[name], new, (0, 0, at, 0), allow_negative_indices=False
        )
        for name, new in _record(new_kv, prefix).items()
    }


def _outgoing(state: Record) -> Record:
    return {f"o_{name}": value for name, value in state.items()}


def _kv(target: Target, prefix: str = "kv", slots: int | None = None):
    config = target.config
    shape = (1, config.num_kv_heads, slots or target.slots, config.head_dim)
    names = (f"{prefix}_{kind}_{i}" for i in range(config.num_layers) for kind in "kv")
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _signature(
    target: Target, function: Function, inputs: Mapping[str, jax.ShapeDtypeStruct]
) -> Signature:
    def traced(params: Params, record: Record) -> Record:
        with exchanged(litert_forms(target.slots)):
            return function(params, record)

    return Signature(traced, inputs)
