"""The tables of ``kvfold study``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold.cli._console import stdout

if TYPE_CHECKING:
    from kvfold.eval.study import MassFigures, RiskFigures, SummaryFigures


def show_mass(found: MassFigures) -> None:
    """Print the table of ``study mass``."""
    table, console = _table(f"rows that hold 90 % of attention, of {found.context:,}", "layer")
    for heading in ("one query, median", "mean", f"{found.queries} queries, one head", "KV head"):
        table.add_column(heading, justify="right", overflow="fold")
    for one in found.layers:
        cells = (one.share.median, one.share.mean, one.union, one.group_union)
        table.add_row(str(one.layer), *(f"{cell:.1%}" for cell in cells))
    cells = (found.share.median, found.share.mean, found.union, found.group_union)
    table.add_section()
    table.add_row("all", *(f"{cell:.1%}" for cell in cells))
    console.print(table)


def show_risk(found: RiskFigures) -> None:
    """Print the tables of ``study risk``."""
    heads = ", ".join(map(str, found.heads))
    title = f"correlation with the true error: layer {found.layer}, heads {heads}, {found.observations:,} clusters"
    table, console = _table(title, "score of a cluster")
    for heading in ("Spearman", "log-Pearson"):
        table.add_column(heading, justify="right", overflow="fold")
    for one in found.correlations:
        table.add_row(one.score, f"{one.spearman:.3f}", f"{one.log_pearson:.3f}")
    console.print(table)
    shares = list(dict.fromkeys(one.share for one in found.matched))
    table, _ = _table(f"error of the output, median/95th percentile, {len(found.layers)} layers", "clusters read by")
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right", overflow="fold")
    for score, represented in dict.fromkeys((one.score, one.represented) for one in found.matched):
        own = [one for one in found.matched if (one.score, one.represented) == (score, represented)]
        name = score if represented else f"{score}, rest left out"
        table.add_row(name, *(f"{one.error.median:.3f}/{one.error.p95:.3f}" for one in own))
    console.print(table)


def show_summaries(found: SummaryFigures) -> None:
    """Print the table of ``study summaries``."""
    title = f"rows read, error of the output (median/95th percentile), {len(found.layers)} layers"
    table, console = _table(title, "tau")
    for curve in found.curves:
        table.add_column(f"{curve.form}, reach {curve.delta:.1f}", justify="right", overflow="fold")
    for at, point in enumerate(found.curves[0].points):
        cells = [curve.points[at] for curve in found.curves]
        table.add_row(
            f"{point.tau:g}", *(f"{one.rows:.1%} {one.error.median:.3f}/{one.error.p95:.3f}" for one in cells)
        )
    console.print(table)


def _table(title: str, first: str) -> tuple[Any, Any]:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    return table, stdout()
