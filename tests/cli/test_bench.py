from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import Invoke, last_json, refused

QUICK = ("--shape", "tiny", "--context", "200", "--dtype", "float32", "--device", "cpu", "--stretches", "2")
RAGGED = "knorm(keep=0.5, allocator=ada)"


def test_decode_shows_a_table_and_writes_a_record(invoke: Invoke, tmp_path: Path) -> None:
    options = (*QUICK, "--policy", RAGGED, "--steps", 4, "--stock", "--out", tmp_path)
    result = invoke("bench", "decode", *options)
    assert result.exit_code == 0, result.stderr
    for words in ("1 x 200 tokens", "dense", "allocator=ada", "floor", "stock", "no graphs", "decode.json"):
        assert words in result.stdout
    record = json.loads((tmp_path / "decode.json").read_text())
    again = last_json(invoke("bench", "decode", *options, "--json"))
    assert again["cells"] == record["cells"]
    assert again["files"] == [str(tmp_path / f"decode.{suffix}") for suffix in ("json", "html", "png")]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert "Time per token" in (tmp_path / "decode.html").read_text()
    assert "steps=4" in refused(invoke("bench", "decode", *options, "--steps", 5))


def test_kernels_show_a_table(invoke: Invoke) -> None:
    result = invoke("bench", "kernels", *QUICK, "--policy", "refinekv", "--rate", 0.2, "--batch", "1,2")
    assert result.exit_code == 0, result.stderr
    for words in ("1 x 200 tokens", "2 x 200 tokens", "sdpa auto", "dense, ragged", "refinekv"):
        assert words in result.stdout
    document = last_json(invoke("bench", "kernels", *QUICK, "--json"))
    assert [cell["method"] for cell in document["cells"]] == ["sdpa auto", "dense", "dense, ragged"]


def test_prefill_shows_a_table(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(
        "bench", "prefill", *QUICK, "--chunk-size", "64,128", "--policy", "knorm(keep=64, chunk=64)", "--out", tmp_path
    )
    assert result.exit_code == 0, result.stderr
    for words in ("1 x 200 tokens, in chunks of 64", "in chunks of 128", "stock", "chunk=64", "beside", "prefill.png"):
        assert words in result.stdout


def test_memory_says_what_fits(invoke: Invoke) -> None:
    options = ("--shape", "llama-3.1-8b", "--context", 32768, "--policy", "knorm(keep=0.25)", "--memory", "80GiB")
    result = invoke("bench", "memory", *options)
    assert result.exit_code == 0, result.stderr
    for words in ("4.00Gi", "batch", "longest", "none: computed", "Computed, not measured"):
        assert words in result.stdout
    document = last_json(invoke("bench", "memory", *options, "--json"))
    assert document["cells"][0]["dense_nbytes"] == 4 << 30
    assert "80GiB" in refused(invoke("bench", "memory", "--memory", "lots"))


def test_a_rate_that_was_measured_is_taken(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    result = invoke(
        "bench", "rate", model_dir, "--policy", "refinekv", "--context", 256, "--steps", 4, "--out", tmp_path
    )
    assert result.exit_code == 0, result.stderr
    rate = json.loads((tmp_path / "rate.json").read_text())["cells"][0]["rate"]
    options = (*QUICK, "--policy", "refinekv", "--steps", 2, "--json")
    if 0 < rate < 1:
        document = last_json(invoke("bench", "decode", *options, "--rate", tmp_path))
        assert document["settings"]["rate"] == rate
    assert "--rate" in refused(invoke("bench", "decode", *options[:-1], "--rate", "lots"))


def test_without_packages_for_figures_the_record_stands(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvfold.report.bench_page", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "kvfold.report.bench_plot", raising=False)
    monkeypatch.delitem(sys.modules, "kvfold.report.bench_page", raising=False)
    result = invoke("bench", "prefill", *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "no page and picture without matplotlib" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["prefill.json"]


@pytest.mark.parametrize("command", ["decode", "kernels"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--context", "3,x"), "--context"),
        (("--context", "0"), "--context"),
        (("--batch", ""), "--batch"),
        (("--shape", "lama-3.1-8b"), "llama-3.1-8b"),
        (("--policy", "dense"), "--policy"),
        (("--policy", "manifoldvk(keep=1)"), "manifoldkv"),
        (("--policy", "quest(read=0.1)", "--rate", "0.1"), "--rate"),
        (("--dtype", "int3"), "--dtype"),
        (("--stretches", "0"), "stretches"),
        (("--out", __file__), "--out"),
        (("--out", f"{__file__}/deep"), "--out must be a folder"),
        (("--seed", str(2**64)), "--seed"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, command: str, arguments: tuple[str, ...], named: str) -> None:
    assert named in refused(invoke("bench", command, *QUICK, *arguments))


def test_help_shows_examples(invoke: Invoke) -> None:
    commands = ("decode", "prefill", "memory", "rate", "kernels")
    for words in (("bench",), *(("bench", command, "--help") for command in commands)):
        assert "Examples" in invoke(*words).stdout
