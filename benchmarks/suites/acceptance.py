"""The suite `acceptance`: tokens per target pass, by rule of verification, copied and ended early.

It measures no time, so a busy machine changes nothing.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks.edits import EDITS
from benchmarks.harness import Advance, Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import (
    GSM8K,
    HUMANEVAL,
    PROMPT_SETS,
    SPEC_BENCH,
    PromptSet,
    SuitePrompt,
)
from benchmarks.suites.jobs import digest_of_tokens, divergences_of, tokens_by_line
from jaxspec.batch.job import run as run_job
from jaxspec.batch.rows import Row, rows_of
from jaxspec.batch.settings import JobSettings
from jaxspec.batch.writer import Collector
from jaxspec.checkpoint import Model, load, load_eagle
from jaxspec.commands.methods import (
    DEER,
    DRAFT,
    EAGLE3_HEAD,
    EAGLE_HEAD,
    MADE_FOR,
    searched_tree,
    with_lookup,
)
from jaxspec.core import decode
from jaxspec.core.cache import empty_layer
from jaxspec.core.tree import EAGLE_PATHS, chain_paths
from jaxspec.core.types import Hidden, KVCache, Proposal, Verdict
from jaxspec.core.verify import verify_chain, verify_deterministic, verify_tree
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Counts, repeated_ngrams
from jaxspec.decoding.request import GenerationConfig, encode_prompt
from jaxspec.drafters import (
    Deer,
    DrafterLike,
    DraftModel,
    Eagle,
    LoadedDrafter,
    PromptLookup,
    SuffixLookup,
)
from jaxspec.measure.comparison import TIE_GAP, Divergence, divergence_lines
from jaxspec.measure.figures import LOW_REPETITION, NUM_RESAMPLES, PLAIN, speedup, speedup_interval
from jaxspec.measure.prompts import read_entries
from jaxspec.measure.timing import release_programs
from jaxspec.tuning.measuring import chain_at_threshold

Record = Mapping[str, Any]

_NEW_TOKENS = 128
_SAMPLES = 8
_PROMPTS = 20
"""Prompts of each set, except for copied drafts."""
(_CHAT,) = (group for group in SPEC_BENCH if group.category == "chat")
MIXED = (GSM8K, HUMANEVAL, _CHAT)
"""Prompts of drafts that end early."""
_FIXED = (2, 3, 4, 5, 6, 7, 8)
_LONGEST = 16
_THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
_COMPARED = (4, 6, 8)
_GREEDY = (4, 8)
"""Lengths of chains on each kind of prompt."""
_ROWS = 8
"""Rows at once of chains that end early: a pass is as wide as the longest draft of its rows."""

CODE_EDITS = PromptSet("code edits", str(EDITS), "{prompt}")
COPIED_FROM = (GSM8K, CODE_EDITS)
"""Prompts of copied drafts; all of each set."""
_ANSWER_ROOM = 512
"""Tokens of an answer at most, so that all of them share programs."""


_COPYING: Mapping[str, DrafterLike] = {
    "prompt lookup": PromptLookup(),
    "suffix lookup": SuffixLookup(),
}
_TREE, _UNION = "EAGLE-1, searched tree", "suffix lookup and EAGLE-1"
_OVER = {"suffix lookup": "prompt lookup", _UNION: _TREE}
"""The method that each is compared with."""


def decode_rows(
    model: Model,
    rows: Sequence[Row],
    config: GenerationConfig,
    drafter: DrafterLike | None,
    batch_size: int | None = None,
) -> list[Record]:
    """Decodes rows in a job; returns its records by line and sample."""
    release_programs()
    output = Collector()
    settings = JobSettings(batch_size=batch_size, drafting="always")
    run_job(model, rows, output, config, drafter, settings=settings)
    return sorted(output.records, key=lambda record: (record["line"], record["sample"]))


def counts_of(records: Sequence[Record]) -> Counts:
    """Returns tokens, target passes and verified draft tokens of records."""
    found = [record["metrics"] for record in records]
    return Counts(
        num_tokens=sum(each["num_tokens"] for each in found),
        num_steps=sum(each["num_verify_steps"] for each in found),
        num_nodes=sum(each["num_draft_tokens"] for each in found),
    )


def _rows_of(model: Model, prompts: Sequence[Any]) -> list[Row]:
    return rows_of([encode_prompt(model, prompt.text) for prompt in prompts])


def verify_node_by_node(
    uniforms: Float[Array, " nodes"],
    proposal: Proposal,
    target_logits: Float[Array, "nodes vocab"],
) -> Verdict:
    """Accepts or rejects each node by itself, from the root; see `core.verify.verify`."""
    if proposal.draft_logprobs is None:
        return verify_deterministic(uniforms, proposal, target_logits)
    is_chain = proposal.tree.children.shape[-1] == 1
    rule = verify_chain if is_chain else verify_tree
    return rule(uniforms, proposal, target_logits)


@contextlib.contextmanager
def judging_node_by_node() -> Iterator[None]:
    """Has all decoding within judge node by node.

    The library has no setting for this: whole paths give the same distribution of texts, and on
    average accept no fewer tokens with any drafter.
    """
    rule = decode.verify
    try:
        decode.verify = verify_node_by_node
        jax.clear_caches()
        yield
    finally:
        decode.verify = rule
        jax.clear_caches()


class Judged(NamedTuple):
    """A drafter at temperature 1, with both rules of verification.

    Attributes:
        name: the drafter's name.
        by_node: target passes and tokens of each prompt, all its samples together, judged node by
            node.
        by_path: the same, with whole paths judged.
        repeated_ngrams: share of 4-grams of an output that occurred in it before.
    """

    name: str
    by_node: Int[np.ndarray, "prompts 2"]
    by_path: Int[np.ndarray, "prompts 2"]
    repeated_ngrams: float

    @property
    def taus(self) -> tuple[float, float]:
        """Tokens per target pass, bonus INCLUDED: node by node, and of whole paths."""
        (passes, tokens), (other_passes, other_tokens) = self.by_node.sum(0), self.by_path.sum(0)
        return float(tokens / passes), float(other_tokens / other_passes)

    @property
    def gain(self) -> float:
        """Relative gain in tau of whole paths; 0 for none."""
        return float(speedup(self.by_node.sum(axis=0), self.by_path.sum(axis=0))) - 1

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the gain over prompts; `None` for one prompt."""
        found = speedup_interval(self.by_node, self.by_path)
        return None if found is None else (found[0] - 1, found[1] - 1)


