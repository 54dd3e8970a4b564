"""Law 2: attention after an eviction equals attention over everything with the evicted rows at minus infinity."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, oracle, policies, tiny


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@laws.few(4)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=laws.HEAD_DIMS,
    keep=laws.KEEPS,
    length=laws.LENGTHS,
    batch=st.sampled_from([1, 2]),
)
def test_decoding_on_what_stayed_equals_masking_what_left(
    method: str, allocator: str, q_per_kv: int, head_dim: int, keep: str, length: int, batch: int
) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv, head_dim))
    cache = kvfold.Cache(model, policies.text(method, keep, allocator=policies.ALLOCATORS[allocator]))
    prompt, following = tiny.ids(length, batch), tiny.ids(4, batch, seed=1)
    cache.prefill(prompt)
    cache.check()
    reference = tiny.stock("llama", **laws.shape(q_per_kv, head_dim))
    expected = oracle.masked_continuation(reference, cache, prompt, following)
    found = caches.decode(cache, following)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("allocator", ["uniform", "ada", "given"])
def test_a_second_turn_of_several_tokens_equals_masking_too(allocator: str) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", 0.3, allocator=policies.ALLOCATORS[allocator]))
    prompt, turn = tiny.ids(63, 2), tiny.ids(7, 2, seed=1)
    cache.prefill(prompt)
    expected = oracle.masked_continuation(tiny.stock(), cache, prompt, turn)
    with cache.hold():
        found = caches.feed(cache, turn)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["knorm", "snapkv", "manifoldkv"])
def test_half_precision_stays_as_close_as_its_own_rounding(method: str) -> None:
    model = tiny.ours("llama", torch.bfloat16)
    cache = kvfold.Cache(model, policies.text(method, 0.5, allocator="ada"))
    prompt, following = tiny.ids(100), tiny.ids(4, seed=1)
    cache.prefill(prompt)
    halves = tiny.stock("llama", torch.bfloat16)
    exact = oracle.masked_continuation(copy.deepcopy(halves).float(), cache, prompt, following)
    same_dtype = oracle.masked_continuation(halves, cache, prompt, following)
    found = caches.decode(cache, following)
    eager_error = (same_dtype.double() - exact.double()).abs().max()
    bound = 2 * (eager_error + torch.finfo(torch.bfloat16).eps * exact.abs().max())
    assert (found.double() - exact.double()).abs().max() <= bound


def test_the_oracle_sees_a_wrong_eviction() -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", 0.3))
    prompt, following = tiny.ids(63), tiny.ids(2, seed=1)
    cache.prefill(prompt)
    other = kvfold.Cache(tiny.ours(), policies.text("random", 0.3)).prefill(prompt)
    expected = oracle.masked_continuation(tiny.stock(), other, prompt, following)
    assert (caches.decode(cache, following) - expected).abs().max() > 1e-2
