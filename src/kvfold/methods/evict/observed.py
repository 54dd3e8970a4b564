"""Attention that the newest queries pay to the stored rows: shared by SnapKV and TOVA."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import ScoreContext
from kvfold.kernels.scores import window_attention
from kvfold.methods.evict.tiles import TILE_ELEMENTS


def given_queries(ctx: ScoreContext) -> Tensor:
    """Return the queries of a context that must have them.

    Args:
        ctx: The context.

    Returns:
        ``[batch, q_heads, window, head_dim]``.

    Raises:
        CacheStateError: If the engine did not supply them.
    """
    if ctx.queries is None:
        raise CacheStateError("a method that needs QUERIES got none; the engine must supply them")
    return ctx.queries


def first_query(ctx: ScoreContext) -> int:
    """Return the position of the first of a context's queries."""
    return ctx.seen_tokens - given_queries(ctx).shape[2] if ctx.first_query is None else ctx.first_query


def observed_attention(ctx: ScoreContext) -> Tensor:
    """Average attention of the newest queries, with the model's own scale, soft cap and sinks.

    Args:
        ctx: A context with queries.

    Returns:
        ``[batch, q_heads, kv_len]`` float32; the softmax runs over all stored rows that a query may see.
    """
    queries = given_queries(ctx)
    batch, q_heads, window, _ = queries.shape
    first = first_query(ctx)
    found = torch.zeros(batch, q_heads, ctx.kv_len, device=queries.device)
    step = max(1, TILE_ELEMENTS // max(1, batch * q_heads * ctx.kv_len))
    for at in range(0, window, step):
        weights = window_attention(
            queries[:, :, at : at + step],
            ctx.keys,
            ctx.positions,
            first + at,
            scale=ctx.scale,
            softcap=ctx.softcap,
            sinks=ctx.attention_sinks,
        )
        found += weights.sum(2)
    return found / max(1, window)
