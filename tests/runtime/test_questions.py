"""What is asked after a prompt was compressed: answers are those of a cache that is fed the same parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.core.errors import ConfigError
from kvfold.hf import prefill
from tests.cli.conftest import byte_tokenizer
from tests.helpers import policies, tiny
from tests.runtime.helpers import MODELS, RAGGED, UNIFORM, answer_later, engine, model_of, prompts, texts
from tests.runtime.recorded import record

NEW = 24
LENGTHS = (120, 137, 100, 203)
"""Long enough that what is fitted to a prompt is, also where a part of the rows is evicted."""
ASKED = (7, 1, 23, 0)
"""Several tokens, a single one, more than a segment, none."""
EVICTING = (
    UNIFORM,
    RAGGED,
    policies.text("windowed_manifoldkv", 0.5),
    policies.text("pyramidkv", 0.5),
    policies.text("expected_attention", 0.4),
    policies.text("kvzip", 0.5),
    policies.text("snapkv", 24),
    policies.text("snapkv", 0.4, chunk=16),
)
FAMILIES = ("gemma3", "gpt_oss", "mistral_sliding", "gemma3n")


def asked(*lengths: int) -> list[Tensor | None]:
    return [tiny.ids(length, seed=1000 + length) if length else None for length in lengths or ASKED]


@functools.lru_cache(maxsize=256)
def answer(family: str, policy: str, length: int, question: int, new: int = NEW) -> tuple[int, ...]:
    return answer_later(model_of(family), policy, prompts(length)[0], asked(question)[0], new)


def wanted(family: str, policy: str) -> list[tuple[int, ...]]:
    return [answer(family, policy, length, count) for length, count in zip(LENGTHS, ASKED, strict=True)]


def found(made: kvfold.Engine, **more: Any) -> list[tuple[int, ...]]:
    return [result.ids for result in made.generate(prompts(*LENGTHS), NEW, questions=asked(), **more)]


@pytest.mark.parametrize("policy", ["dense", *EVICTING, *policies.READERS])
def test_answers_are_those_of_a_cache(policy: str) -> None:
    assert found(engine(policy)) == wanted("llama", policy)


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.RETRIEVERS[0], policies.EVICTING_READERS[0]])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_windows_sinks_and_shared_rows(family: str, policy: str) -> None:
    assert found(engine(policy, family)) == wanted(family, policy)


@pytest.mark.parametrize("family", [name for name in MODELS if name not in ("llama", *FAMILIES)])
def test_every_other_family(family: str) -> None:
    assert found(engine(RAGGED, family)) == wanted(family, RAGGED)


@pytest.mark.parametrize("method", [name for name in policies.METHODS if policies.text(name, 0.5) not in EVICTING])
def test_every_other_method(method: str) -> None:
    policy = policies.text(method, 0.5)
    assert found(engine(policy)) == wanted("llama", policy)


def test_a_question_changes_the_answer() -> None:
    assert len({answer("llama", UNIFORM, 100, count) for count in (0, 1, 7, 23)}) == 4
    assert len(set(answer("llama", UNIFORM, 100, 7))) > 4, "an answer that repeats itself proves little"


def test_the_policy_has_not_seen_the_question() -> None:
    prompt, question = prompts(100)[0], asked(7)[0]
    assert question is not None
    later = engine(UNIFORM).generate(prompt, NEW, questions=question)
    before = engine(UNIFORM).generate(torch.cat((prompt, question), 1), NEW)
    assert later != before
    both = [
        engine().generate(prompt, NEW, questions=question),
        engine().generate(torch.cat((prompt, question), 1), NEW),
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("policy", policies.RETRIEVERS)
@pytest.mark.parametrize("count", [1, 4])
def test_a_segment_that_the_last_token_of_a_question_completes(policy: str, count: int) -> None:
    made = engine(policy)
    size = made.plans[-1].retriever.segments[0]
    for rows in (size * -(-96 // size), size * -(-144 // size)):
        for over in (-1, 0, 1):
            result = made.generate(prompts(rows + over - count)[0], NEW, questions=asked(count)[0])[0]
            assert result.ids == answer("llama", policy, rows + over - count, count), (rows, over)


@pytest.mark.parametrize(
    "policy", ["dense", RAGGED, EVICTING[-1], *policies.EVICTING_READERS[:2], policies.RETRIEVERS[4]]
)
def test_chunks_change_nothing(policy: str) -> None:
    assert found(engine(policy, chunk_size=5)) == wanted("llama", policy)


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.RETRIEVERS[1]])
def test_an_empty_question_is_none(policy: str) -> None:
    made = engine(policy, tokenizer=byte_tokenizer())
    one, two = texts(60), texts(37, seed=1)
    plain = made.generate([one, two], NEW)
    nothing: list[Any] = [None, ["", None], [[], ""], [torch.zeros(1, 0, dtype=torch.long), None]]
    for questions in nothing:
        assert made.generate([one, two], NEW, questions=questions) == plain
    for question in ("", None, []):
        assert "".join(made.stream(one, NEW, question=question)) == plain[0].text


def test_forms() -> None:
    made = engine(UNIFORM, tokenizer=byte_tokenizer())
    prompt, question = texts(60), "which"
    ids = made.tokenizer(question)["input_ids"]
    first = made.generate(prompt, NEW, questions=question)
    for same in (ids, [ids], [question], torch.tensor(ids), torch.tensor([ids]), [torch.tensor([ids])]):
        assert made.generate(prompt, NEW, questions=same) == first
    for same in (question, ids, torch.tensor(ids)):
        assert "".join(made.stream(prompt, NEW, question=same)) == first[0].text


def test_text_is_asked_without_a_token_that_begins_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token, tokenizer.add_bos_token = "A", True
    made = engine(tokenizer=tokenizer)
    made.generate(texts(60), NEW, questions="which")
    assert (made.stats().prompt_tokens, made.stats().question_tokens) == ((61,), (5,))


def test_a_repetition_penalty_is_of_both_parts() -> None:
    prompt, question = prompts(60)[0], asked(7)[0]
    assert question is not None
    later = engine().generate(prompt, NEW, questions=question, repetition_penalty=1.5)
    assert later == engine().generate(torch.cat((prompt, question), 1), NEW, repetition_penalty=1.5)


def test_progress_and_stats_tell_both_parts() -> None:
    seen: list[tuple[int, int]] = []
    made = engine(UNIFORM, chunk_size=50)
    made.generate(prompts(60, 37), NEW, questions=asked(7, 0), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(50, 104), (60, 104), (67, 104), (104, 104)]
    stats = made.stats()
    assert (stats.prompt_tokens, stats.question_tokens) == ((60, 37), (7, 0))
    # 2 layers of 2 KV heads with 16 + 16 numbers of 4 bytes a row
    assert stats.dense_nbytes == 2 * 2 * 32 * 4 * (67 + 37 + 2 * (NEW - 1))


def test_rows_read_are_those_of_a_cache() -> None:
    policy, prompt, question = policies.RETRIEVERS[0], prompts(100)[0], asked(7)[0]
    cache = kvfold.Cache(model_of(), policy).prefill(prompt)
    ids = answer("llama", policy, 100, 7)
    with torch.no_grad():
        with cache.hold():
            prefill.forward(cache, question)
        for token in ids[:-1]:
            prefill.forward(cache, torch.tensor([[token]]))
    made = engine(policy)
    made.generate(prompt, NEW, questions=question)
    assert made.stats().rows_read == cache.stats().rows_read


def test_rows_are_fitted_to_a_prompt_with_its_question() -> None:
    policy = "rowcodes(cluster=8, tau=0.05)"
    made = engine(policy)
    made.generate(prompts(37, 37, 100), NEW, questions=asked(7, 70, 0))
    assert made.stats().reads_whole == (True, False, False)
    result = made.generate(prompts(37)[0], NEW, questions=asked(70)[0])[0]
    assert result.ids == answer("llama", policy, 37, 70)


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.RETRIEVERS[0], policies.EVICTING_READERS[2]])
def test_steps_that_are_recorded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(record(monkeypatch, engine(policy))) == wanted("llama", policy)


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.EVICTING_READERS[0]])
def test_calls_with_and_without_share_storage(policy: str) -> None:
    made = engine(policy)
    first = found(made)
    plain = made.generate(prompts(*LENGTHS), NEW)
    held = made.nbytes
    assert found(made) == first != [result.ids for result in plain]
    assert made.nbytes == held


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "questions must be one per prompt, 2, got 1; put None where nothing is asked"),
        ("a", "questions must be one per prompt, 2, got 1"),
        ([None] * 3, "questions must be one per prompt, 2, got 3"),
        (3, "questions must be text, token ids, or a sequence of either, got 3; leave it out"),
        ([None, 1.5], "questions must be text or token ids, got 'float'"),
        ([[1, "a"], None], "questions must be text or token ids, got 'list'"),
        (torch.ones(2, 3), "questions must be text or token ids, got 'a tensor torch.float32"),
        ([None, [tiny.VOCAB]], f"questions must be token ids of the model, 0 to {tiny.VOCAB - 1}, got {tiny.VOCAB}"),
        (
            [None, [3] * 8100],
            r"at most max_tokens=8192 tokens with its question and its answer, got '60 \+ 8100 \+ 64'",
        ),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    made = engine(tokenizer=byte_tokenizer())
    with pytest.raises(ConfigError, match=words) as caught:
        made.generate(prompts(100, 60), questions=given)
    assert "\n" not in str(caught.value)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="questions must be token ids where there is no tokenizer, got 'why'"):
        engine().generate(prompts(60)[0], questions="why")


def test_a_stream_takes_one_question() -> None:
    with pytest.raises(ConfigError, match="questions must be text or token ids, got 'list'"):
        engine(tokenizer=byte_tokenizer()).stream("abc", question=["a", "b"])  # type: ignore[list-item]
