"""Measurement of a latency profile: times of target and draft passes on this machine."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxspec.checkpoint import Model
from jaxspec.core.checks import (
    MOST_NODES,
    Checked,
    Count,
    Natural,
    Nodes,
    at_least,
    at_most,
    checks_arguments,
)
from jaxspec.core.proposal import tree_proposal
from jaxspec.core.tree import Path, chain_paths, tree_from_parents
from jaxspec.core.types import Params, PyTree, Tree
from jaxspec.drafters import LoadedDrafter
from jaxspec.drafters.block import BlockSettings
from jaxspec.drafters.wrapped import Wrapped
from jaxspec.measure.machine import this_machine
from jaxspec.measure.step import (
    CAPACITY,
    NUM_PROMPT_TOKENS,
    begin_and_propose,
    draft_loop,
    repeat_drafting,
    repetitive_prompt,
    step_loop,
)
from jaxspec.measure.timing import time_in_turns
from jaxspec.tuning.latency import LatencyProfile, Timing
from jaxspec.tuning.measuring import with_tree

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 26, 32, 48, 64)
BATCHES = (1, 2, 3, 4, 6, 8)
LEVELS = (1, 4, 8)
_DEPTH = 5
_Tokens = Annotated[int, at_least(1), at_most(MOST_NODES + 1)]
# The tree that is drafted has two levels of as many nodes.
_Batch = Annotated[int, at_least(1), at_most(MOST_NODES // 2)]


@dataclasses.dataclass(frozen=True)
class RejectedTree(Checked):
    """A drafter whose every node holds a token that the target almost never emits.

    Each step verifies `num_tokens` tokens and emits one, at no cost of drafting.

    Attributes:
        num_tokens: tokens of the target pass, the root included.
        taps: target layers to read: those of the drafter that the profile is for.
    """

    num_tokens: _Tokens
    taps: tuple[Natural, ...] = ()

    @cached_property
    def tree(self) -> Tree:
        """A path as deep as drafts usually are, and all other nodes below the root."""
        path = range(-1, min(self.num_tokens - 1, _DEPTH))
        return tree_from_parents([*path, *[0] * (self.num_tokens - len(path))])

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes, levels = self.tree.paths.shape
        return nodes, levels - 1

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_tokens,)

    def init(self, params, prompt, context) -> tuple[()]:
        del params, prompt, context
        return ()

    def propose(self, params, key, state, context):
        del key
        root = context.tokens[context.length - 1]
        wrong = (root + 1) % params.target.vocab_size
        tokens = jnp.full(self.num_tokens, wrong).at[0].set(root)
        return tree_proposal(self.tree, tokens, jnp.ones(self.num_tokens, bool)), state


@dataclasses.dataclass(frozen=True)
class _WithLevels(Wrapped):
    """A drafter that is passed as many emitted tokens as if its tree had `levels` levels.

    Attributes:
        levels: levels below the root.
    """

    levels: int

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.drafter.tree_shape[0], self.levels


@checks_arguments
def measure_profile(
    model: Model,
    drafter: LoadedDrafter,
    *,
    tokens: Sequence[_Tokens] = TOKENS,
    batches: Sequence[_Batch] = BATCHES,
    levels: Sequence[Nodes] = LEVELS,
    capacity: Count = CAPACITY,
    num_steps: Count = 64,
    repeats: Count = 9,
    name: str = "",
    advance: Callable[[str], None] = lambda _: None,
) -> LatencyProfile:
    """Times target and draft passes of one row on this machine, as decoding runs them.

    A target time is the time of a whole step that verifies that many tokens, with its bookkeeping
    and without its draft. A draft time is the time that a level of that many nodes adds to a draft.
    The first draft pass (the root's) is timed separately, by the levels of the tree: it also reads
    the tokens that the last step emitted, and it has the width of the longest such text.

    Args:
        model: the target.
        drafter: a drafter over any static tree; its own tree is not used.
        tokens: sizes of the target passes, roots included.
        batches: nodes of the draft passes; a drafter of blocks has only a first one.
        levels: levels of the trees whose first draft pass is timed; for a drafter of blocks, those
            within its block.
        capacity: tokens that the caches hold. Passes read whole caches, so give the length of a
            prompt and its output together; at least 64 plus `num_steps`.
        num_steps: steps of each timed loop. Many of them hide the time of entering the loop.
        repeats: timed runs of each loop, for medians and quartiles.
        name: name of the profile; empty: the model's name and the device.
        advance: called once per program, with a description of the work.

    Raises:
        ValueError: the drafter has no static tree, `capacity` is too small for the loops, times are
            too noisy to tell apart, or an argument is of another type or out of range.
    """
    if capacity < NUM_PROMPT_TOKENS + num_steps:
        raise ValueError(
            f"capacity must hold the {NUM_PROMPT_TOKENS} tokens of a prompt and num_steps, "
            f"{NUM_PROMPT_TOKENS + num_steps}, got {capacity}."
        )
    prompts = repetitive_prompt(model.vocab_size)
    targets, drafts, firsts = {}, {}, {}

    def drafting(paths: Sequence[Path], levels: int) -> Callable[[], PyTree]:
        method = _WithLevels(with_tree(drafter, paths).drafter, levels)
        params = Params(model.network, drafter.params)
        states, _ = begin_and_propose(params, prompts, drafter=method, capacity=capacity)
        drafting = repeat_drafting(states, num_steps)
        return partial(draft_loop, params, states.draft, drafting, drafter=method)

    for size in sorted({1, *tokens}):
        advance(f"target pass of {size}")
        rejected = RejectedTree(size, drafter.drafter.taps)
        params = Params(model.network, ())
        states, _ = begin_and_propose(params, prompts, drafter=rejected, capacity=capacity)
        loop = partial(step_loop, params, states, drafter=rejected, num_steps=num_steps)
        reached = int(loop().context.length[0])
        if reached + size > capacity:
            raise ValueError(
                f"capacity must hold the text of every loop, got {capacity}: that of the loop over "
                f"{size} tokens a pass has grown to {reached}; ask for more, or for fewer steps."
            )
        targets[str(size)] = loop
    one_pass = isinstance(drafter.drafter, BlockSettings)
    if isinstance(drafter.drafter, BlockSettings):
        batches = ()
        levels = [count for count in levels if count <= drafter.drafter.block]
    for size in () if one_pass else sorted({1, *batches}):
        roots, below = _draft_probe(size)
        for part, paths in (("before", roots), ("with", (*roots, *below))):
            advance(f"draft {part} a pass of {size}")
            drafts[f"{part} {size}"] = drafting(paths, levels=2)
    for count in sorted({1, *levels}):
        advance(f"first draft pass of {count} levels")
        # For a drafter of blocks it reads as many tokens as its own tree may have emitted.
        paths = chain_paths(count) if one_pass else _draft_probe(1)[0]
        firsts[str(count)] = drafting(paths, count)
    advance("timing target passes")
    target = _timings("target", time_in_turns(targets, repeats), num_steps)
    advance("timing draft passes")
    runs = time_in_turns({**drafts, **{f"first {n}": loop for n, loop in firsts.items()}}, repeats)
    if one_pass:
        each = {"1": runs["first 1"]}
    else:
        each = {str(n): runs[f"with {n}"] - runs[f"before {n}"] for n in sorted({1, *batches})}
    draft = _timings("draft", each, num_steps)
    machine = this_machine()
    return LatencyProfile(
        name=name or f"{model.name} on {machine.device}",
        model=model.name,
        target=target,
        draft=draft,
        first_draft=_timings("first_draft", {n: runs[f"first {n}"] for n in firsts}, num_steps),
        device=str(machine),
        runtime=f"jax {machine.jax}",
        dtype=str(model.dtype),
        source=(
            f"measured with {model.name} and {type(drafter.drafter).__name__}, one row, greedy: "
            f"capacity {capacity}: medians of {repeats} loops of {num_steps} steps, run in turns"
            + ("; THE MACHINE WAS BUSY" if machine.busy else "")
        ),
        one_pass=one_pass,
    )


def _draft_probe(size: int) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the first level of a tree, and a second one below `size` nodes: one more draft pass.

    The root has at least two children, because picking several tokens sorts them.
    """
    roots = tuple((rank,) for rank in range(max(2, size)))
    return roots, tuple((rank, 0) for rank in range(size))


def _timings(
    field: str, seconds: dict[str, Float[np.ndarray, " repeats"]], num_steps: int
) -> tuple[Timing, ...]:
    timings = []
    for size, runs in seconds.items():
        low, middle, high = np.quantile(runs / num_steps, [0.25, 0.5, 0.75])
        if middle <= 0:
            raise ValueError(
                f"{field}: a pass of {size} cannot be told from noise ({1e3 * middle:.3f} +- "
                f"{1e3 * (high - low) / 2:.3f} ms); measure with more repeats, on an idle machine."
            )
        timings.append(Timing(int(size), float(middle), float(high - low) / 2))
    return tuple(timings)
