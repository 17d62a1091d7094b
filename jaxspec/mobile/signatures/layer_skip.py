"""Steps in which the target drafts with some of its own layers skipped."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.sampling import argmax_rows
from jaxspec.core.tree import chain
from jaxspec.core.types import Params
from jaxspec.drafters import LayerSkip
from jaxspec.drafters.growth import extend
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    ints,
    kv_inputs,
    make_signature,
    read_cache,
    unembed_rows,
)
from jaxspec.mobile.signatures.steps import Accept, WholeStep, verify_and_commit


class LayerSkipStep(WholeStep):
    """A whole step in which the target drafts a chain while it skips a fixed set of layers.

    The draft always has its full length, as a graph without control flow cannot end it early.

    Raises:
        ValueError: the drafter has no fixed set.
    """

    def __init__(self, drafter: LayerSkip):
        if drafter.skip is None:
            raise ValueError(
                "drafter: an exported LayerSkip needs its set baked in: skip=Skips(...)."
            )
        self.skip = drafter.skip
        self.tree = chain(drafter.num_speculative_tokens)
        self.levels = drafter.num_speculative_tokens + 1

    def draft_signature(self, target: Target) -> Signature:
        """Makes `draft`, which drafts the whole chain."""

        def draft(params: Params, inputs: Record) -> Record:
            return {"drafted": self._draft(target, params, inputs)[None]}

        return make_signature(target, draft, self._inputs(target))

    def _inputs(self, target: Target) -> Shapes:
        return {"length": ints(1), "pending": ints(1), **kv_inputs(target)}

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        tokens = self._draft(target, params, inputs)
        *_, outputs = verify_and_commit(
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
