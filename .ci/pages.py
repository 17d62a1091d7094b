"""Parts of the documentation site beyond mkdocs.yml.

A hook of MkDocs: pages of results are a part of the site, the page of the command line is made of
the help of its commands, and links that leave `docs/` lead to the repository, whose address is
`[project.urls]` in pyproject.toml. An extension of Griffe: examples
are shown as code.
"""

import contextlib
import io
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from jaxspec.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]


RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the page of the command line, and those of `benchmarks/results` as `results`."""
    text = command_line()
    files.append(File.generated(config, "api/command_line.md", content=text))
    for page in sorted(RESULTS.glob("*.md")):
        name = f"results/{page.name}"
        files.append(File.generated(config, name, abs_src_path=str(page)))
    return files


def command_line() -> str:
    """Returns a page with the help of every command."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Command line\n"]
    for words in ((), *(command.words for command in COMMANDS)):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            main([*words, "--help"])
        parts.append(f"## {' '.join(('jaxspec', *words))}\n\n```text\n{said.getvalue()}```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites relative links to what is no page of the site, or lies elsewhere on it."""
    inside = page.file.src_path.startswith("results/")
    folder = RESULTS if inside else (ROOT / "docs" / page.file.src_path).parent
    place = Path(page.file.src_path).parent

    def rewritten(link: re.Match[str]) -> str:
        path, anchor = (folder / link[1]).resolve(), link[2] or ""
        if not path.exists():
            return link[0]
        if path.parent == RESULTS and path.suffix == ".md":
            found = Path("results") / path.name
        elif path.is_relative_to(ROOT / "docs"):
            found = path.relative_to(ROOT / "docs")
        else:
            return f"]({SOURCE}/blob/main/{path.relative_to(ROOT).as_posix()}{anchor})"
        return f"]({Path(os.path.relpath(found, place)).as_posix()}{anchor})"

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
