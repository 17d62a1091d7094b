"""Chat templates: Jinja programs from outside, run in a sandbox in a process of their own.

The sandbox keeps a template from reaching anything but what it is handed. The process has little
time and memory for each rendering, so that no template runs for ever or fills the machine. It is
started with the first chat, and serves all later ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bounded import Bounded

# A long conversation takes some thousandths of a second.
_PROCESS = Bounded(str(Path(__file__).with_name("rendering.py")), seconds=2, memory=1 << 30)


class TemplateFailure(Exception):
    """A template that refused what it was given, failed on it, or took too long.

    Attributes:
        refused: it says no, or does what the sandbox forbids; else it failed.
        line: of the template; `None` if it is not known.
    """

    def __init__(self, message: str, refused: bool = True, line: int | None = None):
        super().__init__(message)
        self.refused, self.line = refused, line


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Returns what a template makes of variables, which are plain JSON values.

    Raises:
        TemplateFailure: saying why.

    Example:
        >>> render("{% for role in roles %}{{ role }}: {% endfor %}", {"roles": ["user", "model"]})
        'user: model: '
    """
    answer = _PROCESS.ask({"source": source, "variables": variables})
    if answer is None:
        raise TemplateFailure(f"it takes more than {_PROCESS.bounds}")
    if "text" in answer:
        return answer["text"]
    raise TemplateFailure(answer["error"], answer["refused"], answer["line"])
