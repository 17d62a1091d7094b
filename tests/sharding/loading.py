"""Loads folders on a mesh, in a process that sees eight devices, and says what that took.

    python -m tests.sharding.loading FOLDER OUT.json

with a target in FOLDER/target, the same as an Orbax folder in FOLDER/orbax and a head in
FOLDER/head.
"""

import json
import sys
import tracemalloc
from pathlib import Path

import jax
import numpy as np

from jaxspec.checkpoint import load, load_eagle, params
from jaxspec.sharding import make_mesh, mesh_of, parse_mesh


def main(folder: Path, out: Path) -> None:
    """Writes the figures."""
    plain = load(folder / "target")
    held: list[int] = []
    put = params.put

    def measured(*args):
        """Bytes of the host except those of the arrays: on CPUs devices use the host's memory."""
        array = jax.block_until_ready(put(*args))
        now, peak = tracemalloc.get_traced_memory()
        held.append(peak - now)
        del args
        tracemalloc.reset_peak()
        return array

    params.put = measured
    tracemalloc.start()
    model = load(folder / "target", mesh=make_mesh(2, 4))
    tracemalloc.stop()
    leaves = jax.tree.leaves(model.params)
    expected = jax.tree.leaves(plain.params)
    orbax = load(folder / "orbax", mesh=make_mesh(2, 4))
    head = load_eagle(folder / "head", model.network)
    figures = {
        "largest": max(leaf.nbytes for leaf in expected),
        "total": sum(leaf.nbytes for leaf in expected),
        "held": max(held),
        "equal": [
            bool(np.array_equal(*pair))
            for other in (leaves, jax.tree.leaves(orbax.params))
            for pair in zip(other, expected, strict=True)
        ],
        "same_digest": model.digest == plain.digest is not None,
        "on_one_device": sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
        "same_places": [
            one.sharding == other.sharding
            for one, other in zip(leaves, jax.tree.leaves(orbax.params), strict=True)
        ],
        "head_mesh": dict(mesh_of(head).shape),
        "errors": [
            refused(text, folder) for text in ("data=3", "data=1,model=8", "data=2,model=5")
        ],
    }
    out.write_text(json.dumps(figures))


def refused(text: str, folder: Path) -> str:
    """The message for a mesh that does not fit."""
    try:
        load(folder / "target", mesh=parse_mesh(text))
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
