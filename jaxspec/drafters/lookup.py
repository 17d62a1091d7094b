"""Lookup: drafts the tokens that followed an earlier copy of the last few.

`PromptLookup` is Saxena 2023, "Prompt Lookup Decoding"; the same rule as `prompt_lookup_num_tokens`
of Hugging Face `generate`. `SuffixLookup` finds the longest copy, in other texts too, as
SuffixDecoding does (Oliaro et al. 2024); its trees of suffixes are sorted arrays here, see
`jaxspec.drafters.corpus`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxspec.checkpoint.hub import check_is_model
from jaxspec.core.checks import Checked, Nodes, at_least, at_most
from jaxspec.core.forms import exchangeable
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.proposal import bank, chain_proposal
from jaxspec.core.types import Context, Hidden, Params, Proposal
from jaxspec.drafters.corpus import SortedTexts, corpus_of, encoded_texts, extended, nearest
from jaxspec.drafters.loaded import LoadedDrafter, OtherTargetError

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

NEARER = 4
"""Tokens that a match in the row's own text counts more than one of a corpus: what a text says
after some words, it says again far more often than other texts do."""
_MOST_VOTES = 16


@dataclasses.dataclass(frozen=True)
class PromptLookup(Checked):
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
    num_speculative_tokens: Nodes = 4
    max_ngram: Annotated[int, at_least(1), at_most(64)] = 2
    match: Literal["first", "recent"] = "first"

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
        drafted = self.found(context.tokens, context.length)
        return _proposal(context, drafted, drafted >= 0), state

    def found(self, tokens: Int[Array, " places"], length: Int[Array, ""]) -> Int[Array, " drafts"]:
        """Returns what followed the match in a text of this length; -1 where nothing did."""
        start = place_of_match(tokens, length, self.max_ngram, self.match == "recent")
        return tokens_from(tokens, length, start, self.num_speculative_tokens)


@dataclasses.dataclass(frozen=True)
class SuffixLookup(Checked):
    """Looks for the longest earlier copy of the text's end, in the text and in a corpus.

    Where several copies are as long, their continuations vote, token by token. A match of n tokens
    is continued by n tokens at most, and by four more if it is in the row's own text; such a match
    is also preferred to one in the corpus that is less than five tokens longer.

    Without a corpus it needs no weights; `of` gives it texts of yours, such as documentation or
    code. In `jaxspec.batch` the rows that have finished are added to it, where that changes no
    output: for greedy decoding in float32. Time and memory of a step hardly depend on the size of
    the corpus: it is sorted, and its 8 bytes for each token are searched by halving.

    Where a grammar forces the text, that text is drafted after the continuation, or without one.

    Attributes:
        num_speculative_tokens: longest continuation to draft.
        max_ngram: longest match to look for.

    Raises:
        ValueError: a number is below 1.

    Example:
        >>> import jaxspec
        >>> from jaxspec.drafters import SuffixLookup
        >>> model = jaxspec.load("demo")
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", max_new_tokens=16)
        >>> drafter = SuffixLookup.of(plain.texts, model)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", drafter, max_new_tokens=16)
        >>> fast.texts == plain.texts, fast.metrics.tau > 2  # tau: bonus token included
        (True, True)
    """

    taps = ()
    num_speculative_tokens: Nodes = 8
    max_ngram: Annotated[int, at_least(1), at_most(64)] = 16

    @classmethod
    def of(
        cls, texts: str | Sequence[str | Sequence[int]], model: "Model", **settings: int
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` that looks tokens up in texts, too.

        Args:
            texts: a text or several, as strings or token ids.
            model: the target, whose tokenizer encodes them.
            settings: of the drafter.

        Raises:
            ValueError: the texts hold nothing to look up, or ids that the model does not have; they
                are larger than memory; an argument is something else; or a setting is out of range.
        """
        check_is_model(model)
        drafter = cls(**settings)
        corpus = corpus_of(encoded_texts(texts, model), drafter.max_ngram)
        return LoadedDrafter(drafter, corpus, model.tokenizer)

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.num_speculative_tokens + 1, self.num_speculative_tokens

    @property
    def widths(self) -> tuple[int, ...]:
        return bank(self.num_speculative_tokens + 1)

    def init(self, params: Params, prompt: Hidden, context: Context) -> tuple[()]:
        del params, prompt, context  # Reads texts themselves, so there is nothing to carry.
        return ()

    def propose(
        self, params: Params, key: PRNGKeyArray, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()]]:
        del key  # Deterministic.
        return self.look_up(params.draft, context)[0], state

    def look_up(
        self, corpus: SortedTexts | tuple[()], context: Context
    ) -> tuple[Proposal, Int[Array, ""]]:
        """Returns a draft, and how many tokens match: `NEARER` more in the row's own text."""
        size = self.num_speculative_tokens
        tokens, length = context.tokens, context.length
        lengths = _matched_lengths(tokens, length, self.max_ngram)
        longest = jnp.max(lengths)
        places = jnp.where((lengths == longest) & (longest > 0), jnp.arange(len(lengths)), -1)
        # The latest come first. They are floats because XLA sorts whole numbers for that.
        latest = jax.lax.top_k(places.astype(jnp.float32), min(_MOST_VOTES, len(lengths)))[0]
        starts = latest.astype(jnp.int32)
        following = jax.vmap(lambda start: tokens_from(tokens, length, start, size))(starts)
        following = jnp.where((starts >= 0)[:, None], following, -1)
        weight = jnp.where(longest > 0, longest + NEARER, 0)
        if corpus:
            starts, lengths = nearest(corpus, tokens, length, self.max_ngram, _MOST_VOTES)
            longest = jnp.max(lengths)
            at = starts[:, None] + jnp.arange(size)[None, :]
            elsewhere = jnp.take(corpus.tokens, at, mode="fill", fill_value=-1)
            elsewhere = jnp.where((lengths == longest)[:, None], elsewhere, -1)
            is_own = weight >= longest
            following = jnp.concatenate(
                [jnp.where(is_own, following, -1), jnp.where(is_own, -1, elsewhere)]
            )
            weight = jnp.maximum(weight, longest)
        drafted, valid = _vote(following)
        return _proposal(context, drafted, valid & (jnp.arange(size) < weight)), weight

    def with_texts(
        self, params: SortedTexts | tuple[()], texts: Sequence[np.ndarray]
    ) -> SortedTexts | None:
        """See `core.types.ReadsFinished`."""
        if not params:
            return corpus_of(texts, self.max_ngram)
        return extended(params, texts, self.max_ngram)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        if not params.draft:
            return
        if not isinstance(params.draft, SortedTexts):
            raise ValueError(
                "drafter: SuffixLookup looks tokens up in texts: SuffixLookup.of(texts, model), or "
                f"SuffixLookup() without; got {type(params.draft).__name__}."
            )
        largest, vocab_size = int(params.draft.largest), params.target.vocab_size
        if largest >= vocab_size:
            raise OtherTargetError(
                f"drafter: its corpus holds the id {largest}, and the target has {vocab_size}, "
                "from 0; encode the texts with the target's tokenizer: "
                "SuffixLookup.of(texts, model)."
            )


