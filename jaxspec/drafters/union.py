"""Two drafters in one proposal: lookup where its match is long, another one elsewhere."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxspec.checkpoint.tokenizer import covers
from jaxspec.core.checks import Checked, Count
from jaxspec.core.proposal import filled, of_own_draws, shares_draws
from jaxspec.core.tree import traced_tree
from jaxspec.core.types import (
    AsksLikeliest,
    ChecksFit,
    Context,
    Drafter,
    Hidden,
    Params,
    Proposal,
    PyTree,
)
from jaxspec.drafters.corpus import SortedTexts
from jaxspec.drafters.loaded import (
    DrafterLike,
    LoadedDrafter,
    OtherTargetError,
    loaded_drafter,
)
from jaxspec.drafters.lookup import SuffixLookup


class UnionParams(NamedTuple):
    """Weights of both drafters of a `Union`.

    Attributes:
        lookup: a corpus; `()` for none.
        head: weights of the other drafter.
    """

    lookup: SortedTexts | tuple[()]
    head: PyTree


@dataclasses.dataclass(frozen=True)
class Union(Checked):
    """Drafts from lookup where its match is long, and from a head elsewhere.

    Which of the two drafts depends on the text alone. Both draft over one tree of static size, in
    which unused nodes are masked. In sampling, a token from lookup states the distribution that has
    all of its probability on it, so one rule of verification judges both.

    A step costs the head's draft in any case: rows of a batch differ.

    Attributes:
        head: a drafter that needs no memory of its own drafts: `Eagle`, `Eagle2`, `DraftModel`,
            `DFlash`, `Deer`, `LayerSkip`. One that adapts to what is accepted takes the tokens of
            lookup for its own.
        lookup: the lookup.
        min_match: tokens that must match for lookup to draft. In the row's own text, four fewer are
            enough.

    Raises:
        ValueError: `min_match` is below 1, or `head` is `TokenRecycling` or such.

    Example:
        >>> import jaxspec
        >>> from jaxspec.drafters import Union
        >>> model = jaxspec.load("demo")
        >>> drafter = Union.of(jaxspec.Eagle.of(jaxspec.load_eagle("demo-eagle", model)))
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", max_new_tokens=16)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", drafter, max_new_tokens=16)
        >>> fast.texts == plain.texts, fast.metrics.tau > 2  # tau: bonus token included
        (True, True)
    """

    head: Drafter
    lookup: SuffixLookup
    min_match: Count = 10

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.head, AsksLikeliest):
            raise ValueError(
                f"head: {type(self.head).__name__} learns from the drafts that it made itself, and "
                "here lookup makes some; give another drafter, such as an EAGLE head's."
            )

    @classmethod
    def of(
        cls,
        head: DrafterLike,
        lookup: DrafterLike | None = None,
        **settings: int,
    ) -> LoadedDrafter:
        """Returns a drafter for `generate`.

        Args:
            head: such as `Eagle.of(head)`.
            lookup: a `SuffixLookup`, or one with its corpus; `None`: one with its defaults.
            settings: of the drafter.

        Raises:
            ValueError: one of them is no drafter, `lookup` is another one, they have different
                tokenizers, or a setting is out of range.
        """
        head, lookup = loaded_drafter(head), loaded_drafter(lookup or SuffixLookup())
        if not isinstance(lookup.drafter, SuffixLookup):
            raise ValueError(f"lookup must be a SuffixLookup, got {type(lookup.drafter).__name__}.")
        ours, theirs = head.tokenizer, lookup.tokenizer
        tokenizer = theirs if ours is None else ours
        # One may have more tokens than the other, as a diffusion model has its mask.
        if ours and theirs and not (covers(ours, theirs) or covers(theirs, ours)):
            raise OtherTargetError(
                "lookup: its tokenizer differs from that of head, so their tokens mean different "
                "things; encode its texts for the target, SuffixLookup.of(texts, model), and give "
                "a draft model of another tokenizer as DraftModel.of(draft, target=model)."
            )
        drafter = cls(head.drafter, lookup.drafter, **settings)
        params = UnionParams(lookup.params, head.params)
        return LoadedDrafter(drafter, params, tokenizer, head.made_for)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def tree_shape(self) -> tuple[int, int]:
        (nodes, depth), (further, deeper) = self.lookup.tree_shape, self.head.tree_shape
        return max(nodes, further), max(depth, deeper)

    @property
    def widths(self) -> tuple[int, ...]:
        # A match that is long enough is mostly continued to the full length.
        return tuple(sorted({self.lookup.tree_shape[0], *self.head.widths}))

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        return self.head.init(_of_head(params), prompt, context)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]:
        drafted, state = self.head.propose(_of_head(params), key, state, context)
        looked_up, weight = self.lookup.look_up(params.draft.lookup, context)
        return joined(weight >= self.min_match, looked_up, drafted), state

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        self.lookup.check_fit(params._replace(draft=params.draft.lookup))
        if isinstance(self.head, ChecksFit):
            self.head.check_fit(_of_head(params))

    def with_texts(self, params: UnionParams, texts: Sequence[np.ndarray]) -> UnionParams | None:
        """See `core.types.ReadsFinished`."""
        lookup = self.lookup.with_texts(params.lookup, texts)
        return None if lookup is None else params._replace(lookup=lookup)


def _of_head(params: Params) -> Params:
    return params._replace(draft=params.draft.head)


def joined(looks: Bool[Array, ""], looked_up: Proposal, drafted: Proposal) -> Proposal:
    """Returns one of two proposals, over a tree that either fits into.

    Args:
        looks: take the first. It may depend on the text, never on what was drawn.
        looked_up: a chain that was chosen deterministically.
        drafted: any proposal.
    """
    both = (looked_up, drafted)
    nodes = max(len(each.tokens) for each in both)
    depth = max(each.tree.paths.shape[1] for each in both) - 1
    branch = max(each.tree.children.shape[1] for each in both)

    def chosen(name: str) -> Array:
        first, second = (filled(getattr(each, name), nodes) for each in both)
        return jnp.where(looks, first, second)

    # Nodes that fill up are children of the root that nobody drafts.
    parents = [filled(each.tree.parents, nodes) for each in both]
    used = jnp.arange(nodes) < jnp.where(looks, *(len(each.tokens) for each in both))
    tree = traced_tree(jnp.where(looks, *parents), used, depth, branch)
    logprobs = drafted.draft_logprobs
    if logprobs is not None:
        certain = _certain(looked_up, logprobs)
        rows = max(len(logprobs), len(certain))
        logprobs = jnp.where(looks, filled(certain, rows), filled(logprobs, rows))
        if not shares_draws(drafted):
            logprobs = of_own_draws(tree, logprobs)
    return Proposal(chosen("tokens"), tree, chosen("valid"), logprobs, chosen("law_row"))


def _certain(
    chain: Proposal, like: Float[Array, "distributions vocab"]
) -> Float[Array, "drafts vocab"]:
    """Returns the distributions of a chain without chance: each has one token."""
    is_drafted = chain.tokens[1:, None] == jnp.arange(like.shape[1])[None, :]
    return jnp.where(is_drafted, 0.0, -jnp.inf).astype(like.dtype)
