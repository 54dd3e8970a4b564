"""Pools of rows and the layout of runs in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Pools(NamedTuple):
    """Rows of many runs, side by side.

    Attributes:
        keys: ``[pool_rows, head_dim]``.
        values: ``[pool_rows, value_dim]``.
        positions: Of each pool row, int32, ``[pool_rows]``.
        mass: Attention that each row received, float32, ``[pool_rows]``, where it is tracked.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    mass: Tensor | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of each run come from and go to; known on the host.

    Attributes:
        table: First old row, rows, first new row, new room of each run, int64, ``[4, runs]``.
        size: Rows of the new pool.
        widest: Room of the largest new run.
    """

    table: Tensor
    size: int
    widest: int
