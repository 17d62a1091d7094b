"""JSON files of profiles, tables and trees. Some of them ship with the package."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.checkpoint.files import as_path, read_json, replacing_files, write_json
from jaxspec.core.checks import checked

_Record = TypeVar("_Record", bound=Any)


def shipped_names(folder: Path) -> list[str]:
    """Lists the names of the files that ship in a folder."""
    return sorted(path.stem for path in folder.glob("*.json"))


def read_entry(kind: str, source: str | Path, folder: Path) -> dict[str, Any]:
    """Reads a file, or the shipped one of that name.

    Args:
        kind: the noun for messages, such as "profile".
        source: a file, or a name of `shipped_names(folder)`.
        folder: where the shipped files are.

    Raises:
        ValueError: there is no such file, and no shipped one of that name, or `source` can be no
            path.
    """
    names = shipped_names(folder)
    path = folder / f"{source}.json" if str(source) in names else as_path("source", source)
    if not os.path.exists(path):
        noun = kind.split()[-1]
        raise ValueError(
            f"{kind} {source}: no such file, and no shipped {noun} of that name; shipped are "
            f"{', '.join(names)}."
        )
    return read_json(path)


def records(
    field: str, listed: Any, kind: type[_Record], renamed: Mapping[str, str] | None = None
) -> tuple[_Record, ...]:
    """Reads a list of objects in a file as dataclasses.

    Args:
        field: name of the list, for messages.
        listed: the list.
        kind: the dataclass.
        renamed: names in the file of fields of `kind` that have another name there.

    Raises:
        ValueError: it is no list of objects with the fields of `kind`; the message says which.

    Example:
        >>> from jaxspec.tuning import Timing
        >>> records("draft", [{"nodes": 1, "seconds": 0.5}], Timing, {"size": "nodes"})
        (Timing(size=1, seconds=0.5, spread=None),)
    """
    names = {(renamed or {}).get(each.name, each.name): each for each in dataclasses.fields(kind)}
    needed = {name for name, each in names.items() if each.default is dataclasses.MISSING}
    found = []
    for place, entry in enumerate(checked(field, listed, Sequence[Mapping[str, Any]])):
        if not needed <= entry.keys() <= names.keys():
            raise ValueError(
                f"{field}[{place}] must have the fields {', '.join(names)}; got "
                f"{', '.join(entry) or 'none'!s:.80}."
            )
        try:
            found.append(kind(**{names[name].name: value for name, value in entry.items()}))
        except ValueError as error:
            raise ValueError(f"{field}[{place}]: {error}") from None
    return tuple(found)


def write_entry(path: str | Path, entry: dict[str, Any]) -> None:
    """Writes a file. An interrupted write leaves no file."""
    path = Path(path)
    with replacing_files(path.parent) as folder:
        write_json(folder / path.name, entry)