def measure_rules(
    model: Model,
    rows: Sequence[Row],
    drafters: Mapping[str, LoadedDrafter],
    config: GenerationConfig,
    advance: Advance,
) -> list[Judged]:
    """Decodes rows with every drafter and both rules of verification."""

    def figures(records: Sequence[Record]) -> Int[np.ndarray, "prompts 2"]:
        pairs = ((each["metrics"]["num_verify_steps"], len(each["tokens"])) for each in records)
        return np.asarray([*pairs]).reshape(len(rows), -1, 2).sum(axis=1)

    def decode_all(rule: str) -> dict[str, list[Record]]:
        found = {}
        for name, drafter in drafters.items():
            advance(f"{name}, {rule}")
            found[name] = decode_rows(model, rows, config, drafter)
        return found

    by_path = decode_all("whole paths")
    with judging_node_by_node():
        by_node = decode_all("node by node")
    return [
        Judged(
            name,
            figures(by_node[name]),
            figures(by_path[name]),
            repeated_ngrams([each["tokens"] for each in by_path[name]]),
        )
        for name in drafters
    ]


class ByKind(NamedTuple):
    """Greedy decoding of prompts of several kinds with one drafter.

    Attributes:
        name: the drafter's name.
        counts: by kind of prompt, of all together, and of those whose plain output repeats little.
        divergences: where rows leave those of plain decoding.
    """

    name: str
    counts: Mapping[str, Counts]
    divergences: tuple[Divergence, ...]


