"""A job of `jaxspec.batch` on one device and on a mesh of eight, in a process that sees eight.

python -m tests.sharding.jobs OUT.json
"""

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxspec import DenoiseConfig, SelfSpeculation, batch, denoise
from jaxspec.batch import slots, texts
from jaxspec.checkpoint import Model
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import LoadedDrafter
from jaxspec.sharding import make_mesh, mesh_of, shard
from tests.diffusion.networks import BLOCK, MASK, tiny_model
from tests.laws.drafters import DRAFTERS, network
from tests.sharding.cases import COLLECTIVES

VOCAB, BATCH, DEVICES = 24, 8, 8


class Spy:
    """A program of a job, whose text is kept when it is first called for a mesh."""

    def __init__(self, module: ModuleType, name: str):
        self.program, self.text = getattr(module, name), ""
        self.lower = self.program.lower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program."""
        if not self.text and mesh_of(args) is not None:
            self.text = self.lower(*args, **kwargs).compile().as_text()
        return self.program(*args, **kwargs)

    def collectives(self) -> list[tuple[str, list[int]]]:
        """Kind and shape of each."""
        return [
            (kind[1], [int(size) for size in shape.split(",") if size])
            for line in self.text.splitlines()
            if (kind := re.search(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", line))
            for shape in re.findall(r"\[([\d,]*)\]", line[: kind.start()].partition(" = ")[2])
        ]


def canvases(prompts: list[list[int]], cache: str, place: bool) -> list[list[Any]]:
    """Texts of a diffusion model: of a job, and of `denoise` with one row fewer."""
    model = tiny_model(block=BLOCK if cache == "blocks" else None)
    if place:
        model = Model(shard(model.network, make_mesh(4, 2)))
    settings = DenoiseConfig(max_new_tokens=8, block_length=BLOCK, cache=cache)
    few = [[token % MASK for token in prompt] for prompt in prompts]
    output, drafts = batch.Collector(), SelfSpeculation(2)
    jobs = batch.JobSettings(batch_size=4, drafting="always")
    batch.run(model, batch.rows_of(few), output, settings, drafts, settings=jobs)
    rows = sorted([one["line"], one["tokens"]] for one in output.records)
    direct = denoise(model, few[1:], settings, drafts)
    return [*rows, *[row.tokens.tolist() for row in direct]]


def main(out: Path) -> None:
    """Runs both jobs."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size=3 + i % 9).tolist() for i in range(12)]
    rows = [batch.Row(line, 100 + line, prompt) for line, prompt in enumerate(prompts, start=1)]
    config = GenerationConfig(max_new_tokens=16, num_samples=2, temperature=1.0)
    settings = batch.JobSettings(batch_size=BATCH, drafting="always")
    network_of_one = network(VOCAB, qk_norm=True)
    case = DRAFTERS["lookup"]
    found_canvases = [
        [canvases(prompts, cache, place) for place in (False, True)]
        for cache in ("none", "blocks", "prefix", "dual")
    ]
    modules = {"read_prompt": texts, "insert": slots, "run_chunk": texts}
    spies = {name: Spy(module, name) for name, module in modules.items()}
    for name, module in modules.items():
        setattr(module, name, spies[name])

    reports: list[batch.JobReport] = []

    def records(model: Model) -> list[list[Any]]:
        output = batch.Collector()
        drafter = LoadedDrafter(case.make(), ())
        reports.append(batch.run(model, rows, output, config, drafter, 3, settings))
        return sorted([one["line"], one["sample"], one["tokens"]] for one in output.records)

    found = {
        "canvases": found_canvases,
        "one": records(Model(network_of_one)),
        "many": records(Model(shard(network_of_one, make_mesh(4, 2)))),
        "num_records": len(rows) * config.num_samples,
        "collectives": {name: spy.collectives() for name, spy in spies.items()},
        # The keys of one layer on one device, capacity 64.
        "cache_numbers": math.prod((BATCH, 2, 8, 64)) // DEVICES,
        "bytes": [
            (report.state_bytes_estimated, report.state_bytes_held, report.scratch_bytes)
            for report in reports
        ],
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
