"""The best tree of every shape within limits, by dynamic programming over subtrees.

The cost of a tree depends on its shape alone: the number of its nodes, and of nodes with children
in each level. So the tree with the highest tau of each shape is enough, for any costs. Given the
shapes below the children of a node, the children are independent. So the best subtrees are combined
child by child, and only the best of each shape is kept. (If the width of levels is limited, the
widths are part of the shape.)
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxspec.core.checks import Checked, Count, Nodes
from jaxspec.core.tree import Path
from jaxspec.tuning.acceptance import AcceptanceTable

_PAIRS_AT_ONCE = 1 << 20
_MOST_PAIRS = 1 << 30
"""Pairs of subtrees that a search combines at most; 2**27 take a second or two."""


@dataclasses.dataclass(frozen=True)
class Limits(Checked):
    """Limits of the trees to search, ends included.

    Attributes:
        nodes: draft tokens, the root EXCLUDED.
        depth: edges between the root and the deepest node.
        width: nodes of a level.
        branch: children of a node.
        batch: nodes of a level that have children, which are the rows of a draft pass.

    Raises:
        ValueError: a limit is below 1, or larger than any tree; the message names it.
    """

    nodes: Nodes
    depth: Nodes
    width: Count
    branch: Count
    batch: Count


class BestTrees(NamedTuple):
    """The best tree of each shape; entry 0 is the root alone.

    Attributes:
        nodes: draft tokens, the root EXCLUDED.
        batches: nodes with children in each level, the root's first; 0 below the deepest.
        tau: the highest tau of that shape, bonus INCLUDED.
        root: the choices that lead to each tree.
    """

    nodes: Int[np.ndarray, " shapes"]
    batches: Int[np.ndarray, "shapes levels"]
    tau: Float[np.ndarray, " shapes"]
    root: "_Subtree"

    def paths(self, index: int) -> tuple[Path, ...]:
        """Returns the rank paths of the tree of one shape, sorted by depth."""
        return tuple(sorted(_paths(self.root, (), index), key=lambda path: (len(path), path)))


def best_trees(acceptance: AcceptanceTable, limits: Limits) -> BestTrees:
    """Finds the tree of highest tau for every shape within `limits` that the table covers.

    Raises:
        ValueError: there are too many shapes to search.

    Example:
        >>> from jaxspec.tuning import AcceptanceTable, Limits
        >>> table = AcceptanceTable(((0.6, 0.3), (0.4, 0.1)))
        >>> trees = best_trees(table, Limits(nodes=2, depth=2, width=2, branch=2, batch=2))
        >>> [(trees.paths(i), round(float(trees.tau[i]), 2)) for i in range(3)]
        [((), 1.0), (((0,),), 1.6), (((0,), (1,)), 1.9)]
    """
    code = _ShapeCode(limits)
    root = _subtree(acceptance, code, ())
    deeper = [code.field("batch", depth, root.shapes) for depth in range(1, limits.depth)]
    has_child = (root.shapes > 0).astype(np.int64)
    return BestTrees(
        nodes=code.field("nodes", 0, root.shapes),
        batches=np.stack([has_child, *deeper], axis=1),
        tau=1.0 + root.values,
        root=root,
    )


class _ShapeCode:
    """Encodes shapes as 64-bit integers, so that combining subtrees is one addition.

    Each field can hold the sum of two numbers within its limit. Its top bit is set if a sum plus
    the field's slack exceeds the limit.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        # A level that cannot exceed the limit needs no field.
        widest = [min(limits.nodes, limits.branch * limits.batch)] * limits.depth
        widest[0] = min(limits.nodes, limits.branch)
        fields = [("nodes", 0, limits.nodes)]
        fields += [
            ("width", depth, limits.width)
            for depth, nodes in enumerate(widest, start=1)
            if nodes > limits.width
        ]
        fields += [("batch", depth, limits.batch) for depth in range(1, limits.depth)]
        self._places, self._slack, self._guard, shift = {}, 0, 0, 0
        self._pairs = 0
        for name, depth, limit in fields:
            bits = min(limit, limits.nodes).bit_length() + 1
            self._places[name, depth] = shift, bits
            self._slack += ((1 << (bits - 1)) - 1 - min(limit, limits.nodes)) << shift
            self._guard += 1 << (shift + bits - 1)
            shift += bits
        if shift > 63:
            raise self._too_many(f"need {shift} bits of 63")

    def count(self, pairs: int) -> None:
        """Notes pairs of subtrees that are to be combined.

        Raises:
            ValueError: the search would take too long.
        """
        self._pairs += pairs
        if self._pairs > _MOST_PAIRS:
            raise self._too_many(f"make more than {_MOST_PAIRS:,} pairs of subtrees")

    def _too_many(self, why: str) -> ValueError:
        return ValueError(
            f"limits: {self.limits} allow too many shapes (they {why}); search fewer nodes, "
            "levels, or branches, or a smaller width."
        )

    def unit(self, name: str, depth: int) -> int:
        """Returns the code of one unit of a field; 0 if there is no such field."""
        place = self._places.get((name, depth))
        return 0 if place is None else 1 << place[0]

    def field(
        self, name: str, depth: int, shapes: Int[np.ndarray, " shapes"]
    ) -> Int[np.ndarray, " shapes"]:
        """Reads one field of many shapes."""
        shift, bits = self._places[name, depth]
        return (shapes >> shift) & ((1 << bits) - 1)

    def within(self, shapes: Int[np.ndarray, "*shapes"]) -> np.ndarray:
        """Returns True for shapes within all limits."""
        return ((shapes + self._slack) & self._guard) == 0


