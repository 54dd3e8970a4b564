"""Law 1: a budget of at least the length changes nothing, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, policies, tiny

ROOMY = ["1.0", "100%", "512", "1GiB"]


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@laws.few(4)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=laws.HEAD_DIMS,
    dtype=laws.DTYPES,
    keep=st.sampled_from(ROOMY),
    length=laws.LENGTHS,
    batch=st.sampled_from([1, 2]),
)
def test_a_budget_of_the_length_is_dense(
    method: str, allocator: str, q_per_kv: int, head_dim: int, dtype: torch.dtype, keep: str, length: int, batch: int
) -> None:
    model = tiny.ours("llama", dtype, **laws.shape(q_per_kv, head_dim))
    prompt, following = tiny.ids(length, batch), tiny.ids(3, batch, seed=1)
    if method in policies.REPLAYING:
        dense, full = kvfold.Cache(model), kvfold.Cache(model, _policy(method, allocator, keep))
        dense.prefill(prompt)
        full.prefill(prompt)
    else:
        dense, full = kvfold.Cache(model), kvfold.Cache(model, _policy(method, allocator, keep))
        assert torch.equal(caches.feed(dense, prompt), caches.feed(full, prompt))
    caches.assert_same_runs(dense, full)
    assert torch.equal(caches.decode(dense, following), caches.decode(full, following))
    caches.assert_same_runs(dense, full)
    assert dense.seen_tokens == full.seen_tokens == (length + 3,) * batch
    full.check()


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
def test_decoding_past_the_budget_evicts_only_when_asked_to(method: str) -> None:
    model = tiny.ours()
    once = kvfold.Cache(model, policies.text(method, 20, allocator="uniform"))
    often = kvfold.Cache(model, policies.text(method, 20, allocator="uniform", every=4))
    for cache in (once, often):
        caches.feed(cache, tiny.ids(20))
        caches.decode(cache, tiny.ids(12, seed=1))
    assert once.stats().stored_max == 32
    assert often.stats().stored_max == 20


def _policy(method: str, allocator: str, keep: str) -> str:
    return policies.text(method, keep, allocator=policies.ALLOCATORS[allocator])
