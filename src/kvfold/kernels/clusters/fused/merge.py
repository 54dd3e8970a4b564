"""Triton: the sum of all parts of a fused step."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import clusters_of, finite, log_of
from kvfold.kernels.clusters.fused.read import load_counts, of


@triton.jit
def _join(output, lse, first, stop, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v):
    """Take parts ``first`` to ``stop`` of one query head up."""
    for at in range(first, stop, at_s.shape[0]):
        place = (at + at_s).to(tl.int64) * GROUP + query
        real = at + at_s < stop
        lses = tl.load(lse + place, mask=real, other=float("-inf"))
        part = tl.load(
            output + place[:, None] * VALUE_DIM + at_v[None, :],
            mask=real[:, None] & (at_v < VALUE_DIM)[None, :],
            other=0.0,
        )
        now = tl.maximum(top, tl.max(lses, 0))
        safe = finite(now)
        weights = tl.exp(lses - safe)
        fade = tl.exp(top - safe)
        sums = sums * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = now
    return top, total, sums


@triton.jit
def merge(
    parts,
    part_lse,
    fixed,
    fixed_lse,
    sinks,
    lengths,
    fits,
    alive,
    counts,
    output,
    lse,
    expanded,
    counted,
    programs,
    pieces,
    tail_splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COUNTS: tl.constexpr,
    HAS_ALIVE: tl.constexpr,
):
    """Join the parts of one query head, its tail and its sink; grid ``(runs, GROUP)``."""
    run = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
    rows = tl.load(lengths + run).to(tl.int64)
    at_r = tl.arange(0, TILE_R)
    at_s = tl.arange(0, TILE_S)
    at_v = tl.arange(0, TILE_V)
    own = tl.sum(load_counts(counts, tl.num_programs(0), pieces, TILE_R, TILE_P), 1)
    begin = tl.sum(tl.where(at_r < run, own, 0), 0)
    num_read = of(own, at_r, run)
    share = tl.maximum(tl.cdiv(tl.sum(own, 0), programs), 1)
    first = begin // share + run
    stop = tl.where(num_read > 0, (begin + num_read - 1) // share + run + 1, first)
    top = tl.max(tl.full([TILE_S], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([TILE_S], tl.float32), 0)
    sums = tl.zeros([TILE_V], tl.float32)
    width = pieces + tail_splits
    always = run * width
    top, total, sums = _join(
        fixed, fixed_lse, always, always + width, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v
    )
    top, total, sums = _join(parts, part_lse, first, stop, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v)
    if HAS_SINKS:
        sink = tl.load(sinks + run % KV_HEADS * GROUP + query).to(tl.float32)
        now = tl.maximum(top, sink)
        fade = tl.exp(top - finite(now))
        sums = sums * fade
        total = total * fade + tl.exp(sink - finite(now))
        top = now
    found = (sums / tl.where(total > 0.0, total, 1.0)).to(output.dtype.element_ty)
    place = run * GROUP + query
    tl.store(output + place * VALUE_DIM + at_v, found, mask=at_v < VALUE_DIM)
    tl.store(lse + place, log_of(total, top))
    if query == 0:
        tl.store(expanded + run, num_read)
        if COUNTS:
            going = rows * 0 + 1
            if HAS_ALIVE:
                going = tl.load(alive + run // KV_HEADS).to(tl.int64)
            seen = num_read * SEGMENT + count - num_read + rows - count * SEGMENT
            # whole numbers: the order in which they come does not matter
            tl.atomic_add(counted, seen * going, sem="relaxed")
            tl.atomic_add(counted + 1, rows * going, sem="relaxed")
