"""One decoder-only transformer for every family; what differs is in `ModelConfig`.

Linen is confined to this folder: outside it a network is a `Network`, a pytree of plain nested
dicts with static settings. Weights lie as [in, out], queries, keys and values fused and gate and up
fused, so that a dense layer is four products with weights: on every backend their number, and the
order weights lie in, decide what a pass of a few tokens costs.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jaxspec.compilation import warn_of_wrong_sums
from jaxspec.core.cache import capacity_of, empty_layer
from jaxspec.core.forms import exchangeable
from jaxspec.core.masks import sliding_window
from jaxspec.core.narrow import NarrowCall
from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree
from jaxspec.models.attention import Segment, at_least_float32, attend, softcapped
from jaxspec.models.config import ModelConfig
from jaxspec.models.linear import exact_products, multiply
from jaxspec.models.native_forms import (
    attention_fits,
    mlp_fits,
    native_attention,
    native_mlp,
)
from jaxspec.models.rope import rotate, rotations
from jaxspec.models.summary import summary_html, summary_line, weight_facts


class Skips(NamedTuple):
    """Sub-layers to leave out, norm included; their input passes unchanged.

    A tuple of bools is static: the work is absent from the program. An array holds 1 for skipped
    and 0 for kept, and may be traced: the work is done and multiplied away.
    """

    attention: tuple[bool, ...] | Float[Array, " layers"]
    mlp: tuple[bool, ...] | Float[Array, " layers"]


@exchangeable
def lookup_rows(
    table: Float[Array, "rows width"], ids: Int[Array, " nodes"]
) -> Float[Array, "nodes width"]:
    """Rows of a table. Every table read of the models goes through here.

    Ids outside the table are clamped: callers check what users give.

    Example:
        >>> from jaxspec.models import lookup_rows
        >>> lookup_rows(jnp.eye(3), jnp.array([2, 0])).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    return _rows_of_halves(table, ids) if table.dtype == jnp.bfloat16 else _rows(table, ids)


def _rows(table: Array, ids: Array) -> Array:
    return table.at[ids].get(mode="clip")


# XLA gathers no bfloat16 on CPUs: it would first write the whole table in float32.
@jax.custom_jvp
def _rows_of_halves(table: Array, ids: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(_rows(bits, ids), jnp.bfloat16)


@_rows_of_halves.defjvp
def _differentiate_rows(primals: tuple[Array, Array], tangents: tuple[Array, Any]):
    table, ids = primals
    return _rows_of_halves(table, ids), _rows(tangents[0], ids)


class Visible(NamedTuple):
    """The part of every segment that each token sees, for one kind of layer."""

    prefix: Bool[Array, "nodes_or_one places"] | None
    scratch: Bool[Array, "nodes scratch"] | None
    own: Bool[Array, "nodes nodes"]


class Rotation(NamedTuple):
    """Every token's rotation, for one kind of layer."""

    cosines: Float[Array, "nodes_or_one pairs"]
    sines: Float[Array, "nodes_or_one pairs"]


class RMSNorm(nn.Module):
    """x / rms(x), times scale; statistics in float32."""

    eps: float
    plus_one: bool

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = self.param("scale", init, inputs.shape[-1:])
        return rms_norm(inputs, scale, self.eps, self.plus_one)


class NormScale(nn.Module):
    """The weights of an `RMSNorm` that is computed elsewhere."""

    width: int
    plus_one: bool

    @nn.compact
    def __call__(self) -> Float[Array, " width"]:
        init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        return self.param("scale", init, (self.width,))


def rms_norm(
    inputs: Float[Array, "*batch_and_widths"],
    scale: Float[Array, "*widths"],
    eps: float,
    plus_one: bool,
) -> Float[Array, "*batch_and_widths"]:
    """X / rms(x) over the axes of scale, times scale; statistics in float32."""
    wide = inputs.astype(at_least_float32(inputs.dtype))
    axes = tuple(range(-scale.ndim, 0))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=axes, keepdims=True) + eps)
    shape = (1,) * (inputs.ndim - scale.ndim) + scale.shape
    if plus_one:
        # Gemma scales before it rounds, Llama after.
        return (normed * (1.0 + scale.astype(wide.dtype)).reshape(shape)).astype(inputs.dtype)
    return normed.astype(inputs.dtype) * scale.reshape(shape)


