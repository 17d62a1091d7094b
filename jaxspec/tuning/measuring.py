"""Measurement of acceptance tables and of the speed of trees, by decoding prompts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxspec.checkpoint import Model
from jaxspec.core.checks import Count, Natural, Nodes, Share, above_up_to, checks_arguments
from jaxspec.core.tree import Paths, chain_paths, normalize_paths
from jaxspec.core.types import Context, Drafter, Hidden, Params, Proposal, PyTree
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import (
    GenerationConfig,
    PromptLike,
    Request,
    prepare,
    prompt_list,
)
from jaxspec.drafters import LoadedDrafter
from jaxspec.drafters.wrapped import Wrapped
from jaxspec.measure.timing import release_programs, time_in_turns
from jaxspec.tuning.acceptance import (
    AcceptanceTable,
    ExitCounts,
    count_acceptance,
    identity_of,
    probe_paths,
)
from jaxspec.tuning.tree_search import Candidate

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
CHAIN = 8
"""Length of the chains that end early, unless another is asked for."""


@checks_arguments
def with_tree(drafter: LoadedDrafter, paths: Paths, threshold: Share = 0.0) -> LoadedDrafter:
    """Returns the same drafter over another static tree, or a chain that ends early.

    Raises:
        ValueError: the drafter does not use a static tree, or ends no chain early.
    """
    method: Drafter = drafter.drafter
    if not dataclasses.is_dataclass(method) or not hasattr(method, "paths"):
        raise ValueError(
            "drafter: must draft over a static tree (Eagle, DraftModel, Deer, DFlash), got "
            f"{type(method).__name__}."
        )
    settings: dict[str, Any] = {"paths": normalize_paths(paths)}
    if hasattr(method, "threshold"):
        settings["threshold"] = threshold
    elif threshold:
        raise ValueError(
            f"threshold: {type(method).__name__} ends no chain early; Eagle and DraftModel do."
        )
    return drafter._replace(drafter=dataclasses.replace(method, **settings))


@checks_arguments
def measure_acceptance(
    model: Model,
    drafter: LoadedDrafter,
    prompts: "PromptLike | Sequence[PromptLike]",
    config: GenerationConfig | None = None,
    *,
    paths: Paths | None = None,
    seed: Natural = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> AcceptanceTable:
    """Decodes prompts with a wide tree and counts which of its nodes are accepted.

    Use other text than for evaluation: for example, held-out rows of training sets.

    Args:
        model: the target.
        drafter: a drafter over any static tree; its own tree is not used.
        prompts: as for `generate`.
        config: settings of decoding; acceptance depends on them.
        paths: the probing tree; `None`: `probe_paths()`.
        seed: seed of sampling.
        advance: called once per prompt, with a description of the work.

    Raises:
        ValueError: the drafter has no static tree, or nothing was drafted.
    """
    prompts = prompt_list(prompts)
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


class _Counting(NamedTuple):
    """State of `_CountsExits`.

    Attributes:
        own: state of the drafter.
        drafted: tokens of the last step.
        passes: its draft passes.
        counts: steps before it, by the tokens that they drafted, by those that were accepted, and
            by passes: the fields of `ExitCounts`.
    """

    own: PyTree
    drafted: Int[Array, ""]
    passes: Int[Array, ""]
    counts: Int[Array, "3 sizes"]


@dataclasses.dataclass(frozen=True)
class _CountsExits(Wrapped):
    """A drafter of chains that end early, which counts its steps except the last.

    That may have been short of room. The threshold is among the weights: one program for all.
    """

    drafter: Any

    def init(self, params: Params, prompt: Hidden, context: Context) -> _Counting:
        own = self.drafter.init(params._replace(draft=params.draft[0]), prompt, context)
        none = jnp.zeros((3, 1 + self.tree_shape[1]), jnp.int32)
        return _Counting(own, jnp.int32(0), jnp.int32(0), none)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: _Counting, context: Context
    ) -> tuple[Proposal, _Counting]:
        weights, threshold = params.draft
        emitted = context.recent.count  # by the last step; 0 before the first
        sizes = jnp.stack([state.drafted, jnp.maximum(emitted - 1, 0), state.passes])
        counts = state.counts.at[jnp.arange(3), sizes].add(emitted > 0)
        params = params._replace(draft=weights)
        proposal, own, passes = self.drafter.propose_and_count(
            params, key, state.own, context, threshold
        )
        drafted = jnp.sum(proposal.valid) - 1
        return proposal, _Counting(own, drafted, passes, counts)


@checks_arguments
def chain_at_threshold(
    drafter: LoadedDrafter, length: Nodes = CHAIN, threshold: Share = 0.0
) -> LoadedDrafter:
    """Returns a drafter over a chain that ends early; all thresholds share a compiled program.

    Args:
        drafter: an `Eagle` or `DraftModel`; its own tree is not used.
        length: of the longest chain.
        threshold: see `DraftModel`. 0 ends a chain only where no more tokens may be emitted.

    Raises:
        ValueError: the drafter ends no chain early.

    Example:
        >>> import jaxspec
        >>> from jaxspec.tuning.measuring import chain_at_threshold
        >>> model, draft = jaxspec.load("demo"), jaxspec.DraftModel.of(jaxspec.load("demo-draft"))
        >>> chain = chain_at_threshold(draft, length=2, threshold=0.2)
        >>> jaxspec.generate(model, "1, 2,", chain, max_new_tokens=8).metrics.num_tokens
        8
    """
    probing = _CountsExits(with_tree(drafter, chain_paths(length), threshold=1.0).drafter)
    return LoadedDrafter(probing, (drafter.params, jnp.float32(threshold)))


@checks_arguments
def measure_exits(
    model: Model,
    drafter: LoadedDrafter,
    prompts: "PromptLike | Sequence[PromptLike]",
    config: GenerationConfig | None = None,
    *,
    thresholds: Sequence[Annotated[float, above_up_to(0, 1)]] = THRESHOLDS,
    length: Nodes = CHAIN,
    seed: Natural = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> tuple[ExitCounts, ...]:
    """Decodes prompts over a chain that ends early, at each threshold, and counts its steps.

    It counts how many tokens each step drafted and accepted, and its draft passes.

    Args:
        model: the target.
        drafter: an `Eagle` or `DraftModel`; its own tree is not used.
        prompts: as for `generate`; other text than for evaluation.
        config: settings of decoding; acceptance depends on them.
        thresholds: each above 0.
        length: of the longest chain.
        seed: seed of sampling.
        advance: called once per prompt, with a description of the work.

    Raises:
        ValueError: the drafter ends no chain early, or no text has a second step.

    Example:
        >>> import jaxspec
        >>> from jaxspec.tuning.measuring import measure_exits
        >>> model, draft = jaxspec.load("demo"), jaxspec.DraftModel.of(jaxspec.load("demo-draft"))
        >>> config = jaxspec.GenerationConfig(max_new_tokens=8)
        >>> (counts,) = measure_exits(model, draft, ["1, 2,"], config, thresholds=[0.2], length=2)
        >>> len(counts.drafted), sum(counts.drafted) == sum(counts.passes)
        (3, True)
    """
    prompts = prompt_list(prompts)
    counts = np.zeros((len(thresholds), 3, length + 1), int)
    for prompt in prompts:
        advance("counting drafts that end early")
        for index, threshold in enumerate(thresholds):
            loaded = chain_at_threshold(drafter, length, threshold)
            request = prepare(model, prompt, config or GenerationConfig(), loaded, seed)
            states = request.decode()
            counts[index] += np.asarray(states.draft.counts[0])
    if not counts[:, 0].sum(axis=1).all():
        raise ValueError("prompts: no output has a second step; ask for more tokens.")
    return tuple(
        ExitCounts(threshold, *map(tuple, found.tolist()))
        for threshold, found in zip(thresholds, counts, strict=True)
    )


class MeasuredTree(NamedTuple):
    """Measured speed of decoding over a tree, without prefill and compilation.

    Attributes:
        tau: tokens per target pass, bonus INCLUDED.
        step_seconds: seconds of one step.
    """

    tau: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Measured speed, bonus token INCLUDED."""
        return self.tau / self.step_seconds


