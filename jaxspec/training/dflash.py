"""DFlash heads: their objective, blocks of the target's answers, and `DFlashTrainer`.

Chen et al. 2026 (2602.06036), section 4.2. A Markov head learns along, each token given the true
one before it, and a confidence head learns the overlap of both laws at each place, as in DSpark
(DeepSpec, 2607.05147). A path selector learns to choose among the likeliest tokens of a place. A
batch holds prompts with the target's answers and the target, and may hold the target's states,
which get no gradient.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import Model, load_dflash, save_dflash
from jaxspec.core.checks import Checked, Count, Natural, PositiveOrInfinite, at_least
from jaxspec.core.masks import bidirectional
from jaxspec.core.types import PyTree
from jaxspec.drafters import DFlash
from jaxspec.models import (
    Convolution,
    DFlashHead,
    DFlashParts,
    ModelConfig,
    Network,
    dflash_taps,
    init_dflash_params,
)
from jaxspec.models.dflash import NO_MORE
from jaxspec.sharding import on_every_device
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import block_flops_per_token
from jaxspec.training.generated import answers_of, answers_read
from jaxspec.training.loop import StepMetrics, products_in
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.report import OVERLAP_AT, RecipeNotes
from jaxspec.training.settings import (
    CROSS_ENTROPY,
    TARGET,
    DFlashTrainingSettings,
    Dtype,
    Loss,
)
from jaxspec.training.sources import Divided
from jaxspec.training.target import (
    Observed,
    as_stored,
    check_length,
    check_taps,
    decoding_of,
    head_config,
    load_target,
    with_states,
)
from jaxspec.training.train import STORED, Outcome, Run, Task, pack_sources
from jaxspec.training.vocabulary import TrainingVocabulary


class Anchors(NamedTuple):
    """Places of a row at which blocks begin.

    Attributes:
        places: places of the anchors, the tokens that are pending.
        counted: False where the row has no further token to draw.
    """

    places: Int[Array, " anchors"]
    counted: Bool[Array, " anchors"]


@dataclasses.dataclass(frozen=True)
class AnchoredBlocks(Checked):
    """A loss of the tokens behind anchors, each block predicted in one pass.

    An anchor is any token that an answer's token follows: what may be pending when the drafter is
    asked. It stands open at the head of a block of masks, which sees the target's states at all
    places before the anchor, and all of itself; blocks do not see each other. The i-th token weighs
    exp(-(i - 1) / gamma); the sum is divided by that of the weights. As in drafting, the mask is
    never the predicted token.

    Parts that weights hold are trained along. A confidence head adds the cross-entropy of its
    chance against the overlap of both laws, a path selector that of its choice where the true token
    is among them.

    Attributes:
        config: shape of the head's layers.
        taps: target layers that the head reads.
        mask_token_id: see `DFlashHead`.
        block: places of a block, the anchor included.
        anchors: anchors of a row that are drawn for an update; all if it has fewer.
        gamma: decay length of the weights; 7 in the paper for blocks of 16.
        dtype: dtype of the head's products, see `NextToken`. The target's are as exact as when it
            decodes.
        loss: "cross-entropy" of the answer's tokens, or another of `settings.LOSSES` against the
            target's laws of them, see `overlap.losses_of`.
        anchor_predicts, likeliest: see `DFlashHead`.

    Raises:
        ValueError: a setting is out of range.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    mask_token_id: Natural
    block: Annotated[int, at_least(2)]
    anchors: Count
    gamma: PositiveOrInfinite
    dtype: Dtype = "float32"
    loss: Loss = CROSS_ENTROPY
    anchor_predicts: bool = False
    likeliest: Count | None = None

    def head(self, params: PyTree, target: Network) -> DFlashHead:
        return DFlashHead(
            params,
            self.config,
            self.taps,
            self.mask_token_id,
            self.block,
            target.num_layers,
            self.anchor_predicts,
            likeliest=self.likeliest,
        )

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        frozen, target = batch.frozen or {}, batch.target
        head = self.head({**frozen, **params}, target)
        answers = jax.tree.map(jnp.asarray, batch.sequences)
        states = batch.states(self.taps)
        keys = jax.random.split(key, len(answers.tokens))
        features, predicted, counted = jax.vmap(
            lambda row, taps, key: self._read(head, target, row, taps, self.draw(row, key))
        )(answers, states.taps, keys)
        rows = jnp.arange(len(predicted))[:, None, None]
        wanted, previous = answers.tokens[rows, predicted], answers.tokens[rows, predicted - 1]
        with products_in(self.dtype):
            marginals, logits, chances = self._laws(head, target, features, previous)
        judged = logits if self.likeliest is None else marginals

        def of_wanted(logits: Float[Array, "*places vocab"]) -> Float[Array, "*places"]:
            return jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]

        def surprise(logits, counted):
            return jnp.where(counted, jax.nn.logsumexp(logits, -1) - of_wanted(logits), 0.0)

        places = jnp.maximum(jnp.sum(counted, axis=(0, 1)), 1)
        tokens = jnp.sum(counted).astype(jnp.float32)

        def at_depth(name: str, values: Array) -> StepMetrics:
            means = jnp.sum(jnp.where(counted, values, 0), axis=(0, 1)) / places
            return {f"{name}_at_{i + 1}": mean for i, mean in enumerate(means)}

        losses = nats = surprise(judged, counted)
        metrics = {
            "nats": jnp.sum(nats) / jnp.maximum(tokens, 1.0),
            **at_depth("top1", of_wanted(logits) >= jnp.max(logits, axis=-1)),
            "tokens": tokens,
        }
        if self.loss != CROSS_ENTROPY or chances is not None:
            said = states.features[rows, predicted - 1].reshape(-1, target.embed_dim)
            found = match(judged, target.unembed(said).reshape(judged.shape))
            metrics |= at_depth("overlap", found.overlap)
            if self.loss != CROSS_ENTROPY:
                losses = losses_of(self.loss, found, counted, axes=(0, 1))
            if chances is not None:
                overlap = jax.lax.stop_gradient(found.overlap)
                losses = losses + _binary_cross_entropy(chances, overlap)
                metrics |= at_depth("confidence_error", jnp.abs(chances - overlap))
        if self.likeliest is not None:
            candidate = of_wanted(logits) > -jnp.inf
            losses = losses + surprise(logits, counted & candidate)
            metrics |= at_depth("candidate", candidate)
        weights = counted * jnp.exp(-jnp.arange(len(places)) / self.gamma)[None, None]
        loss = jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
        return loss, metrics

    def draw(self, row: Sequences, key: PRNGKeyArray) -> Anchors:
        """Draws different tokens of a row, each with the same chance."""
        assert row.answer is not None  # rows of answers
        follows = jnp.roll(row.segments, -1).at[-1].set(0)
        answered = jnp.roll(row.answer, -1) > 0
        possible = (row.segments > 0) & (row.segments == follows) & answered
        order = jnp.where(possible, jax.random.uniform(key, possible.shape), -1.0)
        highest, places = jax.lax.top_k(order, min(self.anchors, len(order)))
        return Anchors(places, highest >= 0)

    def _read(
        self,
        head: DFlashHead,
        target: Network,
        row: Sequences,
        taps: Float[Array, "length tapped"],
        anchors: Anchors,
    ) -> tuple[
        Float[Array, "anchors drafted embed"],
        Int[Array, "anchors drafted"],
        Bool[Array, "anchors drafted"],
    ]:
        """Returns features of a row's blocks, places of their tokens, and True where they count."""
        tokens, segments, positions = map(jnp.asarray, row[:3])
        length, steps, num_drafted = len(tokens), jnp.arange(self.block), head.num_drafted
        masks = jnp.full(self.block - 1, self.mask_token_id, tokens.dtype)
        with products_in(self.dtype):
            context = head.remember(taps, positions)

        def read(place: Int[Array, ""]) -> Float[Array, "drafted embed"]:
            behind = (segments == segments[place]) & (jnp.arange(length) < place)
            behind = jnp.broadcast_to(behind[None], (self.block, length))
            seen = jnp.concatenate([behind, bidirectional(self.block)], axis=1)
            embedded = target.embed(jnp.concatenate([tokens[place][None], masks]))
            hidden = head.forward(embedded, positions[place] + steps, seen, None, scratch=context)
            return hidden.features[self.block - num_drafted :]

        with products_in(self.dtype):
            features = jax.vmap(read)(anchors.places)
        predicted = anchors.places[:, None] + 1 + jnp.arange(num_drafted)[None]
        inside = jnp.minimum(predicted, length - 1)
        own = segments[inside] == segments[anchors.places][:, None]
        known = tokens[inside] != self.mask_token_id
        counted = anchors.counted[:, None] & (predicted < length) & own & known
        return features, inside, counted

    def _laws(
        self,
        head: DFlashHead,
        target: Network,
        features: Float[Array, "rows anchors drafted embed"],
        previous: Int[Array, "rows anchors drafted"],
    ) -> tuple[
        Float[Array, "rows anchors drafted vocab"],
        Float[Array, "rows anchors drafted vocab"],
        Float[Array, "rows anchors drafted"] | None,
    ]:
        """Returns logits of places alone, given the tokens before them, and chances of those."""
        flat, before = features.reshape(-1, target.embed_dim), previous.reshape(-1)
        marginals = target.unembed(flat).at[:, self.mask_token_id].set(-jnp.inf)
        logits = head.follow(marginals, flat, before) if head.parts.rank else marginals
        chances = None
        if head.parts.confidence:
            chances = head.acceptance(flat, before).reshape(previous.shape)
        shape = (*previous.shape, -1)
        return marginals.reshape(shape), logits.reshape(shape), chances


