"""Lookups against searches in plain Python."""

import dataclasses
from bisect import bisect_left
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import CheckpointError, Model, Tokenizer, memory
from jaxspec.core.types import Context, KVCache, Params, Recent, Warp
from jaxspec.drafters import PromptLookup, SuffixLookup, corpus
from jaxspec.drafters.corpus import corpus_of, encoded_texts, extended
from tests.laws.drafters import network

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


NEIGHBOURS = 16
"""Matches of a corpus, and of a text, that vote."""


def same_end(one: list[int], other: list[int], most: int) -> int:
    """Counts the last tokens that two texts share, `most` at most."""
    pairs = zip(one[::-1][:most], other[::-1][:most], strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(most, len(one), len(other)))


class Searched:
    """A corpus that is sorted and searched by plain Python, all tokens of a text deep."""

    def __init__(self, texts: list[list[int]], reach: int):
        # As in the arrays, what is before a text counts where all of it is the same.
        stream = [token for text in texts for token in [*text, -1]]
        self.places = [
            (stream[:at][::-1][:reach] + [-2] * (reach - at), at)
            for at in range(1, len(stream))
            if min(stream[at - 1 : at + 1]) >= 0
        ]
        self.places.sort()
        self.stream, self.reach = stream, reach

    def matches(self, text: list[int], count: int, most: int) -> tuple[int, list[list[int]]]:
        """Returns the longest match among the neighbours, and what follows such matches."""
        wanted = (text[::-1] + [-2] * self.reach)[: self.reach]
        first = bisect_left(self.places, (wanted, -1)) - NEIGHBOURS // 2
        near = [self.places[i][1] for i in range(first, first + NEIGHBOURS) if self.valid(i)]
        before = {at: self.stream[:at] for at in near}
        lengths = {at: same_end(text, before[at], most) for at in near}
        longest = max(lengths.values(), default=0)
        return longest, [self.following(at, count) for at in near if lengths[at] == longest]

    def valid(self, index: int) -> bool:
        return 0 <= index < len(self.places)

    def following(self, at: int, count: int) -> list[int]:
        after = self.stream[at : at + count]
        return after[: after.index(-1)] if -1 in after else after


def voted(continuations: list[list[int]]) -> list[int]:
    """The likeliest token of those that agree so far, until all have ended."""
    chosen = []
    while continuations := [each for each in continuations if len(each) > len(chosen)]:
        votes = Counter(each[len(chosen)] for each in continuations)
        token = max(votes, key=votes.__getitem__)  # the first one on ties
        continuations = [each for each in continuations if each[len(chosen)] == token]
        chosen.append(token)
    return chosen


def drafted_by_hand(text: list[int], drafter: SuffixLookup, searched: Searched | None) -> list[int]:
    count, most = drafter.num_speculative_tokens, drafter.max_ngram
    lengths = [same_end(text, text[:at], most) for at in range(len(text))]
    own, found = max(lengths), [] if max(lengths) == 0 else lengths
    latest = [at for at in range(len(text)) if found and found[at] == own][::-1][:NEIGHBOURS]
    continuations, weight = [text[at : at + count] for at in latest], own + 4 if own else 0
    if searched is not None:
        elsewhere, others = searched.matches(text, count, most)
        if elsewhere > weight:
            continuations, weight = others, elsewhere
    return voted(continuations)[: min(count, weight)]


@pytest.mark.parametrize("max_ngram", [1, 3, 8])
@pytest.mark.parametrize("with_corpus", [True, False])
def test_the_longest_matches_vote(with_corpus, max_ngram):
    """Random texts of few letters; the longest match is short or long, here or in the corpus."""
    drafter, rng = SuffixLookup(6, max_ngram), np.random.default_rng(max_ngram)
    texts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 30, 2, 90, 17)]
    reach = 1 << (max_ngram - 1).bit_length()
    searched = Searched(texts, reach) if with_corpus else None
    params = corpus_of([np.array(text) for text in texts], max_ngram) if with_corpus else ()
    lengths = rng.integers(1, CAPACITY + 1, ROWS)
    tokens = rng.integers(0, VOCAB, (ROWS, CAPACITY)).astype(np.int32)
    for row in range(0, ROWS, 2):  # texts that end as the corpus does somewhere
        start = rng.integers(0, 60)
        tokens[row, : lengths[row]] = texts[3][start : start + lengths[row]]
    contexts = [context(*row, -1) for row in zip(tokens, lengths, strict=True)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *contexts)
    propose = jax.vmap(lambda row: drafter.propose(Params((), params), KEY, (), row)[0])
    proposals = jax.jit(propose)(batch)
    sizes = set()
    for row in range(ROWS):
        text = tokens[row, : lengths[row]].tolist()
        ours = proposals.tokens[row][np.asarray(proposals.valid[row])].tolist()
        assert ours == [text[-1], *drafted_by_hand(text, drafter, searched)]
        sizes.add(len(ours))
    assert len(sizes) > 2


