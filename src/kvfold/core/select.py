"""Choosing rows by score: one tie rule, protection by mask, indices in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.errors import CacheStateError


def protect_mask(lengths: Tensor, rows: int, sink_tokens: int, recent_tokens: int) -> Tensor:
    """Mark the rows that always stay.

    Args:
        lengths: Rows held per (batch, KV head), int64, ``[batch, kv_heads]``.
        rows: Width of the mask, at least ``lengths.max()``.
        sink_tokens: First rows that stay.
        recent_tokens: Last rows that stay.

    Returns:
        ``[batch, kv_heads, rows]`` bool.
    """
    index = torch.arange(rows, device=lengths.device)
    lengths = lengths[..., None]
    return ((index < sink_tokens) | (index >= lengths - recent_tokens)) & (index < lengths)


def require_numbers(has_nan: bool) -> None:
    """Refuse scores among which is a NaN.

    Args:
        has_nan: What was found.

    Raises:
        CacheStateError: If so.
    """
    if has_nan:
        raise CacheStateError("a method's scores must be numbers, got NaN; the keys or queries of this layer hold NaN")


def rank_rows(scores: Tensor, protected: Tensor, *, checked: bool = False) -> Tensor:
    """Order rows from the first to stay to the last: protected, then by score, ties to the earlier row.

    Args:
        scores: ``[..., rows]`` float32 without NaN.
        protected: ``[..., rows]`` bool.
        checked: The caller has looked for NaN, or will; looking makes the host wait for the device.

    Returns:
        ``[..., rows]`` int64, a permutation of the rows.

    Raises:
        CacheStateError: If a score is NaN.
    """
    if not checked:
        require_numbers(bool(torch.isnan(scores).any()))
    order = torch.sort(scores.float(), dim=-1, descending=True, stable=True).indices
    first = torch.sort((~protected.gather(-1, order)).to(torch.uint8), dim=-1, stable=True).indices
    return order.gather(-1, first)


def select_rows(scores: Tensor, protected: Tensor, counts: Tensor, *, checked: bool = False) -> Tensor:
    """Pick the rows that stay.

    Args:
        scores: ``[batch, kv_heads, rows]`` float32, ``-inf`` where a head has no such row.
        protected: Same shape, bool.
        counts: Rows to keep per head, int64, ``[batch, kv_heads]``; best on the host, where reading them waits for
            nothing.
        checked: As in :func:`rank_rows`.

    Returns:
        ``[batch, kv_heads, counts.max()]`` int64; the first ``counts`` entries of each head are the kept rows in
        ascending order, the rest repeat the width ``rows`` as filler.
    """
    return first_rows(rank_rows(scores, protected, checked=checked), counts)


def first_rows(order: Tensor, counts: Tensor) -> Tensor:
    """Take the first rows of an order.

    Args:
        order: Rows from the first to stay to the last, ``[batch, kv_heads, rows]``.
        counts: As in :func:`select_rows`; counts on another device than the host are not waited for.

    Returns:
        As :func:`select_rows`, as wide as ``order`` where the counts are not on the host.
    """
    width = rows = order.shape[-1]
    if counts.device.type == "cpu":
        width = int(counts.max()) if counts.numel() else 0
    filler = torch.arange(width, device=order.device) >= counts.to(order.device)[..., None]
    return order[..., :width].masked_fill(filler, rows).sort(dim=-1).values
