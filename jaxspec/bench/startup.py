"""How long a newcomer waits.

`python -m jaxspec.bench.startup [--json]`: seconds of `import jaxspec`, and from starting
`jaxspec demo` to its first token, with an empty and with a filled compilation cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.bench.machine import this_machine
from jaxspec.progress import progress_bar

AIMS = {"import": 1.5, "first token, cold": 10.0, "first token, warm": 4.0}
# Off a terminal the demo marks what follows with a line of its own.
PLAIN_HEADING = b"# plain\n"


def measure_startup(repeats: int = 3, demo_arguments: Sequence[str] = ()) -> dict[str, float]:
    """Medians in seconds, in processes of their own; names as in `AIMS`.

    Every cold run has a cache folder of its own, in which the warm run follows it.
    """
    seconds = {name: [] for name in AIMS}
    with progress_bar(len(AIMS) * repeats) as advance:
        for _ in range(repeats):
            advance("import")
            seconds["import"].append(_import_seconds())
            with tempfile.TemporaryDirectory() as cache:
                for name in ("first token, cold", "first token, warm"):
                    advance(name)
                    seconds[name].append(_first_token_seconds(cache, demo_arguments))
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _import_seconds() -> float:
    code = "import time; t = time.perf_counter(); import jaxspec; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return float(done.stdout)


def _first_token_seconds(cache: str, demo_arguments: Sequence[str]) -> float:
    """From starting the process to the first text after the prompt."""
    command = [sys.executable, "-m", "jaxspec", "demo", *demo_arguments]
    environment = {**os.environ, "JAXSPEC_CACHE": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as demo:
        assert demo.stdout is not None
        shown = b""
        while not shown.partition(PLAIN_HEADING)[2].strip():
            piece = os.read(demo.stdout.fileno(), 4096)
            if not piece:
                raise ValueError(f"{' '.join(command)} ended without a token.")
            shown += piece
        seconds = time.perf_counter() - start
        demo.terminate()
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser("python -m jaxspec.bench.startup", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo-draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    machine = this_machine()
    models = ("--model", args.model, "--draft-model", args.draft_model)
    found: dict[str, Any] = measure_startup(args.repeats, models)
    if args.json:
        print(json.dumps({"machine": machine._asdict(), "seconds": found, "aims": AIMS}, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"on {machine}")
    for name, value in found.items():
        console.print(f"{name}: {value:.2f} s (aim: below {AIMS[name]:g} s)")


if __name__ == "__main__":
    main()
