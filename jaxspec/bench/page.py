"""A page of Markdown with one part per suite, `checkpoints/RESULTS.md`.

A part begins with a heading of the first level and lasts until the next; a new measurement replaces
its own part and leaves the others as they are.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxspec.checkpoint.files import replacing_files


def write_part(part: str, path: Path) -> None:
    """Puts a part in its place on a page, or at its end; the page is replaced whole or not at all.

    Args:
        part: Markdown that begins with its heading, `# Title`.
        path: of the page; it need not exist.
    """
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = {_title(each): each.strip() for each in re.split(r"^(?=# )", old, flags=re.M)}
    parts[_title(part)] = part.strip()
    page = "\n\n".join(filter(None, parts.values())) + "\n"
    with replacing_files(path.parent) as staging:
        (staging / path.name).write_text(page, encoding="utf-8")


def bullets(*lines: str) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _title(part: str) -> str:
    return part.partition("\n")[0]
