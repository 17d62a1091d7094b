from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.forms import exchanged
from jaxspec.models import NARROW
from jaxspec.models.linear import multiply, multiply_pairs


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def multiply_table(rows, kernel):
    """The same product, with the kernel lying the other way round."""
    return multiply(rows, jnp.swapaxes(kernel, -1, -2), turned=True)


@pytest.mark.parametrize("product", [multiply, multiply_table])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("width", [7, 96, 256])
def test_it_is_the_product_for_any_number_of_rows(product, num_rows, width):
    rows, kernel = draw(num_rows, width), draw(width, 5, seed=1)
    exact = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(jax.jit(product)(rows, kernel), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_turned_kernel_is_read_as_it_lies(num_rows):
    """A transposed copy of an output head takes longer than its product."""
    compiled = jax.jit(partial(multiply, turned=True)).lower(draw(num_rows, 256), draw(64, 256))
    text = compiled.compile().as_text()
    assert "f32[64,256]" in text
    assert "f32[256,64]" not in text


@pytest.mark.parametrize("product", [multiply, multiply_table])
@pytest.mark.parametrize("axes", [(0, None), (1, None), (None, 0), (0, 0)])
def test_it_maps_over_either_side(product, axes):
    rows = draw(4, 4, 128) if axes[0] is not None else draw(4, 128)
    kernel = draw(4, 128, 6, seed=1) if axes[1] == 0 else draw(128, 6, seed=1)
    np.testing.assert_allclose(
        jax.vmap(product, axes)(rows, kernel),
        jax.vmap(jnp.matmul, axes)(rows, kernel),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_mapped_row_is_one_product_with_all_rows():
    """A product per row would read the weights once per row."""
    with exchanged({}):  # the form of other backends
        text = jax.jit(jax.vmap(multiply, (0, None))).lower(draw(4, 1, 128), draw(128, 6)).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert "tensor<4x128xf32>, tensor<128x6xf32>" in text


def test_the_gradients_of_a_batch_are_one_product_each():
    mapped = jax.vmap(multiply, (0, None))
    gradient = jax.grad(lambda rows, kernel: jnp.sum(mapped(rows, kernel) ** 2), (0, 1))
    text = jax.jit(gradient).lower(draw(4, 3, 128), draw(128, 6)).as_text()
    assert "tensor<12x6xf32>, tensor<128x6xf32>" in text
    assert "tensor<12x128xf32>, tensor<12x6xf32>" in text


@pytest.mark.parametrize("ours", [multiply, multiply_table])
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_derivatives_are_those_of_the_product(order, ours):
    rows, kernel = draw(3, 1, 128), draw(128, 6, seed=1)

    def gradients(product):
        if order == "grad of vmap":
            mapped = jax.vmap(product, (0, None))
            return jax.grad(lambda rows, kernel: jnp.sum(mapped(rows, kernel) ** 2), (0, 1))
        single = jax.grad(lambda rows, kernel: jnp.sum(product(rows, kernel) ** 2), (0, 1))
        return jax.vmap(single, (0, None))

    for found, plain in zip(
        gradients(ours)(rows, kernel), gradients(jnp.matmul)(rows, kernel), strict=True
    ):
        np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-3)


def test_narrow_products_round_the_operands_and_sum_in_float32():
    rows, kernel = draw(5, 512), draw(512, 6, seed=1)
    with jax.default_matmul_precision(NARROW):
        outputs = jax.jit(multiply)(rows, kernel)
    rounded = [np.asarray(side.astype(jnp.bfloat16), np.float64) for side in (rows, kernel)]
    assert outputs.dtype == jnp.float32
    np.testing.assert_allclose(outputs, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-4)
    assert np.max(np.abs(outputs - rows @ kernel)) > 1e-3


def pairs(left, right):
    return multiply_pairs(left[None], right[None], jnp.dtype(jnp.float32))[0]


@pytest.mark.parametrize("product", [multiply, multiply_table, pairs])
@pytest.mark.parametrize(("width", "outputs"), [(24, 40), (40, 24)])
def test_narrow_gradients_round_the_operands_and_sum_in_float32(product, width, outputs):
    """Whichever operand is the narrower: that one is turned on CPUs."""
    rows, kernel = draw(33, width), draw(width, outputs, seed=1)
    gradient = draw(33, outputs, seed=2)

    def gradients(kernel_is_turned):
        @jax.jit
        def both(rows, kernel):
            def outputs_of(rows, table):
                return product(rows, table.T if kernel_is_turned else table)

            with jax.default_matmul_precision(NARROW):
                return jax.vjp(outputs_of, rows, kernel)[1](gradient)

        of_rows, of_kernel = both(rows, kernel.T if kernel_is_turned else kernel)
        return of_rows, of_kernel.T if kernel_is_turned else of_kernel

    rounded = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (rows, kernel, gradient)]
    for of_rows, of_kernel in (gradients(False), gradients(True)):
        np.testing.assert_allclose(of_rows, rounded[2] @ rounded[1].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_kernel, rounded[0].T @ rounded[2], rtol=1e-4, atol=1e-4)


def test_pairs_are_multiplied_one_by_one():
    left, right = draw(3, 5, 24), draw(3, 24, 7, seed=1)
    np.testing.assert_allclose(
        multiply_pairs(left, right, left.dtype), left @ right, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("asked", ["highest", "tensorfloat32", None])
def test_the_precision_asked_for_reaches_the_product_and_its_gradients(asked):
    """Though lowering and transposing come after the context has been left."""

    def loss(rows, kernel):
        with jax.default_matmul_precision(asked):
            return jnp.sum(jax.vmap(multiply, (0, None))(rows, kernel) ** 2)

    with exchanged({}):  # native products know one precision
        text = jax.jit(jax.grad(loss, (0, 1))).lower(draw(4, 1, 128), draw(128, 6)).as_text()
    name = {"highest": "HIGHEST", "tensorfloat32": "HIGH", None: "DEFAULT"}[asked]
    assert text.count("stablehlo.dot_general") == 3
    assert text.count(f"precision = [{name}, {name}]") == 3
