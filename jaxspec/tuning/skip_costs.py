"""Measured costs of drafting with skipped sub-layers, and of target passes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.types import Context, Params, Recent, Warp
from jaxspec.drafters import LayerSkip
from jaxspec.drafters.layer_skip import LayerSkipState
from jaxspec.measure.passes import CAPACITY, CONTEXT, measure_passes
from jaxspec.measure.timing import time_in_turns
from jaxspec.models import Network, Skips
from jaxspec.tuning.latency import LatencyProfile, PartialPasses


class Costs(NamedTuple):
    """Measured seconds, for one row.

    Attributes:
        attention: one attention sub-layer in the pass of a draft token; mean over layers.
        mlp: one MLP sub-layer in the same pass; mean over layers.
        rest: the same pass with all sub-layers skipped.
        passes: a target pass, by width: tokens, the root included.
    """

    attention: float
    mlp: float
    rest: float
    passes: Mapping[int, float]

    def draft_token(self, num_attention: int, num_mlp: int) -> float:
        """Seconds of a draft token with this many sub-layers kept."""
        return self.rest + num_attention * self.attention + num_mlp * self.mlp

    def target_pass(
        self, num_tokens: Int[np.ndarray, " starts"], widths: Sequence[int]
    ) -> Float[np.ndarray, " starts"]:
        """Seconds of a target pass of the smallest width that fits the tokens; widths ascend."""
        seconds = np.array([self.passes[width] for width in widths])
        return seconds[np.searchsorted(widths, num_tokens)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the costs, ready for JSON; `costs_from` inverts it."""
        return {**self._asdict(), "passes": {str(n): t for n, t in self.passes.items()}}


def costs_from(plain: Mapping[str, Any]) -> Costs:
    """Inverts `Costs.as_dict`."""
    return Costs(**{**plain, "passes": {int(n): t for n, t in plain["passes"].items()}})


def costs_of(partial: PartialPasses, passes: Mapping[int, float]) -> Costs:
    """Takes the times of draft tokens apart into those of sub-layers.

    Args:
        partial: draft tokens with and without sub-layers.
        passes: target passes, by width.

    Example:
        >>> from jaxspec.tuning.latency import PartialPasses
        >>> costs = costs_of(PartialPasses(2, 9.0, 6.0, 4.0, 1.0), {1: 10.0})
        >>> costs.attention, costs.mlp, costs.rest
        (1.5, 2.5, 1.0)
    """
    attention = (partial.whole - partial.no_attention) / partial.num_layers
    mlp = (partial.whole - partial.no_mlp) / partial.num_layers
    # Noise may make a small time negative; a search would then keep what it should skip.
    return Costs(max(attention, 0.0), max(mlp, 0.0), partial.nothing, passes)


def costs_in(profile: LatencyProfile, num_layers: int, depth: int) -> Costs:
    """Returns the costs on the device of a profile, for drafts of up to `depth` tokens.

    Raises:
        ValueError: the profile has no times of partial passes, is of a model of another depth, or
            its target passes are too narrow.
    """
    partial = profile.partial
    if partial is None:
        raise ValueError(
            f"profile {profile.name}: has no times of passes with layers left out; time those of a "
            "kit without a head (`jaxspec export kit MODEL OUT`)."
        )
    if partial.num_layers != num_layers:
        raise ValueError(
            f"profile {profile.name}: was timed with a model of {partial.num_layers} layers, and "
            f"this one has {num_layers}; time a kit of this model."
        )
    widths = range(1, depth + 2)
    return costs_of(partial, {width: float(profile.target_seconds(width)) for width in widths})


def partial_sets(num_layers: int) -> dict[str, Skips]:
    """Returns the sets of sub-layers to skip whose draft tokens are timed, as `PartialPasses`."""
    keep, leave = (False,) * num_layers, (True,) * num_layers
    return {
        "whole": Skips(keep, keep),
        "no_attention": Skips(leave, keep),
        "no_mlp": Skips(keep, leave),
        "nothing": Skips(leave, leave),
    }


def measure_skip_costs(target: Network, depth: int, repeats: int = 15) -> Costs:
    """Times drafts of `depth` tokens with four sets, and target passes of every width, in turns.

    The context has `jaxspec.measure.passes.CONTEXT` tokens.
    """
    sets = partial_sets(target.num_layers)
    programs = {name: _draft_program(target, skip, depth) for name, skip in sets.items()}
    seconds = {
        name: float(np.median(times)) / depth
        for name, times in time_in_turns(programs, repeats).items()
    }
    passes = measure_passes(target, range(1, depth + 2), repeats=repeats)
    return costs_of(PartialPasses(target.num_layers, **seconds), passes)


def _draft_program(target: Network, skip: Skips, depth: int) -> Callable[[], Array]:
    drafter = LayerSkip(skip, depth, threshold=0.0, adaptive=None)
    nothing = jnp.zeros((depth + 1, 0), jnp.float32)
    context = Context(
        tokens=jnp.zeros(CAPACITY, jnp.int32),
        length=jnp.int32(CONTEXT + 1),
        room=jnp.int32(depth + 1),
        stop_ids=jnp.zeros(0, jnp.int32),
        warp=Warp(),
        cache=target.empty_cache(CAPACITY)._replace(length=jnp.int32(CONTEXT)),
        recent=Recent(jnp.zeros(depth + 1, jnp.int32), nothing, nothing, jnp.int32(0)),
    )
    state = LayerSkipState(jnp.float32(0), jnp.float32(0), jnp.int32(0))

    @jax.jit
    def draft(target, key, rows):
        propose = partial(drafter.propose, Params(target, ()), key)
        return jax.vmap(propose)(*rows)[0].tokens

    # A batch of one row, mapped as decoding maps it.
    rows = jax.tree.map(lambda array: array[None], (state, context))
    return partial(draft, target, jax.random.key(0), rows)
