"""Diffusion language models: stepwise passes, and whole rounds of self-speculative decoding.

A round drafts, reads the canvases that the drafts lead to, accepts and commits. It does for one row
what `jaxspec.diffusion` does, one token per step, the surest first, in arithmetic that phones
compute exactly. Decisions are made in a window of two blocks: the first unfinished block and the
next. Everything before the window is decided; `length` counts it.

A network that is causal over blocks keeps finished blocks in a cache; the canvases of a round lie
side by side in one pass, and each sees the cache and itself. A network that sees both sides reads a
whole canvas for each of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core import masks
from jaxspec.core.cache import select_nodes
from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import LayerKV, Params
from jaxspec.mobile.records import (
    Record,
    Signature,
    Target,
    cleared,
    floats,
    ints,
    kv_inputs,
    make_signature,
    outgoing,
    read_cache,
    write_kv,
)
from jaxspec.models import Diffusion, lookup_rows

_UNKNOWN = 1e4
"""Doubt about a position that no pass has read; it fits into half precision."""
_LARGEST_ODDS = 30.0
"""Largest logarithm of the odds of a token against the chosen one."""


class Canvases(NamedTuple):
    """Settings of how a file reads canvases.

    Attributes:
        target: the network.
        diffusion: its mask and the direction it reads in.
        block: positions per block; the network's own where it is causal over blocks.
    """

    target: Target
    diffusion: Diffusion
    block: int

    @property
    def width(self) -> int:
        """Positions of the window."""
        return 2 * self.block

    @property
    def is_causal(self) -> bool:
        """True if the network is causal over blocks."""
        return self.diffusion.block is not None

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry of a manifest."""
        return {
            "mask_token_id": self.diffusion.mask_token_id,
            "shift": self.diffusion.shift,
            "block": self.block,
            "causal": self.is_causal,
        }


class _Window(NamedTuple):
    """The window of several canvases; each field is [1, 1, rows, width].

    Attributes:
        tokens: as they stand.
        choices: the tokens that its positions would get.
        doubts: the order to fill them in, lowest first; `_UNKNOWN` without a choice.
    """

    tokens: Array
    choices: Array
    doubts: Array


def denoise_signatures(canvases: Canvases, drafts: tuple[int, ...]) -> dict[str, Signature]:
    """Makes the stepwise pass, and `round_N` for each number of drafts.

    A network that is causal over blocks has two stepwise passes: `denoise_1` while the window's
    first block has masks, and `denoise_2` when it has none, which caches it.
    """
    stepwise = {"denoise": _pass(canvases, 0, 2)}
    if canvases.is_causal:
        stepwise = {f"denoise_{blocks}": _pass(canvases, 0, blocks) for blocks in (1, 2)}
    return stepwise | {f"round_{count}": _pass(canvases, count, 2) for count in drafts}


