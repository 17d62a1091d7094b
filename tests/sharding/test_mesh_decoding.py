"""Decoding on a mesh of eight virtual devices is decoding on one, up to rounding."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws.drafters import DRAFTERS
from tests.models.families import FAMILIES
from tests.sharding.cases import LENGTHS, NEW_TOKENS

TIE = 1e-4
"""Logits that lie closer than this may change places when sums are made in another order."""

QUICK = ("family: llama", "family: qwen3_moe", "drafter: lookup")
SLOW = (
    *(f"family: {name}" for name in FAMILIES if f"family: {name}" not in QUICK),
    *(f"drafter: {name}" for name in DRAFTERS if f"drafter: {name}" not in QUICK),
    *("rows alone", "sampled", "streamed", "int8", "experts divided"),
)


PROCESSES = 6
"""For the slow ones: starting a process takes as long as a case or two."""

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling takes longer than running here; what is divided and sent is decided before.
    *("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"),
)


def on_eight_devices(module: str, *args: str) -> None:
    """Runs a module in a process that sees eight devices."""
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def quick_outcomes(tmp_path_factory):
    """By name, in one process."""
    out = tmp_path_factory.mktemp("mesh") / "out.json"
    on_eight_devices("tests.sharding.cases", str(out), *QUICK)
    return json.loads(out.read_text())


def assert_same_rows(name, outcome):
    assert len(outcome["many"]) == len(LENGTHS), name
    assert all(len(row) == NEW_TOKENS for row in outcome["many"]), name
    assert max(outcome["gaps"], default=0.0) < TIE, name
    same = [one == many for one, many in zip(outcome["one"], outcome["many"], strict=True)]
    assert sum(same) + len(outcome["gaps"]) == len(LENGTHS), name


def assert_caches_stay(name, outcome):
    """Sums of blocks travel; no cache does, nor anything else as large as one.

    Sums have the model's width, which no cache's last axis has. They are large only where a drafter
    that keeps nothing reads the whole text.
    """
    moved = [
        shape
        for kind, shapes in outcome["collectives"].items()
        for shape in shapes
        if math.prod(shape) >= outcome["cache_numbers"]
        and not (kind == "all-reduce" and shape[-1] == outcome["width"])
    ]
    assert moved == [], name


@pytest.mark.parametrize("name", QUICK)
def test_rows_are_those_of_one_device(name, quick_outcomes):
    assert_same_rows(name, quick_outcomes[name])
    assert_caches_stay(name, quick_outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PROCESSES))
def test_rows_of_every_family_and_drafter_are_those_of_one_device(part, tmp_path):
    names = SLOW[part::PROCESSES]
    on_eight_devices("tests.sharding.cases", str(tmp_path / "out.json"), *names)
    outcomes = json.loads((tmp_path / "out.json").read_text())
    assert sorted(outcomes) == sorted(names)
    for name, outcome in outcomes.items():
        assert_same_rows(name, outcome)
        assert_caches_stay(name, outcome)


@pytest.mark.slow
def test_jobs_on_a_mesh_write_what_one_device_writes(tmp_path):
    on_eight_devices("tests.sharding.jobs", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["many"] == found["one"]
    assert len(found["one"]) == found["num_records"]
    for one, many in found["canvases"]:
        assert one == many
    (one, one_held, _), (many, many_held, scratch) = found["bytes"]
    assert (one, many) == (one_held, many_held)
    # Texts and counters, which are no cache, are whole on both devices of the axis "model".
    assert one < many < 2 * one
    assert scratch > 0
    # A row is read alone, put into its slot, and decoded with the others.
    assert found["collectives"].keys() == {"read_prompt", "insert", "run_chunk"}
    assert found["collectives"]["insert"] == []
    moved = found["collectives"]["read_prompt"] + found["collectives"]["run_chunk"]
    assert {kind for kind, _ in moved} <= {"all-reduce", "all-gather", "collective-permute"}
    # At most the logits of a pass.
    assert max(math.prod(shape) for _, shape in moved) < found["cache_numbers"]


def test_a_pass_sums_twice_a_layer_and_gathers_nothing(quick_outcomes):
    """The list of all collectives in the loop: three layers, two rows a device, embed 24.

    A vocabulary of 61 is not divided by two, so embeddings and logits need none.
    """
    assert quick_outcomes["family: llama"]["collectives"] == {
        # Attention and MLP of each layer; is any row running, and how long is the longest.
        "all-reduce": [[2, 1, 24]] * 6 + [[], []]
    }


def test_a_divided_vocabulary_is_looked_up_and_searched_in_parts(quick_outcomes):
    """Two layers, three widths of pass: 1, 2 and 4 tokens, two rows a device."""
    found = quick_outcomes["drafter: lookup"]["collectives"]
    assert found.keys() == {"all-reduce"}
    blocks = [shape for shape in found["all-reduce"] if shape[-1:] == [16]]
    # Five a pass: the lookup of embeddings, and two for each layer.
    assert blocks == [[2, width, 16] for width in (4, 2, 1) for _ in range(5)]
    # The rest is a number or two for each token: the best logit of each part, and scalars.
    assert all(math.prod(shape) <= 2 * 4 for shape in found["all-reduce"] if shape not in blocks)
