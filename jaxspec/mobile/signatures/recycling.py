"""Steps that draft what the target found likeliest after the same tokens before."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core.sampling import likeliest_tokens
from jaxspec.core.types import Hidden, Params, Warp
from jaxspec.drafters import TokenRecycling
from jaxspec.drafters.recycling import filled, learned
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Target,
    floats,
    ints,
    kv_inputs,
    outgoing,
    unembed_rows,
)
from jaxspec.mobile.signatures.steps import Accept, WholeStep, accepts, verify_and_commit


class RecyclingStep(WholeStep):
    """A whole step over the static tree of a drafter, filled from a table of successors.

    State carried between calls: `table`, the ids of the likeliest tokens after each token, plus 1,
    as floats; 0 is a token that the target has not scored yet. `prefill_N` empties it where a text
    begins, as in JAX each row begins with an empty one.
    """

    taps = ()

    def __init__(self, drafter: TokenRecycling):
        self.tree, self.branch = drafter.tree, drafter.num_likeliest
        self.levels = drafter.tree_shape[1] + 1

    def prefill_inputs(self, target: Target) -> Shapes:
        """Returns the further inputs of `prefill_N`."""
        return {"table": floats(1, target.num_tokens, self.branch)}

    def prefilled(
        self, target: Target, params: Params, inputs: Record, hidden: Hidden, pending: Array
    ) -> Record:
        """Returns the further outputs of `prefill_N`, which learns from the whole prompt."""
        del pending
        tokens = inputs["prompt"][0]
        places = np.arange(len(tokens), dtype=np.int32).reshape(1, 1, 1, -1)
        known = jnp.less(places, inputs["count"].reshape(1, 1, 1, 1)).reshape(-1)
        logits = unembed_rows(params.target, target, hidden.features)
        continued = jnp.greater(inputs["length"], 0).reshape(1, 1, 1)
        before = {"table": jnp.where(continued, inputs["table"], 0.0)}
        return outgoing(self._learned(before, tokens, logits, known))

    def _inputs(self, target: Target) -> Shapes:
        own = self.prefill_inputs(target)
        return {"length": ints(1), "pending": ints(1), **own, **kv_inputs(target)}

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        drafted = filled(self.tree, inputs["table"][0], inputs["pending"])
        tokens, accept = jnp.maximum(drafted, 0), accepts(accept, drafted)
        verified = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        state = self._learned(inputs, tokens, verified.logits, drafted >= 0)
        return verified.outputs | outgoing(state)

    def _learned(self, inputs: Record, tokens: Array, logits: Array, known: Array) -> Record:
        likeliest = likeliest_tokens(logits, Warp(), self.branch)
        return {"table": learned(inputs["table"][0], tokens, likeliest, known)[None]}
