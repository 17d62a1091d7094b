"""Steps that draft with an EAGLE head over a static tree, and their parts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.types import Hidden, KVCache, Params, Warp
from jaxspec.drafters import Eagle
from jaxspec.drafters.growth import DraftLaw, grow_tree, lookup_ids
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    cleared,
    floats,
    ints,
    kv_inputs,
    make_signature,
    outgoing,
    padded_rows,
    read_cache,
    write_kv,
)
from jaxspec.mobile.signatures.steps import (
    Accept,
    greedy,
    sampled,
    sampling_inputs,
    verify_and_commit,
)
from jaxspec.models import lookup_rows

LEVEL_CHILDREN = 8
"""Likeliest children that `absorb` and `draft_N` return for each node."""


class EagleStep:
    """A whole step with an EAGLE head over the drafter's static tree, and its parts.

    State carried between calls: `tokens[:count]`, the tokens of the last step, and
    `states[:count]`, the target's states where they were emitted. These are the pairs that the
    head has not absorbed yet. Steps with the same number of rows, `levels`, share their state.
    """

    def __init__(self, drafter: Eagle, head: Any, levels: int | None = None):
        self.drafter, self.tree, self.head_config = drafter, drafter.tree, head.config
        self.levels = levels or drafter.tree_shape[1] + 1
        self.width = len(drafter.taps or (0,)) * head.config.embed_dim

    def read(self, hidden: Hidden) -> Array:
        """Returns the input of the head's states: taps for EAGLE-3, features for EAGLE-1."""
        return hidden.taps if self.drafter.taps else hidden.features

    def head_kv(self, target: Target) -> Shapes:
        """Returns the shapes of the head's cache."""
        return kv_inputs(target._replace(config=self.head_config), "head")

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target that the head reads."""
        return self.drafter.taps

    def prefill_inputs(self, target: Target) -> Shapes:
        """Returns the further inputs of `prefill_N`.

        `following` is the token after the part of the prompt that it reads; for the last part,
        whose successor is unknown, it may be any token.
        """
        return {"following": ints(1), **self.head_kv(target)}

    def prefilled(
        self, target: Target, params: Params, inputs: Record, hidden: Hidden, pending: Array
    ) -> Record:
        """Returns the further outputs of `prefill_N`, which caches the prompt's pairs.

        Pair t joins the state at t with the token after it.
        """
        length, prompt = inputs["length"][0], inputs["prompt"][0]
        head, read, size = params.draft, self.read(hidden), inputs["prompt"].shape[1]
        inputs = cleared(inputs, "head", length)
        pairs = head.forward(
            params.target.embed(jnp.concatenate([prompt[1:], inputs["following"]])),
            head.states_of(read, read),
            length + np.arange(size, dtype=np.int32),
            masks.causal(size),
            read_cache(inputs, "head", 1, length),
        )
        rest = self.levels - 1
        return {
            "o_tokens": jnp.concatenate([pending, jnp.zeros(rest, jnp.int32)])[None],
            "o_states": padded_rows(lookup_rows(read, inputs["count"] - 1), self.levels),
            **outgoing(write_kv(inputs, "head", pairs.new_kv, length)),
        }

    def signature(self, target: Target, report: bool = False) -> Signature:
        """Makes `step`: draft, target pass, greedy acceptance, commit.

        With `report`, that is for `step_N`, it has one further output, for hosts whose reads are
        slow: `report` holds the count, one token per level, then the drafted tokens with the
        pending token first.
        """
        function = partial(self._step, target, greedy, report=report)
        return make_signature(target, function, self._inputs(target) | kv_inputs(target))

    def sampled_signature(self, target: Target) -> Signature:
        """Makes `step_sampled`: acceptance at a temperature; drafts are not drawn."""
        inputs = self._inputs(target) | kv_inputs(target) | sampling_inputs(self.tree)
        return make_signature(target, partial(sampled, partial(self._step, target)), inputs)

    def draft_signature(self, target: Target) -> Signature:
        """Makes `draft`: absorbs the tokens of the last step and drafts the whole static tree."""

        def draft(params: Params, inputs: Record) -> Record:
            absorbed, state = self._absorb(params, inputs)
            cache = read_cache(absorbed, "head", 1, inputs["length"][0])
            tokens = self._draft(params, inputs, cache, state, target)
            return {"drafted": tokens[None], **outgoing(absorbed)}

        return make_signature(target, draft, self._inputs(target))

    def absorb_signature(self, target: Target) -> Signature:
        """Makes `absorb`: only the first half, for hosts that grow the tree themselves.

        Outputs: `state`, predicted for the pending token; `children` and `logprobs`, its likeliest
        successors.
        """

        def absorb(params: Params, inputs: Record) -> Record:
            absorbed, state = self._absorb(params, inputs)
            children = self._children(params, state, target)
            return {"state": state, **children, **outgoing(absorbed)}

        inputs = self._inputs(target)
        del inputs["pending"]
        return make_signature(target, absorb, inputs)

    def level_signature(self, target: Target, size: int, capacity: int) -> Signature:
        """Makes `draft_N`: the head over `size` nodes of one level of a tree that the host grows.

        Inputs: `states`, predicted at the nodes' parents; `position`, of these nodes in the text;
        `drafted`, the number of nodes of earlier levels in the scratch, whose size is `capacity`;
        `visible`, 1 where a node (row) sees a node of the scratch or, in the columns behind the
        scratch, a node of its own level, which is itself.
        """

        def draft(params: Params, inputs: Record) -> Record:
            length, head = inputs["length"][0], params.draft
            inputs = cleared(inputs, "scratch", inputs["drafted"])
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
            "states": floats(1, size, width),
            "position": ints(1),
            "length": ints(1),
            "drafted": ints(1),
            "visible": ints(1, 1, size, capacity + size),
        }
        return make_signature(
            target,
            draft,
            {**inputs, **kv_inputs(head, "scratch", capacity), **self.head_kv(target)},
        )

    def _inputs(self, target: Target) -> Shapes:
        return {
            "tokens": ints(1, self.levels),
            "count": ints(1),
            "length": ints(1),
            "pending": ints(1),
            "states": floats(1, self.levels, self.width),
            **self.head_kv(target),
        }

    def _step(
        self, target: Target, accept: Accept, params: Params, inputs: Record, report: bool = False
    ) -> Record:
        length = inputs["length"][0]
        absorbed, root_state = self._absorb(params, inputs)
        head_cache = read_cache(absorbed, "head", 1, length)
        tokens = self._draft(params, inputs, head_cache, root_state, target)
        hidden, _, path, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, self.drafter.taps, accept, self.levels
        )
        states = path @ self.read(hidden)
        if report:
            parts = [outputs["o_count"], outputs["o_tokens"][0], tokens]
            outputs["report"] = jnp.concatenate(parts)[None]
        return outputs | {"o_states": states[None], **outgoing(absorbed)}

    def _absorb(self, params: Params, inputs: Record) -> tuple[Record, Array]:
        """Caches the pairs that the last step completed, from the target's true states."""
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
        """Returns the likeliest tokens after some states, and their log-probabilities."""
        head = params.draft
        logits = head.unembed(params.target, states)
        if head.draft_ids is None:
            logits = logits[:, : target.num_tokens]
        count = min(LEVEL_CHILDREN, logits.shape[1])
        # GPUs do not know log_softmax.
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

        law = DraftLaw(
            lambda states: head.unembed(params.target, states),
            Warp(),
            target.num_tokens,
            head.draft_ids,
        )
        key = jax.random.key(0)  # nothing is drawn
        return grow_tree(self.tree, key, inputs["pending"][0], law, state, forward).tokens
