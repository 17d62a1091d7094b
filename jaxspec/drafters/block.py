"""Shared parts of drafters that predict a whole block in one pass: all except the pass.

The pass gives one distribution for each of the next positions, independent of one another (the
marginals). They make a chain, a static tree whose nodes of one depth choose from one distribution,
or a tree that is built for each row and step. Drafting costs one pass at any depth of the tree.

A drafter may change the distribution of a position by the token that was chosen before it. Then
chains and trees are chosen level by level, each node from its own distribution.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxspec.core.checks import Checked, Count, Nodes, NotNegative, Share
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.proposal import bank, choose_children, tree_proposal
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.tree import Path, chain, normalize_paths, tree_from_paths
from jaxspec.core.types import Context, Hidden, Proposal, PyTree, Tree, Warp
from jaxspec.drafters.growth import (
    MOST_CANDIDATES,
    DraftLaw,
    Pool,
    best_of_pool,
    fit_vocab,
    grow_tree,
    take_rows,
)
from jaxspec.models.config import ModelConfig

BlockPass = Callable[[Int[Array, " block"]], tuple[Float[Array, "block embed"], PyTree]]
"""A draft pass over a block.

It takes the block's tokens, masks if they are not drafted yet. It returns the features that decide
each position, and what the drafter keeps of the pass.
"""
Follow = Callable[
    [Float[Array, "1 vocab"], Float[Array, "1 embed"], Int[Array, " nodes"]],
    Float[Array, "nodes vocab"],
]
"""Makes of a position's logits and features those after each of several tokens."""
Sure = Callable[[Float[Array, "nodes embed"], Int[Array, " nodes"]], Bool[Array, " nodes"]]
"""Says whether positions are worth a draft, by their features and the tokens before them."""


@dataclasses.dataclass(frozen=True)
class AdaptiveBlock(Checked):
    """Rule for the length of drafts, by how much of the last ones was accepted.

    Each row keeps a running rate for each depth: the share of steps that accepted it, of those that
    offered it and accepted all before it. The next draft has the length m, possibly 0, with the
    most expected tokens per cost: `(1 + sum of chances to depth m) / (1 + draft_cost + token_cost *
    nodes)`, and 1 for m = 0. `nodes` are those to depth m, or the most there can be if the tree is
    built for every step.

    A row whose best length is 0 drafts the next best one from time to time, to check whether 0 is
    still best, unless no draft could pay. If no row of a batch drafts, the draft pass is left out.

    Costs depend on machine and models: give those that `jaxspec tune profile` prints. The defaults
    are for a drafter much smaller than the target. `--drafter` takes the costs of `profile.json` in
    the drafter's folder, if it is there.

    Attributes:
        memory: weight of the past in each rate.
        prior: every rate before anything is known.
        draft_cost: of a draft pass, in target passes over one token.
        token_cost: of each further token of a target pass, in target passes over one token.
        explore: steps without a draft after which a row drafts nevertheless. It waits twice as long
            each time that drafting still does not pay.
        patience: most steps that it waits.

    Raises:
        ValueError: a setting is out of range.
    """

    memory: Share = 0.9
    prior: Share = 0.8
    draft_cost: NotNegative = 0.2
    token_cost: NotNegative = 0.37
    explore: Count = 8
    patience: Count = 64

    def __post_init__(self):
        super().__post_init__()
        if self.patience < self.explore:
            raise ValueError(
                f"patience must be at least explore ({self.explore}), got {self.patience}."
            )


class Acceptance(NamedTuple):
    """Record of how a row's drafts were accepted.

    Attributes:
        rates: running, of each depth; see `AdaptiveBlock`.
        offered: depth of the draft that is being verified; 0 before the first.
        idle: steps since the last draft.
        wait: most steps before the next draft; 0 while drafting pays.
    """

    rates: Float[Array, " depth"]
    offered: Int[Array, ""]
    idle: Int[Array, ""]
    wait: Int[Array, ""]


class BlockDraft(NamedTuple):
    """A proposal, and the parts of the drafter's state that come with it.

    Attributes:
        proposal: for the target to verify.
        kept: what the drafter keeps of the pass; zeros without a pass.
        drafted: True if there was a pass.
        acceptance: of the row, with this draft's length.
    """

    proposal: Proposal
    kept: PyTree
    drafted: Bool[Array, ""]
    acceptance: Acceptance


