"""Rows in host memory: the same answers, and of the rows no more on the device than the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cache.host import HostRows
from kvfold.core.errors import ConfigError
from kvfold.hf.stack import StackedCache
from tests.helpers import caches, laws, policies, tiny

READERS = pytest.mark.parametrize("policy", [*policies.RETRIEVERS, policies.READ_ALL[1]])


def both(policy: str, tokens: int = 63, batch: int = 2, **changes: object) -> tuple[kvfold.Cache, kvfold.Cache]:
    model = tiny.ours("llama", **changes)
    made = (kvfold.Cache(model, policy, offload=offload) for offload in (True, False))
    here, there = (cache.prefill(tiny.ids(tokens, batch), chunk_size=20) for cache in made)
    return here, there


def stores(cache: kvfold.Cache) -> list[HostRows]:
    found = [lane.store for view in cache.views for lane in view.core.lanes if lane.store.on_host]
    assert found
    return found


@READERS
@pytest.mark.parametrize("q_per_kv", [1, 3, 8])
def test_answers_are_those_of_a_cache_on_the_device(policy: str, q_per_kv: int) -> None:
    here, there = both(policy, **laws.shape(q_per_kv))
    following = tiny.ids(20, 2, seed=3)
    torch.testing.assert_close(caches.decode(here, following), caches.decode(there, following), rtol=1e-4, atol=1e-4)
    caches.assert_near_runs(here, there, 1e-4)
    mine, theirs = here.stats(), there.stats()
    assert (mine.rows_read, mine.bytes_read) == pytest.approx((theirs.rows_read, theirs.bytes_read))
    here.check()


@READERS
def test_reading_few_rows_fetches_few(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = both(policy, 200, 1)
    fetched: list[int] = []
    plain = HostRows.fetch
    monkeypatch.setattr(HostRows, "fetch", lambda self, rows: (fetched.append(rows.shape[2]), plain(self, rows))[1])
    caches.decode(here, tiny.ids(3, seed=1))
    everything = policy == policies.READ_ALL[1]
    assert fetched
    assert (min(fetched) > 180) == everything


@READERS
def test_the_device_holds_the_newest_rows_alone(policy: str) -> None:
    here, _ = both(policy)
    segment = here.policy.retriever.segments[0]
    for _ in range(3):
        caches.decode(here, tiny.ids(9, 2, seed=3))
        for store in stores(here):
            assert store.recent is not None
            assert store.recent[0].shape[2] <= segment + 1
            expected = store.dense(store.keys)[:, :, -store.recent[0].shape[2] :]
            assert torch.equal(store.recent[0], expected)


@READERS
def test_bytes_are_those_held_and_split(policy: str) -> None:
    here, there = both(policy)
    for cache in (here, there):
        caches.decode(cache, tiny.ids(5, 2, seed=3))
        assert cache.nbytes == caches.storage_nbytes(caches.own_tensors(cache)) == cache.stats().nbytes
    pools = sum(store.nbytes for store in stores(here))
    assert here.stats().host_nbytes == pools > 0
    assert there.stats().host_nbytes == 0
    assert here.nbytes - there.nbytes == sum(t.nbytes for store in stores(here) for _, t in store.extras())


@READERS
def test_saving_forking_cropping_and_reordering(policy: str, tmp_path: Path) -> None:
    here, there = both(policy)
    fork = here.fork()
    caches.decode(fork, tiny.ids(20, 2, seed=5))
    fork.crop(-17)
    fork.batch_repeat_interleave(2)
    fork.reorder_cache(torch.tensor([3, 0, 2, 2]))
    caches.decode(there_fork := there.fork(), tiny.ids(3 + 17, 2, seed=5))
    there_fork.crop(-17)
    there_fork.batch_repeat_interleave(2)
    there_fork.reorder_cache(torch.tensor([3, 0, 2, 2]))
    following = tiny.ids(9, 4, seed=3)
    torch.testing.assert_close(
        caches.decode(fork, following), caches.decode(there_fork, following), rtol=1e-4, atol=1e-4
    )
    assert stores(fork)
    here.save(tmp_path / "talk.kv")
    there.save(tmp_path / "other.kv")
    assert (tmp_path / "talk.kv").stat().st_size == (tmp_path / "other.kv").stat().st_size
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours(), offload=True)
    plain = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    assert len(stores(loaded)) == len(stores(here))
    following = tiny.ids(9, 2, seed=4)
    expected = caches.decode(there, following)
    for cache in (here, loaded, plain):
        torch.testing.assert_close(caches.decode(cache, following), expected, rtol=1e-4, atol=1e-4)


@READERS
def test_padded_rows_turns_and_stacks(policy: str) -> None:
    model = tiny.ours()
    padded, mask = tiny.left_padded(tiny.ids(40), tiny.ids(9, seed=1))
    later = torch.nn.functional.pad(mask, (0, 7), value=1)
    found = []
    for offload in (True, False):
        cache = (
            kvfold.Cache(model, policy, offload=offload).prefill(padded, mask).prefill(tiny.ids(7, 2, seed=2), later)
        )
        step = torch.nn.functional.pad(later, (0, 1), value=1)
        positions = step.cumsum(-1)[:, -1:] - 1
        found.append(caches.feed(cache, tiny.ids(1, 2), attention_mask=step, position_ids=positions))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    here, there = both(policy, batch=1)
    ids, every = tiny.ids(3, 1, seed=2), torch.ones(1, 3, dtype=torch.bool)
    stacked = [StackedCache([cache]) for cache in (here, there)]
    for given, valid in ((ids, every), (ids[:, :1], every[:, :1])):
        torch.testing.assert_close(*(stack.feed(given, valid) for stack in stacked), rtol=1e-4, atol=1e-4)


def test_first_layers_that_read_everything_stay_on_the_device() -> None:
    cache = kvfold.Cache(tiny.ours(), "quest(page=4, read=8, dense_layers=1)", offload=True).prefill(tiny.ids(40))
    assert [view.core.lanes[0].store.on_host for view in cache.views] == [False, True]
    hybrid = kvfold.Cache(tiny.ours("gemma3"), "refinekv(cluster=4)", offload=True).prefill(tiny.ids(40))
    assert [view.core.lanes[0].store.on_host for view in hybrid.views] == [False, True, False, True]
    caches.decode(hybrid, tiny.ids(3))


def test_another_budget_may_be_taken_later() -> None:
    here, there = both("refinekv(cluster=4, tau=0.5)")
    following = tiny.ids(5, 2, seed=3)
    for cache in (here, there):
        cache.compress("refinekv(cluster=4, tau=0.1)")
    torch.testing.assert_close(caches.decode(here, following), caches.decode(there, following), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ("dense", r"offload must be False with dense, which reads every row, got True; give a retriever alone"),
        (policies.text("knorm", 0.5), r"offload must be False with knorm.*, which evicts, got True"),
        (f"{policies.text('knorm', 0.5)} + refinekv", r"offload must be False with knorm.* which evicts"),
    ],
)
def test_without_a_retriever_alone_it_is_refused(policy: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        kvfold.Cache(tiny.ours(), policy, offload=True)
    assert "\n" not in str(caught.value)
    cache = kvfold.Cache(tiny.ours(), "refinekv(cluster=4)", offload=True).prefill(tiny.ids(20))
    with pytest.raises(ConfigError, match=match):
        cache.compress(policy)
    assert str(cache.policy) == "refinekv(cluster=4)", "a refused policy changes nothing"


def test_watching_for_evictions_is_refused() -> None:
    with pytest.raises(ConfigError, match="observe must be left out with offload"):
        kvfold.Cache(tiny.ours(), "refinekv", offload=True, observe=policies.text("h2o", 0.5))
