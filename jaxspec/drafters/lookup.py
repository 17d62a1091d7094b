"""Prompt lookup: drafts the tokens that followed an earlier copy of the last few.

Saxena 2023, "Prompt Lookup Decoding"; the same rule as `prompt_lookup_num_tokens` of Hugging Face
`generate`.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.core.checks import check_at_least, check_one_of
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.proposal import bank, chain_proposal
from jaxspec.core.types import Context, Hidden, Params, Proposal


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Matches the text's last n tokens, n from `max_ngram` down to 1, against what came before.

    It needs no weights, and pays if output repeats input (summaries, edits, code).

    Where a grammar forces the text, that text is drafted after the continuation, or without one.

    Attributes:
        num_speculative_tokens: longest continuation to draft.
        max_ngram: longest match to look for.
        match: the one of several matches to continue: the "first" (as Hugging Face does) or the
            most "recent".

    Raises:
        ValueError: a number is below 1, or `match` is unknown.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, jaxspec.PromptLookup())
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    taps = ()
    num_speculative_tokens: int = 4
    max_ngram: int = 2
    match: Literal["first", "recent"] = "first"

    def __post_init__(self):
        check_at_least(self, 1, "num_speculative_tokens", "max_ngram")
        check_one_of(self, ("first", "recent"), "match")

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.num_speculative_tokens + 1, self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return bank(self.num_speculative_tokens + 1)

    def init(self, params: Params, prompt: Hidden, context: Context) -> tuple[()]:
        del params, prompt, context  # Reads the text itself, so there is nothing to carry.
        return ()

    def propose(
        self, params: Params, key: PRNGKeyArray, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        del params, key  # No weights, and deterministic.
        tokens, length = context.tokens, context.length
        start = self._continuation_start(tokens, length)
        places = start + jnp.arange(self.num_speculative_tokens)
        # Indices past the end read the last token; it is past `length`, so it is never valid.
        drafted = jnp.take(tokens, places, mode="clip")
        is_stop = jnp.any(drafted[:, None] == context.stop_ids[None, :], axis=1)
        before_stop = jnp.cumsum(is_stop) == 0
        valid = (start > 0) & (places < length) & before_stop
        if context.grammar is not None:
            drafted, valid = _within_grammar(drafted, valid, context.grammar)
        root = tokens[length - 1]
        return chain_proposal(
            jnp.concatenate([root[None], drafted]), jnp.concatenate([jnp.ones(1, bool), valid])
        ), state

    def _continuation_start(
        self, tokens: Int[Array, " places"], length: Int[Array, ""]
    ) -> Int[Array, ""]:
        """Returns the index after the chosen match of the longest n-gram with one; 0 for none."""
        places = jnp.arange(tokens.shape[0])
        matches = jnp.ones(tokens.shape[0], bool)
        start = jnp.int32(0)
        for back in range(self.max_ngram):
            # After this line `matches[s]` says that the back + 1 tokens up to place s - 1 equal
            # the last ones of the text.
            shifted = jnp.roll(tokens, back + 1)
            matches &= (shifted == tokens[length - 1 - back]) & (places > back)
            found = matches & (places < length) & (length > back)
            if self.match == "first":
                chosen = jnp.min(jnp.where(found, places, tokens.shape[0]))
            else:
                chosen = jnp.max(jnp.where(found, places, -1))
            start = jnp.where(jnp.any(found), chosen, start)
        return start.astype(jnp.int32)


def _within_grammar(
    drafted: Int[Array, " drafts"], valid: Bool[Array, " drafts"], grammar: RowGrammar
) -> tuple[Int[Array, " drafts"], Bool[Array, " drafts"]]:
    """Returns a draft without what the grammar forbids, and after it the text that it forces."""

    def choose(carry, found):
        standing, follows, goes_on = carry
        token, is_valid = found
        follows &= is_valid & (grammar.after(standing, token) >= 0)
        token = jnp.where(follows, token, grammar.grammar.guesses[standing])
        goes_on &= token >= 0
        token = jnp.maximum(token, 0)
        return (grammar.after(standing, token), follows, goes_on), (token, goes_on)

    start = (grammar.state, jnp.bool_(True), jnp.bool_(True))
    return jax.lax.scan(choose, start, (drafted, valid))[1]
