"""From a model to a `.litertlm`, the file of the LiteRT-LM runtime.

There the runtime owns the loop, and a file holds what it calls: a table of token embeddings, which
it reads one token at a time; the model, as `prefill_N` and `decode`; the tokenizer, and the tokens
that begin and end a text. With a drafter also `verify`, a pass over G + 1 tokens, and one function
that drafts one token.

The runtime knows one kind of drafter: a greedy chain of always G tokens, accepted where the target
would choose the same, without a cache of its own. It calls the function G times. Each time it hands
over the embedding of the last token beside what the last call returned, or, the first time, what
the target returned; and every time the same position and the same target's caches.

Layer skip fits that, as it reads the target's own caches: what drafted tokens add to them travels
in what each call returns (`Carried`). The runtime wants that to be as wide as an embedding, so
embeddings are padded with zeros to its width.
"""

import dataclasses
import importlib
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.checkpoint.files import replacing_files
from jaxspec.core import masks
from jaxspec.core.forms import exchanged
from jaxspec.core.types import Drafter, Hidden, KVCache, LayerKV, Params
from jaxspec.drafters import LayerSkip, LoadedDrafter, NoDraft
from jaxspec.mobile.export import ExportConfig, check_model, lower_all, to_tflite
from jaxspec.mobile.extra import needs_extra
from jaxspec.mobile.forms import litert_forms
from jaxspec.mobile.records import (
    Record,
    Signature,
    Target,
    kv_inputs,
    read_cache,
    unembed_rows,
    write_kv,
)
from jaxspec.models import ModelConfig, Network, Skips, lookup_rows
from jaxspec.models.rope import rotations

LITERTLM_FILE = "model.litertlm"
_CACHE = "kv_cache"  # begins the names by which the runtime knows a cache
# The runtime gives a message's content as a list of parts, and templates are written for strings.
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
    *("bundle", "verify", "levels", "drafts", "block_length"),
    *("check_gpu_ops", "trees"),
)


def export_litertlm(
    model: Model,
    folder: str | Path,
    drafter: Drafter | LoadedDrafter | None = None,
    config: ExportConfig | None = None,
) -> Path:
    """Writes `model.litertlm` into a folder.

    Args:
        model: the target, with its tokenizer.
        folder: made if it is not there; what else it holds stays.
        drafter: a `LayerSkip` with its set baked in, of which the runtime uses the whole length
            each time; `None`: plain decoding only.
        config: slots, sizes of prefill, and quantization; 1024 tokens of text and int8 by default.

    Returns:
        The file.

    Raises:
        ValueError: the extra `mobile-lm` is not installed, the model has no tokenizer or fills in
            masked slots, a setting does not fit, or the drafter is not one the runtime can run.
    """
    config = config or ExportConfig()
    drafting = _drafting(drafter)
    _check(model, drafting, config)
    assert model.tokenizer is not None, "checked"
    widest = max(*config.prefill, drafting.num_speculative_tokens + 1 if drafting else 1)
    # The runtime pads the last part of a prompt: what is written past the text needs room.
    num_tokens = min(model.network.vocab_size, model.tokenizer.vocab_size)
    target = Target(model.config, config.slots + widest, num_tokens)
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
    version = lm.Metadata("Authors", f"jaxspec {metadata.version('jaxspec')}", lm.DType.STRING)
    builder.add_system_metadata(version)
    with (
        replacing_files(Path(folder)) as staging,
        tempfile.TemporaryDirectory(dir=staging) as parts_folder,
    ):
        parts = Path(parts_folder)
        (parts / "metadata.pb").write_bytes(describe_text(model, model.tokenizer, config.slots))
        builder.add_llm_metadata(str(parts / "metadata.pb"))
        model.tokenizer.write(parts)
        builder.add_hf_tokenizer(str(parts / "tokenizer.json"))
        for name, signatures in sections.items():
            lowered = lower_all(signatures, params, config.quantization)
            path = parts / f"{name}.tflite"
            path.write_bytes(to_tflite(lowered, params, config.quantization, {"section": name}))
            kind = lm.TfLiteModelType[name.upper()]
            # On a GPU the runtime refuses our drafter, with a message if it is told so.
            only = "cpu" if name == "mtp_drafter" else None
            builder.add_tflite_model(str(path), kind, backend_constraint=only)
        with (staging / LITERTLM_FILE).open("wb") as file:
            builder.build(file)
    return Path(folder) / LITERTLM_FILE


