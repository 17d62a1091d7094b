"""Speculative decoding in JAX: drafters, trees and lossless verification in one XLA program."""

from jaxspec.bench import Comparison, compare
from jaxspec.check import DrafterReport, check_drafter
from jaxspec.checkpoint import Model, Tokenizer, load, load_eagle, save
from jaxspec.compilation import use_persistent_cache
from jaxspec.core.tree import chain, eagle_tree, tree_from_parents, tree_from_paths
from jaxspec.core.types import Tree
from jaxspec.denoising import DenoiseConfig, DenoiseResult, denoise, denoise_stream
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
)
from jaxspec.generation import GenerationConfig, Score, StreamStep, generate, score, stream
from jaxspec.metrics import Metrics
from jaxspec.regeneration import regenerate
from jaxspec.result import Generation, GenerationResult, TraceStep
from jaxspec.trees import search_tree

__version__ = "0.1.0"

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
    "Tokenizer",
    "TraceStep",
    "Tree",
    "chain",
    "check_drafter",
    "compare",
    "denoise",
    "denoise_stream",
    "eagle_tree",
    "generate",
    "load",
    "load_eagle",
    "regenerate",
    "save",
    "score",
    "search_tree",
    "stream",
    "tree_from_parents",
    "tree_from_paths",
]

use_persistent_cache()
