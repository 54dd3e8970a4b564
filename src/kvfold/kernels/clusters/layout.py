"""Which rows a cluster has: consecutive ones, or those that a segment's ``members`` name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries


def rows_of_clusters(chosen: Tensor, summaries: Summaries, segment: int, rows: int) -> Tensor:
    """Spread a choice of clusters over their rows.

    Args:
        chosen: Bool, ``[batch, heads, clusters]``; room is False.
        summaries: Summaries of the level, for ``members``.
        segment: Rows of a segment.
        rows: Rows that are stored; rows beyond the last cluster are not chosen.

    Returns:
        Bool, ``[batch, heads, rows]``.
    """
    members = summaries.get("members")
    if members is None:
        spread = chosen.repeat_interleave(segment, -1)
    else:
        heads, kv_heads = chosen.shape[1], members.shape[1]
        count = members.shape[-1] // segment
        per = chosen.shape[-1] // max(count, 1)
        first = torch.arange(count, device=members.device).repeat_interleave(segment) * per
        # room holds anything; it must not lead out of the clusters of its own segment
        cluster = members[..., : count * segment].long().clamp(max=per - 1) + first
        spread = chosen.gather(-1, cluster.repeat_interleave(heads // kv_heads, 1))
    missing = rows - spread.shape[-1]
    return spread[..., :rows] if missing <= 0 else torch.nn.functional.pad(spread, (0, missing))


def log_sizes(summaries: Summaries, segment: int, dtype: torch.dtype) -> Tensor | float:
    """Log of how many rows a cluster stands for, ``-inf`` for none; one number where all have as many.

    Args:
        summaries: Summaries of the level, for ``sizes``.
        segment: Rows of a cluster where there are none.
        dtype: That of the queries; half precision is too short for a size.

    Returns:
        A number, or ``[batch, kv_heads, clusters]`` in float32 or wider.
    """
    sizes = summaries.get("sizes")
    return math.log(segment) if sizes is None else sizes.to(torch.promote_types(dtype, torch.float32)).log()
