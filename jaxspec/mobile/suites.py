"""The suites of `jaxspec bench --suite litert-NAME`: the shipped models as files for LiteRT."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.diffusion import BLOCKS, BOTH_SIDES
from jaxspec.bench.machine import this_machine
from jaxspec.bench.page import bullets, table
from jaxspec.bench.results import MADE_BY
from jaxspec.bench.shipped import (
    DEER,
    EAGLE_HEAD,
    MADE_FOR,
    SKIPS,
    SUITES,
    PromptSet,
    first_that_fit,
    read_prompt_set,
)
from jaxspec.checkpoint import (
    Model,
    load,
    load_eagle,
    shipped_folders,
    shipped_heads,
    shipped_models,
)
from jaxspec.denoising import DenoiseConfig, denoise
from jaxspec.drafters import Deer, Eagle, LayerSkip, LoadedDrafter
from jaxspec.generation import encode_prompt
from jaxspec.mobile.comparison import (
    ABOUT_COLUMNS,
    ABOUT_QUANTIZED,
    PLAIN,
    TITLE,
    Method,
    compare_on_litert,
    decode_in_turns,
    methods_table,
    num_parts,
    plainly,
    results_as_dicts,
    stepping,
    verifying,
)
from jaxspec.mobile.export import BUNDLES, MODEL_FILE, ExportConfig, export
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.filling import Filled, fill_in
from jaxspec.mobile.footprint import (
    Exported,
    Opened,
    RandomModel,
    measure_export,
    measure_opening,
)
from jaxspec.mobile.gpu import check_gpu
from jaxspec.mobile.loops import BlockDraft
from jaxspec.mobile.modelled import HUNDRED_MILLION, Modelled, measure_modelled
from jaxspec.mobile.modelled import NUM_PARTS as MODELLED_PARTS
from jaxspec.mobile.modelled import SLOTS as MODELLED_SLOTS
from jaxspec.mobile.parity import QUANTISED_TIE_GAP, FileParity, compare_with_jax
from jaxspec.mobile.profile import export_kit, measure_here
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.report import compare_quantizations, quality_table
from jaxspec.mobile.runtime import MobileModel
from jaxspec.trees import load_acceptance, load_tree, search_tree, tree_of_head
from jaxspec.trees.search import TREE_FILE

Advance = Callable[[str], None]

NEW_TOKENS = 64
_SLOTS = 1024
_PADDING = 64  # rows behind a text that a padded round may still write
_PUBLISHED_ACCEPTANCE = "eagle1-vicuna7b-tau-4.06-inferred"
_GPU_TIMEOUT = 7200.0
_FORCED = 8
"""Tokens of known text that a GPU reads in one pass."""
_GPU_TOKENS = 16
_SIZES = (
    RandomModel(num_layers=12, embed_dim=576, mlp_dim=1536, num_heads=9),
    HUNDRED_MILLION,
    RandomModel(num_layers=24, embed_dim=1152, mlp_dim=3072, num_heads=18),
)
"""About 50, 100 and 400 million weights."""


class Measured(NamedTuple):
    """A measured suite.

    markdown: its part of the page.
    figures: all of them, ready for JSON.
    as_it_should: False if outputs differ that must be the same.
    """

    markdown: str
    figures: dict[str, Any]
    as_it_should: bool


class LitertSuite(NamedTuple):
    """What is measured together.

    title: of its part of the page.
    prompt_sets: the prompts, `()` if it takes none.
    prompts_per_set: so many are taken unless another number is asked for.
    num_parts: how often `measure` says what it does.
    measure: gives what to write below title and command.
    """

    title: str
    prompt_sets: tuple[PromptSet, ...]
    prompts_per_set: int
    num_parts: int
    measure: Callable[["Prompts", Advance], "Page"]


class Page(NamedTuple):
    """What a suite has to say: paragraphs of Markdown, and the rest of `Measured`."""

    paragraphs: list[str]
    figures: dict[str, Any]
    as_it_should: bool = True


class Prompts(NamedTuple):
    """The shipped target and the prompts of a suite, as ids."""

    model: Model
    ids: Sequence[Sequence[int]]


def measure_litert(
    name: str, data_folder: Path, prompts_per_set: int, advance: Advance = lambda _: None
) -> Measured:
    """Measures a suite of `LITERT_SUITES`.

    Args:
        name: of the suite.
        data_folder: where the files of its prompt sets are; they are read in place.
        prompts_per_set: prompts of each set at most.
        advance: called before each part.

    Raises:
        ValueError: a number is below 1, the extra `mobile`, the data, the model or its head are
            missing, or a file is refused.
    """
    suite = LITERT_SUITES[name]
    if prompts_per_set < 1:
        raise ValueError(f"prompts_per_set must be at least 1, got {prompts_per_set}.")
    if MADE_FOR not in shipped_models() or EAGLE_HEAD not in shipped_heads():
        raise ValueError(
            f"Suite {name!r} measures {MADE_FOR} with the head {EAGLE_HEAD}, which are in "
            "checkpoints/ of the repository, and not here."
        )
    model = load(MADE_FOR)
    rows = {group: read_prompt_set(group, data_folder) for group in suite.prompt_sets}
    ids = [
        encode_prompt(model, prompt.text)
        for prompts in rows.values()
        for prompt in first_that_fit(prompts, model, NEW_TOKENS + _PADDING, prompts_per_set)
    ]
    page = suite.measure(Prompts(model, ids), advance)
    command = f"jaxspec bench --suite {name}"
    if suite.prompt_sets:
        command += f" --prompts-per-set {prompts_per_set}"
    heading = f"# {suite.title}\n\n{MADE_BY}\n    {command}"
    paragraphs = filter(None, [heading, *page.paragraphs, f"{this_machine()}."])
    figures = {"suite": name, "command": command, **page.figures}
    return Measured("\n\n".join(paragraphs) + "\n", figures, page.as_it_should)


def _head(model: Model) -> LoadedDrafter:
    return Eagle.of(load_eagle(EAGLE_HEAD, model.network), tree_of_head(EAGLE_HEAD))


def _measure_tokens(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    drafters: dict[str, Any] = {f"{EAGLE_HEAD}, searched tree": _head(model)}
    notes = []
    if SKIPS in shipped_folders():
        drafters[SKIPS] = LayerSkip.read(SKIPS)
    else:
        notes.append(f"{SKIPS} is not here, so left out.")
    files = list(compare_with_jax(model, drafters, ids, NEW_TOKENS, slots=_SLOTS, advance=advance))
    exact = [file for file in files if file.replay is not None]
    fewer = [file for file in files if file.replay is None]
    lines = [
        f"{file.drafter}: of {file.replay.num_steps} steps that JAX took, the file offers the same "
        f"drafts in {file.replay.same_drafts}, and of JAX's drafts accepts, emits and commits the "
        f"same in {file.replay.same_commits}; logits differ from JAX's by {file.logits_error:.1e} "
        "at most."
        for file in exact
        if file.replay is not None
    ]
    parts = [
        f"{model.name}, {len(ids)} prompts, {NEW_TOKENS} new tokens of each, greedy, stop ids "
        "ignored, LiteRT on the CPU with 1 thread. Tau is tokens per round, bonus token included. "
        "Near ties count as differences here, and are listed with their gap: how far the worse of "
        "both tokens lies below the best logit.",
        "## float32, beside plain decoding in JAX",
        _parity_table(exact),
        bullets(*lines, *_divergences(exact), *notes),
        "## Fewer bits, beside `decode` of the same file",
        "CPUs quantise activations, and their kernels of one row and of several round "
        "differently: where two logits are that close, texts may part. Beyond ties below "
        f"{QUANTISED_TIE_GAP:g} none may.",
        _parity_table(fewer),
        bullets(*_divergences(fewer)),
    ]
    figures = {"files": [_parity_as_dict(file) for file in files]}
    return Page(parts, figures, all(file.exact for file in files))


def _parity_table(files: Sequence[FileParity]) -> str:
    return table(
        ["drafter", "weights", "loop", "texts that are the same", "tau"],
        [
            [
                file.drafter,
                file.quantization,
                loop.name,
                f"{loop.num_texts - len(loop.divergences)} of {loop.num_texts}",
                f"{loop.tau:.2f}",
            ]
            for file in files
            for loop in file.loops
        ],
    )


def _divergences(files: Sequence[FileParity]) -> list[str]:
    return [
        f"{file.drafter}, {file.quantization}, {loop.name}: prompt {each.prompt_index} at token "
        f"{each.position}, gap {each.gap:.1e}"
        + (f", a tie (below {loop.tie_gap:g})." if loop.is_tie(each) else ".")
        for file in files
        for loop in file.loops
        for each in loop.divergences
    ]


def _parity_as_dict(file: FileParity) -> dict[str, Any]:
    loops = [
        {**loop._asdict(), "divergences": [each._asdict() for each in loop.divergences]}
        for loop in file.loops
    ]
    replay = None if file.replay is None else file.replay._asdict()
    return {**file._asdict(), "loops": loops, "replay": replay}


def _measure_speed(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    head = load_eagle(EAGLE_HEAD, model.network)
    acceptance = load_acceptance(shipped_heads()[EAGLE_HEAD] / "acceptance.json")
    searched, lines = {}, []
    for name in _SPEED_QUANTIZATIONS:
        advance(f"{name}: timing passes")
        with TemporaryDirectory() as folder:
            shapes = ExportConfig(slots=_SLOTS, quantization=name, check_gpu_ops=False)
            export_kit(model, folder, Eagle.of(head), shapes)
            profile = measure_here(Path(folder) / MODEL_FILE)
        best = search_tree(acceptance, profile).best_draft
        searched[name] = best.paths
        times = ", ".join(f"{1e3 * t.seconds:.2f} ({t.size})" for t in profile.target)
        drafts = ", ".join(f"{1e3 * t.seconds:.2f} ({t.size})" for t in profile.draft)
        lines.append(
            f"{name}: the tree of {best.nodes} nodes was searched for ms of a target pass (tokens) "
            f"{times}, and of a draft pass (nodes) {drafts}."
        )
    comparison = compare_on_litert(model, head, searched, ids, NEW_TOKENS, _SLOTS, advance)
    figures = comparison.as_dict() | {"trees": searched}
    return Page([*comparison.paragraphs(), bullets(*lines)], figures)


_SPEED_QUANTIZATIONS = ("int4", "int8")


def _measure_skips(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    if SKIPS not in shipped_folders():
        raise ValueError(
            f"Suite 'litert-skips' measures {SKIPS}, which is in checkpoints/ of the repository, "
            "and not here."
        )
    results = {}
    for name in _SKIP_QUANTIZATIONS:
        shapes = ExportConfig(slots=_SLOTS, quantization=name, check_gpu_ops=False)
        methods, files = [], {}
        with TemporaryDirectory() as folder:
            for count in _DRAFTED:
                label = f"{SKIPS}, {count} drafted"
                advance(f"{name}: exporting {label}")
                drafter = LayerSkip.read(SKIPS, num_speculative_tokens=count)
                export(model, Path(folder) / label, drafter, shapes)
                files[label] = MobileModel(Path(folder) / label / MODEL_FILE, num_threads=1)
                methods.append(Method(f"{label}: step", label, count, stepping))
            methods.insert(0, Method(PLAIN, methods[0].file, 0, plainly))
            advance(f"{name}: decoding in turns")
            results[name] = decode_in_turns(files, methods, ids, NEW_TOKENS)
    parts = [
        f"{model.name} drafts for itself with the layers of {SKIPS} left out; {len(ids)} prompts, "
        f"{NEW_TOKENS} new tokens, greedy, LiteRT on the CPU with 1 thread. Drafts are always of "
        f"full length: a graph does not end them early. {ABOUT_COLUMNS}"
    ]
    for name, rows in results.items():
        parts += [f"## {name}", methods_table(rows)]
    figures = {name: results_as_dicts(rows) for name, rows in results.items()}
    # Where weights are quantised near ties may turn, as `litert-tokens` lists them.
    as_it_should = all(row.num_different == 0 for row in results["float32"])
    return Page(parts, {"results": figures}, as_it_should)


_SKIP_QUANTIZATIONS = ("float32", "int8", "int4")
_DRAFTED = (2, 3, 4, 5)


def _measure_blocks(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    if DEER not in shipped_models():
        raise ValueError(
            f"Suite 'litert-blocks' measures {DEER}, which is in checkpoints/ of the repository, "
            "and not here."
        )
    diffusion = load(DEER)
    steps = {f"DEER, chain of {k}, step": Deer.of(diffusion, k) for k in _BLOCKS}
    if (tree := shipped_models()[DEER] / TREE_FILE).is_file():
        paths = load_tree(tree)
        steps["DEER, searched tree, step"] = Deer.of(diffusion, max(map(len, paths)), paths)
    drafters = {f"DEER, tree of {k}": Deer.of(diffusion, k, num_nodes=k) for k in _BLOCKS}
    drafters["DEER, chain of 4"] = steps["DEER, chain of 4, step"]
    results = {}
    for name in _BLOCK_QUANTIZATIONS:
        shapes = ExportConfig(slots=_SLOTS, quantization=name)
        methods, files = [], {}
        with TemporaryDirectory() as folder:
            every = {"EAGLE-1, searched tree, step": _head(model), **steps, **drafters}
            for label, drafter in every.items():
                advance(f"{name}: exporting {label}")
                export(model, Path(folder) / label, drafter, shapes)
                files[label] = MobileModel(Path(folder) / label / MODEL_FILE, num_threads=1)
                nodes = drafter.drafter.tree_shape[0] - 1
                loop = verifying(BlockDraft) if label in drafters else stepping
                methods.append(Method(label, label, nodes, loop))
            methods.insert(0, Method(PLAIN, methods[0].file, 0, plainly))
            advance(f"{name}: decoding in turns")
            results[name] = decode_in_turns(files, methods, ids, NEW_TOKENS)
    parts = [
        f"{model.name} with {DEER}, which drafts a block in one call of `draft_block_N`, of the "
        "fewest slots that hold what was emitted and the block, whatever the draft's depth. Chains "
        "and the searched tree are verified in the same call (step); where there is no step in the "
        "name, `verify_N` and `commit_N` follow, and trees are made anew for every round. "
        f"{len(ids)} prompts, "
        f"{NEW_TOKENS} new tokens, greedy, LiteRT on the CPU with 1 thread. "
        f"{ABOUT_COLUMNS} {ABOUT_QUANTIZED}"
    ]
    for name, rows in results.items():
        parts += [f"## {name}", methods_table(rows)]
    figures = {name: results_as_dicts(rows) for name, rows in results.items()}
    as_it_should = all(row.num_different == 0 for row in results["float32"])
    return Page(parts, {"results": figures}, as_it_should)


_BLOCK_QUANTIZATIONS = ("float32", "int8")
_BLOCKS = (4, 8, 16, 32)


def _measure_files(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    shapes = ExportConfig(slots=_SLOTS, check_gpu_ops=False)
    qualities = compare_quantizations(model, ids, _head(model), shapes, advance)
    rows, notes, figures = [], [], []
    lacking = missing_for_gpu()
    if lacking is not None:
        notes.append(f"No file was opened on a GPU: {lacking}.")
    for bundle in BUNDLES:
        for name, recipe in QUANTIZATIONS.items():
            advance(f"{bundle}, {name}")
            if bundle == "gpu" and recipe is not None and not recipe.on_gpu:
                continue
            config = ExportConfig(slots=_SLOTS, bundle=bundle, quantization=name)
            with TemporaryDirectory() as folder:
                exported = measure_export(Path(folder), MADE_FOR, EAGLE_HEAD, config)
                path, cache = Path(folder) / MODEL_FILE, Path(folder) / "weights.cache"
                opened = {
                    "CPU": measure_opening(path),
                    "CPU, weight cache": measure_opening(path, weight_cache=cache),
                }
                if bundle == "gpu" and lacking is None:
                    opened["GPU"] = measure_opening(path, "gpu")
            rows += [_file_row(bundle, name, exported, where, o) for where, o in opened.items()]
            entry = {"bundle": bundle, "quantization": name, **exported._asdict()}
            figures.append(entry | {"opened": {k: o._asdict() for k, o in opened.items()}})
    columns = ["bundle", "weights", "MB", "x float32 weights", "export s", "export peak GB"]
    columns += ["opened on", "RAM MB", "not backed by a file", "first token s", "next prompt s"]
    parts = [
        f"{model.name} with {EAGLE_HEAD} over its searched tree, {_SLOTS} slots, 1 thread. Each "
        "export and each opening has a process of its own. RAM: by how much that grew until it had "
        "called `prefill_64`, `decode` and `step`. First token: from opening the file, its "
        "checksum, the tokenizer and 32 tokens of prompt included; next prompt: another of that "
        "length. A GPU made of software keeps its memory in RAM, and its times mean nothing.",
        table(columns, rows),
        bullets(*notes),
        "## What fewer bits cost",
        f"Over {len(ids)} held-out prompts, beside float32: divergence of the law (KL), how often "
        "the likeliest token is the same, and tau of `step`, bonus token included.",
        table(*quality_table(qualities)),
    ]
    figures = {"files": figures, "quantizations": [each._asdict() for each in qualities]}
    return Page(parts, figures)


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


def _measure_scale(prompts: Prompts, advance: Advance) -> Page:
    del prompts
    rows, figures, points = [], [], {}
    for name in ("float32", "int4"):
        for sizes in _SIZES:
            advance(f"{name}, {sizes.num_layers} layers of {sizes.embed_dim}")
            config = ExportConfig(slots=_SLOTS, quantization=name, bundle="gpu")
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
    slopes = {name: _slope(several) for name, several in points.items()}
    lines = [
        f"{name}: each further byte of float32 weights adds {of_weights:.1f} bytes to the peak; "
        f"above the loaded model, each further byte of the file adds {of_file:.1f}."
        for name, (of_weights, of_file) in slopes.items()
    ]
    columns = ["weights", "quantised", "file MB", "seconds", "loaded GB", "peak GB"]
    parts = [
        "Random weights, an EAGLE-1 head over its 25 nodes, the bundle for GPUs, 1024 slots. The "
        "peak is that of a process that makes the weights, loaded as float32, and exports them, "
        "libraries included.",
        table([*columns, "peak x float32 weights"], rows),
        bullets(*lines),
    ]
    return Page(parts, {"exports": figures, "slopes": slopes})


def _slope(several: Sequence[Exported]) -> tuple[float, float]:
    """Of the peak over the bytes of weights, and of what export adds over those of the file."""
    peaks = [each.peak_bytes for each in several]
    added = [each.peak_bytes - each.loaded_bytes for each in several]
    whole = np.polyfit([each.weight_bytes for each in several], peaks, 1)
    above = np.polyfit([each.size for each in several], added, 1)
    return float(whole[0]), float(above[0])


def _measure_modelled(prompts: Prompts, advance: Advance) -> Page:
    del prompts
    acceptance = load_acceptance(_PUBLISHED_ACCEPTANCE)
    found = [
        measure_modelled(HUNDRED_MILLION, acceptance, name, advance=advance)
        for name in _SPEED_QUANTIZATIONS
    ]
    sizes = HUNDRED_MILLION
    parts = [
        f"MODELLED: a target of random weights ({sizes.num_layers} layers of {sizes.embed_dim}, "
        f"100 million weights, vocabulary {sizes.vocab_size}) with an EAGLE-1 head, "
        f"{MODELLED_SLOTS} slots (caches are to these weights what 1024 slots are to 7 billion in "
        "int4), 1 thread. Times are measured; tau (tokens per round, bonus token included) is "
        f"not: it comes from a table. {acceptance.source}",
        *(part for each in found for part in (f"## {each.quantization}", _modelled_table(each))),
    ]
    figures = [
        {
            "quantization": each.quantization,
            "profile": each.profile.as_dict(),
            "steps": [step._asdict() for step in each.steps],
            "paths": each.search.best_draft.paths,
        }
        for each in found
    ]
    return Page(parts, {"modelled": figures})


def _modelled_table(found: Modelled) -> str:
    plain = found.steps[0]
    return table(
        ["method", "nodes", "tau, not measured", "step ms", "tokens/s, modelled", "x plain"],
        [
            [
                step.name,
                str(step.nodes),
                f"{step.tau:.2f}",
                f"{1e3 * step.step_seconds:.2f}",
                f"{step.tokens_per_second:.2f}",
                f"{step.tokens_per_second / plain.tokens_per_second:.2f}",
            ]
            for step in found.steps
        ],
    )


def _measure_gpu(prompts: Prompts, advance: Advance) -> Page:
    model, ids = prompts
    drafters = {EAGLE_HEAD: _head(model)}
    if DEER in shipped_models():
        drafters[DEER] = Deer.of(load(DEER), _FORCED, num_nodes=_FORCED)
    rows, found, notes = [], [], []
    for label, bundle, name in _GPU_FILES:
        advance(f"{label}, {bundle}, {name}")
        if label not in drafters:
            notes.append(f"{label} is not here, so no file with it was made.")
            continue
        config = ExportConfig(slots=_SLOTS, bundle=bundle, quantization=name, verify=(_FORCED,))
        # Teacher-forced passes are compared with the CPU's float32, so only in that.
        known = ids if (label, bundle, name) == _GPU_FILES[0] else ()
        known = [text for text in known if len(text) > _FORCED]
        with TemporaryDirectory() as folder:
            export(model, folder, drafters[label], config)
            path = Path(folder) / MODEL_FILE
            checked = check_gpu(path, ids[:4], _GPU_TOKENS, _GPU_TIMEOUT, known)
        passes = checked.passes
        for loop in checked.loops:
            same = sum(at is None for at in loop.first_difference)
            rows.append(
                [
                    *(label, bundle, name, str(len(checked.signatures))),
                    "yes" if checked.fully_accelerated else "NO",
                    loop.name,
                    f"{same} of {len(loop.first_difference)}, {checked.reference}",
                    f"{min(loop.counts)} to {max(loop.counts)}",
                ]
            )
        if passes is not None:
            notes.append(
                f"{bundle}, {name}: one pass of `verify_{_FORCED}` over known text of each of "
                f"{len(known)} prompts: after {passes.num_same} of {passes.num_tokens} tokens the "
                "likeliest one is the CPU's."
            )
        notes += checked.problems
        found.append(checked)
    columns = [
        "drafter",
        "bundle",
        "weights",
        "functions",
        "all on the GPU",
        "loop",
        "texts that are the same",
    ]
    parts = [
        f"{model.name} with {EAGLE_HEAD} over its searched tree, and with {DEER} and trees of "
        f"{_FORCED} nodes in blocks of {_FORCED}; {_SLOTS} slots, on LiteRT's GPU accelerator in "
        f"float32: 4 prompts, {_GPU_TOKENS} new tokens.",
        table([*columns, "tokens per round, bonus included"], rows),
        bullets(*notes),
    ]
    as_it_should = not any(checked.problems for checked in found)
    return Page(parts, {"rows": rows, "notes": notes}, as_it_should)


_GPU_FILES = (
    (EAGLE_HEAD, "gpu", "float32"),
    (EAGLE_HEAD, "gpu", "int8"),
    (EAGLE_HEAD, "gpu", "int4"),
    (EAGLE_HEAD, "cpu", "float32"),
    (DEER, "gpu", "float32"),
    (DEER, "gpu", "int8"),
)
"""Drafters, bundles and weights."""


_FILLED = {BLOCKS: 64, BOTH_SIDES: 32}
"""New tokens of each text."""
_ROUNDS = (1, 2, 3, 4, 5)
_CANVAS = 256
_DIFFUSION_QUANTIZATIONS = ("float32", "int8")


def _measure_diffusion(prompts: Prompts, advance: Advance) -> Page:
    """Stepwise passes and rounds of every length: what a pass costs, and what it decides."""
    parts = [
        f"Up to {_CANVAS} slots, blocks of 8, greedy, stop ids ignored, 1 thread. A pass with N "
        "drafts reads N + 1 rows. **Same as JAX**: texts that equal `jaxspec.denoise` token by "
        "token; where weights have fewer bits, the file's own stepwise decoding. **c_b / c_1**: a "
        "pass's time over that of a stepwise one, both as they come in decoding: most stepwise "
        "passes of a network that is causal over blocks read one block, a round reads two."
    ]
    figures: dict[str, Any] = {}
    right = True
    for name, count in _FILLED.items():
        if name not in shipped_models():
            parts.append(f"{name} is not here, so left out.")
            continue
        model = load(name)
        ids = [each for each in prompts.ids if len(each) + count + 32 <= _CANVAS]
        config = DenoiseConfig(count, 8, stop_token_ids=())
        for quantization in _DIFFUSION_QUANTIZATIONS:
            advance(f"{name}, {quantization}")
            rows = []
            with TemporaryDirectory() as folder:
                shapes = ExportConfig(
                    slots=_CANVAS, quantization=quantization, drafts=_ROUNDS, block_length=8
                )
                export(model, folder, config=shapes)
                file = MobileModel(Path(folder) / MODEL_FILE, num_threads=1)
                found = {n: _filled_in_turn(file, ids, count, n) for n in (0, *_ROUNDS)}
            expected = [text.tokens.tolist() for text in found[0][0]]
            if quantization == "float32":
                expected = [row.tokens.tolist() for row in denoise(model, ids, config)]
            base = found[0][1] / sum(text.num_calls for text in found[0][0])
            for drafts, (texts, seconds) in found.items():
                calls = sum(text.num_calls for text in texts)
                pairs = zip(texts, expected, strict=True)
                same = sum(text.tokens.tolist() == theirs for text, theirs in pairs)
                right &= quantization != "float32" or same == len(texts)
                rows.append(
                    {
                        "drafts": drafts,
                        "num_same": same,
                        "seconds_per_pass": seconds / calls,
                        "cost_ratio": seconds / calls / base,
                        "calls_saved": 1 - calls / sum(t.num_calls for t in found[0][0]),
                        "tokens_per_second": count * len(ids) / seconds,
                    }
                )
            parts += [
                f"## {name}, {quantization}, {len(ids)} prompts",
                _rounds_table(rows, len(ids)),
            ]
            figures[f"{name}, {quantization}"] = rows
    return Page(parts, figures, right)


def _filled_in_turn(
    file: MobileModel, prompts: Sequence[Sequence[int]], count: int, drafts: int
) -> tuple[list[Filled], float]:
    """Texts, and the seconds of all of them; the first is decoded once before."""
    fill_in(file, prompts[0], count, (), drafts)
    start = time.perf_counter()
    texts = [fill_in(file, prompt, count, (), drafts) for prompt in prompts]
    return texts, time.perf_counter() - start


def _rounds_table(rows: Sequence[Mapping[str, Any]], num_texts: int) -> str:
    columns = ["N", "same as JAX", "ms a pass", "c_b / c_1", "calls saved", "at most", "tokens/s"]
    return table(
        columns,
        [
            [
                str(row["drafts"]),
                f"{row['num_same']} of {num_texts}",
                f"{1e3 * row['seconds_per_pass']:.2f}",
                f"{row['cost_ratio']:.2f}",
                f"{row['calls_saved']:.1%}",
                f"{row['drafts'] / (row['drafts'] + 1):.0%}",
                f"{row['tokens_per_second']:.0f}",
            ]
            for row in rows
        ],
    )


_PROMPTS: tuple[PromptSet, ...] = SUITES["shipped"].prompt_sets
_NUM_FILES = len(QUANTIZATIONS) * (1 + len(BUNDLES))

LITERT_SUITES: Mapping[str, LitertSuite] = {
    "litert-tokens": LitertSuite("The same tokens on LiteRT", _PROMPTS, 20, 7, _measure_tokens),
    "litert-speed": LitertSuite(
        TITLE,
        SUITES["trees"].prompt_sets,
        20,
        len(_SPEED_QUANTIZATIONS) + num_parts(_SPEED_QUANTIZATIONS),
        _measure_speed,
    ),
    "litert-skips": LitertSuite(
        "Drafting with the target's own layers on LiteRT",
        _PROMPTS,
        20,
        len(_SKIP_QUANTIZATIONS) * (1 + len(_DRAFTED)),
        _measure_skips,
    ),
    "litert-blocks": LitertSuite(
        "Drafting whole blocks on LiteRT",
        _PROMPTS,
        10,
        len(_BLOCK_QUANTIZATIONS) * (4 + 2 * len(_BLOCKS)),
        _measure_blocks,
    ),
    "litert-files": LitertSuite(
        "Files for LiteRT: size, memory, first token", _PROMPTS, 4, _NUM_FILES, _measure_files
    ),
    "litert-scale": LitertSuite("Exporting larger models", (), 1, 2 * len(_SIZES), _measure_scale),
    "litert-modelled": LitertSuite(
        "LiteRT with a drafter as good as the published one",
        (),
        1,
        MODELLED_PARTS * len(_SPEED_QUANTIZATIONS),
        _measure_modelled,
    ),
    "litert-diffusion": LitertSuite(
        "Diffusion language models on LiteRT",
        _PROMPTS,
        2,
        len(_FILLED) * len(_DIFFUSION_QUANTIZATIONS),
        _measure_diffusion,
    ),
    "litert-gpu": LitertSuite(
        "LiteRT's GPU accelerator", _PROMPTS, 20, len(_GPU_FILES), _measure_gpu
    ),
}
