"""Runs of policies that read by query: what they read is measured, in stacks, alone and over given texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.eval.helpers import model, settings
from tests.eval.test_likelihood import perplexities
from tests.eval.test_runner import records
from tests.helpers import tiny
from tests.helpers.caches import decode, own_tensors, storage_nbytes
from tests.helpers.policies import READ_ALL, text
from tests.hf.test_retrieve_stack import still

from kvfold.core.policy import policy
from kvfold.eval.branch import branches
from kvfold.eval.likelihood import nats_per_token
from kvfold.hf.cache import Cache
from kvfold.hf.compat import cache_kwarg

__all__ = ["still"]

BESIDE = f"{text('snapkv', 0.5, allocator='ada')} + refinekv(cluster=4, tau=0.3)"
EVERYTHING = str(policy(READ_ALL[0]))
FEW = [
    str(policy(one))
    for one in (
        "refinekv(cluster=4, tau=0.5)",
        "quest(page=4, read=12, dense_layers=1)",
        BESIDE,
        "rowcodes(cluster=4, read=12)",
    )
]


@pytest.mark.parametrize("mode", ["stacked", "alone"])
def test_rows_read_are_measured(mode: str, tmp_path: Path) -> None:
    for record in records(tmp_path, settings([*FEW, text("snapkv", 0.5)], mode=mode)):
        results = {one.policy: one for one in record.results}
        assert results["dense"].rows_read == 1
        assert 0 < results[FEW[0]].rows_read < 0.9
        assert 0.5 < results[FEW[1]].rows_read < 0.9, "one of two layers reads everything"
        evicted = next(one for name, one in results.items() if name.startswith("snapkv") and "+" not in name)
        beside = next(one for name, one in results.items() if "+" in name)
        assert 0 < beside.rows_read < evicted.rows_read == pytest.approx(0.5, abs=0.02)
        assert beside.stored_tokens == evicted.stored_tokens
        assert beside.nbytes > evicted.nbytes, "summaries are held too"
        assert results["dense"].bytes_read == 1
        assert evicted.bytes_read == pytest.approx(evicted.rows_read)
        assert results["dense"].rows_scored is evicted.rows_scored is None
        for one in (results[name] for name in FEW):
            assert one.bytes_read is not None
            assert one.rows_scored is not None
            assert 0 < one.bytes_read < 1.2
            assert one.bytes_read != one.rows_read, "summaries are not as wide as rows"
            assert 0 < one.rows_scored < 0.25


@pytest.mark.usefixtures("still")
def test_both_modes_measure_the_same_reads(tmp_path: Path) -> None:
    found = [records(tmp_path / mode, settings(FEW, mode=mode)) for mode in ("stacked", "alone")]
    for stacked, alone in zip(*found, strict=True):
        for one, other in zip(stacked.results, alone.results, strict=True):
            assert one.output == other.output
            assert one.bytes_read == pytest.approx(other.bytes_read)
            assert one.rows_read == pytest.approx(other.rows_read)
            assert one.rows_scored == pytest.approx(other.rows_scored)


@pytest.mark.parametrize("mode", ["stacked", "alone"])
def test_one_token_is_what_the_question_reads(mode: str, tmp_path: Path) -> None:
    for record in records(tmp_path, settings(FEW, mode=mode, count=1, max_new_tokens=1)):
        for one in record.results:
            assert one.bytes_read == pytest.approx(one.rows_read)
            assert one.rows_scored == (None if one.policy == "dense" else 0.0)


@pytest.mark.parametrize("mode", ["stacked", "alone"])
def test_reading_everything_answers_as_dense(mode: str, tmp_path: Path) -> None:
    for record in records(tmp_path, settings(READ_ALL, mode=mode, count=2)):
        dense, *others = record.results
        assert {one.output for one in others} == {dense.output}
        assert [one.rows_read for one in others] == pytest.approx([1.0] * len(others))


def test_a_text_is_read_token_by_token(tmp_path: Path) -> None:
    ids = tiny.ids(90)
    for reads in FEW:
        cache, single = (Cache(model(), reads).prefill(ids[:, :60]) for _ in range(2))
        with torch.no_grad():
            logits = [single.model(input_ids=t[:, None], **{cache_kwarg(): single}).logits for t in ids[:, 60:-1].T]
        expected = torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0], ids[0, 61:])
        assert nats_per_token(cache, ids[:, 60:]) == pytest.approx(float(expected), abs=1e-4)
        assert cache.seen_tokens == (89,)
    for record in perplexities(tmp_path, policies=[*FEW, EVERYTHING]):
        results = {one.policy: one for one in record.results}
        assert 0 < results[FEW[0]].rows_read < 1
        assert results["dense"].bytes_read == 1
        assert results[FEW[0]].bytes_read != 1
        assert results[EVERYTHING].score == pytest.approx(results["dense"].score, abs=1e-4)


def test_budgets_of_one_retriever_share_summaries() -> None:
    grid = ["refinekv(cluster=4, tau=0.5)", "dense", "quest(page=4, read=8)", "refinekv(cluster=4, tau=0.1)", BESIDE]
    own = dict(branches(model(), grid, tiny.ids(90), None))
    first, last = own[grid[0]], own[grid[3]]
    assert storage_nbytes(own_tensors(first) + own_tensors(last)) == first.nbytes == last.nbytes
    for text_of, cache in own.items():
        alone = Cache(model(), text_of).prefill(tiny.ids(90))
        assert (cache.nbytes, str(cache.policy)) == (alone.nbytes, str(alone.policy))
        assert torch.equal(decode(cache, tiny.ids(9, seed=1)), decode(alone, tiny.ids(9, seed=1)))