@exchangeable
def project(
    inputs: Float[Array, "nodes *ins"], kernel: Shaped[Array, "*ins_and_outs"]
) -> Float[Array, "nodes *outs"]:
    """Contracts all axes of each input with the first ones of a kernel."""
    width = math.prod(inputs.shape[1:])
    outputs = multiply(inputs.reshape(-1, width), kernel.reshape(width, -1))
    return outputs.reshape(-1, *kernel.shape[inputs.ndim - 1 :])


class Weights(NamedTuple):
    """The weights of a product: [*ins, *outs], and [*outs] or `None`.

    A kernel of int8 has scales, see `jaxspec.models.storage`.
    """

    kernel: Shaped[Array, "*ins_and_outs"]
    bias: Float[Array, "*outs"] | None
    scale: Float[Array, "*outs"] | None

    def apply(self, inputs: Float[Array, "nodes *ins"]) -> Float[Array, "nodes *outs"]:
        outputs = project(inputs, self.kernel)
        if self.scale is not None:
            outputs = outputs * self.scale[None]
        return outputs if self.bias is None else outputs + self.bias[None]


class ScaledTable(NamedTuple):
    """A table of embeddings or an output head; the scales of one of int8 are of each token."""

    table: Shaped[Array, "..."]
    scale: Float[Array, " vocab"] | None

    def rows(self, tokens: Int[Array, " nodes"], dtype: Any) -> Float[Array, "nodes width"]:
        """Returns what a table holds of some tokens."""
        rows = lookup_rows(self.table, tokens).astype(dtype)
        return rows if self.scale is None else rows * lookup_rows(self.scale[:, None], tokens)

    def products(
        self, features: Float[Array, "nodes width"], *, turned: bool
    ) -> Float[Array, "nodes vocab"]:
        """Returns products with every token; `turned`: it lies as a table does, [vocab, width]."""
        dtype = at_least_float32(features.dtype)
        products = multiply(features, self.table, dtype, turned=turned)
        return products if self.scale is None else products * self.scale[None]


