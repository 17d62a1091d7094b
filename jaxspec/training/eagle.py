"""EAGLE heads: their objectives and `EagleTrainer`.

EAGLE-1 learns the target's next features, EAGLE-3 its tokens several steps ahead. A batch holds
text and the target, and may hold the target's states, which get no gradient. Pair t joins the
target's state at t with token t + 1; see `jaxspec.models.eagle`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.checkpoint import Model, eagle3_taps, save_eagle
from jaxspec.core.checks import Checked, Count, NotNegative, Positive
from jaxspec.core.masks import causal, same_document
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.types import PyTree
from jaxspec.drafters import Eagle
from jaxspec.drafters.growth import extend
from jaxspec.models import (
    DraftVocabulary,
    Eagle3Head,
    EagleHead,
    ModelConfig,
    Network,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.sharding import on_every_device
from jaxspec.training.data import Corpus, Sequences
from jaxspec.training.efficiency import head_flops_per_token
from jaxspec.training.generated import pack_generated
from jaxspec.training.loop import Objective, StepMetrics, products_in, same_choice
from jaxspec.training.overlap import Match, losses_of, match
from jaxspec.training.report import OVERLAP_AT, RecipeNotes, generated_texts
from jaxspec.training.settings import (
    CROSS_ENTROPY,
    OWN_TEXT,
    TARGET,
    Dtype,
    EagleTrainingSettings,
    Loss,
)
from jaxspec.training.sources import Divided
from jaxspec.training.target import (
    Observed,
    OpenedTarget,
    TargetStates,
    as_stored,
    check_length,
    check_taps,
    decoding_of,
    head_config,
    load_target,
    with_states,
)
from jaxspec.training.train import STORED, Outcome, Run, Task, pack_sources


@dataclasses.dataclass(frozen=True)
class FeatureRegression(Checked):
    """EAGLE-1's objective (Li et al. 2024, section 4.2): SmoothL1 of features, and tokens.

    Attributes:
        config: shape of the head's one layer.
        bias: see `EagleHead`.
        token_weight: weight of the loss of tokens against the target's distribution.
        noise: half the width of the uniform noise on the states that are read, at 512 tokens a
            sequence; it scales with 512 / tokens, as in the published code.
        dtype: dtype of the head's products, see `NextToken`. The target's are as exact as when it
            decodes.
        loss: the loss of tokens, see `overlap.losses_of`.
    """

    config: ModelConfig
    bias: bool = True
    token_weight: NotNegative = 0.1
    noise: NotNegative = 0.1
    dtype: Dtype = "float32"
    loss: Loss = CROSS_ENTROPY

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def head(
        self, params: PyTree, target: Network, draft_ids: Int[Array, " draft_vocab"] | None
    ) -> EagleHead:
        vocabulary = None if draft_ids is None else DraftVocabulary.of(target, draft_ids)
        return EagleHead(params, self.config, self.bias, vocabulary)

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        target, sequences = batch.target, batch.sequences
        head, seen = self.head(params, target, batch.draft_ids), batch.states(self.taps)
        width = self.noise * 512 / sequences.tokens.shape[1]

        def read(tokens, segments, positions, features, key):
            shift = jax.random.uniform(key, features.shape, minval=-width, maxval=width)
            states = (features + shift.astype(features.dtype))[:-1]
            mask = (causal(len(tokens)) & same_document(segments))[:-1, :-1]
            embedded, expected = target.embed(tokens[1:]), features[1:]
            with products_in(self.dtype):
                predicted = head.forward(embedded, states, positions[:-1], mask, None).features
                draft_logits = head.unembed(target, predicted)
            log_total = jax.nn.logsumexp(target.unembed(expected), axis=-1)
            return predicted, expected, draft_logits, head.unembed(target, expected), log_total

        keys = jax.random.split(key, len(sequences.tokens))
        outputs = jax.vmap(read)(*sequences[:3], seen.features, keys)
        counted = sequences.segments[:, 1:] == sequences.segments[:, :-1]
        counted &= sequences.segments[:, 1:] > 0
        regression, tokens = feature_losses(*outputs, counted, self.loss)
        metrics = {
            "feature_loss": regression,
            "token_loss": tokens,
            "agreement": _mean(same_choice(outputs[2], outputs[3]), counted),
            "tokens": jnp.sum(counted).astype(jnp.float32),
        }
        return regression + self.token_weight * tokens, metrics


def feature_losses(
    predicted: Float[Array, "rows length embed"],
    expected: Float[Array, "rows length embed"],
    draft_logits: Float[Array, "rows length vocab"],
    target_logits: Float[Array, "rows length vocab"],
    log_total: Float[Array, "rows length"],
    counted: Bool[Array, "rows length"],
    loss: str,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns SmoothL1 of features (beta 1, mean over width) and the loss of tokens per place."""
    difference = jnp.abs(predicted - jax.lax.stop_gradient(expected))
    smooth = jnp.where(difference < 1, 0.5 * difference**2, difference - 0.5)
    tokens = losses_of(loss, match(draft_logits, target_logits, log_total), counted)
    return _mean(jnp.mean(smooth, axis=-1), counted), _mean(tokens, counted)


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest(Checked):
    """EAGLE-3's objective (Li et al. 2025, section 3.2): the head reads its own states, unrolled.

    Step i predicts the token i + 2 places ahead from states that the head made itself i times, so
    that it is trained on what it will read when it drafts.

    Attributes:
        config: shape of the head's one layer.
        taps: target layers that the head reads.
        num_unrolled: number of steps; 7 in the paper.
        decay: weight of a step over that of the one before.
        dtype: dtype of the head's products, see `FeatureRegression`.
        loss: the loss of a step's tokens, see `overlap.losses_of`.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    num_unrolled: Count = 7
    decay: Positive = 0.8
    dtype: Dtype = "float32"
    loss: Loss = CROSS_ENTROPY

    def head(
        self, params: PyTree, target: Network, draft_ids: Int[Array, " draft_vocab"] | None
    ) -> Eagle3Head:
        return Eagle3Head(params, self.config, self.taps, target.vocab_size, draft_ids)

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        del key  # Nothing is drawn.
        head = self.head(params, batch.target, batch.draft_ids)
        sequences = jax.tree.map(jnp.asarray, batch.sequences)
        found, agreements, counts = jax.vmap(
            lambda row, states: self._steps(head, batch.target, row, states)
        )(sequences, batch.states(self.taps))
        losses = losses_of(self.loss, found, counts, axes=(0, 2)) * counts
        # The mean over all places, counted or not, as in the published code.
        places = sequences.tokens.size
        steps = jnp.sum(losses, axis=(0, 2)) / places
        weights = self.decay ** jnp.arange(self.num_unrolled)
        agreed = jnp.sum(agreements, axis=(0, 2)) / jnp.maximum(jnp.sum(counts, axis=(0, 2)), 1)
        metrics = {f"agreement_{i + 1}": agreed[i] for i in range(self.num_unrolled)}
        tokens = jnp.sum(counts[:, 0]).astype(jnp.float32)
        return jnp.sum(weights * steps), metrics | {"tokens": tokens}

    def _steps(
        self, head: Eagle3Head, target: Network, row: Sequences, states: TargetStates
    ) -> tuple[Match, Bool[Array, "steps length"], Bool[Array, "steps length"]]:
        """Returns laws' comparison, agreement and True where the place counts."""
        said = _said(head, target, states)
        results = []
        for depth in unroll(head, target, row, states, self.num_unrolled, self.dtype):
            wanted = said.logits[depth.places]
            counted = depth.counted & said.draftable[depth.places]
            found = match(depth.logits, wanted, said.log_total[depth.places])
            results.append((found, same_choice(depth.logits, wanted) & counted, counted))
        return jax.tree.map(lambda *parts: jnp.stack(parts), *results)


