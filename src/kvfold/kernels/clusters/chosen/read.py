"""Triton: attention over lists of rows and means, in equal shares whatever the heads chose, and the sum of all parts.

The work of all runs lies on one line, in tiles: per run those of its rows, then those of its means. Every program takes
an equal piece of the line, which may end in one run and begin in the next, and writes one part per run that it touches.
Program ``p`` in run ``r`` writes to slot ``p + r``: along the line each piece moves on in one of the two at least, so
that no slot is taken twice, and the parts of a run lie side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite, join, log_of

_STRIDES = [f"{name}_{side}" for name in ("key", "value", "mean", "upper") for side in ("batch", "head")]
_NUMBERS = ["runs", "rows", "clusters", "clusters_upper", "listed", *_STRIDES]
"""What the kernel is not compiled anew for when it changes."""


@triton.jit
def _tiles(
    totals,
    at_r,
    runs,
    SEGMENT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Length of each list of each run, and all tiles of each run."""
    real = at_r < runs
    rows = tl.load(totals + at_r * 3, mask=real, other=0) * SEGMENT
    tiles = tl.cdiv(rows, TILE_N)
    lower = tl.zeros(at_r.shape, tl.int32)
    upper = tl.zeros(at_r.shape, tl.int32)
    if LEVELS > 0:
        lower = tl.load(totals + at_r * 3 + 1, mask=real, other=0)
        tiles += tl.cdiv(lower, TILE_M)
    if LEVELS > 1:
        upper = tl.load(totals + at_r * 3 + 2, mask=real, other=0)
        tiles += tl.cdiv(upper, TILE_M)
    return rows, lower, upper, tiles


@triton.jit
def _of(numbers, at, index):
    return tl.sum(tl.where(at == index, numbers, 0), 0)


@triton.jit
def _weigh(logits, top, total):
    """Take logits ``[queries, entries]`` up: weights, what earlier sums fade by, and the new maximum and total."""
    now = tl.maximum(top, tl.max(logits, 1))
    # a query all of whose rows so far are at minus infinity has no finite maximum to subtract
    safe = finite(now)
    weights = tl.exp(logits - safe[:, None])
    fade = tl.exp(top - safe)
    return weights, fade, now, total * fade + tl.sum(weights, 1)


@triton.jit
def _log(size):
    """Log of a number of rows; ``-inf`` for none."""
    wide = size.to(tl.float32)
    return tl.where(wide > 0.0, tl.log(tl.maximum(wide, 1.0)), float("-inf"))