def test_a_vote_by_eye():
    """After 5, 6 comes 7 twice and 8 once; then 9 once and 1 once, of which 9 is first."""
    texts = [np.array([5, 6, 7, 9]), np.array([2, 5, 6, 8]), np.array([3, 5, 6, 7, 1])]
    drafter, row = SuffixLookup(4), context(jnp.array([0, 5, 6, 0]), 3, -1)
    proposal, _ = drafter.propose(Params((), corpus_of(texts, 16)), KEY, (), row)
    assert proposal.tokens[np.asarray(proposal.valid)].tolist() == [6, 7, 9]


def test_texts_that_come_later_are_found_as_those_that_were_given(monkeypatch):
    monkeypatch.setattr(corpus, "ROOM", 40)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, size) for size in (20, 7, 9, 11, 12)]
    whole = corpus_of(texts[:1], 4)
    for more in (texts[1:3], texts[3:4]):
        whole = extended(whole, more, 4)
    assert whole.tokens.shape == (61,)
    once = corpus_of(texts[:4], 4)
    size = int(once.count)
    assert int(whole.count) == size
    assert whole.tokens[:51].tolist() == once.tokens[:51].tolist()
    assert whole.order[:size].tolist() == once.order[:size].tolist()
    assert extended(whole, [np.array([1])], 4) is None  # too few to sort anew
    # The room is full: of what came later, the oldest is forgotten.
    full = extended(whole, texts[4:], 4)
    kept = np.concatenate([np.append(text, -1) for text in texts[1:]])[-40:]
    assert full.tokens.tolist() == [*texts[0], -1, *kept]
    assert jax.tree.map(jnp.shape, full) == jax.tree.map(jnp.shape, whole)


@pytest.mark.parametrize("reach", [1, 3, 8])
@pytest.mark.parametrize("given", [(), (1,), (60, 1, 200)])
def test_texts_that_come_later_are_sorted_in(given, reach, monkeypatch):
    """Between the places of the given texts, as all texts would be sorted together."""
    monkeypatch.setattr(corpus, "ROOM", 100)
    rng = np.random.default_rng(len(given))
    whole = corpus_of([rng.integers(0, VOCAB, size) for size in given], reach)
    num_given = sum(given) + len(given)
    for size in (30, 40, 50, 120):
        whole = extended(whole, [rng.integers(0, VOCAB, size)], reach)
        tokens = np.asarray(whole.tokens)[: num_given + int(whole.added)]
        assert whole.order[: int(whole.count)].tolist() == sorted_by_hand(tokens, reach)
        assert whole.largest == tokens.max()
    assert whole.added == 100


def sorted_by_hand(tokens: np.ndarray, reach: int) -> list[int]:
    """Places behind a token, by what is before them, the nearest first."""
    reach = 1 << (reach - 1).bit_length()
    padded = [-2] * reach + tokens.tolist()
    places = [at for at in range(1, len(tokens)) if min(tokens[at - 1], tokens[at]) >= 0]
    return sorted(places, key=lambda at: padded[at : at + reach][::-1])


def test_what_comes_later_waits_for_a_part_of_the_room(monkeypatch):
    """Behind a corpus of any size; nothing is read or joined before there is enough of it."""
    monkeypatch.setattr(corpus, "ROOM", 160)
    whole, texts, waiting = corpus_of([np.arange(5000) % 7], 4), [], []
    for first in range(40):
        texts.append(np.arange(first, first + 4))
        waiting.append(texts[-1])
        if len(waiting) == 1:
            without = whole._replace(tokens=jax.ShapeDtypeStruct(whole.tokens.shape, np.int32))
            assert extended(without, waiting, 4) is None
        else:
            whole = extended(whole, waiting, 4)
            waiting = []
    kept = np.concatenate([np.append(text, -1) for text in texts])[-160:]
    assert whole.tokens[5001:].tolist() == kept.tolist()


def test_texts_of_a_user_are_encoded_with_the_targets_tokenizer(model):
    loaded = SuffixLookup.of(["one, two", [3, 4]], model, max_ngram=3)
    ids = model.tokenizer.encode("one, two")
    assert loaded.params.tokens[: len(ids) + 4].tolist() == [*ids, -1, 3, 4, -1]
    assert loaded.drafter == SuffixLookup(max_ngram=3)


