"""Whether LiteRT's GPU accelerator takes a file whole, and computes it right. No phone is needed.

The accelerator in LiteRT's package for Linux is built like the one for phones and runs on any
Vulkan driver, on SwiftShader too, which needs no GPU. It must be asked: a compiled file may still
be wrong, and a file that it dislikes may end its process. So all of this happens in a child.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core.types import Proposal, Warp
from jaxspec.mobile.child import ChildError, ask_child
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.filling import fill_in
from jaxspec.mobile.loops import (
    Acceptance,
    DynamicDraft,
    Loop,
    LoopOf,
    Plain,
    Steps,
    Verified,
    static_proposal,
    verifies_drafts,
)
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.runtime import MobileModel, verify_drafts, whole_steps

TIMEOUT = 900.0
"""Seconds that a check may take."""
_NUM_TOKENS = 16
_MESSAGES = 2000  # characters of a failed child's to show


class LoopCheck(NamedTuple):
    """One way to decode, on the GPU.

    name: of the loop.
    counts: tokens that its rounds emitted, the bonus token included.
    first_difference: by prompt, the first token that is not the one of plain decoding: on the CPU
        where weights are float32, on the GPU where they are not (the two backends round quantised
        products differently); `None`: all are the same.
    expected_counts: of the same loop on the CPU, where weights are float32. Whatever was drafted,
        verification mends it: only the counts show a wrong draft.
    """

    name: str
    counts: tuple[int, ...]
    first_difference: tuple[int | None, ...]
    expected_counts: tuple[int, ...] | None = None


class PassCheck(NamedTuple):
    """Known text read in one pass of `verify_N`, on the GPU.

    num_tokens: in all passes.
    num_same: tokens after which the likeliest token is that of the CPU, with the same file.
    """

    num_tokens: int
    num_same: int


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """What the accelerator made of a file.

    Attributes:
        signatures: compiled, all of the file's.
        fully_accelerated: nothing falls back to the CPU.
        reference: what tokens were compared with.
        loops: the ways to decode that the file has.
        passes: over known texts, if there were any.
    """

    signatures: tuple[str, ...]
    fully_accelerated: bool
    reference: str
    loops: tuple[LoopCheck, ...]
    passes: PassCheck | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the file must not run on a GPU; empty if it may."""
        found = [] if self.fully_accelerated else ["a part of it falls back to the CPU"]
        for loop in self.loops:
            found += [
                f"{loop.name}: prompt {prompt} differs from {self.reference} at token {at}"
                for prompt, at in enumerate(loop.first_difference)
                if at is not None
            ]
            if loop.expected_counts not in (None, loop.counts):
                found.append(f"{loop.name}: its rounds emit more or fewer tokens than on the CPU")
        if self.passes is not None and self.passes.num_same < self.passes.num_tokens:
            wrong = self.passes.num_tokens - self.passes.num_same
            found.append(f"verify_N: the likeliest token is another one than on the CPU {wrong} x")
        return tuple(found)

    def __str__(self) -> str:
        lines = [
            f"GPU: {len(self.signatures)} signatures compiled, "
            f"{'fully' if self.fully_accelerated else 'NOT fully'} accelerated"
        ]
        for loop in self.loops:
            same = sum(at is None for at in loop.first_difference)
            lines.append(
                f"{loop.name}: {same} of {len(loop.first_difference)} texts equal "
                f"{self.reference}; tokens per round (bonus included) {min(loop.counts)} to "
                f"{max(loop.counts)}"
            )
        if self.passes is not None:
            lines.append(
                f"verify_N over known text: after {self.passes.num_same} of "
                f"{self.passes.num_tokens} tokens the likeliest one is the CPU's"
            )
        return "\n".join([*lines, *self.problems])