class _Said(NamedTuple):
    """The target's word on the token after each place of a row.

    Attributes:
        logits: of the tokens that can be drafted.
        log_total: log-sum-exp of the logits of all tokens.
        draftable: True where the likeliest token can be drafted.
        draft_places: its place among the draft's logits.
    """

    logits: Float[Array, "length draft_vocab"]
    log_total: Float[Array, " length"]
    draftable: Bool[Array, " length"]
    draft_places: Int[Array, " length"]


def _said(head: EagleHead | Eagle3Head, target: Network, states: TargetStates) -> _Said:
    logits = jax.lax.stop_gradient(target.unembed(states.features))
    choices, log_total = jnp.argmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)
    ids = head.draft_ids
    if ids is None:
        return _Said(logits, log_total, jnp.ones(choices.shape, bool), choices)
    places = jnp.minimum(jnp.searchsorted(ids, choices), len(ids) - 1)
    return _Said(logits[:, ids], log_total, ids[places] == choices, places)


class DepthLogits(NamedTuple):
    """Logits of a head at one depth of a draft, from every place of a row at once.

    Attributes:
        logits: logits of the token after each of `places`.
        places: entry t: the last token read by the draft that starts behind place t.
        counted: True where that is a token of the same document.
    """

    logits: Float[Array, "length draft_vocab"]
    places: Int[Array, " length"]
    counted: Bool[Array, " length"]


