"""Programs that tests of pages need, and a driven Chromium; what is missing is said and skipped."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).resolve().parent / "mobile" / "web"
"""Folder of `browser.mjs`."""


def program(*names: str) -> str:
    """The path of the first of some programs that is there; skips if none is."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs {' or '.join(names)} on the PATH, which is not here")
    return found


class Browser:
    """A running Chromium that takes scenarios of `browser.mjs`."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def __call__(self, scenario: str, url: str, **task: Any) -> dict[str, Any]:
        line = json.dumps({"scenario": scenario, "url": url, **task})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"failed": "no answer"}')
        assert "failed" not in answer, answer["failed"]
        return answer


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A browser; its driver's packages are fetched into a folder. Skips where a part is missing."""
    node, npm = program("node"), program("npm")
    chromium = program("chromium", "chromium-browser", "google-chrome")
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(DRIVER / name, folder / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch playwright-core here: {done.stderr[-300:]}")
    process = subprocess.Popen(
        [node, str(DRIVER / "browser.mjs")],
        env={**os.environ, "PLAYWRIGHT_FOLDER": str(folder), "CHROMIUM": chromium},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Browser(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
