"""Fewer bits: which tensors change, how much smaller files get, and that they still decode."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import Model
from jaxspec.drafters import Eagle
from jaxspec.models import Network, init_params
from tests.mobile.models import CONFIG, successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from ai_edge_litert import schema_py_generated

from jaxspec.mobile import ExportConfig, MobileModel, export
from jaxspec.mobile.loops import Plain
from jaxspec.mobile.opset import read_graphs, violations
from jaxspec.mobile.quantize import quantize_rows

CAPACITY = 64
PATHS = ((0,), (1,), (0, 0))
SHAPES = ExportConfig(capacity=CAPACITY, prefill=(8,), bundle="gpu", quantization="float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    model, head = successor_model()
    folders = {}
    for name in ("float32", "int8", "int4"):
        folders[name] = tmp_path_factory.mktemp(name)
        export(model, folders[name], Eagle.of(head, PATHS), replace(SHAPES, quantization=name))
    return folders


@pytest.mark.parametrize(("name", "stored"), [("int8", "INT8"), ("int4", "INT4")])
def test_products_and_the_token_table_change_and_nothing_else(folders, name, stored):
    for graph in read_graphs((folders[name] / "model.tflite").read_bytes()):
        tables = set()
        for op in graph.ops:
            weights = graph.ins(op)[1] if len(op.inputs) > 1 else None
            if op.name == "FULLY_CONNECTED" and weights.constant is not None:
                assert weights.dtype == stored
            elif op.name == "EMBEDDING_LOOKUP":
                tables.add((weights.shape[0], weights.dtype))
            else:
                types = {tensor.dtype for tensor in graph.ins(op) if tensor.constant is not None}
                assert types <= {"FLOAT32", "INT32", "BOOL"}
        # 64 rotations, 48 tokens.
        assert tables == {(CAPACITY, "FLOAT32"), (48, "INT8")}


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_files_pass_the_gate_and_step_as_they_decode(folders, name):
    """Compared with `decode` of the same file: equal except for near ties; here there are none."""
    path = folders[name] / "model.tflite"
    assert violations(path.read_bytes()) == []
    model = MobileModel(path, num_threads=1)
    assert model.manifest.quantization == name
    plain = model.generate([3, 1, 4, 1, 5], 40, loop=Plain)
    stepped = model.generate([3, 1, 4, 1, 5], 40)
    np.testing.assert_array_equal(plain.tokens, stepped.tokens)
    assert max(stepped.counts) > 1


def test_a_tied_head_is_stored_twice_and_not_more(tmp_path):
    """With 4 bits as a head, with 8 as a table; each signature reads these two."""
    config = CONFIG.replace(tied_head=True)
    network = Network(init_params(config, jax.random.key(0)), config)
    shapes = replace(SHAPES, quantization="int4", prefill=(4, 8))
    export(Model(network, name="tied"), tmp_path, config=shapes)
    data = (tmp_path / "model.tflite").read_bytes()
    model = schema_py_generated.Model.GetRootAs(data)
    buffers = [model.Buffers(index) for index in range(model.BuffersLength())]
    contents = [data[each.Offset() :][: each.Size()] for each in buffers if each.Size() > 100]
    assert len(set(contents)) == len(contents)
    sizes = [len(content) for content in contents]
    assert sizes.count(48 * 16 // 2) == 3  # two layers hold a kernel of that size as well
    assert sizes.count(48 * 16) == 1
    plain = MobileModel(tmp_path / "model.tflite", num_threads=1).generate([3, 1], 8)
    assert len(plain.tokens) == 8


def test_names_backends_and_widths_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"quantization must be one of \('float32'"):
        ExportConfig(quantization="int3")
    with pytest.raises(ValueError, match="for a GPU take int4"):
        ExportConfig(bundle="gpu", quantization="int4-block32")
    shapes = replace(SHAPES, bundle="cpu", quantization="int4-block32")
    with pytest.raises(ValueError, match=r"32 divides, and target/.* has (16|24); take int4"):
        export(successor_model()[0], tmp_path, config=shapes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("bits", "block"), [(8, 0), (4, 0), (4, 4)])
def test_rows_are_rounded_to_the_nearest_multiple(bits, block):
    """A row of zeros, an odd number of weights, and the largest of each scale at the very end."""
    draws = np.random.default_rng(0)
    width = 12 if block else 5
    matrix = draws.normal(size=(3, width)).astype(np.float32) * np.array([[1.0], [0.0], [50.0]])
    stored, scales = quantize_rows(matrix.astype(np.float32), bits, block)
    assert stored.dtype == np.uint8
    assert stored.size == -(-3 * width * bits // 8)
    numbers = stored.view(np.int8)
    if bits == 4:  # the earlier of a pair in the lower half, both with a sign
        numbers = np.stack([numbers << 4, numbers], axis=1).reshape(-1)[: 3 * width] >> 4
    numbers = numbers.reshape(3, -1, block or width).astype(np.float64)
    steps = np.asarray(scales, np.float64).reshape(3, -1, 1)
    assert (numbers[1] == 0).all()
    assert np.abs(numbers).max() == (1 << bits - 1) - 1
    # Scales of blocks have the precision of bfloat16, so the largest weights may be cut a little.
    slack = 0.5 + (2.0**-8 * 7 if block else 1e-5)
    assert (np.abs(numbers * steps - matrix.reshape(numbers.shape)) <= slack * steps).all()


def test_blocks_decode_too(tmp_path):
    """Widths of 32, so that every weight has a whole number of blocks."""
    config = CONFIG.replace(embed_dim=32, head_dim=8, mlp_dim=32)
    model = Model(Network(init_params(config, jax.random.key(0)), config), name="wide")
    sizes = {}
    for name in ("int4", "int4-block32"):
        export(model, tmp_path, config=replace(SHAPES, bundle="cpu", quantization=name))
        data = (tmp_path / "model.tflite").read_bytes()
        decode = next(graph for graph in read_graphs(data) if graph.signature == "decode")
        products = [op for op in decode.ops if op.name == "FULLY_CONNECTED"]
        assert {decode.ins(op)[1].dtype for op in products} == {"INT4"}
        file = MobileModel(tmp_path / "model.tflite", num_threads=1)
        sizes[name] = file.generate([3, 1, 4], 8).tokens.size
    assert sizes == {"int4": 8, "int4-block32": 8}
