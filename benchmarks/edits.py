"""`python -m benchmarks.edits`: makes `edits.jsonl.gz`, functions of the standard library to edit.

Each of the 40 rows asks for a small edit of one function and holds the edited function, which this
module makes: a target that does what it is asked writes it. So drafters that copy can be measured
without a model that follows instructions.

The functions are from CPython's standard library, version 3.11, Copyright (c) 2001-2023 Python
Software Foundation; All Rights Reserved, under the PSF License Agreement
(https://docs.python.org/3.11/license.html). The answers change them as their requests say.
"""

import ast
import gzip
import json
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

EDITS = Path(__file__).with_name("edits.jsonl.gz")
"""The set; it is part of the repository."""
MODULES = (
    *("argparse", "ast", "base64", "calendar", "code", "colorsys", "copy", "dataclasses"),
    *("difflib", "dis", "doctest", "enum", "fileinput", "filecmp", "fnmatch", "ftplib"),
    *("functools", "getopt", "getpass", "gettext", "glob", "heapq", "inspect", "linecache"),
    *("locale", "mimetypes", "nturl2path", "ntpath", "optparse", "os", "pickletools", "pkgutil"),
    *("platform", "plistlib", "posixpath", "pprint", "pyclbr", "quopri", "random", "runpy"),
    *("shlex", "shutil", "smtplib", "socket", "statistics", "subprocess", "sysconfig", "tarfile"),
    *("tempfile", "textwrap", "timeit", "tokenize", "traceback", "typing", "uuid", "warnings"),
)
"""Modules that functions are taken from, one of each."""
NUM_ROWS = 40
_LINES, _CHARACTERS = (8, 24), (350, 900)


class Edit(NamedTuple):
    """A request and the function after it."""

    request: str
    edited: str


def _renamed(source: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![.\w]){re.escape(old)}\b", new, source)


def _body_start(source: str) -> int:
    """Returns the index of the line after the function's head and docstring."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    first, *rest = function.body
    has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (rest[0] if has_text and rest else first).lineno - 1


def _with_line(source: str, line: str) -> str:
    lines = source.splitlines()
    at = _body_start(source)
    indent = re.match(r"\s*", lines[at])
    assert indent is not None, "every text has such a beginning"
    return "\n".join([*lines[:at], *textwrap.indent(line, indent[0]).splitlines(), *lines[at:]])


def rename_function(source: str, name: str, arg: str) -> Edit:
    """Asks for another name of the function."""
    new = f"{name.strip('_')}_of"
    return Edit(f"Rename `{name}` to `{new}`.", _renamed(source, name, new))


def rename_parameter(source: str, name: str, arg: str) -> Edit:
    """Asks for another name of the first parameter."""
    new = f"given_{arg}"
    return Edit(f"Rename the parameter `{arg}` to `{new}`.", _renamed(source, arg, new))


def check_parameter(source: str, name: str, arg: str) -> Edit:
    """Asks for a check at the beginning."""
    check = f'if {arg} is None:\n    raise ValueError("{arg} must not be None.")'
    request = f"Raise a ValueError at the beginning if `{arg}` is None."
    return Edit(request, _with_line(source, check))


def log_call(source: str, name: str, arg: str) -> Edit:
    """Asks for a line that logs the call."""
    line = f'logger.debug("{name}(%r)", {arg})'
    return Edit(f"Log `{arg}` with `logger.debug` at the beginning.", _with_line(source, line))


def annotate_parameter(source: str, name: str, arg: str) -> Edit:
    """Asks for an annotation."""
    edited = re.sub(rf"(\(\s*){re.escape(arg)}\b", rf"\g<1>{arg}: object", source, count=1)
    return Edit(f"Annotate the parameter `{arg}` with the type `object`.", edited)


KINDS: tuple[Callable[[str, str, str], Edit], ...] = (
    rename_parameter,
    check_parameter,
    log_call,
    rename_function,
    annotate_parameter,
)


def functions(module: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, source and first parameter of functions of a module that are of a fit size."""
    path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
    text = path.read_text(encoding="utf-8")
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef) or not function.args.args:
            continue
        source = ast.get_source_segment(text, function)
        assert source is not None, "a function has a place in its file"
        lines, name = len(source.splitlines()), function.args.args[0].arg
        keywords = {node.arg for node in ast.walk(function) if isinstance(node, ast.keyword)}
        if (
            _LINES[0] <= lines <= _LINES[1]
            and _CHARACTERS[0] <= len(source) <= _CHARACTERS[1]
            and source.isascii()
            and name not in keywords  # which a change of names would change, too
        ):
            yield function.name, source, name


def rows() -> list[dict[str, str]]:
    """Returns the rows of the set, of the Python that runs."""
    made = []
    for module in MODULES:
        name, source, arg = next(functions(module), (None, "", ""))
        if name is None or len(made) == NUM_ROWS:
            continue
        edit = KINDS[len(made) % len(KINDS)](source, name, arg)
        ast.parse(edit.edited)
        made.append(
            {
                "source": f"{module}.{name}",
                "prompt": f"{edit.request}\n\n```python\n{source}\n```\n\n",
                "answer": f"```python\n{edit.edited}\n```\n",
            }
        )
    return made


def main() -> None:
    """Writes the set."""
    version = ".".join(map(str, sys.version_info[:2]))
    made = rows()
    if version != "3.11" or len(made) != NUM_ROWS:
        raise SystemExit(
            f"{EDITS.name} is made by Python 3.11 from {NUM_ROWS} modules; this is {version}, and "
            f"{len(made)} modules have a fit function."
        )
    lines = "".join(f"{json.dumps(row)}\n" for row in made)
    EDITS.write_bytes(gzip.compress(lines.encode(), mtime=0))
    print(f"{len(made)} rows in {EDITS}")


if __name__ == "__main__":
    main()
