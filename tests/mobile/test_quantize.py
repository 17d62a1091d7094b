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
pytest.importorskip("ai_edge_quantizer", reason="needs the extra mobile: '.[mobile]'")

from ai_edge_litert import schema_py_generated

from jaxspec.mobile import ExportConfig, MobileModel, export
from jaxspec.mobile.loops import Plain
from jaxspec.mobile.opset import read_graphs, violations
from jaxspec.mobile.quantize import quantize

SLOTS = 64
PATHS = ((0,), (1,), (0, 0))
SHAPES = ExportConfig(slots=SLOTS, prefill=(8,), bundle="gpu", quantization="float32")


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
        assert tables == {(SLOTS, "FLOAT32"), (48, "INT8")}


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_files_pass_the_gate_and_step_as_they_decode(folders, name):
    """Beside `decode` of the same file: near ties aside, of which there are none here."""
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
    contents = [bytes(buffer.DataAsNumpy()) for buffer in buffers if buffer.DataLength()]
    assert len(set(contents)) == len(contents)
    sizes = [len(content) for content in contents]
    assert sizes.count(48 * 16 // 2) == 3  # two layers hold a kernel of that size as well
    assert sizes.count(48 * 16) == 1
    plain = MobileModel(tmp_path / "model.tflite", num_threads=1).generate([3, 1], 8)
    assert len(plain.tokens) == 8


def test_names_and_backends_are_checked(folders):
    with pytest.raises(ValueError, match="quantization must be one of float32"):
        ExportConfig(quantization="int3")
    with pytest.raises(ValueError, match="for a GPU take int4"):
        ExportConfig(bundle="gpu", quantization="int4-block32")
    data = (folders["float32"] / "model.tflite").read_bytes()
    assert quantize(data, "float32") == data
    with pytest.raises(ValueError, match=r"this model has \[16, 24, 32\]|widths that 32 divides"):
        quantize(data, "int4-block32")
