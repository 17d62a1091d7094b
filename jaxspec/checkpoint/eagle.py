"""EAGLE heads from, and into, their published folders: config.json and one file of weights.

EAGLE-1 files hold `fc` and one layer, `layers.0`; EAGLE-3 files call the layer `midlayer` and add a
final norm, an output head and two maps between vocabularies. Names and dialects follow the module
definitions of SafeAILab/EAGLE, branches v1 and main. The speculators format says `layers.0` for
EAGLE-3 too, may put `model.` before everything, nests the layer's settings in
`transformer_layer_config`, and knows `norm_before_residual`.

Tapped layers are counted in two ways. `eagle_aux_hidden_state_layer_ids` at the top names layers
by what goes in, as vLLM and we do. Inside `eagle_config`, as SpecForge writes and SGLang reads, it
names them by what comes out: [1, 46, 90] of 94 layers are the usual 2, L // 2 and L - 3.
"""

import importlib
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from safetensors import safe_open
from safetensors.numpy import save

from jaxspec.checkpoint.config import config_from_json
from jaxspec.checkpoint.files import CheckpointError, read_json, replacing_files, write_json
from jaxspec.checkpoint.hub import find_head
from jaxspec.checkpoint.huggingface import leaves_by_path
from jaxspec.checkpoint.names import EAGLE, EAGLE3, Placement, Rule, copy_into, copy_out
from jaxspec.checkpoint.safetensors import FLOATS, SINGLE, StoredTensor, find_tensors, read_tensor
from jaxspec.core.types import PyTree
from jaxspec.models.config import ModelConfig
from jaxspec.models.eagle import (
    DraftVocabulary,
    Eagle3Head,
    EagleHead,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.models.transformer import Network
from jaxspec.sharding import beside

TORCH_FILE = "pytorch_model.bin"
# Settings of later dialects that change what a head computes, and their meaning here.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
# Files carry the target's embedding and masks that follow from other tensors.
_NOT_NEEDED = ("embed_tokens.weight", "t2d", "d2t")


class HeadTensor(NamedTuple):
    """A stored tensor that is read when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def load_eagle(source: str | Path, target: Network, dtype: Any = None) -> EagleHead | Eagle3Head:
    """Loads an EAGLE-1 (also EAGLE-2) or EAGLE-3 head for a target, onto the target's mesh.

    Args:
        source: a folder with config.json and model.safetensors, or pytorch_model.bin where torch
            is installed (read by its `weights_only` path, which runs no code); the name of a head
            that comes with the package; or "owner/name" on the Hugging Face Hub.
        target: what the head was trained for.
        dtype: of the weights; None: the target's.

    Raises:
        CheckpointError: nothing is there, tensors are missing, unknown or mis-shaped (all are
            listed), or the head was made for a target of another width, vocabulary or depth.
    """
    folder = find_head(source)
    raw = _unfolded(read_json(folder / "config.json"))
    stored = _stored_tensors(folder)
    config = _layer_config(raw, stored, target)
    dtype = np.dtype(target.dtype if dtype is None else dtype)
    ids = _draft_ids(stored, target.vocab_size)
    num_drafted = target.vocab_size if ids is None else len(ids)
    stated = raw.get("draft_vocab_size", num_drafted)
    if stated != num_drafted:
        raise CheckpointError(
            f"{folder}: config.json says that the head drafts from {stated} tokens of the target's "
            f"{target.vocab_size}, but d2t, which says from which, "
            + ("is missing." if ids is None else f"lists {num_drafted}.")
        )
    if not any(name.endswith("hidden_norm.weight") for name in stored):
        bias = _flag(raw, "bias", True)
        shapes = jax.eval_shape(partial(init_eagle_params, config, bias), jax.random.key(0))
        params = _fill(EAGLE, "layers.0", shapes, stored, dtype)
        vocabulary = None if ids is None else DraftVocabulary.of(target, ids)
        return beside(target, EagleHead(params, config, bool(bias), vocabulary))
    unsupported = [name for name in _UNSUPPORTED if raw.get(name)]
    if unsupported:
        raise CheckpointError(
            f"{folder}: this EAGLE-3 dialect sets {', '.join(unsupported)}, which is not supported."
        )
    config = config.replace(vocab_size=num_drafted)
    taps = _taps(raw) or eagle3_taps(target.num_layers)
    if not all(0 <= layer < target.num_layers for layer in taps):
        raise CheckpointError(
            f"The head is for another target: it reads layers {list(taps)}, the target has "
            f"{target.num_layers} (eagle_aux_hidden_state_layer_ids in config.json)."
        )
    tapped = len(taps) * target.embed_dim
    shapes = jax.eval_shape(partial(init_eagle3_params, config, tapped), jax.random.key(0))
    layer = "midlayer" if any(name.startswith("midlayer.") for name in stored) else "layers.0"
    params = _fill(EAGLE3, layer, shapes, stored, dtype)
    normed = _flag(raw, "norm_before_residual", False)
    head = Eagle3Head(params, config, taps, target.vocab_size, ids, normed)
    return beside(target, head)


def save_eagle(
    head: EagleHead | Eagle3Head,
    folder: str | Path,
    dtype: Any = None,
    *,
    target_layers: int | None = None,
) -> None:
    """Writes a head as `load_eagle` reads it, under the published names.

    The target's embedding, which published files hold as well and which programs that load strictly
    ask for, is left out, and so is t2d, which follows from d2t. An EAGLE-1 head over a reduced
    vocabulary has a d2t too, which other programs do not know of.

    Args:
        head: what to write.
        folder: made if it is not there; an interruption leaves it as it was.
        dtype: to store the weights in; None: the one they have.
        target_layers: of the target, so that loading for a deeper one is refused; None: not said.
    """
    third = isinstance(head, Eagle3Head)
    leaves = leaves_by_path(head.params)
    placed = _placements(EAGLE3 if third else EAGLE, "midlayer" if third else "layers.0", leaves)
    tensors = {
        placement.name: copy_out(placement, leaf, np.dtype(dtype or leaf.dtype))
        for path, group in placed.items()
        for leaf in (np.asarray(leaves[path]),)
        for placement in group
    }
    raw = _config_to_json(head)
    if target_layers is not None:
        raw["target_num_hidden_layers"] = target_layers
    if head.draft_ids is not None:
        ids = np.asarray(head.draft_ids, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        raw["draft_vocab_size"] = len(ids)
    with replacing_files(Path(folder)) as staging:
        write_json(staging / "config.json", raw)
        # Not `save_file`, whose files only their owner may read.
        (staging / SINGLE).write_bytes(save(tensors))


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads: low, middle and high, as the published heads do.

    Raises:
        ValueError: the target has too few layers for three different ones.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 2 < taps[1] < taps[2]:
        raise ValueError(
            f"EAGLE-3 reads layers 2, L // 2 and L - 3, which takes at least 7 layers; the target "
            f"has {num_layers}."
        )
    return taps


def _stored_tensors(folder: Path) -> dict[str, HeadTensor]:
    path = folder / TORCH_FILE
    if path.is_file() and not (folder / SINGLE).is_file():
        found = _torch_tensors(path)
    else:
        found = {name: _lazy(name, tensor) for name, tensor in find_tensors(folder).items()}
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _lazy(name: str, tensor: StoredTensor) -> HeadTensor:
    if tensor.dtype in FLOATS:
        return HeadTensor(tensor.shape, partial(read_tensor, tensor))

    def read() -> np.ndarray:
        with safe_open(tensor.file, "np") as file:
            return file.get_tensor(name)

    return HeadTensor(tensor.shape, read)


def _torch_tensors(path: Path) -> dict[str, HeadTensor]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise CheckpointError(
            f"{path} is a pickle; reading one safely takes torch (extra `parity`), or convert "
            f"it to {SINGLE} where it is trusted."
        ) from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, and what else it holds could run code: {error}"
        ) from None

    def reader(tensor) -> Callable[[], np.ndarray]:
        return lambda: (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    return {
        name: HeadTensor(tuple(tensor.shape), reader(tensor)) for name, tensor in loaded.items()
    }


def _layer_config(
    raw: Mapping[str, Any], stored: Mapping[str, HeadTensor], target: Network
) -> ModelConfig:
    """The one layer's shape. Positions are the target's: published heads state shorter ones."""
    has_bias = any(name.endswith("q_proj.bias") for name in stored)
    # Of a Qwen2 head whose file has no biases, they are missing: without them it drafts worse.
    with_bias = _flag(raw, "qkv_bias", has_bias or raw.get("model_type") == "qwen2")
    text = {
        **raw,
        "model_type": "qwen2" if with_bias else "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": target.config.max_positions,
        "tie_word_embeddings": False,
    }
    config = config_from_json(text)
    layers = raw.get("target_num_hidden_layers", target.num_layers)
    problems = [
        f"{name} is {ours} in config.json, {theirs} in the target"
        for name, ours, theirs in (
            ("hidden_size", config.embed_dim, target.embed_dim),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("target_num_hidden_layers", layers, target.num_layers),
        )
        if ours != theirs
    ]
    if problems:
        raise CheckpointError(f"The head is for another target: {'; '.join(problems)}.")
    return config


def _unfolded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """With the settings of the layer at the top, where all other formats have them."""
    nested = raw.get("transformer_layer_config")
    return {**(nested if isinstance(nested, Mapping) else {}), **raw}


def _taps(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose inputs are read; none where config.json leaves that to the reader."""
    inputs = raw.get("eagle_aux_hidden_state_layer_ids") or ()
    nested = raw.get("eagle_config")
    outputs = (nested if isinstance(nested, Mapping) else {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    return tuple(inputs) or tuple(layer + 1 for layer in outputs or ())


def _draft_ids(
    stored: Mapping[str, HeadTensor], vocab_size: int
) -> Int[jax.Array, " draft_vocab"] | None:
    """Target ids by draft id; files store the difference."""
    if "d2t" not in stored:
        return None
    offsets = stored["d2t"].read()
    ids = np.arange(len(offsets)) + offsets
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"d2t must map its {len(ids)} draft ids to different ids below {vocab_size}; it gives "
            f"{len(np.unique(ids))} different ones from {ids.min()} to {ids.max()}."
        )
    return jnp.asarray(ids, jnp.int32)


def _fill(
    rules: tuple[Rule, ...],
    layer: str,
    shapes: PyTree,
    stored: Mapping[str, HeadTensor],
    dtype: np.dtype,
) -> PyTree:
    leaves = leaves_by_path(shapes)
    placed = _placements(rules, layer, {path: leaf.shape for path, leaf in leaves.items()})
    wanted = {
        placement.name: placement.stored_shape(leaves[path].shape)
        for path, group in placed.items()
        for placement in group
    }
    problems = [
        f"missing: {name}, of shape {list(shape)}"
        for name, shape in wanted.items()
        if name not in stored
    ]
    problems += [
        f"of another shape: {name} is {list(stored[name].shape)}, "
        f"config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    problems += [
        f"unknown: {name}, of shape {list(stored[name].shape)}"
        for name in stored.keys() - wanted.keys()
        if name not in _NOT_NEEDED and not name.endswith(".rotary_emb.inv_freq")
    ]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in sorted(problems))
        raise CheckpointError(
            f"The head's weights do not fit its config.json; {len(problems)} tensors are wrong:"
            f"{lines}"
        )
    arrays = []
    for path, leaf in leaves.items():
        array = np.empty(leaf.shape, dtype)
        for placement in placed[path]:
            copy_into(placement, array, stored[placement.name].read())
        arrays.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _placements(
    rules: tuple[Rule, ...], layer: str, leaves: Mapping[str, Any]
) -> dict[str, list[Placement]]:
    placed: dict[str, list[Placement]] = {path: [] for path in leaves}
    for rule in rules:
        if rule.path in leaves:
            name = rule.name.format(layer=layer)
            placed[rule.path].append(Placement(name, rule.path, None, rule.regions))
    return placed


def _config_to_json(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    config = head.config
    raw = {
        "model_type": "llama",
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": head.target_vocab_size,
    }
    if isinstance(head, Eagle3Head):
        taps = {"eagle_aux_hidden_state_layer_ids": list(head.taps)}
        return {**raw, **taps, "norm_before_residual": head.norm_before_residual}
    return {**raw, "bias": head.bias}


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} in config.json must be true or false, got {value!r}.")
    return value
