"""The three ways to decode with an exported file: plain, draft-verify-commit, and whole steps.

A loop calls signatures and sees a few integers; caches stay in the runtime's buffers. Where the
host decides what to accept, it does so by the functions of `core` that decode in JAX.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.decode import narrow
from jaxspec.core.proposal import tree_proposal
from jaxspec.core.sampling import warp_logits
from jaxspec.core.tree import chain, traced_tree, tree_from_paths
from jaxspec.core.types import Context, KVCache, Params, Proposal, Recent, Verdict, Warp
from jaxspec.core.verify import follow_choices, verify, verify_greedy
from jaxspec.drafters import PromptLookup
from jaxspec.drafters.block import BlockSettings, Choices
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.signatures import LARGEST_TOP_K

if TYPE_CHECKING:
    from jaxspec.mobile.runtime import MobileModel


class Emitted(NamedTuple):
    """What one call, or one round of calls, adds to a text.

    tokens: the accepted drafts, then the target's own.
    num_drafted: how many of them were drafted.
    """

    tokens: list[int]
    num_drafted: int


class Loop(Protocol):
    """A way to go on with a text whose last token is pending and whose others are cached."""

    @property
    def rows(self) -> int:
        """Rows of the cache that a round writes, or positions that it reads, at most."""
        ...

    @property
    def absorbs(self) -> bool:
        """False if a round leaves the cache of an EAGLE head behind."""
        ...

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
        """Emits at least one token. `recent` tokens of the text are of the last round."""
        ...


class Draft(Protocol):
    """Drafts on the host, or by calls of its own."""

    @property
    def nodes(self) -> int:
        """Of every proposal, the root included."""
        ...

    @property
    def absorbs(self) -> bool:
        """False if the file's EAGLE head, if it has one, does not see the last round."""
        ...

    def __call__(self, text: Sequence[int], recent: int) -> Proposal: ...


class Acceptance:
    """Decides on the host what stands of a proposal, by the verification of `core`.

    Attributes:
        warp: how to sample; without a temperature and a bias the target's choices suffice.
    """

    def __init__(self, warp: Warp, seed: int = 0):
        self.warp = warp
        self._draws = np.random.default_rng(seed)

    @property
    def follows_choices(self) -> bool:
        return self.warp.temperature is None and self.warp.bias is None

    def uniforms(self, count: int) -> np.ndarray:
        return self._draws.random(count, np.float32)

    def __call__(self, proposal: Proposal, scores: np.ndarray) -> Verdict:
        """A verdict from the target's choices after each node, or else from its logits."""
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
    """Calls `decode`: one token a round. The first token of a text is chosen in the same way."""

    rows = 1
    absorbs = False

    def __init__(self, model: "MobileModel", acceptance: Acceptance):
        self._model, self._acceptance = model, acceptance
        self._alone = static_proposal(())

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
        del recent
        self._model.call("decode", pending=[text[-1]], length=[len(text) - 1])
        return Emitted([self.choose("decode", text[-1])], 0)

    def choose(self, signature: str, root: int) -> int:
        """The token that a signature's logits of one row give, by a tree of a root alone."""
        if self._acceptance.follows_choices:
            return int(self._model.read(signature, "o_pending")[0])
        alone = self._alone._replace(tokens=np.asarray([root], np.int32))
        verdict = self._acceptance(alone, self._model.read(signature, "logits"))
        return int(verdict.next_token)


