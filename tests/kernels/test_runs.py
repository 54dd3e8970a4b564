"""Attention over runs of a pool: plain torch and Triton against float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core.errors import ShapeError, UnsupportedError
from kvfold.kernels.runs import attend_ragged, attend_runs
from kvfold.kernels.runs.settings import Settings, settings_for
from tests.helpers.device import waiting_is_an_error
from tests.helpers.oracle import attention64
from tests.laws.test_05_fast_equals_reference import eager_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))]
LENGTHS = [0, 1, 15, 63, 257]
NAN = float("nan")


def runs(
    lengths: list[list[int]], head_dim: int, dtype: torch.dtype, value_dim: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay runs into pools whose every other row is not a number; returns keys, values, starts, lengths."""
    generator = torch.Generator().manual_seed(seed)
    starts, at = [], 3
    for row in lengths:
        starts.append([])
        for length in row:
            starts[-1].append(at)
            at += length + 5
    keys, values = torch.full((at, head_dim), NAN), torch.full((at, value_dim or head_dim), NAN)
    for row, first in zip(lengths, starts, strict=True):
        for length, start in zip(row, first, strict=True):
            for pool in (keys, values):
                pool[start : start + length] = torch.randn(length, pool.shape[1], generator=generator)
    placed = (keys.to(DEVICE, dtype), values.to(DEVICE, dtype))
    return *placed, torch.tensor(starts, device=DEVICE), torch.tensor(lengths, device=DEVICE, dtype=torch.int32)


def queries(batch: int, heads: int, q_len: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, heads, q_len, head_dim, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


def assert_exact(
    found: Any, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, **given: Any
) -> None:
    """Every run against attention in float64 over its own rows; the bound is that of law 5, over all runs."""
    group, scale = q.shape[1] // starts.shape[1], given["scale"]
    bias, softcap = given.get("bias"), given.get("softcap")
    assert torch.isfinite(found.output).all()
    errors, eager, sizes = [torch.zeros(())], [torch.zeros(())], [torch.zeros(())]
    for row in range(starts.shape[0]):
        for head in range(starts.shape[1]):
            own = slice(int(starts[row, head]), int(starts[row, head]) + int(lengths[row, head]))
            heads = slice(head * group, (head + 1) * group)
            one = q[row : row + 1, heads].cpu()
            k, v = (pool[own][None, None].cpu() for pool in (keys, values))
            added = None if bias is None else bias[own][None, None].cpu()
            exact, lse = attention64(one, k, v, scale, bias=added, softcap=softcap)
            output, found_lse = found.output[row, heads].cpu(), found.lse[row, heads].cpu()
            if own.start == own.stop:
                assert (output == 0).all()
                assert (found_lse == -torch.inf).all()
                continue
            errors.append((output.double() - exact[0]).abs().max())
            sizes.append(attention64(one, k, v.abs(), scale, bias=added, softcap=softcap)[0].max())
            plain = attention64(one, k, v, scale, softcap=softcap)[0]
            eager.append(eager_error(one, k, v, scale, None, plain, softcap))
            close = 1e-5 if q.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found_lse.double(), lse[0], rtol=close, atol=close)
    assert max(errors) <= 2 * (max(eager) + torch.finfo(q.dtype).eps * max(sizes))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_per_kv", "head_dim"), [(1, 64), (3, 80), (5, 96), (6, 128), (7, 64), (8, 256), (8, 128), (3, 64)]
)
def test_runs_of_any_length(impl: Any, dtype: torch.dtype, q_per_kv: int, head_dim: int) -> None:
    keys, values, starts, lengths = runs([[257, 0], [15, 63], [1, 130]], head_dim, dtype)
    q = queries(3, 2 * q_per_kv, 1, head_dim, dtype)
    given = {"scale": head_dim**-0.5}
    found = attend_runs(q, keys, values, starts, lengths, most_rows=300, impl=impl, **given)
    assert_exact(found, q, keys, values, starts, lengths, **given)


@pytest.mark.parametrize("impl", IMPLS)
def test_biases_a_cap_several_tokens_and_narrow_values(impl: Any) -> None:
    keys, values, starts, lengths = runs([[63, 257]], 64, torch.float32, value_dim=48)
    bias = torch.randn(keys.shape[0], generator=torch.Generator().manual_seed(2)).to(DEVICE)
    bias[int(starts[0, 0]) : int(starts[0, 0]) + 5] = -torch.inf
    for q_len, extra in ((1, {"bias": bias}), (3, {"softcap": 5.0}), (5, {"bias": bias, "softcap": 2.0})):
        q = queries(1, 6, q_len, 64, torch.float32)
        given = {"scale": 0.2, **extra}
        found = attend_runs(q, keys, values, starts, lengths, most_rows=257, impl=impl, **given)
        assert_exact(found, q, keys, values, starts, lengths, **given)


