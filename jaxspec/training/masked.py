"""Diffusion language models: their objective, hidden tokens, and `MaskedTrainer`."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import find_model, load
from jaxspec.checkpoint.config import config_to_json
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.checkpoint.tokenizer import load_tokenizer
from jaxspec.core.checks import Checked, Share
from jaxspec.core.masks import same_document
from jaxspec.core.types import PyTree
from jaxspec.diffusion.process import Masked, block_training_mask, mask_number, mask_share
from jaxspec.models import Diffusion, ModelConfig, Network, init_params
from jaxspec.training.data import Sequences
from jaxspec.training.efficiency import flops_per_token
from jaxspec.training.generated import pack_generated
from jaxspec.training.loop import StepMetrics, products_in
from jaxspec.training.report import PALM_FLOPS, RecipeNotes, texts_read
from jaxspec.training.settings import Dtype, MaskedTrainingSettings
from jaxspec.training.sources import Divided
from jaxspec.training.train import Outcome, Run, Task, pack_sources, write_model
from jaxspec.training.vocabulary import TrainingVocabulary, Turns


class _Seen(NamedTuple):
    """Hidden places of a row, places that may be hidden, and the network's logits of each place."""

    masked: Masked
    maskable: Bool[Array, " places"]
    logits: Float[Array, "places vocab"]


@dataclasses.dataclass(frozen=True)
class MaskedTokens(Checked):
    """Upper bound of a text's negative log-likelihood, in nats per token.

    A network that sees the whole text is trained as LLaDA (arXiv 2502.09992, section 2): each text
    has a share t ~ U(0, 1) of its places hidden, each weighing 1/t. One that is causal over blocks
    is trained as BD3-LM (arXiv 2503.09573): a masked copy of the row next to a clean one, in each
    block k ~ U{1..n} of its n places hidden, each weighing n/k. Where outputs are shifted, the
    first place of a block is predicted from the clean copy, as in decoding. A document's first
    token is never hidden.

    Attributes:
        config: shape of the network that is trained; `config.diffusion` says of which kind it is.
        random_lengths: share of the rows that are cut at a random place; 1 % in LLaDA.
        turns: hide only what an assistant says by these marks, the end of its turn included; every
            answer counts the same at any length (LLaDA's fine-tuning, section 2.3; without its
            padding by ends of text). `None`: hide everything.
        steady: draw numbers of hidden places instead of shares for both kinds, for validation: the
            bound is the same and varies less from draw to draw.
        dtype: dtype of the operands of products; "bfloat16" still sums in float32.
    """

    config: ModelConfig
    random_lengths: Share = 0.01
    turns: Turns | None = None
    steady: bool = False
    dtype: Dtype = "float32"

    def __post_init__(self):
        super().__post_init__()
        _ = self.config.masking  # refuses causal models

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        arrays = (jnp.asarray(field) for field in (batch.tokens, batch.segments, batch.positions))
        tokens, segments, positions = arrays
        network = Network(params, self.config)
        with products_in(self.dtype):
            seen = jax.vmap(lambda *row: self._seen(network, *row))(
                tokens, segments, positions, jax.random.split(key, len(tokens))
            )
        chosen = jnp.take_along_axis(seen.logits, tokens[:, :, None], axis=-1)[:, :, 0]
        nats = jax.nn.logsumexp(seen.logits, axis=-1) - chosen
        hidden = seen.masked.hidden
        shares = seen.maskable.astype(jnp.float32)
        if self.turns is not None:
            shares = shares / jnp.maximum(jax.vmap(_answer_lengths)(seen.maskable, segments), 1)
        total = jnp.maximum(jnp.sum(shares), 1e-6)
        bound = jnp.sum(nats * seen.masked.weights * shares) / total
        right = hidden & (chosen >= jnp.max(seen.logits, axis=-1))
        metrics = {
            "nats": bound,
            "top1": jnp.sum(right) / jnp.maximum(jnp.sum(hidden), 1),
            "tokens": jnp.sum(seen.maskable).astype(jnp.float32),
        }
        return bound, metrics

    @property
    def measured(self) -> "MaskedTokens":
        """The objective of validation: whole rows, and draws that vary less."""
        return dataclasses.replace(self, random_lengths=0.0, steady=True)

    def _seen(
        self,
        network: Network,
        tokens: Int[Array, " places"],
        segments: Int[Array, " places"],
        positions: Int[Array, " places"],
        key: PRNGKeyArray,
    ) -> _Seen:
        """Hides places of a row and runs the network."""
        diffusion = self.config.masking
        cut_key, length_key, mask_key = jax.random.split(key, 3)
        num_places = len(tokens)
        cut = jax.random.bernoulli(cut_key, self.random_lengths)
        length = jnp.where(cut, jax.random.randint(length_key, (), 1, num_places + 1), num_places)
        segments = jnp.where(jnp.arange(num_places) < length, segments, 0)
        maskable = (segments > 0) & (positions > 0)
        if self.turns is not None:
            maskable &= _is_answer(tokens, self.turns)
        if diffusion.block is None:
            draw = mask_number if self.steady else mask_share
            masked = draw(mask_key, maskable, segments)
            hidden = jnp.where(masked.hidden, diffusion.mask_token_id, tokens)
            seen = network.forward(hidden, positions, same_document(segments), None).features
            clean = seen
            begins = jnp.zeros(num_places, bool)
        else:
            blocks = positions // diffusion.block
            within = segments * num_places + blocks
            masked = mask_number(mask_key, maskable, within)
            hidden = jnp.where(masked.hidden, diffusion.mask_token_id, tokens)
            seen, clean = jnp.split(
                network.forward(
                    jnp.concatenate([hidden, tokens]),
                    jnp.concatenate([positions, positions]),
                    block_training_mask(segments, blocks),
                    None,
                ).features,
                2,
            )
            begins = positions % diffusion.block == 0
        if diffusion.shift:
            seen = jnp.where(begins[:, None], jnp.roll(clean, 1, 0), jnp.roll(seen, 1, 0))
        return _Seen(masked, maskable, network.unembed(seen))


