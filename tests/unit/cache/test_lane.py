from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from kvfold.cache.lane import Lane
from kvfold.cache.layer import CacheLayer
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError
from kvfold.core.types import Need, Visibility
from tests.helpers import laws
from tests.helpers.oracle import attention64

HEADS, GROUP, DIM = 2, 3, 8
FULL = Visibility()


def spec(visibility: Visibility = FULL, order: int | None = 0) -> LayerSpec:
    return LayerSpec(
        layer_idx=0, num_layers=1, order=order if visibility.is_full else None, num_compressed=1, visibility=visibility
    )


def draw(count: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, HEADS * GROUP, count, DIM, generator=made),
        torch.randn(batch, HEADS, count, DIM, generator=made),
        torch.randn(batch, HEADS, count, DIM, generator=made),
    )


def visible(kind: Visibility, total: int) -> Tensor:
    """``[total, total]``: which key each query sees, spelled out pair by pair."""
    found = torch.zeros(total, total, dtype=torch.bool)
    for query in range(total):
        for key in range(query + 1):
            found[query, key] = (
                kind.kind == "full"
                or (kind.kind == "sliding" and query - key < kind.size)
                or (kind.kind == "chunked" and query // kind.size == key // kind.size)
            )
    return found


@laws.few(30)
@given(
    kind=st.sampled_from([FULL, *(Visibility(k, n) for k in ("sliding", "chunked") for n in (1, 4, 16, 50))]),
    cuts=st.lists(st.integers(1, 119), max_size=6),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    batch=st.sampled_from([1, 2]),
    ones=st.integers(0, 10),
)
def test_any_split_attends_like_the_whole(
    kind: Visibility, cuts: list[int], softcap: float | None, sinks: bool, batch: int, ones: int
) -> None:
    total = 120
    q, k, v = draw(total, batch)
    logits = torch.randn(HEADS * GROUP) if sinks else None
    call = AttentionCall(scale=0.3, visibility=kind, softcap=softcap, sinks=logits)
    layer = CacheLayer(spec(kind), Need.NOTHING, 0)
    bounds = sorted({0, *cuts, *range(total - ones, total), total})
    found = []
    for start, stop in pairwise(bounds):
        piece = slice(start, stop)
        found.append(
            layer.forward(
                q[:, :, piece],
                k[:, :, piece],
                v[:, :, piece],
                call,
                kvfold.policy("dense"),
                valid=None,
                prompt=stop - start,
                prompt_ends=True,
            )
        )
        layer.check()
    expected, _ = attention64(q, k, v, 0.3, visible(kind, total), softcap=softcap, sinks=logits)
    torch.testing.assert_close(torch.cat(found, 2).double(), expected, rtol=1e-4, atol=1e-5)


POINTS = [
    # policy, calls as (tokens, prompt tokens, prompt ends), tokens seen at each compression
    ("keep=0.5", [(10, 10, True)], [10]),
    ("keep=0.5", [(4, 4, False), (6, 6, True), (1, 0, False), (1, 0, False)], [10]),
    ("keep=0.5", [(10, 10, True), (5, 5, True)], [10, 15]),
    ("keep=0.5, chunk=4", [(10, 10, True)], [4, 8, 10]),
    ("keep=0.5, chunk=4", [(3, 3, False), (6, 6, False), (1, 1, True)], [4, 8, 10]),
    ("keep=0.5, chunk=4", [(8, 8, True)], [4, 8]),
    ("keep=0.5, chunk=1", [(3, 3, True)], [1, 2, 3]),
    ("keep=0.5, every=2", [(5, 5, True), *[(1, 0, False)] * 5], [5, 7, 9]),
    ("keep=0.5, every=3", [(5, 5, True), (7, 0, False)], [5, 8, 11]),
    ("keep=0.5, every=2", [(4, 4, True), (1, 0, False), (3, 3, True), (1, 0, False), (1, 0, False)], [4, 8, 10]),
    ("keep=0.5, chunk=4, every=2", [(6, 6, True), (1, 0, False), (1, 0, False)], [4, 6, 8]),
    ("keep=0.5", [(6, 4, True)], [4]),
]


@pytest.mark.parametrize(("settings", "calls", "expected"), POINTS)
def test_compression_points_are_token_counts(
    settings: str, calls: list[tuple[int, int, bool]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = kvfold.policy(f"knorm({settings}, sink_tokens=1, recent_tokens=1)")
    lane, points = Lane.empty(*draw(1)[1:], Need.KEYS, 0), []
    plain = Lane.compress
    monkeypatch.setattr(Lane, "compress", lambda self, *rest: (points.append(self.seen), plain(self, *rest))[1])
    call = AttentionCall(scale=0.3, visibility=FULL)
    for count, prompt, ends in calls:
        lane.extend(*draw(count, seed=lane.seen), call, spec(), policy, prompt=prompt, prompt_ends=ends)
        lane.check(evicts=True)
    assert points == expected


def test_what_was_observed_is_forgotten_when_the_prompt_ends_unless_it_is_needed() -> None:
    call = AttentionCall(scale=0.3, visibility=FULL)
    for every, kept in ((None, False), (4, True)):
        policy = kvfold.policy(
            "snapkv(keep=0.5, obs_window=3, sink_tokens=1, recent_tokens=1)"
            if every is None
            else f"snapkv(keep=0.5, obs_window=3, sink_tokens=1, recent_tokens=1, every={every})"
        )
        lane = Lane.empty(*draw(1)[1:], policy.needs, policy.query_window)
        lane.extend(*draw(20), call, spec(), policy, prompt=20, prompt_ends=True)
        assert (lane.observed.queries is not None) == kept


def test_check_finds_rows_beyond_what_was_seen() -> None:
    lane = Lane.empty(*draw(1)[1:], Need.NOTHING, 0)
    lane.extend(
        *draw(6), AttentionCall(scale=0.3, visibility=FULL), spec(), kvfold.policy("dense"), prompt=6, prompt_ends=True
    )
    lane.seen = 5
    with pytest.raises(CacheStateError, match="stored tokens must be at most the 5 seen, got 6"):
        lane.check(evicts=True)
    lane.seen = 6
    lane.store.base = 3
    with pytest.raises(CacheStateError, match="positions must be below the 6 tokens seen, got 8"):
        lane.check(evicts=True)
    lane.store.base = 0
    lane.store.keep(torch.arange(3).expand(1, HEADS, 3), torch.full((1, HEADS), 3))
    with pytest.raises(CacheStateError, match="a layer that is passed through must never evict"):
        lane.check(evicts=False)


def test_cropping_nothing() -> None:
    lane = Lane.empty(*draw(1)[1:], Need.NOTHING, 0)
    lane.crop(0)
    lane.crop(-3)
    assert lane.seen == 0


def test_lanes_split_at_the_first_padding_and_stay_split() -> None:
    layer, call = CacheLayer(spec(), Need.NOTHING, 0), AttentionCall(scale=0.3, visibility=FULL)
    dense = kvfold.policy("dense")
    q, k, v = draw(6, batch=2)
    layer.forward(q, k, v, call, dense, valid=None, prompt=6, prompt_ends=True)
    assert len(layer.lanes) == 1
    valid = torch.tensor([[True, True], [True, False]])
    q, k, v = draw(2, batch=2, seed=1)
    found = layer.forward(q, k, v, call, dense, valid=valid, prompt=2, prompt_ends=True)
    assert [lane.seen for lane in layer.lanes] == [8, 7]
    assert (layer.columns, layer.padded_at, layer.batch) == (8, 8, 2)
    assert torch.equal(found[1, :, 1], torch.zeros(HEADS * GROUP, DIM))
    assert layer.row(1)[0] is layer.lanes[1]
    layer.select([1, 1, 0])
    assert [lane.seen for lane in layer.lanes] == [7, 7, 8]
    layer.check()


def test_compressing_an_unfed_layer() -> None:
    layer = CacheLayer(spec(), Need.NOTHING, 0)
    with pytest.raises(CacheStateError, match="compress needs a cache that has been fed"):
        layer.plan(kvfold.policy("knorm", keep=0.5), None)


def test_reading_rows_that_another_layer_wrote() -> None:
    for kind in (FULL, Visibility("sliding", 5)):
        layer, call = (
            CacheLayer(spec(kind, None), Need.NOTHING, 0),
            AttentionCall(scale=0.3, visibility=kind, sinks=torch.randn(HEADS * GROUP), tentative=True),
        )
        q, k, v = draw(20)
        other = draw(20, seed=9)[0]
        got = []
        for piece in (slice(0, 13), slice(13, 14), slice(14, 20)):
            layer.forward(
                q[:, :, piece],
                k[:, :, piece],
                v[:, :, piece],
                call,
                kvfold.policy("dense"),
                valid=None,
                prompt=1,
                prompt_ends=False,
            )
            got.append(layer.read(other[:, :, piece], call, None))
        expected, _ = attention64(other, k, v, 0.3, visible(kind, 20), sinks=call.sinks)
        torch.testing.assert_close(torch.cat(got, 2).double(), expected, rtol=1e-4, atol=1e-5)
