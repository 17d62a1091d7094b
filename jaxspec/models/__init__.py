"""The transformer behind functions over plain pytrees. The only folder that imports Flax."""

from jaxspec.models.config import (
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from jaxspec.models.linear import NARROW
from jaxspec.models.transformer import Network, Skips, init_params, lookup_rows, param_shapes

__all__ = [
    "NARROW",
    "DynamicScaling",
    "Experts",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ModelConfig",
    "Network",
    "Rope",
    "Skips",
    "YarnScaling",
    "init_params",
    "lookup_rows",
    "param_shapes",
]
