"""Products of a few rows with a weight matrix: where a decoding pass spends its time.

A primitive of its own for the sake of three rules. On a CPU one row is multiplied as a batch of
partial sums. Mapped over sequences, their rows become the rows of one product. And so do those of
its transposes: left to itself XLA copies the gradients of a batch before it multiplies them, which
takes longer than the product.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

NARROW = "BF16_BF16_F32"
"""The matmul precision that means bfloat16 operands and float32 sums."""

_MAX_PARTS = 8
_MIN_PART = 64


def exact_products(dtype: jnp.dtype) -> AbstractContextManager[None]:
    """Within it, products of a network of this dtype lose nothing of their operands.

    GPUs and TPUs round those of float32 to TF32 or bfloat16 unless told otherwise, and then passes
    of different widths would differ by far more than rounding. A precision that is set through
    jax, in a context or for good, is left as it is.
    """
    if _asked_precision() is None and jnp.finfo(dtype).bits >= 32:
        return jax.default_matmul_precision("highest")
    return nullcontext()


def multiply(
    rows: Float[Array, "rows in"], kernel: Float[Array, "in out"]
) -> Float[Array, "rows out"]:
    """`rows @ kernel`, in the form that is fastest for so many rows on this backend.

    Under `jax.default_matmul_precision("BF16_BF16_F32")` both are rounded to bfloat16 and summed in
    float32, also on CPUs, where XLA would ignore the request.
    """
    dtype = jnp.promote_types(rows.dtype, kernel.dtype)
    # Kept with the product, which is spelled out when it is lowered: outside of any context.
    precision = _asked_precision()
    return _multiply_p.bind(rows.astype(dtype), kernel.astype(dtype), precision=precision)


def _asked_precision() -> str | None:
    config: Any = jax.config  # jax does not declare its options
    return config.jax_default_matmul_precision


def _product(rows: Array, kernel: Array, precision: str | None, spec: str = "nd,df->nf") -> Array:
    if precision != NARROW:
        return jnp.einsum(spec, rows, kernel, precision=precision)
    operands = rows.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32).astype(rows.dtype)


def _on_cpu(rows: Array, kernel: Array, precision: str | None) -> Array:
    """One row is a batch of parts of the sum: XLA keeps a product with a vector on one core."""
    parts = _num_parts(rows.shape[1])
    if rows.shape[0] != 1 or parts == 1 or precision == NARROW:
        return _product(rows, kernel, precision)
    pieces = jnp.einsum(
        "pd,pdf->pf",
        rows.reshape(parts, -1),
        kernel.reshape(parts, -1, kernel.shape[1]),
        precision=precision,
    )
    return jnp.sum(pieces, axis=0, keepdims=True)


def num_cores() -> int:
    """Host cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_parts(width: int) -> int:
    """A power of two that divides `width`: as many as there are cores, of at least 64 terms."""
    parts = 1
    while (
        2 * parts <= min(num_cores(), _MAX_PARTS)
        and width % (2 * parts) == 0
        and width // (2 * parts) >= _MIN_PART
    ):
        parts *= 2
    return parts


def _batch(operands, axes, precision):
    (rows, kernel), (rows_axis, kernel_axis) = operands, axes
    if kernel_axis is not None:
        product = partial(_product, precision=precision)
        return jax.vmap(product, (rows_axis, kernel_axis))(rows, kernel), 0
    rows = jnp.moveaxis(rows, rows_axis, 0)
    outputs = _multiply_p.bind(rows.reshape(-1, rows.shape[-1]), kernel, precision=precision)
    return outputs.reshape(*rows.shape[:-1], -1), 0


def _gradient_of_rows(gradient, rows, kernel, precision):
    return _product(gradient, kernel, precision, "nf,df->nd")


def _gradient_of_kernel(gradient, rows, kernel, precision):
    # A sum over all tokens of a batch, to which the rounding of operands would add up.
    exact = None if precision == NARROW else precision
    return jnp.einsum("nd,nf->df", rows, gradient, precision=exact)


_multiply_p = Primitive("multiply_rows")
_multiply_p.def_impl(jax.jit(_multiply_p.bind, static_argnames="precision"))
_multiply_p.def_abstract_eval(
    lambda rows, kernel, precision: rows.update(shape=(rows.shape[0], kernel.shape[1]))
)
mlir.register_lowering(_multiply_p, mlir.lower_fun(_product, multiple_results=False))
mlir.register_lowering(_multiply_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
batching.primitive_batchers[_multiply_p] = _batch
ad.defbilinear(_multiply_p, _gradient_of_rows, _gradient_of_kernel)