def measure_kinds(
    model: Model,
    prompts: Sequence[SuitePrompt],
    drafters: Mapping[str, DrafterLike],
    config: GenerationConfig,
    advance: Advance,
) -> list[ByKind]:
    """Decodes prompts greedily with every drafter."""
    rows, kinds = _rows_of(model, prompts), [each.category for each in prompts]
    advance("each kind of prompt: plain decoding")
    plain = tokens_by_line(decode_rows(model, rows, config, None))
    little = [repeated_ngrams([plain[row.line]]) < LOW_REPETITION for row in rows]
    places = {
        **{
            kind: [i for i, each in enumerate(kinds) if each == kind]
            for kind in dict.fromkeys(kinds)
        },
        "all": range(len(rows)),
        f"{sum(little)} that repeat little": np.flatnonzero(little).tolist(),
    }
    found = []
    for name, drafter in drafters.items():
        advance(f"each kind of prompt: {name}")
        records = decode_rows(model, rows, config, drafter)
        found.append(
            ByKind(
                name,
                {kind: counts_of([records[i] for i in those]) for kind, those in places.items()},
                divergences_of(model, rows, plain, tokens_by_line(records)),
            )
        )
    return found


class Copied(NamedTuple):
    """One job.

    Attributes:
        category: its prompts.
        method: the drafter's name.
        counts: of all its rows.
        digest: checksum of its tokens.
        divergences: where its rows leave those of plain decoding.
        repeated_ngrams: share of 4-grams of an output that occurred in it before.
    """

    category: str
    method: str
    counts: Counts
    digest: str
    divergences: tuple[Divergence, ...]
    repeated_ngrams: float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["text"], meta_fields=["vocab_size"]
)
@dataclasses.dataclass(frozen=True)
class Dictated:
    """A target that writes a given text: after place i comes token i + 1 of it.

    Drafts that leave the text are refused, so what it says after them does not matter.
    """

    embed_dim = 1
    text: Int[Array, " places"]
    vocab_size: int

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()) -> Hidden:
        """See `core.types.LanguageModel`; the features of a token are its position."""
        del mask, cache, scratch, taps
        keys = empty_layer(1, 1, len(tokens), jnp.dtype("float32"))
        features = positions.astype(jnp.float32)[:, None]
        return Hidden(features, jnp.zeros((len(tokens), 0)), (keys,))

    def unembed(self, features: Float[Array, "nodes 1"]) -> Float[Array, "nodes vocab"]:
        """See `core.types.LanguageModel`."""
        following = self.text[features[:, 0].astype(jnp.int32) + 1]
        return jax.nn.one_hot(following, self.vocab_size)

    def empty_cache(self, capacity: int) -> KVCache:
        """See `core.types.LanguageModel`."""
        return KVCache((empty_layer(1, 1, capacity, jnp.dtype("float32")),), jnp.int32(0))


def write_answers(model: Model, drafter: DrafterLike) -> Counts:
    """Drafts for a target that writes the answers of the edits, in the model's tokens."""
    assert model.tokenizer is not None, f"{model.name} ships with a tokenizer"
    total, end = Counts(), model.stop_token_ids[0]
    for _, row in read_entries(EDITS):
        prompt = encode_prompt(model, row["prompt"])
        both = [*prompt, *model.tokenizer.encode(row["answer"], special_tokens=False)]
        text = np.full(model.max_positions, end, np.int32)
        text[: len(both)] = both
        writer = Model.of(
            Dictated(jnp.asarray(text), model.vocab_size),
            max_positions=model.max_positions,
            stop_token_ids=(end,),
        )
        result = generate(writer, prompt, drafter, max_new_tokens=_ANSWER_ROOM)
        assert [*prompt, *result[0].tokens.tolist()] == [*both, end], row["source"]
        total += result.metrics.counts
    return total


