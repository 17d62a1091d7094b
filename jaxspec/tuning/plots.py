"""Plots of profiles, trees and searches. They need matplotlib, the extra `plots`.

Each `draw_` function draws on axes of matplotlib; `plot` writes such a drawing to a file.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoint.files import replacing_files
from jaxspec.extras import needs_extra
from jaxspec.tuning.latency import LatencyProfile
from jaxspec.tuning.tree_search import Candidate, TreeSearch

if TYPE_CHECKING:
    from jaxspec.tuning.acceptance import AcceptanceTable

_DPI = 110


def check_plots() -> None:
    """Checks that matplotlib is there, so that a run fails before its work and not after it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    with needs_extra("Drawing a picture", "plots"):
        import matplotlib  # noqa: F401


def plot(
    path: str | FilePath,
    draw: Callable[..., None],
    *arguments: Any,
    size: tuple[float, float] = (7.5, 4.5),
) -> None:
    """Writes a drawing to a file. An interrupted write leaves no file.

    Args:
        path: the file; its suffix is the format.
        draw: a `draw_` function.
        *arguments: its arguments after the axes.
        size: width and height in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    path = FilePath(path)
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots(), *arguments)
    with replacing_files(path.parent) as folder:
        figure.savefig(folder / path.name, dpi=_DPI)


def draw_latency(axes: Any, profiles: Sequence[LatencyProfile]) -> None:
    """Draws the paper's figure: times of target passes by budget, over the time of one token.

    The lines between points are the interpolation that the search uses.
    """
    for profile in profiles:
        budgets = [timing.size - 1 for timing in profile.target]
        (line,) = axes.plot(budgets, profile.normalised(), marker="o", label=profile.name)
        spreads = [(timing.spread or 0.0) / profile.target[0].seconds for timing in profile.target]
        axes.errorbar(
            budgets, profile.normalised(), spreads, fmt="none", color=line.get_color(), capsize=2
        )
    axes.set(
        xlabel="budget: draft nodes, the root excluded",
        ylabel="T_target(budget + 1) / T_target(1)",
        xlim=(0, 64),
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_tree(axes: Any, found: Candidate, acceptance: "AcceptanceTable") -> None:
    """Draws a tree, root on top. Each node shows its rank and its chance of acceptance."""
    places = _places(found.paths)
    for node, (x, y) in places.items():
        if node:
            parent_x, parent_y = places[node[:-1]]
            axes.plot([parent_x, x], [parent_y, y], color="0.7", zorder=1)
        chance = acceptance.chance(node, found.threshold) if node else 1.0
        text = f"{node[-1]}\n{chance:.0%}" if node else "root"
        look = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "C0"}
        axes.text(x, y, text, ha="center", va="center", fontsize="small", bbox=look, zorder=2)
    widest = max(x for x, _ in places.values())
    axes.set(xlim=(-0.6, widest + 0.6), ylim=(-found.depth - 0.6, 0.6))
    axes.set_title(
        f"{found.nodes} nodes without the root; predicted tau {found.tau:.2f} (bonus included), "
        f"{found.tokens_per_second:.2f} tokens/s",
        fontsize="medium",
    )
    axes.axis("off")


def draw_cost(axes: Any, search: TreeSearch, measured: Sequence[tuple[int, float]] = ()) -> None:
    """Draws the time per token of the best tree of each budget, and plain decoding as a line.

    Crosses are `measured` trees: their nodes (the root excluded) and tokens per second.
    """
    budgets = [each.nodes for each in search.by_budget]
    costs = [1e3 / each.tokens_per_second for each in search.by_budget]
    axes.plot(budgets, costs, marker=".", label="best tree of the budget, predicted")
    axes.axhline(costs[0], color="0.4", linestyle="--", label="plain decoding")
    best = search.best
    axes.plot(best.nodes, 1e3 / best.tokens_per_second, "o", color="C3", label="fastest")
    if measured:
        nodes, speeds = zip(*measured, strict=True)
        axes.plot(nodes, [1e3 / speed for speed in speeds], "x", color="C1", label="measured")
    axes.set(
        xlabel="budget: draft nodes, the root excluded",
        ylabel="ms per token",
        ylim=(0, None),
        title=search.profile,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_speedups(axes: Any, searches: Sequence[TreeSearch]) -> None:
    """Draws the predicted speed-up of the best tree of each budget; dots are the fastest trees."""
    for search in searches:
        plain = search.plain.tokens_per_second
        speedups = [each.tokens_per_second / plain for each in search.by_budget]
        budgets = [each.nodes for each in search.by_budget]
        (line,) = axes.plot(budgets, speedups, label=search.profile)
        best = search.best
        axes.plot(best.nodes, best.tokens_per_second / plain, "o", color=line.get_color())
    axes.axhline(1.0, color="0.4", linestyle="--", label="plain decoding")
    axes.set(
        xlabel="draft nodes, the root excluded",
        ylabel="times as fast as plain decoding, predicted",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_predictions(axes: Any, speeds: Sequence[tuple[float, float]]) -> None:
    """Draws predicted against measured tokens per second, one point per tree."""
    predicted, measured = zip(*speeds, strict=True)
    axes.plot(measured, predicted, "o")
    ends = 0.95 * min(*predicted, *measured), 1.05 * max(*predicted, *measured)
    axes.plot(ends, ends, color="0.4", linestyle="--", label="predicted = measured")
    axes.set(xlabel="measured tokens/s", ylabel="predicted tokens/s", xlim=ends, ylim=ends)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_searches(axes: Any, seconds: Mapping[str, Sequence[float]]) -> None:
    """Draws the seconds per token of each search's evaluations, and the best so far."""
    for name, found in seconds.items():
        costs, numbers = [1e3 * each for each in found], range(1, len(found) + 1)
        (line,) = axes.step(numbers, list(itertools.accumulate(costs, min)), label=name)
        axes.plot(numbers, costs, ".", markersize=2, alpha=0.4, color=line.get_color())
    axes.set(xlabel="evaluation", ylabel="milliseconds per token", yscale="log")
    axes.legend(title="best so far")


def _places(paths: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Places nodes: leaves in a row, each parent over the middle of its outer children."""
    nodes = [(), *paths]
    across: dict[tuple[int, ...], float] = {}
    parents = {path[:-1] for path in paths}
    leaves = sorted(node for node in nodes if node not in parents)
    across.update({leaf: float(place) for place, leaf in enumerate(leaves)})
    for node in sorted(parents, key=len, reverse=True):
        below = [across[path] for path in paths if path[:-1] == node]
        across[node] = (min(below) + max(below)) / 2
    return {node: (across[node], -float(len(node))) for node in nodes}
