"""Prompts from a `.jsonl` or `.jsonl.gz` file."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checkpoint.files import as_path, parse_json, read_lines
from jaxspec.core.checks import Count, checked
from jaxspec.decoding.request import PromptLike

FIELDS = ("prompt", "question", "text", "turns", "messages", "tokens")


class PromptRow(NamedTuple):
    """One line of a file.

    Attributes:
        prompt: the prompt.
        category: the line's field of that name, for figures by category; `None` without one.
    """

    prompt: PromptLike
    category: str | None


def read_prompts(
    path: str | Path,
    field: str | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
) -> list[PromptRow]:
    """Reads one prompt per line.

    Args:
        path: JSON objects, one per line; empty lines are skipped. A line has 16 MiB at most, and a
            gzipped file unpacks to 100 times its size at most.
        field: name of the prompt's field; `None` for the first of `FIELDS` that a line has. A list
            of strings is a conversation of which the first turn is taken; a list of messages with
            roles is a chat; a list of whole numbers is token ids.
        limit: prompts at most; `None` for all.
        shuffle_seed: shuffle before cutting to `limit`; `None` keeps the file's order.

    Raises:
        ValueError: for a line that cannot be used, with file and line number, or an empty file.
        OSError: if the file cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "prompts.jsonl"
        ...     _ = path.write_text('{"question": "How many?"}')
        ...     read_prompts(path)
        [PromptRow(prompt='How many?', category=None)]
    """
    limit = checked("limit", limit, Count | None)
    rows = [_as_row(entry, field, where) for where, entry in read_entries(path)]
    if not rows:
        raise ValueError(f"{path} holds no prompts.")
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(rows)
    return rows[:limit]


def read_entries(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of a `.jsonl` or `.jsonl.gz` file: its place, for messages, and its object.

    Raises:
        ValueError: for a line that is not a JSON object, or as `read_lines`.
        OSError: if the file cannot be opened.
    """
    for number, line in read_lines(as_path("path", path)):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _as_entry(line, where)


def _as_entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error}).") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(entry).__name__}.")
    return entry


def _as_row(entry: dict[str, Any], field: str | None, where: str) -> PromptRow:
    found = field_in(entry, FIELDS if field is None else (field,), f"{where}: ")
    category = entry.get("category")
    return PromptRow(
        as_prompt(entry[found], f"{where}: field {found!r}"),
        category if isinstance(category, str) else None,
    )


def field_in(entry: Mapping[str, Any], fields: Sequence[str], where: str = "") -> str:
    """Returns the first of some fields that a line has.

    Raises:
        ValueError: it has none of them; the message begins with `where`.

    Example:
        >>> field_in({"id": 7, "text": "How many?"}, FIELDS)
        'text'
    """
    found = next((name for name in fields if name in entry), None)
    if found is None:
        raise ValueError(
            f"{where}has no field {' or '.join(map(repr, fields))}, only "
            f"{', '.join(map(repr, entry)) or 'none'}; name it with --field."
        )
    return found


def as_prompt(value: Any, where: str) -> PromptLike:
    """Returns the prompt that a value of a file is: a text, a chat, the first turn, or token ids.

    Raises:
        ValueError: it is none of them; the message begins with `where`.

    Example:
        >>> as_prompt(["How many?", "Why?"], "line 1"), as_prompt([5, 6.0], "line 2")
        ('How many?', [5, 6])
    """
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if all(isinstance(message, Mapping) for message in value):
            return value
        with contextlib.suppress(ValueError):
            return list(checked("tokens", value, Sequence[int]))  # 8.0 is a whole number in JSON
    raise ValueError(
        f"{where} must be a text that is not empty, a chat, a list of turns, or a list of token "
        f"ids, got {value!r:.60}."
    )
