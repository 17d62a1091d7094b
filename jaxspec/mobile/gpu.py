"""Check that LiteRT's GPU accelerator takes a whole file and computes it right, without a phone.

The accelerator in LiteRT's package for Linux is built like the phones' and runs on any Vulkan
driver, also on SwiftShader, which needs no GPU. A file that it does not take may end its process,
and a file that it compiles may still be computed wrongly. So the check runs in a child process.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.measure.comparison import Divergence
from jaxspec.mobile.checks import LoopCheck, compare_with_plain, whole_blocks
from jaxspec.mobile.child import ask_child
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.runtime import MobileModel

TIMEOUT = 900.0
"""Seconds that a check may take."""
_NUM_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """Findings about a file on the accelerator.

    Attributes:
        signatures: compiled; all of the file.
        fully_accelerated: True if nothing falls back to the CPU.
        reference: name of the reference of all texts: plain decoding on the CPU where weights are
            float32, else on the GPU, as the two round quantized products differently.
        loops: the ways to decode that the file has.
    """

    signatures: tuple[str, ...]
    fully_accelerated: bool
    reference: str
    loops: tuple[LoopCheck, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the file must not run on a GPU; empty if it may."""
        found = [] if self.fully_accelerated else ["a part of it falls back to the CPU"]
        for loop in self.loops:
            found += [
                f"{loop.name}: prompt {each.prompt_index} differs from {self.reference} at token "
                f"{each.position}"
                for each in loop.divergences
            ]
            if loop.expected_counts not in (None, loop.counts):
                found.append(f"{loop.name}: its rounds emit more or fewer tokens than on the CPU")
        return tuple(found)

    def __str__(self) -> str:
        lines = [
            f"GPU: {len(self.signatures)} signatures compiled, "
            f"{'fully' if self.fully_accelerated else 'NOT fully'} accelerated"
        ]
        for loop in self.loops:
            lines.append(
                f"{loop.name}: {loop.num_texts - len(loop.divergences)} of {loop.num_texts} texts "
                f"equal {self.reference}; tokens per round (bonus included) {min(loop.counts)} to "
                f"{max(loop.counts)}"
            )
        return "\n".join([*lines, *self.problems])


def check_gpu(
    path: str | Path,
    prompts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = _NUM_TOKENS,
    timeout: float = TIMEOUT,
) -> GpuCheck:
    """Compiles every signature of a file for the GPU and decodes with each of its loops.

    Args:
        path: the `.tflite`.
        prompts: ids; `None`: a few short ones.
        max_new_tokens: of each text.
        timeout: seconds for the whole check.

    Raises:
        ValueError: the machine has no accelerator or driver; the file's quantization ends the
            accelerator's process; or the accelerator refused the file, with its own messages.
    """
    lacking = missing_for_gpu()
    if lacking is not None:
        raise ValueError(f"The GPU cannot be checked here: {lacking}.")
    manifest = read_manifest(path)
    check_quantization(manifest.quantization, on_gpu=True)
    prompts = _some_prompts(manifest) if prompts is None else prompts
    task = {
        "path": str(path),
        "prompts": [list(map(int, prompt)) for prompt in prompts],
        "max_new_tokens": max_new_tokens,
    }
    advice = "it more time (--gpu-timeout SECONDS), or the file fewer signatures"
    work = f"The check of {path} on LiteRT's GPU accelerator"
    answer, _ = ask_child("jaxspec.mobile.gpu", task, timeout, work, advice)
    return GpuCheck(
        tuple(manifest.signatures),
        answer["fully_accelerated"],
        answer["reference"],
        tuple(_read_loop(*loop) for loop in answer["loops"]),
    )


def _read_loop(
    name: str, num_texts: int, counts: Any, divergences: Any, expected: Any
) -> LoopCheck:
    """Reads a `LoopCheck` that was written as JSON."""
    found = tuple(Divergence(*each) for each in divergences)
    expected = None if expected is None else tuple(expected)
    return LoopCheck(name, num_texts, tuple(counts), found, expected)


def _some_prompts(manifest: Manifest) -> list[list[int]]:
    """Draws at least four prompts: one for each `prefill_N`, and one that takes several calls."""
    draws = np.random.default_rng(0)
    longest = max(2, manifest.capacity - _NUM_TOKENS)
    sizes = manifest.sizes("prefill") or (_NUM_TOKENS,)
    if manifest.diffusion is not None:
        masks = whole_blocks(manifest, _NUM_TOKENS) + 2 * manifest.diffusion["block"]
        longest = max(2, manifest.capacity - masks)
    lengths = [min(length, longest - 1) for length in (1, 5, 9, *sizes, sizes[-1] + 3)]
    prompts = [draws.integers(0, manifest.num_tokens, length) for length in lengths]
    if manifest.diffusion is not None:
        mask = manifest.diffusion["mask_token_id"]
        other = (mask + 1) % manifest.num_tokens
        prompts = [np.where(prompt == mask, other, prompt) for prompt in prompts]
    return [prompt.tolist() for prompt in prompts]


def _child() -> None:
    """Runs in the child: reads a task from standard input, writes the answer to a file."""
    task = json.load(sys.stdin)
    gpu = MobileModel(task["path"], accelerator="gpu")
    exact = gpu.manifest.quantization == "float32"
    reference = MobileModel(task["path"], num_threads=1) if exact else gpu
    loops = compare_with_plain(gpu, reference, task["prompts"], task["max_new_tokens"])
    answer = {
        "fully_accelerated": gpu.is_fully_accelerated,
        "reference": f"plain decoding on the {'CPU' if exact else 'GPU'}",
        "loops": loops,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    _child()