def measure_copies(
    run: SuiteRun, model: Model, advance: Advance
) -> tuple[list[Copied], dict[str, Counts]]:
    """Decodes a job of each category with every method; drafts for answers that are given."""
    jobs: list[Copied] = []
    config = GenerationConfig(run.suite.max_new_tokens)
    for group in COPIED_FROM:
        rows = _rows_of(model, run.prompts(model, run.suite.max_new_tokens, (group,)))
        plain: dict[int, list[int]] = {}
        for name, make in run.suite.methods.items():
            advance(f"{group.category}: {name}")
            records = decode_rows(model, rows, config, make(model))
            tokens = tokens_by_line(records)
            plain = plain or tokens
            jobs.append(
                Copied(
                    group.category,
                    name,
                    counts_of(records),
                    digest_of_tokens(tokens),
                    divergences_of(model, rows, plain, tokens),
                    repeated_ngrams(list(tokens.values())),
                )
            )
    written: dict[str, Counts] = {}
    for name, drafter in _COPYING.items():
        advance(f"answers: {name}")
        written[name] = write_answers(model, drafter)
    return jobs, written


class ChainFigures(NamedTuple):
    """Greedy decoding over chains of one drafter.

    Attributes:
        drafter: its name.
        length: of the longest chain.
        threshold: at which a chain ends early; 0: all chains have the same length.
        counts: of all rows.
        num_accepted: accepted draft tokens, bonus EXCLUDED.
        divergences: where rows leave those of plain decoding.
    """

    drafter: str
    length: int
    threshold: float
    counts: Counts
    num_accepted: int
    divergences: tuple[Divergence, ...] = ()

    @property
    def drafted_per_accepted(self) -> float:
        """Drafted tokens for each that was accepted; NaN if none was."""
        return self.counts.num_nodes / self.num_accepted if self.num_accepted else float("nan")


def accepted_of_chains(records: Sequence[Record]) -> int:
    """Returns the accepted draft tokens, bonus EXCLUDED; all drafted ones lie along one path."""
    found = [record["metrics"] for record in records]
    return sum(round(each["acceptance_rate"] * each["num_draft_tokens"]) for each in found)


def measure_chains(
    model: Model,
    rows: Sequence[Row],
    drafters: Mapping[str, LoadedDrafter],
    config: GenerationConfig,
    advance: Advance,
) -> tuple[list[ChainFigures], float]:
    """Decodes rows over chains of fixed length and over chains that end early.

    Returns:
        Figures, and the share of 4-grams of plain decoding's outputs that occurred before.
    """
    advance("mixed prompts: plain decoding")
    plain = tokens_by_line(decode_rows(model, rows, config, None, _ROWS))
    fixed = [(length, 0.0) for length in _FIXED]
    early = [(_LONGEST, threshold) for threshold in _THRESHOLDS]
    found = []
    for name, drafter in drafters.items():
        for length, threshold in fixed + early:
            advance(f"{name}: {_chain_name(length, threshold)}")
            chains = chain_at_threshold(drafter, length, threshold)
            records = decode_rows(model, rows, config, chains, _ROWS)
            found.append(
                ChainFigures(
                    name,
                    length,
                    threshold,
                    counts_of(records),
                    accepted_of_chains(records),
                    divergences_of(model, rows, plain, tokens_by_line(records)),
                )
            )
    return found, repeated_ngrams(list(plain.values()))


def _chain_name(length: int, threshold: float) -> str:
    return f"up to {length}, threshold {threshold:g}" if threshold else f"fixed, {length}"


def at_equal_tau(early: Sequence[ChainFigures], tau: float) -> float | None:
    """Returns drafted per accepted tokens where chains that end early have a given tau.

    Linear between the two thresholds next to each other whose taus enclose it.

    Args:
        early: of one drafter, by threshold.
        tau: tokens per target pass, bonus INCLUDED.

    Returns:
        The figure; `None` if no two thresholds enclose that tau.
    """
    for pair in itertools.pairwise(early):
        low, high = sorted(pair, key=lambda each: each.counts.tau)
        if low.counts.tau <= tau <= high.counts.tau:
            taus = [low.counts.tau, high.counts.tau]
            return float(np.interp(tau, taus, [each.drafted_per_accepted for each in (low, high)]))
    return None


