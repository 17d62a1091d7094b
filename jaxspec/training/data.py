"""Packed sequences and their batches. Every choice follows from the settings and a seed."""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.checks import Checked, Count, Positive

# Rows of an epoch: their order takes 50 bytes each, and an epoch of few takes long to find.
_LEAST_ROWS, _MOST_ROWS = 1e-3, 1 << 25


class Sequences(NamedTuple):
    """Rows of packed documents.

    Attributes:
        tokens: ids; 0 where there is padding.
        segments: 1, 2, ... for the documents of a row in order; 0 is padding.
        positions: positions within each segment, from 0.
        answer: 1 where a token belongs to an answer, else 0; `None`: documents are no answers.
        features: see `jaxspec.training.target.TargetStates`; `None`: the states are not kept.
        taps: see `features`.
    """

    tokens: Int[Array | np.ndarray, "rows length"]
    segments: Int[Array | np.ndarray, "rows length"]
    positions: Int[Array | np.ndarray, "rows length"]
    answer: Int[Array | np.ndarray, "rows length"] | None = None
    features: Float[Array | np.ndarray, "rows length embed"] | None = None
    taps: Float[Array | np.ndarray, "rows length tapped"] | None = None


def pack(documents: Sequence[Int[np.ndarray, " tokens"]], length: int) -> Sequences:
    """Packs documents into rows of `length`; every token lands in exactly one place.

    A document longer than a row is cut into whole rows and a rest. Nothing else is cut: pieces go,
    longest first, to the fullest row that can hold them.

    >>> rows = pack([np.array([5, 6, 7]), np.array([8])], 4)
    >>> rows.tokens.tolist(), rows.segments.tolist(), rows.positions.tolist()
    ([[5, 6, 7, 8]], [[1, 1, 1, 2]], [[0, 1, 2, 0]])

    Raises:
        ValueError: `length` is below 2.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, to predict one token; got {length}.")
    pieces = [
        document[start : start + length]
        for document in documents
        for start in range(0, len(document), length)
    ]
    rows: list[list[int]] = []
    roomy: list[tuple[int, int]] = []  # (free places, row), ascending
    for index in sorted(range(len(pieces)), key=lambda index: (-len(pieces[index]), index)):
        size = len(pieces[index])
        best = bisect.bisect_left(roomy, (size, 0))
        if best < len(roomy):
            room, row = roomy.pop(best)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > size:
            bisect.insort(roomy, (room - size, row))

    tokens, segments, positions = np.zeros((3, len(rows), length), np.int32)
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            places = slice(start, start + len(pieces[index]))
            tokens[row, places] = pieces[index]
            segments[row, places] = segment
            positions[row, places] = np.arange(len(pieces[index]))
            start = places.stop
    return Sequences(tokens, segments, positions)


def pack_answers(
    documents: Sequence[Int[np.ndarray, " tokens"]],
    prompt_sizes: Sequence[int],
    length: int,
    block: int = 1,
    filler: int = 0,
) -> Sequences:
    """Packs prompts with their answers into rows, as `pack` does.

    Args:
        documents: tokens of each prompt and its answer; tokens beyond a row are left out.
        prompt_sizes: number of tokens of each prompt.
        length: length of a row.
        block: documents are filled to a multiple of this length, if the row is long enough.
        filler: token that fills them, which does not count as part of the answer.

    >>> pack_answers([np.array([5, 6, 7])], [1], 4, block=2).answer.tolist()
    [[0, 1, 1, 0]]
    """
    cut, marks = [], []
    for document, size in zip(documents, prompt_sizes, strict=True):
        own = document[:length]
        whole = np.full(min(-(-len(own) // block) * block, length), filler, own.dtype)
        whole[: len(own)] = own
        places = np.arange(len(whole))
        cut.append(whole)
        marks.append(((places >= size) & (places < len(own))).astype(np.int32))
    return pack(cut, length)._replace(answer=pack(marks, length).tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches(Checked):
    """An endless series of batches: `batches(step)` needs no history.

    An epoch holds `weight` passes over each source, all rows shuffled together; a fractional
    weight is exact over epochs. A source is passed once before any row of it comes again.

    Attributes:
        sources: rows of each source.
        weights: passes over each source in an epoch.
        rows_per_batch: rows of a batch.
        seed: seed of the order.
    """

    sources: tuple[Sequences, ...]
    weights: tuple[Positive, ...]
    rows_per_batch: Count
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if len(self.sources) != len(self.weights):
            raise ValueError(
                f"weights must be one per source: {len(self.sources)}, got {len(self.weights)}."
            )
        sizes = [len(source.tokens) for source in self.sources]
        rows = sum(map(_rows_drawn, sizes, self.weights))
        if not _LEAST_ROWS <= rows <= _MOST_ROWS:
            raise ValueError(
                f"weights must give an epoch {_LEAST_ROWS:g} to {_MOST_ROWS:,} rows; sources of "
                f"{sizes} rows and weights of {list(self.weights)} give it {float(rows):g}: give "
                "text, and weights nearer to 1."
            )

    def __call__(self, step: int) -> Sequences:
        sizes = tuple(len(source.tokens) for source in self.sources)
        rows = [
            _place(sizes, self.weights, self.seed, index)
            for index in range(step * self.rows_per_batch, (step + 1) * self.rows_per_batch)
        ]
        return jax.tree.map(
            lambda *fields: np.stack([fields[source][row] for source, row in rows]), *self.sources
        )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Packed text of a run by source.

    Attributes:
        train: rows to learn from.
        validation: rows held out.
        weights: passes over each source, relative to a source of weight 1.
    """

    train: dict[str, Sequences]
    validation: dict[str, Sequences]
    weights: dict[str, float]

    def batches(self, rows_per_batch: int, seed: int) -> Batches:
        """Returns the batches of the rows to learn from."""
        return Batches(
            tuple(self.train.values()), tuple(self.weights.values()), rows_per_batch, seed
        )

    def __or__(self, other: "Corpus") -> "Corpus":
        return Corpus(
            self.train | other.train,
            self.validation | other.validation,
            self.weights | other.weights,
        )

    @property
    def tokens_of_one_pass(self) -> dict[str, int]:
        """Number of tokens to learn from by source, padding excluded."""
        return {name: int(np.count_nonzero(packed.segments)) for name, packed in self.train.items()}


