"""Weights that are rounded for texts: what is lost, which products keep 8 bits, what is stored."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import Model
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.decoding.request import encode_prompt
from jaxspec.mobile import calibration
from jaxspec.mobile.calibration import calibrate, round_for
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.memory import estimate_phone_memory, stored_bytes
from jaxspec.mobile.quantize import MOST_EXTRA, QUANTIZATIONS, pack, quantize_rows
from jaxspec.models import Network, init_params
from jaxspec.models.linear import multiply
from jaxspec.models.transformer import param_shapes
from tests.measure.models import filling_model, tiny_model
from tests.mobile.models import CONFIG

ROWS, BLOCKS = QUANTIZATIONS["int4-calibrated"], QUANTIZATIONS["int4-block32-calibrated"]


def model_of(**changes) -> Model:
    config = CONFIG.replace(**changes)
    return Model(Network(init_params(config, jax.random.key(0)), config), name="random")


def unpacked(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    numbers = stored.view(np.int8)
    return (np.stack([numbers << 4, numbers], axis=1).reshape(-1) >> 4).reshape(shape)


def lost(matrix, near, inputs) -> float:
    return float(np.sum((inputs @ (matrix - near).T) ** 2))


@pytest.mark.parametrize("block", [0, 4])
def test_outputs_change_less_than_by_plain_rounding(block):
    """For inputs that go together and differ in size; each number is a whole one of 4 bits."""
    draws = np.random.default_rng(0)
    matrix = draws.normal(size=(6, 12)).astype(np.float32)
    inputs = draws.normal(size=(200, 3)) @ draws.normal(size=(3, 12))
    inputs = (inputs + 0.1 * draws.normal(size=(200, 12))) * np.linspace(0.2, 3, 12)
    numbers, scales = round_for(matrix, inputs.T @ inputs / 200, 4, block)
    assert np.abs(numbers).max() <= 7
    steps = np.asarray(scales, np.float64).reshape(6, -1, 1)
    near = (numbers.reshape(6, -1, block or 12) * steps).reshape(6, 12)
    stored, plain_scales = quantize_rows(matrix, 4, block)
    plain = unpacked(stored, (6, steps.shape[1], block or 12))
    plain = (plain * np.asarray(plain_scales, np.float64).reshape(6, -1, 1)).reshape(6, 12)
    assert lost(matrix, near, inputs) < 0.5 * lost(matrix, plain, inputs)
    assert scales.dtype == plain_scales.dtype
    assert scales.shape == plain_scales.shape


def test_columns_take_up_what_those_before_them_lost():
    """A plain loop over the columns of one output, with the inverse of what is left each time."""
    draws = np.random.default_rng(1)
    matrix, inputs = draws.normal(size=(1, 5)).astype(np.float32), draws.normal(size=(40, 5))
    moments = inputs.T @ inputs / 40
    numbers, scales = round_for(matrix, moments, 4)
    left, order = matrix[0].astype(np.float64), list(np.argsort(-np.diag(moments)))
    damped = moments + 0.01 * np.mean(np.diag(moments)) * np.eye(5)
    expected = np.zeros(5, int)
    while order:
        inverse, column = np.linalg.inv(damped[np.ix_(order, order)]), order[0]
        expected[column] = np.clip(np.rint(left[column] / scales[0]), -7, 7)
        error = (left[column] - expected[column] * scales[0]) / inverse[0, 0]
        left[order] -= error * inverse[0]
        order = order[1:]
    assert numbers[0].tolist() == expected.tolist()


def test_inputs_that_are_zero_lose_nothing():
    numbers, scales = round_for(np.array([[0.0, 0.5, -1.0]], np.float32), np.zeros((3, 3)), 4)
    assert np.isfinite(scales).all()
    assert numbers.tolist()[0][0] == 0


@pytest.fixture(scope="module")
def short():
    """Few short texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "NUM_TEXTS", 6)
        patch.setattr(calibration, "LENGTH", 24)
        yield


