"""Triton: which clusters are read, and attention to the means of the others.

What is passed over. ``Z`` is the sum of all estimated masses and of the rest. A tile of clusters is passed over where,
for every query head, the masses of its represented clusters sum to at most ``2^-13 Z / tiles``; all tiles that are
passed over then hold at most ``2^-13 Z``. What is attended to, ``Z'``, differs from ``Z`` where clusters are read: a
true mass is at least its estimate (Jensen), but for the rounding of the stored mean key, which takes off a factor of
``e^-shift``. As long as ``shift`` is below ``log 2`` - half precision moves logits by hundredths - ``Z'`` is at least
``Z / 2``, and what is passed over is at most ``2^-12 Z'``.

Masses are at most ``Z``, so that weights ``mass / Z`` need no running maximum. They are 2^10 times that, so that
half precision does not lose those of long contexts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import (
    clusters_of,
    finite,
    log_add,
    log_growth,
    log_of,
    log_sum,
    lost,
    piece_of,
    tilt,
)

LIFT = tl.constexpr(6.931471805599453)
"""``log 2^10``."""


@triton.jit
def _threshold(amounts, lengths, run, KV_HEADS: tl.constexpr, TILE_H: tl.constexpr, BY_ROWS: tl.constexpr):
    if BY_ROWS:
        # the mean over KV heads to the nearest whole number, the even one of two
        at_h = tl.arange(0, TILE_H)
        held = tl.load(lengths + run // KV_HEADS * KV_HEADS + at_h, mask=at_h < KV_HEADS, other=0).to(tl.int64)
        rows = tl.sum(held, 0)
        low = rows // KV_HEADS
        twice = 2 * (rows - low * KV_HEADS)
        up = (twice > KV_HEADS) | ((twice == KV_HEADS) & (low % 2 == 1))
        tau = tl.load(amounts + low + up.to(tl.int64))
    else:
        tau = tl.load(amounts + run // KV_HEADS)
    # risks are at least 0, and all pass a threshold of 0
    return tl.where(tau > 0.0, tau, -1.0)


@triton.jit
def choose(
    mean_values,
    mean_step,
    log_mass,
    deviation,
    value_norm,
    value_radius,
    part_lse,
    sinks,
    longest,
    lengths,
    fits,
    amounts,
    chosen,
    counts,
    fixed,
    fixed_lse,
    room,
    splits,
    tail_splits,
    passed_over,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_L: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MEAN: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """List the clusters of a piece that are read, in order, and attend to the others; grid ``(runs, pieces)``."""
    run = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    runs = tl.num_programs(0)
    pieces = tl.num_programs(1)
    at_q = tl.arange(0, TILE_Q)
    at_c = tl.arange(0, TILE)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < GROUP
    real_v = at_v < VALUE_DIM
    count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
    share = piece_of(count, pieces, TILE)
    first = piece * share
    stop = tl.minimum(count, first + share)
    tau = _threshold(amounts, lengths, run, KV_HEADS, TILE_H, BY_ROWS)
    mean_values += run * room * VALUE_DIM
    mean_step += run * room
    spot = at_c[None, :] * VALUE_DIM + at_v[:, None]

    # marks of the first tile are on their way while sums are joined, those of the next while one is at work
    log_mass += run * room * GROUP
    deviation += run * room * GROUP
    mark = at_c[:, None] * GROUP + at_q[None, :]
    mass_ahead = tl.load(
        log_mass + first * GROUP + mark, mask=(first + at_c < stop)[:, None] & real_q[None, :], other=float("-inf")
    )
    reach_ahead = tl.load(
        deviation + first * GROUP + mark, mask=(first + at_c < stop)[:, None] & real_q[None, :], other=0.0
    )
    at_s = tl.arange(0, TILE_S)
    place = (run * splits + at_s[:, None]) * GROUP + at_q[None, :]
    there = (at_s < splits)[:, None] & real_q[None, :]
    all_mass = log_sum(tl.load(part_lse + place, mask=there, other=float("-inf")))
    all_grown = log_sum(tl.load(part_lse + runs * splits * GROUP + place, mask=there, other=float("-inf")))
    at_t = tl.arange(0, TILE_T)
    place = (run * (pieces + tail_splits) + pieces + at_t[:, None]) * GROUP + at_q[None, :]
    there = (at_t < tail_splits)[:, None] & real_q[None, :]
    rest = log_sum(tl.load(fixed_lse + place, mask=there, other=float("-inf")))
    if HAS_SINKS:
        sink = tl.load(sinks + run % KV_HEADS * GROUP + at_q, mask=real_q, other=float("-inf")).to(tl.float32)
        rest = log_add(rest, sink)
    all_mass = finite(log_add(all_mass, rest))
    all_grown = finite(log_add(all_grown, rest))
    unit = 1.0
    if ABSOLUTE or HAS_RADIUS:
        at_l = tl.arange(0, TILE_L)
        parts = splits + tail_splits
        unit = tl.max(tl.load(longest + run * parts + at_l, mask=at_l < parts, other=0.0), 0)

    chosen += run * room + first
    least = passed_over / tl.maximum(tl.cdiv(count, TILE), 1)
    total = tl.zeros([TILE, TILE_Q], tl.float32)
    sums = tl.zeros([TILE_V, TILE_Q], tl.float32)
    # whole numbers of Python where the kernel is interpreted
    listed = first * 0
    looked = first * 0
    for at in range(first, stop, TILE):
        entry = at + at_c
        real = entry < stop
        both = real[:, None] & real_q[None, :]
        mass = mass_ahead
        reach = reach_ahead
        comes = (entry + TILE < stop)[:, None] & real_q[None, :]
        mass_ahead = tl.load(log_mass + (at + TILE) * GROUP + mark, mask=comes, other=float("-inf"))
        reach_ahead = tl.load(deviation + (at + TILE) * GROUP + mark, mask=comes, other=0.0)
        growth = log_growth(reach)
        shares = tl.exp(mass - all_mass[None, :])
        bent = tilt(reach)
        if HAS_RADIUS:
            own = tl.load(value_norm + run * room + entry, mask=real, other=0.0).to(tl.float32)
            own = tl.minimum(own, tl.load(value_radius + run * room + entry, mask=real, other=0.0).to(tl.float32))
            bent = bent * (own / tl.maximum(unit, 1.17549435e-38))[:, None]
        risk = 2.0 * (tl.exp(mass + growth - all_grown[None, :]) * lost(growth) + shares * bent)
        risk = tl.where(both, risk, 0.0)
        risk = tl.sum(risk, 1) / GROUP if MEAN else tl.max(risk, 1)
        if ABSOLUTE:
            risk = risk * unit
        passes = (risk > tau) & real
        number = passes.to(tl.int32)
        tl.store(chosen + listed + tl.cumsum(number, 0) - 1, entry, mask=passes)
        listed += tl.sum(number, 0)
        # what is read does not stand for itself any more
        weights = tl.where(both & (passes == 0)[:, None], shares, 0.0) * 1024.0
        weighed = weights
        if HAS_STEPS:
            weighed = weights * tl.load(mean_step + entry, mask=real, other=0.0)[:, None]
        if tl.max(tl.sum(weights, 0), 0) > least * 1024.0:
            value = tl.load(mean_values + at * VALUE_DIM + spot, mask=real[None, :] & real_v[:, None], other=0)
            rounded = weighed.to(DTYPE)
            if WIDEN:
                rounded = rounded.to(tl.float32)
            read = value.to(rounded.dtype)
            sums += tl.dot(read, rounded, input_precision=PRECISION)
            total += weights
            looked += 1
    whole = tl.sum(total, 0)
    found = sums / tl.where(whole > 0.0, whole, 1.0)[None, :]
    place = (run * (pieces + tail_splits) + piece) * GROUP + at_q
    tl.store(fixed + place[None, :] * VALUE_DIM + at_v[:, None], found, mask=real_q[None, :] & real_v[:, None])
    tl.store(fixed_lse + place, log_of(whole, all_mass - LIFT), mask=real_q)
    tl.store(counts + run * pieces + piece, listed)
    tl.store(counts + (runs + run) * pieces + piece, looked)
