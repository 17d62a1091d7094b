"""Chat templates: Jinja programs from outside, run in a sandbox in a process of their own.

The sandbox keeps a template from reaching anything but what it is handed. The process has little
time and memory for each rendering, so that no template runs for ever or fills the machine. It is
started with the first chat, and serves all later ones. Windows knows no such limits: there a
rendering has a minute, and its output and products are bounded, but not the rest of its memory.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bounded import Bounded, Ended

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
    try:
        answer = _PROCESS.ask({"source": source, "variables": variables})
    except Ended as ended:
        line = _last_line(ended.notes)
        raise TemplateFailure(f"it takes more than {_PROCESS.bounds}", line=line) from None
    if "text" in answer:
        return answer["text"]
    raise TemplateFailure(answer["error"], answer["refused"], answer["line"])


def _last_line(notes: str) -> int | None:
    """Returns the line of the template that a process was in when it ended, if it is known.

    Args:
        notes: lines of the template with those of the program made of it, and then the traceback
            that `faulthandler` wrote, the latest call first.
    """
    lines, _, traceback = notes.partition("\n")
    died = re.search(r'File "<template>", line (\d+)', traceback)
    if died is None:
        return None
    begun = [line for line, first in json.loads(lines) if first <= int(died[1])]
    return begun[-1] if begun else None
