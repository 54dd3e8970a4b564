"""One self-contained page: it opens from a file, offline, and its policy of contents forbids every request."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import PurePath

from kvfold._version import __version__
from kvfold.core.errors import MissingExtraError
from kvfold.report import page_answers, page_sections
from kvfold.report import page_words as words
from kvfold.report.figures.depths import depth_grids
from kvfold.report.figures.palette import css
from kvfold.report.merge import Evidence
from kvfold.report.page_data import page_data
from kvfold.report.page_markup import Markup, data_script, script, tag
from kvfold.report.summary import Summary

_TEMPLATES = "kvfold.report"


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
    scripts = [script(code) for code in (_plotly(), *map(_template, ("fronts.js", "answers.js")))]
    allowed = " ".join(source for _, source in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    model = evidence.runs[0].settings.model
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"kvfold {__version__}"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"kvfold report: {_short_name(model)}"),
        Markup(f"<style>{css()}{_template('page.css')}</style>"),
    )
    links = [tag("a", title, href=f"#{key}") for key, title in page_sections.TITLES.items()]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
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
        data_script("kvfold-data", page_data(evidence, summary)),
        [element for element, _ in scripts],
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


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


def _template(name: str) -> str:
    return files(_TEMPLATES).joinpath("templates", name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("the page needs plotly; pip install 'kvfold[report]'") from error
    code: str = get_plotlyjs()
    return code
