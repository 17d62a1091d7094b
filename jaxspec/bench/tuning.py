"""What the choice of a tree needs of a machine and a drafter: pass times, acceptance, speed."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxspec.bench.machine import this_machine
from jaxspec.bench.step import (
    NUM_PROMPT_TOKENS,
    SLOTS,
    begin_and_propose,
    draft_loop,
    repeat_drafting,
    repetitive_prompt,
    step_loop,
)
from jaxspec.bench.timing import release_programs, time_in_turns
from jaxspec.checkpoint import Model
from jaxspec.core.proposal import tree_proposal
from jaxspec.core.tree import Path, normalize_paths, tree_from_parents
from jaxspec.core.types import Drafter, Params, Proposal, PyTree, Tree
from jaxspec.drafters import LoadedDrafter
from jaxspec.drafters.block import BlockSettings
from jaxspec.generation import GenerationConfig, PromptLike, Request, generate, prepare
from jaxspec.trees import (
    AcceptanceTable,
    Candidate,
    LatencyProfile,
    Timing,
    count_acceptance,
    identity_of,
    probe_paths,
)

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 26, 32, 48, 64)
BATCHES = (1, 2, 3, 4, 6, 8)
LEVELS = (1, 4, 8)
_DEPTH = 5


@dataclasses.dataclass(frozen=True)
class Decoy:
    """Offers at every node of a tree what the target hardly ever says: a step without a draft.

    So texts grow by one token a step, whatever is verified.

    Attributes:
        num_tokens: in the target pass, the root included.
        taps: target layers to read, as the drafter does that the pass stands for.
    """

    num_tokens: int
    taps: tuple[int, ...] = ()

    @cached_property
    def tree(self) -> Tree:
        """A path as deep as drafts usually are, and all further nodes below the root."""
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
class _HandedMore:
    """A drafter that is handed as many emitted tokens as one whose tree has `levels` levels."""

    drafter: Drafter
    levels: int

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.drafter.tree_shape[0], self.levels

    @property
    def widths(self) -> tuple[int, ...]:
        return self.drafter.widths

    def init(self, params, prompt, context) -> PyTree:
        return self.drafter.init(params, prompt, context)

    def propose(self, params, key, state, context) -> tuple[Proposal, PyTree]:
        return self.drafter.propose(params, key, state, context)


def measure_profile(
    model: Model,
    drafter: LoadedDrafter,
    *,
    tokens: Sequence[int] = TOKENS,
    batches: Sequence[int] = BATCHES,
    levels: Sequence[int] = LEVELS,
    slots: int = SLOTS,
    num_steps: int = 64,
    repeats: int = 9,
    name: str = "",
    advance: Callable[[str], None] = lambda _: None,
) -> LatencyProfile:
    """Times target and draft passes of one row on this machine, as decoding runs them.

    A target time is that of a whole step that verifies so many tokens, its bookkeeping included
    and its draft left out. A draft time is what a level of so many nodes adds to a draft. The first
    draft pass, the root's, is timed apart, by the levels of the tree: it also reads what the last
    step emitted, and is as wide as the longest that can be.

    Args:
        model: the target.
        drafter: over any static tree; its own is not used.
        tokens: of the target passes, roots included.
        batches: nodes of the draft passes; a block drafter has none but the first.
        levels: of the trees whose first draft pass is timed; of a block drafter those that its
            block reaches.
        slots: of the caches. Passes read all of them, so ask for as many as prompts and outputs
            will take together, at least 64 and `num_steps`.
        num_steps: in each timed loop; entering one takes time as well, so let them be many.
        repeats: timed runs of each; medians and quartiles are over these.
        name: of the profile.
        advance: called with what is being prepared, once per program.

    Raises:
        ValueError: for a drafter that has no static tree, no levels, slots too few for the loops,
            or times too noisy to tell apart.
    """
    if slots < NUM_PROMPT_TOKENS + num_steps:
        raise ValueError(
            f"slots must hold the {NUM_PROMPT_TOKENS} tokens of a prompt and num_steps, "
            f"{NUM_PROMPT_TOKENS + num_steps}, got {slots}."
        )
    prompts = repetitive_prompt(model.vocab_size)
    targets, drafts, firsts = {}, {}, {}

    def drafting(paths: Sequence[Path], levels: int) -> Callable[[], PyTree]:
        method = _HandedMore(with_tree(drafter, paths).drafter, levels)
        params = Params(model.network, drafter.params)
        states, _ = begin_and_propose(params, prompts, drafter=method, slots=slots)
        drafting = repeat_drafting(states, num_steps)
        return partial(draft_loop, params, states.draft, drafting, drafter=method)

    for size in sorted({1, *tokens}):
        advance(f"target pass of {size}")
        decoy = Decoy(size, drafter.drafter.taps)
        params = Params(model.network, ())
        states, _ = begin_and_propose(params, prompts, drafter=decoy, slots=slots)
        loop = partial(step_loop, params, states, drafter=decoy, num_steps=num_steps)
        reached = int(loop().context.length[0])
        if reached + size > slots:
            raise ValueError(
                f"slots must hold the text of every loop, got {slots}: that of the loop over "
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
        # Of a block drafter it reads as much as its own tree may have emitted.
        chain_of = tuple((0,) * depth for depth in range(1, count + 1))
        firsts[str(count)] = drafting(chain_of if one_pass else _draft_probe(1)[0], count)
    advance("timing target passes")
    target = _timings(time_in_turns(targets, repeats), num_steps)
    advance("timing draft passes")
    runs = time_in_turns({**drafts, **{f"first {n}": loop for n, loop in firsts.items()}}, repeats)
    if one_pass:
        each = {"1": runs["first 1"]}
    else:
        each = {str(n): runs[f"with {n}"] - runs[f"before {n}"] for n in sorted({1, *batches})}
    draft = _timings(each, num_steps)
    for size, seconds, spread in draft:
        if seconds <= 0:
            raise ValueError(
                f"draft: a pass of {size} nodes cannot be told from noise ({1e3 * seconds:.3f} +- "
                f"{1e3 * (spread or 0):.3f} ms); measure with more repeats, on an idle machine."
            )
    machine = this_machine()
    return LatencyProfile(
        name=name or f"{model.name} on {machine.device}",
        target=target,
        draft=draft,
        first_draft=_timings({n: runs[f"first {n}"] for n in firsts}, num_steps),
        device=str(machine),
        runtime=f"jax {machine.jax}",
        dtype=str(model.network.dtype),
        source=(
            f"measured with {model.name} and {type(drafter.drafter).__name__}, one row, greedy: "
            f"{slots} slots: medians of {repeats} loops of {num_steps} steps, run in turns"
            + ("; THE MACHINE WAS BUSY" if machine.busy else "")
        ),
        one_pass=one_pass,
    )


def _draft_probe(size: int) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The first level of a tree, and a second one below `size` of its nodes: one more draft pass.

    The root has two children at least, as of several tokens the likeliest are sorted out.
    """
    roots = tuple((rank,) for rank in range(max(2, size)))
    return roots, tuple((rank, 0) for rank in range(size))


