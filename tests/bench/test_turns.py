"""Turns of a place: who is measured together, what fails, what is tried again, and what kvpress leaves behind."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.bench import DecodeSettings, Folder, KernelSettings, run_decode, run_kernels
from kvfold.bench import decode as decode_module
from kvfold.bench.timing import told
from kvfold.core.errors import ConfigError
from kvfold.hf.press import check_press

EVICTS = "knorm(keep=0.5)"
SMALL = DecodeSettings(
    shape="tiny",
    policies=(EVICTS,),
    contexts=(200,),
    dtype="float32",
    device="cpu",
    steps=3,
    stretches=3,
    warm_up=1,
)
FULL = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139 GiB"
Start = Callable[[decode_module.Bench, str, int, int], decode_module.Running]


def patched(patch: pytest.MonkeyPatch, change: Callable[[Start], Start]) -> None:
    patch.setattr(decode_module.Bench, "start", change(decode_module.Bench.start))


def test_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def noting(real: Start) -> Start:
        def start(self: decode_module.Bench, method: str, context: int, batch: int) -> decode_module.Running:
            found = real(self, method, context, batch)
            own = found.stretch
            found.stretch = lambda: turns.append(method) or own()  # type: ignore[func-returns-value]
            return found

        return start

    patched(monkeypatch, noting)
    record = run_decode(dataclasses.replace(SMALL, stock=True))
    methods = ["dense", EVICTS, "floor", "stock"]
    assert turns == methods * 3
    assert [cell["in_turns_with"] for cell in record.cells] == [methods] * 4


def test_what_does_not_fit_beside_the_others_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def crowded(real: Start) -> Start:
        def start(self: decode_module.Bench, method: str, context: int, batch: int) -> decode_module.Running:
            tried.append(method)
            if method == EVICTS and tried.count(EVICTS) == 1:
                raise torch.OutOfMemoryError(FULL)
            return real(self, method, context, batch)

        return start

    patched(monkeypatch, crowded)
    record = run_decode(SMALL)
    found = {cell["method"]: cell["in_turns_with"] for cell in record.cells}
    assert found == {"dense": ["dense", "floor"], "floor": ["dense", "floor"], EVICTS: [EVICTS]}


def test_a_stretch_that_fails_costs_its_own_cell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(real: Start) -> Start:
        def start(self: decode_module.Bench, method: str, context: int, batch: int) -> decode_module.Running:
            found = real(self, method, context, batch)
            if method == EVICTS:
                found.stretch = lambda: _raise(RuntimeError("no kernel image\nand more"))
            return found

        return start

    patched(monkeypatch, broken)
    dense, evicts, floor = sorted(
        run_decode(SMALL).cells, key=lambda cell: ["dense", EVICTS, "floor"].index(cell["method"])
    )
    assert evicts == {"method": EVICTS, "context": 200, "batch": 1, "error": "no kernel image"}
    assert dense["tpot"]["count"] == floor["tpot"]["count"] == 3


def _raise(error: Exception) -> float:
    raise error


def test_what_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Start) -> Start:
        return lambda *_: _raise(torch.OutOfMemoryError(FULL))  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patched(patch, full)
        failed = run_decode(SMALL, Folder(tmp_path))
    assert {cell["error"] for cell in failed.cells} == {"out of memory: 1.50 GiB more were asked for"}
    assert {cell["asked_nbytes"] for cell in failed.cells} == {3 << 29}
    record = run_decode(SMALL, Folder(tmp_path))
    assert [cell["method"] for cell in record.cells] == ["dense", EVICTS, "floor"]
    assert not [cell for cell in record.cells if "error" in cell]


def test_what_an_engine_cannot_serve_is_told() -> None:
    for policy in ("knorm(keep=64, every=8)",):
        record = run_decode(dataclasses.replace(SMALL, policies=(policy,)))
        found = {cell["method"]: cell for cell in record.cells}
        assert "every" in found[policy]["error"]
        assert "tpot" in found["dense"]


def test_errors_in_words() -> None:
    assert told(torch.OutOfMemoryError("no")) == {"error": "out of memory"}
    assert told(torch.OutOfMemoryError(FULL.replace("1.50 GiB", "20.00 MiB")))["asked_nbytes"] == 20 << 20
    assert told(RuntimeError("")) == {"error": "RuntimeError"}


# kvpress ------------------------------------------------------------------------------------------------------------

PRESSES = ("SnapKVPress(compression_ratio=0.75)", "AdaKVPress(press=SnapKVPress(compression_ratio=0.5))")


@pytest.mark.usefixtures("kvpress")
def test_kvpress_takes_turns_with_the_others() -> None:
    record = run_decode(dataclasses.replace(SMALL, batches=(2,), policies=(), presses=(PRESSES[0],), stock=True))
    found = {cell["method"]: cell for cell in record.cells}
    pressed, stock = found[f"kvpress {PRESSES[0]}"], found["stock"]
    assert pressed["rows_held"] == 50
    assert pressed["nbytes"] == stock["nbytes"] / 4
    assert pressed["in_turns_with"] == ["dense", "floor", "stock", f"kvpress {PRESSES[0]}"]


@pytest.mark.usefixtures("kvpress")
@pytest.mark.parametrize(
    ("press", "named"),
    [
        (PRESSES[1], None),
        ("KnormPress(compression_ratio=0.5)", "AdaKVPress, SnapKVPress"),
        ("SnapKVPress(ratio=0.5)", "SnapKVPress cannot be made"),
        ("SnapKVPress(compression_ratio=3)", "SnapKVPress cannot be made"),
    ],
)
def test_presses_are_made_of_their_text(press: str, named: str | None) -> None:
    record = run_decode(dataclasses.replace(SMALL, policies=(), presses=(press,)))
    cell = record.cells[-1] if "error" not in record.cells[0] else record.cells[0]
    assert cell["method"] == f"kvpress {press}"
    assert ("error" in cell) == (named is not None)
    assert named is None or named in cell["error"]


@pytest.mark.usefixtures("kvpress")
def test_hidden_rows_are_hidden_from_one_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.hf.synthetic import StockRun

    seen: list[tuple[str, object]] = []
    real = StockRun.arrivals

    def spy(self: StockRun, new_tokens: int) -> list[float]:
        module: Any = self.model.model.layers[0].self_attn  # type: ignore[union-attr]
        seen.append((type(self).__name__, getattr(module, "masked_key_indices", None)))
        return real(self, new_tokens)

    monkeypatch.setattr(StockRun, "arrivals", spy)
    run_decode(dataclasses.replace(SMALL, policies=(), presses=(PRESSES[1],), stock=True))
    assert set(seen) == {("StockRun", None), ("PressedRun", (0,))}


def test_without_kvpress_its_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    found = {cell["method"]: cell for cell in run_decode(dataclasses.replace(SMALL, presses=PRESSES[:1])).cells}
    assert "pip install kvpress" in found[f"kvpress {PRESSES[0]}"]["error"]
    assert "tpot" in found["dense"]


@pytest.mark.parametrize("text", ["snapkv", "SnapKVPress(compression_ratio=0.5) + KnormPress", "(", ""])
def test_what_is_no_press_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        check_press(text)
    with pytest.raises(ConfigError):
        run_decode(dataclasses.replace(SMALL, presses=(text,)))


def test_attention_may_be_wrapped_by_others() -> None:
    """Kvpress wraps what is registered, and then passes the dropout by place."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import kvfold
    from tests.helpers import tiny

    model = tiny.ours("llama")
    before = kvfold.Engine(model, "dense").generate(tiny.ids(20), 4)[0].ids
    name = str(model.config._attn_implementation)
    own = ALL_ATTENTION_FUNCTIONS[name]

    def wrapped(module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float, **more: Any) -> Any:
        return own(module, q, k, v, mask, dropout, **more)

    AttentionInterface.register(name, wrapped)
    try:
        assert kvfold.Engine(model, "dense").generate(tiny.ids(20), 4)[0].ids == before
        assert model(tiny.ids(5)).logits.isfinite().all()
    finally:
        AttentionInterface.register(name, own)


def test_kernels_too_say_what_failed_and_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.bench import kernels as kernels_module

    settings = KernelSettings(
        shape="tiny", contexts=(100,), dtype="float32", device="cpu", stretches=1, policies=("knorm(keep=0.5)",)
    )
    with monkeypatch.context() as patch:
        patch.setattr(kernels_module, "per_call", lambda *_, **__: _raise(torch.OutOfMemoryError(FULL)))
        failed = run_kernels(settings, Folder(tmp_path))
    assert {cell["asked_nbytes"] for cell in failed.cells} == {3 << 29}
    again = run_kernels(settings, Folder(tmp_path))
    assert len(again.cells) == len(failed.cells)
    assert not [cell for cell in again.cells if "error" in cell]
