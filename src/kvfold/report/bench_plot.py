"""The figures of a benchmark as one PNG: time and bytes over the length of the context, a line per method."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvfold.report.bench_lines import PLAIN, Panel, Point, methods_of, panels_of
from kvfold.report.style import GREY, INK, PALE, PALETTE, STYLE

_DPI = 160
_STROKES: dict[str, Any] = {"dash": (0, (5, 2)), "dot": ":", "dashdot": "-."}
_MARKERS = "osD^PXv*h"


def draw_bench(record: Mapping[str, Any]) -> bytes:
    """Draw a benchmark: a row of figures for each batch or chunk size.

    Args:
        record: Plain data of :class:`kvfold.bench.Record`.

    Returns:
        A PNG.
    """
    kind = record["kind"].removeprefix("bench ")
    panels, methods = panels_of(kind, record["cells"]), methods_of(record["cells"])
    series = [name for name in (panels[0].lines if panels else {}) if any(panel.lines[name] for panel in panels)]
    with matplotlib.rc_context(STYLE):
        legend = 0.24 * len(methods) + 0.2
        height = 1.2 + 3.4 * max(1, len(series)) + legend
        figure = Figure(figsize=(6 * max(1, len(panels)), height), dpi=_DPI)
        for row, name in enumerate(series):
            for column, panel in enumerate(panels):
                place = (
                    (column + 0.12) / len(panels),
                    (legend + 0.75 + 3.4 * (len(series) - 1 - row)) / height,
                    0.8 / len(panels),
                    2.4 / height,
                )
                _draw(figure.add_axes(place), panel, name, methods)
        _legend(figure, methods, legend / height)
        figure.text(
            0.03, 1 - 0.3 / height, _title(record, kind), fontsize=14, fontweight="bold", color=INK, va="center"
        )
        figure.text(0.03, 1 - 0.6 / height, _subtitle(record), fontsize=9.5, color=GREY, va="center")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _title(record: Mapping[str, Any], kind: str) -> str:
    settings = record["settings"]
    return f"kvfold bench {kind}: {settings.get('shape') or settings.get('model')}"


def _subtitle(record: Mapping[str, Any]) -> str:
    where = record["environment"]
    return f"{where['device']} · {record['settings']['dtype']} · torch {where.get('torch', '?')}"


def look(methods: Sequence[str], method: str) -> tuple[str, Any, str]:
    """Return colour, stroke and marker of a method."""
    if method in PLAIN:
        return (INK if method == "dense" else GREY), _STROKES[PLAIN[method]], "."
    at = [one for one in methods if one not in PLAIN].index(method)
    return PALETTE[at % len(PALETTE)], "-", _MARKERS[at % len(_MARKERS)]


def _draw(axes: Axes, panel: Panel, series: str, methods: Sequence[str]) -> None:
    drawn = panel.lines[series]
    for method in methods:
        line: list[Point] = drawn.get(method, [])
        if not line:
            continue
        colour, stroke, marker = look(methods, method)
        contexts, values = [point.context for point in line], [point.value for point in line]
        around = [[point.value - point.low for point in line], [point.high - point.value for point in line]]
        axes.errorbar(
            contexts, values, yerr=around, color=colour, ls=stroke, marker=marker, ms=5, lw=1.8, elinewidth=0.8
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({point.context for line in drawn.values() for point in line})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(round(value))))
    if any(point.value for line in drawn.values() for point in line):
        axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_title(f"{panel.axis}, {series}", loc="left", fontsize=10.5, color=INK)
    axes.grid(axis="y", color=PALE)
    axes.set_axisbelow(True)


def short(context: int) -> str:
    """Write a number of tokens in few characters."""
    return f"{context // 1024}K" if context >= 1024 and context % 1024 == 0 else f"{context:,}"


def _legend(figure: Figure, methods: Sequence[str], height: float) -> None:
    step = height / (len(methods) + 1)
    for number, method in enumerate(methods):
        colour, stroke, marker = look(methods, method)
        at = height - step * (number + 0.8)
        axes = figure.add_axes((0.03, at - step / 2, 0.03, step))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], color=colour, ls=stroke, marker=marker, ms=5, lw=1.8, markevery=[1])
        figure.text(0.065, at, method, fontsize=9.5, color=INK, va="center")
