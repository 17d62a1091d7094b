"""The comparison of the paper on LiteRT: plain decoding, EAGLE's tree, a searched one, EAGLE-2.

Static trees are drafted and verified by whole graphs. EAGLE-2 shapes each tree anew, so the host
drives it level by level: the overhead that a static tree avoids. Everything runs on one thread and
one file per tree, in turns, with real acceptance.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.figures import LOW_REPETITION, speedup, speedup_interval
from jaxspec.bench.machine import Machine, this_machine
from jaxspec.bench.page import bullets, table
from jaxspec.bench.results import MADE_BY
from jaxspec.checkpoint import Model
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.core.types import Proposal
from jaxspec.drafters import Eagle
from jaxspec.metrics import repeated_ngrams
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.mobile.loops import (
    Acceptance,
    Draft,
    DynamicDraft,
    Emitted,
    Loop,
    LoopOf,
    Plain,
    TreeDraft,
    Verified,
)
from jaxspec.mobile.profile import time_signatures
from jaxspec.mobile.runtime import MobileModel, whole_steps
from jaxspec.trees import load_profile

TITLE = "Speculative decoding on LiteRT"
PLAIN = "plain"
ABOUT_COLUMNS = (
    "Nodes leave the root out; tau is tokens per round, bonus token included. A round's "
    "verification holds the target pass, acceptance on the host and commit. Repeated: the share of "
    "an output's 4-grams that it already held; low repetition: over the prompts, their number in "
    f"parentheses, whose plain output repeats less than {LOW_REPETITION:.0%}."
)
ABOUT_QUANTIZED = (
    "Products with quantised weights are rounded otherwise in wider passes, so near ties may turn "
    "there and texts differ (`litert-tokens` lists such gaps)."
)
_COLUMNS = (
    *("method", "nodes", "drafting ms", "verification ms", "round ms", "tau", "tokens/s"),
    *("x plain [95 %]", "repeated", "low repetition", "texts that differ"),
)
_BEAM = 8
_REPEATS = 31
_PUBLISHED = "galaxy-s25-adreno830-vicuna7b-q4"


class SubsetResult(NamedTuple):
    """A method over some of the prompts. tau: bonus INCLUDED."""

    num_prompts: int
    tau: float
    speedup: float


class MethodResult(NamedTuple):
    """One method on one file.

    nodes: draft tokens of a round, the root EXCLUDED.
    draft_seconds, verify_seconds: medians of a round; verification is the target pass, acceptance
        and commit. `None` where one call does both.
    round_seconds: median of a whole round.
    tau: tokens per round, bonus INCLUDED; the first token, which comes with the prompt, left out.
    tokens_per_second: all tokens over the time of all rounds; reading prompts is left out.
    speedup: plain decoding's time per token over the method's.
    speedup_interval: 95 % bootstrap interval over prompts; `None` for one prompt.
    repeated_ngrams: share of an output's 4-grams that it already held.
    low_repetition: over the prompts whose PLAIN output repeats less than `LOW_REPETITION` of its
        4-grams; `None`: there are none.
    num_different: texts that are not plain decoding's of the same file. Rounding of quantised
        products differs with the width of a pass, so near ties may turn.
    """

    name: str
    nodes: int
    draft_seconds: float | None
    verify_seconds: float | None
    round_seconds: float
    tau: float
    tokens_per_second: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    repeated_ngrams: float
    low_repetition: SubsetResult | None
    num_different: int


class LitertComparison(NamedTuple):
    """All methods by quantization, and what they were measured on.

    step_ratios: by quantization and tree, the time of `step` over that of its three parts.
    """

    machine: Machine
    model: str
    num_prompts: int
    max_new_tokens: int
    results: Mapping[str, Sequence[MethodResult]]
    step_ratios: Mapping[str, Mapping[str, float]]

    def as_markdown(self, command: str) -> str:
        """A part of the page of results, made by a command."""
        heading = f"# {TITLE}\n\n{MADE_BY}\n    {command}"
        return "\n\n".join([heading, *self.paragraphs()]) + "\n"

    def paragraphs(self) -> list[str]:
        """One table per quantization, and the published figures."""
        parts = [
            f"{self.model}, {self.num_prompts} prompts, {self.max_new_tokens} new tokens, greedy, "
            f"1 thread. {self.machine}"
            + (". THE MACHINE WAS BUSY: only ratios count." if self.machine.busy else "."),
            f"{ABOUT_COLUMNS} `step` is one function; its time over that of `draft`, `verify_N` "
            "and `commit_N` together, medians of calls in turns, is below each table.",
        ]
        for name, rows in self.results.items():
            ratios = [
                f"{tree}: step / (draft + verify + commit) = {ratio:.2f}."
                for tree, ratio in self.step_ratios[name].items()
            ]
            parts += [f"## {name}", methods_table(rows), bullets(*ratios)]
        published = load_profile(_PUBLISHED)
        runs = ", ".join(
            f"{run.name} of {run.nodes} nodes: {run.tokens_per_second} tokens/s (tau {run.tau})"
            for run in published.published
        )
        plain = 1 / float(published.target_seconds(1))
        parts.append(
            f"Published for {published.device}: plain {plain:.2f} tokens/s; {runs}. "
            f"{published.quantisation}."
        )
        return parts

    def as_dict(self) -> dict[str, Any]:
        """Every figure, ready for JSON."""
        results = {name: results_as_dicts(rows) for name, rows in self.results.items()}
        return {**self._asdict(), "machine": self.machine._asdict(), "results": results}


def methods_table(rows: Sequence[MethodResult]) -> str:
    """A row for each method, and how much faster than plain decoding it is."""

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.2f}"

    return table(
        _COLUMNS,
        [
            [
                row.name,
                str(row.nodes),
                milliseconds(row.draft_seconds),
                milliseconds(row.verify_seconds),
                milliseconds(row.round_seconds),
                f"{row.tau:.2f}",
                f"{row.tokens_per_second:.2f}",
                _with_interval(row),
                f"{row.repeated_ngrams:.0%}",
                _of_subset(row.low_repetition),
                str(row.num_different),
            ]
            for row in rows
        ],
    )


def results_as_dicts(rows: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """Every figure, ready for JSON."""
    return [
        row._asdict() | {"low_repetition": row.low_repetition and row.low_repetition._asdict()}
        for row in rows
    ]


def _with_interval(row: MethodResult) -> str:
    if row.speedup_interval is None:
        return f"{row.speedup:.2f}"
    low, high = row.speedup_interval
    return f"{row.speedup:.2f} [{low:.2f}, {high:.2f}]"


def _of_subset(subset: SubsetResult | None) -> str:
    if subset is None:
        return ""
    return f"{subset.speedup:.2f}, tau {subset.tau:.2f} ({subset.num_prompts})"


def compare_on_litert(
    model: Model,
    head: Any,
    searched: Mapping[str, Sequence[RankPath]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    slots: int = 1024,
    advance: Callable[[str], None] = lambda _: None,
) -> LitertComparison:
    """Exports a file per tree and quantization, and decodes all prompts with each method in turns.

    Args:
        model: the target.
        head: an EAGLE head for it.
        searched: by quantization of the files, rank paths of the tree that was searched for them.
        prompts: ids.
        max_new_tokens: of each text; stop ids end none, so that all methods do the same work.
        slots: of the files.
        advance: called with what is being done, `num_parts` times.
    """
    results, ratios = {}, {}
    for name, tree_of_name in searched.items():
        config = ExportConfig(slots=slots, quantization=name, check_gpu_ops=False)
        with TemporaryDirectory() as folder:
            files = {}
            for tree, paths in (("EAGLE's tree", EAGLE_PATHS), ("searched tree", tree_of_name)):
                advance(f"{name}: exporting with {tree}")
                levels = (_BEAM,) if paths is EAGLE_PATHS else ()
                shapes = ExportConfig(**{**vars(config), "levels": levels})
                export(model, Path(folder) / tree, Eagle.of(head, paths), shapes)
                files[tree] = MobileModel(Path(folder) / tree / MODEL_FILE, num_threads=1)
            advance(f"{name}: decoding in turns")
            methods = list(_methods(files))
            results[name] = decode_in_turns(files, methods, prompts, max_new_tokens)
            ratios[name] = {tree: _step_ratio(file) for tree, file in files.items()}
    return LitertComparison(
        this_machine(), model.name, len(prompts), max_new_tokens, results, ratios
    )


def num_parts(quantizations: Sized) -> int:
    """How often `compare_on_litert` calls `advance`."""
    return 3 * len(quantizations)


def _step_ratio(file: MobileModel) -> float:
    nodes = 1 + len(file.manifest.paths)
    parts = ("draft", f"verify_{nodes}", f"commit_{nodes}")
    runs = time_signatures(file, ("step", *parts), _REPEATS)
    seconds = {name: float(np.median(times)) for name, times in runs.items()}
    return seconds["step"] / sum(seconds[part] for part in parts)


class Watched:
    """A loop, and how long its drafts and its rounds took."""

    def __init__(self):
        self.drafts: list[float] = []
        self.rounds: list[float] = []
        self.num_tokens = 0

    def loop(self, inner: Loop) -> Loop:
        return _TimedLoop(inner, self)

    def draft(self, inner: Draft) -> Draft:
        return _TimedDraft(inner, self)


class _TimedLoop:
    def __init__(self, inner: Loop, watched: Watched):
        self._inner, self._watched = inner, watched
        self.rows, self.absorbs = inner.rows, inner.absorbs

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
        start = time.perf_counter()
        emitted = self._inner.advance(text, recent)
        self._watched.rounds.append(time.perf_counter() - start)
        self._watched.num_tokens += len(emitted.tokens)
        return emitted


class _TimedDraft:
    def __init__(self, inner: Draft, watched: Watched):
        self._inner, self._watched = inner, watched
        self.nodes, self.absorbs = inner.nodes, inner.absorbs

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        start = time.perf_counter()
        proposal = self._inner(text, recent)
        self._watched.drafts.append(time.perf_counter() - start)
        return proposal


class Method(NamedTuple):
    """One way to decode.

    file: of the target, by name. nodes: of a draft, the root EXCLUDED.
    loop: of what watches it.
    """

    name: str
    file: str
    nodes: int
    loop: Callable[[Watched], LoopOf]


def plainly(watched: Watched) -> LoopOf:
    """A `Method.loop` that decodes token by token."""
    return lambda model, acceptance: watched.loop(Plain(model, acceptance))


def stepping(watched: Watched) -> LoopOf:
    """One that calls whole steps."""
    return lambda model, acceptance: watched.loop(whole_steps(model, acceptance))


def verifying(make: Callable[[MobileModel], Draft]) -> Callable[[Watched], LoopOf]:
    """One that verifies what a draft, made for the target's file, offers."""

    def of(watched: Watched) -> LoopOf:
        def loop(model: MobileModel, acceptance: Acceptance) -> Loop:
            return watched.loop(Verified(model, watched.draft(make(model)), acceptance))

        return loop

    return of


