"""Law 10: seen tokens never fall by eviction, and every row keeps the position and the content that it came with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, policies, tiny


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
@laws.few(5)
@given(
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=2, max_size=8),
    every=st.sampled_from([None, 1, 3]),
    chunk=st.sampled_from([None, 5]),
    allocator=st.sampled_from(["uniform", "ada", "pyramid"]),
    batch=st.sampled_from([1, 2]),
)
def test_through_any_schedule(
    method: str, steps: list[int], every: int | None, chunk: int | None, allocator: str, batch: int
) -> None:
    if allocator == "ada" and not policies.per_head(method):
        allocator = "uniform"
    cache = kvfold.Cache(
        tiny.ours(), policies.text(method, 12, every=every, chunk=chunk, allocator=policies.ALLOCATORS[allocator])
    )
    seen, stream = 0, tiny.ids(sum(steps), batch)
    for step in steps:
        caches.feed(cache, stream[:, seen : seen + step])
        seen += step
        assert cache.seen_tokens == (seen,) * batch
        assert cache.get_seq_length() == seen
        cache.check()
        for positions, _, _ in caches.runs(cache).values():
            assert bool((positions.diff() > 0).all())
            assert positions.numel() == 0 or 0 <= int(positions[0]) <= int(positions[-1]) < seen


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@laws.few(3)
@given(keep=laws.KEEPS, length=laws.LENGTHS, head_dim=laws.HEAD_DIMS, dtype=laws.DTYPES)
def test_rows_are_those_of_their_positions(
    method: str, allocator: str, keep: str, length: int, head_dim: int, dtype: torch.dtype
) -> None:
    model = tiny.ours("llama", dtype, **laws.shape(3, head_dim))
    dense = kvfold.Cache(model).prefill(tiny.ids(length, 2))
    cache = kvfold.Cache(model, policies.text(method, keep, allocator=policies.ALLOCATORS[allocator])).prefill(
        tiny.ids(length, 2)
    )
    everything = caches.runs(dense)
    for place, (positions, keys, values) in caches.runs(cache).items():
        if place[0] == 0 or method == "kvzip" or cache.policy.chunk is None:
            assert torch.equal(keys, everything[place][1][positions])
            assert torch.equal(values, everything[place][2][positions])


@pytest.mark.parametrize("method", policies.METHODS)
@laws.few(4)
@given(length=st.integers(1, 120), sinks=st.integers(0, 6), recent=st.integers(0, 10))
def test_sinks_and_recent_tokens_always_stay(method: str, length: int, sinks: int, recent: int) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text(method, 0.2, sinks=sinks, recent=recent)).prefill(tiny.ids(length))
    recent = cache.policy.recent_tokens
    for positions, _, _ in caches.runs(cache).values():
        kept = set(positions.tolist())
        assert set(range(min(sinks, length))) <= kept
        assert set(range(max(0, length - recent), length)) <= kept
        assert kept


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@pytest.mark.parametrize("keep", [12, 0.3, 0.5])
def test_the_mean_over_heads_and_layers_is_the_budget(method: str, allocator: str, keep: float) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text(method, keep, allocator=policies.ALLOCATORS[allocator])).prefill(
        tiny.ids(101, 2)
    )
    expected = keep if isinstance(keep, int) else int(keep * 101)
    stored = torch.stack([cache.stored_tokens(layer) for layer in (0, 1)]).double()
    assert stored.mean((0, 2)).tolist() == [expected] * 2
    assert cache.stats().stored_tokens == (expected,) * 2
