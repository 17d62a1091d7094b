"""Weights of fewer bits.

Only the weights of products and the table of token embeddings change. Activations stay float32 in
the file; CPUs quantize them while they compute, GPUs turn the weights back into floats. Tables of
rotations and the zeros and ones of acceptance stay as they are: rounded, they would be wrong.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int8, UInt8

from jaxspec.core.checks import shown


class WeightFormat(NamedTuple):
    """Format of stored weights.

    Attributes:
        bits: of the weights of products; the token table always has 8.
        block: number of weights that share a scale; 0: all weights of one output.
        on_gpu: True if LiteRT's GPU accelerator takes it. Blocks end the process there.
        calibrated: True if numbers are chosen for texts of the model, and some products keep 8
            bits, see `mobile.calibration`.
    """

    bits: int
    block: int
    on_gpu: bool
    calibrated: bool = False


MOST_EXTRA = 0.1
"""Share of bytes that products of 8 bits may add to calibrated weights of 4 bits."""
QUANTIZATIONS: dict[str, WeightFormat | None] = {
    "float32": None,
    "int8": WeightFormat(8, 0, on_gpu=True),
    "int4": WeightFormat(4, 0, on_gpu=True),
    "int4-block32": WeightFormat(4, 32, on_gpu=False),
    "int4-calibrated": WeightFormat(4, 0, on_gpu=True, calibrated=True),
    "int4-block32-calibrated": WeightFormat(4, 32, on_gpu=False, calibrated=True),
}


def check_quantization(name: str, on_gpu: bool = False) -> None:
    """Refuses an unknown quantization, or one that ends the process of the GPU accelerator.

    Raises:
        ValueError: naming those to take instead.

    Example:
        >>> check_quantization("int4-calibrated", on_gpu=True)  # may be taken: nothing is said
    """
    if name not in QUANTIZATIONS:
        raise ValueError(
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {shown(name)}."
        )
    weights = QUANTIZATIONS[name]
    if on_gpu and weights is not None and not weights.on_gpu:
        raise ValueError(
            f"quantization: {name} ends the process of LiteRT's GPU accelerator; for a GPU take "
            "int4-calibrated or int8."
        )


def quantize_rows(
    matrix: Float[np.ndarray, "rows width"], bits: int, block: int = 0
) -> tuple[
    UInt8[np.ndarray, " bytes"], Float[np.ndarray, " rows"] | Float[np.ndarray, "rows parts"]
]:
    """Rounds weights to multiples of a scale, which the largest of the weights that share it sets.

    Symmetric: zero stays zero, and the lowest number of `bits` bits is not used.

    Args:
        matrix: one row per output of a product, or per token.
        bits: 8 or 4; two weights of 4 bits share a byte, the earlier in its lower half.
        block: number of weights of a row that share a scale; divides its width; 0: the whole row.

    Returns:
        The weights as a `.tflite` stores them, and their scales: float32, one per row; for blocks
        float16 with the precision of bfloat16.

    Example:
        >>> stored, scales = quantize_rows(np.asarray([[1.0, -0.5]], np.float32), bits=8)
        >>> stored.view(np.int8).tolist()
        [127, -64]
    """
    scales = stored_scales(row_scales(matrix, bits, block), block)
    parts = matrix.reshape(len(matrix), -1, block or matrix.shape[1])
    numbers = round_to(parts, scales[..., None].astype(np.float32), bits)
    return pack(numbers, bits), scales if block else scales[:, 0]


def row_scales(
    matrix: Float[np.ndarray, "rows width"], bits: int, block: int
) -> Float[np.ndarray, "rows parts"]:
    """Returns the scales with which the largest weight of each part is the highest number."""
    parts = matrix.reshape(len(matrix), -1, block or matrix.shape[1])
    return np.max(np.abs(parts), axis=2) / _highest(bits)


def stored_scales(
    scales: Float[np.ndarray, "rows parts"], block: int
) -> Float[np.ndarray, "rows parts"]:
    """Rounds scales to the precision in which a file holds them."""
    if block:
        scales = scales.astype(np.dtype(jnp.bfloat16)).astype(np.float16)
    # Rounding may make a tiny scale zero as well: then the weights are as good as zero.
    return np.where(scales == 0.0, 1.0, scales).astype(np.float16 if block else np.float32)


def round_to(weights: np.ndarray, scales: np.ndarray, bits: int) -> Int8[np.ndarray, "..."]:
    """Returns the whole numbers of `bits` bits that are nearest to weights over scales."""
    highest = _highest(bits)
    return np.rint(weights / scales).clip(-highest, highest).astype(np.int8)


def pack(numbers: Int8[np.ndarray, "..."], bits: int) -> UInt8[np.ndarray, " bytes"]:
    """Returns numbers as a `.tflite` stores them."""
    stored = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    if bits == 4:
        pairs = np.pad(stored, (0, stored.size % 2)).reshape(-1, 2)
        stored = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return stored


def _highest(bits: int) -> int:
    return (1 << (bits - 1)) - 1
