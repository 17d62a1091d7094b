"""The suite `lookup`: drafts that are copied, over a file of questions and over edits of code."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks.edits import EDITS
from benchmarks.harness import Suite, SuiteRun
from benchmarks.page import Page, Section
from benchmarks.prompts import GSM8K, PromptSet
from benchmarks.suites.jobs import digest_of_tokens, divergences_of, tokens_by_line
from jaxspec.batch.job import run as run_job
from jaxspec.batch.rows import rows_of
from jaxspec.batch.settings import JobSettings
from jaxspec.batch.writer import Collector
from jaxspec.checkpoint import Model, load
from jaxspec.commands.methods import EAGLE_HEAD, MADE_FOR, searched_tree, with_lookup
from jaxspec.core.cache import empty_layer
from jaxspec.core.types import Hidden, KVCache
from jaxspec.decoding.generate import generate
from jaxspec.decoding.metrics import Counts, repeated_ngrams
from jaxspec.decoding.request import GenerationConfig, encode_prompt
from jaxspec.drafters import DrafterLike, PromptLookup, SuffixLookup
from jaxspec.measure.comparison import TIE_GAP, Divergence, divergence_lines
from jaxspec.measure.figures import PLAIN
from jaxspec.measure.prompts import read_entries

CODE_EDITS = PromptSet("code edits", str(EDITS), "{prompt}")
_ANSWER_ROOM = 512
"""Tokens of an answer at most, so that all of them share programs."""


_COPYING: Mapping[str, DrafterLike] = {
    "prompt lookup": PromptLookup(),
    "suffix lookup": SuffixLookup(),
}


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


def _measure_lookup(run: SuiteRun) -> Page:
    model, suite = load(MADE_FOR), run.suite
    prompts = run.prompts(model, suite.max_new_tokens)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    jobs: list[Copied] = []
    written: dict[str, Counts] = {}
    with run.steps(len(categories) * len(suite.methods) + len(_COPYING)) as advance:
        for category in categories:
            rows = rows_of([prompt.text for prompt in prompts if prompt.category == category])
            ids = [row._replace(prompt=encode_prompt(model, row.prompt)) for row in rows]
            plain: dict[int, list[int]] = {}
            for name, make in suite.methods.items():
                advance(f"{category}: {name}")
                output, config = Collector(), GenerationConfig(suite.max_new_tokens)
                settings = JobSettings(drafting="always")
                report = run_job(model, ids, output, config, make(model), settings=settings)
                tokens = tokens_by_line(output.records)
                plain = plain or tokens
                jobs.append(
                    Copied(
                        category,
                        name,
                        report.counts,
                        digest_of_tokens(tokens),
                        divergences_of(model, ids, plain, tokens),
                        repeated_ngrams(list(tokens.values())),
                    )
                )
        for name, drafter in _COPYING.items():
            advance(f"answers: {name}")
            written[name] = write_answers(model, drafter)
    return lookup_page(model.name, jobs, written)


def lookup_page(target: str, jobs: list[Copied], written: Mapping[str, Counts]) -> Page:
    """Returns the page of the suite `lookup`."""
    sections = [
        Section(
            "Jobs",
            [
                f"{target}, greedy, float32, every step drafts. tau: tokens per target pass, bonus "
                "token INCLUDED. Suffix lookup reads what the rows of its job have emitted. hash: "
                f"of all tokens; ties, gaps of the target's logits below {TIE_GAP:g}, are listed."
            ],
            [
                *("prompts", "method", "tau", "drafted per pass", "hash"),
                *("rows that differ", "repeated 4-grams"),
            ],
            [
                [
                    job.category,
                    job.method,
                    f"{job.counts.tau:.2f}",
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
            "A target that does what the edits ask for",
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
    agree = all(each.is_tie for job in jobs for each in job.divergences)
    return Page(sections, {"jobs": jobs, "answers": written}, agree)


LOOKUP_SUITES: Mapping[str, Suite] = {
    "lookup": Suite(
        title="Drafts that are copied",
        about="lookup in texts, alone and with a head: tau on a file of questions, on code edits",
        measure=_measure_lookup,
        prompt_sets=(GSM8K, CODE_EDITS),
        prompts_per_set=1319,
        needs=(EAGLE_HEAD,),
        models=(MADE_FOR,),
        methods={
            PLAIN: lambda target: None,
            **{name: lambda target, each=each: each for name, each in _COPYING.items()},
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
            "suffix lookup and EAGLE-1": with_lookup(EAGLE_HEAD),
        },
    ),
}
