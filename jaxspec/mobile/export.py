"""From a model to a `.tflite`: one file, all signatures, shared weights, and its manifest."""

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import replacing_files
from jaxspec.core.tree import Path as RankPath
from jaxspec.core.types import ChecksFit, Drafter, Params
from jaxspec.denoising import DEFAULT_BLOCK, block_asked
from jaxspec.drafters import Deer, Eagle, LayerSkip, LoadedDrafter, NoDraft, PromptLookup
from jaxspec.generation import check_vocabulary
from jaxspec.mobile.convert import Lowered, lower, to_flatbuffer
from jaxspec.mobile.denoise import Canvases, denoise_signatures
from jaxspec.mobile.denoise import prefill_signature as read_blocks_signature
from jaxspec.mobile.manifest import KEY, Manifest, describe, fingerprint, seal
from jaxspec.mobile.memory import estimate_phone_memory
from jaxspec.mobile.opset import require_opset
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.records import Signature, Target
from jaxspec.mobile.signatures import (
    BlockDrafting,
    EagleStep,
    LayerSkipStep,
    commit_signature,
    decode_signature,
    prefill_signature,
    verify_signature,
)
from jaxspec.mobile.weights import Leaf, fill_in
from jaxspec.models import Diffusion, ModelConfig

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
            weights once for each: of blocks the largest window alone, and `verify_N` only for
            trees that the host makes.
        verify: sizes of further `verify_N` and `commit_N`, for hosts that draft themselves.
        levels: sizes of `draft_N`, and `absorb`, for hosts that grow trees with an EAGLE head.
        quantization: of weights, one of `QUANTIZATIONS`.
        drafts: of diffusion language models: a `round_N` for each number of drafts; `None`: 4.
        block_length: of diffusion language models that see both sides: slots that are filled in
            before more; `None`: 32. Others have their own.
        check_gpu_ops: refuse a file that a phone's GPU would refuse or compute wrongly.
        trees: with an EAGLE head, a `step_N` for each of these in place of one `step`, numbered
            from 1. They take each other's state, so that a host may change trees within a text.
    """

    slots: int = 1024
    prefill: tuple[int, ...] = (64,)
    bundle: str = "cpu"
    verify: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    quantization: str = "int8"
    drafts: tuple[int, ...] | None = None
    block_length: int | None = None
    check_gpu_ops: bool = True
    trees: tuple[tuple[RankPath, ...], ...] = ()

    def __post_init__(self):
        for count in self.drafts or ():
            if count < 1:
                raise ValueError(f"drafts: numbers must be at least 1, got {count}.")
        if self.block_length is not None and not 1 <= self.block_length <= self.slots:
            raise ValueError(
                f"block_length must be in 1..{self.slots} (slots), got {self.block_length}."
            )
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

    The converter sees shapes only; weights are quantised one at a time on their way into the file.

    Args:
        model: the target.
        folder: made if it is not there; what else it holds stays.
        drafter: what `step` drafts with: an `Eagle` head over its static tree, or a `LayerSkip`
            with its set baked in. A `Deer` that is causal over blocks gets `draft_block_N`, which
            the host calls before `verify_N`, and over a chain or a static tree `step_block_N`,
            whole greedy steps. `PromptLookup` runs on the host: it gets a
            `verify_N` that fits. `None`: plain decoding only.
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
    check_model(network.config, config.slots)
    loaded = (
        drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter or NoDraft(), ())
    )
    num_tokens = network.vocab_size
    if model.tokenizer is not None:
        num_tokens = min(num_tokens, model.tokenizer.vocab_size)
    target = Target(network.config, config.slots, num_tokens)
    canvases = None
    if network.config.diffusion is None:
        if config.drafts is not None or config.block_length is not None:
            raise ValueError(
                f"drafts, block_length: for diffusion language models, {model.name} is causal."
            )
        signatures, paths = _signatures(target, loaded, config)
    else:
        canvases = canvases_of(target, network.config.diffusion, loaded.drafter, config)
        signatures, paths = _diffusion_signatures(canvases, config), ()
    check_vocabulary(model, loaded)
    params = Params(network, loaded.params)
    for drafting in _drafters(loaded.drafter, config):
        if isinstance(drafting, ChecksFit):
            drafting.check_fit(params)
    lowered = lower_all(signatures, params, config.quantization)
    manifest = Manifest(
        version=metadata.version("jaxspec"),
        model=model.name,
        quantization=config.quantization,
        slots=config.slots,
        num_tokens=num_tokens,
        stop_token_ids=tuple(model.stop_token_ids),
        tokenizer=fingerprint(model.tokenizer),
        drafter=_described(loaded),
        paths=paths,
        signatures=describe(lowered),
        generation_defaults=dict(model.generation_defaults),
        diffusion=None if canvases is None else canvases.as_dict(),
        trees={f"step_{number}": tree for number, tree in enumerate(config.trees, start=1)},
    )
    flatbuffer = to_tflite(lowered, params, config.quantization, {KEY: manifest.to_json()})
    if config.check_gpu_ops:
        require_opset(flatbuffer)
    manifest = seal(flatbuffer, manifest)
    with replacing_files(Path(folder)) as staging:
        (staging / MODEL_FILE).write_bytes(flatbuffer)
        (staging / MANIFEST_FILE).write_text(manifest.to_json() + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.write(staging)
    return manifest


def check_model(config: ModelConfig, slots: int) -> None:
    """Refuses models that no file can hold as they are meant to be used.

    Raises:
        ValueError: saying why.
    """
    if slots > config.max_positions:
        raise ValueError(
            f"slots must be at most the model's {config.max_positions} positions, got {slots}."
        )
    if config.experts is not None:
        raise ValueError(
            "model: mixtures of experts cannot be exported: which weights a token reads is not "
            "fixed, as a file's operations are."
        )


def canvases_of(
    target: Target, diffusion: Diffusion, drafter: Any, config: ExportConfig
) -> Canvases:
    """How a diffusion language model is exported.

    Raises:
        ValueError: a setting is for causal models, or does not fit this one.
    """
    if not isinstance(drafter, NoDraft):
        raise ValueError(
            f"drafter: a diffusion language model drafts its own decisions, so leave "
            f"{type(drafter).__name__} out and set drafts."
        )
    given = [name for name in ("verify", "levels") if getattr(config, name)]
    if given:
        raise ValueError(f"{', '.join(given)}: for causal models, and this one fills in masks.")
    block = block_asked(diffusion.block, config.block_length) or DEFAULT_BLOCK
    for size in config.prefill if diffusion.block is not None else ():
        if size % block:
            raise ValueError(
                f"prefill: sizes must be multiples of the network's block ({block}), got {size}."
            )
    if config.slots < 2 * block:
        raise ValueError(f"slots must be at least two blocks ({2 * block}), got {config.slots}.")
    for count in config.drafts or ():
        if count >= 2 * block:
            raise ValueError(
                f"drafts: a round decides within two blocks ({2 * block} slots), got {count}."
            )
    return Canvases(target, diffusion, block)


def _diffusion_signatures(canvases: Canvases, config: ExportConfig) -> Mapping[str, Signature]:
    prefill = {}
    if canvases.is_causal:
        prefill = {f"prefill_{n}": read_blocks_signature(canvases, n) for n in config.prefill}
    drafts = (4,) if config.drafts is None else config.drafts
    return prefill | denoise_signatures(canvases, drafts)


def lower_all(
    signatures: Mapping[str, Signature], params: Params, quantization: str
) -> dict[str, Lowered]:
    """Lowers functions for weights of these shapes.

    Raises:
        ValueError: so many weights, in this quantization, are more than one file holds.
    """
    shapes = jax.tree.map(_shape_in_file, params)
    _check_size(params, quantization)
    return {name: lower(shapes, signature) for name, signature in signatures.items()}


def to_tflite(
    lowered: Mapping[str, Lowered],
    params: Params,
    quantization: str,
    texts: Mapping[str, str],
) -> bytearray:
    """One file of functions that `lower_all` lowered, with the weights they read and some texts."""
    return fill_in(to_flatbuffer(lowered, texts), _leaves(params), quantization)


def _signatures(
    target: Target, loaded: LoadedDrafter, config: ExportConfig
) -> tuple[Mapping[str, Signature], tuple[tuple[int, ...], ...]]:
    """All functions of a file by name, and the tree of its `step`."""
    drafter, verify, step, paths = loaded.drafter, set(config.verify), None, ()
    blocks = None
    match drafter:
        case NoDraft():
            pass
        case Eagle():
            trees = _drafters(drafter, config)
            levels = 1 + max(tree.tree_shape[1] for tree in trees)
            step, paths = EagleStep(trees[0], loaded.params, levels), drafter.paths
        case LayerSkip():
            step = LayerSkipStep(drafter)
            paths = tuple((0,) * depth for depth in range(1, step.levels))
        case PromptLookup():
            verify.add(drafter.tree_shape[0])
        case Deer():
            blocks = BlockDrafting(drafter, loaded.params)
            if blocks.tree is None or config.bundle == "cpu":
                verify.add(drafter.tree_shape[0])
        case _:
            raise ValueError(
                f"drafter: {type(drafter).__name__} cannot be exported; Eagle, LayerSkip, Deer and "
                "PromptLookup can. A draft model is exported as a model of its own."
            )
    if step is not None and step.levels >= target.slots:
        raise ValueError(
            f"slots: a tree of depth {step.levels - 1} needs more than {target.slots} slots."
        )
    drafting = step if isinstance(step, EagleStep) else None
    if config.levels and drafting is None:
        raise ValueError("levels: only an EAGLE head drafts level by level; leave it out.")
    if config.trees and drafting is None:
        raise ValueError("trees: only an EAGLE head drafts over several; leave it out.")
    if config.trees:
        paths = ()
    elif step is not None and config.bundle == "cpu":
        verify.add(1 + len(paths))
    sizes = sorted(verify)
    functions = {
        **{f"prefill_{n}": prefill_signature(target, n, drafting) for n in config.prefill},
        "decode": decode_signature(target),
        **{f"verify_{n}": verify_signature(target, n, drafting) for n in sizes},
        **{f"commit_{n}": commit_signature(target, n, drafting) for n in sizes},
    }
    if blocks is not None:
        # A GPU holds the weights once for each; the largest does for every step.
        windows = blocks.sizes if config.bundle == "cpu" else blocks.sizes[-1:]
        functions |= {f"draft_block_{n}": blocks.signature(target, n) for n in windows}
        if blocks.tree is not None:
            functions |= {f"step_block_{n}": blocks.step_signature(target, n) for n in windows}
    if config.trees and drafting is not None:
        for number, tree in enumerate(_drafters(drafter, config), start=1):
            each = EagleStep(tree, loaded.params, drafting.levels)
            functions[f"step_{number}"] = each.reporting_signature(target)
    elif step is not None:
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


def _drafters(drafter: Any, config: ExportConfig) -> list[Any]:
    """A drafter over each of several trees, or as it is."""
    return [dataclasses.replace(drafter, paths=tree) for tree in config.trees] or [drafter]


def _shape_in_file(leaf: Any) -> jax.ShapeDtypeStruct:
    """Of a weight: integers stay what they are, all else is float32 to the graph."""
    whole = jnp.issubdtype(leaf.dtype, jnp.integer)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if whole else jnp.float32)


def _leaves(params: Params) -> list[Leaf]:
    """All weights, each made when it is asked for."""

    def leaf(path: Any, array: Any) -> Leaf:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return Leaf(name, lambda: np.asarray(array).astype(_shape_in_file(array).dtype, copy=False))

    return [leaf(path, array) for path, array in jax.tree_util.tree_leaves_with_path(params)]


def _check_size(params: Params, quantization: str) -> None:
    config = params.target.config
    stored = estimate_phone_memory(config, quantization, 0, params.draft)
    size = stored.products + stored.table
    if config.tied_head and quantization == "float32":
        size -= stored.table  # look-ups and products read the same bytes
    if size > _LARGEST:
        raise ValueError(
            f"model: its weights take {size / 2**30:.1f} GiB as {quantization}, and a .tflite "
            "holds less than 2 GiB; take fewer bits, or a smaller model."
        )


def _described(loaded: LoadedDrafter) -> dict[str, Any] | None:
    drafter: Any = loaded.drafter
    if isinstance(drafter, NoDraft):
        return None
    described = {"name": type(drafter).__name__, **dataclasses.asdict(drafter)}
    if isinstance(drafter, Deer):
        described["diffusion"] = dataclasses.asdict(loaded.params.config.diffusion)
    return described