class LinearWeights(nn.Module):
    """Weights that contract all axes of `in_shape` and yield those of `out_shape`."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    bias: bool = False

    @nn.compact
    def __call__(self) -> Weights:
        init = _scaled_normal(math.prod(self.in_shape))
        kernel = self.param("kernel", init, (*self.in_shape, *self.out_shape))
        bias = self.param("bias", nn.initializers.zeros, self.out_shape) if self.bias else None
        return Weights(kernel, bias, _scale_of(self))


class Linear(LinearWeights):
    """A product with such weights."""

    @nn.compact
    def __call__(self, inputs: Float[Array, "nodes *ins"]) -> Float[Array, "nodes *outs"]:
        return super().__call__().apply(inputs)


class AttentionWeights(NamedTuple):
    """Weights of one attention.

    Attributes:
        qkv: [width, kv_heads, group + 2, head_dim]: queries of a group, its key, its value.
        out: [kv_heads, group, head_dim, embed].
        q_norm, k_norm: scales, of a head or of all; `None` for models that norm neither.
        norm, post_norm: scales, see `Stream`.
    """

    qkv: Weights
    out: Weights
    q_norm: Float[Array, " q_width"] | None
    k_norm: Float[Array, " k_width"] | None
    norm: Float[Array, " width"] | None
    post_norm: Float[Array, " embed"] | None


class AttentionRow(NamedTuple):
    """Inputs of the attention of one row; see `Attention` and `Stream`."""

    inputs: Float[Array, "nodes width"]
    base: Float[Array, "nodes embed"] | None
    rotation: Rotation | None
    visible: Visible
    prefix: LayerKV | None
    scratch: LayerKV | None


def attention(
    config: ModelConfig, weights: AttentionWeights, row: AttentionRow
) -> tuple[Float[Array, "nodes embed"], LayerKV]:
    """Grouped-query attention of one layer, with the norms and the sum of `Stream`.

    Returns the tokens' own keys and values as well.
    """
    group, norm = config.num_groups, (config.norm_eps, config.norm_plus_one)
    heads = weights.qkv.apply(_normed(config, row.inputs, weights.norm))
    turned = heads[:, :, : group + 1]
    if weights.q_norm is not None and weights.k_norm is not None:
        queries, keys = turned[:, :, :-1], turned[:, :, -1:]
        q_norm, k_norm = weights.q_norm, weights.k_norm
        if config.joint_qk_norm:
            q_norm, k_norm = q_norm.reshape(queries.shape[1:]), k_norm.reshape(keys.shape[1:])
        queries, keys = rms_norm(queries, q_norm, *norm), rms_norm(keys, k_norm, *norm)
        turned = jnp.concatenate([queries, keys], axis=2)
    if row.rotation is not None:
        turned = rotate(turned, *row.rotation)
    queries = turned[:, :, :group].transpose(1, 2, 0, 3)
    own = LayerKV(turned[:, :, group].transpose(1, 2, 0), heads[:, :, group + 1].transpose(1, 0, 2))
    segments = [
        Segment(kv, mask)
        for kv, mask in zip((row.prefix, row.scratch, own), row.visible, strict=True)
        if kv is not None and mask is not None
    ]
    attended = attend(queries, segments, config.score_scale, config.attention_softcap)
    outputs = weights.out.apply(attended.transpose(2, 0, 1, 3))
    return _joined(config, outputs, weights.post_norm, row.base), own


def _normed(config: ModelConfig, inputs: Array, scale: Array | None) -> Array:
    if scale is None:
        return inputs
    return rms_norm(inputs, scale, config.norm_eps, config.norm_plus_one)


def _joined(config: ModelConfig, outputs: Array, scale: Array | None, base: Array | None) -> Array:
    outputs = _normed(config, outputs, scale)
    if config.residual_scale != 1:
        outputs = outputs * config.residual_scale
    return outputs if base is None else base + outputs


class Stream(NamedTuple):
    """The place of a sub-layer in the residual stream: norms around it, what it is added to.

    Attributes:
        norm: scale of the norm of its inputs; `None` if they are read as they are.
        post_norm: scale of the norm of its outputs; `None` if they are not normed.
        base: what the outputs are added to; `None` to return them alone.
    """

    norm: Float[Array, " width"] | None = None
    post_norm: Float[Array, " embed"] | None = None
    base: Float[Array, "nodes embed"] | None = None


ALONE = Stream()
"""A sub-layer by itself: nothing is normed or added."""


class Attention(nn.Module):
    """Grouped-query attention of one layer, with the norms and the sum of `Stream`.

    Returns the tokens' own keys and values as well.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "nodes width"],
        rotation: Rotation | None,
        visible: Visible,
        prefix: LayerKV | None,
        scratch: LayerKV | None,
        stream: Stream = ALONE,
    ) -> tuple[Float[Array, "nodes embed"], LayerKV]:
        config, group = self.config, self.config.num_groups
        kv_heads, head_dim = config.num_kv_heads, config.head_dim
        qkv = LinearWeights(
            (inputs.shape[-1],), (kv_heads, group + 2, head_dim), config.qkv_bias, name="qkv"
        )()
        out = LinearWeights(
            (kv_heads, group, head_dim), (config.embed_dim,), config.out_bias, name="out"
        )()
        q_norm = k_norm = None
        if config.qk_norm:
            q_heads, k_heads = (config.num_heads, kv_heads) if config.joint_qk_norm else (1, 1)
            q_norm = NormScale(q_heads * head_dim, config.norm_plus_one, name="q_norm")()
            k_norm = NormScale(k_heads * head_dim, config.norm_plus_one, name="k_norm")()
        weights = AttentionWeights(qkv, out, q_norm, k_norm, stream.norm, stream.post_norm)
        row = AttentionRow(inputs, stream.base, rotation, visible, prefix, scratch)
        return narrow_attention(config, weights, row)


