"""Drafts of several drafters: static trees, chains that end when unsure, the best of a pool."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jaxspec.core.cache import KEY_PLACES_AXIS, VALUE_PLACES_AXIS, write
from jaxspec.core.forms import exchangeable
from jaxspec.core.grammar import RowGrammar
from jaxspec.core.proposal import chain_proposal, choose_children, tree_proposal
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.tree import traced_tree
from jaxspec.core.types import Hidden, LayerKV, Proposal, Tree, Warp

Scratch = tuple[LayerKV, ...]
ChainScratch = tuple[LayerKV | None, ...]
"""Keys and values of a chain's nodes, place by place; `None` in a layer without attention."""
LevelPass = Callable[
    [
        int | Int[Array, ""],
        Int[Array, " expanded"],
        Float[Array, "expanded embed"],
        Bool[Array, "expanded seen"],
        Scratch | ChainScratch | None,
    ],
    Hidden,
]
"""A draft pass over the nodes of one level that have children.

It takes their depth, their tokens, the features of their parents, a mask of the scratch entries and
nodes that each sees, and the keys and values of the levels above.
"""


class DraftLaw(NamedTuple):
    """Settings that turn features of a draft pass into the tokens that follow.

    Attributes:
        unembed: features to draft logits.
        warp: of the row.
        vocab_size: of the target.
        draft_ids: the target's id of each draft logit; `None`: the same, except for padding.
        grammar: of the row.
    """

    unembed: Callable[[Float[Array, "nodes embed"]], Float[Array, "nodes draft_vocab"]]
    warp: Warp
    vocab_size: int
    draft_ids: Int[Array, " draft_vocab"] | None = None
    grammar: RowGrammar | None = None

    @property
    def num_drafted(self) -> int:
        """Tokens that may be drafted."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def logits(
        self, features: Float[Array, "nodes embed"], states: Any, depth: int | Int[Array, ""]
    ) -> Float[Array, "nodes drafted"]:
        """Returns the logits of what may follow nodes of one depth, before any warping.

        Args:
            features: of the nodes.
            states: of the grammar, at the nodes; `None` without one.
            depth: of the nodes.
        """
        logits = self.unembed(features)
        if self.draft_ids is None:
            logits = fit_vocab(logits, self.vocab_size)
        if self.grammar is not None:
            logits = self.grammar.keep(logits, states, depth, self._warp.bias, self.draft_ids)
        return logits

    def choose(
        self, key: PRNGKeyArray, logits: Float[Array, "nodes drafted"], branch: int
    ) -> tuple[Int[Array, "nodes branch"], Float[Array, "nodes drafted"]]:
        """Chooses the children of nodes, see `choose_children`, as places among the logits."""
        return choose_children(key, logits, self._warp, branch)

    def ids(self, choices: Int[Array, " chosen"]) -> Int[Array, " chosen"]:
        """Returns the target's ids of what `choose` chose."""
        return choices if self.draft_ids is None else lookup_ids(self.draft_ids, choices)

    def over_vocab(
        self, logprobs: Float[Array, "distributions drafted"]
    ) -> Float[Array, "distributions vocab"] | None:
        """Returns the distributions over the target's ids; `None` if the row decodes greedily."""
        if self.warp.temperature is None:
            return None
        if self.draft_ids is None:
            return logprobs
        nowhere = jnp.full((logprobs.shape[0], self.vocab_size), -jnp.inf)
        return nowhere.at[:, self.draft_ids].set(logprobs)

    @property
    def _warp(self) -> Warp:
        if self.draft_ids is None or self.warp.bias is None:
            return self.warp
        return self.warp._replace(bias=self.warp.bias[self.draft_ids])


