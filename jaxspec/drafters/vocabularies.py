"""A draft model with another vocabulary than its target's: drafts are tokens that both have.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202). The draft model's law
is renormalised on the tokens that both have. It is this law that verification sees, so outputs
follow the target's law whatever is shared; what is shared decides how much is accepted.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.types import Hidden, KVCache, LanguageModel, LayerKV, PyTree
from jaxspec.drafters.loaded import OtherTargetError

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

_NEVER = -1e9
"""Logit of a token that is not shared. It is finite: settings may allow no token that is."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["network", "ids", "shared"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SharedTokens:
    """A draft model in the ids of a target: a `core.types.LanguageModel` around another.

    Attributes:
        network: the draft model.
        ids: `int32[vocab]`, the draft model's id of each of the target's tokens. For a token that
            it does not have, the id that is read in its place.
        shared: `bool[vocab]`, True for tokens that both have. Only these are drafted.
    """

    network: LanguageModel
    ids: PyTree
    shared: PyTree

    @property
    def vocab_size(self) -> int:
        return self.ids.shape[0]

    @property
    def embed_dim(self) -> int:
        return self.network.embed_dim

    @property
    def config(self) -> Any:
        """Settings of the draft model; `None` where it has none."""
        return getattr(self.network, "config", None)

    def forward(
        self,
        tokens: Int[Array, " nodes"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes seen"],
        cache: KVCache | None,
        *,
        scratch: tuple[LayerKV, ...] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """See `core.types.LanguageModel`; the tokens are the target's."""
        tokens = self.ids[tokens]
        return self.network.forward(tokens, positions, mask, cache, scratch=scratch, taps=taps)

    def unembed(self, features: Float[Array, "nodes embed"]) -> Float[Array, "nodes vocab"]:
        """Returns a logit for each of the target's tokens."""
        return jnp.where(self.shared, self.network.unembed(features)[:, self.ids], _NEVER)

    def empty_cache(self, capacity: int) -> KVCache:
        return self.network.empty_cache(capacity)


def shared_tokens(draft: "Model", target: "Model") -> SharedTokens:
    """Returns a draft model in the ids of a target with another tokenizer.

    Tokens are the same if they add the same bytes to a text; ends of text are the same too. In
    place of a token that the draft model does not have, it reads the longest ending of it that it
    has.

    Args:
        draft: the draft model, with its tokenizer.
        target: the target, with its tokenizer.

    Raises:
        OtherTargetError: they share no token, or one has no tokenizer.
        CheckpointError: the bytes of a tokenizer's tokens are not known.

    Example:
        >>> import jaxspec
        >>> draft, target = jaxspec.load("demo-draft"), jaxspec.load("demo")
        >>> bool(shared_tokens(draft, target).shared[100])
        True
    """
    theirs, ours = draft.tokenizer, target.tokenizer
    if theirs is None or ours is None:
        name = (draft if theirs is None else target).name
        raise OtherTargetError(
            f"target: {name} has no tokenizer, so tokens that both models have cannot be found; "
            "put its tokenizer.json into its folder."
        )
    known = _by_bytes(theirs, draft.vocab_size)
    first_end = next(iter(draft.stop_token_ids), 0)
    ids = np.full(target.vocab_size, first_end, np.int32)
    shared = np.zeros(target.vocab_size, bool)
    for spelled, index in _by_bytes(ours, target.vocab_size).items():
        shared[index] = spelled in known
    for index, spelled in enumerate(ours.token_bytes()[: target.vocab_size]):
        endings = (spelled[start:] for start in range(len(spelled)))
        ids[index] = next((known[each] for each in endings if each in known), first_end)
    if not shared.any():
        raise OtherTargetError(
            f"target: {draft.name} and {target.name} share no token, so one cannot draft for the "
            "other; use a draft model with a tokenizer of the same kind."
        )
    for here, there in ((ours.bos_id, theirs.bos_id), (ours.eos_id, theirs.eos_id)):
        if here is not None and there is not None and here < len(ids):
            ids[here], shared[here] = there, True
    return SharedTokens(draft.network, jnp.asarray(ids), jnp.asarray(shared))


def _by_bytes(tokenizer: "Tokenizer", size: int) -> dict[bytes, int]:
    """Returns the id of each token by its bytes, of those that the model has.

    Where two are spelled alike the later one counts: SentencePiece has its 256 bytes in front.
    """
    spelled = enumerate(tokenizer.token_bytes()[:size])
    return {text: index for index, text in spelled if text}
