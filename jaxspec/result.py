"""What decoding returns: rows, metrics, and, where asked for, a trace of every step."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxspec.core.types import DecodeState, Info, Stop
from jaxspec.metrics import Metrics, metrics_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer
    from jaxspec.core.types import Drafter
    from jaxspec.drafters import LoadedDrafter

FINISH_REASONS = {
    Stop.RUNNING: "running",
    Stop.TOKEN: "stop_token",
    Stop.STRING: "stop_string",
    Stop.LENGTH: "length",
    Stop.NOT_FINITE: "not_finite",
}


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step of one row, on the host; notebooks show it as a tree.

    tokens: one per node of the draft tree; node 0 is the pending token.
    parents: each node's parent, -1 at the root.
    valid: nodes that were offered; the others are unused budget.
    draft_logprobs: one law per expanded parent; `None` for deterministic drafts.
    law_row: the law each node was drawn from.
    path: accepted nodes, root first.
    emitted: tokens this step added: the accepted ones, then the bonus (or corrected) token.
    width: tokens in the target pass, root included.
    tokenizer: spells the tokens when the step is shown; `None` shows ids.
    """

    tokens: np.ndarray
    parents: np.ndarray
    valid: np.ndarray
    draft_logprobs: np.ndarray | None
    law_row: np.ndarray
    path: np.ndarray
    emitted: np.ndarray
    width: int
    tokenizer: "Tokenizer | None" = dataclasses.field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str:
        from jaxspec.render import step_svg

        return step_svg(self)


class Trace(tuple[TraceStep, ...]):
    """Every step of one row, in order; notebooks show it as a table."""

    def table(self) -> list[dict]:
        """One plain dictionary per step, see `render.trace_table`; `pandas.DataFrame` takes it."""
        from jaxspec.render import trace_table

        return trace_table(self)

    def _repr_html_(self) -> str:
        from jaxspec.render import trace_html

        return trace_html(self)


def trace_steps(info: Info, tokenizer: "Tokenizer | None" = None) -> list[TraceStep | None]:
    """Fetches one batched step, split into rows; `None` for rows that emitted nothing."""
    host: Any = jax.device_get(info)
    proposal, verdict = host.proposal, host.verdict
    laws = proposal.draft_logprobs
    return [
        TraceStep(
            tokens=proposal.tokens[row],
            parents=proposal.tree.parents[row],
            valid=proposal.valid[row],
            draft_logprobs=None if laws is None else laws[row],
            law_row=proposal.law_row[row],
            path=verdict.path[row][: verdict.num_emitted[row]],
            emitted=host.emitted[row][:count],
            width=int(host.width[row]),
            tokenizer=tokenizer,
        )
        if count
        else None
        for row, count in enumerate(host.count)
    ]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One continuation of one prompt.

    Attributes:
        prompt_tokens: ids of the prompt.
        tokens: ids emitted, the stop id or the token that completed a stop string included.
        text: their text, special tokens left out, cut before a stop string; `None` without a
            tokenizer.
        finish_reason: "stop_token", "stop_string", "length" (budget or context used up) or
            "not_finite" (the target gave no usable logits).
        from_draft: for each token, True if it was drafted and accepted, False if it is the
            target's own.
        logprobs: the target's log-probability of each token before warping; `None` if not asked.
        warped_logprobs: the same after temperature and filters; `None` if not asked.
        metrics: of this row alone.
        prompt_index: place of the prompt in the call.
        sample_index: which of the prompt's samples this is.
        trace: every step, if asked for.
        tokenizer: spells the tokens; `None` if the model has none.
    """

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    text: str | None
    finish_reason: str
    from_draft: np.ndarray
    logprobs: np.ndarray | None
    warped_logprobs: np.ndarray | None
    metrics: Metrics
    prompt_index: int = 0
    sample_index: int = 0
    trace: Trace | None = None
    tokenizer: "Tokenizer | None" = dataclasses.field(default=None, repr=False, compare=False)

    def token_texts(self) -> list[str]:
        """What each token adds to the text; special tokens by name, ids without a tokenizer.

        A character made of several tokens belongs to the one that completes it.
        """
        if self.tokenizer is None:
            return [f"{token} " for token in self.tokens.tolist()]
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=False)
        texts = [detokenizer.push([token]) for token in self.tokens.tolist()]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts

    def _repr_html_(self) -> str:
        from jaxspec.render import generation_html

        return generation_html(self)


@dataclasses.dataclass(frozen=True)
class GenerationResult(Sequence[Generation]):
    """Rows in order of prompts, samples of one prompt side by side, and the metrics of the call.

    drafters: by row, what to draft a next prompt with. A drafter that learns from prompt to prompt
        (`CarriesOn`) goes on where the row left it; any other is the one that was given.
    """

    rows: tuple[Generation, ...]
    metrics: Metrics
    drafters: tuple["Drafter | LoadedDrafter | None", ...] = ()

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self.rows)

    def _repr_html_(self) -> str:
        from jaxspec.render import result_html

        return result_html(self)

    @property
    def texts(self) -> list[str | None]:
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[np.ndarray]:
        return [row.tokens for row in self.rows]


class HostRow(NamedTuple):
    """One row of final states, on the host."""

    tokens: np.ndarray
    finish_reason: str
    from_draft: np.ndarray
    logprobs: np.ndarray | None
    warped_logprobs: np.ndarray | None
    num_steps: int
    num_nodes: int
    accepted: np.ndarray
    drafted: np.ndarray

    def metrics(self) -> Metrics:
        return combine_metrics([self])


def host_rows(states: DecodeState, prompt_lengths: Sequence[int]) -> list[HostRow]:
    """Fetches final states, split into rows without their prompts."""
    host: Any = jax.device_get(states)
    context, emitted, stats = host.context, host.emitted, host.stats

    def part(facts: np.ndarray | None, row: int) -> Any:
        return None if facts is None else facts[row, prompt_lengths[row] : context.length[row]]

    return [
        HostRow(
            tokens=part(context.tokens, row),
            finish_reason=FINISH_REASONS[Stop(int(host.stop[row]))],
            from_draft=part(emitted.from_draft, row),
            logprobs=part(emitted.logprobs, row),
            warped_logprobs=part(emitted.warped_logprobs, row),
            num_steps=int(stats.num_steps[row]),
            num_nodes=int(stats.num_nodes[row]),
            accepted=stats.accepted[row],
            drafted=stats.drafted[row],
        )
        for row in range(len(prompt_lengths))
    ]


def combine_metrics(
    rows: Sequence[HostRow], seconds: float | None = None, compile_seconds: float | None = None
) -> Metrics:
    """Metrics of several rows decoded together."""
    return metrics_of(
        rows=[row.tokens.tolist() for row in rows],
        num_steps=[row.num_steps for row in rows],
        num_nodes=[row.num_nodes for row in rows],
        accepted=np.stack([row.accepted for row in rows]),
        drafted=np.stack([row.drafted for row in rows]),
        num_from_draft=int(sum(row.from_draft.sum() for row in rows)),
        seconds=seconds,
        compile_seconds=compile_seconds,
    )
