"""Suites of files for LiteRT: size, memory, larger and modelled targets, GPUs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from benchmarks.footprint import Exported, Opened, RandomModel, measure_export, measure_opening
from benchmarks.gpu_passes import check_passes
from benchmarks.harness import Advance, Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import PROMPT_SETS
from benchmarks.suites.litert import (
    CAPACITY,
    EAGLE_TREE,
    NEEDS,
    SEARCHED,
    open_file,
    page_of,
    shipped_head,
    target,
)
from jaxspec.checkpoint import load, shipped_folders
from jaxspec.commands.methods import DEER, DRAFT, EAGLE_HEAD, MADE_FOR, SKIPS
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.drafters import (
    AdaptiveExit,
    Deer,
    DrafterLike,
    DraftModel,
    Eagle,
    LayerSkip,
    TokenRecycling,
)
from jaxspec.measure.figures import PLAIN
from jaxspec.measure.timing import time_in_turns
from jaxspec.mobile.contents import BUNDLES, ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.gpu import check_gpu
from jaxspec.mobile.profile import export_kit, measure_here, signature_program
from jaxspec.mobile.quantize import QUANTIZATIONS, check_quantization
from jaxspec.mobile.report import compare_quantizations, quality_table
from jaxspec.tuning import AcceptanceTable, LatencyProfile, load_acceptance, search_tree

HUNDRED_MILLION = RandomModel(num_layers=24, embed_dim=576, mlp_dim=1536, num_heads=9)
"""A target of 100 million weights, of which a draft pass reads 7 %; of 7 billion it reads 5 %."""
SIZES = (
    RandomModel(num_layers=12, embed_dim=576, mlp_dim=1536, num_heads=9),
    HUNDRED_MILLION,
    RandomModel(num_layers=24, embed_dim=1152, mlp_dim=3072, num_heads=18),
)
"""About 50, 100 and 400 million weights."""
# litert-files, litert-scale ---------------------------------------------------------------------


def _measure_files(run: SuiteRun) -> Page:
    model, ids = target(run)
    rows, notes, figures = [], [], []
    lacking = missing_for_gpu()
    if lacking is not None:
        notes.append(f"No file was opened on a GPU: {lacking}.")
    with run.steps(len(QUANTIZATIONS) * (1 + len(BUNDLES))) as advance:
        shapes = ExportConfig(capacity=CAPACITY, check_gpu_ops=False)
        qualities = compare_quantizations(model, ids, shipped_head(model), shapes, advance)
        for bundle in BUNDLES:
            for name, recipe in QUANTIZATIONS.items():
                advance(f"{bundle}, {name}")
                if bundle == "gpu" and recipe is not None and not recipe.on_gpu:
                    continue
                config = ExportConfig(capacity=CAPACITY, bundle=bundle, quantization=name)
                with TemporaryDirectory() as folder:
                    exported = measure_export(Path(folder), MADE_FOR, EAGLE_HEAD, config)
                    path, cache = Path(folder) / MODEL_FILE, Path(folder) / "weights.cache"
                    opened = {
                        "CPU": measure_opening(path),
                        "CPU, weight cache": measure_opening(path, weight_cache=cache),
                    }
                    if bundle == "gpu" and lacking is None:
                        opened["GPU"] = measure_opening(path, "gpu")
                rows += [_file_row(bundle, name, exported, *each) for each in opened.items()]
                entry = {"bundle": bundle, "quantization": name, **exported._asdict()}
                figures.append({**entry, "opened": opened})
    about = (
        f"{model.name} with {EAGLE_HEAD} over its searched tree, capacity {CAPACITY}, 1 thread. "
        "Each export and each opening has its own process. RAM: by how much that grew until it had "
        "called `prefill_64`, `decode` and `step`. First token: from opening the file, its "
        "checksum, the tokenizer and 32 tokens of prompt included; next prompt: another of that "
        "length. A GPU made of software keeps its memory in RAM, and its times mean nothing."
    )
    columns = [
        *("bundle", "weights", "MB", "x float32 weights", "export s", "export peak GB"),
        *("opened on", "RAM MB", "not backed by a file", "first token s", "next prompt s"),
    ]
    fewer = (
        f"Over {len(ids)} held-out prompts, next to float32: divergence of the distribution (KL), "
        "how often the likeliest token is the same, and tau of `step`, bonus token INCLUDED."
    )
    sections = [
        Section(text=[about], columns=columns, rows=rows, notes=notes),
        Section("What fewer bits cost", [fewer], *quality_table(qualities)),
    ]
    return page_of(sections, {"files": figures, "quantizations": qualities})


def _file_row(bundle: str, name: str, exported: Exported, where: str, opened: Opened) -> list[str]:
    return [
        bundle,
        name,
        f"{exported.size / 1e6:.1f}",
        f"{exported.size / exported.weight_bytes:.3f}",
        f"{exported.seconds:.1f}",
        f"{exported.peak_bytes / 1e9:.2f}",
        where,
        f"{opened.resident_bytes / 1e6:.0f}",
        f"{opened.anonymous_bytes / 1e6:.0f}",
        f"{opened.first_token_seconds:.2f}",
        f"{opened.next_first_token_seconds:.2f}",
    ]


def _measure_scale(run: SuiteRun) -> Page:
    rows, figures, points = [], [], {}
    with run.steps(2 * len(SIZES)) as advance:
        for name in ("float32", "int4"):
            for sizes in SIZES:
                advance(f"{name}, {sizes.num_layers} layers of {sizes.embed_dim}")
                config = ExportConfig(capacity=CAPACITY, quantization=name, bundle="gpu")
                with TemporaryDirectory() as folder:
                    exported = measure_export(Path(folder), sizes, None, config)
                points.setdefault(name, []).append(exported)
                rows.append(
                    [
                        f"{exported.weight_bytes / 4e6:.0f} million",
                        name,
                        f"{exported.size / 1e6:.0f}",
                        f"{exported.seconds:.0f}",
                        f"{exported.loaded_bytes / 1e9:.2f}",
                        f"{exported.peak_bytes / 1e9:.2f}",
                        f"{exported.peak_bytes / exported.weight_bytes:.1f}",
                    ]
                )
                figures.append({"quantization": name, **exported._asdict()})
    slopes = {name: _slopes(several) for name, several in points.items()}
    notes = [
        f"{name}: each further byte of float32 weights adds {of_weights:.1f} bytes to the peak; "
        f"above the loaded model, each further byte of the file adds {of_file:.1f}."
        for name, (of_weights, of_file) in slopes.items()
    ]
    about = (
        "Random weights, an EAGLE-1 head over its 25 nodes, the bundle for GPUs, capacity "
        f"{CAPACITY}. The peak is that of a process that makes the weights, loaded as float32, and "
        "exports them, libraries included."
    )
    columns = ["weights", "quantized", "file MB", "seconds", "loaded GB", "peak GB"]
    columns += ["peak x float32 weights"]
    table = Section(text=[about], columns=columns, rows=rows, notes=notes)
    return page_of([table], {"exports": figures, "slopes": slopes})


def _slopes(several: Sequence[Exported]) -> tuple[float, float]:
    """Returns slopes of the peak over bytes of weights, and of an export's memory over its file."""
    peaks = [each.peak_bytes for each in several]
    added = [each.peak_bytes - each.loaded_bytes for each in several]
    whole = np.polyfit([each.weight_bytes for each in several], peaks, 1)
    above = np.polyfit([each.size for each in several], added, 1)
    return float(whole[0]), float(above[0])