def _methods(files: Mapping[str, MobileModel]) -> Iterator[Method]:
    eagle = next(iter(files))
    yield Method(PLAIN, eagle, 0, plainly)
    for name, model in files.items():
        nodes = len(model.manifest.paths)
        yield Method(f"{name}: draft, verify, commit", name, nodes, verifying(TreeDraft))
        yield Method(f"{name}: step", name, nodes, stepping)
    nodes = len(files[eagle].manifest.paths)
    dynamic = verifying(lambda model: DynamicDraft(model, nodes))
    yield Method("EAGLE-2 from the host", eagle, nodes, dynamic)


def decode_in_turns(
    files: Mapping[str, MobileModel],
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[MethodResult]:
    """Decodes all prompts with every method, the one called `PLAIN` among them."""
    watched: dict[str, list[Watched]] = {method.name: [] for method in methods}
    texts: dict[str, list[np.ndarray]] = {method.name: [] for method in methods}

    def decode(method: Method, prompt: Sequence[int], watch: Watched, count: int) -> np.ndarray:
        loop = method.loop(watch)
        return files[method.file].generate(prompt, count, (), loop).tokens

    for method in methods:  # compiles what the host runs, and packs weights
        decode(method, prompts[0], Watched(), 4)
    for turn, prompt in enumerate(prompts):
        for place in range(len(methods)):
            method = methods[(turn + place) % len(methods)]
            watch = Watched()
            texts[method.name].append(decode(method, prompt, watch, max_new_tokens))
            watched[method.name].append(watch)
    repeated = [repeated_ngrams([text.tolist()]) for text in texts[PLAIN]]
    low = [place for place, share in enumerate(repeated) if share < LOW_REPETITION]
    return [_result(method, watched, texts, low) for method in methods]


def _result(
    method: Method,
    watched: Mapping[str, Sequence[Watched]],
    texts: Mapping[str, Sequence[np.ndarray]],
    low_repetition: Sequence[int],
) -> MethodResult:
    watches, own = watched[method.name], texts[method.name]
    costs, plain_costs = _costs(watches), _costs(watched[PLAIN])
    rounds = [seconds for watch in watches for seconds in watch.rounds]
    drafts = [seconds for watch in watches for seconds in watch.drafts]
    seconds, num_tokens = costs.sum(axis=0)
    draft = float(np.median(drafts)) if drafts else None
    verify = float(np.median(rounds)) if method.name == PLAIN else None
    if draft is not None:
        verify = float(np.median(np.subtract(rounds, drafts)))
    subset = None
    if low_repetition:
        some = costs[low_repetition].sum(axis=0)
        num_rounds = sum(len(watches[place].rounds) for place in low_repetition)
        plain = plain_costs[low_repetition].sum(axis=0)
        subset = SubsetResult(
            len(low_repetition), float(some[1] / num_rounds), float(speedup(plain, some))
        )
    pairs = zip(own, texts[PLAIN], strict=True)
    return MethodResult(
        name=method.name,
        nodes=method.nodes,
        draft_seconds=draft,
        verify_seconds=verify,
        round_seconds=float(np.median(rounds)),
        tau=float(num_tokens / len(rounds)),
        tokens_per_second=float(num_tokens / seconds),
        speedup=float(speedup(plain_costs.sum(axis=0), costs.sum(axis=0))),
        speedup_interval=speedup_interval(plain_costs, costs),
        repeated_ngrams=repeated_ngrams([text.tolist() for text in own]),
        low_repetition=subset,
        num_different=sum(not np.array_equal(ours, plain) for ours, plain in pairs),
    )


def _costs(watches: Sequence[Watched]) -> np.ndarray:
    """Seconds and tokens of each prompt."""
    return np.asarray([(sum(watch.rounds), watch.num_tokens) for watch in watches])
