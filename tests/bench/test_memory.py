"""Bytes that are foreseen are those that an engine then holds, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kvfold
from kvfold.bench import MemorySettings, run_memory
from kvfold.bench.memory import Sizes
from kvfold.core.errors import ConfigError
from kvfold.hf.cache_size import layer_nbytes
from kvfold.hf.shape import shape_of
from kvfold.runtime import call as call_module
from kvfold.runtime import moving
from kvfold.runtime.filled import begin_filled
from kvfold.runtime.foresee import foresee
from kvfold.runtime.layout import lay_out
from tests.bench.test_filled import POLICIES, filling
from tests.helpers import tiny
from tests.runtime.helpers import engine

SMALL = MemorySettings(
    shape="tiny", policies=("knorm(keep=0.25)", "refinekv"), contexts=(1024,), batches=(1, 3), memory=8 << 20
)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("batch", "context", "new"), [(1, 150, 24), (1, 17, 5), (3, 300, 40), (2, 1, 1), (4, 63, 16)])
@pytest.mark.parametrize("name", POLICIES)
def test_foreseen_bytes_are_held(
    name: str, batch: int, context: int, new: int, coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(POLICIES[name])
    given = filling(made, batch, context)

    def laid_out(*places: Any, **_: Any) -> Any:
        return lay_out(*places, coarse=coarse)

    monkeypatch.setattr(call_module, "lay_out", laid_out)
    for _ in begin_filled(made, given, new).tokens():
        pass
    found = foresee(made, given.held, given.seen, new, coarse=coarse)
    assert found.nbytes == made.nbytes
    assert found.rows == sum(
        plan.row_nbytes * rows
        for plan, layer in zip(made.plans, given.held, strict=True)
        for line in layer
        for rows in line
    )
    assert min(found.room, found.slack, found.summaries) >= 0


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_are_foreseen_too(family: str) -> None:
    made = engine("knorm(keep=0.5)", family=family)
    given = filling(made, 2)
    list(begin_filled(made, given, 8).tokens())
    assert foresee(made, given.held, given.seen, 8).nbytes == made.nbytes


@pytest.mark.parametrize("policy", ["dense", "knorm(keep=0.25)", "knorm(keep=64, chunk=32)", "refinekv(cluster=8)"])
def test_no_more_is_held_while_prompts_are_read(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lengths = engine(policy, chunk_size=48), (203, 203, 203)
    caches: list[kvfold.Cache] = []
    most = 0

    def watch(*_: object) -> None:
        nonlocal most
        most = max(most, made.nbytes + sum(one.nbytes for one in caches if not lent))

    lent = policy == "dense" or policy.startswith("refinekv")
    real_cache, real_move = call_module.Cache, call_module.move

    def cache(*given: Any, **more: Any) -> kvfold.Cache:
        caches.append(real_cache(*given, **more))
        return caches[-1]

    def move(*given: Any) -> bool:
        watch()
        return real_move(*given)

    monkeypatch.setattr(call_module, "Cache", cache)
    monkeypatch.setattr(call_module, "move", move)
    made.generate([tiny.ids(length)[0].tolist() for length in lengths], 8, ignore_eos=True, progress=watch)
    assert call_module.lend is moving.lend
    held = [[[min(203, 64 if "chunk" in policy else 50 if "knorm" in policy else 203)] * 2] * 3 for _ in made.plans]
    read = layer_nbytes(shape_of(tiny.ours("llama").config, ""), made.policy, 203, torch.float32, 48)
    found = foresee(made, held, lengths, 8, read=read)
    assert found.nbytes == made.nbytes
    assert most <= found.peak
    assert found.peak <= 1.35 * max(most, found.nbytes)


def test_cells_add_up() -> None:
    record = run_memory(SMALL)
    assert [(cell["method"], cell["batch"]) for cell in record.cells] == [
        (method, batch) for batch in (1, 3) for method in ("dense", *SMALL.policies)
    ]
    assert record.environment["device"] == "none: computed"
    for cell in record.cells:
        parts = ("rows", "room", "slack", "summaries", "state")
        assert cell["nbytes"] == sum(cell[f"{part}_nbytes"] for part in parts)
        assert cell["peak_nbytes"] >= cell["nbytes"]
        assert cell["fits"] == (cell["max_batch"] >= cell["batch"])
        assert cell["max_batch_held"] >= cell["max_batch"]
    dense, evicts, reads = record.cells[:3]
    assert dense["rows_nbytes"] == dense["dense_nbytes"] == 4 * evicts["rows_nbytes"]
    assert reads["summaries_nbytes"] > 0
    assert evicts["max_batch_held"] > 2 * dense["max_batch"]


def test_limits_are_the_largest_that_fit() -> None:
    sizes = Sizes(SMALL, {text: kvfold.policy(text) for text in SMALL.policies})
    weights = 2 * 156224
    for method in ("dense", *SMALL.policies):
        cell = sizes.cell(method, 1024, 1)
        assert cell["weights_nbytes"] == weights
        for batch, fits in ((cell["max_batch"], True), (cell["max_batch"] + 1, False)):
            assert (weights + sizes.foresee(method, 1024, batch).peak <= SMALL.memory) == fits
        for context, fits in ((cell["max_context"], True), (cell["max_context"] + 1024, False)):
            assert (weights + sizes.foresee(method, context, 1).peak <= SMALL.memory) == fits


def test_nothing_fits_into_nothing() -> None:
    cell = run_memory(dataclasses.replace(SMALL, memory=1, policies=(), batches=(1,))).cells[0]
    assert (cell["fits"], cell["max_batch"], cell["max_context"]) == (False, 0, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contexts": ()}, "--context"),
        ({"memory": 0}, "--memory"),
        ({"longest": 0.5}, "--longest"),
        ({"dtype": "int3"}, "--dtype"),
        ({"policies": ("dense",)}, "--policy"),
    ],
)
def test_a_mistake_is_told(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_memory(dataclasses.replace(SMALL, **change))


def test_what_an_engine_cannot_hold_is_told() -> None:
    record = run_memory(dataclasses.replace(SMALL, policies=("knorm(keep=64, every=8)",), batches=(1,)))
    assert "every" in record.cells[1]["error"]
