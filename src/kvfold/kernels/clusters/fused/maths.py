"""Triton: functions that several kernels share; all stay finite for reaches up to 1e4 and beyond."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite, log_of

NOTHING = tl.constexpr(-3.0e38)
"""A logit below all others that stays finite when it is subtracted from itself."""


@triton.jit
def log_growth(reach):
    """Log of the largest mean of ``e^x`` over numbers of mean zero within ``[-reach, reach]``: ``log cosh``."""
    large = reach + tl.log(0.5 + 0.5 * tl.exp(-2.0 * reach))
    # below, the logarithm has lost too many digits
    return tl.where(reach < 0.05, 0.5 * reach * reach, large)


@triton.jit
def tilt(reach):
    """Return ``tanh(reach / 2)``."""
    fade = tl.exp(-reach)
    return tl.where(reach < 0.01, 0.5 * reach, (1.0 - fade) / (1.0 + fade))


@triton.jit
def lost(reach):
    """Return ``1 - e^-reach``, to the last digits where it is small."""
    series = reach * (1.0 - reach * (0.5 - reach * (0.16666667 - reach * 0.041666668)))
    return tl.where(reach < 0.06, series, 1.0 - tl.exp(-reach))


@triton.jit
def _two_sums(top, total, other_top, other_total, top_b, total_b, other_top_b, other_total_b):
    largest = tl.maximum(top, top_b)
    other = tl.maximum(other_top, other_top_b)
    total = total * tl.exp(top - largest) + total_b * tl.exp(top_b - largest)
    other_total = other_total * tl.exp(other_top - other) + other_total_b * tl.exp(other_top_b - other)
    return largest, total, other, other_total


@triton.jit
def log_sums(top, total, other_top, other_total):
    """Logs of two sums of ``total e^top`` over the first axis, for which threads meet once; tops are finite."""
    top, total, other_top, other_total = tl.reduce((top, total, other_top, other_total), 0, _two_sums)
    return log_of(total, top), log_of(other_total, other_top)


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
    """Take rows up, ``[rows, head_dim]`` and ``[value_dim, rows]``; queries and sums are ``[.., queries]``.

    Totals are ``[rows, queries]``, by the place in a tile.
    """
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
    return now, total * fade[None, :] + weights, sums
