"""Ratings of rows: plain torch and Triton against float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.core.rope import Rotary
from kvfold.kernels.scores import distance_to_mean, lengths, mean_window_attention, unlikeness
from tests.helpers.oracle import attention64
from tests.kernels.test_runs import DEVICE, HAS_TRITON, IMPLS, LENGTHS, NAN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 80, 96, 128, 256]
METRICS = ["l2", "l1", "linf", "cosine"]
# Keys are read exactly and every sum is one of float32: what rounds is a sum over rows in tiles, and one over channels.
CLOSE = {"rtol": 1e-5, "atol": 4e-6}


def keys_in_room(rows: int, head_dim: int, dtype: torch.dtype, batch: int = 1, heads: int = 2) -> Tensor:
    """Keys with a mean, as a store holds them: the room behind a run is not a number."""
    draw = torch.Generator().manual_seed(rows + head_dim)
    room = torch.full((batch, heads, rows + 7, head_dim), NAN)
    room[:, :, :rows] = torch.randn(batch, heads, rows, head_dim, generator=draw) + 0.5
    return room.to(DEVICE, dtype)[:, :, :rows]


def positions_of(keys: Tensor, *, gaps: bool = False) -> Tensor:
    batch, heads, rows, _ = keys.shape
    if not gaps:
        return torch.arange(rows, device=keys.device).expand(batch, heads, -1)
    draw = torch.Generator().manual_seed(rows)
    found = [torch.randperm(2 * rows, generator=draw)[:rows].sort().values for _ in range(batch * heads)]
    return torch.stack(found).view(batch, heads, rows).to(keys.device) if rows else torch.empty(batch, heads, 0).long()


def distance64(keys: Tensor, positions: Tensor, metric: str, starts: list[int]) -> Tensor:
    """The formula, window by window, in float64."""
    keys, positions = keys.double().cpu(), positions.cpu()
    found = torch.empty(keys.shape[:3], dtype=torch.float64)
    edges = torch.tensor(starts[1:])
    for row in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            window = (positions[row, head][:, None] >= edges).sum(1)
            for one in window.unique():
                own = keys[row, head][window == one]
                mean = own.mean(0)
                if metric == "cosine":
                    rated = -torch.nn.functional.cosine_similarity(own, mean[None], dim=-1)
                else:
                    order = {"l2": 2, "l1": 1, "linf": torch.inf}[metric]
                    rated = torch.linalg.vector_norm(own - mean, ord=order, dim=-1)
                found[row, head][window == one] = rated
    return found


def assert_rated(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double().cpu(), exact.cpu(), **CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_distance_to_the_mean(impl: Any, metric: Any, dtype: torch.dtype, head_dim: int) -> None:
    for rows in LENGTHS:
        keys = keys_in_room(rows, head_dim, dtype)
        positions = positions_of(keys)
        found = distance_to_mean(keys, positions, metric=metric, seen_tokens=rows, impl=impl)
        assert_rated(found, distance64(keys, positions, metric, [0]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("starts", [[0, 64], [0, 70, 300, 470], [0, 64, 128, 192, 4096]])
def test_distance_to_the_mean_of_a_window(impl: Any, gaps: bool, starts: list[int]) -> None:
    for rows in (1, 63, 500):
        keys = keys_in_room(rows, 64, torch.bfloat16)
        positions = positions_of(keys, gaps=gaps)
        given = {"starts": starts, "seen_tokens": max(1100, starts[-1] + 100)}
        found = distance_to_mean(keys, positions, impl=impl, **given)
        assert_rated(found, distance64(keys, positions, "l2", starts))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unlikeness_and_lengths(impl: Any, dtype: torch.dtype, head_dim: int) -> None:
    for rows in [*LENGTHS, 600]:
        keys = keys_in_room(rows, head_dim, dtype)
        exact = keys.double()
        unit = torch.nn.functional.normalize(exact, dim=-1)
        anchor = torch.nn.functional.normalize(unit.sum(2, keepdim=True), dim=-1)
        assert_rated(unlikeness(keys, impl=impl), -(unit * anchor).sum(-1))
        assert_rated(lengths(keys, impl=impl), exact.norm(dim=-1))


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_without_a_direction(impl: Any) -> None:
    keys = torch.zeros(1, 2, 20, 64, device=DEVICE)
    positions = positions_of(keys)
    keys[:, 1, :10], keys[:, 1, 10:] = 1.0, -1.0
    for metric in METRICS:
        assert torch.isfinite(distance_to_mean(keys, positions, metric=metric, seen_tokens=20, impl=impl)).all()
    assert torch.isfinite(unlikeness(keys, impl=impl)).all()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_head_is_rated_alike_bit_for_bit_whoever_is_beside_it() -> None:
    keys = keys_in_room(700, 64, torch.bfloat16, batch=2, heads=3)
    positions = positions_of(keys)
    for starts in ([0], [0, 300]):
        given = {"starts": starts, "seen_tokens": 700, "impl": "triton"}
        together = distance_to_mean(keys, positions, **given)
        for row in range(2):
            at = (slice(row, row + 1), slice(2, 3))
            alone = distance_to_mean(keys[at].clone(), positions[at], **given)
            assert torch.equal(alone, together[at])
        packed = distance_to_mean(keys.contiguous(), positions.contiguous(), **given)
        assert torch.equal(packed, together)
    assert torch.equal(unlikeness(keys[1:, 2:].clone(), impl="triton"), unlikeness(keys, impl="triton")[1:, 2:])


def window64(q: Tensor, keys: Tensor, positions: Tensor, first: int, **given: Any) -> Tensor:
    """Mean weights in float64: one-hot values turn the output of attention into its weights."""
    rows, group = keys.shape[2], q.shape[1] // keys.shape[1]
    eye = torch.eye(rows).expand(*keys.shape[:2], rows, rows)
    at = torch.arange(first, first + q.shape[2])
    seen = positions.cpu()[:, :, None, :] <= at[:, None]
    visible = seen.repeat_interleave(group, 1)
    return attention64(q.cpu(), keys.cpu(), eye, given.pop("scale"), visible, **given)[0].mean(2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_per_kv", "head_dim", "window"),
    [(1, 64, 1), (3, 80, 32), (5, 96, 8), (6, 128, 7), (7, 64, 64), (8, 256, 5), (8, 128, 32), (2, 64, 130)],
)
def test_attention_of_a_window(impl: Any, dtype: torch.dtype, q_per_kv: int, head_dim: int, window: int) -> None:
    draw = torch.Generator().manual_seed(window)
    for rows in (1, 15, 63, 257) if head_dim != 64 else (1, 1100):
        keys = keys_in_room(rows, head_dim, dtype)
        positions = positions_of(keys, gaps=rows == 63)
        positions = positions - positions[..., :1]
        q = torch.randn(1, 2 * q_per_kv, window, head_dim, generator=draw).to(DEVICE, dtype)
        first = max(0, int(positions.max()) + 1 - window)
        given = {"scale": head_dim**-0.5}
        found = mean_window_attention(q, keys, positions, first, impl=impl, **given)
        assert found.dtype == torch.float32
        exact = window64(q, keys, positions, first, **given)
        torch.testing.assert_close(found.double().cpu(), exact, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_of_a_window_with_a_cap_and_sinks(impl: Any) -> None:
    keys = keys_in_room(257, 64, torch.float32, batch=2, heads=2)
    positions = positions_of(keys)
    q = torch.randn(2, 6, 8, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sinks = torch.linspace(-2, 3, 6, device=DEVICE)
    plain = mean_window_attention(q, keys, positions, 249, scale=0.2, softcap=3.0, impl=impl)
    exact = window64(q, keys, positions, 249, scale=0.2, softcap=3.0)
    torch.testing.assert_close(plain.double().cpu(), exact, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(plain.sum(-1), torch.ones(2, 6, device=DEVICE), rtol=1e-5, atol=1e-5)
    joined = mean_window_attention(q, keys, positions, 249, scale=0.2, sinks=sinks, impl=impl)
    rows = torch.cat((keys, keys.new_zeros(2, 2, 1, 64)), dim=2)
    logits = (q.double() @ keys.double().repeat_interleave(3, 1).transpose(-1, -2)) * 0.2
    hidden = positions[:, :1, None, :] > (249 + torch.arange(8, device=DEVICE))[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    extra = sinks.double().view(1, 6, 1, 1).expand(2, 6, 8, 1)
    exact = torch.cat((logits, extra), -1).softmax(-1)[..., : rows.shape[2] - 1].mean(2)
    torch.testing.assert_close(joined.double(), exact, rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_attention_of_a_window_is_alike_bit_for_bit_whoever_is_beside_it() -> None:
    keys = keys_in_room(1100, 64, torch.float32, batch=2, heads=2)
    positions = positions_of(keys)
    q = torch.randn(2, 4, 8, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    together = mean_window_attention(q, keys, positions, 1092, scale=0.2, impl="triton")
    alone = mean_window_attention(q[1:, 2:], keys[1:, 1:].clone(), positions[1:, 1:], 1092, scale=0.2, impl="triton")
    assert torch.equal(alone, together[1:, 2:])


def test_bad_input() -> None:
    keys = keys_in_room(20, 64, torch.float32, batch=2, heads=3)
    positions = positions_of(keys)
    q = torch.randn(2, 6, 4, 64, device=DEVICE)
    with pytest.raises(ShapeError, match=r"positions must be \[batch, kv_heads, rows\]"):
        distance_to_mean(keys, positions[:, :1], seen_tokens=20)
    with pytest.raises(ShapeError, match="metric must be"):
        distance_to_mean(keys, positions, seen_tokens=20, metric="l3")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="starts must be ascending from 0"):
        distance_to_mean(keys, positions, seen_tokens=20, starts=[0, 9, 9])
    with pytest.raises(ShapeError, match="keys must be"):
        lengths(keys[0])
    with pytest.raises(ShapeError, match="impl must be"):
        unlikeness(keys, impl="cuda")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="positions must be"):
        mean_window_attention(q, keys, positions[:1], 16, scale=1.0)
    with pytest.raises(ShapeError, match="multiple of kv_heads, got 5 and 3"):
        mean_window_attention(q[:, :5], keys, positions, 16, scale=1.0)
    with pytest.raises(ShapeError, match="share one dtype"):
        mean_window_attention(q.half(), keys, positions, 16, scale=1.0)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_an_explicit_choice_never_falls_back() -> None:
    keys = keys_in_room(200, 64, torch.float32)
    positions = positions_of(keys)
    with pytest.raises(UnsupportedError, match=r"impl='triton' cannot serve windows of 63 positions \(at least 64\)"):
        distance_to_mean(keys, positions, seen_tokens=200, starts=[0, 63], impl="triton")
    rope, wide = Rotary(torch.ones(32)), torch.randn(1, 1, 3, 300, device=DEVICE)
    with pytest.raises(UnsupportedError, match="keys turned back by a rotary embedding"):
        distance_to_mean(keys, positions, seen_tokens=200, rope=rope, impl="triton")
    with pytest.raises(UnsupportedError, match=r"dtype torch\.float64"):
        lengths(keys.double(), impl="triton")
    with pytest.raises(UnsupportedError, match=r"head_dim 300 \(at most 256\)"):
        mean_window_attention(wide, wide, positions[:1, :1, :3], 0, scale=1.0, impl="triton")
