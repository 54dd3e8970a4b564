"""A step that was recorded once answers every later call: nothing in it depends on what the host knew then."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.helpers import policies
from tests.runtime.helpers import LENGTHS, NEW, RAGGED, answer, engine, prompts
from tests.runtime.recorded import RecordedGraphs, record
from tests.runtime.test_step import NO_NONZERO

SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


def replays(made: Any) -> int:
    return sum(len(program._replays) for program in made._memory._programs.values())


@pytest.mark.parametrize("family", NO_NONZERO)
@pytest.mark.parametrize("policy", ["dense", RAGGED])
def test_families(monkeypatch: pytest.MonkeyPatch, family: str, policy: str) -> None:
    made = record(monkeypatch, engine(policy, family))
    for lengths in (LENGTHS, (100, 37, 60)):
        found = made.generate(prompts(*lengths), NEW)
        assert [result.ids for result in found] == [answer(family, policy, length) for length in lengths]
    assert replays(made) == 1


@pytest.mark.parametrize("policy", policies.READERS)
def test_policies_that_read_by_query(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    made = record(monkeypatch, engine(policy))
    calls = [(200, 120, 137), (137, 200, 130)] if "rowcodes" in policy else [LENGTHS, (37, 100, 60)]
    for lengths in calls:
        wanted = [answer("llama", policy, length) for length in lengths]
        assert [result.ids for result in made.generate(prompts(*lengths), NEW)] == wanted
    assert 0 < made.stats().rows_read < 1
    levels = len(made.policy.retriever.segments)
    assert levels <= replays(made) <= 1 + levels


def test_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [engine(seed=2).generate(prompts(), NEW, **settings) for settings in ({}, SAMPLED, {"temperature": 2.0})]
    for settings, answers in zip(({}, SAMPLED, {"temperature": 2.0}), wanted, strict=True):
        assert record(monkeypatch, engine(seed=2)).generate(prompts(), NEW, **settings) == answers


def test_settings_change_without_a_new_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = record(monkeypatch, engine(seed=2)), engine(seed=2)
    for settings in (SAMPLED, {**SAMPLED, "top_k": 3}, {**SAMPLED, "temperature": 2.0, "repetition_penalty": 1.4}):
        assert made.generate(prompts(), 20, **settings) == plain.generate(prompts(), 20, **settings)
    assert replays(made) == 1


def test_end_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(monkeypatch, engine())
    for number in (3, 7):
        end = answer("llama", "dense", 37)[number]
        for length, result in zip(LENGTHS, made.generate(prompts(), NEW, stop=end), strict=True):
            whole = answer("llama", "dense", length)
            assert result.ids == (whole[: whole.index(end)] if end in whole else whole)
    assert replays(made) == 1


def test_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(monkeypatch, engine(max_batch=1))
    for new in (20, 200, 20):
        assert made.generate(prompts(100)[0], new)[0].ids == answer("llama", "dense", 100, new)
    # the longer answer took more room, so what had been recorded was of no more use
    assert {key[1] for key in made._memory._programs} == {128, 512}


@pytest.mark.parametrize("policy", ["dense", policies.RETRIEVERS[0]])
def test_the_making_of_steps_is_told_apart(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, slow, captured = record(monkeypatch, engine(policy)), 0.5, RecordedGraphs.capture

    def capture(graphs: RecordedGraphs, run: Any, what: str) -> Any:
        time.sleep(slow)
        return captured(graphs, run, what)

    monkeypatch.setattr(RecordedGraphs, "capture", capture)
    start = time.perf_counter()
    made.generate(prompts(60)[0], NEW)
    took, first = time.perf_counter() - start, made.stats()
    assert first.warm_up_s >= slow * (1 if policy == "dense" else 2)
    assert first.ttft < slow
    # nothing is left out, and nothing is told twice
    assert 0 < first.tpot * (NEW - 1) <= took - first.ttft - first.warm_up_s
    made.generate(prompts(60)[0], NEW)
    assert made.stats().warm_up_s == 0
    made.release()
    made.warm_up(60, NEW, batch=1)
    made.generate(prompts(60)[0], NEW)
    assert made.stats().warm_up_s == 0