def test_a_text_of_any_length_is_encoded_in_parts(model, monkeypatch):
    text = "one two\nthree four five six\n" + "x" * 30 + "\nend"
    whole = encoded_texts(text, model)[0].tolist()
    read, encode = [], type(model.tokenizer).encode
    monkeypatch.setattr(
        type(model.tokenizer), "encode", lambda it, s, **k: read.append(s) or encode(it, s, **k)
    )
    monkeypatch.setattr(corpus, "MOST_TEXT_BYTES", 80)
    found = encoded_texts(text, model)[0].tolist()
    assert read == ["one two\n", "three four five six\n", "x" * 20, "x" * 10 + "\nend"]
    assert found[0] == whole[0]
    assert model.tokenizer.decode(found) == model.tokenizer.decode(whole)


VOCABULARY = 24
SPELLER = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "corpus: got 0 texts, none of them of two tokens or more"),
        ([[], [7]], "corpus: got 2 texts, none of them of two tokens or more"),
        (
            [[1, 2], [3, 24]],
            r"texts\[1\] has ids outside 0..23, such as 24; encode it with",
        ),
        ([[1, -1]], r"texts\[0\] has ids outside 0..23, such as -1"),
        ("some text", r"texts\[0\]: mine has no tokenizer; give token ids"),
    ],
)
def test_texts_that_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        SuffixLookup.of(texts, Model(network(VOCABULARY), name="mine"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (5, "corpus: texts must be a text or a sequence, got 5"),
        (None, "corpus: texts must be a text or a sequence, got None"),
        ({"a": 1}, "corpus: texts must be a text or a sequence, got {'a': 1}"),
        ([5], r"texts\[0\] must be a text or a list of token ids, got 5"),
        ([[1, 2], [1, [2]]], r"texts\[1\] must be a text or a list of token ids, got \[1, \[2\]\]"),
        ([[1, 2.5]], r"texts\[0\] must be a text or a list of token ids, got \[1, 2.5\]"),
    ],
)
def test_what_is_no_texts_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        encoded_texts(texts, Model(network(VOCABULARY), name="mine"))


@pytest.mark.parametrize("model", [None, "demo", 3])
def test_a_corpus_needs_a_model(model):
    with pytest.raises(ValueError, match="model must be a Model, got"):
        SuffixLookup.of("abc def", model)


@pytest.mark.parametrize(
    ("host", "device", "message"),
    [
        (10**7, 10**9, "corpus: 262,147 tokens need 0.0168 GB while they are sorted; 0.01 GB are"),
        (10**9, 10**6, "corpus: 262,147 tokens need 0.0021 GB on the device; 0.001 GB are"),
    ],
)
def test_a_corpus_larger_than_memory_is_refused(host, device, message, monkeypatch):
    """It is sorted on the host, and searched on the device."""
    monkeypatch.setattr(memory, "_available_host_memory", lambda: host)
    monkeypatch.setattr(memory, "available_memory", lambda: device)
    with pytest.raises(CheckpointError, match=f"{message} available. Give fewer texts"):
        SuffixLookup.of([[1, 2]], Model(network(VOCABULARY)))
    monkeypatch.setattr(memory, "_available_host_memory", lambda: 2 * 10**7)
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * 10**6)
    SuffixLookup.of([[1, 2]], Model(network(VOCABULARY)))


def test_a_corpus_of_another_target_is_refused(model):
    config = GenerationConfig(max_new_tokens=4)
    of_larger = SuffixLookup.of([[1, 2, 30]], Model(network(40)))
    with pytest.raises(ValueError, match="corpus holds the id 30, and the target has 24"):
        generate(Model(network(VOCABULARY)), [1], config, of_larger)
    others = dataclasses.replace(model, tokenizer=SPELLER)
    with pytest.raises(ValueError, match=r"differs .* encode the texts to look up with the target"):
        generate(model, [1], config, SuffixLookup.of([[1, 2]], others))  # its ids are in range
    without = of_larger.params._replace(tokens=None, order=None)  # the texts are not read again
    with pytest.raises(ValueError, match="corpus holds the id 30, and the target has 24"):
        of_larger.drafter.check_fit(Params(network(VOCABULARY), without))
    with pytest.raises(ValueError, match=r"looks tokens up in texts: SuffixLookup\.of"):
        generate(model, [1], config, of_larger._replace(params={"weights": jnp.zeros(3)}))
