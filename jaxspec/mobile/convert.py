"""StableHLO to `.tflite`. The one module that knows the converter, as its interface may change."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export as jax_export

from jaxspec.core.types import PyTree
from jaxspec.mobile.extra import needs_extra
from jaxspec.mobile.signatures import Signature

# Debug information stays: the scopes of JAX become the names of tensors.
_PREPARE = (
    "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts,"
    "func.func(stablehlo-legalize-composite-to-call),inline)"
)


class Lowered(NamedTuple):
    """A signature as StableHLO. Its first arguments are the weights."""

    program: bytes
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]


def lower(weights: PyTree, signature: Signature) -> Lowered:
    """Traces a signature for weights of these shapes."""
    names = list(signature.inputs)
    record: dict[str, Any] = {}

    def flat(weights: PyTree, *inputs: jax.Array) -> list[jax.Array]:
        outputs = signature.function(weights, dict(zip(names, inputs, strict=True)))
        record.update(outputs)
        return list(outputs.values())

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    # Nothing unused may vanish, or inputs would be named after their neighbours.
    exported = jax_export.export(jax.jit(flat, keep_unused=True), platforms=("cpu",))(
        shapes, *signature.inputs.values()
    )
    outputs = {
        name: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for name, aval in zip(record, exported.out_avals, strict=True)
    }
    return Lowered(exported.mlir_module_serialized, signature.inputs, outputs)


def to_flatbuffer(
    weights: PyTree, signatures: Mapping[str, Lowered], metadata: Mapping[str, str]
) -> bytes:
    """One flatbuffer with all signatures, which share their weights.

    Args:
        weights: a pytree of arrays. They travel as arguments and become constants here: closed
            over, each signature would carry a copy of them through the converter.
        signatures: by name.
        metadata: texts to put into the file, by name.

    Raises:
        ValueError: the extra is not installed, or the converter refused the program: it names where
            the operation came from.
    """
    ir, passmanager, api = _converter()
    context = ir.Context()
    api.prepare_mlir_context(context)
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(weights)]
    constants: dict[int, Any] = {}
    modules = []
    for name, lowered in signatures.items():
        with context, ir.Location.unknown():
            module = ir.Module.parse(lowered.program)
            passmanager.PassManager.parse(_PREPARE).run(module.operation)
            _weights_to_constants(ir, module, leaves, constants)
        api.set_signature(
            module.operation,
            signature_name=name,
            input_names=list(lowered.inputs),
            output_names=list(lowered.outputs),
        )
        modules.append(module)
    with context:
        merged = api.merge_modules(modules)
        texts = {name: ir.StringAttr.get(text) for name, text in metadata.items()}
        merged.operation.attributes["tfl.metadata"] = ir.DictAttr.get(texts)
        config = api.ConvertToTFLConfig()
        config.enable_x64 = False
        config.unsafe_fuse_dynamic_shaped_broadcast = True
        config.canonicalizing_inf_as_min_max_float = True
        try:
            api.run_convert_to_tfl_passes(merged, passmanager.PassManager(), config)
            return api.export_flatbuffer_to_bytes(merged.operation)
        except Exception as error:  # of the bindings' own kinds; the text names operation and scope
            raise ValueError(f"The converter refused the program: {error}") from error


def _converter() -> tuple[Any, Any, Any]:
    """Its modules, which describe nothing of themselves to type checkers."""
    package = "litert_converter.mlir"
    with needs_extra("Exporting"):
        return (
            importlib.import_module(f"{package}.ir"),
            importlib.import_module(f"{package}.passmanager"),
            importlib.import_module(f"{package}._mlir_libs.converter_api_ext"),
        )


def _weights_to_constants(
    ir: Any, module: Any, leaves: Sequence[np.ndarray], constants: dict[int, Any]
) -> None:
    """Replaces the first arguments of `main` by constants that all modules of a context share."""
    (main,) = [op for op in module.body.operations if op.OPERATION_NAME == "func.func"]
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for index, leaf in enumerate(leaves):
            argument = block.arguments[index]
            if index not in constants:
                constants[index] = ir.DenseElementsAttr.get(leaf, type=argument.type)
            constant = ir.Operation.create(
                "arith.constant", results=[argument.type], attributes={"value": constants[index]}
            )
            argument.replace_all_uses_with(constant.result)
    for index in reversed(range(len(leaves))):
        block.erase_argument(index)
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(list(kind.inputs)[len(leaves) :], list(kind.results))
    )
    if "arg_attrs" in main.attributes:
        kept = list(ir.ArrayAttr(main.attributes["arg_attrs"]))[len(leaves) :]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)