@exchangeable
def place_of_match(
    tokens: Int[Array, " places"], length: Int[Array, ""], most: int, recent: bool
) -> Int[Array, ""]:
    """Returns the place behind the longest earlier copy of a text's end: its length without one.

    Of copies that are as long, the first counts, or the most recent one.
    """
    lengths = _matched_lengths(tokens, length, most)
    longest, places = jnp.max(lengths), jnp.arange(lengths.shape[0])
    if recent:
        place = jnp.max(jnp.where(lengths == longest, places, 0))
    else:
        place = jnp.min(jnp.where(lengths == longest, places, places.shape[0]))
    return jnp.where(longest > 0, place, length)


def _matched_lengths(
    tokens: Int[Array, " places"], length: Int[Array, ""], most: int
) -> Int[Array, " places"]:
    """Counts at each place of a text how many tokens before it are those at the text's end.

    It is 0 from the text's end on, where nothing follows.
    """
    places = jnp.arange(tokens.shape[0])
    lengths, matches = jnp.zeros_like(places), places < length
    for back in range(most):
        matches &= (jnp.roll(tokens, back + 1) == tokens[length - 1 - back]) & (places > back)
        lengths += matches
    return lengths


@exchangeable
def tokens_from(
    tokens: Int[Array, " places"], length: Int[Array, ""], start: Int[Array, ""], count: int
) -> Int[Array, " count"]:
    """Returns tokens of a text from a place on; -1 past its end."""
    places = start + jnp.arange(count)
    return jnp.where(places < length, jnp.take(tokens, places, mode="clip"), -1)


def _vote(
    following: Int[Array, "matches drafts"],
) -> tuple[Int[Array, " drafts"], Bool[Array, " drafts"]]:
    """Returns the token that most continuations have, of those that agree so far; ties: the first.

    A continuation has ended where it has a negative number. The second result is False after the
    ends of all.
    """

    def choose(agrees: Bool[Array, " matches"], tokens: Int[Array, " matches"]):
        agrees &= tokens >= 0
        same = (tokens[:, None] == tokens[None, :]) & agrees[None, :]
        votes = jnp.where(agrees, jnp.sum(same, axis=1), 0)
        token = tokens[jnp.argmax(votes)]
        return agrees & (tokens == token), (token, jnp.any(agrees))

    everyone = jnp.ones(following.shape[0], bool)
    return jax.lax.scan(choose, everyone, following.T)[1]


def _proposal(
    context: Context, drafted: Int[Array, " drafts"], valid: Bool[Array, " drafts"]
) -> Proposal:
    """Returns a chain that ends before a stop id, and where the grammar forbids it to go on."""
    drafted = jnp.maximum(drafted, 0)
    is_stop = jnp.any(drafted[:, None] == context.stop_ids[None, :], axis=1)
    valid &= jnp.cumsum(is_stop) == 0
    if context.grammar is not None:
        drafted, valid = _within_grammar(drafted, valid, context.grammar)
    root = context.tokens[context.length - 1]
    return chain_proposal(
        jnp.concatenate([root[None], drafted]), jnp.concatenate([jnp.ones(1, bool), valid])
    )


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