def unroll(
    head: EagleHead | Eagle3Head,
    target: Network,
    row: Sequences,
    states: TargetStates,
    num_steps: int,
    dtype: str,
) -> Iterator[DepthLogits]:
    """Drafts from every place of one row, fed the true text, and yields each depth.

    The first depth reads the target's states, the others those that the head made itself; each
    draft sees the pairs before its place and its own.
    """
    tokens, segments, positions = map(jnp.asarray, row[:3])
    length = len(tokens)
    own_chain = jnp.eye(length, dtype=bool)
    mask, scratch = causal(length) & same_document(segments), None
    with products_in(dtype):
        inputs = head.states_of(states.features, states.taps)
    for step in range(num_steps):
        # Place t reads token t + 1 + step and predicts the next one.
        places = jnp.minimum(jnp.arange(length) + 1 + step, length - 1)
        inside = (jnp.arange(length) + 1 + step < length) & (segments[places] == segments)
        embedded = target.embed(tokens[places])
        with products_in(dtype):
            hidden = head.forward(embedded, inputs, positions + step, mask, None, scratch=scratch)
            logits = head.unembed(target, hidden.features)
        yield DepthLogits(logits, places, inside & (segments > 0))
        inputs = hidden.features
        scratch = extend(scratch, hidden.new_kv)
        mask = jnp.concatenate([mask, own_chain], axis=1)


@dataclasses.dataclass(frozen=True)
class HeadQuality:
    """The objective of validation: a head's loss, and how well it predicts the target.

    `top1_at_2` is the share of places where the likeliest token at depth 2 of the draft is what the
    target says there, `top4_at_2` where it is among the four likeliest. The draft before is fed the
    true text, and tokens that cannot be drafted count as missed: on text that the target wrote
    greedily these are the chances that a node of that rank is accepted after its parent was.
    `overlap_at_2` is the chance that a token drawn at depth 2 at temperature 1 is accepted there.

    Attributes:
        objective: what the head is trained for.
        depth: depth of the tree that is drafted.
        top_k: most children of a node of it.
    """

    objective: FeatureRegression | TrainingTimeTest
    depth: int
    top_k: int

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], StepMetrics]:
        states = batch.states(self.objective.taps)
        # So that they are computed once.
        sequences = jax.tree.map(jnp.asarray, batch.sequences._replace(**states._asdict()))
        batch = batch._replace(sequences=sequences)
        loss, metrics = self.objective(params, batch, key)
        head = self.objective.head(params, batch.target, batch.draft_ids)

        def hits(row: Sequences, states: TargetStates):
            said = _said(head, batch.target, states)
            results = []
            depths = unroll(head, batch.target, row, states, self.depth, self.objective.dtype)
            for depth in depths:
                wanted, counted = said.draft_places[depth.places], depth.counted
                given = jnp.take_along_axis(depth.logits, wanted[:, None], axis=1)
                rank = jnp.sum(depth.logits > given, axis=1)
                hit = counted & said.draftable[depth.places]
                logits, log_total = said.logits[depth.places], said.log_total[depth.places]
                overlap = match(depth.logits, logits, log_total).overlap * counted
                results.append((hit & (rank < 1), hit & (rank < self.top_k), overlap, counted))
            return tuple(jnp.stack(part) for part in zip(*results, strict=True))

        first, among, overlap, counted = jax.vmap(hits)(batch.sequences, states)
        totals = jnp.maximum(jnp.sum(counted, axis=(0, 2)), 1)
        for name, values in (("top1", first), (f"top{self.top_k}", among), ("overlap", overlap)):
            means = jnp.sum(values, axis=(0, 2)) / totals
            metrics |= {f"{name}_at_{i + 1}": means[i] for i in range(self.depth)}
        tokens = jnp.sum(counted[:, 0]).astype(jnp.float32)
        return loss, metrics | {"loss": loss, "tokens": tokens}


