"""The gate: every rule fires on what it is about, names it, and lets its remedy pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.mobile import opset
from jaxspec.mobile.opset import Graph, GraphTensor, Op, OpsetError, require_opset, violations

TABLE = np.arange(24, dtype=np.float32).reshape(3, 8) + 1.0
WEIGHTS = {"square": np.eye(8, dtype=np.float32), "rows": TABLE}


def first_row_only(weights, x):
    return {"out": x["rows"] * weights["rows"]}


def first_row_remedied(weights, x):
    return {"out": (x["rows"][None, None] * jnp.asarray(TABLE)[None, None])[0, 0]}


def output_that_goes_on(weights, x):
    gained = x["rows"] * jnp.asarray(TABLE[:1])
    return {"gained": gained, "out": gained @ weights["square"]}


def output_copied(weights, x):
    gained = x["rows"] * jnp.asarray(TABLE[:1])
    return {"gained": gained[None], "out": gained @ weights["square"]}


def zero_tail(weights, x):
    cut = x["rows"][:, 1:] * 2.0
    return {"out": jnp.concatenate([cut, jnp.zeros((3, 1))], axis=1)}


def gather(weights, x):
    with jax.named_scope("layer_7/mlp"):
        return {"out": weights["rows"][x["ids"]]}


def five_axes(weights, x):
    return {"out": jnp.transpose(x["rows"].reshape(3, 2, 2, 1, 2), (4, 0, 3, 2, 1)) + 1.0}


def cosine(weights, x):
    return {"out": jnp.cos(x["rows"])}


def repeated_operand(weights, x):
    """Scores of three heads over one key head, unfolded for a mask: the converter merges both."""
    queries = (x["rows"].reshape(1, 3, 2, 4) * 0.5).reshape(1, 6, 4)
    keys = (x["rows"] + 1.0).reshape(1, 4, 6)
    scores = jnp.einsum("pnd,pdf->pnf", queries, keys).reshape(1, 3, 2, 6)
    return {"out": jax.nn.softmax(scores + x["rows"][:1, :6].reshape(1, 1, 1, 6))}


def one_hot_of_booleans(weights, x):
    here = jnp.equal(x["ids"][:, None], jnp.arange(8, dtype=jnp.int32)[None])
    return {"out": jnp.sum(here.astype(jnp.int32), axis=1)}


def one_hot_of_floats(weights, x):
    here = jax.nn.one_hot(x["ids"], 8, dtype=jnp.float32).astype(jnp.int32)
    return {"out": jnp.sum(here, axis=1)}


def integer_factor(weights, x):
    return {"out": x["ids"][:, None] * jnp.asarray([[3, 5, 7]], jnp.int32)}


def repeated_integers(weights, x):
    factor = jnp.asarray([3, 5, 7], jnp.int32).reshape(1, 1, 1, 3)
    return {"out": x["ids"].reshape(1, 1, 2, 1) * factor}


def integers_for_each_row(weights, x):
    factor = jnp.asarray([[3, 5, 7]] * 2, jnp.int32).reshape(1, 1, 2, 3)
    return {"out": x["ids"].reshape(1, 1, 2, 1) * factor}


def side_by_side(weights, x):
    return {"out": (x["rows"].reshape(12, 2) @ (x["rows"][:2] + 1.0)).reshape(3, 4, 8)}


BAD = {
    repeated_operand: ("BATCH_MATMUL", "the first product only"),
    first_row_only: ("MUL", "first row only of a constant"),
    output_that_goes_on: ("MUL", "do not write an output"),
    zero_tail: (None, "narrowed last axis"),
    gather: (None, "one-hot rows"),
    five_axes: (None, "axes"),
    cosine: ("COS", "table"),
    one_hot_of_booleans: ("ONE_HOT", "of floats only"),
    integer_factor: ("MUL", "constant integers"),
    repeated_integers: ("MUL", "first row only of constant integers"),
}
OF_FLOATS = (first_row_remedied, output_copied, side_by_side)
GOOD = (*OF_FLOATS, one_hot_of_floats, integers_for_each_row)


WITH_ROWS = {*BAD, *OF_FLOATS} - {gather, one_hot_of_booleans, integer_factor, repeated_integers}


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
    pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")
    from jaxspec.mobile.convert import lower, to_flatbuffer
    from jaxspec.mobile.records import Signature
    from jaxspec.mobile.weights import Leaf, TfliteFile

    rows = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    lowered = {}
    for function in (*BAD, *GOOD):
        inputs = {"rows": rows} if function in WITH_ROWS else {"ids": ids}
        lowered[function.__name__] = lower(WEIGHTS, Signature(function, inputs))
    leaves = [
        Leaf(name, WEIGHTS[name].shape, WEIGHTS[name].dtype, lambda name=name: WEIGHTS[name])
        for name in sorted(WEIGHTS)
    ]
    flatbuffer = TfliteFile(to_flatbuffer(lowered, {}), leaves, "float32").head
    with pytest.raises(OpsetError) as refused:
        require_opset(flatbuffer)
    assert refused.value.violations == tuple(violations(flatbuffer))
    return refused.value.violations


@pytest.mark.parametrize("function", BAD, ids=lambda function: function.__name__)
def test_it_finds(found, function):
    op, problem = BAD[function]
    said = [violation for violation in found if violation.signature == function.__name__]
    assert any(problem in each.problem for each in said), found
    assert op is None or {each.op for each in said} == {op}


@pytest.mark.parametrize("function", GOOD, ids=lambda function: function.__name__)
def test_it_passes_the_remedy(found, function):
    assert not [each for each in found if each.signature == function.__name__]


def test_it_names_the_scope(found):
    assert any("layer_7/mlp" in each.scope for each in found if each.signature == "gather")


@pytest.mark.parametrize(
    ("rows", "out", "bad"), [((1, 4, 8), (4, 8), True), ((4, 8), (4, 8), False)]
)
def test_flattened_products_of_int8(monkeypatch, rows, out, bad):
    """Written down by hand: it takes a quantized file to make one."""
    tensors = (
        GraphTensor("rows", rows, "FLOAT32", True, None),
        GraphTensor("kernel", (8, 8), "INT8", True, np.ones(64, np.int8)),
        GraphTensor("layer_0/out", out, "FLOAT32", True, None),
    )
    graph = Graph("verify_4", tensors, (Op("FULLY_CONNECTED", (0, 1), (2,)),), (2,))
    monkeypatch.setattr(opset, "read_graphs", lambda flatbuffer: [graph])
    said = violations(b"")
    assert bool(said) == bad
    if bad:
        assert "int8 product that flattens" in str(said[0])
        assert "layer_0/out" in str(said[0])
