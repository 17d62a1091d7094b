"""A small language model drafts for a large one.

Leviathan et al. 2023 and Chen et al. 2023 for a chain; with `threshold`, one that ends where the
draft model is unsure; with `paths`, a small static tree whose siblings are the draft model's
likeliest tokens (greedy) or draws without replacement (sampling).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxspec.checkpoint.hub import check_is_model
from jaxspec.core import masks
from jaxspec.core.cache import append, settled
from jaxspec.core.checks import Checked, Count, Nodes, Share, checks_arguments
from jaxspec.core.decode import prefill
from jaxspec.core.proposal import bank
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
from jaxspec.drafters.growth import DraftLaw, check_threshold, grow_chain, grow_tree
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.drafters.vocabularies import shared_tokens

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


@dataclasses.dataclass(frozen=True)
class DraftModel(Checked):
    """Drafts with a separate, smaller model, `params.draft`.

    Its vocabulary is the target's, or another's: see `of`.

    In each step the draft model reads the tokens that the last step emitted (at most depth + 1, in
    one pass), then runs one pass per further level of the tree, over its cache and a small scratch.

    Attributes:
        num_speculative_tokens: length of the chain; ignored when `paths` is given.
        paths: rank paths of a static tree, see `tree_from_paths`.
        chunk: tokens per pass over the prompt.
        threshold: a chain ends early once its confidence is below this: the product of the largest
            probabilities of the laws of its tokens, before any warping. 0 never ends it early.

    Raises:
        ValueError: a setting is out of range, the tree is invalid, or a threshold is given for a
            tree that is no chain.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> drafter = jaxspec.DraftModel.of(jaxspec.load("demo-draft"))
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, drafter)
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    taps = ()
    num_speculative_tokens: Nodes = 4
    paths: tuple[Path, ...] | None = None
    chunk: Count = 256
    threshold: Share = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.paths is not None:
            object.__setattr__(self, "paths", normalize_paths(self.paths))
        check_threshold(self.threshold, self.tree)

    @classmethod
    @checks_arguments
    def of(
        cls,
        model: "Model",
        num_speculative_tokens: int = 4,
        paths: Sequence[Path] | None = None,
        target: "Model | None" = None,
        threshold: float = 0.0,
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` from a model that `load` gave.

        Args:
            model: the draft model.
            num_speculative_tokens: see the class.
            paths: see the class.
            target: the model to draft for, where it has another tokenizer. Then only tokens that
                both have are drafted (arXiv 2502.05202).
            threshold: see the class.

        Raises:
            OtherTargetError: the two share no token.
            ValueError: an argument is something else, or a setting is out of range.
        """
        check_is_model(model)
        paths = None if paths is None else tuple(paths)
        drafter = cls(num_speculative_tokens, paths, threshold=threshold)
        if target is None:
            return LoadedDrafter(drafter, model.network, model.tokenizer)
        check_is_model(target, "target")
        return LoadedDrafter(drafter, shared_tokens(model, target), target.tokenizer)

    @cached_property
    def tree(self) -> Tree:
        """The static tree."""
        if self.paths is None:
            return chain(self.num_speculative_tokens)
        return tree_from_paths(self.paths)

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes, levels = self.tree.paths.shape
        return nodes, levels - 1

    @property
    def widths(self) -> tuple[int, ...]:
        nodes, _ = self.tree_shape
        return bank(nodes) if self.threshold else (nodes,)

    def init(self, params: Params, prompt: Hidden, context: Context) -> KVCache:
        """Returns the draft model's cache of the prompt, without the pending token."""
        bucket = prompt.features.shape[0]
        chunk = min(self.chunk, bucket)
        _, cache = prefill(params.draft, context.tokens[:bucket], context.length, chunk=chunk)
        return cache

    def propose(
        self, params: Params, key: PRNGKeyArray, state: KVCache, context: Context
    ) -> tuple[Proposal, KVCache]:
        proposal, state, _ = self.propose_and_count(params, key, state, context, self.threshold)
        return proposal, state

    def propose_and_count(
        self,
        params: Params,
        key: PRNGKeyArray,
        state: KVCache,
        context: Context,
        threshold: float | Float[Array, ""],
    ) -> tuple[Proposal, KVCache, int | Int[Array, ""]]:
        """Proposes with any threshold, if its own is above 0; also counts its draft passes.

        That of the root is one of them. For the rest see `core.types.Drafter`.
        """
        cache, feature = self._absorb(params.draft, state, context)

        def forward(level, tokens, _, mask, scratch) -> Hidden:
            positions = jnp.full(len(tokens), context.length - 1 + level, jnp.int32)
            return params.draft.forward(tokens, positions, mask, cache, scratch=scratch)

        draft, root = params.draft, context.tokens[context.length - 1]
        law = DraftLaw(
            draft.unembed, context.warp, params.target.vocab_size, grammar=context.grammar
        )
        if not self.threshold:
            proposal = grow_tree(self.tree, key, root, law, feature, forward)
            return proposal, cache, self.tree_shape[1]
        scratch = draft.empty_cache(depth := self.tree_shape[1]).layers
        grown = grow_chain(
            depth, context.room, threshold, key, root, law, feature, forward, scratch
        )
        return grown.proposal, cache, grown.passes

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        if not hasattr(params.draft, "forward"):
            raise ValueError(
                "drafter: DraftModel needs a model's weights: DraftModel.of(load(...)); got "
                f"{type(params.draft).__name__}."
            )
        config = getattr(params.draft, "config", None)
        if getattr(config, "diffusion", None) is not None:
            raise ValueError(
                "drafter: DraftModel needs a causal model, and this is a diffusion language model; "
                "Deer drafts with those."
            )

    def _absorb(
        self, draft: LanguageModel, cache: KVCache, context: Context
    ) -> tuple[KVCache, Float[Array, "1 embed"]]:
        """Caches the text up to and with the pending token; returns that token's feature."""
        window = self.tree_shape[1] + 1
        count = context.length - cache.length
        recent = jax.lax.dynamic_slice_in_dim(context.tokens, cache.length, window)
        positions = cache.length + jnp.arange(window)
        hidden = draft.forward(recent, positions, masks.causal(window), cache)
        return append(cache, settled(hidden), count), hidden.features[count - 1][None]
