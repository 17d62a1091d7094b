"""The search for the fastest draft tree on a device.

A step has one draft pass per level that has nodes with children, and one target pass; it emits tau
tokens. `cost` is seconds per token: (T_d(1) * D + T_target(n)) / tau, as in the paper, if a draft
pass over several nodes takes as long as one over a single node. A drafter of blocks has one draft
pass for a tree of any depth: (T_d + T_target(n)) / tau. Of its trees with n nodes, the likeliest is
the best. A chain that ends early costs the mean over the passes and depths of its steps.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.core.checks import Count, Nodes, Share, checks_arguments
from jaxspec.core.proposal import bank
from jaxspec.core.tree import Path, Paths, chain_paths, tree_from_paths
from jaxspec.core.types import Tree
from jaxspec.tuning.acceptance import AcceptanceTable, ExitCounts, rank_paths
from jaxspec.tuning.files import write_entry
from jaxspec.tuning.latency import LatencyProfile, TableRow
from jaxspec.tuning.tree_exact import BestTrees, Limits, best_trees


@checks_arguments
def draft_batches(paths: Paths) -> tuple[int, ...]:
    """Returns the number of nodes in each draft pass of a tree: per level, those with children.

    Example:
        >>> from jaxspec.core.tree import EAGLE_PATHS
        >>> from jaxspec.tuning import draft_batches
        >>> draft_batches(EAGLE_PATHS)
        (1, 4, 4, 1, 1)
    """
    return _draft_batches(tuple(map(tuple, paths)))


def _draft_batches(paths: Sequence[Path]) -> tuple[int, ...]:
    parents = {path[:-1] for path in paths}
    by_depth = Counter(map(len, parents))
    return tuple(by_depth[depth] for depth in range(len(by_depth)))


@checks_arguments
def cost(tree: Tree, profile: LatencyProfile, tau: float) -> float:
    """Returns the seconds per token of drafting over a tree.

    Args:
        tree: the draft tree; a root alone is plain decoding.
        profile: pass times of the device.
        tau: tokens per target pass, bonus INCLUDED; measured, or from `AcceptanceTable.tau`.

    Raises:
        ValueError: tau is below 1, or the tree is larger than the profile covers.

    Example:
        >>> from jaxspec import eagle_tree
        >>> from jaxspec.tuning import cost, load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> round(1 / cost(eagle_tree(), phone, tau=4.06), 2)
        9.13
    """
    if tau < 1:
        raise ValueError(f"tau counts the bonus token, so it must be at least 1; got {tau}.")
    return _step_seconds(rank_paths(tree), profile) / tau


def _step_seconds(paths: Sequence[Path], profile: LatencyProfile) -> float:
    return sum(_parts(paths, profile))


def _parts(
    paths: Sequence[Path], profile: LatencyProfile, exits: ExitCounts | None = None
) -> tuple[float, float]:
    """Returns the seconds of drafting and of verification in a step.

    Args:
        paths: rank paths of the tree.
        profile: pass times of the device.
        exits: counts of a chain that ends early; means over its steps are returned.
    """
    if exits is None:
        target = float(profile.target_seconds(len(paths) + 1))
        return profile.draft_seconds(_draft_batches(paths)), target
    longest = len(paths)
    widths = np.asarray(bank(longest + 1))
    targets = profile.target_seconds(widths[np.searchsorted(widths, np.arange(longest + 1) + 1)])
    later = (exits.mean_passes(longest) - 1) * float(profile.later_draft_seconds(1))
    first = profile.first_draft_seconds(longest)
    return first + later, float(exits.shares(longest) @ targets)


class Candidate(NamedTuple):
    """A tree with its predicted speed.

    Attributes:
        paths: rank paths of its nodes, without the root; empty for plain decoding.
        tau: tokens per target pass, bonus INCLUDED.
        step_seconds: seconds of one step.
        threshold: of a chain that ends early, see `DraftModel`; 0: it does not.
    """

    paths: tuple[Path, ...]
    tau: float
    step_seconds: float
    threshold: float = 0.0

    @property
    def nodes(self) -> int:
        """Number of draft tokens, the root EXCLUDED."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(map(len, self.paths), default=0)

    @property
    def tree(self) -> Tree:
        """The tree as arrays."""
        return tree_from_paths(self.paths)

    @property
    def tokens_per_second(self) -> float:
        """Predicted speed, bonus token INCLUDED."""
        return self.tau / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        return {
            "paths": [list(path) for path in self.paths],
            "nodes_without_root": self.nodes,
            "tokens_with_root": self.nodes + 1,
            "depth": self.depth,
            "threshold": self.threshold,
            "predicted": {
                "tau_bonus_included": self.tau,
                "step_seconds": self.step_seconds,
                "tokens_per_second": self.tokens_per_second,
            },
        }


