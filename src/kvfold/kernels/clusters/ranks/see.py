"""Triton: what summaries say of clusters for all query heads of a KV head, and the risk of representing them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite, log_of
from kvfold.kernels.clusters.fused.maths import lost

_STRIDES = ["width", "entry_batch", "entry_head", "exist_batch", "exist_head"]
"""What a kernel is not compiled anew for when it changes."""


@triton.jit
def _tile(matrix, entry, real, at_d, HEAD_DIM: tl.constexpr):
    return tl.load(
        matrix + entry[None, :] * HEAD_DIM + at_d[:, None], mask=real[None, :] & (at_d < HEAD_DIM)[:, None], other=0
    )


@triton.jit
def _times(weights, matrix, PARTS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Product in float32.

    ``PARTS``: of float32 and of what bfloat16 holds, as three products whose sum loses no digit; ``WIDE``: of factors
    that share no type otherwise, or that an interpreter cannot multiply.
    """
    if PARTS:
        high = weights.to(tl.bfloat16)
        left = weights - high.to(tl.float32)
        middle = left.to(tl.bfloat16)
        low = (left - middle.to(tl.float32)).to(tl.bfloat16)
        found = _product(high, matrix, WIDE, PRECISION)
        found += _product(middle, matrix, WIDE, PRECISION)
        found += _product(low, matrix, WIDE, PRECISION)
    else:
        found = _product(weights, matrix, WIDE, PRECISION)
    return found


