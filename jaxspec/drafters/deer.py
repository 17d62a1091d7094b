"""DEER: a diffusion language model drafts a whole block in one pass, the target verifies it.

Cheng et al. 2025, "DEER: Draft with Diffusion, Verify with Autoregressive Models" (2512.15176). The
drafter fills in masks behind the text, every one from the same pass, so that its tokens do not
depend on one another; their stated law is the one they were drawn from. The published pseudo-code
asks the drafter again for the law after each accepted token, which is biased.

What the drafter keeps of the text from step to step:

- `"blocks"`: keys and values of finished blocks, for drafters that are causal over blocks. Exact.
- `"prefix"`: keys and values as they were when they were first read, for drafters that see both
  sides. APPROXIMATE as a model, lossless all the same: the law of a draft is the one it came from.
- `"none"`: nothing; every pass reads the whole text.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.core import masks
from jaxspec.core.cache import KEY_SLOTS_AXIS, VALUE_SLOTS_AXIS, append_within, settled
from jaxspec.core.decode import in_chunks
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.tree import Path
from jaxspec.core.types import Context, Hidden, KVCache, LayerKV, Params, Proposal, PyTree
from jaxspec.drafters.block import Acceptance, BlockSettings
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.models import Diffusion, Network

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

CACHES = ("none", "blocks", "prefix")


class DeerState(NamedTuple):
    """What a row carries.

    cache: the drafter's own, of a part of the text that ends before the pending token; `None` where
        nothing is kept.
    """

    cache: KVCache | None
    acceptance: Acceptance


class _Reading(NamedTuple):
    """What a draft pass reads.

    start: its first slot.
    finished: the slot up to which what it reads can be kept.
    kept: slots that it keeps at most.
    sizes: of passes, in slots, smallest first; the last one is enough for any step.
    """

    start: Int[Array, ""]
    finished: Int[Array, ""]
    kept: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Deer(BlockSettings):
    """Drafts with a diffusion language model over the target's vocabulary, `params.draft`.

    Whether its output at a slot decides that slot or the next, and whether it is causal over
    blocks, `model.config.diffusion` says. A drafter that is causal over blocks always sees its last
    block whole, as it was trained.

    Attributes:
        sep_token_id: stands behind the masks, in drafters that were trained to read there that the
            text goes on; `None` for none.
        cache: what the drafter keeps of the text, see above; `None`: "blocks" or "prefix", as fits.
        chunk: tokens per pass over the prompt, with "blocks".

    Raises:
        ValueError: see `BlockSettings`, or `cache` is unknown.
    """

    sep_token_id: int | None = None
    cache: str | None = None
    chunk: int = 256

    def __post_init__(self):
        super().__post_init__()
        if self.cache not in (None, *CACHES):
            raise ValueError(f"cache must be one of {CACHES}, or None, got {self.cache!r}.")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}.")

    @classmethod
    def of(
        cls,
        model: "Model",
        block: int = 8,
        paths: Sequence[Path] | None = None,
        *,
        sep: str | None = None,
        mask: str | None = None,
        **settings: Any,
    ) -> LoadedDrafter:
        """Drafts with a diffusion model from `load`: what `generate(drafter=...)` takes.

        Args:
            model: the drafter.
            block: tokens of a draft.
            paths: of a static tree; a chain without.
            sep: the token that says that the text goes on, such as "[SEP]", or "" for none; `None`:
                the one that the drafter was trained with, as its config.json says.
            mask: the mask's token, such as "[MASK]", for a checkpoint whose config.json does not
                say that it is a diffusion model: Open-dCoder and others in the Qwen-2 layout, which
                see both sides and whose output at a slot decides the next one.
            settings: further fields of `Deer`.

        Raises:
            ValueError: the tokenizer has no such token, or a setting is out of range.
        """
        network = model.network
        if mask is not None:
            if network.config.diffusion is not None:
                raise ValueError(
                    f"mask: {model.name} is a diffusion model, whose config.json names its mask; "
                    "leave it out."
                )
            diffusion = Diffusion(_token_id(model, "mask", mask), shift=True)
            network = Network(network.params, network.config.replace(diffusion=diffusion))
        if sep is None:
            diffusion = getattr(network, "config", None) and network.config.diffusion
            sep_token_id = diffusion and diffusion.separator
        else:
            sep_token_id = _token_id(model, "sep", sep) if sep else None
        paths = None if paths is None else tuple(paths)
        drafter = cls(block, paths, sep_token_id=sep_token_id, **settings)
        return LoadedDrafter(drafter, network, model.tokenizer)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`. Warns where more masks are shown than in training."""
        draft = params.draft
        config = getattr(draft, "config", None)
        if not isinstance(draft, Network):
            raise ValueError(
                "drafter: Deer needs a diffusion model: Deer.of(load(...)); got "
                f"{type(draft).__name__}."
            )
        if config is None or config.diffusion is None:
            raise ValueError(
                "drafter: Deer needs a diffusion model, whose config.json has a mask_token_id; "
                "this one has no mask. If it is one in the layout of a causal model, give "
                'Deer.of(model, mask="[MASK]"); for causal models there is DraftModel.'
            )
        diffusion = config.diffusion
        if self.sep_token_id is not None and not 0 <= self.sep_token_id < config.vocab_size:
            raise ValueError(
                f"sep_token_id must be an id below {config.vocab_size}, got {self.sep_token_id}."
            )
        if self.cache == "blocks" and diffusion.block is None:
            raise ValueError(
                "cache: 'blocks' is for drafters that are causal over blocks; this one sees both "
                "sides, and takes 'prefix' or 'none'."
            )
        if self.cache == "prefix" and diffusion.block is not None:
            raise ValueError(
                "cache: 'prefix' is for drafters that see both sides; this one is causal over "
                "blocks, and takes 'blocks' or 'none'."
            )
        if self.block > config.max_positions:
            raise ValueError(
                f"block must be at most the drafter's {config.max_positions} positions, got "
                f"{self.block}."
            )
        if self.max_branch >= (num_drafted := min(config.vocab_size, params.target.vocab_size)):
            raise ValueError(
                f"drafter: a node has up to {self.max_branch} children, but only "
                f"{num_drafted - 1} tokens can be drafted; give a narrower tree."
            )
        # Without a separator the last block of its own is shown whole, and ends in masks.
        behind = 0 if self.sep_token_id is not None else (diffusion.block or 1) - 1
        num_masks = self.block + behind
        if diffusion.window is not None and num_masks > diffusion.window:
            warnings.warn(
                f"block: drafts of {self.block} tokens show up to {num_masks} masks, but this "
                f"drafter was trained on masked ends of up to {diffusion.window}; what lies behind "
                "will be guessed badly.",
                stacklevel=2,
            )

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def init(self, params: Params, prompt: Hidden, context: Context) -> DeerState:
        draft, slots = params.draft, prompt.features.shape[0]
        cache, diffusion = None, _diffusion_of(draft)
        kind = self._cache(draft)
        if kind == "blocks" and diffusion.block is not None:
            # The pending token is read again with every block: what follows it may depend on it.
            held = (context.length - 1) // diffusion.block * diffusion.block
            layers = _read_blocks(draft, diffusion.block, context.tokens[:slots], self.chunk)
            cache = KVCache(layers, held)
        elif kind == "prefix":
            cache = KVCache(self._read_prefix(draft, context, slots), context.length - 1)
        return DeerState(cache, self.nothing_accepted())

    def propose(
        self, params: Params, key: PRNGKeyArray, state: DeerState, context: Context
    ) -> tuple[Proposal, DeerState]:
        draft, cache = params.draft, state.cache
        diffusion = _diffusion_of(draft)
        reading = self._reading(draft, cache, context)
        start, end = reading.start, self._end(draft, context.length)
        # The output that decides the first position.
        first = context.length - start - int(diffusion.shift)

        def read_slots(size: int, drafted: Int[Array, " block"]) -> tuple[Array, PyTree]:
            positions = start + jnp.arange(size)
            window = jnp.take(context.tokens, positions, mode="clip")
            tokens = self._canvas(draft, window, positions, drafted, context.length)
            hidden = draft.forward(tokens, positions, self._sees(draft, positions, end), cache)
            features = jax.lax.dynamic_slice_in_dim(hidden.features, first, self.block)
            return features, () if cache is None else _first_slots(settled(hidden), reading.kept)

        # All rows of a batch read as many slots: one pass, of the smallest size that is enough.
        enough = largest_of_rows(jnp.sum(np.array(reading.sizes) < end - start))

        def read(drafted: Int[Array, " block"]) -> tuple[Array, PyTree]:
            passes = [partial(read_slots, size) for size in reading.sizes]
            return jax.lax.switch(enough, passes, drafted)

        drafted = self.draft(
            key,
            read,
            draft.unembed,
            diffusion.mask_token_id,
            params.target.vocab_size,
            context,
            state.acceptance,
        )
        if cache is not None:
            count = jnp.where(drafted.drafted, reading.finished - cache.length, 0)
            cache = append_within(cache, drafted.kept, count)
        return drafted.proposal, DeerState(cache, drafted.acceptance)

    def _cache(self, draft: Network) -> str:
        diffusion = _diffusion_of(draft)
        return self.cache or ("prefix" if diffusion.block is None else "blocks")

    def _reading(self, draft: Network, cache: KVCache | None, context: Context) -> _Reading:
        """What a pass reads: what was emitted since the last one, and the block.

        At most `depth` + 1 tokens are emitted in a step, and `slack` in steps without a draft.
        """
        diffusion = _diffusion_of(draft)
        behind = self.block + (self.sep_token_id is not None)
        if cache is None:
            size = context.tokens.shape[0] + behind + (diffusion.block or 0)
            return _Reading(jnp.int32(0), jnp.int32(0), 0, (size,))
        news = self.depth + 1 + self.slack
        if diffusion.block is None:
            sizes = _doubled([1 + (self.depth + 1) // 2 + behind], 1 + news + behind)
            return _Reading(cache.length, context.length - 1, news, sizes)
        block = diffusion.block
        finished = (context.length - 1) // block * block
        kept = (block - 1 + news) // block * block
        return _Reading(cache.length, finished, kept, self.window_sizes(block))

    def window_sizes(self, own_block: int) -> tuple[int, ...]:
        """Slots that a pass of a drafter may read that is causal over blocks of `own_block`.

        Smallest first; the last one is enough for any step. Most steps finish no block of the text,
        or one; more where rows went on without drafts.
        """
        behind = self.block + (self.sep_token_id is not None)
        news = self.depth + 1 + self.slack
        least = -(-(1 + behind) // own_block) * own_block
        most = -(-(own_block + news + behind) // own_block) * own_block
        return _doubled([least, min(least + own_block, most)], most)

    def _end(self, draft: Network, length: Int[Array, ""]) -> Int[Array, ""]:
        """The slot after the canvas."""
        block = _diffusion_of(draft).block
        if self.sep_token_id is not None:
            return length + self.block + 1
        if block is None:
            return length + self.block
        return -(-(length + self.block) // block) * block

    def _sees(
        self, draft: Network, positions: Int[Array, " size"], end: Int[Array, ""]
    ) -> Bool[Array, "size size"]:
        block = _diffusion_of(draft).block
        seen = jnp.broadcast_to(positions[None] < end, (len(positions), len(positions)))
        if block is None:
            return seen
        blocks = positions // block
        return seen & (blocks[:, None] >= blocks[None])

    def _canvas(
        self,
        draft: Network,
        window: Int[Array, " size"],
        positions: Int[Array, " size"],
        drafted: Int[Array, " block"],
        length: Int[Array, ""],
    ) -> Int[Array, " size"]:
        """The text, then what is drafted of the block, then masks, then the separator."""
        diffusion = _diffusion_of(draft)
        masked = jnp.where(positions < length, window, diffusion.mask_token_id)
        if self.steps > 1:
            place = positions - length
            own = jnp.take(drafted, place, mode="clip")
            masked = jnp.where((place >= 0) & (place < self.block), own, masked)
        if self.sep_token_id is not None:
            masked = jnp.where(positions == length + self.block, self.sep_token_id, masked)
        return masked.astype(jnp.int32)

    def _read_prefix(self, draft: Network, context: Context, slots: int) -> tuple[LayerKV, ...]:
        """Keys and values of the prompt with a masked block behind it, from one pass."""
        positions = jnp.arange(slots + self.block + (self.sep_token_id is not None))
        window = jnp.take(context.tokens, positions, mode="clip")
        nothing = jnp.full(self.block, _diffusion_of(draft).mask_token_id, jnp.int32)
        tokens = self._canvas(draft, window, positions, nothing, context.length)
        seen = self._sees(draft, positions, self._end(draft, context.length))
        return _first_slots(settled(draft.forward(tokens, positions, seen, None)), slots)


def _doubled(sizes: list[int], most: int) -> tuple[int, ...]:
    """Some sizes, then each twice the one before, up to the most."""
    while sizes[-1] < most:
        sizes = [*sizes, min(2 * sizes[-1], most)]
    return tuple(sorted(set(sizes)))


def _token_id(model: "Model", name: str, token: str) -> int:
    found = None if model.tokenizer is None else model.tokenizer.token_id(token)
    if found is None:
        raise ValueError(
            f"{name}: {model.name} has no token {token!r} in its tokenizer; leave it out for a "
            "drafter that was trained without one."
        )
    return found


def _diffusion_of(draft: Network) -> Diffusion:
    diffusion = draft.config.diffusion
    assert diffusion is not None, "check_fit refuses causal models"
    return diffusion


def _read_blocks(
    draft: Network, block: int, tokens: Int[Array, " bucket"], chunk: int
) -> tuple[LayerKV, ...]:
    """Keys and values of a prompt, of which those of whole blocks mean something."""
    bucket = tokens.shape[0]
    chunk = min(chunk, bucket)
    if chunk % block or bucket % chunk:
        chunk = bucket

    def forward(tokens, positions, _, cache) -> Hidden:
        seen = masks.block_causal(tokens.shape[0], block)
        return draft.forward(tokens, positions, seen, cache)

    _, layers = in_chunks(forward, tokens, draft.empty_cache, chunk)
    return layers


def _first_slots(layers: tuple[LayerKV, ...], slots: int) -> tuple[LayerKV, ...]:
    """So many slots of a pass; zeros behind its last one."""

    def first(array: Array, axis: int) -> Array:
        found = jax.lax.slice_in_dim(array, 0, min(slots, array.shape[axis]), axis=axis)
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, slots - found.shape[axis])
        return jnp.pad(found, padding)

    return tuple(
        LayerKV(first(layer.keys, KEY_SLOTS_AXIS), first(layer.values, VALUE_SLOTS_AXIS))
        for layer in layers
    )
