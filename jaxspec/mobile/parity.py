"""Whether exported files decode as they should: texts, logits, and traces of JAX done again.

A file of float32 is held against JAX. Fewer bits make another model of it, so such a file is held
against its own `decode`, token by token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from jaxspec.bench.comparison import TIE_GAP, Divergence
from jaxspec.checkpoint import Model
from jaxspec.core.types import Drafter, Proposal
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig, generate, score
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.mobile.loops import Acceptance, Draft, LoopOf, Plain, Steps, TreeDraft, Verified
from jaxspec.mobile.runtime import MobileModel, verify_drafts
from jaxspec.result import Trace

LOOPS: Mapping[str, LoopOf] = {
    "decode": Plain,
    "draft, verify, commit": verify_drafts,
    "step": Steps,
}


LARGEST_LOGITS_ERROR = 5e-5
"""Of float32, beside JAX."""
QUANTISED_TIE_GAP = 0.1
"""Of fewer bits. CPUs quantise activations, and their kernels of one row and of several round
differently: texts were seen to part where the two best logits lay 0.03 apart."""


class LoopParity(NamedTuple):
    """One way to decode with a file, beside its reference.

    tau: tokens per round, bonus INCLUDED; the first token, which comes with the prompt, left out.
    divergences: of the texts that differ.
    tie_gap: below this gap rounding explains a divergence.
    """

    name: str
    num_texts: int
    tau: float
    divergences: tuple[Divergence, ...]
    tie_gap: float = TIE_GAP

    def is_tie(self, divergence: Divergence) -> bool:
        """True if both tokens are the reference's best within `tie_gap`."""
        return divergence.gap is not None and divergence.gap < self.tie_gap

    @property
    def exact(self) -> bool:
        """True if all texts are the same, ties aside."""
        return all(map(self.is_tie, self.divergences))


class Replay(NamedTuple):
    """Steps of JAX, done again by a file behind the same text.

    num_steps: in all traces.
    same_drafts: steps in which the file offers the same tokens.
    same_commits: steps in which, of JAX's drafts, it accepts as many and emits the same tokens.
    """

    num_steps: int
    same_drafts: int
    same_commits: int


class FileParity(NamedTuple):
    """One file.

    drafter: what is baked into it.
    loops: the ways to decode that it has. The reference is JAX for float32, else the first loop.
    replay: of the drafter's traces; `None` where the file has other weights than JAX.
    logits_error: largest difference from JAX's logits behind every token of every text, on texts
        of JAX; `None` likewise.
    """

    drafter: str
    quantization: str
    loops: tuple[LoopParity, ...]
    replay: Replay | None
    logits_error: float | None

    @property
    def exact(self) -> bool:
        """True if nothing differs, ties of texts aside, and logits are as close as promised."""
        replay, error = self.replay, self.logits_error
        same_steps = replay is None or replay.same_drafts == replay.same_commits == replay.num_steps
        close = error is None or error <= LARGEST_LOGITS_ERROR
        return same_steps and close and all(loop.exact for loop in self.loops)


