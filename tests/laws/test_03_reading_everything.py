"""Law 3: a retriever that reads everything is dense attention, and beside an evictor the evictor alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, policies, tiny

FAMILIES = ["qwen2", "qwen2_sliding", "qwen3", "gemma3", "phi3_partial", "gpt_oss", "llama4", "granite", "gemma3n"]


@pytest.mark.parametrize("retriever", policies.READ_ALL)
@laws.few(8)
@given(length=laws.LENGTHS, q_per_kv=laws.Q_PER_KV, head_dim=laws.HEAD_DIMS, steps=st.sampled_from([1, 5, 20]))
def test_logits_are_those_of_a_dense_cache(
    retriever: str, length: int, q_per_kv: int, head_dim: int, steps: int
) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv, head_dim))
    found, dense = (kvfold.Cache(model, text).prefill(tiny.ids(length, 2)) for text in (retriever, "dense"))
    following = tiny.ids(steps, 2, seed=4)
    torch.testing.assert_close(caches.decode(found, following), caches.decode(dense, following), rtol=1e-3, atol=1e-3)
    caches.assert_near_runs(found, dense)


@pytest.mark.parametrize("retriever", policies.READ_ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_families_with_sinks_windows_and_shared_layers(family: str, retriever: str) -> None:
    model = tiny.ours(family)
    found, dense = (kvfold.Cache(model, text).prefill(tiny.ids(70)) for text in (retriever, "dense"))
    following = tiny.ids(6, seed=4)
    torch.testing.assert_close(caches.decode(found, following), caches.decode(dense, following), rtol=1e-3, atol=1e-3)
    assert found.stats().passed_layers == dense.stats().passed_layers


@pytest.mark.parametrize("retriever", policies.READ_ALL)
@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
def test_beside_an_evictor(method: str, allocator: str, retriever: str) -> None:
    evicting = policies.text(method, 0.4, allocator=policies.ALLOCATORS[allocator])
    found, alone = (
        kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(63, 2)) for text in (f"{evicting} + {retriever}", evicting)
    )
    caches.assert_same_runs(found, alone)
    following = tiny.ids(9, 2, seed=4)
    torch.testing.assert_close(caches.decode(found, following), caches.decode(alone, following), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("retriever", policies.READ_ALL)
def test_beside_an_evictor_that_goes_on_while_decoding(retriever: str) -> None:
    evicting = policies.text("snapkv", 20, allocator="ada", every=3)
    found, alone = (
        kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(63)) for text in (f"{evicting} + {retriever}", evicting)
    )
    following = tiny.ids(20, seed=4)
    torch.testing.assert_close(caches.decode(found, following), caches.decode(alone, following), rtol=1e-3, atol=1e-3)
    caches.assert_near_runs(found, alone)


@pytest.mark.parametrize("retriever", policies.READ_ALL)
def test_bfloat16_is_near(retriever: str) -> None:
    model = tiny.ours("llama", torch.bfloat16)
    found, dense = (kvfold.Cache(model, text).prefill(tiny.ids(63)) for text in (retriever, "dense"))
    following = tiny.ids(1, seed=4)
    torch.testing.assert_close(caches.decode(found, following), caches.decode(dense, following), rtol=0.2, atol=0.2)


@pytest.mark.parametrize("retriever", policies.RETRIEVERS)
def test_the_policies_of_the_other_tests_do_not_read_everything(retriever: str) -> None:
    found, dense = (kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(100)) for text in (retriever, "dense"))
    following = tiny.ids(9, seed=4)
    assert not torch.allclose(caches.decode(found, following), caches.decode(dense, following), atol=1e-2)
    shares = found.stats()
    assert 0 < shares.rows_read < 0.95
