"""DFlash: a head of a few layers that drafts a block from the target's hidden states.

Chen et al. 2026 (2602.06036). The states of some layers of the target, at every position of the
text but the last, are fused into one context. Each layer of the head makes keys and values of the
context by its own projections; queries come from the block alone: the pending token and masks,
which see the context and all of the block. A mask's output decides its own place, by the target's
output head; the embedding is the target's too.

Two families of later heads have more parts. DSpark (2607.05147, DeepSpec): the pending token's
place predicts too, so that each place decides the next one; the token before adds to the logits of
a token by a product of two rows (a Markov head); and a head predicts acceptance. DFlash 2 (z-lab):
convolutions around the sub-layers, which reach back within the block, and a path selector, a
Markov head whose product depends on the place and which chooses among its likeliest tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree
from jaxspec.models.attention import at_least_float32
from jaxspec.models.config import ModelConfig
from jaxspec.models.linear import exact_products
from jaxspec.models.rope import rotations
from jaxspec.models.summary import summary_html, summary_line, weight_facts
from jaxspec.models.transformer import (
    Layer,
    Linear,
    RMSNorm,
    Rotation,
    Transitions,
    Visible,
    Weights,
    empty_kv_cache,
    rms_norm,
    visible_to,
)

Places = Float[Array, "places embed"]


class Convolution(NamedTuple):
    """Shape of the convolutions over a block.

    Attributes:
        taps: places that each place reads: its own and those before it.
        group: channels that share what a place adds to their kernels.
    """

    taps: int
    group: int


class DFlashParts(NamedTuple):
    """Parts of a head that the first DFlash heads lack.

    Attributes:
        convolution: around each sub-layer; `None`: none.
        rank: width of the rows of a Markov head or a path selector; 0: neither.
        gated: a place's features scale the product of two rows, as in a path selector.
        confidence: numbers that the confidence head reads; 0: there is none.
    """

    convolution: Convolution | None = None
    rank: int = 0
    gated: bool = False
    confidence: int = 0


NO_MORE = DFlashParts()
"""Those of the first DFlash heads."""


class BlockConvolution(nn.Module):
    """Convolutions of the inputs and of the outputs of a sub-layer, over the places of a block.

    A channel's kernel is its own, the same at every place, plus that of its group, which a product
    of the sub-layer's inputs gives for each place. Nothing lies before the first place.
    """

    shape: Convolution

    @nn.compact
    def __call__(self, inputs: Places) -> tuple[Places, Callable[[Places], Places]]:
        """Returns the inputs after theirs, and the function that is that of the outputs."""
        (taps, group), width = self.shape, inputs.shape[1]
        own = self.param("base", _identities, (2, taps, width))
        kernel = self.param("kernel", nn.initializers.zeros, (width, 2, taps, width // group))
        scale = self.get_variable("params", "scale")
        added = Weights(kernel, None, scale).apply(inputs)
        before, after = (
            partial(_convolve, own[side][None] + jnp.repeat(added[:, side], group, axis=2))
            for side in range(2)
        )
        return before(inputs), after


def _convolve(kernel: Float[Array, "places taps embed"], inputs: Places) -> Places:
    places, taps, _ = kernel.shape
    shifted = [jnp.pad(inputs, ((back, 0), (0, 0)))[:places] for back in range(taps)]
    return jnp.sum(kernel * jnp.stack(shifted, axis=1), axis=1)


def _identities(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    del key  # As if there were no convolution.
    return jnp.zeros(shape).at[:, 0].set(1.0)


class DFlashLayer(Layer):
    """A decoder layer, and the keys and values that it makes of the context.

    Attributes:
        convolution: around its sub-layers; `None`: none.
    """

    convolution: Convolution | None = None

    def setup(self):
        super().setup()
        if self.convolution is not None:
            self.attention_conv, self.mlp_conv = (
                BlockConvolution(self.convolution) for _ in range(2)
            )

    def __call__(
        self,
        residual: Float[Array, "nodes embed"],
        rotation: Rotation,
        visible: Visible,
        prefix: LayerKV | None,
        scratch: LayerKV | None,
    ) -> tuple[Float[Array, "nodes embed"], LayerKV]:
        if self.convolution is None:
            return super().__call__(residual, rotation, visible, prefix, scratch)
        norm = self.config.norm_eps, self.config.norm_plus_one
        inputs, finish = self.attention_conv(rms_norm(residual, self.attention_norm(), *norm))
        outputs, own = self.attention(inputs, rotation, visible, prefix, scratch)
        residual = residual + finish(outputs)
        inputs, finish = self.mlp_conv(rms_norm(residual, self.mlp_norm(), *norm))
        return residual + finish(self.mlp(inputs)), own

    def remember(self, context: Float[Array, "nodes embed"], rotation: Rotation) -> LayerKV:
        # The output of attention is not used, so that XLA leaves it out.
        nobody = Visible(None, None, jnp.eye(context.shape[0], dtype=bool))
        return self.attention(context, rotation, nobody, None, None)[1]


class DFlashLayers(nn.Module):
    """The head's weights: the fusion of states, the layers, the final norm, further parts.

    Attributes:
        tapped: width of the target's tapped layers side by side.
        parts: the further ones.
        causal: see `DFlashHead`.
    """

    config: ModelConfig
    tapped: int
    parts: DFlashParts = NO_MORE
    causal: bool | None = None

    def setup(self):
        config = self.config
        norm = partial(RMSNorm, config.norm_eps, config.norm_plus_one)
        self.fc = Linear((self.tapped,), (config.embed_dim,))
        self.hidden_norm, self.norm = norm(), norm()
        layer = partial(DFlashLayer, config, sparse=False, convolution=self.parts.convolution)
        self.layers = [layer(name=f"layer_{i}") for i in range(config.num_layers)]
        if self.parts.rank:
            scaled_by = config.embed_dim if self.parts.gated else 0
            self.transitions = Transitions(config.vocab_size, self.parts.rank, scaled_by)
        if self.parts.confidence:
            self.confidence = Linear((self.parts.confidence,), (1,), bias=True)

    def __call__(
        self,
        embedded: Float[Array, "nodes embed"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        scratch: tuple[LayerKV, ...] | None,
    ) -> Hidden:
        rotation, kinds = self._rotation(positions), self.config.layer_types
        seen = partial(self._visible, positions, mask, cache)
        visible = {kind: seen(kind) for kind in dict.fromkeys(kinds)}
        residual, new_kv = embedded, []
        for i, (layer, kind) in enumerate(zip(self.layers, kinds, strict=True)):
            prefix = None if cache is None else cache.layers[i]
            scratch_kv = None if scratch is None else scratch[i]
            residual, own = layer(residual, rotation, visible[kind], prefix, scratch_kv)
            new_kv.append(own)
        return Hidden(self.norm(residual), residual[:, :0], tuple(new_kv))

    def remember(
        self, taps: Float[Array, "nodes tapped"], positions: Int[Array, " nodes"]
    ) -> tuple[LayerKV, ...]:
        context, rotation = self.hidden_norm(self.fc(taps)), self._rotation(positions)
        return tuple(layer.remember(context, rotation) for layer in self.layers)

    def follow(
        self,
        logits: Float[Array, "places vocab"],
        features: Float[Array, "places embed"],
        previous: Int[Array, " nodes"],
        likeliest: int | None,
    ) -> Float[Array, "nodes vocab"]:
        if likeliest is None:
            return self.transitions.follow(logits, features, previous)
        rows = self.transitions.rows_of(previous, features)
        best, tokens = jax.lax.top_k(logits, likeliest)
        best = best + self.transitions.to_some(rows, tokens)
        nowhere = jnp.full((len(previous), logits.shape[1]), -jnp.inf, logits.dtype)
        return nowhere.at[jnp.arange(len(previous))[:, None], tokens].set(best)

    def acceptance(
        self, features: Float[Array, "nodes embed"], previous: Int[Array, " nodes"]
    ) -> Float[Array, " nodes"]:
        inputs = features
        if self.parts.confidence > features.shape[1]:
            rows = self.transitions.rows_of(previous, features)
            inputs = jnp.concatenate([features, rows], axis=1)
        return jax.nn.sigmoid(self.confidence(inputs.astype(at_least_float32(inputs.dtype)))[:, 0])

    def everything(self, taps, embedded, positions, mask) -> list[Array]:
        """Reads every weight: what `init` traces."""
        layers = self.remember(taps, positions)
        features = self(embedded, positions, mask, KVCache(layers, jnp.int32(1)), None).features
        read = [features]
        if self.parts.rank:
            logits = jnp.zeros((1, self.config.vocab_size))
            read.append(self.follow(logits, features, positions, None))
        if self.parts.confidence:
            read.append(self.acceptance(features, positions))
        return read

    def _visible(self, positions, mask, cache, kind: str) -> Visible:
        slides, nodes = kind == "sliding", mask.shape[0]
        if slides if self.causal is None else self.causal:
            before = ((0, 0), (mask.shape[1] - nodes, 0))
            mask = mask & jnp.pad(masks.causal(nodes), before, constant_values=True)
        return visible_to(positions, mask, cache, self.config.sliding_window if slides else None)

    def _rotation(self, positions: Int[Array, " nodes"]) -> Rotation:
        config = self.config
        return Rotation(*rotations(config.rope, config.head_dim, config.max_positions, positions))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=[
        *("config", "taps", "mask_token_id", "block", "target_layers"),
        *("anchor_predicts", "causal", "likeliest"),
    ],
    drop_fields=["made_for"],
)
@dataclass(frozen=True)
class DFlashHead:
    """A head for one target.

    Attributes:
        config: of its layers; `vocab_size` and `embed_dim` are the target's.
        taps: target layers whose inputs it reads, side by side.
        mask_token_id: an id of the target's vocabulary, whose embedding stands in open places.
        block: places that it was trained on, the pending token included.
        target_layers: of the target it was made for; `None`: not said.
        anchor_predicts: each place decides the token of the next one, the pending token's place
            too. False: a mask decides its own.
        causal: the places of a block see those before them only; `None`: in layers that slide.
        likeliest: tokens of a place that a path selector chooses among; `None`: all.
        made_for: digest of its target's weights, see `models.digest`; `None`: not said. It is no
            part of the pytree.
    """

    params: PyTree
    config: ModelConfig
    taps: tuple[int, ...]
    mask_token_id: int
    block: int
    target_layers: int | None = None
    anchor_predicts: bool = False
    causal: bool | None = None
    likeliest: int | None = None
    made_for: str | None = None

    def _facts(self) -> dict[str, str]:
        sizes = {"layers": f"{self.config.num_layers}", "block": f"{self.block}"}
        return sizes | weight_facts(self.params)

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        return summary_html(self, self._facts())

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["norm"]["scale"].dtype

    @property
    def num_drafted(self) -> int:
        """Tokens that a block predicts."""
        return self.block if self.anchor_predicts else self.block - 1

    @property
    def parts(self) -> DFlashParts:
        """Its parts, as its weights show them."""
        convolution, rank, confidence = None, 0, 0
        if "attention_conv" in (layer := self.params["layer_0"]):
            *_, taps, groups = layer["attention_conv"]["kernel"].shape
            convolution = Convolution(taps, self.config.embed_dim // groups)
        transitions = self.params.get("transitions", {})
        if transitions:
            rank = transitions["previous"]["embedding"].shape[1]
        if "confidence" in self.params:
            confidence = self.params["confidence"]["kernel"].shape[0]
        return DFlashParts(convolution, rank, "gate" in transitions, confidence)

    def remember(
        self, taps: Float[Array, "nodes tapped"], positions: Int[Array, " nodes"]
    ) -> tuple[LayerKV, ...]:
        """Returns keys and values of each layer, of the target's states at these positions."""
        return self._apply(taps, positions, method=DFlashLayers.remember)

    def forward(
        self,
        embedded: Float[Array, "nodes embed"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        *,
        scratch: tuple[LayerKV, ...] | None = None,
    ) -> Hidden:
        """One pass over the embeddings of a block.

        Args:
            embedded: by the target's embedding.
            positions: in the text.
            mask: which scratch places, then which of the block's places, each sees.
            cache: of `remember`; seen up to `cache.length`.
            scratch: of `remember`, of texts that lie side by side; the mask says what is seen.

        Returns:
            In `features`, what the target's output head reads a place's own token from.
        """
        return self._apply(embedded, positions, mask, cache, scratch)

    def follow(
        self,
        logits: Float[Array, "places vocab"],
        features: Float[Array, "places embed"],
        previous: Int[Array, " nodes"],
    ) -> Float[Array, "nodes vocab"]:
        """Returns logits of places, given the token before each; see `DFlashParts.rank`.

        Args:
            logits: of the target's output head: a place for each token, or one for all tokens.
            features: what they were read from.
            previous: the tokens.
        """
        return self._apply(logits, features, previous, self.likeliest, method=DFlashLayers.follow)

    def acceptance(
        self, features: Float[Array, "nodes embed"], previous: Int[Array, " nodes"]
    ) -> Float[Array, " nodes"]:
        """Returns the chances that places' tokens are accepted, by the confidence head.

        A token's chance is that before it is drawn.

        Args:
            features: of the places.
            previous: the tokens before them, which were accepted.
        """
        return self._apply(features, previous, method=DFlashLayers.acceptance)

    def empty_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for up to `capacity` tokens of one row."""
        return empty_kv_cache(self.config, self.config.num_layers, capacity, self.dtype)

    def _apply(self, *args: Any, method: Any = None) -> Any:
        tapped = self.params["fc"]["kernel"].shape[0]
        layers = DFlashLayers(self.config, tapped, self.parts, self.causal)
        with exact_products(self.dtype):
            return layers.apply({"params": self.params}, *args, method=method)


def dflash_taps(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Returns the layers whose inputs published heads read: evenly, second to third-last.

    Published files count layers by what comes out: `round(1 + i * (num_layers - 4) / (n - 1))`, or
    the middle one for a single feature. What comes out of one goes into the next.

    Raises:
        ValueError: the target has too few layers for that many different ones.

    Example:
        >>> dflash_taps(36, 5)
        (2, 10, 18, 26, 34)
    """
    if num_features == 1:
        outputs = [num_layers // 2]
    else:
        step = (num_layers - 4) / (num_features - 1)
        outputs = [round(1 + i * step) for i in range(num_features)]
    taps = tuple(layer + 1 for layer in outputs)
    if len(set(taps)) < num_features or not 0 < taps[0] <= taps[-1] < num_layers:
        raise ValueError(
            f"taps: a target of {num_layers} layers has no {num_features} different ones between "
            "its first and its last two; give fewer features."
        )
    return taps


def init_dflash_params(
    config: ModelConfig, tapped: int, key: PRNGKeyArray, parts: DFlashParts = NO_MORE
) -> PyTree:
    """Random weights of a `DFlashHead` over tapped layers of `tapped` numbers in all.

    Example:
        >>> from jaxspec.models import ModelConfig, init_dflash_params
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> params = init_dflash_params(config, 3 * 32, jax.random.key(0))  # three taps
        >>> params["fc"]["kernel"].shape
        (96, 32)
    """
    taps = jax.ShapeDtypeStruct((1, tapped), jnp.float32)
    row = jax.ShapeDtypeStruct((1, config.embed_dim), jnp.float32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 1), bool)
    variables = DFlashLayers(config, tapped, parts).lazy_init(
        key, taps, row, one, mask, method=DFlashLayers.everything
    )
    return variables["params"]
