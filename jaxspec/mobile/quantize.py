"""Weights of fewer bits.

Only weights change: of products, and of the table of token embeddings. Activations stay float32 in
the file; CPUs quantise them as they go, GPUs turn the weights back. Tables of rotations and the
zeros and ones of acceptance are left alone: rounded, they would be wrong, not imprecise.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8


class Recipe(NamedTuple):
    """How weights are stored.

    bits: of the weights of products; those of the token table are 8.
    block: weights that share a scale; 0: all that make one output.
    on_gpu: whether LiteRT's GPU accelerator takes it. Blocks end the process there.
    """

    bits: int
    block: int
    on_gpu: bool


QUANTIZATIONS: dict[str, Recipe | None] = {
    "float32": None,
    "int8": Recipe(8, 0, on_gpu=True),
    "int4": Recipe(4, 0, on_gpu=True),
    "int4-block32": Recipe(4, 32, on_gpu=False),
}


def check_quantization(name: str, on_gpu: bool = False) -> None:
    """Refuses a name that is not known, or what ends the process on a GPU.

    Raises:
        ValueError: naming what to take instead.
    """
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {name!r}.")
    recipe = QUANTIZATIONS[name]
    if on_gpu and recipe is not None and not recipe.on_gpu:
        raise ValueError(
            f"quantization: {name} ends the process of LiteRT's GPU accelerator; for a GPU take "
            "int4 or int8."
        )


def quantize_rows(
    matrix: Float[np.ndarray, "rows width"], bits: int, block: int = 0
) -> tuple[
    UInt8[np.ndarray, " bytes"], Float[np.ndarray, " rows"] | Float[np.ndarray, "rows parts"]
]:
    """Rounds weights to multiples of a scale, which the largest of those that share it decides.

    Symmetric: zero stays zero, and the lowest number of `bits` bits is not used.

    Args:
        matrix: one row per output of a product, or per token.
        bits: 8 or 4; of four, two share a byte, the earlier in its lower half.
        block: as many weights of a row share a scale, which divide its width; 0: all of it.

    Returns:
        The weights as a `.tflite` stores them, and their scales: float32 one per row; of blocks,
        float16 with the precision of bfloat16.
    """
    rows, width = matrix.shape
    highest = (1 << (bits - 1)) - 1
    parts = matrix.reshape(rows, -1, block or width)
    scales = np.max(np.abs(parts), axis=2, keepdims=True) / highest
    if block:
        scales = scales.astype(np.dtype(jnp.bfloat16)).astype(np.float16)
    # Also where rounding has made a tiny one zero: then the weights are as good as zero.
    scales = np.where(scales == 0.0, 1.0, scales).astype(scales.dtype)
    numbers = np.rint(parts / scales.astype(np.float32)).clip(-highest, highest).astype(np.int8)
    stored = numbers.reshape(-1).view(np.uint8)
    if bits == 4:
        pairs = np.pad(stored, (0, stored.size % 2)).reshape(-1, 2)
        stored = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return stored, scales[:, :, 0] if block else scales[:, 0, 0]
