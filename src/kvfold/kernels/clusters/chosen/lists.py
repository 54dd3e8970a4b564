"""Triton: a selection's bits become ordered lists of what is read, per run and without the host.

A run has up to three lists: of clusters whose rows are read (or of single rows), and of clusters of either level that
stand for their rows. Where query heads choose apart, an entry is listed if one of them chose it, with a bit for each
that did, so that it is read once. Spans of a list are written side by side: each program first counts what lies before
its own span, which costs less than a launch more, as bits are few bytes beside rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STRIDES = ["exist_batch", "exist_head", "upper_batch", "upper_head", "sizes_batch", "sizes_head"]
"""What a kernel is not compiled anew for when it changes; alignment of bits matters little."""
_LISTED = ["rows", "clusters", "clusters_upper", "listed", "members_batch", "members_head", *_STRIDES]


@triton.jit
def _word(bits, exist, place, owner, real, stride, GROUP: tl.constexpr, PER_QUERY: tl.constexpr):
    """Which query heads chose entries, a bit each, or all bits where they share the choice; 0 for what is not there."""
    if PER_QUERY:
        word = tl.zeros(place.shape, tl.int32)
        for query in tl.static_range(GROUP):
            word |= tl.load(bits + query * stride + place, mask=real, other=0).to(tl.int32) << query
    else:
        word = -tl.load(bits + place, mask=real, other=0).to(tl.int32)
    there = tl.load(exist + owner, mask=real, other=0).to(tl.int32)
    return tl.where(there != 0, word, 0)


@triton.jit
def _list_span(
    bits,
    exist,
    found,
    words,
    count,
    stride,
    GROUP: tl.constexpr,
    PER_QUERY: tl.constexpr,
    PER_OWNER: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COUNT: tl.constexpr,
):
    """Write one span of the entries ``0`` to ``count``; returns how many are listed up to its end."""
    span = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), TILE) * TILE
    first = tl.minimum(span * share, count)
    stop = tl.minimum(first + share, count)
    before = first * 0
    for at in range(0, first, TILE_COUNT):
        place = at + tl.arange(0, TILE_COUNT)
        word = _word(bits, exist, place, place // PER_OWNER, place < first, stride, GROUP, PER_QUERY)
        before += tl.sum((word != 0).to(tl.int32), 0)
    for at in range(first, stop, TILE):
        place = at + tl.arange(0, TILE)
        word = _word(bits, exist, place, place // PER_OWNER, place < stop, stride, GROUP, PER_QUERY)
        taken = (word != 0).to(tl.int32)
        slot = before + tl.cumsum(taken, 0) - 1
        tl.store(found + slot, place, mask=word != 0)
        if PER_QUERY:
            tl.store(words + slot, word, mask=word != 0)
        before += tl.sum(taken, 0)
    return before


@triton.jit
def _list_members(
    bits,
    exist,
    members,
    sizes,
    found,
    words,
    rows,
    segments,
    stride,
    GROUP: tl.constexpr,
    PER_QUERY: tl.constexpr,
    SEGMENT: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COUNT: tl.constexpr,
):
    """Do the same for rows that say themselves which cluster of their segment they belong to."""
    span = tl.program_id(1)
    share = tl.cdiv(segments, tl.num_programs(1))
    first = tl.minimum(span * share, segments)
    stop = tl.minimum(first + share, segments)
    before = first * 0
    for at in range(0, first * PER, TILE_COUNT):
        place = at + tl.arange(0, TILE_COUNT)
        real = place < first * PER
        word = _word(bits, exist, place, place, real, stride, GROUP, PER_QUERY)
        size = tl.load(sizes + place, mask=real & (word != 0), other=0).to(tl.int32)
        before += tl.sum(size, 0)
    last = tl.minimum(stop * SEGMENT, rows)
    for at in range(first * SEGMENT, last, TILE):
        place = at + tl.arange(0, TILE)
        real = place < last
        # room holds anything; it must not lead out of the clusters of its own segment
        member = tl.minimum(tl.load(members + place, mask=real, other=0).to(tl.int32), PER - 1)
        cluster = place // SEGMENT * PER + member
        word = _word(bits, exist, cluster, cluster, real, stride, GROUP, PER_QUERY)
        taken = (word != 0).to(tl.int32)
        slot = before + tl.cumsum(taken, 0) - 1
        tl.store(found + slot, place, mask=word != 0)
        if PER_QUERY:
            tl.store(words + slot, word, mask=word != 0)
        before += tl.sum(taken, 0)
    return before


@triton.jit(do_not_specialize=_LISTED)
def list_chosen(
    bits,
    lower,
    upper,
    exist,
    exist_upper,
    members,
    sizes,
    found,
    words,
    totals,
    rows,
    clusters,
    clusters_upper,
    listed,
    exist_batch,
    exist_head,
    upper_batch,
    upper_head,
    members_batch,
    members_head,
    sizes_batch,
    sizes_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PER: tl.constexpr,
    FORM: tl.constexpr,
    PER_QUERY: tl.constexpr,
    LOWER_PER_QUERY: tl.constexpr,
    UPPER_PER_QUERY: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COUNT: tl.constexpr,
):
    """List what is read; grid ``(runs, spans, lists)``.

    ``bits`` are chosen clusters or rows, ``[runs, entries]``, or with ``PER_QUERY`` ``[runs, GROUP, entries]``;
    ``lower`` and ``upper`` the clusters of either level that stand for their rows, likewise. What exists, ``members``
    and ``sizes`` may be views with strides. ``FORM`` says what the first list holds, and how it is chosen:
    ``clusters``; ``rows``, one by one; ``members``: rows, by the cluster of its segment that each belongs to.

    The lists of a run lie one behind the other, the first with room for ``listed`` entries: ``found`` takes the
    entries, ``words`` a bit per query head; ``totals`` how long each list is, ``[runs, 3]``.
    """
    run = tl.program_id(0).to(tl.int64)
    row = run // KV_HEADS
    head = run % KV_HEADS
    which = tl.program_id(2)
    exist += row * exist_batch + head * exist_head
    base = run * (listed + clusters + clusters_upper)
    number = tl.program_id(0) * 0
    if which == 0:
        if FORM == "members":
            bits += run * clusters * (GROUP if PER_QUERY else 1)
            members += row * members_batch + head * members_head
            sizes += row * sizes_batch + head * sizes_head
            number = _list_members(
                bits, exist, members, sizes, found + base, words + base, rows, clusters // PER, clusters, GROUP,
                PER_QUERY, SEGMENT, PER, TILE, TILE_COUNT,
            )  # fmt: skip
        elif FORM == "rows":
            bits += run * clusters * SEGMENT
            number = _list_span(
                bits, exist, found + base, words + base, tl.minimum(clusters * SEGMENT, rows), 0, GROUP, False,
                SEGMENT, TILE, TILE_COUNT,
            )  # fmt: skip
        else:
            bits += run * clusters * (GROUP if PER_QUERY else 1)
            number = _list_span(
                bits, exist, found + base, words + base, clusters, clusters, GROUP, PER_QUERY, 1, TILE, TILE_COUNT
            )
    elif which == 1:
        lower += run * clusters * (GROUP if LOWER_PER_QUERY else 1)
        base += listed
        number = _list_span(
            lower, exist, found + base, words + base, clusters, clusters, GROUP, LOWER_PER_QUERY, 1, TILE, TILE_COUNT
        )
    else:
        upper += run * clusters_upper * (GROUP if UPPER_PER_QUERY else 1)
        exist_upper += row * upper_batch + head * upper_head
        base += listed + clusters
        number = _list_span(
            upper, exist_upper, found + base, words + base, clusters_upper, clusters_upper, GROUP, UPPER_PER_QUERY, 1,
            TILE, TILE_COUNT,
        )  # fmt: skip
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(totals + run * 3 + which, number)


@triton.jit
def _count(
    bits,
    exist,
    sizes,
    count,
    stride,
    GROUP: tl.constexpr,
    PER_QUERY: tl.constexpr,
    HAS_SIZES: tl.constexpr,
    TILE_COUNT: tl.constexpr,
):
    total = tl.zeros([TILE_COUNT], tl.int32)
    for at in range(0, count, TILE_COUNT):
        place = at + tl.arange(0, TILE_COUNT)
        word = _word(bits, exist, place, place, place < count, stride, GROUP, PER_QUERY)
        if HAS_SIZES:
            total += tl.load(sizes + place, mask=word != 0, other=0).to(tl.int32)
        else:
            total += (word != 0).to(tl.int32)
    return tl.sum(total.to(tl.int64), 0)


@triton.jit(do_not_specialize=["clusters", "clusters_upper", *_STRIDES])
def count_chosen(
    bits,
    lower,
    upper,
    exist,
    exist_upper,
    sizes,
    counts,
    clusters,
    clusters_upper,
    exist_batch,
    exist_head,
    upper_batch,
    upper_head,
    sizes_batch,
    sizes_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FORM: tl.constexpr,
    PER_QUERY: tl.constexpr,
    LOWER_PER_QUERY: tl.constexpr,
    UPPER_PER_QUERY: tl.constexpr,
    TILE_COUNT: tl.constexpr,
):
    """Count rows and means that are read, ``counts`` int64 ``[2, runs]``; grid ``(runs, 2)``.

    With ``FORM`` of ``sizes``, clusters have as many rows as these say; else see :func:`list_chosen`.
    """
    run = tl.program_id(0).to(tl.int64)
    row = run // KV_HEADS
    head = run % KV_HEADS
    exist += row * exist_batch + head * exist_head
    number = run * 0
    if tl.program_id(1) == 0:
        if FORM == "rows":
            bits += run * clusters * SEGMENT
            total = tl.zeros([TILE_COUNT], tl.int32)
            for at in range(0, clusters * SEGMENT, TILE_COUNT):
                place = at + tl.arange(0, TILE_COUNT)
                total += tl.load(bits + place, mask=place < clusters * SEGMENT, other=0).to(tl.int32)
            number = tl.sum(total.to(tl.int64), 0)
        else:
            bits += run * clusters * (GROUP if PER_QUERY else 1)
            sizes += row * sizes_batch + head * sizes_head
            number = _count(bits, exist, sizes, clusters, clusters, GROUP, PER_QUERY, FORM == "sizes", TILE_COUNT)
            if FORM != "sizes":
                number = number * SEGMENT
        tl.store(counts + run, number)
    else:
        lower += run * clusters * (GROUP if LOWER_PER_QUERY else 1)
        number = _count(lower, exist, exist, clusters, clusters, GROUP, LOWER_PER_QUERY, False, TILE_COUNT)
        if clusters_upper > 0:
            upper += run * clusters_upper * (GROUP if UPPER_PER_QUERY else 1)
            exist_upper += row * upper_batch + head * upper_head
            number += _count(
                upper, exist_upper, exist_upper, clusters_upper, clusters_upper, GROUP, UPPER_PER_QUERY, False,
                TILE_COUNT,
            )  # fmt: skip
        tl.store(counts + tl.num_programs(0) + run, number)
