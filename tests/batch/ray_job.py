"""A dataset decoded on a local Ray by two actors, one of which is killed on the way.

python -m tests.batch.ray_job MODEL_FOLDER OUT.json SCRATCH_FOLDER
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec import batch
from jaxspec.batch import ray as stage

CONFIG = jaxspec.GenerationConfig(max_new_tokens=24, temperature=1.0)
FIELDS = ("id", "sample", "text", "tokens", "finish_reason", "error")


def note(folder: Path):
    """Makes a drafter, leaves word of the actor that asked for it, and watches its jobs."""

    def make(model: Any) -> jaxspec.PromptLookup:
        (folder / f"actor-{os.getpid()}").touch()
        stage.run = functools.partial(batch.run, progress=SecondTable(folder))
        return jaxspec.PromptLookup()

    return make


class SecondTable:
    """Progress of an actor: the first that has begun a second table offers itself, and waits."""

    def __init__(self, folder: Path):
        self._folder, self._tables = folder, 0

    def __call__(self, report: batch.JobReport) -> None:
        if report.num_done == report.num_records:
            self._tables += 1
        elif self._tables:
            with contextlib.suppress(FileExistsError):
                (self._folder / "victim").mkdir()
                (self._folder / "victim" / f"{os.getpid()}-{self._tables}").touch()
                time.sleep(300)  # until it is killed


def kill_one(folder: Path, killed: list[str]) -> None:
    """The actor that offers itself; notes it with the number of tables it had decoded."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for offered in folder.glob("victim/*"):
            os.kill(int(offered.name.partition("-")[0]), signal.SIGKILL)
            killed.append(offered.name)
            return
        time.sleep(0.05)


def main(model: str, out: Path, folder: Path) -> None:
    """Decodes with Ray and without, and writes both."""
    import ray

    rows: list[dict] = [{"id": i, "prompt": f"abc abc {i}"} for i in range(64)]
    rows.append({"id": 1000, "prompt": ""})
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    killed: list[str] = []
    thread = threading.Thread(target=kill_one, args=(folder, killed))
    thread.start()
    dataset = ray.data.from_items(rows)
    decoded = stage.decode(
        dataset,
        model,
        CONFIG,
        note(folder),
        7,
        actors=2,
        rows_per_call=8,
        weights="int8",
        settings=batch.JobSettings(batch_size=4),
    )
    found = sorted(decoded.take_all(), key=lambda row: row["id"])
    thread.join()
    ray.shutdown()

    output = batch.Collector()
    asked = [batch.Row(line, row["id"], row["prompt"]) for line, row in enumerate(rows, start=1)]
    drafter, settings = jaxspec.PromptLookup(), batch.JobSettings(batch_size=4)
    target = jaxspec.load(model, weights="int8")
    batch.run(target, asked, output, CONFIG, drafter, 7, settings)
    plain = sorted(output.records, key=lambda record: record["id"])
    out.write_text(
        json.dumps(
            {
                "killed": killed,
                "actors": [path.name for path in folder.glob("actor-*")],
                "with_ray": [_fields(row) for row in found],
                "without": [_fields(row) for row in plain],
            }
        )
    )


def _fields(row: Any) -> dict[str, Any]:
    values = {name: row.get(name) for name in FIELDS}
    tokens = values["tokens"]
    return {**values, "tokens": None if tokens is None else [int(token) for token in tokens]}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
