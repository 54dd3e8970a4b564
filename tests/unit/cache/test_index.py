"""Clusters follow the rows, whatever happens to these; one step attends to what was chosen, as worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvfold
from kvfold.cache import index as index_module
from kvfold.cache.index import ClusterIndex, same_summaries
from kvfold.cache.lane import Lane
from kvfold.cache.rows import RowStore
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.core.policy import Policy
from kvfold.core.types import Need, Visibility
from tests.helpers import laws
from tests.helpers.retrievers import Nearest

HEADS, GROUP, DIM = 2, 3, 8
SPEC = LayerSpec(layer_idx=0, num_layers=1, order=0, num_compressed=1, visibility=Visibility())
CALL = AttentionCall(scale=0.3, visibility=Visibility())
METHODS = [
    Nearest(segment=4),
    Nearest(segment=3, upper=9),
    Nearest(segment=4, upper=40),
    kvfold.policy("doublep(segment=8, clusters=3)").retriever,
]


def rows(count: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, count, DIM, generator=made), torch.randn(batch, HEADS, count, DIM, generator=made)


def stored(count: int, batch: int = 2, keep: list[list[int]] | None = None) -> RowStore:
    keys, values = rows(count, batch)
    store = RowStore(batch, HEADS, keys, values)
    store.append(keys, values, 0)
    if keep is not None:
        counts = torch.tensor(keep)
        wide = torch.arange(int(counts.max())).expand(batch, HEADS, -1)
        store.keep(wide.masked_fill(wide >= counts[..., None], count), counts)
    return store


def assert_follows(index: ClusterIndex, store: RowStore, newest: int = 0) -> None:
    """Compare with each segment summarised alone."""
    method = index.retriever
    levels, exists = index.view()
    for level, size in enumerate(method.segments):
        clusters = 1 if level else method.clusters_per_segment
        for row in range(store.batch):
            for head in range(HEADS):
                count = (store.lengths[row][head] - newest) // size
                assert index.counts[level][row][head] == max(0, count)
                assert exists[level][row, head].tolist() == [
                    at < count * clusters for at in range(exists[level].shape[2])
                ]
                for at in range(count):
                    own = slice(at * size, (at + 1) * size)
                    alone = method.summarise(
                        store.run(store.keys, row, head)[own][None, None, None],
                        store.run(store.values, row, head)[own][None, None, None],
                        level,
                    )
                    for name, tensor in alone.items():
                        per = tensor.shape[2]
                        held = levels[level][name][row, head, at * per : (at + 1) * per]
                        assert torch.equal(held, tensor[0, 0]), f"{name} of segment {at}"


@laws.few(40)
@given(
    method=st.sampled_from(METHODS),
    ragged=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "crop", "sync", "read", "fork", "select"]), st.integers(1, 30)), max_size=9
    ),
)
def test_summaries_are_those_of_each_segment_alone(method: Nearest, ragged: bool, steps: list[tuple[str, int]]) -> None:
    store = stored(40, keep=[[40, 21], [7, 33]] if ragged else None)
    index, forks = ClusterIndex(method), []
    index.sync(store)
    for number, (what, count) in enumerate(steps):
        if what == "append":
            store.append(*rows(count, store.batch, seed=number), 100 * (number + 1))
        elif what == "crop":
            store.crop(min(count, min(min(line) for line in store.lengths)))
            index.crop(store)
        elif what == "fork":
            index.sync(store)
            forks.append((index.fork(), store.fork()))
        elif what == "select":
            chosen = [number % store.batch, 0]
            store, index = store.select(chosen), index.select(chosen)
        elif min(min(line) for line in store.lengths):
            # a store that shrank is read from its newest row on, as every decode step does
            index.sync(store, newest=int(what == "read" and all(n > 1 for line in store.lengths for n in line)))
            index.sync(store)
    index.sync(store)
    assert_follows(index, store)
    for other, own in forks:
        assert_follows(other, own)


@pytest.mark.parametrize("block", [1, 8, 50])
@pytest.mark.parametrize("ragged", [False, True])
def test_blocks_bound_what_is_summarised_at_once(block: int, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_BLOCK_ROWS", block)
    store = stored(40, keep=[[40, 21], [7, 33]] if ragged else None)
    index = ClusterIndex(METHODS[1])
    index.sync(store)
    assert_follows(index, store)


def test_the_newest_rows_are_left_out() -> None:
    store = stored(16)
    index = ClusterIndex(METHODS[0])
    index.sync(store, newest=1)
    assert (index.most, index.covered(0, 0)) == (3, 12)
    index.sync(store)
    assert (index.most, index.covered(0, 0)) == (4, 16)


def test_room_follows_the_rows_and_is_shared_until_written() -> None:
    store = stored(64)
    index = ClusterIndex(METHODS[0])
    index.sync(store)
    fork = index.fork()
    held = {t.data_ptr() for _, t in index.tensors()}
    assert held == {t.data_ptr() for _, t in fork.tensors()}
    store.append(*rows(1), 64)
    fork.sync(store)
    assert index.exists[0].shape[2] == 16
    assert fork.exists[0].shape[2] == store.capacity[0][0] // 4 > 16
    assert held.isdisjoint(t.data_ptr() for _, t in fork.tensors())
    store.append(*rows(3), 65)
    before = fork.exists[0].data_ptr()
    fork.sync(store)
    assert fork.exists[0].data_ptr() == before, "growing token by token must not copy each time"
    assert_follows(fork, store)


def test_widths_are_those_of_the_tensors() -> None:
    index = ClusterIndex(kvfold.policy("refinekv(cluster=4, fanout=3)").retriever)
    index.sync(stored(40))
    for level, names in enumerate(index.levels):
        room = index.exists[level].shape[2]
        looked_at = sum(t[0, 0].nbytes for name, t in names.items() if name != "mean_values")
        assert index.widths.scored[level] == looked_at // room
    assert index.widths.represented == 2 * DIM * 4
    assert index.widths.member == 0
    clustered = ClusterIndex(METHODS[3])
    clustered.sync(stored(40))
    assert clustered.widths.member == 1


def test_methods_that_differ_in_their_knob_alone_share_summaries() -> None:
    own = kvfold.policy("refinekv(cluster=4, tau=0.1)").retriever
    for other, shared in (
        ("refinekv(cluster=4, tau=0.1)", True),
        ("refinekv(cluster=4, tau=0.3)", True),
        ("refinekv(cluster=8, tau=0.1)", False),
        ("refinekv(cluster=4, epsilon=0.1)", False),
        ("quest(page=4)", False),
    ):
        assert same_summaries(own, kvfold.policy(other).retriever) == shared
    # each is valid, a mixture of both would not be
    assert same_summaries(*(kvfold.policy(f"doublep(p1=0.9, p2={p2})").retriever for p2 in (0.2, 0.9)))


def test_summaries_of_another_form_are_refused_by_name() -> None:
    class Short(Nearest):
        def summarise(self, keys: Tensor, values: Tensor, level: int, fitted: object = None) -> dict[str, Tensor]:
            return {"mean_keys": keys.mean(2)}

    with pytest.raises(ShapeError, match=r"Short\.summarise must return mean_keys as \[1, 1, 1, \.\.\.\]"):
        ClusterIndex(Short()).sync(stored(8))


def by_hand(method: Nearest, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[Tensor, int, int]:
    """One query of each head of a group on the rows of one KV head, in float64, cluster by cluster."""
    q, keys, values = q.double(), keys.double(), values.double()
    count = (keys.shape[0] - 1) // method.segment
    taken = math.ceil(count * method.share)
    cut = [slice(at * method.segment, (at + 1) * method.segment) for at in range(count)]
    chosen_by = []
    for head in range(len(q)):
        heads = [head] if method.per_query else range(len(q))
        near = [max(float(q[h] @ keys[own].mean(0)) for h in heads) for own in cut]
        chosen_by.append(sorted(range(count), key=lambda at: -near[at])[:taken])
    outputs, exact, means = [], set(), set()
    for head in range(len(q)):
        logits, parts = [], []
        for at, own in enumerate(cut):
            if at in chosen_by[head]:
                logits += (keys[own] @ q[head] * CALL.scale).tolist()
                parts += list(values[own])
                exact.add(at)
            elif method.means:
                logits.append(float(keys[own].mean(0) @ q[head] * CALL.scale) + math.log(method.segment))
                parts.append(values[own].mean(0))
                means.add(at)
        tail = slice(count * method.segment, None)
        logits += (keys[tail] @ q[head] * CALL.scale).tolist()
        parts += list(values[tail])
        if sinks is not None:
            logits.append(float(sinks[head]))
            parts.append(torch.zeros(DIM, dtype=torch.float64))
        outputs.append(torch.tensor(logits, dtype=torch.float64).softmax(0) @ torch.stack(parts))
    return torch.stack(outputs), len(exact) * method.segment, len(means)


@laws.few(30)
@given(
    share=st.sampled_from([0.0, 0.3, 1.0]),
    means=st.booleans(),
    per_query=st.booleans(),
    ragged=st.booleans(),
    prompt=st.sampled_from([1, 4, 21, 40]),
    sinks=st.booleans(),
)
def test_a_step_attends_to_what_was_chosen(
    share: float, means: bool, per_query: bool, ragged: bool, prompt: int, sinks: bool
) -> None:
    method = Nearest(share=share, means=means, per_query=per_query)
    policy = Policy(retriever_name="nearest", retriever=method)
    call = replace(CALL, sinks=torch.randn(HEADS * GROUP) if sinks else None)
    lane = Lane.empty(*rows(1), Need.NOTHING, 0)
    lane.extend(
        torch.randn(2, HEADS * GROUP, prompt, DIM), *rows(prompt), call, SPEC, policy, prompt=prompt, prompt_ends=True
    )
    if ragged:
        counts = torch.tensor([[prompt, prompt // 2], [max(1, prompt // 4), prompt - 1]])
        wide = torch.arange(prompt).expand(2, HEADS, -1)
        lane.store.keep(wide.masked_fill(wide >= counts[..., None], prompt), counts)
        lane.index = None
    for step in range(9):
        q = torch.randn(2, HEADS * GROUP, 1, DIM)
        before = lane.log.counted
        found = lane.extend(q, *rows(1, seed=50 + step), call, SPEC, policy, prompt=0, prompt_ends=False)
        read = lane.log.counted
        for row in range(2):
            for head in range(HEADS):
                heads = slice(head * GROUP, (head + 1) * GROUP)
                expected, exact, represented = by_hand(
                    method,
                    q[row, heads, 0],
                    lane.store.run(lane.store.keys, row, head),
                    lane.store.run(lane.store.values, row, head),
                    None if call.sinks is None else call.sinks[heads],
                )
                torch.testing.assert_close(found[row, heads, 0].double(), expected, rtol=1e-4, atol=1e-5)
                if read is not None:
                    counted = read[:, row, head] - (0 if before is None else before[:, row, head])
                    clusters = (lane.store.lengths[row][head] - 1) // method.segment
                    assert counted.tolist() == [exact, represented, clusters]


def test_a_soft_cap_is_refused_where_the_model_did_not_tell() -> None:
    lane = Lane.empty(*rows(1), Need.NOTHING, 0)
    policy = Policy(retriever_name="nearest", retriever=Nearest())
    call, q = replace(CALL, softcap=5.0), torch.randn(2, HEADS * GROUP, 1, DIM)
    with pytest.raises(UnsupportedError, match="layer 0 caps its attention logits, which Nearest cannot bound"):
        lane.extend(q, *rows(1), call, SPEC, policy, prompt=0, prompt_ends=False)
