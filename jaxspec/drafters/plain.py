"""Plain decoding: the speculative step with a one-node tree."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxspec.core.proposal import chain_proposal
from jaxspec.core.types import Context, Hidden, Params, Proposal


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Offers the pending token alone, so each target pass emits one token.

    `generate` uses it if no drafter is given.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> result = jaxspec.generate(model, "What is 2 + 3?", config, jaxspec.NoDraft())
        >>> result.metrics.tau  # bonus token included
        1.0
    """

    taps = ()
    tree_shape = (1, 0)
    widths = (1,)

    def init(self, params: Params, prompt: Hidden, context: Context) -> tuple[()]:
        del params, prompt, context
        return ()

    def propose(
        self, params: Params, key: PRNGKeyArray, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        del params, key
        root = context.tokens[context.length - 1]
        return chain_proposal(root[None], jnp.ones(1, bool)), state
