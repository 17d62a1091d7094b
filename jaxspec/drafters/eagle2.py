"""EAGLE-2: the head's confidence decides the shape of each tree.

Li et al. 2024b, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", section 4.
A beam of nodes is expanded level by level. The nodes of highest joint probability, of all that were
seen, make the tree. Any head of `jaxspec.models.eagle` can be used, also those of EAGLE-3.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxspec.core.checks import Checked, Count, Natural, Nodes
from jaxspec.core.types import Context, Hidden, Params, Proposal
from jaxspec.drafters.eagle import EagleState, absorb, check_head, check_is_head, read_prompt
from jaxspec.drafters.growth import MOST_CANDIDATES, Pool, Scratch, best_of_pool, extend
from jaxspec.drafters.loaded import LoadedDrafter

if TYPE_CHECKING:
    from jaxspec.models.eagle import Eagle3Head, EagleHead


@dataclasses.dataclass(frozen=True)
class Eagle2(Checked):
    """Drafts with an EAGLE head over a tree that is built for every row and step.

    The tree depends on the head's probabilities alone, never on a drawn token. Verification treats
    its nodes as deterministic at any temperature.

    Attributes:
        num_nodes: of the tree, the root not counted (the paper's "60 draft tokens" count it).
        depth: passes of the head after the first level; the tree is up to `depth + 1` deep.
        beam: nodes expanded on each level, and children considered of each.
        taps: target layers that the head reads, its `taps`; `()` for EAGLE-1 heads.
        chunk: tokens per pass over the prompt.

    Raises:
        ValueError: a number is below 1, or there are too few candidates, or too many.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> head = jaxspec.load_eagle("demo-eagle", model)
        >>> drafter = jaxspec.Eagle2.of(head, num_nodes=12, depth=3, beam=4)
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, drafter)
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    num_nodes: Nodes = 59
    depth: Nodes = 5
    beam: Nodes = 10
    taps: tuple[Natural, ...] = ()
    chunk: Count = 256

    def __post_init__(self):
        super().__post_init__()
        if self.num_nodes > self._num_candidates:
            raise ValueError(
                f"num_nodes must be at most beam + depth * beam^2 = {self._num_candidates}, "
                f"got {self.num_nodes}."
            )
        if self._num_candidates > MOST_CANDIDATES:
            raise ValueError(
                f"beam: {self.beam} nodes of each of {self.depth} levels give "
                f"{self._num_candidates} candidates (beam + depth * beam^2), at most "
                f"{MOST_CANDIDATES} are possible; lower beam or depth."
            )

    @classmethod
    def of(
        cls, head: "EagleHead | Eagle3Head", *, any_target: bool = False, **settings: int
    ) -> LoadedDrafter:
        """Returns a drafter for `generate` from a head that `load_eagle` gave.

        Args:
            head: the head.
            any_target: see `Eagle.of`.
            settings: fields of `Eagle2`.

        Raises:
            ValueError: it is no such head, or a setting is out of range.
        """
        check_is_head(head)
        drafter = cls(**settings, taps=head.taps)
        return LoadedDrafter(drafter, head, made_for=None if any_target else head.made_for)

    @property
    def _num_candidates(self) -> int:
        return self.beam + self.depth * self.beam**2

    @property
    def tree_shape(self) -> tuple[int, int]:
        return self.num_nodes + 1, self.depth + 1

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_nodes + 1,)

    def init(self, params: Params, prompt: Hidden, context: Context) -> EagleState:
        return read_prompt(params, prompt, context, self.chunk)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: EagleState, context: Context
    ) -> tuple[Proposal, EagleState]:
        del key  # Deterministic.
        state = absorb(params, state, context)
        pool = self._expand(params, state, context)
        root = context.tokens[context.length - 1]
        return best_of_pool(pool, root, self.num_nodes, self.depth + 1, self.beam), state

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        check_head(params, self.taps, depth=self.depth + 1, branch=self.beam)

    def _expand(self, params: Params, state: EagleState, context: Context) -> Pool:
        """Returns every child that a beam search with the head considers."""
        target, head, beam = params.target, params.draft, self.beam
        grammar = context.grammar

        def best_children(states: Float[Array, "nodes embed"], standing: Any, depth: int):
            """Returns the likeliest tokens after nodes; `standing`: their states of the grammar."""
            logits = head.unembed(target, states)
            if context.warp.bias is not None:
                bias = context.warp.bias
                logits = logits + (bias if head.draft_ids is None else bias[head.draft_ids])[None]
            if grammar is not None:
                logits = grammar.keep(logits, standing, depth, ids=head.draft_ids)
            logprobs, choices = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), beam)
            tokens = choices if head.draft_ids is None else head.draft_ids[choices]
            return tokens.astype(jnp.int32), logprobs

        standing: Any = None if grammar is None else grammar.state[None]
        choices, logprobs = best_children(state.state[None], standing, 0)
        tokens, scores = choices[0], logprobs[0]
        pools = [Pool(tokens, jnp.full(beam, -1, jnp.int32), scores)]
        places = jnp.arange(beam, dtype=jnp.int32)  # of the beam's nodes in the pool
        states = jnp.broadcast_to(state.state[None], (beam, state.state.shape[0]))
        if grammar is not None:
            standing = grammar.after(jnp.repeat(standing, beam), tokens)
        scratch: Scratch | None = None
        above = jnp.zeros((beam, 0), bool)  # which nodes of earlier beams each descends from
        for level in range(1, self.depth + 1):
            hidden = head.forward(
                target.embed(tokens),
                states,
                jnp.full(beam, context.length - 2 + level, jnp.int32),
                jnp.concatenate([above, jnp.eye(beam, dtype=bool)], axis=1),
                state.cache,
                scratch=scratch,
            )
            scratch = extend(scratch, hidden.new_kv)
            choices, logprobs = best_children(hidden.features, standing, level)
            created = Pool(
                choices.reshape(-1),
                jnp.repeat(places, beam),
                (scores[:, None] + logprobs).reshape(-1),
            )
            first = beam + (level - 1) * beam**2
            pools.append(created)
            scores, best = jax.lax.top_k(created.scores, beam)
            parents = best // beam  # within the beam just expanded
            tokens, places = created.tokens[best], (first + best).astype(jnp.int32)
            states = hidden.features[parents]
            if grammar is not None:
                standing = grammar.after(standing[parents], tokens)
            above = jnp.concatenate([above, jnp.eye(beam, dtype=bool)], axis=1)[parents]
        return Pool(*(jnp.concatenate(parts) for parts in zip(*pools, strict=True)))
