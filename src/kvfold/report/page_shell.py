"""A self-contained document: it opens from a file, offline, and its policy of contents forbids every request."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from kvfold._version import __version__
from kvfold.core.errors import MissingExtraError
from kvfold.report.figures.palette import css
from kvfold.report.page_markup import Child, Markup, data_script, script, tag


def write_document(title: str, *body: Child, data: Any, codes: Sequence[str], sheets: Sequence[str]) -> str:
    """Write a document with plotly, our scripts and their data.

    Args:
        title: Of the document.
        *body: What it shows.
        data: Plain data for the scripts.
        codes: Our scripts, names of templates.
        sheets: Our styles, names of templates.

    Returns:
        The whole document.

    Raises:
        MissingExtraError: If plotly is not installed.
    """
    scripts = [script(code) for code in (_plotly(), *map(_template, codes))]
    allowed = " ".join(source for _, source in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"kvfold {__version__}"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Markup(f"<style>{css()}{''.join(map(_template, sheets))}</style>"),
    )
    skip = tag("a", "Skip to the content", href="#content", class_="skip")
    whole = tag("body", skip, body, data_script("kvfold-data", data), [element for element, _ in scripts])
    return f"<!doctype html>\n{tag('html', head, whole, lang='en')}\n"


def _template(name: str) -> str:
    return files("kvfold.report").joinpath("templates", name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("the page needs plotly; pip install 'kvfold[report]'") from error
    code: str = get_plotlyjs()
    return code
