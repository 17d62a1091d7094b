"""Suites that decode with files for LiteRT: the same tokens, speed, diffusion models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Advance, MethodFigures, Suite, SuiteRun, measure_methods
from benchmarks.litert_parity import QUANTIZED_TIE_GAP, FileParity, compare_with_jax
from benchmarks.page import Page, Section
from benchmarks.prompts import EAGLE_GSM8K, PROMPT_SETS
from benchmarks.runners import FileMethod, FillRunner, LitertRunner
from benchmarks.suites.diffusion import BLOCKS, BOTH_SIDES
from jaxspec.checkpoint import (
    Model,
    load,
    load_eagle,
    shipped_folders,
    shipped_heads,
    shipped_models,
)
from jaxspec.checkpoint.trees import TREE_FILE
from jaxspec.commands.methods import DEER, DRAFT, EAGLE_HEAD, MADE_FOR, SKIPS
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.decoding.denoise import DenoiseConfig, denoise
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import encode_prompt
from jaxspec.drafters import (
    AdaptiveExit,
    Deer,
    DrafterLike,
    DraftModel,
    Eagle,
    LayerSkip,
    LoadedDrafter,
    PromptLookup,
    TokenRecycling,
    loaded_drafter,
)
from jaxspec.measure.comparison import speedup_text
from jaxspec.measure.figures import LOW_REPETITION, PLAIN, Sample
from jaxspec.measure.machine import this_machine
from jaxspec.measure.prompts import read_prompts
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.drafts import DynamicDraft, ExitDraft, TreeDraft, WindowDraft
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.profile import export_kit, measure_here, time_signatures
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.runtime import MobileModel
from jaxspec.tuning import (
    load_acceptance,
    load_profile,
    load_tree,
    search_tree,
)

NEW_TOKENS = 64
CAPACITY = 1024
"""Places of a file's cache."""
PADDING = 64
"""Places after a text that a padded round may still write."""
NEEDS = (MADE_FOR, EAGLE_HEAD)
ABOUT_COLUMNS = (
    "Nodes leave the root out; tau is tokens per round, bonus token INCLUDED. A round's "
    "verification holds the target pass, acceptance and commit. Repeated: the share of "
    "an output's 4-grams that it already held; low repetition: over the prompts, their number in "
    f"parentheses, whose plain output repeats less than {LOW_REPETITION:.0%}."
)
ABOUT_QUANTIZED = (
    "Products with quantized weights are rounded otherwise in wider passes, so near ties may turn "
    "there and texts differ (`litert-tokens` lists such gaps)."
)


def target(run: SuiteRun) -> tuple[Model, list[list[int]]]:
    """Returns the shipped target and the suite's prompts as ids."""
    model = load(MADE_FOR)
    prompts = run.prompts(model, NEW_TOKENS + PADDING)
    return model, [encode_prompt(model, prompt.text) for prompt in prompts]


def shipped_head(model: Model) -> LoadedDrafter:
    """Returns the shipped head over the tree that was searched for it."""
    return Eagle.of(load_eagle(EAGLE_HEAD, model.network))


def page_of(sections: Sequence[Section], figures: Mapping[str, Any], agree: bool = True) -> Page:
    """Returns a page that ends with the machine."""
    machine = Section(text=[f"{this_machine()}."])
    return Page([*sections, machine], {**figures, "machine": this_machine()}, agree)


def open_file(
    folder: str | Path, name: str, model: Model, drafter: DrafterLike | None, shapes: ExportConfig
) -> MobileModel:
    """Exports a model and opens the file, with one thread."""
    export(model, Path(folder) / name, drafter, shapes)
    return MobileModel(Path(folder) / name / MODEL_FILE, num_threads=1)


