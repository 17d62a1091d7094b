"""EAGLE heads from, and into, their published folders: config.json and one file of weights.

EAGLE-1 files hold `fc` and one layer, `layers.0`; EAGLE-3 files call the layer `midlayer` and add a
final norm, an output head and two maps between vocabularies. Names and dialects follow the module
definitions of SafeAILab/EAGLE, branches v1 and main. The speculators format says `layers.0` for
EAGLE-3 too, may put `model.` before everything, nests the layer's settings in
`transformer_layer_config`, and knows `norm_before_residual`.

EAGLE 3.1 (arXiv 2605.09992) is two settings more: `fc_norm`, norms `fc_norm.0` and so on of each
tapped layer before `fc`, and `norm_output`, by which the next state is what `lm_head` reads, after
the last norm. `norm_before_fc`, which NVIDIA writes inside `eagle_config`, is one norm,
`input_norm`, of all tapped layers side by side. vLLM, SGLang and speculators read them so.

Tapped layers are counted in two ways. `eagle_aux_hidden_state_layer_ids` at the top names layers
by what goes in, as vLLM and we do. Inside `eagle_config`, as SpecForge writes and SGLang reads, it
names them by what comes out: [1, 46, 90] of 94 layers are the usual 2, L // 2 and L - 3.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from safetensors import safe_open

from jaxspec.checkpoint.config import config_from_json, config_to_json
from jaxspec.checkpoint.entries import TARGET_DIGEST, read
from jaxspec.checkpoint.files import CheckpointError, given, read_json
from jaxspec.checkpoint.folder import CONFIG
from jaxspec.checkpoint.heads import check_target, load_head_params, network_of, write_head
from jaxspec.checkpoint.hub import Model, find_head
from jaxspec.checkpoint.names import Tensor, eagle3_rules, eagle_rules
from jaxspec.checkpoint.safetensors import FLOATS, SINGLE, StoredTensor, find_tensors
from jaxspec.checkpoint.trees import TREE_FILE, load_threshold, read_paths
from jaxspec.core.checks import Count, Natural
from jaxspec.models.config import ModelConfig
from jaxspec.models.eagle import (
    DraftVocabulary,
    Eagle3Head,
    EagleHead,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.models.transformer import Network
from jaxspec.sharding import shard_like

_TORCH_FILE = "pytorch_model.bin"
_SECTION, _TAPPED = "eagle_config", "eagle_aux_hidden_state_layer_ids"
# An earlier name of `fc_norm`, with other names of tensors.
_UNSUPPORTED = ("use_aux_norm",)
# Files carry the target's embedding and masks that follow from other tensors.
_NOT_NEEDED = ("embed_tokens.weight", "t2d", "d2t")
_EAGLE = eagle_rules("layers.0")
_LATER_LAYER = re.compile(r"layers\.[1-9]")


class HeadTensor(NamedTuple):
    """A stored tensor that is read when it is needed.

    Attributes:
        shape: its shape.
        make: reads it.
    """

    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    def read(self) -> np.ndarray:
        return self.make()


def load_eagle(
    source: str | Path,
    target: Network | Model,
    dtype: Any = None,
    revision: str | None = None,
) -> EagleHead | Eagle3Head:
    """Loads an EAGLE-1 (also EAGLE-2) or EAGLE-3 head for a target, onto the target's mesh.

    The tree in `tree.json` beside the head, which `jaxspec tune tree` writes, becomes the one that
    `Eagle.of(head)` drafts over, with its threshold.

    Args:
        source: a folder with config.json and model.safetensors, the name of a head that comes with
            the package, or "owner/name" on the Hugging Face Hub.
        target: what the head was trained for: a model, or its network.
        dtype: of the weights; `None`: the target's, and its form of matrices.
        revision: see `load`.

    Raises:
        CheckpointError: nothing is there, or only a pickle (the message converts it), tensors are
            missing, unknown or mis-shaped (the first are listed), or the head was made for a target
            of another width, vocabulary or depth.
        ValueError: `tree.json` holds no tree, `target` is none, or `dtype` is none that weights can
            have.

    Example:
        >>> from jaxspec import load
        >>> head = load_eagle("demo-eagle", load("demo"))
        >>> head.config.num_layers, len(head.paths), head.threshold
        (1, 5, 0.1)
    """
    target = network_of(target)
    folder = find_head(source, revision=revision)
    raw = _unfolded(read_json(folder / CONFIG))
    head = shard_like(target, _read_head(folder, raw, target, dtype))
    head = dataclasses.replace(head, made_for=read(raw, TARGET_DIGEST, str, None))
    tree = folder / TREE_FILE
    if not tree.is_file():
        return head
    return dataclasses.replace(head, paths=read_paths(tree), threshold=load_threshold(tree))


def _read_head(
    folder: Path, raw: Mapping[str, Any], target: Network, dtype: Any
) -> EagleHead | Eagle3Head:
    stored = _stored_tensors(folder)
    if "fc.weight" not in stored:
        raise CheckpointError(
            f"{folder} holds no EAGLE head: its weights have no fc.weight, which joins tokens and "
            "states; give the folder of a head, and its model as target."
        )
    config = _layer_config(raw, stored, target)
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
        bias = read(raw, "bias", bool, True)
        init = partial(init_eagle_params, config, bias)
        params = load_head_params(_EAGLE, config, init, stored, target, dtype, _NOT_NEEDED)
        vocabulary = None if ids is None else DraftVocabulary.of(target, ids)
        return EagleHead(params, config, bias, vocabulary)
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
            f"{target.num_layers} ({_TAPPED} in config.json)."
        )
    norms = _tap_norms(folder, raw, len(taps))
    published = any(name.startswith("midlayer.") for name in stored)
    rules = eagle3_rules("midlayer" if published else "layers.0", norms)
    init = partial(init_eagle3_params, config, len(taps) * target.embed_dim, tap_norms=norms)
    params = load_head_params(rules, config, init, stored, target, dtype, _NOT_NEEDED)
    return Eagle3Head(
        params,
        config,
        taps,
        target.vocab_size,
        ids,
        norm_before_residual=read(raw, "norm_before_residual", bool, False),
        norm_output=read(raw, "norm_output", bool, False),
    )


def _tap_norms(folder: Path, raw: Mapping[str, Any], num_taps: int) -> int:
    """Norms of the tapped layers before they are fused: of each, one of all together, or none."""
    each, together = (read(raw, name, bool, False) for name in ("fc_norm", "norm_before_fc"))
    if each and together:
        raise CheckpointError(
            f"{folder}: fc_norm and norm_before_fc in config.json exclude each other: the tapped "
            "layers are normed each by itself or all together."
        )
    return num_taps if each else int(together)


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
    vocabulary has a d2t too, which other programs do not know of. The head's tree is written beside
    it; without one, a tree that lies there stays.

    Args:
        head: what to write.
        folder: made if it is not there; an interruption leaves it as it was.
        dtype: to store the weights in; `None`: the one they have.
        target_layers: of the target, so that loading for a deeper one is refused; `None`: not said.

    Raises:
        CheckpointError: `head` is none, or `folder` can be no path.
        ValueError: `dtype` is none that weights can have.

    Example:
        >>> import tempfile
        >>> from jaxspec import load, load_eagle
        >>> from jaxspec.checkpoint import save_eagle
        >>> target = load("demo").network
        >>> head = load_eagle("demo-eagle", target)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_eagle(head, folder, target_layers=target.num_layers)
        ...     load_eagle(folder, target).config == head.config
        True
    """
    head = given("head", head, EagleHead | Eagle3Head)
    target_layers = given("target_layers", target_layers, Count | None)
    raw, more = _config_to_json(head), {}
    if target_layers is not None:
        raw["target_num_hidden_layers"] = target_layers
    if head.made_for is not None:
        raw[TARGET_DIGEST] = head.made_for
    if head.draft_ids is not None:
        ids = np.asarray(head.draft_ids, np.int64)
        more["d2t"] = ids - np.arange(len(ids))
        raw["draft_vocab_size"] = len(ids)
    tree = {"paths": head.paths, "threshold": head.threshold}
    beside = None if head.paths is None else {TREE_FILE: tree}
    rules = _EAGLE
    if isinstance(head, Eagle3Head):
        rules = eagle3_rules("midlayer", head.tap_norms)
    write_head(folder, raw, head.params, rules, head.config, dtype, more, beside)


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads: low, middle and high, as the published heads do.

    Raises:
        ValueError: the target has too few layers for three different ones.

    Example:
        >>> from jaxspec.checkpoint import eagle3_taps
        >>> eagle3_taps(32)
        (2, 16, 29)
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 2 < taps[1] < taps[2]:
        raise ValueError(
            f"EAGLE-3 reads layers 2, L // 2 and L - 3, which takes at least 7 layers; the target "
            f"has {num_layers}."
        )
    return taps


