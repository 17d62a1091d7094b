"""Results of decoding: rows, their text, metrics, and on request a trace of every step."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxspec.core.types import DecodeState, Info, Stop
from jaxspec.decoding.metrics import ROW_FIGURES, Counts, Metrics
from jaxspec.extras import needs_extra
from jaxspec.models.summary import summary_line

if TYPE_CHECKING:
    import pandas

    from jaxspec.checkpoint import Tokenizer
    from jaxspec.decoding.profile import DraftingProfile
    from jaxspec.drafters import DrafterLike

R = TypeVar("R", bound=Any, covariant=True)
FINISH_REASONS = {
    Stop.RUNNING: "running",
    Stop.TOKEN: "stop_token",
    Stop.STRING: "stop_string",
    Stop.LENGTH: "length",
    Stop.NOT_FINITE: "not_finite",
    Stop.GRAMMAR: "grammar",
    Stop.NO_TOKEN: "no_token",
}


@dataclasses.dataclass(frozen=True)
class TraceStep:
    """One step of one row, on the host; notebooks show it as a tree.

    Attributes:
        tokens: `[nodes]`, one per node of the draft tree; node 0 is the pending token.
        parents: `[nodes]`, each node's parent, -1 at the root.
        valid: `[nodes]`, True for nodes that were offered; the others are unused budget.
        draft_logprobs: `[distributions, vocab]`, log-probabilities under each expanded parent;
            `None` for deterministic drafts. Rows that `law_row` does not name mean nothing.
        law_row: `[nodes]`, the row of `draft_logprobs` that each node was drawn from.
        path: accepted nodes, root first.
        emitted: tokens this step added: the accepted ones, then the bonus (or corrected) token.
        width: tokens in the target pass, root included.
        tokenizer: spells the tokens when the step is shown; `None` shows ids.
        logprobs: `[nodes]`, the target's log-probability of each node's token after its parent,
            before any warping; `None` if `GenerationConfig.logprobs` was not asked for. It means
            nothing at the root and at nodes that were not offered.
        warped_logprobs: the same after bias, penalties, temperature and filters, if
            `GenerationConfig.warped_logprobs` was asked for.
        seconds: wall time of the step, all rows together, without compilation; `None` if it was
            not measured.
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
    logprobs: np.ndarray | None = None
    warped_logprobs: np.ndarray | None = None
    seconds: float | None = dataclasses.field(default=None, compare=False)

    def _repr_html_(self) -> str:
        from jaxspec.decoding.notebook import step_svg

        return step_svg(self)


class Trace(tuple[TraceStep, ...]):
    """Every step of one row, in order; notebooks show it as a table."""

    def table(self) -> list[dict]:
        """Returns one dictionary per step, as `pandas.DataFrame` takes it.

        The keys are those of `jaxspec.decoding.notebook.trace_table`.
        """
        from jaxspec.decoding.notebook import trace_table

        return trace_table(self)

    def __repr__(self) -> str:
        return summary_line(self, {"steps": f"{len(self)}"})

    def _repr_html_(self) -> str:
        from jaxspec.decoding.notebook import trace_html

        return trace_html(self)


def shown_of(info: Info) -> Info:
    """Returns the part of a step that a trace keeps."""
    tree = info.proposal.tree
    tree = tree._replace(**{name: () for name in tree._fields if name != "parents"})
    return info._replace(proposal=info.proposal._replace(tree=tree))


