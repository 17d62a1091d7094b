"""What EAGLE heads are trained for: the target's next features, or its tokens several steps on.

A batch holds text and the target, and may hold what the target makes of that text, which is not
learned from. Pair t joins the target's state at t with token t + 1; see `jaxspec.models.eagle`.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import PyTree
from jaxspec.drafters.growth import extend
from jaxspec.models import DraftVocabulary, Eagle3Head, EagleHead, ModelConfig, Network
from jaxspec.training.data import Sequences
from jaxspec.training.features import TargetStates, target_states
from jaxspec.training.lm import products_in
from jaxspec.training.loop import Metrics, Objective


class Observed(NamedTuple):
    """A batch with the target whose states or tokens are to be foreseen.

    draft_ids: the target's ids of the tokens that the head drafts from, ascending; None: all.
    states: what the target makes of the sequences; None: computed when they are needed.
    """

    sequences: Sequences
    target: Network
    draft_ids: Int[Array, " draft_vocab"] | None = None
    states: TargetStates | None = None


@dataclasses.dataclass(frozen=True)
class FeatureRegression:
    """EAGLE-1's objective (Li et al. 2024, section 4.2): features by SmoothL1, tokens beside it.

    config: of the head's one layer.
    bias: see `EagleHead`.
    token_weight: of the cross-entropy against the target's distribution.
    noise: half the width of the uniform noise on the states read, at 512 tokens a sequence; it
        scales with 512 / tokens, as in the published code.
    dtype: of the head's products, see `NextToken`. The target's are as exact as when it decodes.
    """

    config: ModelConfig
    bias: bool = True
    token_weight: float = 0.1
    noise: float = 0.1
    dtype: str = "float32"

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
    ) -> tuple[Float[Array, ""], Metrics]:
        target, sequences = batch.target, _on_device(batch.sequences)
        head, seen = self.head(params, target, batch.draft_ids), _states(batch, self.taps)
        width = self.noise * 512 / sequences.tokens.shape[1]

        def read(tokens, segments, positions, features, key):
            shift = jax.random.uniform(key, features.shape, minval=-width, maxval=width)
            states = (features + shift.astype(features.dtype))[:-1]
            mask = (causal(len(tokens)) & same_document(segments))[:-1, :-1]
            embedded, expected = target.embed(tokens[1:]), features[1:]
            with products_in(self.dtype):
                predicted = head.forward(embedded, states, positions[:-1], mask, None).features
                draft_logits = head.unembed(target, predicted)
            return predicted, expected, draft_logits, head.unembed(target, expected)

        keys = jax.random.split(key, len(sequences.tokens))
        outputs = jax.vmap(read)(*sequences, seen.features, keys)
        counted = sequences.segments[:, 1:] == sequences.segments[:, :-1]
        counted &= sequences.segments[:, 1:] > 0
        regression, entropy = feature_losses(*outputs, counted)
        metrics = {
            "feature_loss": regression,
            "token_loss": entropy,
            "agreement": _mean(_same_choice(outputs[2], outputs[3]), counted),
            "tokens": jnp.sum(counted).astype(jnp.float32),
        }
        return regression + self.token_weight * entropy, metrics


def feature_losses(
    predicted: Float[Array, "rows length embed"],
    expected: Float[Array, "rows length embed"],
    draft_logits: Float[Array, "rows length vocab"],
    target_logits: Float[Array, "rows length vocab"],
    counted: Bool[Array, "rows length"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """SmoothL1 of features (beta 1, mean over the width), and soft cross-entropy, per place."""
    difference = jnp.abs(predicted - jax.lax.stop_gradient(expected))
    smooth = jnp.where(difference < 1, 0.5 * difference**2, difference - 0.5)
    return (
        _mean(jnp.mean(smooth, axis=-1), counted),
        _mean(_soft_cross_entropy(draft_logits, target_logits), counted),
    )


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest:
    """EAGLE-3's objective (Li et al. 2025, section 3.2): the head reads its own states, unrolled.

    Step i predicts the token i + 2 places on from states that the head itself made i times over, so
    that it is trained on what it will meet when it drafts.

    config: of the head's one layer.
    taps: target layers that the head reads.
    num_unrolled: how often it is unrolled; 7 in the paper.
    decay: weight of a step over that of the one before.
    dtype: of the head's products, see `FeatureRegression`.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    num_unrolled: int = 7
    decay: float = 0.8
    dtype: str = "float32"

    def head(
        self, params: PyTree, target: Network, draft_ids: Int[Array, " draft_vocab"] | None
    ) -> Eagle3Head:
        return Eagle3Head(params, self.config, self.taps, target.vocab_size, draft_ids)

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        del key  # Nothing is drawn.
        head = self.head(params, batch.target, batch.draft_ids)
        sequences = _on_device(batch.sequences)
        losses, agreements, counts = jax.vmap(
            lambda row, states: self._losses(head, batch.target, row, states)
        )(sequences, _states(batch, self.taps))
        # The mean over all places, counted or not, as in the published code.
        places = sequences.tokens.size
        steps = jnp.sum(losses, axis=(0, 2)) / places
        weights = self.decay ** jnp.arange(self.num_unrolled)
        agreed = jnp.sum(agreements, axis=(0, 2)) / jnp.maximum(jnp.sum(counts, axis=(0, 2)), 1)
        metrics = {f"agreement_{i + 1}": agreed[i] for i in range(self.num_unrolled)}
        tokens = jnp.sum(counts[:, 0]).astype(jnp.float32)
        return jnp.sum(weights * steps), metrics | {"tokens": tokens}

    def _losses(self, head: Eagle3Head, target: Network, row: Sequences, states: TargetStates):
        """Per step and place: loss, agreement, and whether the place counts."""
        target_logits = jax.lax.stop_gradient(target.unembed(states.features))
        draftable, _ = _draft_place(head, jnp.argmax(target_logits, axis=-1))
        if head.draft_ids is not None:
            target_logits = target_logits[:, head.draft_ids]
        results = []
        for foreseen in unroll(head, target, row, states, self.num_unrolled, self.dtype):
            wanted = target_logits[foreseen.places]
            counted = foreseen.counted & draftable[foreseen.places]
            loss = _soft_cross_entropy(foreseen.logits, wanted)
            agreed = _same_choice(foreseen.logits, wanted)
            results.append((loss * counted, agreed & counted, counted))
        return tuple(jnp.stack(part) for part in zip(*results, strict=True))