# litert-modelled --------------------------------------------------------------------------------

MODELLED_CAPACITY = 128
"""With it, caches are to these weights what those of 1024 places are to 7 billion in int4."""
_ACCEPTANCE = "eagle1-vicuna7b-tau-4.06-inferred"


class ModelledStep(NamedTuple):
    """One tree.

    Attributes:
        name: name of the tree.
        nodes: draft tokens, the root EXCLUDED.
        tau: tokens per round, bonus INCLUDED, by the acceptance table: published or inferred.
        step_seconds: median, measured, of the file's `step`, or of `decode` for plain decoding.
    """

    name: str
    nodes: int
    tau: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tau over the time of a step."""
        return self.tau / self.step_seconds


class Modelled(NamedTuple):
    """All trees on one random target.

    Attributes:
        quantization: quantization of the files.
        profile: measured times of passes.
        paths: the searched tree.
        steps: steps over each tree, plain decoding first.
    """

    quantization: str
    profile: LatencyProfile
    paths: Sequence[RankPath]
    steps: tuple[ModelledStep, ...]


def measure_modelled(
    sizes: RandomModel,
    acceptance: AcceptanceTable,
    quantization: str = "int4",
    capacity: int = MODELLED_CAPACITY,
    repeats: int = 15,
    advance: Advance = lambda _: None,
) -> Modelled:
    """Times a random target's passes, searches the fastest tree, and times whole steps over it.

    The times of a pass depend on its shapes and not on the weights' values, so a target of random
    weights can have any size. How many drafts it would accept is taken from the table.

    Args:
        sizes: sizes of the target and its head.
        acceptance: acceptance of the drafter that is supposed.
        quantization: quantization of the files.
        capacity: places of a file's cache.
        repeats: runs of each function, in turns.
        advance: told what is measured next, four times.
    """
    model, head = sizes.make()
    shapes = ExportConfig(
        capacity=capacity, bundle="gpu", quantization=quantization, check_gpu_ops=False
    )
    with TemporaryDirectory() as folder:
        advance(f"{quantization}: timing passes")
        export_kit(model, folder, Eagle.of(head), shapes)
        profile = measure_here(Path(folder) / MODEL_FILE, 1, repeats)
        best = search_tree(acceptance, profile).best_draft
        trees = {EAGLE_TREE: EAGLE_PATHS, SEARCHED: best.paths}
        programs = {}
        for name, paths in trees.items():
            advance(f"{quantization}: exporting with {name}")
            file = open_file(folder, name, model, Eagle.of(head, paths), shapes)
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
    return Modelled(quantization, profile, best.paths, tuple(steps))


def _measure_modelled(run: SuiteRun) -> Page:
    acceptance, sizes = load_acceptance(_ACCEPTANCE), HUNDRED_MILLION
    names = run.settings["quantize"].split(",")
    for name in names:
        check_quantization(name)
    with run.steps(4 * len(names)) as advance:
        found = [measure_modelled(sizes, acceptance, name, advance=advance) for name in names]
    about = (
        f"MODELLED: a target of random weights ({sizes.num_layers} layers of {sizes.embed_dim}, "
        f"100 million weights, vocabulary {sizes.vocab_size}) with an EAGLE-1 head, capacity "
        f"{MODELLED_CAPACITY} (caches are to these weights what those of 1024 places are to 7 "
        "billion in int4), 1 thread. Times are measured; tau (tokens per round, bonus token "
        f"INCLUDED) is not: it comes from a table. {acceptance.source}"
    )
    columns = ["method", "nodes", "tau, not measured", "step ms", "tokens/s, modelled", "x plain"]
    sections = [
        Section(
            each.quantization,
            columns=columns,
            rows=[
                [
                    step.name,
                    str(step.nodes),
                    f"{step.tau:.2f}",
                    f"{1e3 * step.step_seconds:.2f}",
                    f"{step.tokens_per_second:.2f}",
                    f"{step.tokens_per_second / each.steps[0].tokens_per_second:.2f}",
                ]
                for step in each.steps
            ],
        )
        for each in found
    ]
    return page_of([Section(text=[about]), *sections], {"modelled": found})


# litert-gpu -------------------------------------------------------------------------------------

_GPU_TIMEOUT = 7200.0
_FORCED = 8
"""Tokens of known text that a GPU reads in one pass."""
GPU_TOKENS = 16
_RECYCLING = "token recycling"
_GPU_FILES = (
    (EAGLE_HEAD, "gpu", "float32"),
    (EAGLE_HEAD, "gpu", "int8"),
    (EAGLE_HEAD, "gpu", "int4"),
    (EAGLE_HEAD, "cpu", "float32"),
    (DEER, "gpu", "float32"),
    (DEER, "gpu", "int8"),
    (SKIPS, "cpu", "float32"),
    *((SKIPS, "gpu", name) for name in ("int8", "int4")),
    *((DRAFT, "gpu", name) for name in ("float32", "int8", "int4")),
    *((_RECYCLING, "gpu", name) for name in ("float32", "int8", "int4")),
)
"""Drafters, bundles and weights."""


def _measure_gpu(run: SuiteRun) -> Page:
    model, ids = target(run)
    drafters: dict[str, DrafterLike] = {
        EAGLE_HEAD: shipped_head(model),
        _RECYCLING: TokenRecycling(),
    }
    if DEER in shipped_folders():
        drafters[DEER] = Deer.of(load(DEER), _FORCED, num_nodes=_FORCED)
    if SKIPS in shipped_folders():
        drafters[SKIPS] = LayerSkip.read(SKIPS, adaptive=AdaptiveExit())
    if DRAFT in shipped_folders():
        drafters[DRAFT] = DraftModel.of(load(DRAFT), 3)
    rows, notes, alike = [], [], True
    with run.steps(len(_GPU_FILES)) as advance:
        for label, bundle, name in _GPU_FILES:
            advance(f"{label}, {bundle}, {name}")
            if label not in drafters:
                notes.append(f"{label} is not here, so no file with it was made.")
                continue
            config = ExportConfig(
                capacity=CAPACITY, bundle=bundle, quantization=name, verify=(_FORCED,)
            )
            # Passes over known text are compared with the CPU's float32, so only in that.
            known = ids if (label, bundle, name) == _GPU_FILES[0] else ()
            known = [text for text in known if len(text) > _FORCED]
            with TemporaryDirectory() as folder:
                export(model, folder, drafters[label], config)
                path = Path(folder) / MODEL_FILE
                checked = check_gpu(path, ids[:4], GPU_TOKENS, _GPU_TIMEOUT)
                passes = check_passes(path, known, _GPU_TIMEOUT) if known else None
            for loop in checked.loops:
                same = loop.num_texts - len(loop.divergences)
                rows.append(
                    [
                        *(label, bundle, name, str(len(checked.signatures))),
                        "yes" if checked.fully_accelerated else "NO",
                        loop.name,
                        f"{same} of {loop.num_texts}, {checked.reference}",
                        f"{min(loop.counts)} to {max(loop.counts)}",
                    ]
                )
            if passes is not None:
                notes.append(
                    f"{bundle}, {name}: one pass of `verify_{_FORCED}` over known text of each of "
                    f"{len(known)} prompts: after {passes.num_same} of {passes.num_tokens} tokens "
                    "the likeliest one is the CPU's."
                )
                alike = alike and passes.num_same == passes.num_tokens
            notes += checked.problems
            alike = alike and not checked.problems
    columns = [
        *("drafter", "bundle", "weights", "functions", "all on the GPU", "loop"),
        *("texts that are the same", "tokens per round, bonus INCLUDED"),
    ]
    about = (
        f"{model.name} with {EAGLE_HEAD} over its searched tree; with {DEER} and trees of "
        f"{_FORCED} nodes in blocks of {_FORCED}; with the layers of {SKIPS} left out and the "
        f"adaptive exit; with chains of 3 by {DRAFT}; and with tokens recycled. Capacity "
        f"{CAPACITY}, on LiteRT's GPU accelerator in float32: 4 prompts, {GPU_TOKENS} new tokens."
    )
    table = Section(text=[about], columns=columns, rows=rows, notes=notes)
    return page_of([table], {"rows": rows, "notes": notes}, alike)


LITERT_FILES: Mapping[str, Suite] = {
    "litert-files": Suite(
        title="Files for LiteRT: size, memory, first token",
        about="size, memory and first token of files, and what fewer bits cost",
        measure=_measure_files,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=4,
        needs=NEEDS,
    ),
    "litert-scale": Suite(
        title="Exporting larger models",
        about="memory and time of exporting models of up to 400 million weights",
        measure=_measure_scale,
    ),
    "litert-modelled": Suite(
        title="LiteRT with a drafter as good as the published one",
        about="measured steps of a 100-million target with the published acceptance",
        measure=_measure_modelled,
        takes={"quantize": "int4,int8"},
    ),
    "litert-gpu": Suite(
        title="LiteRT's GPU accelerator",
        about="files on LiteRT's GPU accelerator against the CPU",
        measure=_measure_gpu,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        needs=NEEDS,
    ),
}