@checks_arguments
def predict(
    paths: Paths,
    acceptance: AcceptanceTable,
    profile: LatencyProfile,
    threshold: Share = 0.0,
) -> Candidate:
    """Predicts the speed of one tree, or of a chain that ends early.

    Args:
        paths: rank paths of its nodes, without the root; empty for plain decoding.
        acceptance: table of the drafter.
        profile: pass times of the device.
        threshold: of a chain that ends early; 0: it does not.

    Raises:
        ValueError: the tree is larger than the table or the profile covers, or the table does not
            know the threshold.

    Example:
        >>> from jaxspec.tuning import calibrated_table, load_profile, predict
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> round(predict([], calibrated_table(), phone).tokens_per_second, 2)
        11.49
    """
    return _predict(tuple(map(tuple, paths)), acceptance, profile, threshold)


def _predict(
    paths: tuple[Path, ...],
    acceptance: AcceptanceTable,
    profile: LatencyProfile,
    threshold: float = 0.0,
) -> Candidate:
    exits = acceptance.exit(threshold) if threshold else None
    seconds = sum(_parts(paths, profile, exits))
    return Candidate(paths, acceptance.tau(paths, threshold), seconds, threshold)


@checks_arguments
def table_row(
    name: str, found: Candidate, acceptance: AcceptanceTable, profile: LatencyProfile
) -> TableRow:
    """Returns a tree's row of a table of speeds, with drafting and verification taken apart.

    Args:
        name: of the row.
        found: the tree, as `predict` or a search returned it for this table and profile.
        acceptance: table of the drafter.
        profile: pass times of the device.

    Example:
        >>> from jaxspec.core.tree import EAGLE_PATHS
        >>> from jaxspec.tuning import calibrated_table, load_profile, predict
        >>> from jaxspec.tuning.tree_search import table_row
        >>> phone, table = load_profile("galaxy-s25-adreno830-vicuna7b-q4"), calibrated_table()
        >>> row = table_row("EAGLE", predict(EAGLE_PATHS, table, phone), table, phone)
        >>> row.nodes, round(1e3 * row.draft_seconds, 2), round(1e3 * row.target_seconds, 2)
        (25, 52.34, 392.12)
    """
    exits = acceptance.exit(found.threshold) if found.threshold else None
    parts = _parts(found.paths, profile, exits)
    return TableRow(name, found.nodes, *parts, found.tau, found.tokens_per_second)


def early_exits(
    acceptance: AcceptanceTable, profile: LatencyProfile, max_nodes: int
) -> list[Candidate]:
    """Predicts the chains that end early, of each threshold and greatest length, fastest first."""
    chain = chain_paths(max_nodes)
    found = [
        _predict(chain[:length], acceptance, profile, counts.threshold)
        for counts in acceptance.exits
        for length in range(2, int(min(len(counts.drafted), max_nodes + 1, profile.max_levels + 1)))
    ]
    return sorted(found, key=_speed, reverse=True)


