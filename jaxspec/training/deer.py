"""What drafters of blocks are aligned with: the target's own continuations (DEER).

Both stages of DEER's alignment (its section 3.2): the drafter reads what a target was asked, and
has to foresee what the target answered. It sees each document by itself, as `jaxspec.Deer` shows it
the text when it drafts: where it is causal over blocks, in whole ones, the last filled with masks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import same_document
from jaxspec.core.types import PyTree
from jaxspec.diffusion.process import (
    Masked,
    block_training_mask,
    drawn_per_group,
    mask_number,
    mask_share,
)
from jaxspec.models import ModelConfig, Network
from jaxspec.training.data import Answers
from jaxspec.training.lm import products_in
from jaxspec.training.loop import Metrics
from jaxspec.training.settings import CUTS, DTYPES
from jaxspec.training.tokenizer import RESERVED, SEPARATOR


class _Row(NamedTuple):
    """One row of packed texts, cut and hidden.

    texts: number of each slot's text, as often as it was cut: its document where that was once.
    left: of the answers.
    scale: what the weighted cross-entropies of a slot's text are divided by.
    firsts: see `block_training_mask`; None: of every document one end is hidden, in place.
    """

    tokens: Int[Array, " slots"]
    segments: Int[Array, " slots"]
    texts: Int[Array, " slots"]
    left: Bool[Array, " slots"]
    masked: Masked
    scale: Float[Array, " slots"]
    firsts: Int[Array, " slots"] | None = None


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Stage I: an answer is cut at a random place and any of its slots may be hidden.

    Each text has a share t ~ U(0, 1) of what is left of its answer hidden, each slot weighing 1/t;
    the sum is divided by the answer's length. A separator stands where it was cut.

    config: of the drafter; `config.diffusion` says what its slots see.
    separator: put [SEP] behind an answer that was cut: "cut here, not finished". None: for
        networks that see both sides. Those that are causal over blocks are cut at the ends of
        blocks, where no slot would see it.
    dtype: of the operands of products; "bfloat16" still sums in float32.
    steady: draw numbers of hidden slots in place of shares; the expected loss is the same. For
        measuring: something is hidden of every answer.

    Raises:
        ValueError: a setting is out of range, or the network is no diffusion model.
    """

    config: ModelConfig
    separator: bool | None = None
    dtype: str = "float32"
    steady: bool = False

    def __post_init__(self):
        _check(self.config, self.separator, self.dtype)

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
        tokens, segments, left = _cut(
            row, cut_key, self.config, separated(self.config, self.separator)
        )
        draw = mask_number if self.steady else mask_share
        masked = draw(mask_key, left, segments)
        length = jnp.maximum(_count(segments, left), 1.0)
        return _Row(tokens, segments, segments, left, masked, length)


