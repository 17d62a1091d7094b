"""The exact tree search next to published ones: the paper's grid, Medusa's and Sequoia's searches.

Run it from the repository:

    python -m benchmarks.tree_searches
    python -m benchmarks.tree_searches --profile FILE --acceptance FILE
    python -m benchmarks.tree_searches --plot docs/cost.png

It prints the predicted speed of the best tree of each search. For an inferred acceptance table it
also repeats the exact search under other calibrations. `--plot` draws the speed-up by the size of
the tree, on devices that differ and with the acceptance of `demo-eagle` on all of them. Nothing is
measured: the figures follow from the profiles and the table.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.checkpoint import find_head
from jaxspec.core.tree import EAGLE_PATHS, Path
from jaxspec.tuning import (
    AcceptanceTable,
    Candidate,
    LatencyProfile,
    Limits,
    calibrated_table,
    likeliest_paths,
    load_acceptance,
    load_profile,
    predict,
    search_tree,
    shipped_profiles,
    shipped_tables,
)
from jaxspec.tuning.acceptance import PUBLISHED_TAU, SHAPES
from jaxspec.tuning.plots import draw_speedups, plot

GRID_DEPTHS, GRID_WIDTHS, GRID_BRANCHES, GRID_NODES = (3, 5), (1, 8), (1, 3), (3, 25)
"""The grid of the paper, ends included; nodes exclude the root."""
_MOST_NODES = 12  # in searches under other calibrations
_MOST_DRAWN = 16


class OtherSearches(NamedTuple):
    """Trees that published searches find.

    Attributes:
        best: the fastest tree of each search, by name.
        left_out: trees that the profile or the table does not cover: one reason per search.
    """

    best: Mapping[str, Candidate]
    left_out: tuple[str, ...]


def other_searches(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits
) -> OtherSearches:
    """Runs the published searches; their trees may lie outside `limits`."""
    by_depth = AcceptanceTable(acceptance.rates_by_depth())
    trees = {
        "paper's grid": paper_grid(acceptance, profile.max_batch),
        "Medusa": _prefixes(likeliest_paths(by_depth, limits)),
        "Sequoia": [sequoia_search(acceptance, profile, limits)],
        "EAGLE's tree": [EAGLE_PATHS],
    }
    best, left_out = {}, []
    for name, several in trees.items():
        priced, refused = [], []
        for paths in several:
            try:
                priced.append(predict(paths, acceptance, profile))
            except ValueError as error:
                refused.append(str(error))
        if refused:
            left_out.append(f"{name}: {len(refused)} of {len(several)}, the first: {refused[0]}")
        if priced:
            best[name] = max(priced, key=lambda each: each.tokens_per_second)
    return OtherSearches(best, tuple(left_out))


def paper_grid(acceptance: AcceptanceTable, max_batch: int) -> list[tuple[Path, ...]]:
    """Returns the different trees of the paper's grid over depth, width, branching and nodes.

    The paper does not say which tree a tuple (D, W, BF, n) stands for. Here it is the likeliest n
    nodes, taken one by one, of a tree exactly D deep, with at most W nodes in a level and at most
    BF children of a node.

    Args:
        acceptance: the chances of the nodes; a shallow table ends the grid early.
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


def sequoia_search(
    acceptance: AcceptanceTable, profile: LatencyProfile, limits: Limits
) -> tuple[Path, ...]:
    """Runs Sequoia's search (Chen et al. 2024), which knows one acceptance rate per rank."""
    rates = rates_by_rank(acceptance)[: limits.branch]
    table = sequoia_table(rates, limits.nodes + 1, limits.depth + 1)
    sizes = range(1, limits.nodes + 2)
    target_seconds = {tokens: float(profile.target_seconds(tokens)) for tokens in sizes}
    shape = choose_sequoia(table, target_seconds, profile.draft_seconds([1]))
    return sequoia_paths(table, rates, *shape)


def rates_by_rank(acceptance: AcceptanceTable) -> tuple[float, ...]:
    """P(the child of rank r is accepted | its parent is), over all parents of all depths."""
    if acceptance.counts:
        counts = acceptance.counts.values()
        accepted = itertools.zip_longest(*(ranks.accepted for ranks in counts), fillvalue=0)
        offered = itertools.zip_longest(*(ranks.offered for ranks in counts), fillvalue=0)
        return tuple(
            sum(hits) / max(1, sum(tries)) for hits, tries in zip(accepted, offered, strict=True)
        )
    columns = itertools.zip_longest(*acceptance.rates, fillvalue=0.0)
    return tuple(sum(column) / len(acceptance.rates) for column in columns)