@triton.jit
def _read(
    query, keys, values, key_steps, value_steps, entries, words, sizes, first, stop, scale, log_size, top, total, sums,
    at_q, at_d, at_v, SEGMENT: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_N: tl.constexpr,
    HAS_WORDS: tl.constexpr, HAS_SIZES: tl.constexpr, HAS_STEPS: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Take up places ``first`` to ``stop`` of a list whose entries are so many rows each."""
    at_n = tl.arange(0, TILE_N)
    # where to read next is looked up one step ahead: a load that waits for another would not be in flight early
    entry = tl.load(entries + (first + at_n) // SEGMENT, mask=first + at_n < stop, other=0)
    for at in range(first, stop, TILE_N):
        place = at + at_n
        real = place < stop
        row = entry * SEGMENT + place % SEGMENT
        later = place + TILE_N
        entry = tl.load(entries + later // SEGMENT, mask=later < stop, other=0)
        key = tl.load(
            keys + row[None, :] * HEAD_DIM + at_d[:, None],
            mask=real[None, :] & (at_d < HEAD_DIM)[:, None],
            other=0,
        )
        if HAS_STEPS or WIDEN:
            # whole numbers of a byte are exact in every type
            key = key.to(query.dtype)
        logits = tl.dot(query, key, input_precision=PRECISION) * scale
        if HAS_STEPS:
            logits = logits * tl.load(key_steps + row, mask=real, other=0.0)[None, :]
        if HAS_SIZES:
            logits += _log(tl.load(sizes + row, mask=real, other=1))[None, :]
        else:
            logits += log_size
        seen = real[None, :]
        if HAS_WORDS:
            word = tl.load(words + place // SEGMENT, mask=real, other=0)
            seen = seen & (((word[None, :] >> at_q[:, None]) & 1) != 0)
        weights, fade, top, total = _weigh(tl.where(seen, logits, float("-inf")), top, total)
        value = tl.load(
            values + row[:, None] * VALUE_DIM + at_v[None, :],
            mask=real[:, None] & (at_v < VALUE_DIM)[None, :],
            other=0,
        )
        if HAS_STEPS:
            # steps are powers of two, so that this rounds nothing
            size = tl.load(value_steps + row, mask=real, other=0.0)
            value = (value.to(tl.float32) * size[:, None]).to(query.dtype)
        rounded = weights.to(value.dtype)
        if WIDEN:
            rounded = rounded.to(tl.float32)
            value = value.to(tl.float32)
        sums = sums * fade[:, None] + tl.dot(rounded, value, input_precision=PRECISION)
    return top, total, sums


@triton.jit
def _read_left(
    values, means, steps, left, bits, entries, first, stop, rows, clusters, top, total, sums, at_q, at_v,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr,
    HAS_STEPS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take up clusters some of whose rows are read: what is left has a mass, and the mean of the values not read."""
    at_m = tl.arange(0, TILE_M)
    real_v = (at_v < VALUE_DIM)[None, :]
    for at in range(first, stop, TILE_M):
        real = at + at_m < stop
        cluster = tl.load(entries + at + at_m, mask=real, other=0)
        logits = tl.load(
            left + at_q[:, None] * clusters + cluster[None, :],
            mask=(at_q < GROUP)[:, None] & real[None, :],
            other=float("-inf"),
        )
        mean = tl.load(means + cluster[:, None] * VALUE_DIM + at_v[None, :], mask=real[:, None] & real_v, other=0).to(
            tl.float32
        )
        if HAS_STEPS:
            mean = mean * tl.load(steps + cluster, mask=real, other=0.0).to(tl.float32)[:, None]
        read = tl.zeros([TILE_M], tl.int32)
        taken = mean * 0.0
        for place in range(SEGMENT):
            row = cluster * SEGMENT + place
            bit = tl.load(bits + row, mask=real & (row < rows), other=0).to(tl.int32)
            if tl.max(bit, 0) > 0:
                taken += tl.load(
                    values + row[:, None] * VALUE_DIM + at_v[None, :], mask=(bit != 0)[:, None] & real_v, other=0.0
                ).to(tl.float32)
            read += bit
        unread = tl.maximum(SEGMENT - read, 1).to(tl.float32)
        mean = ((SEGMENT * mean - taken) / unread[:, None]).to(values.dtype.element_ty)
        weights, fade, top, total = _weigh(logits, top, total)
        rounded = weights.to(mean.dtype)
        if WIDEN:
            rounded = rounded.to(tl.float32)
            mean = mean.to(tl.float32)
        sums = sums * fade[:, None] + tl.dot(rounded, mean, input_precision=PRECISION)
    return top, total, sums


@triton.jit(do_not_specialize=_NUMBERS)
def attend(
    q,
    keys,
    values,
    mean_keys,
    mean_values,
    mean_key_steps,
    mean_steps,
    sizes,
    upper_keys,
    upper_values,
    upper_key_steps,
    upper_steps,
    upper_sizes,
    left,
    bits,
    found,
    words,
    totals,
    parts,
    part_lse,
    scale,
    log_size,
    log_size_upper,
    runs,
    rows,
    clusters,
    clusters_upper,
    listed,
    key_batch,
    key_head,
    value_batch,
    value_head,
    mean_batch,
    mean_head,
    upper_batch,
    upper_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENT_LEFT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_LEFT: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_SIZES: tl.constexpr,
    PER_QUERY: tl.constexpr,
    LOWER_PER_QUERY: tl.constexpr,
    UPPER_PER_QUERY: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to one piece of the work; grid ``(programs,)``. Strides of batch and head are in rows."""
    program = tl.program_id(0)
    at_r = tl.arange(0, TILE_R)
    all_rows, all_lower, all_upper, work = _tiles(totals, at_r, runs, SEGMENT, TILE_N, TILE_M, LEVELS)
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
    at_d = tl.arange(0, TILE_D)
    at_v = tl.arange(0, TILE_V)
    real_q = at_q < GROUP
    for number in range(first, stop):
        # a number of Python where the kernel is interpreted; offsets in int64: pools have more than 2^31 elements
        run = first.to(tl.int64) * 0 + number
        row = run // KV_HEADS
        head = run % KV_HEADS
        begin = _of(begins, at_r, number)
        low_here = tl.maximum(low - begin, 0)
        high_here = tl.minimum(high - begin, _of(work, at_r, number))
        num_rows = _of(all_rows, at_r, number)
        row_tiles = tl.cdiv(num_rows, TILE_N)
        query = tl.load(
            q + (run * GROUP + at_q[:, None]) * HEAD_DIM + at_d[None, :],
            mask=real_q[:, None] & (at_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            query = query.to(tl.float32)
        # offsets within a run fit int32, which halves the registers of addresses
        own_keys = keys + (row * key_batch + head * key_head) * HEAD_DIM
        own_values = values + (row * value_batch + head * value_head) * VALUE_DIM
        base = run * (listed + clusters + clusters_upper)
        top = tl.full([TILE_Q], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        sums = tl.zeros([TILE_Q, TILE_V], tl.float32)
        top, total, sums = _read(
            query, own_keys, own_values, sizes, sizes, found + base, words + base, sizes,
            tl.minimum(low_here * TILE_N, num_rows), tl.minimum(high_here * TILE_N, num_rows), scale, 0.0, top, total,
            sums, at_q, at_d, at_v, SEGMENT, HEAD_DIM, VALUE_DIM, TILE_N, PER_QUERY, False, False, PRECISION, WIDEN,
        )  # fmt: skip
        if LEVELS > 0:
            own_means = (row * mean_batch + head * mean_head).to(tl.int64)
            lower = _of(all_lower, at_r, number)
            from_lower = tl.minimum(tl.maximum(low_here - row_tiles, 0) * TILE_M, lower)
            to_lower = tl.minimum(tl.maximum(high_here - row_tiles, 0) * TILE_M, lower)
            place = base + listed
            if IS_LEFT:
                top, total, sums = _read_left(
                    own_values, mean_values + own_means * VALUE_DIM, mean_steps + own_means,
                    left + run * GROUP * clusters, bits + run * clusters * SEGMENT_LEFT, found + place, from_lower,
                    to_lower, rows, clusters, top, total, sums, at_q, at_v, GROUP, SEGMENT_LEFT, VALUE_DIM, TILE_M,
                    HAS_STEPS, PRECISION, WIDEN,
                )  # fmt: skip
            else:
                top, total, sums = _read(
                    query, mean_keys + own_means * HEAD_DIM, mean_values + own_means * VALUE_DIM,
                    mean_key_steps + own_means, mean_steps + own_means, found + place, words + place, sizes + own_means,
                    from_lower, to_lower, scale, log_size, top, total, sums, at_q, at_d, at_v, 1, HEAD_DIM, VALUE_DIM,
                    TILE_M, LOWER_PER_QUERY, HAS_SIZES, HAS_STEPS, PRECISION, WIDEN,
                )  # fmt: skip
            if LEVELS > 1:
                own_means = (row * upper_batch + head * upper_head).to(tl.int64)
                tiles = row_tiles + tl.cdiv(lower, TILE_M)
                upper = _of(all_upper, at_r, number)
                place += clusters
                top, total, sums = _read(
                    query, upper_keys + own_means * HEAD_DIM, upper_values + own_means * VALUE_DIM,
                    upper_key_steps + own_means, upper_steps + own_means, found + place, words + place,
                    upper_sizes + own_means,
                    tl.minimum(tl.maximum(low_here - tiles, 0) * TILE_M, upper),
                    tl.minimum(tl.maximum(high_here - tiles, 0) * TILE_M, upper), scale, log_size_upper, top, total,
                    sums, at_q, at_d, at_v, 1, HEAD_DIM, VALUE_DIM, TILE_M, UPPER_PER_QUERY, HAS_SIZES, HAS_STEPS,
                    PRECISION, WIDEN,
                )  # fmt: skip
        part = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        slot = (program + run) * GROUP + at_q
        kept = at_q < tl.where(low_here < high_here, GROUP, 0)
        tl.store(
            parts + slot[:, None] * VALUE_DIM + at_v[None, :], part, mask=kept[:, None] & (at_v < VALUE_DIM)[None, :]
        )
        tl.store(part_lse + slot, log_of(total, top), mask=kept)


@triton.jit
def merge(
    parts,
    part_lse,
    rest,
    rest_lse,
    totals,
    output,
    lse,
    programs,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_V: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Join the parts of one query head and the rest; grid ``(runs, GROUP)``."""
    run = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    at_r = tl.arange(0, TILE_R)
    _, _, _, work = _tiles(totals, at_r, tl.num_programs(0), SEGMENT, TILE_N, TILE_M, LEVELS)
    begins = tl.cumsum(work, 0) - work
    share = tl.maximum(tl.cdiv(tl.sum(work, 0), programs), 1)
    begin = _of(begins, at_r, run)
    own = _of(work, at_r, run)
    first = begin // share + run
    stop = tl.where(own > 0, (begin + own - 1) // share + run + 1, first)
    at_s = tl.arange(0, TILE_S)
    at_v = tl.arange(0, TILE_V)
    real_v = at_v < VALUE_DIM
    head = run * GROUP + query
    # what an empty rest holds may be anything
    top = tl.load(rest_lse + head).to(tl.float32)
    held = top > float("-inf")
    total = held.to(tl.float32)
    sums = tl.load(rest + head * VALUE_DIM + at_v, mask=at_v < tl.where(held, VALUE_DIM, 0), other=0.0).to(tl.float32)
    top, total, sums = join(parts, part_lse, first, stop, GROUP, query, top, total, sums, at_s, at_v, VALUE_DIM)
    result = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(output + head * VALUE_DIM + at_v, result.to(output.dtype.element_ty), mask=real_v)
    tl.store(lse + head, log_of(total, top))
