"""Sources of text: files, rows of JSON, installed packages, and what is held out of them."""

import dataclasses
import hashlib
import importlib.metadata
import io
import re
import string
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

from jaxspec.checkpoint.files import (
    CheckpointError,
    open_file,
    parse_json,
    read_bytes,
    read_lines,
    read_text,
    with_line_feeds,
)
from jaxspec.checkpoint.tokenizer import check_unicode
from jaxspec.core.checks import Checked, FileName, Natural, at_least, from_up_to, shown, within
from jaxspec.training.tokenizer import RESERVED

DATA_FOLDER = Path("data/train")
"""Folder of the default mixture, from the repository's root; not part of the repository."""
STANDARD_LIBRARY = "stdlib"
"""Path of a source that reads the standard library of the running interpreter."""
PACKAGES = "packages:"
"""Prefix of the path of a source that reads installed packages: `packages:rich,click`."""

# The rows of an epoch are laid out at once, so that weights far apart would take all the memory.
Weight = Annotated[float, within(1e-3, 1e3)]

_RESERVED_TOKEN = re.compile("(" + "|".join(re.escape(token) for token in RESERVED) + ")")


class DataError(ValueError):
    """A data file that cannot be used; the message names the file and the line."""


class Document(NamedTuple):
    """One text.

    Attributes:
        pieces: plain text and names of reserved tokens in turn; the first and the last are text,
            which may be empty.
        row: fields it was made from; empty for plain files.
        place: `file:line`, for messages.
    """

    pieces: tuple[str, ...]
    row: Mapping[str, object]
    place: str


class Divided(NamedTuple):
    """The two parts of a source; documents in neither part are not used."""

    train: list[Document]
    validation: list[Document]


@runtime_checkable
class Split(Protocol):
    """Rule that says which documents are held out."""

    def divide(self, documents: Sequence[Document]) -> Divided:
        """Returns the documents to learn from and those held out."""
        ...


@dataclasses.dataclass(frozen=True)
class EveryNth(Checked):
    """Holds out the n-th, the 2n-th, ... document."""

    n: Annotated[int, at_least(2)] = 20

    def divide(self, documents: Sequence[Document]) -> Divided:
        held_out = list(documents[self.n - 1 :: self.n])
        train = [document for i, document in enumerate(documents, 1) if i % self.n]
        return Divided(train, held_out)


@dataclasses.dataclass(frozen=True)
class LastRows(Checked):
    """Holds out the last `count` documents."""

    count: Natural

    def divide(self, documents: Sequence[Document]) -> Divided:
        border = max(len(documents) - self.count, 0)
        return Divided(list(documents[:border]), list(documents[border:]))


@dataclasses.dataclass(frozen=True)
class FieldRanges(Checked):
    """Divides by a whole number in each row; both ends of a range are included."""

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
class LastCharacters(Checked):
    """Holds out the last part of running text; may cut a document in two."""

    fraction: Annotated[float, from_up_to(0, 1)] = 0.1

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


def _template_parts(template: str) -> list[list[tuple[str, str]]]:
    """Returns a template's texts with the field behind each, or "", split by the reserved tokens.

    Raises:
        ValueError: it has braces that are no fields, or fields with more than a name.
    """
    # Splitting by the reserved tokens first is what keeps those inside the fields harmless.
    pieces = []
    for piece in _RESERVED_TOKEN.split(template):
        try:
            parts = list(string.Formatter().parse(piece))
        except ValueError as error:
            raise ValueError(
                f"template: {error} in {shown(piece)}; a brace of the text is written twice."
            ) from None
        for _, name, layout, conversion in parts:
            if name == "" or layout or conversion:
                raise ValueError(
                    f"template must name fields by {{name}} alone, without a layout (:) or a "
                    f"conversion (!), got {shown(piece)}."
                )
        pieces.append([(text, name or "") for text, name, _, _ in parts])
    return pieces


@dataclasses.dataclass(frozen=True)
class Source(Checked):
    """A source of text, its weight, and its held-out part.

    Attributes:
        name: name in figures and recipes.
        path: a `.jsonl`, `.txt` (both also `.gz`) or `.py` file, a folder of `.py` files, `stdlib`,
            or `packages:` and the names of installed packages with commas between them.
        template: text made from one row of a `.jsonl` file: `{name}` stands for a field, `{{` and
            `}}` for braces. A list in a field is written one entry a line. Reserved tokens in the
            template become their ids; in the fields they stay ordinary characters.
        weight: passes over this source while a source of weight 1 is passed once, 0.001 to 1000.
        split: rule that says what is held out.
        exclude: names of folders to leave out of a folder of `.py` files, at any depth.
        origin: origin of the text, for the recipe.
        licence: licence of the text, for the recipe.
    """

    name: str
    path: FileName
    template: str = "{text}"
    weight: Weight = 1.0
    split: Split = EveryNth()
    exclude: tuple[str, ...] = ("site-packages", "__pycache__")
    origin: str = ""
    licence: str = ""

    def __post_init__(self):
        try:
            super().__post_init__()
            _template_parts(self.template)
        except ValueError as error:
            raise ValueError(f"source {shown(self.name)}: {error}") from None


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
    """Returns GSM8K, MBPP and the running Python's standard library, the first two also as chats.

    Args:
        data_folder: folder with `gsm8k/train.jsonl.gz` and `mbpp/train.jsonl.gz`.

    Raises:
        ValueError: naming the files that are missing.
    """
    files = [
        dataclasses.replace(source, path=(data_folder / source.path).as_posix())
        for source in (GSM8K, GSM8K_CHAT, MBPP, MBPP_CHAT)
    ]
    missing = sorted({source.path for source in files if not Path(source.path).exists()})
    if missing:
        raise ValueError(
            f"The data folder {data_folder} must hold gsm8k/train.jsonl.gz and "
            f"mbpp/train.jsonl.gz; missing: {', '.join(missing)}. In a clone of the repository, "
            f"`python -m benchmarks.fetch` fetches them into {DATA_FOLDER}. Or name another folder "
            "(--data-folder FOLDER) or other text (--data NAME=PATH)."
        )
    return (*files, PYTHON)


