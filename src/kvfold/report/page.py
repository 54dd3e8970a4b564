"""One self-contained page of runs: fronts, depths, tables, replay and single answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from kvfold._version import __version__
from kvfold.report import page_answers, page_sections
from kvfold.report import page_words as words
from kvfold.report.figures.depths import depth_grids
from kvfold.report.merge import Evidence
from kvfold.report.page_data import page_data
from kvfold.report.page_markup import Markup, tag
from kvfold.report.page_shell import write_document
from kvfold.report.summary import Summary


def build_page(evidence: Evidence, summary: Summary) -> str:
    """Write the page.

    Args:
        evidence: The merged runs.
        summary: Their numbers.

    Returns:
        The whole document.

    Raises:
        MissingExtraError: If plotly is not installed.
    """
    model = evidence.runs[0].settings.model
    links = [tag("a", title, href=f"#{key}") for key, title in page_sections.titles(summary).items()]
    return write_document(
        f"kvfold report: {_short_name(model)}",
        _header(evidence),
        tag("nav", links, aria_label="Sections"),
        tag(
            "main",
            tag("noscript", tag("p", "Figures and single answers need scripts; all numbers stand in the tables.")),
            page_sections.short(summary),
            page_sections.fronts(summary),
            page_sections.depths(depth_grids(evidence)),
            page_sections.tables(summary),
            page_answers.replay(evidence),
            page_answers.samples(),
            page_sections.setup(evidence),
            id="content",
        ),
        tag("footer", tag("p", f"Written by kvfold {__version__}. Every number was measured on the runs named above.")),
        data=page_data(evidence, summary),
        codes=("fronts.js", "answers.js"),
        sheets=("page.css",),
    )


def _header(evidence: Evidence) -> Markup:
    runs = [run.settings for run in evidence.runs]
    facts = {
        "Model": _each(run.model for run in runs),
        "Device": _each(run.device for run in runs),
        "Data type": _each(run.dtype for run in runs),
        "Samples": f"{len(evidence.samples):,}",
        "Seed": _each(str(run.seed) for run in runs),
        "Question": _each(words.awareness(aware) for run in runs for aware in run.query_aware),
        "Policies": f"{len(evidence.policies)}",
        "Versions": _each(f"{name} {version}" for run in runs for name, version in run.versions.items()),
    }
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    tasks = list(dict.fromkeys(task.name for run in runs for task in run.tasks))
    lengths = sorted({length for run in runs for length in run.lengths})
    asked = f"{len(tasks)} {'task' if len(tasks) == 1 else 'tasks'} at {_each(f'{n:,}' for n in lengths)} tokens"
    return tag(
        "header",
        tag("p", "kvfold report", class_="kicker"),
        tag("h1", _short_name(runs[0].model)),
        tag("p", f"What compressed caches keep of its answers: {asked}.", class_="lead"),
        tag("dl", items),
    )


def _each(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _short_name(model: str) -> str:
    return PurePath(model).name or model