class Steps:
    """Calls `step`, or `step_sampled` at a temperature, and reads what was emitted.

    Of files with several trees, `signature` names the one to draft over.
    """

    absorbs = True

    def __init__(self, model: "MobileModel", acceptance: Acceptance, signature: str = "step"):
        beyond = setting_beyond_steps(acceptance.warp, model.manifest)
        if beyond is not None:
            raise ValueError(
                f"{beyond}: whole steps of this file take a temperature above 0 and a top_k of at "
                f"most {_largest_top_k(model.manifest)}, nothing else; accept on the host instead "
                "(--loop verify, or plain)."
            )
        self._model, self._acceptance = model, acceptance
        self.rows = model.manifest.depth + 1
        self._signature = signature if acceptance.follows_choices else "step_sampled"
        self._begun = False

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
        model, signature = self._model, self._signature
        inputs: dict[str, Any] = {"length": [len(text) - 1]}
        if not self._begun:
            inputs |= pending_inputs(model, signature, text, recent)
            self._begun = True
        if signature == "step_sampled":
            warp = self._acceptance.warp
            inputs |= {
                "uniforms": self._acceptance.uniforms(1 + len(model.manifest.paths)),
                "temperature": [warp.temperature],
                "top_k": [0 if warp.top_k is None else warp.top_k],
            }
        model.call(signature, **inputs)
        count = int(model.read(signature, "o_count")[0])
        return Emitted(model.read(signature, "o_tokens")[0, :count].tolist(), count - 1)


def setting_beyond_steps(warp: Warp, manifest: Manifest) -> str | None:
    """The setting that `step` and `step_sampled` would ignore or get wrong, if there is one."""
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
    """Drafts, calls `verify_N`, decides on the host, calls `commit_N`."""

    def __init__(self, model: "MobileModel", draft: Draft, acceptance: Acceptance):
        self._model, self._draft, self._acceptance = model, draft, acceptance
        self._sizes = model.manifest.sizes("verify")
        if not self._sizes or self._sizes[-1] < draft.nodes:
            raise ValueError(
                f"verify: this file verifies {list(self._sizes)} tokens at a time, and a draft has "
                f"{draft.nodes}, its root included; export it with --verify {draft.nodes}."
            )
        self.rows = next(size for size in self._sizes if size >= draft.nodes)
        self.absorbs = draft.absorbs

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
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
        return Emitted([*accepted, int(verdict.next_token)], count - 1)


def pending_inputs(
    model: "MobileModel", signature: str, text: Sequence[int], recent: int
) -> dict[str, Any]:
    """What a signature that drafts takes of the last round, as far as it takes it."""
    levels = model.manifest.depth + 1
    tokens = np.zeros(levels, np.int32)
    tokens[:recent] = text[len(text) - recent :]
    given = {"tokens": tokens, "count": [recent], "pending": [text[-1]]}
    return {name: given[name] for name in given if name in model.inputs(signature)}


class TreeDraft:
    """Calls `draft`: what the file's own drafter offers, over its static tree."""

    absorbs = True

    def __init__(self, model: "MobileModel"):
        self._model, self._offered = model, static_proposal(model.manifest.paths)
        self.nodes = 1 + len(model.manifest.paths)

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        inputs = pending_inputs(self._model, "draft", text, recent)
        self._model.call("draft", length=[len(text) - 1], **inputs)
        return self._offered._replace(tokens=self._model.read("draft", "drafted")[0])


class LookupDraft:
    """`PromptLookup`, which needs no weights."""

    absorbs = False

    def __init__(self, lookup: PromptLookup, slots: int):
        self.nodes = lookup.tree_shape[0]
        self._lookup, self._slots = lookup, slots

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        tokens = np.zeros(self._slots, np.int32)
        tokens[: len(text)] = text
        return jax.device_get(_look_up(self._lookup, tokens, np.int32(len(text))))


@partial(jax.jit, static_argnames="lookup")
def _look_up(lookup: PromptLookup, tokens, length) -> Proposal:
    none: Any = np.zeros(0, np.float32)
    recent, cache = Recent(none, none, none, none), KVCache((), length)
    no_stops: Any = np.full(1, -1, np.int32)
    context = Context(tokens, length, length, no_stops, Warp(), cache, recent)
    proposal, _ = lookup.propose(Params((), ()), jax.random.key(0), (), context)
    return proposal


