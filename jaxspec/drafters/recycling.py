"""Token recycling: drafts what the target itself found likely after the same tokens before.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling". Rejected nodes are recycled too: the target has scored them.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray, Shaped

from jaxspec.core.checks import Checked
from jaxspec.core.forms import exchangeable
from jaxspec.core.proposal import bank, tree_proposal
from jaxspec.core.rows import largest_of_rows
from jaxspec.core.sampling import likeliest_tokens
from jaxspec.core.tree import Path, normalize_paths, tree_from_paths
from jaxspec.core.types import Context, Hidden, Params, Proposal, Tree
from jaxspec.drafters.growth import take_rows

DEFAULT_PATHS: tuple[Path, ...] = ((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
CHUNK = 64
"""Tokens of a prompt whose logits are in memory at once."""


class RecyclingState(NamedTuple):
    """State of one row.

    Attributes:
        table: `table[token]` are the tokens that were likeliest after `token` where the target
            scored it last, best first; -1 if it has not scored it yet.
        tokens: those of the nodes that are being verified.
    """

    table: Int[Array, "vocab branch"]
    tokens: Int[Array, " nodes"]


@dataclasses.dataclass(frozen=True)
class TokenRecycling(Checked):
    """Fills a static tree from a table of the likeliest tokens after each token.

    It needs no weights and no training. The child of rank r of a node with token t is the token of
    rank r after t, by the target's logits where it scored t last: in the prompt, in the text, or in
    a draft that it rejected. Below a token that it has not scored yet, nothing is drafted.

    Each row keeps a table, `int32[vocab, branch]`, where `branch` is the largest number of children
    of a node. It takes 33 kB for the default tree and 4096 tokens, and 4.8 MB for 8 children and
    150,000 tokens. Reading a prompt costs one more product of its features with the output head; a
    step costs none, since its logits are there.

    Attributes:
        paths: rank paths of the static tree, see `tree_from_paths`. The default of 5 nodes is for
            CPUs, where each node costs time; on other devices wider trees, such as EAGLE's, accept
            more.

    Raises:
        ValueError: the tree is invalid, or has no node.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo")
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> plain = jaxspec.generate(model, "What is 2 + 3?", config)
        >>> fast = jaxspec.generate(model, "What is 2 + 3?", config, jaxspec.TokenRecycling())
        >>> fast.texts == plain.texts, fast.metrics.tau >= 1  # tau: bonus token included
        (True, True)
    """

    taps = ()
    paths: tuple[Path, ...] = DEFAULT_PATHS

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "paths", normalize_paths(self.paths))
        if not self.paths:
            raise ValueError(
                "paths: a tree without a node drafts nothing; to decode plainly, give no drafter."
            )

    @cached_property
    def tree(self) -> Tree:
        """The static tree."""
        return tree_from_paths(self.paths)

    @property
    def tree_shape(self) -> tuple[int, int]:
        nodes, levels = self.tree.paths.shape
        return nodes, levels - 1

    @property
    def widths(self) -> tuple[int, ...]:
        return bank(self.tree_shape[0])

    @property
    def num_likeliest(self) -> int:
        """See `core.types.AsksLikeliest`: the largest number of children of a node."""
        return self.tree.children.shape[1]

    def init(self, params: Params, prompt: Hidden, context: Context) -> RecyclingState:
        """Returns the state after the prompt: its logits fill the rows of its tokens."""
        table = jnp.full((params.target.vocab_size, self.num_likeliest), -1, jnp.int32)
        bucket, length = prompt.features.shape[0], context.length - 1
        chunk = min(CHUNK, bucket)

        def learn_chunk(index: Int[Array, ""], table: Array) -> Array:
            start = jnp.minimum(index * chunk, bucket - chunk)
            tokens, features = (
                jax.lax.dynamic_slice_in_dim(array, start, chunk)
                for array in (context.tokens, prompt.features)
            )
            logits = params.target.unembed(features)
            likeliest = likeliest_tokens(logits, context.warp, self.num_likeliest)
            return learned(table, tokens, likeliest, start + jnp.arange(chunk) < length)

        if chunk == bucket:
            # In a loop, XLA would move the choice of tokens out of it, and sort whole rows there.
            table = learn_chunk(jnp.int32(0), table)
        else:
            num_chunks = -(-largest_of_rows(length) // chunk)
            table = jax.lax.fori_loop(0, num_chunks, learn_chunk, table)
        return RecyclingState(table, jnp.zeros(self.tree_shape[0], jnp.int32))

    def propose(
        self, params: Params, key: PRNGKeyArray, state: RecyclingState, context: Context
    ) -> tuple[Proposal, RecyclingState]:
        del params, key  # The target's logits are there already; deterministic.
        recent, tree = context.recent, self.tree
        assert recent.likeliest is not None, "the step gives what `num_likeliest` asks for"
        scored = (recent.count > 0) & (recent.likeliest[:, 0] >= 0)
        table = learned(state.table, state.tokens, recent.likeliest, scored)
        drafted = filled(tree, table, context.tokens[context.length - 1][None])
        tokens = jnp.maximum(drafted, 0)
        return tree_proposal(tree, tokens, drafted >= 0), RecyclingState(table, tokens)

    def check_fit(self, params: Params) -> None:
        """See `core.types.ChecksFit`."""
        if self.num_likeliest > params.target.vocab_size:
            raise ValueError(
                "drafter: paths must not give a node more children than the target has tokens, "
                f"{params.target.vocab_size}; got {self.num_likeliest}."
            )


def filled(
    tree: Tree, table: Shaped[Array, "vocab branch"], root: Int[Array, " 1"]
) -> Int[Array, " nodes"]:
    """Fills a static tree from a table of successors.

    Args:
        tree: static.
        table: as `successors` reads it.
        root: the pending token.

    Returns:
        The token of each node; -1 below one that is not in the table yet.

    Example:
        >>> from jaxspec.core.tree import tree_from_paths
        >>> table = jnp.array([[1, 2], [2, 0], [-1, -1]])
        >>> filled(tree_from_paths([(0,), (1,), (0, 0), (0, 0, 0)]), table, jnp.array([0])).tolist()
        [0, 1, 2, 2, -1]
    """
    drafted, branch = root, table.shape[1]
    for depth in range(1, tree.paths.shape[1]):
        level = np.flatnonzero(tree.depths == depth)
        parents, places = np.unique(tree.parents[level], return_inverse=True)
        found = successors(table, take_rows(drafted, parents)).reshape(-1)
        drafted = jnp.concatenate([drafted, take_rows(found, places * branch + tree.ranks[level])])
    return drafted


@exchangeable
def successors(
    table: Int[Array, "vocab branch"], tokens: Int[Array, " nodes"]
) -> Int[Array, "nodes branch"]:
    """Returns the rows of tokens; -1 is a token that is not known, and its row."""
    return jnp.where((tokens >= 0)[:, None], table[jnp.maximum(tokens, 0)], -1)


@exchangeable
def learned(
    table: Int[Array, "vocab branch"],
    tokens: Int[Array, " places"],
    likeliest: Int[Array, "places branch"],
    known: Bool[Array, " places"],
) -> Int[Array, "vocab branch"]:
    """Returns the table with new rows for the known tokens; of equal ones, the last one counts."""
    places = jnp.arange(tokens.shape[0])
    later = places[:, None] < places[None, :]
    again = jnp.any((tokens[:, None] == tokens[None, :]) & later & known[None, :], axis=1)
    rows = jnp.where(known & ~again, tokens, table.shape[0])
    return table.at[rows].set(likeliest, mode="drop")
