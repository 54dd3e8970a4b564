"""Law 5: every implementation of attention over row groups equals attention in float64 as far as its type allows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.cache.rows import PAGE, RowStore
from kvfold.core.errors import UnsupportedError
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks, merge
from kvfold.kernels.runs import attend_ragged
from tests.helpers import laws
from tests.helpers.oracle import attention64, causal

IMPLS = ["reference", "flash", "auto"]
KV_LENGTHS = st.sampled_from([0, 1, 15, 63, 257])
WIDE = st.sampled_from([64, 80, 96, 128, 256])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_as_exact(
    found: AttentionOutput,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """err(kernel, fp64) <= 2 (err(eager in the same type, fp64) + eps size), and everything finite.

    ``size`` is the largest output over ``|v|``: what rounding scales with. Over ``v`` the sum cancels, and two textbook
    orders of the same float32 product differ by more than twice the bound that ``max|ref|`` gives.
    """
    exact, lse = attention64(q, k, v, scale, visible, softcap=softcap)
    assert found.output.dtype == q.dtype
    assert torch.isfinite(found.output).all()
    if not exact.numel():
        return
    error = (found.output.double() - exact).abs().max()
    size = attention64(q, k, v.abs(), scale, visible, softcap=softcap)[0].max()
    bound = 2 * (eager_error(q, k, v, scale, visible, exact, softcap) + torch.finfo(q.dtype).eps * size)
    assert error <= bound, f"error {error:.3g} above {bound:.3g}"
    torch.testing.assert_close(
        found.lse.double(),
        lse,
        rtol=2e-2 if q.dtype != torch.float32 else 1e-5,
        atol=2e-2 if q.dtype != torch.float32 else 1e-5,
    )


def eager_error(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, exact: Tensor, softcap: float | None
) -> Tensor:
    """Error of the textbook computation in the type of the inputs, softmax in float32 as in transformers."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if not k.shape[2]:
        return torch.zeros((), dtype=torch.float64)
    logits = q @ keys.mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(q.dtype).min)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
    if visible is not None:
        weights = weights.masked_fill(~visible, 0)
    return ((weights @ values).double() - exact).abs().max()


@pytest.mark.parametrize("impl", IMPLS)
@laws.few(40)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=WIDE,
    dtype=laws.DTYPES,
    kv_len=KV_LENGTHS,
    q_len=st.sampled_from([1, 2, 17, 63]),
    batch=st.sampled_from([1, 2]),
)
@example(q_per_kv=8, head_dim=256, dtype=torch.bfloat16, kv_len=257, q_len=63, batch=2)
@example(q_per_kv=1, head_dim=64, dtype=torch.float32, kv_len=1, q_len=1, batch=1)
def test_every_row_visible(
    impl: str, q_per_kv: int, head_dim: int, dtype: torch.dtype, kv_len: int, q_len: int, batch: int
) -> None:
    q, k, v = (
        draw(batch, h, n, head_dim, dtype=dtype, seed=s)
        for s, h, n in ((1, 2 * q_per_kv, q_len), (2, 2, kv_len), (3, 2, kv_len))
    )
    if impl == "flash" and kv_len == 0:
        with pytest.raises(UnsupportedError, match="an empty group"):
            attend(q, k, v, scale=0.1, impl=impl)
        return
    assert_as_exact(attend(q, k, v, scale=head_dim**-0.5, impl=impl), q, k, v, head_dim**-0.5)


@pytest.mark.parametrize("impl", IMPLS)
@laws.few(30)
@given(q_per_kv=laws.Q_PER_KV, head_dim=WIDE, dtype=laws.DTYPES, length=st.sampled_from([1, 15, 63, 257]))
def test_causal(impl: str, q_per_kv: int, head_dim: int, dtype: torch.dtype, length: int) -> None:
    q, k, v = (draw(2, h, length, head_dim, dtype=dtype, seed=s) for s, h in ((1, 2 * q_per_kv), (2, 2), (3, 2)))
    found = attend(q, k, v, scale=head_dim**-0.5, causal=True, impl=impl)
    assert_as_exact(found, q, k, v, head_dim**-0.5, causal(length, length))