@pytest.mark.parametrize("tied", [False, True])
def test_each_weight_is_rounded_for_its_own_inputs(short, tied):
    """The moments are those of a plain loop over the texts, under the names of files."""
    model = model_of(tied_head=tied)
    network = model.network
    tokens, counts = calibration._written_texts(model, None)
    products = calibration._products_of(network, tokens[0])
    found = list(calibration._moments(network, products, tokens, counts))
    sums, names = [], [each.name for each in products]
    for text, count in zip(tokens, counts, strict=True):
        rows, count = [], int(count)

        def product(inputs, kernel, dtype=None, *, turned=False, rows=rows):
            rows.append(np.asarray(inputs))
            return inputs @ (kernel.T if turned else kernel)

        with exchanged({multiply: product}):
            places = jax.numpy.arange(count)
            hidden = network.forward(jax.numpy.asarray(text[:count]), places, causal(count), None)
            network.unembed(hidden.features)
        each = [row.T @ row for row in rows]
        sums = each if not sums else [one + other for one, other in zip(sums, each, strict=True)]
    for (_, moments), expected in zip(found, sums, strict=True):
        np.testing.assert_allclose(moments, expected / counts.sum(), rtol=1e-3, atol=1e-4)
    layer = ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")
    prefix = "target/params"
    expected = [f"{prefix}/layer_{i}/{part}/kernel" for i in range(2) for part in layer]
    assert names == [*expected, f"{prefix}/{'embed/embedding' if tied else 'head/kernel'}"]


def test_little_is_kept_in_8_bits_and_a_tied_head_always(short):
    for tied in (False, True):
        model = model_of(tied_head=tied)
        found = calibrate(model, ROWS)
        sizes = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
            for path, leaf in jax.tree_util.tree_leaves_with_path(model.network.params)
            if leaf.ndim > 1
        }
        table = sizes.pop("embed/embedding")
        sizes = {f"target/params/{name}": size for name, size in sizes.items()}
        if tied:
            sizes["target/params/embed/embedding"] = table
        weights = sum(sizes.values()) / 2 + table
        head = {"target/params/embed/embedding"} & set(sizes)
        assert head <= found.kept
        # The head shares the bytes of the table, and the others add theirs.
        assert sum(sizes[name] / 2 for name in found.kept - head) <= MOST_EXTRA * weights
        assert set(found.rounded) | found.kept | {"target/params/embed/embedding"} >= set(sizes)
        assert not set(found.rounded) & found.kept


def test_the_most_sensitive_for_their_size_are_kept():
    leaves = {"a": np.zeros(10), "b": np.zeros(20), "c": np.zeros(100), "t/embed/e": np.zeros(200)}
    sizes = {name: leaves[name].size for name in "abc"}
    # A tenth of 65 bytes of products and 200 of the table: room for 26.5 bytes more.
    kept = calibration._kept(sizes, {"a": 1.0, "b": 3.0, "c": 100.0}, leaves, None)
    assert kept == {"a", "b"}  # c would change most, and has no room
    kept = calibration._kept(
        sizes, {"a": 1.0, "b": 0.1, "c": 0.1}, leaves | {"b": np.zeros(60)}, None
    )
    assert kept == {"a"}
    # A head that is the table is larger than the room of 36.5 bytes, and takes nothing of it.
    kept = calibration._kept(sizes, {"a": 1.0, "b": 3.0, "c": 100.0}, leaves, "t/embed/e")
    assert kept == {"t/embed/e", "a", "b"}


def test_texts_are_the_models_own(short, tmp_path):
    """Without prompts they are the same each time; prompts are begun with in turn."""
    model = tiny_model()
    tokens, counts = calibration._written_texts(model, None)
    again, _ = calibration._written_texts(model, None)
    np.testing.assert_array_equal(tokens, again)
    assert tokens.shape == (6, 24)
    assert ((counts > 1) & (counts <= 24)).all()
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "abc, two")))
    tokens, _ = calibration._written_texts(model, str(path))
    for place, text in enumerate(tokens):
        begun = encode_prompt(model, ("one", "abc, two")[place % 2])
        assert text[: len(begun)].tolist() == begun
    assert len({text.tobytes() for text in tokens}) == 6
    path.write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        calibration._written_texts(model, str(path))


