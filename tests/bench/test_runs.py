"""Benchmarks of a tiny shape on a CPU: cells, records and going on with them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.bench import DecodeSettings, Folder, KernelSettings, run_decode, run_kernels
from kvfold.bench import decode as decode_module
from kvfold.bench.models import device_of, geometry_of, make_model
from kvfold.bench.record import SCHEMA, read_record, write_whole
from kvfold.core.errors import ConfigError, DataError, KvfoldError

RAGGED, READS = "knorm(keep=0.5, allocator=ada)", "refinekv"
DECODE = DecodeSettings(
    shape="tiny",
    policies=(RAGGED, READS),
    contexts=(300,),
    batches=(1, 3),
    dtype="float32",
    device="cpu",
    stock=True,
    rate=0.2,
    steps=4,
    stretches=2,
    warm_up=1,
)
KERNELS = KernelSettings(
    shape="tiny", policies=(RAGGED, READS), contexts=(300,), batches=(3,), dtype="float32", device="cpu", stretches=2
)


def test_decode_measures_every_cell() -> None:
    seen: list[dict[str, Any]] = []
    told: list[tuple[int, int, str]] = []
    record = run_decode(DECODE, on_cell=seen.append, progress=lambda *state: told.append(state))
    assert record.cells == seen
    assert [(cell["method"], cell["batch"]) for cell in seen] == [
        (method, batch) for batch in (1, 3) for method in ("dense", RAGGED, READS, "floor", "stock")
    ]
    assert told[-1] == (10, 10, "")
    for cell in seen:
        assert "error" not in cell, cell
        assert len(cell["seconds"]) == cell["tpot"]["count"] == 2
        assert min(cell["seconds"]) > 0
        assert cell["nbytes"] > 0
        assert not cell["is_captured"]
    ragged, reads, floor = seen[1], seen[2], seen[3]
    assert ragged["rows_held"] == 150
    assert ragged["longest_over_mean"] > 1.3
    assert ragged["nbytes"] < 0.7 * seen[0]["nbytes"]
    assert reads["rate"] == pytest.approx(0.2, abs=0.08)
    assert reads["rows_read"] < 0.5
    assert reads["nbytes"] > seen[0]["nbytes"]
    assert floor["rows_held"] == 256


def test_kernels_measure_every_cell() -> None:
    record = run_kernels(KERNELS)
    assert [cell["method"] for cell in record.cells] == ["sdpa auto", "dense", "dense, ragged", RAGGED, READS]
    assert not [cell for cell in record.cells if "error" in cell]
    dense, ragged, evicts, reads = record.cells[1:]
    assert dense["rows_held"] == ragged["rows_held"] == 300
    assert ragged["longest_over_mean"] == pytest.approx(2.0, abs=0.01)
    assert evicts["row_nbytes"] == dense["row_nbytes"] / 2 == 3 * 2 * 150 * 2 * 16 * 4
    assert 0 < reads["rows_read"] <= 1
    assert dense["geometry"] == {"q_heads": 4, "kv_heads": 2, "head_dim": 16}


def test_a_record_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(DECODE, policies=(RAGGED,), batches=(1,), stock=False)
    first = run_decode(small, Folder(tmp_path))
    before = json.loads((tmp_path / "decode.json").read_text())
    assert before["schema_version"] == 1
    assert before["settings"]["shape"] == "tiny"
    assert before["settings"]["rows"].startswith("random")
    assert before["environment"]["torch"] == torch.__version__
    assert before["cells"] == first.cells
    measured: list[str] = []
    real = decode_module.Bench.start

    def spy(self: decode_module.Bench, method: str, context: int, batch: int) -> decode_module.Running:
        measured.append(method)
        return real(self, method, context, batch)

    monkeypatch.setattr(decode_module.Bench, "start", spy)
    more = run_decode(dataclasses.replace(small, policies=(RAGGED, READS)), Folder(tmp_path))
    assert measured == [READS]
    assert [cell for cell in more.cells if cell["method"] != READS] == first.cells
    assert list(tmp_path.iterdir()) == [tmp_path / "decode.json"]
    for name, value in (("steps", 5), ("shape", "smollm2-135m"), ("rate", None)):
        with pytest.raises(DataError, match=f"{name}="):
            run_decode(dataclasses.replace(small, **{name: value}), Folder(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contexts": ()}, "--context"),
        ({"batches": (0,)}, "--batch"),
        ({"stretches": 0}, "--stretches"),
        ({"longest": 0.5}, "--longest"),
        ({"longest": float("nan")}, "--longest must be a number of at least 1, got nan; give longest over mean"),
        ({"longest": float("inf")}, "--longest must be"),
        ({"longest": "2"}, "--longest must be"),
        ({"contexts": 300}, "--context must be whole numbers of at least 1, got 300"),
        ({"contexts": (2.5,)}, "--context must be"),
        ({"contexts": (float("nan"),)}, "--context must be"),
        ({"batches": ("1",)}, "--batch must be"),
        ({"stretches": None}, "--stretches must be"),
        ({"seed": 10**30}, "--seed must be a whole number of 64 bits"),
        ({"seed": 1.5}, "--seed must be"),
        ({"policies": "refinekv"}, "--policy must be texts in a tuple, got 'refinekv'"),
        ({"policies": (), "rate": float("nan")}, "--rate must be above 0 and below 1, got nan"),
        ({"rate": "0.1"}, "--rate must be"),
        ({"shape": None}, "--shape must be text, got None"),
        ({"dtype": []}, "--dtype"),
        ({"device": "meta"}, "--device must be auto or a device of this machine, got 'meta'"),
        ({"rows_from": 3}, "MODEL must be"),
        ({"dtype": "int3"}, "--dtype"),
        ({"rate": 2.0}, "--rate"),
        ({"policies": ("dense",)}, "--policy"),
        ({"policies": ("manifoldvk",)}, "manifoldkv"),
        ({"device": "cuda:77"}, "--device"),
        ({"shape": "lama-3.1-8b"}, "llama-3.1-8b"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(change: dict[str, Any], named: str) -> None:
    for run, settings in ((run_decode, DECODE), (run_kernels, KERNELS)):
        with pytest.raises(KvfoldError, match=named):
            run(dataclasses.replace(settings, **{"rate": 0.1, **change}))  # type: ignore[operator,arg-type]
    for name in ("steps", "warm_up"):
        with pytest.raises(ConfigError, match="at least 1"):
            run_decode(dataclasses.replace(DECODE, **{name: 0}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--repeats"):
        run_kernels(dataclasses.replace(KERNELS, repeats=0))


def test_models_of_a_shape() -> None:
    model, weights = make_model("tiny", tokens=5000, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert weights == "random"
    assert model.config.max_position_embeddings == 5000
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    stated = type(model)(model.config)
    for name, buffer in stated.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert geometry_of("qwen2.5-7b").kv_heads == 4
    assert geometry_of("llama-3.2-3b").head_dim == 128
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(KvfoldError):
        make_model("no/such/model", tokens=10, device=torch.device("cpu"), dtype=torch.float32)


def test_a_tied_head_stays_tied() -> None:
    from kvfold.hf.synthetic import llama_config, random_model

    config = llama_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.detach().std() == pytest.approx(0.02, rel=0.1)


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    with pytest.raises(DataError, match="cannot be read"):
        read_record(file, "decode")
    file.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_record(file, "decode")
    for text in ("[]", '{"schema_version": 99}'):
        file.write_text(text)
        with pytest.raises(DataError, match="schema version"):
            read_record(file, "decode")
    whole = {"schema_version": SCHEMA, "kind": "bench decode", "settings": {}, "environment": {}, "cells": []}
    file.write_text(json.dumps(whole))
    assert read_record(file, "decode") == whole
    with pytest.raises(DataError, match=r"must be a record of kvfold bench rate, got 'bench decode'; name another"):
        read_record(file, "rate")
    for name, value in (("cells", 3), ("cells", [3]), ("settings", None), ("environment", [])):
        file.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(DataError, match="is damaged: it must hold settings, environment and cells"):
            read_record(file, "decode")
    with pytest.raises(DataError, match="cannot be written"):
        run_decode(DECODE, Folder(tmp_path / ("a" * 300)))
    with pytest.raises(DataError, match="cannot be written"):
        write_whole(file / "below.json", "")


def test_no_terminal_package_is_needed() -> None:
    hidden = ("typer", "rich", "pydantic", "plotly", "matplotlib")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); import kvfold.bench"
    subprocess.run([sys.executable, "-c", code], check=True)
