"""Comparison of exported files with JAX: texts, logits, and traces of JAX done again.

A file of float32 is compared with JAX. A file of fewer bits is another model, so it is compared
with its own `decode`, token by token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.types import Proposal
from jaxspec.decoding.generate import generate, score
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import GenerationConfig
from jaxspec.decoding.result import Trace
from jaxspec.drafters import DrafterLike
from jaxspec.measure.comparison import TIE_GAP, Divergence
from jaxspec.mobile.checks import Way, compare_ways, decoding
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.drafts import Caller, Draft
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.loops import (
    HostAcceptance,
    LoopOf,
    Plain,
    Steps,
    Verified,
    own_draft,
    verify_drafts,
)
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.runtime import MobileModel

LARGEST_LOGITS_ERROR = 5e-5
"""Largest difference of float32 logits from those of JAX."""
QUANTIZED_TIE_GAP = 0.1
"""Gap of logits below which texts of fewer bits may differ. CPUs quantize activations, and their
kernels of one row and of several round differently: texts differed at gaps of 0.03."""


class LoopParity(NamedTuple):
    """One way to decode with a file, next to its reference.

    Attributes:
        name: name of the loop.
        num_texts: texts that were compared.
        counts: tokens of each round of all texts, the bonus token INCLUDED; each text begins with
            the 1 that comes with its prompt.
        divergences: first differences of the texts that differ.
        tie_gap: gap of logits below which rounding explains a divergence.
    """

    name: str
    num_texts: int
    counts: tuple[int, ...]
    divergences: tuple[Divergence, ...]
    tie_gap: float

    @property
    def tau(self) -> float:
        """Tokens per round, bonus INCLUDED; the tokens that come with the prompts are left out."""
        tokens, rounds = sum(self.counts) - self.num_texts, len(self.counts) - self.num_texts
        return Counts(num_tokens=tokens, num_steps=rounds).tau

    def is_tie(self, divergence: Divergence) -> bool:
        """True if both tokens are the reference's best within `tie_gap`."""
        return divergence.gap is not None and divergence.gap < self.tie_gap

    @property
    def exact(self) -> bool:
        """True if all texts are the same, except for ties."""
        return all(map(self.is_tie, self.divergences))


class Replay(NamedTuple):
    """Steps of JAX, done again by a file behind the same text.

    Attributes:
        num_steps: in all traces.
        same_drafts: steps in which the file drafts the same tokens, and maybe more behind them.
        same_commits: steps in which the file accepts as many of JAX's drafts and emits the same
            tokens.
    """

    num_steps: int
    same_drafts: int
    same_commits: int


class FileParity(NamedTuple):
    """Comparison of one file.

    Attributes:
        drafter: name of the drafter in the file.
        quantization: of its weights.
        loops: the ways to decode that it has. The reference is JAX for float32, else `decode`.
        replay: of the drafter's traces; `None` where the file has other weights than JAX.
        logits_error: largest difference from JAX's logits behind every token of JAX's texts; `None`
            likewise.
    """

    drafter: str
    quantization: str
    loops: tuple[LoopParity, ...]
    replay: Replay | None
    logits_error: float | None

    @property
    def exact(self) -> bool:
        """True if nothing differs except ties of texts, and the logits are close enough."""
        replay, error = self.replay, self.logits_error
        same_steps = replay is None or replay.same_drafts == replay.same_commits == replay.num_steps
        close = error is None or error <= LARGEST_LOGITS_ERROR
        return same_steps and close and all(loop.exact for loop in self.loops)


