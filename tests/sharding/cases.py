"""Decodes on one device and on a mesh of eight, in a process that sees eight devices.

    python -m tests.sharding.cases OUT.json NAME ...

writes, by name: the rows of both, how close the logits are where rows part, and the collectives of
the program on the mesh.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.loop import decode
from jaxspec.core.types import LayerKV
from jaxspec.decoding.generate import generate, score
from jaxspec.decoding.request import GenerationConfig, prepare
from jaxspec.drafters import LoadedDrafter
from jaxspec.measure.timing import release_programs
from jaxspec.models import Network
from jaxspec.models.storage import stored_as
from jaxspec.sharding import make_mesh, on_mesh_of, shard
from tests.laws.drafters import DRAFTERS, PLAIN, Case, network
from tests.laws.test_hlo import LINE, inside_loops, read_hlo
from tests.models.families import FAMILIES, tiny

DEVICES, VOCAB = 8, 24
LENGTHS = (5, 12, 9, 1, 16, 8, 14)  # one fewer than the devices: a row fills up
NEW_TOKENS = 16
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


class Asked(NamedTuple):
    """One comparison.

    model: parts on the axis "model"; the other devices are for rows.
    streamed: decoded by the loop of the host.
    """

    target: Network
    case: Case
    model: int
    temperature: float = 0.0
    streamed: bool = False


def drafting_target() -> Network:
    return network(VOCAB, layer_types=("full", "sliding"), sliding_window=7, qk_norm=True)


def of_family(name: str) -> Asked:
    target = tiny(name)
    return Asked(target, PLAIN, 4 if target.config.num_kv_heads == 4 else 2)


ASKED = {
    **{f"family: {name}": lambda name=name: of_family(name) for name in FAMILIES},
    **{
        f"drafter: {name}": lambda case=case: Asked(drafting_target(), case, 2)
        for name, case in DRAFTERS.items()
    },
    "rows alone": lambda: Asked(drafting_target(), PLAIN, 1),
    "sampled": lambda: Asked(drafting_target(), DRAFTERS["lookup"], 2, temperature=0.8),
    "streamed": lambda: Asked(drafting_target(), DRAFTERS["lookup"], 2, streamed=True),
    "int8": lambda: Asked(rounded(drafting_target()), DRAFTERS["eagle 3"], 2),
    "experts divided": lambda: Asked(divided_experts(), PLAIN, 2),
}


def rounded(target: Network) -> Network:
    return dataclasses.replace(target, params=stored_as(target.params, "int8"))


def divided_experts() -> Network:
    """Six experts, where those of the family's example are five."""
    target = tiny("qwen3_moe")
    config = target.config.replace(experts=dataclasses.replace(target.config.experts, num=6))
    rng = np.random.default_rng(5)

    def more(leaf: jax.Array) -> np.ndarray:
        shape = tuple(6 if size == 5 else size for size in leaf.shape)
        return rng.normal(size=shape).astype(np.float32) * 0.25 + 0.1

    return Network(jax.tree.map(more, target.params), config)


def outcome(asked: Asked) -> dict:
    """Rows on one device and on the mesh, gaps where they part, and collectives."""
    vocab = asked.target.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, size=length).tolist() for length in LENGTHS]
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=asked.temperature)
    drafter = LoadedDrafter(asked.case.make(), asked.case.draft(asked.target))
    mesh = make_mesh(DEVICES // asked.model, asked.model)
    models = [Model(asked.target), Model(shard(asked.target, mesh))]
    rows = [
        [
            row.tokens.tolist()
            for row in generate(model, prompts, config, drafter, return_trace=asked.streamed)
        ]
        for model in models
    ]
    gaps = [
        gap_where_they_part(models[0], prompt, one, many)
        for prompt, one, many in zip(prompts, *rows, strict=True)
        if one != many
    ]
    request = prepare(models[1], prompts, config, drafter, 0)
    with on_mesh_of(request.params):
        lowered = decode.lower(*request._arrays(), drafter=request.drafter, plan=request.plan)
    return {
        "one": rows[0],
        "many": rows[1],
        "gaps": gaps,
        "collectives": collectives(lowered.compile().as_text()),
        "cache_numbers": cache_numbers(request),
        "width": asked.target.config.embed_dim,
    }


def gap_where_they_part(model: Model, prompt, one, many) -> float:
    """Between the logits of the two tokens."""
    place = next(i for i, pair in enumerate(zip(one, many, strict=False)) if pair[0] != pair[1])
    logits = score(model, [*prompt, *one[:place]]).logits[-1]
    return abs(float(logits[one[place]] - logits[many[place]]))


def collectives(text: str) -> dict[str, list[list[int]]]:
    """Shapes, largest first, of each kind of collective inside the loops of a program."""
    looped = {one.name for one in inside_loops(read_hlo(text))}
    found: dict[str, list[list[int]]] = {}
    for line in text.splitlines():
        kind = re.search(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        name = LINE.match(line)
        if kind and name and name[1] in looped:
            shapes = re.findall(r"\[([\d,]*)\]", line[: kind.start()])
            found.setdefault(kind[1], []).extend(
                [int(size) for size in shape.split(",") if size] for shape in shapes
            )
    return {kind: sorted(shapes, reverse=True) for kind, shapes in found.items()}


def cache_numbers(request) -> int:
    """Numbers of one device's share of the keys of one layer, which must not be sent."""
    config = request.params.target.config
    rows, capacity = request.num_rows, request.plan.capacities[0]
    return rows * config.num_kv_heads * config.head_dim * capacity // DEVICES


def main(out: Path, names: list[str]) -> None:
    """Writes what the cases give."""
    assert jax.device_count() == DEVICES
    assert LayerKV._fields == ("keys", "values")
    outcomes = {}
    for name in names:
        outcomes[name] = outcome(ASKED[name]())
        release_programs()
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
