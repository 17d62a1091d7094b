"""EAGLE: a one-layer head drafts from the target's hidden states, over a static tree.

Li et al. 2024 (EAGLE-1) and 2025 (EAGLE-3). The two differ in their heads, see
`jaxspec.models.eagle`; drafting is the same. Keys and values of predicted states stay in scratch
for one draft; the head's cache holds those of the target's true states only.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import append, settled
from jaxspec.core.checks import Checked, Count, Natural, Share, checks_arguments
from jaxspec.core.decode import in_chunks, places_at_once
from jaxspec.core.proposal import bank
from jaxspec.core.tree import EAGLE_PATHS, Path, normalize_paths, tree_from_paths
from jaxspec.core.types import Context, Hidden, KVCache, Params, Proposal, Tree
from jaxspec.drafters.growth import DraftLaw, check_threshold, grow_chain, grow_tree
from jaxspec.drafters.loaded import LoadedDrafter, check_made_for

if TYPE_CHECKING:
    from jaxspec.models.eagle import Eagle3Head, EagleHead


class EagleState(NamedTuple):
    """State of one row.

    Attributes:
        cache: of pairs (state at t, token t + 1), one fewer than there are tokens of text.
        state: predicted from the last pair; the distribution after the pending token comes from it.
    """

    cache: KVCache
    state: Float[Array, " embed"]


@dataclasses.dataclass(frozen=True)
class Eagle(Checked):
    """Drafts with an EAGLE head, `params.draft`, for the target it was trained for.

    A step costs one pass of the head over the tokens just emitted, and one for each further level
    of the tree that has nodes with children.

    Attributes:
        paths: rank paths of the static tree, see `tree_from_paths`. The default is the published
            tree of EAGLE: 25 nodes, the root not counted. A tree searched for the device is
            usually faster; `of` takes the one that lies beside the head.
        taps: target layers that the head reads, its `taps`; `()` for EAGLE-1.
        chunk: tokens per pass over the prompt.
        threshold: of a chain, as for `DraftModel`: it ends early once the head is unsure.

    Raises:
        ValueError: the tree is invalid or has no node; or a threshold is out of range, or given for
            a tree that is no chain.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> drafter = jaxspec.Eagle.of(jaxspec.load_eagle("demo-eagle", model))
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, drafter)
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    paths: tuple[Path, ...] = EAGLE_PATHS
    taps: tuple[Natural, ...] = ()
    chunk: Count = 256
    threshold: Share = 0.0

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "paths", normalize_paths(self.paths))
        if not self.paths:
            raise ValueError(
                "paths: a tree without a node drafts nothing; a search writes one where plain "
                "decoding is faster. Give no drafter, or another tree."
            )
        check_threshold(self.threshold, self.tree)

    @classmethod
    @checks_arguments
    def of(
        cls,
        head: "EagleHead | Eagle3Head",
        paths: Sequence[Path] | None = None,
        threshold: float | None = None,
        any_target: bool = False,
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` from a head that `load_eagle` gave.

        Args:
            head: the head.
            paths: of the tree; `None`: those of the tree that lay beside the head (`tree.json` in
                its folder), or EAGLE's own without one.
            threshold: see the class; `None`: that of the tree beside the head, and 0 for others.
            any_target: draft for a target with other weights than the one that it was trained for,
                such as a fine-tuned one.

        Raises:
            ValueError: it is no such head, or the tree is invalid.
        """
        check_is_head(head)
        if threshold is None:
            threshold = head.threshold if paths is None else 0.0
        if paths is None:
            paths = EAGLE_PATHS if head.paths is None else head.paths
        drafter = cls(tuple(paths), head.taps, threshold=threshold)
        return LoadedDrafter(drafter, head, made_for=None if any_target else head.made_for)

    @cached_property
    def tree(self) -> Tree:
        """The static tree."""
        return tree_from_paths(self.paths)

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes, levels = self.tree.paths.shape
        return nodes, levels - 1

    @property
    def widths(self) -> tuple[int, ...]:
        nodes, _ = self.tree_shape
        return bank(nodes) if self.threshold else (nodes,)

    def init(self, params: Params, prompt: Hidden, context: Context) -> EagleState:
        return read_prompt(params, prompt, context, self.chunk)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: EagleState, context: Context
    ) -> tuple[Proposal, EagleState]:
        proposal, state, _ = self.propose_and_count(params, key, state, context, self.threshold)
        return proposal, state

    def propose_and_count(
        self,
        params: Params,
        key: PRNGKeyArray,
        state: EagleState,
        context: Context,
        threshold: float | Float[Array, ""],
    ) -> tuple[Proposal, EagleState, int | Int[Array, ""]]:
        """Proposes with any threshold, if its own is above 0; also counts its draft passes.

        That of the root is one of them. For the rest see `core.types.Drafter`.
        """
        target, head = params.target, params.draft
        state = absorb(params, state, context)

        def forward(level, tokens, states, mask, scratch) -> Hidden:
            positions = jnp.full(len(tokens), context.length - 2 + level, jnp.int32)
            return head.forward(
                target.embed(tokens), states, positions, mask, state.cache, scratch=scratch
            )

        root = context.tokens[context.length - 1]
        law = DraftLaw(
            lambda states: head.unembed(target, states),
            context.warp,
            target.vocab_size,
            head.draft_ids,
            context.grammar,
        )
        feature = state.state[None]
        if not self.threshold:
            proposal = grow_tree(self.tree, key, root, law, feature, forward)
            return proposal, state, self.tree_shape[1]
        scratch = head.empty_cache(depth := self.tree_shape[1]).layers
        grown = grow_chain(
            depth, context.room, threshold, key, root, law, feature, forward, scratch
        )
        return grown.proposal, state, grown.passes

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        branch = self.tree.children.shape[1]
        check_head(params, self.taps, depth=self.tree_shape[1], branch=branch)


def check_is_head(head: Any) -> None:
    """Refuses what is no EAGLE head, and says what makes one.

    Raises:
        ValueError: naming what was given.
    """
    if not hasattr(head, "states_of"):
        raise ValueError(
            "drafter: an EAGLE drafter needs a head: load_eagle(folder, model), then "
            f"Eagle.of(head) or Eagle2.of(head); got {type(head).__name__}."
        )


def check_head(params: Params, taps: tuple[int, ...], depth: int, branch: int) -> None:
    """Refuses a head for another target or other layers, or too small for the trees.

    Args:
        params: of target and head.
        taps: layers that the drafter asks the target for.
        depth: of the deepest tree.
        branch: the most children of a node.

    Raises:
        ValueError: naming what differs.
    """
    target, head = params.target, params.draft
    check_is_head(head)
    if not hasattr(target, "embed"):
        raise ValueError(
            "drafter: an EAGLE head reads the token embeddings of a model of `load`; the target is "
            f"{type(target).__name__}, a network of your own. Use another drafter."
        )
    check_made_for(
        target, "head", vocab_size=head.target_vocab_size, embed_dim=head.config.embed_dim
    )
    if head.taps != taps:
        raise ValueError(f"drafter: taps must be the head's, {head.taps}, got {taps}.")
    if depth > head.config.max_positions:
        raise ValueError(
            f"drafter: the tree is {depth} levels deep, but the head has "
            f"{head.config.max_positions} positions; give a shallower tree."
        )
    num_drafted = head.target_vocab_size if head.draft_ids is None else len(head.draft_ids)
    if branch > num_drafted:
        raise ValueError(
            f"drafter: a node of the tree takes rank {branch - 1}, but the head drafts from "
            f"{num_drafted} tokens; give a tree with fewer children of a node."
        )


def read_prompt(params: Params, prompt: Hidden, context: Context, chunk: int) -> EagleState:
    """Returns the state of a head that has read all pairs of the prompt."""
    head, bucket = params.draft, prompt.features.shape[0]
    # Pair t joins the state at t with the token after it; the last pair means nothing.
    pairs = (
        params.target.embed(jnp.roll(context.tokens[:bucket], -1)),
        head.states_of(prompt.features, prompt.taps),
    )

    def forward(pairs, positions, mask, cache) -> Hidden:
        return head.forward(*pairs, positions, mask, cache)

    num_pairs = context.length - 1
    chunk = places_at_once(head, min(chunk, bucket))
    hidden, layers = in_chunks(forward, pairs, head.empty_cache, chunk, num_pairs)
    # A prompt of one token has no pair: its first draft comes from an arbitrary state.
    newest = hidden.features[jnp.maximum(num_pairs - 1, 0)]
    return EagleState(KVCache(layers, num_pairs), newest)


def absorb(params: Params, state: EagleState, context: Context) -> EagleState:
    """Caches the pairs of the last step, made of the target's true states."""
    head, recent, cache = params.draft, context.recent, state.cache
    window = recent.tokens.shape[0]
    hidden = head.forward(
        params.target.embed(recent.tokens),
        head.states_of(recent.features, recent.taps),
        cache.length + jnp.arange(window),
        masks.causal(window),
        cache,
    )
    newest = hidden.features[jnp.maximum(recent.count - 1, 0)]
    return EagleState(
        append(cache, settled(hidden), recent.count),
        jnp.where(recent.count > 0, newest, state.state),
    )
