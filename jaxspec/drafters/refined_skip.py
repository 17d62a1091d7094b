"""Layer skipping whose set is refined while decoding, as in SWIFT (Xia et al. 2024).

Every step tries one other set: a kept sub-layer against a skipped one. Its score is how often one
parallel pass of the skipped network over the last emitted tokens says what was emitted; the better
of the two sets goes on. Sets that change within a program are 0/1 arrays, so no work is left out.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import Context, Hidden, KVCache, Params, Proposal
from jaxspec.drafters.layer_skip import LayerSkip, LayerSkipState
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.models import Skips


class RefinedSkipState(NamedTuple):
    """skipped: of all sub-layers, attention first. first: slot where the prompt ended."""

    inner: LayerSkipState
    skipped: Float[Array, " sub_layers"]
    first: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class RefinedSkip:
    """Begins with the set in `params.draft`.

    Attributes:
        layer_skip: how to draft.
        window: emitted tokens that a set is judged on.
    """

    layer_skip: LayerSkip
    window: int = 32

    @classmethod
    def of(cls, skip: Skips, **settings: Any) -> LoadedDrafter:
        arrays = Skips(*(jnp.asarray(part, jnp.float32) for part in skip))
        return LoadedDrafter(cls(LayerSkip(None, **settings)), arrays)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.layer_skip.tree_shape

    @property
    def widths(self) -> tuple[int, ...]:
        return self.layer_skip.widths

    def init(self, params: Params, prompt: Hidden, context: Context) -> RefinedSkipState:
        inner = self.layer_skip.init(params, prompt, context)
        return RefinedSkipState(inner, jnp.concatenate(params.draft), context.length)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: RefinedSkipState, context: Context
    ) -> tuple[Proposal, RefinedSkipState]:
        key, one = jax.random.split(key)
        noise = jax.random.uniform(one, state.skipped.shape)
        out = jnp.argmax(jnp.where(state.skipped > 0, noise, -1))
        into = jnp.argmax(jnp.where(state.skipped > 0, -1, noise))
        tried = state.skipped.at[out].set(0.0).at[into].set(1.0)
        here, there = (self._score(params, each, state, context) for each in (state.skipped, tried))
        skipped = jnp.where(there > here, tried, state.skipped)
        params = params._replace(draft=Skips(*jnp.split(skipped, 2)))
        proposal, inner = self.layer_skip.propose(params, key, state.inner, context)
        return proposal, RefinedSkipState(inner, skipped, state.first)

    def _score(
        self,
        params: Params,
        skipped: Float[Array, " sub_layers"],
        state: RefinedSkipState,
        context: Context,
    ) -> Int[Array, ""]:
        target = params.target
        start = jnp.maximum(context.length - 1 - self.window, 0)
        slots = start + jnp.arange(self.window)
        hidden = target.forward(
            context.tokens[slots],
            slots,
            causal(self.window),
            KVCache(context.cache.layers, start),
            skip=Skips(*jnp.split(skipped, 2)),
        )
        says = argmax_rows(target.unembed(hidden.features))
        emitted = (slots >= state.first - 1) & (slots < context.length - 1)
        return jnp.sum(emitted & (says == context.tokens[slots + 1]))