@triton.jit
def _product(weights, matrix, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    if WIDE:
        found = tl.dot(weights.to(tl.float32), matrix.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(weights, matrix.to(weights.dtype), input_precision=PRECISION)
    return found


@triton.jit
def _query(q, run, at_q, at_d, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    return tl.load(
        q + (run * GROUP + at_q[:, None]) * HEAD_DIM + at_d[None, :],
        mask=(at_q < GROUP)[:, None] & (at_d < HEAD_DIM)[None, :],
        other=0.0,
    )


@triton.jit(do_not_specialize=_STRIDES)
def bound_pages(
    q,
    high,
    low,
    exists,
    bounds,
    width,
    entry_batch,
    entry_head,
    exist_batch,
    exist_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over dimensions of the larger of ``q high`` and ``q low``; grid ``(runs, tiles)``."""
    run = tl.program_id(0).to(tl.int64)
    at_q = tl.arange(0, TILE_Q)
    at_d = tl.arange(0, TILE_D)
    entry = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    query = _query(q, run, at_q, at_d, GROUP, HEAD_DIM)
    there = tl.load(
        exists + run // KV_HEADS * exist_batch + run % KV_HEADS * exist_head + entry, mask=entry < width, other=0
    )
    real = there.to(tl.int32) != 0
    first = (run // KV_HEADS * entry_batch + run % KV_HEADS * entry_head) * HEAD_DIM
    # signs in float32, as half precision has no maximum of its own; casting back loses nothing
    wide = query.to(tl.float32)
    up = tl.maximum(wide, 0.0).to(query.dtype)
    down = tl.minimum(wide, 0.0).to(query.dtype)
    found = _times(up, _tile(high + first, entry, real, at_d, HEAD_DIM), PARTS, WIDE, PRECISION)
    found += _times(down, _tile(low + first, entry, real, at_d, HEAD_DIM), PARTS, WIDE, PRECISION)
    found = tl.where(real[None, :], found, float("-inf"))
    place = (run * GROUP + at_q[:, None]) * width + entry[None, :]
    tl.store(bounds + place, found, mask=(at_q < GROUP)[:, None] & (entry < width)[None, :])


@triton.jit(do_not_specialize=_STRIDES)
def see(
    q,
    mean_keys,
    mean_key_steps,
    high,
    low,
    step,
    sizes,
    key_shift,
    value_shift,
    value_norm,
    value_radius,
    exists,
    by_query,
    by_cluster,
    scale,
    log_size,
    width,
    entry_batch,
    entry_head,
    exist_batch,
    exist_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    FORM: tl.constexpr,
    HAS_STEP: tl.constexpr,
    HAS_SIZES: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_RADIUS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS_REACH: tl.constexpr,
    WIDE_REACH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Estimate clusters; grid ``(runs, tiles)``.

    ``by_query`` takes ``[4, runs, GROUP, width]``: log mass, then unless ``FORM`` is ``mass`` the reach above and below
    and the shift of the keys; ``by_cluster`` takes ``[3, runs, width]``: shift, norm and reach of the values.
    """
    run = tl.program_id(0).to(tl.int64)
    row = run // KV_HEADS
    head = run % KV_HEADS
    runs = tl.num_programs(0)
    at_q = tl.arange(0, TILE_Q)
    at_d = tl.arange(0, TILE_D)
    entry = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    query = _query(q, run, at_q, at_d, GROUP, HEAD_DIM)
    there = tl.load(exists + row * exist_batch + head * exist_head + entry, mask=entry < width, other=0)
    real = there.to(tl.int32) != 0
    first = row * entry_batch + head * entry_head
    logits = (
        _times(query, _tile(mean_keys + first * HEAD_DIM, entry, real, at_d, HEAD_DIM), PARTS, WIDE, PRECISION) * scale
    )
    if HAS_STEPS:
        logits = logits * tl.load(mean_key_steps + first + entry, mask=real, other=0.0).to(tl.float32)[None, :]
    if HAS_SIZES:
        size = tl.load(sizes + first + entry, mask=real, other=1).to(tl.float32)
        logits += tl.where(size > 0.0, tl.log(tl.maximum(size, 1.0)), float("-inf"))[None, :]
    else:
        logits += log_size
    inside = (at_q < GROUP)[:, None] & (entry < width)[None, :]
    place = (run * GROUP + at_q[:, None]) * width + entry[None, :]
    plane = runs * GROUP * width
    tl.store(by_query + place, tl.where(real[None, :], logits, float("-inf")), mask=inside)
    if FORM != "mass":
        wide = query.to(tl.float32)
        length = tl.sqrt(tl.sum(wide * wide, 1)) * scale
        if FORM == "radius":
            far = tl.load(high + first + entry, mask=real, other=0.0).to(tl.float32)
            above = length[:, None] * far[None, :]
            below = above
        else:
            factor = tl.zeros([TILE_C], tl.float32) + scale
            if HAS_STEP:
                factor = tl.load(step + first + entry, mask=real, other=0.0).to(tl.float32) * scale
            reach = _tile(high + first * HEAD_DIM, entry, real, at_d, HEAD_DIM)
            if FORM == "box":
                above = (
                    _times(tl.abs(wide).to(query.dtype), reach, PARTS_REACH, WIDE_REACH, PRECISION) * factor[None, :]
                )
                below = above
            else:
                up = tl.maximum(wide, 0.0).to(query.dtype)
                down = tl.maximum(-wide, 0.0).to(query.dtype)
                other = _tile(low + first * HEAD_DIM, entry, real, at_d, HEAD_DIM)
                above = _times(up, reach, PARTS_REACH, WIDE_REACH, PRECISION) + _times(
                    down, other, PARTS_REACH, WIDE_REACH, PRECISION
                )
                below = _times(up, other, PARTS_REACH, WIDE_REACH, PRECISION) + _times(
                    down, reach, PARTS_REACH, WIDE_REACH, PRECISION
                )
                above = above * factor[None, :]
                below = below * factor[None, :]
        shift = tl.load(key_shift + first + entry, mask=real, other=0.0).to(tl.float32)
        tl.store(by_query + plane + place, above, mask=inside)
        tl.store(by_query + 2 * plane + place, below, mask=inside)
        tl.store(by_query + 3 * plane + place, length[:, None] * shift[None, :], mask=inside)
        own = run * width + entry
        lost = tl.load(value_shift + first + entry, mask=real, other=0.0).to(tl.float32)
        norm = tl.load(value_norm + first + entry, mask=real, other=0.0).to(tl.float32)
        near = norm
        if HAS_RADIUS:
            near = tl.minimum(norm, tl.load(value_radius + first + entry, mask=real, other=0.0).to(tl.float32))
        tl.store(by_cluster + own, lost, mask=entry < width)
        tl.store(by_cluster + runs * width + own, norm, mask=entry < width)
        tl.store(by_cluster + 2 * runs * width + own, near, mask=entry < width)


@triton.jit
def _growth(above, below):
    """Log of the largest mean of ``e^x`` over numbers of mean zero within ``[-below, above]``."""
    span = above + below
    safe = tl.maximum(span, 0.1)
    chord = above + tl.log(tl.maximum((below + above * tl.exp(tl.maximum(-safe, -80.0))) / safe, 1e-37))
    # below this width the chord's own formula has lost too many digits
    return tl.where(span < 0.1, span * span / 8, tl.maximum(chord, 0.0))


@triton.jit
def _load(log_mass, above, below, key_shift, at, real, IS_SOUND: tl.constexpr):
    mass = tl.load(log_mass + at, mask=real, other=float("-inf"))
    up = tl.load(above + at, mask=real, other=0.0)
    down = tl.load(below + at, mask=real, other=0.0)
    growth = _growth(up, down)
    if IS_SOUND:
        # the mean of the logits may be off by the rounding of the stored mean
        shift = tl.load(key_shift + at, mask=real, other=0.0)
        growth = tl.minimum(up, shift + _growth(up + shift, down + shift))
    return mass, up + down, growth


@triton.jit
def _take(logs, top, total):
    now = tl.maximum(top, tl.max(logs, 0))
    return now, total * tl.exp(top - finite(now)) + tl.sum(tl.exp(logs - finite(now)), 0)


@triton.jit(do_not_specialize=["width"])
def risk(
    log_mass,
    above,
    below,
    key_shift,
    rest_lse,
    represented,
    share,
    risks,
    width,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    IS_SOUND: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    HAS_SHARE: tl.constexpr,
):
    """Risk of each cluster as one query head sees it; grid ``(runs * GROUP,)``."""
    row = tl.program_id(0).to(tl.int64)
    run = row // GROUP
    base = row * width
    rest = tl.load(rest_lse + row).to(tl.float32)
    top = rest
    total = tl.where(rest > float("-inf"), 1.0, 0.0)
    grown_top = top
    grown_total = total
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        real = at < width
        mass, _, growth = _load(log_mass, above, below, key_shift, base + at, real, IS_SOUND)
        top, total = _take(mass, top, total)
        if HAS_CHOICE:
            # what is read exactly does not grow
            growth = tl.where(
                tl.load(represented + run * width + at, mask=real, other=0).to(tl.int32) != 0, growth, 0.0
            )
        grown_top, grown_total = _take(mass + growth, grown_top, grown_total)
    least = finite(log_of(total, top))
    largest = finite(log_of(grown_total, grown_top))
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        real = at < width
        mass, span, growth = _load(log_mass, above, below, key_shift, base + at, real, IS_SOUND)
        fade = tl.exp(-0.5 * span)
        tilt = tl.where(span < 0.02, 0.25 * span, (1.0 - fade) / (1.0 + fade))
        if HAS_SHARE:
            tilt = tilt * tl.load(share + run * width + at, mask=real, other=0.0)
        found = 2.0 * (tl.exp(mass + growth - largest) * lost(growth) + tl.exp(mass - least) * tilt)
        tl.store(risks + base + at, found, mask=real)