def compare_with_jax(
    model: Model,
    drafters: Mapping[str, Drafter | LoadedDrafter],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    quantizations: Sequence[str] = ("float32", "int8", "int4"),
    slots: int = 1024,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[FileParity]:
    """Exports a file per drafter and quantization, and decodes all prompts in each of its ways.

    Args:
        model: the target.
        drafters: by name; each is baked into files of its own.
        prompts: ids.
        max_new_tokens: of each text; no stop id ends one.
        quantizations: of the files.
        slots: of the files.
        advance: called once per file, and once before.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop_token_ids=())
    advance("decoding with JAX")
    texts = [row.tokens.tolist() for row in generate(model, prompts, config)]
    for name, drafter in drafters.items():
        for quantization in quantizations:
            advance(f"{name}, {quantization}")
            shapes = ExportConfig(slots=slots, quantization=quantization, check_gpu_ops=False)
            with TemporaryDirectory() as folder:
                export(model, folder, drafter, shapes)
                file = MobileModel(Path(folder) / MODEL_FILE, num_threads=1)
                if quantization == "float32":
                    traces = _traces(model, drafter, prompts, texts)
                    yield FileParity(
                        name,
                        quantization,
                        _loops(
                            file,
                            prompts,
                            texts,
                            lambda text: score(model, text).logits[-1],
                            TIE_GAP,
                        ),
                        replay(file, prompts, texts, traces),
                        logits_error(model, file, prompts, texts),
                    )
                else:
                    own = [file.generate(p, max_new_tokens, (), Plain).tokens for p in prompts]
                    own = [tokens.tolist() for tokens in own]
                    loops = _loops(
                        file,
                        prompts,
                        own,
                        lambda text, file=file: logits_behind(file, text),
                        QUANTISED_TIE_GAP,
                    )
                    yield FileParity(name, quantization, loops, None, None)


def _traces(
    model: Model,
    drafter: Drafter | LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[Trace]:
    """A file's first token comes with the prompt's pass, so that JAX begins behind it."""
    longer = [[*prompt, text[0]] for prompt, text in zip(prompts, texts, strict=True)]
    config = GenerationConfig(max_new_tokens=len(texts[0]) - 1, stop_token_ids=())
    rows = generate(model, longer, config, drafter, return_trace=True)
    return [row.trace or Trace() for row in rows]


def _loops(
    file: MobileModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    logits_after: Callable[[Sequence[int]], np.ndarray],
    tie_gap: float,
) -> tuple[LoopParity, ...]:
    found = []
    for name, loop in LOOPS.items():
        counts, divergences = [], []
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            decoded = file.generate(prompt, len(text), (), loop)
            counts += decoded.counts[1:]
            ours = decoded.tokens.tolist()
            if ours != text:
                divergences.append(_divergence(index, prompt, text, ours, logits_after))
        tau = float(np.mean(counts))
        found.append(LoopParity(name, len(texts), tau, tuple(divergences), tie_gap))
    return tuple(found)


def _divergence(
    index: int,
    prompt: Sequence[int],
    text: Sequence[int],
    ours: Sequence[int],
    logits_after: Callable[[Sequence[int]], np.ndarray],
) -> Divergence:
    at = next(i for i, (one, other) in enumerate(zip(text, ours, strict=True)) if one != other)
    logits = logits_after([*prompt, *text[:at]])
    gap = float(np.max(logits) - np.min(logits[[text[at], ours[at]]]))
    return Divergence(index, at, text[at], ours[at], gap)


def logits_behind(file: MobileModel, text: Sequence[int]) -> np.ndarray:
    """Logits that `decode` gives behind a text."""
    if len(text) > 1:
        file.prefill(text[:-1])
    file.call("decode", pending=[text[-1]], length=[len(text) - 1])
    return file.read("decode", "logits")[0]


def replay(
    file: MobileModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    traces: Sequence[Trace],
) -> Replay:
    """Does every step of some traces again: `draft`, `verify_N` on JAX's drafts, `commit_N`.

    Args:
        file: with the drafter of the traces.
        prompts: ids.
        texts: that JAX emitted behind them.
        traces: of the same texts, from their second token on.
    """
    same_drafts = same_commits = 0
    for prompt, text, trace in zip(prompts, texts, traces, strict=True):
        replayed = _Replayed(TreeDraft(file), trace)

        def loop(model: MobileModel, acceptance: Acceptance, replayed=replayed) -> Verified:
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
    """Offers the drafts of a trace, and compares them with the file's own."""

    def __init__(self, inner: Draft, trace: Trace):
        self._inner, self._steps = inner, iter(trace)
        self.nodes, self.absorbs = inner.nodes, inner.absorbs
        self.num_same = 0

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        own, step = self._inner(text, recent), next(self._steps)
        same_tree = np.array_equal(own.tree.parents, step.parents)
        same_tokens = np.array_equal(np.asarray(own.tokens)[step.valid], step.tokens[step.valid])
        self.num_same += same_tree and same_tokens
        return own._replace(tokens=step.tokens, valid=step.valid)


def logits_error(
    model: Model,
    file: MobileModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> float:
    """The largest difference from JAX's logits, behind every token of some texts."""
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
