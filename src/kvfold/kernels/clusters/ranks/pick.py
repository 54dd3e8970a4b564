"""Triton: the largest scores of a row, and the fewest entries that hold a share of its mass, without sorting.

A threshold is found bit by bit: which of the keys, whole numbers in the order of the scores, is the last that is
chosen. A row stays in registers; of entries that tie at the threshold the earlier ones are chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.attention.parts import finite


@triton.jit
def _key(score):
    """Whole numbers in the order of scores; 0 and -0 are one number."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def largest(scores, counts, chosen, width, rows_per, TILE: tl.constexpr):
    """Choose so many entries of each row; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    real = at < width
    score = tl.load(scores + row * width + at, mask=real, other=float("-inf"))
    # places below a number that is not whole
    wanted = tl.minimum(tl.ceil(tl.load(counts + row // rows_per).to(tl.float32)), TILE * 1.0).to(tl.int32)
    key = _key(score)
    enough = tl.sum((key >= 0).to(tl.int32), 0) >= wanted
    bound = tl.where(enough, 0, -2147483648)
    for bit in tl.static_range(31):
        higher = bound + (1 << (30 - bit))
        enough = tl.sum((key >= higher).to(tl.int32), 0) >= wanted
        bound = tl.where(enough, higher, bound)
    above = key > bound
    tie = (key == bound).to(tl.int32)
    place = tl.cumsum(tie, 0)
    missing = wanted - tl.sum(above.to(tl.int32), 0)
    found = above.to(tl.int32) + tie * (place <= missing).to(tl.int32)
    found = tl.where(score > float("-inf"), found, 0) * (wanted > 0).to(tl.int32)
    tl.store(chosen + row * width + at, found.to(tl.uint8), mask=real)


@triton.jit
def holding(logs, shares, chosen, width, rows_per, TILE: tl.constexpr):
    """Choose the fewest entries of each row that hold a share of its mass; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    real = at < width
    log = tl.load(logs + row * width + at, mask=real, other=float("-inf"))
    share = tl.load(shares + row // rows_per).to(tl.float32)
    mass = tl.exp(log - finite(tl.max(log, 0)))
    wanted = share * tl.sum(mass, 0)
    key = _key(log)
    enough = tl.sum(tl.where(key >= 0, mass, 0.0), 0) >= wanted
    bound = tl.where(enough, 0, -2147483648)
    for bit in tl.static_range(31):
        higher = bound + (1 << (30 - bit))
        enough = tl.sum(tl.where(key >= higher, mass, 0.0), 0) >= wanted
        bound = tl.where(enough, higher, bound)
    above = key > bound
    tie = (key == bound).to(tl.int32)
    earlier = (tl.cumsum(tie, 0) - 1).to(tl.float32)
    before = tl.sum(tl.where(above, mass, 0.0), 0) + earlier * mass
    found = above.to(tl.int32) + tie * (before < wanted).to(tl.int32)
    found = tl.where(share >= 1.0, 1, found)
    found = tl.where(log > float("-inf"), found, 0)
    tl.store(chosen + row * width + at, found.to(tl.uint8), mask=real)
