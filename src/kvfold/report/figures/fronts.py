"""Score against what it costs, as plotly figures whose colours are names that the page resolves for its scheme."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvfold.report import page_words as words
from kvfold.report.figures.palette import DASHES, SYMBOLS, Style
from kvfold.report.merge import DENSE
from kvfold.report.summary import Row, line_of

Cost = Literal["bytes", "read", "time"]
AXES: dict[Cost, str] = {
    "bytes": "Bytes held, % of dense (measured)",
    "read": "Bytes read per token, % of dense",
    "time": "Time per token, ms (median)",
}

TEMPLATE: dict[str, Any] = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--muted)"},
        "margin": {"l": 54, "r": 14, "t": 12, "b": 46},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--control)",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--ink)"},
            "align": "left",
            "namelength": -1,
        },
        "xaxis": {
            "gridcolor": "var(--line)", "linecolor": "var(--control)", "zeroline": False, "fixedrange": True,
            "ticks": "outside", "tickcolor": "var(--control)", "automargin": True, "title": {"font": {"size": 14}},
        },
        "yaxis": {
            "gridcolor": "var(--line)", "linecolor": "var(--control)", "zeroline": False, "fixedrange": True,
            "automargin": True, "title": {"font": {"size": 14}},
        },
    }
}  # fmt: skip
"""One template for both schemes: ``var(--name)`` is looked up in the page's style."""


def cost_of(row: Row, cost: Cost) -> float | None:
    """Return where a row stands on the axis of a cost, in the axis's unit."""
    if cost == "bytes":
        return 100 * row.share
    if cost == "read":
        return None if row.bytes_read is None else 100 * row.bytes_read
    return None if row.tpot_s is None else 1000 * row.tpot_s


def on_front(row: Row, cost: Cost) -> bool:
    """Whether nothing that costs no more scores as well; times are medians of few samples, so nothing is said there."""
    return {"bytes": row.front, "read": row.front_read, "time": True}[cost]


def lines(rows: Sequence[Row], cost: Cost) -> dict[str, list[Row]]:
    """Put rows that have the cost into lines, each in order of cost; dense is not among them."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.policy != DENSE and cost_of(row, cost) is not None:
            found[line_of(row.policy).name].append(row)
    return {name: sorted(line, key=lambda row: cost_of(row, cost) or 0) for name, line in found.items()}


def front(rows: Sequence[Row], cost: Cost, style: Mapping[str, Style]) -> dict[str, Any] | None:
    """Draw one front.

    Args:
        rows: Of one place.
        cost: What stands on the x axis.
        style: Of every line.

    Returns:
        A plotly figure as plain data; ``None`` where no compressed policy has the cost.
    """
    drawn = lines(rows, cost)
    dense = next((row for row in rows if row.policy == DENSE), None)
    if not drawn or dense is None:
        return None
    data = [_trace(name, line, cost, style[name]) for name, line in drawn.items()]
    at = cost_of(dense, cost)
    if at is not None:
        data.append(_dense_point(dense, at))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": AXES[cost]}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": words.scale(dense)}, "range": _range(rows)},
        "shapes": [
            _shape("rect", dense.low, dense.high, fillcolor="var(--band)", line={"width": 0}),
            _shape("line", dense.mean, dense.mean, line={"color": "var(--dense)", "width": 1.5, "dash": "dash"}),
        ],
    }
    if cost != "time":
        layout["xaxis"] |= {"range": [0, max(104.0, *(1.04 * (cost_of(row, cost) or 0) for row in rows))]}
    return {"data": data, "layout": layout}


def _range(rows: Sequence[Row]) -> list[float]:
    """Say what the axis of scores shows: up to 1, or all of nats, which have no bound."""
    floor, top = min(row.low for row in rows), max(row.high for row in rows)
    if rows[0].lower_is_better:
        return [floor - 0.05 * (top - floor) - 0.01, top + 0.05 * (top - floor) + 0.01]
    return [max(-0.02, floor - 0.05), 1.03]


def _shape(kind: str, low: float, high: float, **extra: Any) -> dict[str, Any]:
    return {"type": kind, "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high, "layer": "below", **extra}


def _trace(name: str, line: Sequence[Row], cost: Cost, style: Style) -> dict[str, Any]:
    colour = f"var(--series-{style.colour})"
    # A filled mark is on the front; a hollow one is beaten by another policy.
    fill = [colour if on_front(row, cost) else "var(--surface)" for row in line]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [cost_of(row, cost) for row in line],
        "y": [row.mean for row in line],
        "line": {"color": colour, "width": 2, "dash": DASHES[style.dash]},
        "marker": {
            "symbol": SYMBOLS[style.symbol], "size": 9, "color": fill, "line": {"color": colour, "width": 2},
        },
        "error_y": _bars(line, colour),
        "text": [_hover(row) for row in line],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _dense_point(dense: Row, at: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": DENSE,
        "x": [at],
        "y": [dense.mean],
        "marker": {"symbol": "circle-open-dot", "size": 11, "color": "var(--dense)", "line": {"width": 2}},
        "error_y": _bars([dense], "var(--dense)"),
        "text": [_hover(dense)],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _bars(line: Sequence[Row], colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [row.high - row.mean for row in line],
        "arrayminus": [row.mean - row.low for row in line],
        "color": colour,
        "thickness": 1,
        "width": 3,
    }


def _hover(row: Row) -> str:
    parts = [
        f"<b>{_plain(row.policy)}</b>",
        f"score {words.score(row.mean)}, 95 % CI {words.interval(row.low, row.high)}",
        f"bytes {words.percent(row.share)} of dense ({words.factor(row.factor)})",
    ]
    if row.bytes_read is not None and row.retrieves:
        parts.append(f"reads {words.percent(row.bytes_read)} of dense's bytes per token")
    if row.difference is not None:
        parts += [f"to dense {words.difference(row)}", words.verdict(row)]
    if row.tpot_s is not None:
        parts.append(f"{words.seconds(row.tpot_s)} per token (n = {row.timed})")
    return "<br>".join([*parts, f"n = {row.count}, {words.awareness(row.place.query_aware)}"])


def _plain(text: str) -> str:
    """Keep plotly from reading a policy's text as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
