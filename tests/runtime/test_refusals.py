"""What an engine cannot do is said in one line that names the argument, the rule, the value and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.core.errors import ConfigError, KvfoldError, UnsupportedError
from tests.cli.conftest import byte_tokenizer
from tests.helpers import tiny
from tests.runtime.helpers import engine, prompts


def refused(kind: type[KvfoldError], words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be"),
        ({"temperature": -0.1}, r"temperature must be 0, or from 1e-06 to 1000, got -0.1; 0 takes the likeliest"),
        ({"temperature": "hot"}, "temperature must be 0, or from .*, got 'hot'"),
        ({"temperature": 1e40}, "temperature must be 0, or from .*, got 1e.40"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"temperature": 1e-40}, "temperature must be"),
        ({"seed": 10**30}, "seed must be a whole number of 64 bits, got 10*; give e.g. 0"),
        ({"seed": -(2**63) - 1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": True}, "top_k must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 1e-06 to 1000, got 0"),
        ({"repetition_penalty": 1e40}, "repetition_penalty must be from 1e-06 to 1000, got 1e.40; give 1 for none"),
        ({"stop": None}, "stop must be strings that are not empty, and token ids, got None"),
        ({"stop": b"end"}, "stop must be strings"),
        ({"stop": [-1]}, "stop must be strings"),
        ({"stop": [10**30]}, "stop must be strings"),
        ({"questions": [10**30]}, "questions must be token ids of the model"),
        ({"stop": [None]}, "stop must be strings that are not empty, and token ids, got None"),
        ({"stop": [""]}, "stop must be strings that are not empty"),
        ({"stop": [1.5]}, "stop must be"),
        ({"stop": ["word"]}, "stop must be token ids where there is no tokenizer, got 'word'"),
        ({"stop": list(range(65))}, "stop must be at most 64 tokens, got 65"),
    ],
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    refused(ConfigError, words, engine().generate, prompts()[0], **settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "prompts must be text, token ids, or a sequence of either"),
        (None, "prompts must be"),
        (3, "prompts must be"),
        ([[1, 2], []], "at least one token each"),
        ("text", "prompts must be token ids where there is no tokenizer, got 'text'"),
        ([[1, "a"]], "prompts must be text or token ids, got 'list'"),
        (torch.ones(1, 3), "prompts must be text or token ids, got 'a tensor torch.float32"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token each"),
        (torch.ones(3, dtype=torch.complex64), "prompts must be text or token ids, got 'a tensor torch.complex64"),
        ([10**30], "prompts must be token ids of the model, got 10*; use the model's own tokenizer"),
        (b"text", "prompts must be text or token ids, got 'bytes'"),
        ([b"text"], "prompts must be text or token ids, got 'bytes'"),
        ([tiny.VOCAB], f"prompts must be token ids of the model, 0 to {tiny.VOCAB - 1}, got {tiny.VOCAB}"),
        ([[3]] * 5, "prompts must be at most max_batch=4, got 5"),
        ([3] * 8190, r"a prompt must be at most max_tokens=8192 tokens with its answer, got '8190 \+ 64'"),
    ],
)
def test_prompts(given: Any, words: str) -> None:
    refused(ConfigError, words, engine().generate, given)


def test_empty_text() -> None:
    made = engine(tokenizer=byte_tokenizer())
    refused(ConfigError, "at least one token", made.generate, "")


def test_text_that_is_half_a_character() -> None:
    made = engine(tokenizer=byte_tokenizer())
    refused(ConfigError, "prompts must be text that can be encoded, got .*ud800", made.generate, "a\ud800b")


def test_a_mass_below_every_number_of_float32() -> None:
    made = engine()
    found = [made.generate(prompts()[0], 8, temperature=1, top_p=share, seed=3)[0].ids for share in (1e-20, 1e-300)]
    assert found[0] == found[1] == made.generate(prompts()[0], 8)[0].ids


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be a whole number of at least 1, got 0"),
        ({"prompt_tokens": "a"}, "prompt_tokens must be"),
        ({"prompt_tokens": [8, 2.5]}, "prompt_tokens must be a whole number of at least 1, got 2.5"),
        ({"prompt_tokens": 10**30}, "a prompt must be at most max_tokens=8192 tokens"),
        ({"prompt_tokens": 4, "batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": "a"}, "max_new_tokens must be a whole number"),
    ],
)
def test_sizes_to_warm_up(sizes: dict[str, Any], words: str) -> None:
    refused(ConfigError, words, engine().warm_up, **sizes)


def test_a_limit_of_tokens() -> None:
    made = engine(max_tokens=100)
    assert len(made.generate(prompts(60)[0], 40)[0].ids) == 40
    refused(
        ConfigError, r"at most max_tokens=100 tokens with its answer, got '60 \+ 41'", made.generate, prompts(60), 41
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"max_batch": 0}, ConfigError, "max_batch must be a whole number of at least 1, got 0"),
        ({"max_tokens": 0}, ConfigError, "max_tokens must be"),
        ({"seed": 2**64}, ConfigError, "seed must be a whole number of 64 bits, got 18446744073709551616; give e.g. 0"),
        ({"seed": None}, ConfigError, "seed must be"),
        ({"chunk_size": -1}, ConfigError, "chunk_size must be"),
        ({"graph": "yes"}, ConfigError, "graph must be True, False or 'auto', got 'yes'"),
        ({"fuse_projections": 2}, ConfigError, "fuse_projections must be True, False or 'auto', got 2; leave it out"),
        ({"graph": True}, ConfigError, "graph must be False or 'auto' on cpu, got True; graphs need a CUDA device"),
        ({"policy": "nothing"}, ConfigError, "nothing"),
        (
            {"policy": "knorm(keep=0.5, every=8)"},
            UnsupportedError,
            "cannot evict while it decodes .*without every, or use kvfold.Cache with model.generate",
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], kind: type[KvfoldError], words: str) -> None:
    refused(kind, words, kvfold.Engine, tiny.ours(), **arguments)


def test_models() -> None:
    refused(ConfigError, "model must be a transformers PreTrainedModel", kvfold.Engine, torch.nn.Linear(2, 2))
    refused(UnsupportedError, "attn_temperature_tuning=False", kvfold.Engine, tiny.ours("llama4"))
    refused(UnsupportedError, "caps its attention logits", kvfold.Engine, tiny.ours("gemma2"), "refinekv")


def test_a_refused_call_changes_nothing() -> None:
    made = engine()
    first = made.generate(prompts(), 5)
    before = made.stats()
    refused(ConfigError, "temperature", made.generate, prompts(), 5, temperature=-1)
    assert made.stats() == before
    assert made.generate(prompts(), 5) == first
