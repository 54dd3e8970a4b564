"""Law 8: saving and loading, forking and cropping equal never having done so, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.core.errors import CacheStateError
from tests.helpers import caches, laws, policies, tiny

FOLLOWING = 4


def filled(method: str, allocator: str, batch: int = 2, padded: bool = False, **params: object) -> kvfold.Cache:
    cache = kvfold.Cache(tiny.ours(), policies.text(method, 0.4, allocator=policies.ALLOCATORS[allocator], **params))
    if padded:
        ids, mask = tiny.left_padded(tiny.ids(63), tiny.ids(40, seed=1))
        return cache.prefill(ids, mask)
    return cache.prefill(tiny.ids(63, batch))


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_loaded_cache_goes_on_as_the_saved_one(method: str, allocator: str, padded: bool, tmp_path: Path) -> None:
    cache = filled(method, allocator, padded=padded)
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    loaded.check()
    caches.assert_same_runs(loaded, cache)
    assert (str(loaded.policy), loaded.seen_tokens, loaded.nbytes) == (
        str(cache.policy),
        cache.seen_tokens,
        cache.nbytes,
    )
    following = tiny.ids(FOLLOWING, 2, seed=3)
    assert torch.equal(caches.decode(loaded, following), caches.decode(cache, following))
    caches.assert_same_runs(loaded, cache)


@pytest.mark.parametrize("method", policies.ONE_FORWARD)
def test_a_second_turn_after_loading_is_compressed_alike(method: str, tmp_path: Path) -> None:
    cache = filled(method, "uniform", every=3)
    caches.decode(cache, tiny.ids(FOLLOWING, 2, seed=3))
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    for one in (cache, loaded):
        caches.feed(one, tiny.ids(9, 2, seed=4))
        caches.decode(one, tiny.ids(5, 2, seed=5))
    caches.assert_same_runs(loaded, cache)


@pytest.mark.parametrize("observed", ["snapkv", "expected_attention", "h2o", "criticalkv", "knorm"])
def test_a_dense_cache_that_watched_is_compressed_after_loading_and_forking(observed: str, tmp_path: Path) -> None:
    text = policies.text(observed, 0.4)
    direct = kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(63))
    dense = kvfold.Cache(tiny.ours(), "dense", observe=text).prefill(tiny.ids(63))
    fork = dense.fork().compress(text)
    caches.assert_same_runs(fork, direct)
    dense.save(tmp_path / "watched.kv")
    loaded = kvfold.Cache.load(tmp_path / "watched.kv", tiny.ours())
    for one in (loaded, dense):
        one.prefill(tiny.ids(1, seed=8))
    caches.assert_same_runs(loaded.compress(text), dense.compress(text))


def test_a_replayed_method_takes_its_prompt_through_save_and_fork(tmp_path: Path) -> None:
    text, lead = policies.text("kvzip", 0.4), tiny.ids(6, seed=7)
    dense = kvfold.Cache(tiny.ours(), "dense", observe=text).prefill(tiny.ids(63), replay_prompt=lead)
    dense.save(tmp_path / "watched.kv")
    fork = dense.fork().compress(text)
    loaded = kvfold.Cache.load(tmp_path / "watched.kv", tiny.ours())
    loaded.compress(text)
    caches.assert_same_runs(fork, loaded)


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@pytest.mark.parametrize("first", ["original", "fork"])
def test_a_fork_and_its_original_never_touch_each_other(method: str, allocator: str, first: str) -> None:
    cache, control = filled(method, allocator), filled(method, allocator)
    fork = cache.fork()
    writer, reader = (cache, fork) if first == "original" else (fork, cache)
    before = caches.runs(reader)
    caches.decode(writer, tiny.ids(20, 2, seed=9))
    after = caches.runs(reader)
    assert all(torch.equal(a, b) for place in before for a, b in zip(before[place], after[place], strict=True))
    following = tiny.ids(FOLLOWING, 2, seed=3)
    assert torch.equal(caches.decode(reader, following), caches.decode(control, following))
    caches.assert_same_runs(reader, control)
    reader.check()
    writer.check()


def test_a_fork_shares_memory_until_it_is_written_to() -> None:
    cache = filled("knorm", "ada")
    fork = cache.fork()
    together = caches.storage_nbytes(caches.own_tensors(cache) + caches.own_tensors(fork))
    assert together == cache.nbytes
    caches.decode(fork, tiny.ids(1, 2, seed=1))
    assert caches.storage_nbytes(caches.own_tensors(cache) + caches.own_tensors(fork)) > together


def test_forks_of_forks_compress_and_reorder_alone() -> None:
    cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(63, 2))
    before = caches.runs(cache)
    child = cache.fork()
    grandchild = child.fork().compress(policies.text("knorm", 0.2))
    child.reorder_cache(torch.tensor([1, 0]))
    after = caches.runs(cache)
    assert all(torch.equal(a, b) for place in before for a, b in zip(before[place], after[place], strict=True))
    assert torch.equal(caches.runs(child)[0, 0, 0][1], before[0, 1, 0][1])
    assert grandchild.stats().stored_max < child.stats().stored_max == 63


@pytest.mark.parametrize(("method", "allocator"), [c for c in policies.COMBINATIONS if c[0] != "kvzip"])
@laws.few(3)
@given(count=st.integers(1, 40), q_per_kv=laws.Q_PER_KV)
def test_cropping_what_was_decoded_equals_never_having_decoded_it(
    method: str, allocator: str, count: int, q_per_kv: int
) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv))
    text = policies.text(method, 0.4, allocator=policies.ALLOCATORS[allocator])
    cropped, control = (kvfold.Cache(model, text).prefill(tiny.ids(63, 2)) for _ in range(2))
    caches.decode(cropped, tiny.ids(count, 2, seed=4))
    cropped.crop(-count)
    cropped.check()
    assert cropped.seen_tokens == (63, 63)
    caches.assert_same_runs(cropped, control) if method != "h2o" else None
    following = tiny.ids(FOLLOWING, 2, seed=3)
    torch.testing.assert_close(caches.decode(cropped, following), caches.decode(control, following), rtol=0, atol=0)


def test_cropping_a_dense_prompt_equals_the_shorter_prompt() -> None:
    cache = kvfold.Cache(tiny.ours()).prefill(tiny.ids(63))
    cache.crop(-20)
    control = kvfold.Cache(tiny.ours()).prefill(tiny.ids(63)[:, :43])
    torch.testing.assert_close(
        caches.decode(cache, tiny.ids(3, seed=1)), caches.decode(control, tiny.ids(3, seed=1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("method", policies.METHODS)
def test_cropping_behind_an_eviction_is_refused_and_changes_nothing(method: str) -> None:
    cache = filled(method, "uniform")
    caches.decode(cache, tiny.ids(3, 2, seed=1))
    before = caches.runs(cache)
    with pytest.raises(CacheStateError, match=r"crop must stay within the 3 tokens .* got 4; fork") as caught:
        cache.crop(-4)
    assert "\n" not in str(caught.value)
    after = caches.runs(cache)
    assert all(torch.equal(a, b) for place in before for a, b in zip(before[place], after[place], strict=True))
    cache.check()
    cache.crop(-3)


def test_cropping_into_a_padded_prompt_is_refused() -> None:
    ids, mask = tiny.left_padded(tiny.ids(20), tiny.ids(9, seed=1))
    cache = kvfold.Cache(tiny.ours()).prefill(ids, mask)
    with pytest.raises(CacheStateError, match="crop must stay behind the padded prompt"):
        cache.crop(-2)


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "llama4"])
def test_sliding_and_chunked_layers_crop_and_refuse_what_they_dropped(family: str) -> None:
    model = tiny.ours(family)
    cache, control = kvfold.Cache(model).prefill(tiny.ids(70)), kvfold.Cache(model).prefill(tiny.ids(70))
    caches.decode(cache, tiny.ids(5, seed=1))
    cache.crop(-5)
    cache.check()
    following = tiny.ids(FOLLOWING, seed=2)
    torch.testing.assert_close(caches.decode(cache, following), caches.decode(control, following), rtol=1e-4, atol=1e-4)
    long = kvfold.Cache(model).prefill(tiny.ids(70))
    caches.decode(long, tiny.ids(60, seed=1))
    control = kvfold.Cache(model).prefill(tiny.ids(70))
    caches.decode(control, tiny.ids(20, seed=1))
    try:
        long.crop(-40)
    except CacheStateError:
        assert len({view.core.columns for view in long.views}) == 1, "a refused crop must leave all layers alike"
        long.check()
    else:
        torch.testing.assert_close(
            caches.decode(long, following), caches.decode(control, following), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("allocator", ["uniform", "ada"])
def test_reordering_and_repeating_rows_equal_their_own_runs(allocator: str) -> None:
    cache = filled("knorm", allocator)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 2, 2]))
    cache.check()
    logits = caches.decode(cache, tiny.ids(3, 4, seed=1))
    for index, source in enumerate([1, 0, 1, 1]):
        alone = filled("knorm", allocator)
        alone.batch_select_indices(torch.tensor([source]))
        expected = caches.decode(alone, tiny.ids(3, 4, seed=1)[index : index + 1])
        torch.testing.assert_close(logits[index], expected[0], rtol=1e-4, atol=1e-4)
