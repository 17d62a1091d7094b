"""DFlash heads from, and into, their published folders: config.json and model.safetensors.

The layers of a Qwen-3 without embedding and output head, `fc` and `hidden_norm` that make their
context, and in config.json the usual fields with `block_size`, `num_target_layers` and
`dflash_config`: `mask_token_id` and `target_layer_ids`, which name layers by what comes out.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.config import config_from_json, config_to_json
from jaxspec.checkpoint.files import CheckpointError, read_json
from jaxspec.checkpoint.folder import CONFIG
from jaxspec.checkpoint.heads import check_target, load_head_params, network_of, write_head
from jaxspec.checkpoint.hub import Model, find_head
from jaxspec.checkpoint.names import DFLASH, TIED_HEAD
from jaxspec.checkpoint.safetensors import find_tensors
from jaxspec.models.dflash import DFlashHead, dflash_taps, init_dflash_params
from jaxspec.models.transformer import Network
from jaxspec.sharding import shard_like

# Settings of later dialects that change what a head computes, and their meaning here.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "input_embedding_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "markov_rank": (None, 0),
}


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
        CheckpointError: nothing is there, tensors are missing, unknown or mis-shaped (all are
            listed), the head was made for a target of another width, vocabulary or depth, it
            reads layers that the target lacks, or some of its layers have a sliding window.
        ValueError: `target` is none.

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
    raw = read_json(folder / CONFIG)
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
    facts = (
        ("hidden_size", config.embed_dim, target.embed_dim),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", layers, target.num_layers),
    )
    problems = []
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
    check_target(facts, problems)
    assert isinstance(mask, int)
    assert isinstance(block, int)

    init = partial(init_dflash_params, config, len(taps) * target.embed_dim)
    stored = find_tensors(folder)
    params = load_head_params(DFLASH, config, init, stored, target, dtype, TIED_HEAD)
    return shard_like(target, DFlashHead(params, config, taps, mask, block, layers))


def save_dflash(head: DFlashHead, folder: str | Path, dtype: Any = None) -> None:
    """Writes a head as `load_dflash` reads it, under the published names.

    Args:
        head: what to write.
        folder: made if it is not there; an interruption leaves it as it was.
        dtype: to store the weights in; `None`: the one they have.

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
    write_head(folder, raw, head.params, DFLASH, head.config, dtype)


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
