"""Triton: logs of sums, and the one way in which kernels join parts of attention by them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(log):
    """Return 0 where there is nothing, so that nothing becomes NaN when it is subtracted."""
    return tl.where(log == float("-inf"), 0.0, log)


@triton.jit
def log_of(total, largest):
    """Log of a sum of ``e^(x - largest)``; ``-inf`` for none."""
    seen = total > 0.0
    return tl.where(seen, largest + tl.log(tl.where(seen, total, 1.0)), float("-inf"))


@triton.jit
def log_add(first, second):
    """Log of ``e^first + e^second``."""
    top = tl.maximum(first, second)
    safe = finite(top)
    return log_of(tl.exp(first - safe) + tl.exp(second - safe), top)


@triton.jit
def log_sum(logs):
    """Log of the sum of ``e^x`` over the first axis."""
    top = tl.max(logs, 0)
    return log_of(tl.sum(tl.exp(logs - finite(top)[None, :]), 0), top)


@triton.jit
def join(parts, parts_lse, first, stop, queries, query, top, total, sums, at_s, at_v, VALUE_DIM: tl.constexpr):
    """Take parts ``first`` to ``stop`` of one query up; each part holds all queries, one after the other.

    ``top``, ``total`` and ``sums`` are the largest log so far, and total and weighted sum relative to it: minus
    infinity and zeros for none. ``at_s`` says how many parts are taken at once.
    """
    real_v = at_v < VALUE_DIM
    for at in range(first, stop, at_s.shape[0]):
        place = (at + at_s).to(tl.int64) * queries + query
        real = at + at_s < stop
        lses = tl.load(parts_lse + place, mask=real, other=float("-inf"))
        part = tl.load(
            parts + place[:, None] * VALUE_DIM + at_v[None, :], mask=real[:, None] & real_v[None, :], other=0.0
        )
        now = tl.maximum(top, tl.max(lses, 0))
        safe = finite(now)
        weights = tl.exp(lses - safe)
        fade = tl.exp(top - safe)
        sums = sums * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = now
    return top, total, sums
