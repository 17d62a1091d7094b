"""DFlash heads from, and into, their published folders: config.json and model.safetensors.

The layers of a Qwen-3 without embedding and output head, `fc` and `hidden_norm` that make their
context, and in config.json the usual fields with `block_size`, `num_target_layers` and
`dflash_config`: `mask_token_id` and `target_layer_ids`, which name layers by what comes out.

DFlash 2 (z-lab) adds to `dflash_config` `conv_kernel_size` and `conv_group_size` of convolutions,
and `selector_rank` and `selector_top_k` of a path selector. DSpark (DeepSpec) has all of its
settings at the top: `markov_rank` of a Markov head, `enable_confidence_head` and
`confidence_head_with_markov`; every place of its blocks predicts. The speculators format nests the
layers' settings in `transformer_layer_config`, names layers by what goes in
(`aux_hidden_state_layer_ids`) and says in `sample_from_anchor` which places predict.

Files of DSpark hold the target's embedding and output head, frozen; they are not read.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.config import config_from_json, config_to_json
from jaxspec.checkpoint.entries import TARGET_DIGEST, read
from jaxspec.checkpoint.files import CheckpointError, given, read_json
from jaxspec.checkpoint.folder import CONFIG
from jaxspec.checkpoint.heads import check_target, load_head_params, network_of, write_head
from jaxspec.checkpoint.hub import Model, find_head
from jaxspec.checkpoint.names import dflash_rules
from jaxspec.checkpoint.safetensors import find_tensors
from jaxspec.core.checks import Count, Natural, shown
from jaxspec.models.config import ModelConfig
from jaxspec.models.dflash import (
    Convolution,
    DFlashHead,
    DFlashParts,
    dflash_taps,
    init_dflash_params,
)
from jaxspec.models.transformer import Network
from jaxspec.sharding import shard_like

# Settings of other dialects that change what a head computes, and their meaning here.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "markov_head_type": (None, "vanilla"),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
    "causal": (None, False),
}
_DSPARK = "Qwen3DSparkModel"
_CONVOLUTION = ("conv_kernel_size", "conv_group_size")
_NOT_NEEDED = ("embed_tokens.weight", "lm_head.weight")


def load_dflash(
    source: str | Path,
    target: Network | Model,
    dtype: Any = None,
    revision: str | None = None,
) -> DFlashHead:
    """Loads a DFlash head for a target.

    Args:
        source: a folder with config.json and model.safetensors, the name of a head that comes with
            the package, or "owner/name" on the Hugging Face Hub.
        target: what the head was trained for: a model, or its network.
        dtype: of the weights; `None`: the target's, and its form of matrices.
        revision: see `load`.

    Raises:
        CheckpointError: nothing is there, tensors are missing, unknown or mis-shaped (the first
            are listed), the head was made for a target of another width, vocabulary or depth, it
            reads layers that the target lacks, or config.json asks for what is not covered (the
            fields are named).
        ValueError: `target` is none, or `dtype` is none that weights can have.

    Example:
        >>> import tempfile
        >>> import jax
        >>> from jaxspec.checkpoint import load_dflash, save_dflash
        >>> from jaxspec.models import DFlashHead, ModelConfig, Network
        >>> from jaxspec.models import dflash_taps, init_dflash_params, init_params
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=8, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128, qk_norm=True,
        ... )
        >>> target = Network(init_params(config, jax.random.key(0)), config)
        >>> one_layer = config.replace(num_layers=1, layer_types=())
        >>> params = init_dflash_params(one_layer, 2 * 32, jax.random.key(1))
        >>> head = DFlashHead(params, one_layer, dflash_taps(8, 2), mask_token_id=63, block=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_dflash(head, folder)
        ...     load_dflash(folder, target).block
        4
    """
    target = network_of(target)
    folder = find_head(source, "dflash", revision)
    raw = _flattened(folder, read_json(folder / CONFIG))
    config = config_from_json({**raw, "model_type": "qwen3", "tie_word_embeddings": False})
    _check_dialect(folder, raw, config)
    layers = raw.get("num_target_layers", target.num_layers)
    facts = (
        ("hidden_size", config.embed_dim, target.embed_dim),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", layers, target.num_layers),
    )
    problems = []
    taps = _taps(raw, target.num_layers, config.num_layers)
    if not all(0 <= layer < target.num_layers for layer in taps):
        outputs = [layer - 1 for layer in taps]
        problems.append(
            f"target_layer_ids are {outputs}, and of {target.num_layers} layers there are 0 to "
            f"{target.num_layers - 2} whose output goes into another"
        )
    mask, block = read(raw, "mask_token_id", Natural), read(raw, "block_size", Count)
    if mask >= target.vocab_size:
        problems.append(f"mask_token_id is {mask}, and must be an id below {target.vocab_size}")
    if block < 2:
        problems.append(f"block_size is {block}, and must be at least 2, the pending token counted")
    check_target(facts, problems)

    parts, likeliest = _parts(raw, config)
    init = partial(init_dflash_params, config, len(taps) * target.embed_dim, parts=parts)
    stored, rules = find_tensors(folder), dflash_rules(gated=parts.gated)
    params = load_head_params(rules, config, init, stored, target, dtype, _NOT_NEEDED)
    predicts, causal = raw["sample_from_anchor"], raw["is_causal"]
    head = DFlashHead(params, config, taps, mask, block, layers, predicts, causal, likeliest)
    made_for = read(raw, TARGET_DIGEST, str, None)
    return dataclasses.replace(shard_like(target, head), made_for=made_for)


def save_dflash(head: DFlashHead, folder: str | Path, dtype: Any = None) -> None:
    """Writes a head as `load_dflash` reads it, under the published names.

    A head with a Markov head, or whose blocks predict at every place, is written as DSpark's are,
    others as DFlash's.

    Args:
        head: what to write.
        folder: made if it is not there; an interruption leaves it as it was.
        dtype: to store the weights in; `None`: the one they have.

    Raises:
        CheckpointError: it has a path selector and a part that only DSpark's files can describe; or
            it is no head, or `folder` can be no path.
        ValueError: `dtype` is none that weights can have.

    Example:
        >>> import os, tempfile
        >>> import jax
        >>> from jaxspec.checkpoint import save_dflash
        >>> from jaxspec.models import DFlashHead, ModelConfig, init_dflash_params
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128, qk_norm=True,
        ... )
        >>> params = init_dflash_params(config, 2 * 32, jax.random.key(1))
        >>> head = DFlashHead(params, config, taps=(2, 5), mask_token_id=63, block=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_dflash(head, folder)
        ...     sorted(os.listdir(folder))
        ['config.json', 'model.safetensors']
    """
    head = given("head", head, DFlashHead)
    raw: dict[str, Any] = {
        **config_to_json(head.config),
        "model_type": "qwen3",
        "block_size": head.block,
    }
    if head.target_layers is not None:
        raw["num_target_layers"] = head.target_layers
    if head.causal is not None:
        raw["is_causal"] = head.causal
    if head.made_for is not None:
        raw[TARGET_DIGEST] = head.made_for
    own: dict[str, Any] = {
        "mask_token_id": head.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in head.taps],
    }
    parts = head.parts
    if parts.convolution is not None:
        own["conv_kernel_size"], own["conv_group_size"] = parts.convolution
    if parts.gated:
        if parts.confidence or head.anchor_predicts:
            raise CheckpointError(
                "No published layout holds a path selector with a confidence head, or with a block "
                "whose first place predicts: save the head without one of them."
            )
        own |= {"selector_rank": parts.rank, "selector_top_k": head.likeliest}
    elif parts.rank or parts.confidence or head.anchor_predicts:
        raw |= own | {
            "architectures": [_DSPARK],
            "sample_from_anchor": head.anchor_predicts,
            "markov_rank": parts.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": parts.confidence > 0,
            "confidence_head_with_markov": parts.confidence > head.config.embed_dim,
        }
        own = {}
    if own:
        name = "DFlash2DraftModel" if parts.gated else "DFlashDraftModel"
        raw |= {"architectures": [name], "dflash_config": own}
    write_head(folder, raw, head.params, dflash_rules(gated=parts.gated), head.config, dtype)


def _flattened(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with all settings at the top, wherever the file has them.

    Raises:
        CheckpointError: it is not of a DFlash head, or leaves open which places predict.
    """
    own, nested = (
        read(raw, name, Mapping[str, Any], None)
        for name in ("dflash_config", "transformer_layer_config")
    )
    speculators = raw.get("speculators_model_type")
    is_dspark = speculators == "dspark" or _DSPARK in read(
        raw, "architectures", tuple[str, ...], ()
    )
    is_nested = nested is not None and "block_size" in raw
    if not (own is not None or is_nested or is_dspark):
        raise CheckpointError(
            f"{folder}: config.json has no `dflash_config`, and its architecture is not {_DSPARK}, "
            "so this is no DFlash head."
        )
    parts = (nested, raw, own)
    flat = {name: part[name] for part in parts if part is not None for name in part}
    if speculators == "dspark" and flat.get("sample_from_anchor") is None:
        raise CheckpointError(
            f"{folder}: config.json does not have sample_from_anchor, which says whether the first "
            "place of a block predicts; its makers have written both kinds without it. Add it."
        )
    flat["sample_from_anchor"] = read(flat, "sample_from_anchor", bool, is_dspark)
    sees_ahead = read(flat, "sliding_window_non_causal", bool, False)
    if speculators is not None and "is_causal" not in flat and sees_ahead:
        flat["is_causal"] = False
    flat["is_causal"] = read(flat, "is_causal", bool, None)
    return flat


def _parts(raw: Mapping[str, Any], config: ModelConfig) -> tuple[DFlashParts, int | None]:
    """Returns the parts of a head, and how many tokens of a place its selector chooses among."""
    convolution, likeliest = None, None
    if read(raw, "conv_kernel_size", Natural, 0):
        convolution = Convolution(*(read(raw, name, Count) for name in _CONVOLUTION))
        if config.embed_dim % convolution.group:
            raise CheckpointError(
                f"conv_group_size in config.json must divide hidden_size ({config.embed_dim}), got "
                f"{convolution.group}."
            )
    gated = read(raw, "selector_rank", Natural, 0) > 0
    rank = read(raw, "markov_rank", Natural, 0)
    if gated:
        rank, likeliest = (read(raw, f"selector_{name}", Count) for name in ("rank", "top_k"))
        if likeliest >= config.vocab_size:
            raise CheckpointError(
                f"selector_top_k in config.json must be below vocab_size ({config.vocab_size}), "
                f"got {likeliest}."
            )
    confidence = 0
    if read(raw, "enable_confidence_head", bool, False):
        with_markov = read(raw, "confidence_head_with_markov", bool, False)
        confidence = config.embed_dim + (rank if with_markov else 0)
    return DFlashParts(convolution, rank, gated, confidence), likeliest


def _taps(raw: Mapping[str, Any], num_layers: int, num_features: int) -> tuple[int, ...]:
    """Layers whose inputs are read: the layers behind those whose outputs the file names."""
    for name, behind in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        layers = read(raw, name, tuple[int, ...], None)
        if layers == ():
            raise CheckpointError(
                f"config.json: {name} must name at least one layer of the target, got none."
            )
        if layers is not None:
            return tuple(layer + behind for layer in layers)
    # Published heads have as many features as layers where they name none.
    return dflash_taps(num_layers, num_features)


def _check_dialect(folder: Path, raw: Mapping[str, Any], config: ModelConfig) -> None:
    neutral = {**_UNSUPPORTED, "draft_vocab_size": (None, config.vocab_size)}
    if raw.get("selector_rank"):
        neutral |= {"markov_rank": (None, 0), "enable_confidence_head": (None, False)}
    if not raw.get("markov_rank"):
        del neutral["markov_head_type"]  # of no head
        if raw.get("enable_confidence_head"):
            neutral["confidence_head_with_markov"] = (None, False)
    unsupported = [
        f"{name} {shown(raw[name])}"
        for name, values in neutral.items()
        if raw.get(name) not in values
    ]
    if unsupported:
        raise CheckpointError(
            f"{folder}: this DFlash dialect sets {', '.join(unsupported)}, which is not supported."
        )
    window, block = config.sliding_window, raw.get("block_size")
    if window is not None and isinstance(block, int) and window < block:
        raise CheckpointError(
            f"{folder}: sliding_window {window} is less than a block ({block} places), which is "
            "not supported."
        )
