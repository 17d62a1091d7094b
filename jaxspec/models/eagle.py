"""Heads that draft from the target's hidden states: EAGLE-1 (also used by EAGLE-2) and EAGLE-3.

EAGLE: Li et al. 2024, section 4.1; EAGLE-2: Li et al. 2024b, the same weights; EAGLE-3: Li et al.
2025, section 3; EAGLE 3.1 (arXiv 2605.09992): EAGLE-3 with norms of what it reads and of its own
states. Position t of a head holds the pair (state at t, token t + 1) and predicts the state at
t + 1, whose logits are those of token t + 2. States are the target's own where they are known, and
the head's predictions where they are not.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.tree import Path
from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree
from jaxspec.models.attention import at_least_float32
from jaxspec.models.config import ModelConfig
from jaxspec.models.linear import exact_products, multiply
from jaxspec.models.rope import rotations
from jaxspec.models.summary import summary_html, summary_line, weight_facts
from jaxspec.models.transformer import (
    MLP,
    Attention,
    Linear,
    Network,
    NormScale,
    RMSNorm,
    Rotation,
    Stream,
    Visible,
    empty_kv_cache,
    rms_norm,
    scaled_logits,
    visible_to,
)


class Seen(NamedTuple):
    """Arguments of attention except its inputs, in the order that `Attention` takes it."""

    rotation: Rotation
    visible: Visible
    prefix: LayerKV | None
    scratch: LayerKV | None


class EagleLayer(nn.Module):
    """One decoder layer over embedding and state joined by a product; no norm before attention.

    Attributes:
        bias: whether that product has one.
    """

    config: ModelConfig
    bias: bool

    def setup(self):
        embed = self.config.embed_dim
        self.fc = Linear((2 * embed,), (embed,), self.bias)
        self.attention = Attention(self.config)
        self.mlp_norm = NormScale(embed, self.config.norm_plus_one)
        self.mlp = MLP(self.config)

    def __call__(
        self,
        embedded: Float[Array, "nodes embed"],
        states: Float[Array, "nodes embed"],
        seen: Seen,
    ) -> Hidden:
        residual = self.fc(jnp.concatenate([embedded, states], axis=-1))
        residual, own = self.attention(residual, *seen, Stream(base=residual))
        return _hidden(self.mlp(residual, Stream(self.mlp_norm(), base=residual)), own)


class TapNorm(nn.Module):
    """A norm of tapped layers that lie side by side: in equal parts, each by itself."""

    config: ModelConfig
    parts: int

    @nn.compact
    def __call__(self, taps: Float[Array, "nodes tapped"]) -> Float[Array, "nodes tapped"]:
        norm = self.config.norm_eps, self.config.norm_plus_one
        init = nn.initializers.zeros if self.config.norm_plus_one else nn.initializers.ones
        scales = self.param("scale", init, (self.parts, taps.shape[1] // self.parts))
        parts = jnp.split(taps, self.parts, axis=1)
        normed = [rms_norm(part, scale, *norm) for part, scale in zip(parts, scales, strict=True)]
        return jnp.concatenate(normed, axis=1)


class Eagle3Layer(nn.Module):
    """One decoder layer whose attention reads embedding and state side by side, each normed.

    Attributes:
        tapped: width of the target's tapped layers side by side.
        norm_before_residual: whether the state that attention's output is added to is the normed
            one.
        norm_output: whether the next state is the normed one, which the output head reads.
        tap_norms: parts in which the tapped layers are normed before they are fused; 0: not.
    """

    config: ModelConfig
    tapped: int
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norms: int = 0

    def setup(self):
        config = self.config
        norm = partial(RMSNorm, config.norm_eps, config.norm_plus_one)
        self.tap_norm = TapNorm(config, self.tap_norms) if self.tap_norms else None
        self.fc = Linear((self.tapped,), (config.embed_dim,))
        self.embed_norm, self.state_norm, self.norm = (norm() for _ in range(3))
        self.mlp_norm = NormScale(config.embed_dim, config.norm_plus_one)
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.head = Linear((config.embed_dim,), (config.vocab_size,))

    def __call__(
        self,
        embedded: Float[Array, "nodes embed"],
        states: Float[Array, "nodes embed"],
        seen: Seen,
    ) -> Hidden:
        normed = self.state_norm(states)
        pair = jnp.concatenate([self.embed_norm(embedded), normed], axis=-1)
        base = normed if self.norm_before_residual else states
        residual, own = self.attention(pair, *seen, Stream(base=base))
        residual = self.mlp(residual, Stream(self.mlp_norm(), base=residual))
        return _hidden(self.norm(residual) if self.norm_output else residual, own)

    def fuse(self, taps: Float[Array, "nodes tapped"]) -> Float[Array, "nodes embed"]:
        return self.fc(taps if self.tap_norm is None else self.tap_norm(taps))

    def unembed(self, states: Float[Array, "nodes embed"]) -> Float[Array, "nodes draft_vocab"]:
        normed = states if self.norm_output else self.norm(states)
        return self.head(normed).astype(at_least_float32(states.dtype))

    def everything(self, embedded, taps, seen) -> Float[Array, "nodes draft_vocab"]:
        """Reads every weight: what `init` traces."""
        return self.unembed(self(embedded, self.fuse(taps), seen).features)


class DraftVocabulary(NamedTuple):
    """The part of the target's vocabulary that a head drafts from.

    Attributes:
        ids: the target's ids, ascending.
        table: the target's output head, cut to them.
    """

    ids: Int[Array, " draft_vocab"]
    table: Float[Array, "embed draft_vocab"]

    @classmethod
    def of(cls, target: Network, ids: Int[Array, " draft_vocab"]) -> "DraftVocabulary":
        """The rows of a target's output head for some of its tokens."""
        if target.config.tied_head:
            return cls(ids, target.params["embed"]["embedding"][ids].T)
        return cls(ids, target.params["head"]["kernel"][:, ids])


