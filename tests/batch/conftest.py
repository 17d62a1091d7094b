"""A tiny model, its folder, and prompts of different lengths."""

import contextlib
import os
from collections.abc import Iterator
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


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a disk that fills up: what is written past so many bytes of a file is cut off."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def closed_folder(tmp_path):
    """Where nobody may write; skips where the user is root and the system has no such place."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if not os.access(folder, os.W_OK):
        return folder
    kernels = Path("/sys/kernel")
    if not kernels.is_dir():
        pytest.skip("this user may write everywhere; run as one who is not root")
    return kernels


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
