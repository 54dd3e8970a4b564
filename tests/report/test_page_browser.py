"""The page in headless Chromium: no request, no error, no overflow, readable, usable with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.browser import CHROMIUM, CONTRASTS, DRIVER, UNNAMED, Browser, browser
from tests.helpers.runs import POLICIES, RETRIEVERS, write_run

from kvfold.report.merge import gather
from kvfold.report.page import build_page
from kvfold.report.summary import summarize

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

EVIL = "<script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\"> one two three four five"

TITLES_CUT = """
const whole = document.documentElement.clientWidth;
return [...document.querySelectorAll(".plot")].filter((plot) => {
  const [title, box] = [plot.querySelector(".xtitle"), plot].map((part) => part.getBoundingClientRect());
  return title.left < box.left || title.right > box.right || title.right > whole;
}).map((plot) => plot.id);
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_run(folder / "run", count=5, aware=(False, True), timed=True, output=EVIL)
    evidence = gather([folder / "run"])
    (folder / "report.html").write_text(build_page(evidence, summarize(evidence)), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reading")
    write_run(folder / "run", policies=(*POLICIES[:4], *RETRIEVERS), count=5, aware=(False, True), timed=True)
    evidence = gather([folder / "run"])
    (folder / "report.html").write_text(build_page(evidence, summarize(evidence)), encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("made", ["page", "reading"])
def test_fits_and_can_be_read(
    window: Browser, made: str, width: int, dark: bool, request: pytest.FixtureRequest
) -> None:
    page: Path = request.getfixturevalue(made)
    window.show(page, width=width, dark=dark)
    seen, poor = window.run(CONTRASTS)
    assert seen > 300
    assert not poor
    assert window.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert window.run("return document.querySelectorAll('.main-svg').length") >= 2
    assert (window.run("return document.querySelectorAll('#plot-read .main-svg').length") > 0) == (made == "reading")
    assert window.run(TITLES_CUT) == []
    assert not window.run(UNNAMED)
    assert window.log("browser") == []
    assert window.requests() == [page.as_uri()]


def test_output_of_models_does_not_run(window: Browser, page: Path) -> None:
    window.show(page)
    assert window.run("return document.title") == "kvfold report: Qwen2.5-Coder-0.5B"
    assert window.run("return document.querySelector('#sample-shown pre').textContent") == EVIL
    assert window.run("return document.querySelectorAll('img').length") == 0


def test_figures_follow_choices_and_the_scheme(window: Browser, page: Path) -> None:
    window.show(page)
    pick = "const s = document.getElementById('view-task'); s.value = 'qa_1'; s.dispatchEvent(new Event('change'));"
    label = "return document.getElementById('plot-bytes').getAttribute('aria-label')"
    assert "All tasks, equal weight, 4,096 tokens, query-agnostic" in window.run(label)
    window.run(pick)
    assert "qa_1, 4,096 tokens, query-agnostic" in window.run(label)
    window.run("document.getElementById('plot-bytes-table').click()")
    assert window.run("return document.getElementById('rows-task-qa_1-4096-agnostic').closest('details').open")
    colour = "return document.querySelector('#plot-bytes .scatterlayer path.js-line').style.stroke"
    light = window.run(colour)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    window.devtools("Emulation.setEmulatedMedia", features=scheme)
    window.run("return new Promise((done) => setTimeout(done, 300))")
    assert window.run(colour) != light


def test_the_front_of_reading_follows_the_same_choices(window: Browser, reading: Path) -> None:
    window.show(reading)
    label = "return document.getElementById('plot-read').getAttribute('aria-label')"
    said = window.run(label)
    assert said.startswith("Mean score against bytes read per token. All tasks, equal weight, 4,096 tokens")
    assert "of the bytes read" in said
    for field, value in (("task", "qa_1"), ("length", "16384"), ("asked", "query-aware")):
        window.run(
            f"const s = document.getElementById('view-{field}'); s.value = '{value}';"
            "s.dispatchEvent(new Event('change'));"
        )
    assert "qa_1, 16,384 tokens, query-aware" in window.run(label)
    window.run("document.getElementById('plot-read-table').click()")
    assert window.run("return document.getElementById('rows-task-qa_1-16384-aware').closest('details').open")
    traces = "return document.querySelectorAll('#plot-read .scatterlayer .trace').length"
    before = window.run(traces)
    window.run("document.querySelector('#legend input').click()")
    assert window.run(traces) == before - 1
    box = "const b = document.querySelector('nav').getBoundingClientRect(); return [b.left, b.right, innerWidth]"
    left, right, wide = window.run(box)
    assert 0 <= left < right <= wide


def test_a_line_is_hidden_with_the_keyboard(window: Browser, page: Path) -> None:
    window.show(page)
    traces = "return document.querySelectorAll('#plot-bytes .scatterlayer .trace').length"
    before = window.run(traces)
    window.run("document.querySelector('#legend input').focus()")
    window.press(" ")
    assert window.run(traces) == before - 1


def test_replay_plays_and_pauses(window: Browser, page: Path) -> None:
    window.show(page)
    text = "return document.getElementById('replay-left-text').textContent"
    assert window.run(text) == ""
    window.run("document.getElementById('replay-play').focus()")
    window.press(" ")
    assert window.run("return document.getElementById('replay-play').textContent") == "Pause"
    waited = "return new Promise((done) => { const t = setInterval(() => { if (document.getElementById("
    waited += "'replay-status').textContent) { clearInterval(t); done(true); } }, 50); })"
    assert window.run(waited)
    assert window.run(text) == EVIL
    assert window.run("return document.getElementById('replay-play').textContent") == "Play"


def test_replay_shows_at_any_moment_what_had_come_by_then(window: Browser, page: Path) -> None:
    window.show(page)
    window.run(
        "for (const id of ['replay-left', 'replay-right']) { const s = document.getElementById(id);"
        "s.value = 'snapkv(keep=0.5)'; s.dispatchEvent(new Event('change')); }"
    )
    (asked, *_) = sorted(
        gather([page.parent / "run"]).samples,
        key=lambda one: (one.record.task, one.record.length, one.record.query_aware, one.record.index),
    )
    steps = asked.results["snapkv(keep=0.5)"].arrivals
    assert steps is not None
    for at in (0, 200, 931, 960, 987, 1000):
        window.run(
            f"const s = document.getElementById('replay-at'); s.value = {at}; s.dispatchEvent(new Event('input'));"
        )
        # the page counts in tenths of milliseconds
        came = [end for moment, end in steps if round(moment * 1e4) <= round(steps[-1][0] * 1e4) * at / 1000 + 1e-5]
        for side in ("left", "right"):
            shown = window.run(f"return document.getElementById('replay-{side}-text').textContent")
            assert shown == EVIL[: came[-1] if came else 0]


def test_replay_does_not_move_where_motion_is_unwanted(window: Browser, page: Path) -> None:
    window.show(page, still=True)
    assert "Motion is reduced" in window.run("return document.getElementById('replay-status').textContent")
    window.run("document.getElementById('replay-play').click()")
    assert window.run("return document.getElementById('replay-left-text').textContent") == EVIL
    window.run("const s = document.getElementById('replay-at'); s.value = 0; s.dispatchEvent(new Event('input'));")
    assert window.run("return document.getElementById('replay-left-text').textContent") == ""