@pytest.mark.parametrize("impl", IMPLS)
def test_hidden_runs_give_nothing(impl: Any) -> None:
    keys, values, starts, lengths = runs([[40, 200]], 64, torch.float32)
    bias = torch.full((keys.shape[0],), -torch.inf, device=DEVICE)
    found = attend_runs(
        queries(1, 2, 1, 64, torch.float32), keys, values, starts, lengths, most_rows=256, scale=1.0, bias=bias,
        impl=impl,
    )  # fmt: skip
    assert (found.output == 0).all()
    assert (found.lse == -torch.inf).all()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def newest_of(
    keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, *, is_ring: bool
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Take a row out of every run, the last or, of a ring, one within; returns rows, their slots, and pools without."""
    place = (lengths - 1) // 2 if is_ring else lengths - 1
    slots = starts + place
    new = tuple(pool[slots].unsqueeze(2) for pool in (keys, values))
    without = (keys.clone(), values.clone())
    for pool in without:
        pool[slots.flatten()] = NAN
    return (new[0], new[1]), slots, without


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_per_kv", "head_dim", "value_dim", "is_ring", "softcap"),
    [(1, 64, 64, False, None), (3, 80, 64, True, None), (5, 96, 96, False, 20.0), (6, 128, 128, True, None),
     (7, 64, 64, True, 20.0), (8, 256, 256, False, None)],
)  # fmt: skip
def test_the_newest_row_is_written_and_read(
    impl: Any, dtype: torch.dtype, q_per_kv: int, head_dim: int, value_dim: int, is_ring: bool, softcap: float | None
) -> None:
    keys, values, starts, lengths = runs([[1, 2, 15], [63, 257, 64]], head_dim, dtype, value_dim)
    new, slots, (held_keys, held_values) = newest_of(keys, values, starts, lengths, is_ring=is_ring)
    q = queries(2, 3 * q_per_kv, 1, head_dim, dtype)
    given: dict[str, Any] = {"scale": head_dim**-0.5, "softcap": softcap}
    found = attend_runs(
        q, held_keys, held_values, starts, lengths, most_rows=300, new=new, slots=slots, impl=impl, **given
    )
    torch.testing.assert_close(held_keys, keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(held_values, values, rtol=0, atol=0, equal_nan=True)
    assert_exact(found, q, keys, values, starts, lengths, **given)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("is_merged_last", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_the_newest_row_is_taken_once_however_runs_are_cut(splits: int, is_merged_last: bool) -> None:
    from kvfold.kernels.runs import triton as kernels

    keys, values, starts, lengths = runs([[1, 257, 100]], 64, torch.float32)
    q = queries(1, 6, 1, 64, torch.float32)
    cut = Settings(splits=splits, tile=16, warps=4, stages=1, is_merged_last=is_merged_last)
    for is_ring in (False, True):
        new, slots, pools = newest_of(keys, values, starts, lengths, is_ring=is_ring)
        found = kernels.attend(
            q, *pools, starts, lengths, most_rows=300, scale=0.125, softcap=None, bias=None, new=new, slots=slots,
            settings=cut,
        )  # fmt: skip
        assert_exact(found, q, keys, values, starts, lengths, scale=0.125)


@pytest.mark.parametrize("is_merged_last", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 7, 33, 64])
def test_the_number_of_splits_changes_nothing(splits: int, is_merged_last: bool) -> None:
    from kvfold.kernels.runs import triton as runs_triton

    cut = Settings(splits=splits, tile=64, warps=4, stages=3, is_merged_last=is_merged_last)
    for length in LENGTHS:
        keys, values, starts, lengths = runs([[length, 257 - length]], 64, torch.float32)
        q = queries(1, 6, 1, 64, torch.float32)
        given = {"most_rows": 512, "scale": 0.125, "softcap": None, "bias": None, "settings": cut}
        for _ in range(2):
            # counters of the first launch serve the second
            found = runs_triton.attend(q, keys, values, starts, lengths, **given)
            assert_exact(found, q, keys, values, starts, lengths, scale=0.125)


def test_every_program_has_a_place_at_once_or_twice() -> None:
    shape = {"queries": 4, "head_dim": 128, "value_dim": 128, "itemsize": 2, "device": torch.device("cpu")}
    for most_rows in (1, 1024, 8192, 32768, 131072, 1 << 20):
        for held in (1, 8, 32, 256, 5000):
            cut = settings_for(runs=held, most_rows=most_rows, **shape)
            assert 1 <= cut.splits <= 64
            assert cut.splits * held <= 2 * 3 * 132 or cut.splits == 1
            assert cut.splits == 1 or cut.splits * cut.tile < most_rows
    assert settings_for(runs=8, most_rows=1024, **shape).is_merged_last
    assert 40 < settings_for(runs=8, most_rows=32768, **shape).splits < 50


@pytest.mark.gpu
def test_graphs_count_for_themselves() -> None:
    keys, values, starts, lengths = runs([[257, 900], [15, 63]], 128, torch.bfloat16)
    q = queries(2, 8, 1, 128, torch.bfloat16)
    given = {"most_rows": 1024, "scale": 0.1}
    wanted = attend_runs(q, keys, values, starts, lengths, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attend_runs(q, keys, values, starts, lengths, **given) for _ in range(3)]
    for _ in range(50):
        graph.replay()
        attend_runs(q, keys, values, starts, lengths, **given)
    torch.cuda.synchronize()
    for one in found:
        assert torch.equal(one.output, wanted.output)
        assert torch.equal(one.lse, wanted.lse)


def test_runs_are_what_the_loop_over_heads_gives() -> None:
    keys, values, starts, lengths = runs([[20, 7], [0, 33]], 64, torch.float32)
    q = queries(2, 6, 1, 64, torch.float32)
    found = attend_runs(q, keys, values, starts, lengths, most_rows=48, scale=0.125, impl="reference")
    for impl in ["auto", "reference", "triton"] if HAS_TRITON else ["auto", "reference"]:
        looped = attend_ragged(q, keys, values, starts.tolist(), lengths.tolist(), scale=0.125, impl=impl)
        torch.testing.assert_close(found.output, looped.output)
        torch.testing.assert_close(found.lse, looped.lse)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_per_kv", "head_dim"), [(7, 64), (5, 96), (8, 128)])
def test_runs_whose_places_the_host_knows(dtype: torch.dtype, q_per_kv: int, head_dim: int) -> None:
    keys, values, starts, lengths = runs([[20, 0], [15, 133]], head_dim, dtype)
    for q_len in (1, 3):
        q = queries(2, 2 * q_per_kv, q_len, head_dim, dtype)
        given = {"scale": head_dim**-0.5}
        found = attend_ragged(q, keys, values, starts.tolist(), lengths.tolist(), impl="triton", **given)
        assert_exact(found, q, keys, values, starts, lengths, **given)


@pytest.mark.gpu
def test_all_heads_go_in_one_call_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.kernels.runs import ragged

    keys, values, starts, lengths = runs([[20, 7], [0, 33]], 64, torch.bfloat16)
    q, places = queries(2, 6, 1, 64, torch.bfloat16), (starts.tolist(), lengths.tolist())
    wanted = attend_ragged(q, keys, values, *places, scale=0.125, impl="reference")
    monkeypatch.setattr(ragged, "attend", None)
    attend_ragged(q, keys, values, *places, scale=0.125)
    with waiting_is_an_error():
        found = attend_ragged(q, keys, values, *places, scale=0.125)
    torch.testing.assert_close(found.output, wanted.output, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-3, atol=1e-3)


def test_an_empty_pool() -> None:
    keys, values, starts, lengths = runs([[0, 0]], 64, torch.float32)
    q = queries(1, 2, 1, 64, torch.float32)
    found = attend_runs(q, keys[:0], values[:0], starts * 0, lengths, most_rows=16, scale=1.0, impl="reference")
    assert (found.output == 0).all()
    assert (found.lse == -torch.inf).all()


def test_bad_input() -> None:
    keys, values, starts, lengths = runs([[4, 4]], 64, torch.float32)
    q = queries(1, 2, 1, 64, torch.float32)
    call = {"most_rows": 16, "scale": 1.0}
    with pytest.raises(ShapeError, match="multiple of kv_heads, got 3 and 2"):
        attend_runs(queries(1, 3, 1, 64, torch.float32), keys, values, starts, lengths, **call)
    with pytest.raises(ShapeError, match="one row each per pool row"):
        attend_runs(q, keys, values[:-1], starts, lengths, **call)
    with pytest.raises(ShapeError, match="share one dtype"):
        attend_runs(q.half(), keys, values, starts, lengths, **call)
    with pytest.raises(ShapeError, match="starts and lengths must be"):
        attend_runs(q, keys, values, starts[0], lengths, **call)
    with pytest.raises(ShapeError, match="impl must be 'auto', 'reference' or 'triton'"):
        attend_runs(q, keys, values, starts, lengths, impl="cuda", **call)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"impl='triton' cannot serve"):
        attend_runs(q.double(), keys.double(), values.double(), starts, lengths, impl="triton", **call)
    new, slots, _ = newest_of(keys, values, starts, lengths, is_ring=False)
    with pytest.raises(ShapeError, match=r"new and slots must be given together.*slots missing"):
        attend_runs(q, keys, values, starts, lengths, new=new, **call)
    with pytest.raises(ShapeError, match=r"without a bias.*bias given"):
        attend_runs(q, keys, values, starts, lengths, new=new, slots=slots, bias=keys[:, 0], **call)
    with pytest.raises(ShapeError, match=r"slots must be \[batch, kv_heads\]"):
        attend_runs(q, keys, values, starts, lengths, new=new, slots=slots[0], **call)
    with pytest.raises(ShapeError, match="new values must be"):
        attend_runs(q, keys, values, starts, lengths, new=(new[0], new[1][..., :-1]), slots=slots, **call)
