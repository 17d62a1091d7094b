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


class ChildError(ValueError):
    """A child that ended without an answer.

    Attributes:
        exit_code: negative: the signal that ended it.
        log: its output on standard error.
    """

    def __init__(self, work: str, exit_code: int, log: str):
        said = "\n".join(line for line in log.splitlines() if line.strip())[-_MESSAGES:]
        super().__init__(
            f"{work}: the runtime refused the file, or ended its process (exit code {exit_code}): "
            f"{said or 'it said nothing.'}"
        )
        self.exit_code, self.log = exit_code, log


def ask_child(
    module: str, task: Mapping[str, Any], timeout: float, work: str, advice: str = "it more time"
) -> tuple[dict[str, Any], str]:
    """Runs `python -m MODULE FILE`: the task goes to standard input, the answer comes in FILE.

    Args:
        module: with a main program.
        task: as JSON.
        timeout: seconds until the child is ended.
        work: names the work in messages.
        advice: what to give it where it takes too long.

    Returns:
        The answer, and the child's output on standard error.

    Raises:
        ValueError: it took longer than `timeout`, or ended without an answer (`ChildError`).
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
            raise ValueError(f"{work} took longer than {timeout:.0f} s: give {advice}.") from None
        if child.returncode or not answer.is_file():
            raise ChildError(work, child.returncode, child.stderr)
        return json.loads(answer.read_text()), child.stderr
