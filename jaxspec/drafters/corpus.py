"""Texts to look tokens up in, as arrays that a compiled program searches."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.checkpoint.memory import check_corpus_fits
from jaxspec.checkpoint.tokenizer import MOST_TEXT_BYTES
from jaxspec.core.checks import checked

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

ROOM = 1 << 18
"""Places of a corpus for texts that are added to it."""
_BETWEEN = -1
"""Stands after each text, and to the end of the room."""
_OUTSIDE = -2
"""Stands for what is before the first token."""


class SortedTexts(NamedTuple):
    """Texts, and their places in the order of what stands before them.

    Two places are compared by the tokens before them, the nearest first. So the places that share
    the longest end with a text are neighbours, where that text would stand in the order.

    Attributes:
        tokens: all texts, one after the other; a negative number after each of them and in places
            that are free.
        order: places that follow a token of their text, sorted. Entries past `count` mean nothing.
        count: number of them.
        added: places at the end that texts which came later fill; `ROOM` at most.
        largest: id of all; negative without any.
    """

    tokens: Int[Array, " places"]
    order: Int[Array, " places"]
    count: Int[Array, ""]
    added: Int[Array, ""]
    largest: Int[Array, ""]


def corpus_of(texts: Sequence[np.ndarray], reach: int) -> SortedTexts:
    """Returns a corpus with `ROOM` free places.

    Args:
        texts: token ids.
        reach: tokens before a place that decide its place in the order, at least.

    Raises:
        CheckpointError: it is larger than the memory that is available.

    Example:
        >>> corpus = corpus_of([np.array([5, 6, 7]), np.array([5, 6, 8])], reach=2)
        >>> corpus.order[: int(corpus.count)].tolist()  # after 5, after 5, after 6, after 6
        [1, 5, 2, 6]
    """
    tokens = _joined(texts)
    check_corpus_fits(len(tokens) + ROOM)
    return _packed(tokens, _sorted(tokens, reach), 0)


def extended(corpus: SortedTexts, texts: Sequence[np.ndarray], reach: int) -> SortedTexts | None:
    """Returns the corpus with further texts in its `ROOM` free places.

    Where these are full, the oldest of the further texts are forgotten. `None`: what is new is less
    than a sixteenth of the whole and of the free places, and not worth the work.
    """
    given, added = len(corpus.tokens) - ROOM, int(corpus.added)
    if 16 * sum(len(text) + 1 for text in texts) < min(given + added, ROOM):
        return None
    tokens, order = np.asarray(corpus.tokens), np.asarray(corpus.order)[: int(corpus.count)]
    later = np.concatenate([tokens[given : given + added], _joined(texts)])[-ROOM:]
    tokens = np.concatenate([tokens[:given], later])
    # The given texts keep their order, so only the later ones are sorted.
    order, start = order[order < given], max(0, given - _power_of_two(reach))
    places = _sorted(tokens[start:], reach) + start
    places = places[places >= given]
    order = np.insert(order, _places_in_order(tokens, order, places, reach), places)
    return _packed(tokens, order, len(later))


def _joined(texts: Sequence[np.ndarray]) -> np.ndarray:
    parts = [np.append(text, _BETWEEN) for text in texts]
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def _power_of_two(reach: int) -> int:
    """Returns how many tokens before a place decide its place in the order."""
    return 1 << (reach - 1).bit_length()


def _sorted(tokens: np.ndarray, reach: int) -> np.ndarray:
    """Returns the order of texts: by one token before each place, then by two, by four, ..."""
    before = np.concatenate([[_OUTSIDE], tokens])[: len(tokens)]
    ranks = np.unique(before, return_inverse=True)[1]
    known = 1
    while known < reach:
        further = np.concatenate([np.zeros(known, ranks.dtype), ranks])[: len(ranks)]
        ranks = np.unique(ranks * len(ranks) + further, return_inverse=True)[1]
        known *= 2
    order = np.argsort(ranks, kind="stable")
    return order[((tokens >= 0) & (before >= 0))[order]]


def _places_in_order(
    tokens: np.ndarray, order: np.ndarray, places: np.ndarray, reach: int
) -> np.ndarray:
    """Returns how many entries of an order stand before each of some later places, by halving."""

    def before(places: np.ndarray, back: int) -> np.ndarray:
        return np.where(places >= back, tokens[np.maximum(places - back, 0)], _OUTSIDE)

    low, high = np.zeros(len(places), int), np.full(len(places), len(order))
    for _ in range(len(order).bit_length()):
        middle = (low + high) // 2
        theirs = order[np.minimum(middle, len(order) - 1)]
        difference, same = np.zeros(len(places), int), np.arange(len(places))
        for back in range(1, _power_of_two(reach) + 1):
            difference[same] = before(theirs[same], back) - before(places[same], back)
            same = same[difference[same] == 0]
        is_before = (difference <= 0) & (low < high)
        low, high = np.where(is_before, middle + 1, low), np.where(is_before, high, middle)
    return low


def _packed(tokens: np.ndarray, order: np.ndarray, added: int) -> SortedTexts:
    capacity = len(tokens) - added + ROOM

    def padded(array: np.ndarray, filler: int) -> Array:
        # By NumPy: XLA would compile a program for each length.
        whole = np.pad(array, (0, capacity - len(array)), constant_values=filler)
        return jnp.asarray(whole.astype(np.int32))

    numbers = (len(order), added, np.max(tokens, initial=_BETWEEN))
    return SortedTexts(padded(tokens, _BETWEEN), padded(order, 0), *map(jnp.int32, numbers))


def nearest(
    corpus: SortedTexts, tokens: Int[Array, " text"], length: Int[Array, ""], reach: int, count: int
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """Finds the places of a corpus before which the end of a text stands, its longest part.

    Args:
        corpus: sorted by at least `reach` tokens.
        tokens: the text, of which `length` are real.
        length: of the text.
        reach: tokens that are compared at most.
        count: neighbours of the text in the order of the corpus.

    Returns:
        Places, and for each the number of tokens before it that are those at the end of the text.
    """
    back = jnp.arange(reach)

    def before(array: Int[Array, " places"], place: Int[Array, ""]) -> Int[Array, " reach"]:
        at = place - 1 - back
        return jnp.where(at >= 0, array[jnp.maximum(at, 0)], _OUTSIDE)

    wanted = before(tokens, length)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        theirs = before(corpus.tokens, corpus.order[middle])
        at = jnp.argmax(theirs != wanted)
        is_less = (theirs[at] < wanted[at]) & (low < high)
        return jnp.where(is_less, middle + 1, low), jnp.where(is_less, high, middle)

    halvings = len(corpus.order).bit_length()
    bounds = (jnp.int32(0), corpus.count)
    first = jax.lax.fori_loop(0, halvings, halve, bounds)[0] - count // 2
    places = first + jnp.arange(count)
    inside = (places >= 0) & (places < corpus.count)
    found = corpus.order[jnp.clip(places, 0, len(corpus.order) - 1)]
    same = (jax.vmap(before, (None, 0))(corpus.tokens, found) == wanted[None]) & (wanted >= 0)[None]
    return found, jnp.where(inside, jnp.sum(jnp.cumprod(same, axis=1), axis=1), 0)


def encoded_texts(texts: Any, model: "Model") -> list[np.ndarray]:
    """Returns the ids of a user's texts for a model: of one, or of a sequence of them or their ids.

    Raises:
        ValueError: there is nothing to look up, it is something else than texts, an id is not of
            the model's vocabulary, or the model has no tokenizer for texts.
    """
    texts = checked("corpus: texts", texts, str | Sequence[Any])
    texts = [texts] if isinstance(texts, str) else texts
    encoded = [_encoded(text, f"corpus: texts[{i}]", model) for i, text in enumerate(texts)]
    if not any(len(ids) > 1 for ids in encoded):
        raise ValueError(
            f"corpus: got {len(encoded)} texts, none of them of two tokens or more, so there is "
            "nothing to look up; give texts, or no corpus."
        )
    return encoded


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yields a text in parts that a tokenizer takes, with their starts, cut behind line ends.

    A long line is cut anywhere. The tokens at a cut may be others than those of the whole text,
    which decides drafts alone.
    """
    start, size = 0, MOST_TEXT_BYTES // 4  # a character has up to 4 bytes
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def _encoded(text: Any, name: str, model: "Model") -> np.ndarray:
    if isinstance(text, str):
        if model.tokenizer is None:
            raise ValueError(f"{name}: {model.name} has no tokenizer; give token ids.")
        encode = model.tokenizer.encode
        text = np.concatenate(
            [
                np.asarray(encode(part, special_tokens=start == 0), np.int32)
                for start, part in _parts(text)
            ]
        )
    try:
        ids = np.asarray(text)
    except ValueError:  # lists of several lengths
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a text or a list of token ids, got {text!r:.60}.")
    if ids.size and not 0 <= ids.min() <= ids.max() < model.vocab_size:
        raise ValueError(
            f"{name} has ids outside 0..{model.vocab_size - 1}, such as "
            f"{ids.max() if ids.min() >= 0 else ids.min()}; encode it with the tokenizer of "
            f"{model.name}."
        )
    return ids.astype(np.int32)
