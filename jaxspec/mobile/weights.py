"""Weights into a converted graph, with fewer bits if asked for, one at a time.

The converter sees only shapes: in its graphs weights are inputs. Here they become constants that
are stored once for all functions that read them. So the converter never holds a copy of the model.

A flatbuffer ends at 2 GiB. The weights lie behind it, where `offset` and `size` of its buffers
point (version 3c of TFLite's schema), in files of all sizes: a weight is made, written and dropped.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxspec.core.loop import round_up
from jaxspec.extras import needs_extra
from jaxspec.mobile.calibration import EMBEDDINGS, Calibration, Rounded
from jaxspec.mobile.quantize import QUANTIZATIONS, WeightFormat, quantize_rows
from jaxspec.progress import progress_bar

PREFIX = "weight:"
"""Prefix of inputs that stand for weights; the index of the leaf follows."""
_TABLE = WeightFormat(8, 0, on_gpu=True)  # of tokens, in all quantizations
_ALIGNMENT = 16  # bytes, of what buffers in the flatbuffer hold
_BEHIND = 64  # bytes, the same of the weights behind it
_ROWS = 1024  # of a weight that are rounded at a time; even, as two weights may share a byte
_LARGE = 1 << 30  # bytes of a file from which writing shows its progress
RUNTIME = b"2.20.0"  # of ai-edge-litert 1.4.0, the oldest that computes such files right


class Leaf(NamedTuple):
    """A weight.

    Attributes:
        name: of its tensors.
        shape: its axes.
        dtype: float32, or one of integers.
        make: returns it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


class _View(NamedTuple):
    """A weight as a graph transposes and reshapes it.

    Attributes:
        weight: index of the leaf.
        changes: axes in a new order ("turn") or a new shape ("reshape"), first to last.
    """

    weight: int
    changes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def of(self, array: np.ndarray) -> np.ndarray:
        """Returns the weight as the graph sees it."""
        for change, numbers in self.changes:
            array = array.transpose(numbers) if change == "turn" else array.reshape(numbers)
        return array

    def reshaped(self, shape: Iterable[int]) -> "_View":
        return _View(self.weight, (*self.changes, ("reshape", tuple(map(int, shape)))))

    def turned(self, axes: Iterable[int]) -> "_View":
        """Adds a transposition; successive ones merge, so that equal views compare equal."""
        axes, before = tuple(map(int, axes)), self.changes
        if before and before[-1][0] == "turn":
            axes, before = tuple(before[-1][1][axis] for axis in axes), before[:-1]
        if axes == tuple(range(len(axes))):
            return _View(self.weight, before)
        return _View(self.weight, (*before, ("turn", axes)))


class _Stored(NamedTuple):
    """One view in one format: its buffer, and its scales or blocks of scales.

    `scales` are ones until the weight is written.
    """

    buffer: int
    shape: tuple[int, ...]
    dtype: str
    scales: np.ndarray | None = None
    blocks: "_Stored | None" = None


_Places = dict[tuple[_View, WeightFormat | None], int]
"""Indices of the tensors of a graph that hold weights, by view and format."""