@dataclasses.dataclass(frozen=True)
class TreeSearch:
    """The result of `search_tree`.

    Attributes:
        ranking: the fastest trees and plain decoding, fastest first.
        by_budget: the fastest tree of each number of nodes, from 0 (plain decoding) upwards.
        exits: chains that end early, if they were asked for, fastest first.
        limits: limits of the search.
        num_shapes: number of tree shapes that were priced.
        profile: name of the latency profile.
        acceptance: source of the acceptance table.
    """

    ranking: tuple[Candidate, ...]
    by_budget: tuple[Candidate, ...]
    limits: Limits
    num_shapes: int
    profile: str
    acceptance: str
    exits: tuple[Candidate, ...] = ()

    @property
    def best(self) -> Candidate:
        """The fastest tree; plain decoding if no tree is faster."""
        return self.ranking[0]

    @property
    def plain(self) -> Candidate:
        """Plain decoding."""
        return self.by_budget[0]

    @property
    def best_draft(self) -> Candidate:
        """The fastest tree with a node, even if plain decoding is faster."""
        return max((*self.by_budget[1:], *self.exits), key=_speed)

    @property
    def tree(self) -> Tree:
        """The best tree as arrays."""
        return self.best.tree

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        return {
            "profile": self.profile,
            "acceptance": self.acceptance,
            "limits": dataclasses.asdict(self.limits),
            "ranking": [candidate.as_dict() for candidate in self.ranking],
            "by_budget": [candidate.as_dict() for candidate in self.by_budget],
            "exits": [candidate.as_dict() for candidate in self.exits],
        }


@checks_arguments
def search_tree(
    acceptance: AcceptanceTable,
    profile: LatencyProfile,
    *,
    max_nodes: Nodes | None = None,
    max_depth: Count | None = None,
    max_width: Count | None = None,
    max_branch: Count | None = None,
    num_best: Count = 10,
    early_exit: bool = False,
) -> TreeSearch:
    """Finds the tree that gives the most tokens per second on a device.

    The search is exact over all trees within the limits. Plain decoding is among the candidates.
    No draft pass is wider than the widest of the profile.

    Args:
        acceptance: table of the drafter.
        profile: pass times of the device.
        max_nodes: draft tokens, the root excluded; `None`: 25, or as many as the profile covers.
        max_depth: levels; `None`: 5, or as many as the table covers.
        max_width: nodes of a level; `None`: no limit. A limit makes the search slower.
        max_branch: children of a node; `None`: 4, or as many as the table covers.
        num_best: number of trees to rank.
        early_exit: also rank chains that end early, up to the length that the table has counts of
            (`jaxspec tune tree` does, if the profile is of JAX). Exported files do not end them.

    Raises:
        ValueError: a limit is larger than the profile or the table covers, or an argument is of
            another type.

    Example:
        >>> from jaxspec import search_tree
        >>> from jaxspec.tuning import calibrated_table, load_profile
        >>> phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
        >>> found = search_tree(calibrated_table(), phone, max_nodes=8)
        >>> found.best.tokens_per_second > 19.43 > found.plain.tokens_per_second
        True
    """
    limits = _limits(acceptance, profile, max_nodes, max_depth, max_width, max_branch)
    search = _search_one_pass if profile.one_pass else _search_all_shapes
    best, by_budget, num_shapes = search(acceptance, profile, limits, num_best)
    most = limits.nodes if max_depth is None else min(limits.nodes, max_depth)
    exits = early_exits(acceptance, profile, most) if early_exit else []
    best = sorted((*best, *exits), key=_speed, reverse=True)[:num_best]
    plain = () if any(not candidate.paths for candidate in best) else by_budget[:1]
    return TreeSearch(
        ranking=tuple(sorted((*best, *plain), key=_speed, reverse=True)),
        by_budget=by_budget,
        limits=limits,
        num_shapes=num_shapes,
        profile=profile.name,
        acceptance=acceptance.source,
        exits=tuple(exits),
    )


