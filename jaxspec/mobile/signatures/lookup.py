"""Steps that draft what followed an earlier copy of the last tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.tree import chain
from jaxspec.core.types import Params
from jaxspec.drafters import PromptLookup
from jaxspec.mobile.records import Record, Shapes, Target, ints, kv_inputs
from jaxspec.mobile.signatures.steps import Accept, WholeStep, accepts, verify_and_commit


class LookupStep(WholeStep):
    """A whole step of prompt lookup, a chain.

    State carried between calls: `text`, the whole text. A host gives it where a text begins; zeros,
    or anything, may follow the text.
    """

    def __init__(self, drafter: PromptLookup, stop_token_ids: tuple[int, ...] = ()):
        self.drafter, self.stop_token_ids = drafter, stop_token_ids
        self.tree, self.levels = chain(drafter.num_speculative_tokens), drafter.tree_shape[0]

    def _inputs(self, target: Target) -> Shapes:
        # A step writes all rows of its result behind the text.
        text = ints(1, target.capacity + self.levels)
        return {"text": text, "length": ints(1), "pending": ints(1), **kv_inputs(target)}

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        text = _written(inputs["text"], inputs["pending"][None], length)
        found = self.drafter.found(text[0], length + 1)
        for stop in self.stop_token_ids:
            other = 1 - jnp.equal(found, stop).astype(jnp.float32).astype(jnp.int32)
            found = other * (found + 1) - 1
        drafted = jnp.concatenate([inputs["pending"], found])
        *_, outputs = verify_and_commit(
            params.target,
            target,
            self.tree,
            jnp.maximum(drafted, 0),
            inputs,
            (),
            accepts(accept, drafted),
            self.levels,
        )
        return outputs | {"o_text": _written(text, outputs["o_tokens"], length + 1)}


def _written(text: Array, tokens: Array, at: Array) -> Array:
    return jax.lax.dynamic_update_slice(text, tokens, (0, at), allow_negative_indices=False)
