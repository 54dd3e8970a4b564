"""Stacks of caches that read by query: each equals its cache alone, and one method chooses once for all its budgets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.cache.index import ClusterIndex
from kvfold.hf.retrieve import stored_share
from kvfold.hf.stack import StackedCache
from kvfold.methods.retrieve.quest import Quest
from kvfold.methods.retrieve.refinekv import RefineKV
from tests.helpers import tiny
from tests.helpers.caches import feed, runs
from tests.helpers.laws import shape
from tests.helpers.policies import text

LENGTHS = (40, 97, 61, 130, 3, 63)
POLICIES = (
    "refinekv(cluster=4, tau=0.3)",
    "dense",
    "quest(page=4, read=24, dense_layers=1)",
    text("snapkv", 0.3),
    "refinekv(cluster=4, tau=0.01)",
    f"{text('snapkv', 0.5, allocator='ada')} + refinekv(cluster=4, tau=0.2)",
    "doublep(segment=16, clusters=4, p1=0.8, p2=0.5)",
    f"{text('knorm', 0.6, allocator='ada')} + quest(page=4, read=12, dense_layers=1)",
    "refinekv(cluster=4, fanout=3, tau=0.2)",
    "quest(page=4, read=8, dense_layers=0)",
    "rowcodes(cluster=4, read=12)",
    f"{text('snapkv', 0.7, allocator='ada')} + rowcodes(cluster=2, read=20)",
    "rowcodes(cluster=4, tau=0.02)",
    "rowcodes(cluster=4, tau=0.1)",
    "rowcodes(cluster=4, read=9)",
)


def filled(model: object, policies: tuple[str, ...] = POLICIES, length: int = 0) -> list[kvfold.Cache]:
    return [
        kvfold.Cache(model, policy).prefill(tiny.ids(length or LENGTHS[index % len(LENGTHS)], seed=index))
        for index, policy in enumerate(policies)
    ]


def questions(count: int) -> tuple[Tensor, Tensor]:
    ids, mask = tiny.left_padded(*(tiny.ids(1 + index % 5, seed=50 + index) for index in range(count)))
    return ids, mask.bool()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let indexes cover what they cover when the prompt ends: a stack reads all later rows as they are."""
    plain = ClusterIndex.sync

    def once(self: ClusterIndex, store: object, newest: int = 0) -> None:
        if not self.counts:
            plain(self, store, newest)

    monkeypatch.setattr(ClusterIndex, "sync", once)


def check(caches: list[kvfold.Cache], steps: int = 6, tolerance: float = 2e-5) -> StackedCache:
    before = [runs(cache) for cache in caches]
    stack, own = StackedCache(caches), [cache.fork() for cache in caches]
    ids, valid = questions(len(caches))
    for step in range(steps):
        found = stack.feed(ids, valid)
        for row, cache in enumerate(own):
            if step:
                alone = feed(cache, ids[row][None])[:, -1]
            else:
                with cache.hold():
                    alone = feed(cache, ids[row][valid[row]][None])[:, -1]
            torch.testing.assert_close(found[row], alone[0], rtol=tolerance, atol=tolerance)
        ids, valid = found.argmax(-1, keepdim=True), torch.ones(len(caches), 1, dtype=torch.bool)
    for cache, held in zip(caches, before, strict=True):
        for place, parts in runs(cache).items():
            assert all(torch.equal(a, b) for a, b in zip(parts, held[place], strict=True)), "the stack changed a cache"
    shares = stack.rows_read(), stack.rows_scored(), stack.bytes_read()
    for read, scored, nbytes, cache, before_it in zip(*shares, own, caches, strict=True):
        stats = cache.stats()
        if stats.rows_read is None:
            assert (read, scored) == (1.0, 0.0)
            assert nbytes == pytest.approx(stored_share(before_it))
        else:
            assert (read, scored) == pytest.approx((stats.rows_read, stats.rows_scored))
            assert nbytes == pytest.approx(stats.bytes_read)
    return stack


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("q_per_kv", [1, 3, 8])
def test_logits_and_reads_equal_each_cache_alone(q_per_kv: int) -> None:
    stack = check(filled(tiny.ours(**shape(q_per_kv))))
    assert stack.seen.tolist() == [LENGTHS[index % len(LENGTHS)] for index in range(len(POLICIES))]


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("family", ["qwen3", "phi3_partial", "granite"])
def test_families(family: str) -> None:
    check(filled(tiny.ours(family)), tolerance=5e-5)


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("policy", POLICIES)
def test_one_cache_alone(policy: str) -> None:
    check(filled(tiny.ours(), (policy,)))