def decode_files(
    files: Mapping[str, MobileModel],
    methods: Mapping[str, FileMethod],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[MethodFigures]:
    """Decodes all prompts with every method, after plain decoding by the first method's file."""
    first = next(iter(methods.values())).file
    runner = LitertRunner(files, {PLAIN: FileMethod(first), **methods}, max_new_tokens)
    found = measure_methods(runner, list(runner.methods), dict(enumerate(prompts)))
    return list(found.values())


def methods_section(
    title: str,
    rows: Sequence[MethodFigures],
    methods: Mapping[str, FileMethod],
    notes: Sequence[str] = (),
) -> Section:
    """Returns the table of methods on files of one kind."""

    def cells(row: MethodFigures) -> list[str]:
        rounds, drafts = row.parts["round"], row.parts.get("draft") or []
        verify = rounds if row.name == PLAIN else np.subtract(rounds, drafts) if drafts else []
        low = row.low_repetition
        subset = low and f"{low.speedup:.2f}, tau {low.mean_acceptance_length:.2f}"
        return [
            row.name,
            str(methods[row.name].nodes if row.name in methods else 0),
            *(f"{1e3 * np.median(s):.2f}" if len(s) else "" for s in (drafts, verify, rounds)),
            f"{row.overall.mean_acceptance_length:.2f}",
            f"{row.overall.tokens_per_second:.2f}",
            speedup_text(row.overall),
            f"{row.overall.repeated_ngrams:.0%}",
            f"{subset} ({low.num_prompts})" if low else "",
            str(len(row.divergences)),
        ]

    columns = [
        *("method", "nodes", "drafting ms", "verification ms", "round ms", "tau", "tokens/s"),
        *("x plain [95 %]", "repeated", "low repetition", "texts that differ"),
    ]
    return Section(title, columns=columns, rows=[cells(row) for row in rows], notes=notes)


# litert-tokens ----------------------------------------------------------------------------------


def _measure_tokens(run: SuiteRun) -> Page:
    model, ids = target(run)
    drafters: dict[str, Any] = {f"{EAGLE_HEAD}, searched tree": shipped_head(model)}
    notes = []
    if SKIPS in shipped_folders():
        drafters[SKIPS] = LayerSkip.read(SKIPS)
    else:
        notes.append(f"{SKIPS} is not here, so left out.")
    with run.steps(1 + 3 * len(drafters)) as advance:
        files = list(
            compare_with_jax(model, drafters, ids, NEW_TOKENS, capacity=CAPACITY, advance=advance)
        )
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
    about = (
        f"{model.name}, {len(ids)} prompts, {NEW_TOKENS} new tokens of each, greedy, stop ids "
        "ignored, LiteRT on the CPU with 1 thread. Tau is tokens per round, bonus token INCLUDED. "
        "Near ties count as differences here, and are listed with their gap: how far the worse of "
        "both tokens lies below the best logit."
    )
    about_fewer = (
        "CPUs quantize activations, and their kernels of one row and of several round "
        "differently: where two logits are that close, texts may differ. Beyond ties below "
        f"{QUANTIZED_TIE_GAP:g} none may."
    )
    sections = [
        Section(text=[about]),
        _parity("float32, next to plain decoding in JAX", exact, notes=[*lines, *notes]),
        _parity("Fewer bits, next to `decode` of the same file", fewer, [about_fewer]),
    ]
    return page_of(sections, {"files": files}, all(file.exact for file in files))


def _parity(
    title: str, files: Sequence[FileParity], text: Sequence[str] = (), notes: Sequence[str] = ()
) -> Section:
    loops = [(file, loop) for file in files for loop in file.loops]
    gaps = [
        f"{file.drafter}, {file.quantization}, {loop.name}: prompt {each.prompt_index} at token "
        f"{each.position}, gap {each.gap:.1e}"
        + (f", a tie (below {loop.tie_gap:g})." if loop.is_tie(each) else ".")
        for file, loop in loops
        for each in loop.divergences
    ]
    rows = [
        [
            file.drafter,
            file.quantization,
            loop.name,
            f"{loop.num_texts - len(loop.divergences)} of {loop.num_texts}",
            f"{loop.tau:.2f}",
        ]
        for file, loop in loops
    ]
    columns = ["drafter", "weights", "loop", "texts that are the same", "tau"]
    return Section(title, text, columns, rows, [*notes, *gaps])


# litert-speed -----------------------------------------------------------------------------------

EAGLE_TREE, SEARCHED = "EAGLE's tree", "searched tree"
_BEAM = 8
_REPEATS = 31
_PUBLISHED = "galaxy-s25-adreno830-vicuna7b-q4"


class Asked(NamedTuple):
    """Model, head, trees and prompts of the suite `litert-speed`.

    Attributes:
        model: the target.
        head: its EAGLE head.
        trees: paths of the searched tree, by quantization.
        prompts: prompts as ids.
        max_new_tokens: tokens of every text.
        capacity: places of a file's cache.
        notes: how trees were searched.
    """

    model: Model
    head: Any
    trees: Mapping[str, Sequence[RankPath]]
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    capacity: int
    notes: Sequence[str] = ()


def _measure_speed(run: SuiteRun) -> Page:
    names = run.settings["quantize"].split(",")
    for name in names:
        check_quantization(name)
    own = [key for key in _OWN if run.settings[key] is not None]
    needed = [key for key in ("model", "prompts", "head", "tree") if key not in own]
    if own and needed:
        raise ValueError(
            f"--{own[0].replace('_', '-')} measures your own model; give --model, --prompts, "
            f"--head and --tree, of which {', '.join(needed)} is missing."
        )
    with run.steps(4 * len(names)) as advance:
        asked = _own(run, names) if own else _searched(run, names, advance)
        return speed_page(asked, advance)


_OWN = (
    *("model", "prompts", "head", "tree"),
    *("field", "limit", "shuffle_seed", "dtype", "max_positions"),
)
"""Settings of a user's own model and prompts."""


def _own(run: SuiteRun, names: Sequence[str]) -> Asked:
    """Returns the user's model, head, tree and prompts."""
    given = run.settings
    count = _new_tokens(run)
    rows = read_prompts(
        Path(given["prompts"]), given["field"], given["limit"], given["shuffle_seed"]
    )
    tree = load_tree(Path(given["tree"]))
    model = load(given["model"], given["dtype"], given["max_positions"])
    ids = [encode_prompt(model, row.prompt) for row in rows]
    capacity, longest = min(CAPACITY, model.config.max_positions), max(map(len, ids))
    if longest > capacity - 2:
        raise ValueError(
            f"{given['prompts']}: a prompt has {longest} tokens, and a file with a capacity of "
            f"{capacity} can draft after {capacity - 2} at most; leave it out."
        )
    head = load_eagle(given["head"], model.network)
    return Asked(model, head, dict.fromkeys(names, tree), ids, count, capacity)


def _searched(run: SuiteRun, names: Sequence[str], advance: Advance) -> Asked:
    """Returns the shipped model, with trees searched for passes timed here."""
    count = _new_tokens(run)
    model, ids = target(run)
    head = load_eagle(EAGLE_HEAD, model.network)
    acceptance = load_acceptance(shipped_heads()[EAGLE_HEAD] / "acceptance.json")
    trees, notes = {}, []
    for name in names:
        advance(f"{name}: timing passes")
        with TemporaryDirectory() as folder:
            shapes = ExportConfig(capacity=CAPACITY, quantization=name, check_gpu_ops=False)
            export_kit(model, folder, Eagle.of(head, EAGLE_PATHS), shapes)
            profile = measure_here(Path(folder) / MODEL_FILE)
        best = search_tree(acceptance, profile).best_draft
        trees[name] = best.paths
        times = ", ".join(f"{1e3 * t.seconds:.2f} ({t.size})" for t in profile.target)
        drafts = ", ".join(f"{1e3 * t.seconds:.2f} ({t.size})" for t in profile.draft)
        notes.append(
            f"{name}: the tree of {best.nodes} nodes was searched for ms of a target pass (tokens) "
            f"{times}, and of a draft pass (nodes) {drafts}."
        )
    return Asked(model, head, trees, ids, count, CAPACITY, notes)


def _new_tokens(run: SuiteRun) -> int:
    count = run.settings["max_new_tokens"] or NEW_TOKENS
    if count < 2:
        raise ValueError(
            "max_new_tokens must be at least 2, as the first comes with the prompt, got "
            f"{run.settings['max_new_tokens']}."
        )
    return count


def speed_page(asked: Asked, advance: Advance = lambda _: None) -> Page:
    """Measures the paper's comparison: plain, EAGLE's tree, a searched one, EAGLE-2.

    Static trees are drafted and verified by whole graphs. EAGLE-2 shapes each tree anew, so the
    host drives it level by level: the overhead that a static tree avoids. Everything runs on one
    thread and one file per tree, in turns, with real acceptance.
    """
    machine = this_machine()
    results, ratios, over_eagle, sections = {}, {}, {}, []
    for name, searched in asked.trees.items():
        shapes = ExportConfig(capacity=asked.capacity, quantization=name, check_gpu_ops=False)
        with TemporaryDirectory() as folder:
            files = {}
            for tree, paths in ((EAGLE_TREE, EAGLE_PATHS), (SEARCHED, searched)):
                advance(f"{name}: exporting with {tree}")
                levels = (_BEAM,) if tree == EAGLE_TREE else ()
                own = ExportConfig(**{**vars(shapes), "levels": levels})
                files[tree] = open_file(folder, tree, asked.model, Eagle.of(asked.head, paths), own)
            methods = _speed_methods(files)
            advance(f"{name}: decoding in turns")
            results[name] = decode_files(files, methods, asked.prompts, asked.max_new_tokens)
            ratios[name] = {tree: _step_ratio(file) for tree, file in files.items()}
        notes = [
            f"{tree}: step / (draft + verify + commit) = {ratio:.2f}."
            for tree, ratio in ratios[name].items()
        ]
        speeds = {row.name: row.overall.tokens_per_second for row in results[name]}
        over_eagle[name] = speeds[f"{SEARCHED}: step"] / speeds[f"{EAGLE_TREE}: step"]
        notes.append(
            f"Tokens per second by `step`, {SEARCHED} over EAGLE's {len(EAGLE_PATHS)} nodes: "
            f"{over_eagle[name]:.2f}."
        )
        sections.append(methods_section(name, results[name], methods, notes))
    about = [
        f"{asked.model.name}, {len(asked.prompts)} prompts, {asked.max_new_tokens} new tokens, "
        f"greedy, 1 thread. {machine}"
        + (". THE MACHINE WAS BUSY: only ratios count." if machine.busy else "."),
        f"{ABOUT_COLUMNS} `step` is one function; its time over that of `draft`, `verify_N` and "
        "`commit_N` together, medians of calls in turns, is below each table.",
    ]
    last = Section(text=[_published()], notes=asked.notes)
    figures = {
        "results": results,
        "step_ratios": ratios,
        "over_eagle": over_eagle,
        "trees": asked.trees,
        "machine": machine,
    }
    return Page([Section(text=about), *sections, last], figures)


def _speed_methods(files: Mapping[str, MobileModel]) -> dict[str, FileMethod]:
    methods = {}
    for name, model in files.items():
        nodes = len(model.manifest.paths)
        methods[f"{name}: draft, verify, commit"] = FileMethod(name, nodes, TreeDraft)
        methods[f"{name}: step"] = FileMethod(name, nodes, steps=True)
    nodes = len(files[EAGLE_TREE].manifest.paths)
    dynamic = FileMethod(EAGLE_TREE, nodes, lambda model: DynamicDraft(model, nodes))
    return {**methods, "EAGLE-2 from the host": dynamic}


def _step_ratio(file: MobileModel) -> float:
    nodes = 1 + len(file.manifest.paths)
    parts = ("draft", f"verify_{nodes}", f"commit_{nodes}")
    runs = time_signatures(file, ("step", *parts), _REPEATS)
    seconds = {name: float(np.median(times)) for name, times in runs.items()}
    return seconds["step"] / sum(seconds[part] for part in parts)


def _published() -> str:
    published = load_profile(_PUBLISHED)
    runs = ", ".join(
        f"{run.name} of {run.nodes} nodes: {run.tokens_per_second} tokens/s (tau {run.tau})"
        for run in published.published
    )
    plain = 1 / float(published.target_seconds(1))
    return (
        f"Published for {published.device}: plain {plain:.2f} tokens/s; {runs}. "
        f"{published.quantization}."
    )


# litert-skips, litert-blocks --------------------------------------------------------------------

SKIP_QUANTIZATIONS = ("float32", "int8", "int4")
DRAFTED = (2, 3, 4, 5)
ENDED_EARLY = (3, 5, 8)
"""Longest drafts of those that end early."""
BLOCK_QUANTIZATIONS = ("float32", "int8")
BLOCK_SIZES = (4, 8, 16, 32)


def _measure_drafters(
    run: SuiteRun,
    drafters: Mapping[str, DrafterLike],
    methods: Mapping[str, FileMethod],
    quantizations: Sequence[str],
    text: str,
    check_gpu_ops: bool,
) -> Page:
    """Decodes by methods on a file for each drafter; their numbers of nodes are set here."""
    model, ids = target(run)
    trees = {name: loaded_drafter(each).drafter.tree_shape for name, each in drafters.items()}
    methods = {name: each._replace(nodes=trees[each.file][0] - 1) for name, each in methods.items()}
    results, sections = {}, []
    with run.steps(len(quantizations) * (1 + len(drafters))) as advance:
        for name in quantizations:
            shapes = ExportConfig(capacity=CAPACITY, quantization=name, check_gpu_ops=check_gpu_ops)
            files = {}
            with TemporaryDirectory() as folder:
                for label, drafter in drafters.items():
                    advance(f"{name}: exporting {label}")
                    files[label] = open_file(folder, label, model, drafter, shapes)
                advance(f"{name}: decoding in turns")
                results[name] = decode_files(files, methods, ids, NEW_TOKENS)
            sections.append(methods_section(name, results[name], methods))
    about = (
        f"{text} {model.name}, {len(ids)} prompts, {NEW_TOKENS} new tokens, greedy, LiteRT on the "
        f"CPU with 1 thread. {ABOUT_COLUMNS} {ABOUT_QUANTIZED}"
    )
    # Quantized weights may turn near ties, as `litert-tokens` lists them.
    agree = not any(row.divergences for row in results["float32"])
    return page_of([Section(text=[about]), *sections], {"results": results}, agree)


def _measure_skips(run: SuiteRun) -> Page:
    drafters: dict[str, DrafterLike] = {}
    methods = {}
    for count in sorted({*DRAFTED, *ENDED_EARLY}):
        label = f"{SKIPS}, {count} drafted"
        drafters[label] = LayerSkip.read(
            SKIPS, num_speculative_tokens=count, adaptive=AdaptiveExit()
        )
        if count in DRAFTED:
            methods[f"{label}: step"] = FileMethod(label, steps=True)
        if count in ENDED_EARLY:
            methods[f"{label}: step_exit"] = FileMethod(label, signature="step_exit")
            methods[f"{label}: draft_1, accept"] = FileMethod(label, draft=ExitDraft, accepts=True)
    others: dict[str, DrafterLike] = {
        DRAFT: DraftModel.of(load(DRAFT), 3),
        "token recycling": TokenRecycling(),
        "prompt lookup": PromptLookup(4),
    }
    methods |= {f"{label}: step": FileMethod(label, steps=True) for label in others}
    text = (
        f"Drafters without a head. Without the layers of {SKIPS}, the target drafts for itself: "
        "`step` drafts the full length; `step_exit` makes as many passes, but ends drafts by the "
        "adaptive threshold (Draft & Verify); with `draft_1` the host does so and saves passes. "
        "`accept_N` verifies and commits its drafts."
    )
    return _measure_drafters(
        run, drafters | others, methods, SKIP_QUANTIZATIONS, text, check_gpu_ops=False
    )


def _measure_blocks(run: SuiteRun) -> Page:
    diffusion = load(DEER)
    name = "EAGLE-1, searched tree, step"
    drafters: dict[str, DrafterLike] = {name: shipped_head(load(MADE_FOR))}
    for k in BLOCK_SIZES:
        drafters[f"DEER, chain of {k}, step"] = Deer.of(diffusion, k)
    if (tree := shipped_models()[DEER] / TREE_FILE).is_file():
        paths = load_tree(tree)
        drafters["DEER, searched tree, step"] = Deer.of(diffusion, max(map(len, paths)), paths)
    methods = {name: FileMethod(name, steps=True) for name in drafters}
    for k in BLOCK_SIZES:
        drafters[f"DEER, tree of {k}"] = Deer.of(diffusion, k, num_nodes=k)
    drafters["DEER, chain of 4"] = Deer.of(diffusion, 4)
    methods = {name: FileMethod(name, draft=WindowDraft) for name in drafters} | methods
    text = (
        f"{DEER} drafts a block in one call of `draft_block_N`, with the smallest N that holds the "
        "tokens emitted last and the block, whatever the draft's depth. Chains and the searched "
        "tree are verified in the same call (step); where there is no step in the name, `verify_N` "
        "and `commit_N` follow, and trees are made anew for every round."
    )
    return _measure_drafters(run, drafters, methods, BLOCK_QUANTIZATIONS, text, check_gpu_ops=True)


# litert-diffusion -------------------------------------------------------------------------------

FILLED = {BLOCKS: 64, BOTH_SIDES: 32}
"""New tokens of each text."""
ROUNDS = (1, 2, 3, 4, 5)
CANVAS = 256
_DIFFUSION_QUANTIZATIONS = ("float32", "int8")


def _measure_diffusion(run: SuiteRun) -> Page:
    """Measures stepwise passes and rounds of every length."""
    about = (
        f"Canvases of up to {CANVAS} places, blocks of 8, greedy, stop ids ignored, 1 thread. A "
        "pass with N drafts reads N + 1 rows. **Same as JAX**: texts that equal `jaxspec.denoise` "
        "token by token; where weights have fewer bits, the file's own stepwise decoding. "
        "**c_b / c_1**: a pass's time over that of a stepwise one, both as they come in decoding: "
        "most stepwise passes of a network that is causal over blocks read one block, a round "
        "reads two."
    )
    _, prompts = target(run)
    sections, figures, right = [Section(text=[about])], {}, True
    with run.steps(len(FILLED) * len(_DIFFUSION_QUANTIZATIONS)) as advance:
        for name, count in FILLED.items():
            if name not in shipped_models():
                sections.append(Section(text=[f"{name} is not here, so left out."]))
                continue
            model = load(name)
            ids = [each for each in prompts if len(each) + count + 32 <= CANVAS]
            for quantization in _DIFFUSION_QUANTIZATIONS:
                advance(f"{name}, {quantization}")
                rows = _fill_in_turns(model, ids, count, quantization)
                if quantization == "float32":
                    right &= all(row["num_same"] == len(ids) for row in rows)
                sections.append(_rounds_section(f"{name}, {quantization}", rows, len(ids)))
                figures[f"{name}, {quantization}"] = rows
    return page_of(sections, figures, right)


def _fill_in_turns(
    model: Model, ids: Sequence[Sequence[int]], count: int, quantization: str
) -> list[dict[str, Any]]:
    """Returns figures of one file, by number of drafts; 0 is stepwise decoding."""
    shapes = ExportConfig(capacity=CANVAS, quantization=quantization, drafts=ROUNDS, block_length=8)
    reference = None  # the file's own stepwise texts
    if quantization == "float32":
        texts: Any = denoise(model, ids, DenoiseConfig(count, 8, stop_token_ids=()))
        reference = [Sample((text,), 0.0, Counts()) for text in texts]
    with TemporaryDirectory() as folder:
        runner = FillRunner(open_file(folder, "file", model, None, shapes), count)
        drafts = [str(count) for count in (0, *ROUNDS)]
        found = measure_methods(runner, drafts, dict(enumerate(ids)), reference=reference)
    figures = {name: each.overall for name, each in found.items()}
    base, per_pass = figures["0"], {n: f.seconds / f.num_verify_steps for n, f in figures.items()}
    return [
        {
            "drafts": int(name),
            "num_same": len(ids) - len(found[name].divergences),
            "seconds_per_pass": per_pass[name],
            "cost_ratio": per_pass[name] / per_pass["0"],
            "calls_saved": 1 - each.num_verify_steps / base.num_verify_steps,
            "tokens_per_second": each.tokens_per_second,
        }
        for name, each in figures.items()
    ]


def _rounds_section(title: str, rows: Sequence[Mapping[str, Any]], num_texts: int) -> Section:
    return Section(
        f"{title}, {num_texts} prompts",
        columns=[
            "N",
            "same as JAX",
            "ms a pass",
            "c_b / c_1",
            "calls saved",
            "at most",
            "tokens/s",
        ],
        rows=[
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


LITERT_DECODING: Mapping[str, Suite] = {
    "litert-tokens": Suite(
        title="The same tokens on LiteRT",
        about="texts, steps and logits of files against JAX, ties listed with their gaps",
        measure=_measure_tokens,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        needs=NEEDS,
    ),
    "litert-speed": Suite(
        title="Speculative decoding on LiteRT",
        about="plain, EAGLE's tree, a searched one and EAGLE-2; --model measures your own",
        measure=_measure_speed,
        prompt_sets=(EAGLE_GSM8K,),
        prompts_per_set=20,
        needs=NEEDS,
        takes={
            **dict.fromkeys(_OWN),
            "max_new_tokens": None,
            "quantize": "int4,int8",
        },
    ),
    "litert-skips": Suite(
        title="Drafting without a head on LiteRT",
        about="layer skipping, a draft model, recycling and lookup on LiteRT",
        measure=_measure_skips,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        needs=(*NEEDS, SKIPS, DRAFT),
    ),
    "litert-blocks": Suite(
        title="Drafting whole blocks on LiteRT",
        about="DEER's chains and trees on LiteRT, next to EAGLE-1",
        measure=_measure_blocks,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=10,
        needs=(*NEEDS, DEER),
    ),
    "litert-diffusion": Suite(
        title="Diffusion language models on LiteRT",
        about="diffusion language models on LiteRT, by number of drafts",
        measure=_measure_diffusion,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=2,
        needs=NEEDS,
    ),
}
