"""The Ray stage: what it refuses, and, where Ray is installed, whole datasets."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import pytest

from jaxspec.batch import ray as stage

ROOT = Path(__file__).resolve().parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install '.[ray]'")


class Dataset:
    """As much of one as is asked before anything runs."""

    def columns(self):
        return ["question", "id"]


def test_a_missing_column_is_named(monkeypatch):
    monkeypatch.setattr(stage, "_ray_data", lambda: None)
    with pytest.raises(ValueError, match="prompt: the dataset has no column 'prompt', only quest"):
        stage.decode(Dataset(), "demo")
    with pytest.raises(ValueError, match="row_id: the dataset has no column 'name'"):
        stage.decode(Dataset(), "demo", prompt="question", row_id="name")


@pytest.mark.parametrize("name", ["actors", "rows_per_call"])
def test_counts_begin_with_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        stage.decode(Dataset(), "demo", **{name: 0})


@pytest.mark.parametrize("row_id", [None, -1, 1 << 31, "\ud800", 0.5])
def test_an_id_that_names_nothing_is_an_error_of_its_row(row_id):
    row = stage._row(1, row_id, "abc")
    assert "id must be" in row.error
    assert row.prompt is None
    assert stage._row(1, "a", "abc").error is None


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxspec-decoding\[ray\]'"):
        stage.decode(Dataset(), "demo")


def test_an_actor_keeps_its_matrices_as_asked(folder, monkeypatch):
    class Local(Dataset):
        def map_batches(self, actor, fn_constructor_kwargs, **_):
            return actor(**fn_constructor_kwargs)

    monkeypatch.setattr(stage, "_ray_data", Mock)
    actor = stage.decode(Local(), folder, prompt="question", weights="int8")
    assert actor._model.params["embed"]["embedding"].dtype == jnp.int8


@pytest.mark.slow
@needs_ray
def test_two_actors_of_which_one_is_killed_lose_nothing(folder, environment, tmp_path):
    """Runs in a separate process: Ray starts several, and they must end with it."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.batch.ray_job", folder, str(out), str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(out.read_text())
    (killed,) = said["killed"]
    victim, _, num_tables = killed.partition("-")
    assert int(num_tables) >= 1  # it was in a table after these
    # Two, and the one that took the place of the killed one.
    assert len(said["actors"]) >= 3
    assert f"actor-{victim}" in said["actors"]
    # Every row once, and each as it is without Ray.
    assert said["with_ray"] == said["without"]
    assert [row["id"] for row in said["with_ray"]] == sorted([*range(64), 1000])
    assert sum(row["error"] is not None for row in said["with_ray"]) == 1
