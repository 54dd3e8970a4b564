"""No figure is cut off, in a narrow terminal and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.runs import RETRIEVERS, write_run

from kvfold.cli._eval_table import show
from kvfold.report.merge import gather
from kvfold.report.summary import Summary, summarize

from .conftest import Invoke

LONG = "snapkv(keep=0.5, allocator=ada, obs_window=16, kernel_size=3)"


def run(folder: Path, count: int) -> Summary:
    policies = ("dense", "manifoldkv(keep=0.25, allocator=ada)", *RETRIEVERS[:1])
    write_run(folder, policies=policies, tasks=("vt",), lengths=(4096,), count=count, timed=True)
    return summarize(gather([folder]))


@pytest.mark.parametrize("columns", [None, 80])
def test_a_table_of_scores_keeps_its_intervals_and_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    summary = run(tmp_path / "run", 8)
    show(summary)
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for row in next(iter(summary.rows.values())):
        assert f"{row.low:.3f} to {row.high:.3f}" in shown
    assert shown.count(" ms\n") + shown.count(" ms ") == 6
    assert "distinguishable" in shown
    assert columns is None or max(map(len, shown.splitlines())) <= columns


def test_few_samples_are_said_to_be_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run(tmp_path / "run", 2))
    shown = capsys.readouterr().out
    assert shown.count("(few samples)") == shown.count("distinguishable") == 2


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("command", [("plan", "llama-3.1-8b", "--policies", LONG), ("methods",)])
def test_a_narrow_terminal_folds(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert "\N{HORIZONTAL ELLIPSIS}" not in invoke(*command).stdout


def test_a_file_has_one_line_per_row(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    (line,) = [
        line for line in invoke("plan", "llama-3.1-8b", "--policies", LONG).stdout.splitlines() if "snap" in line
    ]
    assert LONG in line
    assert "GiB" in line
