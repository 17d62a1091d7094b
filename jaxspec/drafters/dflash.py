"""DFlash: a small head that reads the target's hidden states drafts a whole block in one pass.

Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding" (2602.06036), section 3.
It differs from `Deer` in its context, see `jaxspec.models.dflash`: that is made of the target's
states, so no part of the text is read twice. The head may know more than marginals: a Markov head
or a path selector gives the law of a place by the token chosen before it, and is asked from left to
right, without another pass.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import append
from jaxspec.core.checks import Natural, Share, checks_arguments
from jaxspec.core.proposal import bank
from jaxspec.core.tree import Path
from jaxspec.core.types import Context, Hidden, KVCache, Params, Proposal
from jaxspec.drafters.block import Acceptance, BlockSettings
from jaxspec.drafters.loaded import LoadedDrafter, check_made_for

if TYPE_CHECKING:
    from jaxspec.models import DFlashHead


class DFlashState(NamedTuple):
    """State of one row.

    Attributes:
        cache: of the target's states at every position of the text, except the pending token.
        acceptance: of the last drafts.
    """

    cache: KVCache
    acceptance: Acceptance


@dataclasses.dataclass(frozen=True)
class DFlash(BlockSettings):
    """Drafts with a DFlash head, `params.draft`, for the target it was trained for.

    A head whose blocks have B positions was trained to predict B - 1 tokens (`block`): the first
    position is the pending token. Heads of DSpark predict B, one at that position too.

    Attributes:
        taps: target layers that the head reads, its `taps`.
        confidence: a draft ends before the first token whose chance of acceptance is below this, as
            the head's confidence head predicts it; `None`: it is not asked.

    Raises:
        ValueError: see `BlockSettings`.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.models import DFlashHead, init_dflash_params
        >>> config = jaxspec.load("demo").config  # a random head in place of a trained one
        >>> config = config.replace(num_layers=1, layer_types=("full",), qk_norm=True)
        >>> params = init_dflash_params(config, config.embed_dim, jax.random.key(0))
        >>> loaded = jaxspec.DFlash.of(DFlashHead(params, config, (1,), mask_token_id=0, block=5))
        >>> loaded.drafter.block, loaded.drafter.taps
        (4, (1,))
    """

    taps: tuple[Natural, ...] = ()
    confidence: Share | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.confidence is None:
            return
        if self.adaptive is not None or self.num_nodes is not None:
            raise ValueError(
                "confidence excludes adaptive and num_nodes: each of them says how long a draft is."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        return super().widths if self.confidence is None else bank(self.tree_shape[0])

    @classmethod
    @checks_arguments
    def of(
        cls,
        head: "DFlashHead",
        block: int | None = None,
        paths: Sequence[Path] | None = None,
        *,
        any_target: bool = False,
        **settings: Any,
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` from a head that `load_dflash` gave.

        Args:
            head: the drafter.
            block: tokens of a draft; `None` for as many as the head was trained on.
            paths: of a static tree; `None` for a chain.
            any_target: draft for a target with other weights than the one that it was trained for,
                such as a fine-tuned one.
            settings: further fields of `DFlash`.

        Raises:
            ValueError: it is no such head, a setting is out of range, or two exclude each other.
        """
        _check_is_head(head)
        block = head.num_drafted if block is None else block
        paths = None if paths is None else tuple(paths)
        drafter = cls(block, paths, taps=head.taps, **settings)
        return LoadedDrafter(drafter, head, made_for=None if any_target else head.made_for)

    def init(self, params: Params, prompt: Hidden, context: Context) -> DFlashState:
        positions = jnp.arange(prompt.taps.shape[0])
        layers = params.draft.remember(prompt.taps, positions)
        return DFlashState(KVCache(layers, context.length - 1), self.nothing_accepted())

    def propose(
        self, params: Params, key: PRNGKeyArray, state: DFlashState, context: Context
    ) -> tuple[Proposal, DFlashState]:
        target, head, recent = params.target, params.draft, context.recent
        config = self.within_positions(head.config, context)
        if config != head.config:  # layers that came to slide still see their block whole
            head = dataclasses.replace(head, config=config, causal=bool(head.causal))
        behind = state.cache.length + jnp.arange(recent.tokens.shape[0])
        cache = append(state.cache, head.remember(recent.taps, behind), recent.count)
        places = self.block + int(not head.anchor_predicts)
        positions = context.length - 1 + jnp.arange(places)
        root = context.tokens[context.length - 1]

        def read(drafted: Int[Array, " block"]) -> tuple[Array, tuple[()]]:
            embedded = target.embed(jnp.concatenate([root[None], drafted])[:places])
            seen = masks.bidirectional(places)
            features = head.forward(embedded, positions, seen, cache).features
            return features[places - self.block :], ()

        def sure(features: Array, previous: Array) -> Array:
            return head.acceptance(features, previous) >= self.confidence

        drafted = self.draft(
            key,
            read,
            target.unembed,
            head.mask_token_id,
            target.vocab_size,
            context,
            state.acceptance,
            head.follow if head.parts.rank else None,
            None if self.confidence is None else sure,
        )
        return drafted.proposal, DFlashState(cache, drafted.acceptance)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`. Warns if a block is longer than those trained on."""
        head, target = params.draft, params.target
        _check_is_head(head)
        check_made_for(
            target,
            "head",
            vocab_size=head.config.vocab_size,
            embed_dim=head.config.embed_dim,
            taps=head.taps,
        )
        if head.taps != self.taps:
            raise ValueError(f"drafter: taps must be the head's, {head.taps}, got {self.taps}.")
        self.check_passes(follows=head.parts.rank > 0)
        if self.confidence is not None and not head.parts.confidence:
            raise ValueError(
                "drafter: confidence needs a head with a confidence head, and this one has none; "
                "adaptive=AdaptiveBlock() chooses the length of drafts for any head."
            )
        places = head.config.max_positions
        self.check_room(f"the head's {places} positions less one", places - 1, target.vocab_size)
        if self.block > head.num_drafted:
            warnings.warn(
                f"block: drafts of {self.block} tokens, but this head was trained on "
                f"{head.num_drafted}; it will guess later tokens badly.",
                stacklevel=2,
            )


def _check_is_head(head: Any) -> None:
    """Refuses what is no DFlash head, and says what makes one."""
    if not hasattr(head, "remember"):
        raise ValueError(
            "drafter: DFlash needs a head: load_dflash(folder, model), then DFlash.of(head); got "
            f"{type(head).__name__}."
        )
