"""Fixed text to judge skip sets on, and the drafts of a set at every place of it.

A draft can be computed on given text without decoding. From position s on, the skipped network
reads the tokens s, s + 1, ...; the kept layers attend to the whole network's keys and values before
s, and to their own from s on. If the text equals the draft, all K places are one causal pass over K
tokens, and the drafts from all positions are one batch.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.core.masks import causal
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import KVCache, LayerKV, Params
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.models import Network, Skips
from jaxspec.training.sources import Document, Source, read_source

Tokens = Sequence[int] | Int[np.ndarray, " tokens"]


class Window(NamedTuple):
    """Rows of fixed text.

    Attributes:
        tokens: the rows, right-padded with 0.
        lengths: lengths of the rows, in tokens.
        first: the first position at which a draft may begin: the last position of the prompt.
    """

    tokens: Int[np.ndarray, "rows positions"]
    lengths: Int[np.ndarray, " rows"]
    first: int


def generated_window(model: Model, prompts: Sequence[Tokens], max_new_tokens: int) -> Window:
    """Returns prompts of one length with their greedy continuations by the model.

    Raises:
        ValueError: the rows are longer than the model's context, or prompts differ in length.
    """
    (size, *others) = {len(prompt) for prompt in prompts}
    if others:
        raise ValueError(f"prompts must have one length, got {sorted({size, *others})}.")
    check_window(model, size + max_new_tokens)
    result = generate(model, list(prompts), GenerationConfig(max_new_tokens=max_new_tokens))
    rows = [[*prompt, *row.tokens] for prompt, row in zip(prompts, result, strict=True)]
    return _window(rows, size - 1)


def given_window(model: Model, rows: Sequence[Tokens], prompt_tokens: int) -> Window:
    """Returns rows of given text, which must fit the context. Drafts on it are teacher-forced."""
    check_window(model, max(map(len, rows)))
    return _window(rows, prompt_tokens - 1)


def check_window(model: Model, length: int) -> None:
    """Checks that rows of `length` tokens fit the model's context.

    Raises:
        ValueError: they do not fit.
    """
    if length > model.config.max_positions:
        raise ValueError(
            f"The window must fit the model's context of {model.config.max_positions} tokens, got "
            f"{length}: use a shorter prompt or fewer new tokens."
        )


def _window(rows: Sequence[Tokens], first: int) -> Window:
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return Window(tokens, lengths, first)


def held_out_rows(
    model: Model, sources: Sequence[Source], length: int, count: int
) -> list[Int[np.ndarray, " length"]]:
    """Returns the beginnings of held-out documents, from all sources in turn.

    The choice is always the same.

    Raises:
        ValueError: too few documents have `length` tokens, or the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("model: has no tokenizer, so text cannot be read.")
    rng = np.random.default_rng(0)
    found: list[Iterator[Int[np.ndarray, " length"]]] = []
    for source in sources:
        documents = read_source(source).validation
        order = rng.permutation(len(documents))
        found.append(_beginnings(model.tokenizer, [documents[i] for i in order], length))
    turns = (row for rows in itertools.zip_longest(*found) for row in rows if row is not None)
    rows = list(itertools.islice(turns, count))
    if len(rows) < count:
        raise ValueError(
            f"Only {len(rows)} held-out documents have {length} tokens, {count} are needed: ask "
            "for fewer or shorter rows, or name more text."
        )
    return rows


def _beginnings(
    tokenizer: Tokenizer, documents: Sequence[Document], length: int
) -> Iterator[Int[np.ndarray, " length"]]:
    for document in documents:
        # Tokens are rarely longer than this: long documents need not be encoded to their end.
        tokens = tokenizer.encode("".join(document.pieces)[: 32 * length])
        if len(tokens) >= length:
            yield np.asarray(tokens[:length], np.int32)


class Reading(NamedTuple):
    """The whole network's pass over a window, to compare drafts with.

    Attributes:
        layers: keys and values of every position.
        choices: the likeliest next token after every position.
    """

    layers: tuple[LayerKV, ...]
    choices: Int[Array, "rows positions"]


class TextDrafts(NamedTuple):
    """Drafts of the same length from several positions of a text.

    Attributes:
        agrees: True if the drafted token is the whole network's choice at its place.
        confidence: probability of the drafted token in the draft.
    """

    agrees: Bool[Array | np.ndarray, "*starts depth"]
    confidence: Float[Array | np.ndarray, "*starts depth"]


@jax.jit
def read_window(params: Params, tokens: Int[Array, "rows positions"]) -> Reading:
    """Runs the whole network once over each row."""
    target, length = params.target, tokens.shape[1]

    def read(row):
        hidden = target.forward(row, jnp.arange(length), causal(length), None)
        return Reading(hidden.new_kv, argmax_rows(target.unembed(hidden.features)))

    return jax.lax.map(read, tokens)


@partial(jax.jit, static_argnames="depth")
def draft_everywhere(
    params: Params,
    tokens: Int[Array, "rows positions"],
    reading: Reading,
    starts: Int[Array, " starts"],
    skip: Skips,
    *,
    depth: int,
) -> TextDrafts:
    """Drafts `depth` tokens from each of `starts` in each row: arrays `[rows, starts, depth]`.

    `skip` is traced, so that one program serves every set.
    """
    target = params.target

    def draft(layers, row, choices, start):
        positions = start + jnp.arange(depth)
        prefix = KVCache(layers, start)
        hidden = target.forward(row[positions], positions, causal(depth), prefix, skip=skip)
        logits = target.unembed(hidden.features)
        drafted = argmax_rows(logits)
        probabilities = jax.nn.softmax(logits, axis=-1)
        confidence = jnp.take_along_axis(probabilities, drafted[:, None], axis=1)[:, 0]
        return TextDrafts(drafted == choices[positions], confidence)

    def draft_row(inputs):
        layers, row, choices = inputs
        return jax.vmap(partial(draft, layers, row, choices))(starts)

    # One row at a time: the logits of all rows may be larger than the network.
    return jax.lax.map(draft_row, (reading.layers, tokens, reading.choices))


class FixedText:
    """Fixed text with the program that drafts on it; the program is compiled once for all sets.

    Attributes:
        starts: positions at which drafts begin.
        counted: `[rows, starts]`, True if a draft from there fits into the row.

    Raises:
        ValueError: no draft of `depth` tokens fits into a row, or `depth` is below 1.
    """

    def __init__(self, target: Network, window: Window, depth: int):
        if depth < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {depth}.")
        self.target, self.window, self.depth = target, window, depth
        self.starts = np.arange(window.first, window.tokens.shape[1] - depth + 1)
        self.counted = self.starts[None] + depth <= window.lengths[:, None]
        if not self.counted.any():
            raise ValueError(
                f"num_speculative_tokens: no row of the window has room for a draft of {depth} "
                f"tokens after its first {window.first + 1}; use longer rows."
            )
        self._tokens = jnp.asarray(window.tokens)
        self._reading = read_window(Params(target, ()), self._tokens)

    def drafts(self, skip: Skips) -> TextDrafts:
        """Drafts with a set from every position: arrays `[rows, starts, depth]`; see `counted`."""
        drafts = draft_everywhere(
            Params(self.target, ()),
            self._tokens,
            self._reading,
            jnp.asarray(self.starts),
            Skips(*(jnp.asarray(part, jnp.float32) for part in skip)),
            depth=self.depth,
        )
        return TextDrafts(*map(np.asarray, drafts))
