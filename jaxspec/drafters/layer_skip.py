"""Draft & Verify: the target drafts for itself with some of its sub-layers skipped.

Zhang et al. 2024, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding". The kept layers read the keys and values of the prefix as the whole model computed them;
those of drafted tokens stay in scratch for one draft. Drafting ends early if the draft is unsure,
by a threshold that follows the acceptance rate.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxspec.core.cache import empty_layer
from jaxspec.core.checks import (
    Checked,
    Nodes,
    Share,
    at_most_entries,
    checked,
    one_of,
    shown,
)
from jaxspec.core.proposal import bank
from jaxspec.core.types import Context, Hidden, Params, Proposal
from jaxspec.drafters.growth import DraftLaw, grow_chain
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.drafters.skip_sets import skip_settings
from jaxspec.models import Network, Skips
from jaxspec.models.config import MOST_LAYERS

_Entries = Annotated[Sequence[Any], at_most_entries(MOST_LAYERS)]


@dataclasses.dataclass(frozen=True)
class AdaptiveExit(Checked):
    """Rule by which the exit threshold follows the acceptance rate, once a step (paper, 3.3).

    The threshold settles so that the running rate is below `target_rate` half of the time. With the
    short memory of the defaults the mean rate is lower than that, by 0.03 to 0.1 with a synthetic
    drafter; with `rate_memory` 0.98 it is within 0.03 of `target_rate`.

    Attributes:
        target_rate: alpha; above it the threshold falls and drafts grow longer.
        step: epsilon, the change of the threshold before `threshold_memory` smooths it.
        rate_memory: beta1, weight of the past in the running acceptance rate.
        threshold_memory: beta2, the same for the threshold.
        rule: "paper" raises the threshold while the rate is at most `target_rate`; "released", the
            rule of the published code, does so below it, and leaves the threshold alone after a
            draft of full length.
    """

    target_rate: Share = 0.9
    step: Share = 0.01
    rate_memory: Share = 0.5
    threshold_memory: Share = 0.9
    rule: Annotated[str, one_of("paper", "released")] = "paper"

    def update(
        self,
        threshold: Float[Array, ""],
        rate: Float[Array, ""],
        accepted: Int[Array, ""],
        drafted: Int[Array, ""],
        longest: int,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the threshold and the acceptance rate after a step."""
        mixed = self.rate_memory * rate + (1 - self.rate_memory) * accepted / drafted
        rate = jnp.where(drafted > 0, mixed, rate)
        # A phone's GPU knows no "at most", and no clip on both sides.
        at_least = jnp.greater_equal(self.target_rate, rate)
        low = at_least if self.rule == "paper" else rate < self.target_rate
        fall = threshold - self.step
        if self.rule == "released":
            fall = jnp.where(drafted == longest, threshold, fall)
        kept = self.threshold_memory
        moved = jnp.where(
            low,
            jnp.minimum(kept * threshold + (1 - kept) * (threshold + self.step), 1.0),
            jnp.maximum(kept * threshold + (1 - kept) * fall, 0.0),
        )
        return jnp.where(drafted > 0, moved, threshold), rate


class LayerSkipState(NamedTuple):
    """State of one row.

    Attributes:
        threshold: drafting ends after a token that the draft gives less probability.
        rate: running share of accepted among drafted tokens.
        drafted: tokens in the draft that is being verified; 0 before the first.
    """

    threshold: Float[Array, ""]
    rate: Float[Array, ""]
    drafted: Int[Array, ""]


