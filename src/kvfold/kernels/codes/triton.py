"""Triton: logits of rows from their words, and the choice of rows with what it leaves of each cluster."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite, log_add, log_of, log_sum
from kvfold.kernels.clusters.fused.maths import log_growth, lost, tilt

_STRIDES = ["clusters", "splits", "word_batch", "word_head"]


@triton.jit
def _deviation(word, far):
    """How far the true logit of a row lies from what its word says; the level stands in the highest bits."""
    level = ((word >> 28) & 15).to(tl.float32)
    return far * tl.exp2(-0.5 * level)


@triton.jit
def _take(logs, top, total):
    now = tl.maximum(top, tl.max(logs, 1))
    fade = tl.exp(top - finite(now))
    return now, total * fade + tl.sum(tl.exp(logs - finite(now)[:, None]), 1)


@triton.jit(do_not_specialize=_STRIDES)
def score(
    q,
    words,
    weights,
    longest,
    centres,
    logits,
    part_lse,
    scale,
    clusters,
    splits,
    word_batch,
    word_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODED: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Estimate logits, and sum masses as they are and as they may be; grid ``(runs, splits)``.

    ``centres`` holds the logits of the centres, ``-inf`` where there is no cluster, ``[runs, GROUP, clusters]``.
    """
    run = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    rows = clusters * SIZE
    at_q = tl.arange(0, TILE_Q)
    at_d = tl.arange(0, TILE_D)
    real_q = at_q < GROUP
    query = tl.load(
        q + (run * GROUP + at_q[:, None]) * HEAD_DIM + at_d[None, :],
        mask=real_q[:, None] & (at_d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    far = tl.load(longest + run).to(tl.float32) * tl.abs(scale)
    words += (run // KV_HEADS * word_batch + run % KV_HEADS * word_head) * SIZE
    share = tl.cdiv(tl.cdiv(rows, splits), TILE_N) * TILE_N
    first = tl.minimum(split * share, rows)
    stop = tl.minimum(first + share, rows)
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    grown_top = tl.full([TILE_Q], float("-inf"), tl.float32)
    grown_total = tl.zeros([TILE_Q], tl.float32)
    for at in range(first, stop, TILE_N):
        row = at + tl.arange(0, TILE_N)
        real = row < stop
        both = real_q[:, None] & real[None, :]
        word = tl.load(words + row, mask=real, other=0)
        found = tl.load(
            centres + (run * GROUP + at_q[:, None]) * clusters + (row // SIZE)[None, :], mask=both, other=float("-inf")
        )
        for place in tl.static_range(CODED):
            along = tl.load(weights + (run * HEAD_DIM + at_d) * CODED + place, mask=at_d < HEAD_DIM, other=0.0).to(
                tl.float32
            )
            lean = tl.sum(query * along[None, :], 1) * scale
            # the middle of 16 even steps around 0
            found += lean[:, None] * (((word >> (4 * place)) & 15).to(tl.float32) - 7.5)[None, :]
        tl.store(logits + (run * GROUP + at_q[:, None]) * rows + row[None, :], found, mask=both)
        top, total = _take(found, top, total)
        grown = found + log_growth(_deviation(word, far))[None, :]
        grown_top, grown_total = _take(grown, grown_top, grown_total)
    place = (run * splits + split) * GROUP + at_q
    tl.store(part_lse + place, log_of(total, top), mask=real_q)
    tl.store(part_lse + tl.num_programs(0) * splits * GROUP + place, log_of(grown_total, grown_top), mask=real_q)


@triton.jit(do_not_specialize=_STRIDES)
def choose(
    words,
    longest,
    logits,
    part_lse,
    rest_lse,
    exists,
    amounts,
    groups,
    chosen,
    whole,
    stands,
    left,
    scale,
    clusters,
    splits,
    word_batch,
    word_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEP: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Choose rows of some clusters; grid ``(runs, tiles)``.

    With ``STEP`` of ``above``: those whose risk is larger than a threshold; ``risk``: none, their risks go to
    ``groups``, as so many rows together have them; ``given``: those of the groups that are marked there.
    """
    run = tl.program_id(0).to(tl.int64)
    rows = clusters * SIZE
    at_q = tl.arange(0, TILE_Q)
    real_q = at_q < GROUP
    cluster = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    row = tl.program_id(1) * TILE_K * SIZE + tl.arange(0, TILE_K * SIZE)
    group = tl.program_id(1) * TILE_K * (SIZE // TOGETHER) + tl.arange(0, TILE_K * (SIZE // TOGETHER))
    real = row < rows
    both = real_q[:, None] & real[None, :]
    found = tl.load(logits + (run * GROUP + at_q[:, None]) * rows + row[None, :], mask=both, other=float("-inf"))
    there = tl.load(exists + run * clusters + cluster, mask=cluster < clusters, other=0).to(tl.int32)
    own_groups = groups + run * (rows // TOGETHER)
    inside = group < rows // TOGETHER
    if STEP == "given":
        picked = tl.load(own_groups + group, mask=inside, other=0).to(tl.int32)
    else:
        at_s = tl.arange(0, TILE_S)
        place = (run * splits + at_s[:, None]) * GROUP + at_q[None, :]
        known = (at_s < splits)[:, None] & real_q[None, :]
        rest = tl.load(rest_lse + run * GROUP + at_q, mask=real_q, other=float("-inf")).to(tl.float32)
        mass = log_sum(tl.load(part_lse + place, mask=known, other=float("-inf")))
        grown = log_sum(
            tl.load(part_lse + tl.num_programs(0) * splits * GROUP + place, mask=known, other=float("-inf"))
        )
        mass = finite(log_add(mass, rest))
        grown = finite(log_add(grown, rest))
        words += (run // KV_HEADS * word_batch + run % KV_HEADS * word_head) * SIZE
        far = tl.load(longest + run).to(tl.float32) * tl.abs(scale)
        deviation = _deviation(tl.load(words + row, mask=real, other=0), far)
        growth = log_growth(deviation)
        risk = tl.exp(found + growth[None, :] - grown[:, None]) * lost(growth)[None, :]
        risk = 2.0 * (risk + tl.exp(found - mass[:, None]) * tilt(deviation)[None, :])
        risk = tl.max(tl.where(both, risk, 0.0), 0)
        risk = tl.max(tl.reshape(risk, [TILE_K * (SIZE // TOGETHER), TOGETHER]), 1)
        # rows of a group belong to one cluster
        exist = tl.broadcast_to(there[:, None], [TILE_K, SIZE // TOGETHER])
        exist = tl.reshape(exist, [TILE_K * (SIZE // TOGETHER)])
        if STEP == "risk":
            tl.store(own_groups + group, tl.where(exist != 0, risk, float("-inf")), mask=inside)
        amount = tl.load(amounts + run // KV_HEADS).to(tl.float32)
        picked = (risk > tl.where(amount > 0.0, amount, -1.0)).to(tl.int32)
    if STEP != "risk":
        spread = tl.broadcast_to(picked[:, None], [TILE_K * (SIZE // TOGETHER), TOGETHER])
        read = tl.reshape(spread, [TILE_K, SIZE]) * there[:, None]
        flat = tl.reshape(read, [TILE_K * SIZE])
        tl.store(chosen + run * rows + row, flat.to(tl.uint8), mask=real)
        every = tl.min(read, 1)
        tl.store(whole + run * clusters + cluster, every.to(tl.uint8), mask=cluster < clusters)
        tl.store(stands + run * clusters + cluster, (there * (1 - every)).to(tl.uint8), mask=cluster < clusters)
        unread = tl.reshape(tl.where((flat == 0)[None, :], found, float("-inf")), [TILE_Q, TILE_K, SIZE])
        largest = tl.max(unread, 2)
        total = tl.sum(tl.exp(unread - finite(largest)[:, :, None]), 2)
        tl.store(
            left + (run * GROUP + at_q[:, None]) * clusters + cluster[None, :],
            log_of(total, largest),
            mask=real_q[:, None] & (cluster < clusters)[None, :],
        )
