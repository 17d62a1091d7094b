"""Weights of fewer bits. A file is quantised after its conversion, in one pass over its bytes.

Only weights change: of products, and of the table of token embeddings. Activations stay float32 in
the file; CPUs quantise them as they go, GPUs turn the weights back. Tables of rotations and the
zeros and ones of acceptance are left alone: rounded, they would be wrong, not imprecise.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np

from jaxspec.mobile.extra import needs_extra
from jaxspec.mobile.opset import read_graphs

# The scope of `Network.embed`, of which the converter makes a table look-up. Rotations are read
# from a table too, in another scope.
_TOKEN_TABLE = r"\.embed/"


class Recipe(NamedTuple):
    """How weights are stored.

    bits: of the weights of products; those of the token table are 8.
    block: weights that share a scale; 0: all that make one output.
    on_gpu: whether LiteRT's GPU accelerator takes it. Blocks end the process there.
    """

    bits: int
    block: int
    on_gpu: bool


QUANTIZATIONS: dict[str, Recipe | None] = {
    "float32": None,
    "int8": Recipe(8, 0, on_gpu=True),
    "int4": Recipe(4, 0, on_gpu=True),
    "int4-block32": Recipe(4, 32, on_gpu=False),
}


def check_quantization(name: str, on_gpu: bool = False) -> None:
    """Refuses a name that is not known, or what ends the process on a GPU.

    Raises:
        ValueError: naming what to take instead.
    """
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {name!r}.")
    recipe = QUANTIZATIONS[name]
    if on_gpu and recipe is not None and not recipe.on_gpu:
        raise ValueError(
            f"quantization: {name} ends the process of LiteRT's GPU accelerator; for a GPU take "
            "int4 or int8."
        )


def quantize(flatbuffer: bytes, name: str) -> bytes:
    """The same file with its weights as `name` says; "float32" gives it back as it is.

    Args:
        flatbuffer: a `.tflite` with float32 weights.
        name: one of `QUANTIZATIONS`.

    Raises:
        ValueError: unknown name, a width that blocks do not divide, or no extra `mobile`.
    """
    check_quantization(name)
    recipe = QUANTIZATIONS[name]
    if recipe is None:
        return flatbuffer
    with needs_extra("Quantizing"):
        from ai_edge_quantizer import qtyping, quantizer
    if recipe.block:
        _check_blocks(flatbuffer, name, recipe.block)
    granularity = f"BLOCKWISE_{recipe.block}" if recipe.block else "CHANNELWISE"
    operations = qtyping.TFLOperationName
    # The stubs of the package describe enumerations as texts.
    maker: Any = quantizer.Quantizer(bytearray(flatbuffer))
    maker.add_dynamic_config(
        regex=".*",
        operation_name=operations.FULLY_CONNECTED,
        num_bits=recipe.bits,
        granularity=qtyping.QuantGranularity(granularity),
    )
    maker.add_dynamic_config(
        regex=_TOKEN_TABLE, operation_name=operations.EMBEDDING_LOOKUP, num_bits=8
    )
    return _share_equal_buffers(
        maker.quantize(enable_progress_bar=False, enable_progress_report=False).quantized_model
    )


def _share_equal_buffers(flatbuffer: bytes | bytearray) -> bytes:
    """Stores once what the quantiser has stored for each of its uses.

    It does so where two recipes meet in one tensor: a tied head has 4 bits, its table 8.
    """
    with needs_extra("Quantizing"):
        from ai_edge_litert.tools import flatbuffer_utils
    model: Any = flatbuffer_utils.read_model_from_bytearray(flatbuffer)
    metadata = {entry.buffer for entry in model.metadata or ()}
    first: dict[bytes, int] = {}
    home: dict[int, int] = {}
    for index, buffer in enumerate(model.buffers):
        if index not in metadata and buffer.data is not None and len(buffer.data):
            content = hashlib.sha256(np.asarray(buffer.data, np.uint8).tobytes()).digest()
            home[index] = first.setdefault(content, index)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.buffer = home.get(tensor.buffer, tensor.buffer)
    for index, kept in home.items():
        if index != kept:
            model.buffers[index].data = None
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def _check_blocks(flatbuffer: bytes, name: str, block: int) -> None:
    widths = {
        weights.shape[-1]
        for graph in read_graphs(flatbuffer)
        for op in graph.ops
        if op.name == "FULLY_CONNECTED"
        for weights in graph.ins(op)[1:2]
        if weights.constant is not None
    }
    odd = sorted(width for width in widths if width % block)
    if odd:
        raise ValueError(
            f"quantization: {name} needs widths that {block} divides, and this model has {odd}; "
            "take int4."
        )
