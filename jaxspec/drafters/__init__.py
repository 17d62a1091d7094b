"""Drafting methods, one file each."""

from jaxspec.drafters.block import AdaptiveBlock
from jaxspec.drafters.deer import Deer
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle2 import Eagle2
from jaxspec.drafters.layer_skip import AdaptiveExit, LayerSkip
from jaxspec.drafters.loaded import LoadedDrafter
from jaxspec.drafters.lookup import PromptLookup
from jaxspec.drafters.plain import NoDraft
from jaxspec.drafters.skip_sets import PUBLISHED_SKIPS, published_skips

__all__ = [
    "PUBLISHED_SKIPS",
    "AdaptiveBlock",
    "AdaptiveExit",
    "DFlash",
    "Deer",
    "DraftModel",
    "Eagle",
    "Eagle2",
    "LayerSkip",
    "LoadedDrafter",
    "NoDraft",
    "PromptLookup",
    "published_skips",
]
