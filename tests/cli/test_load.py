from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5Config

from kvfold.core.errors import ConfigError, DataError, KvfoldError, UnsupportedError
from kvfold.hf.load import check_context, find_model, load_model, stop_ids

from .conftest import CONTEXT


def test_folder_is_loaded_ready_to_generate(model_dir: Path) -> None:
    model, tokenizer = load_model(str(model_dir))
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == CONTEXT
    assert stop_ids(model, tokenizer) == {tokenizer.eos_token_id}


def test_dtype_is_what_was_asked(model_dir: Path) -> None:
    model, _ = load_model(str(model_dir), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16


def test_float16_weights_become_float32_on_a_cpu(model_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(str(model_dir), dtype="float16", device="cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu")[0].dtype == torch.float32


def test_loading_into_a_pipe_is_silent(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(model_dir))
    assert capsys.readouterr() == ("", "")


def test_what_a_model_argument_names(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "weights.GGUF").touch()
    assert find_model(str(one)).gguf_file == "weights.GGUF"
    assert find_model(str(one / "weights.GGUF")).name == str(one)
    assert find_model("someone/some-model.v2").is_hub


@pytest.mark.parametrize(
    ("files", "said"), [((), "neither"), (("a.gguf", "b.gguf"), "2 GGUF files"), (("a.bin",), "neither")]
)
def test_a_folder_that_holds_no_one_model(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=said):
        find_model(str(tmp_path))


@pytest.mark.parametrize("spec", ["./none", "a/b/c", "model.gguf", "", "-x"])
def test_no_such_path(spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="MODEL"):
        find_model(spec)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="folder instead"):
        find_model(str(tmp_path / "notes.txt"))


def test_damaged_files_are_data_errors(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model at all")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedError, match="t5"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("options", "named"), [({"dtype": "int8"}, "int8"), ({"device": "cuda:99"}, "cuda:99")])
def test_unknown_options(model_dir: Path, options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_model(str(model_dir), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "new", "fine"), [(CONTEXT - 1, 1, True), (CONTEXT, 1, False), (0, 1, False)])
def test_context(model_dir: Path, tokens: int, new: int, fine: bool) -> None:
    model, _ = load_model(str(model_dir))
    if fine:
        check_context(model, tokens, new)
        return
    with pytest.raises(KvfoldError, match="prompt"):
        check_context(model, tokens, new)
