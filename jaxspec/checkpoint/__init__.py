"""Models from and to files: Hugging Face and Orbax folders, tokenizers, the Hub."""

from jaxspec.checkpoint.config import config_from_json, config_to_json
from jaxspec.checkpoint.dflash import load_dflash, save_dflash
from jaxspec.checkpoint.eagle import eagle3_taps, load_eagle, save_eagle
from jaxspec.checkpoint.files import CheckpointError, recover_files
from jaxspec.checkpoint.folder import shipped_folders
from jaxspec.checkpoint.hub import (
    Model,
    find_head,
    find_model,
    load,
    save,
    save_orbax,
    shipped_heads,
    shipped_models,
)
from jaxspec.checkpoint.memory import (
    MemoryEstimate,
    check_cache_fits,
    check_network_fits,
    estimate_memory,
)
from jaxspec.checkpoint.tokenizer import Detokenizer, Tokenizer, load_tokenizer

__all__ = [
    "CheckpointError",
    "Detokenizer",
    "MemoryEstimate",
    "Model",
    "Tokenizer",
    "check_cache_fits",
    "check_network_fits",
    "config_from_json",
    "config_to_json",
    "eagle3_taps",
    "estimate_memory",
    "find_head",
    "find_model",
    "load",
    "load_dflash",
    "load_eagle",
    "load_tokenizer",
    "recover_files",
    "save",
    "save_dflash",
    "save_eagle",
    "save_orbax",
    "shipped_folders",
    "shipped_heads",
    "shipped_models",
]
