"""Ways to decode with an exported file: plain, whole steps, and drafts of the host's choice.

A loop calls signatures and reads a few integers; caches stay in the runtime's buffers. Where the
host decides what to accept, it calls the functions of `jaxspec.core` that decode in JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxspec.core.decode import narrow
from jaxspec.core.sampling import warp_logits
from jaxspec.core.types import Proposal, Verdict, Warp
from jaxspec.core.verify import follow_choices, verify, verify_greedy
from jaxspec.mobile.drafts import (
    BlockWindows,
    Caller,
    Draft,
    ExitDraft,
    ModelDraft,
    TreeDraft,
    WindowDraft,
    pending_inputs,
    static_proposal,
    verifies_drafts,
)
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.signatures.steps import LARGEST_TOP_K


class Round(NamedTuple):
    """Tokens that one call, or one round of calls, adds to a text.

    Attributes:
        tokens: the accepted drafts, then the target's own.
        num_drafted: number of tokens that were drafted.
    """

    tokens: list[int]
    num_drafted: int


class Loop(Protocol):
    """A way to continue a text whose last token is pending and whose others are cached."""

    @property
    def rows(self) -> int:
        """Most rows of the cache that a round writes, or positions that it reads."""
        ...

    @property
    def absorbs(self) -> bool:
        """False if a round does not update the cache of an EAGLE head."""
        ...

    def advance(self, text: Sequence[int], recent: int) -> Round:
        """Emits at least one token. The last `recent` tokens come from the last round."""
        ...


class HostAcceptance:
    """Acceptance of a proposal on the host, by the verification of `jaxspec.core`.

    Attributes:
        warp: settings of sampling; without temperature and bias the target's choices suffice.
    """

    def __init__(self, warp: Warp, seed: int = 0):
        if warp.penalties is not None:
            raise ValueError("warp: loops on the host apply no penalties; leave them out.")
        self.warp = warp
        self._draws = np.random.default_rng(seed)

    @property
    def follows_choices(self) -> bool:
        """True if the target's own choices decide, without its logits."""
        return self.warp.temperature is None and self.warp.bias is None

    def uniforms(self, count: int) -> np.ndarray:
        """Draws numbers in [0, 1), float32."""
        return self._draws.random(count, np.float32)

    def __call__(self, proposal: Proposal, scores: np.ndarray) -> Verdict:
        """Decides from the target's choices after each node, or from its logits when sampling."""
        if self.follows_choices:
            return jax.device_get(_follow(proposal, scores))
        uniforms = self.uniforms(len(proposal.tokens))
        return jax.device_get(_decide(uniforms, proposal, scores, self.warp))


_follow = jax.jit(follow_choices)


@jax.jit
def _decide(uniforms, proposal: Proposal, logits, warp: Warp) -> Verdict:
    warped = warp_logits(logits, warp)
    if warp.temperature is None:
        return verify_greedy(proposal, warped)
    return verify(uniforms, proposal, warped)


class Plain:
    """Plain decoding by calls of `decode`, one token a round."""

    rows = 1
    absorbs = False

    def __init__(self, model: Caller, acceptance: HostAcceptance):
        self._model, self._acceptance = model, acceptance
        self._alone = static_proposal(())

    def advance(self, text: Sequence[int], recent: int) -> Round:
        del recent
        self._model.call("decode", pending=[text[-1]], length=[len(text) - 1])
        return Round([self.choose("decode", text[-1])], 0)

    def choose(self, signature: str, root: int) -> int:
        """Returns the token that a signature's last row of logits gives, behind `root`."""
        if self._acceptance.follows_choices:
            return int(self._model.read(signature, "o_pending")[0])
        alone = self._alone._replace(tokens=np.asarray([root], np.int32))
        verdict = self._acceptance(alone, self._model.read(signature, "logits"))
        return int(verdict.next_token)


class Steps:
    """Whole steps by calls of `step`, or of `step_sampled` at a temperature.

    In files with several such steps, `signature` names the one to take.
    """

    absorbs = True

    def __init__(self, model: Caller, acceptance: HostAcceptance, signature: str = "step"):
        _check_steps_can(acceptance.warp, model.manifest)
        self._model, self._acceptance = model, acceptance
        self.rows = model.manifest.depth + 1
        self._signature = signature if acceptance.follows_choices else "step_sampled"
        self._begun = False

    def advance(self, text: Sequence[int], recent: int) -> Round:
        model, signature = self._model, self._signature
        inputs: dict[str, Any] = {"length": [len(text) - 1]}
        if not self._begun:
            inputs |= pending_inputs(model, signature, text, recent)
            first = {"threshold": [(model.manifest.drafter or {}).get("threshold")], "rate": [0]}
            inputs |= {name: first[name] for name in first if name in model.inputs(signature)}
            self._begun = True
        if signature == "step_sampled":
            inputs |= _sampling(model, signature, self._acceptance)
        model.call(signature, **inputs)
        count = int(model.read(signature, "o_count")[0])
        return Round(model.read(signature, "o_tokens")[0, :count].tolist(), count - 1)


