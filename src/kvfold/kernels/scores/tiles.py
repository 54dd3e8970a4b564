"""Work on rows in tiles, so that a float32 copy of a long cache is never held."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 22
"""Float32 elements that scoring may hold beside the cache at a time (16 MiB)."""


def map_rows(function: Callable[[slice], Tensor], rows: int, elements_per_row: int) -> Tensor:
    """Apply a function to slices of rows and join the results along the last axis.

    Args:
        function: Takes a slice of rows, returns ``[..., rows of the slice]``.
        rows: Number of rows.
        elements_per_row: Elements that ``function`` holds per row; sets the size of a slice.

    Returns:
        ``[..., rows]``.
    """
    step = max(1, TILE_ELEMENTS // max(1, elements_per_row))
    if rows <= step:
        return function(slice(0, rows))
    return torch.cat([function(slice(at, min(rows, at + step))) for at in range(0, rows, step)], dim=-1)


def unit(rows: Tensor) -> Tensor:
    """Scale rows to length 1 in float32; a zero row stays zero."""
    return torch.nn.functional.normalize(rows.float(), dim=-1, eps=1e-12)
