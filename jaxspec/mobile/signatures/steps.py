"""The half of a step that all drafters share: target pass, acceptance, commit."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core.cache import select_nodes
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.tree import chain
from jaxspec.core.types import Hidden, Params, Tree
from jaxspec.mobile.acceptance import Accepted, accept_greedy, accept_sampled
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    floats,
    ints,
    kv_inputs,
    make_signature,
    outgoing,
    read_cache,
    unembed_rows,
    write_kv,
)
from jaxspec.models import Network

Accept = Callable[[Tree, Array, Array, int], Accepted]
"""Decides from a tree, its tokens, the target's logits after each, and the rows to return."""

LARGEST_TOP_K = 64
"""Candidates that `step_sampled` looks for; an app cannot ask for more."""


def greedy(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
    """Accepts the longest path that the target would have chosen itself."""
    return accept_greedy(tree, tokens, argmax_rows(logits), levels)


def accepts(accept: Accept, drafted: Array) -> Accept:
    """Returns an acceptance for nodes that may hold no draft, where `drafted` is -1.

    The tokens that the target reads there may be what it chooses, and are not accepted.
    """

    def accept_drafted(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
        del tokens
        return accept(tree, drafted, logits, levels)

    return accept_drafted


def sampling_inputs(tree: Tree) -> Shapes:
    """Returns the further inputs of `step_sampled`: `top_k` is in 1..`LARGEST_TOP_K`, 0 is off."""
    return {
        "uniforms": floats(1, len(tree.parents)),
        "temperature": floats(1),
        "top_k": ints(1),
    }


def sampled(
    step: Callable[[Accept, Params, Record], Record], params: Params, inputs: Record
) -> Record:
    """Runs a step whose acceptance draws by the uniforms among its inputs."""

    def accept(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
        probs = warped(logits, inputs["temperature"], inputs["top_k"])
        return accept_sampled(tree, tokens, inputs["uniforms"][0], probs, levels)

    return step(accept, params, inputs)


def warped(logits: Array, temperature: Array, top_k: Array) -> Array:
    """Returns the distribution of `core.sampling.warp_logits` for these two settings."""
    most = min(LARGEST_TOP_K, logits.shape[1])
    best, ids = jax.lax.top_k(logits, most)
    # If the ids were unused, the converter would write a sort instead of TOPK_V2.
    best = best * (ids >= 0).astype(logits.dtype)
    place = jax.nn.one_hot(top_k - 1, most, dtype=logits.dtype)
    off = jnp.equal(top_k, 0).astype(logits.dtype)
    # The added numbers fit into half precision; no logit is that far below.
    lowest = jnp.sum(best * place, axis=1, keepdims=True) - 3e4 * off.reshape(1, 1)
    filtered_out = 1.0 - (logits >= lowest).astype(logits.dtype)
    return jax.nn.softmax(logits / temperature.reshape(1, 1) - 1e4 * filtered_out, axis=-1)


class Committed(NamedTuple):
    """The second half of a step.

    Attributes:
        hidden: the target's states at the nodes.
        logits: the target's, after each node.
        path: the accepted path as one-hot rows.
        outputs: of the step.
    """

    hidden: Hidden
    logits: Array
    path: Array
    outputs: Record


class WholeStep(ABC):
    """A drafter's step in one signature, greedy or sampled.

    Attributes:
        tree: static.
    """

    tree: Tree

    def signature(self, target: Target) -> Signature:
        """Makes `step`."""
        return make_signature(target, partial(self._step, target, greedy), self._inputs(target))

    def sampled_signature(self, target: Target) -> Signature:
        """Makes `step_sampled`."""
        inputs = self._inputs(target) | sampling_inputs(self.tree)
        return make_signature(target, partial(sampled, partial(self._step, target)), inputs)

    @abstractmethod
    def _inputs(self, target: Target) -> Shapes: ...

    @abstractmethod
    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record: ...


def accept_signature(target: Target, size: int) -> Signature:
    """Makes `accept_N`: the second half of a greedy step, behind a chain that the host drafted.

    Inputs: `tokens`, the pending one first; `drafted`, the number of drafts behind it. Later tokens
    are read, but not accepted. Outputs: those of `step`.
    """
    tree = chain(size - 1)

    def accept(params: Params, inputs: Record) -> Record:
        tokens = inputs["tokens"][0]
        offered = jnp.less(np.arange(size, dtype=np.int32), inputs["drafted"] + 1)
        chosen = accepts(greedy, offered.astype(jnp.int32) * (tokens + 1) - 1)
        *_, outputs = verify_and_commit(
            params.target, target, tree, tokens, inputs, (), chosen, size
        )
        return outputs

    inputs = {"tokens": ints(1, size), "drafted": ints(1), "length": ints(1)}
    return make_signature(target, accept, inputs | kv_inputs(target))


def verify_and_commit(
    network: Network,
    target: Target,
    tree: Tree,
    tokens: Array,
    inputs: Record,
    taps: tuple[int, ...],
    accept: Accept,
    levels: int,
) -> Committed:
    """Runs the second half of a step, whose result has `levels` rows."""
    length = inputs["length"][0]
    hidden = network.forward(
        tokens,
        length + tree.depths,
        jnp.asarray(tree.ancestors),
        read_cache(inputs, "kv", target.config.num_layers, length),
        taps=taps,
    )
    logits = unembed_rows(network, target, hidden.features)
    accepted = accept(tree, tokens, logits, levels)
    path_kv = select_nodes(hidden.new_kv, accepted.path)
    outputs = {
        "o_tokens": accepted.tokens[None],
        "o_count": accepted.count[None],
        "o_length": (length + accepted.count)[None],
        "o_pending": accepted.last[None],
        **outgoing(write_kv(inputs, "kv", path_kv, length)),
    }
    return Committed(hidden, logits, accepted.path, outputs)
