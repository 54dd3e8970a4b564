"""What ``kvfold eval`` ends with: a table per task and length, or one JSON document."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvfold.cli._console import seconds, stderr, stdout

if TYPE_CHECKING:
    from kvfold.report.summary import Row, Summary


def document(out: Path, settings: dict[str, Any], summary: Summary) -> dict[str, Any]:
    """Return a run's results as plain data.

    Args:
        out: The folder.
        settings: Of the run.
        summary: What it found.

    Returns:
        ``run``, ``settings``, ``rows`` and ``notes``.
    """
    from kvfold.report.summary import row_json

    rows = [row_json(row) for place in summary.places for row in summary.rows[place]]
    return {"run": str(out), "settings": settings, "rows": rows, "notes": list(summary.notes)}


def show(summary: Summary) -> None:
    """Print a table per task and length, and one over all tasks if there are several.

    Args:
        summary: What a run found.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    console = stdout()
    fits = console.width >= 80
    several = len({place.task for place in summary.places if place.task is not None}) > 1
    for place in summary.places:
        if place.task is None and not several:
            continue
        seen = "question seen" if place.query_aware else "question not seen"
        rows = summary.rows[place]
        title = f"{place.task or 'all tasks'}, {place.length} tokens, {seen}, n={rows[0].count}"
        if rows[0].lower_is_better:
            title = f"{place.task}, {place.length} tokens, nats per token, lower is better, n={rows[0].count}"
        # what is read says something of its own only where it is not what is held
        read = any(row.retrieves for row in rows)
        told = "read: bytes read per token, of what dense reads" if read else None
        table = Table(
            title=title, title_justify="left", caption=told, caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
        )
        # on two lines, so that 80 columns are enough; in fewer, numbers are folded too, but never cut
        timed = ["ttft\ntpot"] if any(row.tpot_s is not None for row in rows) else []
        smaller = "smaller\nread" if read else "smaller"
        for heading in ["policy", "score, 95 %", "to dense, 95 %", "verdict", smaller, *timed]:
            justify: Literal["left", "right"] = "left" if heading in ("policy", "verdict") else "right"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading != "policy" and fits)
        for row in rows:
            table.add_row(row.policy, *_cells(row)[: 4 + len(timed)])
        console.print(table)
    for remark in summary.notes:
        stderr().print(remark, markup=False)


def _cells(row: Row) -> list[str]:
    from kvfold.eval.stats import LEAST_PAIRS

    gap = row.difference
    verdict: str = "-" if gap is None else gap.verdict.replace("not ", "not\n")
    # where lower is better, the direction alone would mislead
    if row.lower_is_better and row.outcome in ("worse", "better"):
        verdict += f", {row.outcome}"
    if gap is not None and row.count < LEAST_PAIRS:
        verdict += "\n(few samples)"
    read = f"\n{100 * row.bytes_read:.1f} %" if row.bytes_read is not None and row.retrieves else ""
    extra = f"\nperplexity {exp(row.mean):.2f}" if row.lower_is_better else ""
    return [
        f"{row.mean:.3f}\n{row.low:.3f} to {row.high:.3f}{extra}",
        "-" if gap is None else f"{gap.difference:+.3f}\n{gap.low:+.3f} to {gap.high:+.3f}",
        verdict,
        f"{row.factor:.2f}x{read}",
        f"{seconds(row.ttft_s)}\n{seconds(row.tpot_s)}",
    ]
