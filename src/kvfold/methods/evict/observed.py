"""Attention that the newest queries pay to the stored rows: shared by SnapKV and TOVA."""

from __future__ import annotations

from torch import Tensor

from kvfold.core.errors import CacheStateError
from kvfold.core.interfaces import ScoreContext
from kvfold.kernels.scores import mean_window_attention


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
    return mean_window_attention(
        given_queries(ctx),
        ctx.keys,
        ctx.positions,
        first_query(ctx),
        scale=ctx.scale,
        softcap=ctx.softcap,
        sinks=ctx.attention_sinks,
    )
