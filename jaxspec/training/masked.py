"""What diffusion language models are trained for: hidden slots, seen from both sides."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.masks import same_document
from jaxspec.core.types import PyTree
from jaxspec.diffusion.process import Masked, block_training_mask, mask_number, mask_share
from jaxspec.models import ModelConfig, Network
from jaxspec.training.data import Sequences
from jaxspec.training.lm import products_in
from jaxspec.training.loop import Metrics
from jaxspec.training.settings import DTYPES
from jaxspec.training.tokenizer import END_OF_TURN, RESERVED, ROLES


class _Seen(NamedTuple):
    """What was hidden of a row, and what the network said of each slot."""

    masked: Masked
    maskable: Bool[Array, " slots"]
    logits: Float[Array, "slots vocab"]


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """An upper bound of a text's negative log-likelihood, in nats per token.

    A network that sees both sides is trained as LLaDA (arXiv 2502.09992, section 2): each document
    has a share t ~ U(0, 1) of its slots hidden, each weighing 1/t. One that is causal over blocks
    is trained as BD3-LM (arXiv 2503.09573): a masked copy of the row beside a clean one, in each
    block k ~ U{1..n} of its n slots hidden, each weighing n/k. Where outputs are shifted, the first
    slot of a block is foreseen from the clean copy, as in decoding. A document's first token is
    never hidden.

    config: of the network being trained; `config.diffusion` says of which kind it is.
    random_lengths: share of the rows that are cut at a random slot, LLaDA's 1 %.
    answers_only: only what an assistant says is hidden, the end of its turn included, and every
        answer counts the same whatever its length (LLaDA's fine-tuning, section 2.3; without its
        padding by ends of text). False: everything.
    steady: draw numbers of hidden slots in place of shares for both kinds; the bound is the same
        and varies less from draw to draw. For measuring.
    dtype: of the operands of products; "bfloat16" still sums in float32.
    """

    config: ModelConfig
    random_lengths: float = 0.01
    answers_only: bool = False
    steady: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}.")
        if self.config.diffusion is None:
            raise ValueError("config must be of a diffusion model, but its `diffusion` is None.")

    def __call__(
        self, params: PyTree, batch: Sequences, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
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
        if self.answers_only:
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
        """The same as validation measures it: whole rows, and draws that vary less."""
        return dataclasses.replace(self, random_lengths=0.0, steady=True)

    def _seen(
        self,
        network: Network,
        tokens: Int[Array, " slots"],
        segments: Int[Array, " slots"],
        positions: Int[Array, " slots"],
        key: PRNGKeyArray,
    ) -> _Seen:
        """One row."""
        diffusion = self.config.diffusion
        assert diffusion is not None  # checked when this object was made
        cut_key, length_key, mask_key = jax.random.split(key, 3)
        slots = len(tokens)
        cut = jax.random.bernoulli(cut_key, self.random_lengths)
        length = jnp.where(cut, jax.random.randint(length_key, (), 1, slots + 1), slots)
        segments = jnp.where(jnp.arange(slots) < length, segments, 0)
        maskable = (segments > 0) & (positions > 0)
        if self.answers_only:
            maskable &= _is_answer(tokens)
        if diffusion.block is None:
            draw = mask_number if self.steady else mask_share
            masked = draw(mask_key, maskable, segments)
            hidden = jnp.where(masked.hidden, diffusion.mask_token_id, tokens)
            seen = network.forward(hidden, positions, same_document(segments), None).features
            clean = seen
            begins = jnp.zeros(slots, bool)
        else:
            blocks = positions // diffusion.block
            within = segments * slots + blocks
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


def _is_answer(tokens: Int[Array, " slots"]) -> Bool[Array, " slots"]:
    """What stands between the mark of an assistant and the end of its turn, that end included."""
    order = jnp.arange(len(tokens))
    roles = [RESERVED.index(f"<|{role}|>") for role in ROLES]
    assistant = tokens == RESERVED.index("<|assistant|>")
    marks = jnp.isin(tokens, jnp.asarray(roles)) | (tokens == RESERVED.index(END_OF_TURN))
    # The newest mark before each slot; a document begins with none.
    newest = jax.lax.cummax(jnp.where(marks, order, -1))
    before = jnp.concatenate([jnp.full(1, -1), newest[:-1]])
    return (before >= 0) & assistant[before]


def _answer_lengths(
    maskable: Bool[Array, " slots"], segments: Int[Array, " slots"]
) -> Float[Array, " slots"]:
    """How many slots each slot's document has that may be hidden."""
    return (same_document(segments) & maskable[None, :]).sum(axis=1).astype(jnp.float32)