def sequoia_table(
    rates: Sequence[float], max_tokens: int, max_levels: int
) -> Float[np.ndarray, "tokens levels ranks"]:
    """Computes Sequoia's T(m, l, b): the most expected tokens of a tree of each shape.

    Args:
        rates: P(the child of each rank is accepted | its parent is), the same everywhere.
        max_tokens: tokens of the largest tree, the root INCLUDED.
        max_levels: levels of the deepest tree, the root's INCLUDED.

    Returns:
        Expected tokens by tokens, levels and children of the root, each from 0 upwards; -inf if
        there is no such tree.
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
    """Returns the tree of an entry of `sequoia_table`, with the best number of children."""
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
    """Adds one more child, by the tokens that the children before it keep."""
    there = np.isfinite(below)[::-1]
    gained = chance * np.where(there, below[::-1], 0)
    return np.where(there, before + gained, -np.inf)


def choose_sequoia(
    table: Float[np.ndarray, "tokens levels ranks"],
    target_seconds: dict[int, float],
    draft_seconds: float,
) -> tuple[int, int]:
    """Returns tokens (root INCLUDED) and levels (root's INCLUDED) of the tree Sequoia chooses.

    It charges a draft pass for every level, also for the root's.
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
    """The exact search under another calibration of the inferred acceptance.

    Attributes:
        shape: name of the rates by rank, see `SHAPES`.
        tau: tau that EAGLE's 25-node tree is calibrated to, bonus INCLUDED.
        decay: factor of the rates from one depth to the next.
        best: the tree that the search finds under this calibration.
        chosen: the tree found under the shipped calibration, priced under this one.
    """

    shape: str
    tau: float
    decay: float
    best: Candidate
    chosen: Candidate


def calibration_sensitivity(
    profile: LatencyProfile, chosen: Sequence[Path], max_nodes: int = _MOST_NODES
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
        best = search_tree(table, profile, max_nodes=max_nodes, max_branch=3).best
        rows.append(SensitivityRow(shape, tau, decay, best, predict(chosen, table, profile)))
    return rows


def _prefixes(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    return [tuple(paths[: end + 1]) for end in range(len(paths))]


def plot_devices(path: str) -> None:
    """Draws the best tree of each size on the shipped profiles and on that of `demo-eagle`."""
    head = find_head("demo-eagle")
    acceptance = load_acceptance(head / "acceptance.json")
    profiles = [head / "profile.json", *shipped_profiles()]
    searches = [
        search_tree(acceptance, load_profile(each), max_nodes=_MOST_DRAWN, max_branch=3)
        for each in profiles
    ]
    plot(path, draw_speedups, searches, size=(7.0, 4.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both comparisons."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree_searches")
    parser.add_argument("--profile", default=shipped_profiles()[0], help="default: %(default)s")
    parser.add_argument("--acceptance", default=shipped_tables()[0], help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE", help="draw devices side by side, and end")
    args = parser.parse_args(argv)
    if args.plot:
        plot_devices(args.plot)
        return 0
    profile, acceptance = load_profile(args.profile), load_acceptance(args.acceptance)
    if profile.one_pass:
        raise SystemExit("--profile: the other searches price a draft pass per level.")
    found = search_tree(acceptance, profile)
    others = other_searches(acceptance, profile, found.limits)
    rows = {"exact": found.best_draft, "plain decoding": found.plain, **others.best}
    for name, tree in rows.items():
        print(
            f"{name:16} {tree.nodes:3} nodes, depth {tree.depth}, tau {tree.tau:.2f} (bonus "
            f"included), {tree.tokens_per_second:.2f} tokens/s"
        )
    for reason in others.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not acceptance.counts:
        most = min(_MOST_NODES, found.limits.nodes)
        for row in calibration_sensitivity(profile, found.best_draft.paths, most):
            print(
                f"rates {row.shape}, tau {row.tau:.2f} of EAGLE's tree, decay {row.decay:.2f}: "
                f"best {row.best.nodes} nodes, {row.best.tokens_per_second:.2f} tokens/s; the tree "
                f"above {row.chosen.tokens_per_second:.2f}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
