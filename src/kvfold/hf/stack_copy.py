"""Rows of many caches, copied side by side in few launches however many caches and heads there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.cache.rows import RowStore


def side_by_side(pieces: Sequence[Sequence[Tensor]], width: int, device: torch.device) -> Tensor:
    """Copy pieces of unequal length into one tensor, with zeros behind.

    Args:
        pieces: Per row and head, ``[count, ...]`` with at most ``width`` entries; one dtype, any device.
        width: Entries of each head in the result.
        device: Of the result.

    Returns:
        ``[rows, heads, width, ...]``.
    """
    first, heads = pieces[0][0], len(pieces[0])
    joined = first.new_zeros(len(pieces) * heads * width, *first.shape[1:], device=device)
    targets, sources = [], []
    for number, piece in enumerate(piece for row in pieces for piece in row):
        if len(piece):
            targets.append(joined.narrow(0, number * width, len(piece)))
            sources.append(piece)
    if targets:
        torch._foreach_copy_(targets, sources)
    return joined.view(len(pieces), heads, width, *first.shape[1:])


def rows_of(
    stores: Sequence[RowStore], firsts: Sequence[Sequence[int]] | None = None
) -> tuple[list[list[Tensor]], ...]:
    """View the rows of stores of one sequence each.

    Args:
        stores: The stores.
        firsts: First row that counts, per store and head; all rows if left out.

    Returns:
        Keys and values per store and head, ``[rows, dim]``.
    """
    found: tuple[list[list[Tensor]], ...] = ([], [])
    for number, store in enumerate(stores):
        starts, lengths = store.starts[0], store.lengths[0]
        at = [0] * store.kv_heads if firsts is None else firsts[number]
        for pool, lines in zip((store.keys, store.values), found, strict=True):
            parts = zip(starts, at, lengths, strict=True)
            lines.append([pool.narrow(0, start + first, count - first) for start, first, count in parts])
    return found


def hiding(lengths: Sequence[Sequence[int]], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a bias that hides what lies behind so many rows, ``[rows, heads, width]``: 0, then minus infinity."""
    ends = torch.tensor(lengths).to(device).unsqueeze(-1)
    beyond = torch.arange(width, device=device) >= ends
    return torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
