"""The numbers that describe one decoder. Families differ only in these fields.

Everything here is frozen, hashable and compared by value: a config is static under `jit`, and an
equal one never compiles again.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxspec.core.checks import (
    Checked,
    Count,
    Natural,
    Positive,
    above_up_to,
    at_least,
    at_most,
    below,
    one_of,
)

LAYER_TYPES = ("full", "sliding", "unrotated")
ACTIVATIONS = ("silu", "gelu_tanh")

MOST_LAYERS = 4096
Layers = Annotated[int, at_least(1), at_most(MOST_LAYERS)]
# Positions are 32-bit integers, and no text is longer.
Growth = Annotated[float, at_least(1), below(2**31)]
Fraction = Annotated[float, above_up_to(0, 1)]


class _OfScaling(Checked):
    prefix: ClassVar[str] = "scaling."


@dataclass(frozen=True)
class LinearScaling(_OfScaling):
    """All frequencies divided by `factor`.

    Attributes:
        factor: divisor of every frequency, at least 1.
    """

    factor: Growth


@dataclass(frozen=True)
class DynamicScaling(_OfScaling):
    """The base grows with the position past `original_max_positions` (NTK-aware interpolation).

    Position p is rotated with the base of a text that ends at p. So a cached key never changes, and
    a pass of many tokens equals many passes of one. `transformers` agrees up to
    `original_max_positions`, and past it as long as it decodes token by token; when it reads a
    longer prompt in one pass it gives every token the base of the last one.

    Attributes:
        factor: rate of that growth per `original_max_positions`, at least 1.
        original_max_positions: longest text of the pretraining, in tokens.
    """

    factor: Growth
    original_max_positions: Count


@dataclass(frozen=True)
class Llama3Scaling(_OfScaling):
    """Low frequencies divided by `factor`, high ones kept, a linear ramp between.

    Attributes:
        factor: divisor of low frequencies, at least 1.
        low_freq_factor: full turns over the original length up to which a frequency is divided by
            the whole factor.
        high_freq_factor: full turns over the original length from which a frequency is kept.
        original_max_positions: longest text of the pretraining, in tokens.
    """

    factor: Growth
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_positions: Count


@dataclass(frozen=True)
class YarnScaling(_OfScaling):
    """Slow dimensions divided by `factor`, fast ones kept, a linear ramp over dimensions between.

    Attributes:
        factor: divisor of the frequencies of slow dimensions, at least 1.
        original_max_positions: longest text of the pretraining, in tokens.
        attention_factor: factor on cosines and sines; `None`: derived from `factor`, `mscale` and
            `mscale_all_dim`.
        beta_fast: full turns over the original length at the fast end of the ramp.
        beta_slow: full turns over the original length at its slow end.
        mscale: weight of log(`factor`) in the numerator of `attention_factor`.
        mscale_all_dim: weight of log(`factor`) in its denominator. Unless both are given,
            `attention_factor` is 0.1 log(`factor`) + 1.
        truncate: round the ends of the ramp outwards to whole dimensions.
    """

    factor: Growth
    original_max_positions: Count
    attention_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling(_OfScaling):
    """A divisor per frequency, from one of two tables, and a larger scale of cosines and sines.

    The table is chosen once, for every position: `long_factors` when `ModelConfig.max_positions`
    exceeds `original_max_positions`, else `short_factors`. `transformers` chooses by the current
    length and throws its cache away at the crossing. To decode short texts as it does, set
    `max_positions` to `original_max_positions`; to decode longer ones, set it to their length.

    Attributes:
        short_factors: divisor of each frequency for short texts, one per rotated pair.
        long_factors: divisor of each frequency for long texts, one per rotated pair.
        factor: ratio of the long context to the original one; gives `attention_factor` when that is
            None.
        original_max_positions: longest text of the pretraining, in tokens.
        attention_factor: factor on cosines and sines; `None`: derived from `factor`.
    """

    short_factors: tuple[Positive, ...]
    long_factors: tuple[Positive, ...]
    factor: Growth
    original_max_positions: Count
    attention_factor: Positive | None = None


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope(Checked):
    """Rotary position embedding, in the halves form: dimension i turns with i + rotated / 2.

    Attributes:
        theta: base of the frequencies: pair i turns by theta^(-2i / rotated) radians per position.
        fraction: share of each head that is rotated, its first dimensions; the rest passes.
        scaling: change of the frequencies for longer texts; `None`: none.
    """

    prefix: ClassVar[str] = "rope."

    theta: Positive = 10_000.0
    fraction: Fraction = 1.0
    scaling: Scaling | None = None

    def rotated_dim(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that are rotated."""
        return int(head_dim * self.fraction)


