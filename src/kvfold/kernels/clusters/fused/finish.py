"""Triton: choice by risk, means of the others, and rows of the chosen, in one launch.

Every program of a run owns blocks of consecutive clusters, dealt out in turn, so that choices that lie close together
spread over the programs. It lists those of its own that are read, attends to the means of the others, goes on with the
rows of the listed, and writes one part.

Masses are at most ``Z``, the sum of all estimated masses and of the rest, so that weights ``mass / Z`` need no running
maximum. They are 2^10 times that, so that half precision does not lose those of long contexts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite, log_add, log_of
from kvfold.kernels.clusters.fused import settings
from kvfold.kernels.clusters.fused.maths import NOTHING, clusters_of, log_sums, lost, take

LIFT = tl.constexpr(6.931471805599453)
"""``log 2^10``."""
BLOCK = tl.constexpr(settings.BLOCK)


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
def _close_up(chosen, own, TILE_F: tl.constexpr):
    """Take the gaps, which are -1, out of a list in its own place; return how many are left."""
    at_f = tl.arange(0, TILE_F)
    # a whole number of Python where the kernel is interpreted
    listed = own * 0
    for at in tl.range(0, own, TILE_F, num_stages=1):
        entry = tl.load(chosen + at + at_f, mask=at + at_f < own, other=-1)
        passes = entry >= 0
        many = passes.to(tl.int32)
        # all is read before any of it is written over, and written before it is read again
        tl.debug_barrier()
        tl.store(chosen + listed + tl.cumsum(many, 0) - 1, entry, mask=passes)
        listed += tl.sum(many, 0)
        tl.debug_barrier()
    return listed


@triton.jit(do_not_specialize=["runs", "programs", "room", "own_room", "splits", "tail_splits"])
def finish(
    q,
    keys,
    values,
    mean_values,
    mean_step,
    log_mass,
    deviation,
    value_norm,
    value_radius,
    part_lse,
    sinks,
    longest,
    starts,
    lengths,
    fits,
    amounts,
    chosen,
    counts,
    parts,
    parts_lse,
    scale,
    runs,
    programs,
    room,
    own_room,
    splits,
    tail_splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_F: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_S: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_STAGES: tl.constexpr,
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
    """Read what a program owns of a run; grid ``(runs * programs,)``."""
    number = tl.program_id(0)
    program = number // runs
    # runs read unequally much: neighbours on a multiprocessor should not all be of the same two
    run = ((number + program // 8) % runs).to(tl.int64)
    at_q = tl.arange(0, TILE_Q)
    at_c = tl.arange(0, TILE)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < GROUP
    real_v = at_v < VALUE_DIM
    count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
    own = (tl.cdiv(count, BLOCK) - program + programs - 1) // programs * BLOCK
    start = tl.load(starts + run).to(tl.int64)
    tau = _threshold(amounts, lengths, run, KV_HEADS, TILE_H, BY_ROWS)
    mean_values += run * room * VALUE_DIM
    mean_step += run * room
    at_d = tl.arange(0, TILE_D)
    query = tl.load(
        q + (run * GROUP + at_q[None, :]) * HEAD_DIM + at_d[:, None],
        mask=real_q[None, :] & (at_d < HEAD_DIM)[:, None],
        other=0.0,
    )
    # tiles are whole blocks: what differs between threads does not change from tile to tile
    inside = (at_c // BLOCK * programs + program) * BLOCK + at_c % BLOCK
    spot = inside[None, :] * VALUE_DIM + at_v[:, None]

    # marks of the first tile are on their way while sums are joined, those of the next while one is at work
    log_mass += run * room * GROUP
    deviation += run * room * GROUP
    comes = (inside < count)[:, None] & real_q[None, :]
    mark = inside[:, None] * GROUP + at_q[None, :]
    mass_ahead = tl.load(log_mass + mark, mask=comes, other=float("-inf"))
    reach_ahead = tl.load(deviation + mark, mask=comes, other=0.0)
    # logs of the masses of all splits, then of the tail, whose rows have no reach
    width = programs + tail_splits
    sides = splits + tail_splits
    at_s = tl.arange(0, TILE_S)
    is_split = (at_s < splits)[:, None] & real_q[None, :]
    is_tail = ((at_s >= splits) & (at_s < sides))[:, None] & real_q[None, :]
    place = (run * splits + at_s[:, None]) * GROUP + at_q[None, :]
    log = tl.load(part_lse + place, mask=is_split, other=NOTHING)
    grown_log = tl.load(part_lse + runs * splits * GROUP + place, mask=is_split, other=NOTHING)
    place = (run * width + programs + at_s[:, None] - splits) * GROUP + at_q[None, :]
    rest = tl.load(parts_lse + place, mask=is_tail, other=NOTHING)
    log = tl.maximum(log, rest)
    grown_log = tl.maximum(grown_log, rest)
    all_mass, all_grown = log_sums(
        log, (log > NOTHING).to(tl.float32), grown_log, (grown_log > NOTHING).to(tl.float32)
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + run % KV_HEADS * GROUP + at_q, mask=real_q, other=float("-inf")).to(tl.float32)
        all_mass = log_add(all_mass, sink)
        all_grown = log_add(all_grown, sink)
    all_mass = finite(all_mass)
    all_grown = finite(all_grown)
    unit = 1.0
    if ABSOLUTE or HAS_RADIUS:
        unit = tl.max(tl.load(longest + run * sides + at_s, mask=at_s < sides, other=0.0), 0)

    chosen += (run * programs + program) * own_room
    total = tl.zeros([TILE, TILE_Q], tl.float32)
    sums = tl.zeros([TILE_V, TILE_Q], tl.float32)
    for at in tl.range(0, own, TILE, num_stages=STAGES):
        base = at * programs
        entry = base + inside
        real = entry < count
        both = real[:, None] & real_q[None, :]
        value = tl.load(mean_values + base * VALUE_DIM + spot, mask=real[None, :] & real_v[:, None], other=0)
        mass = mass_ahead
        reach = reach_ahead
        following = base + TILE * programs
        comes = (following + inside < count)[:, None] & real_q[None, :]
        mass_ahead = tl.load(log_mass + following * GROUP + mark, mask=comes, other=float("-inf"))
        reach_ahead = tl.load(deviation + following * GROUP + mark, mask=comes, other=0.0)
        shares = tl.exp(mass - all_mass[None, :])
        gone = lost(reach)
        bent = shares * (gone / (1.0 + tl.exp(-reach)))
        if HAS_RADIUS:
            size = tl.load(value_norm + run * room + entry, mask=real, other=0.0).to(tl.float32)
            size = tl.minimum(size, tl.load(value_radius + run * room + entry, mask=real, other=0.0).to(tl.float32))
            bent = bent * (size / tl.maximum(unit, 1.17549435e-38))[:, None]
        # cosh(x) - 1 is e^x (1 - e^-x)^2 / 2, and tanh(x / 2) is (1 - e^-x) / (1 + e^-x)
        risk = tl.exp(mass + reach - all_grown[None, :]) * gone * gone + 2.0 * bent
        risk = tl.where(both, risk, 0.0)
        risk = tl.sum(risk, 1) / GROUP if MEAN else tl.max(risk, 1)
        if ABSOLUTE:
            risk = risk * unit
        passes = (risk > tau) & real
        # threads need not meet here to see where in the list each comes
        tl.store(chosen + at + at_c, tl.where(passes, entry, -1), mask=at + at_c < own)
        # what is read does not stand for itself any more
        weights = tl.where(both & (passes == 0)[:, None], shares, 0.0) * 1024.0
        weighed = weights
        if HAS_STEPS:
            weighed = weights * tl.load(mean_step + entry, mask=real, other=0.0)[:, None]
        rounded = weighed.to(DTYPE)
        if WIDEN:
            rounded = rounded.to(tl.float32)
        sums += tl.dot(value.to(rounded.dtype), rounded, input_precision=PRECISION)
        total += weights
    whole = tl.sum(total, 0)
    # rows go on from there
    top = tl.where(whole > 0.0, all_mass - LIFT, float("-inf"))
    # the list is read by other threads than wrote it
    tl.debug_barrier()
    listed = _close_up(chosen, own, TILE_F)
    top, whole, sums = _rows(
        keys + start * HEAD_DIM, values + start * VALUE_DIM, chosen, listed, query, scale, top, whole, sums, SEGMENT,
        HEAD_DIM, VALUE_DIM, TILE_N, TILE_Q, TILE_D, TILE_V, ROW_STAGES, PRECISION, WIDEN,
    )  # fmt: skip
    found = sums / tl.where(whole > 0.0, whole, 1.0)[None, :]
    place = (run * width + program) * GROUP + at_q
    tl.store(parts + place[None, :] * VALUE_DIM + at_v[:, None], found, mask=real_q[None, :] & real_v[:, None])
    tl.store(parts_lse + place, log_of(whole, top), mask=real_q)
    tl.store(counts + run * programs + program, listed)


@triton.jit
def _rows(
    keys, values, chosen, listed, query, scale, top, whole, sums, SEGMENT: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TILE_N: tl.constexpr, TILE_Q: tl.constexpr, TILE_D: tl.constexpr, TILE_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take the rows of listed clusters up."""
    at_n = tl.arange(0, TILE_N)
    at_d = tl.arange(0, TILE_D)
    at_v = tl.arange(0, TILE_V)
    real_d = at_d < HEAD_DIM
    real_v = at_v < VALUE_DIM
    if WIDEN:
        query = query.to(tl.float32)
    rows = listed * SEGMENT
    # place by place, so that threads need not meet before the end
    total = tl.where((at_n == 0)[:, None], whole[None, :], tl.zeros([TILE_N, TILE_Q], tl.float32))
    # where rows are is known a tile ahead, so that no load of rows waits for it
    comes = tl.load(chosen + at_n // SEGMENT, mask=at_n < rows, other=0)
    for at in tl.range(0, rows, TILE_N, num_stages=STAGES):
        row = at + at_n
        real = row < rows
        # offsets within a run fit int32, which halves the registers of addresses
        place = comes * SEGMENT + row % SEGMENT
        comes = tl.load(chosen + (row + TILE_N) // SEGMENT, mask=row + TILE_N < rows, other=0)
        key = tl.load(keys + place[:, None] * HEAD_DIM + at_d[None, :], mask=real[:, None] & real_d[None, :], other=0.0)
        value = tl.load(
            values + place[None, :] * VALUE_DIM + at_v[:, None], mask=real[None, :] & real_v[:, None], other=0.0
        )
        top, total, sums = take(key, value, query, real, scale, top, total, sums, PRECISION, WIDEN)
    return top, tl.sum(total, 0), sums