class _Subtree(NamedTuple):
    """The best ways to add children below one node, one way per shape.

    Attributes:
        shapes: shapes below the node, the node itself excluded.
        values: expected accepted tokens below the node, given that the node is accepted.
        places: by way, the number of children and the index into `added` of that number.
        below: the subtrees of the children, by rank.
        added: for each number of children above 0, by way: the index among the ways with one child
            fewer, and the way in the last child's subtree.
    """

    shapes: Int[np.ndarray, " ways"]
    values: Float[np.ndarray, " ways"]
    places: Int[np.ndarray, "ways 2"]
    below: Sequence["_Subtree"]
    added: Sequence[Int[np.ndarray, "ways_so_far 2"]]


_LEAF = _Subtree(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 2), np.int64), (), ())


def _subtree(acceptance: AcceptanceTable, code: _ShapeCode, parent: Path) -> _Subtree:
    depth = len(parent) + 1
    num_ranks = min(code.limits.branch, code.limits.width, acceptance.num_ranks(len(parent)))
    if depth > code.limits.depth or not num_ranks:
        return _LEAF
    ways = _Ways(_LEAF.shapes, _LEAF.values, _LEAF.places)
    found, below, added = [ways], [], []
    for rank in range(num_ranks):
        child = _subtree(acceptance, code, (*parent, rank))
        shapes = child.shapes + code.unit("nodes", 0) + code.unit("width", depth)
        shapes += (child.shapes > 0) * code.unit("batch", depth)
        values = acceptance.rate(parent, rank) * (1.0 + child.values)
        ways = _together(code, ways, shapes, values)
        if not len(ways.shapes):
            break
        below.append(child)
        added.append(ways.places)
        order = np.arange(len(ways.shapes))
        places = np.stack([np.full_like(order, rank + 1), order], axis=1)
        found.append(ways._replace(places=places))
    return _Subtree(*_best_of_each_shape(found), below, added)


class _Ways(NamedTuple):
    """The first fields of a `_Subtree`; the meaning of `places` depends on the caller."""

    shapes: Int[np.ndarray, " ways"]
    values: Float[np.ndarray, " ways"]
    places: Int[np.ndarray, "ways 2"]


def _together(
    code: _ShapeCode,
    ways: _Ways,
    shapes: Int[np.ndarray, " more"],
    values: Float[np.ndarray, " more"],
) -> _Ways:
    """Combines every way with every one of `shapes`; keeps the best of each shape in the limits."""
    best = _Ways(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, 2), np.int64))
    rows = max(1, _PAIRS_AT_ONCE // len(shapes))
    code.count(len(ways.shapes) * len(shapes))
    for start in range(0, len(ways.shapes), rows):
        part = slice(start, start + rows)
        sums = ways.shapes[part, None] + shapes[None, :]
        first, second = np.nonzero(code.within(sums))
        some = _Ways(
            sums[first, second],
            ways.values[part][first] + values[second],
            np.stack([first + start, second], axis=1),
        )
        best = _best_of_each_shape([best, some])
    return best


def _best_of_each_shape(found: Sequence[_Ways]) -> _Ways:
    together = _Ways(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    order = np.lexsort((-together.values, together.shapes))
    shapes = together.shapes[order]
    is_best = np.concatenate([np.ones(1, bool), shapes[1:] != shapes[:-1]])[: len(order)]
    return _Ways(*(column[order[is_best]] for column in together))


def _paths(subtree: _Subtree, parent: Path, way: int) -> Iterator[Path]:
    num_children, place = subtree.places[way].tolist()
    for rank in reversed(range(num_children)):
        place, way_below = subtree.added[rank][place].tolist()
        yield (*parent, rank)
        yield from _paths(subtree.below[rank], (*parent, rank), way_below)