def grow_tree(
    tree: Tree,
    key: PRNGKeyArray,
    root: Int[Array, ""],
    law: DraftLaw,
    feature: Float[Array, "1 embed"],
    forward: LevelPass,
) -> Proposal:
    """Chooses the children of every node from the draft model's distribution at it.

    Each level that has nodes with children costs one pass over those nodes; the root's level costs
    none.

    Args:
        tree: static.
        key: for sampled children.
        root: the pending token.
        law: makes tokens of features.
        feature: gives the distribution at the root.
        forward: the pass of one level.

    Raises:
        ValueError: a node has more children than there are tokens to draft.
    """
    branch = tree.children.shape[1]
    if branch > law.num_drafted:
        raise ValueError(
            f"paths: a node has {branch} children, but only {law.num_drafted} tokens can be "
            "drafted."
        )
    has_child = tree.children[:, 0] >= 0
    tokens = root[None]
    features, above = feature, np.zeros(1, np.int32)  # of the nodes `above`
    scratch, scratch_nodes, distributions = None, np.zeros(0, np.int32), []
    states: Any = None if law.grammar is None else law.grammar.state[None]
    depth = tree.paths.shape[1] - 1
    for level, level_key in enumerate(jax.random.split(key, depth)):
        expanded = np.flatnonzero((tree.depths == level) & has_child)
        if level > 0:
            seen = np.concatenate([scratch_nodes, expanded])
            hidden = forward(
                level,
                take_rows(tokens, expanded),
                take_rows(features, np.searchsorted(above, tree.parents[expanded])),
                jnp.asarray(tree.ancestors[np.ix_(expanded, seen)]),
                scratch,
            )
            scratch, scratch_nodes = extend(scratch, hidden.new_kv), seen
            features, above = hidden.features, expanded
        standing = None if law.grammar is None else states[expanded]
        logits = law.logits(features, standing, level)
        choices, logprobs = law.choose(level_key, logits, branch)
        below = np.flatnonzero(tree.depths == level + 1)
        rows = np.searchsorted(expanded, tree.parents[below])
        chosen = law.ids(take_rows(choices.reshape(-1), rows * branch + tree.ranks[below]))
        tokens = jnp.concatenate([tokens, chosen])
        if law.grammar is not None:
            moved = law.grammar.after(states[tree.parents[below]], chosen)
            states = jnp.concatenate([states, moved])
        distributions.append(logprobs)
    every_node = jnp.ones(tree.parents.shape[0], bool)
    return tree_proposal(tree, tokens, every_node, law.over_vocab(jnp.concatenate(distributions)))


Confidence = Callable[
    [Float[Array, ""], Float[Array, " drafted"], Int[Array, ""]], Float[Array, ""]
]
"""The confidence after a token: from that before it, the law that it was drawn from, and itself.

The law is the one before any warping. The token is named by its place in the law.
"""


NODE_SHARE = 0.25
"""Share of the threshold below which a token is not drawn at all.

The threshold pays for a draft pass and a place in the target's; when the pass is made, a token has
to pay for its place alone.
"""


def of_draft(
    before: Float[Array, ""], law: Float[Array, " drafted"], choice: Int[Array, ""]
) -> Float[Array, ""]:
    """Estimates the chance that the whole draft is accepted: the product of the laws' largest.

    Example:
        >>> round(float(of_draft(jnp.float32(0.5), jnp.array([0.1, 0.6, 0.3]), jnp.int32(2))), 2)
        0.3
    """
    return before * jnp.max(law)


class _Chain(NamedTuple):
    """A chain that is growing. Entries past those of `count` tokens mean nothing.

    Attributes:
        place: of the next token, in chains that still grow; one value for the whole batch.
        tokens: the pending token, then the drafted ones.
        feature: of the last pass.
        logprobs: distributions that the tokens were drawn from; `None` for deterministic drafts.
        scratch: of the nodes.
        count: drafted tokens.
        confidence: in the draft.
        standing: the draft's state of the grammar; `None` without one.
    """

    place: Int[Array, ""]
    tokens: Int[Array, " nodes"]
    feature: Float[Array, "1 embed"]
    logprobs: Float[Array, "drafts drafted"] | None
    scratch: ChainScratch
    count: Int[Array, ""]
    confidence: Float[Array, ""]
    standing: Any


class GrownChain(NamedTuple):
    """A chain that may have ended early.

    Attributes:
        proposal: the chain.
        count: its tokens.
        passes: draft passes that it took, that of the root included. A last distribution that no
            token was drawn from took a pass, too.
    """

    proposal: Proposal
    count: Int[Array, ""]
    passes: Int[Array, ""]


