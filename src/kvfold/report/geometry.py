"""What ``kvfold inspect`` measured, as one picture, and as a page that opens without a network."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from kvfold.eval.inspect import Advice, Measurements
from kvfold.eval.inspect.energy import PARTS
from kvfold.eval.inspect.measure import mean
from kvfold.eval.inspect.reading import Reading
from kvfold.eval.inspect.recovery import ORACLE
from kvfold.eval.inspect.threshold import choose_tau
from kvfold.report.style import GREY, INK, PALE, PALETTE, STYLE, spread

_DPI = 160
_LEAST_ERROR, _LARGEST_ERROR = 1e-4, 4.0  # of the axis; at short lengths small thresholds differ by rounding alone
_NAMES = {
    "l2": "L2",
    "cosine": "cosine",
    "windowed": "L2 per window",
    "l2_pre": "L2 before RoPE",
    "knorm": "shortest keys",
    "recent": "most recent",
    ORACLE: "best possible",
    "keys": "keys as cached",
    "keys_pre": "keys before RoPE",
    "values": "values",
    "half": "half lie below",
    "most": "95 % lie below",
}


def draw_geometry(measured: Measurements, title: str) -> bytes:
    """Draw the picture.

    Args:
        measured: What was measured.
        title: First line.

    Returns:
        A PNG.
    """
    layers = measured.layers
    last = len(measured.lengths) - 1
    maps = [
        ("spread of key lengths (CV)", [layer.geometry.cv for layer in layers], None, "viridis"),
        (
            "length of the mean key / mean length",
            [layer.geometry.centroid_ratio for layer in layers],
            (0, 1),
            "viridis",
        ),
        ("rank correlation of key length and attention", [layer.geometry.rho for layer in layers], (-1, 1), "RdBu"),
        ("first key: percentile under L2", [layer.sinks["l2"][last] for layer in layers], (0, 1), "viridis"),
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 7.6 if measured.reading is None else 10.2), dpi=_DPI)
        figure.text(0.05, 0.955, title, fontsize=15, fontweight="bold", color=INK, va="center")
        for index, (name, values, limits, colours) in enumerate(maps):
            axes = figure.add_axes((0.05, 0.74 - 0.222 * index, 0.43, 0.13))
            _heat_map(figure, axes, name, values, [layer.layer for layer in layers], limits, colours)
        if measured.reading is None:
            _energy(figure.add_axes((0.58, 0.55, 0.27, 0.32)), measured)
            _recovery(figure.add_axes((0.58, 0.09, 0.27, 0.32)), measured)
        else:
            _energy(figure.add_axes((0.58, 0.68, 0.27, 0.22)), measured)
            _recovery(figure.add_axes((0.58, 0.375, 0.27, 0.22)), measured)
            _reading(figure.add_axes((0.58, 0.07, 0.27, 0.22)), measured.reading)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def geometry_page(measured: Measurements, advice: Advice, title: str, png: bytes) -> str:
    """Write a self-contained page.

    Args:
        measured: What was measured.
        advice: What it says.
        title: Of the page.
        png: From :func:`draw_geometry`.

    Returns:
        HTML.
    """
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in layer_table(measured, advice)
    )
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in TABLE)
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in advice.reasons)
    by_query = "" if advice.tau is None else f"; to read by query: <code>refinekv(tau={advice.tau:g})</code>"
    at_tau = "" if advice.tau is None else f"; rows read and median error of the output at tau={advice.tau:g}"
    picture = base64.b64encode(png).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; height: auto; background: #fff }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #8884 }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p>Advice: <code>{html.escape(advice.policy)}</code>{by_query}</p>
<ul>{reasons}</ul>
<img src="data:image/png;base64,{picture}" alt="Heat maps of key geometry by layer and head; curves of energy, of
attention recovered, and of errors by rows read">
<div class="wide"><table><caption>Mean over the KV heads of a layer; ranks that suffice in every head{at_tau}</caption>
<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
</body></html>
"""


TABLE = (
    "layer",
    "CV",
    "centroid",
    "length share",
    "rho",
    "first key",
    "rank K 95 %",
    "rank V 95 %",
    "rows for 90 %",
    "rows read",
    "error",
)
"""Headings of :func:`layer_table`."""


def layer_table(measured: Measurements, advice: Advice) -> list[tuple[str, ...]]:
    """Write one row per layer, as :data:`TABLE` names the columns.

    Args:
        measured: What was measured.
        advice: What it says.

    Returns:
        Cells as text; a dash where RefineKV cannot serve the model.
    """
    known = () if measured.reading is None else measured.reading.layers
    read = {layer.layer: point for layer in known for point in layer.points if point.tau == advice.tau}
    return [
        (
            str(layer.layer),
            f"{mean(list(layer.geometry.cv)):.3f}",
            f"{mean(list(layer.geometry.centroid_ratio)):.2f}",
            f"{mean(list(layer.geometry.length_share)):.2f}",
            f"{mean(list(layer.geometry.rho)):+.2f}",
            f"{mean(list(layer.sinks['l2'][-1])):.0%}",
            str(key_rank),
            str(value_rank),
            f"{mean(list(layer.concentration.median)):.1%}",
            *((f"{at.rows:.0%}", f"{at.median:.1%}") if (at := read.get(layer.layer)) else ("-", "-")),
        )
        for layer, key_rank, value_rank in zip(
            measured.layers, advice.key_ranks[0.95], advice.value_ranks[0.95], strict=True
        )
    ]


