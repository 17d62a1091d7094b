"""What language models are trained for: the next token, as it is or as a teacher sees it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, Network, Skips
from jaxspec.training.data import Sequences
from jaxspec.training.loop import Metrics, Objective


class Taught(NamedTuple):
    """A batch with the network that knows better."""

    sequences: Sequences
    teacher: Network


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of every token given those before it in its document, in nats per token.

    config: of the network being trained.
    layer_drop: chance of leaving out a sub-layer of the last layer, per sequence; it rises from 0
        at the first layer in a straight line.
    dtype: of weights and activations in the pass; softmax and loss stay float32.
    """

    config: ModelConfig
    layer_drop: float = 0.0
    dtype: str = "float32"

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        logits = _logits(self.network(params), batch, key, self.layer_drop)
        metrics = _metrics(logits, batch)
        return metrics["nats"], metrics

    def network(self, params: PyTree) -> Network:
        """The network that computes in `dtype`."""
        return Network(jax.tree.map(lambda leaf: leaf.astype(self.dtype), params), self.config)


@dataclasses.dataclass(frozen=True)
class SoftLabels:
    """Cross-entropy against the teacher's whole distribution, and the next token's beside it.

    student: how logits come about.
    soft_share: weight of the teacher's distribution; the rest goes to the text itself.
    """

    student: NextToken
    soft_share: float = 0.9

    def __post_init__(self):
        if not 0 <= self.soft_share <= 1:
            raise ValueError(f"soft_share must be in [0, 1], got {self.soft_share}.")

    def __call__(
        self, params: PyTree, batch: Taught, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        student, sequences = self.student, batch.sequences
        logits = _logits(student.network(params), sequences, key, student.layer_drop)
        expert = jax.lax.stop_gradient(_logits(batch.teacher, sequences, key, 0.0))
        _, learned = _targets(sequences)
        expected = jnp.sum(jax.nn.softmax(expert) * logits, axis=-1)
        soft = jax.nn.logsumexp(logits, axis=-1) - expected
        metrics = _metrics(logits, sequences) | {
            "agreement": _mean(jnp.any(_is_largest(logits) & _is_largest(expert), -1), learned)
        }
        hard_share = 1.0 - self.soft_share
        return self.soft_share * _mean(soft, learned) + hard_share * metrics["nats"], metrics


Evaluation = Callable[[PyTree, Sequence[Any]], dict[str, float]]


def make_evaluation(objective: Objective) -> Evaluation:
    """A function of weights and batches: the objective's metrics, averaged over tokens."""
    measure = jax.jit(lambda params, batch: objective(params, batch, jax.random.key(0))[1])

    def evaluate(params: PyTree, batches: Sequence[Any]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for batch in batches:
            metrics = {name: float(value) for name, value in measure(params, batch).items()}
            tokens = metrics.pop("tokens")
            for name, value in (metrics | {"tokens": 1.0}).items():
                totals[name] = totals.get(name, 0.0) + value * tokens
        tokens = totals.pop("tokens")
        return {name: total / tokens for name, total in totals.items()}

    return evaluate


def _logits(
    network: Network, batch: Sequences, key: PRNGKeyArray, layer_drop: float
) -> Float[Array, "rows length-1 vocab"]:
    def row_logits(tokens, segments, positions, key) -> Float[Array, "length-1 vocab"]:
        mask = causal(len(tokens)) & same_document(segments)
        skip = _draw_skips(key, network.num_layers, layer_drop) if layer_drop else None
        hidden = network.forward(tokens, positions, mask, None, skip=skip)
        return network.unembed(hidden.features[:-1])

    keys = jax.random.split(key, len(batch.tokens))
    arrays = (jnp.asarray(batch.tokens), jnp.asarray(batch.segments), jnp.asarray(batch.positions))
    return jax.vmap(row_logits)(*arrays, keys)


def _draw_skips(key: PRNGKeyArray, num_layers: int, layer_drop: float) -> Skips:
    chances = layer_drop * jnp.arange(num_layers) / max(num_layers - 1, 1)
    drawn = jax.random.bernoulli(key, chances[None], (2, num_layers)).astype(jnp.float32)
    return Skips(*drawn)


def _targets(
    batch: Sequences,
) -> tuple[Int[Array, "rows length-1"], Bool[Array, "rows length-1"]]:
    """Each token's successor, and whether that belongs to the same document."""
    segments = jnp.asarray(batch.segments)
    learned = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.asarray(batch.tokens)[:, 1:], learned


def _metrics(logits: Float[Array, "rows length-1 vocab"], batch: Sequences) -> Metrics:
    targets, learned = _targets(batch)
    chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return {
        "nats": _mean(nats, learned),
        # Comparing with the maximum is several times faster on CPUs than an arg-max.
        "top1": _mean(chosen >= jnp.max(logits, axis=-1), learned),
        "tokens": jnp.sum(learned).astype(jnp.float32),
    }


def _is_largest(logits: Float[Array, "*batch vocab"]) -> Bool[Array, "*batch vocab"]:
    return logits >= jnp.max(logits, axis=-1, keepdims=True)


def _mean(
    values: Float[Array, "rows length-1"], counted: Bool[Array, "rows length-1"]
) -> Float[Array, ""]:
    return jnp.sum(values * counted) / jnp.maximum(jnp.sum(counted), 1)
