"""Ranks with ties, and Spearman's correlation."""

from __future__ import annotations

import torch
from torch import Tensor


def average_ranks(values: Tensor) -> Tensor:
    """Rank the last axis from 1; equal values share the mean of their ranks.

    Args:
        values: ``[..., n]``.

    Returns:
        Same shape, float64.
    """
    ordered = values.sort(dim=-1).values.contiguous()
    values = values.contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return (below + upto + 1).double() / 2


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation along the last axis; 0 where one side is constant.

    Args:
        first: ``[..., n]``.
        second: Same shape.

    Returns:
        ``[...]`` float64.
    """
    ranks = [average_ranks(one) for one in (first, second)]
    a, b = (rank - rank.mean(-1, keepdim=True) for rank in ranks)
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(scale > 0, (a * b).sum(-1) / scale.clamp_min(1e-300), 0.0)


def percentile(scores: Tensor, index: int) -> Tensor:
    """Share of the other entries of the last axis that score below one of them, ties half.

    Args:
        scores: ``[..., n]`` with n of at least 2.
        index: Which entry.

    Returns:
        ``[...]`` in [0, 1], float64.
    """
    one = scores[..., index : index + 1]
    below = (scores < one).sum(-1) + ((scores == one).sum(-1) - 1) / 2
    return below.double() / (scores.shape[-1] - 1)
