"""Draft trees: built and checked once on the host, plain arrays from then on.

Budgets: `nodes` in a name, file or message EXCLUDES the root (EAGLE's tree has 25 nodes); `tokens`
in a target pass includes it (26).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.core.checks import (
    MOST_NODES,
    Whole,
    at_least,
    at_most,
    at_most_entries,
    checks_arguments,
    shown,
)
from jaxspec.core.types import Tree

Path = tuple[int, ...]
Paths = Annotated[
    Sequence[Annotated[Sequence[Whole], at_most_entries(MOST_NODES)]], at_most_entries(MOST_NODES)
]
"""Nodes of a tree, the root not among them: which of its parent's choices each takes."""

# The static tree of EAGLE-1 (Li et al. 2024, upstream name `mc_sim_7b_63`): 25 nodes, depth 5.
EAGLE_PATHS: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


@checks_arguments
def normalize_paths(paths: Paths) -> tuple[Path, ...]:
    """Checks rank paths and sorts them by (length, ranks): node i + 1 of the tree is entry i.

    A path lists, from the root down, which of its parent's choices each node takes. The set must
    hold every prefix of each path, and child r requires children 0..r-1: sampled siblings are
    verified in the order they were drawn, so a gap would falsify the distribution.

    Raises:
        ValueError: for what is no list of paths, more than `MOST_NODES` of them, a negative rank, a
            duplicate, a missing parent or a missing sibling.
    """
    known = Counter(map(tuple, paths))
    for path, times in known.items():
        if times > 1:
            raise ValueError(f"paths: {shown(list(path))} is listed twice; list each node once.")
    for path in sorted(known, key=lambda path: (len(path), path)):
        if not path:
            raise ValueError("paths: [] is the root, which every tree has; leave it out.")
        if min(path) < 0:
            raise ValueError(f"paths: {shown(list(path))} has a negative rank; ranks count from 0.")
        *parent, rank = path
        if parent and tuple(parent) not in known:
            raise ValueError(
                f"paths: {shown(list(path))} needs its parent {shown(parent)}; add it."
            )
        if rank and (*parent, rank - 1) not in known:
            raise ValueError(
                f"paths: {shown(list(path))} takes rank {rank} of {parent or 'the root'!s:.80}, "
                f"but rank {rank - 1} is not in the tree; ranks must have no gap."
            )
    return tuple(sorted(known, key=lambda path: (len(path), path)))


@checks_arguments
def tree_from_parents(
    parents: Annotated[Sequence[Whole], at_most_entries(MOST_NODES + 1)],
) -> Tree:
    """Builds a `Tree` on the host; inside `jit` its arrays are constants.

    Siblings take ranks in the order they are listed.

    Example:
        >>> tree_from_parents([-1, 0, 0, 1]).paths.tolist()
        [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3]]

    Raises:
        ValueError: unless node 0 is the root and every parent is a number that comes before its
            children; or there are more than `MOST_NODES` besides the root.
    """
    if not parents or parents[0] != -1:
        raise ValueError(f"parents[0] must be -1, the root; got {list(parents[:1])}.")
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"parents: node {node} has parent {parent}, but a parent must come earlier; "
                "sort the nodes by depth."
            )
    paths = [[0]]
    children: list[list[int]] = [[] for _ in parents]
    ranks = [0]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
        ranks.append(len(children[parent]))
        children[parent].append(node)
    depths = [len(path) - 1 for path in paths]
    ancestors = np.zeros((len(parents), len(parents)), bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    arrays: dict[str, Any] = {
        "parents": np.asarray(parents, np.int32),
        "depths": np.asarray(depths, np.int32),
        "ranks": np.asarray(ranks, np.int32),
        "ancestors": ancestors,
        "paths": _padded(paths, max(depths) + 1),
        "children": _padded(children, max(1, *map(len, children))),
    }
    return Tree(**arrays)


def tree_from_paths(paths: Sequence[Sequence[int]]) -> Tree:
    """Builds a `Tree` from rank paths, EAGLE's and Medusa's way of writing one.

    Args:
        paths: for each node, which of its parent's choices to take, from the root down.

    Example:
        >>> tree_from_paths([[0], [1], [0, 0]]).parents.tolist()
        [-1, 0, 0, 1]

    Raises:
        ValueError: see `normalize_paths`.
    """
    ordered = ((), *normalize_paths(paths))
    index = {path: node for node, path in enumerate(ordered)}
    return tree_from_parents([-1, *(index[path[:-1]] for path in ordered[1:])])


@checks_arguments
def chain(num_nodes: Annotated[int, at_least(0), at_most(MOST_NODES)]) -> Tree:
    """Builds a tree without branches: each draft token is the child of the one before.

    Args:
        num_nodes: draft tokens; the root is not counted.

    Example:
        >>> chain(3).parents.tolist()
        [-1, 0, 1, 2]

    Raises:
        ValueError: unless `num_nodes` is a number from 0, plain decoding, to `MOST_NODES`.
    """
    return tree_from_parents(range(-1, num_nodes))


def chain_paths(num_nodes: int) -> tuple[Path, ...]:
    """Returns the rank paths of a chain; see `tree_from_paths`.

    Example:
        >>> chain_paths(3)
        ((0,), (0, 0), (0, 0, 0))
    """
    return tuple((0,) * depth for depth in range(1, num_nodes + 1))


def eagle_tree() -> Tree:
    """Builds EAGLE-1's static tree (Li et al. 2024): 25 nodes, depth 5, widths 4-8-8-3-2.

    Example:
        >>> len(eagle_tree().parents)  # the root is not among the 25
        26
    """
    return tree_from_paths(EAGLE_PATHS)


def traced_tree(
    parents: Int[Array, " nodes"], valid: Bool[Array, " nodes"], max_depth: int, branch: int
) -> Tree:
    """Builds the same record from a traced parent list: one row's dynamic tree.

    Args:
        parents: -1 at node 0; elsewhere an earlier node.
        valid: unused nodes are False; they get no rank and are nobody's child.
        max_depth: static bound on depth.
        branch: static bound on children per node.
    """
    nodes = parents.shape[0]
    index = jnp.arange(nodes, dtype=jnp.int32)
    climb = [index]
    for _ in range(max_depth):
        last = climb[-1]
        climb.append(jnp.where(last >= 0, parents[jnp.maximum(last, 0)], -1))
    upward = jnp.stack(climb, axis=1)  # node, parent, grandparent, ..., -1 above the root
    depths = jnp.sum(upward >= 0, axis=1).astype(jnp.int32) - 1
    ancestors = jnp.any(upward[:, :, None] == index[None, None, :], axis=1)
    levels = jnp.arange(max_depth + 1)
    paths = jnp.take_along_axis(upward, depths[:, None] - levels[None, :], axis=1, mode="clip")
    paths = jnp.where(levels[None, :] <= depths[:, None], paths, -1)
    sibling = (parents[:, None] == parents[None, :]) & valid[None, :]
    earlier = index[None, :] < index[:, None]
    ranks = jnp.sum(sibling & earlier, axis=1).astype(jnp.int32)
    is_child = (parents[None, :] == index[:, None]) & valid[None, :]
    has_rank = is_child[:, None, :] & (ranks[None, None, :] == jnp.arange(branch)[None, :, None])
    children = jnp.max(jnp.where(has_rank, index[None, None, :], -1), axis=2)
    return Tree(parents, depths, ranks, ancestors, paths, children)


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.asarray([[*row, *[-1] * (width - len(row))] for row in rows], np.int32)
