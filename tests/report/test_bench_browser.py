"""The page of a benchmark in headless Chromium: no request, no error, no overflow, readable, usable with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.benches import EVIL, KINDS, bench
from tests.helpers.browser import CHROMIUM, CONTRASTS, DRIVER, UNNAMED, Browser, browser

from kvfold.report.bench_page import bench_page

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    found = {kind: folder / f"{kind}.html" for kind in KINDS}
    for kind, path in found.items():
        path.write_text(bench_page(bench(kind)), encoding="utf-8")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("kind", KINDS)
def test_fits_and_can_be_read(window: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool) -> None:
    window.show(pages[kind], width=width, dark=dark)
    seen, poor = window.run(CONTRASTS)
    assert seen > 60
    assert not poor
    assert window.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    plots, drawn = window.run(
        "return [document.querySelectorAll('.plot').length, document.querySelectorAll('.plot .main-svg').length]"
    )
    assert drawn >= 2 * plots > 0
    assert not window.run(UNNAMED)
    assert window.log("browser") == []
    assert window.requests() == [pages[kind].as_uri()]


def test_figures_follow_choices_and_the_scheme(window: Browser, pages: dict[str, Path]) -> None:
    window.show(pages["decode"])
    label = "return document.getElementById('plot-time').getAttribute('aria-label')"
    assert window.run(label).startswith("Time per token, ms over tokens of context, 1 sequence: dense, floor, stock")
    window.run(
        "const s = document.getElementById('series'); s.value = '4 sequences'; s.dispatchEvent(new Event('change'));"
    )
    assert "4 sequences" in window.run(label)
    assert window.run("return document.getElementById('plot-time').data[0].y[0]") == pytest.approx(4.0)
    assert window.run("return document.getElementById('plot-time')._fullLayout.xaxis.type") == "log"
    traces = "return document.querySelectorAll('#plot-time .scatterlayer .trace').length"
    before = window.run(traces)
    window.run("document.querySelector('#legend input').focus()")
    window.press(" ")
    assert window.run(traces) == before - 1
    colour = "return document.querySelector('#plot-time .scatterlayer path.js-line').style.stroke"
    light = window.run(colour)
    window.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    window.run("return new Promise((done) => setTimeout(done, 300))")
    assert window.run(colour) != light


def test_names_of_methods_do_not_run(window: Browser, pages: dict[str, Path]) -> None:
    window.show(pages["decode"])
    names = window.run("return [...document.querySelectorAll('.scores .policy')].map((cell) => cell.textContent)")
    assert f"kvpress {EVIL}" in names
    assert window.run("return document.querySelectorAll('main b').length") == 0
