"""JAX itself: its sums on CPUs are right, `import jaxspec` leaves it alone, its cache is quiet."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jaxlib.version
import pytest

from jaxspec.compilation import RIGHT_SUMS, WRONG_SUMS, warn_of_wrong_sums

ROOT = Path(__file__).resolve().parents[1]
# Prints the relative error of the sum in question. In a fresh process, as users run it: the flags
# of the quick tests compile without optimising, which hides the fault.
PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
"""
VECTOR_PRODUCT = """
rows = rng.standard_normal((32769, 3)).astype(np.float32)
matrix = jnp.eye(3, dtype=jnp.float32)
found = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
right = (rows.astype(np.float64) ** 2).sum(1)
print(np.max(np.abs(found - right) / right))
"""
BROADCAST_PRODUCT = """
entries = rng.standard_normal((4, 32, 32)).astype(np.float32)
def summed(entries, value):
    return jnp.sum((entries @ jnp.broadcast_to(value, (4, 32, 32))) * entries, -1)
found = jax.jit(summed)(entries, jnp.float32(1.5))
wide = entries.astype(np.float64)
right = np.sum((wide @ np.full((4, 32, 32), 1.5)) * wide, -1)
print(np.max(np.abs(found - right)) / np.max(np.abs(right)))
"""


def run_fresh(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX"))}
    clean |= {"JAX_PLATFORMS": "cpu", "JAXSPEC_CACHE": "off", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("source", [VECTOR_PRODUCT, BROADCAST_PRODUCT])
def test_sums_are_right(source):
    assert float(run_fresh(PRELUDE + source).stdout) < 1e-5


@pytest.fixture
def release(monkeypatch):
    """Pretends that this release of jaxlib is installed, and that nothing was said yet."""

    def pretend(name):
        monkeypatch.setattr(jaxlib.version, "__version__", name)
        warn_of_wrong_sums.cache_clear()

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    yield pretend
    warn_of_wrong_sums.cache_clear()


@pytest.mark.parametrize("name", WRONG_SUMS)
def test_a_wrong_release_is_named_once_with_what_to_install(release, name):
    release(name)
    with pytest.warns(UserWarning, match=rf"jaxlib {name} .*'jaxlib=={RIGHT_SUMS}'") as said:
        assert not any((warn_of_wrong_sums(), warn_of_wrong_sums()))
    assert len(said) == 1


def test_a_network_that_runs_asks(release, tiny_network):
    release(WRONG_SUMS[0])
    with pytest.warns(UserWarning, match="computes some sums wrong"):
        tiny_network.embed(jax.numpy.zeros(1, int))


def test_nothing_is_said_where_nothing_is_wrong(release, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release(RIGHT_SUMS)
        warn_of_wrong_sums()
        release(WRONG_SUMS[0])
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=-reduce")
        warn_of_wrong_sums()
        release(WRONG_SUMS[0])
        monkeypatch.delenv("XLA_FLAGS")
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        warn_of_wrong_sums()


def test_the_installed_release_is_not_known_to_be_wrong():
    assert jaxlib.version.__version__ not in WRONG_SUMS


CHANGES = """
import os, jax
before = dict(jax.config.values), dict(os.environ)
import warnings
warnings.simplefilter("error")
import jaxspec
import jax._src.xla_bridge as bridge
assert not bridge.backends_are_initialized()
assert {**jax.config.values, **before[0]} == jax.config.values
assert dict(os.environ) == before[1]
"""


def test_importing_changes_nothing_global(tmp_path):
    run_fresh(CHANGES, JAXSPEC_CACHE=str(tmp_path), TF_CPP_MIN_LOG_LEVEL="1")
    assert not list(tmp_path.iterdir())


CACHED = """
import jaxspec, jax, jax.numpy as jnp
jaxspec.use_persistent_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: jnp.tanh(x @ x.T))(jnp.ones((8, 8)))[0, 0])
"""


def test_reading_kept_programs_back_logs_nothing(tmp_path):
    programs = tmp_path / "programs"
    first, second = (run_fresh(CACHED, JAXSPEC_CACHE=str(programs)) for _ in range(2))
    assert list(programs.iterdir())
    assert first.stdout == second.stdout
    assert "cpu_aot_loader" not in second.stderr


KEPT_OUT = """
import os, jaxspec, jax
jaxspec.use_persistent_cache()
assert jax.config.jax_compilation_cache_dir is None
os.environ["JAXSPEC_CACHE"] = "elsewhere"
jax.config.update("jax_compilation_cache_dir", "given")
before = dict(jax.config.values)
jaxspec.use_persistent_cache()
assert before == jax.config.values
"""


def test_no_folder_is_used_against_the_will_of_its_user():
    run_fresh(KEPT_OUT)
