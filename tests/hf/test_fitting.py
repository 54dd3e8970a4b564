"""A retriever that fits something to the prompt: when, to what, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.core.errors import CacheStateError, UnsupportedError
from kvfold.eval.branch import branches
from tests.helpers import caches, policies, tiny

# eight clusters of 4 rows are enough to fit to
POLICY = "rowcodes(cluster=4, window=9, read=0.3)"


def fitted(cache: kvfold.Cache, number: int = 0) -> list[dict[str, Tensor]]:
    """What each layer holds for one lane."""
    lanes = [view.core.lanes[number] for view in cache.views]
    return [{} if lane.index is None else lane.index.fitted for lane in lanes]


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def watched(cache: kvfold.Cache) -> list[int]:
    """Queries remembered per lane."""
    held = [lane.observed.queries for view in cache.views for lane in view.core.lanes]
    return [0 if queries is None else queries.shape[2] for queries in held]


def test_it_is_fitted_to_the_prompts_last_queries_and_kept() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(63))
    other = kvfold.Cache(tiny.ours(), POLICY, observe=POLICY).prefill(tiny.ids(63))
    assert same(fitted(cache), fitted(other))
    for view, found in zip(other.views, fitted(other), strict=True):
        lane = view.core.lanes[0]
        assert lane.observed.queries.shape[2] == 9
        keys = lane.store.dense(lane.store.keys)
        assert same([found], [other.policy.retriever.fit(keys, lane.observed.queries)])
    before = fitted(cache)
    caches.decode(cache, tiny.ids(20, seed=1))
    caches.feed(cache, tiny.ids(40, seed=2))
    caches.decode(cache, tiny.ids(9, seed=3))
    assert all(a[name] is b[name] for a, b in zip(fitted(cache), before, strict=True) for name in a)


def test_queries_are_dropped_once_nobody_else_wants_them() -> None:
    for policy, observe, left in (
        (POLICY, (), 0),
        (POLICY, ("snapkv(keep=0.5)",), 32),
        (f"{policies.text('knorm', 0.8)} + {POLICY}", (), 0),
        (f"{policies.text('knorm', 40, every=8)} + {POLICY}", (), 9),
    ):
        cache = kvfold.Cache(tiny.ours(), policy, observe=observe).prefill(tiny.ids(63))
        assert watched(cache) == [left, left], policy
        assert all(fitted(cache)), policy
        caches.feed(cache, tiny.ids(12, seed=2))
        assert bool(watched(cache)[0]) == bool(left)


def test_short_prompts_are_read_whole_until_there_is_enough_to_fit_to() -> None:
    cache, dense = kvfold.Cache(tiny.ours(), POLICY), kvfold.Cache(tiny.ours())
    for one in (cache, dense):
        one.prefill(tiny.ids(5))
    following = tiny.ids(40, seed=1)
    # 5 + 27 rows before the 28th token: the first that chooses
    torch.testing.assert_close(
        caches.decode(cache, following[:, :27]), caches.decode(dense, following[:, :27]), rtol=1e-4, atol=1e-4
    )
    assert not any(fitted(cache))
    assert watched(cache) == [9, 9]
    assert cache.stats().rows_read == 1.0
    caches.decode(cache, following[:, 27:28])
    assert all(fitted(cache))
    caches.decode(cache, following[:, 28:])
    assert cache.stats().rows_read < 1


@pytest.mark.parametrize("decoded", [25, 27, 28, 35])
@pytest.mark.parametrize("count", [1, 8, 20, 24])
def test_cropping_behind_what_was_fitted_while_decoding_fits_anew(decoded: int, count: int) -> None:
    cropped, control = (kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(5, 2)) for _ in range(2))
    first = tiny.ids(decoded, 2, seed=1)
    caches.decode(cropped, first)
    cropped.crop(-count)
    caches.decode(control, first[:, : decoded - count])
    following = tiny.ids(45, 2, seed=3)
    assert torch.equal(caches.decode(cropped, following), caches.decode(control, following))
    assert same(fitted(cropped), fitted(control))


@pytest.mark.parametrize("decoded", [0, 25, 27, 28, 35])
def test_files_hold_it_or_the_queries_that_it_waits_for(decoded: int, tmp_path: Path) -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(5, 2))
    if decoded:
        caches.decode(cache, tiny.ids(decoded, 2, seed=1))
    cache.save(tmp_path / "talk.kv")
    loaded = kvfold.Cache.load(tmp_path / "talk.kv", tiny.ours())
    assert same(fitted(loaded), fitted(cache))
    assert loaded.nbytes == cache.nbytes
    for one in (cache, loaded):
        one.crop(-min(decoded, 10))
    following = tiny.ids(45, 2, seed=3)
    assert torch.equal(caches.decode(loaded, following), caches.decode(cache, following))
    assert same(fitted(loaded), fitted(cache))


def test_a_sequence_without_a_prompt_is_fitted_in_time() -> None:
    padded, mask = tiny.ids(40, 2), torch.ones(2, 40, dtype=torch.long)
    mask[1] = 0
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(padded, mask)
    for token in tiny.ids(40, 2, seed=1).T:
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -1:]
        caches.feed(cache, token[:, None], attention_mask=mask, position_ids=positions)
    assert all(fitted(cache, 0))
    assert all(fitted(cache, 1))
    cache.check()


@pytest.mark.parametrize("every", [None, 8])
def test_evictions_leave_it_as_it_is(every: int | None) -> None:
    text = f"{policies.text('snapkv', 40, allocator='ada', **({'every': every} if every else {}))} + {POLICY}"
    cache = kvfold.Cache(tiny.ours(), text).prefill(tiny.ids(63))
    before = fitted(cache)
    assert all(before)
    caches.decode(cache, tiny.ids(20, seed=1))
    caches.feed(cache, tiny.ids(30, seed=2))
    caches.decode(cache, tiny.ids(5, seed=1))
    assert same(fitted(cache), before)
    cache.check()


def test_runs_of_unequal_length_are_fitted_each_to_its_own_rows() -> None:
    evicting = policies.text("snapkv", 0.7, allocator="ada")
    cache = kvfold.Cache(tiny.ours(), f"{evicting} + {POLICY}", observe=POLICY)
    queries: list[Tensor] = []
    cache.prefill(tiny.ids(63))
    plain = kvfold.Cache(tiny.ours(), observe=POLICY).prefill(tiny.ids(63))
    for view, source in zip(cache.views, plain.views, strict=True):
        lane = view.core.lanes[0]
        assert not lane.store.is_uniform
        queries = source.core.lanes[0].observed.queries
        group = queries.shape[1] // lane.store.kv_heads
        for head in range(lane.store.kv_heads):
            keys = lane.store.run(lane.store.keys, 0, head)[None, None]
            own = queries[:, head * group : (head + 1) * group]
            alone = cache.policy.retriever.fit(keys, own)
            assert all(torch.equal(lane.index.fitted[name][:, head : head + 1], alone[name]) for name in alone)


def test_a_cache_that_did_not_watch_is_refused_and_left_as_it_was() -> None:
    for tokens in (63, 5):
        dense = kvfold.Cache(tiny.ours()).prefill(tiny.ids(tokens))
        held = caches.runs(dense)
        for policy in (POLICY, f"{policies.text('knorm', 0.5)} + {POLICY}"):
            with pytest.raises(
                CacheStateError, match="RowCodes needs QUERIES, which this cache did not record"
            ) as caught:
                dense.fork().compress(policy)
            assert "\n" not in str(caught.value)
        for place, parts in caches.runs(dense).items():
            assert all(torch.equal(a, b) for a, b in zip(parts, held[place], strict=True))
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(63))
    with pytest.raises(CacheStateError, match="needs QUERIES"):
        cache.fork().compress("rowcodes(cluster=2, read=0.3)")
    # another budget of the same method has what it needs
    other = cache.fork().compress("rowcodes(cluster=4, window=9, read=0.1)")
    assert same(fitted(other), fitted(cache))


def test_there_is_no_certificate() -> None:
    cache = kvfold.Cache(tiny.ours(), POLICY).prefill(tiny.ids(63))
    caches.decode(cache, tiny.ids(1))
    with pytest.raises(UnsupportedError, match="rowcodes knows no bound on its error; use a retriever that does"):
        cache.certificate()


def test_branches_of_one_context_share_what_was_fitted() -> None:
    texts = [f"rowcodes(cluster=4, window=9, read={read})" for read in (0.1, 0.3)]
    texts += ["dense", f"{policies.text('snapkv', 0.7)} + rowcodes(cluster=4, window=9, tau=0.01)"]
    context, following = tiny.ids(63), tiny.ids(9, seed=3)
    for text, branch in branches(tiny.ours(), texts, context, 20):
        alone = kvfold.Cache(tiny.ours(), text).prefill(context, chunk_size=20)
        assert same(fitted(branch), fitted(alone))
        assert branch.nbytes == alone.nbytes
        assert torch.equal(caches.decode(branch, following), caches.decode(alone, following))


def test_codes_cost_what_is_said() -> None:
    """4 bytes per row, and per cluster of 32 two vectors in bytes and two steps; 3 % of rows in half precision."""
    model = tiny.ours("llama", torch.bfloat16, head_dim=64)
    cache = kvfold.Cache(model, "rowcodes(read=1.0)").prefill(tiny.ids(320))
    caches.decode(cache, tiny.ids(1))
    lane = cache.views[0].core.lanes[0]
    assert lane.index.widths.scored == (32 * 4 + 64 + 2,)
    assert lane.index.widths.represented == 64 + 2
    stats = cache.stats()
    assert stats.rows_read == pytest.approx(1.0)
    assert stats.bytes_read == pytest.approx(1 + 10 * (32 * 4 + 64 + 2) / (321 * 2 * 64 * 2))