def grow_chain(
    length: int,
    room: Int[Array, ""],
    threshold: float | Float[Array, ""],
    key: PRNGKeyArray,
    root: Int[Array, ""],
    law: DraftLaw,
    feature: Float[Array, "1 embed"],
    forward: LevelPass,
    scratch: ChainScratch,
    *,
    begun: bool = True,
    confidence: Confidence = of_draft,
    least: float = NODE_SHARE,
) -> GrownChain:
    """Drafts a chain that ends when the draft is unsure: each further token costs a pass.

    It ends after the token that takes the confidence below the threshold; or before that token is
    drawn, if its law alone takes the confidence far below. To drop a token for what it is, or for
    its own probability, is a bias: the law of the tokens that remain is not the stated one.

    Passes run until every row of a batch (`jax.vmap`) has ended its chain.

    Args:
        length: of the longest chain, static.
        room: tokens that may be emitted; one of them is the target's own.
        threshold: 0 never ends a chain early.
        key: for sampled tokens.
        root: the pending token.
        law: makes tokens of features.
        feature: gives the distribution at the root, if it was `begun`; else it means nothing.
        forward: the pass over one node.
        scratch: an empty one of `length` places.
        begun: the root has been read; else the first pass is over it.
        confidence: how it is counted.
        least: share of the threshold below which a token is not drawn. It must be 0 if the
            confidence depends on the token.
    """
    keys, places = jax.random.split(key, length), jnp.arange(length)
    longest = jnp.clip(room - 1, int(begun), length)

    def grows(chain: _Chain) -> Bool[Array, ""]:
        return (chain.confidence >= threshold) & (chain.count < longest)

    def draw(chain: _Chain) -> _Chain:
        at, state, growing = chain.place, chain.standing, grows(chain)
        logits = law.logits(chain.feature, None if law.grammar is None else state[None], at)
        choices, logprobs = law.choose(keys[at], logits, 1)
        (token,) = law.ids(choices[0])
        sure = confidence(chain.confidence, jax.nn.softmax(logits[0]), choices[0, 0])
        sure = jnp.where(growing, sure.astype(jnp.float32), chain.confidence)
        laws = chain.logprobs
        if laws is not None:
            # Only what is written is selected: a pass must not move the other laws.
            written = jnp.where(growing, logprobs[0].astype(laws.dtype), laws[at])
            laws = jax.lax.dynamic_update_index_in_dim(laws, written, at, 0)
        return chain._replace(
            place=at + 1,
            tokens=chain.tokens.at[at + 1].set(jnp.where(growing, token, 0)),
            logprobs=laws,
            count=chain.count + (growing & ~(sure < least * threshold)),
            confidence=sure,
            standing=None if law.grammar is None else law.grammar.after(state, token),
        )

    def read_and_draw(chain: _Chain) -> _Chain:
        at = chain.place
        seen = jnp.concatenate([(places < at) & (places >= int(begun)), jnp.ones(1, bool)])
        hidden = forward(at, chain.tokens[at][None], chain.feature, seen[None], chain.scratch)
        kept = tuple(
            None if layer is None else write(layer, new, at)
            for layer, new in zip(chain.scratch, hidden.new_kv, strict=True)
        )
        return draw(chain._replace(feature=hidden.features, scratch=kept))

    distributions = None
    if law.warp.temperature is not None:
        # Verification reads all rows, also those of nodes that are not drafted.
        distributions = jnp.full((length, law.num_drafted), -jnp.log(law.num_drafted))
    chain = _Chain(
        place=jnp.int32(0),
        tokens=jnp.zeros(length + 1, jnp.int32).at[0].set(root),
        feature=feature,
        logprobs=distributions,
        scratch=scratch,
        count=jnp.int32(0),
        confidence=jnp.float32(1),
        standing=None if law.grammar is None else law.grammar.state,
    )
    # A condition of each row would make `vmap` select between whole chains, laws and all.
    chain = jax.lax.while_loop(
        lambda chain: largest_of_rows(grows(chain)), read_and_draw, draw(chain) if begun else chain
    )
    distributions = None if chain.logprobs is None else law.over_vocab(chain.logprobs)
    valid = jnp.arange(length + 1) <= chain.count
    passes = chain.count + (chain.confidence < least * threshold)
    return GrownChain(chain_proposal(chain.tokens, valid, distributions), chain.count, passes)


