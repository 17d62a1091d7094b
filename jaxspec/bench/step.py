"""What a speculative step costs beside the passes it is made of.

`python -m jaxspec.bench.step [--json]`: the time of a whole step over the time of its draft and
its target pass alone. The rest, which this measures, is verification, commit and bookkeeping.
"""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.bench.machine import this_machine
from jaxspec.bench.timing import time_in_turns
from jaxspec.checkpoint import Model, load
from jaxspec.core.cache import pad_slots
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
from jaxspec.drafters import DraftModel, Eagle, Eagle2, NoDraft, PromptLookup
from jaxspec.progress import progress_bar

SLOTS = 256
NUM_PROMPT_TOKENS = 64
PERIOD = 8
SMALL_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WARPS = {
    "greedy": Warp(),
    "temperature 1": Warp(temperature=jnp.ones(1)),
    "top-p 0.95": Warp(temperature=jnp.ones(1), top_p=jnp.full(1, 0.95)),
}
AIMS = {"greedy": 1.12, "temperature 1": 1.2, "top-p 0.95": 1.2}


class StepCost(NamedTuple):
    """One drafter and one way of sampling; all times in seconds per step.

    target: passes of the widths that the steps really had, weighted by how often.
    width: mean tokens in a target pass.
    aim: the largest ratio to be content with.
    """

    drafter: str
    sampling: str
    step: float
    draft: float
    target: float
    width: float
    aim: float

    @property
    def ratio(self) -> float:
        return self.step / (self.draft + self.target)


def measure_steps(
    model: Model, draft: Model, num_steps: int = 24, repeats: int = 15
) -> list[StepCost]:
    """Measures one row of every drafter with every way of sampling.

    Every program is a jitted loop of `num_steps` over public functions of `core`, run in turns.
    """
    drafters = {
        "plain": (NoDraft(), ()),
        "lookup": (PromptLookup(), ()),
        "draft chain": (DraftModel(), draft.network),
        "draft tree": (DraftModel(paths=SMALL_TREE), draft.network),
    }
    costs = []
    with progress_bar(len(drafters) * len(WARPS)) as advance:
        for name, (drafter, draft_params) in drafters.items():
            params = Params(model.network, draft_params)
            for sampling, warp in WARPS.items():
                advance(f"{name}, {sampling}")
                times = measure_drafter(params, drafter, warp, num_steps, repeats)
                costs.append(StepCost(name, sampling, *times, aim=AIMS[sampling]))
    return costs


class StepTimes(NamedTuple):
    """The measured part of a `StepCost`."""

    step: float
    draft: float
    target: float
    width: float


def measure_drafter(
    params: Params, drafter: Drafter, warp: Warp, num_steps: int = 24, repeats: int = 15
) -> StepTimes:
    """Times the steps of one row that decodes a repetitive prompt."""
    prompts = repetitive_prompt(params.target.vocab_size)
    states, proposals = begin_and_propose(params, prompts, drafter=drafter)
    states = states._replace(context=states.context._replace(warp=warp))
    return measure_step(params, states, proposals, drafter, num_steps, repeats)


def measure_tree_building(
    params: Params, drafter: Eagle2, num_steps: int = 24, repeats: int = 15
) -> float:
    """Seconds per step that `drafter` takes to choose its tree, which is so at any temperature.

    That is: what its drafts take longer than greedy drafts over a static tree with the same passes
    of the head, run in turns.
    """
    prompts = repetitive_prompt(params.target.vocab_size)
    drafts = {}
    for name, method in (("dynamic", drafter), ("static", same_passes(drafter))):
        states, _ = begin_and_propose(params, prompts, drafter=method)
        drafting = repeat_drafting(states, num_steps)
        drafts[name] = partial(draft_loop, params, states.draft, drafting, drafter=method)
    times = time_in_turns(drafts, repeats)
    return float(np.median(times["dynamic"] - times["static"])) / num_steps


def same_passes(drafter: Eagle2) -> Eagle:
    """A static tree whose draft passes have as many nodes: chains below the likeliest tokens."""
    levels = range(drafter.depth + 1)
    paths = [(rank, *[0] * level) for level in levels for rank in range(drafter.beam)]
    return Eagle(tuple(paths), drafter.taps, drafter.chunk)


def measure_step(
    params: Params,
    states: DecodeState,
    proposals: Proposal,
    drafter: Drafter,
    num_steps: int,
    repeats: int,
) -> StepTimes:
    """Times a step, its draft alone, and target passes alone, from the same states."""
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


