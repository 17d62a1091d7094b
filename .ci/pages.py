"""Parts of the documentation site beyond mkdocs.yml.

A hook of MkDocs: links that leave `docs/` lead to the repository, whose address is
`[project.urls]` in pyproject.toml. An extension of Griffe: examples are shown as code.
"""

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites relative links to files of the repository that are outside `docs/`."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def rewritten(link: re.Match[str]) -> str:
        path, anchor = (folder / link[1]).resolve(), link[2] or ""
        if not path.exists() or path.is_relative_to(ROOT / "docs"):
            return link[0]
        return f"]({SOURCE}/blob/main/{path.relative_to(ROOT).as_posix()}{anchor})"

    return re.sub(r"\]\((\.\./[^)#]+)(#[^)]*)?\)", rewritten, markdown)


class Examples(griffe.Extension):
    """Makes Google's sections `Examples:` of `Example:` and of doctests without a title."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        # An unindented doctest, to the next empty line.
        obj.docstring.value = re.sub(
            r"^>>> .*(?:\n.+)*",
            lambda found: "Examples:\n" + textwrap.indent(found[0], "    "),
            text,
            flags=re.MULTILINE,
        )
