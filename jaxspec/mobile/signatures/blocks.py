"""Drafts of whole blocks by a diffusion model that is causal over blocks, and steps over them."""

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
        unsupported = {
            "steps": drafter.steps > 1,
            "sep_token_id": drafter.sep_token_id is not None,
            "cache": drafter.cache not in (None, "blocks"),
            "temperature": bool(drafter.temperature) and not drafter.is_chain,
        }
        if given := [name for name, found in unsupported.items() if found]:
            raise ValueError(
                f"drafter: an exported Deer drafts every block in one pass, without "
                f'{", ".join(given)}; leave that out (sep="" where config.json names one).'
            )
        self.config, self.block, self.mask = network.config, drafter.block, diffusion.mask_token_id
        # A host reads what has gathered in several windows.
        self.sizes = replace(drafter, adaptive=None).window_sizes(diffusion.block)
        self.tree = drafter.tree if drafter.adaptive is None else None
        self.levels = drafter.depth + 1
        # One more than is drafted: the host leaves the mask out, if it is among them.
        self.count = drafter.max_branch + 1
        self.draws = drafter.is_chain and drafter.temperature != 0
        self.temperature = drafter.temperature

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
        """Makes `step_block_sampled_N`: the same at a temperature.

        Of a chain the drafts are drawn too, by the further input `draft_uniforms`, one for each
        position, unless the drafter's own temperature is 0. Trees hold the likeliest tokens.
        """
        tree = self.tree
        assert tree is not None
        inputs = self._step_inputs(target, size) | sampling_inputs(tree)
        step = partial(sampled, partial(self._step, target, size))
        if self.draws:
            inputs["draft_uniforms"] = floats(1, self.block)
            step = partial(self._drawn_step, target, size)
        return make_signature(target, step, inputs)

    def _step(
        self, target: Target, size: int, accept: Accept, params: Params, inputs: Record
    ) -> Record:
        tree = self.tree
        assert tree is not None
        logits, written = self._laws(target, size, params, inputs)
        branch = tree.children.shape[1]
        best = argmax_rows(logits)[:, None]
        if branch > 1:
            best = jax.lax.top_k(logits, branch)[1]
        nodes = zip(tree.depths[1:], tree.ranks[1:], strict=True)
        drafted = [best[depth - 1, rank : rank + 1] for depth, rank in nodes]
        tokens = jnp.concatenate([inputs["pending"], *drafted])
        *_, outputs = verify_and_commit(
            params.target, target, tree, tokens, inputs, (), accept, self.levels
        )
        return outputs | outgoing(written)

    def _drawn_step(self, target: Target, size: int, params: Params, inputs: Record) -> Record:
        assert self.tree is not None, "a chain"
        logits, written = self._laws(target, size, params, inputs)
        temperature, top_k = inputs["temperature"], inputs["top_k"]
        own = temperature if self.temperature is None else jnp.full(1, self.temperature)
        laws = warped(logits, own, top_k)
        drafted = draw_rows(laws, inputs["draft_uniforms"][0])
        tokens = jnp.concatenate([inputs["pending"], drafted])

        def accept(tree: Tree, tokens: Array, logits: Array, levels: int) -> Accepted:
            del tree, levels  # those of the chain
            probs = warped(logits, temperature, top_k)
            return accept_drawn(tokens, inputs["uniforms"][0], probs, laws)

        *_, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        return outputs | outgoing(written)

    def _step_inputs(self, target: Target, size: int) -> Shapes:
        inputs = {"pending": ints(1), "length": ints(1), **kv_inputs(target)}
        return inputs | self._inputs(target, size)

    def _laws(
        self, target: Target, size: int, params: Params, inputs: Record
    ) -> tuple[Array, Record]:
        """Returns the logits of each position without the mask, and the drafter's new cache."""
        logits, written = self._read(target, size, params, inputs)
        if self.mask < target.num_tokens:
            never = np.zeros(target.num_tokens, np.float32)
            never[self.mask] = -1e9
            logits = logits + never[None]
        return logits, written

    def _inputs(self, target: Target, size: int) -> Shapes:
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
