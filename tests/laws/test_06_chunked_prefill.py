"""Law 6: how a prompt is cut into calls changes nothing; a policy with ``chunk`` bounds what is ever stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, policies, tiny


def assert_same(mine: kvfold.Cache, theirs: kvfold.Cache) -> None:
    """Equal positions; rows and the next logits as close as rounding of another split allows."""
    one, other = caches.runs(mine), caches.runs(theirs)
    for place, (positions, keys, values) in one.items():
        assert torch.equal(positions, other[place][0]), f"kept positions differ at layer, row, head {place}"
        torch.testing.assert_close(keys, other[place][1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, other[place][2], rtol=1e-4, atol=1e-4)
    following = tiny.ids(3, mine.batch_size, seed=5)
    torch.testing.assert_close(caches.decode(mine, following), caches.decode(theirs, following), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
def test_prefill_in_chunks_equals_one_shot(method: str, allocator: str, chunk_size: int) -> None:
    text = policies.text(method, 0.4, allocator=policies.ALLOCATORS[allocator])
    prompt = tiny.ids(100 if chunk_size > 1 else 33, 2)
    whole = kvfold.Cache(tiny.ours(), text).prefill(prompt)
    parts = kvfold.Cache(tiny.ours(), text).prefill(prompt, chunk_size=chunk_size)
    assert whole.stats().stored_max < prompt.shape[1]
    assert_same(parts, whole)


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
@laws.few(5)
@given(
    cuts=st.lists(st.integers(1, 99), max_size=5),
    chunk=st.sampled_from([1, 5, 16, 64, 200]),
    keep=st.sampled_from([12, 40, 0.3]),
    allocator=st.sampled_from(["uniform", "ada", "pyramid"]),
)
def test_any_split_of_a_block_iterative_prompt_gives_the_same_rows(
    method: str, cuts: list[int], chunk: int, keep: float, allocator: str
) -> None:
    if allocator == "ada" and not policies.per_head(method):
        allocator = "uniform"
    text = policies.text(method, keep, chunk=chunk, allocator=policies.ALLOCATORS[allocator])
    prompt = tiny.ids(100)
    whole = kvfold.Cache(tiny.ours(), text)
    caches.feed(whole, prompt)
    split = kvfold.Cache(tiny.ours(), text)
    bounds = [0, *sorted(set(cuts)), 100]
    with split.prompt(100):
        for start, stop in pairwise(bounds):
            caches.feed(split, prompt[:, start:stop])
            split.check()
    assert_same(split, whole)


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
@pytest.mark.parametrize("allocator", ["uniform", "ada", "pyramid"])
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_never_more_than_budget_and_chunk_is_stored(
    method: str, allocator: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allocator == "ada" and not policies.per_head(method):
        pytest.skip(f"{method} keeps one set for all heads")
    from kvfold.cache.rows import RowStore

    most: dict[int, int] = {}
    plain = RowStore.append

    def watched(self: RowStore, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        plain(self, k, v, position)
        most[id(self)] = max(most.get(id(self), 0), self.total_rows)

    monkeypatch.setattr(RowStore, "append", watched)
    budget, tokens = 20, 60 if chunk == 1 else 130
    cache = kvfold.Cache(
        tiny.ours(), policies.text(method, budget, chunk=chunk, allocator=policies.ALLOCATORS[allocator])
    )
    prompt = tiny.ids(tokens)
    with cache.prompt(tokens):
        for start in range(0, tokens, 25):
            caches.feed(cache, prompt[:, start : start + 25])
            held = sum(int(cache.stored_tokens(layer).sum()) for layer in (0, 1))
            assert held <= 2 * 2 * (budget + chunk)
    assert most
    # heads and layers share the budget: what one holds beyond it another one lacks
    assert sum(most.values()) <= 2 * 2 * (budget + chunk) or allocator == "pyramid"
    if allocator == "uniform" and method != "pyramidkv":
        assert max(most.values()) <= 2 * (budget + chunk)
    assert cache.stats().stored_tokens == (budget,)


def test_a_chunk_that_divides_the_prompt_compresses_once_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvfold.Cache(tiny.ours(), policies.text("knorm", 0.5, chunk=16))
    caches.feed(cache, tiny.ids(64))
    assert cache.stats().stored_tokens == (32.0,)


@pytest.mark.parametrize("policy", ["kvzip(keep=0.5, chunk=8)", "kvzip(keep=0.5, every=8)"])
def test_a_method_that_cannot_says_so(policy: str) -> None:
    with pytest.raises(kvfold.KvfoldError, match="reads the whole context again"):
        kvfold.policy(policy)
