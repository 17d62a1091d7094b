"""Drafts for the host's loops: by functions of a file, by prompt lookup, by a second file."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.proposal import tree_proposal
from jaxspec.core.tree import chain, chain_paths, traced_tree, tree_from_paths
from jaxspec.core.types import Context, KVCache, Params, Proposal, Recent, Warp
from jaxspec.drafters import AdaptiveExit, PromptLookup
from jaxspec.drafters.block import Acceptance, AdaptiveBlock, BlockSettings, Choices
from jaxspec.mobile.manifest import Manifest


class Caller(Protocol):
    """An open file, as drafts and loops call it; see `runtime.MobileModel`."""

    @property
    def manifest(self) -> Manifest:
        """Settings of the file."""
        ...

    def inputs(self, signature: str) -> Mapping[str, Any]:
        """Returns shape and dtype of each input of a signature."""
        ...

    def call(self, signature: str, **inputs: np.ndarray | Sequence[int]) -> None:
        """Runs a signature on the state, after some of it is set to new values."""
        ...

    def read(self, signature: str, output: str) -> np.ndarray:
        """Returns an output of the last call of a signature."""
        ...

    def prefill(self, prompt: Sequence[int], start: int = 0) -> int:
        """Reads a prompt from its token `start` on and returns the next token."""
        ...


class Draft(Protocol):
    """A source of drafts: computed on the host, or by calls to a file."""

    @property
    def nodes(self) -> int:
        """Number of nodes of every proposal, the root included."""
        ...

    @property
    def absorbs(self) -> bool:
        """False if an EAGLE head in the file does not see the last round."""
        ...

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        """Drafts behind a text; its last `recent` tokens come from the last round."""
        ...


def pending_inputs(
    model: Caller, signature: str, text: Sequence[int], recent: int
) -> dict[str, Any]:
    """Returns those of `tokens`, `count`, `pending` and `text` that a drafting signature takes."""
    levels = model.manifest.depth + 1
    tokens = np.zeros(levels, np.int32)
    tokens[:recent] = text[len(text) - recent :]
    given = {"tokens": tokens, "count": [recent], "pending": [text[-1]]}
    inputs = model.inputs(signature)
    if "text" in inputs:
        given["text"] = np.zeros(inputs["text"]["shape"], np.int32)
        given["text"][0, : len(text)] = text
    return {name: given[name] for name in given if name in inputs}


class TreeDraft:
    """Drafts of the file's own drafter over its static tree, by calls of `draft`."""

    absorbs = True

    def __init__(self, model: Caller):
        self._model, self._offered = model, static_proposal(model.manifest.paths)
        self.nodes = 1 + len(model.manifest.paths)

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        inputs = pending_inputs(self._model, "draft", text, recent)
        self._model.call("draft", length=[len(text) - 1], **inputs)
        return self._offered._replace(tokens=self._model.read("draft", "drafted")[0])


class ExitDraft:
    """Chains of a model with layers skipped, by calls of `draft_1`, until the draft is unsure.

    They end as those of `drafters.LayerSkip` do in JAX, by its rule and with its first threshold.

    Attributes:
        threshold: a draft ends behind a token of a smaller probability.
    """

    absorbs = False

    def __init__(self, model: Caller):
        described = model.manifest.drafter or {}
        self._longest, rule = described["num_speculative_tokens"], described["adaptive"]
        self._rule = None if rule is None else AdaptiveExit(**rule)
        self.threshold, self._rate = np.float32(described["threshold"]), np.float32(0)
        self._drafted = 0
        self._model, self._offered = model, static_proposal(model.manifest.paths)
        self.nodes = self._longest + 1

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        if self._rule is not None:
            moved = self.threshold, self._rate, recent - 1, self._drafted, self._longest
            self.threshold, self._rate = jax.device_get(_moved(self._rule, *moved))
        tokens = np.zeros(self.nodes, np.int32)
        tokens[0], count, chance = text[-1], 0, 1.0
        while chance >= self.threshold and count < self._longest:
            # The tokens before, and itself behind the places of all.
            seen = [1] * count + [0] * (self._longest - count) + [1]
            given = {"tokens": tokens[count : count + 1], "drafted": [count], "visible": seen}
            self._model.call("draft_1", length=[len(text) - 1], **given)
            count += 1
            tokens[count] = self._model.read("draft_1", "children")[0]
            chance = self._model.read("draft_1", "probs")[0]
        self._drafted = count
        return self._offered._replace(tokens=tokens, valid=np.arange(self.nodes) <= count)


