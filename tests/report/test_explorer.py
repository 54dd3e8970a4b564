"""The explorer and the pictures of studies as files: they load nothing, hold every number, and run no text."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser

import pytest
from tests.helpers.studies import CLUSTER, TOKENS, study

from kvfold.core.errors import DataError
from kvfold.eval.study import Exploration
from kvfold.eval.study.explore import TAUS
from kvfold.report.explorer import TITLES, explorer_page
from kvfold.report.explorer_data import LEAST_SHARE, START, explorer_data, riskiest
from kvfold.report.study_plot import draw_study


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page() -> str:
    return explorer_page(study("explore"))


def figures() -> Exploration:
    found = study("explore").figures
    assert isinstance(found, Exploration)
    return found


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    elements = Elements(page).found
    for name, attributes in elements:
        assert "src" not in attributes, name
        assert "href" not in attributes or (attributes["href"] or "").startswith(("#", "data:,")), attributes
        assert not any(key.startswith("on") for key in attributes)
    (policy,) = (a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy


def test_sections_labels_and_names(page: str) -> None:
    elements = Elements(page).found
    assert [a["id"] for name, a in elements if name == "section"] == list(TITLES)
    labelled = {a["for"] for name, a in elements if name == "label"}
    for name, attributes in elements:
        if name in ("select", "input"):
            assert attributes["id"] in labelled
        if attributes.get("role") in ("region", "img"):
            assert attributes["aria-label"]


def test_text_of_tokens_and_models_is_never_markup(page: str) -> None:
    assert not re.search(r"<w\d", page)
    assert "a<b>" not in page
    assert page.count("<script") == 3
    held = re.search(r'id="kvfold-data">(.*?)</script>', page, re.S)
    assert held is not None
    pieces = json.loads(held[1])["pieces"]
    assert len(pieces) == TOKENS
    assert all(re.fullmatch(r" <w\d+>&", piece) for piece in pieces)


def test_scripts_hold_no_formula_of_the_risk(page: str) -> None:
    data = explorer_data(figures())
    for name, view in data["forms"].items():
        own = next(one for one in figures().forms if one.form == name)
        assert view["risk"] == list(own.risk)
        assert [step["error"] for step in view["steps"]] == [step.error for step in own.steps]
        assert len(view["steps"]) == len(data["taus"]) == len(TAUS)
    assert data["taus"][data["start"]] == pytest.approx(START, rel=0.01)
    assert "cosh" not in page[page.index('id="kvfold-data"') :].rpartition("<script>")[2]


def test_every_cluster_is_within_the_axes() -> None:
    data = explorer_data(figures())
    low, high = (10**end for end in data["range"])
    assert all(low < max(one["importance"], LEAST_SHARE) < high for one in data["clusters"])
    for view in data["forms"].values():
        low, high = (10**end for end in view["range"])
        assert all(low < one < high for one in view["distortion"])
    first = figures().forms[0].risk
    assert first[riskiest(figures())] == max(first)


def test_the_table_holds_every_number(page: str) -> None:
    for at, cluster in enumerate(figures().clusters):
        name = f"{at}: keys {cluster.first} to {cluster.first + CLUSTER - 1}"
        (cells,) = re.findall(rf"<tr><th scope=\"row\">{name}</th>(.*?)</tr>", page)
        numbers = [f"{cluster.importance:.3g}", f"{cluster.share:.3g}"]
        for view in figures().forms:
            numbers += [f"{view.distortion[at]:.3g}", f"{view.risk[at]:.3g}"]
        assert re.findall(r"<td>([^<]*)</td>", cells)[1:] == numbers


def test_another_study_has_no_explorer() -> None:
    with pytest.raises(DataError, match="study mass"):
        explorer_page(study("mass"))


@pytest.mark.parametrize("kind", ["mass", "risk", "summaries", "explore"])
def test_every_study_has_a_picture(kind: str) -> None:
    head = draw_study(study(kind))[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", head[16:24]) == (1920, 864)
