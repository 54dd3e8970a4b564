"""Steps of RefineKV on rows made by hand, against the study of summaries, and the rule for its threshold."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.caches import decode

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.eval.inspect import Measurements, advise, inspect_model
from kvfold.eval.inspect.capture import LATER_QUERIES, MIN_TOKENS, LayerRows, capture
from kvfold.eval.inspect.reading import EVERY, TAUS, Point, Reading, Steps, summarise_steps, take_steps
from kvfold.eval.inspect.threshold import MEDIAN, P95, choose_tau, tau_reasons
from kvfold.eval.study.rows import StudyRows
from kvfold.eval.study.sight import sights
from kvfold.eval.study.summaries import _read, passing

CLUSTER = 16
TOKENS = 5 * CLUSTER + 9
SAMPLES = LATER_QUERIES // EVERY


@cache
def measured() -> Measurements:
    return inspect_model(tiny.ours(), tiny.ids(MIN_TOKENS))


def made(keys: torch.Tensor, queries: torch.Tensor, *, sinks: torch.Tensor | None = None) -> LayerRows:
    """Rows of a context and of the later queries, ``[kv_heads, tokens + LATER_QUERIES, 16]``."""
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(3))
    sides = [(side[None, :, :-LATER_QUERIES], side[None, :, -LATER_QUERIES:]) for side in (keys, values)]
    return LayerRows(
        layer_idx=0,
        num_layers=1,
        keys=sides[0][0],
        values=sides[1][0],
        later_keys=sides[0][1],
        later_values=sides[1][1],
        queries=queries[None],
        scale=0.25,
        softcap=None,
        sinks=sinks,
        rope=None,
    )


def random_rows(kv_heads: int = 2, q_per_kv: int = 3, *, sinks: bool = False) -> LayerRows:
    make = torch.Generator().manual_seed(5)
    keys = torch.randn(kv_heads, TOKENS + LATER_QUERIES, 16, generator=make)
    # later clusters are ever narrower, so that every threshold has some on its other side
    keys *= 0.4 ** (torch.arange(TOKENS + LATER_QUERIES) // CLUSTER)[:, None]
    queries = torch.randn(kv_heads * q_per_kv, LATER_QUERIES, 16, generator=make)
    learned = torch.randn(kv_heads * q_per_kv, generator=make) if sinks else None
    return made(keys, queries, sinks=learned)


def points_of(rows: LayerRows, taus: tuple[float, ...] = TAUS) -> tuple[Point, ...]:
    found = summarise_steps([take_steps(rows, taus)], taus)
    assert found is not None
    return found.points


def newest_share(tokens: int) -> float:
    """Of the rows that a sampled query sees, what no cluster covers."""
    positions = range(tokens + EVERY - 1, tokens + LATER_QUERIES, EVERY)
    return sum((at % CLUSTER + 1) / (at + 1) for at in positions) / len(positions)


def test_keys_that_are_all_alike_need_no_rows() -> None:
    keys = torch.ones(1, TOKENS + LATER_QUERIES, 16)
    for point in points_of(made(keys, torch.ones(2, LATER_QUERIES, 16))):
        assert point.rows == pytest.approx(newest_share(TOKENS))
        assert point.p95 < 1e-5


def test_a_peak_is_read_and_little_else() -> None:
    keys = torch.zeros(1, TOKENS + LATER_QUERIES, 16)
    keys[0, 21, 0] = 40.0
    queries = torch.zeros(2, LATER_QUERIES, 16)
    queries[..., 0] = 4.0
    rows = made(keys, queries)
    one = sum(CLUSTER / (at + 1) for at in range(TOKENS + EVERY - 1, TOKENS + LATER_QUERIES, EVERY)) / SAMPLES
    for point in points_of(rows):
        assert point.rows == pytest.approx(newest_share(TOKENS) + one)
        assert point.p95 < 1e-5
    # a risk is at most 4
    lost = points_of(rows, (4.0,))[0]
    assert lost.rows == pytest.approx(newest_share(TOKENS))
    assert lost.median > 0.5


def test_at_zero_everything_is_read() -> None:
    point = points_of(random_rows(), (0.0,))[0]
    assert (point.rows, point.scored) == (pytest.approx(1), pytest.approx(1 / CLUSTER, rel=0.1))
    assert point.p95 < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("q_per_kv", [1, 3])
@pytest.mark.parametrize("tile", [1, 1 << 25])
def test_steps_are_those_of_the_study(q_per_kv: int, sinks: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.eval.inspect.reading._TILE_ELEMENTS", tile)
    rows = random_rows(q_per_kv=q_per_kv, sinks=sinks)
    positions = tuple(range(TOKENS + EVERY - 1, TOKENS + LATER_QUERIES, EVERY))
    same = StudyRows(
        layer=0,
        keys=torch.cat((rows.keys, rows.later_keys), 2),
        values=torch.cat((rows.values, rows.later_values), 2),
        queries=rows.queries[:, :, [at - TOKENS for at in positions]],
        positions=positions,
        scale=rows.scale,
        sinks=rows.sinks,
    )
    found = take_steps(rows)
    for index, tau in enumerate(TAUS):
        parts = [_read(sight, passing(sight, "box", tau)) for sight in sights(same, CLUSTER)]
        read, _, errors = (torch.cat(side).double() for side in zip(*parts, strict=True))
        torch.testing.assert_close(found.rows[index], read, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.errors[index], errors, atol=1e-5, rtol=1e-4)
    assert len({round(float(share), 3) for share in found.rows.mean(-1)}) >= 3


def test_a_step_is_one_of_a_real_cache() -> None:
    ids = tiny.ids(MIN_TOKENS)
    layer = next(iter(list(capture(tiny.ours(), ids, chunk_size=96).rows())))
    steps = take_steps(layer, (0.1,))
    reader = kvfold.Cache(tiny.ours(), "refinekv(tau=0.1)").prefill(ids[:, :-1])
    decode(reader, ids[:, -1:])
    lane = reader.views[0].core.lanes[0]
    held, covered = lane.store.lengths[0][0], lane.index.covered(0, 0)
    expected = (lane.log.counted[0, 0] + held - covered) / held
    torch.testing.assert_close(steps.rows.view(SAMPLES, -1)[-1], expected.double(), atol=1e-6, rtol=0)
    assert 0.1 < float(expected.mean()) < 0.9


def test_figures_of_a_model() -> None:
    reading = measured().reading
    assert reading is not None
    assert (reading.cluster, reading.queries) == (CLUSTER, SAMPLES)
    assert [point.tau for point in reading.points] == list(TAUS)
    assert [layer.layer for layer in reading.layers] == [0, 1]
    rows = [point.rows for point in reading.points]
    assert rows == sorted(rows, reverse=True)
    for index, point in enumerate(reading.points):
        own = [layer.points[index] for layer in reading.layers]
        assert point.rows == pytest.approx(sum(one.rows for one in own) / len(own))
        assert min(one.median for one in own) <= point.median <= max(one.median for one in own)
        assert all(math.isfinite(figure) for figure in dataclasses.astuple(point))


def test_a_median_and_a_percentile_of_a_sample() -> None:
    errors = torch.arange(101.0, dtype=torch.float64)[torch.randperm(101)]
    halves = [
        Steps(layer=at, rows=torch.ones(1, 2), scored=torch.ones(1, 2), errors=part[None])
        for at, part in enumerate((errors[:40], errors[40:]))
    ]
    found = summarise_steps(halves, (0.01,))
    assert found is not None
    assert found.points[0].median == 50
    assert found.points[0].p95 == pytest.approx(95)
    assert summarise_steps([]) is None


def test_hybrid_models_are_read_where_they_see_everything() -> None:
    found = inspect_model(tiny.ours("gemma3"), tiny.ids(MIN_TOKENS)).reading
    assert found is not None
    assert [layer.layer for layer in found.layers] == [1, 3]


def test_a_model_that_caps_its_logits_is_left_out_by_name() -> None:
    given = inspect_model(tiny.ours("gemma2"), tiny.ids(MIN_TOKENS))
    assert given.reading is None
    advice = advise(given)
    assert (advice.tau, advice.tau_within) == (None, None)
    told = [reason for reason in advice.reasons if "tau" in reason]
    assert told == ["no tau: RefineKV cannot serve gemma2, whose layers 1, 3 cap their attention logits"]
    with pytest.raises(UnsupportedError, match="gemma2"):
        kvfold.Cache(tiny.ours("gemma2"), "refinekv")


def point(tau: float, median: float, p95: float) -> Point:
    return Point(tau=tau, rows=0.28, scored=1 / 16, median=median, p95=p95)


@pytest.mark.parametrize(
    ("errors", "tau", "within"),
    [
        ([(0.001, 0.01), (0.01, 0.1), (0.1, 0.5)], 0.01, True),
        ([(0.001, 0.01), (MEDIAN, P95), (0.1, 0.5)], 0.01, True),
        ([(0.001, 0.01), (0.01, P95 + 0.001), (0.1, 0.5)], 0.001, True),
        ([(0.001, 0.01), (MEDIAN + 0.001, 0.1), (0.1, 0.5)], 0.001, True),
        ([(0.0, 0.0)] * 3, 0.1, True),
        # the largest within counts, though a smaller one is not: errors need not be ordered
        ([(0.001, 0.01), (0.01, 0.9), (0.01, 0.2)], 0.1, True),
        ([(0.2, 0.01), (0.2, 0.9), (0.3, 0.9)], 0.001, False),
        ([(math.nan, math.nan)] * 3, 0.001, False),
    ],
)
def test_the_rule_for_the_threshold(errors: list[tuple[float, float]], tau: float, within: bool) -> None:
    points = [point(at, *error) for at, error in zip((0.001, 0.01, 0.1), errors, strict=True)]
    for order in (points, points[::-1]):
        choice = choose_tau(order)
        assert (choice.point.tau, choice.within) == (tau, within)


def reasons_of(*points: Point) -> list[str]:
    reading = Reading(cluster=16, queries=8, points=points, layers=())
    return tau_reasons(dataclasses.replace(measured(), reading=reading))


def test_reasons_give_the_figures_and_what_they_hold_for() -> None:
    found = reasons_of(point(0.01, 0.034, 0.23), point(0.03, 0.09, 0.7), point(0.1, 0.2, 1.7))
    assert found[0].startswith(
        "tau=0.01: reads 28% of the rows of this text with an output error of 3.4% (median), 23% (95th percentile)"
    )
    assert found[1].startswith("tau=0.03: ")
    assert "the share read falls and the error grows with length" in found[2]
    assert f"{measured().tokens:,} tokens" in found[2]
    assert len(reasons_of(point(0.01, 0.0, 0.0))) == 2


def test_reasons_say_when_no_threshold_is_within_the_bounds() -> None:
    found = reasons_of(point(0.001, 0.09, 0.7), point(0.003, 0.2, 1.7))
    assert found[0].startswith("no tau keeps the output error within the bounds, 4% and 30%; the smallest, tau=0.001: ")
    assert len(found) == 2


def test_advice_names_a_policy_and_goes_into_json() -> None:
    document = json.loads(json.dumps({"advice": advise(measured()).as_dict(), "all": measured().as_dict()}))
    assert document["advice"]["tau"] in TAUS
    assert document["advice"]["tau_within"] in (True, False)
    assert kvfold.policy(f"refinekv(tau={document['advice']['tau']:g})").retriever is not None
    assert [one["tau"] for one in document["all"]["reading"]["points"]] == list(TAUS)
