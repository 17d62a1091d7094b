"""Text files in, packed sequences out. Every choice follows from the settings and a seed."""

import bisect
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import re
import string
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from jaxspec.checkpoint.tokenizer import check_unicode
from jaxspec.training.tokenizer import BOS, EOS, RESERVED, without_reserved

STANDARD_LIBRARY = "stdlib"
"""As a source's path: the standard library of the running interpreter."""
PACKAGES = "packages:"
"""How the path of a source begins that reads installed packages: `packages:rich,click`."""

_RESERVED_TOKEN = re.compile("(" + "|".join(re.escape(token) for token in RESERVED) + ")")


class DataError(ValueError):
    """A data file that cannot be used; the message names the file and the line."""


class Document(NamedTuple):
    """One text.

    pieces: plain text and names of reserved tokens in turn, text first and last (it may be empty).
    row: the fields it was made from; empty for plain files.
    place: `file:line`, for messages.
    """

    pieces: tuple[str, ...]
    row: Mapping[str, object]
    place: str


class Divided(NamedTuple):
    """The two parts of a source; documents in neither part are not used at all."""

    train: list[Document]
    validation: list[Document]


class Split(Protocol):
    """Decides which documents are held out."""

    def divide(self, documents: Sequence[Document]) -> Divided: ...


@dataclasses.dataclass(frozen=True)
class EveryNth:
    """Holds out the n-th, the 2n-th, ... document."""

    n: int = 20

    def __post_init__(self):
        if self.n < 2:
            raise ValueError(f"n must be at least 2, got {self.n}: 1 would hold out everything.")

    def divide(self, documents: Sequence[Document]) -> Divided:
        held_out = list(documents[self.n - 1 :: self.n])
        train = [document for i, document in enumerate(documents, 1) if i % self.n]
        return Divided(train, held_out)


@dataclasses.dataclass(frozen=True)
class LastRows:
    """Holds out the last `count` documents."""

    count: int

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, got {self.count}.")

    def divide(self, documents: Sequence[Document]) -> Divided:
        border = max(len(documents) - self.count, 0)
        return Divided(list(documents[:border]), list(documents[border:]))


@dataclasses.dataclass(frozen=True)
class FieldRanges:
    """Tells the parts apart by a whole number in each row; both ends of a range are included."""

    field: str
    train: tuple[int, int]
    validation: tuple[int, int]

    def divide(self, documents: Sequence[Document]) -> Divided:
        numbers = [self._number(document) for document in documents]

        def within(ends: tuple[int, int]) -> list[Document]:
            pairs = zip(documents, numbers, strict=True)
            return [document for document, number in pairs if ends[0] <= number <= ends[1]]

        return Divided(within(self.train), within(self.validation))

    def _number(self, document: Document) -> int:
        number = document.row.get(self.field)
        if not isinstance(number, int):
            raise DataError(
                f"{document.place}: the split goes by a whole number in {self.field!r}, "
                f"got {number!r}."
            )
        return number


@dataclasses.dataclass(frozen=True)
class LastCharacters:
    """Holds out the last part of running text, cutting a document where the border falls."""

    fraction: float = 0.1

    def __post_init__(self):
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction must be in [0, 1), got {self.fraction}.")

    def divide(self, documents: Sequence[Document]) -> Divided:
        sizes = [sum(map(len, document.pieces)) for document in documents]
        left = round(sum(sizes) * (1 - self.fraction))
        parts = Divided([], [])
        for document, size in zip(documents, sizes, strict=True):
            if size <= left:
                parts.train.append(document)
            elif left <= 0:
                parts.validation.append(document)
            else:
                text = "".join(document.pieces)
                parts.train.append(document._replace(pieces=(text[:left],)))
                parts.validation.append(document._replace(pieces=(text[left:],)))
            left -= size
        return parts


