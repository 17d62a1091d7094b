"""Optimizers of the trainers: warm-up, cosine, clipping, decay of weights."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.core.types import PyTree
from jaxspec.training.settings import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings, num_steps: int | Int[Array, ""]
) -> optax.GradientTransformation:
    """Returns the optimizer of a run of `num_steps` steps, which may be traced."""
    if settings.name == "adamw":
        update = optax.adamw(
            cosine(settings.learning_rate, settings, num_steps),
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=decays,
        )
    else:
        update = muon(
            cosine(settings.learning_rate, settings, num_steps),
            weight_decay=settings.weight_decay,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            adam_learning_rate=cosine(settings.adam_learning_rate, settings, num_steps),
            muon_weight_dimension_numbers=matrix_axes,
        )
    return optax.chain(optax.clip_by_global_norm(settings.clip), update)


def cosine(
    peak: float, settings: OptimizerSettings, num_steps: int | Int[Array, ""]
) -> optax.Schedule:
    """Returns the learning rate by step: a line up to `peak`, at the end half a cosine down."""
    warmup = jnp.minimum(settings.warmup_steps, num_steps // 2)
    start = jnp.maximum(warmup, num_steps * (1.0 - settings.decay_fraction))

    def learning_rate(count: ArrayLike) -> Float[Array, ""]:
        count = jnp.asarray(count)
        rising = (count + 1) / (warmup + 1)
        progress = jnp.clip((count - start) / jnp.maximum(num_steps - start, 1), 0.0, 1.0)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        floor = settings.final_fraction
        return peak * jnp.minimum(rising, floor + (1.0 - floor) * falling)

    return learning_rate


def decays(params: PyTree) -> PyTree:
    """Returns True for the weights that decay: the kernels of layers and of an untied head."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in _names(path) and "embed" not in _names(path), params
    )


def matrix_axes(params: PyTree) -> PyTree:
    """Returns the axes of each kernel that a product sums over, for Muon; `None`: left to Adam.

    Projections that are fused in one array are orthogonalised separately: every head's query, key
    and value, the gate and the up projection, each expert.
    """

    def axes(path, weight) -> MuonDimensionNumbers | None:
        names = _names(path)
        if "kernel" not in names or names[0] == "head" or "router" in names:
            return None
        last = weight.ndim - 1
        if "out" in names:  # [kv heads, groups, head dim, embed]
            return MuonDimensionNumbers(reduction_axis=tuple(range(last)), output_axis=last)
        if "experts" in names:  # the first axis counts experts
            return MuonDimensionNumbers(reduction_axis=1, output_axis=last)
        return MuonDimensionNumbers(reduction_axis=0, output_axis=last)

    return jax.tree_util.tree_map_with_path(axes, params)


def _names(path) -> tuple[str, ...]:
    return tuple(str(entry.key) for entry in path)
