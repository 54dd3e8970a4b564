from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers import tiny

import kvfold
from kvfold.eval.quiz import Question, Quiz
from kvfold.eval.recall import ask, measure_recall, score


class Numbers:
    """A tokenizer of a model without words: token 5 is the text ``5``."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def greedy(context: list[int], steps: int) -> list[int]:
    model = tiny.stock(attn="sdpa")
    for _ in range(steps):
        context = [*context, int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax())]
    return context[-steps:]


CONTEXT, ASKED = tuple(tiny.ids(200)[0].tolist()), "7 8 9"


def quiz() -> Quiz:
    said = greedy([*CONTEXT, 7, 8, 9], 3)
    right = Question(text=ASKED, expected=f"{said[0]} {said[1]}", depth=0.25)
    return Quiz(task="numbers", context=CONTEXT, questions=(right, Question(text=ASKED, expected="no", depth=0.5)))


@pytest.fixture
def dense() -> kvfold.Cache:
    return kvfold.Cache(tiny.ours(), "dense", observe=["snapkv(keep=0.2)"]).prefill(torch.tensor([CONTEXT]))


class Words(Numbers):
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) if word.isdigit() else 1 for word in text.split()]}


def test_dense_says_what_the_model_says(dense: kvfold.Cache) -> None:
    found = measure_recall(dense, "dense", quiz(), Words())  # type: ignore[arg-type]
    assert found.policy == "dense"
    assert [answer.correct for answer in found.answers] == [True, False]
    assert found.recalled == 1
    assert found.answers[0].text == " ".join(map(str, greedy([*CONTEXT, 7, 8, 9], 4)))
    assert found.answers[0].tokens == 4
    assert found.answers[0].depth == 0.25


def test_a_policy_acts_before_the_questions_and_never_on_them(dense: kvfold.Cache) -> None:
    calls: list[int] = []
    found = measure_recall(dense, "snapkv(keep=0.2)", quiz(), Words(), lambda: calls.append(1))  # type: ignore[arg-type]
    small = dense.fork().compress("snapkv(keep=0.2)")
    assert len(calls) == 2
    assert (found.nbytes, found.dense_nbytes) == (small.nbytes, small.dense_nbytes)
    assert found.freed == 1 - small.nbytes / small.dense_nbytes > 0.7
    # The same question twice: the first left no trace.
    assert found.answers[0].text == found.answers[1].text or found.answers[0].tokens != found.answers[1].tokens
    assert dense.seen_tokens == (200,)
    assert int(dense.stored_tokens(0).min()) == 200


def test_asking_leaves_the_cache_as_it_was(dense: kvfold.Cache) -> None:
    small = dense.fork().compress("keydiff(keep=0.2)")
    held = small.stored_tokens(0).clone()
    first, second = (ask(small, quiz().questions[0], Words()) for _ in range(2))  # type: ignore[arg-type]
    assert first.text == second.text
    assert small.seen_tokens == (200,)
    assert torch.equal(small.stored_tokens(0), held)


def test_figures_are_those_of_the_answers(dense: kvfold.Cache) -> None:
    found = measure_recall(dense, "keydiff(keep=0.5)", quiz(), Words())  # type: ignore[arg-type]
    rest = sum(answer.rest_seconds for answer in found.answers)
    assert found.tokens_per_second == pytest.approx(sum(a.tokens - 1 for a in found.answers) / rest)
    assert found.first_seconds == pytest.approx(sum(a.first_seconds for a in found.answers) / 2)
    document = found.as_dict()
    assert document["recalled"] == found.recalled
    assert document["answers"][1]["expected"] == "no"
    assert SimpleNamespace(**document).freed == found.freed


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [("velvet", " Velvet.", True), ("1234", "1234567", True), ("1234", "12 34", False), ("tiger", "", False)],
)
def test_an_answer_counts_if_the_expected_one_stands_in_it(expected: str, text: str, right: bool) -> None:
    assert score(expected, text) is right
