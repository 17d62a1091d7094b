"""DFlash heads: their objective, blocks of the target's answers, and `DFlashTrainer`.

Chen et al. 2026 (2602.06036), section 4.2. A batch holds prompts with the target's answers and the
target, and may hold the target's states, which get no gradient.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import save_dflash
from jaxspec.core.checks import check_above_zero, check_one_of
from jaxspec.core.masks import bidirectional
from jaxspec.core.types import PyTree
from jaxspec.drafters import DFlash
from jaxspec.models import DFlashHead, ModelConfig, Network, dflash_taps, init_dflash_params
from jaxspec.sharding import on_every_device
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import block_flops_per_token
from jaxspec.training.generated import answers_of, answers_read
from jaxspec.training.loop import StepMetrics, products_in
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.report import OVERLAP_AT, RecipeNotes
from jaxspec.training.settings import (
    CROSS_ENTROPY,
    DTYPES,
    LOSSES,
    TARGET,
    DFlashTrainingSettings,
)
from jaxspec.training.sources import Divided
from jaxspec.training.target import (
    Observed,
    OpenedTarget,
    as_stored,
    check_length,
    check_taps,
    decoding_of,
    head_config,
    load_target,
    with_states,
)
from jaxspec.training.train import STORED, Outcome, Run, Task, pack_sources


class Anchors(NamedTuple):
    """Places of a row at which blocks begin.

    Attributes:
        places: places of the anchors, the tokens that are pending.
        counted: False where the row has no further token to draw.
    """

    places: Int[Array, " anchors"]
    counted: Bool[Array, " anchors"]


@dataclasses.dataclass(frozen=True)
class AnchoredBlocks:
    """A loss of the tokens behind anchors, each block predicted in one pass.

    An anchor is any token that an answer's token follows: what may be pending when the drafter is
    asked. It stands open at the head of a block of masks, which sees the target's states at all
    places before the anchor, and all of itself; blocks do not see each other. The i-th mask weighs
    exp(-(i - 1) / gamma); the sum is divided by that of the weights. As in drafting, the mask is
    never the predicted token.

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

    Raises:
        ValueError: a setting is out of range.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    mask_token_id: int
    block: int
    anchors: int
    gamma: float
    dtype: str = "float32"
    loss: str = CROSS_ENTROPY

    def __post_init__(self):
        check_one_of(self, DTYPES, "dtype")
        check_one_of(self, LOSSES, "loss")
        if self.block < 2 or self.anchors < 1:
            raise ValueError(
                "block must be at least 2 places, the anchor included, and anchors at least 1, got "
                f"{self.block} and {self.anchors}."
            )
        check_above_zero(self, "gamma")

    def head(self, params: PyTree, target: Network) -> DFlashHead:
        return DFlashHead(
            params, self.config, self.taps, self.mask_token_id, self.block, target.num_layers
        )

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        head, target = self.head(params, batch.target), batch.target
        answers = jax.tree.map(jnp.asarray, batch.sequences)
        states = batch.states(self.taps)
        keys = jax.random.split(key, len(answers.tokens))
        logits, predicted, counted = jax.vmap(
            lambda row, taps, key: self._predict(head, target, row, taps, self.draw(row, key))
        )(answers, states.taps, keys)
        rows = jnp.arange(len(predicted))[:, None, None]
        wanted = answers.tokens[rows, predicted]
        chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        nats = jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0)
        weights = counted * jnp.exp(-jnp.arange(self.block - 1) / self.gamma)[None, None]
        hits = counted & (chosen >= jnp.max(logits, axis=-1))
        tokens = jnp.sum(counted).astype(jnp.float32)
        at_depth = jnp.sum(hits, axis=(0, 1)) / jnp.maximum(jnp.sum(counted, axis=(0, 1)), 1)
        metrics = {
            "nats": jnp.sum(nats) / jnp.maximum(tokens, 1.0),
            **{f"top1_at_{i + 1}": at_depth[i] for i in range(self.block - 1)},
            "tokens": tokens,
        }
        losses = nats
        if self.loss != CROSS_ENTROPY:
            said = states.features[rows, predicted - 1].reshape(-1, target.embed_dim)
            found = match(logits, target.unembed(said).reshape(logits.shape))
            losses = losses_of(self.loss, found, counted, axes=(0, 1))
            overlap = jnp.sum(found.overlap * counted, axis=(0, 1))
            overlap = overlap / jnp.maximum(jnp.sum(counted, axis=(0, 1)), 1)
            metrics |= {f"overlap_at_{i + 1}": overlap[i] for i in range(self.block - 1)}
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

    def _predict(
        self,
        head: DFlashHead,
        target: Network,
        row: Sequences,
        taps: Float[Array, "length tapped"],
        anchors: Anchors,
    ) -> tuple[
        Float[Array, "anchors block-1 vocab"],
        Int[Array, "anchors block-1"],
        Bool[Array, "anchors block-1"],
    ]:
        """Returns logits of a row's masks, places of their tokens, and True where they count."""
        tokens, segments, positions = map(jnp.asarray, row[:3])
        length, steps = len(tokens), jnp.arange(self.block)
        masks = jnp.full(self.block - 1, self.mask_token_id, tokens.dtype)
        with products_in(self.dtype):
            context = head.remember(taps, positions)

        def read(place: Int[Array, ""]) -> Float[Array, "block-1 embed"]:
            behind = (segments == segments[place]) & (jnp.arange(length) < place)
            behind = jnp.broadcast_to(behind[None], (self.block, length))
            seen = jnp.concatenate([behind, bidirectional(self.block)], axis=1)
            embedded = target.embed(jnp.concatenate([tokens[place][None], masks]))
            ahead = positions[place] + steps
            return head.forward(embedded, ahead, seen, None, scratch=context).features[1:]

        with products_in(self.dtype):
            logits = target.unembed(jax.vmap(read)(anchors.places).reshape(-1, target.embed_dim))
        logits = logits.at[:, self.mask_token_id].set(-jnp.inf)
        predicted = anchors.places[:, None] + steps[None, 1:]
        inside = jnp.minimum(predicted, length - 1)
        own = segments[inside] == segments[anchors.places][:, None]
        known = tokens[inside] != self.mask_token_id
        counted = anchors.counted[:, None] & (predicted < length) & own & known
        return logits.reshape(*predicted.shape, -1), inside, counted


