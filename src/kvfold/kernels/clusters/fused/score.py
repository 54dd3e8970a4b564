"""Triton: mass and reach of every cluster as the query sees it, and attention over the tail, in one launch.

Programs of one run share it: the first ones read mean keys and reaches, once for all query heads of a KV head; the last
ones append the newest row and attend to the rows that no cluster covers. Both give partial sums that the choice needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import log_of
from kvfold.kernels.clusters.fused.maths import NOTHING, clusters_of, log_sums, piece_of, take


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
    FILLS: tl.constexpr,
    PACKS: tl.constexpr,
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
            HEAD_DIM, TILE_Q, TILE_C, TILE_D, FORM, HAS_STEPS, FILLS, PACKS, KNOWS_LONGEST, PRECISION, WIDEN,
        )  # fmt: skip
    else:
        _read_tail(
            query, new_keys, new_values, keys, values, starts, lengths, parts, parts_lse, longest, run,
            split - splits, splits, tail_splits, programs, count, scale, at_q, at_d, real_q, real_d, GROUP, SEGMENT,
            HEAD_DIM, VALUE_DIM, TILE_Q, TILE_N, TILE_V, APPENDS, KNOWS_LONGEST, PRECISION, WIDEN,
        )  # fmt: skip


@triton.jit
def _sum_up(logits, weights, top, total):
    """Take ``weights * e^logits`` up place by place, so that threads need not meet before the end."""
    # of the two factors, that of the larger logit is 1
    fade = tl.exp(-tl.abs(logits - top))
    over = logits > top
    total = tl.where(over, total, weights) * fade + tl.where(over, weights, total)
    return tl.maximum(top, logits), total


@triton.jit
def _score_clusters(
    query, mean_keys, mean_step, reach, reach_step, value_norm, log_mass, deviation, part_lse, longest, run, runs,
    split, splits, tail_splits, count, room, scale, log_size, at_q, at_d, real_q, real_d, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_C: tl.constexpr, TILE_D: tl.constexpr, FORM: tl.constexpr,
    HAS_STEPS: tl.constexpr, FILLS: tl.constexpr, PACKS: tl.constexpr, KNOWS_LONGEST: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    at_c = tl.arange(0, TILE_C)
    share = piece_of(count, splits, TILE_C)
    first = split * share
    stop = tl.minimum(count, first + share)
    # bits of a byte are a number below all normal ones of half precision: multiplied as such, which is exact, they
    # need no conversion, of which devices make few at a time
    AS_BITS: tl.constexpr = FORM == "steps" and query.dtype != tl.float32 and not WIDEN
    HALF: tl.constexpr = query.dtype
    size = tl.abs(query)
    bit = scale
    if AS_BITS:
        if query.dtype == tl.bfloat16:
            # products of numbers near 2^-133 would be lost; as far as 2^63 nothing is
            size = (size.to(tl.float32) * 1.8446744073709552e19).to(HALF)
            bit = scale * 5.902958103587057e20
        else:
            bit = scale * 16777216.0
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
    mean_keys += run * room * HEAD_DIM
    mean_step += run * room
    reach += run * room if FORM == "radius" else run * room * HEAD_DIM
    reach_step += run * room
    value_norm += run * room
    log_mass += run * room * GROUP
    deviation += run * room * GROUP
    # what differs between threads does not change from tile to tile
    inside = at_c[:, None] * HEAD_DIM + at_d[None, :]
    # a tile that would reach beyond the room starts earlier, so that loads need no mask: what others score is left out
    last = tl.maximum(room - TILE_C, 0)
    within = at_c < room
    # what is not multiplied is loaded a tile ahead by hand: compilers let only what is multiplied be in flight
    begins = tl.minimum(first, last)
    key_unit = _read(mean_step + begins, at_c, within, FILLS) if HAS_STEPS else scale
    unit = _read(reach_step + begins, at_c, within, FILLS) if FORM != "plain" else scale
    for at in range(first, stop, TILE_C):
        base = tl.minimum(at, last)
        later = tl.minimum(at + TILE_C, last)
        real = (at_c >= at - base) & (at_c < stop - base)
        kept = real[:, None] & real_q[None, :]
        if FILLS and TILE_D == HEAD_DIM:
            code = tl.load(mean_keys + base * HEAD_DIM + inside)
        else:
            both = within[:, None] & real_d[None, :]
            code = tl.load(mean_keys + base * HEAD_DIM + inside, mask=both, other=0)
        logits = tl.dot(code.to(query.dtype), query, input_precision=PRECISION) * scale
        if HAS_STEPS:
            logits = logits * key_unit[:, None]
            key_unit = _read(mean_step + later, at_c, within, FILLS)
        logits = logits + log_size
        if FORM == "radius":
            off = span[None, :] * unit[:, None].to(tl.float32)
        else:
            if FILLS and TILE_D == HEAD_DIM:
                box = tl.load(reach + base * HEAD_DIM + inside)
            else:
                both = within[:, None] & real_d[None, :]
                box = tl.load(reach + base * HEAD_DIM + inside, mask=both, other=0)
            if AS_BITS and PACKS:
                # two bytes become two such numbers by one permutation
                box = tl.inline_asm_elementwise(
                    "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
                    "=r,=r,r",
                    [box],
                    dtype=size.dtype,
                    is_pure=True,
                    pack=4,
                )
            elif AS_BITS:
                box = box.to(tl.uint16).to(HALF, bitcast=True)
            off = tl.dot(box.to(size.dtype), size, input_precision=PRECISION) * bit
            if FORM == "steps":
                off = off * unit[:, None]
        if FORM != "plain":
            unit = _read(reach_step + later, at_c, within, FILLS)
        place = at_c[:, None] * GROUP + at_q[None, :]
        tl.store(log_mass + base * GROUP + place, logits, mask=kept)
        tl.store(deviation + base * GROUP + place, off, mask=kept)
        logits = tl.where(kept, logits, float("-inf"))
        off = tl.where(kept, off, 0.0)
        top, total = _sum_up(logits, 1.0, top, total)
        # cosh(off) is e^off times this
        grown_top, grown_total = _sum_up(logits + off, 0.5 + 0.5 * tl.exp(-2.0 * off), grown_top, grown_total)
        if KNOWS_LONGEST:
            norm = tl.maximum(norm, tl.load(value_norm + base + at_c, mask=real, other=0.0).to(tl.float32))
    place = (run * splits + split) * GROUP + at_q
    all_mass, all_grown = log_sums(top, total, grown_top, grown_total)
    tl.store(part_lse + place, all_mass, mask=real_q)
    tl.store(part_lse + runs * splits * GROUP + place, all_grown, mask=real_q)
    if KNOWS_LONGEST:
        tl.store(longest + run * (splits + tail_splits) + split, tl.max(norm, 0))


@triton.jit
def _read(array, at_c, within, FILLS: tl.constexpr):
    """Read a number per cluster of a tile."""
    return tl.load(array + at_c) if FILLS else tl.load(array + at_c, mask=within, other=0.0)


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
    total = tl.zeros([TILE_N, TILE_Q], tl.float32)
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
    whole = tl.sum(total, 0)
    found = sums / tl.where(whole > 0.0, whole, 1.0)[None, :]
    place = (run * (programs + tail_splits) + programs + split) * GROUP + at_q
    tl.store(parts + place[None, :] * VALUE_DIM + at_v[:, None], found, mask=real_q[None, :] & real_v[:, None])
    tl.store(parts_lse + place, log_of(whole, top), mask=real_q)
    if KNOWS_LONGEST:
        tl.store(longest + run * (splits + tail_splits) + splits + split, tl.max(norm, 0))