def _binary_cross_entropy(
    chances: Float[Array, "*places"], shares: Float[Array, "*places"]
) -> Float[Array, "*places"]:
    inside = jnp.clip(chances, 1e-6, 1 - 1e-6)
    return -(shares * jnp.log(inside) + (1 - shares) * jnp.log1p(-inside))


class OpenedHead(NamedTuple):
    """The target of a run, its vocabulary, and the head to train, without trained weights.

    Attributes:
        head: with the weights that stay as they are; without any if all are trained.
        parts: parts of the whole head.
    """

    model: Model
    vocabulary: TrainingVocabulary
    head: DFlashHead
    parts: DFlashParts

    @property
    def is_whole(self) -> bool:
        """True if all weights are trained."""
        return not self.head.params


@dataclasses.dataclass(frozen=True)
class DFlashTrainer:
    """Trains a DFlash head for a target, on answers of that target.

    Each validation also decodes held-out beginnings greedily with the head, in drafts as long as
    its blocks predict: `tau_with_bonus` counts tokens per target pass, the bonus token included.
    The result is a `DFlashHead`; `load_dflash` reads `out`.
    """

    settings: DFlashTrainingSettings

    def open(self, run: Run[DFlashTrainingSettings]) -> OpenedHead:
        settings = self.settings
        model, vocabulary = load_target(run)
        check_length(settings.sequence_length, model)
        if settings.start_from is not None:
            head = load_dflash(settings.start_from, model, "float32")
            _check_frozen(head, settings)
            parts = head.parts
        else:
            head, parts = self._new_head(model, vocabulary), NO_MORE
        if head.block > settings.sequence_length:
            raise ValueError(
                f"block must be at most sequence_length ({settings.sequence_length}), got "
                f"{head.block}."
            )
        embed = model.config.embed_dim
        if settings.selector:
            convolution = Convolution(2, math.gcd(16, embed))
            parts = DFlashParts(convolution, settings.selector, gated=True)
        if settings.markov:
            parts = parts._replace(rank=settings.markov)
        if settings.confidence:
            parts = parts._replace(confidence=embed + parts.rank)
        head = dataclasses.replace(head, made_for=model.digest)
        return OpenedHead(model, vocabulary, head, parts)

    def _new_head(self, model: Model, vocabulary: TrainingVocabulary) -> DFlashHead:
        settings, layers = self.settings, model.config.num_layers
        mask = vocabulary.needed("mask")  # refused before the target writes its texts
        if settings.taps is not None:
            check_taps(settings.taps, model)
        return DFlashHead(
            {},
            layers_config(model.config, settings.layers, settings.mlp_dim),
            dflash_taps(layers, settings.layers) if settings.taps is None else settings.taps,
            mask,
            settings.block,
            layers,
            anchor_predicts=settings.markov > 0,
            likeliest=min(16, model.config.vocab_size - 1) if settings.selector else None,
        )

    def task(
        self, run: Run[DFlashTrainingSettings], opened: OpenedHead, documents: Sequence[Divided]
    ) -> Task:
        settings, (model, vocabulary, head, parts) = self.settings, opened
        sources = pack_sources(run, vocabulary, documents)
        corpus = answers_of(run, model, sources)
        target = jax.device_put(model.network, on_every_device(run.mesh))
        frozen = jax.device_put(head.params, on_every_device(run.mesh))
        objective = partial(
            AnchoredBlocks,
            head.config,
            head.taps,
            head.mask_token_id,
            head.block,
            settings.anchors,
            settings.decay_over(head.block),
            loss=settings.loss,
            anchor_predicts=head.anchor_predicts,
            likeliest=head.likeliest,
        )
        reads_laws = self._reads_laws
        share_read = 1.0 if reads_laws else max(head.taps) / model.config.num_layers
        tapped = len(head.taps) * model.config.embed_dim
        make = partial(init_dflash_params, head.config, tapped, parts=parts)

        def first_params() -> PyTree:
            made = make(jax.random.key(settings.seed))
            return {name: made[name] for name in made if name not in head.params}

        if settings.cache_features:
            corpus = with_states(run, corpus, target, head.taps, features=reads_laws)

        def drafter(params: PyTree):
            params = as_stored({**head.params, **params}, model.network)
            return DFlash.of(dataclasses.replace(head, params=params))

        return Task(
            corpus,
            vocabulary,
            objective,
            evaluation=objective,
            first_params=first_params,
            result=lambda params: dataclasses.replace(head, params={**frozen, **params}),
            flops_per_token=block_flops_per_token(
                jax.eval_shape(make, jax.random.key(0)),
                head.config,
                model.config,
                settings.sequence_length,
                head.block,
                settings.anchors,
                0.0 if settings.cache_features else share_read,
                reads_laws,
                head.num_drafted,
                parts.rank,
                not opened.is_whole,
            ),
            as_batch=lambda rows: Observed(rows, target, frozen=frozen),
            decode=decoding_of(run, model, sources.validation, drafter),
        )

    @property
    def _reads_laws(self) -> bool:
        return self.settings.loss != CROSS_ENTROPY or self.settings.confidence

    def save(self, opened: OpenedHead, outcome: Outcome, folder: Path) -> None:
        save_dflash(outcome.result, folder, dtype=STORED)

    def recipe(
        self, run: Run[DFlashTrainingSettings], opened: OpenedHead, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings, head, parts = self.settings, opened.head, opened.parts
        states = "included" if self._reads_laws else "up to the last layer read included"
        if settings.cache_features:
            states = "left out, since it was made once"
        each, of_head = (6, 4) if opened.is_whole else (2, 2)
        of_markov = ", and 6 x rank x vocabulary" if parts.rank else ""
        more = {
            f"a Markov head of rank {parts.rank}": settings.markov,
            "a confidence head": settings.confidence,
            f"a path selector of rank {parts.rank}, with convolutions": settings.selector,
        }
        parts_trained = " and ".join(name for name, is_trained in more.items() if is_trained)
        meanings = [
            "nats: cross-entropy of a predicted token, all weighing the same. top1_at_D: share of "
            "the D-th tokens that were the most likely ones."
        ]
        if self._reads_laws:
            meanings.append(OVERLAP_AT)
        if settings.confidence:
            meanings.append(
                "confidence_error_at_D: how far the confidence head is from that chance."
            )
        if settings.selector:
            meanings.append("candidate_at_D: share of the D-th tokens that could be selected.")
        about = f"A DFlash head of {head.config.num_layers} layers"
        if opened.is_whole:
            about += f" with {parts_trained}" if parts_trained else ""
        else:
            digest = run.sha256["start_from"]
            about = (
                f"{parts_trained[0].upper()}{parts_trained[1:]}, over the head in "
                f"`{settings.start_from}` (SHA-256 `{digest}`), which stayed as it was,"
            )
        return RecipeNotes(
            cost=f"for each token of text, {each} x the weights that make context of it; for each "
            f"place of a block, {each} x the layers' weights in products + {2 * each} x layers x "
            f"heads x head dim x (sequence length + block); for each predicted token, "
            f"{of_head + 2 * self._reads_laws} x those of the target's output head{of_markov}; the "
            f"target's forward pass {states}",
            about=f"{about} for the target in `{settings.target}`, whose files have the SHA-256 "
            f"`{run.sha256[TARGET]}`. It reads the inputs of the target's layers "
            f"{', '.join(map(str, head.taps))}. Blocks of {head.block} places, the pending token "
            f"counted, predict {head.num_drafted} tokens, from {settings.anchors} anchors a "
            f"sequence; the i-th token weighs exp(-(i - 1) / {settings.decay_over(head.block):g}).",
            read=[answers_read(settings, run.sha256)],
            held_out="answers",
            meaning=" ".join(meanings),
            drafts=f"drafts of {head.num_drafted} tokens",
            label="nats per predicted token",
        )


def _check_frozen(head: DFlashHead, settings: DFlashTrainingSettings) -> None:
    """Refuses a head over which nothing can be trained.

    Raises:
        ValueError: saying why.
    """
    has = {"a path selector": head.parts.gated}
    has["a Markov head"] = bool(settings.markov and head.parts.rank and not head.parts.gated)
    has["a confidence head"] = bool(settings.confidence and head.parts.confidence)
    has["layers that slide or are causal"] = (
        head.config.sliding_window is not None or head.causal is True
    )
    found = [name for name, is_there in has.items() if is_there]
    if found:
        raise ValueError(
            f"start_from: the head in {settings.start_from} has {' and '.join(found)} already, and "
            "nothing more can be trained over it; name another."
        )


def layers_config(target: ModelConfig, num_layers: int, mlp_dim: int | None) -> ModelConfig:
    """Returns the layers of a head: of the target's shape and of Qwen-3's kind, as published.

    Args:
        target: shape of the model whose states the head reads.
        num_layers: layers of the head.
        mlp_dim: hidden units of an MLP; `None`: as many as the target's.
    """
    config = head_config(target, num_layers).replace(qk_norm=True)
    return config if mlp_dim is None else config.replace(mlp_dim=mlp_dim)
