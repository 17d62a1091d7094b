"""Products of a few rows with a weight matrix: where a decoding pass spends its time.

A separate primitive, for the sake of three rules. On a CPU one row is multiplied as a batch of
partial sums. Mapped over sequences, their rows become the rows of one product. And so do those of
its transposes: left to itself XLA copies the gradients of a batch before it multiplies them, which
takes longer than the product.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Shaped

from jaxspec import native
from jaxspec.core.forms import exchangeable, is_exchanged
from jaxspec.core.narrow import MAX_ROWS, NARROW, NATIVE_WEIGHTS, asked_precision

_MAX_PARTS = 8
_MIN_PART = 64


def exact_products(dtype: jnp.dtype) -> AbstractContextManager[None]:
    """Within it, products of a network of this dtype lose nothing of their operands.

    GPUs and TPUs round those of float32 to TF32 or bfloat16 unless told otherwise, and then passes
    of different widths would differ by far more than rounding. A precision that is set through
    jax, in a context or for the whole process, is left as it is.
    """
    if asked_precision() is None and jnp.finfo(dtype).bits >= 32:
        return jax.default_matmul_precision("highest")
    return nullcontext()


@exchangeable
def multiply(
    rows: Float[Array, "rows in"],
    kernel: Shaped[Array, "in out"],
    dtype: jnp.dtype | None = None,
    *,
    turned: bool = False,
) -> Float[Array, "rows out"]:
    """`rows @ kernel`, in the form that is fastest for that number of rows on this backend.

    The result has `dtype`, the operands' own unless given. A kernel of fewer bits than the rows is
    multiplied as the numbers that it holds. With `turned`, the kernel lies in memory
    the other way round, [out, in], as a table of embeddings that is the output head too; a
    transpose of it would be copied in every pass.

    Under `jax.default_matmul_precision("BF16_BF16_F32")` both are rounded to bfloat16 and summed in
    float32, also on CPUs, where XLA would ignore the request.
    """
    common = rows.dtype if kernel.dtype == jnp.int8 else jnp.promote_types(rows.dtype, kernel.dtype)
    if common != jnp.float32:
        kernel = kernel.astype(common)
    # Kept with the product, which is spelled out when it is lowered: outside of any context.
    precision = asked_precision()
    return _multiply_p.bind(
        rows.astype(common),
        kernel,
        precision=precision,
        dtype=dtype or common,
        turned=turned,
        natively=not is_exchanged() and native.status().instructions is not None,
    )


def multiply_pairs(
    left: Float[Array, "pairs rows in"], right: Float[Array, "pairs in out"], dtype: jnp.dtype
) -> Float[Array, "pairs rows out"]:
    """`left @ right` for every pair of activations, such as queries and keys.

    The result has `dtype`. What `multiply` says of precisions holds here.
    """
    if asked_precision() == NARROW:
        return _narrow_pairs(left, right).astype(dtype)
    return jnp.einsum("pnd,pdf->pnf", left, right, preferred_element_type=dtype)


def _product(
    rows: Array,
    kernel: Array,
    precision: str | None,
    dtype: jnp.dtype,
    turned: bool,
    natively: bool = False,
) -> Array:
    del natively
    kernel = kernel.astype(rows.dtype)
    spec = "nd,fd->nf" if turned else "nd,df->nf"
    if precision == NARROW:
        return _narrow(spec, rows, kernel).astype(dtype)
    return jnp.einsum(spec, rows, kernel, precision=precision, preferred_element_type=dtype)


def _narrow(spec: str, left: Array, right: Array) -> Array:
    operands = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def _narrow_outer(left: Array, right: Array) -> Array:
    """The sum over n of left[..., n, :] times right[..., n, :], for each pair of columns.

    XLA on CPUs has a fast bfloat16 product only when the left operand's sum runs along its rows, as
    it lies in memory: the narrower one is turned, and XLA must be kept from turning it back, and
    from turning the product when that is turned.
    """
    if left.shape[-1] > right.shape[-1]:
        return jnp.swapaxes(_narrow_outer(right, left), -1, -2)
    turned = _as_it_lies(jnp.swapaxes(left.astype(jnp.bfloat16), -1, -2))
    return _as_it_lies(_narrow("...dn,...nf->...df", turned, right))


def _as_it_lies(array: Array) -> Array:
    """The same, with its last axis contiguous in a CPU's memory."""
    layout = Layout(major_to_minor=tuple(range(array.ndim)))
    return jax.lax.platform_dependent(
        array, cpu=lambda same: with_layout_constraint(same, layout), default=lambda same: same
    )