def check_gpu(
    path: str | Path,
    prompts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = _NUM_TOKENS,
    timeout: float = TIMEOUT,
    known_texts: Sequence[Sequence[int]] = (),
) -> GpuCheck:
    """Compiles every signature of a file for the GPU and decodes with each of its loops.

    Args:
        path: the `.tflite`.
        prompts: ids; `None`: four short ones.
        max_new_tokens: of each text.
        timeout: seconds for all of it.
        known_texts: ids; the last N of each are read in one pass of the file's widest `verify_N`.

    Raises:
        ValueError: the machine has no accelerator or driver, the file has no `verify_N` that known
            texts need, it is quantised in a way that ends the accelerator's process, or the
            accelerator refused it: with its own messages.
    """
    lacking = missing_for_gpu()
    if lacking is not None:
        raise ValueError(f"The GPU cannot be checked here: {lacking}.")
    manifest = read_manifest(path)
    check_quantization(manifest.quantization, on_gpu=True)
    if known_texts and not manifest.sizes("verify"):
        raise ValueError("known_texts: this file has no verify_N; export it with --verify N.")
    prompts = _some_prompts(manifest) if prompts is None else prompts
    task = {
        "path": str(path),
        "prompts": [list(map(int, p)) for p in prompts],
        "known_texts": [list(map(int, text)) for text in known_texts],
        "max_new_tokens": max_new_tokens,
    }
    try:
        answer, _ = ask_child("jaxspec.mobile.gpu", task, timeout)
    except TimeoutError:
        raise ValueError(
            f"The GPU check of {path} took longer than {timeout:.0f} s: give it more time "
            "(--gpu-timeout SECONDS), or the file fewer signatures."
        ) from None
    except ChildError as error:
        raise ValueError(
            f"LiteRT's GPU accelerator refused {path}, or ended its process (exit code "
            f"{error.exit_code}): {_last_messages(error.log)}"
        ) from None
    loops = tuple(
        LoopCheck(name, tuple(counts), tuple(at), None if expected is None else tuple(expected))
        for name, counts, at, expected in answer["loops"]
    )
    passes = None if answer["passes"] is None else PassCheck(*answer["passes"])
    return GpuCheck(
        tuple(manifest.signatures), answer["fully_accelerated"], answer["reference"], loops, passes
    )


def _last_messages(log: str) -> str:
    wanted = [line for line in log.splitlines() if line.strip()]
    return "\n".join(wanted)[-_MESSAGES:] or "it said nothing."


def _some_prompts(manifest: Manifest) -> list[list[int]]:
    """At least four; each `prefill_N` reads one, and one takes several calls if it may."""
    draws = np.random.default_rng(0)
    longest = max(2, manifest.slots - _NUM_TOKENS)
    sizes = manifest.sizes("prefill") or (_NUM_TOKENS,)
    if manifest.diffusion is not None:
        longest = max(2, manifest.slots - _num_masks(manifest) - 2 * manifest.diffusion["block"])
    lengths = [min(length, longest - 1) for length in (1, 5, 9, *sizes, sizes[-1] + 3)]
    prompts = [draws.integers(0, manifest.num_tokens, n) for n in lengths]
    if manifest.diffusion is not None:
        mask = manifest.diffusion["mask_token_id"]
        prompts = [
            np.where(prompt == mask, (mask + 1) % manifest.num_tokens, prompt) for prompt in prompts
        ]
    return [prompt.tolist() for prompt in prompts]


