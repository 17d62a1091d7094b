"""Weights that are put into converted graphs: what they compute, what is stored, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from jaxspec.mobile.convert import lower, to_flatbuffer
from jaxspec.mobile.opset import read_graphs
from jaxspec.mobile.records import Signature
from jaxspec.mobile.weights import RUNTIME, Leaf, TfliteFile

_draws = np.random.default_rng(0)
WEIGHTS = {
    "embedding": _draws.normal(size=(12, 8)).astype(np.float32),
    "experts": _draws.normal(size=(3, 4)).astype(np.float32),
    "gain": _draws.normal(size=8).astype(np.float32),
    "ids": np.array([5, 3, 8], np.int32),
    "kernel": _draws.normal(size=(8, 2, 3)).astype(np.float32),
    "turned": _draws.normal(size=(5, 8)).astype(np.float32),
    "unused": _draws.normal(size=(4, 4)).astype(np.float32),
}
NAMES = {"embedding": "target/embed/embedding", "kernel": "target/layer_0/qkv"}
LEAVES = [
    Leaf(NAMES.get(name, name), array.shape, array.dtype, lambda array=array: array)
    for name, array in WEIGHTS.items()
]


def everything(weights, x):
    """A table, kernels as they lie, reshaped and turned, a tied head, and what is no product."""
    rows = jax.nn.one_hot(x["tokens"], 12) @ weights["embedding"] * weights["gain"][None]
    return {
        "product": rows @ weights["kernel"].reshape(8, 6),
        "turned": rows @ weights["turned"].T,
        "tied": rows @ weights["embedding"].T,
        "expert": jax.nn.one_hot(x["tokens"] - 1, 3) @ weights["experts"],
        "ids": x["tokens"][:, None] + weights["ids"][None],
    }


def once_more(weights, x):
    return {"out": jax.nn.one_hot(x["tokens"], 12) @ weights["embedding"] @ weights["turned"].T}


TOKENS = np.array([1, 3], np.int32)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """The file by quantization."""
    inputs = {"tokens": jax.ShapeDtypeStruct((2,), jnp.int32)}
    functions = {"everything": everything, "once_more": once_more}
    lowered = {name: lower(WEIGHTS, Signature(f, inputs)) for name, f in functions.items()}
    graphs = to_flatbuffer(lowered, {})
    path, files = tmp_path_factory.mktemp("filled") / "model.tflite", {}
    for name in ("float32", "int8"):
        TfliteFile(graphs, LEAVES, name).write(path)
        files[name] = path.read_bytes()
    return files


def run(file: bytes, signature: str) -> dict[str, np.ndarray]:
    runner = Interpreter(model_content=file).get_signature_runner(signature)
    return runner(tokens=TOKENS)


@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_files_compute_what_jax_does(filled, quantization):
    ours = run(filled[quantization], "everything")
    theirs = everything(WEIGHTS, {"tokens": TOKENS})
    for name, expected in theirs.items():
        exact = quantization == "float32" or name in ("ids", "expert")
        np.testing.assert_allclose(ours[name], expected, atol=1e-5 if exact else 0.15)
    if quantization == "int8":
        assert np.abs(ours["product"] - theirs["product"]).max() > 1e-4


def test_each_weight_is_stored_once_for_all_functions(filled):
    """A tied head, too: with its rows as they are, and aligned."""
    file = np.frombuffer(filled["float32"], np.uint8)
    places: dict[str, set[int]] = {}
    for graph in read_graphs(filled["float32"]):
        for tensor in graph.tensors:
            if tensor.constant is not None and tensor.constant.nbytes > 64:
                place = tensor.constant.ctypes.data - file.ctypes.data
                places.setdefault(tensor.name, set()).add(place)
    assert {name: len(several) for name, several in places.items()} == {
        "target/embed/embedding": 1,
        "target/layer_0/qkv": 1,
        "turned": 1,
    }
    assert all(place % 64 == 0 for several in places.values() for place in several)
    assert WEIGHTS["unused"].tobytes() not in filled["float32"]


def test_a_file_says_how_old_a_runtime_may_be(filled):
    file = schema.ModelT.InitFromPackedBuf(filled["float32"], 0)
    (entry,) = [each for each in file.metadata if each.name == b"min_runtime_version"]
    assert bytes(file.buffers[entry.buffer].data).rstrip(b"\0") == RUNTIME


def test_tables_have_8_bits_and_what_is_no_embedding_has_32(filled):
    for graph in read_graphs(filled["int8"]):
        dtypes = {
            (op.name, graph.ins(op)[1].name.rpartition("/")[2]): graph.ins(op)[1].dtype
            for op in graph.ops
            if op.name in ("EMBEDDING_LOOKUP", "FULLY_CONNECTED")
        }
        assert all(
            dtype == ("FLOAT32" if "experts" in name else "INT8")
            for (_, name), dtype in dtypes.items()
        )
        assert ("EMBEDDING_LOOKUP", "embedding") in dtypes
