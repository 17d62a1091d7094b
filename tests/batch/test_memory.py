"""The memory that a job really takes: pages of a separate process, in place of XLA's arithmetic."""

import ctypes
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxspec import Deer, DraftModel, Eagle, GenerationConfig, PromptLookup
from jaxspec.batch import Collector, JobSettings, rows_of, run
from jaxspec.checkpoint import Model
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import ModelConfig
from tests.checkpoint.networks import random_network
from tests.laws.drafters import FORKED, PATHS, diffuser, eagle_head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/proc/self/clear_refs", os.W_OK),
        reason="needs Linux, where a process's peak is read and set back in /proc/self",
    ),
]

# A few rows take much more than a process's noise of some megabytes: 4096 bytes of cache a token.
CONFIG = ModelConfig(
    vocab_size=256,
    embed_dim=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=128,
    max_positions=8192,
)
BYTES_PER_TOKEN = {"plain": 4096, "lookup": 4096, "eagle": 8192, "draft model": 8192, "deer": 8192}
"""The drafter's cache included."""


def wide_model(name: str) -> tuple[Model, LoadedDrafter | PromptLookup | None]:
    """With a drafter of this name."""
    network = random_network(CONFIG)
    drafter = {
        "plain": lambda: None,
        "lookup": lambda: PromptLookup(num_speculative_tokens=3),
        "eagle": lambda: LoadedDrafter(Eagle(FORKED, chunk=8), eagle_head(network)),
        "draft model": lambda: LoadedDrafter(DraftModel(paths=PATHS), network),
        "deer": lambda: LoadedDrafter(Deer(3), diffuser(network, 4)),
    }[name]()
    return Model(network, None, "wide"), drafter


def status(name: str) -> int:
    """Bytes, by a line of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.fixture
def process():
    """Calls a function in a process that has imported all and begun nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


class Taken(NamedTuple):
    """Bytes of a job.

    peak: the most that its process took, above what it had when the job began.
    states, scratch: as estimated.
    """

    peak: int
    states: int
    scratch: int


def taken(name: str, batch_size: int, capacity: int, longest: int) -> Taken:
    """By the second of two equal jobs: whatever there is to compile and to load is there."""
    model, drafter = wide_model(name)
    lengths = np.random.default_rng(0).integers(longest // 2, longest, batch_size + 2)
    rows = rows_of([[token % 251 for token in range(length)] for length in lengths])
    config = GenerationConfig(max_new_tokens=6)
    for _ in range(2):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        before = status("VmRSS")
        settings = JobSettings(batch_size=batch_size, capacity=capacity)
        report = run(model, rows, Collector(), config, drafter, settings=settings)
    return Taken(status("VmHWM") - before, report.state_bytes_estimated, report.scratch_bytes)


@pytest.mark.parametrize(
    ("name", "batch_size", "capacity", "longest"),
    [
        ("plain", 32, 2048, 100),
        ("plain", 4, 8192, 7000),
        ("eagle", 16, 2048, 100),
        ("eagle", 4, 8192, 7000),
        ("deer", 32, 1024, 100),
        ("deer", 4, 8192, 7000),
    ],
)
def test_the_peak_of_a_process_is_what_was_estimated(process, name, batch_size, capacity, longest):
    found = process(taken, name, batch_size, capacity, longest)
    assert found.states < found.peak <= 1.1 * (found.states + found.scratch)


class Outcome(NamedTuple):
    num_done: int
    batch_size: int


def decoded_within_a_limit(seed: int) -> Outcome:
    """Decodes 20 rows, 2 to 24 of which would fill the memory that the system still gives."""
    import resource

    rng = np.random.default_rng(seed)
    # The limit counts stacks of threads, and of these there are as many as cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    name = sorted(BYTES_PER_TOKEN)[seed % len(BYTES_PER_TOKEN)]
    model, drafter = wide_model(name)
    left = int(rng.uniform(7e8, 12e8))  # compiling alone takes up to 4e8
    capacity = int(left / rng.uniform(2, 24) / BYTES_PER_TOKEN[name])
    longest = int(10 ** rng.uniform(1, 3.3))
    rows = rows_of([rng.integers(0, 255, n).tolist() for n in rng.integers(1, longest, 20)])
    config = GenerationConfig(
        max_new_tokens=int(rng.integers(1, 8)),
        temperature=float(rng.integers(0, 2)),
        logprobs=bool(rng.integers(0, 2)),
    )
    limit = status("VmData") + left
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    report = run(model, rows, Collector(), config, drafter, settings=JobSettings(capacity=capacity))
    return Outcome(report.num_done, report.batch_size)


@pytest.mark.parametrize("seed", range(20))
def test_automatic_rows_at_once_finish_in_what_memory_is_left(process, seed):
    found = process(decoded_within_a_limit, seed)
    assert found.num_done == 20
    assert found.batch_size < 32, "any number fitted"
