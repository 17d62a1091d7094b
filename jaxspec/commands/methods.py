"""Methods over the models that ship: drafters by name, each built for a target."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checkpoint import (
    CheckpointError,
    Model,
    load,
    load_eagle,
    shipped_folders,
    shipped_heads,
    shipped_models,
)
from jaxspec.core.types import Params, Warp
from jaxspec.decoding.request import GenerationConfig, prepare
from jaxspec.drafters import (
    AdaptiveBlock,
    Deer,
    DrafterLike,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    LoadedDrafter,
    NoDraft,
    PromptLookup,
    SuffixLookup,
    TokenRecycling,
    Union,
)
from jaxspec.drafters.loaded import OtherTargetError
from jaxspec.measure.step import measure_drafter
from jaxspec.models import Eagle3Head, EagleHead

EAGLE_HEAD, EAGLE3_HEAD, SKIPS = "demo-eagle", "demo-eagle3", "demo-skips"
DRAFT, DEER = "demo-draft", "demo-deer"
MADE_FOR = "demo"
"""The target of the shipped heads and sets."""


def searched_set(**settings: Any) -> Callable[[Model], LayerSkip | None]:
    """Builds layer skipping with the shipped set; `settings` replace those found with it."""

    def method(target: Model) -> LayerSkip | None:
        if target.name != MADE_FOR or SKIPS not in shipped_folders():
            return None
        return LayerSkip.read(SKIPS, **settings)

    return method


def with_head(
    name: str, draft: Callable[[EagleHead | Eagle3Head], LoadedDrafter | None]
) -> Callable[[Model], LoadedDrafter | None]:
    """Builds a method that drafts with a shipped head."""

    def method(target: Model) -> LoadedDrafter | None:
        if target.name != MADE_FOR or name not in shipped_heads():
            return None
        return draft(load_eagle(name, target.network))

    return method


def searched_tree(name: str) -> Callable[[Model], LoadedDrafter | None]:
    """Builds a shipped head over the tree that was searched for it."""
    return with_head(name, lambda head: None if head.paths is None else Eagle.of(head))


def with_lookup(name: str) -> Callable[[Model], LoadedDrafter | None]:
    """Builds a shipped head over its searched tree, and lookup where its match is long."""
    return with_head(name, lambda head: None if head.paths is None else Union.of(Eagle.of(head)))


def with_draft_model(name: str, **settings: Any) -> Callable[[Model], LoadedDrafter | None]:
    """Builds a shipped causal model that drafts for every target, in tokens that both have."""

    def method(target: Model) -> LoadedDrafter | None:
        if name not in shipped_models():
            return None
        draft = load(name)
        made = if_it_drafts_for(target, DraftModel.of(draft, **settings))
        if made is not None:
            return made
        try:
            return DraftModel.of(draft, target=target, **settings)
        except (OtherTargetError, CheckpointError):
            return None

    return method


def with_deer(name: str, **settings: Any) -> Callable[[Model], LoadedDrafter | None]:
    """Builds a shipped diffusion model that drafts for the target that it was aligned with."""

    def method(target: Model) -> LoadedDrafter | None:
        if name not in shipped_models():
            return None
        return if_it_drafts_for(target, Deer.of(load(name), **settings))

    return method


def adaptive_deer(name: str, block: int) -> Callable[[Model], LoadedDrafter | None]:
    """Builds chains of a shipped diffusion model whose length fits the costs of this machine."""
    whole = with_deer(name, block=block)

    def method(target: Model) -> LoadedDrafter | None:
        chain = whole(target)
        if chain is None:
            return None
        return with_deer(name, block=block, adaptive=measure_block_costs(target, chain))(target)

    return method


def measure_block_costs(target: Model, chain: LoadedDrafter) -> AdaptiveBlock:
    """Measures the costs of drafting and of each further token of a target pass on this machine.

    Costs are constants of the compiled program. They are rounded, so that the program is found
    again in the compilation cache. The cost of a token keeps one significant digit: it may be far
    below 0.1 if passes are bound by memory.

    Args:
        target: the target model.
        chain: a drafter of whole blocks.
    """
    params = Params(target.network, chain.params)
    one, whole = (
        measure_drafter(params, drafter, Warp(), repeats=5)
        for drafter in (NoDraft(), chain.drafter)
    )
    further = (whole.target - one.target) / (whole.width - 1)
    return AdaptiveBlock(
        draft_cost=round(whole.draft / one.target, 1),
        token_cost=float(f"{max(0.0, further / one.target):.1g}"),
    )


def if_it_drafts_for(target: Model, drafter: LoadedDrafter) -> LoadedDrafter | None:
    """Returns the drafter, or `None` if it is for another target or another vocabulary."""
    try:
        prepare(target, [0], GenerationConfig(max_new_tokens=1), drafter, 0)
    except OtherTargetError:
        return None
    return drafter


EVERY_METHOD: Mapping[str, Callable[[Model], DrafterLike | None]] = {
    "prompt lookup": lambda target: PromptLookup(),
    "suffix lookup": lambda target: SuffixLookup(),
    "token recycling": lambda target: TokenRecycling(),
    "draft model": with_draft_model(DRAFT),
    "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
    "suffix lookup and EAGLE-1": with_lookup(EAGLE_HEAD),
    "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
    "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
    "layer skip, as searched": searched_set(),
    "DEER, chain of 8": with_deer(DEER, block=8),
    "DEER, tree of 8": with_deer(DEER, block=8, num_nodes=8),
    "DEER, adaptive chain": adaptive_deer(DEER, block=8),
}
"""Methods of `jaxspec bench --drafter all`; each returns `None` for a target it does not fit."""