class Saved(NamedTuple):
    """A fixed chain, and chains that end early with the same tau.

    Attributes:
        fixed: figures of the fixed chain.
        early: drafted per accepted tokens of the others; `None` if no thresholds enclose that tau.
    """

    fixed: ChainFigures
    early: float | None

    @property
    def change(self) -> float | None:
        """Relative change of drafted per accepted tokens; below 0, fewer are drafted."""
        return None if self.early is None else self.early / self.fixed.drafted_per_accepted - 1


def saved_at_equal_tau(chains: Sequence[ChainFigures]) -> list[Saved]:
    """Compares fixed chains of some lengths with those of the same drafter that end early."""
    return [
        Saved(
            fixed,
            at_equal_tau(
                [each for each in chains if each.drafter == fixed.drafter and each.threshold],
                fixed.counts.tau,
            ),
        )
        for fixed in chains
        if not fixed.threshold and fixed.length in _COMPARED
    ]


def _measure_acceptance(run: SuiteRun) -> Page:
    model, suite = load(MADE_FOR), run.suite
    draft, deer = DraftModel.of(load(DRAFT)), load(DEER)
    heads = {name: load_eagle(name, model.network) for name in (EAGLE_HEAD, EAGLE3_HEAD)}
    chain = chain_paths(4)
    sampled = {
        "draft model, chain of 4": DraftModel.of(load(DRAFT), 4),
        "draft model, chain of 8": DraftModel.of(load(DRAFT), 8),
        "DEER, chain of 5": Deer.of(deer, 5),
        "DEER, chain of 8": Deer.of(deer, 8),
        "EAGLE-1, chain of 4": Eagle.of(heads[EAGLE_HEAD], chain),
        "EAGLE-1, 25 nodes": Eagle.of(heads[EAGLE_HEAD], EAGLE_PATHS),
    }
    greedy = {
        **{f"DEER, chain of {length}": Deer.of(deer, length) for length in _GREEDY},
        "DEER, tree of 8": Deer.of(deer, 8, num_nodes=8),
        **{
            f"draft model, chain of {length}": DraftModel.of(load(DRAFT), length)
            for length in _GREEDY
        },
        **{
            f"EAGLE-1, chain of {length}": Eagle.of(heads[EAGLE_HEAD], chain_paths(length))
            for length in _GREEDY
        },
    }
    chains = {
        "draft model": draft,
        "EAGLE-1": Eagle.of(heads[EAGLE_HEAD], chain),
        "EAGLE-3": Eagle.of(heads[EAGLE3_HEAD], chain),
    }
    num_jobs = len(COPIED_FROM) * len(suite.methods) + len(_COPYING)
    num_chains = 1 + len(chains) * (len(_FIXED) + len(_THRESHOLDS))
    room = suite.max_new_tokens

    def rows(prompt_sets: Sequence[PromptSet]) -> list[Row]:
        return _rows_of(model, run.prompts(model, room, prompt_sets, _PROMPTS))

    with run.steps(2 * len(sampled) + 1 + len(greedy) + num_jobs + num_chains) as advance:
        config = GenerationConfig(room, temperature=1.0, num_samples=_SAMPLES)
        judged = measure_rules(model, rows(PROMPT_SETS), sampled, config, advance)
        prompts = run.prompts(model, room, PROMPT_SETS, _PROMPTS)
        kinds = measure_kinds(model, prompts, greedy, GenerationConfig(room), advance)
        jobs, written = measure_copies(run, model, advance)
        figures, repeated = measure_chains(
            model, rows(MIXED), chains, GenerationConfig(room), advance
        )
    return acceptance_page(model.name, judged, kinds, jobs, written, figures, repeated)


