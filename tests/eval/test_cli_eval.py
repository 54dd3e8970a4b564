"""``kvfold eval`` as a user types it: grids, tables, JSON, going on, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Invoke, invoke, last_json, model_dir, refused

from kvfold.cli._grid import listed, read_lengths, read_policies
from kvfold.core.errors import ConfigError
from kvfold.eval.record import RunFolder

__all__ = ["invoke", "model_dir"]

SMALL = "sink_tokens=2, recent_tokens=8"
# the model's context is 512 bytes
TINY: tuple[Any, ...] = (
    "--tasks",
    "niah_single_1",
    "--lengths",
    500,
    "--n",
    2,
    "--max-new-tokens",
    3,
    "--dtype",
    "float32",
)


def arguments(model: Path, out: Path, *more: Any, policies: str = f"knorm(keep=0.5, {SMALL})") -> list[Any]:
    return ["eval", model, "--out", out, "--policies", policies, *TINY, *more]


def test_tables_say_score_difference_verdict_and_bytes(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    result = invoke(*arguments(model_dir, tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    for expected in ("niah_single_1, 500 tokens, question not seen, n=2", "dense", "knorm", "distinguishable", "x"):
        assert expected in result.stdout
    assert len(RunFolder(tmp_path / "run").records()) == 2


def test_tables_say_what_is_read_where_that_is_not_what_is_held(
    invoke: Invoke, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plain = invoke(*arguments(model_dir, tmp_path / "plain"))
    assert "read" not in plain.stdout
    reads = "refinekv(cluster=8, tau=0.5)"
    result = invoke(*arguments(model_dir, tmp_path / "run", policies=reads))
    lines = result.stdout.splitlines()
    (row,) = (
        row
        for row in last_json(invoke(*arguments(model_dir, tmp_path / "run", "--json", policies=reads)))["rows"]
        if row["policy"] == reads and row["task"] is not None
    )
    heading = next(i for i, line in enumerate(lines) if "smaller" in line)
    assert lines[heading + 1].split()[-1] == "read"
    assert "read: bytes read per token, of what dense reads" in result.stdout
    assert f"{100 * row['bytes_read']:.1f} %" in result.stdout
    assert row["rows_scored"] > 0
    assert max(map(len, lines)) <= 80


def test_json_is_the_last_line(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    both = ("--query-aware", "--query-agnostic", "--json")
    document = last_json(invoke(*arguments(model_dir, tmp_path / "run", *both)))
    assert document["settings"]["query_aware"] == [False, True]
    assert document["settings"]["lengths"] == [500]
    rows = [row for row in document["rows"] if row["task"] == "niah_single_1"]
    assert [row["query_aware"] for row in rows] == [False, False, True, True]
    dense, knorm = rows[:2]
    assert dense["difference"] is None
    assert knorm["difference"]["verdict"] == "not distinguishable"
    assert knorm["factor"] > 1.5
    json.dumps(document, allow_nan=False)


def test_the_same_command_goes_on_and_another_is_refused_by_name(
    invoke: Invoke, model_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = last_json(invoke(*arguments(model_dir, run, "--json")))
    (lost, *_) = sorted((run / "records").rglob("*.json"))
    before = lost.read_bytes()
    lost.unlink()
    assert last_json(invoke(*arguments(model_dir, run, "--json"))) == first
    assert lost.read_bytes() == before
    assert "seed=0, asked for 1" in refused(invoke(*arguments(model_dir, run, "--seed", 1)))
    lost.write_text(before.decode().replace('"schema_version": 2', '"schema_version": 7'))
    assert "schema version 7" in refused(invoke(*arguments(model_dir, run)))
    lost.write_text(before.decode()[:40])
    assert "is damaged" in refused(invoke(*arguments(model_dir, run)))


def test_timed_runs_show_times(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    document = last_json(invoke(*arguments(model_dir, tmp_path / "run", "--mode", "alone", "--n", 1, "--json")))
    assert all(row["ttft_s"] > 0 and row["timed"] == 1 for row in document["rows"])


def test_prompts_can_go_through_the_chat_template(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    invoke(*arguments(model_dir, tmp_path / "run", "--template", "chat", "--lengths", 480))
    plain, *_ = RunFolder(tmp_path / "run").records()
    assert plain.length == 480


def test_policies_come_one_by_one_or_as_a_grid() -> None:
    assert read_policies(["manifoldkv(keep=0.5); keydiff(keep=0.25, allocator=ada)", "dense"], None, None, None) == [
        "manifoldkv(keep=0.5)", "keydiff(keep=0.25, allocator=ada)", "dense",
    ]  # fmt: skip
    grid = read_policies(None, ["manifoldkv,keydiff(sink_tokens=0)"], ["uniform, ada"], ["0.5,25%", "1024"])
    assert len(grid) == 12
    assert grid[0] == read_policies(["manifoldkv(keep=0.5, allocator=uniform)"], None, None, None)[0]
    assert "keydiff(keep=1024, allocator=ada, sink_tokens=0)" in grid
    assert len(read_policies(["knorm(keep=0.5)"], ["knorm"], None, ["0.5,0.50"])) == 1
    assert read_policies(None, ["kvzip"], None, ["0.5"]) == ["kvzip(keep=0.5)"]


def test_values_are_split_outside_of_brackets() -> None:
    assert listed(["a(b=1, c=[2,3]), d", "", "e,"]) == ["a(b=1, c=[2,3])", "d", "e"]
    assert read_lengths(["4096,16K", "2k"]) == [4096, 16384, 2048]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ((None, ["knorm"], None, None), "--methods needs --keep"),
        ((None, None, None, ["0.5"]), "--keep needs --methods"),
        ((None, None, ["ada"], None), "--allocators needs --methods"),
        ((None, None, None, None), "policies must be at least one"),
        (([" ; "], None, None, None), "policies must be at least one"),
        ((None, ["knorm(keep=0.5)"], None, ["0.5"]), "keep must be given once"),
        ((None, ["knorm + tova"], None, ["0.5"]), "separated by commas"),
        ((None, ["knrm"], None, ["0.5"]), "did you mean"),
        ((["knorm(keep=0.5"], None, None, None), "balanced brackets"),
    ],
)
def test_a_grid_that_cannot_be_read_is_named(parts: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_policies(*parts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (("--tasks", "niah_multykey_2"), "niah_multikey_2"),
        (("--tasks", "niah_single_1"), "tasks must be different from each other"),
        (("--lengths", "4Q"), "--lengths must be whole numbers of tokens, got '4Q'"),
        (("--lengths", "513"), "at most 512, the model's context, got 513"),
        (("--lengths", "0"), "lengths must be at least 1 token, got 0"),
        (("--n", "0"), "n must be at least 1"),
        (("--data", "nowhere"), "--data must be an existing folder, got 'nowhere'"),
        (("--suite", "longbench:nowhere"), "nowhere"),
        (("--suite", "longbench"), "--suite"),
        (("--policies", "knrm(keep=0.5)"), "did you mean"),
        (("--keep", "0.5"), "--keep needs --methods"),
        (("--mode", "both"), "both"),
        (("--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        (("--policies", "knorm(keep=64, every=4)"), "mode 'alone'"),
    ],
)
def test_mistakes_are_one_line(
    invoke: Invoke, model_dir: Path, tmp_path: Path, changes: tuple[str, ...], named: str
) -> None:
    assert named in refused(invoke(*arguments(model_dir, tmp_path / "run", *changes)))
    assert not (tmp_path / "run").exists()


def test_models_and_folders_that_are_none(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    assert "check the path" in refused(invoke(*arguments(tmp_path / "nothing", tmp_path / "run")))
    (tmp_path / "encoder").mkdir()
    config = {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": 8,
        "num_layers": 1,
        "num_heads": 1,
        "vocab_size": 9,
    }
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config))
    (tmp_path / "encoder" / "model.safetensors").write_bytes(b"")
    assert "decoder-only" in refused(invoke(*arguments(tmp_path / "encoder", tmp_path / "run")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    assert "holds no run" in refused(invoke(*arguments(model_dir, tmp_path / "full")))


def test_nothing_to_ask_is_refused(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    rest = ("--policies", "knorm(keep=0.5)", "--lengths", 500)
    assert "tasks must be at least one" in refused(invoke("eval", model_dir, "--out", tmp_path / "run", *rest))
    assert "lengths must be at least one" in refused(
        invoke("eval", model_dir, "--out", tmp_path / "run", *rest[:2], "--tasks", "vt")
    )


def test_files_of_a_suite_are_tasks(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"dataset": name, "context": "Ships. " * (3 + index), "input": "Who?", "answers": ["x"], "all_classes": None}
        for name in ("repobench-p", "passage_retrieval_en")
        for index in range(3)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite = (
        "--suite",
        f"longbench:{tmp_path / 'data'}",
        "--lengths",
        500,
        "--max-new-tokens",
        2,
        "--out",
        tmp_path / "run",
    )
    policy = ("--policies", f"knorm(keep=0.5, {SMALL})")
    document = last_json(invoke("eval", model_dir, *suite, *policy, "--n", 2, "--json"))
    assert [task["name"] for task in document["settings"]["tasks"]] == [
        "longbench/repobench-p",
        "longbench/passage_retrieval_en",
    ]
    assert {row["task"] for row in document["rows"]} == {
        None,
        "longbench/repobench-p",
        "longbench/passage_retrieval_en",
    }
    assert document["notes"] == []
    assert last_json(invoke("eval", model_dir, *suite, *policy, "--n", 2, "--json")) == document
    line = refused(invoke("eval", model_dir, *suite[:-1], tmp_path / "other", *policy, "--n", 4))
    assert "n must be at most 3 for longbench/" in line
