"""Pieces of a step that native code computes on CPUs, where a program has few enough rows.

Such a piece is a function of weights and of one row's arrays, and a second form of it for a batch
of rows. The first is the reference: what is differentiated, and what runs wherever the second does
not fit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxspec import native
from jaxspec.core.forms import is_exchanged
from jaxspec.core.types import PyTree

MAX_ROWS = 1024
"""Tokens of a program above which XLA's own products are as fast."""

NATIVE_WEIGHTS = (jnp.float32, jnp.bfloat16, jnp.int8)
_PARAMS = ("static", "structure", "num_weights", "precision")
ABSENT = np.zeros(0, np.float32)
"""An operand of a native call that is not there."""


NARROW = "BF16_BF16_F32"
"""The matmul precision that means bfloat16 operands and float32 sums."""


def asked_precision() -> str | None:
    """Returns the precision of products that is set through jax, in a context or for all."""
    config: Any = jax.config  # jax does not declare its options
    return config.jax_default_matmul_precision


class NarrowCall:
    """A function with a native form for CPUs.

    Args:
        name: of the primitive.
        reference: computes one row: `reference(static, weights, row)`.
        batched: computes a batch natively, with the same arguments; arrays of `row` and of the
            result have a leading axis.
        fits: of the same arguments, whether `batched` can compute that.
    """

    def __init__(
        self, name: str, reference: Callable, batched: Callable, fits: Callable[..., bool]
    ):
        self._reference, self._batched, self._fits = reference, batched, fits
        self._primitive = primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(jax.jit(primitive.bind, static_argnames=_PARAMS))
        primitive.def_abstract_eval(self._shapes)
        mlir.register_lowering(primitive, mlir.lower_fun(self._plainly, multiple_results=True))
        mlir.register_lowering(primitive, self._lower_for_cpu, platform="cpu")
        batching.primitive_batchers[primitive] = self._batch
        ad.primitive_jvps[primitive] = self._differentiate

    def __call__(self, static: Any, weights: PyTree, row: PyTree) -> Any:
        if is_exchanged() or native.status().instructions is None:
            return self._reference(static, weights, row)
        result = jax.eval_shape(partial(self._reference, static), weights, row)
        fixed, moving = jax.tree.leaves(weights), jax.tree.leaves(row)
        leaves = self._primitive.bind(
            *fixed,
            *(jnp.asarray(leaf)[None] for leaf in moving),
            static=static,
            structure=jax.tree.structure((weights, row)),
            num_weights=len(fixed),
            precision=asked_precision(),
        )
        return jax.tree.unflatten(jax.tree.structure(result), [leaf[0] for leaf in leaves])

    def _plainly(self, *leaves, static, structure, num_weights, precision):
        del num_weights
        weights, rows = jax.tree.unflatten(structure, leaves)
        # It is spelled out when it is lowered, outside of the context in which it was asked for.
        with nullcontext() if precision is None else jax.default_matmul_precision(precision):
            return jax.tree.leaves(jax.vmap(partial(self._reference, static, weights))(rows))

    def _natively(self, *leaves, static, structure, num_weights, precision):
        del num_weights, precision
        weights, rows = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(self._batched(static, weights, rows))

    def _shapes(self, *leaves, **params):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        results = jax.eval_shape(partial(self._plainly, **params), *shapes)
        return [ShapedArray(result.shape, result.dtype) for result in results]

    def _lower_for_cpu(self, context, *operands, **params):
        weights, rows = jax.tree.unflatten(params["structure"], context.avals_in)
        one_device = getattr(context.module_context.axis_context, "num_devices", 1) == 1
        exact = params["precision"] != NARROW
        fits = one_device and exact and self._fits(params["static"], weights, rows)
        form = self._natively if fits else self._plainly
        return mlir.lower_fun(form, multiple_results=True)(context, *operands, **params)

    def _batch(self, leaves, axes, *, num_weights, **params):
        params["num_weights"] = num_weights
        size = next(
            leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
        )
        if any(axis is not None for axis in axes[:num_weights]):
            outputs = jax.vmap(partial(self._plainly, **params), axes)(*leaves)
            return outputs, [0] * len(outputs)

        def merge(leaf, axis):
            if axis is None:
                leaf, axis = jnp.broadcast_to(leaf[None], (size, *leaf.shape)), 0
            leaf = jnp.moveaxis(leaf, axis, 0)
            return leaf.reshape(size * leaf.shape[1], *leaf.shape[2:])

        rows = map(merge, leaves[num_weights:], axes[num_weights:])
        outputs = self._primitive.bind(*leaves[:num_weights], *rows, **params)
        parts = [leaf.reshape(size, leaf.shape[0] // size, *leaf.shape[1:]) for leaf in outputs]
        return parts, [0] * len(outputs)

    def _differentiate(self, primals, tangents, **params):
        tangents = [
            ad.instantiate_zeros(tangent) if isinstance(tangent, ad.Zero) else tangent
            for tangent in tangents
        ]
        return jax.jvp(partial(self._plainly, **params), tuple(primals), tuple(tangents))