@laws.few(40)
@given(
    q_per_kv=laws.Q_PER_KV,
    q_len=st.sampled_from([1, 5, 63]),
    kv_len=KV_LENGTHS,
    is_causal=st.booleans(),
    masked=st.booleans(),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    dtype=laws.DTYPES,
)
def test_masks_biases_softcap_and_sinks_together(
    q_per_kv: int,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    masked: bool,
    biased: bool,
    softcap: float | None,
    sinks: bool,
    dtype: torch.dtype,
) -> None:
    q, k, v = (
        draw(2, h, n, 64, dtype=dtype, seed=s) for s, h, n in ((1, 2 * q_per_kv, q_len), (2, 2, kv_len), (3, 2, kv_len))
    )
    mask = draw(2, q_len, kv_len, seed=4) > -0.5 if masked else None
    bias = draw(2, 2, kv_len, seed=5) if biased else None
    logits = draw(2 * q_per_kv, seed=6) if sinks else None
    visible = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool)
    if is_causal:
        visible = visible & causal(q_len, kv_len)
    if mask is not None:
        visible = visible & mask[:, None]
    found = attend(q, k, v, scale=0.3, causal=is_causal, mask=mask, bias=bias, softcap=softcap)
    if logits is not None:
        found = join_sinks(found, logits)
    exact, lse = attention64(q, k, v, 0.3, visible, softcap=softcap, bias=bias, sinks=logits)
    assert torch.isfinite(found.output).all()
    rounding = 4 * torch.finfo(dtype).eps * (exact.abs().max() if exact.numel() else 0) + 2e-6
    assert not exact.numel() or (found.output.double() - exact).abs().max() <= rounding
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "flash"])
@laws.few(30)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=WIDE,
    dtype=laws.DTYPES,
    kv_len=st.sampled_from([1, 15, 63, 257]),
    q_len=st.sampled_from([1, 2, 17]),
    shift=st.sampled_from([0.0, 7.0, 12.0]),
)
def test_rows_that_stand_for_many_tokens(
    impl: str, q_per_kv: int, head_dim: int, dtype: torch.dtype, kv_len: int, q_len: int, shift: float
) -> None:
    """A bias of ``log n`` per row, up to that of a cluster of 160 000 tokens, and rows that are hidden by it."""
    q, k, v = (
        draw(2, h, n, head_dim, dtype=dtype, seed=s)
        for s, h, n in ((1, 2 * q_per_kv, q_len), (2, 2, kv_len), (3, 2, kv_len))
    )
    bias = draw(2, 2, kv_len, seed=4).abs() + shift
    bias[0, 1] = -torch.inf
    bias[1, 0, : kv_len // 2] = -torch.inf
    found = attend(q, k, v, scale=head_dim**-0.5, bias=bias, impl=impl)
    exact, lse = attention64(q, k, v, head_dim**-0.5, bias=bias)
    assert torch.isfinite(found.output).all()
    assert torch.equal(found.output[0, q_per_kv:], torch.zeros_like(found.output[0, q_per_kv:]))
    size = attention64(q, k, v.abs(), head_dim**-0.5, bias=bias)[0].max()
    # twice what rounding the inputs of the same sum in this type may cost
    assert (found.output.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * size + 2e-6
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-5, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@laws.few(25)
@given(
    q_per_kv=laws.Q_PER_KV,
    head_dim=WIDE,
    dtype=laws.DTYPES,
    q_len=st.sampled_from([1, 4]),
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 63, 257]), min_size=4, max_size=4),
    softcap=st.sampled_from([None, 3.0]),
)
def test_heads_of_unequal_length_in_a_poisoned_pool(
    impl: str, q_per_kv: int, head_dim: int, dtype: torch.dtype, q_len: int, lengths: list[int], softcap: float | None
) -> None:
    capacity = [-(-n // PAGE) * PAGE + PAGE for n in lengths]
    starts = [sum(capacity[:i]) for i in range(4)]
    keys = torch.full((sum(capacity), head_dim), torch.nan, dtype=dtype)
    values = torch.full_like(keys, torch.nan)
    for start, count in zip(starts, lengths, strict=True):
        keys[start : start + count] = draw(count, head_dim, dtype=dtype, seed=start + 1)
        values[start : start + count] = draw(count, head_dim, dtype=dtype, seed=start + 2)
    q = draw(2, 2 * q_per_kv, q_len, head_dim, dtype=dtype)
    found = attend_ragged(
        q,
        keys,
        values,
        [starts[:2], starts[2:]],
        [lengths[:2], lengths[2:]],
        scale=head_dim**-0.5,
        softcap=softcap,
        impl=impl,
    )
    assert torch.isfinite(found.output).all()
    for place, (start, count) in enumerate(zip(starts, lengths, strict=True)):
        row, head = divmod(place, 2)
        mine = slice(head * q_per_kv, (head + 1) * q_per_kv)
        k, v = keys[start : start + count][None, None], values[start : start + count][None, None]
        part = AttentionOutput(found.output[row : row + 1, mine], found.lse[row : row + 1, mine])
        assert_as_exact(part, q[row : row + 1, mine], k, v, head_dim**-0.5, softcap=softcap)
        if count == 0:
            assert torch.equal(part.output, torch.zeros_like(part.output))
            assert bool((part.lse == -torch.inf).all())


@laws.few(30)
@given(
    cuts=st.lists(st.integers(0, 63), max_size=4),
    q_per_kv=laws.Q_PER_KV,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    order=st.randoms(use_true_random=False),
)
def test_merging_any_split_equals_the_whole(cuts: list[int], q_per_kv: int, dtype: torch.dtype, order: object) -> None:
    q, k, v = (draw(2, h, n, 64, dtype=dtype, seed=s) for s, h, n in ((1, 2 * q_per_kv, 5), (2, 2, 63), (3, 2, 63)))
    bounds = [0, *sorted(cuts), 63]
    parts = [attend(q, k[:, :, a:b], v[:, :, a:b], scale=0.2) for a, b in pairwise(bounds)]
    order.shuffle(parts)
    whole, found = attend(q, k, v, scale=0.2, impl="reference"), merge(parts)
    torch.testing.assert_close(found.output, whole.output, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_merging_nothing_but_empty_groups_is_zero() -> None:
    q, empty = draw(1, 4, 3, 64), draw(1, 2, 0, 64)
    found = merge([attend(q, empty, empty, scale=0.1), attend(q, empty, empty, scale=0.1)])
    assert torch.equal(found.output, torch.zeros(1, 4, 3, 64))
    assert bool((found.lse == -torch.inf).all())


def test_large_logits_do_not_overflow() -> None:
    q, k, v = (draw(1, 2, n, 64, seed=n) * 100 for n in (3, 20, 20))
    parts = [attend(q, k[:, :, :7], v[:, :, :7], scale=1.0), attend(q, k[:, :, 7:], v[:, :, 7:], scale=1.0)]
    exact, _ = attention64(q, k, v, 1.0)
    torch.testing.assert_close(merge(parts).output.double(), exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_views_that_are_not_contiguous_read_the_same(impl: str) -> None:
    q = draw(2, 5, 6, 64).transpose(1, 2)
    k, v = (
        draw(2, 40, 2, 64, seed=1).transpose(1, 2)[:, :, 3:30],
        draw(2, 40, 2, 64, seed=2).transpose(1, 2)[:, :, 3:30],
    )
    found = attend(q, k, v, scale=0.125, impl=impl)
    packed = attend(q.contiguous(), k.contiguous(), v.contiguous(), scale=0.125, impl=impl)
    torch.testing.assert_close(found.output, packed.output, rtol=0, atol=1e-6)


def test_slack_of_a_store_never_leaks() -> None:
    k, v = draw(2, 2, 20, 16), draw(2, 2, 20, 16, seed=1)
    store = RowStore(2, 2, k, v)
    store.append(k, v, 0)
    store.keep(
        torch.tensor([[[0, 3, 7, 19], [1, 20, 20, 20]], [[2, 4, 20, 20], [5, 6, 8, 20]]]),
        torch.tensor([[4, 1], [2, 3]]),
    )
    clean = store.attend(draw(2, 4, 3, 16), scale=0.25, softcap=None)
    for row in range(2):
        for head in range(2):
            slack = slice(
                store.starts[row][head] + store.lengths[row][head], store.starts[row][head] + store.capacity[row][head]
            )
            store.keys[slack] = torch.nan
            store.values[slack] = torch.nan
    poisoned = store.attend(draw(2, 4, 3, 16), scale=0.25, softcap=None)
    assert torch.equal(clean.output, poisoned.output)
