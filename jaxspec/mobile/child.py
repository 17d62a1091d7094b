"""Work in a child process: its memory is counted apart, and a crash there is an error here."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MESSAGES = 2000  # characters of a failed child's that are shown


class ChildError(Exception):
    """A child that ended without an answer.

    Attributes:
        exit_code: negative: the signal that ended it.
        log: its output on standard error.
    """

    def __init__(self, exit_code: int, log: str):
        super().__init__(exit_code, log)
        self.exit_code, self.log = exit_code, log

    @property
    def last_messages(self) -> str:
        """End of the log, without empty lines."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "\n".join(lines)[-_MESSAGES:] or "it said nothing."


def ask_child(module: str, task: Mapping[str, Any], timeout: float) -> tuple[dict[str, Any], str]:
    """Runs `python -m MODULE FILE`: the task goes to standard input, the answer comes in FILE.

    Args:
        module: with a main program.
        task: as JSON.
        timeout: seconds until the child is ended.

    Returns:
        The answer, and the child's output on standard error.

    Raises:
        ChildError: it ended without an answer.
        TimeoutError: it took longer than `timeout`.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        # Drivers want a folder; JAX, in the child too, must leave GPUs alone.
        runtime = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", folder)}
        try:
            child = subprocess.run(
                [sys.executable, "-m", module, str(answer)],
                input=json.dumps(task),
                env={**os.environ, **runtime, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{module} took longer than {timeout:.0f} s") from None
        if child.returncode or not answer.is_file():
            raise ChildError(child.returncode, child.stderr)
        return json.loads(answer.read_text()), child.stderr
