"""Law 9: reported bytes are those of every tensor held, and evicted bytes go back."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.cache.rows import PAGE
from tests.helpers import caches, laws, policies, tiny


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@laws.few(3)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=laws.HEAD_DIMS,
    dtype=laws.DTYPES,
    keep=laws.KEEPS,
    length=laws.LENGTHS,
    padded=st.booleans(),
    decoded=st.sampled_from([0, 1, 20]),
)
def test_nbytes_is_what_the_object_holds(
    method: str,
    allocator: str,
    q_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    keep: str,
    length: int,
    padded: bool,
    decoded: int,
) -> None:
    model = tiny.ours("llama", dtype, **laws.shape(q_per_kv, head_dim))
    cache = kvfold.Cache(model, policies.text(method, keep, allocator=policies.ALLOCATORS[allocator]))
    assert cache.nbytes == 0
    if padded:
        cache.prefill(*tiny.left_padded(tiny.ids(length), tiny.ids(5)))
    else:
        cache.prefill(tiny.ids(length, 2))
    if not padded:
        caches.decode(cache, tiny.ids(decoded, 2, seed=1)) if decoded else None
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache))
    assert cache.stats().nbytes == cache.nbytes


@pytest.mark.parametrize("family", ["gemma3", "llama4", "gpt_oss", "gemma3n", "mistral_sliding"])
def test_nbytes_holds_for_hybrid_models(family: str) -> None:
    cache = kvfold.Cache(tiny.ours(family), policies.text("snapkv", 0.5, allocator="ada")).prefill(tiny.ids(70, 2))
    caches.decode(cache, tiny.ids(5, 2, seed=1))
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache))


def test_a_replay_prompt_is_counted() -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("kvzip", 0.5)).prefill(tiny.ids(50), replay_prompt=tiny.ids(400))
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache))


@pytest.mark.parametrize("policy", ["expected_attention(keep=0.9)", "manifoldkv(keep=0.9, rope_frame=pre)"])
def test_a_copied_rotary_embedding_is_counted(policy: str) -> None:
    cache = kvfold.Cache(tiny.build("llama").to(torch.bfloat16), policy).prefill(tiny.ids(50))
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache))


def test_dense_nbytes_is_the_formula() -> None:
    cache = kvfold.Cache(tiny.ours("llama", torch.bfloat16), policies.text("knorm", 0.1)).prefill(tiny.ids(63, 2))
    # keys and values, layers, KV heads, head_dim, tokens, bytes of an element, sequences
    assert cache.dense_nbytes == 2 * 2 * 2 * 16 * 63 * 2 * 2
    stats = cache.stats()
    assert stats.compression_ratio == pytest.approx(1 - stats.nbytes / stats.dense_nbytes)
    assert stats.compression_factor == pytest.approx(stats.dense_nbytes / stats.nbytes)


def live_storage_bytes() -> int:
    """Bytes behind every tensor that Python can reach anywhere in the process."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor or type(item) is torch.nn.Parameter:
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("allocator", ["uniform", "ada"])
def test_evicted_bytes_are_returned_to_the_allocator(allocator: str) -> None:
    model = tiny.ours()
    before = live_storage_bytes()
    cache = kvfold.Cache(model, "dense", observe=policies.text("knorm", 0.25)).prefill(tiny.ids(1600, 2))
    dense = live_storage_bytes() - before
    assert dense == pytest.approx(cache.nbytes, rel=0.02)
    cache.compress(policies.text("knorm", 0.25, allocator=allocator))
    small = live_storage_bytes() - before
    assert small == pytest.approx(cache.nbytes, rel=0.05)
    assert small < 0.3 * dense
    del cache
    assert live_storage_bytes() - before < 0.01 * dense


@laws.few(15)
@given(length=st.integers(40, 300), keep=st.sampled_from(["0.2", "0.5", "60"]), decoded=st.integers(0, 40))
def test_slack_is_at_most_a_page_and_a_thirtysecond_per_head(length: int, keep: str, decoded: int) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", keep, allocator="ada")).prefill(tiny.ids(length))
    caches.decode(cache, tiny.ids(decoded, seed=1)) if decoded else None
    for view in cache.views:
        store = view.core.lanes[0].store
        for capacity, rows in zip(store.capacity[0], store.lengths[0], strict=True):
            assert capacity % PAGE == 0
            assert capacity - rows <= PAGE + max(PAGE, math.ceil(rows / 32))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("allocator", ["uniform", "ada", "pyramid"])
@pytest.mark.parametrize("size", [48 << 10, 96 << 10, 100_001])
def test_a_budget_in_bytes_is_an_upper_bound_of_what_is_held(size: int, allocator: str, batch: int) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", f"{size}B", allocator=policies.ALLOCATORS[allocator]))
    cache.prefill(tiny.ids(700, batch))
    assert cache.nbytes <= size * batch
    assert cache.nbytes > 0.5 * size * batch