def _heat_map(
    figure: Figure,
    axes: Axes,
    name: str,
    values: Sequence[Sequence[float]],
    layers: Sequence[int],
    limits: tuple[float, float] | None,
    colours: str,
) -> None:
    heads = max(map(len, values))
    grid = [[row[head] if head < len(row) else float("nan") for row in values] for head in range(heads)]
    low, high = limits or (0.0, max(map(max, values)))
    image = axes.imshow(grid, aspect="auto", cmap=colours, vmin=low, vmax=high, interpolation="nearest")
    axes.set_title(name, loc="left", fontsize=10.5, color=INK)
    step = max(1, len(layers) // 8)
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_ylabel("KV head")
    axes.set_xlabel("layer", labelpad=1)
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.03)
    bar.outline.set_visible(False)


def _energy(axes: Axes, measured: Measurements) -> None:
    """Mean over layers and heads, with the range over layers behind."""
    shares = [part / PARTS for part in range(1, PARTS + 1)]
    ends = {}
    for colour, kind in zip(PALETTE, measured.layers[0].energy.spectra, strict=False):
        curves = [[mean(list(heads)) for heads in layer.energy.spectra[kind].energy] for layer in measured.layers]
        points = list(zip(*curves, strict=True))
        middle = [mean(list(point)) for point in points]
        axes.fill_between(shares, [min(p) for p in points], [max(p) for p in points], color=colour, alpha=0.12, lw=0)
        axes.plot(shares, middle, color=colour, marker="o", ms=3.5)
        ends[kind] = (middle[1], colour)
    axes.set_title("energy in the leading directions, range over layers", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("rank / width")
    _percent(axes)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _label(axes, ends, x=1.03, low=0.45, high=0.98, top=axes.get_ylim())


def _recovery(axes: Axes, measured: Measurements) -> None:
    keeps = sorted(measured.keeps)
    ends = {}
    colours = iter(PALETTE)
    for name in measured.layers[0].recovery:
        plain = name in (ORACLE, "recent")
        colour = GREY if plain else next(colours)
        values = [measured.recovery(name, keep) for keep in keeps]
        axes.plot(keeps, values, color=colour, marker="o", ms=3.5, ls="--" if plain else "-")
        ends[name] = (values[-1], colour)
    axes.set_title("attention of later queries on the rows kept", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("rows kept")
    axes.set_xticks(keeps)
    _percent(axes)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _label(axes, ends, x=1.03, low=0.0, high=1.0, top=axes.get_ylim())


def _reading(axes: Axes, reading: Reading) -> None:
    """Error of the output against rows read, a point per threshold; the one of the rule has a ring."""
    points = sorted(reading.points, key=lambda point: point.tau)
    shares, picked = [point.rows for point in points], choose_tau(points)
    lines = {"half": [point.median for point in points], "most": [point.p95 for point in points]}
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_ERROR, _LARGEST_ERROR)
    axes.set_xlim(0, 1.02)
    span = math.log(_LARGEST_ERROR / _LEAST_ERROR)
    ends = {}
    for colour, (name, errors) in zip(PALETTE, lines.items(), strict=False):
        shown = [min(max(error, _LEAST_ERROR), _LARGEST_ERROR) for error in errors]
        axes.plot(shares, shown, color=colour, marker="o", ms=3.5)
        at = points.index(picked.point)
        axes.plot(shares[at], shown[at], color=colour, marker="o", ms=9, mfc="none", mew=1.6)
        ends[name] = (math.log(shown[0] / _LEAST_ERROR) / span, colour)
    axes.axvline(picked.point.rows, color=GREY, lw=0.8, ls=":")
    for point in points:
        bold = point is picked.point
        height = min(max(point.p95, _LEAST_ERROR), _LARGEST_ERROR)
        axes.annotate(
            f"tau={point.tau:g}" if bold else f"{point.tau:g}",
            (point.rows, height),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=9,
            color=INK if bold else GREY,
            fontweight="bold" if bold else "normal",
        )
    axes.set_title("refinekv: error of the output, by tau", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("rows read")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4%}".rstrip("0%").rstrip(".") + "%"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=PALE)
    axes.set_axisbelow(True)
    _label(axes, ends, x=1.03, low=0.0, high=1.0, top=(0.0, 1.0))


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(min(axes.get_ylim()[0], 0.5), 1.01)
    axes.grid(axis="y", color=PALE)
    axes.set_axisbelow(True)


def _label(
    axes: Axes,
    ends: dict[str, tuple[float, str]],
    *,
    x: float,
    low: float,
    high: float,
    top: tuple[float, float],
) -> None:
    """Write the name of each line beside the axes, near its height."""
    bottom, upper = top
    wanted = [(value - bottom) / (upper - bottom) for value, _ in ends.values()]
    for place, (name, (_, colour)) in zip(spread(wanted, gap=0.085, low=low, high=high), ends.items(), strict=True):
        axes.text(x, place, _NAMES[name], color=colour, fontsize=10, va="center", transform=axes.transAxes)