class MLPWeights(NamedTuple):
    """Weights of one gated MLP: [embed, 2, hidden] and [hidden, embed]; scales, see `Stream`."""

    gate_up: Weights
    down: Weights
    norm: Float[Array, " embed"] | None
    post_norm: Float[Array, " embed"] | None


class MLPRow(NamedTuple):
    """Inputs of the gated MLP of one row; see `Stream`."""

    inputs: Float[Array, "nodes embed"]
    base: Float[Array, "nodes embed"] | None


def mlp(config: ModelConfig, weights: MLPWeights, row: MLPRow) -> Float[Array, "nodes embed"]:
    """The gated MLP `down(activation(gate x) * up x)`, with the norms and the sum of `Stream`."""
    gate_up = weights.gate_up.apply(_normed(config, row.inputs, weights.norm))
    outputs = weights.down.apply(activate(config, gate_up[:, 0]) * gate_up[:, 1])
    return _joined(config, outputs, weights.post_norm, row.base)


class MLP(nn.Module):
    """The gated MLP `down(activation(gate x) * up x)`, with the norms and the sum of `Stream`."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "nodes embed"], stream: Stream = ALONE
    ) -> Float[Array, "nodes embed"]:
        embed, width, bias = self.config.embed_dim, self.config.mlp_dim, self.config.mlp_bias
        weights = MLPWeights(
            LinearWeights((embed,), (2, width), bias, name="gate_up")(),
            LinearWeights((width,), (embed,), bias, name="down")(),
            stream.norm,
            stream.post_norm,
        )
        return narrow_mlp(self.config, weights, MLPRow(inputs, stream.base))


class ExpertKernel(nn.Module):
    """One kernel per expert, stacked."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> Float[Array, "experts *shape"]:
        return self.param("kernel", _scaled_normal(self.shape[1]), self.shape)


@exchangeable
def mix_experts(
    config: ModelConfig,
    inputs: Float[Array, "nodes embed"],
    weights: Float[Array, "nodes chosen"],
    chosen: Int[Array, "nodes chosen"],
    gate_up: Float[Array, "experts embed 2 hidden"],
    down: Float[Array, "experts hidden embed"],
) -> Float[Array, "nodes embed"]:
    """The weighted sum of what each token's chosen experts make of it.

    With few tokens the chosen experts' weights are gathered, so that only they are read; with many,
    nearly all experts are read anyway and a scan over experts applies each to all tokens, weighted
    by 0 where it was not chosen. The static number of tokens decides.
    """
    if chosen.size < gate_up.shape[0]:
        return _mix_gathered(config, inputs, weights, chosen, gate_up, down)
    return _mix_scanned(config, inputs, weights, chosen, gate_up, down)


def _mix_gathered(config, inputs, weights, chosen, gate_up, down):
    nodes, embed = inputs.shape
    picked = lookup_rows(gate_up.reshape(gate_up.shape[0], -1), chosen.reshape(-1))
    picked = picked.reshape(nodes, -1, embed, 2 * gate_up.shape[3])
    hidden = jnp.einsum("nd,nkdf->nkf", inputs, picked)
    gate, up = jnp.split(hidden, 2, axis=-1)
    picked = lookup_rows(down.reshape(down.shape[0], -1), chosen.reshape(-1))
    picked = picked.reshape(nodes, -1, down.shape[1], embed)
    hidden = activate(config, gate) * up * weights[:, :, None]
    return jnp.einsum("nkf,nkfd->nd", hidden, picked)


def _mix_scanned(config, inputs, weights, chosen, gate_up, down):
    one_hot = jax.nn.one_hot(chosen, gate_up.shape[0], dtype=inputs.dtype)
    shares = jnp.einsum("nk,nke->en", weights, one_hot)

    def add_expert(total, expert):
        gate_up, down, share = expert
        hidden = inputs @ gate_up.reshape(inputs.shape[1], -1)
        gate, up = jnp.split(hidden, 2, axis=-1)
        output = (activate(config, gate) * up) @ down
        return total + share[:, None] * output, None

    return jax.lax.scan(add_expert, jnp.zeros_like(inputs), (gate_up, down, shares))[0]