@dataclasses.dataclass(frozen=True)
class Refinement:
    """Stage II: the last R ~ U{1..longest} slots of a cut answer are hidden, as in drafting.

    The i-th of them, counted from 1 where the hidden ones begin, weighs alpha^(R - i): what comes
    first decides whether the rest is read at all.

    longest: hidden slots at most; DEER's is 96.
    alpha: DEER's is 1.01.
    normalise: divide by the sum of the weights. False: as DEER writes it, the sum alone, whose
        size goes with alpha and R: at 1.05 it diverges.
    cuts: "one": each answer is cut at one place, as in DEER. "all": behind every `longest` slots,
        from one of the first blocks on, all in one pass that reads a clean copy beside the hidden
        one: twice the work for as many ends as there is room for. Needs a network that is causal
        over blocks and whole blocks of `longest` slots.

    Others as for `Continuation`.

    Raises:
        ValueError: a setting is out of range, or the network is no diffusion model.
    """

    config: ModelConfig
    longest: int = 96
    alpha: float = 1.01
    normalise: bool = True
    separator: bool | None = None
    dtype: str = "float32"
    cuts: str = "one"

    def __post_init__(self):
        _check(self.config, self.separator, self.dtype)
        if self.longest < 1:
            raise ValueError(f"longest must be at least 1, got {self.longest}.")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}.")
        if self.cuts not in CUTS:
            raise ValueError(f"cuts must be one of {CUTS}, got {self.cuts!r}.")
        diffusion = self.config.diffusion
        assert diffusion is not None  # checked above
        if self.cuts == "all" and diffusion.block is None:
            raise ValueError(
                'cuts "all" needs a drafter that is causal over blocks; this one sees both sides, '
                'where each cut takes a pass of its own: take "one".'
            )
        if self.cuts == "all" and self.longest % (diffusion.block or 1):
            raise ValueError(
                f"longest must be a multiple of the drafter's block ({diffusion.block}) with cuts "
                f'"all", got {self.longest}.'
            )

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
        if self.cuts == "all":
            tokens, segments, left, firsts = _cut_everywhere(
                row, cut_key, self.config, self.longest
            )
            texts = segments * len(segments) + firsts
        else:
            tokens, segments, left = _cut(
                row, cut_key, self.config, separated(self.config, self.separator)
            )
            firsts, texts = None, segments
        # How many slots of the answer are left from each slot on, itself included.
        behind = _count_from(texts, left)
        number = 1 + jnp.floor(drawn_per_group(length_key, texts) * self.longest)
        number = jnp.minimum(number, _count(texts, left))
        masked = tail_weights(left, behind, number, self.alpha)
        total = _sum(texts, masked.weights) if self.normalise else jnp.ones(len(tokens))
        scale = jnp.where(total > 0, total, 1.0)
        return _Row(tokens, segments, texts, left, masked, scale, firsts)


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
    lengths = jnp.maximum(jax.vmap(_count)(rows.texts, rows.left), 1.0)
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
    hidden = jnp.where(cut.masked.hidden, diffusion.mask_token_id, cut.tokens)
    positions = jnp.asarray(row.positions)
    if cut.firsts is None:
        seen = same_document(cut.segments)
        if diffusion.block is not None:
            blocks = positions // diffusion.block
            seen &= blocks[:, None] >= blocks[None, :]
        features = network.forward(hidden, positions, seen, None).features
        before = jnp.roll(features, 1, axis=0)
    else:
        assert diffusion.block is not None  # checked when the objective was made
        both = network.forward(
            jnp.concatenate([hidden, cut.tokens]),
            jnp.concatenate([positions, positions]),
            block_training_mask(cut.segments, positions // diffusion.block, cut.firsts),
            None,
        ).features
        features, clean = jnp.split(both, 2)
        begins = positions == cut.firsts * diffusion.block
        before = jnp.where(begins[:, None], jnp.roll(clean, 1, 0), jnp.roll(features, 1, 0))
    return cut, network.unembed(before if diffusion.shift else features)


def _cut(
    row: Answers, key: PRNGKeyArray, config: ModelConfig, separator: bool | None
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Bool[Array, " slots"]]:
    """Ends every answer at a random place: tokens, documents, and what is left of the answers.

    With a network that is causal over blocks, at the end of a block: such a drafter fills in whole
    blocks.
    """
    assert config.diffusion is not None  # checked when the objective was made
    segments = jnp.asarray(row.segments)
    answer = jnp.asarray(row.answer, bool) & (segments > 0)
    length, behind = _count(segments, answer), _count_from(segments, answer)
    before = length - behind
    kept = 1.0 + jnp.floor(drawn_per_group(key, segments) * length)
    filler = (behind == 0) & (segments > 0)
    if config.diffusion.block is not None:
        prompt = _count(segments, ~answer & ~filler)
        whole = config.diffusion.block
        kept = jnp.ceil((prompt + kept) / whole) * whole - prompt
    left = answer & (before < kept)
    ends = answer & (before == kept) & separated(config, separator)
    gone = (answer & ~left & ~ends) | (filler & (kept < length))
    tokens = jnp.where(ends, RESERVED.index(SEPARATOR), jnp.asarray(row.tokens))
    return tokens, jnp.where(gone, 0, segments), left


def _cut_everywhere(
    row: Answers, key: PRNGKeyArray, config: ModelConfig, longest: int
) -> tuple[Int[Array, " slots"], Int[Array, " slots"], Bool[Array, " slots"], Int[Array, " slots"]]:
    """Ends every answer behind each `longest` slots: as `_cut`, and the first block of each part.

    The first part has as many blocks as chance will have it, so that any may be the last of one.
    """
    assert config.diffusion is not None  # checked when the objective was made
    assert config.diffusion.block is not None
    segments = jnp.asarray(row.segments)
    blocks = jnp.asarray(row.positions) // config.diffusion.block
    together = longest // config.diffusion.block
    skipped = jnp.floor(drawn_per_group(key, segments) * together).astype(jnp.int32)
    firsts = jnp.maximum((blocks + skipped) // together * together - skipped, 0)
    return jnp.asarray(row.tokens), segments, jnp.asarray(row.answer, bool) & (segments > 0), firsts


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


def separated(config: ModelConfig, separator: bool | None) -> bool:
    """Whether a separator stands where an answer was cut, see `Continuation`."""
    assert config.diffusion is not None  # checked when the objective was made
    return config.diffusion.block is None if separator is None else separator


def _check(config: ModelConfig, separator: bool | None, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}.")
    if config.diffusion is None:
        raise ValueError("config must be of a diffusion model, but its `diffusion` is None.")
    if separator and config.diffusion.block is not None:
        raise ValueError(
            "separator must be left out for a drafter that is causal over blocks: its answers are "
            "cut at the ends of blocks, where no slot would see one."
        )