def check_threshold(threshold: float, tree: Tree) -> None:
    """Refuses a threshold that is out of range, or of a tree with branches.

    Raises:
        ValueError: saying what to give.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}.")
    if threshold and tree.children.shape[1] > 1:
        raise ValueError(
            f"threshold: only a chain ends early, and this tree has nodes with "
            f"{tree.children.shape[1]} children; give paths of a chain, such as ((0,), (0, 0)), "
            "or no threshold."
        )


def take_rows(array: Shaped[Array, "rows *row"], rows: np.ndarray) -> Shaped[Array, "taken *row"]:
    """Returns `array[rows]` for static rows, cut out in runs: a gather is slower on CPUs.

    The GPU of a phone has no gather at all.

    Example:
        >>> take_rows(jnp.arange(5), np.array([1, 2, 4])).tolist()
        [1, 2, 4]
    """
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    pieces = [jax.lax.slice_in_dim(array, run[0], run[-1] + 1) for run in runs]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


@exchangeable
def lookup_ids(ids: Int[Array, " table"], index: Int[Array, " taken"]) -> Int[Array, " taken"]:
    """Returns `ids[index]`."""
    return ids[index]


def fit_vocab(
    logits: Float[Array, "parents draft_vocab"], size: int
) -> Float[Array, "parents vocab"]:
    """Cuts or pads logits to a vocabulary's size; families pad vocabularies differently."""
    missing = max(0, size - logits.shape[-1])
    return jnp.pad(logits[:, :size], ((0, 0), (0, missing)), constant_values=-jnp.inf)


def extend(scratch: Scratch | None, new_kv: Scratch) -> Scratch:
    """Returns scratch with the keys and values of another pass appended."""
    if scratch is None:
        return new_kv
    return tuple(
        LayerKV(
            jnp.concatenate([old.keys, new.keys], KEY_PLACES_AXIS),
            jnp.concatenate([old.values, new.values], VALUE_PLACES_AXIS),
        )
        for old, new in zip(scratch, new_kv, strict=True)
    )


MOST_CANDIDATES = 1 << 20
"""Largest pool of a row and step."""


class Pool(NamedTuple):
    """Candidates for the tree in the order of their creation, so that parents come first.

    Attributes:
        tokens: of the candidates.
        parents: index in the pool; -1 is the root.
        scores: the drafter's log-probability of the path from the root.
    """

    tokens: Int[Array, " candidates"]
    parents: Int[Array, " candidates"]
    scores: Float[Array, " candidates"]


def best_of_pool(
    pool: Pool, root: Int[Array, ""], num_nodes: int, max_depth: int, branch: int
) -> Proposal:
    """Returns the tree of the `num_nodes` best candidates; its tokens are deterministic.

    Re-ranking of EAGLE-2 (Li et al. 2024b, section 4.2).

    Args:
        pool: at least `num_nodes` candidates.
        root: the pending token.
        num_nodes: of the tree, the root not counted.
        max_depth: static bound on depth.
        branch: static bound on children per node.
    """
    # The best of the pool include their parents: no child scores above its parent, and on ties
    # `top_k` takes the one created first.
    best = jnp.zeros(pool.scores.shape[0], bool)
    best = best.at[jax.lax.top_k(pool.scores, num_nodes)[1]].set(True)
    kept = jnp.nonzero(best, size=num_nodes)[0]  # ascending, without a sort
    parents = jnp.searchsorted(kept, pool.parents[kept]) + 1
    parents = jnp.where(pool.parents[kept] < 0, 0, parents).astype(jnp.int32)
    parents = jnp.concatenate([jnp.full(1, -1, jnp.int32), parents])
    every_node = jnp.ones(num_nodes + 1, bool)
    tree = traced_tree(parents, every_node, max_depth, min(branch, num_nodes))
    tokens = jnp.concatenate([root[None], pool.tokens[kept]])
    no_law = jnp.zeros(num_nodes + 1, jnp.int32)
    return Proposal(tokens, tree, every_node, None, no_law)
