"""Export of a model to a `.litertlm`, the file of the LiteRT-LM runtime.

The runtime owns the loop, and the file holds the functions that it calls: a table of token
embeddings, which it reads one token at a time; the model, as `prefill_N` and `decode`; the
tokenizer, and the tokens that begin and end a text. With a drafter also `verify`, a pass over G + 1
tokens, and one function that drafts one token.

The runtime knows one kind of drafter: a greedy chain of always G tokens, accepted where the target
would choose the same, without a separate cache. It calls the drafting function G times, each time
with the embedding of the last token, the output of the last call (the first time, of the target),
the same position and the same caches of the target.

Layer skip fits that, as it reads the target's own caches: the keys and values of drafted tokens
travel in the output of each call (`Carried`). The runtime wants that output to be as wide as an
embedding, so embeddings are padded with zeros to its width.
"""

import dataclasses
import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.checkpoint.files import check_space, replacing_files
from jaxspec.core import masks
from jaxspec.core.forms import exchanged
from jaxspec.core.types import Hidden, KVCache, LayerKV, Params
from jaxspec.drafters import DrafterLike, LayerSkip, NoDraft, loaded_drafter
from jaxspec.extras import installed_version, needs_extra
from jaxspec.mobile.contents import ExportConfig, check_model, in_one_dtype
from jaxspec.mobile.convert import lower_all, to_tflite
from jaxspec.mobile.export import calibrated
from jaxspec.mobile.forms import litert_forms
from jaxspec.mobile.records import (
    Record,
    Shapes,
    Signature,
    Target,
    cleared,
    floats,
    ints,
    kv_inputs,
    make_signature,
    read_cache,
    unembed_rows,
    write_kv,
)
from jaxspec.mobile.weights import TfliteFile
from jaxspec.models import ModelConfig, Network, Skips, lookup_rows
from jaxspec.models.rope import rotations

LITERTLM_FILE = "model.litertlm"
_CACHE = "kv_cache"  # prefix of the runtime's names of caches
# The runtime passes a message's content as a list of parts; templates are written for strings.
_CONTENTS_TO_STRINGS = """\
{%- set told = namespace(messages=[]) -%}
{%- for message in messages -%}
  {%- set content = message['content'] -%}
  {%- if content is not string -%}
    {%- set content = content | map(attribute='text') | join -%}
  {%- endif -%}
  {%- set told.messages = told.messages + [{'role': message['role'], 'content': content}] -%}
{%- endfor -%}
{%- set messages = told.messages %}"""
_WITHOUT_MEANING = (
    *("bundle", "verify", "levels", "drafts", "block_length", "check_gpu_ops", "trees"),
)


