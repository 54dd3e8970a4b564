"""Rows that no prompt has written: as many as asked for, and read as a cache with the same rows reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.bench.rows import RandomRows, held_rows
from kvfold.core.errors import CacheStateError, ConfigError
from kvfold.hf.compat import cache_kwarg
from kvfold.runtime.filled import Filling, begin_filled
from tests.helpers import tiny
from tests.runtime.helpers import engine, model_of

CONTEXT = 150
POLICIES = {
    "dense": "dense",
    "evicts": "knorm(keep=0.5)",
    "ragged": "knorm(keep=0.5, allocator=ada)",
    "reads": "refinekv(cluster=8, tau=0.05)",
    "reads_little": "quest(read=32, page=8, dense_layers=0)",
    "fits": "rowcodes(cluster=8, read=24)",
    "both": "knorm(keep=0.5, allocator=ada) + refinekv(cluster=8, tau=0.05)",
}


def filling(made: kvfold.Engine, batch: int = 1, context: int = CONTEXT) -> Filling:
    seen = (context,) * batch
    held = held_rows(made.plans, made.policy, seen, longest=1.6, seed=1)
    rows, plan = RandomRows(torch.device("cpu"), seed=3), made.plans[0]
    heads, width = int(made.facts.config.num_attention_heads), plan.keys.shape[0]

    def queries(layer: int, row: int) -> Tensor:
        return rows.queries(heads, made.policy.query_window, width, plan.keys.dtype, layer, row)

    return Filling(seen=seen, held=held, write=rows.write, queries=queries)


def cache_of(made: kvfold.Engine, given: Filling) -> kvfold.Cache:
    """Put the same rows into an ordinary cache, by feeding it and writing over what it holds."""
    cache = kvfold.Cache(made.model, made.policy)
    # a token each, so that everything is there; then the rows themselves
    with torch.no_grad(), cache.hold():
        cache.prefill(tiny.ids(given.seen[0], seed=5))
    for number, view in enumerate(cache.views):
        lane, wanted = view.core.lanes[0], given.held[number][0]
        store, most = lane.store, max(wanted)
        index = torch.arange(most).expand(1, len(wanted), most)
        store.keep(index, torch.tensor([wanted]))
        for head in range(store.kv_heads):
            given.write(store.run(store.keys, 0, head), store.run(store.values, 0, head), number, 0, head)
        if given.queries is not None and made.policy.query_window:
            lane.observed.queries, lane.observed.end = given.queries(number, 0), lane.seen
        lane.index = None
        lane.index_rows(made.policy, view.core.spec)
    return cache


def stepped(cache: kvfold.Cache, count: int) -> list[int]:
    found = [0]
    with torch.no_grad():
        for step in range(count):
            output: Any = cache.model(
                torch.tensor([[found[-1]]]),
                position_ids=torch.tensor([[CONTEXT + step]]),
                use_cache=True,
                **{cache_kwarg(): cache},
            )
            found.append(int(output.logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_a_cache_with_the_same_rows(name: str) -> None:
    made = engine(POLICIES[name], max_batch=1)
    given = filling(made)
    call = begin_filled(made, given, 24)
    found = [token for (token,) in call.tokens()]
    assert found == stepped(cache_of(made, given), 23)


@pytest.mark.parametrize("name", ["dense", "ragged", "reads", "fits", "both"])
def test_every_run_begins_at_the_same_rows(name: str) -> None:
    made = engine(POLICIES[name])
    call = begin_filled(made, filling(made, batch=3), 20)
    first = list(call.tokens())
    assert len(first) == 20
    assert list(call.tokens()) == first
    rest = call.tokens()
    next(rest), next(rest)
    assert list(call.tokens()) == first


@pytest.mark.parametrize("name", ["dense", "ragged", "both"])
def test_runs_hold_what_was_asked_for(name: str) -> None:
    made = engine(POLICIES[name])
    given = filling(made, batch=2)
    call = begin_filled(made, given, 8)
    layers = call.layers()
    for number, layer in enumerate(layers):
        assert layer.state.of(number, layer.state.lengths).tolist() == given.held[number]
    assert [line for layer in call.layout.lengths for line in layer] == [line for layer in given.held for line in layer]


@pytest.mark.parametrize("name", POLICIES)
def test_attention_over_rows_is_finite(name: str) -> None:
    made = engine(POLICIES[name])
    call = begin_filled(made, filling(made, batch=2), 8)
    q = torch.randn(2, int(made.facts.config.num_attention_heads), 1, made.plans[0].keys.shape[0])
    row = torch.randn(2, made.plans[0].kv_heads, 1, q.shape[-1])
    for layer in call.layers():
        found = layer.attend(q, row, row, scale=0.3, softcap=None, sinks=None, is_new=True)
        assert found.isfinite().all()
        assert found.shape == q.shape


def test_windows_hold_what_they_show() -> None:
    made = kvfold.Engine(model_of("gemma3"), "knorm(keep=0.5)", max_batch=2)
    call = begin_filled(made, filling(made, batch=2), 12)
    tokens = list(call.tokens())
    assert len(tokens) == 12
    sizes = [layer.plan.visibility.size for layer in call.layers() if not layer.plan.visibility.is_full]
    assert sizes


def test_an_amount_stands_in_for_the_policys_own() -> None:
    own = engine("refinekv(cluster=8, tau=0.3)", max_batch=1)
    wanted = list(begin_filled(own, filling(own), 20).tokens())
    other = engine("refinekv(cluster=8, tau=0.0001)", max_batch=1)
    call = begin_filled(other, filling(other), 20)
    assert list(call.tokens())
    read = call.counted()[0]
    call.amount = 0.3
    assert list(call.tokens()) == wanted
    assert call.counted()[0] < read


def test_what_does_not_fit_is_refused() -> None:
    made = engine(max_batch=1, max_tokens=160)
    with pytest.raises(ConfigError, match="max_batch=1"):
        begin_filled(made, filling(made, batch=2), 4)
    with pytest.raises(ConfigError, match="max_tokens=160"):
        begin_filled(made, filling(made), 11)
    call = begin_filled(made, filling(made), 4)
    with pytest.raises(CacheStateError, match="ask for tokens"):
        _ = call.layout
    made.generate(tiny.ids(20), 2)
    with pytest.raises(CacheStateError):
        call.layers()


def test_an_answer_after_it_is_the_same_as_ever() -> None:
    made = engine("refinekv(cluster=8, tau=0.05)", max_batch=1)
    wanted = made.generate(tiny.ids(60), 20)[0].ids
    list(begin_filled(made, filling(made), 20).tokens())
    assert made.generate(tiny.ids(60), 20)[0].ids == wanted
