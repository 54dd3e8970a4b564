"""Triton: attention over what was chosen, in equal shares whatever the heads chose, and the sum of all parts.

The work of all runs lies on one line: per run its blocks of mean values that matter, then the tiles of rows of its
clusters that are read. Every program takes an equal piece of the line, which may end in one run and begin in the next,
and writes one part per run that it touches. Program ``p`` in run ``r`` writes to slot ``p + r``: along the line each
piece moves on in one of the two at least, so that no slot is taken twice, and the parts of a run lie side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import clusters_of, finite, log_of, weigh


@triton.jit
def _work(totals, at_r, runs, SEGMENT: tl.constexpr, TILE_N: tl.constexpr):
    """Work of each run, in blocks; a tile of keys and values counts as two blocks of values."""
    read = tl.load(totals + at_r * 2, mask=at_r < runs, other=0)
    blocks = tl.load(totals + at_r * 2 + 1, mask=at_r < runs, other=0)
    return read, blocks, blocks + 2 * tl.cdiv(read * SEGMENT, TILE_N)


@triton.jit
def _of(numbers, at, index):
    return tl.sum(tl.where(at == index, numbers, 0), 0)


@triton.jit
def _list(found, counts, flat, base, run, tiles, begin, end, which, WIDTH: tl.constexpr, TILE_T: tl.constexpr):
    """Write places ``begin`` to ``end`` of a run's list, which lies in pieces, one piece per tile of the choice.

    Each program writes what it reads itself: two that share a place write the same number.
    """
    CHUNK: tl.constexpr = 32
    at_t = tl.arange(0, TILE_T)
    number = tl.load(counts + (run * tiles + at_t) * 2 + which, mask=at_t < tiles, other=0)
    ends = tl.cumsum(number, 0)
    for at in range(begin, end, CHUNK):
        place = at + tl.arange(0, CHUNK)
        passed = (ends[None, :] <= place[:, None]) & (at_t < tiles)[None, :]
        tile = tl.sum(passed.to(tl.int32), 1)
        before = tl.sum(tl.where(passed, number[None, :], 0), 1)
        inside = place < end
        entry = tl.load(found + (run * tiles + tile) * WIDTH + place - before, mask=inside, other=0)
        tl.store(flat + base + place, entry, mask=inside)


@triton.jit
def attend(
    q,
    keys,
    values,
    mean_values,
    starts,
    lengths,
    fits,
    log_mass,
    chosen,
    blocks,
    counts,
    totals,
    flat_chosen,
    flat_blocks,
    parts,
    part_lse,
    scale,
    room,
    tiles,
    runs,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to one piece of the work; grid ``(programs,)``."""
    program = tl.program_id(0)
    at_r = tl.arange(0, TILE_R)
    read, needed, work = _work(totals, at_r, runs, SEGMENT, TILE_N)
    ends = tl.cumsum(work, 0)
    begins = ends - work
    whole = tl.sum(work, 0)
    share = tl.maximum(tl.cdiv(whole, tl.num_programs(0)), 1)
    low = program * share
    high = tl.minimum(low + share, whole)
    first = tl.sum(((ends <= low) & (at_r < runs)).to(tl.int32), 0)
    stop = tl.sum(((begins < high) & (at_r < runs)).to(tl.int32), 0)
    stop = tl.where(low < high, stop, first)

    at_q = tl.arange(0, TILE_Q)
    at_n = tl.arange(0, TILE_N)
    at_b = tl.arange(0, BLOCK)
    at_d = tl.arange(0, TILE_D)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < GROUP
    real_d = at_d < HEAD_DIM
    real_v = at_v < VALUE_DIM
    for number in range(first, stop):
        # a number of Python where the kernel is interpreted
        run = first.to(tl.int64) * 0 + number
        begin = _of(begins, at_r, number)
        num_blocks = _of(needed, at_r, number)
        num_read = _of(read, at_r, number)
        low_here = tl.maximum(low - begin, 0)
        high_here = tl.minimum(high - begin, _of(work, at_r, number))
        # where the piece ends between the two halves of a tile of rows, the tile belongs to what comes before
        first_block = tl.minimum(low_here, num_blocks)
        stop_block = tl.minimum(high_here, num_blocks)
        first_row = tl.cdiv(tl.maximum(low_here - num_blocks, 0), 2) * TILE_N
        stop_row = tl.minimum(tl.cdiv(tl.maximum(high_here - num_blocks, 0), 2) * TILE_N, num_read * SEGMENT)
        first_row = tl.minimum(first_row, stop_row)

        base = run * tiles * (TILE // BLOCK)
        _list(blocks, counts, flat_blocks, base, run, tiles, first_block, stop_block, 1, TILE // BLOCK, TILE_T)
        base_read = run * tiles * TILE
        last = tl.cdiv(stop_row, SEGMENT)
        _list(chosen, counts, flat_chosen, base_read, run, tiles, first_row // SEGMENT, last, 0, TILE, TILE_T)
        # what one thread has written, others read below
        tl.debug_barrier()

        count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
        start = tl.load(starts + run).to(tl.int64)
        query = tl.load(
            q + (run * GROUP + at_q[:, None]) * HEAD_DIM + at_d[None, :],
            mask=real_q[:, None] & real_d[None, :],
            other=0.0,
        )
        if WIDEN:
            query = query.to(tl.float32)
        # offsets within a run fit int32, which halves the registers of addresses
        own_keys = keys + start * HEAD_DIM
        own_values = values + start * VALUE_DIM
        own_means = mean_values + run * room * VALUE_DIM
        own_mass = log_mass + run * GROUP * room
        own_blocks = flat_blocks + base
        own_chosen = flat_chosen + base_read
        top = tl.full([TILE_Q], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        sums = tl.zeros([TILE_Q, TILE_V], tl.float32)
        # where to read next is looked up one step ahead: a load that waits for another would not be in flight early
        block = tl.load(own_blocks + first_block, mask=first_block < stop_block, other=0)
        for at in range(first_block, stop_block):
            entry = block * BLOCK + at_b
            block = tl.load(own_blocks + at + 1, mask=at + 1 < stop_block, other=0)
            real = entry < count
            logits = tl.load(
                own_mass + at_q[:, None] * room + entry[None, :],
                mask=real_q[:, None] & real[None, :],
                other=float("-inf"),
            )
            weights, fade, top, total = weigh(logits, top, total)
            value = tl.load(
                own_means + entry[:, None] * VALUE_DIM + at_v[None, :],
                mask=real[:, None] & real_v[None, :],
                other=0.0,
            )
            rounded = weights.to(value.dtype)
            if WIDEN:
                rounded = rounded.to(tl.float32)
                value = value.to(tl.float32)
            sums = sums * fade[:, None] + tl.dot(rounded, value, input_precision=PRECISION)
        place = first_row + at_n
        cluster = tl.load(own_chosen + place // SEGMENT, mask=place < stop_row, other=0)
        for at in range(first_row, stop_row, TILE_N):
            place = at + at_n
            real = place < stop_row
            row = cluster * SEGMENT + place % SEGMENT
            later = place + TILE_N
            cluster = tl.load(own_chosen + later // SEGMENT, mask=later < stop_row, other=0)
            key = tl.load(
                own_keys + row[None, :] * HEAD_DIM + at_d[:, None], mask=real[None, :] & real_d[:, None], other=0.0
            )
            if WIDEN:
                key = key.to(tl.float32)
            logits = tl.dot(query, key, input_precision=PRECISION) * scale
            weights, fade, top, total = weigh(tl.where(real[None, :], logits, float("-inf")), top, total)
            value = tl.load(
                own_values + row[:, None] * VALUE_DIM + at_v[None, :], mask=real[:, None] & real_v[None, :], other=0.0
            )
            rounded = weights.to(value.dtype)
            if WIDEN:
                rounded = rounded.to(tl.float32)
                value = value.to(tl.float32)
            sums = sums * fade[:, None] + tl.dot(rounded, value, input_precision=PRECISION)
        found = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        slot = (program + run) * GROUP + at_q
        kept = at_q < tl.where(low_here < high_here, GROUP, 0)
        tl.store(parts + slot[:, None] * VALUE_DIM + at_v[None, :], found, mask=kept[:, None] & real_v[None, :])
        tl.store(part_lse + slot, log_of(total, top), mask=kept)


@triton.jit
def _join(output, lse, first, stop, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v):
    """Take parts ``first`` to ``stop`` of one query head up."""
    for at in range(first, stop, at_s.shape[0]):
        place = (at + at_s).to(tl.int64) * GROUP + query
        real = at + at_s < stop
        lses = tl.load(lse + place, mask=real, other=float("-inf"))
        now = tl.maximum(top, tl.max(lses, 0))
        safe = finite(now)
        weights = tl.exp(lses - safe)
        fade = tl.exp(top - safe)
        part = tl.load(
            output + place[:, None] * VALUE_DIM + at_v[None, :],
            mask=real[:, None] & (at_v < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums = sums * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = now
    return top, total, sums


@triton.jit
def merge(
    parts,
    part_lse,
    tail_output,
    tail_lse,
    sinks,
    lengths,
    fits,
    alive,
    totals,
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
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COUNTS: tl.constexpr,
    HAS_ALIVE: tl.constexpr,
):
    """Join the parts of one query head, its tail and its sink; grid ``(runs, GROUP)``."""
    run = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    at_r = tl.arange(0, TILE_R)
    read, _, work = _work(totals, at_r, tl.num_programs(0), SEGMENT, TILE_N)
    begins = tl.cumsum(work, 0) - work
    share = tl.maximum(tl.cdiv(tl.sum(work, 0), programs), 1)
    begin = _of(begins, at_r, run)
    own = _of(work, at_r, run)
    first = begin // share + run
    stop = tl.where(own > 0, (begin + own - 1) // share + run + 1, first)
    at_s = tl.arange(0, TILE_S)
    at_v = tl.arange(0, TILE_V)
    top = tl.max(tl.full([TILE_S], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([TILE_S], tl.float32), 0)
    sums = tl.zeros([TILE_V], tl.float32)
    top, total, sums = _join(parts, part_lse, first, stop, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v)
    tail = run * tail_splits
    top, total, sums = _join(
        tail_output, tail_lse, tail, tail + tail_splits, query, top, total, sums, GROUP, VALUE_DIM, at_s, at_v
    )
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
        num_read = _of(read, at_r, run)
        tl.store(expanded + run, num_read)
        if COUNTS:
            count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
            rows = tl.load(lengths + run).to(tl.int64)
            going = rows * 0 + 1
            if HAS_ALIVE:
                going = tl.load(alive + run // KV_HEADS).to(tl.int64)
            seen = num_read * SEGMENT + count - num_read + rows - count * SEGMENT
            tl.atomic_add(counted, seen * going, sem="relaxed")
            tl.atomic_add(counted + 1, rows * going, sem="relaxed")
