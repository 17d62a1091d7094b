"""What an exported file computes: passes and whole steps of one row, at fixed shapes.

See `records` for how they take and give tensors. In contrast to `core`, `length` counts the cached
tokens: the pending one is not in it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.cache import select_nodes, select_path
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.tree import chain
from jaxspec.core.types import Hidden, KVCache, Params, Tree, Warp
from jaxspec.drafters import Deer, Eagle, LayerSkip
from jaxspec.drafters.growth import extend, grow_tree, lookup_ids
from jaxspec.mobile.acceptance import Accepted, accept_greedy, accept_sampled
from jaxspec.mobile.records import (
    Record,
    Signature,
    Target,
    ints,
    kv_inputs,
    kv_record,
    make_signature,
    outgoing,
    read_cache,
    unembed_rows,
    write_kv,
)
from jaxspec.models import Network, lookup_rows

Accept = Callable[[Tree, Array, Array, int], Accepted]
"""Decides from a tree, its tokens, the target's logits after each, and the rows to give."""

LARGEST_TOP_K = 64
"""Of `step_sampled`: a graph looks for so many candidates, whatever the app asks for."""
LEVEL_CHILDREN = 8
"""Likeliest children that `absorb` and `draft_N` give of each node."""


def decode_signature(target: Target) -> Signature:
    """One token of plain decoding: `pending` in, its successor out."""

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


def prefill_signature(target: Target, size: int, drafting: "EagleStep | None" = None) -> Signature:
    """Reads `count` <= `size` tokens of a prompt behind the cached ones.

    What follows them is padding: it is written, and then means nothing. `logits` and `o_pending`
    are of the last token. With an EAGLE head the token after these must be known: `following`, any
    for the last part of a prompt, whose successor is not.
    """

    def prefill(params: Params, inputs: Record) -> Record:
        length, prompt, last = inputs["length"][0], inputs["prompt"][0], inputs["count"] - 1
        cache = read_cache(inputs, "kv", target.config.num_layers, length)
        positions = length + np.arange(size, dtype=np.int32)
        taps = () if drafting is None else drafting.drafter.taps
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
        # Pair t joins the state at t with the token after it.
        head, read = params.draft, drafting.read(hidden)
        pairs = head.forward(
            params.target.embed(jnp.concatenate([prompt[1:], inputs["following"]])),
            head.states_of(read, read),
            positions,
            masks.causal(size),
            read_cache(inputs, "head", 1, length),
        )
        rest = drafting.levels - 1
        states = lookup_rows(read, last)
        return outputs | {
            "o_tokens": jnp.concatenate([pending, jnp.zeros(rest, jnp.int32)])[None],
            "o_states": jnp.concatenate([states, jnp.zeros((rest, states.shape[1]))])[None],
            **outgoing(write_kv(inputs, "head", pairs.new_kv, length)),
        }

    inputs = {"prompt": ints(1, size), "count": ints(1), "length": ints(1), **kv_inputs(target)}
    if drafting is not None:
        inputs |= {"following": ints(1), **drafting.head_kv(target)}
    return make_signature(target, prefill, inputs)


def verify_signature(target: Target, size: int, drafting: "EagleStep | None" = None) -> Signature:
    """Scores `size` tokens of any tree; the cache is only read.

    positions: of each token in the text. visible: 1 where a token (row) sees another (column),
    itself included. `choices` are the target's own tokens after each. What an EAGLE head reads of
    the target, `new_states`, goes on to `commit_N`.
    """
    taps = () if drafting is None else drafting.drafter.taps

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


