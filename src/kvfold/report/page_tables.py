"""The tables of the page: they hold every number that a figure shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvfold.report import page_words as words
from kvfold.report.figures.depths import DepthGrid
from kvfold.report.figures.palette import heat_step
from kvfold.report.page_markup import Child, Markup, tag
from kvfold.report.summary import Place, Row, Summary

_MARKS = {"lower": "\N{BLACK DOWN-POINTING TRIANGLE}", "higher": "\N{BLACK UP-POINTING TRIANGLE}"}
_COLOURS = {"worse": "lower", "better": "higher", "not distinguishable": "not", None: "reference"}
"""Classes of the page's style, named after scores of which higher is better."""


def anchor(place: Place) -> str:
    """Return the id of a place's rows."""
    task = "all" if place.task is None else "task-" + re.sub(r"[^A-Za-z0-9_-]", "-", place.task)
    return f"rows-{task}-{place.length}-{'aware' if place.query_aware else 'agnostic'}"


def box(label: str, *children: Child) -> Markup:
    """Let something wide scroll inside its own box, with the keyboard too."""
    return tag("div", children, class_="scroll", role="region", aria_label=label, tabindex=0)


def breakable(policy: str) -> list[Child]:
    """Let a policy's text wrap between its parameters before it wraps anywhere else."""
    parts = re.split(r"(?<=[(,])", policy)
    return [child for part in parts for child in (part, Markup("<wbr>"))][:-1]


def score_table(summary: Summary, places: Sequence[Place], caption: str) -> Markup:
    """Write the rows of some places as one table.

    Args:
        summary: The numbers.
        places: One group of rows each.
        caption: What the table shows.

    Returns:
        The table in its box.
    """
    timed = any(row.tpot_s is not None for place in places for row in summary.rows[place])
    reads = any(row.retrieves for place in places for row in summary.rows[place])
    heads = ["Policy", "Question", "n", "Score (95 % CI)", "To dense (95 % CI)", "Verdict", "Bytes held", "Factor"]
    heads += ["Rows read", "Bytes read"] if reads else []
    heads += ["First token", "Per token", "n timed"] if timed else []
    numeric = {"n", *heads[heads.index("Bytes held") :]}
    head = [tag("th", name, scope="col", class_="number" if name in numeric else None) for name in heads]
    groups = []
    for place in places:
        name = f"{place.length:,} tokens, {words.awareness(place.query_aware)}"
        title = tag("th", tag("span", name), scope="rowgroup", colspan=len(heads), id=anchor(place))
        rows = [_row(row, reads, timed) for row in summary.rows[place]]
        groups.append(tag("tbody", tag("tr", title, class_="group"), rows))
    return box(caption, tag("table", tag("caption", caption), tag("thead", tag("tr", head)), groups, class_="scores"))


def _row(row: Row, reads: bool, timed: bool) -> Markup:
    found = row.difference.verdict if row.difference is not None else None
    mark = _MARKS.get(found or "")
    extra = f", {words.perplexity(row)}" if row.lower_is_better else ""
    sign = None if mark is None else tag("span", mark + " ", aria_hidden="true")
    cells = [
        tag("th", breakable(row.policy), scope="row", class_="policy"),
        tag("td", words.awareness(row.place.query_aware)),
        tag("td", str(row.count), class_="number"),
        tag("td", words.score(row.mean), tag("span", f" {words.interval(row.low, row.high)}{extra}", class_="ci")),
        tag("td", words.difference(row)),
        tag("td", sign, words.verdict(row), class_=f"verdict {_COLOURS[row.outcome]}"),
        tag("td", words.percent(row.share), class_="number"),
        tag("td", words.factor(row.factor), class_="number"),
    ]
    if reads:
        known = words.percent(row.bytes_read) if row.bytes_read is not None else "\N{EN DASH}"
        cells += [tag("td", text, class_="number") for text in (words.percent(row.rows_read), known)]
    if timed:
        cells += [
            tag("td", text, class_="number")
            for text in (words.seconds(row.ttft_s), words.seconds(row.tpot_s), str(row.timed))
        ]
    return tag("tr", cells)


def heat_table(grid: DepthGrid) -> Markup:
    """Write one policy's scores by depth and length; every coloured cell holds its number.

    Args:
        grid: The scores.

    Returns:
        The table in its box.
    """
    label = f"{grid.policy} on {grid.task}, {words.awareness(grid.query_aware)}: mean score by depth and length"
    head = [tag("th", "Depth", scope="col"), *(tag("th", f"{length:,}", scope="col") for length in grid.lengths)]
    rows = [
        tag("tr", tag("th", depth, scope="row"), [_heat_cell(cell) for cell in cells])
        for depth, cells in zip(grid.depths, grid.cells, strict=True)
    ]
    caption = tag(
        "caption", tag("b", breakable(grid.policy)), tag("span", f" {words.awareness(grid.query_aware)}", class_="ci")
    )
    return box(label, tag("table", caption, tag("thead", tag("tr", head)), tag("tbody", rows), class_="heat"))


def _heat_cell(cell: tuple[float, int] | None) -> Markup:
    if cell is None:
        return tag("td", "\N{EN DASH}")
    mean, count = cell
    return tag("td", f"{mean:.2f}", class_=f"h{heat_step(mean)}", title=f"n = {count}")


def plain_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """Write a table of text; the first cell of each row names it.

    Args:
        caption: What the table shows.
        heads: Names of the columns.
        rows: Cells.

    Returns:
        The table in its box.
    """
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in heads]))
    body = [tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in others]) for first, *others in rows]
    return box(caption, tag("table", tag("caption", caption), head, tag("tbody", body), class_="plain"))