def acceptance_page(
    target: str,
    judged: Sequence[Judged],
    kinds: Sequence[ByKind],
    jobs: Sequence[Copied],
    written: Mapping[str, Counts],
    chains: Sequence[ChainFigures],
    repeated: float,
) -> Page:
    """Returns the page of the suite `acceptance`."""
    saved = saved_at_equal_tau(chains)
    about = (
        f"{target}, float32, up to {_NEW_TOKENS} new tokens, every step drafts. tau: tokens per "
        "target pass, bonus token INCLUDED. repeated 4-grams: share of those of an output that "
        "occurred in it before. Greedy outputs are compared with those of plain decoding; ties, "
        f"gaps of the target's logits below {TIE_GAP:g}, are listed."
    )
    sections = [
        Section(text=[about]),
        _rules_section(judged),
        _kinds_section(kinds),
        *_copies_sections(target, jobs, written),
        _saved_section(saved, repeated),
        _chains_section(chains),
    ]
    divergences = [each.divergences for each in (*kinds, *jobs, *chains)]
    figures = {
        "verification": judged,
        "kinds": kinds,
        "jobs": jobs,
        "answers": written,
        "chains": chains,
        "saved_at_equal_tau": saved,
        "repeated_ngrams_of_mixed_prompts": repeated,
    }
    agree = all(each.is_tie for found in divergences for each in found)
    return Page(sections, figures, agree)


def _rules_section(judged: Sequence[Judged]) -> Section:
    return Section(
        "Rules of verification at temperature 1",
        [
            f"{_PROMPTS} prompts each of {_names(PROMPT_SETS)} at most, {_SAMPLES} samples of "
            "each. node by node: each drafted token is accepted or rejected by itself. whole "
            "paths: by the joint ratio of the tokens up to it, which is what the library does. "
            f"gain: of tau [95 % bootstrap interval over prompts, {NUM_RESAMPLES} draws]."
        ],
        ["drafter", "tau, node by node", "tau, whole paths", "gain", "repeated 4-grams"],
        [
            [
                each.name,
                *(f"{tau:.3f}" for tau in each.taus),
                _gain_text(each),
                f"{each.repeated_ngrams:.1%}",
            ]
            for each in judged
        ],
    )


def _kinds_section(kinds: Sequence[ByKind]) -> Section:
    return Section(
        "Kinds of prompts",
        [
            f"Greedy, {_PROMPTS} prompts of each kind at most; tau. Prompts repeat little if less "
            f"than {LOW_REPETITION:.0%} of plain decoding's 4-grams occurred in it before."
        ],
        ["drafter", *kinds[0].counts, "rows that differ"],
        [
            [
                each.name,
                *(
                    f"{counts.tau:.2f}" if counts.num_steps else "-"
                    for counts in each.counts.values()
                ),
                str(len(each.divergences)),
            ]
            for each in kinds
        ],
        [line for each in kinds for line in divergence_lines(each.name, each.divergences)],
    )


def _names(prompt_sets: Sequence[PromptSet]) -> str:
    *others, last = (group.category for group in prompt_sets)
    return f"{', '.join(others)} and {last}"


def _gain_text(judged: Judged) -> str:
    interval = judged.gain_interval
    shown = "" if interval is None else " [{:+.1%}, {:+.1%}]".format(*interval)
    return f"{judged.gain:+.1%}{shown}"