def _timings(
    seconds: dict[str, Float[np.ndarray, " repeats"]], num_steps: int
) -> tuple[Timing, ...]:
    timings = []
    for size, runs in seconds.items():
        low, middle, high = np.quantile(runs / num_steps, [0.25, 0.5, 0.75])
        timings.append(Timing(int(size), float(middle), float(high - low) / 2))
    return tuple(timings)


def with_tree(drafter: LoadedDrafter, paths: Sequence[Path]) -> LoadedDrafter:
    """The same drafter over another static tree.

    Raises:
        ValueError: it does not draft over a static tree.
    """
    method: Drafter = drafter.drafter
    if not dataclasses.is_dataclass(method) or not hasattr(method, "paths"):
        raise ValueError(
            "drafter: must draft over a static tree (Eagle, DraftModel, Deer, DFlash), got "
            f"{type(method).__name__}."
        )
    tree = {"paths": normalize_paths(paths)}
    return drafter._replace(drafter=dataclasses.replace(method, **tree))


def measure_acceptance(
    model: Model,
    drafter: LoadedDrafter,
    prompts: Sequence[PromptLike],
    config: GenerationConfig | None = None,
    *,
    paths: Sequence[Path] | None = None,
    seed: int = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> AcceptanceTable:
    """Decodes prompts with a wide tree and counts which of its nodes are accepted.

    Tune on text that is not evaluated on: held-out rows of training sets.

    Args:
        model: the target.
        drafter: over any static tree; its own is not used.
        prompts: as for `generate`.
        config: how to decode; acceptance belongs to it too.
        paths: of the probing tree; `None`: `probe_paths()`.
        seed: of sampling.
        advance: called once per prompt.

    Raises:
        ValueError: for a drafter that has no static tree, or if nothing was drafted.
    """
    paths = probe_paths() if paths is None else paths
    probing = with_tree(drafter, paths)
    steps, num_tokens = [], 0
    for prompt in prompts:
        advance("counting accepted drafts")
        (row,) = generate(model, prompt, config, probing, seed, return_trace=True)
        steps += row.trace or ()
        num_tokens += len(row.tokens)
    return AcceptanceTable.from_counts(
        count_acceptance(steps),
        head=identity_of(drafter.params),
        source=(
            f"measured with {model.name}: {len(steps)} steps, {num_tokens} tokens, "
            f"{len(prompts)} prompts, temperature {(config or GenerationConfig()).temperature}, "
            f"a probing tree of {len(paths)} nodes"
        ),
    )


class MeasuredTree(NamedTuple):
    """A tree's speed while decoding, prefill and compilation left out.

    tau: tokens per target pass, bonus INCLUDED.
    step_seconds: of one step.
    """

    tau: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.step_seconds


class Prediction(NamedTuple):
    """What was predicted of a tree, beside what was measured."""

    predicted: Candidate
    measured: MeasuredTree

    @property
    def error(self) -> float:
        """Of the tokens per second predicted, as a share of those measured; above 0: too many."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return {
            **self.predicted.as_dict(),
            "measured": {
                "tau_bonus_included": self.measured.tau,
                "step_seconds": self.measured.step_seconds,
                "tokens_per_second": self.measured.tokens_per_second,
            },
            "error": self.error,
        }


class PredictionErrors(NamedTuple):
    """How far what was predicted lies from what was measured, as shares of the latter.

    median, worst: of tokens per second. A machine that has become faster or slower since its
        profile was measured is in them.
    speedup_median, speedup_worst: of the speed-up over plain decoding, where that cancels.
    """

    num_trees: int
    median: float
    worst: float
    speedup_median: float
    speedup_worst: float


def prediction_errors(predictions: Sequence[Prediction]) -> PredictionErrors:
    """Over all trees, with plain decoding, which is no tree, beside them.

    Raises:
        ValueError: there is no tree, or no plain decoding.
    """
    trees = [each for each in predictions if each.predicted.paths]
    plain = [each for each in predictions if not each.predicted.paths]
    if not trees or len(plain) != 1:
        raise ValueError(
            f"predictions: must be of trees and of plain decoding once, got {len(trees)} and "
            f"{len(plain)}."
        )
    errors = [abs(each.error) for each in trees]
    of_speedups = [abs((1 + each.error) / (1 + plain[0].error) - 1) for each in trees]
    return PredictionErrors(
        len(trees),
        float(np.median(errors)),
        max(errors),
        float(np.median(of_speedups)),
        max(of_speedups),
    )


def measure_trees(
    model: Model,
    drafter: LoadedDrafter,
    trees: Sequence[Sequence[Path]],
    prompts: Sequence[PromptLike],
    config: GenerationConfig | None = None,
    *,
    repeats: int = 3,
    seed: int = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> list[MeasuredTree]:
    """Decodes prompts one at a time over each tree, in turns, and times the steps.

    Each prompt is also decoded with room for one token, by the same program; what the whole takes
    longer than that is the time of the steps after the first.

    Args:
        model: the target.
        drafter: over any static tree; its own is not used.
        trees: rank paths of each; none is plain decoding.
        prompts: as for `generate`.
        config: how to decode.
        repeats: timed runs of each prompt and tree.
        seed: of sampling.
        advance: called once per prompt.

    Raises:
        ValueError: as for `generate`, or if no prompt gives more than one step.
    """
    config = config or GenerationConfig()
    methods = [with_tree(drafter, paths) if len(paths) else None for paths in trees]
    seconds, steps, tokens = np.zeros((3, len(trees)))
    for prompt in prompts:
        advance("decoding in turns")
        release_programs()
        requests = [prepare(model, prompt, config, method, seed) for method in methods]
        programs = {}
        for index, request in enumerate(requests):
            programs[f"{index} whole"] = request.decode
            programs[f"{index} first step"] = _first_step(request).decode
        times = time_in_turns(programs, repeats)
        for index, request in enumerate(requests):
            whole, first = times[f"{index} whole"], times[f"{index} first step"]
            states = request.decode()
            seconds[index] += np.median(whole) - np.median(first)
            steps[index] += int(states.stats.num_steps[0])
            tokens[index] += int(states.context.length[0]) - request.prompt_lengths[0]
    later = steps - len(prompts)
    if np.any(later < 1):
        raise ValueError(
            "prompts: no tree can be timed where outputs end with their first step; ask for more "
            "tokens, or give other prompts."
        )
    return [
        MeasuredTree(float(tau), float(step_seconds))
        for tau, step_seconds in zip(tokens / steps, seconds / later, strict=True)
    ]


def _first_step(request: Request) -> Request:
    prompts = request.prompts
    return dataclasses.replace(request, prompts=prompts._replace(room=jnp.ones_like(prompts.room)))