class Foreseen(NamedTuple):
    """What a head says at one depth of a draft, from every place of a row at once.

    logits: of the token after each of `places`.
    places: entry t: the last token read by the draft that starts behind place t.
    counted: whether that is a token of the same document.
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
) -> Iterator[Foreseen]:
    """A head that drafts from every place of one row and is fed the true text, depth by depth.

    The first depth reads the target's states, the others those that the head made itself; each
    draft sees the pairs before its place and its own.
    """
    tokens, segments, positions = map(jnp.asarray, row)
    length = len(tokens)
    own_chain = jnp.eye(length, dtype=bool)
    mask, scratch = causal(length) & same_document(segments), None
    with products_in(dtype):
        inputs = head.states_of(states.features, states.taps)
    for step in range(num_steps):
        # Place t reads token t + 1 + step and foresees what follows it.
        places = jnp.minimum(jnp.arange(length) + 1 + step, length - 1)
        inside = (jnp.arange(length) + 1 + step < length) & (segments[places] == segments)
        embedded = target.embed(tokens[places])
        with products_in(dtype):
            hidden = head.forward(embedded, inputs, positions + step, mask, None, scratch=scratch)
            logits = head.unembed(target, hidden.features)
        yield Foreseen(logits, places, inside & (segments > 0))
        inputs = hidden.features
        scratch = extend(scratch, hidden.new_kv)
        mask = jnp.concatenate([mask, own_chain], axis=1)


@dataclasses.dataclass(frozen=True)
class HeadQuality:
    """What validation asks of a head: its loss, and how often it foresees the target's choice.

    `top1_at_2` is the share of places where the likeliest token at depth 2 of the draft is what the
    target says there, `top4_at_2` where it is among the four likeliest. The draft before is fed the
    true text, and tokens that cannot be drafted count as missed: on text that the target wrote
    greedily these are the chances that a node of that rank is accepted after its parent was.

    objective: what the head is trained for.
    depth: of the tree that is drafted.
    top_k: the most children that a node of it has.
    """

    objective: FeatureRegression | TrainingTimeTest
    depth: int
    top_k: int

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        states = _states(batch, self.objective.taps)
        batch = batch._replace(sequences=_on_device(batch.sequences), states=states)
        loss, metrics = self.objective(params, batch, key)
        head = self.objective.head(params, batch.target, batch.draft_ids)

        def hits(row: Sequences, states: TargetStates):
            choices = jnp.argmax(batch.target.unembed(states.features), axis=-1)
            draftable, draft_places = _draft_place(head, choices)
            results = []
            depths = unroll(head, batch.target, row, states, self.depth, self.objective.dtype)
            for foreseen in depths:
                wanted = draft_places[foreseen.places]
                said = jnp.take_along_axis(foreseen.logits, wanted[:, None], axis=1)
                rank = jnp.sum(foreseen.logits > said, axis=1)
                counted = foreseen.counted
                hit = counted & draftable[foreseen.places]
                results.append((hit & (rank < 1), hit & (rank < self.top_k), counted))
            return tuple(jnp.stack(part) for part in zip(*results, strict=True))

        first, among, counted = jax.vmap(hits)(batch.sequences, states)
        totals = jnp.maximum(jnp.sum(counted, axis=(0, 2)), 1)
        for name, hit in (("top1", first), (f"top{self.top_k}", among)):
            shares = jnp.sum(hit, axis=(0, 2)) / totals
            metrics |= {f"{name}_at_{i + 1}": shares[i] for i in range(self.depth)}
        tokens = jnp.sum(counted[:, 0]).astype(jnp.float32)
        return loss, metrics | {"loss": loss, "tokens": tokens}


def evaluation_of(objective: FeatureRegression | TrainingTimeTest, paths) -> Objective:
    """How validation measures a head that is to draft over a tree of these paths: no noise."""
    if isinstance(objective, FeatureRegression):
        objective = dataclasses.replace(objective, noise=0.0)
    return HeadQuality(objective, max(map(len, paths)), 1 + max(map(max, paths)))


def _states(batch: Observed, taps: tuple[int, ...]) -> TargetStates:
    if batch.states is not None:
        return TargetStates(*map(jnp.asarray, batch.states))
    return target_states(batch.target, batch.sequences, taps)


def _draft_place(
    head: EagleHead | Eagle3Head, tokens: Int[Array, " length"]
) -> tuple[Bool[Array, " length"], Int[Array, " length"]]:
    """Whether tokens can be drafted, and their places among the draft's logits."""
    ids = head.draft_ids
    if ids is None:
        return jnp.ones(tokens.shape, bool), tokens
    places = jnp.minimum(jnp.searchsorted(ids, tokens), len(ids) - 1)
    return ids[places] == tokens, places


def _on_device(sequences: Sequences) -> Sequences:
    return Sequences(*(jnp.asarray(field) for field in sequences))


def _soft_cross_entropy(
    draft_logits: Float[Array, "*places vocab"], target_logits: Float[Array, "*places vocab"]
) -> Float[Array, "*places"]:
    wanted = jax.lax.stop_gradient(jax.nn.softmax(target_logits, axis=-1))
    return -jnp.sum(wanted * jax.nn.log_softmax(draft_logits, axis=-1), axis=-1)


def _same_choice(
    draft_logits: Float[Array, "*places vocab"], target_logits: Float[Array, "*places vocab"]
) -> Bool[Array, "*places"]:
    # Comparing with the maximum is several times faster on CPUs than an arg-max.
    best = [
        logits >= jnp.max(logits, axis=-1, keepdims=True)
        for logits in (draft_logits, target_logits)
    ]
    return jnp.any(best[0] & best[1], axis=-1)


def _mean(values: Float[Array, "rows length"], counted: Bool[Array, "rows length"]):
    return jnp.sum(values * counted) / (jnp.sum(counted) + 1e-5)