def evaluation_of(objective: FeatureRegression | TrainingTimeTest, paths) -> Objective:
    """Returns the objective of validation, without noise, of a head that drafts over a tree.

    Args:
        objective: what the head is trained for.
        paths: the tree, as for `tree_from_paths`.
    """
    if isinstance(objective, FeatureRegression):
        objective = dataclasses.replace(objective, noise=0.0)
    return HeadQuality(objective, max(map(len, paths)), 1 + max(map(max, paths)))


def _mean(values: Float[Array, "rows length"], counted: Bool[Array, "rows length"]):
    return jnp.sum(values * counted) / (jnp.sum(counted) + 1e-5)


@dataclasses.dataclass(frozen=True)
class EagleTrainer:
    """Trains an EAGLE-1 or EAGLE-3 head for a target.

    Each validation also decodes held-out beginnings greedily with the head over `settings.paths`:
    `tau_with_bonus` counts tokens per target pass, the bonus token included. The result is an
    `EagleHead` or `Eagle3Head`; `load_eagle` reads `out`.
    """

    settings: EagleTrainingSettings

    def open(self, run: Run[EagleTrainingSettings]) -> OpenedTarget:
        settings = self.settings
        model, vocabulary = load_target(run)
        check_length(settings.sequence_length, model)
        if settings.draft_vocab >= model.vocab_size:
            raise ValueError(
                f"draft_vocab must be below the target's vocabulary ({model.vocab_size}), got "
                f"{settings.draft_vocab}: 0 drafts from all tokens."
            )
        branch = 1 + max(map(max, settings.paths))
        if 0 < settings.draft_vocab < branch:
            raise ValueError(
                f"draft_vocab is {settings.draft_vocab}, but a node of the tree (paths) has "
                f"{branch} children: draft from more tokens."
            )
        if settings.version == 1:
            return OpenedTarget(model, vocabulary, ())
        layers = model.config.num_layers
        taps = eagle3_taps(layers) if settings.taps is None else settings.taps
        check_taps(taps, model)
        return OpenedTarget(model, vocabulary, taps)

    def task(
        self, run: Run[EagleTrainingSettings], opened: OpenedTarget, documents: Sequence[Divided]
    ) -> Task:
        settings, (model, vocabulary, taps) = self.settings, opened
        sources = pack_sources(run, vocabulary, documents)
        corpus = self._corpus(run, sources, model)
        ids, coverage = _draft_ids(sources, corpus, settings.draft_vocab, model.vocab_size)
        num_drafted = model.vocab_size if ids is None else len(ids)
        config = head_config(model.config)
        if settings.version == 3:
            config = config.replace(vocab_size=num_drafted)

        target = jax.device_put(model.network, on_every_device(run.mesh))
        own_device = None if ids is None else jnp.asarray(ids)
        ids = None if ids is None else jax.device_put(own_device, on_every_device(run.mesh))
        objective = partial(self._objective, config, taps)
        own_tree = None if settings.paths == EAGLE_PATHS else settings.paths
        first_params = partial(self._first_params, config, len(taps) * model.config.embed_dim)
        if settings.cache_features:
            corpus = with_states(run, corpus, target, taps, features=True)

        def drafter(params: PyTree):
            stored = as_stored(params, model.network)
            head = objective("float32").head(stored, model.network, own_device)
            return Eagle.of(head, settings.paths)

        return Task(
            corpus,
            vocabulary,
            objective,
            evaluation=lambda dtype: evaluation_of(objective(dtype), settings.paths),
            first_params=first_params,
            result=lambda params: dataclasses.replace(
                objective("float32").head(params, target, ids), paths=own_tree
            ),
            flops_per_token=head_flops_per_token(
                jax.eval_shape(first_params),
                config,
                model.config,
                settings.sequence_length,
                num_drafted,
                settings.num_unrolled if settings.version == 3 else None,
                reads_target=not settings.cache_features,
                whole_laws=settings.loss != CROSS_ENTROPY and ids is not None,
            ),
            as_batch=lambda rows: Observed(rows, target, ids),
            decode=decoding_of(run, model, sources.validation, drafter),
            figures={
                "draft_vocab": num_drafted,
                "target_vocab": model.vocab_size,
                "draft_vocab_coverage": round(coverage, 4),
            },
        )

    def save(self, opened: OpenedTarget, outcome: Outcome, folder: Path) -> None:
        head = dataclasses.replace(outcome.result, made_for=opened.model.digest)
        save_eagle(head, folder, STORED, target_layers=opened.model.network.num_layers)

    def recipe(
        self, run: Run[EagleTrainingSettings], opened: OpenedTarget, metrics: Mapping[str, Any]
    ) -> RecipeNotes:
        settings = self.settings
        unrolled = f", unrolled {settings.num_unrolled} times" if settings.version == 3 else ""
        states = "left out, since it was made once" if settings.cache_features else "included"
        return RecipeNotes(
            cost="6 x the head's weights in products + 12 x heads x head dim x sequence length"
            f"{unrolled}, and the output head; the target's forward pass {states}",
            about=f"An EAGLE-{settings.version} head for the target in `{settings.target}`, whose "
            f"files have the SHA-256 `{run.sha256[TARGET]}`. It drafts from "
            f"{metrics['draft_vocab']:,} of {metrics['target_vocab']:,} tokens, which make up "
            f"{100 * metrics['draft_vocab_coverage']:.2f} % of the text it learned from.",
            read=generated_texts(
                settings,
                metrics,
                "the target wrote itself, half greedily and half at temperature 1",
            ),
            meaning="loss: what was trained for, without noise. topK_at_D: share of places where "
            "the target's choice is among the K likeliest tokens of the draft's depth D, the draft "
            "before it being fed the true text; tokens that cannot be drafted count as missed. "
            + OVERLAP_AT,
            drafts=f"over the tree of {len(settings.paths)} nodes (its root not counted) in "
            "`training.json`",
            metric="loss",
            label="loss",
        )

    def _corpus(self, run: Run[EagleTrainingSettings], sources: Corpus, model: Model) -> Corpus:
        """Returns the target's texts and, if they are asked for, the sources."""
        settings, corpus = self.settings, Corpus({}, {}, {})
        if settings.sources_weight:
            weights = {
                name: weight * settings.sources_weight for name, weight in sources.weights.items()
            }
            corpus = dataclasses.replace(sources, weights=weights)
        if settings.own_text:
            corpus |= pack_generated(run, sources, model, 1.0)
        return corpus

    def _objective(
        self, config: ModelConfig, taps: tuple[int, ...], dtype: str
    ) -> FeatureRegression | TrainingTimeTest:
        settings = self.settings
        if settings.version == 1:
            return FeatureRegression(
                config,
                token_weight=settings.token_weight,
                noise=settings.noise,
                dtype=dtype,
                loss=settings.loss,
            )
        return TrainingTimeTest(
            config, taps, settings.num_unrolled, settings.decay, dtype, settings.loss
        )

    def _first_params(self, config: ModelConfig, tapped: int) -> PyTree:
        key = jax.random.key(self.settings.seed)
        if self.settings.version == 1:
            return init_eagle_params(config, True, key)
        return init_eagle3_params(config, tapped, key)


def _draft_ids(
    sources: Corpus, corpus: Corpus, count: int, vocab_size: int
) -> tuple[Int[np.ndarray, " draft_vocab"] | None, float]:
    """Returns the most frequent tokens, ascending, and their share of the text that is learned.

    The sources count as much as the target's own texts, half of which are drawn at temperature 1:
    these alone miss tokens that the target writes when it decodes greedily. `None` for all tokens.
    """
    if not count:
        return None, 1.0

    def share(texts: Mapping[str, Sequences], weights: Mapping[str, float]) -> np.ndarray:
        counts = np.zeros(vocab_size)
        for name, rows in texts.items():
            tokens = rows.tokens[rows.segments > 0]
            counts += weights[name] * np.bincount(tokens, minlength=vocab_size)
        return counts / counts.sum()

    both = share(sources.train, sources.weights)
    own = corpus.train.get(OWN_TEXT)
    learned = both if own is None else share({OWN_TEXT: own}, {OWN_TEXT: 1.0})
    if own is not None:
        both = both + learned
    ids = np.sort(np.argsort(-both, kind="stable")[:count]).astype(np.int32)
    return ids, float(learned[ids].sum())