def trace_steps(
    info: Info, tokenizer: "Tokenizer | None" = None, seconds: float | None = None
) -> list[TraceStep | None]:
    """Fetches one batched step, split into rows; `None` for rows that emitted nothing."""
    host: Any = jax.device_get(shown_of(info))
    proposal, verdict = host.proposal, host.verdict

    def part(facts: np.ndarray | None, row: int) -> np.ndarray | None:
        return None if facts is None else facts[row]

    return [
        TraceStep(
            tokens=proposal.tokens[row],
            parents=proposal.tree.parents[row],
            valid=proposal.valid[row],
            draft_logprobs=part(proposal.draft_logprobs, row),
            law_row=proposal.law_row[row],
            path=verdict.path[row][: verdict.num_emitted[row]],
            emitted=host.emitted[row][:count],
            width=int(host.width[row]),
            tokenizer=tokenizer,
            logprobs=part(host.logprobs, row),
            warped_logprobs=part(host.warped_logprobs, row),
            seconds=seconds,
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
        finish_reason: "stop_token", "stop_string", "length" (budget or context used up), "grammar"
            (the text is complete and nothing may follow), "no_token" (settings forbid every token)
            or "not_finite" (the target gave no usable logits).
        from_draft: one entry per token: True if it was drafted and accepted, False if the target
            chose it.
        logprobs: the target's log-probability of each token before warping; `None` if not asked.
        warped_logprobs: the same after bias, penalties, temperature and filters; `None` if not
            asked.
        metrics: figures of this row alone.
        prompt_index: place of the prompt in the call.
        sample_index: number of the sample among those of its prompt.
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
        """Returns what each token adds to the text; special tokens by name, ids without tokenizer.

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
        from jaxspec.decoding.notebook import generation_html

        return generation_html(self)


class Rows(Sequence[R]):
    """Rows of a result in order of prompts; `result[i]` is row i."""

    rows: tuple[R, ...]

    def _facts(self) -> dict[str, str]:
        return {"rows": f"{len(self)}", "tokens": f"{sum(map(len, self.tokens))}"}

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        from jaxspec.decoding.notebook import rows_html

        return rows_html(self)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def texts(self) -> list[str | None]:
        """Text of each row; `None` without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[np.ndarray]:
        """Ids that each row emitted."""
        return [row.tokens for row in self.rows]


@dataclasses.dataclass(frozen=True, repr=False)
class GenerationResult(Rows[Generation]):
    """Rows in order of prompts, the samples of a prompt next to each other, and metrics.

    Attributes:
        rows: continuations; `result[i]` is row i.
        metrics: figures of the whole call.
        drafters: drafters for a next prompt, by row. A drafter that learns from prompt to prompt
            (`CarriesOn`) continues where the row left it; any other is the one that was given.
        drafting: the profile that decided whether the rows drafted; `None` if none did.

    Example:
        >>> import jaxspec
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> result = jaxspec.generate(jaxspec.load("demo"), "What is 2 + 3?", config)
        >>> len(result), result[0].finish_reason, result.metrics.num_tokens
        (1, 'length', 16)
    """

    rows: tuple[Generation, ...]
    metrics: Metrics
    drafters: tuple["DrafterLike | None", ...] = ()
    drafting: "DraftingProfile | None" = None

    def _facts(self) -> dict[str, str]:
        return {**super()._facts(), "tau": f"{self.metrics.mean_acceptance_length:.2f}"}

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns one row for each continuation: text, tokens, and its figures.

        Raises:
            MissingExtra: pandas is not installed.
        """
        with needs_extra("to_pandas", "notebooks"):
            import pandas
        return pandas.DataFrame(
            {
                "prompt": row.prompt_index,
                "sample": row.sample_index,
                "text": row.text,
                "finish_reason": row.finish_reason,
                "tokens": row.tokens.tolist(),
                "num_prompt_tokens": len(row.prompt_tokens),
                **{name: getattr(row.metrics, name) for name in ROW_FIGURES},
            }
            for row in self.rows
        )

    def save_html(self, path: str | Path) -> None:
        """Writes the decode inspector: one page on which a person steps through the decode.

        It shows the tree of every step, the accepted path, the pass width, the text as it grows,
        tau so far, and the time of each step. It is one file that loads nothing, for any browser.
        Probabilities at nodes are shown where they were recorded: of the target with
        `warped_logprobs=True` or `logprobs=True`, of the draft where it was drawn from.

        Args:
            path: the file. Its folder is made; an older file is replaced when the page is whole.

        Raises:
            ValueError: the result has no trace (`return_trace=True`), or `path` is a folder.

        Example:
            >>> import jaxspec, pathlib, tempfile
            >>> result = jaxspec.generate(
            ...     jaxspec.load("demo"),
            ...     "1, 2, 3, 1, 2, 3,",
            ...     jaxspec.PromptLookup(),
            ...     max_new_tokens=16,
            ...     warped_logprobs=True,
            ...     return_trace=True,
            ... )
            >>> page = pathlib.Path(tempfile.mkdtemp()) / "decode.html"
            >>> result.save_html(page)
            >>> page.read_text()[:15]
            '<!doctype html>'
        """
        from jaxspec.decoding.inspector import save_page

        save_page(self, path)

    def _repr_html_(self) -> str:
        from jaxspec.decoding.notebook import result_html

        return result_html(self)


class HostRow(NamedTuple):
    """One row of final states, on the host.

    Attributes:
        tokens: ids emitted, see `Generation`.
        finish_reason: see `Generation`.
        from_draft: see `Generation`.
        logprobs: see `Generation`.
        warped_logprobs: see `Generation`.
        counts: counters of the row's steps.
    """

    tokens: np.ndarray
    finish_reason: str
    from_draft: np.ndarray
    logprobs: np.ndarray | None
    warped_logprobs: np.ndarray | None
    counts: Counts

    def metrics(self) -> Metrics:
        """Returns the metrics of this row alone, without times."""
        return Metrics.of([self.counts], [self.tokens.tolist()])


def host_rows(states: DecodeState, prompt_lengths: Sequence[int]) -> list[HostRow]:
    """Fetches final states, split into rows without their prompts."""
    host: Any = jax.device_get(states)
    context, emitted, stats = host.context, host.emitted, host.stats

    def part(facts: np.ndarray | None, row: int) -> Any:
        return None if facts is None else facts[row, prompt_lengths[row] : context.length[row]]

    def counts(row: int) -> Counts:
        return Counts(
            num_tokens=len(part(context.tokens, row)),
            num_steps=int(stats.num_steps[row]),
            num_nodes=int(stats.num_nodes[row]),
            num_from_draft=int(part(emitted.from_draft, row).sum()),
            accepted=tuple(stats.accepted[row].tolist()),
            drafted=tuple(stats.drafted[row].tolist()),
        )

    return [
        HostRow(
            tokens=part(context.tokens, row),
            finish_reason=FINISH_REASONS[Stop(int(host.stop[row]))],
            from_draft=part(emitted.from_draft, row),
            logprobs=part(emitted.logprobs, row),
            warped_logprobs=part(emitted.warped_logprobs, row),
            counts=counts(row),
        )
        for row in range(len(prompt_lengths))
    ]


def text_of(
    tokenizer: "Tokenizer | None",
    tokens: np.ndarray,
    finish_reason: str,
    stop_strings: Sequence[str],
) -> str | None:
    """Returns the text of emitted tokens, as `Generation.text` has it."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(tokens.tolist())
    return cut_at(text, stop_strings) if finish_reason == "stop_string" else text


def cut_at(text: str, stop_strings: Sequence[str]) -> str:
    """Returns the text before the stop string that came first.

    Example:
        >>> cut_at("one. two; three", [";", "."])
        'one'
    """
    starts = [text.find(string) for string in stop_strings if string in text]
    if not starts and any(
        string.startswith(" ") and text.startswith(string[1:]) for string in stop_strings
    ):
        return ""  # decoders of the SentencePiece kind drop the space that a text begins with
    return text[: min(starts)] if starts else text


class TextStream:
    """Text of a growing row; its end is withheld while it may begin a stop string."""

    def __init__(self, tokenizer: "Tokenizer | None", stop_strings: Sequence[str]):
        self._stop_strings = stop_strings
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._held = ""

    def push(self, tokens: np.ndarray, finish_reason: str | None) -> str:
        """Takes further tokens, and returns the text that is now certain."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push(tokens.tolist())
        if finish_reason is not None:
            self._held += self._detokenizer.finish()
            cut = finish_reason == "stop_string"
            piece = cut_at(self._held, self._stop_strings) if cut else self._held
            self._held = ""
            return piece
        certain = len(self._held) - max(map(self._overlap, self._stop_strings), default=0)
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece

    def _overlap(self, string: str) -> int:
        """Returns the length of the longest end of the held text that begins `string`."""
        longest = min(len(string) - 1, len(self._held))
        sizes = range(longest, 0, -1)
        return next((size for size in sizes if self._held.endswith(string[:size])), 0)