def _sampling(model: Caller, signature: str, acceptance: HostAcceptance) -> dict[str, Any]:
    """Returns the further inputs of a sampled step: new uniforms, and settings."""
    warp, inputs = acceptance.warp, model.inputs(signature)
    draws = (name for name in ("uniforms", "draft_uniforms") if name in inputs)
    return {
        **{name: acceptance.uniforms(inputs[name]["shape"][1]) for name in draws},
        "temperature": [warp.temperature],
        "top_k": [0 if warp.top_k is None else warp.top_k],
    }


def _check_steps_can(warp: Warp, manifest: Manifest) -> None:
    beyond = setting_beyond_steps(warp, manifest)
    if beyond is not None:
        raise ValueError(
            f"{beyond}: whole steps of this file take a temperature above 0 and a top_k of at most "
            f"{_largest_top_k(manifest)}, nothing else; accept on the host instead (--loop verify, "
            "or plain)."
        )


def setting_beyond_steps(warp: Warp, manifest: Manifest) -> str | None:
    """Returns a setting that `step` and `step_sampled` cannot apply, if there is one."""
    if warp.bias is not None:
        return "bias"
    if warp.temperature is None:
        return None
    top_k = 0 if warp.top_k is None else int(warp.top_k)
    beyond = {
        "temperature": not warp.temperature > 0,
        "top_k": not 0 <= top_k <= _largest_top_k(manifest),
        "top_p": warp.top_p is not None,
        "min_p": warp.min_p is not None,
    }
    return next((name for name, found in beyond.items() if found), None)


def _largest_top_k(manifest: Manifest) -> int:
    return min(LARGEST_TOP_K, manifest.num_tokens)


class Verified:
    """Rounds that draft, call `verify_N`, accept on the host, and call `commit_N`."""

    def __init__(self, model: Caller, draft: Draft, acceptance: HostAcceptance):
        self._model, self._draft, self._acceptance = model, draft, acceptance
        self._sizes = model.manifest.sizes("verify")
        if not self._sizes or self._sizes[-1] < draft.nodes:
            raise ValueError(
                f"verify: this file verifies {list(self._sizes)} tokens at a time, and a draft has "
                f"{draft.nodes}, its root included; export it with --verify {draft.nodes}."
            )
        self.rows = next(size for size in self._sizes if size >= draft.nodes)
        self.absorbs = draft.absorbs

    def advance(self, text: Sequence[int], recent: int) -> Round:
        model, length = self._model, len(text) - 1
        proposal = self._draft(text, recent)
        used = int(np.flatnonzero(proposal.valid)[-1]) + 1
        size = next(size for size in self._sizes if size >= used)
        if size < len(proposal.tokens):
            proposal = narrow(proposal, size)
        nodes, tree = len(proposal.tokens), proposal.tree
        tokens, depths = np.zeros((2, size), np.int32)
        tokens[:nodes], depths[:nodes] = proposal.tokens, tree.depths
        visible = np.eye(size, dtype=np.int32)
        visible[:nodes, :nodes] = np.asarray(tree.ancestors) & np.asarray(proposal.valid)
        verify_n, commit_n = f"verify_{size}", f"commit_{size}"
        inputs = {"tokens": tokens, "positions": length + depths, "visible": visible}
        model.call(verify_n, length=[length], **inputs)
        wanted = "choices" if self._acceptance.follows_choices else "logits"
        verdict = self._acceptance(proposal, model.read(verify_n, wanted)[0, :nodes])
        count = int(verdict.num_emitted)
        path = np.full(size, -1, np.int32)
        path[:count] = verdict.path[:count]
        model.call(commit_n, path=path, count=[count], length=[length])
        accepted = tokens[path[1:count]].tolist()
        return Round([*accepted, int(verdict.next_token)], count - 1)