def test_what_is_not_calibrated_says_so(short):
    with pytest.raises(ValueError, match="calibration: int8 reads no texts; take int4-calibrated"):
        ExportConfig(calibration="prompts.jsonl")
    with pytest.raises(ValueError, match="only causal models are calibrated"):
        calibrate(filling_model("filling", 4), ROWS)


def test_memory_counts_what_may_be_kept():
    plain, more = (
        estimate_phone_memory(CONFIG, name, capacity=10) for name in ("int4", "int4-calibrated")
    )
    assert more.products == int(plain.products + MOST_EXTRA * (plain.products + plain.table))
    assert more.table == plain.table
    tied = CONFIG.replace(tied_head=True)
    rows, eight, calibrated = (
        estimate_phone_memory(tied, name, capacity=10)
        for name in ("int4", "int8", "int4-calibrated")
    )
    extra = int(MOST_EXTRA * (rows.products + rows.table))
    table = param_shapes(tied)["embed"]["embedding"].shape
    head = stored_bytes(table, "int8") - stored_bytes(table, "int4")
    assert rows.products < calibrated.products == rows.products + extra + head < eight.products


def test_files_hold_the_rounded_numbers(short, tmp_path):
    """In rows and in blocks: each is what the calibration chose, and the file decodes."""
    pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
    pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")
    from jaxspec.mobile import MobileModel, export
    from jaxspec.mobile.opset import read_graphs

    model = model_of(embed_dim=32, head_dim=8, mlp_dim=32, tied_head=True)
    shapes = ExportConfig(capacity=64, prefill=(8,))
    for name, form in (("int4-calibrated", ROWS), ("int4-block32-calibrated", BLOCKS)):
        assert form is not None
        expected = calibrate(model, form)
        export(model, tmp_path, config=replace(shapes, quantization=name))
        data = (tmp_path / "model.tflite").read_bytes()
        decode = next(graph for graph in read_graphs(data) if graph.signature == "decode")
        products = [op for op in decode.ops if op.name == "FULLY_CONNECTED"]
        dtypes = {decode.ins(op)[1].name: decode.ins(op)[1].dtype for op in products}
        assert dtypes == {n: "INT8" if n in expected.kept else "INT4" for n in dtypes}
        assert len(dtypes) == 9
        for each in expected.rounded.values():
            assert each.numbers.tobytes() in data
        assert MobileModel(tmp_path / "model.tflite").generate([3, 1, 4], 8).tokens.size == 8


def test_numbers_of_another_matrix_are_refused(short, tmp_path, monkeypatch):
    """A matrix that lies the other way round would fill the same bytes."""
    pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
    pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")
    from jaxspec.mobile import export as exporting

    name = "target/params/layer_0/mlp/down/kernel"

    def turned(*arguments):
        found = calibrate(*arguments)
        other = found.rounded[name]._replace(shape=found.rounded[name].shape[::-1])
        return found._replace(rounded={**found.rounded, name: other})

    monkeypatch.setattr(sys.modules[exporting.__module__], "calibrate", turned)
    shapes = ExportConfig(capacity=64, prefill=(8,), quantization="int4-calibrated")
    with pytest.raises(ValueError, match=rf"{name} as a matrix of \(24, 16\), and .* \(16, 24\)"):
        exporting(model_of(), tmp_path, config=shapes)
    assert not list(tmp_path.iterdir())


def test_packing_is_that_of_plain_rounding():
    stored, scales = quantize_rows(np.array([[7.0, -3.0, 1.0]], np.float32), 4)
    assert scales.tolist() == [1.0]
    np.testing.assert_array_equal(pack(np.array([[7, -3, 1]], np.int8), 4), stored)
