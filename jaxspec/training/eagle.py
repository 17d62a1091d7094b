"""What EAGLE heads are trained for: the target's next features, or its tokens several steps on.

A batch holds text and the target; its features are computed as they are needed and not learned
from. Pair t joins the target's state at t with token t + 1; see `jaxspec.models.eagle`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import Hidden, PyTree
from jaxspec.drafters.growth import extend
from jaxspec.models import DraftVocabulary, Eagle3Head, EagleHead, ModelConfig, Network
from jaxspec.training.data import Sequences
from jaxspec.training.loop import Metrics


class Observed(NamedTuple):
    """A batch with the target whose hidden states are to be foreseen.

    vocabulary: the tokens that an EAGLE-1 head drafts from; None: all.
    """

    sequences: Sequences
    target: Network
    vocabulary: DraftVocabulary | None = None


@dataclasses.dataclass(frozen=True)
class FeatureRegression:
    """EAGLE-1's objective (Li et al. 2024, section 4.2): features by SmoothL1, tokens beside it.

    config: of the head's one layer.
    bias: see `EagleHead`.
    token_weight: of the cross-entropy against the target's distribution.
    noise: half the width of the uniform noise on the states read, at 512 tokens a sequence; it
        scales with 512 / tokens, as in the published code.
    """

    config: ModelConfig
    bias: bool = True
    token_weight: float = 0.1
    noise: float = 0.1

    def __call__(
        self, params: PyTree, batch: Observed, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        head = EagleHead(params, self.config, self.bias, batch.vocabulary)
        sequences = _on_device(batch.sequences)
        width = self.noise * 512 / sequences.tokens.shape[1]

        def read(tokens, segments, positions, key):
            seen = _target_pass(batch.target, tokens, segments, positions)
            shift = jax.random.uniform(key, seen.features.shape, minval=-width, maxval=width)
            states = (seen.features + shift.astype(seen.features.dtype))[:-1]
            mask = (causal(len(tokens)) & same_document(segments))[:-1, :-1]
            predicted = head.forward(
                batch.target.embed(tokens[1:]), states, positions[:-1], mask, None
            ).features
            expected = seen.features[1:]
            return (
                predicted,
                expected,
                head.unembed(batch.target, predicted),
                head.unembed(batch.target, expected),
            )

        keys = jax.random.split(key, len(sequences.tokens))
        outputs = jax.vmap(read)(*sequences, keys)
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
    num_steps: how often it is unrolled; 7 in the paper.
    decay: weight of a step over that of the one before.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    num_steps: int = 7
    decay: float = 0.8

    def __call__(
        self, params: PyTree, batch: "Tapped", key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        del key  # Nothing is drawn.
        vocab_size = batch.target.vocab_size
        head = Eagle3Head(params, self.config, self.taps, vocab_size, batch.draft_ids)
        sequences = _on_device(batch.sequences)
        losses, agreements, counts = jax.vmap(lambda *row: self._unroll(head, batch, *row))(
            *sequences
        )
        # The mean over all places, counted or not, as in the published code.
        places = sequences.tokens.size
        steps = jnp.sum(losses, axis=(0, 2)) / places
        weights = self.decay ** jnp.arange(self.num_steps)
        agreed = jnp.sum(agreements, axis=(0, 2)) / jnp.maximum(jnp.sum(counts, axis=(0, 2)), 1)
        metrics = {f"agreement_{i + 1}": agreed[i] for i in range(self.num_steps)}
        tokens = jnp.sum(counts[:, 0]).astype(jnp.float32)
        return jnp.sum(weights * steps), metrics | {"tokens": tokens}

    def _unroll(self, head: Eagle3Head, batch: "Tapped", tokens, segments, positions):
        """Per step and place: loss, agreement, and whether the place counts."""
        length = len(tokens)
        seen = _target_pass(batch.target, tokens, segments, positions, self.taps)
        target_logits = jax.lax.stop_gradient(batch.target.unembed(seen.features))
        likeliest = jnp.argmax(target_logits, axis=-1)
        draftable = jnp.ones(length, bool)
        if batch.draft_ids is not None:
            draftable = jnp.any(likeliest[:, None] == batch.draft_ids[None], axis=1)
            target_logits = target_logits[:, batch.draft_ids]
        states = head.states_of(seen.features, seen.taps)
        own_chain = jnp.eye(length, dtype=bool)
        mask, scratch = causal(length) & same_document(segments), None
        results = []
        for step in range(self.num_steps):
            # Place t reads token t + 1 + step and foresees what follows it.
            ahead = jnp.minimum(jnp.arange(length) + 1 + step, length - 1)
            inside = (jnp.arange(length) + 1 + step < length) & (segments[ahead] == segments)
            hidden = head.forward(
                batch.target.embed(tokens[ahead]),
                states,
                positions + step,
                mask,
                None,
                scratch=scratch,
            )
            states = hidden.features
            draft_logits, wanted = head.unembed(batch.target, states), target_logits[ahead]
            counted = inside & (segments > 0) & draftable[ahead]
            loss = _soft_cross_entropy(draft_logits, wanted)
            results.append((loss * counted, _same_choice(draft_logits, wanted) & counted, counted))
            scratch = extend(scratch, hidden.new_kv)
            mask = jnp.concatenate([mask, own_chain], axis=1)
        return tuple(jnp.stack(part) for part in zip(*results, strict=True))


class Tapped(NamedTuple):
    """A batch with the target whose tapped layers are read.

    draft_ids: the tokens that the head drafts from; None: all.
    """

    sequences: Sequences
    target: Network
    draft_ids: Int[Array, " draft_vocab"] | None = None


def _target_pass(
    target: Network, tokens, segments, positions, taps: tuple[int, ...] = ()
) -> Hidden:
    mask = causal(len(tokens)) & same_document(segments)
    return jax.lax.stop_gradient(target.forward(tokens, positions, mask, None, taps=taps))


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
