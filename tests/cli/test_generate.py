from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import policies
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.hf.compat import cache_kwarg

from .conftest import CONTEXT, Invoke, last_json, refused, words

TEXT = "The lighthouse keeper counted ships. " * 6
POLICY = "manifoldkv(keep=0.5, sink_tokens=2, recent_tokens=4)"


def test_answer_goes_to_stdout_and_the_table_to_stderr(invoke: Invoke, model_dir: Path) -> None:
    result = invoke("generate", model_dir, "--prompt", TEXT, "--policy", POLICY, "--max-new-tokens", 5)
    assert result.exit_code == 0
    assert "KV held" in result.stderr
    assert "KV held" not in result.stdout


def test_json_is_the_last_line_and_bytes_are_less(invoke: Invoke, model_dir: Path) -> None:
    options = ("--policy", POLICY, "--max-new-tokens", 5, "--compare-dense", "--json")
    document = last_json(invoke("generate", model_dir, "--prompt", TEXT, *options))
    dense = document["dense"]
    assert document["policy"] == POLICY
    assert document["query_aware"]
    assert 0 < document["nbytes"] < dense["nbytes"]
    assert document["dense_nbytes"] == dense["dense_nbytes"] <= dense["nbytes"]
    assert document["compression_ratio"] == 1 - document["nbytes"] / document["dense_nbytes"]
    assert document["ttft"] > 0
    assert document["fed_tokens"] == dense["fed_tokens"]
    assert 1 <= document["new_tokens"] <= 5


def test_text_is_that_of_stock_generate(invoke: Invoke, model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = tokenizer(TEXT, return_tensors="pt")
    new = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    stock = tokenizer.decode(new, skip_special_tokens=True)
    options = ("--raw", "--max-new-tokens", 8, "--chunk-size", 32, "--json")
    assert last_json(invoke("generate", model_dir, "--prompt", TEXT, *options))["text"] == stock


@pytest.mark.parametrize("way", ["file", "stdin", "prompt"])
def test_where_the_prompt_comes_from(invoke: Invoke, model_dir: Path, tmp_path: Path, way: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    given = {"file": ("--file", file), "stdin": (), "prompt": ("--prompt", TEXT)}[way]
    options = ("--max-new-tokens", 2, "--raw", "--json")
    document = last_json(invoke("generate", model_dir, *given, *options, stdin=TEXT))
    assert document["fed_tokens"] == len(TEXT)
    assert not document["chat_template"]


def test_question_is_not_seen_by_the_policy(invoke: Invoke, model_dir: Path) -> None:
    options = ("--question", "How many ships?", "--policy", POLICY, "--max-new-tokens", 2, "--json")
    document = last_json(invoke("generate", model_dir, "--prompt", TEXT, *options))
    assert not document["query_aware"]
    assert document["chat_template"]


@pytest.mark.parametrize(
    "policy",
    [
        policies.text("snapkv", 0.3, allocator="ada(safeguard=0.25)"),
        policies.text("knorm", 0.4, chunk=16),
        policies.text("knorm", 0.4, every=8),
        policies.RETRIEVERS[0],
    ],
)
def test_the_policy_acts_when_the_prompt_has_ended_as_in_attach(invoke: Invoke, words_dir: Path, policy: str) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(words_dir), AutoModelForCausalLM.from_pretrained(words_dir)
    ids = tokenizer(words(150), return_tensors="pt")
    with kvfold.attach(model, policy):
        found = model.generate(**ids, max_new_tokens=30, do_sample=False)[0, 150:]
    options = ("--policy", policy, "--max-new-tokens", 30, "--chunk-size", 64, "--no-engine", "--json")
    document = last_json(invoke("generate", words_dir, "--prompt", words(150), *options))
    assert document["text"] == tokenizer.decode(found)


@pytest.mark.parametrize("question", ["w5", "w5 w6 w7"])
def test_a_question_is_fed_to_what_was_kept(invoke: Invoke, words_dir: Path, question: str) -> None:
    policy = policies.text("snapkv", 0.3)
    tokenizer, model = AutoTokenizer.from_pretrained(words_dir), AutoModelForCausalLM.from_pretrained(words_dir)
    context, asked = (tokenizer(text, return_tensors="pt").input_ids for text in (words(150), question))
    cache = kvfold.Cache(model, policy).prefill(context)
    ids, mask = torch.cat((context, asked), 1), torch.ones(1, 150 + asked.shape[1], dtype=torch.long)
    with cache.hold():  # the question is no prompt of its own after which the policy acts
        found = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **{cache_kwarg(): cache})
    options = ("--policy", policy, "--question", question, "--max-new-tokens", 30, "--json")
    document = last_json(invoke("generate", words_dir, "--prompt", words(150), *options))
    assert document["text"] == tokenizer.decode(found[0, ids.shape[1] :])
    assert document["fed_tokens"] == ids.shape[1]


def test_sampling_follows_the_seed(invoke: Invoke, model_dir: Path) -> None:
    def text(seed: int) -> str:
        options = ("--temperature", 2.0, "--seed", seed, "--max-new-tokens", 8, "--json")
        return str(last_json(invoke("generate", model_dir, "--prompt", TEXT, *options))["text"])

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--prompt", ""), "prompt"),
        (("--prompt", " \n"), "prompt"),
        (("--prompt", "x" * (CONTEXT + 1), "--raw"), f"at most {CONTEXT} tokens"),
        (("--prompt", "x" * CONTEXT, "--raw"), "context"),
        (("--prompt", "a", "--file", "b"), "--file"),
        (("--file", "no-such-file.txt"), "no-such-file.txt"),
        (("--prompt", "a", "--policy", "manifoldvk(keep=0.5)"), "manifoldkv"),
        (("--prompt", "a", "--policy", "manifoldkv(keep=0)"), "keep"),
        (("--prompt", "a", "--policy", "manifoldkv(keep=nan)"), "keep"),
        (("--prompt", "a", "--dtype", "float8"), "float8"),
        (("--prompt", "a", "--device", "abacus"), "abacus"),
        (("--prompt", "a", "--question", ""), "--question"),
        *((("--prompt", "a", "--temperature", one), "--temperature") for one in ("-1", "nan", "inf", "1e-40", "1e40")),
        *((("--prompt", "a", "--seed", one), "--seed") for one in (str(2**64), str(-(2**63) - 1))),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, model_dir: Path, options: tuple[str, ...], named: str) -> None:
    assert named in refused(invoke("generate", model_dir, *options))


def test_a_missing_model_is_one_line(invoke: Invoke, tmp_path: Path) -> None:
    assert "none.gguf" in refused(invoke("generate", tmp_path / "none.gguf", "--prompt", "a"))
    assert "--allow-download" in refused(invoke("generate", "nobody/nothing", "--prompt", "a"))
