"""Conversations: one prefill, turns in order, each after what the model itself has said; one unit of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.eval.helpers import Digits, byte_tokenizer, model, settings
from tests.eval.test_runner import records, untimed
from tests.helpers import tiny
from tests.helpers.policies import text

import kvfold.eval.runner as runner
import kvfold.eval.talk as talk
from kvfold.core.errors import ConfigError, DataError
from kvfold.eval.answer import answer_alone, end_tokens
from kvfold.eval.jobs import make_jobs
from kvfold.eval.prompt import build_prompt, build_turn
from kvfold.eval.record import RunFolder, SampleRecord
from kvfold.eval.sample import Sample
from kvfold.hf.cache import Cache

TURNS = 3
POLICIES = [text("manifoldkv", 0.4), text("snapkv", 0.3, allocator="ada"), text("kvzip", 0.5), text("knorm", 0.2)]


@dataclass(frozen=True, slots=True)
class Chats(Digits):
    """Three questions about each text of digits, whose answers are of unequal length."""

    name: ClassVar[str] = "chats"
    limit: int = 9

    def samples(self, count: int, tokens: int, seed: int, count_tokens: Callable[[str], int]) -> list[Sample]:
        return [self._turn(index, tokens, seed) for index in range(count)]

    def _turn(self, index: int, tokens: int, seed: int) -> Sample:
        group, turn = divmod(index, TURNS)
        return replace(
            self._sample(group, tokens, seed),
            index=index,
            question=f"\nWhich word{'?' * (turn + 1)}",
            max_new_tokens=self.limit + turn,
            facts={"group": group, "turn": turn},
        )


def chat(folder: Path, count: int = 6, **changes: Any) -> list[SampleRecord]:
    options = {name: changes.pop(name) for name in ("batch_samples", "stack_rows", "model") if name in changes}
    wanted = settings(**{"tasks": [Chats()], "policies": POLICIES, "lengths": [90], "count": count, **changes})
    return records(folder, wanted, tasks=[Chats()], **options)


def greedy(ids: list[int], limit: int, ends: set[int]) -> list[int]:
    """What the stock model says after some tokens, each step from scratch."""
    said: list[int] = []
    while len(said) < limit:
        with torch.no_grad():
            logits = model()(input_ids=torch.tensor([ids + said]), use_cache=False).logits
        said.append(int(logits[0, -1].argmax()))
        if said[-1] in ends:
            return said[:-1]
    return said


@pytest.mark.parametrize("template", ["none", "chat"])
def test_dense_turns_are_what_the_stock_model_says_after_all_that_stood_before(tmp_path: Path, template: Any) -> None:
    tokenizer, ends = byte_tokenizer(), end_tokens(model(), byte_tokenizer())
    found = chat(tmp_path, template=template)
    for group in range(2):
        own = [one for one in found if one.facts["group"] == group]
        turns = [sample for sample in Chats().samples(6, 90, 0, len) if sample.facts["group"] == group]
        first = build_prompt(turns[0], tokenizer, query_aware=False, template=template)
        ids = [*first.context[0].tolist(), *first.tail[0].tolist()]
        for record, turn in zip(own, turns, strict=True):
            if turn is not turns[0]:
                ids += build_turn(turn, tokenizer, template=template)[0].tolist()
            answer = greedy(ids, turn.max_new_tokens, ends)
            assert record.results[0].output == tokenizer.decode(answer, skip_special_tokens=True)
            ids += answer


@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("query_aware", [False, True])
def test_stacks_say_turn_by_turn_what_caches_say_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query_aware: bool, template: Any
) -> None:
    # some answers end by themselves, others at their limit
    ends = {int(token) for token in tiny.ids(40, seed=2)[0]}
    monkeypatch.setattr(talk, "end_tokens", lambda *args: ends)
    grid: dict[str, Any] = {"query_aware": [query_aware], "template": template, "count": 8}
    stacked = chat(tmp_path / "a", **grid, batch_samples=2, stack_rows=4)
    alone = chat(tmp_path / "b", **grid, mode="alone")
    assert [untimed(one) for one in stacked] == [untimed(one) for one in alone]
    lengths = {(one.facts["turn"], len(result.output)) for one in stacked for result in one.results}
    assert len(lengths) > 8


def test_a_turn_depends_on_what_the_policy_itself_said_before(tmp_path: Path) -> None:
    turn = [one for one in chat(tmp_path / "a") if one.facts["turn"] == 1]
    alone = Chats().samples(6, 90, 0, len)[1]
    prompt = build_prompt(alone, byte_tokenizer(), query_aware=False, template="none")
    cache = Cache(model()).prefill(prompt.context)
    lone = answer_alone(cache, prompt.tail, alone.max_new_tokens, end_tokens(model(), byte_tokenizer()))
    assert turn[0].results[0].output != byte_tokenizer().decode(lone.ids)


@pytest.mark.parametrize(("mode", "prefills"), [("alone", 2 * 5 + 5), ("stacked", 2)])
def test_a_context_is_read_once_for_all_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, prefills: int
) -> None:
    calls: list[int] = []
    prefill = Cache.prefill
    monkeypatch.setattr(Cache, "prefill", lambda self, ids, **more: calls.append(1) or prefill(self, ids, **more))
    found = chat(tmp_path, mode=mode)
    # dense and four policies, two groups; the first of all warms up alone
    assert len(calls) == prefills
    assert [(one.index, one.facts["group"], one.facts["turn"]) for one in found] == [
        (index, *divmod(index, TURNS)) for index in range(6)
    ]
    for group in range(2):
        own = [one for one in found if one.facts["group"] == group]
        for results in zip(*(one.results for one in own), strict=True):
            assert len({(one.policy, one.nbytes, one.stored_tokens) for one in results}) == 1


def test_later_turns_are_timed_from_their_question(tmp_path: Path) -> None:
    first, *later = chat(tmp_path, count=3, mode="alone")
    for result in first.results:
        assert result.prefill_s is not None
        assert result.ttft_s is not None
        assert 0 < result.prefill_s < result.ttft_s
    for record in later:
        for result in record.results:
            assert result.prefill_s == 0
            assert result.ttft_s is not None
            assert result.arrivals is not None
            assert result.arrivals[0][0] == pytest.approx(result.ttft_s, abs=1e-6)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_group_is_resumed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    chat(tmp_path, batch_samples=2)
    paths = [RunFolder(tmp_path).record_path("chats", 90, False, index) for index in range(6)]
    before = [path.read_bytes() for path in paths]
    paths[lost].unlink()
    written: list[int] = []
    write = RunFolder.write
    monkeypatch.setattr(RunFolder, "write", lambda self, one: written.append(one.index) or write(self, one))
    said: list[tuple[int, int, str]] = []
    wanted = settings(tasks=[Chats()], policies=POLICIES, lengths=[90], count=6)
    runner.run(
        model(), byte_tokenizer(), [Chats()], wanted, RunFolder(tmp_path), batch_samples=1,
        progress=lambda *now: said.append(now),
    )  # fmt: skip
    assert written == [0, 1, 2]
    assert said == [(0, 6, "chats 90"), (6, 6, "done")]
    assert [path.read_bytes() for path in paths] == before


def test_only_turns_in_a_row_of_one_group_are_one_job() -> None:
    samples = Chats().samples(7, 90, 0, len)
    assert [len(job.turns) for job in make_jobs(samples, 90, False)] == [3, 3, 1]
    labels = [{"group": 1}, {"group": 1}, {}, {"group": None, "turn": 0}, {"group": None, "turn": 1}]
    plain = [replace(samples[0], facts=facts) for facts in labels]
    assert [len(job.turns) for job in make_jobs(plain, 90, False)] == [1, 1, 1, 1, 1]
    with pytest.raises(DataError, match="turns of group 0 of chats must share one context, sample 1 has another"):
        make_jobs([samples[0], replace(samples[1], context="else")], 90, False)


def words(ids: torch.Tensor) -> str:
    return byte_tokenizer().decode(ids[0])


def test_a_later_turn_follows_the_answer_as_the_template_has_it() -> None:
    turn = Sample(task="t", index=1, context="c", question=" And who?", answer_prefix=" It is", answers=("x",))
    assert words(build_turn(turn, byte_tokenizer(), template="none")) == " And who? It is"
    assert (
        words(build_turn(turn, byte_tokenizer(), template="chat"))
        == "<|end|><|user|> And who?<|end|><|assistant|> It is"
    )
    with pytest.raises(ConfigError, match="question must have at least one token, got none in sample 1 of t"):
        build_turn(replace(turn, question="", answer_prefix=""), byte_tokenizer(), template="none")
    first_alone = byte_tokenizer(template="{{ messages[0]['content'] }}")
    with pytest.raises(ConfigError, match="whose chat template leaves earlier turns out"):
        build_turn(turn, first_alone, template="chat")


def test_what_a_cache_does_not_hold_of_an_answer_is_known() -> None:
    cache = Cache(model()).prefill(tiny.ids(30))
    cut = answer_alone(cache.fork(), tiny.ids(4, seed=1), 5, set())
    assert cut.unfed == cut.ids[-1:]
    ended = answer_alone(cache.fork(), tiny.ids(4, seed=1), 5, {cut.ids[3]})
    assert ended.unfed == []
    assert ended.ids == cut.ids[: cut.ids.index(cut.ids[3])]
