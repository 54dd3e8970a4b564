"""Answers of a run: the same in stacks as one by one, in bytes too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.eval.helpers import Digits, byte_tokenizer, model, settings
from tests.helpers import tiny
from tests.helpers.policies import METHODS, text

import kvfold.eval.runner as runner
from kvfold.core.errors import ConfigError, DataError, UnsupportedError
from kvfold.eval.record import RunFolder, RunSettings, SampleRecord

POLICIES = [
    *(text(name, keep) for name in METHODS for keep in (0.3, 0.6)),
    text("manifoldkv", 0.4, allocator="ada"),
    text("kvzip", 0.25, allocator="uniform"),
    text("keydiff", 0.4, chunk=16),
    text("knorm", "24KiB"),
    text("h2o", "24KiB"),
]


def records(folder: Path, wanted: RunSettings, **options: Any) -> list[SampleRecord]:
    owner = options.pop("model", None)
    tasks = options.pop("tasks", [Digits()])
    runner.run(owner or model(), byte_tokenizer(), tasks, wanted, RunFolder(folder), **options)
    return RunFolder(folder).records()


def untimed(record: SampleRecord) -> dict[str, Any]:
    plain = record.model_dump()
    for result in plain["results"]:
        for name in ("prefill_s", "ttft_s", "tpot_s", "arrivals", "peak_nbytes"):
            result[name] = None
    return plain


@pytest.mark.parametrize("query_aware", [False, True])
def test_stacked_answers_equal_answers_alone_for_every_method(tmp_path: Path, query_aware: bool) -> None:
    grid: dict[str, Any] = {"policies": POLICIES, "query_aware": [query_aware], "lengths": [80, 120], "count": 2}
    stacked = records(tmp_path / "a", settings(**grid), batch_samples=2, stack_rows=7)
    alone = records(tmp_path / "b", settings(**grid, mode="alone"))
    assert [untimed(one) for one in stacked] == [untimed(one) for one in alone]
    assert {one.length for one in stacked} == {80, 120}
    # answers that are all alike would prove nothing
    assert len({result.output for one in stacked for result in one.results}) > 3


def test_every_policy_gets_its_own_bytes_and_dense_comes_first(tmp_path: Path) -> None:
    (first, *_) = records(tmp_path, settings(["h2o(keep=0.5)", "kvzip(keep=0.5)", "manifoldkv(keep=0.5)"]))
    dense, *others = first.results
    assert dense.policy == "dense"
    assert dense.rows_read == 1
    assert dense.nbytes >= dense.dense_nbytes
    assert all(one.nbytes < dense.nbytes and one.stored_tokens < dense.stored_tokens for one in others)
    assert first.prompt_tokens == 96 - first.index % 5
    assert first.facts == {"depth": 0.0}


def test_times_are_measured_alone_and_only_there(tmp_path: Path) -> None:
    (one, *_) = records(tmp_path / "a", settings(mode="alone", count=1))
    for result in one.results:
        assert result.prefill_s is not None
        assert result.ttft_s is not None
        assert 0 < result.prefill_s < result.ttft_s
        assert result.tpot_s is not None
        assert result.peak_nbytes is None  # counted on a GPU alone
    (one, *_) = records(tmp_path / "b", settings(count=1))
    assert one.results[0].ttft_s is None


def test_query_aware_and_agnostic_stand_beside_each_other(tmp_path: Path) -> None:
    found = records(tmp_path, settings(query_aware=[False, True]))
    assert [(one.query_aware, one.index) for one in found] == [(aware, i) for aware in (False, True) for i in range(3)]
    agnostic, aware = found[1], found[4]
    assert agnostic.uid == aware.uid
    assert agnostic.prompt_tokens == aware.prompt_tokens
    # the question is part of what is compressed
    assert aware.results[0].dense_nbytes > agnostic.results[0].dense_nbytes


def test_progress_counts_samples(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    records(tmp_path, settings(count=3), batch_samples=2, progress=lambda *now: said.append(now))
    assert said == [(0, 3, "digits 96"), (2, 3, "digits 96"), (3, 3, "done")]


def test_max_new_tokens_bounds_and_never_raises_a_tasks_own(tmp_path: Path) -> None:
    short = records(tmp_path / "a", settings(max_new_tokens=2))
    long = records(tmp_path / "b", settings(max_new_tokens=99))
    own = records(tmp_path / "c", settings())
    assert [untimed(one) for one in long] == [untimed(one) for one in own]
    pairs = zip(short, own, strict=True)
    assert all(a.results[0].output == "" or b.results[0].output.startswith(a.results[0].output[:1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policies": []}, "policies must be at least one"),
        ({"tasks": []}, "tasks must be at least one"),
        ({"lengths": []}, "lengths must be at least one"),
        ({"query_aware": []}, "query_aware must be at least one"),
        ({"count": 0}, "n must be at least 1 sample"),
        ({"lengths": [0]}, "lengths must be at least 1 token"),
        ({"lengths": [96, 9000]}, "at most 8192, the model's context, got 9000"),
        ({"tasks": [Digits(), Digits(limit=9)]}, "tasks must be different"),
        ({"policies": ["manifolkv(keep=0.5)"]}, "did you mean manifoldkv"),
        ({"count": 1.5}, "n must be at least 1 sample per task and length, got 1.5; give a whole number"),
        ({"lengths": 96}, "lengths must be a list, got 96"),
        ({"lengths": ["96"]}, "lengths must be at least 1 token, got '96'; give a whole number"),
        ({"lengths": [float("nan")]}, "lengths must be"),
        ({"policies": "dense"}, "policies must be a list, got 'dense'; put a single one"),
        ({"query_aware": True}, "query_aware must be a list, got True"),
        ({"chunk_size": 1.5}, "chunk_size must be a whole number of at least 1, got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_a_malformed_grid_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(**changes)


def test_a_length_that_a_task_cannot_make_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 60"):
        records(tmp_path / "run", settings(lengths=[96, 50]))
    assert not (tmp_path / "run").exists()


def test_stacks_refuse_sliding_models_and_eviction_while_decoding(tmp_path: Path) -> None:
    sliding = tiny.ours("qwen2_sliding", vocab_size=len(byte_tokenizer()))
    with pytest.raises(UnsupportedError, match="Qwen2ForCausalLM"):
        records(tmp_path / "a", settings(model=sliding), model=sliding)
    found = records(tmp_path / "b", settings(model=sliding, mode="alone"), model=sliding)
    assert len(found) == 3
    moving = ["knorm(keep=48, every=1)"]
    with pytest.raises(UnsupportedError, match="every=1"):
        records(tmp_path / "c", settings(moving))
    records(tmp_path / "d", settings(moving, mode="alone"))


def test_a_record_of_another_sample_is_refused(tmp_path: Path) -> None:
    wanted = settings()
    (first, *_) = records(tmp_path, wanted)
    RunFolder(tmp_path).write(first.model_copy(update={"uid": "0" * 16}))
    with pytest.raises(DataError, match="another sample"):
        records(tmp_path, wanted)


def test_a_task_of_another_version_or_parameters_is_refused(tmp_path: Path) -> None:
    records(tmp_path, settings())
    changed = dataclasses.replace(Digits(), limit=5)
    with pytest.raises(DataError, match="tasks="):
        records(tmp_path, settings(tasks=[changed]), tasks=[changed])
