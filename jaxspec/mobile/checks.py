"""Comparison of texts: decoding with every way of a file, next to a reference.

`gpu` compares a file on the accelerator with itself on the CPU; `benchmarks` compares it with JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxspec.core.loop import round_up
from jaxspec.core.tree import chain_paths
from jaxspec.core.types import Proposal, Warp
from jaxspec.measure.comparison import Divergence
from jaxspec.mobile.drafts import (
    Caller,
    DynamicDraft,
    common_length,
    static_proposal,
    verifies_drafts,
)
from jaxspec.mobile.filling import fill_in
from jaxspec.mobile.loops import (
    ChainsAccepted,
    HostAcceptance,
    LoopOf,
    Plain,
    Steps,
    Verified,
    verify_drafts,
    whole_steps,
)
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.runtime import Decoded, MobileModel

Way = Callable[[MobileModel, Sequence[int]], Decoded]
"""Continues a prompt with a file in one way."""


class LoopCheck(NamedTuple):
    """One way to decode with a file, next to its reference.

    Attributes:
        name: name of the loop.
        num_texts: texts that were compared.
        counts: tokens of each round of all texts, the bonus token INCLUDED; each text begins with
            the 1 that comes with its prompt. For diffusion models: decisions of each pass.
        divergences: first differences of the texts that differ.
        expected_counts: the reference's counts; `None`: it was not decoded in this way.
            Verification corrects any draft, so wrong drafts show in the counts only.
    """

    name: str
    num_texts: int
    counts: tuple[int, ...]
    divergences: tuple[Divergence, ...]
    expected_counts: tuple[int, ...] | None = None


def compare_ways(
    model: MobileModel,
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    reference: MobileModel | None = None,
) -> tuple[LoopCheck, ...]:
    """Decodes prompts in several ways and compares the texts with expected ones.

    Args:
        model: the file that is checked.
        ways: ways of decoding, by name.
        prompts: ids of the prompts.
        texts: expected ids behind each prompt.
        reference: a file that is decoded in the same ways, for the tokens of its rounds.
    """
    checks = []
    for name, way in ways.items():
        counts, expected, divergences = [], [], []
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            decoded = way(model, prompt)
            counts += decoded.counts
            ours = decoded.tokens.tolist()
            if ours != list(text):
                at = common_length(ours, text)
                divergences.append(Divergence(index, at, text[at], ours[at], None))
            if reference is not None:
                expected += way(reference, prompt).counts
        theirs = None if reference is None else tuple(expected)
        check = LoopCheck(name, len(prompts), tuple(counts), tuple(divergences), theirs)
        checks.append(check)
    return tuple(checks)


def compare_with_plain(
    model: MobileModel, reference: MobileModel, prompts: Sequence[Sequence[int]], count: int
) -> tuple[LoopCheck, ...]:
    """Decodes prompts in every way of a file and compares the texts with plain decoding.

    Args:
        model: the file where it is checked.
        reference: the same file where it is right, or `model` itself: then its own plain decoding
            is the reference, and no counts are expected.
        prompts: ids of the prompts.
        count: tokens of each text, rounded up to whole blocks for diffusion models.
    """
    manifest = model.manifest
    if manifest.diffusion is not None:
        count = whole_blocks(manifest, count)
        ways: dict[str, Way] = {"denoise": _filling(count, 0)}
        ways |= {f"round_{drafts}": _filling(count, drafts) for drafts in manifest.sizes("round")}
        texts = [ways["denoise"](reference, prompt).tokens.tolist() for prompt in prompts]
    else:
        texts = [decoding(count)(reference, prompt).tokens.tolist() for prompt in prompts]
        known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        ways = every_loop(manifest, count, known)
    other = None if reference is model else reference
    return compare_ways(model, ways, prompts, texts, other)


def whole_blocks(manifest: Manifest, count: int) -> int:
    """Rounds a number of tokens up to whole blocks of a diffusion model."""
    assert manifest.diffusion is not None, "a causal model has no blocks"
    block = manifest.diffusion["block"]
    return round_up(count, block)


def decoding(count: int, loop: LoopOf = Plain, warp: Warp | None = None) -> Way:
    """Makes a way that decodes `count` tokens, whatever stop ids come."""
    return lambda model, prompt: model.generate(prompt, count, (), loop, warp)


def _filling(count: int, drafts: int) -> Way:
    return lambda model, prompt: fill_in(model, prompt, count, (), drafts)


def every_loop(manifest: Manifest, count: int, texts: Sequence[Sequence[int]]) -> dict[str, Way]:
    """Returns ways that together call every signature of a causal model's file.

    Passes with layers left out are not among them: they are there to be timed, in kits only.
    `texts` are drafted where no function of the file drafts.
    """
    ways = {"decode": decoding(count)}
    if "step" in manifest.signatures:
        ways["step"] = decoding(count, Steps)
    for name in manifest.trees:
        ways[name] = decoding(count, partial(Steps, signature=name))
    if "step_exit" in manifest.signatures:
        ways["step_exit"] = decoding(count, partial(Steps, signature="step_exit"))
        ways["draft_1, accept"] = decoding(count, verify_drafts)
    for size in manifest.sizes("accept"):
        ways[f"accept_{size}"] = decoding(count, partial(_known_chains, texts, size))
    if "draft" in manifest.signatures:
        ways["draft, verify, commit"] = decoding(count, verify_drafts)
    if manifest.sizes("step_block"):
        ways["draft_block, step_block"] = decoding(count, whole_steps)
    if manifest.sizes("step_block_sampled"):
        one: Any = {"temperature": np.float32(1), "top_k": np.int32(1)}
        ways["draft_block, step_block_sampled"] = decoding(count, whole_steps, Warp(**one))
    if manifest.sizes("draft_block") and verifies_drafts(manifest):
        ways["draft_block, verify, commit"] = decoding(count, verify_drafts)
    sizes = manifest.sizes("verify")
    for size in sizes:
        if "draft" not in manifest.signatures or size != 1 + len(manifest.paths):
            ways[f"verify_{size}, commit_{size}"] = decoding(count, partial(_known, texts, size))
    grows = "absorb" in manifest.signatures and max(sizes, default=0) > 1
    for beam in manifest.sizes("draft") if grows else ():
        ways[f"absorb, draft_{beam}, verify, commit"] = decoding(count, partial(_growing, beam))
    if "step_sampled" in manifest.signatures:
        # With one candidate its tokens can be compared with those of the others.
        settings: Any = {"temperature": np.float32(1), "top_k": np.int32(1)}
        ways["step_sampled"] = decoding(count, Steps, Warp(**settings))
    return ways


def _known(
    texts: Sequence[Sequence[int]], size: int, model: Caller, acceptance: HostAcceptance
) -> Verified:
    return Verified(model, _KnownDraft(texts, size), acceptance)


def _known_chains(
    texts: Sequence[Sequence[int]], size: int, model: Caller, acceptance: HostAcceptance
) -> ChainsAccepted:
    del acceptance
    return ChainsAccepted(model, _KnownDraft(texts, size))


def _growing(beam: int, model: Caller, acceptance: HostAcceptance) -> Verified:
    return Verified(model, DynamicDraft(model, beam=beam), acceptance)


class _KnownDraft:
    """Drafts of known texts, so that all rows of `verify_N`, `commit_N` and `accept_N` are used."""

    absorbs = False

    def __init__(self, texts: Sequence[Sequence[int]], nodes: int):
        self._texts, self.nodes = texts, nodes
        self._offered = static_proposal(chain_paths(nodes - 1))

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        begun, tokens = list(text), np.zeros(self.nodes, np.int32)
        known = next((each for each in self._texts if each[: len(begun)] == begun), begun)
        drafted = known[len(begun) - 1 :][: self.nodes]
        tokens[: len(drafted)] = drafted
        return self._offered._replace(tokens=tokens)