def _is_answer(tokens: Int[Array, " places"], turns: Turns) -> Bool[Array, " places"]:
    """Returns True between the mark of an assistant and the end of its turn, the end included."""
    order = jnp.arange(len(tokens))
    assistant = tokens == turns.assistant
    marks = jnp.isin(tokens, jnp.asarray([*turns.roles, turns.end]))
    # The newest mark before each place; a document begins with none.
    newest = jax.lax.cummax(jnp.where(marks, order, -1))
    before = jnp.concatenate([jnp.full(1, -1), newest[:-1]])
    return (before >= 0) & assistant[before]


def _answer_lengths(
    maskable: Bool[Array, " places"], segments: Int[Array, " places"]
) -> Float[Array, " places"]:
    """Returns the number of places that may be hidden in each place's document."""
    return (same_document(segments) & maskable[None, :]).sum(axis=1).astype(jnp.float32)


class OpenedMasked(NamedTuple):
    """The network that a run begins with, and its vocabulary."""

    start: Network
    vocabulary: TrainingVocabulary


@dataclasses.dataclass(frozen=True)
class MaskedTrainer:
    """Trains a diffusion language model, or converts a causal one.

    The result is a `Network`; `out` has the layout of LLaDA, SDAR or Dream, by its shape.
    """

    settings: MaskedTrainingSettings

    def open(self, run: Run[MaskedTrainingSettings]) -> OpenedMasked:
        settings = self.settings
        vocabulary = _vocabulary(settings)
        if settings.answers_only and vocabulary.turns is None:
            raise ValueError(
                "answers_only needs a tokenizer made by `jaxspec train lm`, whose tokens mark the "
                "turns of a chat: leave it out for other models."
            )
        start = first_network(settings, vocabulary)
        if settings.sequence_length > start.config.max_positions:
            raise ValueError(
                f"sequence_length must be at most the model's positions "
                f"({start.config.max_positions}), got {settings.sequence_length}."
            )
        config_to_json(start.config)  # refuses, before anything is trained, what cannot be saved
        return OpenedMasked(start, vocabulary)

    def task(
        self,
        run: Run[MaskedTrainingSettings],
        opened: OpenedMasked,
        documents: Sequence[Divided],
    ) -> Task:
        settings, (start, vocabulary) = self.settings, opened
        corpus = pack_sources(run, vocabulary, documents)
        if settings.teacher is not None:
            teacher = load(settings.teacher)
            corpus |= pack_generated(run, corpus, teacher, settings.own_text_weight)
        objective = partial(
            MaskedTokens,
            start.config,
            settings.random_lengths,
            vocabulary.turns if settings.answers_only else None,
        )
        copies = 2 if settings.block else 1
        return Task(
            corpus,
            vocabulary,
            lambda dtype: objective(dtype=dtype),
            evaluation=lambda dtype: objective(dtype=dtype).measured,
            first_params=lambda: start.params,
            result=lambda params: Network(params, start.config),
            flops_per_token=copies * flops_per_token(start.config, settings.sequence_length),
        )

    def save(self, opened: OpenedMasked, outcome: Outcome, folder: Path) -> None:
        write_model(folder, outcome.result, outcome.vocabulary)

    def recipe(
        self, run: Run[MaskedTrainingSettings], opened: OpenedMasked, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings, block = self.settings, self.settings.block
        sees = f"its own block of {block} places and all before it" if block else "both sides"
        twice = ", twice, for a masked and a clean copy of the text"
        return RecipeNotes(
            cost=PALM_FLOPS + (twice if block else ""),
            meaning="nats: upper bound of the negative log-likelihood per token, from one draw of "
            "hidden places per text. top1: share of the hidden tokens that were the most likely "
            "one.",
            about=f"A diffusion language model; a place sees {sees}.",
            read=texts_read(settings, run.sha256, metrics, settings.own_text_weight),
            label="bound of nats per token",
        )


def _vocabulary(settings: MaskedTrainingSettings) -> TrainingVocabulary:
    if settings.start_from is None:
        assert settings.tokenizer is not None  # checked with the settings
        return TrainingVocabulary.of(load_tokenizer(settings.tokenizer), settings.tokenizer)
    return TrainingVocabulary.of_folder(settings.start_from, settings.tokenizer).with_masks()


def first_network(settings: MaskedTrainingSettings, vocabulary: TrainingVocabulary) -> Network:
    """Returns the network that a run begins with: random, or made from another one.

    Args:
        settings: settings of the run.
        vocabulary: tokens of the model, the mask among them.

    Raises:
        ValueError: the vocabulary has no mask, or `start_from` lacks layers that are asked for.
    """
    block = settings.block or None
    if settings.start_from is None:
        diffusion = Diffusion(vocabulary.needed("mask"), bool(settings.shift), block)
        config = settings.model.replace(vocab_size=vocabulary.size, diffusion=diffusion)
        return Network(init_params(config, jax.random.key(settings.seed)), config)
    source = load_network(find_model(settings.start_from), "float32")
    before = source.config.diffusion
    mask = vocabulary.needed("mask") if before is None else before.mask_token_id
    shift = settings.shift
    if shift is None:
        shift = True if before is None else before.shift
    if before is None:
        source = with_vocabulary(source, vocabulary.size)
    return with_layers(source, settings.layers, Diffusion(mask, shift, block))


def with_vocabulary(network: Network, size: int) -> Network:
    """Returns a network with rows for more ids: each the mean of the rows that there are.

    Example:
        >>> import jaxspec
        >>> network = jaxspec.load("demo-draft").network
        >>> with_vocabulary(network, network.vocab_size + 2).vocab_size - network.vocab_size
        2
    """
    missing = size - network.vocab_size
    if missing == 0:
        return network
    params = dict(network.params)
    for name, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
        if name in params:
            rows = params[name][leaf]
            mean = jnp.mean(rows, axis=axis, keepdims=True)
            rows = jnp.concatenate([rows, jnp.repeat(mean, missing, axis=axis)], axis=axis)
            params[name] = {**params[name], leaf: rows}
    return Network(params, network.config.replace(vocab_size=size))


def with_layers(
    network: Network, layers: tuple[int, ...] | None, diffusion: Diffusion | None
) -> Network:
    """Returns a network with some of another's layers, in this order, and other settings of masks.

    Raises:
        ValueError: `layers` is empty or names a layer that does not exist.
    """
    config, params = network.config, dict(network.params)
    kept = tuple(range(config.num_layers)) if layers is None else layers
    missing = sorted({layer for layer in kept if not 0 <= layer < config.num_layers})
    if not kept or missing:
        raise ValueError(
            f"layers must name some of the {config.num_layers} layers, 0..{config.num_layers - 1}, "
            f"got {kept}."
        )
    taken = {f"layer_{new}": params[f"layer_{old}"] for new, old in enumerate(kept)}
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("layer_")}
    if diffusion is None or not diffusion.rank:
        rest.pop("transitions", None)
    experts = config.experts
    if experts is not None:
        sparse = tuple(experts.layers[layer] for layer in kept)
        experts = dataclasses.replace(experts, layers=sparse)
    changed = config.replace(
        num_layers=len(kept),
        layer_types=tuple(config.layer_types[layer] for layer in kept),
        experts=experts,
        diffusion=diffusion,
    )
    return Network(rest | taken, changed)
