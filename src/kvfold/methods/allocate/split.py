"""Split a whole number by weights within bounds."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=4096)
def split(total: int, weights: tuple[float, ...], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    """Share ``total`` out in proportion to weights; what a bound takes from one part goes to the others.

    Args:
        total: What is shared out; taken into ``[sum(low), sum(high)]`` first.
        weights: One per part, at least 0; parts of weight 0 get no more than ``low`` until the others are
            full.
        low: Least of each part.
        high: Most of each part, at least ``low``.

    Returns:
        Whole numbers that sum to ``total``; what rounding leaves goes to the largest fractions, and
        among equal ones to earlier parts.
    """
    total = min(max(total, sum(low)), sum(high))
    tiny = max(weights, default=0.0) * 1e-9 or 1.0
    weights = tuple(max(weight, tiny) for weight in weights)
    parts = tuple(zip(weights, low, high, strict=True))

    def shares(level: float) -> list[float]:
        return [min(max(level * weight, least), most) for weight, least, most in parts]

    bottom, top = 0.0, (max(high, default=0) + 1) / min(weights, default=1.0)
    while bottom < (middle := (bottom + top) / 2) < top:
        bottom, top = (middle, top) if sum(shares(middle)) <= total else (bottom, middle)
    wanted = shares(bottom)
    found = [int(share) for share in wanted]
    order = sorted(range(len(found)), key=lambda part: (found[part] - wanted[part], part))
    while (rest := total - sum(found)) > 0:
        for part in [part for part in order if found[part] < high[part]][:rest]:
            found[part] += 1
    return tuple(found)


def rows_held(scores: Tensor) -> Tensor:
    """Mark the rows that a head has: those whose score is above ``-inf``."""
    return scores > -torch.inf


def split_over_heads(scores: Tensor, protected: Tensor, keep: int, weights: tuple[float, ...]) -> Tensor:
    """Share ``keep`` rows per head out by weights, within what each head has and must keep.

    Args:
        scores: ``[batch, kv_heads, rows]``, ``-inf`` where a head has no such row.
        protected: Same shape, bool: rows that always stay.
        keep: Mean rows per head.
        weights: One per head.

    Returns:
        ``[batch, kv_heads]`` int64.
    """
    held = rows_held(scores)
    most = held.sum(-1)
    least = (protected & held).sum(-1)
    total = keep * scores.shape[1]
    counts = [
        split(total, weights, tuple(low), tuple(high)) for low, high in zip(least.tolist(), most.tolist(), strict=True)
    ]
    return torch.tensor(counts, dtype=torch.int64, device=scores.device).view(most.shape)
