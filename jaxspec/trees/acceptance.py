"""How often the drafts at each place of a tree are accepted: counted, or inferred.

What a drafter is worth in a tree follows from P(child of rank r is accepted | its parent is), for
every parent. Children of one parent exclude each other, so the chance that a node is accepted is
the product along its path, and tau is one plus the sum of these chances over the tree's nodes.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxspec.core.tree import EAGLE_PATHS, Path, tree_from_parents
from jaxspec.core.types import PyTree, Tree
from jaxspec.trees.files import read_entry, shipped_names, write_entry

if TYPE_CHECKING:
    from jaxspec.result import TraceStep

_SHIPPED = FilePath(__file__).resolve().parent / "tables"
# A parent's own counts weigh as much as those of its whole depth once it was seen so often.
_PRIOR_STRENGTH = 16.0
_NUMBERS_HASHED = 4096

PUBLISHED_TAU = 4.06
"""Of EAGLE's 25-node tree, Vicuna-7B on GSM8K; tokens per target pass, bonus INCLUDED."""
SHAPES: dict[str, tuple[float, ...]] = {
    # Chances of the first ranks in the demo vector that Sequoia ships (Chen et al. 2024).
    "sequoia": (0.634183, 0.107946, 0.056972, 0.022489),
    # Two made-up ones on either side of it, to see how much the shape matters.
    "steep": (0.70, 0.07, 0.02, 0.01),
    "flat": (0.60, 0.14, 0.08, 0.04),
}
"""Chances by rank, of which only the ratios are used."""


