"""The figures of a study as one PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from kvfold.eval.study.boundary import LEAST_DISTORTION
from kvfold.eval.study.explore import Exploration
from kvfold.eval.study.mass import MassFigures
from kvfold.eval.study.record import StudyRecord
from kvfold.eval.study.risk import RiskFigures
from kvfold.eval.study.scores import IMPORTANCE, ORACLE
from kvfold.eval.study.summaries import SummaryFigures
from kvfold.report.explorer_data import LEAST_SHARE, START
from kvfold.report.style import GREY, INK, PALE, PALETTE, STYLE, spread

_DPI = 160
_LEAST = 1e-4  # errors below are rounding
_CONTROLS = (IMPORTANCE, ORACLE, "exact", "risk, exact")
"""What is no method, or none that pays: drawn in grey, dashed."""

_Line = tuple[str, Sequence[float], Sequence[float]]


def draw_study(record: StudyRecord) -> bytes:
    """Draw a study.

    Args:
        record: Of any study.

    Returns:
        A PNG.
    """
    figures = record.figures
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 5.4), dpi=_DPI)
        if isinstance(figures, MassFigures):
            told = _mass(figure, figures)
        elif isinstance(figures, RiskFigures):
            told = _risk(figure, figures)
        elif isinstance(figures, SummaryFigures):
            told = _summaries(figure, figures)
        else:
            told = _explore(figure, figures)
        name = PurePath(record.model).name or record.model
        figure.text(0.05, 0.945, f"{name}: {told}", fontsize=14, fontweight="bold", color=INK, va="center")
        settings = f"{record.settings.text}, {record.settings.tokens:,} tokens · {record.dtype}, figures in float32"
        figure.text(0.05, 0.895, settings, fontsize=10, color=GREY, va="center")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _axes(figure: Figure, place: tuple[float, float, float, float], title: str, x: str) -> Axes:
    axes = figure.add_axes(place)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x)
    axes.grid(axis="y", color=PALE)
    axes.set_axisbelow(True)
    return axes


def _mass(figure: Figure, found: MassFigures) -> str:
    axes = _axes(
        figure, (0.06, 0.13, 0.3, 0.66), "share of the context that holds 90 % of attention", "queries together"
    )
    counts = [count for count, _, _ in found.growth]
    lines: list[_Line] = [
        ("one head", counts, [one for _, one, _ in found.growth]),
        ("heads of a\nKV head", counts, [group for _, _, group in found.growth]),
        ("one query", counts, [found.share.mean] * len(counts)),
    ]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(counts[::2], [str(count) for count in counts[::2]])
    axes.set_ylim(0, 1)
    _lines(axes, lines)
    axes = _axes(figure, (0.58, 0.13, 0.3, 0.66), "by layer", "layer")
    layers = [one.layer for one in found.layers]
    _lines(
        axes,
        [
            (f"{found.queries} queries,\none head", layers, [one.union for one in found.layers]),
            ("the same,\nKV head", layers, [one.group_union for one in found.layers]),
            ("one query", layers, [one.share.mean for one in found.layers]),
        ],
    )
    axes.set_ylim(0, 1)
    for one in figure.axes:
        one.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return f"one query needs {found.share.mean:.1%} of the rows, {found.queries} queries {found.union:.0%}"


def _risk(figure: Figure, found: RiskFigures) -> str:
    parts: tuple[tuple[float, str, Callable[[Any], float]], ...] = (
        (0.055, "error at an equal budget, median", lambda one: one.error.median),
        (0.375, "95th percentile", lambda one: one.error.p95),
    )
    names = list(dict.fromkeys((one.score, one.represented) for one in found.matched))
    for at, (left, title, read) in enumerate(parts):
        axes = _axes(figure, (left, 0.13, 0.27, 0.66), title, "clusters read")
        lines: list[_Line] = []
        for score, represented in names:
            own = [one for one in found.matched if (one.score, one.represented) == (score, represented)]
            name = score if represented else f"{score}, rest left out"
            lines.append((name, [one.share for one in own], [max(_LEAST, read(one)) for one in own]))
        _log_axis(axes, *_ends(lines))
        axes.set_xticks([one.share for one in found.matched if one.score == IMPORTANCE])
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        _lines(axes, lines, labels=at == 1)
    axes = figure.add_axes((0.81, 0.13, 0.165, 0.66))
    axes.set_title("rank correlation\nwith the true error", loc="left", fontsize=10.5, color=INK)
    places = range(len(found.correlations))
    axes.barh(places, [one.spearman for one in found.correlations], color=PALE)
    for place, one in zip(places, found.correlations, strict=True):
        axes.text(0.03, place, f"{one.score}  {one.spearman:.3f}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    return f"risk of clusters of {found.cluster} keys against true error"


def _summaries(figure: Figure, found: SummaryFigures) -> str:
    parts: tuple[tuple[float, str, Callable[[Any], float]], ...] = (
        (0.06, "error of the output, median", lambda one: one.error.median),
        (0.46, "95th percentile", lambda one: one.error.p95),
    )
    for at, (left, title, read) in enumerate(parts):
        axes = _axes(figure, (left, 0.13, 0.33, 0.66), title, "rows read exactly")
        axes.set_xscale("log")
        ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{tick:.0%}" for tick in ticks])
        lines: list[_Line] = [
            (
                f"{curve.form}\n(reach {curve.delta:.1f})",
                [point.rows for point in curve.points],
                [max(_LEAST, read(point)) for point in curve.points],
            )
            for curve in found.curves
        ]
        _log_axis(axes, *_ends(lines))
        _lines(axes, lines, labels=at == 1)
    return f"what bounds the distortion of clusters of {found.cluster} keys, as tau falls"


def _explore(figure: Figure, found: Exploration) -> str:
    shares = [max(one.importance, LEAST_SHARE) for one in found.clusters]
    for at, view in enumerate(found.forms):
        axes = _axes(figure, (0.06 + 0.32 * at, 0.17, 0.27, 0.62), f"distortion by {view.form}", "importance")
        read = sum(risk > START for risk in view.risk)
        axes.set_title(f"{read} of {len(view.risk)} read at tau = {START}", loc="right", fontsize=9, color=GREY)
        axes.set_xscale("log")
        axes.set_xlim(min(shares) / 1.6, min(1.6, max(shares) * 1.6))
        reaches = [max(one, LEAST_DISTORTION) for one in view.distortion]
        _log_axis(axes, min(reaches) / 1.1, max(reaches) * 1.1)
        for is_read, colour, marker in ((False, PALETTE[0], "o"), (True, PALETTE[2], "D")):
            places = [one for one, risk in enumerate(view.risk) if (risk > START) is is_read]
            axes.plot(
                [shares[one] for one in places],
                [reaches[one] for one in places],
                marker,
                color=colour,
                markersize=5,
                markerfacecolor=colour if is_read else "none",
            )
        axes.plot([START * x for x, _ in view.line], [y for _, y in view.line], "--", color=GREY)
    key = "filled: read key by key · open: represented by the mean · dashed: R = tau, in units of the longest value"
    figure.text(0.05, 0.03, key, fontsize=9.5, color=GREY, va="center")
    return f"layer {found.layer}, query head {found.head}, position {found.position}"


def _ticks(ratio: float) -> tuple[float, ...]:
    """Choose the numbers of a decade that are written, more where an axis spans little."""
    if ratio < 4:
        return (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    return (1, 2, 5) if ratio < 200 else (1,)


def _ends(lines: Sequence[_Line]) -> tuple[float, float]:
    """Return the range of an axis that holds all lines."""
    values = [value for _, _, ys in lines for value in ys]
    return min(values) / 1.25, max(values) * 1.25


def _log_axis(axes: Axes, low: float, high: float) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=_ticks(high / low)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _lines(axes: Axes, lines: Sequence[_Line], *, labels: bool = True) -> None:
    """Draw lines, and write the name of each beside its end."""
    colours = iter(PALETTE * 2)
    ends: list[tuple[float, str, str]] = []
    for name, xs, ys in lines:
        plain = name.partition("\n")[0] in _CONTROLS
        colour = GREY if plain else next(colours)
        axes.plot(xs, ys, color=colour, marker="o", ms=3.5, ls="--" if plain else "-")
        ends.append((ys[-1], name, colour))
    if not labels:
        return
    shown = axes.transData.transform([(1.0, end) for end, _, _ in ends])
    wanted = [float(axes.transAxes.inverted().transform(point)[1]) for point in shown]
    gap = 0.115 if any("\n" in name for _, name, _ in ends) else 0.06
    for place, (_, name, colour) in zip(spread(wanted, gap=gap, low=0.0, high=1.0), ends, strict=True):
        axes.text(1.03, place, name, color=colour, fontsize=9.5, va="center", transform=axes.transAxes)
