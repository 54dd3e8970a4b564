"""Facts recalled against KV bytes held: one line per method, dense as the reference."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from kvfold.eval.recall import Recall
from kvfold.report.style import GREY, INK, PALE, PALETTE, STYLE, spread

_DPI = 160
_MIB = 2**20
_CONTROLS = ("random", "streamingllm")
"""Methods that never look at the text: drawn in grey, dashed."""


def draw_recall(
    dense: Recall,
    curves: Mapping[str, Sequence[Recall]],
    *,
    title: str,
    subtitle: str,
    width: int = 1600,
    height: int = 960,
) -> bytes:
    """Draw the plot.

    Args:
        dense: What the uncompressed cache recalled.
        curves: What each method recalled, by its label.
        title: First line.
        subtitle: Second line, smaller.
        width: Pixels.
        height: Pixels.

    Returns:
        A PNG.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        axes = figure.add_axes((0.075, 0.135, 0.70, 0.71))
        asked = len(dense.answers)
        ends = _lines(axes, dense, curves, asked)
        _frame(axes, dense, curves, asked)
        _labels(axes, ends, asked)
        figure.text(0.03, 0.945, title, fontsize=15, fontweight="bold", color=INK, va="center")
        figure.text(0.03, 0.89, subtitle, fontsize=10, color=GREY, va="center")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_DPI)
    return png.getvalue()


def _lines(
    axes: Axes, dense: Recall, curves: Mapping[str, Sequence[Recall]], asked: int
) -> list[tuple[float, float, str, str]]:
    """Draw the lines, and return where each ends: x, y, label, colour."""
    ends = []
    lane = 0.015 * asked
    colours = iter(PALETTE * (1 + len(curves) // len(PALETTE)))
    budgets = [sorted(points, key=lambda point: -point.nbytes) for points in curves.values()]
    for label, points in zip(curves, budgets, strict=True):
        control = label.startswith(_CONTROLS)
        colour = GREY if control else next(colours)
        xs, ys = [dense.nbytes / _MIB], [float(dense.recalled)]
        for at, point in enumerate(points):
            # Where several recalled as many they stand one beside the other, like the lines of a map of trains.
            equal = [other for other in budgets if other[at : at + 1] and other[at].recalled == point.recalled]
            place = next(index for index, other in enumerate(equal) if other is points)
            xs.append(point.nbytes / _MIB)
            ys.append(point.recalled - (place - (len(equal) - 1) / 2) * lane)
        axes.plot(xs, ys, color=colour, linewidth=2.2, linestyle=(0, (3, 2)) if control else "-", zorder=2, alpha=0.9)
        marks: dict[str, Any] = {"markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.2}
        axes.plot(xs[1:], ys[1:], "o", color=colour, zorder=3, **marks)
        ends.append((xs[-1], ys[-1], label, colour))
    x, y = dense.nbytes / _MIB, float(dense.recalled)
    axes.plot([x], [y], "*", color=INK, markersize=20, markeredgecolor="white", markeredgewidth=1.2, zorder=4)
    look: dict[str, Any] = {"color": INK, "fontweight": "bold", "ha": "center", "fontsize": 11}
    axes.annotate("dense", (x, y), xytext=(0, 13), textcoords="offset points", **look)
    return ends


def _frame(axes: Axes, dense: Recall, curves: Mapping[str, Sequence[Recall]], asked: int) -> None:
    """Set scales, ticks and words: bytes fall from left to right."""
    held = sorted({point.nbytes for points in curves.values() for point in points} | {dense.nbytes}, reverse=True)
    ticks: list[float] = []
    for nbytes in held:
        # Methods at one budget hold nearly the same bytes: one tick for them.
        if not ticks or nbytes / _MIB < 0.8 * ticks[-1]:
            ticks.append(nbytes / _MIB)
    axes.set_xscale("log")
    axes.set_xlim(held[0] / _MIB * 1.13, held[-1] / _MIB / 1.06)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    full = dense.dense_nbytes / _MIB
    axes.set_xticklabels([f"{tick:.3g} MiB\n{max(0.0, 1 - tick / full):.0%} gone" for tick in ticks])
    axes.set_ylim(-0.09 * asked, 1.12 * asked)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(asked, 8), integer=True))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= asked])
    axes.set_ylabel(f"facts recalled, of {asked}")
    axes.set_xlabel("KV cache held when the questions came, measured", labelpad=8)
    axes.grid(axis="y", color=PALE, linewidth=1)
    axes.set_axisbelow(True)


def _labels(axes: Axes, ends: list[tuple[float, float, str, str]], asked: int) -> None:
    """Write each label beside the end of its line, moved apart where ends are close."""
    low, high = axes.get_ylim()
    places = spread([y for _, y, _, _ in ends], gap=0.062 * (high - low), low=0.0 - 0.06 * asked, high=high)
    right = axes.get_xlim()[1]
    for (x, y, label, colour), place in zip(ends, places, strict=True):
        line = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.8,
            "alpha": 0.5,
            "shrinkA": 2,
            "shrinkB": 5,
            "relpos": (0, 0.5),
        }
        look: dict[str, Any] = {"color": colour, "fontsize": 11, "fontweight": "bold", "va": "center"}
        axes.annotate(
            label,
            (x, y),
            xytext=(right / 1.07, place),
            annotation_clip=False,
            arrowprops=line,
            **look,
        )
