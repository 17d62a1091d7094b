"""Prompt lookup against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.types import Context, KVCache, Params, Recent, Warp
from jaxspec.drafters import PromptLookup

CAPACITY, VOCAB, ROWS = 20, 4, 200
KEY = jax.random.key(0)  # of no consequence: a lookup draws nothing


def search(text: list[int], drafter: PromptLookup, stop_ids: list[int]) -> list[int]:
    """The tokens that followed an earlier copy of the last few: the longest copy that has any."""
    for size in range(min(drafter.max_ngram, len(text) - 1), 0, -1):
        copied = text[len(text) - size :]
        ends = [end for end in range(size, len(text)) if text[end - size : end] == copied]
        if ends:
            end = ends[0] if drafter.match == "first" else ends[-1]
            following = text[end : end + drafter.num_speculative_tokens]
            stops = [i for i, token in enumerate(following) if token in stop_ids]
            return following[: stops[0]] if stops else following
    return []


def context(tokens: np.ndarray, length: int, stop_id: int) -> Context:
    """Returns a context with the fields that a lookup may read; the rest is absent."""
    nothing = jnp.zeros((1, 0))
    return Context(
        tokens=jnp.asarray(tokens),
        length=jnp.int32(length),
        room=jnp.int32(9),
        stop_ids=jnp.array([-1, stop_id]),
        warp=Warp(),
        cache=KVCache((), jnp.int32(length - 1)),
        recent=Recent(jnp.zeros(1, jnp.int32), nothing, nothing, jnp.int32(0)),
    )


@pytest.mark.parametrize("match", ["first", "recent"])
@pytest.mark.parametrize(("num_tokens", "max_ngram"), [(1, 1), (4, 2), (3, 5)])
def test_drafts_equal_a_plain_search(num_tokens, max_ngram, match):
    """Random texts of few letters, from one token to a full buffer; stale tokens lie past them."""
    drafter = PromptLookup(num_tokens, max_ngram, match)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, CAPACITY)).astype(np.int32)
    lengths = rng.integers(1, CAPACITY + 1, ROWS)
    stop_ids = rng.integers(-1, VOCAB, ROWS)
    contexts = [context(*row) for row in zip(tokens, lengths, stop_ids, strict=True)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *contexts)
    propose = jax.jit(jax.vmap(lambda row: drafter.propose(Params((), ()), KEY, (), row)[0]))
    proposals = propose(batch)
    drafted = 0
    for row in range(ROWS):
        text = tokens[row, : lengths[row]].tolist()
        valid = np.asarray(proposals.valid[row])
        assert proposals.tokens[row, 0] == text[-1]
        assert (np.diff(valid.astype(int)) <= 0).all()  # a chain: no gaps
        ours = proposals.tokens[row][valid][1:].tolist()
        assert ours == search(text, drafter, [int(stop_ids[row])])
        drafted += len(ours)
    assert drafted > ROWS / 4


def test_a_draft_by_eye():
    text = jnp.array([5, 7, 8, 9, 7, 8, 1, 7, 8, 0, 0, 0])
    first, _ = PromptLookup(3, 2).propose(Params((), ()), KEY, (), context(text, 9, -1))
    recent, _ = PromptLookup(3, 2, "recent").propose(Params((), ()), KEY, (), context(text, 9, -1))
    assert first.tokens.tolist() == [8, 9, 7, 8]
    assert recent.tokens.tolist() == [8, 1, 7, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"max_ngram": 0}, "max_ngram must be at least 1, got 0"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**settings)
