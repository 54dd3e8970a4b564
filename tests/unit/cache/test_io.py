from __future__ import annotations

import builtins
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.cache import io
from kvfold.core.errors import DataError, MissingExtraError
from tests.helpers import caches, laws, policies, tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("io") / "talk.kv"
    kvfold.Cache(tiny.ours(), policies.text("snapkv", 0.4, allocator="ada")).prefill(tiny.ids(40)).save(path)
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        kvfold.Cache.load(path, tiny.ours())
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@settings(laws.few(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(saved: Path, place: float, bit: int, tmp_path: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    (tmp_path / "flipped.kv").write_bytes(content)
    refused(tmp_path / "flipped.kv", "damaged|no saved cache|inconsistent|another model|format|must be")


@pytest.mark.parametrize("bit", range(7))
def test_a_flipped_bit_in_the_header_is_noticed(saved: Path, bit: int, tmp_path: Path) -> None:
    content = saved.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for at in range(8, end, 7):
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        (tmp_path / "flipped.kv").write_bytes(flipped)
        refused(tmp_path / "flipped.kv", ".")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.99])
def test_a_truncated_file(saved: Path, share: float, tmp_path: Path) -> None:
    content = saved.read_bytes()
    (tmp_path / "short.kv").write_bytes(content[: int(share * len(content))])
    refused(tmp_path / "short.kv", "damaged or no saved cache")
    (tmp_path / "short.kv").write_bytes(content[:-1])
    refused(tmp_path / "short.kv", "damaged or no saved cache")
    (tmp_path / "long.kv").write_bytes(content + b"x")
    refused(tmp_path / "long.kv", "damaged or no saved cache")


def test_foreign_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, weights)
    refused(weights, "is a safetensors file but no saved cache; give a file made by Cache.save")
    safetensors.torch.save_file({"w": torch.zeros(3)}, weights, metadata={"format": "pt"})
    refused(weights, "no saved cache")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    refused(text, "damaged or no saved cache")
    (tmp_path / "zip.kv").write_bytes(b"PK\x03\x04" + os.urandom(100))
    refused(tmp_path / "zip.kv", "damaged or no saved cache")


@pytest.mark.parametrize("metadata", ["not json", "[]", "3", "null", "{}"])
def test_a_header_that_is_no_description(metadata: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.kv"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path, metadata={"kvfold": metadata})
    refused(path, "damaged|format")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    refused(tmp_path / "none.kv", "path must be a saved cache, got .*, which is no file")
    refused(tmp_path, "which is no file")


def test_another_version_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "future.kv"
    monkeypatch.setattr(io, "FORMAT", 99)
    io.write(path, {"w": torch.zeros(3)}, {})
    monkeypatch.undo()
    refused(path, rf"has format 99, this version reads {io.FORMAT}; save it again")


def test_another_model(saved: Path) -> None:
    for model in (tiny.ours("qwen3"), tiny.ours("llama", seed=1), tiny.ours("llama", rms_norm_eps=1e-3)):
        with pytest.raises(
            DataError,
            match=r"belongs to another model \(config or weights differ\); load the model that it was saved with",
        ):
            kvfold.Cache.load(saved, model)


def test_another_dtype(saved: Path) -> None:
    with pytest.raises(DataError, match=r"dtype|another model") as caught:
        kvfold.Cache.load(saved, tiny.ours("llama", torch.bfloat16))
    assert "load the model" in str(caught.value)


@pytest.mark.parametrize("target", ["no/such/folder/talk.kv", "."])
def test_a_path_that_cannot_be_written(target: str, tmp_path: Path) -> None:
    cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(5))
    with pytest.raises(DataError, match="path must be writable, got") as caught:
        cache.save(tmp_path / target)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(DataError, match="No space left on device"):
        kvfold.Cache(tiny.ours()).prefill(tiny.ids(5)).save(tmp_path / "talk.kv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["save_file", "fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_write_leaves_the_old_file_whole(
    stage: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.kv"
    kvfold.Cache(tiny.ours()).prefill(tiny.ids(5)).save(path)
    before = path.read_bytes()
    plain = safetensors.torch.save_file

    def interrupt(*args: object, **kwargs: object) -> None:
        if stage == "save_file":
            plain(*args, **kwargs)
        raise error("interrupted")

    monkeypatch.setattr(safetensors.torch if stage == "save_file" else os, stage, interrupt)
    with pytest.raises((error, DataError)):
        kvfold.Cache(tiny.ours()).prefill(tiny.ids(30)).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["talk.kv"]
    assert kvfold.Cache.load(path, tiny.ours()).seen_tokens == (5,)


def test_a_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    for length in (5, 30):
        kvfold.Cache(tiny.ours()).prefill(tiny.ids(length)).save(str(path))
        assert kvfold.Cache.load(str(path), tiny.ours()).seen_tokens == (length,)


def test_an_empty_cache(tmp_path: Path) -> None:
    path = tmp_path / "empty.kv"
    kvfold.Cache(tiny.ours(), policies.text("knorm", 0.5)).save(path)
    loaded = kvfold.Cache.load(path, tiny.ours())
    assert (loaded.seen_tokens, loaded.nbytes) == ((), 0)
    control = kvfold.Cache(tiny.ours(), policies.text("knorm", 0.5)).prefill(tiny.ids(30))
    caches.assert_same_runs(loaded.prefill(tiny.ids(30)), control)


def test_tensors_that_share_storage_and_are_not_contiguous(tmp_path: Path) -> None:
    path, base = tmp_path / "t.kv", torch.arange(12.0).view(3, 4)
    tensors = {
        "a": base,
        "b": base,
        "c": base.T,
        "d": base[1],
        "e": torch.zeros(0, 3),
        "f": torch.tensor([True]),
        "g": base.bfloat16(),
    }
    io.write(path, tensors, {"note": "n"})
    found, header = io.read(path)
    assert header["note"] == "n"
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_facts_that_do_not_fit_the_tensors(saved: Path, tmp_path: Path) -> None:
    tensors, header = io.read(saved)
    path = tmp_path / "odd.kv"
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("keys")}
    damaged = json.loads(json.dumps(header))
    damaged["layers"]["0"]["lanes"][0]["lengths"][0][0] += 5000
    emptied = json.loads(json.dumps(header))
    emptied["layers"] = {}
    for held, facts in ((without, header), (tensors, damaged), (tensors, emptied)):
        io.write(path, held, {k: v for k, v in facts.items() if k not in ("format", "sha256")})
        with pytest.raises(DataError, match="layer 0 of the saved cache is inconsistent") as caught:
            kvfold.Cache.load(path, tiny.ours())
        assert "\n" not in str(caught.value)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: object, **kwargs: object) -> object:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return plain(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"needs safetensors; pip install 'kvfold\[hf\]'"):
        io.write(tmp_path / "t.kv", {}, {})