def _drafting(drafter: Drafter | LoadedDrafter | None) -> LayerSkip | None:
    inner = drafter.drafter if isinstance(drafter, LoadedDrafter) else drafter
    match inner:
        case None | NoDraft():
            return None
        case LayerSkip(skip=Skips()):
            return inner
        case LayerSkip():
            raise ValueError("drafter: LayerSkip needs its set baked in: skip=Skips(...).")
    raise ValueError(
        f"drafter: LiteRT-LM cannot run {type(inner).__name__}, as it gives a drafter no cache of "
        "its own and no tree; LayerSkip it can."
    )


def _check(model: Model, drafting: LayerSkip | None, config: ExportConfig) -> None:
    if model.tokenizer is None:
        raise ValueError(
            "model: has no tokenizer, and a .litertlm must hold one: put the model's "
            "tokenizer.json into its folder."
        )
    check_model(model.config, config.slots)
    if model.config.diffusion is not None:
        raise ValueError(
            "model: it fills in masked slots, and LiteRT-LM decodes from left to right; take a "
            "causal model, or export a .tflite."
        )
    defaults = ExportConfig()
    for name in _WITHOUT_MEANING:
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name}: has no meaning in a .litertlm; leave it out.")
    if drafting is not None:
        drafting.check_fit(Params(model.network, ()))
        if drafting.num_speculative_tokens + 1 >= config.slots:
            raise ValueError(
                f"slots: a draft of {drafting.num_speculative_tokens} tokens needs more than "
                f"{config.slots} slots."
            )


def describe_text(model: Model, tokenizer: Tokenizer, slots: int) -> bytes:
    """What begins and ends a text, how chats are written, and how long texts may be."""
    made = _builder_module("runtime.proto.llm_metadata_pb2").LlmMetadata()
    made.max_num_tokens = slots
    made.llm_model_type.generic_model.SetInParent()
    made.supports_thinking = made.supports_function_calling = False
    # The runtime's tokenizer adds nothing to a text; this is what ours puts before each.
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
    """A module of the package that writes such files, which describes nothing to type checkers."""
    with needs_extra("Exporting for LiteRT-LM", "mobile-lm"):
        return importlib.import_module(f"litert_lm_builder.{name}")


@dataclasses.dataclass(frozen=True)
class Carried:
    """One row of numbers that a draft call hands to the next, and the target to the first.

    In this order: features of the last token; for each token of the draft but the last 1 where its
    keys and values are known; these keys, then values, of each layer whose attention is kept. The
    target fills in its features, and zeros.

    Attributes:
        config: of the target.
        skip: the layers that drafting skips; `None` without a drafter.
        slots: tokens of a draft whose keys and values later ones read: all but the last.
    """

    config: ModelConfig
    skip: Skips | None
    slots: int

    @classmethod
    def of(cls, config: ModelConfig, drafting: LayerSkip | None) -> "Carried":
        if drafting is None:
            return cls(config, None, 0)
        return cls(config, drafting.skip, drafting.num_speculative_tokens - 1)

    @property
    def layers(self) -> tuple[int, ...]:
        """Those whose keys and values travel."""
        if self.skip is None:
            return ()
        return tuple(i for i, skipped in enumerate(self.skip.attention) if not skipped)

    @property
    def width(self) -> int:
        head = self.config.num_kv_heads * self.config.head_dim
        return self.config.embed_dim + self.slots * (1 + 2 * head * len(self.layers))

    def pad(self, rows: Float[Array, "nodes embed"]) -> Float[Array, "nodes width"]:
        """Embeddings or features, followed by zeros."""
        return jnp.pad(rows, ((0, 0), (0, self.width - rows.shape[1])))

    def unpack(
        self, row: Float[Array, " width"]
    ) -> tuple[Float[Array, " slots"], tuple[LayerKV | None, ...]]:
        """Which slots are filled, and the scratch as `Network.forward` takes it."""
        heads, dim, slots = self.config.num_kv_heads, self.config.head_dim, self.slots
        rest = row[self.config.embed_dim :]
        scratch: list[LayerKV | None] = [None] * self.config.num_layers
        filled, rest = rest[:slots], rest[slots:]
        size = heads * dim * slots
        for layer in self.layers:
            keys, values, rest = rest[:size], rest[size : 2 * size], rest[2 * size :]
            scratch[layer] = LayerKV(
                keys.reshape(heads, dim, slots), values.reshape(heads, slots, dim)
            )
        return filled, tuple(scratch)

    def pack(
        self,
        filled: Float[Array, " slots"],
        scratch: tuple[LayerKV | None, ...],
        hidden: Hidden,
    ) -> Float[Array, "1 width"]:
        """The next row: the token of this pass goes into the first free slot, if there is one."""
        free = (jnp.arange(self.slots) == jnp.sum(filled)).astype(jnp.float32)
        parts = [hidden.features.reshape(-1), filled + free]
        for layer in self.layers:
            old, new = scratch[layer], hidden.new_kv[layer]
            assert old is not None, "kept"
            parts.append((old.keys + new.keys * free[None, None]).reshape(-1))
            parts.append((old.values + new.values * free[None, :, None]).reshape(-1))
        return jnp.concatenate(parts)[None]


