"""``kvfold generate --engine``: the words of the way without an engine, and one line for what an engine refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import policies, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.cli._answer import Settings
from kvfold.cli._engine import EngineSession, decide
from kvfold.cli._session import Session
from kvfold.core.errors import ConfigError, UnsupportedError
from kvfold.runtime import compile as compiling
from kvfold.runtime.program import Program

from .conftest import Invoke, last_json, refused, save_words, words

PROMPT = words(150)
NEW = 40
HALF = policies.text("snapkv", 0.5)
POLICIES = (
    "dense",
    HALF,
    policies.text("snapkv", 0.5, allocator="ada(safeguard=0.25)"),
    policies.text("windowed_manifoldkv", 0.5),
    policies.text("snapkv", 0.4, chunk=16),
    policies.text("kvzip", 0.5),
    *policies.RETRIEVERS,
    policies.EVICTING_READERS[0],
)


def generate(invoke: Invoke, folder: Path, *options: object) -> dict[str, Any]:
    return last_json(invoke("generate", folder, "--prompt", PROMPT, "--max-new-tokens", NEW, "--json", *options))


def both(invoke: Invoke, folder: Path, *options: object) -> tuple[dict[str, Any], dict[str, Any]]:
    return generate(invoke, folder, "--engine", *options), generate(invoke, folder, "--no-engine", *options)


@pytest.mark.parametrize("policy", POLICIES)
def test_words_are_those_without_an_engine(invoke: Invoke, words_dir: Path, policy: str) -> None:
    found, wanted = both(invoke, words_dir, "--policy", policy)
    assert (found["engine"], wanted["engine"]) == (True, False)
    assert found["text"] == wanted["text"]
    assert len(found["text"].split()) == NEW
    assert len(set(found["text"].split())) > 4, "an answer that repeats itself proves little"
    for name in ("fed_tokens", "new_tokens", "seen_tokens", "dense_nbytes", "policy", "query_aware", "rows_read"):
        assert found[name] == wanted[name], name
    assert (found["rows_read"] is None) == ("+" not in policy and policy not in policies.RETRIEVERS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("question", ["w5", "w5 w6 w7 w90 w14"])
def test_a_question_is_answered_as_without_an_engine(
    invoke: Invoke, words_dir: Path, policy: str, question: str
) -> None:
    found, wanted = both(invoke, words_dir, "--policy", policy, "--question", question)
    assert (found["engine"], found["query_aware"]) == (True, False)
    for name in ("text", "fed_tokens", "new_tokens", "seen_tokens", "dense_nbytes", "query_aware"):
        assert found[name] == wanted[name], name
    assert found["fed_tokens"] == 150 + len(question.split())


@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding", "gpt_oss"])
@pytest.mark.parametrize("policy", [HALF, policies.RETRIEVERS[0]])
def test_a_question_over_layers_that_are_passed_through(
    invoke: Invoke, tmp_path: Path, family: str, policy: str
) -> None:
    options = ("--policy", policy, "--question", "w5 w6 w7")
    found, wanted = both(invoke, save_words(tmp_path, family), *options)
    assert found["text"] == wanted["text"]


def test_a_policy_changes_the_words(invoke: Invoke, words_dir: Path) -> None:
    few = policies.text("snapkv", 8)
    texts = {policy: generate(invoke, words_dir, "--engine", "--policy", policy)["text"] for policy in ("dense", few)}
    assert texts["dense"] != texts[few]


@pytest.mark.parametrize("family", ["gemma3", "mistral_sliding", "gpt_oss"])
def test_layers_that_are_passed_through(invoke: Invoke, tmp_path: Path, family: str) -> None:
    found, wanted = both(invoke, save_words(tmp_path, family), "--policy", HALF)
    assert found["text"] == wanted["text"]
    assert found["passed_layers"] == wanted["passed_layers"] != []
    assert found["compressed_layers"] == wanted["compressed_layers"]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_chunks_of_the_prompt_change_nothing(invoke: Invoke, words_dir: Path, size: int) -> None:
    found, wanted = both(invoke, words_dir, "--policy", HALF, "--chunk-size", size)
    assert found["text"] == wanted["text"] == generate(invoke, words_dir, "--policy", HALF)["text"]


def test_the_model_of_the_other_tests_with_its_template(invoke: Invoke, model_dir: Path) -> None:
    options = ("--prompt", "The lighthouse keeper counted ships. " * 6, "--policy", HALF, "--json")
    found, wanted = (last_json(invoke("generate", model_dir, way, *options)) for way in ("--engine", "--no-engine"))
    assert found["chat_template"]
    assert (found["text"], found["new_tokens"]) == (wanted["text"], wanted["new_tokens"])


def test_a_document_has_the_same_fields_either_way(invoke: Invoke, words_dir: Path) -> None:
    found, wanted = both(invoke, words_dir, "--policy", HALF, "--compare-dense")
    assert found.keys() == wanted.keys()
    for document in (found, wanted):
        dense = document["dense"]
        assert dense.keys() <= document.keys()
        assert dense["engine"] == document["engine"]
        assert (dense["policy"], dense["warmed_up"]) == ("dense", True)
        assert 0 < document["nbytes"] < dense["nbytes"]
        assert document["compression_ratio"] == 1 - document["nbytes"] / document["dense_nbytes"]
        assert document["ttft"] > 0
        assert document["tpot"] > 0
    assert found["dense"]["text"] == wanted["dense"]["text"]
    # an engine does not tell them
    assert (found["stored_tokens"], found["bytes_read"]) == (None, None)
    assert len(wanted["stored_tokens"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used unasked")
def test_on_a_cpu_there_is_no_engine_unasked(invoke: Invoke, words_dir: Path) -> None:
    assert not generate(invoke, words_dir)["engine"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", HALF, policies.RETRIEVERS[0]])
def test_on_a_gpu_there_is_one(invoke: Invoke, words_dir: Path, policy: str) -> None:
    found = generate(invoke, words_dir, "--policy", policy, "--compare-dense")
    assert (found["engine"], found["is_captured"], found["dense"]["is_captured"]) == (True, True, True)
    assert found["peak_nbytes"] > 0
    wanted = generate(invoke, words_dir, "--policy", policy, "--no-engine")
    assert found["text"] == wanted["text"]
    assert wanted["peak_nbytes"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", HALF, policies.RETRIEVERS[0]])
def test_on_a_gpu_it_answers_a_question_too(invoke: Invoke, words_dir: Path, policy: str) -> None:
    options = ("--policy", policy, "--question", "w5 w6 w7")
    found = generate(invoke, words_dir, *options)
    assert (found["engine"], found["is_captured"], found["warmed_up"]) == (True, True, False)
    assert found["warm_up_s"] > 0
    assert found["text"] == generate(invoke, words_dir, *options, "--no-engine")["text"]
    assert generate(invoke, words_dir, *options, "--compare-dense")["warm_up_s"] == 0


@pytest.mark.parametrize(
    ("wanted", "device", "found"),
    [
        (None, "cuda", True),
        (None, "cpu", False),
        (None, "mps", False),
        (True, "cpu", True),
        (False, "cuda", False),
    ],
)
def test_what_is_chosen_unasked(wanted: bool | None, device: str, found: bool) -> None:
    assert decide(wanted, compile=False, device=device) is found


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--compile", "--no-engine"), "--compile cannot go with --no-engine"),
        (("--compile", "--device", "cpu"), "--compile needs an engine, which is not used on cpu unasked; add --engine"),
        (("--engine", "--policy", "knorm(keep=0.5, every=8)"), "--no-engine"),
        (("--engine", "--policy", "knorm(keep=0.5, every=8)"), "cannot evict while it decodes"),
    ],
)
def test_what_cannot_go_together_is_one_line(
    invoke: Invoke, words_dir: Path, options: tuple[str, ...], named: str
) -> None:
    assert named in refused(invoke("generate", words_dir, "--prompt", PROMPT, *options))


def test_a_model_that_an_engine_refuses_is_served_without(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path, "llama4")
    line = refused(invoke("generate", folder, "--prompt", PROMPT, "--engine"))
    assert "attn_temperature_tuning=False" in line
    assert line.endswith("--no-engine")
    assert generate(invoke, folder, "--no-engine")["new_tokens"] == NEW


def test_what_nothing_can_serve_does_not_name_another_way(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path, "gemma2")
    lines = {
        refused(invoke("generate", folder, "--prompt", PROMPT, "--policy", "refinekv", way))
        for way in ("--engine", "--no-engine")
    }
    (line,) = lines
    assert "caps its attention logits" in line


def change(folder: Path, **settings: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(**settings)
    model.generation_config.save_pretrained(folder)


def test_a_repetition_penalty_of_the_model_is_of_prompt_and_answer(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path, "llama")
    plain = generate(invoke, folder)["text"]
    change(folder, repetition_penalty=1.5)
    found, wanted = both(invoke, folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    stock = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert found["text"] == wanted["text"] == tokenizer.decode(stock) != plain


def test_what_ends_an_answer(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path, "llama")
    words = generate(invoke, folder)["text"].split()
    change(folder, eos_token_id=[int(words[7][1:]), 1])
    found, wanted = both(invoke, folder)
    end = words.index(words[7])
    assert found["text"] == wanted["text"] == " ".join(words[:end])
    assert found["new_tokens"] == wanted["new_tokens"] == end + 1


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        ({"no_repeat_ngram_size": 3}, (), "no_repeat_ngram_size=3"),
        ({"suppress_tokens": [5]}, (), "suppress_tokens=[5]"),
        ({"min_p": 0.1, "do_sample": True}, ("--temperature", 1.0), "min_p=0.1"),
    ],
)
def test_a_wish_of_the_model_that_an_engine_has_not(
    invoke: Invoke, tmp_path: Path, settings: dict[str, Any], options: tuple[object, ...], named: str
) -> None:
    folder = save_words(tmp_path, "llama")
    change(folder, **settings)
    line = refused(invoke("generate", folder, "--prompt", PROMPT, "--engine", *options))
    assert named in line
    assert line.endswith("--no-engine")
    assert generate(invoke, folder, "--no-engine", *options)["new_tokens"] == NEW
    if options:
        assert generate(invoke, folder, "--engine")["new_tokens"] == NEW


def test_sampling_follows_the_seed(invoke: Invoke, words_dir: Path) -> None:
    def text(seed: int) -> str:
        return str(generate(invoke, words_dir, "--engine", "--temperature", 2.0, "--seed", seed)["text"])

    assert text(1) == text(1) != text(2)


def test_tokens_are_drawn_from_what_the_model_says(invoke: Invoke, tmp_path: Path) -> None:
    folder = save_words(tmp_path, "llama")
    greedy = generate(invoke, folder)["text"]
    change(folder, top_k=1, do_sample=True)
    for document in both(invoke, folder, "--temperature", 3.0):
        assert document["text"] == greedy


def test_what_was_used_is_said(invoke: Invoke, words_dir: Path) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", 3, "--device", "cpu")
    with_engine = invoke("generate", words_dir, "--engine", *options)
    without = invoke("generate", words_dir, "--no-engine", *options)
    assert with_engine.exit_code == without.exit_code == 0
    assert with_engine.stdout.count("\n") == 1
    assert "decoded by" in with_engine.stderr
    assert "no engine" not in with_engine.stderr
    assert "no engine" in without.stderr
    # nothing was captured or compiled
    assert "making of the step" not in with_engine.stderr + without.stderr


def test_that_a_method_had_too_few_rows_is_said_then_alone(invoke: Invoke, words_dir: Path) -> None:
    options = ("--max-new-tokens", 3, "--device", "cpu", "--policy", "rowcodes(cluster=8, tau=0.05)")
    said = {
        (count, way): "too few rows"
        in " ".join(invoke("generate", words_dir, "--prompt", words(count), way, *options).stderr.split())
        for count in (20, 150)
        for way in ("--engine", "--no-engine")
    }
    assert [case for case, is_said in said.items() if is_said] == [(20, "--engine")]


def sessions(folder: Path, **more: Any) -> tuple[EngineSession, Session]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    settings = Settings(**{"max_new_tokens": 5, "chunk_size": 64, "temperature": 0.0, "seed": 0, **more})
    policy = kvfold.policy(HALF)
    return EngineSession(model, tokenizer, policy, settings, compile=False), Session(model, tokenizer, policy, settings)


def test_words_come_one_by_one_and_the_reading_is_told(words_dir: Path) -> None:
    ids = tiny.ids(150)[0].tolist()
    for session in sessions(words_dir):
        pieces: list[str] = []
        seen: list[tuple[int, int]] = []
        answer = session.answer(ids, [], pieces.append, lambda done, total, seen=seen: seen.append((done, total)))
        assert answer.warm_up_s == 0
        assert seen == [(64, 150), (128, 150), (150, 150)]
        assert len(pieces) == 5
        assert "".join(pieces) == answer.text
        assert answer.peak_nbytes is None


def test_one_token_has_no_time_per_token(words_dir: Path) -> None:
    for session in sessions(words_dir, max_new_tokens=1):
        answer = session.answer([5, 6], [], lambda _: None, None)
        assert (answer.new_tokens, answer.tpot) == (1, None)


@pytest.mark.parametrize("captures", [True, False])
def test_warming_up_changes_no_word(words_dir: Path, monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    # what a GPU makes beforehand, without its graphs
    monkeypatch.setattr(kvfold.Engine, "captures", captures)
    ids, session = tiny.ids(150)[0].tolist(), sessions(words_dir, temperature=1.0, seed=7)[0]
    for question in ([], [5, 6, 7]):
        first = session.answer(ids, question, lambda _: None, None).text
        session.warm_up(ids, question)
        assert session.answer(ids, question, lambda _: None, None).text == first
    assert session.stats()["warmed_up"]


def test_closing_gives_back_what_is_held(words_dir: Path) -> None:
    session = sessions(words_dir)[0]
    session.answer(tiny.ids(150)[0].tolist(), [], lambda _: None, None)
    assert session.stats()["nbytes"] > 0
    session.close()
    assert session._engine.nbytes == 0


@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo", "ignore::DeprecationWarning")
def test_a_compiled_step(invoke: Invoke, words_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a compiler makes of it takes minutes, and is the compiler's own business
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    for asked in ((), ("--question", "w5 w6")):
        found = generate(invoke, words_dir, "--engine", "--compile", "--policy", HALF, *asked)
        assert found["compile"]
        assert found["warm_up_s"] > found["tpot"]
        assert found["text"] == generate(invoke, words_dir, "--no-engine", "--policy", HALF, *asked)["text"]


def test_what_a_compiler_fails_at_is_one_line(invoke: Invoke, words_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "no_such_backend")
    line = refused(invoke("generate", words_dir, "--prompt", PROMPT, "--engine", "--compile"))
    assert "no_such_backend" in line
    assert line.endswith("leave --compile out")


def test_a_step_that_fails_after_the_first_word_is_told_on_its_own_line(
    invoke: Invoke, words_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UnsupportedError("the step of M cannot be captured as a CUDA graph")

    monkeypatch.setattr(Program, "stepper", fail)
    result = invoke("generate", words_dir, "--prompt", PROMPT, "--engine")
    assert result.exit_code == 2
    assert len(result.stdout.split()) == 1
    assert result.stdout.endswith("\n")
    (line,) = result.stderr.splitlines()
    assert line.endswith("as a CUDA graph; on the command line: --no-engine")


def test_a_prompt_that_is_too_long_is_one_line(invoke: Invoke, words_dir: Path) -> None:
    long = " ".join(["w5"] * 8190)
    lines = {refused(invoke("generate", words_dir, "--prompt", long, way)) for way in ("--engine", "--no-engine")}
    (line,) = lines
    assert "at most 8192 tokens" in line


def test_help_has_an_example(invoke: Invoke) -> None:
    shown = " ".join(invoke("generate", "--help").stdout.split())
    assert "--engine --max-new-tokens 500" in shown
    assert "--no-engine" in shown


def test_decide_refuses_by_name() -> None:
    with pytest.raises(ConfigError, match="add --engine"):
        decide(None, compile=True, device="cpu")
    assert decide(None, compile=True, device="cuda")


@pytest.mark.parametrize("way", ["--engine", "--no-engine"])
def test_a_question_is_kept_whole(invoke: Invoke, words_dir: Path, way: str) -> None:
    # 30 rows of the prompt may stay; of the question's 40 all do
    options = ("--policy", policies.text("knorm", 30), "--question", " ".join(["w5"] * 40), "--max-new-tokens", 1)
    document = last_json(invoke("generate", words_dir, "--prompt", PROMPT, way, *options, "--json"))
    row = 2 * 16 * 4 * 2  # keys and values of 16 numbers of 4 bytes, 2 KV heads
    assert document["nbytes"] >= document["dense_nbytes"] / (document["fed_tokens"]) * 70 > 40 * row
