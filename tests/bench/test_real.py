"""Rows and rates of a real model: a folder with weights and a tokenizer, here a tiny one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.bench import (
    DecodeSettings,
    Folder,
    KernelSettings,
    RateSettings,
    read_rate,
    run_decode,
    run_kernels,
    run_rate,
)
from kvfold.bench.real import RealRows, text_ids
from kvfold.core.errors import ConfigError, DataError, UnsupportedError
from kvfold.hf.load import load_model
from tests.cli.conftest import model_dir  # noqa: F401

DECODE = DecodeSettings(
    shape="tiny",
    contexts=(100,),
    dtype="float32",
    device="cpu",
    steps=2,
    stretches=1,
    warm_up=1,
    policies=("refinekv",),
)
RATE = RateSettings(
    model="",
    policies=("refinekv(cluster=8, tau=0.003)", "quest(read=0.5, dense_layers=0)"),
    contexts=(128, 256),
    steps=8,
)


def test_rows_are_those_of_the_models_cache(model_dir: Path) -> None:  # noqa: F811
    rows = RealRows(str(model_dir), tokens=120, device=torch.device("cpu"), dtype=torch.float32)
    model, tokenizer = load_model(str(model_dir))
    cache = kvfold.Cache(model).prefill(torch.tensor([text_ids(tokenizer)[:120]]))
    rows.check(4, {(8, 8)})
    keys, values = torch.full((300, 8), torch.nan), torch.full((300, 8), torch.nan)
    # the fourth layer and head of a larger shape are the second ones of this model
    rows.write(keys, values, layer=3, row=2, head=3)
    store = cache.views[1].core.lanes[0].store
    for found, pool in ((keys, store.keys), (values, store.values)):
        own = store.run(pool, 0, 1)
        assert torch.allclose(found, torch.cat((own, own, own))[:300], atol=1e-5)
    all_keys, _ = rows.stock(2, 4, 50, 8, torch.float32, 1)
    assert all_keys.shape == (2, 4, 50, 8)
    assert torch.equal(all_keys[1, 3], keys[:50])
    queries = rows.queries(8, 5, 8, torch.float32, 1, 0)
    assert queries.shape == (1, 8, 5, 8)
    # two query heads for each of four KV heads, whose keys are those of two
    assert torch.equal(queries[:, :4], queries[:, 4:])
    assert not torch.equal(queries[:, 0], queries[:, 1])
    assert "120 tokens of prose" in rows.described


def test_another_width_is_refused_by_name(model_dir: Path) -> None:  # noqa: F811
    for run, settings in (
        (run_decode, dataclasses.replace(DECODE, rows_from=str(model_dir))),
        (run_kernels, KernelSettings(shape="tiny", contexts=(50,), device="cpu", rows_from=str(model_dir))),
    ):
        with pytest.raises(ConfigError, match=r"--rows-from must be a model with head_dim 16.*with 8"):
            run(settings)  # type: ignore[operator]


def test_a_model_of_the_same_width_serves(model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """The shape's own folder agrees with itself."""
    given = {"shape": str(model_dir), "rows_from": str(model_dir)}
    record = run_decode(dataclasses.replace(DECODE, stock=True, **given), Folder(tmp_path))  # type: ignore[arg-type]
    assert not [cell for cell in record.cells if "error" in cell]
    assert record.settings["rows"].startswith("of tiny")
    kernels = run_kernels(
        KernelSettings(contexts=(50,), dtype="float32", device="cpu", policies=("refinekv",), stretches=1, **given)  # type: ignore[arg-type]
    )
    assert not [cell for cell in kernels.cells if "error" in cell]
    with pytest.raises(DataError, match="rows"):
        run_decode(dataclasses.replace(DECODE, shape=str(model_dir)), Folder(tmp_path))


def test_rates_are_counted_on_the_model(model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = dataclasses.replace(RATE, model=str(model_dir))
    cells = run_rate(settings, Folder(tmp_path)).cells
    assert [(cell["method"], cell["context"]) for cell in cells] == [
        (method, context) for context in (128, 256) for method in RATE.policies
    ]
    for cell in cells:
        assert 0 < cell["rows_read"] <= 1
        assert (cell["rate"] is None) == cell["method"].startswith("quest")
    assert read_rate(tmp_path, ("refinekv",)) == cells[2]["rate"]
    assert read_rate(tmp_path / "rate.json", RATE.policies) == cells[2]["rate"]
    assert run_rate(settings, Folder(tmp_path)).cells == cells


@pytest.mark.parametrize(("tau", "rate"), [("1e-12", 1.0), ("1e9", 0.0)])
def test_rates_of_everything_and_nothing(model_dir: Path, tau: str, rate: float) -> None:  # noqa: F811
    policy = f"refinekv(cluster=8, tau={tau})"
    settings = dataclasses.replace(RATE, model=str(model_dir), policies=(policy,), contexts=(203,))
    cell = run_rate(settings).cells[0]
    assert cell["rate"] == pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            {"rate": 0},
            r"--rate .*rate.json' must hold a share above 0 and below 1, holds 0\.0 of refinekv; give a number",
        ),
        ({"rate": 1.0}, "must hold a share above 0 and below 1"),
        ({"rate": float("nan")}, "must hold a share above 0 and below 1"),
        ({"rate": "a"}, "is damaged: a cell lacks its method, context or rate"),
        ({"rate": 0.1, "context": None}, "is damaged"),
        ({"rate": 0.1, "method": []}, "is damaged"),
        ({}, "must hold the share of one policy, holds none"),
    ],
)
def test_records_without_a_share(tmp_path: Path, cell: dict[str, object], words: str) -> None:
    file, tables = tmp_path / "rate.json", {"settings": {}, "environment": {}}
    cells = [{"method": "refinekv", "context": 64, "batch": 1, **cell}]
    file.write_text(json.dumps({"schema_version": 1, "kind": "bench rate", **tables, "cells": cells}))
    with pytest.raises(DataError, match=words) as caught:
        read_rate(str(file), ("refinekv",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema_version": 1}', '{"schema_version": 1, "kind": "bench rate"}'])
def test_files_that_are_no_records(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=r"x\.json"):
        read_rate(tmp_path / "x.json", ())


def test_rates_that_cannot_be_meant(model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = dataclasses.replace(RATE, model=str(model_dir))
    for wrong, error in (
        ({"policies": ("knorm(keep=0.5)",)}, UnsupportedError),
        ({"policies": ()}, ConfigError),
        ({"contexts": (600,)}, ConfigError),
        ({"steps": 0}, ConfigError),
    ):
        with pytest.raises(error):
            run_rate(dataclasses.replace(settings, **wrong))  # type: ignore[arg-type]
    run_rate(
        dataclasses.replace(settings, policies=("refinekv", "refinekv(cluster=8, tau=0.01)"), contexts=(64,)),
        Folder(tmp_path),
    )
    with pytest.raises(DataError, match="one policy"):
        read_rate(tmp_path, ("quest(read=0.1)",))
    assert 0 < read_rate(tmp_path, ("refinekv(cluster=8, tau=0.01)",)) < 1
