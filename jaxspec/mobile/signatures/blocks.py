"""Drafts of whole blocks by a diffusion model that is causal over blocks, and steps over them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core.sampling import argmax_rows
from jaxspec.core.types import Params, Tree
from jaxspec.drafters import Deer
from jaxspec.drafters.block import BlockSettings
from jaxspec.mobile.acceptance import Accepted, accept_drawn, draw_rows
from jaxspec.mobile.records import (
    Record,
    Shapes,
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
from jaxspec.mobile.signatures.steps import (
    Accept,
    greedy,
    sampled,
    sampling_inputs,
    verify_and_commit,
    warped,
)
from jaxspec.models import Network, lookup_rows


class BlockDrafting:
    """Drafting of whole blocks in one pass of a diffusion model that is causal over blocks.

    The host chooses the window that a pass reads and the rows that count, see
    `drafts.BlockWindows`. `tree` is the static tree that whole steps verify; `None`: the host makes
    one for every round, or chooses the length of every draft.

    Raises:
        ValueError: the drafter does what a file cannot.
    """

    def __init__(self, drafter: Deer, network: Any):
        diffusion = network.config.diffusion if isinstance(network, Network) else None
        if diffusion is None:
            raise ValueError("drafter: Deer needs a diffusion model: Deer.of(load(...)).")
        if diffusion.block is None:
            raise ValueError(
                "drafter: this diffusion model sees both sides, so that every pass would read the "
                "whole text; only models that are causal over blocks can be exported."
            )
        if diffusion.rank:
            raise ValueError(
                "drafter: this diffusion model has a Markov head, which files cannot hold; give "
                "one of `jaxspec train deer` without --markov."
            )
        check_in_one_pass(
            drafter,
            sep_token_id=drafter.sep_token_id is not None,
            cache=drafter.cache not in (None, "blocks"),
        )
        self.config, self.block, self.mask = network.config, drafter.block, diffusion.mask_token_id
        # A host reads what has gathered in several windows.
        self.sizes = replace(drafter, adaptive=None).window_sizes(diffusion.block)
        self.tree = drafter.tree if drafter.adaptive is None else None
        self.levels = drafter.depth + 1
        # One more than is drafted: the host leaves the mask out, if it is among them.
        self.count = drafter.max_branch + 1
        self.drafter = drafter

    def signature(self, target: Target, size: int) -> Signature:
        """Makes `draft_block_N`: reads a window of N tokens, returns each position's likeliest.

        Inputs: `window`, the tokens; `start`, the number of cached tokens, all in finished blocks;
        `visible`, 1 where a token of the window (row) sees another (column); `first`, the row whose
        output decides the first position.
        """

        def draft(params: Params, inputs: Record) -> Record:
            logits, written = self._read(target, size, params, inputs)
            probs, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.count)
            return {"children": ids[None], "logprobs": jnp.log(probs)[None], **outgoing(written)}

        return make_signature(target, draft, self._inputs(target, size))

    def step_signature(self, target: Target, size: int) -> Signature:
        """Makes `step_block_N`: such a pass, then target pass, acceptance and commit of the tree.

        Inputs: also `pending` and `length` of the target, as for `step`.
        """
        step = partial(self._step, target, size, greedy)
        return make_signature(target, step, self._step_inputs(target, size))

    def sampled_step_signature(self, target: Target, size: int) -> Signature:
        """Makes `step_block_sampled_N`: the same at a temperature, see `sampled_block`."""
        step, inputs = partial(self._step, target, size), self._step_inputs(target, size)
        return sampled_block(self.drafter, target, step, inputs)

    def _step(
        self, target: Target, size: int, accept: Accept | None, params: Params, inputs: Record
    ) -> Record:
        tree = self.tree
        assert tree is not None
        logits, written = self._read(target, size, params, inputs)
        logits = without_token(logits, self.mask)
        tokens, accept = draft_block(self.drafter, logits, inputs, accept)
        *_, outputs = verify_and_commit(
            params.target, target, tree, tokens, inputs, (), accept, self.levels
        )
        return outputs | outgoing(written)

    def _step_inputs(self, target: Target, size: int) -> Shapes:
        inputs = {"pending": ints(1), "length": ints(1), **kv_inputs(target)}
        return inputs | self._inputs(target, size)

    def _inputs(self, target: Target, size: int) -> Shapes:
        if self.config.max_positions < target.capacity:
            raise ValueError(
                f"capacity must be at most the drafter's {self.config.max_positions} positions, "
                f"got {target.capacity}."
            )
        own = target._replace(config=self.config, capacity=target.capacity + self.sizes[-1])
        return {
            "window": ints(1, size),
            "start": ints(1),
            "first": ints(1),
            "visible": ints(1, 1, size, size),
            **kv_inputs(own, "block"),
        }

    def _read(
        self, target: Target, size: int, params: Params, inputs: Record
    ) -> tuple[Array, Record]:
        """Returns the logits of each position of a draft, and the drafter's new cache."""
        start, network = inputs["start"][0], params.draft
        inputs = cleared(inputs, "block", start)
        hidden = network.forward(
            inputs["window"][0],
            start + np.arange(size, dtype=np.int32),
            inputs["visible"][0, 0] > 0,
            read_cache(inputs, "block", self.config.num_layers, start),
        )
        rows = inputs["first"] + np.arange(self.block, dtype=np.int32)
        logits = network.unembed(lookup_rows(hidden.features, rows))[:, : target.num_tokens]
        return logits, write_kv(inputs, "block", hidden.new_kv, start)