class _OneLayerHead:
    """The parts that do not differ between EAGLE heads."""

    params: PyTree
    config: ModelConfig
    paths: tuple[Path, ...] | None
    threshold: float
    _layer: Any

    def _facts(self) -> dict[str, str]:
        tree = {} if self.paths is None else {"nodes of its tree": f"{len(self.paths)}"}
        return weight_facts(self.params) | tree

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        return summary_html(self, self._facts())

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["mlp_norm"]["scale"].dtype

    def forward(
        self,
        embedded: Float[Array, "nodes embed"],
        states: Float[Array, "nodes embed"],
        positions: Int[Array, " nodes_or_one"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        *,
        scratch: tuple[LayerKV, ...] | None = None,
    ) -> Hidden:
        """One pass over pairs of a token's embedding and the state before it.

        `positions` may be a single one that holds for all.

        Returns:
            The next states in `features`. The other arguments are those of `Network.forward`.
        """
        return self._apply(embedded, states, _seen(self.config, positions, mask, cache, scratch))

    def empty_cache(self, capacity: int) -> KVCache:
        """Returns an empty cache for up to `capacity` tokens of one row."""
        return empty_kv_cache(self.config, 1, capacity, self.dtype)

    def _apply(self, *args: Any, method: Any = None) -> Any:
        with exact_products(self.dtype):
            return self._layer.apply({"params": self.params}, *args, method=method)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "vocabulary"],
    meta_fields=["config", "bias"],
    drop_fields=["paths", "threshold", "made_for"],
)
@dataclass(frozen=True, repr=False)
class EagleHead(_OneLayerHead):
    """EAGLE-1's head: its states are the target's features, read by the target's output head.

    Attributes:
        config: of its one layer; `vocab_size` is the target's.
        vocabulary: `None` to draft from all tokens.
        paths: rank paths of the tree that lay beside it when it was loaded, for `Eagle.of`; `None`
            for none. They are no part of the pytree: what JAX makes of a head has none.
        threshold: of that tree, a chain that ends early: see `drafters.DraftModel`. As `paths`.
        made_for: digest of its target's weights, see `models.digest`; `None`: not said. As `paths`.
    """

    params: PyTree
    config: ModelConfig
    bias: bool = True
    vocabulary: DraftVocabulary | None = None
    paths: tuple[Path, ...] | None = None
    threshold: float = 0.0
    made_for: str | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def target_vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def draft_ids(self) -> Int[Array, " draft_vocab"] | None:
        return None if self.vocabulary is None else self.vocabulary.ids

    def states_of(
        self, features: Float[Array, "nodes embed"], taps: Float[Array, "nodes tapped"]
    ) -> Float[Array, "nodes embed"]:
        """Returns the states that a pass of the target gave."""
        return features

    def unembed(
        self, target: Network, states: Float[Array, "nodes embed"]
    ) -> Float[Array, "nodes draft_vocab"]:
        """Returns the logits of the token after each state, over `draft_ids`."""
        if self.vocabulary is None:
            return target.unembed(states)
        with exact_products(self.dtype):
            logits = multiply(states, self.vocabulary.table, at_least_float32(self.dtype))
        return scaled_logits(target.config, logits)

    @property
    def _layer(self) -> EagleLayer:
        return EagleLayer(self.config, self.bias)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "draft_ids"],
    meta_fields=["config", "taps", "target_vocab_size", "norm_before_residual", "norm_output"],
    drop_fields=["paths", "threshold", "made_for"],
)
@dataclass(frozen=True, repr=False)
class Eagle3Head(_OneLayerHead):
    """EAGLE-3's head: its states begin as a fusion of the target's tapped layers' inputs.

    Attributes:
        config: of its one layer; `vocab_size` counts the tokens it drafts from.
        taps: target layers whose inputs it reads; three, by the paper: low, middle, high.
        target_vocab_size: of the target.
        draft_ids: the target's ids of those tokens; `None` if they are all tokens.
        norm_before_residual: see `Eagle3Layer`; the paper's heads do not.
        norm_output: see `Eagle3Layer`; heads of EAGLE 3.1 do.
        paths: as for `EagleHead`.
        threshold: as for `EagleHead`.
        made_for: as for `EagleHead`.
    """

    params: PyTree
    config: ModelConfig
    taps: tuple[int, ...]
    target_vocab_size: int
    draft_ids: Int[Array, " draft_vocab"] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    paths: tuple[Path, ...] | None = None
    threshold: float = 0.0
    made_for: str | None = None

    @property
    def tap_norms(self) -> int:
        """Parts in which the tapped layers are normed before they are fused; 0: not."""
        return len(self.params["tap_norm"]["scale"]) if "tap_norm" in self.params else 0

    def states_of(
        self, features: Float[Array, "nodes embed"], taps: Float[Array, "nodes tapped"]
    ) -> Float[Array, "nodes embed"]:
        """Returns the states that a pass of the target gave."""
        return self._apply(taps, method=Eagle3Layer.fuse)

    def unembed(
        self, target: Network, states: Float[Array, "nodes embed"]
    ) -> Float[Array, "nodes draft_vocab"]:
        """Returns the logits of the token after each state, over `draft_ids`."""
        return self._apply(states, method=Eagle3Layer.unembed)

    @property
    def _layer(self) -> Eagle3Layer:
        tapped, norms = self.params["fc"]["kernel"].shape[0], self.tap_norms
        return Eagle3Layer(self.config, tapped, self.norm_before_residual, self.norm_output, norms)


