"""One target by this library and by llama.cpp, in turns, on the same weights and prompts."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import llama_cpp
from benchmarks.harness import MethodFigures, Suite, SuiteRun, measure_methods
from benchmarks.llama_cpp import LlamaCppMethod, LlamaCppRunner
from benchmarks.page import Page, Section
from benchmarks.prompts import PROMPT_SETS
from jaxspec.checkpoint import load, load_eagle
from jaxspec.commands.methods import DRAFT, EAGLE3_HEAD, EAGLE_HEAD, MADE_FOR
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import DraftModel, Eagle, PromptLookup
from jaxspec.measure.compare import JaxRunner
from jaxspec.measure.comparison import speedup_text
from jaxspec.measure.figures import PLAIN, Sample
from jaxspec.measure.machine import this_machine
from jaxspec.models.linear import num_cores
from jaxspec.tuning import tree_of_head

_NUM_DRAFTED = 4
_THEIRS: Mapping[str, LlamaCppMethod] = {
    "llama.cpp, bf16": LlamaCppMethod("bf16"),
    "llama.cpp, bf16, draft model": LlamaCppMethod("bf16", "model"),
    "llama.cpp, bf16, n-gram": LlamaCppMethod("bf16", "n-gram"),
    "llama.cpp, q8_0": LlamaCppMethod("q8_0"),
}
_OURS_INT8 = "plain, int8"


class _InTurns:
    """Decodes with the runner that knows a method."""

    def __init__(self, runners: Sequence[JaxRunner | LlamaCppRunner]):
        self._runners = {name: runner for runner in runners for name in runner.methods}
        self.methods = list(self._runners)

    def decode(self, method: str, prompt: list[int], seed: int) -> Sample:
        return self._runners[method].decode(method, prompt, seed)


def _measure(run: SuiteRun) -> Page:
    model, draft, max_new_tokens = load(MADE_FOR), load(DRAFT), run.suite.max_new_tokens
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    drafters = {
        PLAIN: None,
        "prompt lookup": PromptLookup(),
        "draft model": DraftModel.of(draft, num_speculative_tokens=_NUM_DRAFTED),
        **{
            f"{name}, searched tree": Eagle.of(load_eagle(head, model.network), tree_of_head(head))
            for name, head in (("EAGLE-1", EAGLE_HEAD), ("EAGLE-3", EAGLE3_HEAD))
        },
    }
    prompts = run.prompts(model, max_new_tokens)
    assert model.tokenizer is not None, "shipped with one"
    ids = {i: [int(t) for t in model.tokenizer.encode(p.text)] for i, p in enumerate(prompts)}
    reason, threads = llama_cpp.why_not_here(), num_cores()
    with ExitStack() as stack:
        runners: list[JaxRunner | LlamaCppRunner] = [
            JaxRunner(model, drafters, config, carry=False),
            JaxRunner(load(MADE_FOR, weights="int8"), {_OURS_INT8: None}, config, carry=False),
        ]
        theirs = f"llama.cpp is left out: {reason}."
        if reason is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            other = stack.enter_context(
                LlamaCppRunner(model, _THEIRS, folder, threads, max_new_tokens, draft, _NUM_DRAFTED)
            )
            runners.append(other)
            theirs = f"llama.cpp: {other.versions}; times are its own, of prompt and new tokens."
        both = _InTurns(runners)
        with run.steps(len(both.methods) * len(ids) * (1 + run.repeats)) as advance:
            figures = measure_methods(
                both,
                both.methods,
                ids,
                run.repeats,
                categories=[prompt.category for prompt in prompts],
                warm=list(ids),
                advance=advance,
            )
    table = Section(
        text=[
            f"{MADE_FOR}, {len(ids)} prompts, greedy, up to {max_new_tokens} new tokens, one at a "
            f"time, runs of each timed: {run.repeats}. Draft models draft {_NUM_DRAFTED} tokens. "
            f"{theirs} {this_machine()}."
        ],
        columns=["method", "outputs", "tau", "tokens/s", "over plain [95 %]", "repeated"],
        rows=[_cells(each, len(ids)) for each in figures.values()],
        notes=[
            "**outputs**: prompts whose tokens are those of our plain decoding. int8 and q8_0 are "
            "other models, so theirs may differ.",
            "**tau**: tokens per target pass, bonus token INCLUDED.",
            "**repeated**: share of the output's 4-grams that occurred in it before.",
        ],
    )
    exact = [each for name, each in figures.items() if name != _OURS_INT8 and name not in _THEIRS]
    agree = not any(each.divergences for each in exact)
    return Page([table], {"methods": figures, "machine": this_machine()}, agree)


def _cells(row: MethodFigures, num_prompts: int) -> list[str]:
    figures = row.overall
    different = len({divergence.prompt_index for divergence in row.divergences})
    return [
        row.name,
        f"{num_prompts - different} of {num_prompts} equal",
        f"{figures.mean_acceptance_length:.2f}",
        f"{figures.tokens_per_second:.0f}",
        speedup_text(figures),
        f"{figures.repeated_ngrams:.0%}",
    ]


SIDE_BY_SIDE: Mapping[str, Suite] = {
    "side-by-side": Suite(
        title="Next to llama.cpp",
        about="plain and speculative decoding next to llama.cpp's, on the same weights",
        measure=_measure,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        repeats=3,
        needs=(MADE_FOR, DRAFT, EAGLE_HEAD, EAGLE3_HEAD),
    )
}
