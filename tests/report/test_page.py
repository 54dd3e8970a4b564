"""The page as text: it loads nothing, holds every number, and runs no text of a model."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.runs import POLICIES, TEXTS, arrivals, write_run

from kvfold.report import page_words as words
from kvfold.report.figures.palette import HEAT, INK, SERIES, contrast, on_heat, styles
from kvfold.report.merge import Evidence, gather
from kvfold.report.page import build_page
from kvfold.report.page_data import LONGEST, page_data
from kvfold.report.page_markup import data_script, script, tag
from kvfold.report.page_sections import TITLES
from kvfold.report.summary import Summary, summarize

EVIL = "</script><script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\">"


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag in ("td", "th") or (self._inside and tag in ("span", "wbr"))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False


Report = tuple[Evidence, Summary, str]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, aware=(False, True), count=10)
    evidence = gather([folder])
    summary = summarize(evidence)
    return evidence, summary, build_page(evidence, summary)


def test_nothing_is_loaded_from_anywhere(report: Report) -> None:
    elements = Elements(report[2])
    for name, attributes in elements.found:
        assert "src" not in attributes, name
        assert "href" not in attributes or (attributes["href"] or "").startswith(("#", "data:,")), attributes
        assert not any(key.startswith("on") for key in attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", report[2], re.S)
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy


def test_plotly_is_inlined_once(report: Report) -> None:
    assert report[2].count("* plotly.js v") == 1


def test_every_section_is_there_with_its_heading(report: Report) -> None:
    found = {a.get("id"): a for name, a in Elements(report[2]).found if name == "section"}
    assert list(found) == list(TITLES)
    assert all(f'id="{key}-title">{title}</h2>' in report[2] for key, title in TITLES.items())


def test_tables_hold_what_the_statistics_say(report: Report) -> None:
    cells = Elements(report[2]).cells
    rows = [row for place in report[1].places for row in report[1].rows[place]]
    places = [i for i, cell in enumerate(cells) if cell in POLICIES and cells[i + 1].startswith("query-a")]
    assert len(places) == len(rows)
    for at, row in zip(places, rows, strict=True):
        difference = row.difference
        assert cells[at] == row.policy
        assert cells[at + 1] == ("query-aware" if row.place.query_aware else "query-agnostic")
        assert cells[at + 2] == str(row.count)
        assert cells[at + 3] == f"{row.mean:.3f} {row.low:.3f} to {row.high:.3f}"
        if difference is not None:
            numbers = [float(n) for n in re.findall(r"[+-]?\d\.\d+", cells[at + 4].replace(words.MINUS, "-"))]
            assert numbers == pytest.approx([difference.difference, difference.low, difference.high], abs=6e-4)
            assert difference.verdict in cells[at + 5]


def test_few_samples_are_called_few(tmp_path: Path) -> None:
    write_run(tmp_path, count=2, lengths=(4096,), tasks=("qa_1",))
    (rows, _) = summarize(gather([tmp_path])).rows.values()
    assert {words.verdict(row) for row in rows[1:]} == {"not distinguishable from dense (too few samples)"}


def test_every_field_has_a_label_and_every_box_a_name(report: Report) -> None:
    elements = Elements(report[2]).found
    labelled = {a["for"] for name, a in elements if name == "label"}
    for name, attributes in elements:
        if name in ("select", "input"):
            assert attributes["id"] in labelled
        if attributes.get("role") in ("region", "img"):
            assert attributes["aria-label"]


def test_what_was_not_measured_is_said(report: Report) -> None:
    assert "Time per token was not measured" in report[2]
    assert "Arrival times were not measured" in report[2]
    assert 'id="plot-time"' not in report[2]


def test_timed_runs_have_their_figure_and_replay(tmp_path: Path) -> None:
    write_run(tmp_path, timed=True, count=2, lengths=(4096,), tasks=("qa_1",))
    evidence = gather([tmp_path])
    page = build_page(evidence, summarize(evidence))
    assert 'id="plot-time"' in page
    assert 'id="replay-play"' in page
    assert "No task of these runs says at which depth" in page


def test_the_page_holds_when_each_token_came(tmp_path: Path) -> None:
    write_run(tmp_path, timed=True, count=2, lengths=(4096,), tasks=("qa_1", TEXTS))
    evidence = gather([tmp_path])
    data = page_data(evidence, summarize(evidence))
    for sample, asked in zip(data["samples"], evidence.samples, strict=True):
        for policy, text, *_, packed in sample["results"]:
            if sample["task"] == TEXTS:
                assert packed is None
                assert data["texts"][text] == "(scored, not generated)"
                continue
            result = asked.results[data["policies"][policy]]
            moments, ends = np.cumsum(packed[::2]) / 1e4, np.cumsum(packed[1::2])
            expected = arrivals(0.42, result.tpot_s or 0, result.output)
            assert moments == pytest.approx([moment for moment, _ in expected], abs=5.1e-5)
            assert ends.tolist() == [end for _, end in expected]
            assert ends[-1] == len(data["texts"][text])


def test_times_without_arrivals_are_not_replayed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", count=1, lengths=(4096,), tasks=("qa_1",))
    write_run(tmp_path / "b", count=1, lengths=(4096,), tasks=("qa_1",), timed=True, output="other")
    evidence = gather([tmp_path / "a", tmp_path / "b"])
    page = build_page(evidence, summarize(evidence))
    assert 'id="plot-time"' in page
    assert "Arrival times were not measured" in page


def test_texts_say_that_lower_is_better_wherever_they_stand(tmp_path: Path) -> None:
    write_run(tmp_path, count=8, lengths=(4096,), tasks=("qa_1", TEXTS))
    evidence = gather([tmp_path])
    summary = summarize(evidence)
    page = build_page(evidence, summary)
    assert "Task perplexity, nats per token, lower is better" in page
    (rows,) = (rows for place, rows in summary.rows.items() if place.task == TEXTS)
    cells = Elements(page).cells
    for row in rows:
        at = next(i for i, cell in enumerate(cells) if cell.endswith(f"perplexity {math.exp(row.mean):.2f}"))
        assert cells[at] == (f"{row.mean:.3f} {row.low:.3f} to {row.high:.3f}, perplexity {math.exp(row.mean):.2f}")
        if row.outcome == "worse":
            assert cells[at + 2].endswith("higher than dense, worse")
    assert {row.outcome for row in rows} == {None, "worse"}
    worse = [a["class"] for name, a in Elements(page).found if name == "td" and "verdict" in (a.get("class") or "")]
    assert worse[-len(rows) :] == ["verdict reference"] + ["verdict lower"] * (len(rows) - 1)
    views = page_data(evidence, summary)["views"]
    axis = views["perplexity|4096|query-agnostic"]["bytes"]["layout"]["yaxis"]
    assert axis["title"]["text"] == "Nats per token, lower is better"
    assert axis["range"][0] < min(row.low for row in rows) < max(row.high for row in rows) < axis["range"][1]
    assert views["|4096|query-agnostic"]["bytes"]["layout"]["yaxis"]["title"]["text"] == "Mean score"


def test_text_of_models_is_never_markup(tmp_path: Path) -> None:
    write_run(tmp_path, count=1, output=EVIL + "x" * LONGEST, model=f"a<b>/{EVIL}", timed=True)
    evidence = gather([tmp_path])
    page = build_page(evidence, summarize(evidence))
    assert EVIL not in page
    assert "<img" not in page
    assert page.count("<script") == 4
    held = re.search(r'id="kvfold-data">(.*?)</script>', page, re.S)
    assert held is not None
    texts = json.loads(held[1])["texts"]
    assert all(text.startswith(EVIL) and "[cut here: " in text for text in texts)


def test_markup_escapes_and_keeps_zero() -> None:
    assert tag("p", "<b>", tag("i", "&"), [None, "c"]) == "<p>&lt;b&gt;<i>&amp;</i>c</p>"
    assert tag("div", tabindex=0, title='"<', hidden=False, id=None) == '<div tabindex="0" title="&quot;&lt;"></div>'
    assert "</script>" not in data_script("d", "</script>")[:-9]
    with pytest.raises(ValueError, match="end of its own element"):
        script("'</SCRIPT>'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme: str) -> None:
    ink = INK[scheme]
    for text in ("ink", "muted", "accent", "lower", "higher"):
        for ground in ("ground", "surface", "raised"):
            assert contrast(ink[text], ink[ground]) >= 4.5, (text, ground)
    assert contrast(ink["on-accent"], ink["accent"]) >= 4.5
    for line in (*SERIES[scheme], ink["control"], ink["dense"]):
        assert contrast(line, ink["surface"]) >= 3, line
    for colour in HEAT[scheme]:
        assert contrast(colour, on_heat(colour)) >= 4.5, colour


def test_lines_look_different() -> None:
    many = tuple(f"method{i}(keep=0.5{a})" for i in range(16) for a in ("", ", allocator=ada"))
    found = styles(many)
    assert len(set(found.values())) == len(found) == 32


def test_words() -> None:
    assert words.signed(-0.0004) == "0.000"
    assert words.signed(-0.25) == "\N{MINUS SIGN}0.250"
    assert words.signed(0.25) == "+0.250"
    assert words.seconds(None) == "\N{EN DASH}"
    assert (words.seconds(0.0125), words.seconds(3.2)) == ("12.5 ms", "3.20 s")