class ChainsAccepted:
    """Rounds that draft a chain and call `accept_N`, which verifies and commits it greedily."""

    absorbs = False

    def __init__(self, model: Caller, draft: Draft):
        self._model, self._draft = model, draft
        self._sizes = [size for size in model.manifest.sizes("accept") if size <= draft.nodes]
        self.rows = self._sizes[-1]

    def advance(self, text: Sequence[int], recent: int) -> Round:
        proposal = self._draft(text, recent)
        drafted = int(proposal.valid.sum()) - 1
        size = next(size for size in self._sizes if size > drafted)
        signature, tokens = f"accept_{size}", np.asarray(proposal.tokens[:size])
        self._model.call(signature, tokens=tokens, drafted=[drafted], length=[len(text) - 1])
        count = int(self._model.read(signature, "o_count")[0])
        return Round(self._model.read(signature, "o_tokens")[0, :count].tolist(), count - 1)


class BlockSteps:
    """Whole steps: a block's draft, verified in the same call.

    They are calls of `step_block_N`, or of `step_block_sampled_N` at a temperature.
    """

    absorbs = False

    def __init__(self, model: Caller, acceptance: HostAcceptance):
        self._samples = not acceptance.follows_choices
        if self._samples and not model.manifest.sizes("step_block_sampled"):
            raise ValueError(
                "temperature, bias: whole steps of this file are greedy; accept on the host "
                "instead (--loop verify, or plain)."
            )
        _check_steps_can(acceptance.warp, model.manifest)
        self._model, self._windows, self._acceptance = model, BlockWindows(model), acceptance
        self.rows = self._windows.settings.depth + 1

    def advance(self, text: Sequence[int], recent: int) -> Round:
        del recent
        size, inputs = self._windows.prepare(text)
        signature = f"step_block_{size}"
        if self._samples:
            signature = f"step_block_sampled_{size}"
            inputs |= _sampling(self._model, signature, self._acceptance)
        self._model.call(signature, pending=[text[-1]], length=[len(text) - 1], **inputs)
        count = int(self._model.read(signature, "o_count")[0])
        return Round(self._model.read(signature, "o_tokens")[0, :count].tolist(), count - 1)


LoopOf = Callable[[Caller, HostAcceptance], Loop]
"""Makes a loop over a file."""


def own_draft(model: Caller) -> Draft:
    """Makes drafts of the file's own drafter, whichever function of the file makes them."""
    if model.manifest.sizes("draft_block"):
        return WindowDraft(model)
    return ExitDraft(model) if "step_exit" in model.manifest.signatures else TreeDraft(model)


def verify_drafts(model: Caller, acceptance: HostAcceptance) -> Loop:
    """Makes the loop that verifies the drafts of the file's own drafter.

    The host accepts, unless drafts are greedy chains and the file has `accept_N`.
    """
    draft = own_draft(model)
    if acceptance.follows_choices and model.manifest.sizes("accept"):
        return ChainsAccepted(model, draft)
    return Verified(model, draft, acceptance)


def whole_steps(model: Caller, acceptance: HostAcceptance) -> Loop:
    """Makes the loop that calls the file's own steps, which accept inside."""
    of_blocks = model.manifest.sizes("step_block")
    return BlockSteps(model, acceptance) if of_blocks else Steps(model, acceptance)


def best_loop(manifest: Manifest, warp: Warp) -> LoopOf:
    """Chooses steps where they do what is asked, else drafts accepted on the host, else plain."""
    sampled = "" if warp.temperature is None else "_sampled"
    has_steps = f"step{sampled}" in manifest.signatures or manifest.sizes(f"step_block{sampled}")
    if has_steps and setting_beyond_steps(warp, manifest) is None:
        return whole_steps
    return verify_drafts if verifies_drafts(manifest) else Plain


def drafted_by(draft: Caller, num_speculative_tokens: int) -> LoopOf:
    """Makes loops that verify chains of a smaller exported model.

    The loop raises `ValueError` if that model has another tokenizer or a smaller capacity.
    """

    def loop(model: Caller, acceptance: HostAcceptance) -> Loop:
        ours, theirs = model.manifest, draft.manifest
        if (theirs.tokenizer, theirs.num_tokens) != (ours.tokenizer, ours.num_tokens):
            raise ValueError(
                f"draft: {theirs.model} was exported with another tokenizer than "
                f"{ours.model}, so its tokens mean something else; take a model that shares it."
            )
        if theirs.capacity < ours.capacity:
            raise ValueError(
                f"draft: {theirs.model} has a capacity of {theirs.capacity} tokens, too "
                f"few for the texts of {ours.model}; export it with --capacity {ours.capacity}."
            )
        return Verified(model, ModelDraft(draft, num_speculative_tokens), acceptance)

    return loop
