"""Prompts are cut where compression happens; answers end where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.eval.helpers import END, byte_tokenizer, model
from tests.helpers import tiny
from tests.helpers.policies import text

import kvfold
from kvfold.core.errors import ConfigError
from kvfold.eval.answer import answer_alone, answer_stacked, end_tokens
from kvfold.eval.prompt import build_prompt
from kvfold.eval.sample import Sample

TOKENIZER = byte_tokenizer()


def sample(**changes: Any) -> Sample:
    parts = {"context": "A long text.", "question": " Who?", "answer_prefix": " It is", **changes}
    return Sample(task="t", index=4, answers=("x",), **parts)


def words(ids: torch.Tensor) -> str:
    return TOKENIZER.decode(ids[0])


@pytest.mark.parametrize(
    ("template", "aware", "context", "tail"),
    [
        ("none", False, "A long text.", " Who? It is"),
        ("none", True, "A long text. Who?", " It is"),
        ("chat", False, "<|user|>A long text.", " Who?<|end|><|assistant|> It is"),
        ("chat", True, "<|user|>A long text. Who?", "<|end|><|assistant|> It is"),
    ],
)
def test_prompts_are_cut_where_compression_happens(template: Any, aware: bool, context: str, tail: str) -> None:
    found = build_prompt(sample(), TOKENIZER, query_aware=aware, template=template)
    assert (words(found.context), words(found.tail)) == (context, tail)


def test_a_tail_is_never_empty() -> None:
    found = build_prompt(sample(answer_prefix=""), TOKENIZER, query_aware=True, template="none")
    assert (words(found.context), words(found.tail)) == ("A long text. Who", "?")


def test_prompts_without_a_context_or_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="sample 4 of t"):
        build_prompt(sample(context=""), TOKENIZER, query_aware=False, template="none")
    for tokenizer, reason in (
        (byte_tokenizer(template=None), "has no chat template"),
        (byte_tokenizer(template="{{ 'fixed' }}"), "leaves the user's text out"),
    ):
        with pytest.raises(ConfigError, match=reason):
            build_prompt(sample(), tokenizer, query_aware=False, template="chat")


def caches(count: int = 5) -> list[kvfold.Cache]:
    policies = ["dense", text("knorm", 0.3), text("snapkv", 0.5), text("keydiff", 0.2), text("tova", 0.4)]
    return [kvfold.Cache(model(), policies[i % 5]).prefill(tiny.ids(50 + 9 * i, seed=i)) for i in range(count)]


def alone(cache: kvfold.Cache, tail: torch.Tensor, limit: int, ends: set[int]) -> list[int]:
    return answer_alone(cache.fork(), tail, limit, ends).ids


def test_answers_end_at_their_own_limits_and_end_tokens() -> None:
    own = caches()
    tails = [tiny.ids(1 + 2 * i, seed=70 + i) for i in range(5)]
    limits = [1, 30, 8, 17, 30]
    free = [alone(cache, tail, limit, set()) for cache, tail, limit in zip(own, tails, limits, strict=True)]
    assert [len(row) for row in free] == limits
    # tokens that the model does say: first of one answer, in the middle of another
    ends = {free[4][0], free[1][9]}
    expected = []
    for row in free:
        stop = next((at for at, token in enumerate(row) if token in ends), len(row))
        expected.append(row[:stop])
    assert expected[4] == []
    assert answer_stacked(own, tails, limits, ends) == expected
    assert [alone(c, t, n, ends) for c, t, n in zip(own, tails, limits, strict=True)] == expected
    assert answer_stacked(own, tails, limits, set()) == free


def test_a_stack_stops_once_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.hf.stack import StackedCache

    own, tails = caches(2), [tiny.ids(3, seed=i) for i in range(2)]
    ends = {alone(cache, tail, 1, set())[0] for cache, tail in zip(own, tails, strict=True)}
    calls, feed = [], StackedCache.feed
    monkeypatch.setattr(StackedCache, "feed", lambda *args: calls.append(1) or feed(*args))
    assert answer_stacked(own, tails, [500, 500], ends) == [[], []]
    assert len(calls) <= 8


def test_times_count_the_steps_after_the_first() -> None:
    (cache,) = caches(1)
    timed = answer_alone(cache.fork(), tiny.ids(4), 6, set())
    assert timed.steps == 5
    assert timed.first_s > 0
    assert timed.rest_s > 0
    only = answer_alone(cache.fork(), tiny.ids(4), 6, set(range(400)))
    assert (only.ids, only.steps) == ([], 0)


def test_the_question_is_kept_whole() -> None:
    cache = kvfold.Cache(model(), text("knorm", 0.3)).prefill(tiny.ids(60))
    held = int(cache.stored_tokens(0)[0, 0])
    answer_alone(cache, tiny.ids(11, seed=3), 5, set())
    assert cache.stored_tokens(0).unique().tolist() == [held + 11 + 4]
    assert cache.seen_tokens == (60 + 11 + 4,)


def test_end_tokens_are_those_of_model_and_tokenizer() -> None:
    assert TOKENIZER.eos_token == END
    assert end_tokens(model(), TOKENIZER) == {TOKENIZER.eos_token_id}
