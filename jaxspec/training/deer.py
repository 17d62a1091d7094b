"""What drafters of blocks are aligned with: the target's own continuations (DEER).

Both stages of DEER's alignment (its section 3.2): the drafter reads what a target was asked, and
has to foresee what the target answered. It sees each document by itself, as `jaxspec.Deer` shows it
the text when it drafts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import same_document
from jaxspec.core.types import PyTree
from jaxspec.diffusion.process import Masked, drawn_per_group, mask_number, mask_share
from jaxspec.models import ModelConfig, Network
from jaxspec.training.data import Answers
from jaxspec.training.lm import products_in
from jaxspec.training.loop import Metrics
from jaxspec.training.settings import DTYPES
from jaxspec.training.tokenizer import RESERVED, SEPARATOR


class _Row(NamedTuple):
    """One row of packed texts, cut and hidden.

    left: of the answers.
    scale: what the weighted cross-entropies of a slot's document are divided by.
    """

    tokens: Int[Array, " slots"]
    segments: Int[Array, " slots"]
    left: Bool[Array, " slots"]
    masked: Masked
    scale: Float[Array, " slots"]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Stage I: an answer is cut at a random place and any of its slots may be hidden.

    Each text has a share t ~ U(0, 1) of what is left of its answer hidden, each slot weighing 1/t;
    the sum is divided by the answer's length. A separator stands where it was cut.

    config: of the drafter; `config.diffusion` says what its slots see.
    separator: put [SEP] behind an answer that was cut: "cut here, not finished". Slots of a
        network that is causal over blocks see it only within their own block.
    dtype: of the operands of products; "bfloat16" still sums in float32.
    steady: draw numbers of hidden slots in place of shares; the expected loss is the same. For
        measuring: something is hidden of every answer.
    """

    config: ModelConfig
    separator: bool = True
    dtype: str = "float32"
    steady: bool = False

    def __post_init__(self):
        _check(self.config, self.dtype)

    def __call__(
        self, params: PyTree, batch: Answers, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        return _loss(self, params, batch, key)

    @property
    def measured(self) -> "Continuation":
        """The same as validation measures it."""
        return dataclasses.replace(self, steady=True)

    def cut(self, row: Answers, key: PRNGKeyArray) -> _Row:
        """What the drafter is shown of one row, and what it has to foresee."""
        cut_key, mask_key = jax.random.split(key)
        tokens, segments, left = _cut(row, cut_key, self.config, self.separator)
        draw = mask_number if self.steady else mask_share
        masked = draw(mask_key, left, segments)
        return _Row(tokens, segments, left, masked, jnp.maximum(_count(segments, left), 1.0))


@dataclasses.dataclass(frozen=True)
class Refinement:
    """Stage II: the last R ~ U{1..longest} slots of a cut answer are hidden, as in drafting.

    The i-th of them, counted from 1 where the hidden ones begin, weighs alpha^(R - i): what comes
    first decides whether the rest is read at all.

    longest: hidden slots at most; DEER's is 96.
    alpha: DEER's is 1.01.
    normalise: divide by the sum of the weights. False: as DEER writes it, the sum alone, whose
        size goes with alpha and R: at 1.05 it diverges.

    Others as for `Continuation`.
    """

    config: ModelConfig
    longest: int = 96
    alpha: float = 1.01
    normalise: bool = True
    separator: bool = True
    dtype: str = "float32"

    def __post_init__(self):
        _check(self.config, self.dtype)
        if self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest}.")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}.")

    def __call__(
        self, params: PyTree, batch: Answers, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        return _loss(self, params, batch, key)

    @property
    def measured(self) -> "Refinement":
        """The same as validation measures it."""
        return self

    def cut(self, row: Answers, key: PRNGKeyArray) -> _Row:
        """What the drafter is shown of one row, and what it has to foresee."""
        cut_key, length_key = jax.random.split(key)
        tokens, segments, left = _cut(row, cut_key, self.config, self.separator)
        # How many slots of the answer are left from each slot on, itself included.
        behind = _count_from(segments, left)
        number = 1 + jnp.floor(drawn_per_group(length_key, segments) * self.longest)
        number = jnp.minimum(number, _count(segments, left))
        masked = tail_weights(left, behind, number, self.alpha)
        total = _sum(segments, masked.weights) if self.normalise else jnp.ones(len(tokens))
        return _Row(tokens, segments, left, masked, jnp.where(total > 0, total, 1.0))


def tail_weights(
    answer: Bool[Array, " slots"],
    behind: Float[Array, " slots"],
    number: Float[Array, " slots"],
    alpha: float,
) -> Masked:
    """The last `number` slots of an answer, each weighing alpha^(slots that follow it).

    Args:
        answer: slots that may be hidden.
        behind: how many slots of the answer are left from each slot on, itself included.
        number: of slots to hide, by document, at each of its slots.
        alpha: above 1, those that come first weigh most.
    """
    hidden = answer & (behind <= number)
    return Masked(hidden, jnp.where(hidden, alpha ** (behind - 1.0), 0.0))


def _loss(
    objective: Continuation | Refinement, params: PyTree, batch: Answers, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted cross-entropies of each text over its scale, averaged over texts."""
    network = Network(params, objective.config)
    arrays = Answers(*map(jnp.asarray, batch))
    with products_in(objective.dtype):
        rows, logits = jax.vmap(lambda row, key: _foresee(network, objective, row, key))(
            arrays, jax.random.split(key, len(arrays.tokens))
        )
    chosen = jnp.take_along_axis(logits, arrays.tokens[:, :, None], axis=-1)[:, :, 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    hidden = rows.masked.hidden
    lengths = jnp.maximum(jax.vmap(_count)(rows.segments, rows.left), 1.0)
    texts = jnp.sum(rows.left / lengths)
    loss = jnp.sum(nats * rows.masked.weights / rows.scale) / jnp.maximum(texts, 1.0)
    count = jnp.maximum(jnp.sum(hidden), 1)
    metrics = {
        "nats": jnp.sum(nats * hidden) / count,
        "top1": jnp.sum(hidden & (chosen >= jnp.max(logits, axis=-1))) / count,
        "tokens": jnp.sum(hidden).astype(jnp.float32),
    }
    return loss, metrics


def _foresee(
    network: Network, objective: Continuation | Refinement, row: Answers, key: PRNGKeyArray
) -> tuple[_Row, Float[Array, "slots vocab"]]:
    """One row: what was hidden, and the network's logits of each slot."""
    diffusion = network.config.diffusion
    assert diffusion is not None  # checked when the objective was made
    cut = objective.cut(row, key)
    shown = jnp.where(cut.masked.hidden, diffusion.mask_token_id, cut.tokens)
    seen = same_document(cut.segments)
    if diffusion.block is not None:
        blocks = row.positions // diffusion.block
        seen &= blocks[:, None] >= blocks[None, :]
    positions = jnp.asarray(row.positions)
    features = network.forward(shown, positions, seen, None).features
    if diffusion.shift:
        features = jnp.roll(features, 1, axis=0)
    return cut, network.unembed(features)


def _cut(
    row: Answers, key: PRNGKeyArray, config: ModelConfig, separator: bool
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Bool[Array, " slots"]]:
    """Ends every answer at a random place: tokens, documents, and what is left of the answers.

    With a network that is causal over blocks, at the end of a block: such a drafter fills in whole
    blocks.
    """
    assert config.diffusion is not None  # checked when the objective was made
    segments = jnp.asarray(row.segments)
    answer = jnp.asarray(row.answer, bool) & (segments > 0)
    length = _count(segments, answer)
    before = length - _count_from(segments, answer)
    kept = 1.0 + jnp.floor(drawn_per_group(key, segments) * length)
    if config.diffusion.block is not None:
        prompt = _count(segments, ~answer)
        whole = config.diffusion.block
        kept = jnp.ceil((prompt + kept) / whole) * whole - prompt
    left = answer & (before < kept)
    ends = answer & (before == kept) & separator
    gone = answer & ~left & ~ends
    tokens = jnp.where(ends, RESERVED.index(SEPARATOR), jnp.asarray(row.tokens))
    return tokens, jnp.where(gone, 0, segments), left


def _sum(segments: Int[Array, " slots"], values: Float[Array, " slots"]) -> Float[Array, " slots"]:
    """The sum over each slot's document."""
    return jnp.sum(jnp.where(same_document(segments), values[None, :], 0.0), axis=1)


def _count(
    segments: Int[Array, " slots"], counted: Bool[Array, " slots"]
) -> Float[Array, " slots"]:
    """How many slots of each slot's document are counted."""
    return _sum(segments, counted.astype(jnp.float32))


def _count_from(
    segments: Int[Array, " slots"], counted: Bool[Array, " slots"]
) -> Float[Array, " slots"]:
    """The same of those at or behind each slot."""
    order = jnp.arange(len(segments))
    later = same_document(segments) & (order[:, None] <= order[None, :])
    return jnp.sum(jnp.where(later, counted[None, :].astype(jnp.float32), 0.0), axis=1)


def _check(config: ModelConfig, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}.")
    if config.diffusion is None:
        raise ValueError("config must be of a diffusion model, but its `diffusion` is None.")
