"""Draft & Verify: the target drafts for itself with some of its sub-layers skipped.

Zhang et al. 2024, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding". The kept layers read the prefix's keys and values as the whole model computed them; those
of drafted tokens live in scratch for one draft. Drafting ends early where the draft is unsure, by a
threshold that follows the acceptance rate.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.cache import empty_layer, write
from jaxspec.core.proposal import bank, chain_proposal, choose_children
from jaxspec.core.types import Context, Hidden, LayerKV, Params, Proposal
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.drafters.skip_sets import skip_settings
from jaxspec.models import Skips


@dataclasses.dataclass(frozen=True)
class AdaptiveExit:
    """How the exit threshold follows the acceptance rate, once a step (section 3.3 of the paper).

    It settles where the running rate is below `target_rate` half of the time. With the short memory
    of the defaults the mean rate is lower than that, by 0.03 to 0.1 with a synthetic drafter; with
    `rate_memory` 0.98 it is within 0.03 of `target_rate`.

    Attributes:
        target_rate: alpha; above it the threshold falls and drafts grow longer.
        step: epsilon, how far the threshold would move.
        rate_memory: beta1, weight of the past in the running acceptance rate.
        threshold_memory: beta2, the same for the threshold.
        rule: "paper" raises the threshold while the rate is at most `target_rate`; "released", the
            rule of the published code, does so below it, and leaves the threshold alone after a
            draft of full length.
    """

    target_rate: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9
    rule: str = "paper"

    def __post_init__(self):
        for name in ("target_rate", "step", "rate_memory", "threshold_memory"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}.")
        if self.rule not in ("paper", "released"):
            raise ValueError(f"rule must be 'paper' or 'released', got {self.rule!r}.")

    def update(
        self,
        threshold: Float[Array, ""],
        rate: Float[Array, ""],
        accepted: Int[Array, ""],
        drafted: Int[Array, ""],
        longest: int,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The threshold and acceptance rate after a step that accepted some of its draft."""
        mixed = self.rate_memory * rate + (1 - self.rate_memory) * accepted / drafted
        rate = jnp.where(drafted > 0, mixed, rate)
        low = rate <= self.target_rate if self.rule == "paper" else rate < self.target_rate
        wanted = threshold + jnp.where(low, self.step, -self.step)
        if self.rule == "released":
            wanted = jnp.where(~low & (drafted == longest), threshold, wanted)
        kept = self.threshold_memory
        moved = jnp.clip(kept * threshold + (1 - kept) * wanted, 0.0, 1.0)
        return jnp.where(drafted > 0, moved, threshold), rate


class LayerSkipState(NamedTuple):
    """What a row carries.

    threshold: drafting ends after a token that the draft gives less probability.
    rate: running share of accepted among drafted tokens.
    drafted: tokens in the draft that is being verified; 0 before the first.
    """

    threshold: Float[Array, ""]
    rate: Float[Array, ""]
    drafted: Int[Array, ""]


class CarriedSkip(NamedTuple):
    """What `LayerSkip` reads as `params.draft` where it goes on from another prompt.

    skip: the set, as arrays; `None` where it is compiled in.
    threshold, rate: of `LayerSkipState`, to begin with.
    """

    skip: Skips | None
    threshold: Float[Array, ""]
    rate: Float[Array, ""]