class ModelDraft:
    """A smaller exported model drafts a chain, one `decode` at a time."""

    absorbs = False

    def __init__(self, draft: "MobileModel", num_speculative_tokens: int):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}."
            )
        self.nodes = num_speculative_tokens + 1
        chained = tuple((0,) * depth for depth in range(1, num_speculative_tokens + 1))
        self._draft, self._offered = draft, static_proposal(chained)
        self._cached: list[int] = []

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        draft, count = self._draft, self.nodes - 1
        if len(text) + count > draft.manifest.slots:
            raise ValueError(
                f"draft model: it was exported with {draft.manifest.slots} slots, too few for a "
                f"text of {len(text)} tokens and {count} drafted ones; export it with more."
            )
        start = common_length(self._cached, text[:-1])
        tokens = [draft.prefill(text, start)]
        while len(tokens) < count:
            length = len(text) + len(tokens) - 1
            draft.call("decode", pending=[tokens[-1]], length=[length])
            tokens.append(int(draft.read("decode", "o_pending")[0]))
        self._cached = [*text, *tokens[:-1]]
        return self._offered._replace(tokens=np.asarray([text[-1], *tokens], np.int32))


def drafted_by(draft: "MobileModel", num_speculative_tokens: int) -> "LoopOf":
    """Verifies the chains of a smaller exported model.

    The loop raises a `ValueError` where that model reads other tokens, or shorter texts.
    """

    def loop(model: "MobileModel", acceptance: Acceptance) -> Loop:
        ours, theirs = model.manifest, draft.manifest
        if (theirs.tokenizer, theirs.num_tokens) != (ours.tokenizer, ours.num_tokens):
            raise ValueError(
                f"--draft-model: {theirs.model} was exported with another tokenizer than "
                f"{ours.model}, so its tokens mean something else; take a model that shares it."
            )
        if theirs.slots < ours.slots:
            raise ValueError(
                f"--draft-model: {theirs.model} was exported with {theirs.slots} slots, too few "
                f"for the texts of {ours.model}; export it with --slots {ours.slots}."
            )
        return Verified(model, ModelDraft(draft, num_speculative_tokens), acceptance)

    return loop


