"""A small language model drafts for a large one.

Leviathan et al. 2023 and Chen et al. 2023 for a chain; with `paths`, a small static tree whose
siblings are the draft model's likeliest tokens (greedy) or draws without replacement (sampling).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import append, settled
from jaxspec.core.decode import prefill
from jaxspec.core.tree import Path, chain, normalize_paths, tree_from_paths
from jaxspec.core.types import (
    Context,
    Hidden,
    KVCache,
    LanguageModel,
    Params,
    Proposal,
    Tree,
)
from jaxspec.drafters.growth import grow_tree
from jaxspec.drafters.loaded import LoadedDrafter

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with a model of its own, over the same vocabulary; its weights are `params.draft`.

    The draft model re-reads what the last step emitted (at most depth + 1 tokens, in one pass),
    then runs one pass per further level of the tree, over cached prefix and a small scratch.

    Attributes:
        num_speculative_tokens: length of the chain; ignored when `paths` is given.
        paths: rank paths of a static tree, see `tree_from_paths`.
        chunk: tokens per pass over the prompt.

    Raises:
        ValueError: if `num_speculative_tokens` is below 1, or for an invalid tree.
    """

    num_speculative_tokens: int = 4
    paths: tuple[Path, ...] | None = None
    chunk: int = 256

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}."
            )
        if self.paths is not None:
            object.__setattr__(self, "paths", normalize_paths(self.paths))

    @classmethod
    def of(
        cls, model: "Model", num_speculative_tokens: int = 4, paths: Sequence[Path] | None = None
    ) -> LoadedDrafter:
        """Drafts with a model from `load`: what `generate(drafter=...)` takes."""
        drafter = cls(num_speculative_tokens, None if paths is None else tuple(paths))
        return LoadedDrafter(drafter, model.network, model.tokenizer)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        if not hasattr(params.draft, "forward"):
            raise ValueError(
                "drafter: DraftModel needs a model's weights: DraftModel.of(load(...)); got "
                f"{type(params.draft).__name__}."
            )
        config = getattr(params.draft, "config", None)
        if config is not None and config.diffusion is not None:
            raise ValueError(
                "drafter: DraftModel needs a causal model, and this is a diffusion language model; "
                "Deer drafts with those."
            )

    @cached_property
    def tree(self) -> Tree:
        if self.paths is None:
            return chain(self.num_speculative_tokens)
        return tree_from_paths(self.paths)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes, levels = self.tree.paths.shape
        return nodes, levels - 1

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.tree_shape[0],)

    def init(self, params: Params, prompt: Hidden, context: Context) -> KVCache:
        """The draft model's own cache of the prompt, the pending token left out."""
        slots = prompt.features.shape[0]
        chunk = min(self.chunk, slots)
        _, cache = prefill(params.draft, context.tokens[:slots], context.length, chunk=chunk)
        return cache

    def propose(
        self, params: Params, key: PRNGKeyArray, state: KVCache, context: Context
    ) -> tuple[Proposal, KVCache]:
        cache, feature = self._absorb(params.draft, state, context)

        def forward(level, tokens, _, mask, scratch) -> Hidden:
            positions = jnp.full(len(tokens), context.length - 1 + level, jnp.int32)
            return params.draft.forward(tokens, positions, mask, cache, scratch=scratch)

        vocab_size = params.target.vocab_size
        proposal = grow_tree(
            self.tree,
            key,
            context.tokens[context.length - 1],
            context.warp,
            feature,
            params.draft.unembed,
            forward,
            vocab_size,
        )
        return proposal, cache

    def _absorb(
        self, draft: LanguageModel, cache: KVCache, context: Context
    ) -> tuple[KVCache, Float[Array, "1 embed"]]:
        """Caches the text up to the pending token, that one included; returns its feature."""
        window = self.tree_shape[1] + 1
        count = context.length - cache.length
        recent = jax.lax.dynamic_slice_in_dim(context.tokens, cache.length, window)
        positions = cache.length + jnp.arange(window)
        hidden = draft.forward(recent, positions, masks.causal(window), cache)
        return append(cache, settled(hidden), count), hidden.features[count - 1][None]
