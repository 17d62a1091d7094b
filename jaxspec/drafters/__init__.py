"""Drafting methods, one file each, and what several of them share.

| file | what it holds |
|---|---|
| plain, recycling, draft_model, layer_skip, eagle, eagle2, deer, dflash | one method each |
| lookup | `PromptLookup` and `SuffixLookup` |
| corpus | texts to look tokens up in, as sorted arrays |
| union | lookup where its match is long, another drafter elsewhere |
| block | settings and drafting of `Deer` and `DFlash` |
| growth | trees grown level by level; the best of a pool of candidates |
| loaded | a drafter with its weights; checks that weights belong to a target |
| skip_sets | sets of sub-layers for `LayerSkip` |
"""

from jaxspec.drafters.block import AdaptiveBlock
from jaxspec.drafters.deer import Deer
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle2 import Eagle2
from jaxspec.drafters.layer_skip import AdaptiveExit, LayerSkip
from jaxspec.drafters.loaded import DrafterLike, LoadedDrafter, loaded_drafter
from jaxspec.drafters.lookup import PromptLookup, SuffixLookup
from jaxspec.drafters.plain import NoDraft
from jaxspec.drafters.recycling import TokenRecycling
from jaxspec.drafters.skip_sets import PUBLISHED_SKIPS, published_skips
from jaxspec.drafters.union import Union

__all__ = [
    "PUBLISHED_SKIPS",
    "AdaptiveBlock",
    "AdaptiveExit",
    "DFlash",
    "Deer",
    "DraftModel",
    "DrafterLike",
    "Eagle",
    "Eagle2",
    "LayerSkip",
    "LoadedDrafter",
    "NoDraft",
    "PromptLookup",
    "SuffixLookup",
    "TokenRecycling",
    "Union",
    "loaded_drafter",
    "published_skips",
]
