"""Triton: which clusters are read, and which blocks of mean values matter.

What is passed over. ``Z`` is the sum of all estimated masses and of the rest. A block of clusters is passed over where,
for every query head, the masses of its represented clusters sum to at most ``2^-13 Z / blocks``; all blocks that are
passed over then hold at most ``2^-13 Z``. What is attended to, ``Z'``, differs from ``Z`` where clusters are read: a
true mass is at least its estimate (Jensen), but for the rounding of the stored mean key, which takes off a factor of
``e^-shift``. As long as ``shift`` is below ``log 2`` - half precision moves logits by hundredths - ``Z'`` is at least
``Z / 2``, and what is passed over is at most ``2^-12 Z'``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import clusters_of, finite, log_add, log_growth, log_sum, lost, tilt


@triton.jit
def choose(
    log_mass,
    deviation,
    value_norm,
    value_radius,
    part_lse,
    tail_lse,
    sinks,
    longest,
    lengths,
    fits,
    amounts,
    chosen,
    blocks,
    counts,
    totals,
    room,
    splits,
    tail_splits,
    passed_over,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_L: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MEAN: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
):
    """List the clusters of a tile that are read and its blocks that matter, in order; grid ``(runs, tiles)``."""
    run = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    runs = tl.num_programs(0)
    tiles = tl.num_programs(1)
    count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
    at_g = tl.arange(0, TILE_G)
    at_s = tl.arange(0, TILE_S)
    at_t = tl.arange(0, TILE_T)
    real_g = at_g < GROUP
    place = (run * splits + at_s[:, None]) * GROUP + at_g[None, :]
    there = (at_s < splits)[:, None] & real_g[None, :]
    all_mass = log_sum(tl.load(part_lse + place, mask=there, other=float("-inf")))
    all_grown = log_sum(tl.load(part_lse + runs * splits * GROUP + place, mask=there, other=float("-inf")))
    rest = log_sum(
        tl.load(
            tail_lse + (run * tail_splits + at_t[:, None]) * GROUP + at_g[None, :],
            mask=(at_t < tail_splits)[:, None] & real_g[None, :],
            other=float("-inf"),
        )
    )
    if HAS_SINKS:
        sink = tl.load(sinks + run % KV_HEADS * GROUP + at_g, mask=real_g, other=float("-inf")).to(tl.float32)
        rest = log_add(rest, sink)
    all_mass = finite(log_add(all_mass, rest))
    all_grown = finite(log_add(all_grown, rest))

    at = tile * TILE + tl.arange(0, TILE)
    real = at < count
    both = real_g[:, None] & real[None, :]
    place = (run * GROUP + at_g[:, None]) * room + at[None, :]
    mass = tl.load(log_mass + place, mask=both, other=float("-inf"))
    reach = tl.load(deviation + place, mask=both, other=0.0)
    growth = log_growth(reach)
    share = tl.exp(mass - all_mass[:, None])
    bent = tilt(reach)
    unit = 1.0
    if ABSOLUTE or HAS_RADIUS:
        at_l = tl.arange(0, TILE_L)
        parts = splits + tail_splits
        unit = tl.max(tl.load(longest + run * parts + at_l, mask=at_l < parts, other=0.0), 0)
    if HAS_RADIUS:
        own = tl.load(value_norm + run * room + at, mask=real, other=0.0).to(tl.float32)
        own = tl.minimum(own, tl.load(value_radius + run * room + at, mask=real, other=0.0).to(tl.float32))
        bent = bent * (own / tl.maximum(unit, 1.17549435e-38))[None, :]
    risk = 2.0 * (tl.exp(mass + growth - all_grown[:, None]) * lost(growth) + share * bent)
    risk = tl.where(both, risk, 0.0)
    risk = tl.sum(risk, 0) / GROUP if MEAN else tl.max(risk, 0)
    if ABSOLUTE:
        risk = risk * unit
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
    passes = (risk > tl.where(tau > 0.0, tau, -1.0)) & real

    number = passes.to(tl.int32)
    tl.store(chosen + (run * tiles + tile) * TILE + tl.cumsum(number, 0) - 1, at, mask=passes)
    # what is read does not stand for itself any more
    tl.store(log_mass + place, tl.full([TILE_G, TILE], float("-inf"), tl.float32), mask=both & passes[None, :])

    left = tl.where(both & (passes == 0)[None, :], share, 0.0)
    sums = tl.max(tl.sum(tl.reshape(left, [TILE_G, TILE // BLOCK, BLOCK]), 2), 0)
    matters = sums > passed_over / tl.maximum(tl.cdiv(count, BLOCK), 1)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    needed = matters.to(tl.int32)
    tl.store(blocks + (run * tiles + tile) * (TILE // BLOCK) + tl.cumsum(needed, 0) - 1, block, mask=matters)

    both_counts = (run * tiles + tile) * 2
    tl.store(counts + both_counts, tl.sum(number, 0))
    tl.store(counts + both_counts + 1, tl.sum(needed, 0))
    # whole numbers: the order in which they come does not matter
    tl.atomic_add(totals + run * 2, tl.sum(number, 0), sem="relaxed")
    tl.atomic_add(totals + run * 2 + 1, tl.sum(needed, 0), sem="relaxed")
