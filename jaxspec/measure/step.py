"""Times of a speculative step and of the passes it is made of.

The difference between a whole step and its draft and target pass alone is verification, commit and
bookkeeping.
"""

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxspec.checkpoint import Model
from jaxspec.core.cache import pad_caches
from jaxspec.core.decode import Prompt, begin, narrow, speculative_step
from jaxspec.core.types import (
    Context,
    DecodeState,
    Drafter,
    KVCache,
    LayerKV,
    Params,
    Proposal,
    PyTree,
    Warp,
)
from jaxspec.decoding.request import GenerationConfig, prepare
from jaxspec.drafters import DrafterLike, NoDraft, loaded_drafter
from jaxspec.measure.figures import PLAIN
from jaxspec.measure.timing import release_programs, time_in_turns
from jaxspec.progress import progress_bar

CAPACITY = 256
NUM_PROMPT_TOKENS = 64
PERIOD = 8


class StepTimes(NamedTuple):
    """Seconds of a step and of its parts, run alone.

    Attributes:
        step: a whole step.
        draft: its draft.
        target: its target pass, a mean over the widths of the steps.
        width: mean tokens in a target pass.
    """

    step: float
    draft: float
    target: float
    width: float

    def as_dict(self) -> dict[str, float]:
        """Returns all figures, ready for JSON.

        Example:
            >>> StepTimes(step=0.4, draft=0.1, target=0.2, width=4.0).as_dict()["step_seconds"]
            0.4
        """
        seconds = {f"{name}_seconds": getattr(self, name) for name in ("draft", "target", "step")}
        return {"tokens_in_target_pass": self.width, **seconds}


def measure_drafter(
    params: Params, drafter: Drafter, warp: Warp, num_steps: int = 24, repeats: int = 15
) -> StepTimes:
    """Times steps of one row that decodes a repetitive prompt, drafts alone, and passes alone.

    Args:
        params: weights of target and drafter.
        drafter: the method.
        warp: sampling parameters of the row.
        num_steps: steps of one timed loop.
        repeats: timed loops.

    Example:
        >>> import jaxspec
        >>> params = Params(jaxspec.load("demo-draft").network, ())
        >>> times = measure_drafter(params, NoDraft(), Warp(), num_steps=1, repeats=1)
        >>> times.width
        1.0
    """
    prompts = repetitive_prompt(params.target.vocab_size)
    states, proposals = begin_and_propose(params, prompts, drafter=drafter)
    states = states._replace(context=states.context._replace(warp=warp))
    loops = {"num_steps": num_steps, "drafter": drafter}
    last, drafting = record_drafting(params, states, **loops)
    used = widths_used(np.asarray(last.stats.drafted[0]), drafter)
    programs = {
        "step": partial(step_loop, params, states, **loops),
        "draft": partial(draft_loop, params, states.draft, drafting, drafter=drafter),
    }
    for width in used:
        programs[f"target {width}"] = partial(
            target_loop, params, states.context.cache, proposals, width=width, **loops
        )
    medians = {
        name: float(np.median(seconds)) / num_steps
        for name, seconds in time_in_turns(programs, repeats).items()
    }
    return StepTimes(
        step=medians["step"],
        draft=medians["draft"],
        target=sum(share * medians[f"target {width}"] for width, share in used.items()),
        width=sum(share * width for width, share in used.items()),
    )


def time_steps(
    model: Model,
    drafters: Mapping[str, DrafterLike],
    config: GenerationConfig,
    repeats: int,
    progress: bool = True,
) -> dict[str, StepTimes]:
    """Times the steps of plain decoding and of every method.

    They decode a text that repeats a few ids, not prompts; see `measure_drafter`.

    Args:
        model: the target.
        drafters: methods by name.
        config: settings of sampling.
        repeats: timed loops of each, at least five.
        progress: show a bar where standard error is a terminal.
    """
    warp = prepare(model, [0], config, None, 0).prompts.warp
    methods = {PLAIN: NoDraft(), **drafters}
    steps = {}
    with progress_bar(len(methods), progress) as advance:
        for name, method in methods.items():
            advance(f"timing steps of {name}")
            release_programs()
            loaded = loaded_drafter(method)
            params = Params(model.network, loaded.params)
            steps[name] = measure_drafter(params, loaded.drafter, warp, repeats=max(5, repeats))
    return steps


