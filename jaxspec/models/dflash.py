"""DFlash: a head of a few layers that drafts a block from the target's hidden states.

Chen et al. 2026 (2602.06036). The states of some layers of the target, at every position of the
text but the last, are fused into one context. Each layer of the head makes keys and values of the
context by its own projections; queries come from the block alone: the pending token and masks,
which see the context and all of the block. A mask's output decides its own place, by the target's
output head; the embedding is the target's too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree
from jaxspec.models.config import ModelConfig
from jaxspec.models.linear import exact_products
from jaxspec.models.rope import rotations
from jaxspec.models.summary import summary_html, summary_line, weight_facts
from jaxspec.models.transformer import (
    Layer,
    Linear,
    RMSNorm,
    Rotation,
    Visible,
    empty_kv_cache,
    visible_to,
)


class DFlashLayer(Layer):
    """A decoder layer, and the keys and values that it makes of the context."""

    def remember(self, context: Float[Array, "nodes embed"], rotation: Rotation) -> LayerKV:
        # The output of attention is not used, so that XLA leaves it out.
        nobody = Visible(None, None, jnp.eye(context.shape[0], dtype=bool))
        return self.attention(context, rotation, nobody, None, None)[1]


class DFlashLayers(nn.Module):
    """The head's weights: the fusion of states, the layers, the final norm.

    Attributes:
        tapped: width of the target's tapped layers side by side.
    """

    config: ModelConfig
    tapped: int

    def setup(self):
        config = self.config
        norm = partial(RMSNorm, config.norm_eps, config.norm_plus_one)
        self.fc = Linear((self.tapped,), (config.embed_dim,))
        self.hidden_norm, self.norm = norm(), norm()
        layers = range(config.num_layers)
        self.layers = [DFlashLayer(config, sparse=False, name=f"layer_{i}") for i in layers]

    def __call__(
        self,
        embedded: Float[Array, "nodes embed"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        scratch: tuple[LayerKV, ...] | None,
    ) -> Hidden:
        rotation, visible = self._rotation(positions), visible_to(positions, mask, cache, None)
        residual, new_kv = embedded, []
        for i, layer in enumerate(self.layers):
            prefix = None if cache is None else cache.layers[i]
            scratch_kv = None if scratch is None else scratch[i]
            residual, own = layer(residual, rotation, visible, prefix, scratch_kv)
            new_kv.append(own)
        return Hidden(self.norm(residual), residual[:, :0], tuple(new_kv))

    def remember(
        self, taps: Float[Array, "nodes tapped"], positions: Int[Array, " nodes"]
    ) -> tuple[LayerKV, ...]:
        context, rotation = self.hidden_norm(self.fc(taps)), self._rotation(positions)
        return tuple(layer.remember(context, rotation) for layer in self.layers)

    def everything(self, taps, embedded, positions, mask) -> Hidden:
        """Reads every weight: what `init` traces."""
        layers = self.remember(taps, positions)
        return self(embedded, positions, mask, KVCache(layers, jnp.int32(1)), None)

    def _rotation(self, positions: Int[Array, " nodes"]) -> Rotation:
        config = self.config
        return Rotation(*rotations(config.rope, config.head_dim, config.max_positions, positions))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["config", "taps", "mask_token_id", "block", "target_layers"],
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
    """

    params: PyTree
    config: ModelConfig
    taps: tuple[int, ...]
    mask_token_id: int
    block: int
    target_layers: int | None = None

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

    def empty_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for up to `capacity` tokens of one row."""
        return empty_kv_cache(self.config, self.config.num_layers, capacity, self.dtype)

    def _apply(self, *args: Any, method: Any = None) -> Any:
        layers = DFlashLayers(self.config, self.params["fc"]["kernel"].shape[0])
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


def init_dflash_params(config: ModelConfig, tapped: int, key: PRNGKeyArray) -> PyTree:
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
    variables = DFlashLayers(config, tapped).lazy_init(
        key, taps, row, one, mask, method=DFlashLayers.everything
    )
    return variables["params"]
