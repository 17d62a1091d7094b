"""Functions and weights into one `.tflite`: lowered for shapes, converted, filled with weights.

The only module that calls the converter.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from jaxspec.core.types import Params, PyTree
from jaxspec.extras import needs_extra
from jaxspec.mobile.records import Signature
from jaxspec.mobile.weights import PREFIX, Leaf, TfliteFile

# Debug information stays: the scopes of JAX become the names of tensors.
_PREPARE = (
    "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts,"
    "func.func(stablehlo-legalize-composite-to-call),inline)"
)

_CONVERTED = {"tfl", "func", "builtin", "arith", "quant"}


class Lowered(NamedTuple):
    """A signature as StableHLO; its first arguments are the weights.

    Attributes:
        program: serialized.
        num_weights: number of weights among the arguments.
        inputs: shape and dtype of the other arguments, by name.
        outputs: shape and dtype of the results, by name.
    """

    program: bytes
    num_weights: int
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, jax.ShapeDtypeStruct]


def lower(weights: PyTree, signature: Signature) -> Lowered:
    """Traces a signature for weights of these shapes and dtypes, given as shapes or as arrays."""
    names = list(signature.inputs)
    record: dict[str, Any] = {}

    def flat(weights: PyTree, *inputs: jax.Array) -> list[jax.Array]:
        outputs = signature.function(weights, dict(zip(names, inputs, strict=True)))
        record.update(outputs)
        return list(outputs.values())

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    # Unused inputs must stay, or the others would get the wrong names.
    exported = jax_export.export(jax.jit(flat, keep_unused=True), platforms=("cpu",))(
        shapes, *signature.inputs.values()
    )
    outputs = {
        name: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for name, aval in zip(record, exported.out_avals, strict=True)
    }
    num_weights = len(jax.tree.leaves(weights))
    return Lowered(exported.mlir_module_serialized, num_weights, signature.inputs, outputs)


def to_flatbuffer(signatures: Mapping[str, Lowered], metadata: Mapping[str, str]) -> bytes:
    """Makes one flatbuffer of all signatures, with weights as inputs; see `weights.TfliteFile`.

    Args:
        signatures: by name.
        metadata: texts to put into the file, by name.

    Raises:
        ValueError: the extra `mobile` is not installed, or the converter refused an operation,
            named with its JAX scope.
    """
    ir, passmanager, api = _converter()
    context = ir.Context()
    api.prepare_mlir_context(context)
    modules, merged = [], None
    try:
        for name, lowered in signatures.items():
            with context, ir.Location.unknown():
                module = ir.Module.parse(lowered.program)
                passmanager.PassManager.parse(_PREPARE).run(module.operation)
            weights = [f"{PREFIX}{place}" for place in range(lowered.num_weights)]
            api.set_signature(
                module.operation,
                signature_name=name,
                input_names=[*weights, *lowered.inputs],
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
            api.run_convert_to_tfl_passes(merged, passmanager.PassManager(), config)
            return api.export_flatbuffer_to_bytes(merged.operation)
    except Exception as error:  # the bindings raise classes of their module
        left = [] if merged is None else sorted(set(_not_converted(merged.operation)))
        details = str(error) + (f" It has nothing for {', '.join(left)}." if left else "")
        raise ValueError(f"The converter refused the program: {details}") from error


def _not_converted(operation: Any) -> Iterator[str]:
    """Yields operations that are still StableHLO, with the JAX scopes that they came from."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                name = inner.operation.name
                if name.partition(".")[0] not in _CONVERTED:
                    scope = re.search(r'"([^"]*)"', str(inner.location))
                    yield f"{name} at {scope.group(1) if scope else inner.location}"
                yield from _not_converted(inner.operation)


def _converter() -> tuple[Any, Any, Any]:
    """Imports the converter's modules, which have no types."""
    package = "litert_converter.mlir"
    with needs_extra("Exporting", "mobile"):
        return (
            importlib.import_module(f"{package}.ir"),
            importlib.import_module(f"{package}.passmanager"),
            importlib.import_module(f"{package}._mlir_libs.converter_api_ext"),
        )


def lower_all(signatures: Mapping[str, Signature], params: Params) -> dict[str, Lowered]:
    """Lowers functions for weights of these shapes."""
    shapes = jax.tree.map(_shape_in_file, params)
    return {name: lower(shapes, signature) for name, signature in signatures.items()}


def to_tflite(
    lowered: Mapping[str, Lowered],
    params: Params,
    quantization: str,
    texts: Mapping[str, str],
) -> TfliteFile:
    """Makes one file of functions of `lower_all`, the weights that they read, and some texts.

    Weights are read when the file is written.
    """
    return TfliteFile(to_flatbuffer(lowered, texts), _leaves(params), quantization)


def _shape_in_file(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a weight: integers keep their type, all others are float32."""
    whole = jnp.issubdtype(leaf.dtype, jnp.integer)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if whole else jnp.float32)


def _leaves(params: Params) -> list[Leaf]:
    """Lists all weights; each is made when it is asked for."""

    def leaf(path: Any, array: Any) -> Leaf:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = np.dtype(_shape_in_file(array).dtype)
        return Leaf(name, array.shape, dtype, lambda: np.asarray(array).astype(dtype, copy=False))

    return [leaf(path, array) for path, array in jax.tree_util.tree_leaves_with_path(params)]