def _num_masks(manifest: Manifest, count: int = _NUM_TOKENS) -> int:
    """`count`, rounded up to whole blocks."""
    assert manifest.diffusion is not None, "only these are filled in"
    block = manifest.diffusion["block"]
    return -(-count // block) * block


def _loops(manifest: Manifest, texts: Sequence[Sequence[int]]) -> dict[str, tuple[LoopOf, Warp]]:
    """The ways to decode that a file has, by the signatures they call: every one of the file's.

    `texts` are foretold where nothing of the file drafts.
    """
    loops: dict[str, tuple[LoopOf, Warp]] = {"decode": (Plain, Warp())}
    if "step" in manifest.signatures:
        loops["step"] = Steps, Warp()
    if "draft" in manifest.signatures:
        loops["draft, verify, commit"] = verify_drafts, Warp()
    if manifest.sizes("step_block"):
        loops["draft_block, step_block"] = whole_steps, Warp()
    if manifest.sizes("draft_block") and verifies_drafts(manifest):
        loops["draft_block, verify, commit"] = verify_drafts, Warp()
    sizes = manifest.sizes("verify")
    for size in sizes:
        if "draft" not in manifest.signatures or size != 1 + len(manifest.paths):
            loops[f"verify_{size}, commit_{size}"] = partial(_foretelling, texts, size), Warp()
    for beam in manifest.sizes("draft") if max(sizes, default=0) > 1 else ():
        loops[f"absorb, draft_{beam}, verify, commit"] = partial(_growing, beam), Warp()
    if "step_sampled" in manifest.signatures:
        # Of one candidate, so that its tokens can be compared with those of the others.
        settings: Any = {"temperature": np.float32(1), "top_k": np.int32(1)}
        loops["step_sampled"] = Steps, Warp(**settings)
    return loops


def _foretelling(
    texts: Sequence[Sequence[int]], size: int, model: MobileModel, acceptance: Acceptance
) -> Loop:
    return Verified(model, _Foretold(texts, size), acceptance)


def _growing(beam: int, model: MobileModel, acceptance: Acceptance) -> Loop:
    return Verified(model, DynamicDraft(model, beam=beam), acceptance)


class _Foretold:
    """Drafts what is known to follow: all rows of `verify_N` and `commit_N` are used."""

    absorbs = False

    def __init__(self, texts: Sequence[Sequence[int]], nodes: int):
        self._texts, self.nodes = texts, nodes
        self._offered = static_proposal([(0,) * depth for depth in range(1, nodes)])

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        begun, tokens = list(text), np.zeros(self.nodes, np.int32)
        known = next((each for each in self._texts if each[: len(begun)] == begun), begun)
        drafted = known[len(begun) - 1 :][: self.nodes]
        tokens[: len(drafted)] = drafted
        return self._offered._replace(tokens=tokens)


def _child() -> None:
    """What runs in the child: reads a task from standard input, writes a result."""
    task = json.load(sys.stdin)
    gpu = MobileModel(task["path"], accelerator="gpu")
    exact = gpu.manifest.quantization == "float32"
    reference = MobileModel(task["path"], num_threads=1) if exact else gpu
    compare = compare_loops if gpu.manifest.diffusion is None else compare_fillings
    loops = compare(gpu, reference, task["prompts"], task["max_new_tokens"])
    passes = None
    if task["known_texts"]:
        cpu = reference if exact else MobileModel(task["path"], num_threads=1)
        passes = _check_passes(gpu, cpu, task["known_texts"])
    answer = {
        "passes": passes,
        "fully_accelerated": gpu.is_fully_accelerated,
        "reference": "plain decoding on the CPU" if exact else "plain decoding on the GPU",
        "loops": loops,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


def compare_loops(
    model: MobileModel, reference: MobileModel, prompts: Sequence[Sequence[int]], count: int
) -> list[LoopCheck]:
    """Decodes some prompts with each loop of a file.

    Args:
        model: the file where it is checked.
        reference: where it is right; `model` itself: its plain decoding is, and no counts are.
        prompts: ids.
        count: tokens of each text.
    """
    plain = [reference.generate(prompt, count, (), Plain).tokens.tolist() for prompt in prompts]
    texts = [[*prompt, *following] for prompt, following in zip(prompts, plain, strict=True)]
    checks = []
    for name, (loop, warp) in _loops(model.manifest, texts).items():
        counts, expected, differences = [], [], []
        for prompt, theirs in zip(prompts, plain, strict=True):
            ours = model.generate(prompt, count, (), loop, warp)
            counts += ours.counts
            pairs = enumerate(zip(ours.tokens.tolist(), theirs, strict=True))
            differences.append(next((at for at, (one, other) in pairs if one != other), None))
            if reference is not model:
                expected += reference.generate(prompt, count, (), loop, warp).counts
        expected_counts = tuple(expected) if expected else None
        checks.append(LoopCheck(name, tuple(counts), tuple(differences), expected_counts))
    return checks


def compare_fillings(
    model: MobileModel, reference: MobileModel, prompts: Sequence[Sequence[int]], count: int
) -> list[LoopCheck]:
    """The same for a diffusion language model: stepwise, and with each of its rounds.

    Counts are decisions of a pass. Args as of `compare_loops`; `count` is rounded up to blocks.
    """
    count = _num_masks(model.manifest, count)
    stepwise = [fill_in(reference, prompt, count, (), 0).tokens.tolist() for prompt in prompts]
    checks = []
    for drafts in (0, *model.manifest.sizes("round")):
        counts, expected, differences = [], [], []
        for prompt, theirs in zip(prompts, stepwise, strict=True):
            ours = fill_in(model, prompt, count, (), drafts)
            counts += ours.counts
            pairs = enumerate(zip(ours.tokens.tolist(), theirs, strict=True))
            differences.append(next((at for at, (one, other) in pairs if one != other), None))
            if reference is not model:
                expected += fill_in(reference, prompt, count, (), drafts).counts
        name = f"round_{drafts}" if drafts else "denoise"
        expected_counts = tuple(expected) if expected else None
        checks.append(LoopCheck(name, tuple(counts), tuple(differences), expected_counts))
    return checks


def _check_passes(gpu: MobileModel, cpu: MobileModel, texts: Sequence[Sequence[int]]) -> PassCheck:
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


if __name__ == "__main__":
    _child()
