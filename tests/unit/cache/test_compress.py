from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.cache.compress import carry_out, plan, row_nbytes
from kvfold.cache.observe import SKIP_FIRST, Observations
from kvfold.cache.rows import RowStore
from kvfold.cache.spec import AttentionCall, LayerSpec
from kvfold.core.errors import CacheStateError, ShapeError, UnsupportedError
from kvfold.core.interfaces import Evictor, ScoreContext
from kvfold.core.policy import Policy
from kvfold.core.rope import Rotary
from kvfold.core.types import Need, Visibility

HEADS, GROUP, DIM = 2, 2, 4
SPEC = LayerSpec(layer_idx=3, num_layers=8, order=0, num_compressed=1, visibility=Visibility())
CALL = AttentionCall(scale=0.5, visibility=Visibility())


def filled(count: int = 20, batch: int = 1, *, mass: bool = False) -> RowStore:
    store = RowStore(
        batch, HEADS, torch.zeros(batch, HEADS, 0, DIM), torch.zeros(batch, HEADS, 0, DIM), track_mass=mass
    )
    store.append(torch.randn(batch, HEADS, count, DIM), torch.randn(batch, HEADS, count, DIM), 0)
    return store


def compress(*args: object) -> bool:
    planned = plan(*args)
    carry_out([] if planned is None else [planned])
    return planned is not None


def nothing() -> Observations:
    return Observations(needs=Need.NOTHING, query_window=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(Evictor):
    """Record contexts; rate by position."""

    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES | Need.QUERY_MOMENTS | Need.OUTPUT_WEIGHT | Need.REPLAY | Need.ROPE
    seen: list[ScoreContext] = dataclasses.field(default_factory=list)
    answer: object = None

    @property
    def query_window(self) -> int:
        return 3

    def score(self, ctx: ScoreContext) -> Tensor:
        self.seen.append(ctx)
        return ctx.positions.float() if self.answer is None else self.answer(ctx)


def policy_with(evictor: Evictor, keep: object = 0.5, allocator: str = "ada") -> Policy:
    return dataclasses.replace(
        kvfold.policy("knorm", keep=keep, allocator=allocator, sink_tokens=1, recent_tokens=1),
        evictor=evictor,
        method="recorder",
    )


def test_what_needs_no_compression_is_left_alone() -> None:
    store = filled()
    for policy, spec in (
        (kvfold.policy("dense"), SPEC),
        (kvfold.policy("knorm", keep=1.0), SPEC),
        (kvfold.policy("knorm", keep=0.1), dataclasses.replace(SPEC, order=None)),
    ):
        before = store.keys.data_ptr()
        assert compress(store, policy, spec, CALL, 20, nothing(), None) is False
        assert store.keys.data_ptr() == before
    empty = RowStore(1, HEADS, torch.zeros(1, HEADS, 0, DIM), torch.zeros(1, HEADS, 0, DIM))
    assert compress(empty, kvfold.policy("knorm", keep=0.1), SPEC, CALL, 0, nothing(), None) is False


def test_the_context_of_unequal_runs_is_cut_to_one_head() -> None:
    evictor = Recorder()
    store = filled(batch=2)
    index = torch.stack([torch.arange(20), torch.arange(20)]).expand(2, 2, 20).clone()
    counts = torch.tensor([[20, 12], [16, 9]])
    index[torch.arange(20) >= counts[..., None]] = 20
    store.keep(index, counts)
    observed = Observations(
        needs=evictor.needs,
        query_window=3,
        queries=torch.randn(2, 4, 3, DIM),
        end=20,
        count=5,
        total=torch.randn(2, 4, DIM),
        outer=torch.randn(2, 4, DIM, DIM),
    )
    weight, sinks, replay = torch.randn(7, 4 * DIM), torch.randn(4), torch.rand(2, HEADS, 20)
    call = dataclasses.replace(
        CALL, output_weight=weight, sinks=sinks, softcap=9.0, rope=Rotary(inv_freq=torch.ones(2))
    )
    assert compress(store, policy_with(evictor, 8), SPEC, call, 20, observed, replay) is True
    assert len(evictor.seen) == 4
    for at, ctx in enumerate(evictor.seen):
        row, head = divmod(at, HEADS)
        mine = slice(head * GROUP, (head + 1) * GROUP)
        assert ctx.keys.shape == (1, 1, int(counts[row, head]), DIM)
        assert ctx.positions[0, 0].tolist() == list(range(int(counts[row, head])))
        assert torch.equal(ctx.queries, observed.queries[row : row + 1, mine])
        assert torch.equal(ctx.query_moments.mean, observed.moments().mean[row : row + 1, mine])
        assert torch.equal(ctx.output_weight, weight[:, head * GROUP * DIM : (head + 1) * GROUP * DIM])
        assert torch.equal(ctx.attention_sinks, sinks[mine])
        assert torch.equal(ctx.replay_mass[0, 0], replay[row, head, : counts[row, head]])
        assert (ctx.first_head, ctx.layer_idx, ctx.num_layers, ctx.scale, ctx.softcap, ctx.seen_tokens) == (
            head,
            3,
            8,
            0.5,
            9.0,
            20,
        )
        assert ctx.rope is call.rope
    assert store.total_rows == 2 * 2 * 8


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("queries", "recorder needs QUERIES, which this cache did not record; make the cache with observe="),
        ("total", "recorder needs QUERY_MOMENTS"),
        ("replay", r"recorder needs REPLAY, .*; feed the prompt with cache.prefill\(\)"),
        ("weight", "recorder needs OUTPUT_WEIGHT"),
    ],
)
def test_a_need_that_was_not_observed_is_named(missing: str, words: str) -> None:
    evictor, store = Recorder(), filled()
    observed = Observations(
        needs=evictor.needs,
        query_window=3,
        queries=None if missing == "queries" else torch.randn(1, 4, 3, DIM),
        end=20,
        count=5,
        total=None if missing == "total" else torch.randn(1, 4, DIM),
        outer=torch.randn(1, 4, DIM, DIM),
    )
    call = dataclasses.replace(CALL, output_weight=None if missing == "weight" else torch.randn(7, 4 * DIM))
    with pytest.raises(CacheStateError, match=words) as caught:
        compress(
            store,
            policy_with(evictor),
            SPEC,
            call,
            20,
            observed,
            None if missing == "replay" else torch.rand(1, HEADS, 20),
        )
    assert "\n" not in str(caught.value)
    assert store.lengths == [[20, 20]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Recorder):
    """Need keys alone."""

    needs: ClassVar[Need] = Need.KEYS


