"""The page of a benchmark: figures over the length of the context, every number as a table, and how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvfold._version import __version__
from kvfold.report.bench_lines import PLAIN, Panel, Point, methods_of, panels_of
from kvfold.report.bench_plot import short
from kvfold.report.bench_table import EXPLAINED, Cell, make_table, place_of, places_of
from kvfold.report.figures.fronts import TEMPLATE
from kvfold.report.figures.palette import SERIES, SYMBOLS
from kvfold.report.page_markup import Child, Markup, select, tag
from kvfold.report.page_shell import write_document
from kvfold.report.page_tables import box, breakable, plain_table

TITLES = {"figures": "Figures", "numbers": "All numbers", "setup": "Configuration"}
_LEADS = {
    "decode": "What one more token costs, by how many tokens stand before it.",
    "kernels": "What the attention of one layer costs in a decode step.",
    "prefill": "What reading a prompt costs, in time and in memory beside the weights.",
    "memory": "What is held while tokens are decoded, and how much fits. Computed, not measured.",
    "rate": "How much of a real text is read by query.",
}


def bench_page(record: Mapping[str, Any]) -> str:
    """Write the page.

    Args:
        record: Plain data of :class:`kvfold.bench.Record`.

    Returns:
        The whole document.

    Raises:
        MissingExtraError: If plotly is not installed.
    """
    kind, cells = record["kind"].removeprefix("bench "), record["cells"]
    shape = str(record["settings"].get("shape") or record["settings"].get("model"))
    panels, methods = panels_of(kind, cells), methods_of(cells)
    series = list(panels[0].lines) if panels else []
    return write_document(
        f"kvfold bench {kind}: {shape}",
        tag(
            "header",
            tag("p", f"kvfold bench {kind}", class_="kicker"),
            tag("h1", f"{shape} on {record['environment']['device']}"),
            tag("p", _LEADS[kind], class_="lead"),
        ),
        tag("nav", [tag("a", title, href=f"#{key}") for key, title in TITLES.items()], aria_label="Sections"),
        tag(
            "main",
            tag("noscript", tag("p", "Figures need scripts; all numbers stand in the tables.")),
            _figures(panels, series, methods),
            _numbers(kind, cells),
            _setup(record),
            id="content",
        ),
        tag("footer", tag("p", f"Written by kvfold {__version__}.")),
        data={
            "template": TEMPLATE,
            "panels": [{"key": panel.key, "axis": panel.axis, "figures": _drawn(panel, methods)} for panel in panels],
        },
        codes=("bench.js",),
        sheets=("page.css", "bench.css"),
    )


def _section(key: str, *children: Child) -> Markup:
    return tag("section", tag("h2", TITLES[key], id=f"{key}-title"), children, id=key, aria_labelledby=f"{key}-title")


def _figures(panels: Sequence[Panel], series: Sequence[str], methods: Sequence[str]) -> Markup:
    if not panels:
        return _section("figures", tag("p", "Nothing was measured: the table says why."))
    shown = [
        tag(
            "figure",
            tag("h3", panel.title),
            tag("div", id=f"plot-{panel.key}", class_="plot", role="img", aria_label="Drawn when scripts run."),
        )
        for panel in panels
    ]
    choice = tag("div", select("series", "Show", [(name, name) for name in series]), class_="controls")
    legend = [
        tag(
            "label",
            tag("input", type="checkbox", checked=True, value=method),
            tag("span", class_=f"key {PLAIN.get(method, 'solid')}", style=f"border-color:{_css(methods, method)}"),
            tag("span", breakable(method)),
        )
        for method in methods
    ]
    return _section(
        "figures",
        choice,
        tag("fieldset", tag("legend", "Methods"), tag("div", legend, class_="legend", id="legend")),
        tag("div", shown, class_="columns"),
        tag("p", "Marks are medians; bars reach from the lower to the upper quartile.", class_="quiet"),
    )


def _css(methods: Sequence[str], method: str) -> str:
    if method in PLAIN:
        return "var(--dense)" if method == "dense" else "var(--muted)"
    return f"var(--series-{_number(methods, method) % len(SERIES['light'])})"


def _number(methods: Sequence[str], method: str) -> int:
    return [one for one in methods if one not in PLAIN].index(method)


def _drawn(panel: Panel, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a plotly figure per series."""
    return {name: _figure(panel, lines, methods) for name, lines in panel.lines.items() if lines}


def _figure(panel: Panel, lines: Mapping[str, Sequence[Point]], methods: Sequence[str]) -> dict[str, Any]:
    ticks = sorted({point.context for line in lines.values() for point in line})
    return {
        "data": [_trace(lines[method], panel, methods, method) for method in methods if method in lines],
        "layout": {
            "xaxis": {
                "title": {"text": "Tokens of context"},
                "type": "log",
                "tickvals": ticks,
                "ticktext": [short(tick) for tick in ticks],
            },
            "yaxis": {"title": {"text": panel.axis}, "rangemode": "tozero"},
        },
    }


def _trace(line: Sequence[Point], panel: Panel, methods: Sequence[str], method: str) -> dict[str, Any]:
    colour = _css(methods, method)
    symbol = "circle" if method in PLAIN else SYMBOLS[_number(methods, method) % len(SYMBOLS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": method,
        "x": [point.context for point in line],
        "y": [point.value for point in line],
        "line": {"color": colour, "width": 2, "dash": PLAIN.get(method, "solid")},
        "marker": {"symbol": symbol, "size": 8, "color": colour},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [point.high - point.value for point in line],
            "arrayminus": [point.value - point.low for point in line],
            "color": colour,
            "thickness": 1,
            "width": 3,
            "visible": any(point.low != point.high for point in line),
        },
        "hovertemplate": f"{_plain(method)}<br>%{{x:,}} tokens: %{{y:,.4~g}}<extra>{panel.axis}</extra>",
    }


def _plain(text: str) -> str:
    """Keep plotly from reading a method's text as markup, or as a place for values."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def _numbers(kind: str, cells: Sequence[Cell]) -> Markup:
    tables = []
    for place in places_of(cells):
        own = [cell for cell in cells if place_of(cell) == place]
        found = make_table(kind, own)
        numeric = [tag("th", name, scope="col", class_="number") for name in found.headings]
        head = tag("thead", tag("tr", tag("th", "Method", scope="col"), numeric))
        rows = [_row(row, len(found.headings)) for row in found.rows]
        caption = tag("caption", place.name)
        tables.append(box(place.name, tag("table", caption, head, tag("tbody", rows), class_="scores")))
    return _section("numbers", tag("p", EXPLAINED[kind]), tables)


def _row(row: Sequence[str], columns: int) -> Markup:
    name = tag("th", breakable(row[0]), scope="row", class_="policy")
    if len(row) == 2 and columns != 1:
        return tag("tr", name, tag("td", row[1], colspan=columns, class_="failed"))
    return tag("tr", name, [tag("td", text, class_="number") for text in row[1:]])


def _setup(record: Mapping[str, Any]) -> Markup:
    facts = {
        **record["environment"],
        **{key: value for key, value in record["settings"].items() if value is not None},
        "command": record["command"],
    }
    turns = [" · ".join(cell["in_turns_with"]) for cell in record["cells"] if "in_turns_with" in cell]
    groups = list(dict.fromkeys(turns))
    told = tag("p", "Measured in turns, one stretch of each per round: ", "; ".join(groups), ".") if groups else None
    table = plain_table("How this was measured", ["Setting", "Value"], [[key, str(facts[key])] for key in facts])
    return _section("setup", told, table)