class SpeedPrediction(NamedTuple):
    """Predicted and measured speed of one tree."""

    predicted: Candidate
    measured: MeasuredTree

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens per second; above 0: predicted too fast."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
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
    """Relative errors of predicted speeds, over trees.

    Attributes:
        num_trees: number of trees, without plain decoding.
        median: median error of tokens per second. It includes any change of the machine's speed
            since its profile was measured.
        worst: largest error of tokens per second.
        speedup_median: median error of the speed-up over plain decoding, in which such a change
            cancels.
        speedup_worst: largest error of the speed-up.
    """

    num_trees: int
    median: float
    worst: float
    speedup_median: float
    speedup_worst: float


def prediction_errors(predictions: Sequence[SpeedPrediction]) -> PredictionErrors:
    """Summarizes the errors of all trees.

    Args:
        predictions: trees, and plain decoding (no nodes) exactly once.

    Raises:
        ValueError: there is no tree, or plain decoding is not there once.
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


@checks_arguments
def measure_trees(
    model: Model,
    drafter: LoadedDrafter,
    trees: Sequence[Paths],
    prompts: "PromptLike | Sequence[PromptLike]",
    config: GenerationConfig | None = None,
    *,
    thresholds: Sequence[Share] | None = None,
    repeats: Count = 3,
    seed: Natural = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> list[MeasuredTree]:
    """Decodes prompts one at a time over each tree, in turns, and times the steps.

    The same program also decodes each prompt for one token only. The difference of the two times is
    the time of the steps after the first.

    Args:
        model: the target.
        drafter: a drafter over any static tree; its own tree is not used.
        trees: rank paths of each tree; empty for plain decoding.
        prompts: as for `generate`.
        config: settings of decoding.
        thresholds: of each tree, see `with_tree`; `None`: no chain ends early.
        repeats: timed runs of each prompt and tree.
        seed: seed of sampling.
        advance: called once per prompt, with a description of the work.

    Raises:
        ValueError: as for `generate`; there are other thresholds than trees, or no prompt gives
            more than one step.
    """
    config, prompts = config or GenerationConfig(), prompt_list(prompts)
    thresholds = [0.0] * len(trees) if thresholds is None else thresholds
    if len(thresholds) != len(trees):
        raise ValueError(
            f"thresholds must have one entry for each of {len(trees)} trees, got {len(thresholds)}."
        )
    methods = [
        with_tree(drafter, paths, threshold) if len(paths) else None
        for paths, threshold in zip(trees, thresholds, strict=True)
    ]
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
            "prompts: outputs that end with their first step cannot be timed; ask for more tokens, "
            "or give other prompts."
        )
    return [
        MeasuredTree(float(tau), float(step_seconds))
        for tau, step_seconds in zip(tokens / steps, seconds / later, strict=True)
    ]


def _first_step(request: Request) -> Request:
    prompts = request.prompts
    return dataclasses.replace(request, prompts=prompts._replace(room=jnp.minimum(prompts.room, 1)))