SPLITS = {kind.__name__: kind for kind in (EveryNth, LastRows, FieldRanges, LastCharacters)}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where text comes from, how much of it is used, and what is held out.

    name: how reports call it.
    path: a `.jsonl`, `.txt` (both also `.gz`) or `.py` file, a folder of `.py` files, `stdlib`, or
        `packages:` and the names of installed packages with commas between them.
    template: the text made from one row of a `.jsonl` file, in `str.format` style. A list in a
        field is written one entry a line. Reserved tokens in the template become their ids;
        in the fields they stay ordinary characters.
    weight: passes over this source while a source of weight 1 is passed once.
    exclude: names of folders to leave out of a folder of `.py` files, at any depth.
    origin, licence: for the recipe that goes with the weights.
    """

    name: str
    path: str
    template: str = "{text}"
    weight: float = 1.0
    split: Split = EveryNth()
    exclude: tuple[str, ...] = ("site-packages", "__pycache__")
    origin: str = ""
    licence: str = ""

    def __post_init__(self):
        if not self.weight > 0:
            raise ValueError(f"The weight of {self.name!r} must be above 0, got {self.weight}.")


GSM8K = Source(
    name="gsm8k",
    path="gsm8k/train.jsonl.gz",
    template="{question}\n{answer}",
    split=LastRows(300),
    weight=2.0,
    origin="openai/grade-school-math@3101c7d5072418e28b9008a6636bde82a006892c, train split, "
    "calculator marks such as <<48/2=24>> kept",
    licence="MIT",
)
MBPP = Source(
    name="mbpp",
    path="mbpp/train.jsonl.gz",
    template='"""\n{text}\n{test_list}\n"""\n{code}\n',
    split=FieldRanges("task_id", train=(601, 974), validation=(511, 600)),
    weight=2.0,
    origin="google-research/google-research mbpp/mbpp.jsonl (Austin et al. 2021), rows 1-10 and "
    "511-974; changed: line ends",
    licence="CC BY 4.0",
)
SHAKESPEARE = Source(
    name="shakespeare",
    path="tiny_shakespeare/input.txt.gz",
    split=LastCharacters(0.1),
    origin="karpathy/char-rnn@6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e",
    licence="public domain",
)
PYTHON = Source(
    name="stdlib",
    path=STANDARD_LIBRARY,
    exclude=("test", "tests", "encodings", "idlelib", "lib2to3", "site-packages", "__pycache__"),
    origin="the standard library of the Python interpreter that ran the training",
    licence="PSF-2.0",
)
LIBRARIES = Source(
    name="libraries",
    path=PACKAGES + "beartype,click,flax,fsspec,httpcore2,httpx2,jinja2,jsonschema,networkx,optax,"
    "prompt_toolkit,pytest,rich,tornado,traitlets",
    exclude=("test", "tests", "testing", "_vendor", "__pycache__"),
    licence="MIT, BSD-3-Clause or Apache-2.0",
)
# The same rows as turns of a conversation, so that `--chat` has been seen in training.
GSM8K_CHAT = dataclasses.replace(
    GSM8K,
    name="gsm8k-chat",
    template="<|user|>{question}<|end|><|assistant|>{answer}<|end|>",
    weight=1.0,
)
MBPP_CHAT = dataclasses.replace(
    MBPP,
    name="mbpp-chat",
    template="<|user|>{text}\n{test_list}<|end|><|assistant|>{code}<|end|>",
    weight=1.0,
)

KNOWN_SOURCES = {
    source.name: source
    for source in (GSM8K, GSM8K_CHAT, MBPP, MBPP_CHAT, PYTHON, LIBRARIES, SHAKESPEARE)
}


def default_mixture(data_folder: Path) -> tuple[Source, ...]:
    """GSM8K, MBPP and the running Python's standard library, the first two also as chats.

    Args:
        data_folder: holds `gsm8k/train.jsonl.gz` and `mbpp/train.jsonl.gz`.

    Raises:
        ValueError: naming the files that are not there.
    """
    files = [
        dataclasses.replace(source, path=(data_folder / source.path).as_posix())
        for source in (GSM8K, GSM8K_CHAT, MBPP, MBPP_CHAT)
    ]
    missing = sorted({source.path for source in files if not Path(source.path).exists()})
    if missing:
        raise ValueError(
            f"The data folder {data_folder} must hold gsm8k/train.jsonl.gz and "
            f"mbpp/train.jsonl.gz; missing: {', '.join(missing)}. Name other files by --data."
        )
    return (*files, PYTHON)


def source_files(source: Source) -> list[Path]:
    """The files a source reads, in the order it reads them."""
    root = _source_root(source)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"Source {source.name!r}: {source.path} is not there.")
    if source.path.startswith(PACKAGES):
        found = (path for package in _packages(source) for path in _python_files(package))
    else:
        found = root.rglob("*.py")
    files = [
        path for path in found if not set(source.exclude) & set(path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise DataError(f"Source {source.name!r}: no .py files in {source.path}.")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_source(source: Source) -> Divided:
    """Reads a source and holds out its validation part. Line ends become single line feeds.

    Raises:
        DataError: naming the file and line that cannot be read, or a source left empty.
    """
    documents: list[Document] = []
    for path in source_files(source):
        documents.extend(_read_file(path, source))
    parts = source.split.divide(documents)
    if not parts.train:
        raise DataError(
            f"Source {source.name!r}: none of the {len(documents)} documents in {source.path} "
            f"is left for training by {source.split}."
        )
    return parts


def fingerprint(source: Source) -> str:
    """SHA-256 of the file, or, for a folder, of the sorted lines `sha256  relative/path`."""
    files = source_files(source)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    if _source_root(source).is_file():
        return digests[0]
    root = _source_root(source)
    lines = [
        f"{digest}  {path.relative_to(root).as_posix()}\n"
        for digest, path in zip(digests, files, strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def document_texts(documents: Sequence[Document]) -> Iterator[str]:
    """Their plain text, reserved tokens left out: what a tokenizer is trained on."""
    for document in documents:
        yield from document.pieces[::2]


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> list[Int[np.ndarray, " tokens"]]:
    """Every document as bos, its tokens, eos."""
    plain = without_reserved(tokenizer)
    texts = [piece for document in documents for piece in document.pieces[::2]]
    encoded = iter(plain.encode_batch(texts, add_special_tokens=False))
    bos, eos = RESERVED.index(BOS), RESERVED.index(EOS)
    ids = []
    for document in documents:
        tokens = [bos]
        for index, piece in enumerate(document.pieces):
            tokens += [tokenizer.token_to_id(piece)] if index % 2 else next(encoded).ids
        ids.append(np.asarray([*tokens, eos], np.int32))
    return ids


class Sequences(NamedTuple):
    """Rows of packed documents.

    tokens: 0 where there is padding.
    segments: 1, 2, ... for the documents of a row in order; 0 is padding.
    positions: count from 0 in every segment.
    """

    tokens: Int[Array | np.ndarray, "rows length"]
    segments: Int[Array | np.ndarray, "rows length"]
    positions: Int[Array | np.ndarray, "rows length"]


class SeenSequences(NamedTuple):
    """Rows of packed documents with what a target made of them; see `Sequences`, `TargetStates`."""

    tokens: Int[Array | np.ndarray, "rows length"]
    segments: Int[Array | np.ndarray, "rows length"]
    positions: Int[Array | np.ndarray, "rows length"]
    features: Float[Array | np.ndarray, "rows length embed"]
    taps: Float[Array | np.ndarray, "rows length tapped"]


class Answers(NamedTuple):
    """Rows of packed documents, each a prompt and its answer; see `Sequences`.

    answer: 1 where a token is of an answer, else 0.
    """

    tokens: Int[Array | np.ndarray, "rows length"]
    segments: Int[Array | np.ndarray, "rows length"]
    positions: Int[Array | np.ndarray, "rows length"]
    answer: Int[Array | np.ndarray, "rows length"]


class SeenAnswers(NamedTuple):
    """Rows of prompts with their answers, and what a target made of them; see `Answers`.

    taps: see `TargetStates`.
    """

    tokens: Int[Array | np.ndarray, "rows length"]
    segments: Int[Array | np.ndarray, "rows length"]
    positions: Int[Array | np.ndarray, "rows length"]
    answer: Int[Array | np.ndarray, "rows length"]
    taps: Float[Array | np.ndarray, "rows length tapped"]


Rows = TypeVar("Rows", Sequences, SeenSequences, Answers, SeenAnswers)
"""Records of arrays whose first axis counts rows."""


def pack(documents: Sequence[Int[np.ndarray, " tokens"]], length: int) -> Sequences:
    """Lays documents into rows of `length`; every token lands in exactly one slot.

    A document longer than a row is cut into whole rows and a rest. Nothing else is cut: pieces go,
    longest first, to the fullest row that still holds them.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, to predict one token; got {length}.")
    pieces = [
        document[start : start + length]
        for document in documents
        for start in range(0, len(document), length)
    ]
    rows: list[list[int]] = []
    roomy: list[tuple[int, int]] = []  # (free slots, row), ascending
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
            slots = slice(start, start + len(pieces[index]))
            tokens[row, slots] = pieces[index]
            segments[row, slots] = segment
            positions[row, slots] = np.arange(len(pieces[index]))
            start = slots.stop
    return Sequences(tokens, segments, positions)


