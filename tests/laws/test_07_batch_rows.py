"""Law 7: a row of a left-padded batch is that row alone: same rows kept, same logits, same text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from tests.helpers import caches, laws, policies, tiny


def masked(mask: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -count:]
    return {"attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize(("method", "allocator"), policies.COMBINATIONS)
@laws.few(3)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 15, 63, 100]), min_size=2, max_size=3),
    q_per_kv=laws.Q_PER_KV,
    keep=st.sampled_from(["0.5", "9", "0.25"]),
    chunk_size=st.sampled_from([None, 10]),
)
def test_kept_positions_and_logits_are_those_of_the_row_alone(
    method: str, allocator: str, lengths: list[int], q_per_kv: int, keep: str, chunk_size: int | None
) -> None:
    model = tiny.ours("llama", **laws.shape(q_per_kv))
    text = policies.text(method, keep, allocator=policies.ALLOCATORS[allocator])
    rows = [tiny.ids(n, seed=i) for i, n in enumerate(lengths)]
    padded, mask = tiny.left_padded(*rows)
    together = kvfold.Cache(model, text).prefill(padded, mask, chunk_size=chunk_size)
    together.check()
    assert together.seen_tokens == tuple(lengths)
    found = []
    following = tiny.ids(3, len(rows), seed=9)
    for column in following.T:
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        found.append(caches.feed(together, column[:, None], **masked(mask, 1)))
    logits = torch.cat(found, 1)
    for index, row in enumerate(rows):
        alone = kvfold.Cache(model, text).prefill(row, chunk_size=chunk_size)
        expected = caches.decode(alone, following[index : index + 1])
        for layer in range(2):
            for head in range(2):
                assert torch.equal(together.positions(layer, index, head), alone.positions(layer, 0, head))
        torch.testing.assert_close(logits[index], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", policies.METHODS)
def test_generated_text_is_that_of_the_row_alone(method: str) -> None:
    model = tiny.ours()
    rows = [tiny.ids(n, seed=i) for i, n in enumerate([70, 41, 1, 22])]
    padded, mask = tiny.left_padded(*rows)
    with kvfold.attach(model, policies.text(method, 0.4)):
        together = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for index, row in enumerate(rows):
            alone = model.generate(row, max_new_tokens=8, do_sample=False)
            assert torch.equal(together[index, -8:], alone[0, -8:])


@pytest.mark.parametrize("method", ["knorm", "snapkv", "h2o", "expected_attention", "streamingllm"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_turns_of_unequal_length_padded_on_the_right(method: str, chunk_size: int | None) -> None:
    model, text = tiny.ours(), policies.text(method, 0.5)
    first = [tiny.ids(n, seed=i) for i, n in enumerate([40, 31])]
    turns = [tiny.ids(n, seed=10 + i) for i, n in enumerate([9, 4])]
    padded, mask = tiny.left_padded(*first)
    cache = kvfold.Cache(model, text).prefill(padded, mask)
    turn = torch.stack([torch.nn.functional.pad(t[0], (0, 9 - t.shape[1])) for t in turns])
    real = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    mask = torch.cat((mask, real), 1)
    cache.prefill(turn, mask, chunk_size=chunk_size)
    cache.check()
    assert cache.seen_tokens == (49, 35)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    logits = caches.feed(cache, tiny.ids(1, 2, seed=20), **masked(mask, 1))
    for index in range(2):
        alone = kvfold.Cache(model, text).prefill(first[index]).prefill(turns[index])
        expected = caches.feed(alone, tiny.ids(1, 2, seed=20)[index : index + 1])
        for layer in range(2):
            for head in range(2):
                assert torch.equal(cache.positions(layer, index, head), alone.positions(layer, 0, head))
        torch.testing.assert_close(logits[index], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["dense", "knorm(keep=0.5, sink_tokens=2, recent_tokens=4)"])
def test_a_row_that_sits_a_turn_out(policy: str) -> None:
    model = tiny.ours()
    cache = kvfold.Cache(model, policy).prefill(tiny.ids(30, 2))
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[1, 30:] = 0
    cache.prefill(tiny.ids(6, 2, seed=1), mask)
    assert cache.seen_tokens == (36, 30)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    logits = caches.feed(cache, tiny.ids(1, 2, seed=2), **masked(mask, 1))
    alone = kvfold.Cache(model, policy).prefill(tiny.ids(30, 2)[1:])
    expected = caches.feed(alone, tiny.ids(1, 2, seed=2)[1:])
    torch.testing.assert_close(logits[1], expected[0], rtol=1e-3, atol=1e-3)


def test_padding_is_never_kept_and_the_budget_counts_real_tokens() -> None:
    rows = [tiny.ids(100), tiny.ids(128)]
    padded, mask = tiny.left_padded(*rows)
    for method in policies.METHODS:
        cache = kvfold.Cache(tiny.ours(), policies.text(method, 0.5, allocator="uniform")).prefill(padded, mask)
        assert cache.stored_tokens(0).tolist() == [[50, 50], [64, 64]]
