from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import CONTEXT, Invoke, last_json, refused, save_words

TEXT = "The lighthouse keeper counted ships, and the ships counted him. " * 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_summary_gives_advice_with_reasons(invoke: Invoke, model_dir: Path, file: Path) -> None:
    result = invoke("inspect", model_dir, "--text", file, "--tokens", 320)
    assert result.exit_code == 0
    for words in (
        "by the rule",
        "288 tokens",
        "proxy",
        "rank",
        "best possible",
        "the first key",
        "of the heads",
        "refinekv(tau=",
    ):
        assert words in result.stdout


def test_json_is_one_document_with_all_of_it(invoke: Invoke, model_dir: Path, file: Path) -> None:
    document = last_json(invoke("inspect", model_dir, "--text", file, "--tokens", 320, "--keep", 0.5, "--json"))
    assert document["advice"]["keep"] == 0.5
    assert document["measurements"]["tokens"] == 288
    assert document["measurements"]["lengths"] == [36, 72, 144, 288]
    assert [layer["layer"] for layer in document["measurements"]["layers"]] == [0, 1]
    assert set(document["measurements"]["layers"][0]["recovery"]["l2"]) == {"0.5", "0.25", "0.1"}
    points = document["measurements"]["reading"]["points"]
    assert [point["tau"] for point in points] == [0.001, 0.003, 0.01, 0.03, 0.1]
    assert document["advice"]["tau"] in [point["tau"] for point in points]


def test_without_a_text_there_is_one_cut_to_the_model(invoke: Invoke, model_dir: Path) -> None:
    document = last_json(invoke("inspect", model_dir, "--json"))
    assert document["text"] == "emma"
    assert document["measurements"]["tokens"] == CONTEXT - 32


def test_a_picture_and_a_page(invoke: Invoke, model_dir: Path, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, page = tmp_path / "out.png", tmp_path / "out.html"
    for path in (picture, page):
        result = invoke("inspect", model_dir, "--text", file, "--tokens", 320, "--out", path)
        assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "data:image/png;base64," in text
    assert "http" not in text.replace("data:image", "")
    assert text.count("<tr>") == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", 10), "at least 288"),
        (("--tokens", CONTEXT + 1), f"at most {CONTEXT}, the model's context"),
        (("--keep", 0.3), "0.25"),
        (("--out", "report.pdf"), ".html"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
        (("--chunk-size", 0), "chunk-size"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, model_dir: Path, options: tuple[object, ...], named: str) -> None:
    assert named in refused(invoke("inspect", model_dir, *options))


def test_a_text_that_is_too_short(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a" * 300, encoding="utf-8")
    assert "at most 300, the text" in refused(invoke("inspect", model_dir, "--text", short, "--tokens", 400))
    short.write_text("a", encoding="utf-8")
    assert "--text must be at least 288 tokens long" in refused(invoke("inspect", model_dir, "--text", short))


def test_a_model_that_is_too_short_is_not_blamed_on_the_text(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path / "short", max_position_embeddings=64)
    assert "context of at least 288 tokens, got 64" in refused(invoke("inspect", folder))


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for out in (tmp_path / "none" / "out.png", tmp_path / "folder.png"):
        assert "--out" in refused(invoke("inspect", "no/such/model", "--out", out))


def test_every_figure_is_a_number(invoke: Invoke, model_dir: Path, file: Path) -> None:
    line = invoke("inspect", model_dir, "--text", file, "--tokens", 320, "--json").stdout.splitlines()[-1]
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