def compare_with_jax(
    model: Model,
    drafters: Mapping[str, DrafterLike],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    quantizations: Sequence[str] = ("float32", "int8", "int4"),
    capacity: int = 1024,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[FileParity]:
    """Exports a file per drafter and quantization, and decodes all prompts in each of its ways.

    Args:
        model: the target.
        drafters: by name; each is exported into separate files.
        prompts: ids.
        max_new_tokens: of each text; stop ids do not end one.
        quantizations: of the files.
        capacity: of the files.
        advance: called once per file, and once before.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop_token_ids=())
    advance("decoding with JAX")
    texts = [row.tokens.tolist() for row in generate(model, prompts, config)]
    for name, drafter in drafters.items():
        for quantization in quantizations:
            advance(f"{name}, {quantization}")
            shapes = ExportConfig(capacity=capacity, quantization=quantization, check_gpu_ops=False)
            with TemporaryDirectory() as folder:
                export(model, folder, drafter, shapes)
                file = MobileModel(Path(folder) / MODEL_FILE, num_threads=1)
                loops = loops_of(file.manifest).items()
                ways = {name: decoding(max_new_tokens, loop) for name, loop in loops}
                if quantization == "float32":
                    traces = _traces(model, drafter, prompts, texts)
                    yield FileParity(
                        name,
                        quantization,
                        judged_loops(
                            file,
                            ways,
                            prompts,
                            texts,
                            logits_after=lambda text: score(model, text).logits[-1],
                            tie_gap=TIE_GAP,
                        ),
                        replay(file, prompts, texts, traces),
                        logits_error(model, file, prompts, texts),
                    )
                else:
                    own = [ways["decode"](file, prompt).tokens.tolist() for prompt in prompts]
                    loops = judged_loops(
                        file,
                        ways,
                        prompts,
                        own,
                        logits_after=lambda text, file=file: logits_behind(file, text),
                        tie_gap=QUANTIZED_TIE_GAP,
                    )
                    yield FileParity(name, quantization, loops, None, None)


def loops_of(manifest: Manifest) -> dict[str, LoopOf]:
    """Returns the ways in which a file with a drafter decodes, by name.

    Where drafts end by a threshold, `step` drafts whole chains: `step_exit` ends them as JAX does.
    """
    drafted = "draft_1, accept" if manifest.sizes("accept") else "draft, verify, commit"
    loops: dict[str, LoopOf] = {"decode": Plain, drafted: verify_drafts}
    for signature in ("step_exit", "step"):
        if signature in manifest.signatures:
            loops[signature] = partial(Steps, signature=signature)
    return loops


def judged_loops(
    file: MobileModel,
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    logits_after: Callable[[Sequence[int]], np.ndarray],
    tie_gap: float,
) -> tuple[LoopParity, ...]:
    """Decodes prompts in several ways; tells ties from faults where a text is not the expected one.

    Args:
        file: the file that is checked.
        ways: ways of decoding, by name.
        prompts: ids of the prompts.
        texts: expected ids behind each prompt.
        logits_after: returns the reference's logits behind a text.
        tie_gap: see `LoopParity`.
    """

    def with_gap(each: Divergence) -> Divergence:
        prompt, text = prompts[each.prompt_index], texts[each.prompt_index]
        logits = logits_after([*prompt, *text[: each.position]])
        pair = np.asarray([each.plain_token, each.drafted_token])
        return each._replace(gap=float(np.max(logits) - np.min(logits[pair])))

    return tuple(
        LoopParity(*check[:3], tuple(map(with_gap, check.divergences)), tie_gap)
        for check in compare_ways(file, ways, prompts, texts)
    )


def logits_behind(file: MobileModel, text: Sequence[int]) -> np.ndarray:
    """Returns the logits of `decode` behind a text."""
    if len(text) > 1:
        file.prefill(text[:-1])
    file.call("decode", pending=[text[-1]], length=[len(text) - 1])
    return file.read("decode", "logits")[0]


def _traces(
    model: Model,
    drafter: DrafterLike,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[Trace]:
    """Decodes with JAX behind the first token of each text, which comes with a file's prompt."""
    longer = [[*prompt, text[0]] for prompt, text in zip(prompts, texts, strict=True)]
    config = GenerationConfig(max_new_tokens=len(texts[0]) - 1, stop_token_ids=())
    rows = generate(model, longer, config, drafter, return_trace=True)
    return [row.trace or Trace() for row in rows]


def replay(
    file: MobileModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    traces: Sequence[Trace],
) -> Replay:
    """Does every step of traces again: the file's draft, `verify_N` on JAX's, `commit_N`.

    Args:
        file: with the drafter of the traces.
        prompts: ids.
        texts: ids that JAX emitted behind them.
        traces: of the same texts, from their second token on.
    """
    same_drafts = same_commits = 0
    for prompt, text, trace in zip(prompts, texts, traces, strict=True):
        replayed = _Replayed(own_draft(file), trace)

        def loop(model: Caller, acceptance: HostAcceptance, replayed=replayed) -> Verified:
            return Verified(model, replayed, acceptance)

        stream = file.stream(prompt, loop)
        if next(stream).tokens != text[:1]:
            continue
        for step in trace:
            emitted = next(stream).tokens
            theirs = step.emitted.tolist()  # the budget may have cut the last
            if len(emitted) != len(step.path) or emitted[: len(theirs)] != theirs:
                break
            same_commits += 1
        same_drafts += replayed.num_same
    return Replay(sum(map(len, traces)), same_drafts, same_commits)


class _Replayed:
    """Drafts of a trace, compared with the drafts of the file."""

    def __init__(self, inner: Draft, trace: Trace):
        self._inner, self._steps = inner, iter(trace)
        self.nodes, self.absorbs = inner.nodes, inner.absorbs
        self.num_same = 0

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        own, step = self._inner(text, recent), next(self._steps)
        same_tree = np.array_equal(own.tree.parents, step.parents)
        # JAX ends drafts at the budget, and those of a head at its threshold, which a file lacks.
        offered = np.where(own.valid, own.tokens, -1)
        same_tokens = np.array_equal(offered[step.valid], step.tokens[step.valid])
        self.num_same += same_tree and same_tokens
        return own._replace(tokens=step.tokens, valid=step.valid)


def logits_error(
    model: Model,
    file: MobileModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> float:
    """Returns the largest difference from JAX's logits behind every token of texts."""
    worst = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        theirs = score(model, [*prompt, *text]).logits[len(prompt) - 1 :]
        file.prefill(prompt)
        ours = [file.read(f"prefill_{file.last_prefill}", "logits")[0]]
        for place, token in enumerate(text):
            file.call("decode", pending=[token], length=[len(prompt) + place])
            ours.append(file.read("decode", "logits")[0])
        known = file.manifest.num_tokens
        differences = np.abs(np.stack(ours) - theirs[:, :known])
        worst = float(np.maximum(worst, np.max(differences)))  # NaN stays NaN
    return worst
