"""The explorer in headless Chromium: no request, no error, no overflow, readable, usable with mouse and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browser import CHROMIUM, CONTRASTS, DRIVER, UNNAMED, Browser, browser
from tests.helpers.studies import CLUSTER, study

from kvfold.eval.study import Exploration
from kvfold.eval.study.explore import TAUS, FormView
from kvfold.report.explorer import explorer_page
from kvfold.report.explorer_data import START, riskiest

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

RIGHT, LEFT = "\ue014", "\ue012"
TRACES = "return document.getElementById('plot-clusters').data.map((t) => [t.name, t.x, t.y, t.customdata || null])"
PLACE = """
const plot = document.getElementById("plot-clusters"), at = arguments[0];
plot.scrollIntoView({ block: "center", behavior: "instant" });
const trace = plot.data.find((one) => one.name !== "shown below" && (one.customdata || []).includes(at));
const index = trace.customdata.indexOf(at), box = plot.getBoundingClientRect(), layout = plot._fullLayout;
const [x, y] = [layout.xaxis.d2p(trace.x[index]), layout.yaxis.d2p(trace.y[index])];
return [box.left + layout._size.l + x, box.top + layout._size.t + y];
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    path.write_text(explorer_page(study("explore")), encoding="utf-8")
    return path


def figures() -> Exploration:
    found = study("explore").figures
    assert isinstance(found, Exploration)
    return found


def form(name: str) -> FormView:
    return next(view for view in figures().forms if view.form == name)


def traces(window: Browser) -> dict[str, Any]:
    return {name: (x, y, places) for name, x, y, places in window.run(TRACES)}


def choose(window: Browser, field: str, value: object) -> None:
    kind = "input" if field == "tau" else "change"
    window.run(
        f"const f = document.getElementById('{field}'); f.value = arguments[0]; f.dispatchEvent(new Event('{kind}'));",
        str(value),
    )


def text(window: Browser, identifier: str) -> str:
    found: str = window.run("return document.getElementById(arguments[0]).textContent", identifier)
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_fits_and_can_be_read(window: Browser, page: Path, width: int, dark: bool) -> None:
    window.show(page, width=width, dark=dark)
    seen, poor = window.run(CONTRASTS)
    assert seen > 150
    assert not poor
    assert window.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert window.run("return document.querySelectorAll('.main-svg').length") >= 4
    assert not window.run(UNNAMED)
    assert window.log("browser") == []
    assert window.requests() == [page.as_uri()]


def test_text_of_tokens_does_not_run(window: Browser, page: Path) -> None:
    window.show(page)
    first = riskiest(figures()) * CLUSTER
    shown = window.run("return [...document.querySelectorAll('#keys-rows code')].map((cell) => cell.textContent)")
    assert shown == list(figures().pieces[first : first + CLUSTER])


@pytest.mark.parametrize("name", ["box", "radius", "exact"])
def test_the_slider_moves_the_boundary(window: Browser, page: Path, name: str) -> None:
    window.show(page)
    choose(window, "form", name)
    own, before = form(name), None
    for at in (20, 30, 40, 50):
        choose(window, "tau", at)
        drawn, tau = traces(window), TAUS[at]
        read = [place for place, risk in enumerate(own.risk) if risk > tau]
        assert (drawn["read"][2] or []) == read
        assert len(drawn["represented"][2] or []) == len(own.risk) - len(read)
        line = [importance * tau for importance, _ in own.line]
        assert drawn["R = tau"][0] == pytest.approx(line, rel=1e-3)
        assert line != before
        before = line
        step = own.steps[at]
        assert f"{len(read)} of {len(own.risk)} clusters are read" in text(window, "said")
        assert f"off by {100 * step.error:.1f}\N{NO-BREAK SPACE}%" in text(window, "said")
        assert f"{len(read)} of {len(own.risk)} clusters" in window.run(
            "return document.getElementById('tau').getAttribute('aria-valuetext')"
        )


def test_a_click_shows_the_logits_of_a_cluster(window: Browser, page: Path) -> None:
    window.show(page)
    # one that no other mark covers
    view = form("box")
    at = min(range(len(view.risk)), key=lambda place: view.distortion[place])
    x, y = window.run(PLACE, at)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        window.devtools("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
    assert window.run("return document.getElementById('cluster').value") == str(at)
    keys = window.run("return document.getElementById('plot-keys').data.map((t) => [t.name, t.x, t.y])")
    shown, cluster = {name: (places, logits) for name, places, logits in keys}, figures().clusters[at]
    assert shown["keys"][0] == list(range(cluster.first, cluster.first + CLUSTER))
    assert shown["keys"][1] == pytest.approx(cluster.logits, abs=1e-4)
    assert shown["mean key"][1] == pytest.approx([cluster.representative] * 2, abs=1e-4)
    rows = window.run(
        "return [...document.querySelectorAll('#keys-rows tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert [float(row[2].replace("\u2212", "-")) for row in rows] == pytest.approx(cluster.logits, abs=6e-3)
    assert [row[1] for row in rows] == list(figures().pieces[cluster.first : cluster.first + CLUSTER])
    assert traces(window)["shown below"][2] == [at]


def test_everything_is_reached_with_the_keyboard(window: Browser, page: Path) -> None:
    window.show(page)
    window.run("document.getElementById('tau').focus()")
    start = int(window.run("return document.getElementById('tau').value"))
    assert pytest.approx(START, rel=0.01) == TAUS[start]
    before = text(window, "tau-shown")
    window.press(RIGHT)
    assert int(window.run("return document.getElementById('tau').value")) == start + 1
    assert text(window, "tau-shown") != before
    window.press(LEFT)
    assert text(window, "tau-shown") == before
    choose(window, "cluster", 0)
    assert window.run("return document.getElementById('before').disabled")
    window.run("document.getElementById('after').focus()")
    window.press(" ")
    assert window.run("return document.getElementById('cluster').value") == "1"
    assert "Cluster 1," in text(window, "plot-keys-name")
    reached = window.run(
        "return [...document.querySelectorAll('select, input, button, summary, [tabindex]')]"
        ".filter((node) => node.tabIndex >= 0).map((node) => node.id || node.tagName)"
    )
    assert {"form", "tau", "cluster", "before", "after", "SUMMARY"} <= set(reached)


def test_figures_follow_the_scheme(window: Browser, page: Path) -> None:
    window.show(page)
    colour = "return document.querySelector('#plot-clusters .scatterlayer path.js-line').style.stroke"
    light = window.run(colour)
    window.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    window.run("return new Promise((done) => setTimeout(done, 300))")
    assert window.run(colour) != light