def init_eagle_params(config: ModelConfig, bias: bool, key: PRNGKeyArray) -> PyTree:
    """Random weights of an `EagleHead`, as `jaxspec.models.init_params` draws them.

    Example:
        >>> from jaxspec.models import EagleHead, ModelConfig, init_eagle_params
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> params = init_eagle_params(config, bias=False, key=jax.random.key(0))
        >>> params["fc"]["kernel"].shape  # an embedding and a feature go in, side by side
        (64, 32)
        >>> head = EagleHead(params, config, bias=False)
    """
    row = jax.ShapeDtypeStruct((1, config.embed_dim), jnp.float32)
    variables = EagleLayer(config, bias).lazy_init(key, row, row, _nothing_seen(config))
    return variables["params"]


def init_eagle3_params(
    config: ModelConfig, tapped: int, key: PRNGKeyArray, tap_norms: int = 0
) -> PyTree:
    """Random weights of an `Eagle3Head` over tapped layers of `tapped` numbers in all.

    With `tap_norms`, they are normed in that many parts: EAGLE 3.1 norms each tapped layer.

    Example:
        >>> from jaxspec.models import ModelConfig, init_eagle3_params
        >>> config = ModelConfig(
        ...     vocab_size=64, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
        ...     head_dim=8, mlp_dim=64, max_positions=128,
        ... )
        >>> params = init_eagle3_params(config, 3 * 32, jax.random.key(0))  # three taps
        >>> params["fc"]["kernel"].shape
        (96, 32)
    """
    row = jax.ShapeDtypeStruct((1, config.embed_dim), jnp.float32)
    taps = jax.ShapeDtypeStruct((1, tapped), jnp.float32)
    layer = Eagle3Layer(config, tapped, tap_norms=tap_norms)
    seen = _nothing_seen(config)
    return layer.lazy_init(key, row, taps, seen, method=Eagle3Layer.everything)["params"]


def _seen(config, positions, mask, cache, scratch) -> Seen:
    return Seen(
        rotation=Rotation(
            *rotations(config.rope, config.head_dim, config.max_positions, positions)
        ),
        visible=visible_to(positions, mask, cache, None),
        prefix=None if cache is None else cache.layers[0],
        scratch=None if scratch is None else scratch[0],
    )


def _nothing_seen(config: ModelConfig) -> Seen:
    return _seen(config, jnp.zeros(1, jnp.int32), jnp.ones((1, 1), bool), None, None)


def _hidden(states: Float[Array, "nodes embed"], own: LayerKV) -> Hidden:
    return Hidden(states, states[:, :0], (own,))