def check_in_one_pass(drafter: BlockSettings, **further: bool) -> None:
    """Refuses settings that no file has.

    Args:
        drafter: of any kind that drafts whole blocks.
        further: settings that a file of this kind lacks, and True for those that were given.

    Raises:
        ValueError: naming those that were given.
    """
    unsupported = {
        "steps": drafter.steps > 1,
        **further,
        # The host drafts trees, and lengths that adapt, of the likeliest tokens.
        "temperature": bool(drafter.temperature)
        and not (drafter.is_chain and drafter.adaptive is None),
    }
    if given := [name for name, found in unsupported.items() if found]:
        sep = ' (sep="" where config.json names one)' if "sep_token_id" in given else ""
        raise ValueError(
            f"drafter: an exported {type(drafter).__name__} drafts every block in one pass, "
            f"without {', '.join(given)}; leave that out{sep}."
        )


def without_token(logits: Array, token: int) -> Array:
    """Returns logits by which one token, if it is among them, is never drafted."""
    if token >= logits.shape[1]:
        return logits
    never = np.zeros(logits.shape[1], np.float32)
    never[token] = -1e9
    return logits + never[None]


def draft_block(
    drafter: BlockSettings, logits: Array, inputs: Record, accept: Accept | None
) -> tuple[Array, Accept]:
    """Drafts the static tree of a block whose positions have one law each.

    Args:
        drafter: its settings.
        logits: of each level of the tree.
        inputs: of the step.
        accept: of the likeliest tokens; `None`: a chain is drawn and judged as a whole path.

    Returns:
        The tokens, the pending one first, and how they are accepted.
    """
    tree = drafter.tree
    assert tree is not None, "the host makes other trees"
    if accept is not None:
        branch = tree.children.shape[1]
        best = argmax_rows(logits)[:, None]
        if branch > 1:
            best = jax.lax.top_k(logits, branch)[1]
        nodes = zip(tree.depths[1:], tree.ranks[1:], strict=True)
        drafted = [best[depth - 1, rank : rank + 1] for depth, rank in nodes]
        return jnp.concatenate([inputs["pending"], *drafted]), accept
    temperature, top_k = inputs["temperature"], inputs["top_k"]
    own = temperature if drafter.temperature is None else jnp.full(1, drafter.temperature)
    laws = warped(logits, own, top_k)
    drafted = draw_rows(laws, inputs["draft_uniforms"][0])
    tokens = jnp.concatenate([inputs["pending"], drafted])

    def accept_path(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
        del tree, levels  # those of the chain
        probs = warped(logits, temperature, top_k)
        return accept_drawn(tokens, inputs["uniforms"][0], probs, laws)

    return tokens, accept_path


def sampled_block(
    drafter: BlockSettings,
    target: Target,
    step: Callable[[Accept | None, Params, Record], Record],
    inputs: Shapes,
) -> Signature:
    """Makes a step at a temperature of a greedy one and its inputs.

    Of a chain the drafts are drawn too, by the further input `draft_uniforms`, one for each
    position, unless the drafter's own temperature is 0. Trees hold the likeliest tokens.
    """
    assert drafter.tree is not None, "the host makes other trees"
    inputs = inputs | sampling_inputs(drafter.tree)
    if drafter.is_chain and drafter.temperature != 0:
        draws = {"draft_uniforms": floats(1, drafter.block)}
        return make_signature(target, partial(step, None), inputs | draws)
    return make_signature(target, partial(sampled, step), inputs)
