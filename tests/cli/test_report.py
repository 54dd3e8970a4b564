from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import pytest
from tests.helpers.runs import POLICIES, write_run

from .conftest import Invoke, last_json, refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    write_run(folder, count=4, lengths=(4096,), policies=POLICIES[:4], tasks=("niah_multikey_2", "qa_1"), timed=True)
    return folder


def test_page_pictures_and_json(invoke: Invoke, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    document = last_json(invoke("report", run, "--out", out, "--png", tmp_path / "figures", "--json"))
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert document["page"] == str(out)
    assert len(document["rows"]) == 3 * 4
    assert {row["policy"] for row in document["rows"]} == set(POLICIES[:4])
    assert document["rows"][1]["difference"]["verdict"] in ("lower", "higher", "not distinguishable")
    assert [Path(png).name for png in document["pngs"]] == [
        "score-bytes-4096-query-agnostic.png",
        "score-time-4096-query-agnostic.png",
        "depth-niah_multikey_2-query-agnostic.png",
    ]
    assert all(Path(png).read_bytes()[:4] == b"\x89PNG" for png in document["pngs"])


def test_help_has_examples(invoke: Invoke) -> None:
    assert "kvfold report" in invoke("report", "--help").stdout.partition("Examples")[2]


def test_open_shows_the_page(invoke: Invoke, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    result = invoke("report", run, "--out", tmp_path / "page.html", "--open")
    assert result.stdout.splitlines() == [str(tmp_path / "page.html")]
    assert shown == [(tmp_path / "page.html").as_uri()]


def test_bad_input_is_one_line(invoke: Invoke, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert "nowhere" in refused(invoke("report", tmp_path / "nowhere", "--out", out))
    assert "RUN" in refused(invoke("report"))
    assert "--out" in refused(invoke("report", run, "--out", tmp_path))
    assert "make" in refused(invoke("report", run, "--out", tmp_path / "missing" / "page.html"))
    (tmp_path / "file").touch()
    assert "--png" in refused(invoke("report", run, "--out", out, "--png", tmp_path / "file"))
    assert "--png" in refused(invoke("report", run, "--out", out, "--png", tmp_path / "file" / "deep"))
    write_run(tmp_path / "other", count=1, lengths=(4096,), model="other", fingerprint="0")
    assert "model='other'" in refused(invoke("report", run, tmp_path / "other", "--out", out))
    record = next((tmp_path / "other" / "records").glob("*/*/*.json"))
    record.write_text(record.read_text()[:100])
    assert "damaged" in refused(invoke("report", tmp_path / "other", "--out", out))
    for path in (tmp_path / "other" / "records").glob("*/*/*.json"):
        path.unlink()
    assert "no records" in refused(invoke("report", tmp_path / "other", "--out", out))
    assert not out.exists()


def test_a_missing_package_is_one_line(
    invoke: Invoke, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    line = refused(invoke("report", run, "--out", tmp_path / "page.html"))
    assert "pip install 'kvfold[report]'" in line