def test_scores_of_a_wrong_shape_or_of_nan_are_refused_and_nothing_is_evicted() -> None:
    for answer, kind, words in (
        (
            lambda ctx: ctx.positions[..., :-1].float(),
            ShapeError,
            r"Plain.score must return \[1, 2, 20\], got \[1, 2, 19\]",
        ),
        (lambda ctx: ctx.positions.float() / 0 * 0, CacheStateError, "scores must be numbers, got NaN"),
    ):
        store = filled()
        with pytest.raises(kind, match=words):
            compress(store, policy_with(Plain(answer=answer)), SPEC, CALL, 20, nothing(), None)
        assert store.lengths == [[20, 20]]
        store.check()


def test_scores_in_half_precision_are_taken() -> None:
    store = filled()
    assert compress(
        store, policy_with(Plain(answer=lambda ctx: ctx.positions.bfloat16())), SPEC, CALL, 20, nothing(), None
    )
    assert store.total_rows == 20


def test_bytes_of_a_row() -> None:
    assert row_nbytes(filled(), dataclasses.replace(SPEC, num_compressed=3)) == 3 * HEADS * (2 * DIM * 4 + 4)
    assert row_nbytes(filled(mass=True), SPEC) == HEADS * (2 * DIM * 4 + 4 + 4)


def queries(count: int, seed: int = 0) -> Tensor:
    return torch.randn(1, 2, count, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [3, 9, 18], [29, 1]])
def test_the_newest_queries_are_remembered(pieces: list[int]) -> None:
    observed, q, seen = Observations(needs=Need.QUERIES, query_window=7), queries(30), 0
    for count in pieces:
        observed.add(q[:, :, seen : seen + count], seen + count, CALL)
        seen += count
    assert torch.equal(observed.queries, q[:, :, -7:])
    assert observed.queries.untyped_storage().nbytes() == 7 * 2 * DIM * 4


def test_queries_of_two_stretches_are_not_joined() -> None:
    observed, q = Observations(needs=Need.QUERIES, query_window=7), queries(30)
    observed.add(q[:, :, :5], 5, CALL)
    observed.add(q[:, :, 10:13], 13, CALL)
    assert torch.equal(observed.queries, q[:, :, 10:13])


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [3, 9, 18], [2, 28]])
def test_moments_leave_out_the_first_positions_and_rope(pieces: list[int]) -> None:
    rope = Rotary(inv_freq=torch.tensor([0.7, 0.1]))
    raw, seen = queries(30), 0
    turned = rope.rotate(raw, torch.arange(30))
    observed = Observations(needs=Need.QUERY_MOMENTS, query_window=0)
    call = dataclasses.replace(CALL, rope=rope)
    for count in pieces:
        observed.add(turned[:, :, seen : seen + count], seen + count, call)
        seen += count
    rest = raw[:, :, SKIP_FIRST:]
    moments = observed.moments()
    assert moments.count == 30 - SKIP_FIRST
    torch.testing.assert_close(moments.mean, rest.mean(2), rtol=1e-4, atol=1e-5)
    centred = rest - rest.mean(2, keepdim=True)
    torch.testing.assert_close(moments.covariance, centred.mT @ centred / rest.shape[2], rtol=1e-4, atol=1e-4)


def test_no_moments_of_too_few_queries() -> None:
    observed = Observations(needs=Need.QUERY_MOMENTS, query_window=0)
    observed.add(queries(SKIP_FIRST), SKIP_FIRST, CALL)
    assert observed.moments() is None
    observed.crop(1, SKIP_FIRST)


def test_cropping_observations() -> None:
    observed, q = Observations(needs=Need.QUERIES, query_window=7), queries(20)
    observed.add(q, 20, CALL)
    observed.crop(3, 20)
    assert torch.equal(observed.queries, q[:, :, 13:17])
    observed.crop(9, 17)
    assert observed.queries is None
    sums = Observations(needs=Need.QUERY_MOMENTS, query_window=0)
    sums.add(q, 20, CALL)
    with pytest.raises(
        UnsupportedError, match="crop cannot undo query moments; crop after the prompt was compressed, or fork before"
    ):
        sums.crop(1, 20)


def test_forks_and_selections_of_observations_are_independent() -> None:
    observed, q = (
        Observations(needs=Need.QUERIES | Need.QUERY_MOMENTS, query_window=3),
        queries(20).expand(2, -1, -1, -1).clone(),
    )
    observed.add(q, 20, CALL)
    fork, chosen = observed.fork(), observed.select([1])
    before = fork.queries.clone()
    observed.add(q, 40, CALL)
    assert torch.equal(fork.queries, before)
    assert fork.count == 16
    assert chosen.queries.shape[0] == chosen.total.shape[0] == chosen.outer.shape[0] == 1
    observed.forget()
    assert list(observed.tensors()) == []
    assert fork.moments() is not None
