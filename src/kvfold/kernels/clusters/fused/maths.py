"""Triton: functions that several kernels share; all stay finite for reaches up to 1e4 and beyond."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_growth(reach):
    """Log of the largest mean of ``e^x`` over numbers of mean zero within ``[-reach, reach]``: ``log cosh``."""
    large = reach + tl.log(0.5 + 0.5 * tl.exp(-2.0 * reach))
    # below, the logarithm has lost too many digits
    return tl.where(reach < 0.05, 0.5 * reach * reach, large)


@triton.jit
def lost(growth):
    """Return ``1 - e^-growth``, to the last digits where it is small."""
    series = growth * (1.0 - growth * (0.5 - growth * (0.16666667 - growth * 0.041666668)))
    return tl.where(growth < 0.06, series, 1.0 - tl.exp(-growth))


@triton.jit
def tilt(reach):
    """Return ``tanh(reach / 2)``."""
    fade = tl.exp(-reach)
    return tl.where(reach < 0.01, 0.5 * reach, (1.0 - fade) / (1.0 + fade))


@triton.jit
def finite(log):
    """Return 0 where there is nothing, so that nothing becomes NaN when it is subtracted."""
    return tl.where(log == float("-inf"), 0.0, log)


@triton.jit
def log_of(total, largest):
    """Log of a sum of ``e^(x - largest)``; ``-inf`` for none."""
    seen = total > 0.0
    return tl.where(seen, largest + tl.log(tl.where(seen, total, 1.0)), float("-inf"))


@triton.jit
def log_add(first, second):
    """Log of ``e^first + e^second``."""
    top = tl.maximum(first, second)
    safe = finite(top)
    return log_of(tl.exp(first - safe) + tl.exp(second - safe), top)


@triton.jit
def log_sum(logs):
    """Log of the sum of ``e^x`` over the first axis."""
    top = tl.max(logs, 0)
    return log_of(tl.sum(tl.exp(logs - finite(top)[None, :]), 0), top)


@triton.jit
def clusters_of(lengths, fits, run, KV_HEADS: tl.constexpr, SEGMENT: tl.constexpr):
    """Count the clusters of a run: complete segments of all rows but the newest."""
    rows = tl.load(lengths + run).to(tl.int32)
    there = tl.load(fits + run // KV_HEADS).to(tl.int32)
    return tl.maximum(rows - 1, 0) // SEGMENT * there


@triton.jit
def piece_of(count, pieces, TILE: tl.constexpr):
    """How many clusters a program of a run takes: whole tiles, as equal as these allow."""
    return tl.cdiv(tl.cdiv(count, pieces), TILE) * TILE


@triton.jit
def take(
    key, value, query, real, scale, top, total, sums, PRECISION: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """Take rows up, ``[rows, head_dim]`` and ``[value_dim, rows]``; queries and sums are ``[.., queries]``."""
    if WIDEN:
        key = key.to(tl.float32)
    logits = tl.where(real[:, None], tl.dot(key, query, input_precision=PRECISION) * scale, float("-inf"))
    now = tl.maximum(top, tl.max(logits, 0))
    # a query all of whose rows so far are at minus infinity has no finite maximum to subtract
    safe = finite(now)
    weights = tl.exp(logits - safe[None, :])
    fade = tl.exp(top - safe)
    rounded = weights.to(value.dtype)
    if WIDEN:
        rounded = rounded.to(tl.float32)
        value = value.to(tl.float32)
    sums = sums * fade[None, :] + tl.dot(value, rounded, input_precision=PRECISION)
    return now, total * fade + tl.sum(weights, 0), sums
