"""Steps in which the target drafts with some of its own layers skipped."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.sampling import argmax_rows
from jaxspec.core.tree import chain
from jaxspec.core.types import Hidden, KVCache, LayerKV, Params
from jaxspec.drafters import LayerSkip
from jaxspec.drafters.growth import extend
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
    unembed_rows,
    write_kv,
)
from jaxspec.mobile.signatures.steps import Accept, WholeStep, accepts, greedy, verify_and_commit


class LayerSkipStep(WholeStep):
    """A whole step in which the target drafts a chain while it skips a fixed set of layers.

    A graph without control flow makes every pass of a draft. So `step` keeps drafts of full length.
    `step_exit` ends them where the drafter does in JAX, and `draft_1` lets a host do so, which then
    saves the passes behind.

    Raises:
        ValueError: the drafter has no fixed set.
    """

    def __init__(self, drafter: LayerSkip):
        if drafter.skip is None:
            raise ValueError(
                "drafter: an exported LayerSkip needs its set baked in: skip=Skips(...)."
            )
        self.drafter, self.skip = drafter, drafter.skip
        self.tree = chain(drafter.num_speculative_tokens)
        self.levels = drafter.num_speculative_tokens + 1
        self.kept = tuple(i for i, skipped in enumerate(self.skip.attention) if not skipped)

    def draft_signature(self, target: Target) -> Signature:
        """Makes `draft`, which drafts the whole chain."""

        def draft(params: Params, inputs: Record) -> Record:
            return {"drafted": self._draft(target, params, inputs)[0][None]}

        return make_signature(target, draft, self._own_inputs(target))

    def draft_one_signature(self, target: Target) -> Signature:
        """Makes `draft_1`: one token of a chain that the host ends.

        Inputs: `tokens`, the last token; `drafted`, the number of tokens before it that the scratch
        holds; `visible`, 1 for these and, in the last column, for the token itself. Outputs:
        `children`, the likeliest token behind it, and `probs`, its probability.
        """
        places, kept = self.levels - 1, self.kept

        def draft(params: Params, inputs: Record) -> Record:
            drafted = inputs["drafted"]
            inputs = cleared(inputs, "scratch", drafted)
            layers = iter(read_cache(inputs, "scratch", len(kept), drafted[0]).layers)
            scratch = tuple(None if skipped else next(layers) for skipped in self.skip.attention)
            cache = self._cache(inputs)
            token, position = inputs["tokens"][0], inputs["length"] + drafted
            seen = inputs["visible"][0, 0] > 0
            hidden, logits = self._pass(target, params, token, position, seen, cache, scratch)
            probs = jnp.max(jax.nn.softmax(logits, axis=-1), axis=1)
            new_kv = tuple(hidden.new_kv[layer] for layer in kept)
            written = write_kv(inputs, "scratch", new_kv, drafted[0])
            return {"children": argmax_rows(logits), "probs": probs, **outgoing(written)}

        inputs = self._own_inputs(target)
        del inputs["pending"]
        inputs |= {"tokens": ints(1, 1), "drafted": ints(1), "visible": ints(1, 1, 1, places + 1)}
        if kept:
            config = target.config.replace(num_layers=len(kept), layer_types=())
            inputs |= kv_inputs(target._replace(config=config), "scratch", places)
        return make_signature(target, draft, inputs)

    def exit_signature(self, target: Target) -> Signature:
        """Makes `step_exit`, whose drafts end where those of the drafter do.

        State: the `threshold` that ends a draft and, where it is adaptive, the `rate` of acceptance
        that moves it. A text begins with the drafter's threshold and a rate of 0.
        """
        inputs = self._inputs(target) | {"threshold": floats(1)}
        if self.drafter.adaptive is not None:
            inputs["rate"] = floats(1)
        return make_signature(target, partial(self._exit_step, target), inputs)

    def _inputs(self, target: Target) -> Shapes:
        return {"length": ints(1), "pending": ints(1), **kv_inputs(target)}

    def _own_inputs(self, target: Target) -> Shapes:
        """Returns what drafting reads: on a GPU, a function refuses a buffer that it does not."""
        caches = {f"kv_{kind}_{layer}" for kind in "kv" for layer in self.kept}
        return {
            name: shape
            for name, shape in self._inputs(target).items()
            if not name.startswith("kv_") or name in caches
        }

    def _cache(self, inputs: Record) -> KVCache | None:
        """Reads the cache; layers without attention get another's, which they do not read."""
        if not self.kept:
            return None
        sources = [i if i in self.kept else self.kept[0] for i in range(len(self.skip.attention))]
        every = {
            f"kv_{kind}_{i}": inputs[f"kv_{kind}_{source}"]
            for i, source in enumerate(sources)
            for kind in "kv"
        }
        return read_cache(every, "kv", len(sources), inputs["length"][0])

    def _step(self, target: Target, accept: Accept, params: Params, inputs: Record) -> Record:
        tokens, _ = self._draft(target, params, inputs)
        *_, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        return outputs

    def _exit_step(self, target: Target, params: Params, inputs: Record) -> Record:
        tokens, chances = self._draft(target, params, inputs)
        threshold, going_on, ends = inputs["threshold"], jnp.ones(1, jnp.float32), []
        for chance in chances:
            ends.append(going_on)
            going_on = going_on * (chance >= threshold).astype(jnp.float32)
        count = reduce(jnp.add, ends).astype(jnp.int32)
        drafted = jnp.concatenate([jnp.ones(1, jnp.float32), *ends]).astype(jnp.int32)
        accept = accepts(greedy, drafted * (tokens + 1) - 1)
        *_, outputs = verify_and_commit(
            params.target, target, self.tree, tokens, inputs, (), accept, self.levels
        )
        if self.drafter.adaptive is None:
            return outputs
        before, accepted = (threshold[0], inputs["rate"][0]), outputs["o_count"][0] - 1
        moved = self.drafter.adaptive.update(*before, accepted, count[0], self.levels - 1)
        return outputs | {"o_threshold": moved[0][None], "o_rate": moved[1][None]}

    def _draft(self, target: Target, params: Params, inputs: Record) -> tuple[Array, list[Array]]:
        """Returns the chain, the pending token first, and the probability of each further one."""
        cache = self._cache(inputs)
        token, tokens, scratch, chances = inputs["pending"], [inputs["pending"]], None, []
        for drafted in range(self.levels - 1):
            seen, position = jnp.ones((1, drafted + 1), bool), inputs["length"] + drafted
            hidden, logits = self._pass(target, params, token, position, seen, cache, scratch)
            scratch = extend(scratch, hidden.new_kv)
            token = argmax_rows(logits)
            tokens.append(token)
            chances.append(jnp.max(jax.nn.softmax(logits, axis=-1), axis=1))
        return jnp.concatenate(tokens), chances

    def _pass(
        self,
        target: Target,
        params: Params,
        token: Array,
        position: Array,
        seen: Array,
        cache: KVCache | None,
        scratch: tuple[LayerKV | None, ...] | None,
    ) -> tuple[Hidden, Array]:
        """Reads one token with layers left out; returns its states, and the logits behind it."""
        hidden = params.target.forward(
            token, position, seen, cache, scratch=scratch, skip=self.skip
        )
        return hidden, unembed_rows(params.target, target, hidden.features)