class TfliteFile:
    """A `.tflite` that is complete but for its weights.

    Products with weights become FULLY_CONNECTED, products of one-hot rows EMBEDDING_LOOKUP.

    Attributes:
        head: the flatbuffer, with ones in place of scales.
        size: bytes of the whole file.
    """

    def __init__(
        self,
        flatbuffer: bytes,
        leaves: Sequence[Leaf],
        quantization: str,
        calibration: Calibration | None = None,
    ):
        """Puts weights in place of the inputs `PREFIX...` of a flatbuffer.

        Args:
            flatbuffer: a `.tflite`.
            leaves: the weights; none is made before the file is written.
            quantization: of the weights of products, one of `QUANTIZATIONS`.
            calibration: weights that were rounded before; `None`: all are rounded here.

        Raises:
            ValueError: the extra `mobile` is not installed, blocks do not divide a width, or a
                weight was rounded before as another matrix than the one that a graph reads.
        """
        with needs_extra("Exporting", "mobile"):
            from ai_edge_litert import schema_py_generated as schema
            from ai_edge_litert.tools import flatbuffer_utils
        self._schema: Any = schema
        self._model: Any = flatbuffer_utils.read_model_from_bytearray(bytearray(flatbuffer))
        self._flatbuffer, self._leaves, self._quantization = flatbuffer, leaves, quantization
        self._calibration = calibration or Calibration({}, frozenset())
        self._format = QUANTIZATIONS[quantization]
        self._stored: dict[tuple[_View, WeightFormat | None], _Stored] = {}
        self._codes = vars(schema.BuiltinOperator)
        inside = len(self._model.buffers)
        signatures = {each.subgraphIndex: each for each in self._model.signatureDefs}
        for index, graph in enumerate(self._model.subgraphs):
            self._fill(graph, signatures[index])
        self._ask_for_runtime()
        end = len(_packed(self._model))
        for buffer in self._model.buffers[inside:]:
            buffer.offset = round_up(end, _BEHIND)
            end = buffer.offset + buffer.size
        self.head, self.size = _packed(self._model), end

    def with_calibration(self, calibration: Calibration) -> "TfliteFile":
        """Returns the file with weights that were rounded before; errors as when it is made."""
        return TfliteFile(self._flatbuffer, self._leaves, self._quantization, calibration)

    def write(self, path: Path) -> None:
        """Writes the file. Weights are made and rounded one at a time."""
        wanted: dict[int, list[tuple[_View, WeightFormat | None]]] = {}
        for view, form in self._stored:
            wanted.setdefault(view.weight, []).append((view, form))
        shown = self.size > _LARGE
        with path.open("wb") as file, progress_bar(len(wanted), shown=shown) as advance:
            for weight, forms in wanted.items():
                advance("writing weights")
                self._write_weight(file, self._leaves[weight], forms)
            file.seek(0)
            file.write(_packed(self._model))

    def _write_weight(
        self,
        file: BinaryIO,
        leaf: Leaf,
        forms: list[tuple[_View, WeightFormat | None]],
    ) -> None:
        # A function of its own, so that nothing holds the weight while the next one is made.
        array, rounded = leaf.make(), self._calibration.rounded.get(leaf.name)
        for view, form in forms:
            known = rounded if form is not None and form == self._format else None
            self._write_view(file, view.of(array), form, self._stored[view, form], known)

    def _write_view(
        self,
        file: BinaryIO,
        array: np.ndarray,
        form: WeightFormat | None,
        stored: _Stored,
        known: Rounded | None,
    ) -> None:
        """Writes a view into its place; scales go there too, or into the flatbuffer."""
        file.seek(self._model.buffers[stored.buffer].offset)
        if form is None:
            file.write(_bytes_of(array))
            return
        scales = []
        if known is not None:
            file.write(_bytes_of(known.numbers))
            scales.append(known.scales)
        for row in range(0, len(array) if known is None else 0, _ROWS):
            packed, of_rows = quantize_rows(array[row : row + _ROWS], form.bits, form.block)
            file.write(_bytes_of(packed))
            scales.append(of_rows)
        if stored.blocks is not None:
            file.seek(self._model.buffers[stored.blocks.buffer].offset)
            file.write(_bytes_of(np.concatenate(scales)))
        elif stored.scales is not None:
            stored.scales[:] = np.concatenate(scales)

    def _ask_for_runtime(self) -> None:
        """Raises the version of the runtime that the file asks for, which hosts may read."""
        for entry in self._model.metadata or ():
            if entry.name == b"min_runtime_version":
                text = RUNTIME.ljust(_ALIGNMENT, b"\0")
                self._model.buffers[entry.buffer].data = np.frombuffer(text, np.uint8)

    def _fill(self, graph: Any, signature: Any) -> None:
        views = {
            entry.tensorIndex: _View(int(entry.name.decode().removeprefix(PREFIX)))
            for entry in signature.inputs
            if entry.name.decode().startswith(PREFIX)
        }
        weights = set(views)
        makers: dict[int, Any] = {}
        tensors: _Places = {}
        kept = []
        for op in graph.operators:
            name = self._name(op)
            inputs = [int(index) for index in op.inputs]
            if name in ("RESHAPE", "TRANSPOSE") and inputs[0] in views:
                views[int(op.outputs[0])] = self._changed(graph, op, name, views[inputs[0]])
                continue
            if name == "BATCH_MATMUL" and inputs[1] in views and inputs[0] not in views:
                self._to_weights(graph, op, makers.get(inputs[0]), views[inputs[1]], tensors)
            elif name == "FULLY_CONNECTED" and inputs[1] in views and inputs[0] not in views:
                form = self._format_of(views[inputs[1]])
                inputs[1] = self._tensor(graph, views[inputs[1]], form, tensors)
                op.inputs = inputs
            elif any(index in views for index in inputs):
                op.inputs = [
                    self._tensor(graph, views[index], None, tensors) if index in views else index
                    for index in inputs
                ]
            makers.update(dict.fromkeys(map(int, op.outputs), op))
            kept.append(op)
        graph.operators = kept
        graph.inputs = [index for index in graph.inputs if index not in weights]
        signature.inputs = [e for e in signature.inputs if e.tensorIndex not in weights]
        _drop_what_nobody_reads(graph, signature)

    def _name(self, op: Any) -> str:
        code = self._model.operatorCodes[op.opcodeIndex].builtinCode
        return next(name for name, value in self._codes.items() if value == code)

    def _changed(self, graph: Any, op: Any, name: str, view: _View) -> _View:
        if name == "RESHAPE":
            return view.reshaped(graph.tensors[op.outputs[0]].shape)
        axes = self._model.buffers[graph.tensors[op.inputs[1]].buffer].data
        return view.turned(np.asarray(axes, np.uint8).view(np.int32))

    def _to_weights(
        self,
        graph: Any,
        op: Any,
        maker: Any,
        view: _View,
        tensors: _Places,
    ) -> None:
        """A product with a weight on its right."""
        rows, options = int(op.inputs[0]), op.builtinOptions
        width = len(graph.tensors[op.inputs[1]].shape)
        if width != 2 or options.adjX:
            op.inputs = [rows, self._tensor(graph, view, None, tensors)]
        elif maker is not None and self._name(maker) == "ONE_HOT" and not options.adjY:
            # Only rows of embeddings may share one scale each: an expert's row is a whole matrix.
            is_embedding = EMBEDDINGS in self._leaves[view.weight].name
            form = _TABLE if self._format is not None and is_embedding else None
            op.inputs = [int(maker.inputs[0]), self._tensor(graph, view, form, tensors)]
            op.opcodeIndex = self._code("EMBEDDING_LOOKUP")
            op.builtinOptionsType, op.builtinOptions = 0, None
        else:
            turned = view if options.adjY else view.turned((1, 0))
            op.inputs = [rows, self._tensor(graph, turned, self._format_of(turned), tensors), -1]
            op.opcodeIndex = self._code("FULLY_CONNECTED")
            op.builtinOptions = self._schema.FullyConnectedOptionsT()
            op.builtinOptions.keepNumDims = len(graph.tensors[rows].shape) > 2
            kinds = self._schema.BuiltinOptions
            op.builtinOptionsType = kinds.FullyConnectedOptions

    def _format_of(self, view: _View) -> WeightFormat | None:
        """Returns the format of a product's weight. One that keeps 8 bits has that of the table."""
        kept = self._leaves[view.weight].name in self._calibration.kept
        return _TABLE if kept else self._format

    def _code(self, name: str) -> int:
        wanted, codes = self._codes[name], self._model.operatorCodes
        for index, code in enumerate(codes):
            if code.builtinCode == wanted:
                return index
        code = self._schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode, code.version = wanted, min(wanted, 127), 1
        codes.append(code)
        return len(codes) - 1

    def _tensor(self, graph: Any, view: _View, form: WeightFormat | None, tensors: _Places) -> int:
        """Returns the index of a constant in a graph; adds it if it is missing."""
        if (view, form) not in tensors:
            if (view, form) not in self._stored:
                self._stored[view, form] = self._store(view, form)
            name = self._leaves[view.weight].name
            tensors[view, form] = self._add(graph, name, self._stored[view, form])
        return tensors[view, form]

    def _add(self, graph: Any, name: str, stored: _Stored) -> int:
        tensor = self._schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name.encode(), list(stored.shape), stored.buffer
        tensor.type = vars(self._schema.TensorType)[stored.dtype]
        if stored.scales is not None or stored.blocks is not None:
            tensor.quantization = self._schema.QuantizationParametersT()
        if stored.scales is not None:
            tensor.quantization.scale = stored.scales
            tensor.quantization.zeroPoint = np.zeros(len(stored.scales), np.int64)
        if stored.blocks is not None:
            details = self._schema.BlockwiseQuantizationT()
            details.scales = self._add(graph, f"{name}/scales", stored.blocks)
            details.zeroPoints = -1
            details.blockSize = stored.shape[1] // stored.blocks.shape[1]
            tensor.quantization.details = details
            kinds = self._schema.QuantizationDetails
            tensor.quantization.detailsType = kinds.BlockwiseQuantization
        graph.tensors.append(tensor)
        return len(graph.tensors) - 1

    def _store(self, view: _View, form: WeightFormat | None) -> _Stored:
        """Plans how a view is stored, from its shape alone."""
        leaf = self._leaves[view.weight]
        shape = view.of(np.broadcast_to(np.zeros((), np.int8), leaf.shape)).shape
        size = int(np.prod(shape))
        if form is None:
            dtype = "INT32" if np.issubdtype(leaf.dtype, np.integer) else "FLOAT32"
            return _Stored(self._buffer(size * leaf.dtype.itemsize), shape, dtype)
        if shape[1] % (form.block or 1):
            raise ValueError(
                f"quantization: {self._quantization} needs widths that {form.block} divides, and "
                f"{leaf.name} has {shape[1]}; take int4."
            )
        known = self._calibration.rounded.get(leaf.name) if form == self._format else None
        if known is not None and known.shape != shape:
            raise ValueError(
                f"quantization: {self._quantization} rounded {leaf.name} as a matrix of "
                f"{known.shape}, and a graph reads it as {shape}; take int4."
            )
        dtype, buffer = f"INT{form.bits}", self._buffer((size * form.bits + 7) // 8)
        if not form.block:
            return _Stored(buffer, shape, dtype, scales=np.ones(shape[0], np.float32))
        parts = (shape[0], shape[1] // form.block)
        blocks = _Stored(self._buffer(2 * parts[0] * parts[1]), parts, "FLOAT16")
        return _Stored(buffer, shape, dtype, blocks=blocks)

    def _buffer(self, size: int) -> int:
        """Adds a buffer behind the flatbuffer, whose place is not known yet."""
        buffer = self._schema.BufferT()
        # An offset of 0 or 1 would mean that there is none, and 0 takes no room.
        buffer.offset, buffer.size = _BEHIND, size
        self._model.buffers.append(buffer)
        return len(self._model.buffers) - 1


def single_functions(path: Path, names: Sequence[str]) -> Iterator[tuple[str, bytearray]]:
    """Yields the flatbuffers that leave a file one function each.

    Weights keep their places, so a flatbuffer is written over the beginning of the file. A runtime
    packs weights for every function that it finds, and a phone may have memory for one.

    Args:
        path: of a file that `TfliteFile` wrote.
        names: of the functions.
    """
    from ai_edge_litert import schema_py_generated as schema

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        unread: Any = schema.Model.GetRootAs(view, 0)
        buffers = map(unread.Buffers, range(unread.BuffersLength()))
        end = min(buffer.Offset() for buffer in buffers if buffer.Size())
        model: Any = schema.ModelT.InitFromObj(schema.Model.GetRootAs(bytearray(view[:end]), 0))
    graphs, places = model.subgraphs, {}
    for signature in model.signatureDefs:
        places[signature.signatureKey.decode()] = signature, graphs[signature.subgraphIndex]
    for name in names:
        signature, graph = places[name]
        signature.subgraphIndex = 0
        model.signatureDefs, model.subgraphs = [signature], [graph]
        flatbuffer = _packed(model)
        assert len(flatbuffer) <= end, "it would lie over weights"
        yield name, flatbuffer


def _packed(model: Any) -> bytearray:
    """Packs a flatbuffer; its length depends on no scale and no offset."""
    import flatbuffers

    class Builder(flatbuffers.Builder):
        """A builder that aligns vectors of bytes as the schema asks."""

        def StartVector(self, elemSize: int, numElems: int, alignment: int) -> int:
            wanted = _ALIGNMENT if elemSize == 1 else alignment
            return super().StartVector(elemSize, numElems, wanted)

    builder = Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    data: bytearray = builder.Bytes
    del data[: builder.Head()]
    return data


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _drop_what_nobody_reads(graph: Any, signature: Any) -> None:
    """Removes operations whose results nobody reads, and then tensors that nothing names."""
    while True:
        read = {int(i) for op in graph.operators for i in op.inputs} | set(map(int, graph.outputs))
        kept = [op for op in graph.operators if read & set(map(int, op.outputs))]
        if len(kept) == len(graph.operators):
            break
        graph.operators = kept
    named = read | {int(i) for op in graph.operators for i in op.outputs}
    named |= set(map(int, graph.inputs))
    for tensor in [graph.tensors[index] for index in named if index >= 0]:
        details = None if tensor.quantization is None else tensor.quantization.details
        if details is not None:
            named.add(int(details.scales))
    order = sorted(index for index in named if index >= 0)
    place = {-1: -1, **{index: new for new, index in enumerate(order)}}
    graph.tensors = [graph.tensors[index] for index in order]
    for tensor in graph.tensors:
        details = None if tensor.quantization is None else tensor.quantization.details
        if details is not None:
            details.scales = place[int(details.scales)]
    for op in graph.operators:
        op.inputs = [place[int(index)] for index in op.inputs]
        op.outputs = [place[int(index)] for index in op.outputs]
    graph.inputs = [place[int(index)] for index in graph.inputs]
    graph.outputs = [place[int(index)] for index in graph.outputs]
    for entry in (*signature.inputs, *signature.outputs):
        entry.tensorIndex = place[int(entry.tensorIndex)]
