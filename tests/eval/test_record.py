"""Records: whole or absent, read as written, refused if they are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.eval.helpers import settings

from kvfold.core.errors import DataError
from kvfold.eval.record import PolicyResult, RunFolder, SampleRecord

RESULT = PolicyResult(
    policy="dense", output="ä\n\ud83d\udd11".encode("utf-16", "surrogatepass").decode("utf-16"), score=0.1 + 0.2,
    nbytes=1, dense_nbytes=2, stored_tokens=1 / 3, rows_read=1e-17, ttft_s=0.5, arrivals=((0.5, 1), (1 / 3, 2)),
)  # fmt: skip


def record(**changes: Any) -> SampleRecord:
    plain: dict[str, Any] = {
        "uid": "f" * 16, "task": "t", "length": 64, "index": 0, "query_aware": False, "prompt_tokens": 60,
        "metric": "f1", "answers": ("a", "b"), "facts": {"depth": 0.5, "kind": None, "list": [1, "x"]},
        "results": (RESULT,),
    }  # fmt: skip
    return SampleRecord(**{**plain, **changes})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(settings())
    folder.write(record())
    assert folder.records() == [record()]
    assert folder.settings() == settings()
    folder.open(settings())


def test_records_of_before_reads_were_measured_are_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(record())
    path = folder.record_path("t", 64, False, 0)
    plain = json.loads(path.read_text("utf-8"))
    for name in ("bytes_read", "rows_scored"):
        assert plain["results"][0].pop(name) is None
    path.write_text(json.dumps(plain), "utf-8")
    assert folder.records() == [record()]


def test_records_come_in_order_of_task_length_and_index(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    places = [("a", 4096, 0), ("a", 16384, 2), ("a", 16384, 10), ("b", 512, 0)]
    for task, length, index in reversed(places):
        folder.write(record(task=task, length=length, index=index))
    assert [(one.task, one.length, one.index) for one in folder.records()] == places


@pytest.mark.parametrize("name", ["policies", "seed", "count", "lengths", "mode", "template", "chunk_size"])
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str) -> None:
    other: dict[str, Any] = {
        "policies": ["keydiff(keep=0.5)"], "seed": 1, "count": 4, "lengths": [97], "mode": "alone",
        "template": "chat", "chunk_size": 8,
    }  # fmt: skip
    RunFolder(tmp_path).open(settings())
    with pytest.raises(DataError, match=rf"holds a run with {name}=.* asked for") as refusal:
        RunFolder(tmp_path).open(settings(**{name: other[name]}))
    assert "\n" not in str(refusal.value)
    assert "RunSettings(" not in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: text.replace('"score": 0.30000000000000004', '"score": "high"'), r"damaged: results\.0\.score"),
        (lambda text: text.replace('"uid"', '"uids"'), "damaged: uid"),
        (lambda text: json.dumps({**json.loads(text), "more": 1}), "damaged: more"),
        (lambda text: json.dumps({**json.loads(text), "schema_version": 1}), "schema version 1, this kvfold reads 2"),
        (lambda text: "[]", "schema version None"),
    ],
)
def test_a_record_that_is_not_ours_is_refused(tmp_path: Path, damage: Any, reason: str) -> None:
    folder = RunFolder(tmp_path)
    folder.write(record())
    path = folder.record_path("t", 64, False, 0)
    path.write_text(damage(path.read_text("utf-8")), "utf-8")
    with pytest.raises(DataError, match=reason) as refusal:
        folder.records()
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(record())
    folder.record_path("t", 64, False, 0).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is damaged"):
        folder.records()


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing; give the folder of a run"):
        RunFolder(tmp_path / "none").settings()
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match="holds no run"):
        RunFolder(tmp_path).open(settings())
    with pytest.raises(DataError, match="is a file"):
        RunFolder(tmp_path / "letter.txt").open(settings())


def test_what_a_killed_run_left_behind_does_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "run.json.0123.part").write_text("{")
    folder.open(settings())
    folder.write(record())
    (folder.record_path("t", 64, False, 1).with_suffix(".json.0123.part")).write_text("{")
    assert len(folder.records()) == 1


def test_records_can_be_read_by_whoever_may_read_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write(record())
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert folder.record_path("t", 64, False, 0).stat().st_mode == plain.stat().st_mode


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        RunFolder(tmp_path).write(record())