def commit_signature(target: Target, size: int, drafting: "EagleStep | None" = None) -> Signature:
    """Writes the nodes on a path of `verify_N` into the cache.

    path: `path[d]` is the accepted node of depth d, -1 past the last; `count` of them count. With
    an EAGLE head the states on the path come out too, as `draft` and `absorb` take them.
    """

    def commit(params: Params, inputs: Record) -> Record:
        del params
        length, path = inputs["length"][0], inputs["path"][0]
        new_kv = read_cache(inputs, "new", target.config.num_layers, length).layers
        # Of one node there is nothing to choose, and the converter refuses a choice of one.
        path_kv = new_kv if size == 1 else select_path(new_kv, path)
        outputs = {
            "o_length": inputs["length"] + inputs["count"],
            **outgoing(write_kv(inputs, "kv", path_kv, length)),
        }
        if drafting is not None and size == 1:
            none = jnp.zeros((drafting.levels - 1, drafting.width))
            outputs["o_states"] = jnp.concatenate([inputs["new_states"][0], none])[None]
        elif drafting is not None:
            missing = jnp.full(max(0, drafting.levels - size), -1, jnp.int32)
            states_path = jnp.concatenate([path, missing])[: drafting.levels]
            rows = jax.nn.one_hot(states_path, size, dtype=jnp.float32)
            outputs["o_states"] = (rows @ inputs["new_states"][0])[None]
        return outputs

    inputs = {"path": ints(1, size), "count": ints(1), "length": ints(1), **kv_inputs(target)}
    inputs |= kv_inputs(target, "new", size)
    if drafting is not None:
        inputs["new_states"] = jax.ShapeDtypeStruct((1, size, drafting.width), jnp.float32)
    return make_signature(target, commit, inputs)


