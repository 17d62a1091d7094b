"""From a model to a `.tflite`: one file, all signatures, shared weights, and its manifest."""

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files
from jaxspec.core.types import Drafter, Params, PyTree
from jaxspec.drafters import Eagle, LayerSkip, LoadedDrafter, NoDraft, PromptLookup
from jaxspec.mobile.convert import lower, to_flatbuffer
from jaxspec.mobile.manifest import KEY, Manifest, describe, fingerprint, seal
from jaxspec.mobile.opset import require_opset
from jaxspec.mobile.quantize import check_quantization, quantize
from jaxspec.mobile.signatures import (
    EagleStep,
    LayerSkipStep,
    Signature,
    Target,
    commit_signature,
    decode_signature,
    prefill_signature,
    verify_signature,
)

BUNDLES = ("cpu", "gpu")
MODEL_FILE, MANIFEST_FILE = "model.tflite", "manifest.json"
_LARGEST = (1 << 31) - 1  # offsets in a flatbuffer are 31 bits


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Which functions a file gets, and their fixed shapes.

    Attributes:
        slots: of the caches, which is the longest text in tokens.
        prefill: how many tokens of a prompt are read at a time, for each signature of that kind.
        bundle: "cpu": with a drafter also `draft`, `verify_N`, `commit_N` and `step_sampled`, for
            hosts that sample or choose what to verify. "gpu": few functions, as a GPU holds the
            weights once for each.
        verify: sizes of further `verify_N` and `commit_N`, for hosts that draft themselves.
        levels: sizes of `draft_N`, and `absorb`, for hosts that grow trees with an EAGLE head.
        quantization: of weights, one of `QUANTIZATIONS`.
        check_gpu_ops: refuse a file that a phone's GPU would refuse or compute wrongly.
    """

    slots: int = 1024
    prefill: tuple[int, ...] = (64,)
    bundle: str = "cpu"
    verify: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    quantization: str = "int8"
    check_gpu_ops: bool = True

    def __post_init__(self):
        if self.slots < 2:
            raise ValueError(f"slots must be at least 2, got {self.slots}.")
        if not self.prefill:
            raise ValueError("prefill must name at least one size: a prompt has to be read.")
        if self.bundle not in BUNDLES:
            raise ValueError(f"bundle must be one of {', '.join(BUNDLES)}, got {self.bundle!r}.")
        check_quantization(self.quantization, on_gpu=self.bundle == "gpu")
        for name in ("prefill", "verify", "levels"):
            for size in getattr(self, name):
                if not 1 <= size <= self.slots:
                    raise ValueError(
                        f"{name}: sizes must be in 1..{self.slots} (slots), got {size}."
                    )


def export(
    model: Model,
    folder: str | Path,
    drafter: Drafter | LoadedDrafter | None = None,
    config: ExportConfig | None = None,
) -> Manifest:
    """Writes `model.tflite`, `manifest.json` and the tokenizer into a folder.

    Conversion is of float32 weights, which must stay below 2 GiB; quantising follows it.

    Args:
        model: the target; its weights are written as float32.
        folder: made if it is not there; what else it holds stays.
        drafter: what `step` drafts with: an `Eagle` head over its static tree, or a `LayerSkip`
            with its set baked in. `PromptLookup` runs on the host: it gets a `verify_N` that fits.
            `None`: plain decoding only.
        config: functions, shapes and quantization; 1024 tokens of text and int8 by default.

    Returns:
        The manifest.

    Raises:
        ValueError: the extra `mobile` is not installed, a setting does not fit the model, the
            drafter cannot be exported, or the file would exceed 2 GiB.
        OpsetError: the model does what a phone's GPU cannot.
    """
    config = config or ExportConfig()
    network = model.network
    if config.slots > network.config.max_positions:
        raise ValueError(
            f"slots must be at most the model's {network.config.max_positions} positions, "
            f"got {config.slots}."
        )
    loaded = (
        drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter or NoDraft(), ())
    )
    num_tokens = network.vocab_size
    if model.tokenizer is not None:
        num_tokens = min(num_tokens, model.tokenizer.vocab_size)
    target = Target(network.config, config.slots, num_tokens)
    signatures, paths = _signatures(target, loaded, config)
    params = Params(network, loaded.params)
    weights = jax.tree.map(_as_float32, params)
    _check_size(weights)
    lowered = {name: lower(weights, signature) for name, signature in signatures.items()}
    manifest = Manifest(
        version=metadata.version("jaxspec"),
        model=model.name,
        quantization=config.quantization,
        slots=config.slots,
        num_tokens=num_tokens,
        stop_token_ids=tuple(model.stop_token_ids),
        tokenizer=fingerprint(model.tokenizer),
        drafter=_described(loaded.drafter),
        paths=paths,
        signatures=describe(lowered),
    )
    flatbuffer = to_flatbuffer(weights, lowered, {KEY: manifest.to_json()})
    flatbuffer = quantize(flatbuffer, config.quantization)
    if config.check_gpu_ops:
        require_opset(flatbuffer)
    flatbuffer, manifest = seal(flatbuffer, manifest)
    with replacing_files(Path(folder)) as staging:
        (staging / MODEL_FILE).write_bytes(flatbuffer)
        (staging / MANIFEST_FILE).write_text(manifest.to_json() + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.write(staging)
    return manifest


def _signatures(
    target: Target, loaded: LoadedDrafter, config: ExportConfig
) -> tuple[Mapping[str, Signature], tuple[tuple[int, ...], ...]]:
    """All functions of a file by name, and the tree of its `step`."""
    drafter, verify, step, paths = loaded.drafter, set(config.verify), None, ()
    match drafter:
        case NoDraft():
            pass
        case Eagle():
            step, paths = EagleStep(drafter, loaded.params), drafter.paths
        case LayerSkip():
            step = LayerSkipStep(drafter)
            paths = tuple((0,) * depth for depth in range(1, step.levels))
        case PromptLookup():
            verify.add(drafter.tree_shape[0])
        case _:
            raise ValueError(
                f"drafter: {type(drafter).__name__} cannot be exported; Eagle, LayerSkip and "
                "PromptLookup can. A draft model is exported as a model of its own."
            )
    if step is not None and step.levels >= target.slots:
        raise ValueError(
            f"slots: a tree of depth {step.levels - 1} needs more than {target.slots} slots."
        )
    drafting = step if isinstance(step, EagleStep) else None
    if config.levels and drafting is None:
        raise ValueError("levels: only an EAGLE head drafts level by level; leave it out.")
    if step is not None and config.bundle == "cpu":
        verify.add(1 + len(paths))
    sizes = sorted(verify)
    functions = {
        **{f"prefill_{n}": prefill_signature(target, n, drafting) for n in config.prefill},
        "decode": decode_signature(target),
        **{f"verify_{n}": verify_signature(target, n, drafting) for n in sizes},
        **{f"commit_{n}": commit_signature(target, n, drafting) for n in sizes},
    }
    if step is not None:
        functions["step"] = step.signature(target)
        if config.bundle == "cpu":
            functions["step_sampled"] = step.sampled_signature(target)
            functions["draft"] = step.draft_signature(target)
    if drafting is not None and config.levels:
        functions["absorb"] = drafting.absorb_signature(target)
        for size in config.levels:
            slots = size * max(1, drafting.levels - 2)
            functions[f"draft_{size}"] = drafting.level_signature(target, size, slots)
    return functions, paths


def _as_float32(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float32)


def _check_size(weights: PyTree) -> None:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    if size > _LARGEST:
        raise ValueError(
            f"model: its weights take {size / 2**30:.1f} GiB as float32, and a .tflite holds less "
            "than 2 GiB."
        )


def _described(drafter: Any) -> dict[str, Any] | None:
    if isinstance(drafter, NoDraft):
        return None
    return {"name": type(drafter).__name__, **dataclasses.asdict(drafter)}