def repetitive_prompt(vocab_size: int) -> Prompt:
    """One row of a few tokens again and again, so that lookup has something to find."""
    period = np.random.default_rng(0).integers(min(300, vocab_size), size=PERIOD)
    tokens = np.tile(period, NUM_PROMPT_TOKENS // PERIOD).astype(np.int32)
    return Prompt(
        tokens=jnp.asarray(tokens[None]),
        length=jnp.full(1, NUM_PROMPT_TOKENS, jnp.int32),
        room=jnp.full(1, SLOTS, jnp.int32),
        seed=jnp.zeros((1, 1), jnp.int32),
        stop_ids=jnp.full((1, 1), -1, jnp.int32),
        warp=Warp(),
    )


@partial(jax.jit, static_argnames=("drafter", "slots"))
def begin_and_propose(
    params: Params, prompts: Prompt, *, drafter: Drafter, slots: int = SLOTS
) -> tuple[DecodeState, Proposal]:
    """States after prefill, and what the drafter would propose there when decoding greedily."""
    row = partial(begin, drafter=drafter, text_slots=slots, chunk=NUM_PROMPT_TOKENS)
    states = pad_slots(jax.vmap(row, in_axes=(None, 0))(params, prompts), slots)
    return states, _propose(params, states, drafter)[0]


def _propose(params: Params, states: DecodeState, drafter: Drafter) -> tuple[Proposal, PyTree]:
    return jax.vmap(partial(drafter.propose, params))(states.key, states.draft, states.context)


def widths_used(drafted: np.ndarray, drafter: Drafter) -> Mapping[int, float]:
    """Share of steps by width of their target pass, from how deep each step drafted."""
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
    """Whole steps, one after the other."""

    def advance(_, states: DecodeState) -> DecodeState:
        return speculative_step(params, states, drafter=drafter)[0]

    return jax.lax.fori_loop(0, num_steps, advance, states)


class Drafting(NamedTuple):
    """What drafters were given in each of some steps.

    key: by step.
    context: by step, without the text and the cached keys and values: those of every step are the
        beginning of what the last one has.
    tokens, layers: the last step's.
    """

    key: PRNGKeyArray
    context: Context
    tokens: Int[Array, "rows slots"]
    layers: tuple[LayerKV, ...]


def _light(states: DecodeState) -> tuple[PRNGKeyArray, Context]:
    context = states.context
    return states.key, context._replace(tokens=(), cache=context.cache.length)


@partial(jax.jit, static_argnames=("drafter", "num_steps"))
def record_drafting(
    params: Params, states: DecodeState, *, drafter: Drafter, num_steps: int
) -> tuple[DecodeState, Drafting]:
    """Decodes some steps, and keeps what each one's draft began with."""

    def advance(states: DecodeState, _):
        return speculative_step(params, states, drafter=drafter)[0], _light(states)

    last, (key, context) = jax.lax.scan(advance, states, None, length=num_steps)
    return last, Drafting(key, context, last.context.tokens, last.context.cache.layers)


def repeat_drafting(states: DecodeState, num_steps: int) -> Drafting:
    """The same beginning, again and again."""
    key, context = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_steps, *leaf.shape)), _light(states)
    )
    return Drafting(key, context, states.context.tokens, states.context.cache.layers)


@partial(jax.jit, static_argnames="drafter")
def draft_loop(
    params: Params, draft: PyTree, drafting: Drafting, *, drafter: Drafter
) -> tuple[PyTree, Proposal]:
    """Proposals alone, from the drafter's state before the first of them.

    All of a proposal is kept, its tree too: what nobody reads is not computed.
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
    """Target passes alone, logits and new keys and values included. Each waits for the last."""
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


def as_table(costs: list[StepCost]) -> Table:
    """Times in milliseconds; a ratio above its aim is marked."""
    table = Table(
        title="A step over its draft and target pass alone",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("drafter", "sampling"):
        table.add_column(column)
    for column in ("step ms", "draft ms", "target ms", "width", "ratio", "aim"):
        table.add_column(column, justify="right")
    for cost in costs:
        table.add_row(
            cost.drafter,
            cost.sampling,
            *(f"{seconds * 1e3:.3f}" for seconds in (cost.step, cost.draft, cost.target)),
            f"{cost.width:.1f}",
            f"{cost.ratio:.3f}" + (" !" if cost.ratio > cost.aim else ""),
            f"{cost.aim:.2f}",
        )
    return table


def as_dict(costs: list[StepCost]) -> list[dict[str, Any]]:
    return [{**cost._asdict(), "ratio": cost.ratio} for cost in costs]


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser("python -m jaxspec.bench.step", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo-draft")
    parser.add_argument("--steps", type=int, default=24, help="per timed loop")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    machine = this_machine()
    costs = measure_steps(load(args.model), load(args.draft_model), args.steps, args.repeats)
    if args.json:
        print(json.dumps({"machine": machine._asdict(), "steps": as_dict(costs)}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(f"{args.model} on {machine}")
        console.print(as_table(costs))


if __name__ == "__main__":
    main()
