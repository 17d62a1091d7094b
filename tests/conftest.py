"""Settings and fixtures that the tests of several folders share."""

import lzma
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from tests.browser import Browser, running_browser
from tests.shapes import checked

ROOT = Path(__file__).resolve().parents[1]
# Compiled afresh: a program that another worker left on disk is not what a test is about.
os.environ.setdefault("JAXSPEC_CACHE", "off")
# Before anything of `jaxspec` is imported.
install_import_hook(
    ("jaxspec.core", "jaxspec.diffusion", "jaxspec.drafters"),
    f"{checked.__module__}.{checked.__name__}",
)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The time of an example says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles without optimising, in half the time or less; slow tests run what users run."""
    if config.option.markexpr == "not slow":
        flags = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the terminal that the tests were started in; a test that is about one sets its own."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture(scope="session")
def recorded_folder(tmp_path_factory) -> Callable[..., Path]:
    """Returns the path of a folder of recorded reference data, `tests/recorded`.

    A folder with packed files (`.xz`) is copied, with these unpacked.
    """
    recorded = ROOT / "tests" / "recorded"

    @cache
    def find(*parts: str) -> Path:
        folder = recorded.joinpath(*parts)
        if not any(folder.glob("*.xz")):
            return folder
        copy = tmp_path_factory.mktemp("recorded") / folder.name
        shutil.copytree(folder, copy)
        for packed in copy.glob("*.xz"):
            packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
            packed.unlink()
        return copy

    return find


@pytest.fixture(scope="session")
def data_folder() -> Callable[..., Path]:
    """Returns the path of a folder of fetched data sets, `data`; skips where it is absent."""

    def find(*parts: str) -> Path:
        path = (ROOT / "data").joinpath(*parts)
        if not path.exists():
            name = path.relative_to(ROOT).as_posix()
            pytest.skip(f"needs {name}: run `python -m benchmarks.fetch`")
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


@pytest.fixture(scope="session")
def model():
    """A model with a tokenizer, small enough for anything."""
    from tests.measure.models import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory) -> str:
    """The folder of that model."""
    import jaxspec

    folder = tmp_path_factory.mktemp("models") / "tiny"
    jaxspec.save(model, folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _few_programs_in_memory():
    """Lets go of compiled programs now and then."""
    from jaxspec.measure.timing import release_programs

    yield
    release_programs()


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """A running Chromium; skips without one, or without node or npm."""
    with running_browser(tmp_path_factory.mktemp("playwright")) as running:
        yield running
