"""Page and picture of a benchmark as files: they load nothing, hold every number, and run no text."""

from __future__ import annotations

import html
import json
import re
import struct
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.helpers.benches import EVIL, KINDS, POLICIES, bench

from kvfold.report.bench_lines import methods_of, panels_of
from kvfold.report.bench_page import TITLES, bench_page
from kvfold.report.bench_plot import draw_bench, short
from kvfold.report.bench_table import make_table, place_of, places_of


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="kvfold-data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_loads_nothing_and_holds_every_number(kind: str) -> None:
    record = bench(kind)
    page = bench_page(record)
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(page)
    for name, attributes in Elements(page).found:
        assert "src" not in attributes, name
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), attributes
    for title in TITLES.values():
        assert f">{title}</h2>" in page
    for place in places_of(record["cells"]):
        own = [cell for cell in record["cells"] if place_of(cell) == place]
        for row in make_table(kind, own).rows:
            for text in row[1:]:
                assert html.escape(text, quote=False) in page
    assert EVIL not in page


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_the_cells(kind: str) -> None:
    record = bench(kind)
    panels = panels_of(kind, record["cells"])
    drawn = data_of(bench_page(record))["panels"]
    assert [panel.key for panel in panels] == [one["key"] for one in drawn]
    measured = [cell for cell in record["cells"] if "error" not in cell]
    assert all(
        sum(len(line) for lines in panel.lines.values() for line in lines.values()) == len(measured) for panel in panels
    )
    for panel, one in zip(panels, drawn, strict=True):
        for series, lines in panel.lines.items():
            traces = {trace["name"]: trace for trace in one["figures"][series]["data"]}
            assert list(traces) == [method for method in methods_of(record["cells"]) if method in lines]
            for method, points in lines.items():
                assert traces[method]["x"] == [point.context for point in points] == [8192, 32768, 131072]
                assert traces[method]["y"] == [point.value for point in points]
            looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in traces.values()}
            assert len(looks) == len(traces)


@pytest.mark.parametrize("kind", KINDS)
def test_the_picture_is_a_png(kind: str) -> None:
    picture = draw_bench(bench(kind))
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 900
    assert height >= 700


def test_numbers_of_a_table() -> None:
    record = bench("decode")
    place = places_of(record["cells"])[0]
    table = make_table("decode", [cell for cell in record["cells"] if place_of(cell) == place])
    assert place.name == "1 x 8,192 tokens"
    rows = {row[0]: dict(zip(table.headings, row[1:], strict=False)) for row in table.rows}
    assert rows["dense"]["ms/token"] == "1.00"
    # dense 1, floor 1/2, the method 1/4 of a millisecond
    assert rows[POLICIES[0]]["speed"] == "4.00x"
    assert rows[POLICIES[0]]["gain"] == "150%"
    assert rows["floor"]["gain"] == "-"
    assert rows["refinekv"]["expanded"] == "5.0%"
    assert table.rows[-1] == (f"kvpress {EVIL}", "out of memory: 1.50 GiB more were asked for")
    assert place_of(bench("prefill")["cells"][0]).series == "chunks of 1,024"


def test_a_record_of_failures_is_shown_too() -> None:
    record = bench("decode")
    record["cells"] = [cell for cell in record["cells"] if "error" in cell]
    assert "Nothing was measured" in bench_page(record)
    assert draw_bench(record).startswith(b"\x89PNG")


def test_short_numbers() -> None:
    assert [short(number) for number in (200, 1000, 1024, 131072, 1500)] == ["200", "1,000", "1K", "128K", "1,500"]
