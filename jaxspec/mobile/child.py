"""Work in a process of its own: its memory is counted apart, and a crash there is an error here."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ChildError(Exception):
    """A child ended without an answer.

    Attributes:
        exit_code: negative: the signal that ended it.
        log: what it wrote on standard error.
    """

    def __init__(self, exit_code: int, log: str):
        super().__init__(exit_code, log)
        self.exit_code, self.log = exit_code, log


def ask_child(module: str, task: Mapping[str, Any], timeout: float) -> tuple[dict[str, Any], str]:
    """Runs `python -m MODULE FILE`: the task goes to standard input, the answer comes in FILE.

    Returns:
        The answer, and what the child wrote on standard error.

    Raises:
        ChildError: it ended without an answer.
        TimeoutError: it took more than so many seconds, and was ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        # Drivers want a place of their own; JAX, in the child too, shall stay away from GPUs.
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
