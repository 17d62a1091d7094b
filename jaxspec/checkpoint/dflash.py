"""DFlash heads from, and into, their published folders: config.json and model.safetensors.

The layers of a Qwen-3 without embedding and output head, `fc` and `hidden_norm` that make their
context, and in config.json the usual fields with `block_size`, `num_target_layers` and
`dflash_config`: `mask_token_id` and `target_layer_ids`, which name layers by what comes out.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from jaxspec.checkpoint.config import config_from_json, config_to_json
from jaxspec.checkpoint.files import CheckpointError, read_json, replacing_files, write_json
from jaxspec.checkpoint.hub import find_head
from jaxspec.checkpoint.huggingface import leaves_by_path
from jaxspec.checkpoint.names import (
    DFLASH,
    copy_into,
    copy_out,
    match_tensors,
    placements_by,
)
from jaxspec.checkpoint.safetensors import SINGLE, find_tensors, read_tensor
from jaxspec.models.dflash import DFlashHead, dflash_taps, init_dflash_params
from jaxspec.models.transformer import Network
from jaxspec.sharding import beside

# Settings of later dialects that change what a head computes, and their meaning here.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "input_embedding_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "markov_rank": (None, 0),
}


def load_dflash(source: str | Path, target: Network, dtype: Any = None) -> DFlashHead:
    """Loads a DFlash head for a target.

    Args:
        source: a folder with config.json and model.safetensors, the name of a head that comes with
            the package, or "owner/name" on the Hugging Face Hub.
        target: what the head was trained for.
        dtype: of the weights; None: the target's.

    Raises:
        CheckpointError: nothing is there, tensors are missing, unknown or mis-shaped (all are
            listed), the head was made for a target of another width, vocabulary or depth, it
            reads layers that the target lacks, or some of its layers have a sliding window.
    """
    folder = find_head(source, "dflash")
    raw = read_json(folder / "config.json")
    own = raw.get("dflash_config")
    if not isinstance(own, Mapping):
        raise CheckpointError(
            f"{folder}: config.json has no `dflash_config`, so this is no DFlash head."
        )
    _check_dialect(folder, {**raw, **own})
    config = config_from_json({**raw, "model_type": "qwen3", "tie_word_embeddings": False})
    if config.sliding_window is not None:
        sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding"]
        raise CheckpointError(
            f"{folder}: layers {sliding} of this DFlash head see {config.sliding_window} positions "
            "only (sliding_window), which is not supported: its layers must see the whole text."
        )
    layers = raw.get("num_target_layers", target.num_layers)
    problems = [
        f"{name} is {theirs} in config.json, {ours} in the target"
        for name, theirs, ours in (
            ("hidden_size", config.embed_dim, target.embed_dim),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("num_target_layers", layers, target.num_layers),
        )
        if theirs != ours
    ]
    taps = _taps(own, target.num_layers, config.num_layers)
    if not all(0 <= layer < target.num_layers for layer in taps):
        outputs = [layer - 1 for layer in taps]
        problems.append(
            f"target_layer_ids are {outputs}, and of {target.num_layers} layers there are 0 to "
            f"{target.num_layers - 2} whose output goes into another"
        )
    mask = own.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        problems.append(f"mask_token_id is {mask}, and must be an id below {target.vocab_size}")
    block = raw.get("block_size")
    if type(block) is not int or block < 2:
        problems.append(f"block_size is {block}, and must be at least 2, the pending token counted")
    if problems:
        raise CheckpointError(f"The head is for another target: {'; '.join(problems)}.")
    assert isinstance(mask, int)
    assert isinstance(block, int)

    tapped = len(taps) * target.embed_dim
    shapes = jax.eval_shape(partial(init_dflash_params, config, tapped), jax.random.key(0))
    leaves = leaves_by_path(shapes)
    sizes = {path: leaf.shape for path, leaf in leaves.items()}
    placed = placements_by(DFLASH, config, sizes)
    matched = match_tensors(placed, sizes, find_tensors(folder), tied_head=True)
    dtype = np.dtype(target.dtype if dtype is None else dtype)
    arrays = []
    for path, shape in sizes.items():
        array = np.empty(shape, dtype)
        for placement in placed[path]:
            copy_into(placement, array, read_tensor(matched[placement.name]))
        arrays.append(jnp.asarray(array))
    params = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    return beside(target, DFlashHead(params, config, taps, mask, block, layers))


def save_dflash(head: DFlashHead, folder: str | Path, dtype: Any = None) -> None:
    """Writes a head as `load_dflash` reads it, under the published names.

    Args:
        head: what to write.
        folder: made if it is not there; an interruption leaves it as it was.
        dtype: to store the weights in; None: the one they have.
    """
    leaves = leaves_by_path(head.params)
    placed = placements_by(DFLASH, head.config, {k: leaf.shape for k, leaf in leaves.items()})
    tensors = {
        placement.name: copy_out(placement, leaf, np.dtype(dtype or leaf.dtype))
        for path, group in placed.items()
        for leaf in (np.asarray(leaves[path]),)
        for placement in group
    }
    raw = {
        **config_to_json(head.config),
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "block_size": head.block,
        "dflash_config": {
            "mask_token_id": head.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in head.taps],
        },
    }
    if head.target_layers is not None:
        raw["num_target_layers"] = head.target_layers
    with replacing_files(Path(folder)) as staging:
        write_json(staging / "config.json", raw)
        (staging / SINGLE).write_bytes(save(tensors))


def _taps(own: Mapping[str, Any], num_layers: int, num_features: int) -> tuple[int, ...]:
    """Layers whose inputs are read: the layers behind those whose outputs the file names."""
    outputs = own.get("target_layer_ids")
    if outputs is None:
        # Published heads have as many features as layers where they name none.
        return dflash_taps(num_layers, num_features)
    if not isinstance(outputs, list) or not all(type(layer) is int for layer in outputs):
        raise CheckpointError(
            f"target_layer_ids in config.json must be a list of layers, got {outputs!r}."
        )
    return tuple(layer + 1 for layer in outputs)


def _check_dialect(folder: Path, raw: Mapping[str, Any]) -> None:
    unsupported = [
        f"{name} {raw[name]!r}"
        for name, neutral in _UNSUPPORTED.items()
        if raw.get(name) not in neutral
    ]
    if unsupported:
        raise CheckpointError(
            f"{folder}: this DFlash dialect sets {', '.join(unsupported)}, which is not supported."
        )
