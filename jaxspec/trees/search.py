"""Which tree to draft over: what trees cost on a device, and the search for the cheapest.

A step costs its draft passes, one per level that has nodes with children, and one target pass; it
gives tau tokens. `cost` is the quotient: the paper's (T_d(1) * D + T_target(n)) / tau where a draft
pass takes as long for several nodes as for one. A drafter of whole blocks has one draft pass
however deep the tree is, (T_d + T_target(n)) / tau: of trees with n nodes the likeliest is best.
"""

import dataclasses
import itertools
import json
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.checkpoint import find_head
from jaxspec.core.tree import EAGLE_PATHS, Path, normalize_paths, tree_from_paths
from jaxspec.core.types import Tree
from jaxspec.trees.acceptance import (
    PUBLISHED_TAU,
    SHAPES,
    AcceptanceTable,
    calibrated_table,
    rank_paths,
)
from jaxspec.trees.exact import BestTrees, Limits, best_trees
from jaxspec.trees.files import write_entry
from jaxspec.trees.latency import LatencyProfile

PLAIN = "plain decoding"
TREE_FILE = "tree.json"
PUBLISHED_TREES: Mapping[str, tuple[Path, ...]] = {"eagle-25": EAGLE_PATHS}
"""Trees that `load_tree` knows by name; the number leaves the root out."""
GRID_DEPTHS, GRID_WIDTHS, GRID_BRANCHES, GRID_NODES = (3, 5), (1, 8), (1, 3), (3, 25)
"""The grid of the paper, ends included; nodes leave the root out."""


def draft_batches(paths: Iterable[Path]) -> tuple[int, ...]:
    """Nodes in each draft pass of a tree: those of each level that have children.

    Example:
        >>> from jaxspec.core.tree import EAGLE_PATHS
        >>> draft_batches(EAGLE_PATHS)
        (1, 4, 4, 1, 1)
    """
    parents = {path[:-1] for path in paths}
    by_depth = Counter(map(len, parents))
    return tuple(by_depth[depth] for depth in range(len(by_depth)))


def cost(tree: Tree, profile: LatencyProfile, tau: float) -> float:
    """Seconds per token of drafting over a tree.

    Args:
        tree: a root alone is plain decoding.
        profile: of the device.
        tau: tokens per target pass, bonus INCLUDED; measured, or `AcceptanceTable.tau`.

    Raises:
        ValueError: tau is below 1, or the profile does not reach as far as the tree.

    Example:
        >>> from jaxspec import eagle_tree
        >>> from jaxspec.trees import load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> round(1 / cost(eagle_tree(), phone, tau=4.06), 2)
        9.13
    """
    if tau < 1:
        raise ValueError(f"tau counts the bonus token, so it must be at least 1; got {tau}.")
    return _step_seconds(rank_paths(tree), profile) / tau


def _step_seconds(paths: Sequence[Path], profile: LatencyProfile) -> float:
    target = float(profile.target_seconds(len(paths) + 1))
    return profile.draft_seconds(draft_batches(paths)) + target


