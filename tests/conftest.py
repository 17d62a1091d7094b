"""What the tests of several folders share."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from tests.shapes import checked

# Compiled afresh: a program that another worker left on disk is not what a test is about.
os.environ.setdefault("JAXSPEC_CACHE", "off")
# Before anything of `jaxspec` is imported.
install_import_hook(
    ("jaxspec.core", "jaxspec.diffusion", "jaxspec.drafters"),
    f"{checked.__module__}.{checked.__name__}",
)
jax.config.update("jax_numpy_rank_promotion", "raise")
# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles without optimising, in half the time or less; slow tests run what users run."""
    if config.option.markexpr == "not slow":
        flags = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


@pytest.fixture(scope="session")
def shared_folder() -> Callable[..., Path]:
    """The path of a folder of recorded reference data beside the repository; skips without it."""

    def find(*parts: str) -> Path:
        path = Path(__file__).resolve().parents[2].joinpath("shared", *parts)
        if not path.exists():
            pytest.skip(f"needs {path}, which is not here")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_config():
    """A Llama of a few thousand weights."""
    from jaxspec.models import ModelConfig

    return ModelConfig(
        vocab_size=97,
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        max_positions=256,
    )


@pytest.fixture(scope="session")
def tiny_network(tiny_config):
    """That config with random weights, float32."""
    from jaxspec.models import Network, init_params

    return Network(init_params(tiny_config, jax.random.key(0)), tiny_config)


@pytest.fixture(autouse=True)
def _few_programs_in_memory():
    """Lets go of compiled programs now and then."""
    from jaxspec.bench.timing import release_programs

    yield
    release_programs()