def in_order(
    sequences: Sequences, rows_per_batch: int, most: int | None = None
) -> Iterator[Sequences]:
    """Yields the first `most` rows as batches of one size, the last filled with padding."""
    first = jax.tree.map(lambda field: field[:most], sequences)
    for start in range(0, len(first.tokens), rows_per_batch):
        yield jax.tree.map(functools.partial(_batch_at, start, rows_per_batch), first)


def _batch_at(start: int, size: int, field: np.ndarray) -> np.ndarray:
    rows = field[start : start + size]
    return np.pad(rows, ((0, size - len(rows)), *[(0, 0)] * (field.ndim - 1)))


def _place(
    sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, index: int
) -> tuple[int, int]:
    """Returns (source, row) of the index-th row of all epochs."""
    # Rounding starts an epoch a few rows before the exact ratio says, never after.
    epoch = int(index / sum(map(_rows_drawn, sizes, weights)))
    while index >= _epoch_start(sizes, weights, epoch + 1):
        epoch += 1
    order = _epoch_order(sizes, weights, seed, epoch)
    source, row = order[index - _epoch_start(sizes, weights, epoch)]
    return int(source), int(row)


def _rows_drawn(size: int, weight: float, epochs: int = 1) -> Fraction:
    return Fraction(weight).limit_denominator(10**6) * size * epochs


def _epoch_start(sizes: tuple[int, ...], weights: tuple[float, ...], epoch: int) -> int:
    pairs = zip(sizes, weights, strict=True)
    return sum(int(_rows_drawn(size, weight, epoch)) for size, weight in pairs)


@functools.lru_cache(maxsize=4)
def _epoch_order(
    sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int
) -> Int[np.ndarray, "rows 2"]:
    """Returns (source, row) of every place in an epoch."""
    entries = []
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        ends = (int(_rows_drawn(size, weight, end)) for end in (epoch, epoch + 1))
        drawn = np.arange(*ends)
        for lap in np.unique(drawn // size):
            order = np.random.default_rng((seed, 1, source, int(lap))).permutation(size)
            rows = order[drawn[drawn // size == lap] % size]
            entries.append(np.stack([np.full_like(rows, source), rows], axis=1))
    together = np.concatenate(entries)
    return np.random.default_rng((seed, 0, epoch)).permutation(together)