class Candidate(NamedTuple):
    """A tree and what is predicted of it.

    paths: its nodes, the root left out; none is plain decoding.
    found_by: the searches that came upon it.
    tau: tokens per target pass, bonus INCLUDED.
    step_seconds: of one step.
    """

    paths: tuple[Path, ...]
    found_by: tuple[str, ...]
    tau: float
    step_seconds: float

    @property
    def nodes(self) -> int:
        """Draft tokens, the root EXCLUDED."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def tree(self) -> Tree:
        return tree_from_paths(self.paths)

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return {
            "paths": [list(path) for path in self.paths],
            "nodes_without_root": self.nodes,
            "tokens_with_root": self.nodes + 1,
            "depth": self.depth,
            "found_by": list(self.found_by),
            "predicted": {
                "tau_bonus_included": self.tau,
                "step_seconds": self.step_seconds,
                "tokens_per_second": self.tokens_per_second,
            },
        }


@dataclasses.dataclass(frozen=True)
class TreeSearch:
    """What `search_tree` found.

    Attributes:
        ranking: fastest first: the best of each search, whose trees are not all within the limits,
            EAGLE's own, and plain decoding.
        by_budget: the fastest tree of each number of nodes, from 0 on.
        limits: of the exact search.
        num_shapes: shapes that it priced.
        num_grid_trees: different trees in the paper's grid.
        left_out: what could not be priced, and why.
        profile: name of the latency profile.
        acceptance: source of the acceptance table.
    """

    ranking: tuple[Candidate, ...]
    by_budget: tuple[Candidate, ...]
    limits: Limits
    num_shapes: int
    num_grid_trees: int
    left_out: tuple[str, ...]
    profile: str
    acceptance: str

    @property
    def best(self) -> Candidate:
        """The fastest within the limits; plain decoding if no tree is worth its time."""
        exact = {"exact", PLAIN}
        return next(candidate for candidate in self.ranking if exact & set(candidate.found_by))

    @property
    def plain(self) -> Candidate:
        """Plain decoding."""
        return self.by_budget[0]

    @property
    def best_draft(self) -> Candidate:
        """The fastest within the limits that drafts at all, be it slower than plain decoding."""
        return max(self.by_budget[1:], key=lambda candidate: candidate.tokens_per_second)

    @property
    def tree(self) -> Tree:
        """Of the best."""
        return self.best.tree

    def as_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        return {
            "profile": self.profile,
            "acceptance": self.acceptance,
            "limits": self.limits._asdict(),
            "left_out": list(self.left_out),
            "ranking": [candidate.as_dict() for candidate in self.ranking],
            "by_budget": [candidate.as_dict() for candidate in self.by_budget],
        }


def search_tree(
    acceptance: AcceptanceTable,
    profile: LatencyProfile,
    *,
    max_nodes: int | None = None,
    max_depth: int | None = None,
    max_width: int | None = None,
    max_branch: int | None = None,
    num_best: int = 10,
) -> TreeSearch:
    """Finds the tree that gives the most tokens per second on a device.

    Exact over all trees within the limits; beside it, for comparison, the best of the paper's grid,
    of Medusa's greedy growth and of Sequoia's dynamic programme, EAGLE's own tree, and plain
    decoding, which wins where drafting does not pay. Draft passes are never wider than the
    profile's widest.

    Args:
        acceptance: of the drafter.
        profile: of the device.
        max_nodes: draft tokens, the root excluded; `None`: up to 25, as far as the profile reaches.
        max_depth: `None`: up to 5, as far as the table reaches.
        max_width: nodes of a level; `None`: no limit. A limit costs time: it enters the shape.
        max_branch: children of a node; `None`: up to 4, as far as the table reaches.
        num_best: trees of the exact search to rank.

    Raises:
        ValueError: a limit lies beyond what the profile or the table was measured for.

    Example:
        >>> from jaxspec import search_tree
        >>> from jaxspec.trees import calibrated_table, load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> found = search_tree(calibrated_table(), phone, max_nodes=8)
        >>> found.best.tokens_per_second > 19.43 > found.plain.tokens_per_second
        True
    """
    limits = _limits(acceptance, profile, max_nodes, max_depth, max_width, max_branch)
    if profile.one_pass:
        return _search_one_pass(acceptance, profile, limits, num_best)
    trees = best_trees(acceptance, limits)
    seconds = _seconds_of_shapes(trees, profile)
    speeds = trees.tau / seconds

    def candidate(index: int) -> Candidate:
        name = "exact" if trees.nodes[index] else PLAIN
        return Candidate(
            trees.paths(index), (name,), float(trees.tau[index]), float(seconds[index])
        )

    budgets = [np.flatnonzero(trees.nodes == nodes) for nodes in range(limits.nodes + 1)]
    by_budget = tuple(
        candidate(int(shapes[np.argmax(speeds[shapes])])) for shapes in budgets if shapes.size
    )
    found = [candidate(int(index)) for index in np.argsort(-speeds, kind="stable")[:num_best]]
    found.append(by_budget[0])

    left_out = []
    grid = paper_grid(acceptance, profile.max_batch)
    others = {
        "grid": grid,
        "medusa": _prefixes(likeliest_paths(_by_depth(acceptance), limits)),
        "sequoia": [_sequoia(acceptance, profile, limits)],
        "EAGLE's tree": [EAGLE_PATHS],
    }
    for name, several in others.items():
        priced, refused = [], []
        for paths in several:
            try:
                tau, step_seconds = acceptance.tau(paths), _step_seconds(paths, profile)
            except ValueError as error:
                refused.append(str(error))
            else:
                priced.append(Candidate(tuple(paths), (name,), tau, step_seconds))
        if refused:
            left_out.append(f"{name}: {len(refused)} of {len(several)}, first because {refused[0]}")
        found += sorted(priced, key=lambda each: -each.tokens_per_second)[:1]
    return TreeSearch(
        ranking=_ranked(found),
        by_budget=by_budget,
        limits=limits,
        num_shapes=len(speeds),
        num_grid_trees=len(grid),
        left_out=tuple(left_out),
        profile=profile.name,
        acceptance=acceptance.source,
    )


def _search_one_pass(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits, num_best: int
) -> TreeSearch:
    """Greedy growth, for each depth: only nodes and depth have a price where a draft is one pass.

    Exact where no choice of a node is accepted more often than the choices before it, and drafts
    for deeper trees take no less time.
    """

    def candidate(paths: Sequence[Path]) -> Candidate:
        name = "exact" if paths else PLAIN
        tau, seconds = acceptance.tau(paths), _step_seconds(paths, profile)
        return Candidate(tuple(paths), (name,), tau, seconds)

    grown = [likeliest_paths(acceptance, limits._replace(depth=d)) for d in _depths(limits)]
    by_nodes: dict[int, Candidate] = {0: candidate(())}
    for paths in grown:
        for each in map(candidate, _prefixes(paths)):
            best = by_nodes.get(each.nodes, each)
            # The first draft pass also reads what the last step emitted: deeper trees cost more.
            by_nodes[each.nodes] = max(best, each, key=lambda one: one.tokens_per_second)
    by_budget = tuple(by_nodes[nodes] for nodes in sorted(by_nodes))
    found = sorted(by_budget, key=lambda each: -each.tokens_per_second)[:num_best]
    return TreeSearch(
        ranking=_ranked([*found, by_budget[0]]),
        by_budget=by_budget,
        limits=limits,
        num_shapes=1 + sum(map(len, grown)),
        num_grid_trees=0,
        left_out=("the other searches: they price a draft pass for each level",),
        profile=profile.name,
        acceptance=acceptance.source,
    )


def _depths(limits: Limits) -> range:
    return range(1, min(limits.depth, limits.nodes) + 1)


def save_tree(found: Candidate, path: str | FilePath, **facts: Any) -> None:
    """Writes a tree with its figures as JSON; the file is there whole or not at all."""
    write_entry(path, {**found.as_dict(), **facts})


def load_tree(source: str | FilePath) -> tuple[Path, ...]:
    """The nodes of a tree, for `Eagle.of(head, paths)`.

    Args:
        source: a file of `save_tree`, or one with a JSON list of rank paths; or the name of a
            published tree, see `PUBLISHED_TREES`.

    Raises:
        ValueError: there is no such file, or it holds something else, or a tree without a node,
            which is how a search says that plain decoding is faster.

    Example:
        >>> from jaxspec.trees import load_tree
        >>> len(load_tree("eagle-25"))
        25
    """
    if str(source) in PUBLISHED_TREES:
        return PUBLISHED_TREES[str(source)]
    try:
        value = json.loads(FilePath(source).read_text(encoding="utf-8"))
        entries = value["paths"] if isinstance(value, dict) else value
        paths = [tuple(map(operator.index, path)) for path in entries]
    except OSError as error:
        raise ValueError(
            f"tree {source}: {error.strerror or error}; give a file of `jaxspec tune tree`, or "
            f"{', '.join(PUBLISHED_TREES)}."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"tree {source}: must hold a JSON list of rank paths, such as [[0], [1], [0, 0]], or "
            "an object with one as 'paths'."
        ) from None
    if not paths:
        raise ValueError(
            f"tree {source}: has no node, so its search found that plain decoding is faster; "
            "decode without a drafter, or give another tree."
        )
    try:
        return normalize_paths(paths)
    except ValueError as error:
        raise ValueError(f"tree {source}: {error}") from None


def tree_of_head(head: str | FilePath) -> tuple[Path, ...]:
    """The tree to draft over with an EAGLE head: the one searched for it, `tree.json` beside it.

    Where none lies there, EAGLE's own of 25 nodes.

    Args:
        head: as for `load_eagle`.
    """
    searched = find_head(head) / TREE_FILE
    return load_tree(searched) if searched.is_file() else EAGLE_PATHS


def paper_grid(acceptance: AcceptanceTable, max_batch: int) -> list[tuple[Path, ...]]:
    """The different trees of the paper's grid over depth, width, branching and nodes.

    The paper does not say which tree a tuple (D, W, BF, n) stands for. Here: the likeliest n nodes,
    taken one by one, of a tree exactly D deep, with at most W nodes in a level and BF children.

    Args:
        acceptance: says which nodes are likely; it may end the grid early.
        max_batch: the most nodes of a level that may have children.
    """
    fewest, most = GRID_NODES
    found = {}
    spans = (range(first, last + 1) for first, last in (GRID_DEPTHS, GRID_WIDTHS, GRID_BRANCHES))
    for depth, width, branch in itertools.product(*spans):
        limits = Limits(most, depth, width, branch, max_batch)
        for paths in _prefixes(likeliest_paths(acceptance, limits)):
            if len(paths) >= fewest and max(map(len, paths)) == depth:
                found.setdefault(frozenset(paths), paths)
    return list(found.values())


def likeliest_paths(acceptance: AcceptanceTable, limits: Limits) -> list[Path]:
    """Nodes in the order in which greedy growth adds them: always the likeliest that may come next.

    Medusa's search (Cai et al. 2024) where the table knows only depth and rank. For a number of
    nodes and no other limit than depth and branching, the first ones have the highest tau.
    """
    chosen: list[Path] = []
    waiting: dict[Path, float] = {}
    widths, batches = Counter(), Counter()

    def offer(path: Path, chance_of_parent: float) -> None:
        *parent, rank = path
        depth = len(parent)
        known = rank < min(limits.branch, acceptance.num_ranks(depth))
        if known and depth < limits.depth:
            waiting[path] = chance_of_parent * acceptance.rate(tuple(parent), rank)

    chances: dict[Path, float] = {(): 1.0}
    offer((0,), 1.0)
    while waiting and len(chosen) < limits.nodes:
        path = min(waiting, key=lambda path: (-waiting[path], len(path), path))
        chance = waiting.pop(path)
        parent, rank, depth = path[:-1], path[-1], len(path)
        if widths[depth] == limits.width or (rank == 0 and batches[depth] == limits.batch):
            continue  # nor will it ever fit
        chosen.append(path)
        chances[path] = chance
        widths[depth] += 1
        batches[depth] += rank == 0
        offer((*parent, rank + 1), chances[parent])
        offer((*path, 0), chance)
    return chosen


def sequoia_table(
    rates: Sequence[float], max_tokens: int, max_levels: int
) -> Float[np.ndarray, "tokens levels ranks"]:
    """Sequoia's T(m, l, b) (Chen et al. 2024): the most tokens that a tree of that shape gives.

    Args:
        rates: P(the child of each rank is accepted | its parent is), the same everywhere.
        max_tokens: of a tree, the root INCLUDED.
        max_levels: of a tree, the root's INCLUDED.

    Returns:
        By tokens, levels and children of the root, from 0 on; -inf where there is no such tree.
    """
    best = np.full((max_tokens + 1, max_levels + 1, len(rates) + 1), -np.inf, np.float32)
    best[1, 1:, 0] = 1.0
    chances = np.asarray(rates, np.float32)
    for tokens in range(2, max_tokens + 1):
        for levels in range(2, max_levels + 1):
            below = best[1:tokens, levels - 1].max(axis=-1)  # the last child, 1 to tokens - 1 of it
            best[tokens, levels, 1] = 1 + chances[0] * below[-1]
            for children in range(2, len(rates) + 1):
                before = best[1:tokens, levels, children - 1]
                totals = _with_child(before, chances[children - 1], below)
                best[tokens, levels, children] = totals.max()
    return best


def sequoia_paths(
    table: Float[np.ndarray, "tokens levels ranks"],
    rates: Sequence[float],
    tokens: int,
    levels: int,
) -> tuple[Path, ...]:
    """The tree behind an entry of `sequoia_table`, with the best number of children."""
    chances = np.asarray(rates, np.float32)

    def grow(root: Path, tokens: int, levels: int) -> Iterator[Path]:
        for rank in reversed(range(int(np.argmax(table[tokens, levels])))):
            taken = tokens - 1
            if rank:
                below = table[1:tokens, levels - 1].max(axis=-1)
                totals = _with_child(table[1:tokens, levels, rank], chances[rank], below)
                taken = tokens - 1 - int(np.argmax(totals))
            yield (*root, rank)
            yield from grow((*root, rank), taken, levels - 1)
            tokens -= taken

    return tuple(sorted(grow((), tokens, levels), key=lambda path: (len(path), path)))


def _with_child(before: np.ndarray, chance: np.float32, below: np.ndarray) -> np.ndarray:
    """What one more child adds, by the tokens that the children before it keep."""
    there = np.isfinite(below)[::-1]
    gained = chance * np.where(there, below[::-1], 0)
    return np.where(there, before + gained, -np.inf)


def choose_sequoia(
    table: Float[np.ndarray, "tokens levels ranks"],
    target_seconds: dict[int, float],
    draft_seconds: float,
) -> tuple[int, int]:
    """Tokens (root INCLUDED) and levels (root's included) of the tree that Sequoia would choose.

    It charges a draft pass for every level, the root's too.
    """
    best = table.max(axis=-1)
    prices = {
        (tokens, levels): (levels * draft_seconds + seconds) / best[tokens, levels]
        for tokens, seconds in target_seconds.items()
        for levels in range(1, table.shape[1])
        if best[tokens, levels] > 0
    }
    return min(prices, key=lambda shape: prices[shape])


class SensitivityRow(NamedTuple):
    """What another calibration of the inferred acceptance would change.

    shape: of the rates by rank, see `SHAPES`.
    tau: that EAGLE's 25-node tree is calibrated to, bonus INCLUDED.
    decay: of the rates per depth.
    best: the tree that the search finds under this calibration.
    chosen: the tree found under the shipped calibration, priced under this one.
    """

    shape: str
    tau: float
    decay: float
    best: Candidate
    chosen: Candidate


def calibration_sensitivity(
    profile: LatencyProfile, chosen: Sequence[Path], max_nodes: int = 12
) -> list[SensitivityRow]:
    """Searches again under other shapes, decays and values of tau than the shipped ones."""
    rows = []
    calibrations = [
        *((shape, PUBLISHED_TAU, 1.0) for shape in SHAPES),
        *(("sequoia", PUBLISHED_TAU * factor, 1.0) for factor in (0.95, 1.05)),
        ("sequoia", PUBLISHED_TAU, 0.97),
    ]
    for shape, tau, decay in calibrations:
        table = calibrated_table(tau, SHAPES[shape], decay)
        trees = best_trees(table, _limits(table, profile, max_nodes, None, None, 3))
        seconds = _seconds_of_shapes(trees, profile)
        index = int(np.argmax(trees.tau / seconds))
        best = Candidate(
            trees.paths(index), ("exact",), float(trees.tau[index]), float(seconds[index])
        )
        paths = tuple(chosen)
        again = Candidate(paths, ("exact",), table.tau(paths), _step_seconds(paths, profile))
        rows.append(SensitivityRow(shape, tau, decay, best, again))
    return rows


def _limits(
    acceptance: AcceptanceTable,
    profile: LatencyProfile,
    max_nodes: int | None,
    max_depth: int | None,
    max_width: int | None,
    max_branch: int | None,
) -> Limits:
    if max_nodes is None:
        max_nodes = min(25, profile.max_tokens - 1)
    profile.target_seconds(max_nodes + 1)  # names what to measure
    reach = {"max_depth": acceptance.max_depth, "max_branch": acceptance.max_branch}
    for name, given in (("max_depth", max_depth), ("max_branch", max_branch)):
        if given is not None and given > reach[name]:
            raise ValueError(
                f"{name}: the acceptance table reaches {reach[name]}, got {given}; measure with a "
                "larger probing tree (probe_paths), or search less."
            )
    if max_depth is None:
        usual = acceptance.max_depth if profile.one_pass else 5
        max_depth = int(min(usual, acceptance.max_depth, profile.max_levels))
    profile.first_draft_seconds(max_depth)
    return Limits(
        nodes=max_nodes,
        depth=max_depth,
        width=max_nodes if max_width is None else max_width,
        branch=min(4, acceptance.max_branch) if max_branch is None else max_branch,
        batch=profile.max_batch,
    )


def _seconds_of_shapes(trees: BestTrees, profile: LatencyProfile) -> Float[np.ndarray, " shapes"]:
    each = [0.0, *profile.later_draft_seconds(np.arange(1, profile.max_batch + 1))]
    levels = np.sum(trees.batches > 0, axis=1)
    firsts = [0.0, *map(profile.first_draft_seconds, range(1, trees.batches.shape[1] + 1))]
    first = np.asarray(firsts)[levels]
    deeper = np.asarray(each)[trees.batches[:, 1:]].sum(axis=1)
    return first + deeper + profile.target_seconds(trees.nodes + 1)


def _sequoia(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits
) -> tuple[Path, ...]:
    rates = acceptance.rates_by_rank()[: limits.branch]
    table = sequoia_table(rates, limits.nodes + 1, limits.depth + 1)
    sizes = range(1, limits.nodes + 2)
    target_seconds = {tokens: float(profile.target_seconds(tokens)) for tokens in sizes}
    shape = choose_sequoia(table, target_seconds, profile.draft_seconds([1]))
    return sequoia_paths(table, rates, *shape)


def _by_depth(acceptance: AcceptanceTable) -> AcceptanceTable:
    return AcceptanceTable(acceptance.rates_by_depth())


def _prefixes(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    return [tuple(paths[: end + 1]) for end in range(len(paths))]


def _ranked(found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Fastest first, each tree once, with all that found it."""
    merged: dict[frozenset[Path], Candidate] = {}
    for candidate in found:
        same = frozenset(candidate.paths)
        if same in merged:
            names = dict.fromkeys((*merged[same].found_by, *candidate.found_by))
            merged[same] = merged[same]._replace(found_by=tuple(names))
        else:
            merged[same] = candidate
    return tuple(sorted(merged.values(), key=lambda each: -each.tokens_per_second))
