"""Steps that draft whole blocks with a DFlash head, and their first half."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.types import Hidden, Params
from jaxspec.drafters import DFlash
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
from jaxspec.mobile.signatures.blocks import (
    check_in_one_pass,
    draft_block,
    sampled_block,
    without_token,
)
from jaxspec.mobile.signatures.steps import Accept, WholeStep, greedy, verify_and_commit
from jaxspec.models import DFlashHead, lookup_rows


class DFlashStep(WholeStep):
    """A whole step over the chain or the static tree of a DFlash head, and its first half.

    State carried between calls: the head's cache, `head`, and `states[:count]`, the target's states
    at the tokens of the last step, which it has not read yet.

    Raises:
        ValueError: the drafter does what a file cannot.
    """

    def __init__(self, drafter: DFlash, head: DFlashHead):
        check_in_one_pass(
            drafter,
            num_nodes=drafter.num_nodes is not None,
            adaptive=drafter.adaptive is not None,
            confidence=drafter.confidence is not None,
        )
        if head.parts.rank or head.parts.convolution is not None:
            raise ValueError(
                "drafter: a DFlash head with a Markov head, a path selector or convolutions cannot "
                "be exported; give one of `jaxspec train dflash` without --markov and --selector."
            )
        assert drafter.tree is not None, "num_nodes is refused"
        self.drafter, self.tree, self.taps = drafter, drafter.tree, head.taps
        self.levels, self.config = drafter.depth + 1, head.config
        self.width: int = head.params["fc"]["kernel"].shape[0]

    def read(self, hidden: Hidden) -> Array:
        """Returns the states that the head reads."""
        return hidden.taps

    def prefill_inputs(self, target: Target) -> Shapes:
        """Returns the further inputs of `prefill_N`: the head's cache."""
        if self.config.max_positions < target.capacity:
            raise ValueError(
                f"capacity must be at most the head's {self.config.max_positions} positions, got "
                f"{target.capacity}."
            )
        return kv_inputs(target._replace(config=self.config), "head")

    def prefilled(
        self, target: Target, params: Params, inputs: Record, hidden: Hidden, pending: Array
    ) -> Record:
        """Returns the further outputs of `prefill_N`, for which the head reads the prompt's states.

        The last of them goes to the first step too, which reads it again.
        """
        del target, pending
        length, size = inputs["length"][0], inputs["prompt"].shape[1]
        inputs = cleared(inputs, "head", length)
        read = self._remembered(params, inputs, hidden.taps, length, size)
        last = lookup_rows(hidden.taps, inputs["count"] - 1)
        return {"o_states": padded_rows(last, self.levels), **outgoing(read)}

    def sampled_signature(self, target: Target) -> Signature:
        """Makes `step_sampled`: of a chain the drafts are drawn too, see `sampled_block`."""
        return sampled_block(
            self.drafter, target, partial(self._step, target), self._inputs(target)
        )

    def draft_signature(self, target: Target) -> Signature:
        """Makes `draft`: reads the states of the last step and drafts the whole static tree."""

        def draft(params: Params, inputs: Record) -> Record:
            logits, written = self._laws(target, params, inputs)
            tokens, _ = draft_block(self.drafter, logits, inputs, greedy)
            return {"drafted": tokens[None], **outgoing(written)}

        return make_signature(target, draft, self._own_inputs(target))

    def _own_inputs(self, target: Target) -> Shapes:
        own = {"states": floats(1, self.levels, self.width), "count": ints(1), "length": ints(1)}
        return {**own, "pending": ints(1), **self.prefill_inputs(target)}

    def _inputs(self, target: Target) -> Shapes:
        return self._own_inputs(target) | kv_inputs(target)

    def _step(
        self, target: Target, accept: Accept | None, params: Params, inputs: Record
    ) -> Record:
        logits, written = self._laws(target, params, inputs)
        tokens, accept = draft_block(self.drafter, logits, inputs, accept)
        hidden, _, path, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, self.taps, accept, self.levels
        )
        return outputs | {"o_states": (path @ hidden.taps)[None], **outgoing(written)}

    def _laws(self, target: Target, params: Params, inputs: Record) -> tuple[Array, Record]:
        """Returns the logits of each level, and the cache with the states of the last step in it.

        The pass reads the pending token and masks. The head's last `block` places predict.
        """
        head, block, length = params.draft, self.drafter.block, inputs["length"]
        start = length[0] - inputs["count"][0]
        written = self._remembered(params, inputs, inputs["states"][0], start, self.levels)
        places = block + int(not head.anchor_predicts)
        open_places = jnp.full(places - 1, head.mask_token_id, jnp.int32)
        features = head.forward(
            params.target.embed(jnp.concatenate([inputs["pending"], open_places])),
            length + np.arange(places, dtype=np.int32),
            masks.bidirectional(places),
            read_cache(written, "head", self.config.num_layers, length[0]),
        ).features
        first = places - block
        logits = params.target.unembed(features[first : first + self.drafter.depth])
        return without_token(logits[:, : target.num_tokens], head.mask_token_id), written

    def _remembered(
        self, params: Params, inputs: Record, states: Array, start: Array, count: int
    ) -> Record:
        """Returns the cache with `count` states of the target in it, from `start` on."""
        positions = start + np.arange(count, dtype=np.int32)
        return write_kv(inputs, "head", params.draft.remember(states, positions), start)