class CarriedSkip(NamedTuple):
    """Weights of `LayerSkip` (`params.draft`) that continue from another prompt.

    Attributes:
        skip: the set, as arrays; `None` if it is compiled in.
        threshold: first value of `LayerSkipState.threshold`.
        rate: first value of `LayerSkipState.rate`.
    """

    skip: Skips | None
    threshold: Float[Array, ""]
    rate: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class LayerSkip(Checked):
    """Drafts with the target itself, without some attention and MLP sub-layers and their norms.

    An adaptive threshold continues from prompt to prompt if the next prompt is decoded with the
    drafter that the last call left, `GenerationResult.drafters`.

    Attributes:
        skip: sub-layers to leave out, compiled into the program. `None` reads a `Skips` of 0/1
            arrays from `params.draft`: slower, as skipped work is done and multiplied by 0, but
            another set costs no compilation.
        num_speculative_tokens: the longest draft, K.
        threshold: first value of the exit threshold; drafting ends after a token whose probability,
            before any warping, is below it. 0 never exits early.
        adaptive: rule by which the threshold moves; `None`: not at all.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> drafter = jaxspec.LayerSkip.read("demo-skips")
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, drafter)
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    taps = ()
    skip: Skips | None = None
    num_speculative_tokens: Nodes = 8
    threshold: Share = 0.8
    adaptive: AdaptiveExit | None = AdaptiveExit()

    def __post_init__(self):
        if self.skip is not None:
            _check_kind(self.skip)
        super().__post_init__()
        if self.skip is not None:
            entries = [entry for part in self.skip for entry in part]
            if not all(np.ndim(entry) == 0 and entry in (0, 1) for entry in entries):
                raise ValueError(
                    f"skip must hold True or False for each sub-layer, got {shown(entries)}."
                )
            if len(self.skip.attention) != len(self.skip.mlp):
                raise ValueError(
                    "skip must name as many attention as MLP sub-layers, got "
                    f"{len(self.skip.attention)} and {len(self.skip.mlp)}."
                )
            plain = Skips(*(tuple(bool(entry) for entry in part) for part in self.skip))
            object.__setattr__(self, "skip", plain)

    @classmethod
    def of(cls, skip: Skips, **settings: Any) -> LoadedDrafter:
        """Returns a drafter for `generate` that reads its set as 0/1 arrays.

        Trying many sets this way costs one compilation. Entries of `skip` may be bools or arrays.

        Raises:
            ValueError: `skip` is not a `Skips`, or a setting is out of range.
        """
        _check_kind(skip)
        # Bools in a tuple would be traced one by one, and look like a set that is compiled in.
        arrays = Skips(*(jnp.asarray(part, jnp.float32) for part in skip))
        return LoadedDrafter(cls(None, **settings), arrays)

    @classmethod
    def read(cls, source: str | Path, **settings: Any) -> "LayerSkip":
        """Returns a drafter with the settings that a search found.

        The threshold is constant, as in the search. `settings` replace what was found.

        Args:
            source: a folder that `jaxspec tune skips` wrote or its `skips.json`, or the name of a
                set that comes with the package: "demo-skips" for the model "demo".
            settings: of `LayerSkip`.

        Raises:
            ValueError: `source` does not exist, or is not a result of `jaxspec tune skips`.
        """
        return cls(**{"adaptive": None, **skip_settings(source), **settings})

    @property
    def ends_early(self) -> bool:
        """True if a draft may end before its full length."""
        return self.threshold > 0 or self.adaptive is not None

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.num_speculative_tokens + 1, self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return bank(self.num_speculative_tokens + 1)

    def carried(
        self, params: Skips | CarriedSkip | tuple[()], draft: LayerSkipState, context: Context
    ) -> Skips | CarriedSkip | tuple[()]:
        """See `core.types.CarriesOn`; the row's last step is counted in."""
        if self.adaptive is None:
            return params
        threshold, rate = self._moved(draft, context)
        arrays = None if self.skip is not None else cast(Skips, self._set(params))
        return CarriedSkip(arrays, threshold, rate)

    def init(self, params: Params, prompt: Hidden, context: Context) -> LayerSkipState:
        del prompt, context  # The target's own cache is all that drafting reads.
        if isinstance(params.draft, CarriedSkip):
            return LayerSkipState(params.draft.threshold, params.draft.rate, jnp.int32(0))
        return LayerSkipState(jnp.float32(self.threshold), jnp.float32(0), jnp.int32(0))

    def propose(
        self, params: Params, key: PRNGKeyArray, state: LayerSkipState, context: Context
    ) -> tuple[Proposal, LayerSkipState]:
        threshold, rate = self._moved(state, context)
        target, skip = params.target, self._set(params.draft)

        def forward(depth, token, _, mask, scratch) -> Hidden:
            positions = (context.length - 1 + depth)[None]
            return target.forward(token, positions, mask, context.cache, scratch=scratch, skip=skip)

        size, num_layers = self.num_speculative_tokens, len(context.cache.layers)
        kv_heads, head_dim, _ = context.cache.layers[0].keys.shape
        no_keys = empty_layer(kv_heads, head_dim, size, context.cache.layers[0].keys.dtype)
        absent = (False,) * num_layers if self.skip is None else self.skip.attention
        grown = grow_chain(
            size,
            context.room,
            threshold,
            key,
            context.tokens[context.length - 1],
            DraftLaw(target.unembed, context.warp, target.vocab_size, grammar=context.grammar),
            jnp.zeros((1, target.embed_dim), target.dtype),
            forward,
            tuple(None if skipped else no_keys for skipped in absent),
            begun=False,
            confidence=lambda before, law, choice: law[choice],  # as published: of the last token
            least=0.0,
        )
        return grown.proposal, LayerSkipState(threshold, rate, grown.count)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        skip = self._set(params.draft)
        if not isinstance(skip, Skips):
            raise ValueError(
                "drafter: LayerSkip needs a set: LayerSkip(skip), or LayerSkip.of(skip) with 0/1 "
                f"arrays; got {type(skip).__name__}."
            )
        if not isinstance(params.target, Network):
            raise ValueError(
                "drafter: LayerSkip leaves out layers of a model of `load`; the target is "
                f"{type(params.target).__name__}, a network of your own. Use another drafter."
            )
        for name, entries in zip(Skips._fields, skip, strict=True):
            if len(entries) != params.target.num_layers:
                raise ValueError(
                    f"drafter: skip.{name} must have {params.target.num_layers} entries, one per "
                    f"layer of the target, got {len(entries)}."
                )
            if not np.isin(np.asarray(entries), (0, 1)).all():
                raise ValueError(f"drafter: skip.{name} must hold 0 or 1 for each layer.")

    def _set(self, params: Skips | CarriedSkip | tuple[()]) -> Skips | tuple[()] | None:
        """Returns the sub-layers to leave out: the compiled set, or that of the params."""
        if self.skip is not None:
            return self.skip
        return params.skip if isinstance(params, CarriedSkip) else params

    def _moved(
        self, state: LayerSkipState, context: Context
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns threshold and rate after the step that verified the last draft."""
        if self.adaptive is None:
            return state.threshold, state.rate
        accepted = jnp.maximum(context.recent.count - 1, 0)
        return self.adaptive.update(
            state.threshold, state.rate, accepted, state.drafted, self.num_speculative_tokens
        )


def _check_kind(skip: object) -> None:
    if not isinstance(skip, Skips):
        raise ValueError(
            "skip must be a `Skips`, as `skips_of` and `skips_of_bits` return, got "
            f"{type(skip).__name__}."
        )
    for name, entries in zip(Skips._fields, skip, strict=True):
        checked(f"skip.{name}", entries, _Entries)