@jax.custom_vjp
def _narrow_pairs(left: Array, right: Array) -> Array:
    return _narrow("pnd,pdf->pnf", left, right)


def _narrow_pairs_forward(left: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow_pairs(left, right), (left, right)


def _narrow_pairs_backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    left, right = operands
    of_left = _narrow("pnf,pdf->pnd", gradient, right)
    return of_left.astype(left.dtype), _narrow_outer(left, gradient).astype(right.dtype)


_narrow_pairs.defvjp(_narrow_pairs_forward, _narrow_pairs_backward)


def _on_cpu(
    rows: Array,
    kernel: Array,
    precision: str | None,
    dtype: jnp.dtype,
    turned: bool,
    natively: bool,
) -> Array:
    """One row is a batch of parts of the sum: XLA keeps a product with a vector on one core.

    Not so if the kernel is turned: XLA would copy it to cut it along the sum.
    """
    if natively and precision != NARROW and _fits(rows, kernel, dtype):
        shape = rows.shape[0], kernel.shape[0 if turned else 1]
        absent = np.zeros(0, np.float32)
        return native.call(
            "product",
            jax.ShapeDtypeStruct(shape, jnp.float32),
            *(rows, kernel, absent, absent),
            turned=int(turned),
            workers=native.num_cores(),
        )
    kernel = kernel.astype(rows.dtype)
    parts = _num_parts(rows.shape[1])
    if rows.shape[0] != 1 or parts == 1 or precision == NARROW or turned:
        return _product(rows, kernel, precision, dtype, turned)
    pieces = jnp.einsum(
        "pd,pdf->pf",
        rows.reshape(parts, -1),
        kernel.reshape(parts, -1, kernel.shape[1]),
        precision=precision,
        preferred_element_type=dtype,
    )
    return jnp.sum(pieces, axis=0, keepdims=True)


def _fits(rows: Array, kernel: Array, dtype: jnp.dtype) -> bool:
    return (
        rows.shape[0] <= MAX_ROWS
        and rows.dtype == dtype == jnp.float32
        and kernel.dtype in NATIVE_WEIGHTS
    )


def _num_parts(width: int) -> int:
    """A power of two that divides `width`: as many as there are cores, of at least 64 terms."""
    parts = 1
    while (
        2 * parts <= min(native.num_cores(), _MAX_PARTS)
        and width % (2 * parts) == 0
        and width // (2 * parts) >= _MIN_PART
    ):
        parts *= 2
    return parts


def _batch(operands, axes, **params):
    (rows, kernel), (rows_axis, kernel_axis) = operands, axes
    if kernel_axis is not None:
        product = partial(_product, **params)
        return jax.vmap(product, (rows_axis, kernel_axis))(rows, kernel), 0
    rows = jnp.moveaxis(rows, rows_axis, 0)
    outputs = _multiply_p.bind(rows.reshape(-1, rows.shape[-1]), kernel, **params)
    return outputs.reshape(*rows.shape[:-1], -1), 0


def _gradient_of_rows(gradient, rows, kernel, precision, dtype, turned, natively):
    del dtype, natively
    return _product(gradient, kernel, precision, rows.aval.dtype, turned=not turned)


def _gradient_of_kernel(gradient, rows, kernel, precision, dtype, turned, natively):
    del dtype, natively
    left, right = (gradient, rows) if turned else (rows, gradient)
    if precision == NARROW:
        return _narrow_outer(left, right).astype(kernel.aval.dtype)
    return jnp.einsum(
        "nd,nf->df", left, right, precision=precision, preferred_element_type=kernel.aval.dtype
    )


_multiply_p = Primitive("multiply_rows")
_multiply_p.def_impl(
    jax.jit(_multiply_p.bind, static_argnames=("precision", "dtype", "turned", "natively"))
)
_multiply_p.def_abstract_eval(
    lambda rows, kernel, precision, dtype, turned, natively: rows.update(
        shape=(rows.shape[0], kernel.shape[0 if turned else 1]), dtype=jnp.dtype(dtype)
    )
)
mlir.register_lowering(_multiply_p, mlir.lower_fun(_product, multiple_results=False))
mlir.register_lowering(_multiply_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
batching.primitive_batchers[_multiply_p] = _batch
ad.defbilinear(_multiply_p, _gradient_of_rows, _gradient_of_kernel)
