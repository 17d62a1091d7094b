"""Steps in which a smaller language model, in the target's file, drafts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.types import Hidden, Params, Warp
from jaxspec.drafters import DraftModel
from jaxspec.drafters.growth import DraftLaw, grow_tree
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    cleared,
    ints,
    kv_inputs,
    make_signature,
    outgoing,
    read_cache,
    write_kv,
)
from jaxspec.mobile.signatures.steps import Accept, WholeStep, verify_and_commit
from jaxspec.models import Network, lookup_rows


class DraftModelStep(WholeStep):
    """A whole step over the static tree of a draft model, and its first half.

    State carried between calls: the draft model's cache, `head`, and `tokens[:count]`, the tokens
    of the last step, which it has not read yet.

    Raises:
        ValueError: the draft model cannot be in the target's file.
    """

    taps = ()

    def __init__(self, drafter: DraftModel, network: Any):
        if not isinstance(network, Network):
            raise ValueError(
                "drafter: a draft model in a file needs the target's tokenizer: DraftModel.of("
                f"load(...)); got {type(network).__name__}."
            )
        if network.config.experts is not None:
            raise ValueError(
                "drafter: mixtures of experts cannot be exported, as draft models neither."
            )
        self.tree, self.config = drafter.tree, network.config
        self.levels = drafter.tree_shape[1] + 1

    def prefill_inputs(self, target: Target) -> Shapes:
        """Returns the further inputs of `prefill_N`: the draft model's cache."""
        if self.config.max_positions < target.capacity:
            raise ValueError(
                f"capacity must be at most the draft model's {self.config.max_positions} "
                f"positions, got {target.capacity}."
            )
        if self.config.vocab_size < target.num_tokens:
            raise ValueError(
                f"drafter: the draft model has {self.config.vocab_size} ids, fewer than the "
                f"{target.num_tokens} that the target may emit."
            )
        return kv_inputs(target._replace(config=self.config), "head")

    def prefilled(
        self, target: Target, params: Params, inputs: Record, hidden: Hidden, pending: Array
    ) -> Record:
        """Returns the further outputs of `prefill_N`, for which the draft model reads the prompt.

        The pending token is the first that a step has to read.
        """
        del target, hidden
        length, prompt = inputs["length"][0], inputs["prompt"][0]
        inputs = cleared(inputs, "head", length)
        positions = length + np.arange(len(prompt), dtype=np.int32)
        read = self._read(params, inputs, prompt, positions, length)
        rest = jnp.zeros(self.levels - 1, jnp.int32)
        return {
            "o_tokens": jnp.concatenate([pending, rest])[None],
            **outgoing(write_kv(inputs, "head", read.new_kv, length)),
        }

    def draft_signature(self, target: Target) -> Signature:
        """Makes `draft`: reads the tokens of the last step and drafts the whole static tree."""

        def draft(params: Params, inputs: Record) -> Record:
            tokens, absorbed = self._draft(target, params, inputs)
            return {"drafted": tokens[None], **outgoing(absorbed)}

        return make_signature(target, draft, self._own_inputs(target))

    def _own_inputs(self, target: Target) -> Shapes:
        own = {"tokens": ints(1, self.levels), "count": ints(1), "length": ints(1)}
        return {**own, "pending": ints(1), **self.prefill_inputs(target)}

    def _inputs(self, target: Target) -> Shapes:
        return self._own_inputs(target) | kv_inputs(target)

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        tokens, absorbed = self._draft(target, params, inputs)
        *_, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        return outputs | outgoing(absorbed)

    def _draft(self, target: Target, params: Params, inputs: Record) -> tuple[Array, Record]:
        """Returns the tokens of the tree, and the cache with those of the last step in it."""
        draft, length = params.draft, inputs["length"]
        # The pending token is the last of them; it stands at `length`.
        start = length - inputs["count"] + 1
        positions = start + np.arange(self.levels, dtype=np.int32)
        read = self._read(params, inputs, inputs["tokens"][0], positions, start[0])
        absorbed = write_kv(inputs, "head", read.new_kv, start[0])
        cache = read_cache(absorbed, "head", self.config.num_layers, length[0] + 1)

        def forward(level, tokens, _, mask, scratch) -> Hidden:
            positions = jnp.concatenate([length + level] * len(tokens))  # no broadcast on GPUs
            return draft.forward(tokens, positions, mask, cache, scratch=scratch)

        law = DraftLaw(draft.unembed, Warp(), target.num_tokens)
        feature = lookup_rows(read.features, inputs["count"] - 1)
        key = jax.random.key(0)  # nothing is drawn
        tree = grow_tree(self.tree, key, inputs["pending"][0], law, feature, forward)
        return tree.tokens, absorbed

    def _read(
        self, params: Params, inputs: Record, tokens: Array, positions: Array, length: Array
    ) -> Hidden:
        cache = read_cache(inputs, "head", self.config.num_layers, length)
        return params.draft.forward(tokens, positions, masks.causal(len(tokens)), cache)
