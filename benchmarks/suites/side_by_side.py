"""One target by this library, llama.cpp and OpenVINO, in turns, on the same weights and prompts."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import llama_cpp, openvino
from benchmarks.harness import MethodFigures, Suite, SuiteRun, measure_methods
from benchmarks.llama_cpp import LlamaCppMethod, LlamaCppRunner
from benchmarks.openvino import OpenVinoMethod, OpenVinoRunner
from benchmarks.page import Page, Section
from benchmarks.prompts import PROMPT_SETS
from jaxspec.checkpoint import Model, load, shipped_models
from jaxspec.checkpoint.trees import TREE_FILE
from jaxspec.commands.methods import (
    DEER,
    DRAFT,
    EAGLE3_HEAD,
    EAGLE_HEAD,
    MADE_FOR,
    SKIPS,
    searched_set,
    searched_tree,
    with_deer,
    with_draft_model,
)
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import LoadedDrafter, PromptLookup
from jaxspec.measure.compare import JaxRunner, divergence_of
from jaxspec.measure.comparison import Divergence, divergence_lines, outputs_text, speedup_text
from jaxspec.measure.figures import PLAIN, Sample
from jaxspec.measure.machine import this_machine
from jaxspec.measure.passes import CAPACITY, CONTEXT, NUM_PASSES, loop_of_passes
from jaxspec.measure.timing import in_turns
from jaxspec.native import num_cores
from jaxspec.tuning import load_tree

_NUM_DRAFTED = 4
_LLAMA_CPP: Mapping[str, LlamaCppMethod] = {
    "llama.cpp, bf16": LlamaCppMethod("bf16"),
    "llama.cpp, bf16, draft model": LlamaCppMethod("bf16", "model"),
    "llama.cpp, bf16, n-gram": LlamaCppMethod("bf16", "n-gram"),
    "llama.cpp, q8_0": LlamaCppMethod("q8_0"),
}
_OPENVINO: Mapping[str, OpenVinoMethod] = {
    "OpenVINO, bf16": OpenVinoMethod("bf16"),
    "OpenVINO, bf16, draft model": OpenVinoMethod("bf16", drafts=True),
}
_Runner = JaxRunner | LlamaCppRunner | OpenVinoRunner
_OURS_INT8 = "plain, int8"
_NUM_TOKENS = (1, 2, 6, 8, 16, 26)
"""Widths of the passes, the root included."""
_MIN_PASSES = 7
_DECODING = "decoding"


def deer_tree(target: Model) -> LoadedDrafter | None:
    """Builds DEER over the tree that was searched for it."""
    folder = shipped_models().get(DEER)
    if folder is None or not (folder / TREE_FILE).is_file():
        return None
    return with_deer(DEER, paths=load_tree(folder / TREE_FILE))(target)


class _InTurns:
    """Decodes with the runner that knows a method."""

    def __init__(self, runners: Sequence[_Runner]):
        self._runners = {name: runner for runner in runners for name in runner.methods}
        self.methods = list(self._runners)

    def decode(self, method: str, prompt: list[int], seed: int) -> Sample:
        return self._runners[method].decode(method, prompt, seed)


def _measure(run: SuiteRun) -> Page:
    model, max_new_tokens = load(MADE_FOR), run.suite.max_new_tokens
    ours_int8 = load(MADE_FOR, weights="int8")
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    drafters = {name: make(model) for name, make in run.suite.methods.items()}
    prompts = run.prompts(model, max_new_tokens)
    assert model.tokenizer is not None, "shipped with one"
    ids = {i: [int(t) for t in model.tokenizer.encode(p.text)] for i, p in enumerate(prompts)}
    repeats_of_passes = max(_MIN_PASSES, run.repeats)

    def compare_with_plain(index: int, plain: Sample, other: Sample) -> list[Divergence]:
        one, two = (np.asarray(sample.texts[0]) for sample in (plain, other))
        found = divergence_of(model, index, np.asarray(ids[index]), one, two)
        return [] if found is None else [found]

    with ExitStack() as stack:
        runners: list[_Runner] = [
            JaxRunner(model, {PLAIN: None, **drafters}, config, carry=False),
            JaxRunner(ours_int8, {_OURS_INT8: None}, config, carry=False),
        ]
        passes: dict[str, dict[str, Callable[[], float]]] = {
            name: {str(n): partial(_seconds, loop_of_passes(each.network, n)) for n in _NUM_TOKENS}
            for name, each in ((PLAIN, model), (_OURS_INT8, ours_int8))
        }
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given = (folder, num_cores(), max_new_tokens, load(DRAFT), _NUM_DRAFTED)
        left_out = {"llama.cpp": llama_cpp.why_not_here(), "OpenVINO": openvino.why_not_here()}
        others = []
        if left_out["llama.cpp"] is None:
            servers = stack.enter_context(LlamaCppRunner(model, _LLAMA_CPP, *given))
            others.append(servers)
            passes |= {
                name: _passes_of(servers, name, model.vocab_size)
                for name, method in _LLAMA_CPP.items()
                if method.drafts is None
            }
        if left_out["OpenVINO"] is None:
            others.append(OpenVinoRunner(model, _OPENVINO, *given))
        runners += others
        facts = [
            f"{each.versions}; times are its own, of prompt and new tokens." for each in others
        ]
        facts += [f"{name} is left out: {why}." for name, why in left_out.items() if why]
        if left_out["OpenVINO"] is None:
            facts.append("OpenVINO's EAGLE-3 is left out: it reads heads in a form of its makers.")
        both = _InTurns(runners)
        with run.steps(len(both.methods) * len(ids) * (1 + run.repeats)) as advance:
            figures = measure_methods(
                both,
                both.methods,
                ids,
                run.repeats,
                categories=[prompt.category for prompt in prompts],
                warm=list(ids),
                compare=compare_with_plain,
                advance=advance,
            )
        seconds = _medians(passes, repeats_of_passes)
    exact = [each for name, each in figures.items() if name in (PLAIN, *drafters)]
    table = Section(
        text=[
            f"{MADE_FOR}, {len(ids)} prompts, greedy, up to {max_new_tokens} new tokens, one at a "
            f"time, runs of each timed: {run.repeats}. Draft models draft {_NUM_DRAFTED} tokens. "
            f"{' '.join(facts)} {this_machine()}."
        ],
        columns=["method", "outputs", "tau", "tokens/s", "over plain [95 %]", "repeated"],
        rows=[_cells(each, len(ids)) for each in figures.values()],
        notes=[
            "**outputs**: prompts whose tokens are those of our plain decoding. int8 and q8_0 are "
            "other models, so theirs may differ. In bf16, both round what they multiply, too.",
            "**tau**: tokens per target pass, bonus token INCLUDED.",
            "**repeated**: share of the output's 4-grams that occurred in it before.",
            *(line for each in exact for line in divergence_lines(each.name, each.divergences)),
        ],
    )
    agree = all(divergence.is_tie for each in exact for divergence in each.divergences)
    found = {"methods": figures, "passes": seconds, "machine": this_machine()}
    return Page([table, _section_of_passes(seconds, repeats_of_passes)], found, agree)


def _cells(row: MethodFigures, num_prompts: int) -> list[str]:
    figures = row.overall
    return [
        row.name,
        outputs_text(row.divergences, num_prompts),
        f"{figures.mean_acceptance_length:.2f}",
        f"{figures.tokens_per_second:.0f}",
        speedup_text(figures),
        f"{figures.repeated_ngrams:.0%}",
    ]


def _seconds(loop: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(loop())
    return (time.perf_counter() - start) / NUM_PASSES


def _passes_of(
    runner: LlamaCppRunner, method: str, vocab_size: int
) -> dict[str, Callable[[], float]]:
    ids = np.random.default_rng(0).integers(16, vocab_size, CONTEXT + max(_NUM_TOKENS)).tolist()
    context, following = ids[:CONTEXT], ids[CONTEXT:]
    return {
        _DECODING: partial(runner.token_seconds, method, context, NUM_PASSES),
        **{
            str(n): partial(runner.pass_seconds, method, context, following[:n])
            for n in _NUM_TOKENS
        },
    }


def _medians(
    passes: Mapping[str, Mapping[str, Callable[[], float]]], repeats: int
) -> dict[str, dict[str, float]]:
    """Runs every pass `repeats` times, in turns, after a first run that is not counted."""
    timed = {f"{name}, {kind}": each[kind] for name, each in passes.items() for kind in each}
    for once in timed.values():
        once()
    seconds: dict[str, list[float]] = {key: [] for key in timed}
    for _, key in in_turns(list(timed), 1, repeats):
        seconds[key].append(timed[key]())
    return {
        name: {kind: float(np.median(seconds[f"{name}, {kind}"])) for kind in each}
        for name, each in passes.items()
    }


def _section_of_passes(seconds: Mapping[str, Mapping[str, float]], repeats: int) -> Section:
    columns = (_DECODING, *map(str, _NUM_TOKENS))
    # A pass of ours over one token is one of decoding.
    whole = {name: {_DECODING: each["1"], **each} for name, each in seconds.items()}
    rows = [
        [name, *(f"{1e3 * each[column]:.2f} ms" for column in columns)]
        for name, each in whole.items()
    ]
    rows += [
        [f"{ours} / {theirs}", *(f"{whole[ours][c] / whole[theirs][c]:.2f}" for c in columns)]
        for ours, theirs in ((PLAIN, "llama.cpp, bf16"), (_OURS_INT8, "llama.cpp, q8_0"))
        if theirs in whole
    ]
    return Section(
        "Passes",
        text=[
            f"T(n) is the time of one pass over n tokens after a cached text of {CONTEXT}; medians "
            f"of {repeats}, in turns."
        ],
        columns=["weights", _DECODING, *(f"T({n})" for n in _NUM_TOKENS)],
        rows=rows,
        notes=[
            f"Ours: a loop of {NUM_PASSES} passes with a capacity of {CAPACITY}, as verification "
            "runs them: every token has logits and a choice.",
            "llama.cpp: the server's time of a prompt whose first tokens are cached. Only the last "
            "token has logits, so these passes do less than verification.",
            f"**{_DECODING}**: time per token of {NUM_PASSES} tokens decoded one by one. For ours "
            "that is T(1).",
        ],
    )


SIDE_BY_SIDE: Mapping[str, Suite] = {
    "side-by-side": Suite(
        title="Next to llama.cpp and OpenVINO",
        about="plain and speculative decoding next to llama.cpp's and OpenVINO's, same weights",
        measure=_measure,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        repeats=5,
        needs=(DRAFT, EAGLE_HEAD, EAGLE3_HEAD, SKIPS, DEER),
        models=(MADE_FOR,),
        methods={
            "prompt lookup": lambda target: PromptLookup(),
            "draft model": with_draft_model(DRAFT, num_speculative_tokens=_NUM_DRAFTED),
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
            "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
            "layer skip, as searched": searched_set(),
            "DEER, chain of 4": with_deer(DEER, block=4),
            "DEER, searched tree": deer_tree,
        },
    )
}