class DynamicDraft:
    """`drafters.Eagle2` driven from the host: the head's confidence shapes each tree.

    The head runs once per level, `draft_N` over a beam of N nodes, and between calls the host
    chooses what to expand. As deep as the file's static tree.
    """

    absorbs = True

    def __init__(self, model: "MobileModel", num_nodes: int | None = None, beam: int | None = None):
        """`num_nodes` of each tree, else all that fit into `verify_N`; `beam`: N of `draft_N`."""
        sizes = model.manifest.sizes("draft")
        if not sizes:
            raise ValueError("levels: this file has no draft_N; export it with --levels N.")
        self._beam = sizes[-1] if beam is None else beam
        self._levels = model.manifest.depth
        children = model.manifest.signatures["absorb"]["outputs"]["children"]["shape"][-1]
        self._children = created = min(children, self._beam)
        candidates = created
        for _ in range(1, self._levels):
            created = min(created, self._beam) * self._children
            candidates += created
        if num_nodes is None:
            widest = max(model.manifest.sizes("verify"), default=0)
            num_nodes = max(1, min(candidates, widest - 1))
        if num_nodes > candidates:
            raise ValueError(
                f"num_nodes must be at most {candidates}, what a beam of {self._beam} ever "
                f"considers, got {num_nodes}."
            )
        self._model, self._num_nodes, self.nodes = model, num_nodes, num_nodes + 1

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        tokens, parents, scores = self._expand(text, recent)
        # A child never scores above its parent, and a stable order takes what came first on ties.
        kept = np.sort(np.argsort(-scores, kind="stable")[: self._num_nodes])
        above = np.where(parents[kept] < 0, 0, np.searchsorted(kept, parents[kept]) + 1)
        every_node: Any = np.ones(self.nodes, bool)
        branch = min(self._children, self._num_nodes)
        tree = _grown(np.asarray([-1, *above], np.int32), every_node, self._levels, branch)
        nodes: Any = np.asarray([text[-1], *tokens[kept]], np.int32)
        no_law: Any = np.zeros(self.nodes, np.int32)
        return Proposal(nodes, jax.device_get(tree), every_node, None, no_law)

    def _expand(
        self, text: Sequence[int], recent: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every child that the beam considers, in the order of their creation; see `Eagle2`."""
        model, beam, width = self._model, self._beam, self._children
        draft_n, length = f"draft_{beam}", len(text) - 1
        inputs = pending_inputs(model, "absorb", text, recent)
        model.call("absorb", length=[length], **inputs)
        state = model.read("absorb", "state")[0]
        tokens = model.read("absorb", "children")[0, 0, :width]
        scores = model.read("absorb", "logprobs")[0, 0, :width]
        pool = [(tokens, np.full(width, -1), scores)]
        places = np.arange(beam)  # of the beam's nodes among the candidates
        states = np.tile(state, (beam, 1))
        slots = model.inputs(draft_n)["scratch_k_0"]["shape"][2]
        above = np.zeros((beam, slots), np.int32)  # which nodes of earlier beams each descends from
        tokens, scores = _padded(tokens, beam), _padded(scores, beam, -np.inf)
        created_before = width
        for level in range(1, self._levels):
            at = (level - 1) * beam
            model.call(
                draft_n,
                tokens=tokens,
                states=states,
                position=[length + level - 1],
                length=[length],
                drafted=[at],
                visible=np.concatenate([above, np.eye(beam, dtype=np.int32)], axis=1),
            )
            children = model.read(draft_n, "children")[0, :, :width]
            logprobs = model.read(draft_n, "logprobs")[0, :, :width]
            parents = np.repeat(places, width)
            created = children.reshape(-1), parents, (scores[:, None] + logprobs).reshape(-1)
            pool.append(created)
            best = np.argsort(-created[2], kind="stable")[:beam]
            tokens, scores = created[0][best], created[2][best]
            places, chosen = created_before + best, best // width
            created_before += beam * width
            states = model.read(draft_n, "next_states")[0][chosen]
            above[np.arange(beam), at + np.arange(beam)] = 1
            above = above[chosen]
        columns = zip(*pool, strict=True)
        tokens, parents, scores = (np.concatenate(column) for column in columns)
        return tokens, parents, scores


_grown = jax.jit(traced_tree, static_argnames=("max_depth", "branch"))


def _padded(row: np.ndarray, length: int, value: float = 0) -> np.ndarray:
    return np.concatenate([row, np.full(length - len(row), value, row.dtype)])


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class BlockWindows:
    """What a drafter of blocks has read of a text, and the window that it reads next.

    It keeps finished blocks; what came since it reads in the smallest window of N slots that holds
    it, and a prompt's blocks in the largest, by calls of `draft_block_N`.

    Attributes:
        settings: of the drafter.
        mask: never drafted.
    """

    def __init__(self, model: "MobileModel"):
        self.settings = block_settings(model.manifest)
        diffusion = (model.manifest.drafter or {})["diffusion"]
        self.mask, self._shift = diffusion["mask_token_id"], int(diffusion["shift"])
        self._own_block = diffusion["block"]
        self._model, self._sizes = model, model.manifest.sizes("draft_block")
        self._text: list[int] = []
        self._kept = 0

    def prepare(self, text: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """The slots of the last window of a text, and the inputs of a call that reads it."""
        own, length, largest = self._own_block, len(text), self._sizes[-1]
        kept = min(self._kept, common_length(self._text, text)) // own * own
        finished = (length - 1) // own * own
        end = -(-(length + self.settings.block) // own) * own
        while end - kept > largest:
            self._model.call(f"draft_block_{largest}", **self._window(text, largest, kept, 0))
            kept = min(kept + largest, finished)
        size = next(size for size in self._sizes if size >= end - kept)
        self._text, self._kept = list(text), finished
        return size, self._window(text, size, kept, length - kept - self._shift)

    def _window(self, text: Sequence[int], size: int, kept: int, first: int) -> dict[str, Any]:
        slots = np.arange(kept, kept + size)
        window = np.full(size, self.mask, np.int32)
        known = text[kept : kept + size]
        window[: len(known)] = known
        blocks = slots // self._own_block
        # Masks behind the last block are seen by themselves alone.
        visible = (blocks[:, None] >= blocks[None]).astype(np.int32)
        return {"window": window, "start": [kept], "first": [first], "visible": visible}


def block_settings(manifest: Manifest) -> BlockSettings:
    """How the drafter of blocks that a file was made with drafts."""
    described = manifest.drafter or {}
    names = [field.name for field in dataclasses.fields(BlockSettings)]
    settings = {name: described[name] for name in names if name in described}
    if settings.get("paths") is not None:
        settings["paths"] = tuple(map(tuple, settings["paths"]))
    return BlockSettings(**settings)


def verifies_drafts(manifest: Manifest) -> bool:
    """Whether a file drafts for the host, and verifies as many tokens as that drafts."""
    if "draft" in manifest.signatures:
        nodes = 1 + len(manifest.paths)
    elif manifest.sizes("draft_block"):
        nodes = block_settings(manifest).tree_shape[0]
    else:
        return False
    return max(manifest.sizes("verify"), default=0) >= nodes


class BlockDraft:
    """Calls `draft_block_N`: a diffusion model's whole block, as a chain or a tree.

    Drafts are deterministic, so that any acceptance does.
    """

    absorbs = False

    def __init__(self, model: "MobileModel"):
        self._model, self._windows = model, BlockWindows(model)
        self.nodes = self._windows.settings.tree_shape[0]

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        size, inputs = self._windows.prepare(text)
        signature = f"draft_block_{size}"
        self._model.call(signature, **inputs)
        tokens = self._model.read(signature, "children")[0]
        logprobs = self._model.read(signature, "logprobs")[0]
        tokens, logprobs = _without_token(tokens, logprobs, self._windows.mask)
        return jax.device_get(_offer(self._windows.settings, tokens, logprobs, np.int32(text[-1])))


class BlockSteps:
    """Calls `step_block_N`: such a draft over a static tree, verified greedily in the same call."""

    absorbs = False

    def __init__(self, model: "MobileModel", acceptance: Acceptance):
        if not acceptance.follows_choices:
            raise ValueError(
                "temperature, bias: whole steps of this file are greedy; accept on the host "
                "instead (--loop verify, or plain)."
            )
        self._model, self._windows = model, BlockWindows(model)
        self.rows = self._windows.settings.depth + 1

    def advance(self, text: Sequence[int], recent: int) -> Emitted:
        del recent
        size, inputs = self._windows.prepare(text)
        signature = f"step_block_{size}"
        self._model.call(signature, pending=[text[-1]], length=[len(text) - 1], **inputs)
        count = int(self._model.read(signature, "o_count")[0])
        return Emitted(self._model.read(signature, "o_tokens")[0, :count].tolist(), count - 1)


def _without_token(
    tokens: np.ndarray, logprobs: np.ndarray, token: int
) -> tuple[np.ndarray, np.ndarray]:
    """All but one of the likeliest of each position: without a token, or else the last.

    Probabilities are those without the token.
    """
    found = tokens == token
    places = np.argsort(np.where(found, tokens.shape[1], np.arange(tokens.shape[1])), axis=1)
    kept = places[:, :-1]
    share = np.sum(np.where(found, np.exp(logprobs), 0.0), axis=1, keepdims=True)
    rest = np.log(np.maximum(1.0 - share, np.finfo(np.float32).tiny))
    picked = np.take_along_axis(logprobs, kept, 1) - rest
    return np.take_along_axis(tokens, kept, 1).astype(np.int32), picked.astype(np.float32)


@partial(jax.jit, static_argnames="settings")
def _offer(settings: BlockSettings, tokens, logprobs, root) -> Proposal:
    return settings.offer(Choices(tokens, logprobs), root, drawn=False)


def static_proposal(paths: Sequence[tuple[int, ...]]) -> Proposal:
    """A static tree of tokens that are yet to come, on the host."""
    tree = tree_from_paths(paths) if paths else chain(0)
    nodes = len(tree.parents)
    proposal = tree_proposal(tree, jnp.zeros(nodes, jnp.int32), jnp.ones(nodes, bool))
    return jax.device_get(proposal)


LoopOf = Callable[["MobileModel", Acceptance], Loop]