class SharedExpert(nn.Module):
    """A gated MLP that every token goes through, times a sigmoid of its own."""

    config: ModelConfig
    width: int

    @nn.compact
    def __call__(self, inputs: Float[Array, "nodes embed"]) -> Float[Array, "nodes embed"]:
        gate = Linear((self.config.embed_dim,), (1,), name="router")(inputs)
        alone = self.config.replace(mlp_dim=self.width, residual_scale=1.0)
        return jax.nn.sigmoid(gate) * MLP(alone, name="mlp")(inputs)


class MixtureOfExperts(nn.Module):
    """Each token's sum over its best `per_token` gated MLPs, weighted by the router.

    Attributes:
        shared: what else is added for every token; `None`: nothing.
    """

    config: ModelConfig
    shared: SharedExpert | None = None

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "nodes embed"], stream: Stream = ALONE
    ) -> Float[Array, "nodes embed"]:
        experts, embed = self.config.experts, self.config.embed_dim
        assert experts is not None, "a sparse layer of a model without experts"
        inputs = _normed(self.config, inputs, stream.norm)
        logits = Linear((embed,), (experts.num,), name="router")(inputs)
        probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(probs, experts.per_token)
        if experts.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(inputs.dtype)
        gate_up = ExpertKernel((experts.num, embed, 2, experts.mlp_dim), name="gate_up")()
        down = ExpertKernel((experts.num, experts.mlp_dim, embed), name="down")()
        outputs = mix_experts(self.config, inputs, weights, chosen, gate_up, down)
        if self.shared is not None:
            outputs = outputs + self.shared(inputs)
        return _joined(self.config, outputs, stream.post_norm, stream.base)


class Layer(nn.Module):
    """Attention and MLP, each normed before or after or both, and added to the residual stream.

    keep_attention, keep_mlp: False leaves the work out of the program; an array multiplies.
    """

    config: ModelConfig
    sparse: bool

    def setup(self):
        config = self.config
        norm = partial(NormScale, config.embed_dim, config.norm_plus_one)
        if config.pre_norms:
            self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config)
        if self.sparse:
            assert config.experts is not None, "a sparse layer of a model without experts"
            width = config.experts.shared_dim
            self.shared = None if width is None else SharedExpert(config, width)
            self.experts = MixtureOfExperts(config, self.shared)
        else:
            self.mlp = MLP(config)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()

    def __call__(
        self,
        residual: Float[Array, "nodes embed"],
        rotation: Rotation | None,
        visible: Visible,
        prefix: LayerKV | None,
        scratch: LayerKV | None,
        keep_attention: bool | Float[Array, ""] = True,
        keep_mlp: bool | Float[Array, ""] = True,
    ) -> tuple[Float[Array, "nodes embed"], LayerKV]:
        config = self.config

        def stream(name, keep):
            norm = getattr(self, f"{name}_norm")() if config.pre_norms else None
            post_norm = getattr(self, f"{name}_post_norm")() if config.post_norms else None
            return Stream(norm, post_norm, residual if keep is True else None)

        def joined(keep, output):
            return output if keep is True else residual + output * keep.astype(output.dtype)

        if keep_attention is False:
            nodes = residual.shape[0]
            own = empty_layer(config.num_kv_heads, config.head_dim, nodes, residual.dtype)
        else:
            joins = stream("attention", keep_attention)
            output, own = self.attention(residual, rotation, visible, prefix, scratch, joins)
            residual = joined(keep_attention, output)
        if keep_mlp is not False:
            joins = stream("mlp", keep_mlp)
            output = (self.experts if self.sparse else self.mlp)(residual, joins)
            residual = joined(keep_mlp, output)
        return residual, own


def _scale_of(module: nn.Module) -> Array | None:
    """The scales of a module's matrix, if that is stored with any."""
    return module.get_variable("params", "scale")