@partial(jax.jit, static_argnames=("rule", "longest"))
def _moved(rule: AdaptiveExit, threshold, rate, accepted, drafted, longest):
    return rule.update(threshold, rate, accepted, drafted, longest)


class LookupDraft:
    """Drafts of `PromptLookup`, which needs no weights."""

    absorbs = False

    def __init__(self, lookup: PromptLookup, capacity: int):
        self.nodes = lookup.tree_shape[0]
        self._lookup, self._capacity = lookup, capacity

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        tokens = np.zeros(self._capacity, np.int32)
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
    """Chains drafted by a smaller exported model, one `decode` at a time."""

    absorbs = False

    def __init__(self, draft: Caller, num_speculative_tokens: int):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}."
            )
        self.nodes = num_speculative_tokens + 1
        offered = static_proposal(chain_paths(num_speculative_tokens))
        self._draft, self._offered = draft, offered
        self._cached: list[int] = []

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        del recent
        draft, count = self._draft, self.nodes - 1
        if len(text) + count > draft.manifest.capacity:
            raise ValueError(
                f"draft model: its capacity is {draft.manifest.capacity} tokens, too few for a "
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


class DynamicDraft:
    """Trees of `drafters.Eagle2`, grown by the host: the head's confidence shapes each of them.

    The head runs once per level, `draft_N` over a beam of N nodes; between calls the host chooses
    the nodes to expand. Trees are as deep as the file's static tree.
    """

    absorbs = True

    def __init__(self, model: Caller, num_nodes: int | None = None, beam: int | None = None):
        """Sets the shape of the trees.

        Args:
            model: a file with `absorb` and `draft_N`.
            num_nodes: of each tree, the root excluded; `None`: all that fit into `verify_N`.
            beam: N of `draft_N`; `None`: the largest of the file.

        Raises:
            ValueError: the file has no `draft_N`, or its beam never considers that many nodes.
        """
        sizes = model.manifest.sizes("draft")
        if "absorb" not in model.manifest.signatures:
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
                f"num_nodes must be at most {candidates}, which a beam of {self._beam} considers, "
                f"got {num_nodes}."
            )
        self._model, self._num_nodes, self.nodes = model, num_nodes, num_nodes + 1

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        tokens, parents, scores = self._expand(text, recent)
        # A child never scores above its parent, and a stable sort puts the parent first on ties.
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
        """Returns tokens, parents and scores of every child that the beam considers, in order."""
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
        capacity = model.inputs(draft_n)["scratch_k_0"]["shape"][2]
        above = np.zeros((beam, capacity), np.int32)  # 1 at a node's ancestors in earlier beams
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
    """Returns the number of tokens with which both texts begin.

    Example:
        >>> common_length([3, 1, 4], [3, 1, 5, 9])
        2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class BlockWindows:
    """State of a drafter of blocks: the part of a text that it has read, and its next window.

    It keeps finished blocks. Later tokens are read in the smallest window that holds them, a
    prompt's blocks in the largest, by calls of `draft_block_N`.

    Attributes:
        settings: of the drafter.
        mask: token id that is never drafted.
    """

    def __init__(self, model: Caller):
        self.settings = block_settings(model.manifest)
        diffusion = (model.manifest.drafter or {})["diffusion"]
        self.mask, self._shift = diffusion["mask_token_id"], int(diffusion["shift"])
        self._own_block = diffusion["block"]
        self._model, self._sizes = model, model.manifest.sizes("draft_block")
        self._text: list[int] = []
        self._kept = 0

    def prepare(self, text: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """Returns the size of the last window of a text, and the inputs of a call that reads it."""
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
        positions = np.arange(kept, kept + size)
        window = np.full(size, self.mask, np.int32)
        known = text[kept : kept + size]
        window[: len(known)] = known
        blocks = positions // self._own_block
        # Masks behind the last block see only themselves.
        visible = (blocks[:, None] >= blocks[None]).astype(np.int32)
        return {"window": window, "start": [kept], "first": [first], "visible": visible}


def block_settings(manifest: Manifest) -> BlockSettings:
    """Returns the settings of the drafter of blocks that a file was made with."""
    described = manifest.drafter or {}
    names = [field.name for field in dataclasses.fields(BlockSettings)]
    settings = {name: described[name] for name in names if name in described}
    if settings.get("paths") is not None:
        settings["paths"] = tuple(map(tuple, settings["paths"]))
    if settings.get("adaptive") is not None:
        settings["adaptive"] = AdaptiveBlock(**settings["adaptive"])
    return BlockSettings(**settings)


def verifies_drafts(manifest: Manifest) -> bool:
    """True if a file drafts for the host and verifies at least as many tokens as it drafts."""
    # With `step_exit` comes the `draft_1` of layers left out; an EAGLE head has another one.
    if {"draft", "step_exit"} & manifest.signatures.keys():
        nodes = 1 + len(manifest.paths)
    elif manifest.sizes("draft_block"):
        nodes = block_settings(manifest).tree_shape[0]
    else:
        return False
    return max(manifest.sizes("verify"), default=0) >= nodes


class WindowDraft:
    """Whole blocks of a diffusion model, as a chain or a tree, by calls of `draft_block_N`.

    Drafts are deterministic, so they suit any acceptance. Their length follows the drafter's rule,
    `AdaptiveBlock`, if it has one; a draft of no token costs no pass.
    """

    absorbs = False

    def __init__(self, model: Caller):
        self._model, self._windows = model, BlockWindows(model)
        settings = self._windows.settings
        self.nodes = settings.tree_shape[0]
        self._acceptance: Acceptance = jax.device_get(settings.nothing_accepted())

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        settings, before = self._windows.settings, self._acceptance
        rates, length, wait = jax.device_get(_next_length(settings, before, recent - 1))
        idle: Any = np.int32(0 if length else before.idle + 1)
        self._acceptance = Acceptance(rates, length, idle, wait)
        if not length:
            return static_proposal(())._replace(tokens=np.asarray(text[-1:], np.int32))
        drafted = self._draft(text)
        return drafted._replace(valid=drafted.valid & (drafted.tree.depths <= length))

    def _draft(self, text: Sequence[int]) -> Proposal:
        size, inputs = self._windows.prepare(text)
        signature = f"draft_block_{size}"
        self._model.call(signature, **inputs)
        tokens = self._model.read(signature, "children")[0]
        logprobs = self._model.read(signature, "logprobs")[0]
        tokens, logprobs = _without_token(tokens, logprobs, self._windows.mask)
        return jax.device_get(_offer(self._windows.settings, tokens, logprobs, np.int32(text[-1])))


def _without_token(
    tokens: np.ndarray, logprobs: np.ndarray, token: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drops a token from the likeliest of each position, or the last one where it is not there.

    The log-probabilities are renormalized without the token.
    """
    found = tokens == token
    places = np.argsort(np.where(found, tokens.shape[1], np.arange(tokens.shape[1])), axis=1)
    kept = places[:, :-1]
    share = np.sum(np.where(found, np.exp(logprobs), 0.0), axis=1, keepdims=True)
    rest = np.log(np.maximum(1.0 - share, np.finfo(np.float32).tiny))
    picked = np.take_along_axis(logprobs, kept, 1) - rest
    return np.take_along_axis(tokens, kept, 1).astype(np.int32), picked.astype(np.float32)


@partial(jax.jit, static_argnames="settings")
def _next_length(settings: BlockSettings, acceptance: Acceptance, accepted):
    return settings.next_length(acceptance, accepted)


@partial(jax.jit, static_argnames="settings")
def _offer(settings: BlockSettings, tokens, logprobs, root) -> Proposal:
    return settings.offer(Choices(tokens, logprobs), root, drawn=False)


def static_proposal(paths: Sequence[tuple[int, ...]]) -> Proposal:
    """Returns a proposal over a static tree, on the host, with zeros for its tokens."""
    tree = tree_from_paths(paths) if paths else chain(0)
    nodes = len(tree.parents)
    proposal = tree_proposal(tree, jnp.zeros(nodes, jnp.int32), jnp.ones(nodes, bool))
    return jax.device_get(proposal)