def repetitive_prompt(vocab_size: int) -> Prompt:
    """Returns one row that repeats a few tokens, so that lookup has something to find.

    Example:
        >>> repetitive_prompt(4096).tokens.shape
        (1, 64)
    """
    period = np.random.default_rng(0).integers(min(300, vocab_size), size=PERIOD)
    tokens = np.tile(period, NUM_PROMPT_TOKENS // PERIOD).astype(np.int32)
    return Prompt(
        tokens=jnp.asarray(tokens[None]),
        length=jnp.full(1, NUM_PROMPT_TOKENS, jnp.int32),
        room=jnp.full(1, CAPACITY, jnp.int32),
        seed=jnp.zeros((1, 1), jnp.int32),
        stop_ids=jnp.full((1, 1), -1, jnp.int32),
        warp=Warp(),
    )


@partial(jax.jit, static_argnames=("drafter", "capacity"))
def begin_and_propose(
    params: Params, prompts: Prompt, *, drafter: Drafter, capacity: int = CAPACITY
) -> tuple[DecodeState, Proposal]:
    """Returns states after prefill, and the drafter's greedy proposals there."""
    row = partial(begin, drafter=drafter, text_capacity=capacity, chunk=NUM_PROMPT_TOKENS)
    states = pad_caches(jax.vmap(row, in_axes=(None, 0))(params, prompts), capacity)
    propose = jax.vmap(partial(drafter.propose, params))
    return states, propose(states.key, states.draft, states.context)[0]


def widths_used(drafted: np.ndarray, drafter: Drafter) -> Mapping[int, float]:
    """Returns the share of steps by width of their target pass.

    Args:
        drafted: entry i: steps whose draft was i tokens deep.
        drafter: the method.

    Example:
        >>> widths_used(np.asarray([10]), NoDraft())
        {1: 1.0}
    """
    if len(drafter.widths) == 1:
        return {drafter.widths[0]: 1.0}
    widths = [min(w for w in drafter.widths if w > depth) for depth in range(len(drafted))]
    total = drafted.sum()
    return {
        width: float(sum(n for n, w in zip(drafted, widths, strict=True) if w == width) / total)
        for width in sorted({w for n, w in zip(drafted, widths, strict=True) if n})
    }


@partial(jax.jit, static_argnames=("drafter", "num_steps"))
def step_loop(
    params: Params, states: DecodeState, *, drafter: Drafter, num_steps: int
) -> DecodeState:
    """Runs whole steps, one after the other."""

    def advance(_, states: DecodeState) -> DecodeState:
        return speculative_step(params, states, drafter=drafter)[0]

    return jax.lax.fori_loop(0, num_steps, advance, states)


class Drafting(NamedTuple):
    """Inputs of drafters in each of some steps.

    Attributes:
        key: random keys, by step.
        context: contexts, by step, without text and cached keys and values: those of every step
            are the beginning of the last one's.
        tokens: the last step's text.
        layers: the last step's cached keys and values.
    """

    key: PRNGKeyArray
    context: Context
    tokens: Int[Array, "rows places"]
    layers: tuple[LayerKV, ...]


def _light(states: DecodeState) -> tuple[PRNGKeyArray, Context]:
    context = states.context
    return states.key, context._replace(tokens=(), cache=context.cache.length)


@partial(jax.jit, static_argnames=("drafter", "num_steps"))
def record_drafting(
    params: Params, states: DecodeState, *, drafter: Drafter, num_steps: int
) -> tuple[DecodeState, Drafting]:
    """Decodes some steps, and keeps the inputs of each draft."""

    def advance(states: DecodeState, _):
        return speculative_step(params, states, drafter=drafter)[0], _light(states)

    last, (key, context) = jax.lax.scan(advance, states, None, length=num_steps)
    return last, Drafting(key, context, last.context.tokens, last.context.cache.layers)


def repeat_drafting(states: DecodeState, num_steps: int) -> Drafting:
    """Returns the same inputs for every step."""
    key, context = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_steps, *leaf.shape)), _light(states)
    )
    return Drafting(key, context, states.context.tokens, states.context.cache.layers)


@partial(jax.jit, static_argnames="drafter")
def draft_loop(
    params: Params, draft: PyTree, drafting: Drafting, *, drafter: Drafter
) -> tuple[PyTree, Proposal]:
    """Runs proposals alone, from the drafter's state before the first of them.

    All of a proposal is kept, its tree too: a value that is not read would not be computed.
    """

    def advance(index, carry) -> tuple[PyTree, Proposal]:
        draft, _ = carry
        key, context = jax.tree.map(itemgetter(index), (drafting.key, drafting.context))
        context = context._replace(
            tokens=drafting.tokens, cache=KVCache(drafting.layers, context.cache)
        )
        proposals, draft = jax.vmap(partial(drafter.propose, params))(key, draft, context)
        return draft, proposals

    return jax.lax.fori_loop(1, len(drafting.key), advance, advance(0, (draft, None)))


@partial(jax.jit, static_argnames=("drafter", "width", "num_steps"))
def target_loop(
    params: Params,
    caches: KVCache,
    proposals: Proposal,
    *,
    drafter: Drafter,
    width: int,
    num_steps: int,
) -> PyTree:
    """Runs target passes alone, logits and new keys and values included, one after the other."""
    target = params.target

    def one_row(tokens, proposal: Proposal, cache: KVCache):
        proposal = narrow(proposal, width)
        hidden = target.forward(
            tokens,
            cache.length + proposal.tree.depths,
            proposal.tree.ancestors & proposal.valid[None],
            cache,
            taps=drafter.taps,
        )
        return target.unembed(hidden.features), hidden.new_kv

    def advance(_, carry):
        logits, _ = carry
        # Nothing is NaN, so the tokens stay what they are; the compiler cannot know.
        tokens = proposals.tokens[:, :width] + jnp.isnan(logits[:, :, 0])
        return jax.vmap(one_row)(tokens, proposals, caches)

    start = jax.vmap(one_row)(proposals.tokens[:, :width], proposals, caches)
    return jax.lax.fori_loop(1, num_steps, advance, start)
