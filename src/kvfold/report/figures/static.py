"""The main figures as PNG files, drawn with matplotlib: no browser is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from kvfold.report import page_words as words
from kvfold.report.figures.depths import DepthGrid, depth_grids
from kvfold.report.figures.fronts import AXES, Cost, cost_of, lines
from kvfold.report.figures.palette import HEAT, INK, MARKERS, SERIES, STROKES, Style, heat_step, on_heat, styles
from kvfold.report.merge import DENSE, Evidence
from kvfold.report.summary import Row, Summary

_INK = INK["light"]
_PANELS = 4


def write_pngs(evidence: Evidence, summary: Summary, folder: Path) -> list[Path]:
    """Draw score against bytes, reading and time at every length, all tasks together, and the heat maps of each task.

    Args:
        evidence: The merged runs.
        summary: Their numbers.
        folder: Where the files go; it is made.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    style = styles(tuple(policy for policy in evidence.policies if policy != DENSE))
    written = []
    costs: tuple[Cost, ...] = ("bytes", "read", "time") if summary.reads_less else ("bytes", "time")
    for place in summary.places:
        if place.task is None:
            for cost in costs:
                if (figure := _front(summary.rows[place], cost, style)) is not None:
                    written.append(folder / f"score-{cost}-{place.length}-{words.awareness(place.query_aware)}.png")
                    _save(figure, written[-1])
    grids = depth_grids(evidence)
    for task, aware in dict.fromkeys((grid.task, grid.query_aware) for grid in grids):
        own = [grid for grid in grids if (grid.task, grid.query_aware) == (task, aware)]
        written.append(folder / f"depth-{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}-{words.awareness(aware)}.png")
        _save(_heat(own), written[-1])
    return written


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=160, facecolor=_INK["surface"], bbox_inches="tight", pad_inches=0.2)


def _front(rows: Sequence[Row], cost: Cost, style: dict[str, Style]) -> Figure | None:
    drawn = lines(rows, cost)
    dense = next((row for row in rows if row.policy == DENSE), None)
    if not drawn or dense is None:
        return None
    figure = Figure(figsize=(8.4, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhspan(dense.low, dense.high, color=_INK["dense"], alpha=0.1, linewidth=0)
    axes.axhline(dense.mean, color=_INK["dense"], linestyle="--", linewidth=1.2, label="dense, 95 % CI")
    for name, line in drawn.items():
        look, colour = style[name], SERIES["light"][style[name].colour]
        stroke: Any = STROKES[look.dash]
        axes.errorbar(
            [cost_of(row, cost) or 0.0 for row in line],
            [row.mean for row in line],
            yerr=[[row.mean - row.low for row in line], [row.high - row.mean for row in line]],
            color=colour, linestyle=stroke, marker=MARKERS[look.symbol], linewidth=1.6, elinewidth=0.7, capsize=2,
            markersize=5.5, label=name,
        )  # fmt: skip
    axes.set_title(words.place_words(rows[0].place), loc="left", fontsize=11, color=_INK["ink"])
    axes.set_xlabel(AXES[cost])
    axes.set_ylabel(f"{words.scale(dense)}, 95 % CI")
    axes.set_xlim(left=0)
    axes.grid(color=_INK["line"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _heat(grids: Sequence[DepthGrid]) -> Figure:
    columns = min(_PANELS, len(grids))
    rows = math.ceil(len(grids) / columns)
    depths, lengths = grids[0].depths, grids[0].lengths
    size = (1.6 + columns * max(2.1, 0.6 * len(lengths) + 1), 1 + rows * (0.3 * len(depths) + 1))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{grids[0].task}, {words.awareness(grids[0].query_aware)}: mean score by depth and length")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(grids) :]:
        axes.set_axis_off()
    for axes, grid in zip(panels, grids, strict=False):
        shown = [[math.nan if cell is None else float(heat_step(cell[0])) for cell in row] for row in grid.cells]
        axes.imshow(shown, cmap=ListedColormap(list(HEAT["light"])), vmin=-0.5, vmax=10.5, aspect="auto")
        for y, row in enumerate(grid.cells):
            for x, cell in enumerate(row):
                if cell is not None:
                    ink = on_heat(HEAT["light"][heat_step(cell[0])])
                    axes.text(x, y, f"{cell[0]:.2f}", ha="center", va="center", fontsize=7, color=ink)
        axes.set_title(grid.policy, fontsize=7.5)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), depths, fontsize=7)
    return figure
