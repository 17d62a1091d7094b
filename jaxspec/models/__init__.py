"""The transformer behind functions over plain pytrees. The only folder that imports Flax."""

from jaxspec.models.config import (
    Diffusion,
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from jaxspec.models.dflash import (
    Convolution,
    DFlashHead,
    DFlashParts,
    dflash_taps,
    init_dflash_params,
)
from jaxspec.models.eagle import (
    DraftVocabulary,
    Eagle3Head,
    EagleHead,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.models.linear import NARROW
from jaxspec.models.transformer import Network, Skips, init_params, lookup_rows, param_shapes

__all__ = [
    "NARROW",
    "Convolution",
    "DFlashHead",
    "DFlashParts",
    "Diffusion",
    "DraftVocabulary",
    "DynamicScaling",
    "Eagle3Head",
    "EagleHead",
    "Experts",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ModelConfig",
    "Network",
    "Rope",
    "Skips",
    "YarnScaling",
    "dflash_taps",
    "init_dflash_params",
    "init_eagle3_params",
    "init_eagle_params",
    "init_params",
    "lookup_rows",
    "param_shapes",
]
