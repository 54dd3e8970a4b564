"""Choices of single rows in fixed shapes, and what is left of their clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.clusters.choose import largest
from kvfold.kernels.clusters.logs import log_sum


def choose_rows(
    risk: Tensor, exists: Tensor, group: int, *, above: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """Choose rows, so many consecutive ones together.

    Args:
        risk: Of each row, at least 0, ``[batch, kv_heads, rows]``.
        exists: Which rows are there, bool, same shape.
        group: Consecutive rows that are chosen together, by the largest risk among them; divides their number.
        above: If given, choose what has a larger risk; all, where it is 0. Broadcasts to ``[batch, kv_heads, 1]``.
        count: If given, choose at most so many rows, the riskiest first; same form.

    Returns:
        Bool, ``[batch, kv_heads, rows]``.
    """
    groups = risk.masked_fill(~exists, -torch.inf).view(*risk.shape[:2], risk.shape[-1] // group, group).amax(-1)
    chosen = torch.ones_like(groups, dtype=torch.bool)
    if above is not None:
        chosen = chosen & ((groups > above) | (above <= 0))
    if count is not None:
        chosen = chosen & largest(groups, torch.floor(count / group))
    return chosen.repeat_interleave(group, -1) & exists


def left_over(logits: Tensor, chosen: Tensor, size: int) -> Tensor:
    """Log of the mass of the rows of each cluster that are not read.

    Args:
        logits: As estimated, ``-inf`` for a row that is not there, ``[batch, kv_heads, q_per_kv, rows]``.
        chosen: Which rows are read, bool, ``[batch, kv_heads, rows]``.
        size: Rows of a cluster.

    Returns:
        ``[batch, kv_heads, q_per_kv, clusters]``; ``-inf`` where nothing is left.
    """
    unread = logits.masked_fill(chosen.unsqueeze(2), -torch.inf)
    return log_sum(unread.view(*logits.shape[:3], logits.shape[-1] // size, size))
