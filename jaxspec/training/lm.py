"""What language models are trained for: the next token, as it is or as a teacher sees it."""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import causal, same_document
from jaxspec.core.types import PyTree
from jaxspec.models import NARROW, ModelConfig, Network, Skips
from jaxspec.training.data import Sequences
from jaxspec.training.loop import Metrics, Objective
from jaxspec.training.settings import DTYPES


class Taught(NamedTuple):
    """A batch with the network that knows better."""

    sequences: Sequences
    teacher: Network


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of every token given those before it in its document, in nats per token.

    config: of the network being trained.
    layer_drop: chance of leaving out a sub-layer of the last layer, per sequence; it rises from 0
        at the first layer in a straight line (stochastic depth, Huang et al. 2016).
    early_exit: share of the sequences that leave out all layers from a drawn one on, at the
        earliest after a quarter of them: the head learns to read them (LayerSkip, Elhoushi et
        al. 2024, section 3, without its rising weights).
    dtype: of the operands of products; "bfloat16" still sums in float32. Weights, activations,
        softmax and loss stay float32.
    """

    config: ModelConfig
    layer_drop: float = 0.0
    early_exit: float = 0.0
    dtype: str = "float32"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}.")

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        metrics = _metrics(self.logits(params, batch, key), batch)
        return metrics["nats"], metrics

    def logits(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> Float[Array, "rows length-1 vocab"]:
        """What the network says of each next token, with layers left out as in training."""
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
    def whole(self) -> "NextToken":
        """The same with no layer left out: what is measured."""
        return dataclasses.replace(self, layer_drop=0.0, early_exit=0.0)


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

    @property
    def whole(self) -> "SoftLabels":
        """The same with no layer left out: what is measured."""
        return dataclasses.replace(self, student=self.student.whole)

    def __call__(
        self, params: PyTree, batch: Taught, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        sequences = batch.sequences
        logits = self.student.logits(params, sequences, key)
        expert = jax.lax.stop_gradient(_logits(batch.teacher, sequences))
        _, learned = _targets(sequences)
        expected = jnp.sum(jax.nn.softmax(expert) * logits, axis=-1)
        soft = jax.nn.logsumexp(logits, axis=-1) - expected
        metrics = _metrics(logits, sequences) | {
            "agreement": _mean(jnp.any(_is_largest(logits) & _is_largest(expert), -1), learned)
        }
        hard_share = 1.0 - self.soft_share
        return self.soft_share * _mean(soft, learned) + hard_share * metrics["nats"], metrics


def products_in(dtype: str) -> AbstractContextManager[None]:
    """Within it, networks multiply operands of this dtype, one of `DTYPES`, and sum in float32."""
    return jax.default_matmul_precision(NARROW if dtype == "bfloat16" else "highest")


Evaluation = Callable[[PyTree, Iterable[Any]], dict[str, float]]


def make_evaluation(objective: Objective) -> Evaluation:
    """A function of weights and batches: the objective's metrics, averaged over tokens."""
    measure = jax.jit(lambda params, batch: objective(params, batch, jax.random.key(0))[1])

    def evaluate(params: PyTree, batches: Iterable[Any]) -> dict[str, float]:
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