def _stored_tensors(folder: Path) -> Mapping[str, Tensor]:
    pickled, single = folder / _TORCH_FILE, folder / SINGLE
    if pickled.is_file() and not single.is_file():
        raise CheckpointError(
            f"{pickled} is a pickle, and loading a pickle runs whatever program it holds; convert "
            'it once, with torch installed: python -c "import torch, safetensors.torch as s; '
            f"t = torch.load('{pickled}', map_location='cpu', weights_only=True); "
            f"s.save_file({{n: x.contiguous() for n, x in t.items()}}, '{single}')\""
        )
    return {
        name.removeprefix("model."): (
            tensor if tensor.dtype in FLOATS else _other_tensor(name, tensor)
        )
        for name, tensor in find_tensors(folder).items()
    }


def _other_tensor(name: str, tensor: StoredTensor) -> HeadTensor:
    """A tensor that is not of floats, as maps between vocabularies are."""

    def read() -> np.ndarray:
        with safe_open(tensor.file, "np") as file:
            return file.get_tensor(name)

    return HeadTensor(tensor.shape, read)


def _layer_config(
    raw: Mapping[str, Any], stored: Mapping[str, Tensor], target: Network
) -> ModelConfig:
    """The one layer's shape. Positions are the target's: published heads state shorter ones."""
    num_layers = read(raw, "num_hidden_layers", Count, 1)
    # Some heads of one layer state the number of the target's layers.
    if num_layers > 1 and any(_LATER_LAYER.match(name) for name in stored):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {num_layers}, and only EAGLE heads of one layer "
            "are supported."
        )
    has_bias = any(name.endswith("q_proj.bias") for name in stored)
    # A Qwen2 head whose file has no biases is refused: without them it drafts worse.
    with_bias = read(raw, "qkv_bias", bool, has_bias or raw.get("model_type") == "qwen2")
    text = {
        **raw,
        "model_type": "qwen2" if with_bias else "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": target.config.max_positions,
        "tie_word_embeddings": False,
    }
    config = config_from_json(text)
    layers = raw.get("target_num_hidden_layers", target.num_layers)
    facts = (
        ("hidden_size", config.embed_dim, target.embed_dim),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_num_hidden_layers", layers, target.num_layers),
    )
    check_target(facts)
    return config