def export_litertlm(
    model: Model,
    folder: str | Path,
    drafter: DrafterLike | None = None,
    config: ExportConfig | None = None,
) -> Path:
    """Writes `model.litertlm` into a folder.

    Args:
        model: the target, with its tokenizer.
        folder: made if it does not exist; other files in it stay.
        drafter: a `LayerSkip` with a fixed set, always drafted at full length; `None`: plain
            decoding only.
        config: capacity, prefill and quantization; 1024 tokens of text and int8 by default.

    Returns:
        The file.

    Raises:
        ValueError: the extra `mobile-lm` is not installed, the model has no tokenizer or fills in
            masks, a setting does not fit, the runtime cannot run the drafter, or the disk has too
            little room: for its sections, and then for the file that holds copies of them.
    """
    config, model = config or ExportConfig(), in_one_dtype(model)[0]
    drafting = _drafting(drafter)
    _check(model, drafting, config)
    assert model.tokenizer is not None, "checked"
    widest = max(*config.prefill, drafting.num_speculative_tokens + 1 if drafting else 1)
    # The runtime pads the last part of a prompt, and the padding needs room behind the text.
    num_tokens = min(model.network.vocab_size, model.tokenizer.vocab_size)
    target = Target(model.config, config.capacity + widest, num_tokens, config.capacity + widest)
    params, carried = Params(model.network, ()), Carried.of(model.config, drafting)
    sections = {
        "embedder": {"embed": embed_signature(target, carried)},
        "prefill_decode": {
            **{
                f"prefill_{size}": prefill_signature(target, carried, size)
                for size in config.prefill
            },
            "decode": verify_signature(target, carried, 1),
        },
    }
    if drafting is not None:
        size = drafting.num_speculative_tokens + 1
        sections["prefill_decode"]["verify"] = verify_signature(target, carried, size)
        sections["mtp_drafter"] = {"draft": draft_signature(target, carried)}
    lm = _builder_module("litertlm_builder")
    builder = lm.LitertLmFileBuilder()
    author = f"jaxspec {installed_version()}"
    builder.add_system_metadata(lm.Metadata("Authors", author, lm.DType.STRING))
    files = {
        name: to_tflite(
            lower_all(signatures, params), params, config.quantization, {"section": name}
        )
        for name, signatures in sections.items()
    }
    with (
        replacing_files(Path(folder)) as staging,
        tempfile.TemporaryDirectory(dir=staging) as parts_folder,
    ):
        _check_space(staging, files)  # before a calibration, which takes long
        calibration = calibrated(model, config)
        if calibration is not None:
            files = {name: file.with_calibration(calibration) for name, file in files.items()}
            _check_space(staging, files)
        parts = Path(parts_folder)
        (parts / "metadata.pb").write_bytes(describe_text(model, model.tokenizer, config.capacity))
        builder.add_llm_metadata(str(parts / "metadata.pb"))
        model.tokenizer.write(parts)
        builder.add_hf_tokenizer(str(parts / "tokenizer.json"))
        for name, part in files.items():
            path = parts / f"{name}.tflite"
            part.write(path)
            kind = lm.TfLiteModelType[name.upper()]
            # The runtime cannot run this drafter on a GPU; told so, it says it in a message.
            only = "cpu" if name == "mtp_drafter" else None
            builder.add_tflite_model(str(path), kind, backend_constraint=only)
        with (staging / LITERTLM_FILE).open("wb") as file:
            builder.build(file)
    return Path(folder) / LITERTLM_FILE


def _check_space(folder: Path, files: Mapping[str, TfliteFile]) -> None:
    check_space(folder, 2 * sum(file.size for file in files.values()))  # parts, then the whole


def _drafting(drafter: DrafterLike | None) -> LayerSkip | None:
    inner = loaded_drafter(drafter).drafter
    match inner:
        case NoDraft():
            return None
        case LayerSkip(skip=Skips()):
            return inner
        case LayerSkip():
            raise ValueError("drafter: LayerSkip needs a fixed set: skip=Skips(...).")
    raise ValueError(
        f"drafter: LiteRT-LM cannot run {type(inner).__name__}, as it gives a drafter no separate "
        "cache and no tree; take LayerSkip."
    )


def _check(model: Model, drafting: LayerSkip | None, config: ExportConfig) -> None:
    if model.tokenizer is None:
        raise ValueError(
            "model: it has no tokenizer, and a .litertlm must hold one: put the model's "
            "tokenizer.json into its folder."
        )
    if model.config.diffusion is not None:
        raise ValueError(
            "model: it fills in masks, and LiteRT-LM decodes from left to right; take a causal "
            "model, or export a .tflite."
        )
    check_model(model.config, config.capacity)
    defaults = ExportConfig()
    for name in _WITHOUT_MEANING:
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name}: has no meaning in a .litertlm; leave it out.")
    if drafting is not None:
        drafting.check_fit(Params(model.network, ()))
        if drafting.num_speculative_tokens + 1 >= config.capacity:
            raise ValueError(
                f"capacity: a draft of {drafting.num_speculative_tokens} tokens needs more than "
                f"{config.capacity} tokens."
            )


def describe_text(model: Model, tokenizer: Tokenizer, capacity: int) -> bytes:
    """Describes where a text begins and ends, how chats are written, and the longest text."""
    made = _builder_module("runtime.proto.llm_metadata_pb2").LlmMetadata()
    made.max_num_tokens = capacity
    made.llm_model_type.generic_model.SetInParent()
    made.supports_thinking = made.supports_function_calling = False
    # The runtime's tokenizer adds nothing to a text; ours puts this before each.
    before = tokenizer.encode("")
    if before:
        made.start_token.token_ids.ids.extend(before)
    for token in model.stop_token_ids:
        made.stop_tokens.add().token_ids.ids.append(token)
    if tokenizer.pad_id is not None:
        made.pad_token.token_ids.ids.append(tokenizer.pad_id)
    if "default" in tokenizer.templates:
        made.jinja_prompt_template = _CONTENTS_TO_STRINGS + tokenizer.templates["default"]
    sampler = made.sampler_params
    sampler.type, sampler.k, sampler.p, sampler.temperature = sampler.TOP_P, 1, 0.95, 1.0
    return made.SerializeToString()


