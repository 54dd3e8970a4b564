"""Triton: attention over the rows of clusters that were chosen, in equal shares whatever the heads chose.

The clusters of all runs lie on one line. Every program takes an equal piece of it, which may end in one run and begin
in the next, and writes one part per run that it touches. Program ``p`` in run ``r`` writes to slot ``p + r``: along the
line each piece moves on in one of the two at least, so that no slot is taken twice, and the parts of a run lie side by
side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import log_of, piece_of, take


@triton.jit
def of(numbers, at, index):
    """Take one of several numbers that all threads hold."""
    return tl.sum(tl.where(at == index, numbers, 0), 0)


@triton.jit
def load_counts(counts, runs, pieces, TILE_R: tl.constexpr, TILE_P: tl.constexpr):
    """How many clusters each piece of each run chose, ``[TILE_R, TILE_P]``."""
    at_r = tl.arange(0, TILE_R)[:, None]
    at_p = tl.arange(0, TILE_P)[None, :]
    return tl.load(counts + at_r * pieces + at_p, mask=(at_r < runs) & (at_p < pieces), other=0)


@triton.jit
def attend(
    q,
    keys,
    values,
    starts,
    lengths,
    fits,
    chosen,
    counts,
    parts,
    part_lse,
    scale,
    room,
    pieces,
    runs,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to one piece of the line; grid ``(programs,)``."""
    program = tl.program_id(0)
    at_r = tl.arange(0, TILE_R)
    at_p = tl.arange(0, TILE_P)
    at_k = tl.arange(0, TILE_K)
    at_q = tl.arange(0, TILE_Q)
    at_n = tl.arange(0, TILE_N)
    at_d = tl.arange(0, TILE_D)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < GROUP
    real_d = at_d < HEAD_DIM
    real_v = at_v < VALUE_DIM
    is_run = at_r < runs
    rows_of = tl.load(lengths + at_r, mask=is_run, other=0).to(tl.int32)
    fit_of = tl.load(fits + at_r // KV_HEADS, mask=is_run, other=0).to(tl.int32)
    start_of = tl.load(starts + at_r, mask=is_run, other=0).to(tl.int64)
    share_of = piece_of(tl.maximum(rows_of - 1, 0) // SEGMENT * fit_of, pieces, TILE_C)
    many = load_counts(counts, runs, pieces, TILE_R, TILE_P)
    own = tl.sum(many, 1)
    ends = tl.cumsum(own, 0)
    whole = tl.sum(own, 0)
    piece = tl.maximum(tl.cdiv(whole, tl.num_programs(0)), 1)
    low = program * piece
    high = tl.minimum(low + piece, whole)
    first = tl.sum(((ends <= low) & is_run).to(tl.int32), 0)
    stop = tl.sum(((ends - own < high) & is_run).to(tl.int32), 0)
    stop = tl.where(low < high, stop, first)
    for number in range(first, stop):
        # a number of Python where the kernel is interpreted
        run = first.to(tl.int64) * 0 + number
        end = of(ends, at_r, number)
        begin = end - of(own, at_r, number)
        here = tl.maximum(low, begin) - begin
        there = tl.minimum(high, end) - begin
        query = tl.load(
            q + (run * GROUP + at_q[None, :]) * HEAD_DIM + at_d[:, None],
            mask=real_q[None, :] & real_d[:, None],
            other=0.0,
        )
        if WIDEN:
            query = query.to(tl.float32)
        start = of(start_of, at_r, number)
        share = of(share_of, at_r, number)
        # offsets within a run fit int32, which halves the registers of addresses
        own_keys = keys + start * HEAD_DIM
        own_values = values + start * VALUE_DIM
        of_piece = tl.sum(tl.where((at_r == number)[:, None], many, 0), 0)
        piece_ends = tl.cumsum(of_piece, 0)
        top = tl.full([TILE_Q], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        sums = tl.zeros([TILE_V, TILE_Q], tl.float32)
        for base in range(here, there, TILE_K):
            # the clusters of so many places at once, so that no load of rows waits for one of where they are
            place = base + at_k
            passed = (piece_ends[None, :] <= place[:, None]) & (at_p < pieces)[None, :]
            at_piece = tl.sum(passed.to(tl.int32), 1)
            before = tl.sum(tl.where(passed, of_piece[None, :], 0), 1)
            listed = run * room + at_piece * share + place - before
            clusters = tl.load(chosen + listed, mask=place < there, other=0)
            rows = (tl.minimum(there, base + TILE_K) - base) * SEGMENT
            for at in range(0, rows, TILE_N):
                row = at + at_n
                real = row < rows
                which = row // SEGMENT
                cluster = tl.sum(tl.where(which[:, None] == at_k[None, :], clusters[None, :], 0), 1)
                row = (cluster - which) * SEGMENT + row
                key = tl.load(
                    own_keys + row[:, None] * HEAD_DIM + at_d[None, :],
                    mask=real[:, None] & real_d[None, :],
                    other=0.0,
                )
                value = tl.load(
                    own_values + row[None, :] * VALUE_DIM + at_v[:, None],
                    mask=real[None, :] & real_v[:, None],
                    other=0.0,
                )
                top, total, sums = take(key, value, query, real, scale, top, total, sums, PRECISION, WIDEN)
        found = sums / tl.where(total > 0.0, total, 1.0)[None, :]
        slot = (program + run) * GROUP + at_q
        kept = at_q < tl.where(here < there, GROUP, 0)
        tl.store(parts + slot[None, :] * VALUE_DIM + at_v[:, None], found, mask=kept[None, :] & real_v[:, None])
        tl.store(part_lse + slot, log_of(total, top), mask=kept)
