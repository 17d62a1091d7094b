"""Block regeneration: a drafter alone extends a text, block after block.

DEER's qualitative claim (2512.15176, section 5.3): after its alignment the drafter goes on from a
partial text by itself, masking the next block again and again. Nothing verifies what it writes, so
this is a view of the drafter, not a way to decode.
"""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxspec.core.cache import pad_slots
from jaxspec.core.types import Context, Hidden, Params, Recent, Warp
from jaxspec.drafters import Deer, LoadedDrafter
from jaxspec.generation import GenerationConfig, PromptLike, encode_prompt, generate, score

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Regenerated:
    """A text that a drafter went on with.

    Attributes:
        prompt_tokens: what it went on from.
        tokens: what it wrote, up to and including a stop id.
        block: tokens that it wrote at a time.
        text: of `tokens`; `None` without a tokenizer.
        logprob: the target's mean log-probability of a token of them.
        target_logprob: the same of what the target writes itself, as many tokens at most, at the
            same temperature.
        target_tokens: those tokens.
    """

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    block: int
    text: str | None
    logprob: float
    target_logprob: float
    target_tokens: np.ndarray

    @property
    def blocks(self) -> list[np.ndarray]:
        """`tokens`, block by block; the last may have been cut."""
        return [self.tokens[i : i + self.block] for i in range(0, len(self.tokens), self.block)]


def regenerate(
    model: "Model",
    drafter: LoadedDrafter,
    prompt: PromptLike,
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Regenerated:
    """Lets a drafter extend a prompt by itself, and asks the target what it makes of it.

    Args:
        model: the target; it writes nothing of the text.
        drafter: of `Deer.of`; a chain.
        prompt: as for `generate`.
        max_new_tokens: rounded up to whole blocks.
        temperature: of the drafter, and of the target's own text beside it.
        seed: of sampling.

    Raises:
        ValueError: the drafter is none that can write alone, or the text does not fit.
    """
    method = drafter.drafter
    if not isinstance(method, Deer) or not method.is_chain or method.adaptive is not None:
        raise ValueError(
            "drafter: only a diffusion model that drafts chains of one length can write by itself: "
            f"Deer.of(model); got {method!r:.80}."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    num_blocks = -(-max_new_tokens // method.block)
    num_new = num_blocks * method.block
    config = GenerationConfig(max_new_tokens=num_new, temperature=temperature, logprobs=True)
    # Checks the prompt, too, and that drafter and target go together.
    generate(model, prompt, dataclasses.replace(config, max_new_tokens=1), drafter, seed)
    ids = encode_prompt(model, prompt)
    positions = min(model.config.max_positions, drafter.params.config.max_positions)
    if len(ids) + num_new > positions:
        raise ValueError(
            f"prompt: its {len(ids)} tokens and {num_new} new ones do not fit into "
            f"{positions} positions; shorten either."
        )
    (own,) = generate(model, prompt, config, seed=seed)
    bucket = -(-len(ids) // _BUCKET) * _BUCKET
    tokens = np.zeros(bucket, np.int32)
    tokens[: len(ids)] = ids
    warp = Warp() if temperature == 0 else Warp(temperature=jnp.float32(temperature))
    bias = np.zeros(model.vocab_size, np.float32)
    if model.tokenizer is not None:
        bias[model.tokenizer.vocab_size :] = -np.inf
    written = _write_blocks(
        drafter.params,
        jnp.asarray(tokens),
        jnp.int32(len(ids)),
        warp._replace(bias=jnp.asarray(bias)),
        jax.random.key(seed),
        drafter=method,
        num_blocks=num_blocks,
    )
    written = _up_to_stop(np.asarray(written), model.stop_token_ids)
    said = score(model, [*ids, *written.tolist()]).logprobs[len(ids) - 1 :]
    assert own.logprobs is not None
    return Regenerated(
        prompt_tokens=np.asarray(ids, np.int32),
        tokens=written,
        block=method.block,
        text=None if model.tokenizer is None else model.tokenizer.decode(written.tolist()),
        logprob=float(np.mean(said)),
        target_logprob=float(np.mean(own.logprobs)),
        target_tokens=own.tokens,
    )


@partial(jax.jit, static_argnames=("drafter", "num_blocks"))
def _write_blocks(
    network,
    tokens: Int[Array, " bucket"],
    length: Int[Array, ""],
    warp: Warp,
    key: PRNGKeyArray,
    *,
    drafter: Deer,
    num_blocks: int,
) -> Int[Array, " new"]:
    """Every block is drafted behind the ones before it, and taken as it is."""
    block, bucket = drafter.block, tokens.shape[0]
    slots = bucket + (num_blocks + 1) * block + 1
    nothing = jnp.zeros((block + 1, 0))
    context = Context(
        tokens=jnp.pad(tokens, (0, slots - bucket)),
        length=length,
        room=jnp.int32(block + 1),
        stop_ids=jnp.full(1, -1),
        warp=warp,
        cache=network.empty_cache(1),
        recent=Recent(jnp.zeros(block + 1, jnp.int32), nothing, nothing, jnp.int32(0)),
    )
    params = Params(network, network)
    prompt = Hidden(jnp.zeros((bucket, 0)), jnp.zeros((bucket, 0)), ())
    state = pad_slots(drafter.init(params, prompt, context), slots)

    def write(carry, key: PRNGKeyArray):
        context, state = carry
        proposal, state = drafter.propose(params, key, state, context)
        drafted = proposal.tokens[1:]
        text = jax.lax.dynamic_update_slice_in_dim(context.tokens, drafted, context.length, 0)
        return (context._replace(tokens=text, length=context.length + block), state), drafted

    _, drafted = jax.lax.scan(write, (context, state), jax.random.split(key, num_blocks))
    return drafted.reshape(-1)


def _up_to_stop(tokens: np.ndarray, stop_ids: tuple[int, ...]) -> np.ndarray:
    ends = np.flatnonzero(np.isin(tokens, stop_ids))
    return tokens[: ends[0] + 1] if ends.size else tokens