def _builder_module(name: str) -> Any:
    """Imports a module of the package that writes such files; it has no types."""
    with needs_extra("Exporting for LiteRT-LM", "mobile-lm"):
        return importlib.import_module(f"litert_lm_builder.{name}")


@dataclasses.dataclass(frozen=True)
class Carried:
    """One row of numbers that a draft call passes to the next, and the target to the first.

    In this order: features of the last token; 1 for each token of the draft, except the last, whose
    keys and values are known; these keys, then values, of each layer whose attention is kept. The
    target writes its features, then zeros.

    Attributes:
        config: of the target.
        skip: the layers that drafting skips; `None` without a drafter.
        capacity: tokens of a draft whose keys and values later ones read: all except the last.
    """

    config: ModelConfig
    skip: Skips | None
    capacity: int

    @classmethod
    def of(cls, config: ModelConfig, drafting: LayerSkip | None) -> "Carried":
        """Makes the row for a drafter; it holds features only where there is none."""
        if drafting is None:
            return cls(config, None, 0)
        return cls(config, drafting.skip, drafting.num_speculative_tokens - 1)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers whose keys and values travel."""
        if self.skip is None:
            return ()
        return tuple(i for i, skipped in enumerate(self.skip.attention) if not skipped)

    @property
    def width(self) -> int:
        """Numbers of the row."""
        head = self.config.num_kv_heads * self.config.head_dim
        return self.config.embed_dim + self.capacity * (1 + 2 * head * len(self.layers))

    def pad(self, rows: Float[Array, "nodes embed"]) -> Float[Array, "nodes width"]:
        """Pads embeddings or features with zeros."""
        return jnp.pad(rows, ((0, 0), (0, self.width - rows.shape[1])))

    def unpack(
        self, row: Float[Array, " width"]
    ) -> tuple[Float[Array, " capacity"], tuple[LayerKV | None, ...]]:
        """Returns 1 for each known token, and the scratch as `Network.forward` takes it."""
        heads, dim, capacity = self.config.num_kv_heads, self.config.head_dim, self.capacity
        rest = row[self.config.embed_dim :]
        scratch: list[LayerKV | None] = [None] * self.config.num_layers
        filled, rest = rest[:capacity], rest[capacity:]
        size = heads * dim * capacity
        for layer in self.layers:
            keys, values, rest = rest[:size], rest[size : 2 * size], rest[2 * size :]
            scratch[layer] = LayerKV(
                keys.reshape(heads, dim, capacity), values.reshape(heads, capacity, dim)
            )
        return filled, tuple(scratch)

    def pack(
        self,
        filled: Float[Array, " capacity"],
        scratch: tuple[LayerKV | None, ...],
        hidden: Hidden,
    ) -> Float[Array, "1 width"]:
        """Makes the next row: the token of this pass takes the first free place, if any is left."""
        free = (jnp.arange(self.capacity) == jnp.sum(filled)).astype(jnp.float32)
        parts = [hidden.features.reshape(-1), filled + free]
        for layer in self.layers:
            old, new = scratch[layer], hidden.new_kv[layer]
            assert old is not None, "kept"
            parts.append((old.keys + new.keys * free[None, None]).reshape(-1))
            parts.append((old.values + new.values * free[None, :, None]).reshape(-1))
        return jnp.concatenate(parts)[None]


def embed_signature(target: Target, carried: Carried) -> Signature:
    """Makes `embed`: one token's row of the table, as the model's passes take it."""

    def embed(params: Params, inputs: Record) -> Record:
        table = params.target.params["embed"]["embedding"]
        return {"embeddings": carried.pad(lookup_rows(table, inputs["token_ids"][0]))[None]}

    return make_signature(target, embed, {"token_ids": ints(1, 1)}, _forms(target))


def prefill_signature(target: Target, carried: Carried, size: int) -> Signature:
    """Makes `prefill_N`, which caches up to `size` tokens and writes their padding behind them."""

    def prefill(params: Params, inputs: Record) -> Record:
        inputs = cleared(inputs, _CACHE, inputs["input_pos"][0])
        return _pass(params.target, target, inputs)[1]

    return make_signature(target, prefill, _pass_inputs(target, carried, size), _forms(target))


def verify_signature(target: Target, carried: Carried, size: int) -> Signature:
    """Makes `decode` and `verify`: logits behind each of one or G + 1 tokens."""

    def verify(params: Params, inputs: Record) -> Record:
        hidden, caches = _pass(params.target, target, inputs)
        logits = unembed_rows(params.target, target, hidden.features)
        outputs = {"logits": logits[None], **caches}
        if carried.skip is not None:
            outputs["activations"] = carried.pad(hidden.features)[None]
        return outputs

    return make_signature(target, verify, _pass_inputs(target, carried, size), _forms(target))


def draft_signature(target: Target, carried: Carried) -> Signature:
    """Makes `draft`: one token of a draft, by the target with layers skipped.

    Inputs: `activations`, the embedding of the last token followed by the output of the last call;
    `input_pos`, the position of the last cached token.
    """

    def draft(params: Params, inputs: Record) -> Record:
        embedded, row = jnp.split(inputs["activations"][0, 0], 2)
        filled, scratch = carried.unpack(row)
        length = inputs["input_pos"] + 1
        hidden = _forward(
            params.target,
            target,
            embedded[None],
            length + jnp.sum(filled).astype(jnp.int32),
            (jnp.concatenate([filled, jnp.ones(1)]) > 0)[None],
            read_cache(inputs, _CACHE, target.config.num_layers, length[0]),
            scratch=scratch,
            skip=carried.skip,
        )
        return {
            "logits": unembed_rows(params.target, target, hidden.features)[None],
            "projected_activations": carried.pack(filled, scratch, hidden)[None],
        }

    inputs = {
        "activations": floats(1, 1, 2 * carried.width),
        "input_pos": ints(1),
        **kv_inputs(target, _CACHE),
    }
    return make_signature(target, draft, inputs, _forms(target))


def _pass(network: Network, target: Target, inputs: Record) -> tuple[Hidden, Record]:
    """Reads tokens behind the cached ones; the first one's position is the cached length.

    The runtime's mask is not needed, as a causal mask follows from the positions.
    """
    positions = inputs["input_pos"]
    length = positions[0]
    cache = read_cache(inputs, _CACHE, target.config.num_layers, length)
    embedded = inputs["embeddings"][0]
    seen = masks.causal(len(positions))
    hidden = _forward(network, target, embedded, positions, seen, cache)
    return hidden, write_kv(inputs, _CACHE, hidden.new_kv, length)


def _pass_inputs(target: Target, carried: Carried, size: int) -> Shapes:
    return {
        "embeddings": floats(1, size, carried.width),
        "input_pos": ints(size),
        **kv_inputs(target, _CACHE),
    }


def _forward(
    network: Network,
    target: Target,
    embedded: Float[Array, "nodes padded"],
    positions: Int[Array, " nodes"],
    mask: Array,
    cache: KVCache,
    **options: Any,
) -> Hidden:
    """Runs `Network.forward` on rows of the table, which the runtime has looked up, not on ids."""
    forms = _forms(target)
    tokens = jnp.zeros(len(embedded), jnp.int32)
    rows = embedded[:, : target.config.embed_dim]

    def lookup(table: Array, ids: Array) -> Array:
        return rows if ids is tokens else forms[lookup_rows](table, ids)

    with exchanged({**forms, lookup_rows: lookup}):
        return network.forward(tokens, positions, mask, cache, **options)


def _forms(target: Target) -> Mapping[Any, Any]:
    """Returns LiteRT's forms without a table of rotations, which the runtime's GPU refuses."""
    forms = dict(litert_forms(target.capacity))
    del forms[rotations]
    return forms
