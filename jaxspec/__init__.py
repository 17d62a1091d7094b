"""Speculative decoding in JAX: drafters, trees and lossless verification in one XLA program.

- Models: `load`, `load_eagle`, `save`, `Model`, `Tokenizer`.
- Decoding: `generate`, `stream`, `score`, `GenerationConfig`.
- Results: `GenerationResult`, `Generation`, `StreamStep`, `Score`, `Metrics`, `TraceStep`.
- Drafters: `PromptLookup`, `TokenRecycling`, `DraftModel`, `Eagle`, `Eagle2`, `DFlash`, `Deer`,
  `LayerSkip`, `NoDraft`; a drafter with its weights is a `LoadedDrafter`.
- Draft trees: `Tree`, `chain`, `tree_from_parents`, `tree_from_paths`, `eagle_tree`,
  `search_tree`.
- Diffusion models: `denoise`, `denoise_stream`, `DenoiseConfig`, `DenoiseResult`,
  `SelfSpeculation`.
- Measuring and checking: `compare`, `Comparison`, `check_drafter`, `check_model`, `DrafterReport`.
- Compiled programs kept on disk: `use_persistent_cache`.
"""

from jaxspec import start  # noqa: F401  first: hears Ctrl-C while the others are imported
from jaxspec.checkpoint import Model, Tokenizer, load, load_eagle, save
from jaxspec.compilation import use_persistent_cache
from jaxspec.core.tree import chain, eagle_tree, tree_from_parents, tree_from_paths
from jaxspec.core.types import Tree
from jaxspec.decoding.check import DrafterReport, check_drafter
from jaxspec.decoding.denoise import DenoiseConfig, DenoiseResult, denoise, denoise_stream
from jaxspec.decoding.generate import Score, StreamStep, generate, score, stream
from jaxspec.decoding.metrics import Metrics
from jaxspec.decoding.model_check import check_model
from jaxspec.decoding.request import GenerationConfig
from jaxspec.decoding.result import Generation, GenerationResult, TraceStep
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import (
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    LoadedDrafter,
    NoDraft,
    PromptLookup,
    TokenRecycling,
)
from jaxspec.measure import Comparison, compare
from jaxspec.tuning import search_tree

__version__ = "0.2.0.dev0"

__all__ = [
    "Comparison",
    "DFlash",
    "Deer",
    "DenoiseConfig",
    "DenoiseResult",
    "DraftModel",
    "DrafterReport",
    "Eagle",
    "Eagle2",
    "Generation",
    "GenerationConfig",
    "GenerationResult",
    "LayerSkip",
    "LoadedDrafter",
    "Metrics",
    "Model",
    "NoDraft",
    "PromptLookup",
    "Score",
    "SelfSpeculation",
    "StreamStep",
    "TokenRecycling",
    "Tokenizer",
    "TraceStep",
    "Tree",
    "chain",
    "check_drafter",
    "check_model",
    "compare",
    "denoise",
    "denoise_stream",
    "eagle_tree",
    "generate",
    "load",
    "load_eagle",
    "save",
    "score",
    "search_tree",
    "stream",
    "tree_from_parents",
    "tree_from_paths",
    "use_persistent_cache",
]
