"""Triton: mass and reach of every cluster as the query sees it, and attention over the tail, in one launch.

Programs of one run share it: the first ones read mean keys and reaches, once for all query heads of a KV head; the last
ones append the newest row and attend to the rows that no cluster covers. Both give partial sums that the choice needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.clusters.fused.maths import clusters_of, log_growth, log_of, piece_of, take

NOTHING = tl.constexpr(-3.0e38)
"""A logit below all others that stays finite when it is subtracted from itself."""


@triton.jit(do_not_specialize=["room", "splits", "tail_splits", "programs"])
def score(
    q,
    new_keys,
    new_values,
    keys,
    values,
    mean_keys,
    mean_step,
    reach,
    reach_step,
    value_norm,
    starts,
    lengths,
    fits,
    log_mass,
    deviation,
    part_lse,
    parts,
    parts_lse,
    longest,
    scale,
    log_size,
    room,
    splits,
    tail_splits,
    programs,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_V: tl.constexpr,
    FORM: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    APPENDS: tl.constexpr,
    KNOWS_LONGEST: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Score the clusters of a split, or attend to a share of the tail; grid ``(runs, splits + tail_splits)``."""
    # offsets in int64: a pool of a long context has more than 2^31 elements
    run = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    runs = tl.num_programs(0)
    at_q = tl.arange(0, TILE_Q)
    at_d = tl.arange(0, TILE_D)
    real_q = at_q < GROUP
    real_d = at_d < HEAD_DIM
    query = tl.load(
        q + (run * GROUP + at_q[None, :]) * HEAD_DIM + at_d[:, None], mask=real_q[None, :] & real_d[:, None], other=0.0
    )
    count = clusters_of(lengths, fits, run, KV_HEADS, SEGMENT)
    if split < splits:
        _score_clusters(
            query, mean_keys, mean_step, reach, reach_step, value_norm, log_mass, deviation, part_lse, longest, run,
            runs, split, splits, tail_splits, count, room, scale, log_size, at_q, at_d, real_q, real_d, GROUP,
            HEAD_DIM, TILE_Q, TILE_C, FORM, HAS_STEPS, KNOWS_LONGEST, PRECISION, WIDEN,
        )  # fmt: skip
    else:
        _read_tail(
            query, new_keys, new_values, keys, values, starts, lengths, parts, parts_lse, longest, run,
            split - splits, splits, tail_splits, programs, count, scale, at_q, at_d, real_q, real_d, GROUP, SEGMENT,
            HEAD_DIM, VALUE_DIM, TILE_Q, TILE_N, TILE_V, APPENDS, KNOWS_LONGEST, PRECISION, WIDEN,
        )  # fmt: skip


@triton.jit
def _sum_up(logits, top, total):
    """Take logits up place by place, so that threads need not meet before the end."""
    now = tl.maximum(top, logits)
    return now, total * tl.exp(top - now) + tl.exp(logits - now)


@triton.jit
def _log_total(top, total):
    """Log-sum-exp over the places."""
    largest = tl.max(top, 0)
    return log_of(tl.sum(total * tl.exp(top - largest[None, :]), 0), largest)


