"""Triton: the sum of all parts of a fused step."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import join, log_of
from kvfold.kernels.clusters.fused.maths import clusters_of


@triton.jit(do_not_specialize=["programs", "tail_splits"])
def merge(
    parts,
    parts_lse,
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
    tail_splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COUNTS: tl.constexpr,
    HAS_ALIVE: tl.constexpr,
):
    """Join the parts of one query head and its sink, and count what was read; grid ``(runs, GROUP)``."""
    run = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    at_s = tl.arange(0, TILE_S)
    at_v = tl.arange(0, TILE_V)
    width = programs + tail_splits
    top = tl.max(tl.full([TILE_S], float("-inf"), tl.float32), 0)
    if HAS_SINKS:
        top = tl.load(sinks + run % KV_HEADS * GROUP + query).to(tl.float32)
    total = (top > float("-inf")).to(tl.float32)
    sums = tl.zeros([TILE_V], tl.float32)
    first = run * width
    top, total, sums = join(
        parts, parts_lse, first, first + width, GROUP, query, top, total, sums, at_s, at_v, VALUE_DIM
    )
    found = (sums / tl.where(total > 0.0, total, 1.0)).to(output.dtype.element_ty)
    head = run * GROUP + query
    tl.store(output + head * VALUE_DIM + at_v, found, mask=at_v < VALUE_DIM)
    tl.store(lse + head, log_of(total, top))
    if query == 0:
        at_p = tl.arange(0, TILE_P)
        num_read = tl.sum(tl.load(counts + run * programs + at_p, mask=at_p < programs, other=0), 0)
        tl.store(expanded + run, num_read)
        if COUNTS:
            count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
            rows = tl.load(lengths + run).to(tl.int64)
            going = rows * 0 + 1
            if HAS_ALIVE:
                going = tl.load(alive + run // KV_HEADS).to(tl.int64)
            seen = num_read * SEGMENT + count - num_read + rows - count * SEGMENT
            # whole numbers: the order in which they come does not matter
            tl.atomic_add(counted, seen * going, sem="relaxed")
            tl.atomic_add(counted + 1, rows * going, sem="relaxed")
