"""Prompts that are read: seconds, bytes and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.bench import Folder, PrefillSettings, run_prefill
from kvfold.bench import prefill as prefill_module
from kvfold.core.errors import ConfigError
from kvfold.hf.attention import is_prepared
from kvfold.hf.press import pressed_prefill
from kvfold.hf.synthetic import stock_prefill
from tests.helpers import tiny

CHUNKED, READS = "knorm(keep=64, chunk=64)", "refinekv"
SMALL = PrefillSettings(
    shape="tiny",
    policies=("knorm(keep=0.25)", CHUNKED, READS),
    contexts=(300,),
    chunk_sizes=(64, 512),
    dtype="float32",
    device="cpu",
    stretches=2,
)
ROW = 4 * 2 * 2 * 16 * 4


def test_every_cell_is_measured(tmp_path: Path) -> None:
    record = run_prefill(SMALL, Folder(tmp_path))
    assert [(cell["method"], cell["chunk_size"]) for cell in record.cells] == [
        (method, size) for size in (64, 512) for method in ("stock", "dense", *SMALL.policies)
    ]
    for cell in record.cells:
        assert len(cell["seconds"]) == cell["ttft"]["count"] == 2
        assert cell["tokens_per_second"] == pytest.approx(300 / cell["ttft"]["median"])
        assert cell["peak_nbytes"] is cell["beside_nbytes"] is None
    stock, dense, evicts, chunked, reads = record.cells[:5]
    assert stock["nbytes"] == 300 * ROW
    assert dense["nbytes"] < 1.05 * stock["nbytes"] < reads["nbytes"]
    assert max(evicts["nbytes"], chunked["nbytes"]) < 0.3 * stock["nbytes"]
    again = run_prefill(SMALL, Folder(tmp_path))
    assert again.cells == record.cells


def test_peaks_are_told_beside_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "allocated", lambda _: 1000)
    monkeypatch.setattr(prefill_module, "peak_of", lambda _: 9_000_000)
    for cell in run_prefill(dataclasses.replace(SMALL, chunk_sizes=(64,))).cells:
        assert cell["peak_nbytes"] == 9_000_000 - 1000
        assert cell["beside_nbytes"] == cell["peak_nbytes"] - cell["nbytes"]


def test_what_fails_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    small = dataclasses.replace(SMALL, chunk_sizes=(64,), policies=("knorm(keep=64, every=8)",))
    with monkeypatch.context() as patch:
        patch.setattr(prefill_module, "stock_prefill", full)
        cells = run_prefill(small, Folder(tmp_path)).cells
    assert cells[0]["error"] == "out of memory: 2.00 GiB more were asked for"
    assert "every" in cells[2]["error"]
    again = run_prefill(small, Folder(tmp_path)).cells
    assert sorted("error" in cell for cell in again) == [False, False, True]


@pytest.mark.usefixtures("kvpress")
def test_kvpress_reads_a_prompt_in_one_call_and_leaves_no_mark() -> None:
    presses = ("SnapKVPress(compression_ratio=0.75)", "AdaKVPress(press=SnapKVPress(compression_ratio=0.5))")
    record = run_prefill(dataclasses.replace(SMALL, policies=(), contexts=(100, 200), presses=presses))
    cells = [cell for cell in record.cells if cell["method"].startswith("kvpress ")]
    assert [(cell["method"], cell["context"], cell["chunk_size"]) for cell in cells] == [
        (f"kvpress {text}", context, context) for context in (100, 200) for text in presses
    ]
    assert [cell["nbytes"] for cell in cells] == [25 * ROW, 100 * ROW, 50 * ROW, 200 * ROW]
    assert all(len(cell["seconds"]) == 2 for cell in cells)


@pytest.mark.usefixtures("kvpress")
def test_marks_of_kvpress_are_taken_away() -> None:
    model = tiny.ours("llama")
    pressed_prefill(model, "AdaKVPress(press=SnapKVPress(compression_ratio=0.5))", tiny.ids(50))
    assert not any(getattr(module, "masked_key_indices", None) for module in model.modules())


def test_stock_reads_as_if_alone() -> None:
    model = tiny.ours("llama")
    ids = tiny.ids(50)
    seconds, nbytes = stock_prefill(model, ids, 16)
    assert seconds > 0
    assert nbytes == 50 * sum(2 * 2 * 16 * 4 for _ in range(2))
    assert is_prepared(model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contexts": (0,)}, "--context"),
        ({"chunk_sizes": ()}, "--chunk-size"),
        ({"stretches": 0}, "--stretches"),
        ({"dtype": "int3"}, "--dtype"),
        ({"policies": ("dense",)}, "--policy"),
    ],
)
def test_a_mistake_is_told(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_prefill(dataclasses.replace(SMALL, **change))