def prefill_blocks_signature(canvases: Canvases, size: int) -> Signature:
    """Makes `prefill_N`, which caches `size` tokens of a prompt behind `length` others.

    Only networks that are causal over blocks cache a prompt, in whole blocks. The input `last` is
    the index, among these tokens, of the one before the first position to decide.
    """
    target = canvases.target

    def prefill(params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        inputs = cleared(inputs, "kv", length)
        with jax.ensure_compile_time_eval():
            seen = masks.block_causal(size, canvases.block)
        hidden = params.target.forward(
            inputs["prompt"][0],
            length + np.arange(size, dtype=np.int32),
            seen,
            read_cache(inputs, "kv", target.config.num_layers, length),
        )
        outputs = outgoing(write_kv(inputs, "kv", hidden.new_kv, length))
        if canvases.diffusion.shift:
            outputs["o_edge"] = lookup_rows(hidden.features, inputs["last"])
        return outputs

    inputs = {"prompt": ints(1, size), "length": ints(1), **kv_inputs(target)}
    if canvases.diffusion.shift:
        inputs["last"] = ints(1)
    return make_signature(target, prefill, inputs)


def _pass(canvases: Canvases, num_drafts: int, blocks: int) -> Signature:
    """Makes a pass over `num_drafts` + 1 canvases that reads `blocks` blocks of their window."""
    target, width, mask = canvases.target, canvases.width, canvases.diffusion.mask_token_id

    def denoise(params: Params, inputs: Record) -> Record:
        length = inputs["length"][0]
        drafts = [inputs["window"].reshape(1, 1, 1, width)]
        for _ in range(num_drafts):
            said = [inputs[name].reshape(1, 1, 1, width) for name in ("choices", "doubts")]
            drafts.append(_decide(canvases, _Window(drafts[-1], *said)))
        tokens = jnp.concatenate(drafts, axis=2)
        if canvases.is_causal:
            choices, doubts, carry = _read_blocks(canvases, params, inputs, tokens, blocks)
            if num_drafts:
                choices, doubts = _say_alike(canvases, tokens, choices, doubts)
        else:
            choices, doubts, carry = _read_canvases(canvases, params, inputs, tokens)
        decided = _decide(canvases, _Window(tokens, choices, doubts))
        last, count = _last_kept(tokens, decided)
        whole = last.astype(jnp.int32)
        decided = jnp.sum(whole * decided, axis=2, keepdims=True)
        choices = jnp.sum(whole * choices, axis=2, keepdims=True)
        doubts = jnp.sum(last * doubts, axis=2, keepdims=True)
        # A finished block is cached from a pass that has read it finished.
        finished = jnp.sum(whole * tokens, axis=2, keepdims=True) if canvases.is_causal else decided
        left = _is_mask(canvases, finished) * _first_block(canvases)
        over = 1.0 - jnp.minimum(jnp.sum(left, axis=3, keepdims=True), 1.0)
        ahead = length + np.arange(width, width + canvases.block, dtype=np.int32)
        fresh = jnp.less(ahead.reshape(1, 1, 1, -1), inputs["end"].reshape(1, 1, 1, 1))
        fresh = fresh.astype(jnp.int32) * mask
        unknown = jnp.full((1, 1, 1, canvases.block), _UNKNOWN)
        is_over = over.astype(jnp.int32)

        def moved(entries: Array, behind: Array, on: Array) -> Array:
            later = jnp.concatenate([entries[..., canvases.block :], behind], axis=3)
            return (on * later + (1 - on) * entries).reshape(1, width)

        outputs = {
            "decided": decided.reshape(1, width),
            "count": count,
            "o_window": moved(decided, fresh, is_over),
            "o_choices": moved(choices, choices[..., canvases.block :], is_over),
            "o_doubts": moved(doubts, unknown, over),
            "o_length": inputs["length"] + is_over.reshape(1) * canvases.block,
        }
        return outputs | carry(last, over, decided)

    inputs = {"window": ints(1, width), "length": ints(1), "end": ints(1)}
    if num_drafts:
        inputs["choices"] = ints(1, width)
        inputs["doubts"] = floats(1, width)
    if canvases.is_causal:
        inputs |= kv_inputs(target)
        if canvases.diffusion.shift:
            inputs["edge"] = floats(1, target.config.embed_dim)
    else:
        inputs["canvas"] = ints(1, target.capacity)
    return make_signature(target, denoise, inputs)


_Carry = Callable[[Array, Array, Array], Record]
"""Returns the next state.

Takes the one-hot index of the kept canvas, 1 where its first block is over, and the decided tokens.
"""


def _read_blocks(
    canvases: Canvases, params: Params, inputs: Record, tokens: Array, blocks: int
) -> tuple[Array, Array, _Carry]:
    """Reads the windows side by side, behind the cache of finished blocks."""
    target, block, width = canvases.target, canvases.block, blocks * canvases.block
    network, rows, length = params.target, tokens.shape[2], inputs["length"][0]
    # No prompt is cached where it is shorter than a block, so nothing was cleared before.
    inputs = cleared(inputs, "kv", length)
    if canvases.diffusion.shift:
        begun = jnp.greater(inputs["length"], 0).reshape(1, 1)
        inputs["edge"] = jnp.where(begun, inputs["edge"], 0.0)
    row, position = np.divmod(np.arange(rows * width, dtype=np.int32), width)
    place = position // block
    own = (row[:, None] == row[None]) & (place[:, None] >= place[None])
    hidden = network.forward(
        tokens[..., :width].reshape(-1),
        length + position,
        jnp.asarray(own),
        read_cache(inputs, "kv", target.config.num_layers, length),
    )
    features = hidden.features
    if canvases.diffusion.shift:
        # The position before a window is cached; its neighbour here belongs to another row.
        parts = []
        for start in range(0, rows * width, width):
            parts += [inputs["edge"], features[start : start + width - 1]]
        features = jnp.concatenate(parts)
    choices, doubts = _choices(canvases, network.unembed(features))
    choices, doubts = (each.reshape(1, 1, rows, width) for each in (choices, doubts))
    if blocks == 1:
        choices = jnp.concatenate([choices, choices], axis=3)
        doubts = jnp.concatenate([doubts, jnp.full(doubts.shape, _UNKNOWN)], axis=3)

    def carry(last: Array, over: Array, decided: Array) -> Record:
        del decided
        if blocks == 1:
            return {}  # A block with masks is not cached.
        # One row leaves nothing to choose, and the converter refuses a choice by constants.
        if rows == 1:
            kv = tuple(
                LayerKV(keys[:, :, :block], values[:, :block]) for keys, values in hidden.new_kv
            )
            edge = hidden.features[block - 1 : block]
        else:
            same_place = jnp.asarray(np.eye(block, width)[None, :, None], jnp.float32)
            pick = (last * same_place).reshape(block, rows * width)
            kv, edge = select_nodes(hidden.new_kv, pick), pick[block - 1 :] @ hidden.features
        # A block with masks is written too: no later pass sees it before it is written again.
        outputs = outgoing(write_kv(inputs, "kv", kv, length))
        if canvases.diffusion.shift:
            on = over.reshape(1, 1)
            outputs["o_edge"] = on * edge + (1.0 - on) * inputs["edge"]
        return outputs

    return choices, doubts, carry


def _say_alike(
    canvases: Canvases, tokens: Array, choices: Array, doubts: Array
) -> tuple[Array, Array]:
    """Gives rows that are still in the first block the choices of a later row for the second.

    That later row is the first whose own first block is full, or the last row, as in
    `jaxspec.diffusion.self_speculative`: a round keeps the drafts that it keeps there.
    """
    first = _first_block(canvases)
    still_open = jnp.sum(_is_mask(canvases, tokens) * first, axis=3, keepdims=True)
    is_past = 1.0 - jnp.minimum(still_open, 1.0)
    ends = jnp.concatenate([is_past[:, :, :-1], jnp.ones((1, 1, 1, 1))], axis=2)
    before = jnp.concatenate([jnp.zeros((1, 1, 1, 1)), ends[:, :, :-1]], axis=2)
    source, own = ends - before, jnp.maximum(is_past, first)

    def alike(entries: Array) -> Array:
        ours, theirs = (part.astype(entries.dtype) for part in (own, source))
        return ours * entries + (1 - ours) * jnp.sum(theirs * entries, axis=2, keepdims=True)

    return alike(choices), alike(doubts)


def _read_canvases(
    canvases: Canvases, params: Params, inputs: Record, tokens: Array
) -> tuple[Array, Array, _Carry]:
    """Reads a whole canvas for each window."""
    capacity, width, network = canvases.target.capacity, canvases.width, params.target
    rows = tokens.shape[2]
    window = inputs["length"] + np.arange(width, dtype=np.int32)
    place = jax.nn.one_hot(window, capacity, dtype=jnp.float32)[None, None].astype(jnp.int32)
    inside = jnp.sum(place, axis=2, keepdims=True)
    outside = inputs["canvas"].reshape(1, 1, 1, capacity) * (1 - inside)

    def placed(row: Array) -> Array:
        """Returns the canvas with these tokens in its window."""
        return outside + jnp.sum(place * row.reshape(1, 1, width, 1), axis=2, keepdims=True)

    columns = np.tile(np.arange(capacity, dtype=np.int32), (capacity, 1))[None, None]
    seen = jnp.less(columns, inputs["end"].reshape(1, 1, 1, 1)).reshape(capacity, capacity)
    found = []
    for row in range(rows):
        text = placed(tokens[:, :, row : row + 1]).reshape(-1)
        hidden = network.forward(text, np.arange(capacity, dtype=np.int32), seen, None)
        found.append(lookup_rows(hidden.features, window - int(canvases.diffusion.shift)))
    features = found[0] if rows == 1 else jnp.concatenate(found)
    choices, doubts = _choices(canvases, network.unembed(features))

    def carry(last: Array, over: Array, decided: Array) -> Record:
        del last, over
        return {"o_canvas": placed(decided).reshape(1, capacity)}

    shape = (1, 1, rows, width)
    return choices.reshape(shape), doubts.reshape(shape), carry


def _choices(canvases: Canvases, logits: Array) -> tuple[Array, Array]:
    """Returns a token for each row of logits, and its doubt.

    The doubt is the odds of all other tokens: the logarithm of the token's own probability would
    round to 0 for all sure tokens. Odds above 1 enter by their logarithm, which fits into half
    precision.
    """
    vocab = logits.shape[1]
    possible = np.arange(vocab) < canvases.target.num_tokens
    possible &= np.arange(vocab) != canvases.diffusion.mask_token_id
    choices = argmax_rows(logits + jnp.asarray(np.where(possible, 0.0, -1e4)[None], jnp.float32))
    chosen = jax.nn.one_hot(choices, vocab, dtype=jnp.float32)
    best = jnp.sum(chosen * logits, axis=1, keepdims=True)
    others = jnp.exp(jnp.minimum(logits - best, _LARGEST_ODDS)) * (1.0 - chosen)
    odds = jnp.sum(others, axis=1)
    return choices, jnp.minimum(odds, 1.0) + jnp.log(jnp.maximum(odds, 1.0))


def _decide(canvases: Canvases, window: _Window) -> Array:
    """Makes the stepwise decision: the surest open position of each row's block gets its token.

    Ties go to the lowest position. A row without a mask whose choice is known stays as it is.
    """
    rows, width = window.tokens.shape[2:]
    first = _first_block(canvases)
    still_open = _is_mask(canvases, window.tokens)
    in_first = jnp.minimum(jnp.sum(still_open * first, axis=3, keepdims=True), 1.0)
    current = first * in_first + (1.0 - first) * (1.0 - in_first)
    known = jnp.less(window.doubts, 0.5 * _UNKNOWN).astype(jnp.float32)
    eligible = still_open * current * known
    ranked = -2.0 * _UNKNOWN * (1.0 - eligible) - window.doubts * eligible
    best = argmax_rows(ranked.reshape(rows, width))
    any_left = jnp.minimum(jnp.sum(eligible, axis=3, keepdims=True), 1.0)
    fills = jax.nn.one_hot(best, width, dtype=jnp.float32).reshape(1, 1, rows, width) * any_left
    fills = fills.astype(jnp.int32)
    return window.tokens + fills * (window.choices - window.tokens)


def _last_kept(tokens: Array, decided: Array) -> tuple[Array, Array]:
    """Finds the last canvas that follows from decisions alone: one-hot, and its drafts' number."""
    rows, width = tokens.shape[2:]
    kept, last = jnp.ones((1, 1, 1, 1)), []
    count = jnp.zeros((1, 1, 1, 1))
    for row in range(rows - 1):
        same = jnp.equal(decided[:, :, row : row + 1], tokens[:, :, row + 1 : row + 2])
        same = jnp.sum(same.astype(jnp.float32), axis=3, keepdims=True)
        agrees = jax.nn.relu(same - (width - 1.0))
        last.append(kept * (1.0 - agrees))
        kept = kept * agrees
        count = count + kept
    last.append(kept)
    return jnp.concatenate(last, axis=2), count.reshape(1).astype(jnp.int32)


def _is_mask(canvases: Canvases, tokens: Array) -> Array:
    return jnp.equal(tokens, canvases.diffusion.mask_token_id).astype(jnp.float32)


def _first_block(canvases: Canvases) -> Array:
    first = np.arange(canvases.width) < canvases.block
    return jnp.asarray(first.reshape(1, 1, 1, -1), jnp.float32)
