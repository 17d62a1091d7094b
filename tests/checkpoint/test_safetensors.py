import json
import struct

import chex
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.safetensors import (
    TensorToWrite,
    find_tensors,
    read_header,
    read_tensor,
    write_safetensors,
)

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "scalar": np.float32(0.5),
    "empty": np.zeros((0, 3), np.float32),
    "b": np.linspace(-3, 3, 5, dtype=np.float32),
}


def write(path, dtype=np.float32, arrays=ARRAYS):
    tensors = [
        TensorToWrite(name, np.shape(array), lambda array=array: np.asarray(array))
        for name, array in arrays.items()
    ]
    write_safetensors(path, tensors, np.dtype(dtype))


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_written_is_read_here_and_by_the_reference_library(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    write(path, dtype)
    ours = {name: read_tensor(tensor) for name, tensor in find_tensors(tmp_path).items()}
    reference = safetensors.numpy.load_file(path)
    assert ours.keys() == reference.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert ours[name].dtype == reference[name].dtype == dtype
        np.testing.assert_array_equal(ours[name], np.asarray(array, dtype))
        np.testing.assert_array_equal(ours[name], reference[name])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_the_reference_library_writes_is_read_here(tmp_path, dtype):
    arrays = {name: np.asarray(array, dtype) for name, array in ARRAYS.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    ours = {name: read_tensor(tensor) for name, tensor in find_tensors(tmp_path).items()}
    chex.assert_trees_all_equal(ours, arrays, strict=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_files_are_those_of_the_reference_library_to_the_byte(tmp_path, dtype):
    """The names are given in the order that the library sorts them into."""
    arrays = {name: np.asarray(ARRAYS[name], dtype) for name in ("a", "b", "empty", "scalar")}
    write(tmp_path / "ours", dtype, arrays)
    assert (tmp_path / "ours").read_bytes() == safetensors.numpy.save(arrays, {"format": "pt"})


@pytest.mark.parametrize("missing", [1, 4, 40])
def test_a_truncated_file_is_refused(tmp_path, missing):
    path = tmp_path / "model.safetensors"
    write(path)
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        find_tensors(tmp_path)


def test_a_header_of_more_bytes_than_names_take_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**8))
        stream.truncate(10**8 + 8)  # without its bytes on the disk
    with pytest.raises(CheckpointError, match=r"would have 100000000 bytes, .* at most 16777216"):
        read_header(path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{nonsense", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([], "not a JSON object"),
        (b'{"a": {}, "a": {}}', "twice"),
        ({"a": 1}, "are needed"),
        ({"a": {**ENTRY, "dtype": "F31"}}, "unknown dtype"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {**ENTRY, "shape": [-2]}}, "shape"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "shape"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "shape"),
        ({"a": {**ENTRY, "shape": [0, 2**70]}}, "shape"),
        ({"a": {**ENTRY, "shape": [1] * 70}}, "shape"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "data_offsets"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "data_offsets"),
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, "do not hold"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, "do not hold"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "hole"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({}, "end at byte"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, header, why):
    path = tmp_path / "x.safetensors"
    write_raw(path, header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=f"(?s)x.safetensors is truncated or damaged.*{why}"):
        read_header(path)


def test_damage_anywhere_gives_our_error_or_a_file_that_can_be_read(tmp_path):
    """Random bytes put into a file, or cut off: never another exception, never a huge array."""
    path = tmp_path / "model.safetensors"
    write(path)
    intact = path.read_bytes()

    @settings(max_examples=200)
    @given(
        st.integers(0, len(intact)),
        st.integers(0, len(intact) - 1),
        st.binary(min_size=1, max_size=9),
    )
    def check(length, start, noise):
        damaged = intact[:start] + noise + intact[start + len(noise) :]
        path.write_bytes(damaged[:length] if length > start + len(noise) else damaged)
        try:
            for tensor in find_tensors(tmp_path).values():
                assert read_tensor(tensor).nbytes <= len(intact)
        except CheckpointError:
            pass

    check()


def test_weights_that_are_not_floats_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}, b"\0" * 8)
    (tensor,) = find_tensors(tmp_path).values()
    with pytest.raises(CheckpointError, match=r"as I8; known are .*Quantized"):
        read_tensor(tensor)


def test_a_folder_of_pickles_is_refused_with_the_way_to_convert(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"only pytorch_model\.bin, a pickle.*save_pretrained"
    ):
        find_tensors(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no weights"):
        find_tensors(tmp_path)


def write_index(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_shards_are_read_as_one(tmp_path):
    write(tmp_path / "1.safetensors", arrays={"a": ARRAYS["a"]})
    write(tmp_path / "2.safetensors", arrays={"b": ARRAYS["b"]})
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    found = find_tensors(tmp_path)
    assert found.keys() == {"a", "b"}
    np.testing.assert_array_equal(read_tensor(found["b"]), ARRAYS["b"])


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret", "sub/1.safetensors", "..", "a\\b"]
)
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, shard):
    write(tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": shard})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        find_tensors(tmp_path)


def test_an_index_that_does_not_fit_its_shards_lists_every_problem(tmp_path):
    write(tmp_path / "1.safetensors", arrays={"a": ARRAYS["a"]})
    write_index(tmp_path, {"a": "1.safetensors", "x": "1.safetensors", "y": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"(?s)x is not in 1\.saf.*y is not in 1\.saf"):
        find_tensors(tmp_path)
    write_index(tmp_path, {"a": "1.safetensors", "x": "2.safetensors"})
    with pytest.raises(CheckpointError, match=r"shard '2\.safetensors' is not there"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": ["1.safetensors"]}])
def test_an_index_of_the_wrong_form_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"weight_map|does not fit"):
        find_tensors(tmp_path)
