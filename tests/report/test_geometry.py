"""The picture and the page of ``kvfold inspect``, with and without figures of reading by query."""

from __future__ import annotations

import dataclasses
import struct
from functools import cache

import pytest
from tests.helpers import tiny

from kvfold.eval.inspect import Measurements, advise, inspect_model
from kvfold.eval.inspect.capture import MIN_TOKENS
from kvfold.eval.inspect.reading import Point

pytest.importorskip("matplotlib")

from kvfold.report.geometry import TABLE, draw_geometry, geometry_page, layer_table


@cache
def measured() -> Measurements:
    return inspect_model(tiny.ours(), tiny.ids(MIN_TOKENS))


def without() -> Measurements:
    return dataclasses.replace(measured(), reading=None, reading_note="RefineKV cannot serve it")


def size(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_reading_by_query_has_a_panel_of_its_own() -> None:
    with_panel, plain = (size(draw_geometry(given, "tiny")) for given in (measured(), without()))
    assert with_panel[0] == plain[0]
    assert with_panel[1] > plain[1]


@pytest.mark.parametrize("error", [0.0, 50.0])
def test_errors_beyond_the_axis_are_drawn(error: float) -> None:
    assert measured().reading is not None
    points = (Point(tau=0.01, rows=1.0, scored=0.06, median=error, p95=error),)
    given = dataclasses.replace(measured(), reading=dataclasses.replace(measured().reading, points=points))
    assert draw_geometry(given, "tiny").startswith(b"\x89PNG")


def test_a_table_gives_the_figures_at_the_threshold_of_the_rule() -> None:
    advice = advise(measured())
    table = layer_table(measured(), advice)
    assert measured().reading is not None
    assert [len(row) for row in table] == [len(TABLE)] * 2
    for row, layer in zip(table, measured().reading.layers, strict=True):
        at = next(point for point in layer.points if point.tau == advice.tau)
        assert row[-2:] == (f"{at.rows:.0%}", f"{at.median:.1%}")
    assert [row[-2:] for row in layer_table(without(), advise(without()))] == [("-", "-")] * 2


def test_a_page_names_the_threshold_where_there_is_one() -> None:
    advice = advise(measured())
    page = geometry_page(measured(), advice, "tiny", b"png")
    assert f"<code>refinekv(tau={advice.tau:g})</code>" in page
    assert f"at tau={advice.tau:g}</caption>" in page
    plain = geometry_page(without(), advise(without()), "tiny", b"png")
    assert "refinekv(" not in plain
    assert "no tau: RefineKV cannot serve it" in plain
