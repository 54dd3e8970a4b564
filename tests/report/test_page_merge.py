"""Which runs stand side by side, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.runs import POLICIES, TASKS, TEXTS, write_run

from kvfold.core.errors import DataError
from kvfold.eval.stats import compare
from kvfold.report.merge import gather
from kvfold.report.summary import Place, line_of, summarize


def small(path: Path, **changes: Any) -> str:
    write_run(path, **{"lengths": (4096,), "count": 8, **changes})
    return str(path)


def test_policies_of_two_runs_meet_on_the_same_samples(tmp_path: Path) -> None:
    first = small(tmp_path / "a", policies=POLICIES[:3])
    second = small(tmp_path / "b", policies=("dense", "snapkv(keep=0.5)"))
    evidence = gather([first, second])
    assert len(evidence.samples) == 8 * len(TASKS)
    assert evidence.policies == (*POLICIES[:3], "snapkv(keep=0.5)")
    assert all(set(sample.results) == set(evidence.policies) for sample in evidence.samples)
    assert f"{8 * len(TASKS)} answers are in more than one run" in evidence.notes[-1]


def test_a_timed_run_adds_times_to_scores_of_another(tmp_path: Path) -> None:
    evidence = gather([small(tmp_path / "a"), small(tmp_path / "b", count=3, timed=True)])
    timed = [s for s in evidence.samples if s.results["dense"].tpot_s is not None]
    assert len(timed) == 3 * len(TASKS)
    row = summarize(evidence).rows[Place(None, 4096, False)][0]
    assert (row.count, row.timed) == (8 * len(TASKS), 3 * len(TASKS))


def test_times_of_another_device_are_left_out_and_said(tmp_path: Path) -> None:
    first = small(tmp_path / "a", timed=True, count=2)
    second = small(tmp_path / "b", timed=True, count=2, seed=1, device="cpu")
    evidence = gather([first, second])
    assert sum(s.results["dense"].tpot_s is not None for s in evidence.samples) == 2 * len(TASKS)
    assert any("Times of" in note and "cpu" in note for note in evidence.notes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "0", "model": "other"}, "model='other'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"template": "chat"}, "template='chat'"),
        ({"max_new_tokens": 8}, "max_new_tokens=8"),
    ],
)
def test_runs_that_cannot_be_merged_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match="make one report for each") as refusal:
        gather([small(tmp_path / "a"), small(tmp_path / "b", **change)])
    assert named in str(refusal.value)
    assert str(tmp_path / "b") in str(refusal.value)


def test_a_task_with_other_parameters_is_refused(tmp_path: Path) -> None:
    first, second = small(tmp_path / "a"), small(tmp_path / "b", seed=1)
    settings = tmp_path / "b" / "run.json"
    settings.write_text(settings.read_text().replace('"needles": 4', '"needles": 8'))
    with pytest.raises(DataError, match=TASKS[0]):
        gather([first, second])


def test_one_folder_twice_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path / "a")
    with pytest.raises(DataError, match="named twice"):
        gather([path, f"{tmp_path}/./a"])


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    path = small(tmp_path / "a")
    next((tmp_path / "a" / "records").glob("*/*/*.json")).unlink()
    assert any("23 of 24" in note for note in gather([path]).notes)


def test_a_sample_without_dense_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path / "a", policies=POLICIES[1:3])
    with pytest.raises(DataError, match="no answer of dense"):
        gather([path])


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path / "a", count=1)
    record = next((tmp_path / "a" / "records").glob("*/*/*.json"))
    record.write_text(record.read_text().replace('"score": 1.0', '"score": NaN', 1))
    with pytest.raises(DataError, match=r"damaged|finite"):
        gather([path])


def test_rows_are_what_the_statistics_say(tmp_path: Path) -> None:
    evidence = gather([small(tmp_path / "a", count=12)])
    summary = summarize(evidence)
    for policy in POLICIES[1:]:
        scores = [[s.results[policy].score for s in evidence.samples if s.record.task == task] for task in TASKS]
        dense = [[s.results["dense"].score for s in evidence.samples if s.record.task == task] for task in TASKS]
        (row,) = (row for row in summary.rows[Place(None, 4096, False)] if row.policy == policy)
        assert row.difference == compare(scores, dense)
        (one,) = (row for row in summary.rows[Place(TASKS[0], 4096, False)] if row.policy == policy)
        assert one.difference == compare(scores[:1], dense[:1])
        assert one.factor == pytest.approx(1 / one.share)


def test_the_front_is_what_nothing_beats(tmp_path: Path) -> None:
    rows = summarize(gather([small(tmp_path / "a")])).rows[Place(None, 4096, False)]
    for row in rows:
        better = [o for o in rows if o.share <= row.share and o.mean >= row.mean and o is not row]
        assert row.front == all((o.share, o.mean) == (row.share, row.mean) for o in better)


def test_a_policy_missing_in_a_task_has_no_overall_row(tmp_path: Path) -> None:
    first = small(tmp_path / "a", policies=POLICIES[:2])
    second = small(tmp_path / "b", policies=("dense", "snapkv(keep=0.5)"), tasks=TASKS[:1])
    summary = summarize(gather([first, second]))
    assert [row.policy for row in summary.rows[Place(None, 4096, False)]] == list(POLICIES[:2])
    assert any(note.startswith("snapkv(keep=0.5) did not answer every task") for note in summary.notes)


def test_where_lower_is_better_more_is_worse(tmp_path: Path) -> None:
    rows = summarize(gather([small(tmp_path / "a", tasks=(TEXTS,))])).rows[Place(TEXTS, 4096, False)]
    assert all(row.lower_is_better for row in rows)
    found = {row.policy: row for row in rows}
    assert found["dense"].outcome is None
    for policy in POLICIES[1:]:
        gap = found[policy].difference
        assert gap is not None
        assert gap.mean > gap.reference
        assert (gap.verdict, found[policy].outcome) == ("higher", "worse")
    # the least bytes and the fewest nats are never beaten; many nats for more bytes are
    assert found["dense"].front
    assert found["manifoldkv(keep=0.1)"].front
    assert not found["snapkv(keep=0.5)"].front
    usual = summarize(gather([small(tmp_path / "b")])).rows[Place(None, 4096, False)]
    assert {row.outcome for row in usual if row.difference and row.difference.verdict == "lower"} == {"worse"}


def test_nats_are_not_averaged_with_scores(tmp_path: Path) -> None:
    whole = summarize(gather([small(tmp_path / "a", tasks=(*TASKS, TEXTS))]))
    without = summarize(gather([small(tmp_path / "b")]))
    assert whole.rows[Place(None, 4096, False)] == without.rows[Place(None, 4096, False)]
    assert any("nats per token, lower is better" in note for note in whole.notes)
    assert not any("nats" in note for note in without.notes)
    texts = summarize(gather([small(tmp_path / "c", tasks=(TEXTS,))]))
    alone, all_tasks = (texts.rows[Place(task, 4096, False)] for task in (TEXTS, None))
    assert [row.mean for row in all_tasks] == [row.mean for row in alone]
    assert not any("nats" in note for note in texts.notes)


def test_turns_are_said_to_count_as_samples(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lengths=(4096,), count=2, tasks=TASKS[:1])
    said = "Each turn of a conversation counts as a sample"
    assert not any(said in note for note in summarize(gather([tmp_path / "a"])).notes)
    for turn, record in enumerate(folder.records()):
        folder.write(record.model_copy(update={"facts": {"group": 0, "turn": turn}}))
    assert any(said in note for note in summarize(gather([tmp_path / "a"])).notes)


def test_the_first_token_is_timed_where_the_cache_was_filled_for_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lengths=(4096,), count=5, tasks=TASKS[:1], timed=True)
    first, *later = folder.records()
    for record in later:
        turns = [one.model_copy(update={"prefill_s": 0.0, "ttft_s": 0.01}) for one in record.results]
        folder.write(record.model_copy(update={"results": tuple(turns)}))
    rows = summarize(gather([tmp_path / "a"])).rows[Place(TASKS[0], 4096, False)]
    assert [row.ttft_s for row in rows] == [result.ttft_s for result in first.results]
    assert {row.timed for row in rows} == {5}


def test_arrivals_go_with_the_text_that_arrived(tmp_path: Path) -> None:
    first = small(tmp_path / "a", count=2)
    same = gather([first, small(tmp_path / "b", count=2, timed=True)])
    assert all(result.arrivals for sample in same.samples for result in sample.results.values())
    other = gather([first, small(tmp_path / "c", count=2, timed=True, output="something else")])
    for sample in other.samples:
        for result in sample.results.values():
            assert result.ttft_s is not None
            assert result.arrivals is None


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("manifoldkv(keep=0.25)", ("manifoldkv", "manifoldkv", "")),
        (
            "manifoldkv(keep=64, allocator=ada, metric=l1)",
            ("manifoldkv(allocator=ada, metric=l1)", "manifoldkv", "ada"),
        ),
        ("snapkv(keep=0.5) + ojakv(rank=0.6)", ("snapkv + ojakv", "snapkv + ojakv", "")),
        ("what (is this", ("what (is this", "what (is this", "")),
    ],
)
def test_lines_join_budgets(policy: str, line: tuple[str, str, str]) -> None:
    assert line_of(policy) == line


def test_tasks_that_differ_between_lengths_are_said_to(tmp_path: Path) -> None:
    said = "Not every task was asked at every length"
    write_run(tmp_path / "a", tasks=("vt", "qa_1"), lengths=(4096, 16384), count=2)
    assert not any(said in note for note in summarize(gather([tmp_path / "a"])).notes)
    write_run(tmp_path / "b", tasks=("vt",), lengths=(4096,), count=2)
    write_run(tmp_path / "c", tasks=("qa_1",), lengths=(16384,), count=2)
    assert any(said in note for note in summarize(gather([tmp_path / "b", tmp_path / "c"])).notes)