class Embedding(nn.Module):
    """A table with a row for each token, [vocab, width]."""

    vocab_size: int
    width: int

    @nn.compact
    def __call__(self) -> ScaledTable:
        shape = (self.vocab_size, self.width)
        table = self.param("embedding", _scaled_normal(self.width), shape)
        return ScaledTable(table, _scale_of(self))


class Head(nn.Module):
    """The output head, [embed, vocab], when it is not the embedding table."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> ScaledTable:
        shape = (self.config.embed_dim, self.config.vocab_size)
        table = self.param("kernel", _scaled_normal(self.config.embed_dim), shape)
        return ScaledTable(table, _scale_of(self))


class Transitions(nn.Module):
    """The effect of a token on its follower: a Markov head, or the product of a path selector.

    Attributes:
        vocab_size: tokens of the tables.
        rank: width of a token's rows.
        scaled_by: numbers of the features of a follower's place, which scale the token's row; 0:
            they do not.
    """

    vocab_size: int
    rank: int
    scaled_by: int = 0

    def setup(self):
        table = partial(Embedding, self.vocab_size, self.rank)
        self.previous, self.following = table(), table()
        self.gate = Linear((self.scaled_by,), (self.rank,)) if self.scaled_by else None

    def rows_of(
        self, tokens: Int[Array, " nodes"], features: Float[Array, "places embed"]
    ) -> Float[Array, "nodes rank"]:
        """Returns the rows of tokens, as the features of the next places, or of one, scale them."""
        rows = self.previous().rows(tokens, features.dtype)
        return rows if self.gate is None else rows * self.gate(features)

    def follow(
        self,
        logits: Float[Array, "places vocab"],
        features: Float[Array, "places embed"],
        previous: Int[Array, " nodes"],
    ) -> Float[Array, "nodes vocab"]:
        """Returns the logits of every token, given the token before."""
        return logits + self.following().products(self.rows_of(previous, features), turned=True)

    def to_some(
        self, rows: Float[Array, "nodes rank"], tokens: Int[Array, "places some"]
    ) -> Float[Array, "nodes some"]:
        """Returns what is added to the logits of some tokens, of each node or the same of all."""
        table = self.following()
        theirs = table.rows(tokens.reshape(-1), rows.dtype).reshape(*tokens.shape, -1)
        return jnp.sum(rows[:, None] * theirs, axis=2).astype(at_least_float32(rows.dtype))


class Transformer(nn.Module):
    """Embedding, layers, final norm; the head is a separate method.

    Attributes:
        dtype: of activations; matrices may be stored narrower.
    """

    config: ModelConfig
    dtype: Any = jnp.float32

    def setup(self):
        config = self.config
        self.embedding = Embedding(config.vocab_size, config.embed_dim, name="embed")
        self.layers = [
            Layer(config, config.sparse_layer(i), name=f"layer_{i}")
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.norm_eps, config.norm_plus_one)
        if not config.tied_head:
            self.head = Head(config)
        if config.markov_rank:
            self.transitions = Transitions(config.vocab_size, config.markov_rank)

    def __call__(
        self,
        tokens: Int[Array, " nodes"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        scratch: tuple[LayerKV | None, ...] | None,
        taps: tuple[int, ...],
        skips: Skips | None,
    ) -> Hidden:
        config = self.config
        rotation, visible = {}, {}
        for kind, rope, window in _layer_kinds(config):
            rotation[kind] = rope and Rotation(
                *rotations(rope, config.head_dim, config.max_positions, positions)
            )
            visible[kind] = visible_to(positions, mask, cache, window)
        residual, inputs, new_kv = self.embed(tokens), [], []
        for i, (layer, kind) in enumerate(zip(self.layers, config.layer_types, strict=True)):
            inputs.append(residual)
            residual, own = layer(
                residual,
                rotation[kind],
                visible[kind],
                cache.layers[i] if cache is not None else None,
                scratch[i] if scratch is not None else None,
                _keep(skips.attention, i) if skips is not None else True,
                _keep(skips.mlp, i) if skips is not None else True,
            )
            new_kv.append(own)
        tapped = [inputs[i] for i in taps] or [residual[:, :0]]
        return Hidden(self.norm(residual), jnp.concatenate(tapped, axis=-1), tuple(new_kv))

    def embed(self, tokens: Int[Array, " nodes"]) -> Float[Array, "nodes embed"]:
        embedded = self.embedding().rows(tokens, self.dtype)
        scale = self.config.embed_scale
        return embedded if scale is None else embedded * scale

    def unembed(self, features: Float[Array, "nodes embed"]) -> Float[Array, "nodes vocab"]:
        tied = self.config.tied_head
        table = self.embedding() if tied else self.head()
        return scaled_logits(self.config, table.products(features, turned=tied))

    def follow(
        self,
        logits: Float[Array, "places vocab"],
        features: Float[Array, "places embed"],
        previous: Int[Array, " nodes"],
    ) -> Float[Array, "nodes vocab"]:
        return self.transitions.follow(logits, features, previous)

    def everything(self, tokens, positions, mask) -> Float[Array, "nodes vocab"]:
        """Reads every weight: what `init` traces."""
        features = self(tokens, positions, mask, None, None, (), None).features
        logits = self.unembed(features)
        return self.follow(logits, features, tokens) if self.config.markov_rank else logits


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["config"])
@dataclass(frozen=True)
class Network:
    """A `core.types.LanguageModel`: weights as a pytree, settings static.

    Attributes:
        params: nested dicts as `param_shapes` describes them.
    """

    params: PyTree
    config: ModelConfig

    def _facts(self) -> dict[str, str]:
        return {"layers": f"{self.num_layers}", **weight_facts(self.params)}

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        return summary_html(self, self._facts())

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def embed_dim(self) -> int:
        return self.config.embed_dim

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations and caches. Softmax and logits are float32 at least.

        Matrices have it too unless they are stored narrower, see `jaxspec.models.storage`.
        """
        return self.params["norm"]["scale"].dtype

    def forward(
        self,
        tokens: Int[Array, " nodes"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        *,
        scratch: tuple[LayerKV | None, ...] | None = None,
        taps: tuple[int, ...] = (),
        skip: Skips | None = None,
    ) -> Hidden:
        """One pass over the tokens of one row. Nothing is written: `core.cache` does that.

        Args:
            tokens: ids.
            positions: of each token in the text; a cached token's position is its place.
            mask: which scratch places, then which of these tokens, each token sees. The cached
                prefix is seen up to `cache.length`. Sliding layers see less of the prefix and of
                these tokens; scratch is taken to lie within their window.
            cache: the prefix; None for none.
            scratch: keys and values of uncommitted tokens of earlier passes; `None` in a layer
                whose attention is left out.
            taps: layers whose inputs are wanted, side by side, in this order.
            skip: sub-layers to leave out. The keys and values of an attention that is absent from
                the program are zeros.

        Raises:
            ValueError: a tapped layer does not exist, or `skip` is not one entry per layer.
        """
        for layer in taps:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"taps must be layers in 0..{self.num_layers - 1}, got {layer}.")
        if skip is not None:
            for name, entries in zip(Skips._fields, skip, strict=True):
                if len(entries) != self.num_layers:
                    raise ValueError(
                        f"skip.{name} must have {self.num_layers} entries, one per layer, "
                        f"got {len(entries)}."
                    )
        return self._apply(tokens, positions, mask, cache, scratch, taps, skip)

    def embed(self, tokens: Int[Array, " nodes"]) -> Float[Array, "nodes embed"]:
        """Returns token embeddings as the first layer reads them."""
        return self._apply(tokens, method=Transformer.embed)

    def unembed(self, features: Float[Array, "nodes embed"]) -> Float[Array, "nodes vocab"]:
        """Returns the logits of the next token, float32, from features after the final norm."""
        return self._apply(features, method=Transformer.unembed)

    def follow(
        self,
        logits: Float[Array, "places vocab"],
        features: Float[Array, "places embed"],
        previous: Int[Array, " nodes"],
    ) -> Float[Array, "nodes vocab"]:
        """Returns logits of places, given the token before each; see `Diffusion.rank`.

        Args:
            logits: of `unembed`: a place for each token, or one for all tokens.
            features: what they were read from.
            previous: the tokens.

        Raises:
            ValueError: the network has no Markov head.
        """
        if not self.config.markov_rank:
            raise ValueError("config.diffusion.rank must be at least 1: there is no Markov head.")
        return self._apply(logits, features, previous, method=Transformer.follow)

    def empty_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for up to `capacity` tokens of one row."""
        return empty_kv_cache(self.config, self.config.num_layers, capacity, self.dtype)

    def _apply(self, *args, method=None) -> Any:
        warn_of_wrong_sums()
        with exact_products(self.dtype):
            transformer = Transformer(self.config, self.dtype)
            return transformer.apply({"params": self.params}, *args, method=method)


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """Random weights: normal, scaled by the square root of the inputs; norms are identities.

    Example:
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> network = Network(init_params(config, jax.random.key(0)), config)
        >>> network.params["layer_1"]["attention"]["qkv"]["kernel"].shape
        (32, 2, 4, 8)
    """
    # Lazy: draws each weight by itself and computes nothing of the pass that it traces. One program
    # for all of them would take many times longer to compile.
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 1), bool)
    variables = Transformer(config).lazy_init(key, one, one, mask, method=Transformer.everything)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), variables["params"])


def param_shapes(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> PyTree:
    """The tree of `init_params` as `jax.ShapeDtypeStruct`s; takes no memory.

    Example:
        >>> from jaxspec.models import ModelConfig, param_shapes
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))
        22688
    """
    return jax.eval_shape(partial(init_params, config, dtype=dtype), jax.random.key(0))


def empty_kv_cache(
    config: ModelConfig, num_layers: int, capacity: int, dtype: jnp.dtype
) -> KVCache:
    """Returns an empty cache for up to `capacity` tokens of one row, of that many layers."""
    layers = tuple(
        empty_layer(config.num_kv_heads, config.head_dim, capacity, dtype)
        for _ in range(num_layers)
    )
    return KVCache(layers, jnp.zeros((), jnp.int32))


narrow_attention = NarrowCall("narrow_attention", attention, native_attention, attention_fits)
narrow_mlp = NarrowCall("narrow_mlp", mlp, native_mlp, mlp_fits)


def _scaled_normal(width: int):
    def init(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape) * width**-0.5

    return init


def scaled_logits(
    config: ModelConfig, products: Float[Array, "nodes vocab"]
) -> Float[Array, "nodes vocab"]:
    """Logits from products with the output head: divided and softcapped."""
    if config.logit_divisor != 1:
        products = products / config.logit_divisor
    return softcapped(products, config.final_softcap)


def activate(config: ModelConfig, gate: Array) -> Array:
    """The activation of an MLP's gate."""
    if config.activation == "silu":
        return jax.nn.silu(gate)
    return jax.nn.gelu(gate, approximate=True)


def _keep(skips: tuple[bool, ...] | Float[Array, " layers"], layer: int) -> bool | Float[Array, ""]:
    if isinstance(skips, tuple):
        return not skips[layer]
    return 1.0 - skips[layer].astype(jnp.float32)


def _layer_kinds(config: ModelConfig):
    """(kind, rotation, window) of each kind of layer that occurs."""
    layers = {kind: i for i, kind in enumerate(config.layer_types)}
    return [(kind, config.layer_rope(i), config.layer_window(i)) for kind, i in layers.items()]


def visible_to(
    positions: Int[Array, " nodes_or_one"],
    mask: Bool[Array, "nodes scratch+nodes"],
    cache: KVCache | None,
    window: int | None,
) -> Visible:
    """Returns what the tokens of a pass see, `window` positions back if that is bounded."""
    nodes = mask.shape[0]
    scratch, own = jnp.split(mask, (mask.shape[1] - nodes,), axis=1)
    if window is not None:
        own = sliding_window(own, positions, positions, window)
    prefix = None
    if cache is not None:
        places = jnp.arange(capacity_of(cache))
        prefix = places[None] < cache.length
        if window is not None:
            prefix = sliding_window(prefix, positions, places, window)
    return Visible(prefix, scratch, own)
