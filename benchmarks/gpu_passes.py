"""Known texts, each read in one pass of `verify_N` on LiteRT's GPU accelerator and on the CPU."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.mobile.child import ask_child
from jaxspec.mobile.runtime import MobileModel


class PassCheck(NamedTuple):
    """Agreement of the GPU with the CPU on known texts.

    Attributes:
        num_tokens: in all passes.
        num_same: tokens after which the likeliest token is that of the CPU with the same file.
    """

    num_tokens: int
    num_same: int


def check_passes(path: str | Path, texts: Sequence[Sequence[int]], timeout: float) -> PassCheck:
    """Reads the last N tokens of each text in one pass of the file's widest `verify_N`.

    Args:
        path: the `.tflite`.
        texts: ids, more than N of each.
        timeout: seconds for all passes.

    Raises:
        ValueError: the accelerator refused the file, or took longer.
    """
    task = {"path": str(path), "texts": [list(map(int, text)) for text in texts]}
    work = f"Passes of {path} on LiteRT's GPU accelerator"
    return PassCheck(**ask_child("benchmarks.gpu_passes", task, timeout, work)[0])


def compare_passes(gpu: MobileModel, cpu: MobileModel, texts: Sequence[Sequence[int]]) -> PassCheck:
    """Reads the texts with both and compares the target's choices after each token."""
    size = gpu.manifest.sizes("verify")[-1]
    below = np.tril(np.ones((size, size), np.int32))
    same = 0
    for text in texts:
        start = len(text) - size
        inputs = {
            "tokens": text[start:],
            "positions": np.arange(start, len(text)),
            "visible": below,
            "length": [start],
        }
        choices = []
        for model in (gpu, cpu):
            model.prefill(text[:start])
            model.call(f"verify_{size}", **inputs)
            choices.append(model.read(f"verify_{size}", "choices"))
        same += int(np.sum(choices[0] == choices[1]))
    return PassCheck(size * len(texts), same)


def _child() -> None:
    task = json.load(sys.stdin)
    gpu = MobileModel(task["path"], accelerator="gpu")
    cpu = MobileModel(task["path"], num_threads=1)
    checked = compare_passes(gpu, cpu, task["texts"])
    Path(sys.argv[1]).write_text(json.dumps(checked._asdict()))


if __name__ == "__main__":
    _child()