class _Draft(NamedTuple):
    """A draft that is growing. Entries at or past `count` mean nothing.

    scratch: keys and values of the drafted tokens; `None` in a layer without attention.
    """

    tokens: Int[Array, " nodes"]
    logprobs: Float[Array, "drafts vocab"] | None
    scratch: tuple[LayerKV | None, ...]
    count: Int[Array, ""]
    sure: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class LayerSkip:
    """Drafts with the target itself, some attention and MLP sub-layers left out with their norms.

    A threshold that adapts goes on adapting from prompt to prompt if the next prompt of a row is
    drafted with what the last call left, `GenerationResult.drafters`.

    Attributes:
        skip: sub-layers to leave out, baked into the program. `None` reads a `Skips` of 0/1 arrays
            from `params.draft`: slower, as the work is done and multiplied away, but another set
            costs no compilation.
        num_speculative_tokens: the longest draft, K.
        threshold: where the exit threshold starts; drafting ends after a token whose probability,
            before any warping, is below it. 0 never exits early.
        adaptive: how the threshold moves; `None`: not at all.

    Raises:
        ValueError: for a setting out of range.
    """

    skip: Skips | None = None
    num_speculative_tokens: int = 8
    threshold: float = 0.8
    adaptive: AdaptiveExit | None = AdaptiveExit()

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}."
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}.")
        if self.skip is not None:
            _check_kind(self.skip)
            entries = [entry for part in self.skip for entry in part]
            if not all(entry in (0, 1) for entry in entries):
                raise ValueError(
                    f"skip must hold True or False for each sub-layer, got {self.skip}."
                )
            if len(self.skip.attention) != len(self.skip.mlp):
                raise ValueError(
                    "skip must name as many attention as MLP sub-layers, got "
                    f"{len(self.skip.attention)} and {len(self.skip.mlp)}."
                )
            plain = Skips(*(tuple(bool(entry) for entry in part) for part in self.skip))
            object.__setattr__(self, "skip", plain)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        skip = self._set(params.draft)
        if not isinstance(skip, Skips):
            raise ValueError(
                "drafter: LayerSkip needs a set: LayerSkip(skip), or LayerSkip.of(skip) with 0/1 "
                f"arrays; got {type(skip).__name__}."
            )
        for name, entries in zip(Skips._fields, skip, strict=True):
            if len(entries) != params.target.num_layers:
                raise ValueError(
                    f"drafter: skip.{name} must have {params.target.num_layers} entries, one per "
                    f"layer of the target, got {len(entries)}."
                )
            if not np.isin(np.asarray(entries), (0, 1)).all():
                raise ValueError(f"drafter: skip.{name} must hold 0 or 1 for each layer.")

    @classmethod
    def of(cls, skip: Skips, **settings: Any) -> LoadedDrafter:
        """Drafts with a set as 0/1 arrays, made here of what is none: for `generate(drafter=...)`.

        Trying many sets this way costs one compilation.

        Raises:
            ValueError: `skip` is no `Skips`, or a setting is out of range.
        """
        _check_kind(skip)
        # Bools in a tuple would be traced one by one, and look like a set that is compiled in.
        arrays = Skips(*(jnp.asarray(part, jnp.float32) for part in skip))
        return LoadedDrafter(cls(None, **settings), arrays)

    @classmethod
    def read(cls, source: str | Path, **settings: Any) -> "LayerSkip":
        """Drafts as a search found best.

        The threshold stands still, as the search took it to. `settings` replace what was found.

        Args:
            source: what `jaxspec tune skips` wrote, a folder or its `skips.json`, or the name of a
                set that comes with the package: "demo-skips" for the model "demo".
            settings: of `LayerSkip`.

        Raises:
            ValueError: nothing is there, or it does not hold what it should.
        """
        return cls(**{"adaptive": None, **skip_settings(source), **settings})

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.num_speculative_tokens + 1, self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return bank(self.num_speculative_tokens + 1)

    def carried(
        self, params: Skips | CarriedSkip | tuple[()], draft: LayerSkipState, context: Context
    ) -> Skips | CarriedSkip | tuple[()]:
        """See `core.types.CarriesOn`; the row's last step is booked here."""
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
        # No longer than can be emitted beside the token that the target adds.
        longest = jnp.minimum(self.num_speculative_tokens, context.room - 1)
        draft = self._draft(params, key, threshold, longest, context)
        valid = jnp.arange(self.num_speculative_tokens + 1) <= draft.count
        proposal = chain_proposal(draft.tokens, valid, draft.logprobs)
        return proposal, LayerSkipState(threshold, rate, draft.count)

    def _set(self, params: Skips | CarriedSkip | tuple[()]) -> Skips | tuple[()] | None:
        """The sub-layers to leave out, from the drafter's own params where they are there."""
        if self.skip is not None:
            return self.skip
        return params.skip if isinstance(params, CarriedSkip) else params

    def _moved(
        self, state: LayerSkipState, context: Context
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Threshold and rate after the step that verified the last draft."""
        if self.adaptive is None:
            return state.threshold, state.rate
        accepted = jnp.maximum(context.recent.count - 1, 0)
        return self.adaptive.update(
            state.threshold, state.rate, accepted, state.drafted, self.num_speculative_tokens
        )

    def _draft(
        self,
        params: Params,
        key: PRNGKeyArray,
        threshold: Float[Array, ""],
        longest: Int[Array, ""],
        context: Context,
    ) -> _Draft:
        target, size = params.target, self.num_speculative_tokens
        skip = self._set(params.draft)
        keys = jax.random.split(key, size)
        slots = jnp.arange(size)

        def goes_on(draft: _Draft) -> Bool[Array, ""]:
            return draft.sure & (draft.count < longest)

        def draw(draft: _Draft) -> _Draft:
            at = draft.count
            seen = jnp.concatenate([slots < at, jnp.ones(1, bool)])
            hidden = target.forward(
                draft.tokens[at][None],
                (context.length - 1 + at)[None],
                seen[None],
                context.cache,
                scratch=draft.scratch,
                skip=skip,
            )
            logits = target.unembed(hidden.features)
            choices, logprobs = choose_children(keys[at], logits, context.warp, 1)
            token = choices[0, 0]
            # The exit looks at the law before warping, and at a token that is kept either way.
            confidence = jax.nn.softmax(logits[0])[token]
            return _Draft(
                tokens=draft.tokens.at[at + 1].set(token),
                logprobs=None if draft.logprobs is None else draft.logprobs.at[at].set(logprobs[0]),
                scratch=tuple(
                    None if layer is None else write(layer, new, at)
                    for layer, new in zip(draft.scratch, hidden.new_kv, strict=True)
                ),
                count=at + 1,
                sure=confidence >= threshold,
            )

        kv_heads, head_dim, _ = context.cache.layers[0].keys.shape
        dtype = context.cache.layers[0].keys.dtype
        no_keys = empty_layer(kv_heads, head_dim, size, dtype)
        num_layers = len(context.cache.layers)
        absent = (False,) * num_layers if self.skip is None else self.skip.attention
        laws = None
        if context.warp.temperature is not None:
            # What is not drafted is drawn from nothing, but must be a law: verification reads it.
            laws = jnp.full((size, target.vocab_size), -jnp.log(target.vocab_size))
        start = _Draft(
            tokens=jnp.zeros(size + 1, jnp.int32).at[0].set(context.tokens[context.length - 1]),
            logprobs=laws,
            scratch=tuple(None if skipped else no_keys for skipped in absent),
            count=jnp.int32(0),
            sure=jnp.bool_(True),
        )
        return jax.lax.while_loop(goes_on, draw, start)


def _check_kind(skip: object) -> None:
    if not isinstance(skip, Skips):
        raise ValueError(
            "skip must be a `Skips`, for example of `skips_of` or `skips_of_bits`, got "
            f"{type(skip).__name__}."
        )