def _copies_sections(
    target: str, jobs: Sequence[Copied], written: Mapping[str, Counts]
) -> list[Section]:
    taus = {(job.category, job.method): job.counts.tau for job in jobs}

    def over(job: Copied) -> str:
        other = taus.get((job.category, _OVER.get(job.method, "")))
        return f"{job.counts.tau / other:.3f} times {_OVER[job.method]}" if other else ""

    return [
        Section(
            "Copied drafts",
            [
                "Greedy. Suffix lookup reads what the rows of its job have emitted. hash: of all "
                "tokens."
            ],
            [
                *("prompts", "method", "tau", "tau over another", "drafted per pass", "hash"),
                *("rows that differ", "repeated 4-grams"),
            ],
            [
                [
                    job.category,
                    job.method,
                    f"{job.counts.tau:.2f}",
                    over(job),
                    f"{job.counts.num_nodes / job.counts.num_steps:.2f}",
                    f"`{job.digest}`",
                    str(len(job.divergences)),
                    f"{job.repeated_ngrams:.1%}",
                ]
                for job in jobs
            ],
            [line for job in jobs for line in divergence_lines(job.method, job.divergences)],
        ),
        Section(
            "Copied drafts for a target that does what the edits ask for",
            [
                "The target writes the answers of the code edits, in the tokens of "
                f"{target}: what drafts would bring to a model that follows instructions."
            ],
            ["method", "tau", "drafted per pass"],
            [
                [name, f"{counts.tau:.2f}", f"{counts.num_nodes / counts.num_steps:.2f}"]
                for name, counts in written.items()
            ],
        ),
    ]


def _saved_section(saved: Sequence[Saved], repeated: float) -> Section:
    return Section(
        "Drafts that end early",
        [
            f"Greedy, {_PROMPTS} prompts each of {_names(MIXED)} (Spec-Bench) at most; repeated "
            f"4-grams of plain decoding: {repeated:.1%}. drafted per accepted: drafted tokens for "
            "each that was accepted, bonus EXCLUDED. ending early: chains of up to "
            f"{_LONGEST} that end where the drafter is unsure, at the tau of the fixed chain, "
            "linear between two thresholds of the table below; -: no two of them enclose it. Near "
            "the limit of new tokens, no chain drafts more than may be emitted."
        ],
        [
            *("drafter", "fixed chain", "tau", "drafted per accepted", "ending early, equal tau"),
            "change",
        ],
        [
            [
                each.fixed.drafter,
                str(each.fixed.length),
                f"{each.fixed.counts.tau:.2f}",
                f"{each.fixed.drafted_per_accepted:.2f}",
                "-" if each.early is None else f"{each.early:.2f}",
                "-" if each.change is None else f"{each.change:+.0%}",
            ]
            for each in saved
        ],
    )


def _chains_section(chains: Sequence[ChainFigures]) -> Section:
    return Section(
        "Every chain",
        columns=[
            *("drafter", "chain", "tau", "drafted per pass", "drafted per accepted"),
            "rows that differ",
        ],
        rows=[
            [
                each.drafter,
                _chain_name(each.length, each.threshold),
                f"{each.counts.tau:.2f}",
                f"{each.counts.num_nodes / each.counts.num_steps:.2f}",
                f"{each.drafted_per_accepted:.2f}",
                str(len(each.divergences)),
            ]
            for each in chains
        ],
        notes=[
            line
            for each in chains
            for line in divergence_lines(
                f"{each.drafter}, {_chain_name(each.length, each.threshold)}", each.divergences
            )
        ],
        level=3,
    )


ACCEPTANCE_SUITES: Mapping[str, Suite] = {
    "acceptance": Suite(
        title="Tokens per target pass",
        about="tokens per pass: rules of verification, copied drafts, drafts that end early",
        measure=_measure_acceptance,
        prompt_sets=tuple(dict.fromkeys((*COPIED_FROM, *PROMPT_SETS, *MIXED))),
        prompts_per_set=1319,
        needs=(EAGLE_HEAD, EAGLE3_HEAD, DRAFT, DEER),
        models=(MADE_FOR,),
        methods={
            PLAIN: lambda target: None,
            **{name: lambda target, each=each: each for name, each in _COPYING.items()},
            _TREE: searched_tree(EAGLE_HEAD),
            _UNION: with_lookup(EAGLE_HEAD),
        },
        max_new_tokens=_NEW_TOKENS,
    ),
}
