"""``kvfold report``: runs as one page that opens offline."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import _options
from kvfold.cli._console import note, print_json, progress_bar
from kvfold.cli._files import check_file, check_folder, write_file
from kvfold.core.errors import MissingExtraError

if TYPE_CHECKING:
    from kvfold.report.merge import Evidence
    from kvfold.report.summary import Summary

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders that kvfold eval wrote, of one model.")]
Out = Annotated[Path, typer.Option(help="The page; an older one is replaced.")]
Png = Annotated[Path | None, typer.Option(metavar="DIR", help="Write the main figures there as PNG files too.")]
Open = Annotated[bool, typer.Option("--open", help="Show the page in the browser.")]


def command(
    runs: Runs, out: Out = Path("report.html"), png: Png = None, json: _options.Json = False, open_page: Open = False
) -> None:
    """Write one self-contained HTML page: scores with intervals against bytes and time, answers, configuration.

    [bold]Examples[/bold]

      kvfold report runs/qwen

      kvfold report runs/qwen runs/qwen-timed --out qwen.html --png figures --open
    """
    check_file("--out", out)
    if png is not None:
        check_folder("--png", png)
    try:
        from kvfold.report.figures.static import write_pngs
        from kvfold.report.merge import gather
        from kvfold.report.page import build_page
        from kvfold.report.summary import summarize
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pydantic", "numpy", "matplotlib"):
            raise
        raise MissingExtraError(f"kvfold report needs {error.name}; pip install 'kvfold[report]'") from error
    evidence = gather(runs)
    with progress_bar("Comparing") as report:
        summary = summarize(evidence, report)
    write_file(out, build_page(evidence, summary))
    pictures = write_pngs(evidence, summary, png) if png is not None else []
    for remark in summary.notes:
        note(remark)
    if open_page:
        webbrowser.open(out.resolve().as_uri())
    if json:
        print_json(document(evidence, summary, out, pictures))
        return
    for path in (out, *pictures):
        print(path)


def document(evidence: Evidence, summary: Summary, out: Path, pictures: list[Path]) -> dict[str, Any]:
    """Return what ``--json`` prints.

    Args:
        evidence: The merged runs.
        summary: Their numbers.
        out: The page.
        pictures: The PNG files.

    Returns:
        Plain data: every row of every table, with its interval and verdict.
    """
    from kvfold.report.summary import row_json

    return {
        "page": str(out),
        "pngs": [str(path) for path in pictures],
        "runs": [
            {"path": run.name, "found": run.found, "planned": run.planned, **run.settings.model_dump(mode="json")}
            for run in evidence.runs
        ],
        "notes": list(summary.notes),
        "rows": [row_json(row) for place in summary.places for row in summary.rows[place]],
    }
