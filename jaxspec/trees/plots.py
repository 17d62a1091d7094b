"""Pictures of profiles, trees and searches. They need matplotlib, the extra `plots`.

`draw_` functions draw on axes that are given, `plot_` functions into a file.
"""

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.checkpoint.files import replacing_files
from jaxspec.trees.latency import CachePressure, LatencyProfile
from jaxspec.trees.search import Candidate, TreeSearch

if TYPE_CHECKING:
    from jaxspec.trees.acceptance import AcceptanceTable

_DPI = 110


def check_plots() -> None:
    """Notices before the work that pictures cannot be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("Pictures need matplotlib: pip install 'jaxspec[plots]'.") from None


def plot_latency(profiles: Sequence[LatencyProfile], path: FilePath) -> None:
    """See `draw_latency`."""
    figure, axes = _figure((7.5, 4.5))
    draw_latency(axes, profiles)
    _save(figure, path)


def draw_latency(axes: Any, profiles: Sequence[LatencyProfile]) -> None:
    """Verification latency against budget, over that of one token: the paper's figure.

    Points are the profiles' own; a profile that knows its on-chip memory has `CachePressure`
    drawn through them, if they are on both sides of its knee.
    """
    for profile in profiles:
        budgets = [timing.size - 1 for timing in profile.target]
        (line,) = axes.plot(budgets, profile.normalised(), marker="o", label=profile.name)
        spreads = [(timing.spread or 0.0) / profile.target[0].seconds for timing in profile.target]
        axes.errorbar(
            budgets, profile.normalised(), spreads, fmt="none", color=line.get_color(), capsize=2
        )
        if profile.memory is not None:
            try:
                curve, sizes = CachePressure.fitted(profile), np.arange(1, 33)
            except ValueError:
                axes.plot([], [], " ", label=f"{profile.name}: too few points for the model")
                continue
            axes.plot(
                sizes - 1,
                curve.seconds(sizes) / curve.one_token,
                color=line.get_color(),
                linestyle=":",
                label=f"{profile.name}: modelled cache pressure",
            )
    axes.set(
        xlabel="budget: draft nodes, the root excluded",
        ylabel="T_target(budget + 1) / T_target(1)",
        xlim=(0, 64),
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def plot_tree(found: Candidate, acceptance: "AcceptanceTable", path: FilePath) -> None:
    """See `draw_tree`."""
    figure, axes = _figure((7.5, 1.5 + 1.1 * found.depth))
    draw_tree(axes, found, acceptance)
    _save(figure, path)


def draw_tree(axes: Any, found: Candidate, acceptance: "AcceptanceTable") -> None:
    """A tree, root on top; nodes carry their rank and the chance that they are accepted."""
    places = _places(found.paths)
    for node, (x, y) in places.items():
        if node:
            parent_x, parent_y = places[node[:-1]]
            axes.plot([parent_x, x], [parent_y, y], color="0.7", zorder=1)
        chance = acceptance.chance(node)
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


def plot_cost(
    search: TreeSearch, path: FilePath, measured: Sequence[tuple[int, float]] = ()
) -> None:
    """See `draw_cost`."""
    figure, axes = _figure((7.5, 4.5))
    draw_cost(axes, search, measured)
    _save(figure, path)


def draw_cost(axes: Any, search: TreeSearch, measured: Sequence[tuple[int, float]] = ()) -> None:
    """Seconds per token of the best tree of each budget, with plain decoding as a line.

    Args:
        axes: to draw on.
        search: what to draw.
        measured: nodes (the root excluded) and tokens per second of trees, drawn as crosses.
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


def plot_predictions(speeds: Sequence[tuple[float, float]], path: FilePath) -> None:
    """See `draw_predictions`."""
    figure, axes = _figure((4.8, 4.5))
    draw_predictions(axes, speeds)
    _save(figure, path)


def draw_predictions(axes: Any, speeds: Sequence[tuple[float, float]]) -> None:
    """Predicted against measured tokens per second, a point for each tree."""
    predicted, measured = zip(*speeds, strict=True)
    axes.plot(measured, predicted, "o")
    ends = 0.95 * min(*predicted, *measured), 1.05 * max(*predicted, *measured)
    axes.plot(ends, ends, color="0.4", linestyle="--", label="predicted = measured")
    axes.set(xlabel="measured tokens/s", ylabel="predicted tokens/s", xlim=ends, ylim=ends)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _places(paths: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Where nodes go: leaves side by side, parents over the middle of their outer children."""
    nodes = [(), *paths]
    across: dict[tuple[int, ...], float] = {}
    parents = {path[:-1] for path in paths}
    leaves = sorted(node for node in nodes if node not in parents)
    across.update({leaf: float(place) for place, leaf in enumerate(leaves)})
    for node in sorted(parents, key=len, reverse=True):
        below = [across[path] for path in paths if path[:-1] == node]
        across[node] = (min(below) + max(below)) / 2
    return {node: (across[node], -float(len(node))) for node in nodes}


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: FilePath) -> None:
    path = FilePath(path)
    with replacing_files(path.parent) as folder:
        figure.savefig(folder / path.name, dpi=_DPI)