def pack_answers(
    documents: Sequence[Int[np.ndarray, " tokens"]],
    prompt_sizes: Sequence[int],
    length: int,
    block: int = 1,
    filler: int = 0,
) -> Answers:
    """Lays prompts with their answers into rows, as `pack` does.

    Args:
        documents: tokens of each prompt and its answer. What does not fit into a row is left out.
        prompt_sizes: how many tokens of each are the prompt's.
        length: of a row.
        block: each document is filled to a whole number of so many tokens, if there is room.
        filler: the token that it is filled with, which is not of the answer.
    """
    cut, marks = [], []
    for document, size in zip(documents, prompt_sizes, strict=True):
        own = document[:length]
        whole = np.full(min(-(-len(own) // block) * block, length), filler, own.dtype)
        whole[: len(own)] = own
        slots = np.arange(len(whole))
        cut.append(whole)
        marks.append(((slots >= size) & (slots < len(own))).astype(np.int32))
    packed = pack(cut, length)
    return Answers(*packed, pack(marks, length).tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches(Generic[Rows]):
    """An endless, seekable series of batches: `batches(step)` needs no history.

    An epoch holds `weight` passes over each source, all rows shuffled together; a fractional
    weight is exact over epochs. A source is passed once before any row of it comes again.
    """

    sources: tuple[Rows, ...]
    weights: tuple[float, ...]
    rows_per_batch: int
    seed: int = 0

    def __post_init__(self):
        if self.rows_per_batch < 1:
            raise ValueError(f"rows_per_batch must be at least 1, got {self.rows_per_batch}.")
        if len(self.sources) != len(self.weights):
            raise ValueError(
                f"weights must be one per source: {len(self.sources)}, got {len(self.weights)}."
            )

    def __call__(self, step: int) -> Rows:
        sizes = tuple(len(source.tokens) for source in self.sources)
        rows = [
            _place(sizes, self.weights, self.seed, index)
            for index in range(step * self.rows_per_batch, (step + 1) * self.rows_per_batch)
        ]
        kind = type(self.sources[0])
        return kind(
            *(
                np.stack([self.sources[source][field][row] for source, row in rows])
                for field in range(len(kind._fields))
            )
        )


def in_order(sequences: Rows, rows_per_batch: int, most: int | None = None) -> Iterator[Rows]:
    """The first `most` rows as batches of one size, the last filled up with padding."""
    for start in range(0, len(sequences.tokens[:most]), rows_per_batch):
        part = [field[:most][start : start + rows_per_batch] for field in sequences]
        missing = rows_per_batch - len(part[0])
        yield type(sequences)(*(_with_empty_rows(field, missing) for field in part))


def _with_empty_rows(field: Any, missing: int) -> Any:
    return np.pad(field, ((0, missing), *[(0, 0)] * (field.ndim - 1)))


def _place(
    sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, index: int
) -> tuple[int, int]:
    """(source, row) of the index-th row ever drawn."""
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
    """(source, row) of every place in an epoch."""
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


def described(source: Source) -> Source:
    """The source with its origin filled in where that is a matter of what is installed."""
    if source.origin or not source.path.startswith(PACKAGES):
        return source
    releases = [f"{package.name} {package.version}" for package in _packages(source)]
    return dataclasses.replace(source, origin="installed packages: " + ", ".join(releases))


def _source_root(source: Source) -> Path:
    if source.path == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    if source.path.startswith(PACKAGES):
        return Path(sysconfig.get_paths()["purelib"])
    return Path(source.path)


def _packages(source: Source) -> list[importlib.metadata.Distribution]:
    names = source.path.removeprefix(PACKAGES).split(",")
    found = {package.name.lower(): package for package in importlib.metadata.distributions()}
    missing = [name for name in names if name.lower() not in found]
    if missing:
        raise DataError(
            f"Source {source.name!r}: these packages are not installed: {', '.join(missing)}."
        )
    return [found[name.lower()] for name in names]


def _python_files(package: importlib.metadata.Distribution) -> list[Path]:
    root = Path(sysconfig.get_paths()["purelib"])
    paths = [Path(str(package.locate_file(file))) for file in package.files or ()]
    return [path for path in paths if path.suffix == ".py" and root in path.parents]


def _read_file(path: Path, source: Source) -> list[Document]:
    kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if kind in (".jsonl", ".jsonl.gz"):
        make = _row_reader(source)
        return [make(line, f"{path}:{n}") for n, line in _lines(path) if line.strip()]
    if kind in (".txt", ".txt.gz"):
        return [Document(("".join(line for _, line in _lines(path)),), {}, f"{path}:1")]
    if kind == ".py":
        return [Document((_python_text(path),), {}, f"{path}:1")]
    raise DataError(
        f"Source {source.name!r}: {path} must end in .jsonl, .txt (or either with .gz) or .py."
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, line ends as single line feeds."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, _with_line_feeds(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 ({error.reason}).") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: the gzip stream is broken ({error}).") from None


def _python_text(path: Path) -> str:
    """Source text, in the encoding that the file declares."""
    try:
        with path.open("rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        return _with_line_feeds(path.read_bytes().decode(encoding))
    except SyntaxError as error:
        raise DataError(f"{path}:1: {error.msg}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not {error.encoding} ({error.reason}).") from None


def _row_reader(source: Source) -> Callable[[str, str], Document]:
    """Turns a line of a `.jsonl` file into a document by the source's template."""
    # Splitting by the reserved tokens first is what keeps those inside the fields harmless.
    templates = _RESERVED_TOKEN.split(source.template)
    fields = {
        name
        for template in templates
        for _, name, _, _ in string.Formatter().parse(template)
        if name is not None
    }

    def read(line: str, place: str) -> Document:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}).") from None
        if not isinstance(row, dict):
            raise DataError(f"{place}: a row must be a JSON object, got {type(row).__name__}.")
        missing = sorted(fields - row.keys())
        if missing:
            raise DataError(
                f"{place}: the template of source {source.name!r} needs {missing}, "
                f"but the row has {sorted(row)}."
            )
        texts = {name: _field_text(row[name]) for name in fields}
        for name, text in texts.items():
            try:
                check_unicode(text, f"field {name!r}")
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None
        return Document(tuple(piece.format(**texts) for piece in templates), row, place)

    return read


def _field_text(value: object) -> str:
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    return _with_line_feeds(text)


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