def embed_signature(target: Target, carried: Carried) -> Signature:
    """`embed`: one token's row of the table, as the model's passes take it."""

    def embed(params: Params, inputs: Record) -> Record:
        table = params.target.params["embed"]["embedding"]
        return {"embeddings": carried.pad(lookup_rows(table, inputs["token_ids"][0]))[None]}

    return _signature(target, embed, {"token_ids": jax.ShapeDtypeStruct((1, 1), jnp.int32)})


def prefill_signature(target: Target, carried: Carried, size: int) -> Signature:
    """`prefill_N`: caches up to `size` tokens. What pads them is written behind them."""

    def prefill(params: Params, inputs: Record) -> Record:
        return _pass(params.target, target, inputs)[1]

    return _signature(target, prefill, _pass_inputs(target, carried, size))


def verify_signature(target: Target, carried: Carried, size: int) -> Signature:
    """`decode` and `verify`: the same over one or G + 1 tokens, with what follows each of them."""

    def verify(params: Params, inputs: Record) -> Record:
        hidden, caches = _pass(params.target, target, inputs)
        logits = unembed_rows(params.target, target, hidden.features)
        outputs = {"logits": logits[None], **caches}
        if carried.skip is not None:
            outputs["activations"] = carried.pad(hidden.features)[None]
        return outputs

    return _signature(target, verify, _pass_inputs(target, carried, size))


def draft_signature(target: Target, carried: Carried) -> Signature:
    """`draft`: one token of a draft, by the target with layers skipped.

    activations: the embedding of the last token, then what the last call returned. input_pos: of
    the last token that is cached.
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
        "activations": jax.ShapeDtypeStruct((1, 1, 2 * carried.width), jnp.float32),
        "input_pos": jax.ShapeDtypeStruct((1,), jnp.int32),
        **kv_inputs(target, _CACHE),
    }
    return _signature(target, draft, inputs)


def _pass(network: Network, target: Target, inputs: Record) -> tuple[Hidden, Record]:
    """Reads some tokens behind the cached ones; the first one's position is the cached length.

    The runtime's own mask is not needed: a causal model's follows from the positions.
    """
    positions = inputs["input_pos"]
    length = positions[0]
    cache = read_cache(inputs, _CACHE, target.config.num_layers, length)
    embedded = inputs["embeddings"][0]
    seen = masks.causal(len(positions))
    hidden = _forward(network, target, embedded, positions, seen, cache)
    return hidden, write_kv(inputs, _CACHE, hidden.new_kv, length)


def _pass_inputs(target: Target, carried: Carried, size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {
        "embeddings": jax.ShapeDtypeStruct((1, size, carried.width), jnp.float32),
        "input_pos": jax.ShapeDtypeStruct((size,), jnp.int32),
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
    """`Network.forward` for tokens that the runtime has looked up: their rows in place of ids."""
    forms = _forms(target)
    tokens = jnp.zeros(len(embedded), jnp.int32)
    rows = embedded[:, : target.config.embed_dim]

    def lookup(table: Array, ids: Array) -> Array:
        return rows if ids is tokens else forms[lookup_rows](table, ids)

    with exchanged({**forms, lookup_rows: lookup}):
        return network.forward(tokens, positions, mask, cache, **options)


def _forms(target: Target) -> Mapping[Any, Any]:
    """LiteRT's, but rotations are computed: the runtime's GPU takes no table of floats."""
    forms = dict(litert_forms(target.slots))
    del forms[rotations]
    return forms


def _signature(
    target: Target, function: Any, inputs: Mapping[str, jax.ShapeDtypeStruct]
) -> Signature:
    def traced(params: Params, record: Record) -> Record:
        with exchanged(_forms(target)):
            return function(params, record)

    return Signature(traced, inputs)
