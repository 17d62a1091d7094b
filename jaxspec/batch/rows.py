"""The rows of a job: a file of prompts, line by line, good or bad."""

import contextlib
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.checkpoint.files import as_path, parse_json, read_lines
from jaxspec.core.checks import shown
from jaxspec.decoding.request import PromptLike, encode_prompt, prompt_list
from jaxspec.extras import needs_extra
from jaxspec.measure.prompts import FIELDS, as_prompt, field_in

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

RECORD_FIELDS = (
    *("line", "id", "sample", "text", "tokens", "finish_reason", "num_prompt_tokens", "metrics"),
    *("logprobs", "warped_logprobs", "error"),
)
"""Names that are a record's own; a field of the input with such a name becomes `input_NAME`."""
DATASET = "hf:"
"""Beginning of a path that names a split of `datasets`."""


class Row(NamedTuple):
    """One prompt of a job, or the reason why there is none.

    Attributes:
        line: number of its line in the file, from 1.
        id: decides its randomness: the field `id` of its line, or else one less than `line`, which
            is its place among the prompts of a call of `generate`.
        prompt: text, chat messages or token ids; `None` for a bad row.
        error: the reason why the row is bad; `None` for a good one.
        source: the line itself, whose fields its records pass on; `None`: there is none.
    """

    line: int
    id: str | int
    prompt: PromptLike | None
    error: str | None = None
    source: bytes | None = None


class EncodedRow(NamedTuple):
    """A row with its prompt as token ids.

    Attributes:
        line: see `Row`.
        id: see `Row`.
        tokens: ids of the prompt; empty for a bad row.
        error: see `Row`.
    """

    line: int
    id: str | int
    tokens: np.ndarray
    error: str | None = None


def read_rows(path: str | Path, field: str | None = None, chat: bool = False) -> list[Row]:
    r"""Reads one prompt per line; a line that cannot be used is a row with an error.

    Args:
        path: "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT", a split that the package `datasets` loads
            from the Hub or from a folder (a saved one has no CONFIG), whose rows are objects. Or a
            file: JSON per line, gzipped
            if its name ends so; empty lines are skipped. A line has 16 MiB at most, and a gzipped
            file unpacks to 100 times its size at most. A line is a text, a list of token ids, a
            chat (a list of messages), or an object that has one of them in a field, or a list of
            turns of which the first is taken. Its field `id`, if it has one, is a text or a number
            from 0, and no other line may have it.
        field: name of the prompt's field in an object; `None`: the first of `FIELDS` that
            it has.
        chat: wrap texts as messages of a user.

    Raises:
        ValueError: the file holds no line, there is no such split, or as for
            `checkpoint.files.read_lines`.
        OSError: it cannot be opened.
        MissingExtra: `datasets` is not installed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "in.jsonl"
        >>> _ = path.write_text('{"prompt": "Two and two"}\n[5, 6]\n')
        >>> [(row.line, row.prompt) for row in read_rows(path)]
        [(1, 'Two and two'), (2, [5, 6])]
    """
    lines_of_ids: dict[str | int, int] = {}
    is_split = str(path).startswith(DATASET)
    lines = _dataset(str(path)) if is_split else read_lines(as_path("path", path))
    rows = [
        _with_own_id(_read_line(number, line, field, chat), lines_of_ids)
        for number, line in lines
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"{path} holds no prompts.")
    return rows


def rows_of(prompts: PromptLike | Iterable[PromptLike]) -> list[Row]:
    """Returns prompts as rows: prompt i of a call of `generate` is line i + 1 with id i.

    Example:
        >>> [(row.line, row.id) for row in rows_of(["one", "two"])]
        [(1, 0), (2, 1)]
    """
    return [Row(i + 1, i, prompt) for i, prompt in enumerate(prompt_list(prompts))]


def with_fields_of(source: bytes | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record behind the fields of the line that it answers.

    A line that is no object, such as a text, is passed on as the field `prompt`. A field whose name
    is one of `RECORD_FIELDS` is passed on as `input_NAME`, and as often as needed until the name is
    free; an id that is the record's own is not passed on twice.

    Example:
        >>> with_fields_of(b'{"text": "Two and", "label": 2}', {"line": 1, "text": " two"})
        {'label': 2, 'input_text': 'Two and', 'line': 1, 'text': ' two'}
    """
    if source is None:
        return dict(record)
    try:
        value = _parsed(source.decode("utf-8"))
    except ValueError:  # the record says so
        return dict(record)
    fields = value if isinstance(value, dict) else {"prompt": value}
    kept = {name: held for name, held in fields.items() if name not in RECORD_FIELDS}
    for name in RECORD_FIELDS:
        if name not in fields or (name == "id" and fields[name] == record.get(name)):
            continue
        free = f"input_{name}"
        while free in kept:
            free = f"input_{free}"
        kept[free] = fields[name]
    return {**kept, **record}


def checked_id(value: Any) -> str | int:
    """Returns a valid id as it is.

    Raises:
        ValueError: it is neither a text that UTF-8 can hold nor a number from 0 that 31 bits hold.
    """
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise ValueError(f"id must be a text or a number from 0 to {(1 << 31) - 1}, got {value!a:.40}.")


def number_of(row_id: str | int) -> int:
    """Returns the number that an id adds to the seed: itself, or a text's checksum in 31 bits."""
    if isinstance(row_id, int):
        return row_id
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:4], "big") >> 1


