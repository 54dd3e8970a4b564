"""Texts that are scored and not generated: teacher forced under each policy's cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Invoke, invoke, last_json, model_dir, refused
from tests.eval.helpers import Digits, byte_tokenizer, model, settings
from tests.eval.test_runner import records, untimed
from tests.helpers import tiny
from tests.helpers.policies import text

import kvfold.eval.likelihood as likelihood
from kvfold.core.errors import ConfigError
from kvfold.eval.likelihood import nats_per_token
from kvfold.eval.prompt import build_text
from kvfold.eval.record import SampleRecord
from kvfold.eval.sample import TextSample
from kvfold.eval.tasks.perplexity import Perplexity
from kvfold.hf.cache import Cache

__all__ = ["invoke", "model_dir"]

TASK = Perplexity(continuation=40)
POLICIES = [text("manifoldkv", 0.4), text("snapkv", 0.3, allocator="ada"), text("kvzip", 0.5), text("knorm", 0.2)]


def reference(ids: torch.Tensor, scored: int) -> float:
    """Mean negative log-likelihood of the last tokens under the stock model."""
    with torch.no_grad():
        logits = model()(input_ids=ids, use_cache=False).logits[0, -scored - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -scored:]))


def perplexities(folder: Path, **changes: Any) -> list[SampleRecord]:
    wanted = settings(**{"tasks": [TASK], "policies": POLICIES, "lengths": [200], "count": 3, **changes})
    return records(folder, wanted, tasks=[TASK])


@pytest.mark.parametrize("piece", [512, 7, 1])
def test_dense_is_the_stock_models_loss_however_the_text_is_fed(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(likelihood, "_PIECE", piece)
    ids = tiny.ids(90)
    cache = Cache(model()).prefill(ids[:, :60])
    assert nats_per_token(cache, ids[:, 60:]) == pytest.approx(reference(ids, 29), abs=1e-5)
    assert cache.seen_tokens == (89,)


def test_the_text_is_kept_whole_and_no_policy_acts_on_it() -> None:
    ids = tiny.ids(120)
    cache = Cache(model(), text("knorm", 0.3)).prefill(ids[:, :60])
    held = int(cache.stored_tokens(0)[0, 0])
    nats_per_token(cache, ids[:, 60:])
    assert cache.stored_tokens(0).unique().tolist() == [held + 59]


def test_a_policy_that_evicts_while_decoding_does_so_while_it_reads() -> None:
    ids = tiny.ids(120)
    cache = Cache(model(), "knorm(keep=40, every=1, sink_tokens=2, recent_tokens=4)").prefill(ids[:, :60])
    nats_per_token(cache, ids[:, 60:])
    assert cache.stored_tokens(0).unique().tolist() == [40]


def test_records_hold_nats_of_the_continuation_alone(tmp_path: Path) -> None:
    found = perplexities(tmp_path)
    for record, sample in zip(found, TASK.samples(3, 200, 0, len), strict=True):
        assert (record.metric, record.answers) == ("nll", (sample.continuation,))
        assert record.prompt_tokens == len(sample.context) + len(sample.continuation)
        ids = byte_tokenizer()(sample.context + sample.continuation, return_tensors="pt").input_ids
        dense, *others = record.results
        assert dense.score == pytest.approx(reference(ids, len(sample.continuation)), abs=1e-5)
        assert len({one.score for one in record.results}) == 5
        assert all(one.nbytes < dense.nbytes for one in others)
        assert all(one.output == "" and one.ttft_s is None and one.tpot_s is None for one in record.results)


def test_modes_and_pieces_of_the_prefill_agree(tmp_path: Path) -> None:
    stacked = perplexities(tmp_path / "a")
    alone = perplexities(tmp_path / "b", mode="alone", chunk_size=None)
    for one, other in zip(stacked, alone, strict=True):
        scores = [[result.score for result in record.results] for record in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        assert all(result.prefill_s for result in other.results)
    kept = [[{**result, "score": 0} for result in untimed(one)["results"]] for one in (*stacked, *alone)]
    assert kept[:3] == kept[3:]


def test_keeping_everything_changes_nothing(tmp_path: Path) -> None:
    (record,) = perplexities(tmp_path, policies=["manifoldkv(keep=1.0)"], count=1)
    dense, whole = record.results
    assert whole.score == dense.score


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query_aware": [False, True]}, "query_aware must be False for perplexity, which asks nothing, got True"),
        ({"template": "chat"}, "template must be none for perplexity, which asks nothing, got 'chat'"),
    ],
)
def test_what_a_text_cannot_have_is_refused_before_anything_runs(tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        perplexities(tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_texts_too_short_to_be_cut_are_refused() -> None:
    for context, continuation in (("", " b"), ("a", " b"), ("ab", "")):
        with pytest.raises(ConfigError, match="context must have at least two tokens and continuation one"):
            build_text(TextSample(task="t", index=0, context=context, continuation=continuation), byte_tokenizer())


def test_texts_and_questions_share_a_run(tmp_path: Path) -> None:
    both = [Digits(), TASK]
    found = records(tmp_path, settings(tasks=both, lengths=[96], count=2), tasks=both)
    assert [(one.task, one.metric) for one in found] == [("digits", "match_all")] * 2 + [("perplexity", "nll")] * 2


def arguments(model: Path, out: Path, *more: Any) -> list[Any]:
    policy = "knorm(keep=0.2, sink_tokens=2, recent_tokens=8)"
    tasks = ("--tasks", "perplexity(continuation=60)", "--lengths", 300, "--n", 7, "--dtype", "float32")
    return ["eval", model, "--out", out, "--policies", policy, *tasks, *more]


def test_the_command_says_that_lower_is_better(invoke: Invoke, model_dir: Path, tmp_path: Path) -> None:
    result = invoke(*arguments(model_dir, tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    assert "perplexity, 300 tokens, nats per token, lower is better, n=7" in result.stdout
    document = last_json(invoke(*arguments(model_dir, tmp_path / "run", "--json")))
    dense = document["rows"][0]
    assert dense["lower_is_better"]
    assert f"perplexity {math.exp(dense['mean']):.2f}" in result.stdout
    chat = invoke(*arguments(model_dir, tmp_path / "other", "--template", "chat"))
    assert "template must be none for perplexity" in refused(chat)
