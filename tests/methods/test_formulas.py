"""Every evicting method against its formula in float64, over shapes, dtypes and ways of calling it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvfold.core import catalogue
from kvfold.core.interfaces import ScoreContext
from kvfold.kernels.scores import tiles

from . import references
from .helpers import EVICTORS, context, cut, evictor

WITH_REFERENCE = [case for case in EVICTORS if case != "random"]
PER_HEAD = [case for case in EVICTORS if evictor(case).per_head]


def expected(case: str, ctx: ScoreContext) -> Tensor:
    name, params = EVICTORS[case]
    return getattr(references, name)(ctx, **params)


def check(case: str, ctx: ScoreContext) -> None:
    found = evictor(case).score(ctx)
    assert found.dtype == torch.float32
    assert found.shape == ctx.keys.shape[:3]
    # CriticalKV's winners of stage one: above all else, whatever they are
    found = found.double().masked_fill(found > 1e37, torch.inf)
    torch.testing.assert_close(found, expected(case, ctx), rtol=1e-4, atol=2e-5)


def test_every_method_of_the_catalogue_is_tested() -> None:
    assert {name for name, _ in EVICTORS.values()} == {
        e.name for e in catalogue.methods("evict") if "kvfold.methods" in e.target
    }


@pytest.mark.parametrize("q_per_kv", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 15, 63])
@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_scores_follow_the_formula(case: str, rows: int, q_per_kv: int) -> None:
    check(case, context(rows, method=evictor(case), q_per_kv=q_per_kv, seed=rows + q_per_kv))


@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_scores_follow_the_formula_at_a_longer_odd_length(case: str) -> None:
    check(case, context(257, method=evictor(case), batch=1, kv_heads=1, q_per_kv=2))


@pytest.mark.parametrize("rows", [1, 15, 40])
@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_scores_follow_the_formula_where_rows_were_evicted(case: str, rows: int) -> None:
    # every observed query must see a row, as the newest rows of a real cache always stay
    ctx = context(rows, method=evictor(case), gaps=True)
    newest = ctx.positions.clone()
    newest[..., 0] = 0
    check(case, dataclasses.replace(ctx, positions=newest))


@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_scores_use_sinks_and_soft_cap_of_the_model(case: str) -> None:
    method = evictor(case)
    softcap = None if "ea" in case or "expected" in case else 1.5
    check(case, context(15, method=method, sinks=True, softcap=softcap))


def test_manifoldkv_turns_back_the_rotated_channels_alone() -> None:
    check("manifoldkv_pre", context(15, rotary_pairs=3))


def test_expected_attention_turns_the_rotated_channels_alone() -> None:
    check("expected_attention", context(15, rotary_pairs=3))


@pytest.mark.parametrize("case", WITH_REFERENCE)
def test_bfloat16_rows_are_rated_in_float32(case: str) -> None:
    check(case, context(63, method=evictor(case), dtype=torch.bfloat16))


@pytest.mark.parametrize("case", EVICTORS)
def test_scores_are_numbers_on_degenerate_rows(case: str) -> None:
    for rows in (1, 2, 20):
        ctx = context(rows, method=evictor(case))
        for keys in (torch.zeros_like(ctx.keys), torch.ones_like(ctx.keys), 1e4 * ctx.keys):
            changed = dataclasses.replace(ctx, keys=keys, values=torch.zeros_like(ctx.values))
            assert not evictor(case).score(changed).isnan().any()


@pytest.mark.parametrize("case", EVICTORS)
def test_scores_are_the_same_each_time_and_leave_the_input_alone(case: str) -> None:
    ctx = context(33, method=evictor(case))
    before = ctx.keys.clone(), ctx.values.clone()
    first = evictor(case).score(ctx)
    torch.manual_seed(1)
    assert torch.equal(first, evictor(case).score(ctx))
    assert torch.equal(before[0], ctx.keys)
    assert torch.equal(before[1], ctx.values)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("case", PER_HEAD)
def test_heads_are_rated_alike_alone_and_together(case: str, gaps: bool) -> None:
    ctx = context(40, method=evictor(case), gaps=gaps, sinks=True)
    together = evictor(case).score(ctx)
    for row in range(2):
        for head in range(2):
            alone = evictor(case).score(cut(ctx, row, head))
            torch.testing.assert_close(alone[0, 0], together[row, head], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", EVICTORS)
def test_tiles_do_not_change_scores(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(63, method=evictor(case))
    whole = evictor(case).score(ctx)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 100)
    torch.testing.assert_close(evictor(case).score(ctx), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["tova", "streamingllm"])
def test_methods_with_one_set_per_layer_rate_all_heads_alike(case: str) -> None:
    scores = evictor(case).score(context(20, method=evictor(case)))
    assert not evictor(case).per_head
    assert torch.equal(scores[:, 0], scores[:, 1])