@dataclass(frozen=True)
class Experts(Checked):
    """A sparse MLP: each token goes through `per_token` of `num` gated MLPs of width `mlp_dim`.

    Attributes:
        normalize: divide the chosen experts' probabilities by their sum.
        layers: which layers are sparse; the others have the dense MLP.
        shared_dim: width of one more MLP in each sparse layer, which every token goes through,
            times a gate of its own (Qwen2-MoE); `None`: there is none.
    """

    prefix: ClassVar[str] = "experts."

    num: Count
    per_token: Count
    mlp_dim: Count
    normalize: bool
    layers: tuple[bool, ...]
    shared_dim: Count | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.per_token > self.num:
            raise ValueError(
                f"experts.per_token must be in 1..{self.num} (experts.num), got {self.per_token}."
            )


@dataclass(frozen=True)
class Diffusion(Checked):
    """Settings of networks that fill in masked places, in any order, and do not continue text.

    Attributes:
        mask_token_id: stands in a place whose token is not decided yet.
        shift: the output at a place decides the NEXT place, as in networks converted from causal
            ones; False: it decides its own.
        block: places of a block; tokens see all of their own block and of those before it; `None`:
            every token sees all others.
        window: the longest masked end of a text that it was trained to fill in from one pass, as a
            drafter is; `None`: not said.
        separator: stands behind a masked end where the text continues, in drafters that were
            trained to read it there; `None`: nothing does.
        made_for: digest of the weights of the model that it was trained to draft for, see
            `models.digest`; `None`: not said.
        rank: width of the rows of a Markov head, by which a token adds to the logits of the next
            one while `Deer` chooses a draft; 0: there is none. A model that decodes by itself does
            not read it.
    """

    prefix: ClassVar[str] = "diffusion."

    mask_token_id: Natural
    shift: bool = False
    block: Count | None = None
    window: Count | None = None
    separator: Natural | None = None
    made_for: str | None = None
    rank: Natural = 0


