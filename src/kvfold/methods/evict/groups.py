"""Means over the query heads that share a KV head."""

from __future__ import annotations

from torch import Tensor


def group_mean(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """Average over query heads of a KV head: ``[batch, q_heads, rows]`` to ``[batch, kv_heads, rows]``."""
    batch, _, rows = per_query_head.shape
    return per_query_head.view(batch, kv_heads, -1, rows).mean(2)
