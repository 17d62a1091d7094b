"""The safetensors format: find tensors, read them one at a time, write them as a stream.

Read without memory mapping: a mapped file counts towards a process's memory as it is read, and a
shard is many tensors. The format: 8 bytes with the length of a JSON header, the header (name ->
dtype, shape, byte range), then the data, little-endian, without holes.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files import MOST_JSON, CheckpointError, listed, read_json
from jaxspec.core.checks import shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_AXES, _MAX_SIZE = 32, 2**48  # what NumPy can describe, with room to spare

# Types that weights may be stored as. `<`: files are little-endian whatever the machine is.
FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHER_BITS = {
    "BOOL": 8,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}


class StoredTensor(NamedTuple):
    """The place of one tensor in a file.

    Attributes:
        dtype: the format's name of it, such as "BF16".
        start, num_bytes: the byte range in `file`.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def read(self) -> np.ndarray:
        """See `read_tensor`."""
        return read_tensor(self)


class TensorToWrite(NamedTuple):
    """One tensor of a file about to be written. `make` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads the tensors of one file, checked against the file's size.

    Raises:
        CheckpointError: the file is truncated, or its header is damaged.
    """
    try:
        with path.open("rb") as stream:
            return _parse_header(path, stream)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Finds all tensors of a checkpoint folder, in one file or in shards named by an index.

    Raises:
        CheckpointError: there are no safetensors, or the index and the shards do not agree, or the
            index points outside the folder.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _find_sharded(folder)
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    found = (
        f"only {pickles[0]}, a pickle, and loading a pickle runs whatever program it holds"
        if pickles
        else f"no weights: expected {SINGLE}, or {INDEX} and the shards it names"
    )
    raise CheckpointError(
        f"{folder} has {found}. A model that is published only as pytorch_model.bin is converted "
        'once, where it is trusted: python -c "from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained('FOLDER_OR_HUB_ID').save_pretrained('NEW_FOLDER')\""
    )


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """Reads one tensor as it is stored into a new array, in C order.

    Raises:
        CheckpointError: the file ends early, or its dtype is not a float that weights can have.
    """
    array = np.empty(tensor.shape, float_dtype(tensor))
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            num_read = stream.readinto(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {error}.") from error
    if num_read != tensor.num_bytes:
        raise CheckpointError(f"{tensor.file} ended while being read: it is being changed.")
    return array


def float_dtype(tensor: StoredTensor) -> np.dtype:
    """Returns the NumPy dtype of a stored weight."""
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.file} stores weights as {tensor.dtype}; known are {', '.join(FLOATS)}. "
            "Quantized checkpoints must be converted to one of these first."
        )
    return FLOATS[tensor.dtype]


def write_safetensors(path: Path, tensors: Iterable[TensorToWrite], dtype: np.dtype) -> None:
    """Writes one file, every tensor in `dtype`, holding one tensor at a time.

    The caller provides for interruption: write to a temporary name and rename.
    """
    tensors = list(tensors)
    tag = next(name for name, known in FLOATS.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {
            "dtype": tag,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            array = np.asarray(tensor.make(), dtype, order="C")
            assert array.shape == tensor.shape, (tensor.name, array.shape, tensor.shape)
            stream.write(array.reshape(-1).view(np.uint8).data)


def _find_sharded(folder: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(x, str) for x in weight_map.values())
    if not is_map or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to shards.")
    shards = weight_map.values()
    problems = []
    for name in sorted(set(shards)):
        if Path(name).name != name or "\\" in name or name in (".", "..") or len(name) > 255:
            problems.append(f"shard {name!r} is not a plain file name in this folder")
        elif not (folder / name).is_file():
            problems.append(f"shard {name!r} is not there")
    _raise_problems(folder / INDEX, problems)

    headers = {name: read_header(folder / name) for name in sorted(set(shards))}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            problems.append(f"{name} is not in {shard}")
        else:
            found[name] = headers[shard][name]
    _raise_problems(folder / INDEX, problems)
    return found


def _raise_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{path} does not fit its folder, fetch the checkpoint again:{listed(problems)}"
        )


def _parse_header(path: Path, stream: BinaryIO) -> dict[str, StoredTensor]:
    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is truncated or damaged: {why}. Fetch it again.")

    size = stream.seek(0, 2)
    stream.seek(0)
    if size < 8:
        raise damaged(f"{size} bytes cannot hold a safetensors header")
    (length,) = struct.unpack("<Q", stream.read(8))
    # So many bytes hold 100,000 names; the format itself allows 100 MB.
    if length > min(size - 8, MOST_JSON):
        raise damaged(
            f"its header would have {length} bytes, the file has {size}, and at most "
            f"{MOST_JSON} are read"
        )
    try:
        header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise damaged("its header is not a JSON object")
    header.pop("__metadata__", None)

    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _parse_entry(path, entry, 8 + length)
        except ValueError as error:
            raise damaged(f"tensor {name!r:.200}: {error}") from error
    end = 8 + length
    # Empty tensors share their start with the one after them, and come first.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            raise damaged(f"tensor {name!r:.200} overlaps another, or leaves a hole before it")
        end += tensor.num_bytes
    if end != size:
        raise damaged(f"its tensors end at byte {end}, the file at {size}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _parse_entry(path: Path, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("dtype, shape and data_offsets are needed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _OTHER_BITS | {name: 8 * known.itemsize for name, known in FLOATS.items()}
    if not isinstance(dtype, str) or dtype not in bits:
        raise ValueError(f"unknown dtype {shown(dtype)}")
    if not _natural_numbers(shape) or len(shape) > _MAX_AXES or max(shape, default=0) > _MAX_SIZE:
        raise ValueError(f"shape must be a list of sizes, got {shown(shape)}")
    if not _natural_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets must be [begin, end], got {shown(offsets)}")
    num_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * bits[dtype] != 8 * num_bytes:
        raise ValueError(f"{num_bytes} bytes do not hold {dtype} of shape {shape}")
    return StoredTensor(path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _natural_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