@dataclass(frozen=True)
class ModelConfig(Checked):
    """A decoder-only transformer: RMSNorm, rotary positions, gated MLPs.

    Attributes:
        max_positions: longest text the network is meant for.
        norm_plus_one: norms multiply by 1 + scale (Gemma).
        pre_norms: norms before attention and before the MLP; all but OLMo 2 have them.
        post_norms: norms after attention and after the MLP, before each residual sum (Gemma and
            OLMo 2).
        qk_norm: queries and keys are normalised before rotation, each head by itself.
        joint_qk_norm: `qk_norm` is over all heads at once (OLMo 2).
        qkv_bias, out_bias, mlp_bias: which projections add a bias.
        tied_head: the output head is the embedding table.
        rope: rotation in full layers, and in sliding ones unless `sliding_rope` is given.
        layer_types: "full", "sliding" or "unrotated" (full, but not rotated: SmolLM3) for each
            layer; `()` stands for all full.
        sliding_window: a sliding layer's token at position i sees positions i - window + 1 .. i.
        query_scale: multiplies scores; `None`: head_dim ** -0.5.
        attention_softcap, final_softcap: c * tanh(x / c) of scores and of logits; `None`: left
            alone.
        embed_scale: multiplies embeddings; `None`: left alone.
        residual_scale: multiplies what attention and MLP add to the residual stream (Granite).
        logit_divisor: divides logits (Granite).
        experts: the sparse layers; `None`: all dense.
        diffusion: how it fills in masked places; `None`: it is causal. The pass itself does not
            read this: its mask is an argument.
    """

    vocab_size: Count
    embed_dim: Count
    num_layers: Layers
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    mlp_dim: Count
    max_positions: Count
    norm_eps: Positive = 1e-6
    norm_plus_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Annotated[str, one_of(*ACTIVATIONS)] = "silu"
    tied_head: bool = False
    rope: Rope = Rope()
    sliding_rope: Rope | None = None
    layer_types: tuple[Annotated[str, one_of(*LAYER_TYPES)], ...] = ()
    sliding_window: Count | None = None
    query_scale: Positive | None = None
    attention_softcap: Positive | None = None
    final_softcap: Positive | None = None
    embed_scale: Positive | None = None
    residual_scale: Positive = 1.0
    logit_divisor: Positive = 1.0
    experts: Experts | None = None
    diffusion: Diffusion | None = None

    def __post_init__(self):
        super().__post_init__()
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full",) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_heads}."
            )
        self._check_layers()
        self._check_diffusion()
        for name in ("rope", "sliding_rope"):
            self._check_rope(name)
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("joint_qk_norm says how qk_norm is done, so qk_norm must be True.")

    @property
    def masking(self) -> Diffusion:
        """`diffusion`, of a network that has it; any other is refused."""
        if self.diffusion is None:
            raise ValueError("config must be of a diffusion model, but its `diffusion` is None.")
        return self.diffusion

    @property
    def num_groups(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def layer_rope(self, layer: int) -> Rope | None:
        """Returns the rotation used in one layer; `None`: it has none."""
        if self.layer_types[layer] == "unrotated":
            return None
        if self.layer_types[layer] == "sliding" and self.sliding_rope is not None:
            return self.sliding_rope
        return self.rope

    def layer_window(self, layer: int) -> int | None:
        """Returns how many positions back one layer sees; `None`: to the beginning."""
        return self.sliding_window if self.layer_types[layer] == "sliding" else None

    def sparse_layer(self, layer: int) -> bool:
        """Says whether one layer's MLP is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def replace(self, **changes) -> "ModelConfig":
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def _check_layers(self):
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types must name {self.num_layers} layers (num_layers), "
                f"got {len(self.layer_types)}."
            )
        if "sliding" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers, so sliding_window must be given.")
        if self.experts is not None and len(self.experts.layers) != self.num_layers:
            raise ValueError(
                f"experts.layers must have {self.num_layers} entries (num_layers), "
                f"got {len(self.experts.layers)}."
            )

    @property
    def markov_rank(self) -> int:
        """The rank of its Markov head, see `Diffusion.rank`; 0: there is none."""
        return 0 if self.diffusion is None else self.diffusion.rank

    def _check_diffusion(self):
        if self.diffusion is None:
            return
        if self.diffusion.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id must be an id below vocab_size ({self.vocab_size}), "
                f"got {self.diffusion.mask_token_id}."
            )
        if "sliding" in self.layer_types:
            raise ValueError(
                "diffusion: layers that slide look back only, but a masked place must see both "
                "sides; layer_types must be all full."
            )

    def _check_rope(self, name: str):
        rope = getattr(self, name)
        if rope is None:
            return
        rotated = rope.rotated_dim(self.head_dim)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"{name}.fraction must rotate an even number of a head's {self.head_dim} "
                f"dimensions, at least 2; {rope.fraction} rotates {rotated}."
            )
        if isinstance(rope.scaling, LongRopeScaling):
            for table in ("short_factors", "long_factors"):
                given = len(getattr(rope.scaling, table))
                if given != rotated // 2:
                    raise ValueError(
                        f"{name}.scaling.{table} must have {rotated // 2} entries, one per "
                        f"frequency, got {given}."
                    )
