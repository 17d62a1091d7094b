"""Optimizers of the trainers: warm-up, cosine, clipping, and what decays."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.core.types import PyTree

OPTIMIZERS = ("adamw", "muon")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """How weights move.

    name: "adamw", or "muon": orthogonalised momentum for the layers' matrices, Adam for the rest.
    learning_rate: the highest, reached after `warmup_steps`.
    decay_fraction: the last part of the run, in which half a cosine takes the learning rate down
        to `final_fraction` of itself. With less than 1 it is constant before, so that a run may
        be made longer or shorter until then.
    adam_learning_rate: the same for what Muon leaves to Adam; unused by "adamw".
    weight_decay: times the learning rate, each step; norms, biases and embeddings do not decay.
    clip: the largest norm of a whole gradient; larger ones are scaled down to it.
    """

    name: str = "muon"
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.004
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    warmup_steps: int = 50
    decay_fraction: float = 1.0
    final_fraction: float = 0.02
    clip: float = 1.0

    def __post_init__(self):
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer name must be one of {OPTIMIZERS}, got {self.name!r}.")
        for name in ("learning_rate", "adam_learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("weight_decay", "warmup_steps", "final_fraction"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must be in (0, 1], got {self.decay_fraction}.")


def make_optimizer(
    settings: OptimizerSettings, num_steps: int | Int[Array, ""]
) -> optax.GradientTransformation:
    """The optimizer of a run of `num_steps` steps, which may be traced."""
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
    """Learning rate by step: a straight line up to `peak`, at the end half a cosine down."""
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
    """True for the weights that decay: the kernels of layers and of an untied head."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in _names(path) and "embed" not in _names(path), params
    )


def matrix_axes(params: PyTree) -> PyTree:
    """Which axes of a kernel a product sums over, for Muon; None leaves a weight to Adam.

    Projections that lie fused in one array are orthogonalised apart: every head's query, key and
    value, the gate and the up projection, each expert.
    """

    def axes(path, weight) -> MuonDimensionNumbers | None:
        names = _names(path)
        if "kernel" not in names or not names[0].startswith("layer_") or "router" in names:
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
