"""Laws 6 to 11 for policies that read by query: what a step reads depends on the rows, not on how they came."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from kvfold.core.errors import CacheStateError
from tests.helpers import caches, laws, policies, tiny

READERS = pytest.mark.parametrize("text", policies.READERS)
FOLLOWING = 20
"""Longer than a segment of every retriever of these tests, so that new clusters come while decoding."""


def filled(text: str, batch: int = 2, *, padded: bool = False) -> kvfold.Cache:
    cache = kvfold.Cache(tiny.ours(), text)
    if padded:
        return cache.prefill(*tiny.left_padded(tiny.ids(63), tiny.ids(40, seed=1)))
    return cache.prefill(tiny.ids(63, batch))


def summaries(cache: kvfold.Cache) -> dict[str, Tensor]:
    """What the indexes of a cache hold, without room behind the clusters."""
    found = {}
    for view in cache.views:
        for number, lane in enumerate(view.core.lanes):
            if lane.index is None:
                continue
            levels, exists = lane.index.view()
            for level, (names, there) in enumerate(zip(levels, exists, strict=True)):
                own = f"{view.core.spec.layer_idx}.{number}.{level}"
                found[f"{own}.exists"] = there
                for name, tensor in names.items():
                    each = there
                    if tensor.shape[2] != there.shape[2]:
                        each = there.repeat_interleave(tensor.shape[2] // max(1, there.shape[2]), 2)
                    found[f"{own}.{name}"] = tensor[each] if tensor.shape[2] == each.shape[2] else tensor
    return found


def fitted(cache: kvfold.Cache) -> dict[str, Tensor]:
    """What retrievers have found in the prompt."""
    return {
        f"{view.core.spec.layer_idx}.{number}.{name}": tensor.clone()
        for view in cache.views
        for number, lane in enumerate(view.core.lanes)
        if lane.index is not None
        for name, tensor in lane.index.fitted.items()
    }


def take_over_fitted(mine: kvfold.Cache, theirs: kvfold.Cache) -> None:
    """Summarise as another cache does, with what it was fitted to."""
    for view, other in zip(mine.views, theirs.views, strict=True):
        for lane, source in zip(view.core.lanes, other.core.lanes, strict=True):
            assert source.index is not None
            lane.index = source.index.emptied()
            lane.index_rows(mine.policy, view.core.spec)


def assert_same_summaries(mine: kvfold.Cache, theirs: kvfold.Cache) -> None:
    one, other = summaries(mine), summaries(theirs)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@READERS
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_prefill_in_chunks_equals_one_shot(text: str, chunk_size: int) -> None:
    prompt = tiny.ids(100 if chunk_size > 1 else 33, 2)
    whole = kvfold.Cache(tiny.ours(), text).prefill(prompt)
    parts = kvfold.Cache(tiny.ours(), text).prefill(prompt, chunk_size=chunk_size)
    following = tiny.ids(3, 2, seed=5)
    near = policies.tolerance(text)
    torch.testing.assert_close(caches.decode(parts, following), caches.decode(whole, following), rtol=near, atol=near)
    assert whole.stats().rows_read == pytest.approx(parts.stats().rows_read)


@READERS
@laws.few(3)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 15, 63, 100]), min_size=2, max_size=3),
    q_per_kv=laws.Q_PER_KV,
    chunk_size=st.sampled_from([None, 10]),
)
def test_a_row_of_a_padded_batch_is_that_row_alone(
    text: str, lengths: list[int], q_per_kv: int, chunk_size: int | None
) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv))
    rows = [tiny.ids(n, seed=i) for i, n in enumerate(lengths)]
    padded, mask = tiny.left_padded(*rows)
    together = kvfold.Cache(model, text).prefill(padded, mask, chunk_size=chunk_size)
    found, following = [], tiny.ids(6, len(rows), seed=9)
    for column in following.T:
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -1:]
        found.append(caches.feed(together, column[:, None], attention_mask=mask, position_ids=positions))
    for index, row in enumerate(rows):
        alone = kvfold.Cache(model, text).prefill(row, chunk_size=chunk_size)
        expected = caches.decode(alone, following[index : index + 1])
        near = policies.tolerance(text)
        torch.testing.assert_close(torch.cat(found, 1)[index], expected[0], rtol=near, atol=near)
    together.check()


@READERS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("decoded", [0, 1, FOLLOWING])
def test_a_loaded_cache_goes_on_as_the_saved_one(text: str, padded: bool, decoded: int, tmp_path: Path) -> None:
    cache = filled(text, padded=padded)
    if decoded:
        caches.decode(cache, tiny.ids(decoded, 2, seed=6))
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    loaded.check()
    assert (str(loaded.policy), loaded.nbytes, loaded.stats()) == (str(cache.policy), cache.nbytes, cache.stats())
    following = tiny.ids(FOLLOWING, 2, seed=3)
    assert torch.equal(caches.decode(loaded, following), caches.decode(cache, following))
    assert_same_summaries(loaded, cache)
    assert loaded.stats() == cache.stats()


@pytest.mark.parametrize("text", policies.RETRIEVERS)
def test_clusters_are_not_written_to_the_file(text: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    filled(text).save(tmp_path / "talk.kv")
    filled("dense").save(tmp_path / "dense.kv")
    names = []
    for name in ("talk.kv", "dense.kv"):
        with safe_open(tmp_path / name, framework="pt") as file:
            names.append(set(file.keys()))
    fitted = {f"{layer}.0.fitted.{part}" for layer in (0, 1) for part in ("frame", "weights", "steps", "longest")}
    # one policy fits something to a prompt of 63 rows; the other waits for more rows, with the queries that it has
    waiting = {f"{layer}.0.queries" for layer in (0, 1)}
    extra = {"rowcodes(cluster=4": fitted, "rowcodes(cluster=8": waiting}.get(text.partition(",")[0], set())
    assert names[0] == names[1] | extra


@READERS
@pytest.mark.parametrize("first", ["original", "fork"])
def test_a_fork_and_its_original_never_touch_each_other(text: str, first: str) -> None:
    cache, control = filled(text), filled(text)
    fork = cache.fork()
    assert caches.storage_nbytes(caches.own_tensors(cache) + caches.own_tensors(fork)) == cache.nbytes
    writer, reader = (cache, fork) if first == "original" else (fork, cache)
    before = summaries(reader)
    caches.decode(writer, tiny.ids(FOLLOWING, 2, seed=9))
    after = summaries(reader)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    following = tiny.ids(FOLLOWING, 2, seed=3)
    assert torch.equal(caches.decode(reader, following), caches.decode(control, following))
    assert reader.stats() == control.stats()


@READERS
@laws.few(4)
@given(count=st.integers(1, 40), q_per_kv=laws.Q_PER_KV)
def test_cropping_what_was_decoded_equals_never_having_decoded_it(text: str, count: int, q_per_kv: int) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv))
    cropped, control = (kvfold.Cache(model, text).prefill(tiny.ids(63, 2)) for _ in range(2))
    caches.decode(cropped, tiny.ids(count, 2, seed=4))
    cropped.crop(-count)
    cropped.check()
    following = tiny.ids(FOLLOWING, 2, seed=3)
    assert torch.equal(caches.decode(cropped, following), caches.decode(control, following))
    assert_same_summaries(cropped, control)


@pytest.mark.parametrize("text", policies.RETRIEVERS)
@pytest.mark.parametrize("count", [1, 3, 17, 30])
def test_cropping_into_the_prompt_and_going_on_differently(text: str, count: int) -> None:
    cropped = kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(63))
    before = fitted(cropped)
    cropped.crop(-count)
    cropped.prefill(tiny.ids(count + 2, seed=8))
    control = kvfold.Cache(tiny.ours(), text).prefill(
        torch.cat((tiny.ids(63)[:, : 63 - count], tiny.ids(count + 2, seed=8)), 1)
    )
    if before:
        # queries are dropped once something is fitted to them: it stays what it was, and the rest is as in any cache
        after = fitted(cropped)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        take_over_fitted(control, cropped)
    following = tiny.ids(5, seed=3)
    near = policies.tolerance(text)
    torch.testing.assert_close(
        caches.decode(cropped, following), caches.decode(control, following), rtol=near, atol=near
    )


@READERS
def test_several_tokens_after_the_prompt_are_read_one_by_one(text: str) -> None:
    whole, single = filled(text), filled(text)
    following = tiny.ids(FOLLOWING, 2, seed=3)
    expected = caches.decode(single, following)
    with whole.prompt(0):
        found = [caches.feed(whole, following[:, a:b]) for a, b in ((0, 1), (1, 8), (8, 9), (9, FOLLOWING))]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)
    assert whole.stats() == single.stats()


@READERS
@laws.few(3)
@given(
    q_per_kv=laws.Q_PER_KV,
    dtype=laws.DTYPES,
    length=laws.LENGTHS,
    padded=st.booleans(),
    decoded=st.sampled_from([0, 1, FOLLOWING]),
)
def test_nbytes_is_what_the_object_holds(
    text: str, q_per_kv: int, dtype: torch.dtype, length: int, padded: bool, decoded: int
) -> None:
    cache = kvfold.Cache(tiny.ours("llama", dtype, **laws.shape(q_per_kv)), text)
    if padded:
        cache.prefill(*tiny.left_padded(tiny.ids(length), tiny.ids(5)))
    else:
        cache.prefill(tiny.ids(length, 2))
        if decoded:
            caches.decode(cache, tiny.ids(decoded, 2, seed=1))
    assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache)) == cache.stats().nbytes


@READERS
def test_seen_tokens_grow_and_positions_travel_with_rows(text: str) -> None:
    cache = filled(text)
    for step in range(1, 12):
        caches.decode(cache, tiny.ids(1, 2, seed=step))
        cache.check()
        assert cache.seen_tokens == (63 + step,) * 2
        assert all(int(positions[-1]) == 62 + step for positions, _, _ in caches.runs(cache).values())


@READERS
def test_other_requests_on_the_model_are_untouched(text: str) -> None:
    plain, prepared = tiny.stock(attn="sdpa"), tiny.ours()
    cache = filled(text)
    caches.decode(cache, tiny.ids(3, 2, seed=1))
    prompt = tiny.ids(30)
    found, expected = (model.generate(prompt, max_new_tokens=8, do_sample=False) for model in (prepared, plain))
    assert torch.equal(found, expected)


@READERS
def test_reordered_and_repeated_rows_go_on_as_their_own(text: str) -> None:
    cache = filled(text)
    caches.decode(cache, tiny.ids(5, 2, seed=2))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 2, 2]))
    cache.check()
    following = tiny.ids(FOLLOWING, 4, seed=1)
    logits = caches.decode(cache, following)
    for index, source in enumerate([1, 0, 1, 1]):
        alone = filled(text)
        caches.decode(alone, tiny.ids(5, 2, seed=2))
        alone.batch_select_indices(torch.tensor([source]))
        expected = caches.decode(alone, following[index : index + 1])
        torch.testing.assert_close(logits[index], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", policies.EVICTING_READERS)
def test_cropping_behind_an_eviction_is_refused(text: str) -> None:
    cache = filled(text)
    caches.decode(cache, tiny.ids(3, 2, seed=1))
    with pytest.raises(CacheStateError, match=r"crop must stay within the 3 tokens"):
        cache.crop(-4)
