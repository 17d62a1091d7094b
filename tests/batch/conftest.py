"""A tiny model, its folder, and prompts of different lengths."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

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
    """Cuts files off at `size` bytes, as on a disk that fills up."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def closed_folder(tmp_path):
    """A folder where nobody may write; skips if the user is root and the system has none."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if not os.access(folder, os.W_OK):
        return folder
    kernels = Path("/sys/kernel")
    if not kernels.is_dir():
        pytest.skip("this user may write everywhere; run as one who is not root")
    return kernels


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Environment of processes that run jobs: each program is compiled once, and quickly."""
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
