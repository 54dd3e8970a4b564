"""What cannot be loaded is told in one line, whatever raised it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfold.core.errors import ConfigError, DataError, KvfoldError
from kvfold.hf.load import device_of, find_model, load_model
from tests.cli.conftest import byte_tokenizer
from tests.helpers import tiny


def refused(kind: type[KvfoldError], words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


def folder(path: Path, config: object = None, weights: bytes = b"hi") -> str:
    given = {"model_type": "llama"} if config is None else config
    (path / "config.json").write_text(given if isinstance(given, str) else json.dumps(given))
    (path / "model.safetensors").write_bytes(weights)
    return str(path)


@pytest.mark.parametrize("weights", [b"", b"hi", (2**40).to_bytes(8, "little") + b"{}      "])
def test_weights_that_are_none(tmp_path: Path, weights: bytes) -> None:
    words = "MODEL .* cannot be loaded: .*header.*; check its files"
    refused(DataError, words, load_model, folder(tmp_path, weights=weights))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("3", "cannot be loaded"),
        ({"model_type": []}, "cannot be loaded"),
        ({"model_type": "llama", "hidden_size": "a"}, "hidden_size.*got str"),
        ({"model_type": "llama", "hidden_size": -4}, "hidden size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "cannot be loaded"),
        ({"model_type": "llama", "torch_dtype": "foo"}, "foo"),
    ],
)
def test_configs_of_wrong_types(tmp_path: Path, config: object, words: str) -> None:
    refused(DataError, words, load_model, folder(tmp_path, config))


@pytest.mark.parametrize("device", ["meta", "CPU", "", None])
def test_devices_that_hold_no_numbers(tmp_path: Path, device: Any) -> None:
    words = "device must be auto or a device of this machine, got .*; try cpu"
    refused(ConfigError, words, load_model, folder(tmp_path), device=device)
    refused(ConfigError, "^--device must be", device_of, device, "--device")


@pytest.mark.parametrize("dtype", [None, [], 3])
def test_dtypes_that_are_no_names(tmp_path: Path, dtype: Any) -> None:
    refused(ConfigError, "dtype must be auto or one of", load_model, folder(tmp_path), dtype=dtype)


@pytest.mark.parametrize("spec", ["a" * 300, "~nobody-of-this-name/model", None, 3])
def test_names_that_no_file_can_have(spec: Any) -> None:
    refused(DataError, "MODEL must be an existing file or folder, or a hub id, got .*check the path", find_model, spec)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    torch_file = pytest.importorskip("safetensors.torch")
    byte_tokenizer().save_pretrained(tmp_path)
    tiny.build("llama").save_pretrained(tmp_path)
    held = torch_file.load_file(tmp_path / "model.safetensors")
    load_model(str(tmp_path))
    name = next(name for name in held if name.endswith("layers.0.self_attn.q_proj.weight"))
    torch_file.save_file(
        {key: one for key, one in held.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    refused(
        DataError,
        f"must hold all weights of LlamaForCausalLM, lacks 1, first '{name}'; check",
        load_model,
        str(tmp_path),
    )