class EagleStep:
    """A whole step with an EAGLE head over the drafter's static tree, and its parts.

    Carried: `tokens[:count]`, what the last step emitted, and `states[:count]`, what the head reads
    of the target where they were emitted: the pairs that the head has yet to absorb. Steps with
    the same number of rows, `levels`, take each other's state.
    """

    def __init__(self, drafter: Eagle, head: Any, levels: int | None = None):
        self.drafter, self.tree, self.head_config = drafter, drafter.tree, head.config
        self.levels = levels or drafter.tree_shape[1] + 1
        self.width = len(drafter.taps or (0,)) * head.config.embed_dim

    def read(self, hidden: Hidden) -> Array:
        """What a head makes its states of: EAGLE-3 of taps, EAGLE-1 of features."""
        return hidden.taps if self.drafter.taps else hidden.features

    def head_kv(self, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
        return kv_inputs(target._replace(config=self.head_config), "head")

    def signature(self, target: Target) -> Signature:
        """`step`: draft, target pass, greedy acceptance, commit."""
        function = partial(self._step, target, _greedy)
        return make_signature(target, function, self._inputs(target) | kv_inputs(target))

    def reporting_signature(self, target: Target) -> Signature:
        """`step_N`: the same for hosts to which every read is dear.

        report: the count, as many tokens as there are levels, then what was drafted, the pending
        token first.
        """
        function = partial(self._step, target, _greedy, report=True)
        return make_signature(target, function, self._inputs(target) | kv_inputs(target))

    def sampled_signature(self, target: Target) -> Signature:
        """`step_sampled`: the same with acceptance at a temperature; drafts are not drawn."""
        inputs = self._inputs(target) | kv_inputs(target) | _sampling(self.tree)
        return make_signature(target, partial(_step_sampled, partial(self._step, target)), inputs)

    def draft_signature(self, target: Target) -> Signature:
        """`draft`: absorbs what the last step emitted, and drafts the whole static tree."""

        def draft(params: Params, inputs: Record) -> Record:
            absorbed, state = self._absorb(params, inputs)
            cache = read_cache(absorbed, "head", 1, inputs["length"][0])
            tokens = self._draft(params, inputs, cache, state, target)
            return {"drafted": tokens[None], **outgoing(absorbed)}

        return make_signature(target, draft, self._inputs(target))

    def absorb_signature(self, target: Target) -> Signature:
        """`absorb`: only the first half, for hosts that grow the tree themselves.

        state: predicted for the pending token. children, logprobs: its likeliest successors.
        """

        def absorb(params: Params, inputs: Record) -> Record:
            absorbed, state = self._absorb(params, inputs)
            children = self._children(params, state, target)
            return {"state": state, **children, **outgoing(absorbed)}

        inputs = self._inputs(target)
        del inputs["pending"]
        return make_signature(target, absorb, inputs)

    def level_signature(self, target: Target, size: int, slots: int) -> Signature:
        """`draft_N`: the head over `size` nodes of one level, of a tree that the host grows.

        states: predicted at the nodes' parents. position: of these nodes in the text. drafted:
        slots of the scratch that earlier levels fill, where those of this one go. visible: 1 where
        a node (row) sees a slot of the scratch or, behind them, a node of its level: itself.
        """

        def draft(params: Params, inputs: Record) -> Record:
            length, head = inputs["length"][0], params.draft
            scratch = read_cache(inputs, "scratch", 1, length).layers
            hidden = head.forward(
                params.target.embed(inputs["tokens"][0]),
                inputs["states"][0],
                inputs["position"],
                inputs["visible"][0, 0] > 0,
                read_cache(inputs, "head", 1, length),
                scratch=scratch,
            )
            children = self._children(params, hidden.features, target)
            written = write_kv(inputs, "scratch", hidden.new_kv, inputs["drafted"][0])
            return {"next_states": hidden.features[None], **children, **outgoing(written)}

        head = target._replace(config=self.head_config)
        width = self.head_config.embed_dim
        inputs = {
            "tokens": ints(1, size),
            "states": jax.ShapeDtypeStruct((1, size, width), jnp.float32),
            "position": ints(1),
            "length": ints(1),
            "drafted": ints(1),
            "visible": ints(1, 1, size, slots + size),
        }
        return make_signature(
            target, draft, {**inputs, **kv_inputs(head, "scratch", slots), **self.head_kv(target)}
        )

    def _inputs(self, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "tokens": ints(1, self.levels),
            "count": ints(1),
            "length": ints(1),
            "pending": ints(1),
            "states": jax.ShapeDtypeStruct((1, self.levels, self.width), jnp.float32),
            **self.head_kv(target),
        }

    def _step(
        self, target: Target, accept: Accept, params: Params, inputs: Record, report: bool = False
    ) -> Record:
        length = inputs["length"][0]
        absorbed, root_state = self._absorb(params, inputs)
        head_cache = read_cache(absorbed, "head", 1, length)
        tokens = self._draft(params, inputs, head_cache, root_state, target)
        hidden, path, outputs = _verify_and_commit(
            params.target, target, self.tree, tokens, inputs, self.drafter.taps, accept, self.levels
        )
        states = path @ self.read(hidden)
        if report:
            parts = [outputs["o_count"], outputs["o_tokens"][0], tokens]
            outputs["report"] = jnp.concatenate(parts)[None]
        return outputs | {"o_states": states[None], **outgoing(absorbed)}

    def _absorb(self, params: Params, inputs: Record) -> tuple[Record, Array]:
        """Caches the pairs that the last step made known, from the target's true states."""
        head, states = params.draft, inputs["states"][0]
        start = inputs["length"][0] - inputs["count"][0]
        hidden = head.forward(
            params.target.embed(inputs["tokens"][0]),
            head.states_of(states, states),
            start + np.arange(self.levels, dtype=np.int32),
            masks.causal(self.levels),
            read_cache(inputs, "head", 1, start),
        )
        absorbed = write_kv(inputs, "head", hidden.new_kv, start)
        return absorbed, lookup_rows(hidden.features, inputs["count"] - 1)

    def _children(self, params: Params, states: Array, target: Target) -> Record:
        """The likeliest tokens after some states, and how likely each is."""
        head = params.draft
        logits = head.unembed(params.target, states)
        if head.draft_ids is None:
            logits = logits[:, : target.num_tokens]
        count = min(LEVEL_CHILDREN, logits.shape[1])
        # A logarithm at the end: log_softmax is an operation that GPUs do not know.
        probs, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)
        if head.draft_ids is not None:
            ids = lookup_ids(head.draft_ids, ids.reshape(-1)).reshape(ids.shape)
        return {"children": ids[None], "logprobs": jnp.log(probs)[None]}

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
    """A whole step in which the target drafts a chain with a baked set of layers skipped.

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
        """`step`."""
        function = partial(self._step, target, _greedy)
        return make_signature(target, function, self._inputs(target))

    def sampled_signature(self, target: Target) -> Signature:
        """`step_sampled`."""
        inputs = self._inputs(target) | _sampling(self.tree)
        return make_signature(target, partial(_step_sampled, partial(self._step, target)), inputs)

    def draft_signature(self, target: Target) -> Signature:
        """`draft`: the whole chain."""

        def draft(params: Params, inputs: Record) -> Record:
            return {"drafted": self._draft(target, params, inputs)[None]}

        return make_signature(target, draft, self._inputs(target))

    def _inputs(self, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
        return {"length": ints(1), "pending": ints(1), **kv_inputs(target)}

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        tokens = self._draft(target, params, inputs)
        *_, outputs = _verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        return outputs

    def _draft(self, target: Target, params: Params, inputs: Record) -> Array:
        cache = read_cache(inputs, "kv", target.config.num_layers, inputs["length"][0])
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
            token = argmax_rows(unembed_rows(params.target, target, hidden.features))
            tokens.append(token)
        return jnp.concatenate(tokens)


class BlockDrafting:
    """Drafting of whole blocks by a diffusion model that is causal over blocks: one pass.

    The host says what the pass reads and what of it counts, see `loops.BlockWindows`. `tree` is
    the static tree that whole steps verify; None where the host makes one for every round.

    Raises:
        ValueError: the drafter does what a file cannot.
    """

    def __init__(self, drafter: Deer, network: Any):
        diffusion = network.config.diffusion if isinstance(network, Network) else None
        if diffusion is None:
            raise ValueError("drafter: Deer needs a diffusion model: Deer.of(load(...)).")
        if diffusion.block is None:
            raise ValueError(
                "drafter: this diffusion model sees both sides, so that every pass would read the "
                "whole text; only models that are causal over blocks can be exported."
            )
        unsupported = {
            "steps": drafter.steps > 1,
            "sep_token_id": drafter.sep_token_id is not None,
            "adaptive": drafter.adaptive is not None,
            "cache": drafter.cache not in (None, "blocks"),
            "temperature": bool(drafter.temperature),
        }
        if given := [name for name, found in unsupported.items() if found]:
            raise ValueError(
                f"drafter: an exported Deer drafts every block in one pass, without "
                f'{", ".join(given)}; leave that out (sep="" where config.json names one).'
            )
        self.config, self.block, self.mask = network.config, drafter.block, diffusion.mask_token_id
        self.sizes = drafter.window_sizes(diffusion.block)
        self.tree, self.levels = drafter.tree, drafter.depth + 1
        # The mask may be among them, and is left out by the host.
        self.count = drafter.max_branch + 1

    def signature(self, target: Target, size: int) -> Signature:
        """`draft_block_N`: reads `window`, N slots from `start` on, and gives each position's best.

        start: tokens that are cached, of finished blocks. visible: 1 where a slot of the window
        (row) sees another (column). first: the row whose output decides the first position.
        """

        def draft(params: Params, inputs: Record) -> Record:
            logits, written = self._read(target, size, params, inputs)
            probs, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.count)
            return {"children": ids[None], "logprobs": jnp.log(probs)[None], **outgoing(written)}

        return make_signature(target, draft, self._inputs(target, size))

    def step_signature(self, target: Target, size: int) -> Signature:
        """`step_block_N`: such a pass, then the static tree's: target pass, acceptance, commit.

        pending, length: of the target, as for `step`.
        """
        tree = self.tree
        assert tree is not None

        def step(params: Params, inputs: Record) -> Record:
            logits, written = self._read(target, size, params, inputs)
            if self.mask < target.num_tokens:
                never = np.zeros(target.num_tokens, np.float32)
                never[self.mask] = -1e9
                logits = logits + never[None]
            branch = tree.children.shape[1]
            best = argmax_rows(logits)[:, None]
            if branch > 1:
                best = jax.lax.top_k(logits, branch)[1]
            nodes = zip(tree.depths[1:], tree.ranks[1:], strict=True)
            drafted = [best[depth - 1, rank : rank + 1] for depth, rank in nodes]
            tokens = jnp.concatenate([inputs["pending"], *drafted])
            *_, outputs = _verify_and_commit(
                params.target, target, tree, tokens, inputs, (), _greedy, self.levels
            )
            return outputs | outgoing(written)

        inputs = {"pending": ints(1), "length": ints(1), **kv_inputs(target)}
        return make_signature(target, step, inputs | self._inputs(target, size))

    def _inputs(self, target: Target, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        own = target._replace(config=self.config, slots=target.slots + self.sizes[-1])
        return {
            "window": ints(1, size),
            "start": ints(1),
            "first": ints(1),
            "visible": ints(1, 1, size, size),
            **kv_inputs(own, "block"),
        }

    def _read(
        self, target: Target, size: int, params: Params, inputs: Record
    ) -> tuple[Array, Record]:
        """The logits of each position of a draft, and what the drafter keeps."""
        start, network = inputs["start"][0], params.draft
        hidden = network.forward(
            inputs["window"][0],
            start + np.arange(size, dtype=np.int32),
            inputs["visible"][0, 0] > 0,
            read_cache(inputs, "block", self.config.num_layers, start),
        )
        rows = inputs["first"] + np.arange(self.block, dtype=np.int32)
        logits = network.unembed(lookup_rows(hidden.features, rows))[:, : target.num_tokens]
        return logits, write_kv(inputs, "block", hidden.new_kv, start)


def _greedy(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
    return accept_greedy(tree, tokens, argmax_rows(logits), levels)


def _sampling(tree: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """What `step_sampled` takes besides: `top_k` in 1..`LARGEST_TOP_K`, or 0 for off."""
    return {
        "uniforms": jax.ShapeDtypeStruct((1, len(tree.parents)), jnp.float32),
        "temperature": jax.ShapeDtypeStruct((1,), jnp.float32),
        "top_k": ints(1),
    }


def _step_sampled(
    step: Callable[[Accept, Params, Record], Record], params: Params, inputs: Record
) -> Record:
    """A step whose acceptance draws by the uniforms among its inputs."""

    def accept(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
        probs = _warped(logits, inputs["temperature"], inputs["top_k"])
        return accept_sampled(tree, tokens, inputs["uniforms"][0], probs, levels)

    return step(accept, params, inputs)


def _warped(logits: Array, temperature: Array, top_k: Array) -> Array:
    """The law of `core.sampling.warp_logits` for these two settings, without bisection."""
    most = min(LARGEST_TOP_K, logits.shape[1])
    best, ids = jax.lax.top_k(logits, most)
    # Who leaves the ids unused gets a sort in place of TOPK_V2, and no runtime has one.
    best = best * (ids >= 0).astype(logits.dtype)
    place = jax.nn.one_hot(top_k - 1, most, dtype=logits.dtype)
    off = jnp.equal(top_k, 0).astype(logits.dtype)
    # Half precision holds what is added; no logit is that far below.
    lowest = jnp.sum(best * place, axis=1, keepdims=True) - 3e4 * off.reshape(1, 1)
    filtered_out = 1.0 - (logits >= lowest).astype(logits.dtype)
    return jax.nn.softmax(logits / temperature.reshape(1, 1) - 1e4 * filtered_out, axis=-1)


def _verify_and_commit(
    network: Network,
    target: Target,
    tree: Tree,
    tokens: Array,
    inputs: Record,
    taps: tuple[int, ...],
    accept: Accept,
    levels: int,
) -> tuple[Hidden, Array, Record]:
    """The second half of any step. The path comes out as `levels` one-hot rows."""
    length = inputs["length"][0]
    hidden = network.forward(
        tokens,
        length + tree.depths,
        jnp.asarray(tree.ancestors),
        read_cache(inputs, "kv", target.config.num_layers, length),
        taps=taps,
    )
    accepted = accept(tree, tokens, unembed_rows(network, target, hidden.features), levels)
    path_kv = select_nodes(hidden.new_kv, accepted.path)
    return (
        hidden,
        accepted.path,
        {
            "o_tokens": accepted.tokens[None],
            "o_count": accepted.count[None],
            "o_length": (length + accepted.count)[None],
            "o_pending": accepted.last[None],
            **outgoing(write_kv(inputs, "kv", path_kv, length)),
        },
    )
