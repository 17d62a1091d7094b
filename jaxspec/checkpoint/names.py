"""Tables from the tensors of Hugging Face checkpoints to parts of the parameter tree.

One table per family, read in both directions: a rule says where a tensor's numbers lie in a leaf,
as NumPy views of the leaf. Loading copies the tensor into the views, saving copies the views out.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jaxspec.checkpoint.files import CheckpointError, listed
from jaxspec.models.config import ModelConfig


class Tensor(Protocol):
    """A stored tensor that is read when it is needed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> np.ndarray: ...


T = TypeVar("T", bound=Tensor)
_MOST_LISTED = 10
# Tensors that some files hold although the head is the embedding table.
TIED_HEAD = ("lm_head.weight",)


class Region(NamedTuple):
    """A part of a leaf that is a run of rows of a stored tensor.

    Attributes:
        view: the part, its axes in the order of the stored tensor.
        num_row_axes: how many leading axes of `view` make up the tensor's first axis; the others,
            if any, make up its second. `None`: the tensor has the axes of `view`.
    """

    view: np.ndarray
    num_row_axes: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rows have in the file."""
        if self.num_row_axes is None:
            return self.view.shape
        rows, columns = self.view.shape[: self.num_row_axes], self.view.shape[self.num_row_axes :]
        return (math.prod(rows), math.prod(columns)) if columns else (math.prod(rows),)


Regions = Callable[[np.ndarray], tuple[Region, ...]]


class Rule(NamedTuple):
    """One line of a table.

    Attributes:
        name: of the stored tensor, with `{layer}` and `{expert}` to fill in. Experts, or whatever
            else is counted like them, are the leading axis of their leaf.
        path: of the leaf. The rule holds for the networks that have such a leaf.
        regions: where the tensor's rows lie in the leaf, from its first row to its last.
    """

    name: str
    path: str
    regions: Regions


class TensorPlacement(NamedTuple):
    """A rule filled in: one tensor of one network.

    Attributes:
        expert: which entry of the leaf's leading axis it belongs to; `None`: the whole leaf.
    """

    name: str
    path: str
    expert: int | None
    regions: Regions

    def regions_in(self, leaf: np.ndarray) -> tuple[Region, ...]:
        return self.regions(leaf if self.expert is None else leaf[self.expert])

    def stored_shape(self, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the tensor has in a file. Takes no memory."""
        stand_in = np.broadcast_to(np.zeros((), np.int8), leaf_shape)
        shapes = [region.shape for region in self.regions_in(stand_in)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _same(leaf):
    """Vectors, and tables whose rows are looked up."""
    return (Region(leaf, 1),)


def _whole(leaf):
    """Of more than two axes, which lie there as here."""
    return (Region(leaf, None),)


def _kernels(leaf):
    """[in, *outs] here, [all outs, in] there."""
    return (Region(np.moveaxis(leaf, 0, -1), leaf.ndim - 1),)


def _first(leaf):
    """One vector, here a table of one row."""
    return _same(leaf[0])


def _linear(leaf):
    """[in, out] here, [out, in] there."""
    return (Region(leaf.T, 1),)


def _heads(leaf, *parts):
    """Some of the vectors of each kv head, whose group is its queries, then its key and value."""
    found = [leaf[..., part, :] for part in parts]
    found = [part.reshape(*part.shape[:-2], -1) for part in found]
    return tuple(Region(np.moveaxis(part, 0, -1) if leaf.ndim == 4 else part, 2) for part in found)


def _halves(leaf, *indices):
    return tuple(Region(leaf[..., index, :].T, 1) for index in indices)


def _out(leaf):
    """[kv heads, group, head_dim, embed] here, [embed, all heads] there."""
    return (Region(leaf.reshape(-1, leaf.shape[-1]).T, 1),)


def _query_key_value(leaf):
    return _heads(leaf, slice(None, -2), slice(-2, -1), slice(-1, None))


def _query(leaf):
    return _query_key_value(leaf)[:1]


def _key(leaf):
    return _query_key_value(leaf)[1:2]


def _value(leaf):
    return _query_key_value(leaf)[2:]


def _gate_up(leaf):
    return _halves(leaf, 0, 1)


def _gate(leaf):
    return _halves(leaf, 0)


def _up(leaf):
    return _halves(leaf, 1)


_LAYER = "model.layers.{layer}"
_ENDS = (
    Rule("model.embed_tokens.weight", "embed/embedding", _same),
    Rule("model.embed_tokens.weight", "embed/kernel", _linear),
    Rule("model.norm.weight", "norm/scale", _same),
    Rule("lm_head.weight", "head/kernel", _linear),
)


def _attention(layer: str, leaf: str) -> tuple[Rule, ...]:
    """Queries, keys and values of a layer of that name, in leaves whose paths begin like that."""
    kinds = {"weight": "kernel", "bias": "bias"}
    parts = {"q": _query, "k": _key, "v": _value}
    return tuple(
        Rule(f"{layer}.self_attn.{part}_proj.{kind}", f"{leaf}attention/qkv/{ours}", regions)
        for kind, ours in kinds.items()
        for part, regions in parts.items()
    )


def _attention_out(layer: str, leaf: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{layer}.self_attn.o_proj.weight", f"{leaf}attention/out/kernel", _out),
        Rule(f"{layer}.self_attn.o_proj.bias", f"{leaf}attention/out/bias", _same),
    )


def _mlp(name: str, leaf: str) -> tuple[Rule, ...]:
    """Gate and up projection of an MLP of that name, in leaves whose paths begin like that."""
    return (
        Rule(f"{name}.gate_proj.weight", f"{leaf}mlp/gate_up/kernel", _gate),
        Rule(f"{name}.up_proj.weight", f"{leaf}mlp/gate_up/kernel", _up),
        Rule(f"{name}.gate_proj.bias", f"{leaf}mlp/gate_up/bias", _gate),
        Rule(f"{name}.up_proj.bias", f"{leaf}mlp/gate_up/bias", _up),
    )


def _mlp_out(name: str, leaf: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{name}.down_proj.weight", f"{leaf}mlp/down/kernel", _linear),
        Rule(f"{name}.down_proj.bias", f"{leaf}mlp/down/bias", _same),
    )


def _sublayers(layer: str, leaf: str) -> tuple[Rule, ...]:
    return (
        *_attention(layer, leaf),
        *_mlp(f"{layer}.mlp", leaf),
        *_attention_out(layer, leaf),
        *_mlp_out(f"{layer}.mlp", leaf),
    )


def _norms(**leaves: str) -> tuple[Rule, ...]:
    """The norms of a layer: their leaves by their names, a dot as two underscores."""
    return tuple(
        Rule(f"{_LAYER}.{name.replace('__', '.')}.weight", f"layer_{{layer}}/{leaf}/scale", _same)
        for name, leaf in leaves.items()
    )


def _experts(name: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The router and the experts of a sparse layer, by what a family calls them."""
    expert, leaf = f"{name}.experts.{{expert}}", "layer_{layer}/experts"
    return (
        Rule(f"{name}.gate.weight", f"{leaf}/router/kernel", _linear),
        Rule(f"{expert}.{gate}.weight", f"{leaf}/gate_up/kernel", _gate),
        Rule(f"{expert}.{up}.weight", f"{leaf}/gate_up/kernel", _up),
        Rule(f"{expert}.{down}.weight", f"{leaf}/down/kernel", _linear),
    )


_IN_MODEL = (_LAYER, "layer_{layer}/")
_QK_NORMS = _norms(self_attn__q_norm="attention/q_norm", self_attn__k_norm="attention/k_norm")
_EXPERTS = _experts(f"{_LAYER}.mlp", "gate_proj", "up_proj", "down_proj")
_SHARED = (
    Rule(f"{_LAYER}.mlp.shared_expert_gate.weight", "layer_{layer}/shared/router/kernel", _linear),
    *_mlp(f"{_LAYER}.mlp.shared_expert", "layer_{layer}/shared/"),
    *_mlp_out(f"{_LAYER}.mlp.shared_expert", "layer_{layer}/shared/"),
)
_PRE_NORMS = _norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm")
_FOUR_NORMS = _norms(
    input_layernorm="attention_norm",
    post_attention_layernorm="attention_post_norm",
    pre_feedforward_layernorm="mlp_norm",
    post_feedforward_layernorm="mlp_post_norm",
)
_PHI3 = (
    Rule(
        f"{_LAYER}.self_attn.qkv_proj.weight",
        "layer_{layer}/attention/qkv/kernel",
        _query_key_value,
    ),
    Rule(f"{_LAYER}.mlp.gate_up_proj.weight", "layer_{layer}/mlp/gate_up/kernel", _gate_up),
)
_LAYER_OUTS = _attention_out(*_IN_MODEL) + _mlp_out(f"{_LAYER}.mlp", "layer_{layer}/")
_LLAMA = _ENDS + _PRE_NORMS + _QK_NORMS + _sublayers(*_IN_MODEL)
_GEMMA = _ENDS + _FOUR_NORMS + _QK_NORMS + _sublayers(*_IN_MODEL)
_BLOCK = "model.transformer.blocks.{layer}"
_LLADA = (
    Rule("model.transformer.wte.weight", "embed/embedding", _same),
    Rule("model.transformer.ln_f.weight", "norm/scale", _same),
    Rule("model.transformer.ff_out.weight", "head/kernel", _linear),
    Rule(f"{_BLOCK}.attn_norm.weight", "layer_{layer}/attention_norm/scale", _same),
    Rule(f"{_BLOCK}.q_proj.weight", "layer_{layer}/attention/qkv/kernel", _query),
    Rule(f"{_BLOCK}.k_proj.weight", "layer_{layer}/attention/qkv/kernel", _key),
    Rule(f"{_BLOCK}.v_proj.weight", "layer_{layer}/attention/qkv/kernel", _value),
    Rule(f"{_BLOCK}.attn_out.weight", "layer_{layer}/attention/out/kernel", _out),
    Rule(f"{_BLOCK}.ff_norm.weight", "layer_{layer}/mlp_norm/scale", _same),
    Rule(f"{_BLOCK}.ff_proj.weight", "layer_{layer}/mlp/gate_up/kernel", _gate),
    Rule(f"{_BLOCK}.up_proj.weight", "layer_{layer}/mlp/gate_up/kernel", _up),
    Rule(f"{_BLOCK}.ff_out.weight", "layer_{layer}/mlp/down/kernel", _linear),
)
_MARKOV_HEAD = (
    Rule("markov_head.markov_w1.weight", "transitions/previous/embedding", _same),
    Rule("markov_head.markov_w2.weight", "transitions/following/embedding", _same),
)

TABLES: dict[str, tuple[Rule, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA + _experts(f"{_LAYER}.block_sparse_moe", "w1", "w3", "w2"),
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA + _EXPERTS + _SHARED,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA + _EXPERTS,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _ENDS + _PRE_NORMS + _PHI3 + _LAYER_OUTS,
    "olmo2": _GEMMA,  # of whose norms it has those behind
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "llada": _LLADA + _MARKOV_HEAD,
    "Dream": _LLAMA + _MARKOV_HEAD,
    "sdar": _LLAMA + _MARKOV_HEAD,
}


def eagle_rules(layer: str) -> tuple[Rule, ...]:
    """Returns the table of EAGLE-1 heads: one layer of that name, without the ends of a model."""
    return (
        *_sublayers(layer, ""),
        Rule(f"{layer}.post_attention_layernorm.weight", "mlp_norm/scale", _same),
        Rule("fc.weight", "fc/kernel", _linear),
        Rule("fc.bias", "fc/bias", _same),
    )


def eagle3_rules(layer: str, tap_norms: int = 0) -> tuple[Rule, ...]:
    """Returns the table of EAGLE-3 heads, whose layer has that name.

    Args:
        layer: its name.
        tap_norms: norms in front of `fc`: one for each tapped layer, or one for all together.
    """
    one = Rule("input_norm.weight", "tap_norm/scale", _first)
    each = Rule("fc_norm.{expert}.weight", "tap_norm/scale", _same)
    return (
        *eagle_rules(layer),
        one if tap_norms == 1 else each,
        Rule(f"{layer}.input_layernorm.weight", "embed_norm/scale", _same),
        Rule(f"{layer}.hidden_norm.weight", "state_norm/scale", _same),
        Rule("norm.weight", "norm/scale", _same),
        Rule("lm_head.weight", "head/kernel", _linear),
    )


_CONVOLUTIONS = tuple(
    rule
    for name in ("attention_conv", "mlp_conv")
    for rule in (
        Rule(f"layers.{{layer}}.{name}.base_kernel", f"layer_{{layer}}/{name}/base", _whole),
        Rule(
            f"layers.{{layer}}.{name}.kernel_projection.weight",
            f"layer_{{layer}}/{name}/kernel",
            _kernels,
        ),
    )
)
# DFlash heads are the layers of a Qwen-3 without its ends, and what makes their context.
_DFLASH = (
    *_sublayers("layers.{layer}", "layer_{layer}/"),
    *(Rule(rule.name.removeprefix("model."), rule.path, _same) for rule in _QK_NORMS + _PRE_NORMS),
    *_CONVOLUTIONS,
    Rule("fc.weight", "fc/kernel", _linear),
    Rule("hidden_norm.weight", "hidden_norm/scale", _same),
    Rule("norm.weight", "norm/scale", _same),
    Rule("confidence_head.proj.weight", "confidence/kernel", _linear),
    Rule("confidence_head.proj.bias", "confidence/bias", _same),
)
_PATH_SELECTOR = (
    Rule("candidate_selector.predecessor_codebook", "transitions/previous/embedding", _same),
    Rule("candidate_selector.successor_codebook", "transitions/following/embedding", _same),
    Rule("candidate_selector.hidden_projection.weight", "transitions/gate/kernel", _linear),
)


def dflash_rules(*, gated: bool) -> tuple[Rule, ...]:
    """Returns the table of DFlash heads; `gated`: with a path selector, not a Markov head."""
    return _DFLASH + (_PATH_SELECTOR if gated else _MARKOV_HEAD)


# Multimodal Gemma-3 keeps its text model under one of these, next to parts that are not read.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def placements(
    model_type: str, config: ModelConfig, leaves: Mapping[str, tuple[int, ...]]
) -> dict[str, list[TensorPlacement]]:
    """Returns the tensors of each leaf by the table of a family, a key of `TABLES`."""
    return placements_by(TABLES[model_type], config, leaves)


def placements_by(
    rules: tuple[Rule, ...], config: ModelConfig, leaves: Mapping[str, tuple[int, ...]]
) -> dict[str, list[TensorPlacement]]:
    """Returns the tensors that make up each leaf of a network.

    Args:
        rules: the table to go by.
        config: how many layers and experts there are.
        leaves: shape of each leaf by its path.
    """
    placed: dict[str, list[TensorPlacement]] = {path: [] for path in leaves}
    for rule in rules:
        layers = range(config.num_layers) if "{layer}" in rule.name else (0,)
        for layer in layers:
            path = rule.path.format(layer=layer)
            if path not in leaves:
                continue
            experts = range(leaves[path][0]) if "{expert}" in rule.name else (None,)
            for expert in experts:
                name = rule.name.format(layer=layer, expert=expert)
                placed[path].append(TensorPlacement(name, path, expert, rule.regions))
    without = [path for path, tensors in placed.items() if not tensors]
    assert not without, f"no rule fills {without}"
    return placed


def check_counts(
    rules: tuple[Rule, ...], config: ModelConfig, stored: Mapping[str, Tensor]
) -> None:
    """Refuses more layers or experts than there are tensors of, before any of them is placed.

    Raises:
        CheckpointError: with both numbers.
    """
    names = _text_tensors(stored)
    starts = {rule.name.partition("{layer}")[0] for rule in rules if "{layer}" in rule.name}
    layers = {
        name.removeprefix(start).partition(".")[0]
        for start in starts
        for name in names
        if name.startswith(start)
    }
    wanted = {}
    if starts:
        wanted["layers"] = config.num_layers, len(layers)
    if config.experts is not None:
        wanted["experts"] = config.experts.num * sum(config.experts.layers), len(names)
    for what, (asked, found) in wanted.items():
        if asked > found:
            raise CheckpointError(
                f"The weights do not fit config.json, by which there are {asked} {what}, and the "
                f"file has tensors of {found} at most. Check that both are of the same "
                "checkpoint, and complete."
            )


def match_tensors(
    placed: Mapping[str, list[TensorPlacement]],
    leaves: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, T],
    not_needed: tuple[str, ...] = (),
) -> dict[str, T]:
    """Returns the stored tensor of each placement, by the placement's name.

    Args:
        placed: the tensors that make up each leaf.
        leaves: shape of each leaf by its path.
        stored: the tensors that there are, by name.
        not_needed: names of tensors that may be stored and are not used.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape; the first ones of each
            kind are listed.
    """
    stored = _text_tensors(stored)
    wanted = {
        placement.name: placement.stored_shape(leaves[path])
        for path, tensors in placed.items()
        for placement in tensors
    }
    missing, misshaped, unknown = [], [], []
    for name, shape in wanted.items():
        if name not in stored:
            missing.append(f"missing: {name}, of shape {list(shape)}")
        elif stored[name].shape != shape:
            misshaped.append(
                f"of another shape: {name} is {list(stored[name].shape)}, "
                f"config.json makes it {list(shape)}"
            )
    for name in stored:
        # Old files hold tables of frequencies, which follow from config.json.
        ignored = name in not_needed or name.endswith(".rotary_emb.inv_freq")
        if name not in wanted and not ignored:
            unknown.append(f"unknown: {name:.200}, of shape {list(stored[name].shape)}")
    kinds = [kind for kind in (missing, misshaped, unknown) if kind]
    if kinds:
        lines = "".join(listed(kind, _MOST_LISTED // len(kinds)) for kind in kinds)
        raise CheckpointError(
            f"The weights do not fit config.json; {sum(map(len, kinds))} tensors are wrong. Check "
            f"that both are of the same checkpoint, and complete:{lines}"
        )
    return {name: stored[name] for name in wanted}


def copy_into(placement: TensorPlacement, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Puts a stored tensor into its leaf, cast to the leaf's dtype."""
    row = 0
    for region in placement.regions_in(leaf):
        num_rows = region.shape[0]
        _copy(region.view, tensor[row : row + num_rows].reshape(region.view.shape))
        row += num_rows


def copy_out(placement: TensorPlacement, leaf: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the tensor to store for a leaf, cast to `dtype`."""
    tensor = np.empty(placement.stored_shape(leaf.shape), dtype)
    row = 0
    for region in placement.regions_in(leaf):
        num_rows = region.shape[0]
        _copy(tensor[row : row + num_rows].reshape(region.view.shape), region.view)
        row += num_rows
    return tensor


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Casts and copies arrays of one shape, of which one may be transposed in memory."""
    adjacent = [array.strides[-1:] == (array.itemsize,) for array in (target, source)]
    if target.ndim < 2 or all(adjacent):
        np.copyto(target, source, casting="unsafe")
        return
    # A block of rows is transposed at a time. It goes through a buffer whose rows are a little
    # longer than the block's: rows a power of two apart would evict each other from the cache.
    num_rows, num_columns = target.shape[-2:]
    buffer = np.empty((min(num_rows, 128), num_columns + 32), target.dtype)
    for index in np.ndindex(target.shape[:-2]):
        to, of = target[index], source[index]
        for row in range(0, num_rows, 128):
            block = buffer[: min(num_rows - row, 128), :num_columns]
            np.copyto(block, of[row : row + 128], casting="unsafe")
            to[row : row + 128] = block


def _text_tensors(stored: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of the text model under the names that they have in text-only models."""
    if not any(name.startswith(tuple(_TEXT_PREFIXES)) for name in stored):
        return dict(stored)
    found = {}
    for name, tensor in stored.items():
        if name.removeprefix("model.").startswith(_OTHER_PARTS):
            continue
        for prefix, plain in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = plain + name.removeprefix(prefix)
                break
        found[name] = tensor
    return found