def _unfolded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are not null, those of the two inner sections at the top too."""
    layer, eagle = (
        read(raw, name, Mapping[str, Any], {}) for name in ("transformer_layer_config", _SECTION)
    )
    # At the top the ids of tapped layers mean something else.
    eagle = {name: value for name, value in eagle.items() if name != _TAPPED}
    parts = (layer, raw, eagle)
    return {key: value for part in parts for key, value in part.items() if value is not None}


def _taps(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose inputs are read; none where config.json leaves that to the reader."""
    nested = read(raw, _SECTION, Mapping[str, Any], {})
    inputs, outputs = (read(part, _TAPPED, tuple[Natural, ...], ()) for part in (raw, nested))
    return inputs or tuple(layer + 1 for layer in outputs)


def _draft_ids(
    stored: Mapping[str, Tensor], vocab_size: int
) -> Int[jax.Array, " draft_vocab"] | None:
    """Target ids by draft id; files store the difference."""
    if "d2t" not in stored:
        return None
    shape = stored["d2t"].shape
    if len(shape) != 1 or not 1 <= shape[0] <= vocab_size:
        raise CheckpointError(
            f"d2t must have one axis of 1 to {vocab_size} draft ids, got the shape {tuple(shape)}."
        )
    offsets = stored["d2t"].read()
    if not np.all(offsets == np.floor(offsets)):
        raise CheckpointError("d2t must hold whole numbers, one for each draft id.")
    ids = np.arange(len(offsets)) + offsets
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"d2t must map its {len(ids)} draft ids to different ids below {vocab_size}; it gives "
            f"{len(np.unique(ids))} different ones from {ids.min()} to {ids.max()}."
        )
    return jnp.asarray(ids, jnp.int32)


def _config_to_json(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    raw = {**config_to_json(head.config), "vocab_size": head.target_vocab_size}
    del raw["architectures"]  # a head is no model
    if isinstance(head, Eagle3Head):
        taps = {_TAPPED: list(head.taps)}
        norms = {
            "norm_before_residual": head.norm_before_residual,
            "norm_before_fc": head.tap_norms == 1,
            "fc_norm": head.tap_norms > 1,
            "norm_output": head.norm_output,
        }
        return {**raw, **taps, **norms}
    return {**raw, "bias": head.bias}
