"""What DFlash heads are trained for: blocks of the target's answers, from its states before them.

Chen et al. 2026 (2602.06036), section 4.2. A batch holds prompts with the target's answers and the
target, and may hold what the target makes of that text, which is not learned from.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import bidirectional
from jaxspec.core.types import PyTree
from jaxspec.models import DFlashHead, ModelConfig, Network
from jaxspec.training.data import Answers, Sequences
from jaxspec.training.features import target_states
from jaxspec.training.lm import products_in
from jaxspec.training.loop import Metrics
from jaxspec.training.settings import DTYPES


class Answered(NamedTuple):
    """A batch of answers with the target that gave them.

    taps: the inputs of its tapped layers side by side; None: computed when they are needed.
    """

    answers: Answers
    target: Network
    taps: Float[Array, "rows length tapped"] | None = None


class Anchors(NamedTuple):
    """Where the blocks of a row begin.

    places: of the anchors, the tokens that are pending.
    counted: False where the row has no further token to draw.
    """

    places: Int[Array, " anchors"]
    counted: Bool[Array, " anchors"]


@dataclasses.dataclass(frozen=True)
class AnchoredBlocks:
    """Cross-entropy of the tokens behind anchors, each block foreseen in one pass.

    An anchor is any token that an answer's token follows: what may be pending when the drafter is
    asked. It stands open at the head of a block of masks, which sees the target's states at all
    places before the anchor, and all of itself; blocks do not see each other. The i-th mask weighs
    exp(-(i - 1) / gamma); the sum is divided by that of the weights. As in drafting, the mask is no
    token that could be meant.

    config: of the head's layers.
    taps: target layers that the head reads.
    mask_token_id: see `DFlashHead`.
    block: slots of a block, the anchor included.
    anchors: how many of a row are drawn for an update, or all if it has fewer.
    gamma: 7 in the paper for blocks of 16.
    dtype: of the head's products, see `NextToken`. The target's are as exact as when it decodes.

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

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}.")
        if self.block < 2 or self.anchors < 1:
            raise ValueError(
                "block must be at least 2 slots, the anchor included, and anchors at least 1, got "
                f"{self.block} and {self.anchors}."
            )
        if not self.gamma > 0:
            raise ValueError(f"gamma must be above 0, got {self.gamma}.")

    def head(self, params: PyTree, target: Network) -> DFlashHead:
        return DFlashHead(
            params, self.config, self.taps, self.mask_token_id, self.block, target.num_layers
        )

    def __call__(
        self, params: PyTree, batch: Answered, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        head, target = self.head(params, batch.target), batch.target
        answers = Answers(*map(jnp.asarray, batch.answers))
        taps = batch.taps
        if taps is None:
            taps = target_states(target, Sequences(*answers[:3]), self.taps).taps
        keys = jax.random.split(key, len(answers.tokens))
        logits, wanted, counted = jax.vmap(
            lambda row, taps, key: self._foresee(head, target, row, taps, self.draw(row, key))
        )(answers, jnp.asarray(taps), keys)
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
        loss = jnp.sum(nats * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
        return loss, metrics

    def draw(self, row: Answers, key: PRNGKeyArray) -> Anchors:
        """Different tokens of a row, any as likely as another."""
        follows = jnp.roll(row.segments, -1).at[-1].set(0)
        answered = jnp.roll(row.answer, -1) > 0
        possible = (row.segments > 0) & (row.segments == follows) & answered
        order = jnp.where(possible, jax.random.uniform(key, possible.shape), -1.0)
        highest, places = jax.lax.top_k(order, min(self.anchors, len(order)))
        return Anchors(places, highest >= 0)

    def _foresee(
        self,
        head: DFlashHead,
        target: Network,
        row: Answers,
        taps: Float[Array, "length tapped"],
        anchors: Anchors,
    ) -> tuple[
        Float[Array, "anchors block-1 vocab"],
        Int[Array, "anchors block-1"],
        Bool[Array, "anchors block-1"],
    ]:
        """Of one row: logits of all masks, the tokens that stand there, and which count."""
        tokens, segments, positions, _ = map(jnp.asarray, row)
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
        slots = anchors.places[:, None] + steps[None, 1:]
        inside = jnp.minimum(slots, length - 1)
        own = segments[inside] == segments[anchors.places][:, None]
        wanted = tokens[inside]
        counted = anchors.counted[:, None] & (slots < length) & own & (wanted != self.mask_token_id)
        return logits.reshape(*slots.shape, -1), wanted, counted
