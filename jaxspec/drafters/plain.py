"""Plain decoding: the speculative step with a one-node tree."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxspec.core.proposal import chain_proposal
from jaxspec.core.types import Context, Hidden, Params, Proposal


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Offers the pending token alone, so that each target pass emits one token."""

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def tree_shape(self) -> tuple[int, int]:
        return 1, 0

    @property
    def widths(self) -> tuple[int, ...]:
        return (1,)

    def init(self, params: Params, prompt: Hidden, context: Context) -> tuple[()]:
        del params, prompt, context
        return ()

    def propose(
        self, params: Params, key: PRNGKeyArray, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        del params, key
        root = context.tokens[context.length - 1]
        return chain_proposal(root[None], jnp.ones(1, bool)), state
