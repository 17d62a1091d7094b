"""JSON files of profiles, tables and trees. Some of them ship with the package."""

from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files import read_json, replacing_files, write_json


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
        ValueError: there is no such file, and no shipped one of that name.
    """
    names = shipped_names(folder)
    path = folder / f"{source}.json" if str(source) in names else Path(source)
    if not path.exists():
        noun = kind.split()[-1]
        raise ValueError(
            f"{kind} {source}: no such file, and no shipped {noun} of that name; shipped are "
            f"{', '.join(names)}."
        )
    return read_json(path)


def write_entry(path: str | Path, entry: dict[str, Any]) -> None:
    """Writes a file. An interrupted write leaves no file."""
    path = Path(path)
    with replacing_files(path.parent) as folder:
        write_json(folder / path.name, entry)