def source_files(source: Source) -> list[Path]:
    """Returns the files of a source in the order in which they are read.

    Raises:
        DataError: there are none.
    """
    root = _source_root(source)
    if root.exists() and not root.is_dir():
        return [root]
    if not root.exists():
        raise DataError(f"Source {shown(source.name)}: {source.path:.400} is not there.")
    if source.path.startswith(PACKAGES):
        found = (path for package in _packages(source) for path in _python_files(package))
    else:
        found = root.rglob("*.py")
    files = [
        path for path in found if not set(source.exclude) & set(path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise DataError(f"Source {shown(source.name)}: no .py files in {source.path:.400}.")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_source(source: Source) -> Divided:
    """Reads a source and holds out its validation part. Line ends become single line feeds.

    Raises:
        DataError: naming the file and line that cannot be read, or a source of which no text is
            left to learn from.
    """
    documents: list[Document] = []
    for path in source_files(source):
        try:
            documents.extend(_read_file(path, source))
        except CheckpointError as error:
            raise DataError(f"Source {shown(source.name)}: {error}") from None
    parts = source.split.divide(documents)
    if not any(document_texts(parts.train)):
        raise DataError(
            f"Source {shown(source.name)}: no text of the {len(documents)} documents in "
            f"{source.path} is left for training by {source.split}; give more text."
        )
    return parts


def fingerprint(source: Source) -> str:
    """Returns the SHA-256 of a file, or for a folder of the sorted lines `sha256  path`."""
    files, root = source_files(source), _source_root(source)
    return file_digest(root) if root.is_file() else files_digest(files, root)


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(files: Sequence[Path], root: Path) -> str:
    """Returns the SHA-256 of the lines `sha256  path` of files, their paths from a folder on."""
    lines = [f"{file_digest(path)}  {path.relative_to(root).as_posix()}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def document_texts(documents: Sequence[Document]) -> Iterator[str]:
    """Yields the plain text of documents, without reserved tokens, to train a tokenizer on."""
    for document in documents:
        yield from document.pieces[::2]


def described(source: Source) -> Source:
    """Returns a source whose origin names the releases of the packages that it reads."""
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
    if "" in names:
        raise DataError(
            f"Source {shown(source.name)}: path must name installed packages with commas between "
            f"them, such as {PACKAGES}numpy,jax; got {shown(source.path)}."
        )
    missing = [name for name in names if name.lower() not in found]
    if missing:
        raise DataError(
            f"Source {shown(source.name)}: these packages are not installed: "
            f"{', '.join(missing):.200}; install them, or leave them out."
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
        return [make(line, f"{path}:{n}") for n, line in read_lines(path) if line.strip()]
    if kind in (".txt", ".txt.gz"):
        return [Document((read_text(path),), {}, f"{path}:1")]
    if kind == ".py":
        return [Document((_python_text(path),), {}, f"{path}:1")]
    raise DataError(
        f"Source {shown(source.name)}: {path} must end in .jsonl, .txt (or either with .gz) or .py."
    )


def _python_text(path: Path) -> str:
    """Returns source text, read in the encoding that the file declares."""
    try:
        found = read_bytes(path)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(found).readline)
        return with_line_feeds(found.decode(encoding))
    except SyntaxError as error:
        raise DataError(f"{path}:1: {error.msg}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not {error.encoding} ({error.reason}).") from None


def _row_reader(source: Source) -> Callable[[bytes, str], Document]:
    """Returns a function from a line of a `.jsonl` file to a document, by the source's template."""
    pieces = _template_parts(source.template)
    fields = {name for parts in pieces for _, name in parts if name}

    def read(line: bytes, place: str) -> Document:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise DataError(f"{place}: a row must be a JSON object, got {type(row).__name__}.")
        missing = sorted(fields - row.keys())
        if missing:
            raise DataError(
                f"{place}: the template of source {shown(source.name)} needs {missing}, "
                f"but the row has {sorted(row)}."
            )
        texts = {name: _field_text(row[name]) for name in fields}
        for name, text in texts.items():
            try:
                check_unicode(text, f"field {name!r}")
            except ValueError as error:
                raise DataError(f"{place}: {error}") from None
        made = ("".join(text + texts.get(name, "") for text, name in parts) for parts in pieces)
        return Document(tuple(made), row, place)

    return read


def _field_text(value: object) -> str:
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    return with_line_feeds(text)