class Choices(NamedTuple):
    """Tokens chosen for each position.

    Attributes:
        tokens: the best, or the first drawn, first.
        logprobs: the distributions they come from; for dynamic trees, those of the tokens alone.
    """

    tokens: Int[Array, "positions branch"]
    logprobs: Float[Array, "positions _"]


Expansion = Callable[[int, Int[Array, " nodes"], Int[Array, " nodes"]], Choices]
"""Chooses the children of the nodes of one level, of each node or the same of all.

It takes their depth, their tokens, and the places of their parents among the nodes above that were
expanded.
"""


@dataclasses.dataclass(frozen=True)
class BlockSettings(Checked):
    """Settings of drafting a block. The default is a chain.

    Attributes:
        block: positions that a draft pass predicts, k; the longest chain.
        paths: rank paths of a static tree, see `tree_from_paths`; siblings are the likeliest tokens
            of their position, or behind their parent, or draws without replacement.
        num_nodes: nodes, the root not counted, of a tree that is built of the most probable paths
            for every row and step; its tokens are deterministic at any temperature.
        branch: tokens of a position, or behind a node, that such a tree considers.
        temperature: of drafting; `None`: the row's. 0 drafts the likeliest tokens, which are
            verified as deterministic ones. Drawn tokens pass the row's filters; the likeliest are
            taken as they are. Not for `num_nodes`, which takes the likeliest.
        steps: denoising passes for one chain. Each decides an even share of the positions from left
            to right, so each token's distribution depends on the tokens before it alone, as
            verification requires.
        adaptive: rule for the length of drafts; `None`: the whole block.

    Raises:
        ValueError: a setting is out of range, or two exclude each other.
    """

    block: Nodes = 8
    paths: tuple[Path, ...] | None = None
    num_nodes: Nodes | None = None
    branch: Count = 4
    temperature: NotNegative | None = None
    steps: Count = 1
    adaptive: AdaptiveBlock | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.temperature is not None and self.num_nodes is not None:
            raise ValueError(
                "temperature and num_nodes exclude each other: such a tree takes the likeliest "
                "tokens, whatever the temperature."
            )
        if self.paths is not None and self.num_nodes is not None:
            raise ValueError("paths and num_nodes exclude each other: a tree is one or the other.")
        if self.steps > self.block:
            raise ValueError(
                f"steps must be at most block ({self.block}): each decides a position at least; "
                f"got {self.steps}."
            )
        if self.steps > 1 and not self.is_chain:
            raise ValueError(
                f"steps must be 1 for a tree, got {self.steps}: later passes would need a canvas "
                "for each of its paths."
            )
        if self.paths is not None:
            object.__setattr__(self, "paths", normalize_paths(self.paths))
            if not self.paths:
                raise ValueError(
                    "paths: a tree without a node drafts nothing; to decode plainly, give no "
                    "drafter."
                )
        if self.depth > self.block:
            raise ValueError(
                f"paths: the tree is {self.depth} levels deep, but a block has {self.block} "
                "positions; give a larger block or a shallower tree."
            )
        if self.num_nodes is not None and self.num_nodes > (most := self._num_candidates):
            raise ValueError(
                f"num_nodes must be at most {most} with block {self.block} and branch "
                f"{self.branch}, got {self.num_nodes}."
            )
        if self.num_nodes is not None and self._num_candidates > MOST_CANDIDATES:
            raise ValueError(
                f"branch: {self.branch} tokens of a position with num_nodes {self.num_nodes} give "
                f"{self._num_candidates} candidates, at most {MOST_CANDIDATES} are possible; lower "
                "one of them."
            )

    @property
    def is_chain(self) -> bool:
        """True without a tree."""
        return self.paths is None and self.num_nodes is None

    @property
    def depth(self) -> int:
        """Levels of the deepest draft."""
        if self.num_nodes is not None:
            return min(self.block, self.num_nodes)
        return self.block if self.paths is None else max(map(len, self.paths))

    @property
    def slack(self) -> int:
        """Most tokens emitted between two draft passes, in addition to those of one step."""
        return 0 if self.adaptive is None else self.adaptive.patience

    @cached_property
    def tree(self) -> Tree | None:
        """The static tree; `None` if it is built for each step."""
        if self.num_nodes is not None:
            return None
        return chain(self.block) if self.paths is None else tree_from_paths(self.paths)

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes = self.num_nodes if self.tree is None else len(self.tree.parents) - 1
        assert nodes is not None
        return nodes + 1, self.depth

    @property
    def widths(self) -> tuple[int, ...]:
        nodes, _ = self.tree_shape
        return (nodes,) if self.adaptive is None else bank(nodes)

    @property
    def max_branch(self) -> int:
        """The most children of a node."""
        return self.branch if self.tree is None else self.tree.children.shape[1]

    def check_room(self, positions: str, longest: int, vocab_size: int) -> None:
        """Refuses blocks and trees that are too large for a head or a drafter.

        Raises:
            ValueError: saying which.
        """
        if self.block > longest:
            raise ValueError(f"block must be at most {positions}, got {self.block}.")
        if self.max_branch >= vocab_size:
            raise ValueError(
                f"drafter: a node has up to {self.max_branch} children, but only {vocab_size - 1} "
                "tokens can be drafted; give a narrower tree."
            )

    def check_passes(self, *, follows: bool) -> None:
        """Refuses several passes if tokens follow one another, see `draft`.

        Raises:
            ValueError: `follows`, and `steps` is not 1.
        """
        if follows and self.steps > 1:
            raise ValueError(
                f"steps must be 1, got {self.steps}: it is for places that do not depend on one "
                "another, and this drafter chooses each token by the one before it."
            )

    def within_positions(self, config: ModelConfig, context: Context) -> ModelConfig:
        """Returns settings of draft passes that look no further back than there are positions.

        Where the text has room for no more, and where some layers slide already, they are `config`.
        Rotations are relative, so each token sees those before it as in a text of its own. Masks
        are arguments of the passes, which need no `diffusion`.
        """
        if context.tokens.shape[0] <= config.max_positions or config.sliding_window is not None:
            return config
        kinds = tuple("sliding" if kind == "full" else kind for kind in config.layer_types)
        window = config.max_positions
        return config.replace(layer_types=kinds, sliding_window=window, diffusion=None)

    @cached_property
    def _nodes_to_depth(self) -> np.ndarray:
        """Most nodes of a draft that ends at each depth, the root not counted."""
        if self.num_nodes is not None:
            return np.minimum(self.num_nodes, self.branch * np.cumsum(self._beams()))
        assert self.tree is not None
        return np.cumsum(np.bincount(self.tree.depths)[1:])

    @property
    def _num_candidates(self) -> int:
        return sum(beam * self.branch for beam in self._beams())

    def _beams(self) -> list[int]:
        """Returns the number of paths that each level extends: all that could be in the tree.

        A path that is extended is in the tree with its ancestors, a child, and every better path of
        its length.
        """
        assert self.num_nodes is not None
        beams = [1]
        while len(beams) < self.depth:
            beams.append(min(self.num_nodes - len(beams), beams[-1] * self.branch))
        return beams

    def nothing_accepted(self) -> Acceptance:
        """Returns the record of a row before its first draft."""
        adaptive = self.adaptive
        prior, wait = (0.0, 0) if adaptive is None else (adaptive.prior, adaptive.explore)
        zero = jnp.int32(0)
        return Acceptance(jnp.full(self.depth, prior), zero, zero, jnp.int32(wait))

    def draft(
        self,
        key: PRNGKeyArray,
        read: BlockPass,
        unembed: Callable[[Float[Array, "positions embed"]], Float[Array, "positions _"]],
        mask_token_id: int,
        vocab_size: int,
        context: Context,
        acceptance: Acceptance,
        follow: Follow | None = None,
        sure: Sure | None = None,
    ) -> BlockDraft:
        """Drafts a block.

        Args:
            key: for sampled tokens.
            read: the draft pass.
            unembed: features to draft logits.
            mask_token_id: never drafted.
            vocab_size: of the target.
            context: of the row.
            acceptance: after the last draft.
            follow: what a token makes of the next position; `None`: nothing. Not for several
                passes.
            sure: a path ends where it is False; `None`: nowhere. As `follow`, and not with
                `adaptive`, nor for trees that are built in each step.
        """
        root = context.tokens[context.length - 1]
        rates, length, wait = self._length(acceptance, context)
        length = jnp.minimum(length, jnp.maximum(context.room - 1, 0))
        warp = self._warp(context.warp)

        def choose() -> tuple[Choices | Pool, Float[Array, "positions embed"], PyTree]:
            tokens = jnp.full(self.block, mask_token_id, jnp.int32)
            kept, choices, seen = None, [], []
            standing: Any = None
            if context.grammar is not None:
                standing = context.grammar.state[None]
            ends = [-(-step * self.block // self.steps) for step in range(self.steps + 1)]
            for step, step_key in enumerate(jax.random.split(key, self.steps)):
                part = slice(ends[step], min(ends[step + 1], self.depth))
                features, kept = read(tokens)
                seen.append(features[part])
                logits = unembed(seen[-1])
                if mask_token_id < logits.shape[1]:
                    logits = logits.at[:, mask_token_id].set(-jnp.inf)
                if follow is not None:
                    given = partial(_given, follow, logits, seen[-1], vocab_size)
                    chosen = self._choose_by_level
                    if self.tree is None:
                        chosen = self._candidates
                    return chosen(step_key, given, root, warp, context), seen[-1], kept
                logits = fit_vocab(logits, vocab_size)
                if context.grammar is None:
                    choices.append(self._choose(step_key, logits, warp))
                else:
                    chosen, standing = self._choose_in_turn(
                        step_key, logits, warp, context.grammar, standing, part.start
                    )
                    choices.append(chosen)
                if self.steps > 1:
                    tokens = tokens.at[part].set(choices[-1].tokens[:, 0])
            return _joined(choices), jnp.concatenate(seen), kept

        drafted = jnp.bool_(True)
        if self.adaptive is None:
            found, features, kept = choose()
        else:
            drafted = length > 0
            found, features, kept = _where_wanted(drafted, choose)
        drawn = warp.temperature is not None
        if isinstance(found, Pool):
            # Without a pass all is zero. Every parent is then the root, and no node is valid.
            parents = jnp.where(drafted, found.parents, -1)
            proposal = self._best_paths(found._replace(parents=parents), root)
        elif follow is None:
            proposal = self.offer(found, root, drawn=drawn)
        else:
            assert self.tree is not None, "a tree that is built makes a pool"
            tokens = jnp.concatenate([root[None], found.tokens[:, 0]])
            every_node = jnp.ones(len(tokens), bool)
            logprobs = found.logprobs if drawn else None
            proposal = tree_proposal(self.tree, tokens, every_node, logprobs)
        goes_on = None
        if sure is not None:
            assert self.tree is not None, "`sure` is not for trees that are built"
            above = proposal.tokens[jnp.maximum(proposal.tree.parents, 0)]
            goes_on = sure(take_rows(features, np.maximum(self.tree.depths - 1, 0)), above)
        valid = self._valid(proposal, length, context, goes_on)
        proposal = proposal._replace(valid=valid)
        idle = jnp.where(drafted, 0, acceptance.idle + 1)
        return BlockDraft(proposal, kept, drafted, Acceptance(rates, length, idle, wait))

    def _warp(self, warp: Warp) -> Warp:
        """Returns the warp of a row's drafts; without a temperature they are the likeliest."""
        if warp.temperature is None or self.temperature is None:
            return warp
        if self.temperature == 0:
            return Warp(bias=warp.bias)
        return warp._replace(temperature=jnp.full_like(warp.temperature, self.temperature))

    def _choose(
        self, key: PRNGKeyArray, logits: Float[Array, "positions vocab"], warp: Warp
    ) -> Choices:
        if self.num_nodes is None:
            tokens, distributions = choose_children(key, logits, warp, self.max_branch)
            return Choices(tokens.astype(jnp.int32), distributions)
        if warp.bias is not None:
            logits = logits + warp.bias[None]
        # Row by row: with three axes XLA sorts whole rows on CPUs.
        best = [jax.lax.top_k(row, self.branch) for row in logits]
        scores, tokens = (jnp.stack(part) for part in zip(*best, strict=True))
        totals = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return Choices(tokens.astype(jnp.int32), scores - totals)

    def _choose_in_turn(
        self,
        key: PRNGKeyArray,
        logits: Float[Array, "positions vocab"],
        warp: Warp,
        grammar: RowGrammar,
        standing: Int[Array, "1"],
        start: int,
    ) -> tuple[Choices, Int[Array, "1"]]:
        """Chooses position by position, as the grammar goes on after the first token of each.

        Later tokens of a position begin other paths of a tree, which may leave the grammar.

        Args:
            key: for sampled tokens.
            logits: of the positions.
            warp: of the drafts.
            grammar: of the row.
            standing: state of the grammar before the first position.
            start: number of the first position.
        """
        choices = []
        for place, place_key in enumerate(jax.random.split(key, len(logits))):
            row = logits[place : place + 1]
            row = grammar.keep(row, standing, start + place, warp.bias)
            choices.append(self._choose(place_key, row, warp))
            standing = grammar.after(standing, choices[-1].tokens[:, 0])
        return _joined(choices), standing

    def _choose_by_level(
        self,
        key: PRNGKeyArray,
        given: Callable[[int, Int[Array, " nodes"]], Float[Array, "nodes vocab"]],
        root: Int[Array, ""],
        warp: Warp,
        context: Context,
    ) -> Choices:
        """Chooses the nodes of the static tree, each level given the one above.

        Args:
            key: for sampled tokens.
            given: from a position and the tokens before it to logits.
            root: the pending token.
            warp: of the drafts.
            context: of the row.

        Returns:
            One token for each node, and one distribution for each that has children.
        """
        assert self.tree is not None, "a tree that is built has `_candidates`"

        def forward(level: Any, tokens: Int[Array, " nodes"], *_: Any) -> Hidden:
            logits = given(level, tokens)
            return Hidden(logits, logits[:, :0], ())

        first = given(0, root[None])
        law = DraftLaw(lambda logits: logits, warp, first.shape[1], grammar=context.grammar)
        proposal = grow_tree(self.tree, key, root, law, first, forward)
        logprobs = proposal.draft_logprobs
        return Choices(proposal.tokens[1:, None], first[:0] if logprobs is None else logprobs)

    def offer(self, choices: Choices, root: Int[Array, ""], *, drawn: bool) -> Proposal:
        """The proposal that choices make, every node valid; `drawn`: they are sampled."""
        if self.tree is None:

            def of_position(level: int, tokens: Int[Array, " nodes"], parents: Any) -> Choices:
                del tokens, parents
                return Choices(*(part[level][None] for part in choices))

            return self._best_paths(self._expand(of_position, root), root)
        tree, branch = self.tree, choices.tokens.shape[1]
        picked = np.asarray((tree.depths[1:] - 1) * branch + tree.ranks[1:])
        tokens = jnp.concatenate([root[None], take_rows(choices.tokens.reshape(-1), picked)])
        every_node = jnp.ones(len(tree.parents), bool)
        if not drawn:
            return tree_proposal(tree, tokens, every_node)
        # Parents of one depth share one draw: only one of them is ever asked for its children.
        law_row = jnp.asarray(tree.depths - 1).at[0].set(0)
        tree = jax.tree.map(jnp.asarray, tree)
        return Proposal(tokens, tree, every_node, choices.logprobs, law_row)

    def _candidates(
        self,
        key: PRNGKeyArray,
        given: Callable[[int, Int[Array, " nodes"]], Float[Array, "nodes vocab"]],
        root: Int[Array, ""],
        warp: Warp,
        context: Context,
    ) -> Pool:
        """Returns the candidates for a tree whose nodes depend on the token above each.

        Args:
            key: not read: the likeliest are taken.
            given: from a position and the tokens before it to logits.
            root: the pending token.
            warp: of the drafts.
            context: of the row.
        """
        grammar = context.grammar
        standing: Any = None if grammar is None else grammar.state[None]

        def after(level: int, tokens: Int[Array, " nodes"], parents: Any) -> Choices:
            nonlocal standing
            logits = given(level, tokens)
            if grammar is not None:
                if level:
                    standing = grammar.after(standing[parents], tokens)
                logits = grammar.keep(logits, standing, level, warp.bias)
            return self._choose(key, logits, warp)

        return self._expand(after, root)

    def _expand(self, children: Expansion, root: Int[Array, ""]) -> Pool:
        """Returns the children of the paths with the highest products, level by level."""
        tokens, scores, places = root[None], jnp.zeros(1), jnp.full(1, -1, jnp.int32)
        parents = jnp.zeros(1, jnp.int32)
        pools, created = [], 0
        for level, beam in enumerate(self._beams()):
            if level:
                scores = pools[-1].scores
                before = created - scores.shape[0]
                best = jnp.arange(beam)
                if beam < scores.shape[0]:
                    scores, best = jax.lax.top_k(scores, beam)
                tokens, parents = pools[-1].tokens[best], best // self.branch
                places = (before + best).astype(jnp.int32)
            chosen = children(level, tokens, parents)
            extended = scores[:, None] + chosen.logprobs
            drafted = jnp.broadcast_to(chosen.tokens, extended.shape)
            pools.append(
                Pool(drafted.reshape(-1), jnp.repeat(places, self.branch), extended.reshape(-1))
            )
            created += beam * self.branch
        return Pool(*map(jnp.concatenate, zip(*pools, strict=True)))

    def _best_paths(self, pool: Pool, root: Int[Array, ""]) -> Proposal:
        """Returns the tree of the paths with the highest products."""
        assert self.num_nodes is not None
        return best_of_pool(pool, root, self.num_nodes, self.depth, self.branch)

    def _valid(
        self,
        proposal: Proposal,
        length: Int[Array, ""],
        context: Context,
        goes_on: Bool[Array, " nodes"] | None,
    ) -> Bool[Array, " nodes"]:
        """Returns True for nodes within the length that do not follow a drafted stop id.

        Where `goes_on` is False, a path ends above the node.
        """
        tree = proposal.tree
        is_stop = jnp.any(proposal.tokens[:, None] == context.stop_ids[None, :], axis=1)
        nodes = jnp.arange(is_stop.shape[0])
        before = tree.ancestors & (nodes[:, None] != nodes[None, :]) & (nodes > 0)[None, :]
        ended = jnp.any(before & is_stop[None, :], axis=1)
        if goes_on is not None:
            ended = ended | jnp.any(tree.ancestors & (~goes_on & (nodes > 0))[None, :], axis=1)
        return (tree.depths == 0) | ((tree.depths <= length) & ~ended)

    def _length(
        self, acceptance: Acceptance, context: Context
    ) -> tuple[Float[Array, " depth"], Int[Array, ""], Int[Array, ""]]:
        return self.next_length(acceptance, jnp.maximum(context.recent.count - 1, 0))

    def next_length(
        self, acceptance: Acceptance, accepted: Int[Array, ""]
    ) -> tuple[Float[Array, " depth"], Int[Array, ""], Int[Array, ""]]:
        """Returns the rates after the last draft was verified, the next depth, and the wait.

        `accepted` counts the tokens of the last draft that stand.
        """
        rates, adaptive = acceptance.rates, self.adaptive
        if adaptive is None:
            return rates, jnp.int32(self.depth), acceptance.wait
        depths = jnp.arange(1, self.depth + 1)
        tried = (depths <= acceptance.offered) & (accepted >= depths - 1)
        mixed = adaptive.memory * rates + (1 - adaptive.memory) * (accepted >= depths)
        rates = jnp.where(tried, mixed, rates)
        tokens = 1 + jnp.cumsum(jnp.cumprod(rates))
        costs = 1 + adaptive.draft_cost + adaptive.token_cost * self._nodes_to_depth
        worth = tokens / jnp.asarray(costs, tokens.dtype)
        best, pays = jnp.argmax(worth).astype(jnp.int32) + 1, jnp.max(worth) > 1
        doubled = jnp.clip(2 * acceptance.wait, adaptive.explore, adaptive.patience)
        wait = jnp.where(acceptance.offered > 0, doubled, acceptance.wait)
        wait = jnp.where(pays, 0, wait)
        could_pay = bool(np.any(1 + np.arange(1, self.depth + 1) > costs))
        tries = (acceptance.idle >= wait) & could_pay
        return rates, jnp.where(pays | tries, best, 0), wait


def _joined(choices: list[Choices]) -> Choices:
    return Choices(*map(jnp.concatenate, zip(*choices, strict=True)))


def _given(
    follow: Follow,
    logits: Float[Array, "positions vocab"],
    features: Float[Array, "positions embed"],
    vocab_size: int,
    position: int,
    previous: Int[Array, " nodes"],
) -> Float[Array, "nodes _"]:
    """Returns the logits of one position after each of several tokens, of the target's tokens."""
    row = slice(position, position + 1)
    return fit_vocab(follow(logits[row], features[row], previous), vocab_size)


def _where_wanted(wanted: Bool[Array, ""], compute: Callable[[], PyTree]) -> PyTree:
    """Returns `compute()`, or zeros without computing if no row of the batch wants it."""
    shapes = jax.eval_shape(compute)
    return jax.lax.cond(
        largest_of_rows(wanted),
        compute,
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    )
