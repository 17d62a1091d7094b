"""What steps would give with a drafter as good as the published one: times are measured, tau not.

The times of a pass depend on its shapes and not on what the weights are, so a target of random
weights can be as large as one likes. How many drafts it would accept is taken from the paper.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from jaxspec.bench.timing import time_in_turns
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.drafters import Eagle
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.mobile.footprint import RandomModel
from jaxspec.mobile.profile import export_kit, measure_here, signature_program
from jaxspec.mobile.runtime import MobileModel
from jaxspec.trees import AcceptanceTable, LatencyProfile, TreeSearch, search_tree

HUNDRED_MILLION = RandomModel(num_layers=24, embed_dim=576, mlp_dim=1536, num_heads=9)
"""A target of 100 million weights, of which a draft pass reads 7 %; of 7 billion it reads 5 %."""

SLOTS = 128
"""With so many, caches are to these weights what those of 1024 slots are to 7 billion in int4."""
NUM_PARTS = 4
PLAIN = "plain"


class ModelledStep(NamedTuple):
    """One tree.

    nodes: draft tokens, the root EXCLUDED.
    tau: tokens per round, bonus INCLUDED, by the acceptance table: published or inferred.
    step_seconds: of the file's `step`, or of `decode` for plain decoding; median, measured.
    """

    name: str
    nodes: int
    tau: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.step_seconds


class Modelled(NamedTuple):
    """All trees on one random target.

    steps: plain decoding first.
    acceptance: where the table comes from.
    """

    quantization: str
    profile: LatencyProfile
    search: TreeSearch
    steps: tuple[ModelledStep, ...]
    acceptance: str


def measure_modelled(
    sizes: RandomModel,
    acceptance: AcceptanceTable,
    quantization: str = "int4",
    slots: int = SLOTS,
    repeats: int = 15,
    num_threads: int = 1,
    advance: Callable[[str], None] = lambda _: None,
) -> Modelled:
    """Times a random target's passes, searches the fastest tree, and times whole steps over it.

    Args:
        sizes: of the target and its head.
        acceptance: of the drafter that is supposed.
        quantization: of the files.
        slots: of the files.
        repeats: runs of each function, in turns.
        num_threads: of the CPU.
        advance: called with what is being done, `NUM_PARTS` times.
    """
    model, head = sizes.make()
    shapes = ExportConfig(slots=slots, bundle="gpu", quantization=quantization, check_gpu_ops=False)
    with TemporaryDirectory() as folder:
        advance(f"{quantization}: timing passes")
        export_kit(model, folder, Eagle.of(head), shapes)
        profile = measure_here(Path(folder) / MODEL_FILE, num_threads, repeats)
        search = search_tree(acceptance, profile)
        trees: dict[str, tuple[RankPath, ...]] = {
            "EAGLE's tree": EAGLE_PATHS,
            "searched tree": search.best_draft.paths,
        }
        programs = {}
        for name, paths in trees.items():
            advance(f"{quantization}: exporting with {name}")
            export(model, Path(folder) / name, Eagle.of(head, paths), shapes)
            file = MobileModel(Path(folder) / name / MODEL_FILE, num_threads=num_threads)
            programs[name] = signature_program(file, "step")
            programs.setdefault(PLAIN, signature_program(file, "decode"))
        advance(f"{quantization}: timing steps")
        runs = time_in_turns(programs, repeats)
    seconds = {name: float(np.median(times)) for name, times in runs.items()}
    steps = [ModelledStep(PLAIN, 0, 1.0, seconds[PLAIN])]
    steps += [
        ModelledStep(name, len(paths), acceptance.tau(paths), seconds[name])
        for name, paths in trees.items()
    ]
    return Modelled(quantization, profile, search, tuple(steps), acceptance.source)