def encode_rows(
    model: "Model",
    rows: Sequence[Row],
    spare: int = 1,
    check: Callable[[Sequence[int]], None] = lambda ids: None,
) -> list[EncodedRow]:
    """Returns the token ids of every row; a prompt that the model cannot read becomes an error.

    Args:
        model: the model.
        rows: the rows.
        spare: positions that must be left behind each prompt.
        check: raises a ValueError for ids that may not be a prompt.
    """
    return [_encode(model, row, spare, check) for row in rows]


def digest_of(rows: Sequence[Row]) -> str:
    """Returns a checksum of lines, ids, prompts and errors, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        parts = [row.line, row.id, row.prompt, row.error]
        try:
            text = json.dumps(parts, default=lambda value: np.asarray(value).tolist())
        except Exception:  # of what is no prompt, which its record says
            parts[2] = type(row.prompt).__name__
            text = json.dumps(parts)
        digest.update(text.encode())
    return digest.hexdigest()


def _encode(
    model: "Model", row: Row, spare: int, check: Callable[[Sequence[int]], None]
) -> EncodedRow:
    empty = np.zeros(0, np.int32)
    if row.error is not None:
        return EncodedRow(row.line, row.id, empty, row.error)
    try:
        ids = encode_prompt(model, row.prompt, "the prompt", spare)
        check(ids)
    except ValueError as error:
        return EncodedRow(row.line, row.id, empty, str(error))
    except Exception as error:  # of a caller's object, whose code is not ours
        return EncodedRow(row.line, row.id, empty, f"the prompt cannot be read: {shown(error)}.")
    return EncodedRow(row.line, row.id, np.asarray(ids, np.int32))


def _read_line(number: int, line: bytes, field: str | None, chat: bool) -> Row:
    row_id: str | int = number - 1
    try:
        value = _parsed(line.decode("utf-8"))
        if isinstance(value, Mapping) and "id" in value:
            row_id = checked_id(value["id"])
        return Row(number, row_id, _as_prompt(_prompt_in(value, field), chat), source=line)
    except UnicodeDecodeError as error:
        return Row(number, row_id, None, f"not UTF-8 text ({error}).", line)
    except ValueError as error:
        return Row(number, row_id, None, str(error), line)


def _dataset(path: str) -> Iterator[tuple[int, bytes]]:
    """Yields the rows of a split of `datasets` as lines of JSON, counted from 1.

    Values that JSON does not have, such as dates, become texts.

    Raises:
        ValueError: the path does not name a split, or it cannot be loaded.
    """
    parts = path.removeprefix(DATASET).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            f"{path}: give hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, such as "
            "hf:openai/gsm8k:main:test."
        )
    name, *config, split = parts
    with needs_extra(path, "datasets"):
        datasets: Any = importlib.import_module("datasets")
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            found: Any = _saved_split(datasets.load_from_disk(name), config, split)
        else:
            found = datasets.load_dataset(name, *config, split=split)
    except Exception as error:  # of any of its many parts
        raise ValueError(f"{path}: datasets cannot load it: {error!s:.300}") from error
    for number, row in enumerate(found, start=1):
        yield number, json.dumps(row, default=str).encode()


def _saved_split(found: Any, config: Sequence[str], split: str) -> Any:
    """Returns a split of what a folder of `save_to_disk` holds: named splits, or one.

    Raises:
        ValueError: it holds other splits, or a configuration is asked for.
    """
    if config:
        raise ValueError(f"a saved folder has no configurations, got {config[0]!r}.")
    if isinstance(found, dict):
        there = dict(found)
    else:  # one whose name may not be known
        there = {split if found.split is None else str(found.split): found}
    if split not in there:
        raise ValueError(f"the folder has no split {split!r}, only {', '.join(there)}.")
    return there[split]


# Only such texts can hold a number that JSON does not.
_MAY_BE_INFINITE = re.compile("NaN|Infinity|[0-9][eE]|[0-9]{300}")


def _parsed(text: str) -> Any:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}).") from None
    try:
        if _MAY_BE_INFINITE.search(text):
            json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError(
            "it holds NaN, an infinity or a number past 1.7e308, which no record can hold; give "
            "null or a text in its place."
        ) from None
    return value


def _with_own_id(row: Row, lines_of_ids: dict[str | int, int]) -> Row:
    if row.error is not None:
        return row  # not decoded, so its id is free
    first = lines_of_ids.setdefault(row.id, row.line)
    if first == row.line:
        return row
    return row._replace(prompt=None, error=f"id {shown(row.id)} is line {first}'s already.")


def _prompt_in(value: Any, field: str | None) -> Any:
    if not isinstance(value, Mapping):
        return value
    return value[field_in(value, FIELDS if field is None else (field,))]


def _as_prompt(value: Any, chat: bool) -> PromptLike:
    prompt = as_prompt(value, "the prompt")
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
