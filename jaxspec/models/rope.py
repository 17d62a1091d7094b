"""Rotary position embedding: how fast each pair of dimensions turns, and the turning itself.

Angles are float32 whatever the network's dtype: at position 100,000 a bfloat16 angle is noise.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.forms import exchangeable
from jaxspec.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def inverse_frequencies(
    rope: Rope, head_dim: int, max_positions: int
) -> tuple[Float[np.ndarray, " pairs"], float]:
    """Radians per position of each rotated pair, and the factor on cosines and sines.

    What `DynamicScaling` does past its original length depends on the position and is added by
    `rotations`. `max_positions` chooses the table of `LongRopeScaling` and is not read otherwise.
    """
    dim = rope.rotated_dim(head_dim)
    plain = _powers(rope.theta, dim)
    match rope.scaling:
        case None | DynamicScaling():
            return plain, 1.0
        case LinearScaling(factor):
            return plain / np.float32(factor), 1.0
        case Llama3Scaling():
            return _llama3(plain, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(plain, rope.theta, dim, rope.scaling), _yarn_attention(rope.scaling)
        case LongRopeScaling():
            return _longrope(plain, rope.scaling, max_positions), _longrope_attention(rope.scaling)


@exchangeable
def rotations(
    rope: Rope, head_dim: int, max_positions: int, positions: Int[Array, " nodes"]
) -> tuple[Float[Array, "nodes pairs"], Float[Array, "nodes pairs"]]:
    """Cosines and sines of every token's rotation. They depend on its own position only."""
    frequencies, attention_factor = inverse_frequencies(rope, head_dim, max_positions)
    where = positions.astype(jnp.float32)[:, None]
    angles = where * frequencies[None]
    if isinstance(rope.scaling, DynamicScaling):
        angles = angles * _dynamic_slowdown(rope.scaling, rope.rotated_dim(head_dim), where)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotate(
    heads: Float[Array, "nodes kv_heads group head_dim"],
    cosines: Float[Array, "nodes_or_one pairs"],
    sines: Float[Array, "nodes_or_one pairs"],
) -> Float[Array, "nodes kv_heads group head_dim"]:
    """Turns the first 2 * pairs dimensions of each head; pair i is dimensions i and i + pairs."""
    pairs = cosines.shape[-1]
    first, second, rest = jnp.split(heads, (pairs, 2 * pairs), axis=-1)
    cosines, sines = cosines[:, None, None, :], sines[:, None, None, :]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate([*(half.astype(heads.dtype) for half in turned), rest], axis=-1)


def _powers(theta: float, dim: int) -> Float[np.ndarray, " pairs"]:
    return (1.0 / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(
        np.float32
    )


def _dynamic_slowdown(
    scaling: DynamicScaling, dim: int, positions: Float[Array, "nodes 1"]
) -> Float[Array, "nodes pairs"]:
    # theta' = theta * growth ** (dim / (dim - 2)) multiplies frequency i by
    # growth ** (-2i / (dim - 2)); a single pair has frequency 1 whatever the base.
    stretch = jnp.maximum((positions + 1.0) / scaling.original_max_positions, 1.0)
    growth = scaling.factor * stretch - (scaling.factor - 1.0)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / max(dim - 2, 1)
    return growth ** -exponents[None]


def _llama3(
    plain: Float[np.ndarray, " pairs"], scaling: Llama3Scaling
) -> Float[np.ndarray, " pairs"]:
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return ((1 - keep) * plain / scaling.factor + keep * plain).astype(np.float32)


def _yarn(
    plain: Float[np.ndarray, " pairs"], theta: float, dim: int, scaling: YarnScaling
) -> Float[np.ndarray, " pairs"]:
    def dimension_turning(times: float) -> float:
        """The (fractional) pair that turns this many times over the original context."""
        wavelength = scaling.original_max_positions / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width is a step; the small number is the one transformers uses.
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return (plain / scaling.factor * slow + plain * (1 - slow)).astype(np.float32)


def _yarn_attention(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _longrope(
    plain: Float[np.ndarray, " pairs"], scaling: LongRopeScaling, max_positions: int
) -> Float[np.ndarray, " pairs"]:
    fits = max_positions <= scaling.original_max_positions
    factors = scaling.short_factors if fits else scaling.long_factors
    return plain / np.asarray(factors, np.float32)


def _longrope_attention(scaling: LongRopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_positions))
