"""Language models and draft models: their objectives and `LMTrainer`.

The objective is the next token, as it is or with a teacher's distributions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import find_model, load
from jaxspec.checkpoint.files import replacing_files
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.checkpoint.tokenizer import load_tokenizer, read_backend
from jaxspec.core.checks import Checked, Share
from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, Network, Skips, init_params
from jaxspec.sharding import on_every_device
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.generated import pack_generated
from jaxspec.training.loop import StepMetrics, products_in, same_choice
from jaxspec.training.overlap import losses_of, match
from jaxspec.training.report import OVERLAP, PALM_FLOPS, RecipeNotes, texts_read
from jaxspec.training.settings import (
    CROSS_ENTROPY,
    SMALL,
    BelowOne,
    Dtype,
    LMTrainingSettings,
    Loss,
)
from jaxspec.training.sources import Divided, document_texts
from jaxspec.training.tokenizer import loaded_tokenizer, train_tokenizer
from jaxspec.training.train import Outcome, Run, Task, pack_sources, write_model
from jaxspec.training.vocabulary import TrainingVocabulary


class Taught(NamedTuple):
    """A batch with the teacher."""

    sequences: Sequences
    teacher: Network


@dataclasses.dataclass(frozen=True)
class NextToken(Checked):
    """Cross-entropy of every token given those before it in its document, in nats per token.

    Attributes:
        config: shape of the network that is trained.
        layer_drop: chance to leave out a sub-layer of the last layer, per sequence; it rises from 0
            at the first layer in a straight line (stochastic depth, Huang et al. 2016).
        early_exit: share of the sequences that leave out all layers from a drawn one on, at the
            earliest after a quarter of them: the head learns to read them (LayerSkip, Elhoushi et
            al. 2024, section 3, without its rising weights).
        dtype: dtype of the operands of products; "bfloat16" still sums in float32. Weights,
            activations, softmax and loss stay float32.
    """

    config: ModelConfig
    layer_drop: BelowOne = 0.0
    early_exit: BelowOne = 0.0
    dtype: Dtype = "float32"

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        metrics = _metrics(self.logits(params, batch, key), batch)
        return metrics["nats"], metrics

    def logits(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> Float[Array, "rows length-1 vocab"]:
        """Returns the logits of each next token, with layers left out as in training."""
        draw = partial(
            _draw_skips,
            num_layers=self.config.num_layers,
            layer_drop=self.layer_drop,
            early_exit=self.early_exit,
        )
        skips = jax.vmap(draw)(jax.random.split(key, len(batch.tokens)))
        with products_in(self.dtype):
            whole = not (self.layer_drop or self.early_exit)
            return _logits(Network(params, self.config), batch, None if whole else skips)

    @property
    def measured(self) -> "NextToken":
        """The objective of validation: no layer is left out."""
        return dataclasses.replace(self, layer_drop=0.0, early_exit=0.0)


@dataclasses.dataclass(frozen=True)
class SoftLabels(Checked):
    """A loss against the teacher's whole distribution, and cross-entropy of the next token.

    Attributes:
        student: gives the student's logits.
        soft_share: weight of the teacher's distribution; the rest goes to the text itself.
        loss: the loss against that distribution, see `overlap.losses_of`.
    """

    student: NextToken
    soft_share: Share = 0.9
    loss: Loss = CROSS_ENTROPY

    @property
    def measured(self) -> "SoftLabels":
        """The objective of validation: no layer is left out."""
        return dataclasses.replace(self, student=self.student.measured)

    def __call__(
        self, params: PyTree, batch: Taught, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        sequences = batch.sequences
        logits = self.student.logits(params, sequences, key)
        expert = jax.lax.stop_gradient(_logits(batch.teacher, sequences))
        _, learned = _targets(sequences)
        found = match(logits, expert)
        soft = _mean(losses_of(self.loss, found, learned), learned)
        metrics = _metrics(logits, sequences) | {
            "agreement": _mean(same_choice(logits, expert), learned),
            "overlap": _mean(found.overlap, learned),
        }
        return self.soft_share * soft + (1.0 - self.soft_share) * metrics["nats"], metrics


def _logits(
    network: Network, batch: Sequences, skips: Skips | None = None
) -> Float[Array, "rows length-1 vocab"]:
    def row_logits(tokens, segments, positions, skip) -> Float[Array, "length-1 vocab"]:
        mask = causal(len(tokens)) & same_document(segments)
        hidden = network.forward(tokens, positions, mask, None, skip=skip)
        return network.unembed(hidden.features[:-1])

    arrays = (jnp.asarray(batch.tokens), jnp.asarray(batch.segments), jnp.asarray(batch.positions))
    return jax.vmap(row_logits)(*arrays, skips)


def _draw_skips(
    key: PRNGKeyArray, *, num_layers: int, layer_drop: float, early_exit: float
) -> Skips:
    drop_key, share_key, depth_key = jax.random.split(key, 3)
    layers = jnp.arange(num_layers)
    chances = layer_drop * layers / max(num_layers - 1, 1)
    dropped = jax.random.bernoulli(drop_key, chances[None], (2, num_layers))
    exits = jax.random.bernoulli(share_key, early_exit)
    depth = jax.random.randint(depth_key, (), max(num_layers // 4, 1), max(num_layers, 2))
    left_out = dropped | (exits & (layers >= depth))[None]
    return Skips(*left_out.astype(jnp.float32))


def _targets(
    batch: Sequences,
) -> tuple[Int[Array, "rows length-1"], Bool[Array, "rows length-1"]]:
    """Returns the successor of each token, and True where it belongs to the same document."""
    segments = jnp.asarray(batch.segments)
    learned = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.asarray(batch.tokens)[:, 1:], learned


def _metrics(logits: Float[Array, "rows length-1 vocab"], batch: Sequences) -> StepMetrics:
    targets, learned = _targets(batch)
    chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return {
        "nats": _mean(nats, learned),
        # Comparing with the maximum is several times faster on CPUs than an arg-max.
        "top1": _mean(chosen >= jnp.max(logits, axis=-1), learned),
        "tokens": jnp.sum(learned).astype(jnp.float32),
    }


def _mean(
    values: Float[Array, "rows length-1"], counted: Bool[Array, "rows length-1"]
) -> Float[Array, ""]:
    return jnp.sum(values * counted) / jnp.maximum(jnp.sum(counted), 1)


@dataclasses.dataclass(frozen=True)
class LMTrainer:
    """Trains a language model in the Llama format, or a draft model after a teacher.

    The result is a `Network`; `out` has the Hugging Face layout.
    """

    settings: LMTrainingSettings

    def open(self, run: Run[LMTrainingSettings]) -> Network | None:
        if self.settings.teacher is None:
            return None
        return jax.device_put(
            load_network(find_model(self.settings.teacher)), on_every_device(run.mesh)
        )

    def task(
        self, run: Run[LMTrainingSettings], opened: Network | None, documents: Sequence[Divided]
    ) -> Task:
        settings, teacher = self.settings, opened
        vocabulary = _vocabulary(settings, run.state_folder, documents)
        corpus = pack_sources(run, vocabulary, documents)
        config, first_params = _beginning(settings, vocabulary)
        flops = flops_per_token(config, settings.sequence_length)
        if teacher is not None:
            if teacher.vocab_size != config.vocab_size:
                raise ValueError(
                    f"The teacher in {settings.teacher} has a vocabulary of {teacher.vocab_size}, "
                    f"the tokenizer one of {config.vocab_size}: they must be the same."
                )
            # The teacher's pass is a forward one, which is a third.
            flops += flops_per_token(teacher.config, settings.sequence_length) / 3
        if settings.own_text:
            assert settings.teacher is not None  # checked with the settings
            model = load(settings.teacher)
            corpus |= pack_generated(run, corpus, model, settings.own_text_weight)
        objective = partial(self._objective, config, teacher)
        return Task(
            corpus,
            vocabulary,
            objective,
            evaluation=lambda dtype: objective(dtype).measured,
            first_params=first_params,
            result=lambda params: Network(params, config),
            flops_per_token=flops,
            as_batch=lambda rows: rows if teacher is None else Taught(rows, teacher),
        )

    def save(self, opened: Any, outcome: Outcome, folder: Path) -> None:
        write_model(folder, outcome.result, outcome.vocabulary)

    def recipe(
        self, run: Run[LMTrainingSettings], opened: Any, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings = self.settings
        compared = (
            " agreement: share of tokens where the teacher's most likely token is this model's "
            f"too. {OVERLAP}"
        )
        return RecipeNotes(
            cost=PALM_FLOPS + (", and the teacher's forward pass" if settings.teacher else ""),
            meaning="nats: cross-entropy per token. top1: share of tokens that were the most "
            "likely one." + (compared if settings.teacher else ""),
            read=texts_read(settings, run.sha256, metrics, settings.own_text_weight),
        )

    def _objective(
        self, config: ModelConfig, teacher: Network | None, dtype: str
    ) -> NextToken | SoftLabels:
        settings = self.settings
        student = NextToken(config, settings.layer_drop, settings.early_exit, dtype)
        if teacher is None:
            return student
        return SoftLabels(student, settings.soft_share, settings.loss)


def _vocabulary(
    settings: LMTrainingSettings, state_folder: Path, documents: Sequence[Divided]
) -> TrainingVocabulary:
    """Loads the vocabulary of the settings, or trains one and keeps it in the state folder.

    A model that learns from another, or begins with its weights, has as many ids as that one.
    """
    given, longest = settings.tokenizer, settings.model.max_positions
    models = [folder for folder in (settings.teacher, settings.start_from) if folder is not None]
    if models:
        return TrainingVocabulary.of_folder(models[0], given)
    if given is not None:
        return TrainingVocabulary.of(load_tokenizer(given), given)
    path = state_folder / "tokenizer.json"
    if not path.exists():
        texts = (
            text
            for source, part in zip(settings.sources, documents, strict=True)
            for _ in range(max(1, round(source.weight)))
            for text in document_texts(part.train)
        )
        tokenizer = train_tokenizer(texts, settings.model.vocab_size)
        with replacing_files(state_folder) as staging:
            tokenizer.save(str(staging / path.name))
    loaded = loaded_tokenizer(read_backend(path), longest)
    return TrainingVocabulary.of(loaded, str(path))


def _beginning(
    settings: LMTrainingSettings, vocabulary: TrainingVocabulary
) -> tuple[ModelConfig, Callable[[], PyTree]]:
    """Returns the model's shape and what makes its first weights: random ones or `start_from`'s."""
    config = settings.model.replace(vocab_size=vocabulary.size)
    if settings.start_from is None:
        return config, lambda: init_params(config, jax.random.key(settings.seed))
    network = load_network(find_model(settings.start_from), "float32")
    if settings.model == SMALL:  # no other shape is asked for
        config = network.config.replace(diffusion=None)
    if network.config != config:
        raise ValueError(
            f"The weights of start_from ({settings.start_from}) are of {network.config}, but the "
            f"model to train is {config}: make them equal, or leave the model's shape out."
        )
    if settings.sequence_length > config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the positions of start_from "
            f"({config.max_positions}), got {settings.sequence_length}."
        )
    return config, lambda: network.params
