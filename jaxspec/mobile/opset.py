"""The gate: refuses files that a phone's GPU delegate does not take whole or computes wrongly.

Every rule was measured on LiteRT's GPU accelerator. It refuses some operations, which sends a whole
graph to the CPU, and computes a few combinations WRONGLY, in silence. The gate reads the finished
file, so it sees the converter's output, and names each operation with the JAX scope that it came
from.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.extras import needs_extra

MAX_RANK = 4

ALLOWED = frozenset(
    (
        *("ADD", "ARG_MAX", "BATCH_MATMUL", "CAST", "CONCATENATION", "CUMSUM", "DIV"),
        *("DYNAMIC_UPDATE_SLICE", "EMBEDDING_LOOKUP", "EQUAL", "EXP", "FULLY_CONNECTED", "GELU"),
        *("GREATER", "GREATER_EQUAL", "LESS", "LOG", "LOGISTIC", "MAXIMUM", "MEAN", "MINIMUM"),
        *("MUL", "ONE_HOT", "PACK", "REDUCE_MAX", "RELU", "RESHAPE", "RSQRT", "SELECT"),
        *("SELECT_V2", "SLICE", "SOFTMAX", "SUB", "SUM", "TANH", "TOPK_V2", "TRANSPOSE"),
    )
)
_INSTEAD = {
    "GATHER": "use a product with one-hot rows, or slices",
    "GATHER_ND": "use a product with one-hot rows, or slices",
    "BROADCAST_TO": "add a constant of the wanted shape, or let an operation broadcast",
    "STABLEHLO_SCATTER": "use dynamic_update_slice",
    "LOG_SOFTMAX": "take the logarithm of a softmax",
    "STABLEHLO_SORT": "use the ids of a top_k, too: else it is a sort",
    "COS": "the GPU's is off by 1e-3: read a table",
    "SIN": "the GPU's is off by 1e-3: read a table",
    "RELU_0_TO_1": "use relu on one side only",
    "REDUCE_ALL": "sum zeros and ones",
    "REDUCE_ANY": "sum zeros and ones",
    "IF": "a graph has no control flow",
    "WHILE": "a graph has no control flow",
}
_DTYPES = frozenset(("FLOAT32", "INT32", "INT8", "INT4", "UINT8", "BOOL"))
_ELEMENTWISE = frozenset(
    (
        *("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "RELU", "EXP", "LOGISTIC", "TANH"),
        *("RSQRT", "GELU", "CAST"),
    )
)


class Violation(NamedTuple):
    """An operation that does not pass.

    Attributes:
        signature: name of its function.
        op: its builtin name.
        scope: the JAX scope that it came from.
        problem: the fault, and what to write instead.
    """

    signature: str
    op: str
    scope: str
    problem: str

    def __str__(self) -> str:
        return f"{self.signature}: {self.op} at {self.scope}: {self.problem}"


class OpsetError(ValueError):
    """A file has operations that a GPU delegate refuses or computes wrongly.

    Attributes:
        violations: all of them.
    """

    def __init__(self, violations: Sequence[Violation]):
        self.violations = tuple(violations)
        lines = "".join(f"\n  {violation}" for violation in self.violations)
        super().__init__(f"{len(self.violations)} operations do not run on a phone's GPU:{lines}")


def require_opset(flatbuffer: bytes | bytearray) -> None:
    """Refuses a file with violations.

    Raises:
        OpsetError: listing all of them.
    """
    if found := violations(flatbuffer):
        raise OpsetError(found)


def violations(flatbuffer: bytes | bytearray) -> list[Violation]:
    """Lists the operations of a `.tflite` that a GPU delegate refuses or computes wrongly.

    Raises:
        ValueError: the extra `mobile` is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from jaxspec import load
        >>> from jaxspec.mobile import ExportConfig, export, violations
        >>> config = ExportConfig(capacity=64, prefill=(8,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = export(load("demo-draft"), folder, config=config)
        ...     violations(Path(folder, "model.tflite").read_bytes())
        []
    """
    found = []
    for graph in read_graphs(flatbuffer):
        for op in graph.ops:
            problems = (rule(graph, op) for rule in _RULES)
            found += [
                Violation(graph.signature, op.name, graph.scope(op), problem)
                for problem in problems
                if problem is not None
            ]
    return found


class GraphTensor(NamedTuple):
    """A tensor of a graph.

    Attributes:
        name: the JAX scope that it came from.
        shape: its axes.
        dtype: name of the type.
        static: True if its shape is known beforehand.
        constant: its bytes, none of them if they lie behind what was read; `None` if it is
            computed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    static: bool
    constant: np.ndarray | None


class Op(NamedTuple):
    """An operation of a graph.

    Attributes:
        name: builtin or custom.
        inputs: indices of tensors, without omitted ones.
        outputs: indices of tensors.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Graph(NamedTuple):
    """One signature.

    Attributes:
        signature: its name.
        tensors: by index.
        ops: in order.
        outputs: indices of tensors.
    """

    signature: str
    tensors: tuple[GraphTensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    def ins(self, op: Op) -> list[GraphTensor]:
        return [self.tensors[index] for index in op.inputs]

    def out(self, op: Op) -> GraphTensor:
        return self.tensors[op.outputs[0]]

    def scope(self, op: Op) -> str:
        """Returns the scope, or a neighbour's: functions jitted inside jax lose theirs."""
        named = [op, *self.readers(op.outputs[0]), *filter(None, map(self.maker, op.inputs))]
        names = [self.out(other).name for other in named]
        return next((name for name in names if "/" in name), names[0])

    def maker(self, tensor: int) -> Op | None:
        return next((op for op in self.ops if tensor in op.outputs), None)

    def readers(self, tensor: int) -> Iterator[Op]:
        return (op for op in self.ops if tensor in op.inputs)


def read_graphs(flatbuffer: bytes | bytearray) -> list[Graph]:
    """Reads the signatures of a `.tflite`, of which the weights behind its flatbuffer may lack.

    Raises:
        ValueError: the extra `mobile` is not installed.
    """
    schema = _schema()
    builtins = _names(schema.BuiltinOperator)
    model: Any = schema.Model.GetRootAs(flatbuffer)
    codes: list[str] = []
    for index in range(model.OperatorCodesLength()):
        code = model.OperatorCodes(index)
        # Older files, whose enumeration fitted into a byte, have only the old field.
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        custom = code.CustomCode()
        codes.append(custom.decode() if custom else builtins[number])
    named = {
        definition.SubgraphIndex(): definition.SignatureKey().decode()
        for definition in map(model.SignatureDefs, range(model.SignatureDefsLength()))
    }
    file, graphs = np.frombuffer(flatbuffer, np.uint8), []
    for index in range(model.SubgraphsLength()):
        name = named.get(index, f"subgraph {index}")
        graphs.append(_read_graph(schema, model, file, model.Subgraphs(index), name, codes))
    return graphs


def _schema() -> Any:
    with needs_extra("Reading a .tflite", "mobile"):
        from ai_edge_litert import schema_py_generated
    return schema_py_generated


def _read_graph(
    schema: Any, model: Any, file: np.ndarray, graph: Any, name: str, codes: Sequence[str]
) -> Graph:
    dtypes = _names(schema.TensorType)
    tensors = []
    for tensor in map(graph.Tensors, range(graph.TensorsLength())):
        data = model.Buffers(tensor.Buffer())
        shape = tuple(tensor.Shape(axis) for axis in range(tensor.ShapeLength()))
        static = all(
            tensor.ShapeSignature(axis) >= 0 for axis in range(tensor.ShapeSignatureLength())
        )
        constant = data.DataAsNumpy() if data.DataLength() else None
        if data.Offset() > 1:  # behind the flatbuffer
            constant = file[data.Offset() : data.Offset() + data.Size()]
        tensors.append(
            GraphTensor(tensor.Name().decode(), shape, dtypes[tensor.Type()], static, constant)
        )
    ops = []
    for op in map(graph.Operators, range(graph.OperatorsLength())):
        inputs = (op.Inputs(index) for index in range(op.InputsLength()))
        outputs = tuple(op.Outputs(index) for index in range(op.OutputsLength()))
        present = tuple(index for index in inputs if index >= 0)
        code: int = op.OpcodeIndex()
        ops.append(Op(codes[code], present, outputs))
    outputs = tuple(graph.Outputs(index) for index in range(graph.OutputsLength()))
    return Graph(name, tuple(tensors), tuple(ops), outputs)


def _names(enumeration: type) -> dict[int, str]:
    return {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}


def _refused(graph: Graph, op: Op) -> str | None:
    del graph
    if op.name in ALLOWED:
        return None
    return f"the GPU does not take this operation; {_INSTEAD.get(op.name, 'write it differently')}."


def _too_many_axes(graph: Graph, op: Op) -> str | None:
    rank = max(len(graph.tensors[index].shape) for index in (*op.inputs, *op.outputs))
    return f"a tensor has {rank} axes, at most {MAX_RANK} pass." if rank > MAX_RANK else None


def _not_static(graph: Graph, op: Op) -> str | None:
    tensors = [graph.tensors[index] for index in (*op.inputs, *op.outputs)]
    if not all(tensor.static for tensor in tensors):
        return "a shape is not static."
    unknown = sorted({tensor.dtype for tensor in tensors} - _DTYPES)
    return f"it has tensors of {', '.join(unknown)}." if unknown else None


def _one_hot_of_others(graph: Graph, op: Op) -> str | None:
    if op.name == "ONE_HOT" and graph.out(op).dtype != "FLOAT32":
        return f"GPUs make one-hot rows of floats only, not of {graph.out(op).dtype}; cast them."
    return None


def _integer_factor(graph: Graph, op: Op) -> str | None:
    """Finds one row of constant integers for several rows: its program does not compile."""
    out = graph.out(op)
    if op.name != "MUL" or out.dtype != "INT32" or len(out.shape) not in (2, 3):
        return None
    for tensor in graph.ins(op):
        if tensor.constant is not None and 1 < int(np.prod(tensor.shape)) < int(np.prod(out.shape)):
            return (
                f"GPUs do not compute a product with repeated constant integers {tensor.shape} of "
                "so few axes; make it four."
            )
    return None


def _repeated_integers(graph: Graph, op: Op) -> str | None:
    """Finds silent bug F: one row of constant integers for several; only the first is right."""
    out = graph.out(op)
    if op.name != "MUL" or out.dtype != "INT32" or len(out.shape) != MAX_RANK:
        return None
    for tensor in graph.ins(op):
        shape = (1,) * (MAX_RANK - len(tensor.shape)) + tensor.shape
        if tensor.constant is not None and shape[-1] > 1 and shape[2] < out.shape[2]:
            return "browsers read the first row only of constant integers; repeat it for each row."
    return None


def _constant_where(graph: Graph, op: Op) -> str | None:
    if op.name in ("SELECT", "SELECT_V2") and graph.ins(op)[0].constant is not None:
        return "it chooses by a constant; add a constant bias instead."
    return None


def _constant_on_the_left(graph: Graph, op: Op) -> str | None:
    if op.name == "BATCH_MATMUL" and graph.ins(op)[0].constant is not None:
        return "its left operand is constant; exchange the operands."
    return None


def _first_row_only(graph: Graph, op: Op) -> str | None:
    """Finds silent bug A: only the first row of such a constant is used."""
    if op.name not in ("ADD", "SUB", "MUL", "MAXIMUM") or graph.out(op).dtype != "FLOAT32":
        return None
    rank = len(graph.out(op).shape)
    if rank not in (2, 3):
        return None
    for tensor in graph.ins(op):
        shape = tensor.shape
        if tensor.constant is not None and len(shape) == rank and shape[0] > 1:
            return f"GPUs read the first row only of a constant {list(shape)}; lead with ones."
    return None


def _flattened_product(graph: Graph, op: Op) -> str | None:
    """Finds silent bug B: all rows except the first are wrong."""
    if op.name != "FULLY_CONNECTED":
        return None
    rows, weights, out = graph.ins(op)[0], graph.ins(op)[1], graph.out(op)
    if weights.dtype != "INT8" or len(rows.shape) == len(out.shape):
        return None
    if int(np.prod(out.shape[:-1])) > 1:
        return "GPUs compute the first row only of an int8 product that flattens; keep the axes."
    return None


def _output_that_is_read(graph: Graph, op: Op) -> str | None:
    """Finds silent bug C: such an output is never written."""
    if op.name not in ("ADD", "MUL") or op.outputs[0] not in graph.outputs:
        return None
    if all(tensor.constant is None for tensor in graph.ins(op)):
        return None
    if any(reader.name == "FULLY_CONNECTED" for reader in graph.readers(op.outputs[0])):
        return "GPUs do not write an output that also feeds a product; output a reshape of it."
    return None


def _repeated_operand(graph: Graph, op: Op) -> str | None:
    """Finds silent bug E: one operand for a whole batch; only the first product is right."""
    if op.name != "BATCH_MATMUL":
        return None
    left, right = (tensor.shape[:-2] for tensor in graph.ins(op))
    if int(np.prod(left)) != int(np.prod(right)):
        return (
            f"GPUs compute the first product only where one operand serves a batch, {list(left)} "
            f"and {list(right)}; lay the batch side by side."
        )
    return None


def _zero_tail(graph: Graph, op: Op) -> str | None:
    """Finds silent bug D: zeros behind a narrowed last axis become what was cut off."""
    if op.name in ("PAD", "PADV2"):
        inner = op.inputs[0]
    elif op.name == "CONCATENATION" and len(op.inputs) == 2:
        inner, tail = op.inputs
        zeros = graph.tensors[tail].constant
        if zeros is None or not zeros.size or zeros.any():
            return None
    else:
        return None
    shape, out = graph.tensors[inner].shape, graph.out(op).shape
    if not shape or shape[-1] == out[-1]:
        return None
    maker: Op | None = graph.maker(inner)
    while maker is not None and maker.name in _ELEMENTWISE:
        maker = next((m for m in map(graph.maker, maker.inputs) if m is not None), None)
    if maker is None or maker.name != "SLICE":
        return None
    source, cut = graph.ins(maker)[0].shape, graph.out(maker).shape
    if cut[-1] < source[-1] and cut[-1] % 4:
        return "browsers fill the zeros behind a narrowed last axis with what was cut off."
    return None


_RULES: tuple[Callable[[Graph, Op], str | None], ...] = (
    _refused,
    _too_many_axes,
    _not_static,
    _one_hot_of_others,
    _integer_factor,
    _repeated_integers,
    _constant_where,
    _constant_on_the_left,
    _first_row_only,
    _flattened_product,
    _output_that_is_read,
    _repeated_operand,
    _zero_tail,
)
