"""A tiny model, its folder, and prompts of different lengths."""

import os
from pathlib import Path

import jax
import pytest

import jaxspec
from tests.bench.models import tiny_model

PROMPTS = (
    "hello world",
    "abc abc abc abc abc",
    "x",
    "once upon a time there was a text of many words",
    "the same",
    "qwerty qwerty qwe",
    "zz",
    "to be or not to be, to be",
)


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    jaxspec.save(model, folder)
    return str(folder)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of processes that run jobs: each program is compiled once for all of them, and quickly."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAXSPEC_CACHE": str(tmp_path_factory.mktemp("programs")),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "XLA_FLAGS": flags.strip(),
    }


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """Compiling takes longer than running here, and no law depends on how well it is done."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
