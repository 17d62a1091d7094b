"""Acceptance tables: how often the draft at each place of a tree is accepted, counted or inferred.

A table holds P(child of rank r is accepted | its parent is accepted) for every parent. At most one
child of a parent is accepted. So the chance that a node is accepted is the product along its path,
and tau is one plus the sum of these chances over the nodes of the tree. Of chains that end early,
it holds how deep they were drafted and accepted, by threshold.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from jaxtyping import Float

from jaxspec.core.checks import (
    MOST_NODES,
    Checked,
    Natural,
    Nodes,
    NotNegative,
    Positive,
    Requirement,
    Share,
    above_up_to,
    checks_arguments,
    shown,
)
from jaxspec.core.tree import EAGLE_PATHS, Path, Paths, tree_from_parents
from jaxspec.core.types import PyTree, Tree
from jaxspec.tuning.files import read_entry, records, shipped_names, write_entry

if TYPE_CHECKING:
    from jaxspec.decoding.result import TraceStep

_SHIPPED = FilePath(__file__).resolve().parent / "tables"
# After this many observations, a parent's own rate weighs as much as the rate of its depth.
_PRIOR_STRENGTH = 16.0
_NUMBERS_HASHED = 4096
_NOT_EMPTY = Requirement("of at least one entry", bool, is_interval=False)

PUBLISHED_TAU = 4.06
"""Tau of EAGLE's 25-node tree with Vicuna-7B on GSM8K: tokens per target pass, bonus INCLUDED."""
SHAPES: dict[str, tuple[float, ...]] = {
    # The first ranks of the demo vector that comes with Sequoia (Chen et al. 2024).
    "sequoia": (0.634183, 0.107946, 0.056972, 0.022489),
    # Two invented shapes, one on either side of it, to test how much the shape matters.
    "steep": (0.70, 0.07, 0.02, 0.01),
    "flat": (0.60, 0.14, 0.08, 0.04),
}
"""Chances by rank. Only their ratios are used."""


@dataclasses.dataclass(frozen=True)
class RankCounts(Checked):
    """Counts for the children of one parent, over the steps that accepted the parent.

    Attributes:
        offered: steps that offered the child, by rank.
        accepted: steps that accepted the child, by rank.

    Raises:
        ValueError: a count is no number from 0; the message names it.
    """

    offered: tuple[Natural, ...]
    accepted: tuple[Natural, ...]


@dataclasses.dataclass(frozen=True)
class _CountsBelow(RankCounts):
    """Counts as files hold them.

    Attributes:
        parent: rank path of the parent.
    """

    parent: tuple[Natural, ...]