class RankCounts(NamedTuple):
    """What became of one parent's children, over the steps that accepted the parent.

    offered: steps in which the child of each rank was there to be accepted.
    accepted: steps that accepted it.
    """

    offered: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AcceptanceTable:
    """P(the child of rank r is accepted | its parent is), by parent.

    Attributes:
        rates: `rates[d][r]`, for parents at depth d of which nothing else is known. How deep and
            how wide it is says which trees the table can judge.
        counts: of parents that were observed, by rank path; drawn towards `rates` where few.
        head: identity of the drafter's weights, see `identity_of`; "" if it is none of ours.
        source: where the figures come from, and whether they are inferred.

    Raises:
        ValueError: for chances below 0, or that add up to more than 1.
    """

    rates: tuple[tuple[float, ...], ...]
    counts: Mapping[Path, RankCounts] = dataclasses.field(default_factory=dict)
    head: str = ""
    source: str = ""

    def __post_init__(self):
        if not self.rates or not all(self.rates):
            raise ValueError("rates: needs at least one depth and one rank at each, got none.")
        for depth, row in enumerate(self.rates):
            if min(row) < 0 or sum(row) > 1 + 1e-9 or not math.isfinite(sum(row)):
                raise ValueError(
                    f"rates: chances below a parent at depth {depth} must be at least 0 and add up "
                    f"to at most 1, got {row}."
                )
        for parent, (offered, accepted) in self.counts.items():
            pairs = itertools.zip_longest(accepted, offered, fillvalue=-1)
            if not all(0 <= hits <= tries for hits, tries in pairs):
                raise ValueError(
                    f"counts of {list(parent)}: each rank must be offered at least as often as "
                    f"accepted, got {offered} and {accepted}."
                )

    @classmethod
    def from_counts(
        cls, counts: Mapping[Path, RankCounts], head: str = "", source: str = ""
    ) -> "AcceptanceTable":
        """A table of what was observed.

        `rates` pool each depth's parents off the main path (all ranks 0), which say most about
        parents that were never seen; where these are few, all parents of the depth.

        Raises:
            ValueError: nothing was offered below the root.
        """
        rates = []
        for depth in range(1 + max(map(len, counts), default=-1)):
            level = {path: ranks for path, ranks in counts.items() if len(path) == depth}
            everyone = _pooled(level.values())
            if not everyone.offered or not everyone.offered[0]:
                break
            seen = [
                hits / tries
                for hits, tries in zip(everyone.accepted, everyone.offered, strict=True)
                if tries
            ]
            others = _pooled(ranks for path, ranks in level.items() if any(path))
            row = [_drawn(others, rank, prior) for rank, prior in enumerate(seen)]
            # Ranks are not offered by the same parents, so that few counts may add up to too much.
            rates.append(tuple(rate / max(1.0, sum(row)) for rate in row))
        if not rates:
            raise ValueError("counts: no draft token was offered; decode more, or longer.")
        return cls(tuple(rates), dict(counts), head, source)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest tree the table can judge."""
        return len(self.rates)

    @property
    def max_branch(self) -> int:
        """The most children of a node that the table can judge."""
        return max(map(len, self.rates))

    def num_ranks(self, depth: int) -> int:
        """Ranks known below parents at this depth; 0 below the deepest."""
        return len(self.rates[depth]) if depth < len(self.rates) else 0

    def rate(self, parent: Path, rank: int) -> float:
        """P(child `rank` of `parent` is accepted | the parent is).

        Raises:
            ValueError: the table says nothing of that depth or rank.
        """
        depth = len(parent)
        if rank >= self.num_ranks(depth):
            raise ValueError(
                f"acceptance table: says nothing of rank {rank} at depth {depth + 1}, only of "
                f"depths to {self.max_depth} and ranks to {self.num_ranks(depth) - 1} there; "
                "measure with a wider or deeper probing tree (probe_paths)."
            )
        counts = self.counts.get(parent, RankCounts((), ()))
        return _drawn(counts, rank, self.rates[depth][rank])

    def chance(self, path: Path) -> float:
        """P(the node at this rank path is accepted)."""
        return math.prod(self.rate(path[:depth], rank) for depth, rank in enumerate(path))

    def tau(self, paths: Iterable[Path]) -> float:
        """Expected tokens per target pass, bonus INCLUDED, of the tree with these nodes."""
        return 1.0 + sum(map(self.chance, paths))

    def rates_by_depth(self) -> tuple[tuple[float, ...], ...]:
        """`rates`, but of all parents, weighted by how often they were reached.

        What models that know only depth and rank (Medusa) or only rank (Sequoia) work with.
        """
        if not self.counts:
            return self.rates
        levels = []
        for depth, row in enumerate(self.rates):
            everyone = _pooled(ranks for path, ranks in self.counts.items() if len(path) == depth)
            levels.append(tuple(_drawn(everyone, rank, prior) for rank, prior in enumerate(row)))
        return tuple(levels)

    def rates_by_rank(self) -> tuple[float, ...]:
        """P(the child of rank r is accepted | its parent is), over all parents of all depths."""
        if self.counts:
            everyone = _pooled(self.counts.values())
            pairs = zip(everyone.accepted, everyone.offered, strict=True)
            return tuple(hits / max(1, tries) for hits, tries in pairs)
        columns = itertools.zip_longest(*self.rates, fillvalue=0.0)
        return tuple(sum(column) / len(self.rates) for column in columns)

    def shares(self) -> tuple[float, float]:
        """Of all accepted draft tokens, those on the main path, and those that are its neighbours.

        Main path: nodes whose ranks are all 0. Neighbours: other children of main-path nodes.

        Raises:
            ValueError: the table was not counted, or nothing was accepted.
        """
        total = sum(sum(ranks.accepted) for ranks in self.counts.values())
        if not total:
            raise ValueError("counts: nothing was accepted, so there are no shares of it.")
        on_main = [ranks.accepted for path, ranks in self.counts.items() if not any(path)]
        main = sum(accepted[0] for accepted in on_main if accepted)
        return main / total, sum(sum(accepted[1:]) for accepted in on_main) / total

    def check_head(self, params: PyTree) -> None:
        """Refuses weights other than those the table was counted with.

        Raises:
            ValueError: naming both.
        """
        if self.head != identity_of(params):
            raise ValueError(
                f"acceptance table: belongs to the head {self.head or '(none of ours)'}, not to "
                f"{identity_of(params)}; measure one for this head."
            )

    def as_dict(self) -> dict[str, Any]:
        """The table as its file has it."""
        return {
            "source": self.source,
            "head": self.head,
            "rates": [list(row) for row in self.rates],
            "counts": [
                {"parent": list(parent), **{k: list(v) for k, v in ranks._asdict().items()}}
                for parent, ranks in sorted(self.counts.items(), key=lambda item: _order(item[0]))
            ],
        }


def save_acceptance(table: AcceptanceTable, path: str | FilePath) -> None:
    """Writes a table; the file is there whole or not at all."""
    write_entry(path, table.as_dict())


def shipped_tables() -> list[str]:
    """Names that `load_acceptance` knows without a file."""
    return shipped_names(_SHIPPED)


def load_acceptance(source: str | FilePath) -> AcceptanceTable:
    """Reads a table: a file, or the name of a shipped one.

    Raises:
        ValueError: naming what is missing or out of range.
    """
    entry = read_entry("acceptance table", source, _SHIPPED)
    try:
        return AcceptanceTable(
            rates=tuple(tuple(map(float, row)) for row in entry["rates"]),
            counts={
                tuple(ranks["parent"]): RankCounts(
                    tuple(ranks["offered"]), tuple(ranks["accepted"])
                )
                for ranks in entry["counts"]
            },
            head=entry["head"],
            source=entry["source"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"acceptance table {source}: {error!r}; it has `rates`, `counts`, `head` and `source`."
        ) from error


def probe_paths(max_depth: int = 5, max_branch: int = 4) -> tuple[Path, ...]:
    """The nodes of a tree to measure acceptance with: all whose ranks add up to `max_branch` - 1.

    Or to less. Wide near the main path, where steps go, and narrow far from it.

    Raises:
        ValueError: if either is below 1.
    """
    if max_depth < 1 or max_branch < 1:
        raise ValueError(
            f"max_depth and max_branch must be at least 1, got {max_depth} and {max_branch}."
        )
    return tuple(
        path
        for depth in range(1, max_depth + 1)
        for path in itertools.product(range(max_branch), repeat=depth)
        if sum(path) < max_branch
    )


def count_acceptance(steps: Iterable["TraceStep"]) -> dict[Path, RankCounts]:
    """Counts what steps over static trees offered and accepted, by parent.

    Works for greedy and for sampled children alike: a child counts as accepted when it lies on the
    path that verification kept, before any stop cuts it.
    """
    known: dict[bytes, tuple[Path, ...]] = {}
    tries: dict[Path, dict[int, list[int]]] = {}
    for step in steps:
        shape = step.parents.tobytes()
        if shape not in known:
            known[shape] = ((), *rank_paths(tree_from_parents(step.parents.tolist())))
        paths = known[shape]
        kept = set(step.path.tolist())
        for node in np.flatnonzero(step.valid & np.isin(step.parents, step.path)).tolist():
            *parent, rank = paths[node]
            tally = tries.setdefault(tuple(parent), {}).setdefault(rank, [0, 0])
            tally[0] += 1
            tally[1] += node in kept
    return {
        parent: RankCounts(
            tuple(ranks.get(rank, (0, 0))[0] for rank in range(max(ranks) + 1)),
            tuple(ranks.get(rank, (0, 0))[1] for rank in range(max(ranks) + 1)),
        )
        for parent, ranks in tries.items()
    }


def rank_paths(tree: Tree) -> tuple[Path, ...]:
    """Rank paths of all nodes but the root, in node order: what `tree_from_paths` was given.

    Example:
        >>> from jaxspec import chain
        >>> rank_paths(chain(2))
        ((0,), (0, 0))
    """
    ranks = np.asarray(tree.ranks)
    depths, paths = np.asarray(tree.depths), np.asarray(tree.paths)
    return tuple(
        tuple(ranks[path[1 : depth + 1]].tolist())
        for path, depth in zip(paths[1:], depths[1:], strict=True)
    )


def calibrated_table(
    tau: float = PUBLISHED_TAU,
    shape: Sequence[float] = SHAPES["sequoia"],
    decay: float = 1.0,
    paths: Sequence[Path] = EAGLE_PATHS,
    max_depth: int = 5,
) -> AcceptanceTable:
    """The table with rates of a given shape under which a tree has a given tau. INFERRED.

    Every parent at depth d has the rates `scale * shape * decay ** d`; the scale is solved for.

    Args:
        tau: tokens per target pass, bonus INCLUDED, that `paths` shall have.
        shape: rates by rank, up to a factor.
        decay: how much less likely each further depth is.
        paths: the tree whose tau is known.
        max_depth: of the table.

    Raises:
        ValueError: no scale gives that tau with chances that add up to at most 1.
    """

    def table(scale: float) -> AcceptanceTable:
        rates = tuple(
            tuple(scale * share * decay**depth for share in shape) for depth in range(max_depth)
        )
        source = (
            f"INFERRED, not measured: rates by rank proportional to {tuple(shape)}, times "
            f"{decay} per depth, scaled so that a tree of {len(paths)} nodes has tau {tau} (tokens "
            "per target pass, bonus included); the same below every parent."
        )
        return AcceptanceTable(rates, source=source)

    low, high = 0.0, 1.0 / sum(shape)
    if not 1.0 <= tau <= table(high).tau(paths):
        raise ValueError(
            f"tau: a tree of {len(paths)} nodes with rates of this shape has a tau between 1 and "
            f"{table(high).tau(paths):.2f}, bonus included, got {tau}."
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if table(middle).tau(paths) < tau else (low, middle)
    return table(low)


def identity_of(params: PyTree) -> str:
    """A name for a drafter's weights: a hash of their structure and of each array's beginning.

    Weights that were stored in bfloat16 have one name, in whatever type they are loaded.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}\n".encode())
        digest.update(np.asarray(leaf.ravel()[:_NUMBERS_HASHED], np.float32).tobytes())
    return digest.hexdigest()[:16]


def _pooled(counts: Iterable[RankCounts]) -> RankCounts:
    def total(columns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, itertools.zip_longest(*columns, fillvalue=0)))

    counts = list(counts)
    return RankCounts(
        total(ranks.offered for ranks in counts), total(ranks.accepted for ranks in counts)
    )


def _drawn(counts: RankCounts, rank: int, prior: float) -> float:
    """The observed rate, drawn towards a prior that weighs `_PRIOR_STRENGTH` observations."""
    if rank >= len(counts.offered):
        return prior
    tries = counts.offered[rank] + _PRIOR_STRENGTH
    return (counts.accepted[rank] + _PRIOR_STRENGTH * prior) / tries


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path