@dataclasses.dataclass(frozen=True)
class DFlashTrainer:
    """Trains a DFlash head for a target, on answers of that target.

    Each validation also decodes held-out beginnings greedily with the head, in drafts of
    `settings.block` - 1 tokens: `tau_with_bonus` counts tokens per target pass, the bonus token
    included. The result is a `DFlashHead`; `load_dflash` reads `out`.
    """

    settings: DFlashTrainingSettings

    def open(self, run: Run[DFlashTrainingSettings]) -> OpenedTarget:
        settings = self.settings
        model, vocabulary = load_target(run)
        check_length(settings.sequence_length, model)
        vocabulary.needed("mask")  # refused before the target writes its texts
        if settings.block > settings.sequence_length:
            raise ValueError(
                f"block must be at most sequence_length ({settings.sequence_length}), got "
                f"{settings.block}."
            )
        if settings.taps is None:
            taps = dflash_taps(model.config.num_layers, settings.layers)
            return OpenedTarget(model, vocabulary, taps)
        check_taps(settings.taps, model)
        return OpenedTarget(model, vocabulary, settings.taps)

    def task(
        self, run: Run[DFlashTrainingSettings], opened: OpenedTarget, documents: Sequence[Divided]
    ) -> Task:
        settings, (model, vocabulary, taps) = self.settings, opened
        sources = pack_sources(run, vocabulary, documents)
        corpus = answers_of(run, model, sources)
        config = layers_config(model.config, settings.layers, settings.mlp_dim)
        target = jax.device_put(model.network, on_every_device(run.mesh))
        objective = partial(
            AnchoredBlocks,
            config,
            taps,
            vocabulary.needed("mask"),
            settings.block,
            settings.anchors,
            settings.decay,
            loss=settings.loss,
        )
        reads_laws = settings.loss != CROSS_ENTROPY
        share_read = 1.0 if reads_laws else max(taps) / model.config.num_layers
        tapped = len(taps) * model.config.embed_dim
        first_params = partial(init_dflash_params, config, tapped, jax.random.key(settings.seed))
        if settings.cache_features:
            corpus = with_states(run, corpus, target, taps, features=reads_laws)

        def drafter(params: PyTree):
            head = objective("float32").head(as_stored(params, model.network), model.network)
            return DFlash.of(head)

        return Task(
            corpus,
            vocabulary,
            objective,
            evaluation=objective,
            first_params=first_params,
            result=lambda params: objective("float32").head(params, target),
            flops_per_token=block_flops_per_token(
                jax.eval_shape(first_params),
                config,
                model.config,
                settings.sequence_length,
                settings.block,
                settings.anchors,
                0.0 if settings.cache_features else share_read,
                reads_laws,
            ),
            as_batch=lambda rows: Observed(rows, target),
            decode=decoding_of(run, model, sources.validation, drafter),
        )

    def save(self, opened: OpenedTarget, outcome: Outcome, folder: Path) -> None:
        save_dflash(outcome.result, folder, dtype=STORED)

    def recipe(
        self, run: Run[DFlashTrainingSettings], opened: OpenedTarget, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings = self.settings
        reads_laws = settings.loss != CROSS_ENTROPY
        states = "included" if reads_laws else "up to the last layer read included"
        if settings.cache_features:
            states = "left out, since it was made once"
        return RecipeNotes(
            cost="for each token of text, 6 x the weights that make context of it; for each place "
            "of a block, 6 x the layers' weights in products + 12 x layers x heads x head dim x "
            f"(sequence length + block); for each mask, {6 if reads_laws else 4} x those of the "
            f"target's output head; the target's forward pass {states}",
            about=f"A DFlash head of {settings.layers} layers for the target in "
            f"`{settings.target}`, whose files have the SHA-256 `{run.sha256[TARGET]}`. It reads "
            f"the inputs of the target's layers {', '.join(map(str, opened.taps))}. Blocks of "
            f"{settings.block} places, the pending token counted, from {settings.anchors} anchors "
            f"a sequence; the i-th mask weighs exp(-(i - 1) / {settings.decay:g}).",
            read=[answers_read(settings, run.sha256)],
            held_out="answers",
            meaning="nats: cross-entropy of a masked token, all weighing the same. top1_at_D: "
            "share of the D-th masks whose token was the most likely one."
            + (f" {OVERLAP_AT}" if reads_laws else ""),
            drafts=f"drafts of {settings.block - 1} tokens",
            label="nats per masked token",
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
