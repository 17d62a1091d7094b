"""Suites of drafting methods on the shipped targets, each a table of data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness import Suite
from benchmarks.methods import measure_suite_methods
from benchmarks.prompts import EAGLE_GSM8K, GSM8K, HUMANEVAL, PROMPT_SETS, SPEC_BENCH
from jaxspec.checkpoint import Model
from jaxspec.commands.methods import (
    DEER,
    DRAFT,
    EAGLE3_HEAD,
    EAGLE_HEAD,
    EVERY_METHOD,
    MADE_FOR,
    searched_set,
    searched_tree,
    with_deer,
    with_draft_model,
    with_head,
)
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.drafters import AdaptiveExit, Eagle, Eagle2, LayerSkip, LoadedDrafter, PromptLookup
from jaxspec.models import Eagle3Head, EagleHead
from jaxspec.tuning import draft_batches

_BLOCKS = (4, 16, 32)  # besides the 8 of `EVERY_METHOD`


def adaptive_exit(**settings: Any) -> Callable[[Model], LayerSkip | None]:
    """Builds layer skipping with the shipped set and a threshold that adapts from prompt to prompt.

    The threshold begins at the searched value. It moves as in the paper, except for `settings`.
    """
    return searched_set(num_speculative_tokens=8, adaptive=AdaptiveExit(**settings))


def dynamic_tree(head: EagleHead | Eagle3Head, paths: Sequence[RankPath]) -> LoadedDrafter:
    """Builds EAGLE-2 within the bounds of a static tree: its nodes, levels, and nodes per pass.

    A pass has at least two nodes: with one, the tree would be a chain in every step.
    """
    widest = max(*draft_batches(paths), 1 + max(path[-1] for path in paths))
    depth = max(1, max(map(len, paths)) - 1)
    return Eagle2.of(head, num_nodes=len(paths), depth=depth, beam=max(2, widest))


SHIPPED_SUITES: Mapping[str, Suite] = {
    "shipped": Suite(
        title="Figures of the shipped models",
        about="every kind of drafter on GSM8K, HumanEval and MBPP, next to transformers",
        measure=measure_suite_methods,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        repeats=3,
        models=(MADE_FOR,),
        methods={
            # Both with the lengths that they draft by default.
            "prompt lookup": lambda target: PromptLookup(),
            "draft model": with_draft_model(DRAFT),
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
            "EAGLE-1, 25 nodes": with_head(EAGLE_HEAD, lambda head: Eagle.of(head, EAGLE_PATHS)),
            "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
            "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
            "layer skip, as searched": searched_set(),
        },
        temperatures={"greedy": 0.0, "temperature 1": 1.0},
        assistant=DRAFT,
    ),
    # A table with the columns of the paper on trees for phones: budget, drafting, verification,
    # tau, tokens/s.
    "trees": Suite(
        title="Static and dynamic EAGLE trees",
        about="static against dynamic EAGLE trees on the questions of EAGLE's own evaluation",
        measure=measure_suite_methods,
        prompt_sets=(EAGLE_GSM8K,),
        prompts_per_set=80,
        repeats=3,
        models=(MADE_FOR,),
        methods={
            "searched tree": searched_tree(EAGLE_HEAD),
            "EAGLE's 25 nodes": with_head(EAGLE_HEAD, lambda head: Eagle.of(head, EAGLE_PATHS)),
            "EAGLE-2, as searched": with_head(
                EAGLE_HEAD, lambda head: dynamic_tree(head, head.paths or EAGLE_PATHS)
            ),
            "EAGLE-2, 25 nodes": with_head(
                EAGLE_HEAD, lambda head: dynamic_tree(head, EAGLE_PATHS)
            ),
            "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
            "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
        },
        temperatures={"greedy": 0.0, "temperature 1": 1.0},
    ),
    "skips": Suite(
        title="Drafting with the target's own layers, by task",
        about="layer skipping by task: GSM8K, HumanEval and the groups of Spec-Bench",
        measure=measure_suite_methods,
        prompt_sets=(GSM8K, HUMANEVAL, *SPEC_BENCH),
        prompts_per_set=20,
        repeats=3,
        models=(MADE_FOR,),
        methods={
            "layer skip, as searched": searched_set(),
            "layer skip, K = 8": searched_set(num_speculative_tokens=8),
            "layer skip, K = 8, adaptive": adaptive_exit(),
            "draft model": with_draft_model(DRAFT),
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
        },
        temperatures={"greedy": 0.0, "temperature 0.7, top-p 0.9": 0.7},
        top_p=0.9,
    ),
    "skip-settings": Suite(
        title="Drafting with the target's own layers: exit threshold and length",
        about="layer skipping by length, exit threshold and settings of the adaptive exit",
        measure=measure_suite_methods,
        prompt_sets=(GSM8K, HUMANEVAL),
        prompts_per_set=20,
        repeats=3,
        models=(MADE_FOR,),
        methods={
            "as searched": searched_set(),
            **{f"K = {n}": searched_set(num_speculative_tokens=n) for n in (1, 2, 3, 4, 6, 8)},
            **{
                f"K = 8, threshold {p:g}": searched_set(num_speculative_tokens=8, threshold=p)
                for p in (0.2, 0.4, 0.6, 0.8)
            },
            # From here on the threshold adapts, K = 8: as in the paper, then with one change.
            "adaptive": adaptive_exit(),
            **{f"alpha = {rate:g}": adaptive_exit(target_rate=rate) for rate in (0.7, 0.8, 0.95)},
            **{f"epsilon = {step:g}": adaptive_exit(step=step) for step in (0.03, 0.1, 0.3)},
            **{f"beta1 = {kept:g}": adaptive_exit(rate_memory=kept) for kept in (0.2, 0.8, 0.95)},
            **{f"beta2 = {kept:g}": adaptive_exit(threshold_memory=kept) for kept in (0.0, 0.5)},
        },
    ),
    # The same as `jaxspec bench --drafter all`, in full, and blocks of other sizes.
    "methods": Suite(
        title="Every method that comes with the package",
        about="every method that comes with the package, and DEER's blocks of 4 to 32",
        measure=measure_suite_methods,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=5,
        repeats=1,
        models=(MADE_FOR,),
        methods={
            **EVERY_METHOD,
            **{f"DEER, chain of {k}": with_deer(DEER, block=k) for k in _BLOCKS},
            **{f"DEER, tree of {k}": with_deer(DEER, block=k, num_nodes=k) for k in _BLOCKS},
        },
        temperatures={"greedy": 0.0, "temperature 0.6": 0.6, "temperature 1": 1.0},
        batches=(1, 6, 16),
        batch_methods=tuple(EVERY_METHOD),
    ),
}
