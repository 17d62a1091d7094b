"""Settings of an export, and the functions that a file gets by them."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from jaxspec.checkpoint import Model
from jaxspec.core.checks import Checked, Count, at_least, at_most
from jaxspec.core.tree import Path as RankPath
from jaxspec.core.tree import chain_paths
from jaxspec.decoding.denoise import DEFAULT_BLOCK, block_asked
from jaxspec.drafters import (
    Deer,
    DFlash,
    DrafterLike,
    DraftModel,
    Eagle,
    LayerSkip,
    LoadedDrafter,
    NoDraft,
    PromptLookup,
    TokenRecycling,
    loaded_drafter,
)
from jaxspec.mobile.quantize import QUANTIZATIONS, check_quantization
from jaxspec.mobile.records import Signature, Target
from jaxspec.mobile.signatures.blocks import BlockDrafting
from jaxspec.mobile.signatures.dflash import DFlashStep
from jaxspec.mobile.signatures.diffusion import (
    Canvases,
    denoise_signatures,
    prefill_blocks_signature,
)
from jaxspec.mobile.signatures.draft_model import DraftModelStep
from jaxspec.mobile.signatures.eagle import EagleStep
from jaxspec.mobile.signatures.layer_skip import LayerSkipStep
from jaxspec.mobile.signatures.lookup import LookupStep
from jaxspec.mobile.signatures.recycling import RecyclingStep
from jaxspec.mobile.signatures.steps import accept_signature
from jaxspec.mobile.signatures.target import (
    commit_signature,
    decode_signature,
    prefill_signature,
    verify_signature,
)
from jaxspec.models import Diffusion, ModelConfig
from jaxspec.models.storage import widened
from jaxspec.tuning.measuring import with_tree
from jaxspec.tuning.skip_costs import partial_sets

BUNDLES = ("cpu", "gpu")
_DRAFTS = (4,)
# Metadata for the command line, as `jaxspec.commands.flags` reads it.
_QUANTIZE = {"flag": "--quantize", "choices": tuple(QUANTIZATIONS)}
_CALIBRATION = {"metavar": "FILE.jsonl"}
_ANY_OPS = {
    "flag": "--any-ops",
    "action": "store_false",
    "help": "write the file even if a phone's GPU would refuse it or compute it wrongly",
}


@dataclasses.dataclass(frozen=True)
class ExportConfig(Checked):
    """Functions of a file, and their fixed shapes.

    Attributes:
        capacity: tokens that the caches hold; also the longest text.
        prefill: N of each `prefill_N`, the tokens of a prompt that are read at a time.
        bundle: "cpu": with a drafter also `draft`, `verify_N`, `commit_N` and `step_sampled`, for
            hosts that sample or draft themselves, and what ends drafts early. "gpu": few functions,
            as a GPU holds the weights once for each: only the largest window of blocks, and
            `verify_N` only for trees that the host makes.
        verify: N of further `verify_N` and `commit_N`, for hosts that draft themselves; where
            drafts end early, also of `accept_N`.
        levels: N of `draft_N`, next to `absorb`, for hosts that grow trees with an EAGLE head.
        quantization: format of weights, one of `QUANTIZATIONS`.
        drafts: N of each `round_N` of a diffusion language model; `None`: 4.
        block_length: of diffusion language models that see both sides: tokens that are filled in
            before more; `None`: 32. Others have their own.
        check_gpu_ops: refuse a file that a phone's GPU would refuse or compute wrongly.
        trees: with an EAGLE head, a `step_N` for each of these in place of one `step`, numbered
            from 1. They share their state, so a host may change trees within a text.
        partial: without a drafter: the model drafts that many tokens with all its sub-layers
            (`partial_whole`) and without some; latency kits time these functions. `None`: none.
        calibration: file of prompts, never of the evaluation, that the model continues; calibrated
            weights are rounded for these texts. `None`: it writes texts without a prompt.

    Raises:
        ValueError: naming the setting that is out of range.

    Example:
        >>> ExportConfig(capacity=512, prefill=(16, 64), bundle="gpu").quantization
        'int8'
    """

    capacity: Annotated[int, at_least(2), at_most(2**24)] = 1024
    prefill: tuple[Count, ...] = (64,)
    bundle: str = dataclasses.field(default="cpu", metadata={"choices": BUNDLES})
    verify: tuple[Count, ...] = ()
    levels: tuple[Count, ...] = ()
    quantization: str = dataclasses.field(default="int8", metadata=_QUANTIZE)
    drafts: tuple[Count, ...] | None = None
    block_length: Count | None = None
    check_gpu_ops: bool = dataclasses.field(default=True, metadata=_ANY_OPS)
    trees: tuple[tuple[RankPath, ...], ...] = ()
    partial: Count | None = None
    calibration: str | None = dataclasses.field(default=None, metadata=_CALIBRATION)

    def __post_init__(self):
        super().__post_init__()
        if self.block_length is not None and self.block_length > self.capacity:
            raise ValueError(
                f"block_length must be in 1..{self.capacity} (the capacity), got "
                f"{self.block_length}."
            )
        if not self.prefill:
            raise ValueError("prefill must name at least one size: a prompt has to be read.")
        check_quantization(self.quantization, on_gpu=self.bundle == "gpu")
        weights = QUANTIZATIONS[self.quantization]
        if self.calibration is not None and not (weights and weights.calibrated):
            raise ValueError(
                f"calibration: {self.quantization} reads no texts; take int4-calibrated, or leave "
                "it out."
            )
        for name in ("prefill", "verify", "levels"):
            for size in getattr(self, name):
                if size > self.capacity:
                    raise ValueError(
                        f"{name}: sizes must be in 1..{self.capacity} (the capacity), got {size}."
                    )


class Contents(NamedTuple):
    """Functions of a file.

    Attributes:
        signatures: by name.
        num_tokens: ids that may be emitted.
        paths: rank paths of the tree of `step`, the root left out.
        canvases: of a diffusion language model; `None`: the model is causal.
    """

    signatures: Mapping[str, Signature]
    num_tokens: int
    paths: tuple[tuple[int, ...], ...] = ()
    canvases: Canvases | None = None


def in_one_dtype(model: Model, drafter: DrafterLike | None = None) -> tuple[Model, LoadedDrafter]:
    """Returns a model and a drafter whose matrices are of their dtype, as signatures read them."""
    loaded = loaded_drafter(drafter)
    model = dataclasses.replace(model, network=widened(model.known_network))
    return model, loaded._replace(params=widened(loaded.params))


def contents_of(model: Model, loaded: LoadedDrafter, config: ExportConfig) -> Contents:
    """Chooses the functions of a file.

    Args:
        model: the target.
        loaded: the drafter; `NoDraft()` for plain decoding only.
        config: settings of the file.

    Raises:
        ValueError: a setting does not fit the model, or the drafter cannot be exported.
    """
    network = model.network
    check_model(network.config, config.capacity)
    num_tokens = network.vocab_size
    if model.tokenizer is not None:
        num_tokens = min(num_tokens, model.tokenizer.vocab_size)
    target = Target(network.config, config.capacity, num_tokens, config.capacity)
    if network.config.diffusion is not None:
        canvases = _canvases(target, network.config.diffusion, loaded.drafter, config)
        return Contents(_diffusion_signatures(canvases, config), num_tokens, (), canvases)
    if config.drafts is not None or config.block_length is not None:
        raise ValueError(
            f"drafts, block_length: for diffusion language models, and {model.name} is causal."
        )
    signatures, paths = _signatures(target, loaded, config, tuple(model.stop_token_ids))
    return Contents(signatures, num_tokens, paths)


def check_model(config: ModelConfig, capacity: int) -> None:
    """Refuses models that no file can hold as they are meant to be used.

    Raises:
        ValueError: the reason.
    """
    if capacity > config.max_positions:
        raise ValueError(
            f"capacity must be at most the model's {config.max_positions} positions, got "
            f"{capacity}."
        )
    if config.experts is not None:
        raise ValueError(
            "model: mixtures of experts cannot be exported: each token chooses its experts, and a "
            "file cannot choose weights while it runs."
        )


def drafters_over_trees(drafter: Any, config: ExportConfig) -> list[Any]:
    """Returns a drafter over each of several trees, or as it is."""
    loaded = LoadedDrafter(drafter, ())
    return [with_tree(loaded, tree).drafter for tree in config.trees] or [drafter]


def _canvases(target: Target, diffusion: Diffusion, drafter: Any, config: ExportConfig) -> Canvases:
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
    if config.capacity < 2 * block:
        raise ValueError(
            f"capacity must be at least two blocks ({2 * block}), got {config.capacity}."
        )
    for count in config.drafts or ():
        if count >= 2 * block:
            raise ValueError(
                f"drafts: a round decides within two blocks ({2 * block} tokens), got {count}."
            )
    return Canvases(target, diffusion, block)


def _diffusion_signatures(canvases: Canvases, config: ExportConfig) -> Mapping[str, Signature]:
    prefill = {}
    if canvases.is_causal:
        prefill = {f"prefill_{n}": prefill_blocks_signature(canvases, n) for n in config.prefill}
    drafts = _DRAFTS if config.drafts is None else config.drafts
    return prefill | denoise_signatures(canvases, drafts)


def _signatures(
    target: Target,
    loaded: LoadedDrafter,
    config: ExportConfig,
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[Mapping[str, Signature], tuple[tuple[int, ...], ...]]:
    """Returns all functions of a causal model's file by name, and the tree of its `step`."""
    drafter, verify, step, paths = loaded.drafter, set(config.verify), None, ()
    blocks, behind = None, 0
    match drafter:
        case NoDraft():
            pass
        case Eagle():
            trees = drafters_over_trees(drafter, config)
            levels = 1 + max(tree.tree_shape[1] for tree in trees)
            step, paths = EagleStep(trees[0], loaded.params, levels), drafter.paths
        case DFlash():
            step = DFlashStep(drafter, loaded.params)
            paths = drafter.paths or chain_paths(step.levels - 1)
            behind = drafter.block + 1
        case LayerSkip():
            step = LayerSkipStep(drafter)
            paths = chain_paths(step.levels - 1)
        case DraftModel():
            step = DraftModelStep(drafter, loaded.params)
            paths = drafter.paths or chain_paths(step.levels - 1)
        case TokenRecycling():
            step, paths = RecyclingStep(drafter), drafter.paths
        case PromptLookup():
            step = LookupStep(drafter, stop_token_ids)
            paths = chain_paths(step.levels - 1)
            if config.bundle == "cpu":
                verify.add(step.levels)
        case Deer():
            blocks = BlockDrafting(drafter, loaded.params)
            behind = blocks.sizes[-1]
            if blocks.tree is None or config.bundle == "cpu":
                verify.update(drafter.widths)
        case _:
            raise ValueError(
                f"drafter: {type(drafter).__name__} cannot be exported; Eagle, DraftModel, "
                "LayerSkip, Deer, DFlash, TokenRecycling and PromptLookup can."
            )
    target = target._replace(num_positions=target.capacity + behind)
    if step is not None and step.levels >= target.capacity:
        raise ValueError(
            f"capacity: a tree of depth {step.levels - 1} needs more than {target.capacity} tokens."
        )
    drafting = step if isinstance(step, EagleStep) else None
    carrying = step if isinstance(step, EagleStep | DFlashStep) else None
    filling = carrying or (step if isinstance(step, DraftModelStep | RecyclingStep) else None)
    for_host = carrying or (step if isinstance(step, DraftModelStep | LayerSkipStep) else None)
    if config.levels and drafting is None:
        raise ValueError("levels: only an EAGLE head drafts level by level; leave it out.")
    if config.trees and drafting is None:
        raise ValueError("trees: only an EAGLE head drafts over several; leave it out.")
    exits = step if isinstance(step, LayerSkipStep) and step.drafter.ends_early else None
    if config.partial is not None and not isinstance(drafter, NoDraft):
        raise ValueError("partial: only a file without a drafter has partial passes; leave it out.")
    if config.trees:
        paths = ()
    elif for_host is not None and config.bundle == "cpu":
        verify.update(drafter.widths if exits is not None else [1 + len(paths)])
    sizes = sorted(verify)
    functions = {
        **{f"prefill_{n}": prefill_signature(target, n, filling) for n in config.prefill},
        "decode": decode_signature(target),
        **{f"verify_{n}": verify_signature(target, n, carrying) for n in sizes},
        **{f"commit_{n}": commit_signature(target, n, carrying) for n in sizes},
    }
    if config.partial is not None:
        for name, skip in partial_sets(target.config.num_layers).items():
            each = LayerSkipStep(LayerSkip(skip, config.partial, adaptive=None))
            functions[f"partial_{name}"] = each.draft_signature(target)
    if blocks is not None:
        # A GPU holds the weights once for each; the largest serves every step.
        windows = blocks.sizes if config.bundle == "cpu" else blocks.sizes[-1:]
        functions |= {f"draft_block_{n}": blocks.signature(target, n) for n in windows}
        if blocks.tree is not None:
            functions |= {f"step_block_{n}": blocks.step_signature(target, n) for n in windows}
        if blocks.tree is not None and config.bundle == "cpu":
            functions |= {
                f"step_block_sampled_{n}": blocks.sampled_step_signature(target, n) for n in windows
            }
    if config.trees and drafting is not None:
        for number, tree in enumerate(drafters_over_trees(drafter, config), start=1):
            each = EagleStep(tree, loaded.params, drafting.levels)
            functions[f"step_{number}"] = each.signature(target, report=True)
    elif step is not None:
        functions["step"] = step.signature(target)
        if config.bundle == "cpu":
            functions["step_sampled"] = step.sampled_signature(target)
            if exits is not None:
                functions["step_exit"] = exits.exit_signature(target)
                functions["draft_1"] = exits.draft_one_signature(target)
                functions |= {f"accept_{n}": accept_signature(target, n) for n in sizes if n > 1}
            elif for_host is not None:
                functions["draft"] = for_host.draft_signature(target)
    if drafting is not None and config.levels:
        functions["absorb"] = drafting.absorb_signature(target)
        for size in config.levels:
            scratch = size * max(1, drafting.levels - 2)
            functions[f"draft_{size}"] = drafting.level_signature(target, size, scratch)
    return functions, paths