_Found = tuple[list[Candidate], tuple[Candidate, ...], int]
"""The fastest trees, the fastest of each number of nodes, and the number of shapes priced."""


def _search_all_shapes(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits, num_best: int
) -> _Found:
    trees = best_trees(acceptance, limits)
    seconds = _seconds_of_shapes(trees, profile)
    speeds = trees.tau / seconds

    def candidate(index: int) -> Candidate:
        return Candidate(trees.paths(index), float(trees.tau[index]), float(seconds[index]))

    budgets = [np.flatnonzero(trees.nodes == nodes) for nodes in range(limits.nodes + 1)]
    by_budget = tuple(
        candidate(int(shapes[np.argmax(speeds[shapes])])) for shapes in budgets if shapes.size
    )
    best = [candidate(int(index)) for index in np.argsort(-speeds, kind="stable")[:num_best]]
    return best, by_budget, len(speeds)


def _search_one_pass(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits, num_best: int
) -> _Found:
    """Grows trees greedily, once per depth: one draft pass costs by nodes and depth alone.

    This is exact if later choices of a node are never accepted more often than earlier ones, and
    drafts for deeper trees take no less time.
    """
    plain = _predict((), acceptance, profile)
    by_nodes, num_shapes = {0: plain}, 1
    for depth in range(1, min(limits.depth, limits.nodes) + 1):
        grown = likeliest_paths(acceptance, dataclasses.replace(limits, depth=depth))
        num_shapes += len(grown)
        for count in range(1, len(grown) + 1):
            candidate = _predict(tuple(grown[:count]), acceptance, profile)
            # The first draft pass also reads what the last step emitted: deeper trees cost more.
            by_nodes[count] = max(by_nodes.get(count, candidate), candidate, key=_speed)
    by_budget = tuple(by_nodes[nodes] for nodes in sorted(by_nodes))
    return sorted(by_budget, key=_speed, reverse=True)[:num_best], by_budget, num_shapes


def _speed(candidate: Candidate) -> float:
    return candidate.tokens_per_second


@checks_arguments
def save_tree(found: Candidate, path: str | FilePath, **facts: Any) -> None:
    """Writes a tree with its figures as JSON. An interrupted write leaves no file.

    Args:
        found: the tree.
        path: the file.
        **facts: further fields of the file, plain values.

    Example:
        >>> import tempfile
        >>> from jaxspec.tuning import Candidate, load_tree, save_tree
        >>> chain = Candidate(((0,), (0, 0)), tau=2.0, step_seconds=0.01)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tree(chain, f"{folder}/tree.json")
        ...     load_tree(f"{folder}/tree.json")
        ((0,), (0, 0))
    """
    write_entry(path, {**found.as_dict(), **facts})


@checks_arguments
def likeliest_paths(acceptance: AcceptanceTable, limits: Limits) -> list[Path]:
    """Grows a tree greedily: returns its nodes in the order in which they are added.

    Each step adds the node with the highest chance among those that may come next. This is Medusa's
    search (Cai et al. 2024) if the table knows only depth and rank. If depth and branching are the
    only limits, the first n nodes have the highest tau of all trees of n nodes.

    Example:
        >>> from jaxspec.tuning import AcceptanceTable, Limits, likeliest_paths
        >>> table = AcceptanceTable(((0.6, 0.3), (0.4, 0.1)))
        >>> likeliest_paths(table, Limits(nodes=3, depth=2, width=3, branch=2, batch=3))
        [(0,), (1,), (0, 0)]
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
            continue  # it will not fit later either
        chosen.append(path)
        chances[path] = chance
        widths[depth] += 1
        batches[depth] += rank == 0
        offer((*parent, rank + 1), chances[parent])
        offer((*path, 0), chance)
    return chosen


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
    profile.target_seconds(max_nodes + 1)  # raises an error that says what to measure
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
