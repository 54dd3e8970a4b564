"""What retrievers read, beside what they hold: shown where it was measured, absent where it was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.runs import POLICIES, RETRIEVERS, read_of, write_run
from tests.report.test_page import Elements

from kvfold.report.figures.fronts import AXES, cost_of, lines
from kvfold.report.figures.static import write_pngs
from kvfold.report.merge import Evidence, gather
from kvfold.report.page import build_page
from kvfold.report.page_data import page_data
from kvfold.report.page_sections import TITLES, titles
from kvfold.report.page_words import percent
from kvfold.report.summary import Place, Summary, line_of, row_json, summarize

MIXED = (*POLICIES[:4], *RETRIEVERS)
OVERALL = Place(None, 4096, False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evidence, Summary, str]:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, policies=MIXED, count=8, lengths=(4096,), tasks=("niah_multikey_2", "qa_1"))
    evidence = gather([folder])
    summary = summarize(evidence)
    return evidence, summary, build_page(evidence, summary)


def without_reads(folder: Path) -> None:
    """Make a run one that was written before reads were measured."""
    for path in (folder / "records").rglob("*.json"):
        plain = json.loads(path.read_text("utf-8"))
        for result in plain["results"]:
            del result["bytes_read"], result["rows_scored"]
        path.write_text(json.dumps(plain), "utf-8")


def test_rows_hold_what_was_read(report: tuple[Evidence, Summary, str]) -> None:
    rows = {row.policy: row for row in report[1].rows[OVERALL]}
    assert report[1].reads_less
    for policy, row in rows.items():
        read = read_of(policy)
        assert row.retrieves == (read is not None)
        assert row.bytes_read == pytest.approx(row.rows_read if read is None else read)
        assert {"bytes_read", "rows_scored", "front_read"} <= row_json(row).keys()
    assert rows["refinekv(tau=0.5)"].share > 1


def test_the_front_of_reading_is_what_nothing_beats(report: tuple[Evidence, Summary, str]) -> None:
    rows = report[1].rows[OVERALL]
    for row in rows:
        better = [o for o in rows if o.bytes_read <= row.bytes_read and o.mean >= row.mean and o is not row]
        assert row.front_read == all((o.bytes_read, o.mean) == (row.bytes_read, row.mean) for o in better)
    assert any(row.front_read and not row.front for row in rows), "reading little is what holding all is for"


def test_the_section_stands_after_the_first_front(report: tuple[Evidence, Summary, str]) -> None:
    elements = Elements(report[2]).found
    expected = titles(report[1])
    assert list(expected) == ["short", "bytes", "read", *list(TITLES)[2:]]
    assert [a["id"] for name, a in elements if name == "section"] == list(expected)
    assert [a["href"] for name, a in elements if name == "a" and a.get("href") in {f"#{key}" for key in expected}] == [
        f"#{key}" for key in expected
    ]
    assert 'id="read-title">Score against reading</h2>' in report[2]
    assert 'id="plot-read"' in report[2]
    assert "reads, for each token that it decodes, summaries of clusters" in report[2]


def test_the_figure_marks_its_own_front(report: tuple[Evidence, Summary, str]) -> None:
    (view,) = (v for key, v in page_data(*report[:2])["views"].items() if key.startswith("|"))
    assert view["read"]["layout"]["xaxis"]["title"]["text"] == AXES["read"]
    rows = report[1].rows[OVERALL]
    drawn = lines(rows, "read")
    assert list(drawn) == ["manifoldkv", "refinekv", "quest", "snapkv + refinekv"]
    assert [row.policy for row in drawn["refinekv"]] == list(RETRIEVERS[:3]), "in order of what is read"
    for trace in view["read"]["data"][:-1]:
        line = drawn[trace["name"]]
        assert trace["x"] == [cost_of(row, "read") for row in line]
        filled = ["surface" not in colour for colour in trace["marker"]["color"]]
        assert filled == [row.front_read for row in line]
    (dense,) = view["read"]["data"][-1]["x"]
    assert dense == 100
    assert "of dense's bytes per token" in view["read"]["data"][1]["text"][0]
    best = next(row for row in rows if row.front_read and row.retrieves)
    assert f"{best.policy} scores {best.mean:.3f} at {percent(best.bytes_read)} of the bytes read" in view["words_read"]
    assert "bytes read" not in view["words"]


def test_tables_hold_rows_and_bytes_read(report: tuple[Evidence, Summary, str]) -> None:
    cells = Elements(report[2]).cells
    heads = cells.index("Bytes held")
    assert cells[heads : heads + 4] == ["Bytes held", "Factor", "Rows read", "Bytes read"]
    (row,) = (row for row in report[1].rows[OVERALL] if row.policy == RETRIEVERS[0])
    at = cells.index(row.policy, heads)
    assert cells[at + 8 : at + 10] == [percent(row.rows_read), percent(row.bytes_read)]


def test_in_short_names_the_least_reading_and_calls_no_retriever_compressed(tmp_path: Path) -> None:
    write_run(tmp_path, policies=("dense", RETRIEVERS[1]), count=8, lengths=(4096,), tasks=("qa_1",))
    evidence = gather([tmp_path])
    summary = summarize(evidence)
    page = build_page(evidence, summary)
    (_, row) = summary.rows[OVERALL]
    said = f"</b><code>{row.policy}</code> reads {percent(row.bytes_read)} of dense\u2019s bytes per token"
    assert (said in page) == (row.outcome != "worse")
    assert f"<code>{row.policy}</code> reads" in page
    assert "every compressed policy" not in page
    assert f"<code>{row.policy}</code> holds" not in page


@pytest.mark.parametrize("policies", [POLICIES, MIXED], ids=["none reads by query", "not measured"])
def test_nothing_is_shown_where_nothing_was_measured(policies: tuple[str, ...], tmp_path: Path) -> None:
    write_run(tmp_path / "run", policies=policies, count=2, lengths=(4096,), tasks=("qa_1",))
    if policies == MIXED:
        without_reads(tmp_path / "run")
    evidence = gather([tmp_path / "run"])
    summary = summarize(evidence)
    page = build_page(evidence, summary)
    assert not summary.reads_less
    assert titles(summary) == TITLES
    for absent in ('id="read"', 'href="#read"', 'id="plot-read"', "Rows read", '"read":'):
        assert absent not in page
    assert not any("read" in path.name for path in write_pngs(evidence, summary, tmp_path / "figures"))


def test_a_policy_without_reads_is_in_no_line_of_the_front(tmp_path: Path) -> None:
    write_run(tmp_path / "a", policies=POLICIES[:2], count=4, lengths=(4096,))
    without_reads(tmp_path / "a")
    write_run(tmp_path / "b", policies=("dense", *RETRIEVERS), count=4, lengths=(4096,))
    evidence = gather([tmp_path / "a", tmp_path / "b"])
    summary = summarize(evidence)
    rows = {row.policy: row for row in summary.rows[OVERALL]}
    assert rows[POLICIES[1]].bytes_read is None
    assert not rows[POLICIES[1]].front_read
    assert POLICIES[1] not in lines(list(rows.values()), "read")
    assert "refinekv" in lines(list(rows.values()), "read")
    build_page(evidence, summary)


def test_pictures_have_the_front_too(report: tuple[Evidence, Summary, str], tmp_path: Path) -> None:
    names = [path.name for path in write_pngs(*report[:2], tmp_path)]
    assert names[:2] == ["score-bytes-4096-query-agnostic.png", "score-read-4096-query-agnostic.png"]
    assert (tmp_path / names[1]).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("refinekv(tau=0.5)", ("refinekv", "refinekv", "")),
        ("refinekv", ("refinekv", "refinekv", "")),
        ("refinekv(cluster=8, tau=0.5)", ("refinekv(cluster=8)", "refinekv", "")),
        ("refinekv(epsilon=0.1)", ("refinekv(epsilon=\u2026)", "refinekv", "")),
        ("refinekv(read=10%)", ("refinekv(read=\u2026)", "refinekv", "")),
        ("quest(read=0.1, page=8)", ("quest(page=8)", "quest", "")),
        ("doublep(p1=0.8, p2=0.5)", ("doublep(p1=0.8)", "doublep", "")),
        (
            "snapkv(keep=0.5, allocator=ada) + refinekv(tau=0.1)",
            ("snapkv(allocator=ada) + refinekv", "snapkv + refinekv", "ada"),
        ),
        ("criticalkv(keep=0.5, epsilon=0.1)", ("criticalkv(epsilon=0.1)", "criticalkv", "")),
    ],
)
def test_lines_join_knobs_and_never_two_of_them(policy: str, line: Any) -> None:
    assert line_of(policy) == line
