import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import (
    CheckpointError,
    check_cache_fits,
    check_network_fits,
    estimate_memory,
    load,
    memory,
)
from jaxspec.models import ModelConfig, Network, param_shapes

SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "max_positions": 64}
CONFIG = ModelConfig(**SIZES, vocab_size=64, embed_dim=512, num_layers=24, mlp_dim=1536)

# Prints the peak before and after loading, in bytes. `VmHWM` rather than `ru_maxrss`, which a child
# inherits from the process that started it.
PROGRAM = """
import sys
import jax
from pathlib import Path
from jaxspec.checkpoint import load

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small = load(sys.argv[1])  # kept: what it frees, the next one would take
before = peak()
load(sys.argv[2], dtype=sys.argv[3])
print(before, peak())
"""


def write_zeros(folder: Path, config: ModelConfig, dtype: str) -> None:
    from jaxspec.checkpoint.huggingface import write_network

    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(config, jnp.dtype(dtype))
    )
    folder.mkdir()
    write_network(Network(zeros, config), folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak figures")
@pytest.mark.parametrize(("stored", "target"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_the_peak_is_the_weights_and_little_more(stored, target, tmp_path):
    """150 MB of weights: a copy of them, or a mapped file, would nearly double the peak."""
    write_zeros(tmp_path / "small", CONFIG.replace(num_layers=1, layer_types=()), stored)
    write_zeros(tmp_path / "large", CONFIG, stored)
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "small", tmp_path / "large", target],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    before, after = map(int, finished.stdout.split())
    needed = estimate_memory(CONFIG, np.dtype(jnp.dtype(target)))
    assert needed.weights > 150e6
    assert 0.9 * needed.weights < after - before < needed.weights + needed.transient + 16e6


def test_an_estimate_counts_what_is_allocated():
    config = CONFIG.replace(num_layers=2, layer_types=(), tied_head=True)
    estimate = estimate_memory(config, np.dtype(np.float16), capacity=100, batch_size=3)
    leaves = jax.tree.leaves(param_shapes(config, jnp.float16))
    cache = Network({"norm": {"scale": jnp.zeros(1, jnp.float16)}}, config).empty_cache(100)
    assert estimate.weights == sum(leaf.size * 2 for leaf in leaves)
    assert estimate.cache == 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    assert estimate.transient == 2 * max(leaf.size * 2 for leaf in leaves)


def test_what_cannot_fit_is_refused_with_figures(monkeypatch, saved_folder):
    wide, one_layer = np.dtype(np.float32), CONFIG.replace(num_layers=1, layer_types=())
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000_000)
    check_network_fits(one_layer, wide)
    check_cache_fits(one_layer, wide, capacity=4000, batch_size=5)
    with pytest.raises(CheckpointError, match=r"weights 0\.30.* GB in float32.* 0\.1 GB are avail"):
        check_network_fits(CONFIG, wide)
    with pytest.raises(
        CheckpointError, match=r"50 texts of 4000 tokens need 0\.41 GB.*2,048 bytes"
    ):
        check_cache_fits(one_layer, wide, capacity=4000, batch_size=50)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(CheckpointError, match="GB are available"):
        load(saved_folder)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    check_cache_fits(CONFIG, wide, capacity=10**9, batch_size=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": "x"}, "capacity must be a whole number, got 'x'"),
        ({"capacity": -100}, "capacity must be at least 0, got -100"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"config": 5}, "config must be of type ModelConfig, got 5"),
    ],
)
def test_what_is_no_size_is_named(arguments, message):
    asked = {"config": CONFIG, "dtype": np.dtype(np.float32), "capacity": 1}
    for call in (estimate_memory, check_cache_fits):
        with pytest.raises(ValueError, match=message):
            call(**{**asked, "batch_size": 1, **arguments})


def test_memory_is_asked_for_where_arrays_go():
    available = memory.available_memory()
    assert available is None or available > 1e6


def test_a_container_has_what_its_limit_leaves(tmp_path):
    assert memory._container_memory(tmp_path) is None
    (tmp_path / "memory.stat").write_text("file 900\nanon 300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._container_memory(tmp_path) == 700


def test_a_process_has_what_its_limits_leave(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    none = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_DATA: none, resource.RLIMIT_AS: none}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], none))
    status = tmp_path / "status"
    assert memory._process_memory(status) is None
    status.write_text("Name:\tpython\nVmSize:\t     500 kB\nVmData:\t     300 kB\n")
    assert memory._process_memory(status) is None
    limits[resource.RLIMIT_DATA] = 1000 * 1024
    assert memory._process_memory(status) == 700 * 1024
    limits[resource.RLIMIT_AS] = 600 * 1024
    assert memory._process_memory(status) == 100 * 1024
    limits[resource.RLIMIT_AS] = 400 * 1024
    assert memory._process_memory(status) == 0