@triton.jit
def _score_clusters(
    query, mean_keys, mean_step, reach, reach_step, value_norm, log_mass, deviation, part_lse, longest, run, runs,
    split, splits, tail_splits, count, room, scale, log_size, at_q, at_d, real_q, real_d, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_C: tl.constexpr, FORM: tl.constexpr, HAS_STEPS: tl.constexpr,
    KNOWS_LONGEST: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    at_c = tl.arange(0, TILE_C)
    share = piece_of(count, splits, TILE_C)
    first = split * share
    stop = tl.minimum(count, first + share)
    # whole numbers up to 256 and half precision are exact in either type
    size = tl.abs(query)
    if WIDEN:
        query = query.to(tl.float32)
        size = size.to(tl.float32)
    wide = query.to(tl.float32)
    span = tl.sqrt(tl.sum(wide * wide, 0)) * scale
    top = tl.full([TILE_C, TILE_Q], NOTHING, tl.float32)
    total = tl.zeros([TILE_C, TILE_Q], tl.float32)
    grown_top = tl.full([TILE_C, TILE_Q], NOTHING, tl.float32)
    grown_total = tl.zeros([TILE_C, TILE_Q], tl.float32)
    norm = tl.zeros([TILE_C], tl.float32)
    # offsets within a run fit int32, which halves the registers of addresses
    mean_keys += run * room * HEAD_DIM
    mean_step += run * room
    reach += run * room if FORM == "radius" else run * room * HEAD_DIM
    reach_step += run * room
    log_mass += run * room * GROUP
    deviation += run * room * GROUP
    # what is not multiplied is loaded a tile ahead by hand: compilers let only what is multiplied be in flight
    begins = first + at_c < stop
    key_unit = tl.load(mean_step + first + at_c, mask=begins, other=0.0) if HAS_STEPS else scale
    unit = tl.load(reach_step + first + at_c, mask=begins, other=0.0) if FORM != "plain" else scale
    for at in range(first, stop, TILE_C):
        entry = at + at_c
        real = entry < stop
        both = real[:, None] & real_d[None, :]
        code = tl.load(mean_keys + entry[:, None] * HEAD_DIM + at_d[None, :], mask=both, other=0)
        key = code.to(query.dtype)
        logits = tl.dot(key, query, input_precision=PRECISION) * scale
        later = entry + TILE_C
        if HAS_STEPS:
            logits = logits * key_unit[:, None]
            key_unit = tl.load(mean_step + later, mask=later < stop, other=0.0)
        logits = logits + log_size
        if FORM == "radius":
            off = span[None, :] * unit[:, None].to(tl.float32)
        else:
            box = tl.load(reach + entry[:, None] * HEAD_DIM + at_d[None, :], mask=both, other=0).to(size.dtype)
            off = tl.dot(box, size, input_precision=PRECISION) * scale
            if FORM == "steps":
                off = off * unit[:, None]
        if FORM != "plain":
            unit = tl.load(reach_step + later, mask=later < stop, other=0.0)
        place = entry[:, None] * GROUP + at_q[None, :]
        kept = real[:, None] & real_q[None, :]
        tl.store(log_mass + place, logits, mask=kept)
        tl.store(deviation + place, off, mask=kept)
        logits = tl.where(kept, logits, float("-inf"))
        top, total = _sum_up(logits, top, total)
        grown_top, grown_total = _sum_up(logits + log_growth(off), grown_top, grown_total)
        if KNOWS_LONGEST:
            norm = tl.maximum(norm, tl.load(value_norm + run * room + entry, mask=real, other=0.0).to(tl.float32))
    place = (run * splits + split) * GROUP + at_q
    tl.store(part_lse + place, _log_total(top, total), mask=real_q)
    tl.store(part_lse + runs * splits * GROUP + place, _log_total(grown_top, grown_total), mask=real_q)
    if KNOWS_LONGEST:
        tl.store(longest + run * (splits + tail_splits) + split, tl.max(norm, 0))


@triton.jit
def _read_tail(
    query, new_keys, new_values, keys, values, starts, lengths, parts, parts_lse, longest, run, split, splits,
    tail_splits, programs, count, scale, at_q, at_d, real_q, real_d, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_N: tl.constexpr, TILE_V: tl.constexpr,
    APPENDS: tl.constexpr, KNOWS_LONGEST: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    at_n = tl.arange(0, TILE_N)
    at_v = tl.arange(0, TILE_V)
    real_v = at_v < VALUE_DIM
    covered = count * SEGMENT
    start = tl.load(starts + run).to(tl.int64) + covered
    rows = tl.load(lengths + run).to(tl.int32) - covered
    share = piece_of(rows, tail_splits, TILE_N)
    first = split * share
    stop = tl.minimum(rows, first + share)
    if APPENDS:
        # the one program that reads the newest row writes it
        if (first < rows) & (stop == rows):
            newest = start + rows - 1
            new_key = tl.load(new_keys + run * HEAD_DIM + at_d, mask=real_d, other=0.0)
            tl.store(keys + newest * HEAD_DIM + at_d, new_key, mask=real_d)
            new_value = tl.load(new_values + run * VALUE_DIM + at_v, mask=real_v, other=0.0)
            tl.store(values + newest * VALUE_DIM + at_v, new_value, mask=real_v)
        tl.debug_barrier()
    if WIDEN:
        query = query.to(tl.float32)
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    sums = tl.zeros([TILE_V, TILE_Q], tl.float32)
    norm = tl.zeros([TILE_N], tl.float32)
    keys += start * HEAD_DIM
    values += start * VALUE_DIM
    for at in range(first, stop, TILE_N):
        row = at + at_n
        real = row < stop
        key = tl.load(keys + row[:, None] * HEAD_DIM + at_d[None, :], mask=real[:, None] & real_d[None, :], other=0.0)
        value = tl.load(
            values + row[None, :] * VALUE_DIM + at_v[:, None], mask=real[None, :] & real_v[:, None], other=0.0
        )
        if KNOWS_LONGEST:
            length = value.to(tl.float32)
            norm = tl.maximum(norm, tl.sqrt(tl.sum(length * length, 0)))
        top, total, sums = take(key, value, query, real, scale, top, total, sums, PRECISION, WIDEN)
    found = sums / tl.where(total > 0.0, total, 1.0)[None, :]
    place = (run * (programs + tail_splits) + programs + split) * GROUP + at_q
    tl.store(parts + place[None, :] * VALUE_DIM + at_v[:, None], found, mask=real_q[None, :] & real_v[:, None])
    tl.store(parts_lse + place, log_of(total, top), mask=real_q)
    if KNOWS_LONGEST:
        tl.store(longest + run * (splits + tail_splits) + splits + split, tl.max(norm, 0))