def test_reading_everything_is_a_stack_of_dense_caches() -> None:
    policies = (
        "refinekv(cluster=4, tau=0)",
        "quest(page=4, read=1.0, dense_layers=0)",
        "refinekv(cluster=4, read=100%)",
        "rowcodes(cluster=4, tau=0)",
    )
    stack = StackedCache(filled(tiny.ours(), policies))
    dense = StackedCache(filled(tiny.ours(), ("dense",) * 4))
    ids, valid = questions(4)
    for _ in range(8):
        found, expected = stack.feed(ids, valid), dense.feed(ids, valid)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ids, valid = expected.argmax(-1, keepdim=True), torch.ones(4, 1, dtype=torch.bool)
    assert stack.rows_read() == pytest.approx([1.0] * 4)
    assert all(share > 1 for share in stack.bytes_read()), "summaries are read too"
    assert dense.bytes_read() == [1.0] * 4
    assert dense.read_shares() == [None] * 4


def test_budgets_of_one_method_choose_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    for method in (RefineKV, Quest):
        plain = method.select

        def counting(self: object, ctx: object, plain: object = plain) -> object:
            calls.append(ctx.queries.shape[0])
            return plain(self, ctx)

        monkeypatch.setattr(method, "select", counting)
    policies = tuple(
        policy
        for tau in (0.5, 0.1, 0.05, 0.01)
        for policy in (f"refinekv(cluster=4, tau={tau})", f"quest(page=4, read={tau}, dense_layers=0)", "dense")
    )
    stack = StackedCache(filled(tiny.ours(), policies, length=60))
    ids, valid = questions(len(policies))
    found = stack.feed(ids, valid)
    assert calls == [], "a question reads everything"
    stack.feed(found.argmax(-1, keepdim=True), torch.ones(len(policies), 1, dtype=torch.bool))
    assert calls == [4, 4] * 2, "two methods in two layers"
    shares = stack.rows_read()
    assert shares[0] < shares[3] < 1
    assert shares[2::3] == [1.0] * 4


def test_answers_that_have_ended_do_not_count() -> None:
    policies = ("refinekv(cluster=4, tau=0.3)", "dense", "quest(page=4, read=12, dense_layers=0)")
    stack, control = (StackedCache(filled(tiny.ours(), policies)) for _ in range(2))
    ids, valid = questions(3)
    token, every = stack.feed(ids, valid).argmax(-1, keepdim=True), torch.ones(3, 1, dtype=torch.bool)
    control.feed(ids, valid)
    assert stack.rows_read() == [1.0] * 3
    assert stack.bytes_read() == [1.0] * 3, "a question reads everything and no summary"
    for step in range(4):
        stack.feed(token, every, counted=torch.tensor([step < 2, True, step < 4]))
        if step == 1:
            ended, nbytes = stack.rows_read()[0], stack.bytes_read()[0]
        token = control.feed(token, every).argmax(-1, keepdim=True)
    assert stack.rows_read()[0] == ended != control.rows_read()[0]
    assert stack.rows_read()[2] == control.rows_read()[2]
    assert stack.bytes_read()[0] == nbytes != control.bytes_read()[0]
    assert stack.bytes_read()[1:] == control.bytes_read()[1:]


def test_a_question_in_several_calls_is_read_whole() -> None:
    policies = ("refinekv(cluster=4, tau=0.5)", "quest(page=4, read=8, dense_layers=0)")
    whole, parts = (StackedCache(filled(tiny.ours(), policies)) for _ in range(2))
    ids = tiny.ids(9, 2, seed=3)
    every = torch.ones(2, 9, dtype=torch.bool)
    expected = whole.feed(ids, every)
    parts.feed(ids[:, :4], every[:, :4])
    torch.testing.assert_close(parts.feed(ids[:, 4:], every[:, 4:]), expected, rtol=1e-4, atol=1e-4)
    assert parts.rows_read() == [1.0, 1.0]
