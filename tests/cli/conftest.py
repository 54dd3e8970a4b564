"""Tiny random models with tokenizers of bytes or of words, saved to folders as a user would have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvfold.cli.app import app

CONTEXT = 512
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([END, "<|user|>", "<|assistant|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
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


def words(count: int, seed: int = 3) -> str:
    """A prompt for :func:`save_words`."""
    return " ".join(f"w{int(n)}" for n in tiny.ids(count, seed=seed)[0])


def save_words(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a model whose answers do not repeat themselves, with one word per token: equal words are equal tokens."""
    core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(tiny.VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    tiny.build(family, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("words"))


Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    def run(*arguments: object, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def refused(result: Result) -> str:
    """Assert that the command failed with one line on stderr and nothing on stdout; return the line."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvfold: ")
    return line.removeprefix("kvfold: ")


def last_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document