@dataclasses.dataclass(frozen=True)
class ExitCounts(Checked):
    """Counts of steps over a chain that ends early, at one threshold.

    Attributes:
        threshold: of the drafter.
        drafted: entry i: steps whose draft was i tokens deep.
        accepted: entry i: steps that accepted i draft tokens, bonus EXCLUDED.
        passes: entry i: steps with i draft passes, that of the root included. A step that ended
            before its last token was drawn has one more than it has tokens. `()`, as in files of
            earlier versions: not counted; a step is then priced with a pass for each token.

    Raises:
        ValueError: a field is out of range, no step was counted, or not the same steps.

    Example:
        >>> from jaxspec.tuning import ExitCounts
        >>> counts = ExitCounts(0.5, drafted=(0, 4, 6), accepted=(2, 5, 3), passes=(0, 3, 7))
        >>> counts.shares(2).tolist(), counts.mean_passes(2)
        ([0.0, 0.4, 0.6], 1.7)
    """

    threshold: Share
    drafted: tuple[Natural, ...]
    accepted: tuple[Natural, ...]
    passes: tuple[Natural, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if not sum(self.drafted) or not sum(self.accepted):
            raise ValueError(
                f"drafted and accepted must count the same steps, at least one; got "
                f"{shown(self.drafted)} and {shown(self.accepted)}."
            )
        if self.passes and sum(self.passes) != sum(self.drafted):
            raise ValueError(
                f"passes must count the {sum(self.drafted)} steps of drafted, got "
                f"{shown(self.passes)}; leave it out if it was not counted."
            )

    def shares(self, longest: int) -> Float[np.ndarray, " depths"]:
        """Returns the share of steps that drafted 0, 1, ... tokens of at most `longest`."""
        return _shares(self.drafted, longest)

    def mean_passes(self, longest: int) -> float:
        """Returns the draft passes of a step in the mean, for a chain of at most `longest`.

        The pass of the root is one of them.
        """
        shares = _shares(self.passes or self.drafted, longest)
        return float(shares @ np.maximum(np.arange(longest + 1), 1))

    def chance(self, depth: int) -> float:
        """Returns the share of steps that accepted so many tokens."""
        return sum(self.accepted[depth:]) / sum(self.accepted)


@dataclasses.dataclass(frozen=True)
class AcceptanceTable(Checked):
    """P(the child of rank r is accepted | its parent is), by parent.

    Attributes:
        rates: `rates[d][r]`, for parents at depth d without counts. Its depth and width limit the
            trees that the table can judge.
        counts: counts of the parents that were observed, by rank path. A rate from few counts is
            drawn towards `rates`.
        head: identity of the drafter's weights, see `identity_of`; "" if they are not known.
        source: origin of the figures; says whether they are inferred.
        exits: counts of chains that end early, all of one greatest length; `()` for none.

    Raises:
        ValueError: a chance is below 0, the chances of a depth add up to more than 1, or a field is
            of another type.

    Example:
        >>> from jaxspec.tuning import AcceptanceTable
        >>> table = AcceptanceTable(((0.5, 0.25), (0.5, 0.25)))
        >>> table.chance((0, 1))
        0.125
        >>> table.tau([(0,), (1,), (0, 1)])
        1.875
    """

    rates: tuple[tuple[NotNegative, ...], ...]
    counts: Mapping[tuple[Natural, ...], RankCounts] = dataclasses.field(default_factory=dict)
    head: str = ""
    source: str = ""
    exits: tuple[ExitCounts, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if not self.rates or not all(self.rates):
            raise ValueError("rates: needs at least one depth and one rank at each, got none.")
        for depth, row in enumerate(self.rates):
            if sum(row) > 1 + 1e-9:
                raise ValueError(
                    f"rates: chances below a parent at depth {depth} must add up to at most 1, got "
                    f"{shown(row)}."
                )
        for parent, ranks in self.counts.items():
            pairs = itertools.zip_longest(ranks.accepted, ranks.offered, fillvalue=-1)
            if not all(0 <= hits <= tries for hits, tries in pairs):
                raise ValueError(
                    f"counts of {shown(list(parent))}: each rank must be offered at least as often "
                    f"as accepted, got {shown(ranks.offered)} and {shown(ranks.accepted)}."
                )

    @classmethod
    @checks_arguments
    def from_counts(
        cls, counts: Mapping[Path, RankCounts], head: str = "", source: str = ""
    ) -> "AcceptanceTable":
        """Builds a table from counts.

        `rates` pool the parents of each depth that lie off the main path (the path of ranks 0):
        they are most like parents that were never observed. If they are few, all parents of the
        depth are pooled.

        Raises:
            ValueError: no step offered a node below the root, or `counts` holds something else.
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
            # Ranks are offered by different parents, so rates from few counts may exceed 1 in sum.
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
        """Number of ranks known for parents at this depth; 0 below the deepest."""
        return len(self.rates[depth]) if depth < len(self.rates) else 0

    def rate(self, parent: Path, rank: int) -> float:
        """P(child `rank` of `parent` is accepted | the parent is).

        Raises:
            ValueError: the table does not reach that depth or rank.
        """
        depth = len(parent)
        if rank >= self.num_ranks(depth):
            raise ValueError(
                f"acceptance table: has no rank {rank} at depth {depth + 1}; it has "
                f"{self.num_ranks(depth)} ranks there and {self.max_depth} depths. Measure with a "
                "wider or deeper probing tree (probe_paths)."
            )
        counts = self.counts.get(parent, _NO_COUNTS)
        return _drawn(counts, rank, self.rates[depth][rank])

    def exit(self, threshold: float) -> ExitCounts:
        """Returns the counts at a threshold.

        Raises:
            ValueError: there are none.
        """
        for counts in self.exits:
            if counts.threshold == threshold:
                return counts
        known = [counts.threshold for counts in self.exits]
        raise ValueError(
            f"acceptance table: has no counts for threshold {threshold}, only for {known}; measure "
            "them with `jaxspec tune tree`."
        )

    def chance(self, path: Path, threshold: float = 0.0) -> float:
        """P(the node at this rank path is accepted); of a chain that ends early, with a threshold.

        Raises:
            ValueError: the table does not know that depth, rank or threshold.
        """
        if threshold:
            return self.exit(threshold).chance(len(path))
        return math.prod(self.rate(path[:depth], rank) for depth, rank in enumerate(path))

    def tau(self, paths: Iterable[Path], threshold: float = 0.0) -> float:
        """Expected tokens per target pass, bonus INCLUDED, of the tree with these nodes."""
        return 1.0 + sum(self.chance(path, threshold) for path in paths)

    def rates_by_depth(self) -> tuple[tuple[float, ...], ...]:
        """Rates by depth and rank over all parents, weighted by how often each was reached."""
        if not self.counts:
            return self.rates
        levels = []
        for depth, row in enumerate(self.rates):
            everyone = _pooled(ranks for path, ranks in self.counts.items() if len(path) == depth)
            levels.append(tuple(_drawn(everyone, rank, prior) for rank, prior in enumerate(row)))
        return tuple(levels)

    def shares(self, paths: Iterable[Path]) -> tuple[float, float]:
        """Shares of a tree's accepted draft tokens: on the main path, and next to it.

        On the main path all ranks are 0. Next to it are the other children of its nodes.

        Args:
            paths: rank paths of the tree's nodes, without the root.

        Raises:
            ValueError: the table does not know a node, or no node is ever accepted.

        Example:
            >>> from jaxspec.tuning import AcceptanceTable
            >>> table = AcceptanceTable(((0.5, 0.25), (0.5, 0.0)))
            >>> table.shares([(0,), (1,), (0, 0), (1, 0)])
            (0.6666666666666666, 0.2222222222222222)
        """
        chances = {path: self.chance(path) for path in paths}
        total = sum(chances.values())
        if not total:
            raise ValueError("paths: no node is ever accepted, so there are no shares.")
        main = sum(chance for path, chance in chances.items() if not any(path))
        beside = (chance for path, chance in chances.items() if path[-1] and not any(path[:-1]))
        return main / total, sum(beside) / total

    def check_head(self, params: PyTree) -> None:
        """Checks that the table was counted with these weights.

        Raises:
            ValueError: it belongs to other weights; the message names both.
        """
        if self.head != identity_of(params):
            raise ValueError(
                f"acceptance table: belongs to the head {self.head or '(unknown)'}, not to "
                f"{identity_of(params)}; measure one for this head."
            )

    def as_dict(self) -> dict[str, Any]:
        """Returns the table in the form of its file."""
        return {
            "source": self.source,
            "head": self.head,
            "rates": [list(row) for row in self.rates],
            "counts": [
                {
                    "parent": list(parent),
                    "offered": list(self.counts[parent].offered),
                    "accepted": list(self.counts[parent].accepted),
                }
                for parent in sorted(self.counts, key=lambda parent: (len(parent), parent))
            ],
            "exits": [dataclasses.asdict(counts) for counts in self.exits],
        }


_NO_COUNTS = RankCounts((), ())


def _shares(counts: Sequence[int], longest: int) -> Float[np.ndarray, " sizes"]:
    """Returns the shares of sizes 0, 1, ..., where larger ones count as `longest`."""
    padded = np.asarray([*counts, *[0] * longest], float)
    capped = np.append(padded[:longest], padded[longest:].sum())
    return capped / capped.sum()


@checks_arguments
def save_acceptance(table: AcceptanceTable, path: str | FilePath) -> None:
    """Writes a table. An interrupted write leaves no file.

    Example:
        >>> import tempfile
        >>> from jaxspec.tuning import calibrated_table, load_acceptance, save_acceptance
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_acceptance(calibrated_table(), f"{folder}/table.json")
        ...     load_acceptance(f"{folder}/table.json") == calibrated_table()
        True
    """
    write_entry(path, table.as_dict())


def shipped_tables() -> list[str]:
    """Names of the tables that come with the package.

    Example:
        >>> from jaxspec.tuning import shipped_tables
        >>> shipped_tables()
        ['eagle1-vicuna7b-tau-4.06-inferred']
    """
    return shipped_names(_SHIPPED)


@checks_arguments
def load_acceptance(source: str | FilePath) -> AcceptanceTable:
    """Reads a table.

    Args:
        source: a file, or a name of `shipped_tables()`.

    Raises:
        ValueError: a field is missing or out of range; the message names it.

    Example:
        >>> from jaxspec.core.tree import EAGLE_PATHS
        >>> from jaxspec.tuning import load_acceptance
        >>> round(load_acceptance("eagle1-vicuna7b-tau-4.06-inferred").tau(EAGLE_PATHS), 2)
        4.06
    """
    entry = read_entry("acceptance table", source, _SHIPPED)
    lacking = [name for name in ("rates", "counts", "head", "source") if name not in entry]
    if lacking:
        raise ValueError(
            f"acceptance table {source}: has no {lacking[0]}; it has `rates`, `counts`, `head` and "
            "`source`."
        )
    try:
        counts = records("counts", entry["counts"], _CountsBelow)
        return AcceptanceTable(
            rates=entry["rates"],
            counts={each.parent: RankCounts(each.offered, each.accepted) for each in counts},
            head=entry["head"],
            source=entry["source"],
            exits=records("exits", entry.get("exits", ()), ExitCounts),
        )
    except ValueError as error:
        raise ValueError(f"acceptance table {source}: {error}") from None


@checks_arguments
def probe_paths(max_depth: Nodes = 5, max_branch: Nodes = 4) -> tuple[Path, ...]:
    """Returns the rank paths of a tree to measure acceptance with.

    It has all nodes whose ranks add up to at most `max_branch - 1`: it is wide near the main path,
    which most steps follow, and narrow far from it.

    Raises:
        ValueError: either argument is below 1, or the tree would be too large.

    Example:
        >>> from jaxspec.tuning import probe_paths
        >>> probe_paths(2, 2)
        ((0,), (1,), (0, 0), (0, 1), (1, 0))
    """
    # So many ways there are to share out fewer than `max_branch` ranks among the depths.
    if math.comb(max_depth + max_branch, max_depth) - 1 > MOST_NODES:
        raise ValueError(
            f"max_depth and max_branch: {max_depth} and {max_branch} give a tree of more than "
            f"{MOST_NODES} nodes; lower one of them."
        )
    paths, level = [], [()]
    for _ in range(max_depth):
        level = [(*path, rank) for path in level for rank in range(max_branch - sum(path))]
        paths += level
    return tuple(paths)


def count_acceptance(steps: Iterable["TraceStep"]) -> dict[Path, RankCounts]:
    """Counts the children that steps over static trees offered and accepted, by parent.

    A child counts as accepted when it lies on the path that verification kept, before any stop
    cuts that path. This holds for greedy and for sampled children.

    Raises:
        ValueError: `steps` are no steps of a trace.

    Example:
        >>> from jaxspec import TraceStep
        >>> from jaxspec.tuning import count_acceptance
        >>> step = TraceStep(  # The root has two children, and the second is accepted.
        ...     tokens=np.array([7, 1, 2]), parents=np.array([-1, 0, 0]), valid=np.ones(3, bool),
        ...     draft_logprobs=None, law_row=np.zeros(3, int), path=np.array([0, 2]),
        ...     emitted=np.array([2, 9]), width=3,
        ... )
        >>> count_acceptance([step])
        {(): RankCounts(offered=(1, 1), accepted=(0, 1))}
    """
    if not isinstance(steps, Iterable):
        raise ValueError(f"steps must be the steps of a trace, got {shown(steps)}.")
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
            pair = tries.setdefault(tuple(parent), {}).setdefault(rank, [0, 0])
            pair[0] += 1
            pair[1] += node in kept
    return {
        parent: RankCounts(
            tuple(ranks.get(rank, (0, 0))[0] for rank in range(max(ranks) + 1)),
            tuple(ranks.get(rank, (0, 0))[1] for rank in range(max(ranks) + 1)),
        )
        for parent, ranks in tries.items()
    }


@checks_arguments
def rank_paths(tree: Tree) -> tuple[Path, ...]:
    """Returns the rank paths of all nodes except the root, in node order.

    It inverts `tree_from_paths`.

    Example:
        >>> from jaxspec import chain
        >>> from jaxspec.tuning import rank_paths
        >>> rank_paths(chain(2))
        ((0,), (0, 0))
    """
    ranks = np.asarray(tree.ranks)
    depths, paths = np.asarray(tree.depths), np.asarray(tree.paths)
    return tuple(
        tuple(ranks[path[1 : depth + 1]].tolist())
        for path, depth in zip(paths[1:], depths[1:], strict=True)
    )


@checks_arguments
def calibrated_table(
    tau: float = PUBLISHED_TAU,
    shape: Annotated[Sequence[Positive], _NOT_EMPTY] = SHAPES["sequoia"],
    decay: Annotated[float, above_up_to(0, 1)] = 1.0,
    paths: Paths = EAGLE_PATHS,
    max_depth: Nodes = 5,
) -> AcceptanceTable:
    """Infers a table from the known tau of one tree.

    Every parent at depth d has the rates `scale * shape * decay ** d`. The function solves for the
    scale.

    Args:
        tau: tokens per target pass of the tree `paths`, bonus INCLUDED.
        shape: rates by rank, up to a factor.
        decay: factor of the rates from one depth to the next.
        paths: the tree whose tau is known.
        max_depth: depth of the table.

    Raises:
        ValueError: no scale gives that tau with chances that add up to at most 1, or a number is
            out of range.

    Example:
        >>> from jaxspec.tuning import calibrated_table
        >>> round(calibrated_table(tau=4.06).rate((), 0), 2)
        0.73
    """
    tree = tuple(map(tuple, paths))

    def table(scale: float) -> AcceptanceTable:
        rates = tuple(
            tuple(scale * share * decay**depth for share in shape) for depth in range(max_depth)
        )
        source = (
            f"INFERRED, not measured: rates by rank proportional to {tuple(shape)}, times "
            f"{decay} per depth, scaled so that a tree of {len(tree)} nodes has tau {tau} (tokens "
            "per target pass, bonus included); the same below every parent."
        )
        return AcceptanceTable(rates, source=source)

    low, high = 0.0, 1.0 / sum(shape)
    if not 1.0 <= tau <= table(high).tau(tree):
        raise ValueError(
            f"tau: a tree of {len(tree)} nodes with rates of this shape has a tau between 1 and "
            f"{table(high).tau(tree):.2f}, bonus included, got {tau}."
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if table(middle).tau(tree) < tau else (low, middle)
    return table(low)


def identity_of(params: PyTree) -> str:
    """Names a drafter's weights: a hash of their structure and of the beginning of each array.

    The name does not depend on the type in which weights are loaded, if they were stored in
    bfloat16.

    Raises:
        ValueError: `params` is `None`, or holds anything but arrays.

    Example:
        >>> identity_of({"w": np.ones(3)}) == identity_of({"w": np.ones(3, np.float16)})
        True
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if params is None or not all(hasattr(leaf, "ravel") for _, leaf in leaves):
        raise ValueError(f"params must be a pytree of arrays, got {shown(params)}.")
    for path, leaf in leaves:
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
    """Returns the observed rate, drawn towards a prior worth `_PRIOR_STRENGTH` observations."""
    if rank >= len(counts.offered):
        return prior
    tries = counts.offered[rank] + _PRIOR_STRENGTH
    return (counts.accepted[rank] + _PRIOR_STRENGTH * prior) / tries
