"""Drafters of blocks aligned with a target (DEER): both stages' objectives and `DeerTrainer`.

In both stages of DEER's alignment (its section 3.2) the drafter reads a prompt to the target and
learns to predict the target's answer. It sees each document by itself, as `jaxspec.Deer` shows it
the text when it drafts: in whole blocks, the last filled with masks, if it is causal over blocks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import Model, load
from jaxspec.checkpoint.tokenizer import covers
from jaxspec.core.checks import Checked, Count, Positive, one_of
from jaxspec.core.masks import same_document
from jaxspec.core.types import Params, PyTree
from jaxspec.diffusion.process import (
    Masked,
    block_training_mask,
    drawn_per_group,
    mask_number,
    mask_share,
)
from jaxspec.drafters import Deer, LoadedDrafter
from jaxspec.drafters.growth import fit_vocab
from jaxspec.models import ModelConfig, Network, init_params
from jaxspec.sharding import on_every_device
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.generated import answers_of, answers_read
from jaxspec.training.loop import StepMetrics, products_in
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.report import OVERLAP, PALM_FLOPS, RecipeNotes
from jaxspec.training.settings import (
    CROSS_ENTROPY,
    CUTS,
    HIDES,
    SCATTERED,
    TARGET,
    DeerTrainingSettings,
    Dtype,
    Loss,
)
from jaxspec.training.sources import Divided
from jaxspec.training.target import (
    Observed,
    as_stored,
    decoding_of,
    load_target,
    target_states,
)
from jaxspec.training.train import Outcome, Run, Task, pack_sources, write_model
from jaxspec.training.vocabulary import TrainingVocabulary


class _Row(NamedTuple):
    """One row of packed texts, cut and hidden.

    Attributes:
        tokens: tokens of the row, with separators.
        segments: documents; 0 is padding.
        texts: number of each place's text: its document, or the part of it behind a cut.
        left: True at the places of an answer that remain after it is cut.
        masked: hidden places and their weights.
        scale: divisor of the weighted cross-entropies of a place's text.
        firsts: see `block_training_mask`; `None`: one end of every document is hidden, in place.
    """

    tokens: Int[Array, " places"]
    segments: Int[Array, " places"]
    texts: Int[Array, " places"]
    left: Bool[Array, " places"]
    masked: Masked
    scale: Float[Array, " places"]
    firsts: Int[Array, " places"] | None = None


@dataclasses.dataclass(frozen=True)
class Continuation(Checked):
    """Stage I: an answer is cut at a random place, and places of what is left are hidden.

    A separator stands at the cut. "scattered", as a diffusion model learns: a share t ~ U(0, 1) of
    the places is hidden, each weighing 1/t; the sum is divided by the answer's length. "suffix", as
    a drafter is used: the last `longest` places are hidden, all of them, and weigh the same. With a
    network that is causal over blocks up to a block's places less one are left out, at random: cuts
    are the ends of blocks, and a draft begins anywhere in one.

    Attributes:
        config: shape of the drafter; `config.diffusion` says what its places see.
        separator: put [SEP] behind an answer that was cut: "cut here, not finished". `None`: for
            networks that see the whole text. Those that are causal over blocks are cut at the ends
            of blocks, where no place would see it.
        dtype: dtype of the operands of products; "bfloat16" still sums in float32.
        steady: draw numbers of hidden places instead of shares, for validation: the expected loss
            is the same, and a part of every answer is hidden.
        hide: "scattered" or "suffix".
        longest: of a suffix: most hidden places.

    Raises:
        ValueError: a setting is out of range, or the network is no diffusion model.
    """

    config: ModelConfig
    separator: bool | None = None
    dtype: Dtype = "float32"
    steady: bool = False
    hide: Annotated[str, one_of(*HIDES)] = SCATTERED
    longest: Count = 96

    def __post_init__(self):
        super().__post_init__()
        _check(self)

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        return _loss(self, params, batch, key)

    @property
    def measured(self) -> "Continuation":
        """The objective of validation."""
        return dataclasses.replace(self, steady=True)

    def cut(self, row: Sequences, key: PRNGKeyArray) -> _Row:
        """Cuts a row and hides the places to predict."""
        cut_key, mask_key = jax.random.split(key)
        tokens, segments, left = _cut(
            row, cut_key, self.config, separated(self.config, self.separator)
        )
        if self.hide == SCATTERED:
            draw = mask_number if self.steady else mask_share
            masked, counted = draw(mask_key, left, segments), left
        else:
            block = self.config.masking.block or 1
            shown = jnp.floor(drawn_per_group(mask_key, segments) * block)
            number = jnp.maximum(self.longest - shown, 1.0)
            masked = tail_weights(left, _count_from(segments, left), number, alpha=1.0)
            counted = masked.hidden
        scale = jnp.maximum(_count(segments, counted), 1.0)
        return _Row(tokens, segments, segments, left, masked, scale)


@dataclasses.dataclass(frozen=True)
class Refinement(Checked):
    """Stage II: the last R ~ U{1..longest} places of a cut answer are hidden, as in drafting.

    The i-th of them, counted from 1 at the first hidden one, weighs alpha^(R - i), because the
    first tokens decide whether the rest is read at all.

    Attributes:
        config: see `Continuation`.
        longest: most hidden places; 96 in DEER.
        alpha: weight of a place over that of the next one; 1.01 in DEER.
        normalise: divide by the sum of the weights. False: the sum alone, as DEER writes it, whose
            size depends on alpha and R: at 1.05 it diverges.
        separator: see `Continuation`.
        dtype: see `Continuation`.
        cuts: "one": each answer is cut at one place, as in DEER. "all": behind every `longest`
            places, from one of the first blocks on, all in one pass that reads a clean copy next to
            the hidden one: twice the work for as many ends as there is room for. Needs a network
            that is causal over blocks, and `longest` in whole blocks.
        loss: "cross-entropy" of the answer's tokens, or another of `settings.LOSSES` between the
            target's laws of them and those that are drafted from, see `overlap.losses_of`; such a
            batch holds the target too (`Observed`).

    Raises:
        ValueError: a setting is out of range, or the network is no diffusion model.
    """

    config: ModelConfig
    longest: Count = 96
    alpha: Positive = 1.01
    normalise: bool = True
    separator: bool | None = None
    dtype: Dtype = "float32"
    cuts: Annotated[str, one_of(*CUTS)] = "one"
    loss: Loss = CROSS_ENTROPY

    def __post_init__(self):
        super().__post_init__()
        _check(self)
        diffusion = self.config.masking
        if self.cuts == "all" and diffusion.block is None:
            raise ValueError(
                'cuts "all" needs a drafter that is causal over blocks; this one sees both sides, '
                'where each cut takes another pass: take "one".'
            )
        if self.cuts == "all" and self.longest % (diffusion.block or 1):
            raise ValueError(
                f"longest must be a multiple of the drafter's block ({diffusion.block}) with cuts "
                f'"all", got {self.longest}.'
            )

    def __call__(
        self, params: PyTree, batch: Sequences | Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        if self.loss == CROSS_ENTROPY:
            assert isinstance(batch, Sequences)
            return _loss(self, params, batch, key)
        assert isinstance(batch, Observed)
        said = target_states(batch.target, batch.sequences).features
        laws = jax.vmap(batch.target.unembed)(jnp.roll(said, 1, axis=1))
        return _loss(self, params, batch.sequences, key, laws)

    @property
    def measured(self) -> "Refinement":
        """The objective of validation."""
        return self

    def cut(self, row: Sequences, key: PRNGKeyArray) -> _Row:
        """Cuts a row and hides the places to predict."""
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
        # Number of places of the answer from each place on, itself included.
        behind = _count_from(texts, left)
        number = 1 + jnp.floor(drawn_per_group(length_key, texts) * self.longest)
        number = jnp.minimum(number, _count(texts, left))
        masked = tail_weights(left, behind, number, self.alpha)
        total = _sum(texts, masked.weights) if self.normalise else jnp.ones(len(tokens))
        scale = jnp.where(total > 0, total, 1.0)
        return _Row(tokens, segments, texts, left, masked, scale, firsts)


def tail_weights(
    answer: Bool[Array, " places"],
    behind: Float[Array, " places"],
    number: Float[Array, " places"],
    alpha: float,
) -> Masked:
    """Hides the last `number` places of an answer, each weighing alpha^(places that follow it).

    Args:
        answer: places that may be hidden.
        behind: number of places of the answer from each place on, itself included.
        number: number of places to hide in each place's document.
        alpha: weight of a place over that of the next one.

    >>> answer = jnp.array([False, True, True, True])
    >>> hidden, weights = tail_weights(answer, jnp.array([0.0, 3, 2, 1]), jnp.full(4, 2.0), 2.0)
    >>> hidden.tolist(), weights.tolist()
    ([False, False, True, True], [0.0, 0.0, 2.0, 1.0])
    """
    hidden = answer & (behind <= number)
    return Masked(hidden, jnp.where(hidden, alpha ** (behind - 1.0), 0.0))


def _loss(
    objective: Continuation | Refinement,
    params: PyTree,
    batch: Sequences,
    key: PRNGKeyArray,
    laws: Float[Array, "rows places vocab"] | None = None,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns the weighted losses of each text over its scale, averaged over texts.

    Args:
        objective: says what is hidden.
        params: weights of the drafter.
        batch: rows of answers.
        key: for what is drawn.
        laws: the target's logits of the token at each place; `None`: the loss is cross-entropy of
            the tokens that stand there.
    """
    network = Network(params, objective.config)
    arrays = jax.tree.map(jnp.asarray, batch)
    with products_in(objective.dtype):
        rows, logits = jax.vmap(lambda row, key: _predict(network, objective, row, key))(
            arrays, jax.random.split(key, len(arrays.tokens))
        )
    chosen = jnp.take_along_axis(logits, arrays.tokens[:, :, None], axis=-1)[:, :, 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    hidden = rows.masked.hidden
    count = jnp.maximum(jnp.sum(hidden), 1)
    metrics = {
        "nats": jnp.sum(nats * hidden) / count,
        "top1": jnp.sum(hidden & (chosen >= jnp.max(logits, axis=-1))) / count,
        "tokens": jnp.sum(hidden).astype(jnp.float32),
    }
    losses = nats
    if laws is not None:
        assert isinstance(objective, Refinement)
        found = match(_drafted_from(logits, network, laws.shape[-1]), laws)
        losses = losses_of(objective.loss, found, hidden)
        metrics["overlap"] = jnp.sum(found.overlap * hidden) / count
    lengths = jnp.maximum(jax.vmap(_count)(rows.texts, rows.left), 1.0)
    texts = jnp.sum(rows.left / lengths)
    loss = jnp.sum(losses * rows.masked.weights / rows.scale) / jnp.maximum(texts, 1.0)
    return loss, metrics


def _drafted_from(
    logits: Float[Array, "rows places draft_vocab"], network: Network, vocab_size: int
) -> Float[Array, "rows places vocab"]:
    """Returns the logits that drafts are drawn from: of the target's tokens, without the mask."""
    known = logits.at[..., network.config.masking.mask_token_id].set(-jnp.inf)
    return jax.vmap(lambda row: fit_vocab(row, vocab_size))(known)


def _predict(
    network: Network, objective: Continuation | Refinement, row: Sequences, key: PRNGKeyArray
) -> tuple[_Row, Float[Array, "places vocab"]]:
    """Returns a row with its hidden places, and the network's logits of each place."""
    diffusion = network.config.masking
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
    features = before if diffusion.shift else features
    logits = network.unembed(features)
    if diffusion.rank:
        logits = network.follow(logits, features, jnp.roll(cut.tokens, 1))
    return cut, logits


def _cut(
    row: Sequences, key: PRNGKeyArray, config: ModelConfig, separator: bool | None
) -> tuple[Int[Array, " places"], Int[Array, " places"], Bool[Array, " places"]]:
    """Ends every answer at a random place; returns tokens, documents, and places that are left.

    With a network that is causal over blocks the place is the end of a block, because such a
    drafter fills in whole blocks.
    """
    segments = jnp.asarray(row.segments)
    answer = jnp.asarray(row.answer, bool) & (segments > 0)
    length, behind = _count(segments, answer), _count_from(segments, answer)
    before = length - behind
    kept = 1.0 + jnp.floor(drawn_per_group(key, segments) * length)
    filler = (behind == 0) & (segments > 0)
    if (whole := config.masking.block) is not None:
        prompt = _count(segments, ~answer & ~filler)
        kept = jnp.ceil((prompt + kept) / whole) * whole - prompt
    left = answer & (before < kept)
    marked = separated(config, separator)
    ends = answer & (before == kept) & marked
    gone = (answer & ~left & ~ends) | (filler & (kept < length))
    tokens = jnp.asarray(row.tokens)
    if marked:
        tokens = jnp.where(ends, jnp.asarray(config.masking.separator), tokens)
    return tokens, jnp.where(gone, 0, segments), left


def _cut_everywhere(
    row: Sequences, key: PRNGKeyArray, config: ModelConfig, longest: int
) -> tuple[
    Int[Array, " places"], Int[Array, " places"], Bool[Array, " places"], Int[Array, " places"]
]:
    """Ends every answer behind each `longest` places; returns as `_cut`, and parts' first blocks.

    The length of the first part is random, so that any block may be the last of a part.
    """
    block = config.masking.block
    assert block is not None  # checked when the objective was made
    segments = jnp.asarray(row.segments)
    blocks = jnp.asarray(row.positions) // block
    together = longest // block
    skipped = jnp.floor(drawn_per_group(key, segments) * together).astype(jnp.int32)
    firsts = jnp.maximum((blocks + skipped) // together * together - skipped, 0)
    return jnp.asarray(row.tokens), segments, jnp.asarray(row.answer, bool) & (segments > 0), firsts


def _sum(
    segments: Int[Array, " places"], values: Float[Array, " places"]
) -> Float[Array, " places"]:
    """Returns the sum over each place's document."""
    return jnp.sum(jnp.where(same_document(segments), values[None, :], 0.0), axis=1)


def _count(
    segments: Int[Array, " places"], counted: Bool[Array, " places"]
) -> Float[Array, " places"]:
    """Returns the number of counted places in each place's document."""
    return _sum(segments, counted.astype(jnp.float32))


def _count_from(
    segments: Int[Array, " places"], counted: Bool[Array, " places"]
) -> Float[Array, " places"]:
    """Returns the number of counted places at or behind each place, in its document."""
    order = jnp.arange(len(segments))
    later = same_document(segments) & (order[:, None] <= order[None, :])
    return jnp.sum(jnp.where(later, counted[None, :].astype(jnp.float32), 0.0), axis=1)


def separated(config: ModelConfig, separator: bool | None) -> bool:
    """Returns True if a separator stands where an answer was cut, see `Continuation`."""
    return config.masking.block is None if separator is None else separator


def _check(objective: Continuation | Refinement) -> None:
    """Refuses settings of a stage that do not fit its network."""
    if objective.config.masking.block is not None and objective.separator:
        raise ValueError(
            "separator must be left out for a drafter that is causal over blocks: its answers are "
            "cut at the ends of blocks, where no place would see one."
        )
    if (
        separated(objective.config, objective.separator)
        and objective.config.masking.separator is None
    ):
        raise ValueError(
            "config.diffusion.separator must name the separator's id where one stands at a cut; "
            "name it, or choose separator=False."
        )


class OpenedDeer(NamedTuple):
    """The target of a run, its vocabulary, and the network to align."""

    model: Model
    vocabulary: TrainingVocabulary
    start: Network


@dataclasses.dataclass(frozen=True)
class DeerTrainer:
    """Aligns a diffusion model with the target that it drafts for: one of DEER's two stages.

    Each validation also decodes held-out beginnings greedily with the drafter: `tau_with_bonus`
    counts tokens per target pass, the bonus token included. The result is a `Network`.
    """

    settings: DeerTrainingSettings

    def open(self, run: Run[DeerTrainingSettings]) -> OpenedDeer:
        model, vocabulary = load_target(run)
        drafter = load(self.settings.start_from, dtype="float32")
        start = _first_network(self.settings, drafter, model, vocabulary)
        self._objective(start.config, "float32")  # refuses what does not fit the drafter
        return OpenedDeer(model, vocabulary, start)

    def task(
        self, run: Run[DeerTrainingSettings], opened: OpenedDeer, documents: Sequence[Divided]
    ) -> Task:
        settings, (model, vocabulary, start) = self.settings, opened
        config, diffusion = start.config, start.config.masking
        sources = pack_sources(run, vocabulary, documents)
        # A drafter that is causal over blocks always sees whole ones.
        corpus = answers_of(run, model, sources, diffusion.block or 1, diffusion.mask_token_id)
        objective = partial(self._objective, config)
        flops = self._copies * flops_per_token(config, settings.sequence_length)
        target = None
        if settings.loss != CROSS_ENTROPY:
            target = jax.device_put(model.network, on_every_device(run.mesh))
            # The target's pass is a forward one, which is a third.
            flops += flops_per_token(model.config, settings.sequence_length) / 3

        def drafter(params: PyTree) -> LoadedDrafter:
            network = Network(as_stored(params, model.network), config)
            return LoadedDrafter(_method(settings, config), network, model.tokenizer)

        return Task(
            corpus,
            vocabulary,
            objective,
            evaluation=lambda dtype: objective(dtype).measured,
            first_params=lambda: start.params,
            result=lambda params: Network(params, config),
            flops_per_token=flops,
            as_batch=lambda rows: rows if target is None else Observed(rows, target),
            decode=decoding_of(run, model, sources.validation, drafter),
        )

    def save(self, opened: OpenedDeer, outcome: Outcome, folder: Path) -> None:
        write_model(folder, outcome.result, outcome.vocabulary)

    def recipe(
        self, run: Run[DeerTrainingSettings], opened: OpenedDeer, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings = self.settings
        hidden = (
            f"the last {settings.longest} places hidden" if settings.has_window else "any hidden"
        )
        stage = (
            f"I, continuation distillation ({hidden})"
            if settings.stage == 1
            else f"II, refinement (the last 1 to {settings.longest} places hidden, alpha "
            f"{settings.alpha:g}, {'' if settings.normalise else 'not '}normalised, "
            f"{'one cut' if settings.cuts == 'one' else 'cuts throughout'} of each answer)"
        )
        rank = opened.start.config.masking.rank
        if rank:
            stage += f", with a Markov head of rank {rank}"
        twice = ", twice, for a hidden and a clean copy of each row"
        reads_laws = settings.loss != CROSS_ENTROPY
        return RecipeNotes(
            cost=PALM_FLOPS
            + (twice if self._copies > 1 else "")
            + (", and the target's forward pass" if reads_laws else ""),
            about=f"A drafter of blocks (DEER) for the target in `{settings.target}`, whose files "
            f"have the SHA-256 `{run.sha256[TARGET]}`, from the diffusion model in "
            f"`{settings.start_from}` (`{run.sha256['start_from']}`). Stage {stage}.",
            read=[answers_read(settings, run.sha256)],
            held_out="answers",
            meaning="nats: cross-entropy of a hidden token"
            + (", given the true one before it" if rank else "")
            + ". top1: share of them that were the most likely one."
            + (f" {OVERLAP}" if reads_laws else ""),
            drafts=f"blocks of {settings.block} tokens",
            label="nats per hidden token",
        )

    @property
    def _copies(self) -> int:
        """Copies of each row in a pass, see `Refinement.cuts`."""
        return 2 if self.settings.cuts == "all" else 1

    def _objective(self, config: ModelConfig, dtype: str) -> Continuation | Refinement:
        settings = self.settings
        if settings.stage == 1:
            return Continuation(
                config, settings.separator, dtype, hide=settings.hide, longest=settings.longest
            )
        return Refinement(
            config,
            settings.longest,
            settings.alpha,
            settings.normalise,
            settings.separator,
            dtype,
            settings.cuts,
            settings.loss,
        )


def _first_network(
    settings: DeerTrainingSettings, start: Model, target: Model, vocabulary: TrainingVocabulary
) -> Network:
    """Returns the network to align, after checks that it can draft for the target.

    Raises:
        ValueError: saying what does not fit.
    """
    config = start.config
    if config.diffusion is None:
        raise ValueError(
            f"start_from must be a diffusion model, whose config.json has a mask_token_id, but "
            f"{settings.start_from} is a causal one: convert it first (jaxspec train masked)."
        )
    # It may have rows more, for its mask and separator.
    if not target.vocab_size <= config.vocab_size <= target.vocab_size + 2:
        raise ValueError(
            f"start_from ({settings.start_from}) has a vocabulary of {config.vocab_size}, the "
            f"target one of {target.vocab_size}: they must share a tokenizer."
        )
    theirs, ours = start.tokenizer, target.tokenizer
    if theirs is not None and ours is not None and not covers(theirs, ours):
        raise ValueError(
            f"start_from ({settings.start_from}) has another tokenizer than the target, so its "
            "tokens mean something else: start from a model that shares it."
        )
    if settings.sequence_length > config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the drafter's positions ({config.max_positions}), "
            f"got {settings.sequence_length}."
        )
    separator = _separator(config, vocabulary) if separated(config, settings.separator) else None
    trained = {"separator": separator, "made_for": target.digest}
    if settings.has_window:
        trained["window"] = settings.longest
    if settings.markov:
        if config.diffusion.rank:
            raise ValueError(
                f"markov: the drafter in {settings.start_from} has a Markov head of rank "
                f"{config.diffusion.rank}, which is trained along: leave markov out."
            )
        trained["rank"] = settings.markov
    config = config.replace(diffusion=dataclasses.replace(config.diffusion, **trained))
    params = start.params
    if settings.markov:
        key = jax.random.key(settings.seed)
        fresh = jax.jit(lambda key: init_params(config, key)["transitions"])(key)
        params = {**params, "transitions": fresh}
    network = Network(params, config)
    # The drafter of validation, checked now and not after the first updates.
    _method(settings, config).check_fit(Params(target.network, network))
    return network


def _separator(config: ModelConfig, vocabulary: TrainingVocabulary) -> int:
    """Returns the drafter's separator, or an id of the vocabulary for one."""
    given = config.masking.separator
    if given is not None:
        return given
    mask = config.masking.mask_token_id
    masked = dataclasses.replace(vocabulary, size=config.vocab_size, given_mask=mask)
    return masked.needed("separator")


def _method(settings: DeerTrainingSettings, config: ModelConfig) -> Deer:
    return Deer(settings.block, sep_token_id=config.masking.separator)
