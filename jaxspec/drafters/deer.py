"""DEER: a diffusion language model drafts a whole block in one pass, the target verifies it.

Cheng et al. 2025, "DEER: Draft with Diffusion, Verify with Autoregressive Models" (2512.15176). The
drafter fills in masks after the text, all from the same pass, so its tokens do not depend on one
another; with a Markov head each depends on the one before it, too. The distribution it states is
the one they were drawn from. The published pseudo-code asks the drafter again for the distribution
after each accepted token, which is biased.

Kept of the text from step to step:

- `"blocks"`: keys and values of finished blocks, for drafters that are causal over blocks. Exact.
- `"prefix"`: keys and values as they were when they were first read, for drafters that see both
  sides. APPROXIMATE as a model, but lossless: a draft states the distribution it came from.
- `"none"`: nothing; every pass reads the whole text.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.checkpoint.hub import check_is_model
from jaxspec.core import masks
from jaxspec.core.cache import KEY_PLACES_AXIS, VALUE_PLACES_AXIS, append_within, settled
from jaxspec.core.checks import Count, Natural, checks_arguments, one_of
from jaxspec.core.decode import in_chunks, places_at_once
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
    """State of one row.

    Attributes:
        cache: the drafter's, of a part of the text that ends before the pending token; `None` if
            nothing is kept.
        acceptance: of the last drafts.
    """

    cache: KVCache | None
    acceptance: Acceptance


class _Reading(NamedTuple):
    """Range of positions that a draft pass reads.

    Attributes:
        start: first position.
        finished: keys and values of positions before this one can be kept.
        kept: most positions that are kept.
        sizes: of passes, in positions, smallest first; the last one is enough for any step.
    """

    start: Int[Array, ""]
    finished: Int[Array, ""]
    kept: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Deer(BlockSettings):
    """Drafts with a diffusion language model over the target's vocabulary, `params.draft`.

    `model.config.diffusion` says whether the output at a position decides that position or the
    next, and whether the model is causal over blocks. A drafter that is causal over blocks always
    sees its last block whole, as in training.

    Attributes:
        sep_token_id: stands after the masks, for drafters that were trained with a sign there that
            the text continues; `None` for none.
        cache: what the drafter keeps of the text, "none", "blocks" or "prefix", see above; `None`:
            "blocks" or "prefix", as fits.
        chunk: tokens per pass over the prompt, with "blocks".

    Raises:
        ValueError: see `BlockSettings`, or `cache` is unknown.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> drafter = jaxspec.Deer.of(jaxspec.load("demo-deer"), block=4)
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, drafter)
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    taps = ()
    sep_token_id: Natural | None = None
    cache: Annotated[str, one_of(*CACHES)] | None = None
    chunk: Count = 256

    @classmethod
    @checks_arguments
    def of(
        cls,
        model: "Model",
        block: int = 8,
        paths: Sequence[Path] | None = None,
        *,
        sep: str | None = None,
        mask: str | None = None,
        any_target: bool = False,
        **settings: Any,
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` from a diffusion model that `load` gave.

        Args:
            model: the drafter.
            block: tokens of a draft.
            paths: of a static tree; `None` for a chain.
            sep: the token that says that the text continues, such as "[SEP]", or "" for none;
                `None`: the one that the drafter was trained with, as its config.json says.
            mask: the mask's token, such as "[MASK]", for a checkpoint whose config.json does not
                say that it is a diffusion model: Open-dCoder and others in the Qwen-2 layout, which
                see both sides and whose output at a position decides the next one.
            any_target: draft for a target with other weights than the one that it was trained for,
                such as a fine-tuned one.
            settings: further fields of `Deer`.

        Raises:
            ValueError: it is no diffusion model, the tokenizer has no such token, the mask is one
                of ordinary text, or a setting is out of range.
        """
        check_is_model(model)
        network = model.known_network
        if mask is not None:
            if network.config.diffusion is not None:
                raise ValueError(
                    f"mask: {model.name} is a diffusion model, whose config.json names its mask; "
                    "leave it out."
                )
            mask_token_id = _token_id(model, "mask", mask)
            assert model.tokenizer is not None, "it has the token"
            if mask_token_id not in model.tokenizer.backend.get_added_tokens_decoder():
                raise ValueError(
                    f"mask: {mask!r} is a token of ordinary text of {model.name}; give one that "
                    "was added for this, as its tokenizer.json lists them."
                )
            diffusion = Diffusion(mask_token_id, shift=True)
            network = Network(network.params, network.config.replace(diffusion=diffusion))
        _check_has_mask(network)
        if sep is None:
            diffusion = network.config.diffusion
            sep_token_id = diffusion and diffusion.separator
        else:
            sep_token_id = _token_id(model, "sep", sep) if sep else None
        paths = None if paths is None else tuple(paths)
        drafter = cls(block, paths, sep_token_id=sep_token_id, **settings)
        made_for = None if any_target else network.config.masking.made_for
        return LoadedDrafter(drafter, network, model.tokenizer, made_for)

    def init(self, params: Params, prompt: Hidden, context: Context) -> DeerState:
        draft, bucket = params.draft, prompt.features.shape[0]
        cache, diffusion = None, draft.config.masking
        kind = self._cache(draft)
        if kind == "blocks" and diffusion.block is not None:
            # The pending token is read again with every block: later positions depend on it.
            held = (context.length - 1) // diffusion.block * diffusion.block
            reader = self._reader(draft, context)
            layers = _read_blocks(
                reader, diffusion.block, context.tokens[:bucket], context.length, self.chunk
            )
            cache = KVCache(layers, held)
        elif kind == "prefix":
            cache = KVCache(self._read_prefix(draft, context, bucket), context.length - 1)
        return DeerState(cache, self.nothing_accepted())

    def propose(
        self, params: Params, key: PRNGKeyArray, state: DeerState, context: Context
    ) -> tuple[Proposal, DeerState]:
        draft, cache = params.draft, state.cache
        diffusion, reader = draft.config.masking, self._reader(draft, context)
        reading = self._reading(draft, cache, context)
        start, end = reading.start, self._end(draft, context.length)
        # Index of the output that decides the first drafted position.
        first = context.length - start - int(diffusion.shift)

        def read_positions(size: int, drafted: Int[Array, " block"]) -> tuple[Array, PyTree]:
            positions = start + jnp.arange(size)
            window = jnp.take(context.tokens, positions, mode="clip")
            tokens = self._canvas(draft, window, positions, drafted, context.length)
            hidden = reader.forward(tokens, positions, self._sees(draft, positions, end), cache)
            features = jax.lax.dynamic_slice_in_dim(hidden.features, first, self.block)
            return features, () if cache is None else _first_positions(
                settled(hidden), reading.kept
            )

        # All rows of a batch share one pass, of the smallest size that is enough.
        enough = largest_of_rows(jnp.sum(np.array(reading.sizes) < end - start))

        def read(drafted: Int[Array, " block"]) -> tuple[Array, PyTree]:
            passes = [partial(read_positions, size) for size in reading.sizes]
            return jax.lax.switch(enough, passes, drafted)

        drafted = self.draft(
            key,
            read,
            draft.unembed,
            diffusion.mask_token_id,
            params.target.vocab_size,
            context,
            state.acceptance,
            draft.follow if diffusion.rank else None,
        )
        if cache is not None:
            count = jnp.where(drafted.drafted, reading.finished - cache.length, 0)
            cache = append_within(cache, drafted.kept, count)
        return drafted.proposal, DeerState(cache, drafted.acceptance)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`. Warns if more masks are shown than in training."""
        draft = params.draft
        if not isinstance(draft, Network):
            raise ValueError(
                "drafter: Deer needs a diffusion model: Deer.of(load(...)); got "
                f"{type(draft).__name__}."
            )
        _check_has_mask(draft)
        config, diffusion = draft.config, draft.config.masking
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
        self.check_passes(follows=diffusion.rank > 0)
        longest, vocab_size = config.max_positions, min(config.vocab_size, params.target.vocab_size)
        self.check_room(f"the drafter's {longest} positions", longest, vocab_size)
        # Without a separator the drafter's last block is shown whole, and ends in masks.
        behind = 0 if self.sep_token_id is not None else (diffusion.block or 1) - 1
        num_masks = self.block + behind
        if diffusion.window is not None and num_masks > diffusion.window:
            warnings.warn(
                f"block: drafts of {self.block} tokens show up to {num_masks} masks, but this "
                f"drafter was trained on masked ends of up to {diffusion.window}; it will guess "
                f"later tokens badly. Give block at most {max(1, diffusion.window - behind)}.",
                stacklevel=2,
            )

    def _reader(self, draft: Network, context: Context) -> Network:
        return Network(draft.params, self.within_positions(draft.config, context))

    def _cache(self, draft: Network) -> str:
        diffusion = draft.config.masking
        return self.cache or ("prefix" if diffusion.block is None else "blocks")

    def _reading(self, draft: Network, cache: KVCache | None, context: Context) -> _Reading:
        """Returns the range of a pass: the tokens emitted since the last one, and the block.

        A step emits at most `depth` + 1 tokens, and steps without a draft at most `slack`.
        """
        diffusion = draft.config.masking
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
        """Returns sizes of passes, in positions, for a drafter causal over blocks of `own_block`.

        Smallest first; the last one is enough for any step. Most steps finish no block of the text
        or one, and more if rows continued without drafts.
        """
        behind = self.block + (self.sep_token_id is not None)
        news = self.depth + 1 + self.slack
        least = -(-(1 + behind) // own_block) * own_block
        most = -(-(own_block + news + behind) // own_block) * own_block
        return _doubled([least, min(least + own_block, most)], most)

    def _end(self, draft: Network, length: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the position after the canvas."""
        block = draft.config.masking.block
        if self.sep_token_id is not None:
            return length + self.block + 1
        if block is None:
            return length + self.block
        return -(-(length + self.block) // block) * block

    def _sees(
        self, draft: Network, positions: Int[Array, " size"], end: Int[Array, ""]
    ) -> Bool[Array, "size size"]:
        block = draft.config.masking.block
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
        """Returns the text, the drafted part of the block, masks, and the separator."""
        diffusion = draft.config.masking
        masked = jnp.where(positions < length, window, diffusion.mask_token_id)
        if self.steps > 1:
            place = positions - length
            own = jnp.take(drafted, place, mode="clip")
            masked = jnp.where((place >= 0) & (place < self.block), own, masked)
        if self.sep_token_id is not None:
            masked = jnp.where(positions == length + self.block, self.sep_token_id, masked)
        return masked.astype(jnp.int32)

    def _read_prefix(self, draft: Network, context: Context, bucket: int) -> tuple[LayerKV, ...]:
        """Returns keys and values of the prompt with a masked block after it, from one pass."""
        positions = jnp.arange(bucket + self.block + (self.sep_token_id is not None))
        window = jnp.take(context.tokens, positions, mode="clip")
        nothing = jnp.full(self.block, draft.config.masking.mask_token_id, jnp.int32)
        tokens = self._canvas(draft, window, positions, nothing, context.length)
        seen = self._sees(draft, positions, self._end(draft, context.length))
        hidden = self._reader(draft, context).forward(tokens, positions, seen, None)
        return _first_positions(settled(hidden), bucket)


def _doubled(sizes: list[int], most: int) -> tuple[int, ...]:
    """Returns the sizes, continued by doubling up to `most`."""
    while sizes[-1] < most:
        sizes = [*sizes, min(2 * sizes[-1], most)]
    return tuple(sorted(set(sizes)))


def _check_has_mask(network: Network) -> None:
    if network.config.diffusion is None:
        raise ValueError(
            "drafter: Deer needs a diffusion model, whose config.json has a mask_token_id; "
            "this one has no mask. If it is one in the layout of a causal model, give "
            'Deer.of(model, mask="[MASK]"); for causal models there is DraftModel.'
        )


def _token_id(model: "Model", name: str, token: str) -> int:
    found = None if model.tokenizer is None else model.tokenizer.token_id(token)
    if found is None:
        raise ValueError(
            f"{name}: {model.name} has no token {token!r} in its tokenizer; leave it out for a "
            "drafter that was trained without one."
        )
    return found


def _read_blocks(
    draft: Network,
    block: int,
    tokens: Int[Array, " bucket"],
    length: Int[Array, ""],
    chunk: int,
) -> tuple[LayerKV, ...]:
    """Returns keys and values of a prompt; only those of whole blocks have a meaning."""
    bucket = tokens.shape[0]
    largest = min(chunk, bucket)
    chunk = places_at_once(draft, largest)
    if chunk % block:
        chunk = largest
    if chunk % block or bucket % chunk:
        chunk = bucket

    def forward(tokens, positions, _, cache) -> Hidden:
        seen = masks.block_causal(tokens.shape[0], block)
        return draft.forward(tokens, positions, seen, cache)

    _, layers = in_chunks(forward, tokens, draft.empty_cache, chunk, length)
    return layers


def _first_positions(layers: tuple[LayerKV, ...], size: int) -> tuple[LayerKV, ...]:
    """Returns the first `size` positions of a pass; zeros after its last one."""

    def first(array: Array, axis: int) -> Array:
        found = jax.lax.slice_in_dim(array, 0, min(size, array.shape[axis]), axis=axis)
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, size - found.shape[axis])
        return jnp.pad(found, padding)

    return tuple(
        LayerKV(first(layer.keys, KEY_PLACES_AXIS), first(layer.values, VALUE_PLACES_AXIS))
        for layer in layers
    )
