"""Plain torch: one index for all pools, and a selection per pool."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.gather.types import Layout, Pools


def gather(
    keys: Tensor, values: Tensor, index: Tensor, layout: Layout, positions: Tensor | int, mass: Tensor | None
) -> Pools:
    """Compute :func:`kvfold.kernels.gather.gather_runs` in plain torch."""
    starts, counts, places, rooms = layout.table
    # of each new row: its run, and which entry of the run's index it is
    run = torch.arange(rooms.numel()).repeat_interleave(rooms)
    entry = torch.arange(layout.size) - places[run]
    slack = entry >= counts[run]
    at, first = (run * index.shape[-1] + entry)[~slack].to(index.device), starts[run[~slack]].to(index.device)
    target = None if not bool(slack.any()) else (~slack).nonzero()[:, 0].to(index.device)
    own = index.flatten()[at]
    source = own + first
    if isinstance(positions, int):
        kept = _place((own + positions).to(torch.int32), target, layout.size)
    else:
        kept = _move(positions, source, target, layout.size)
    new_keys, new_values = (_move(pool, source, target, layout.size) for pool in (keys, values))
    return Pools(new_keys, new_values, kept, None if mass is None else _move(mass, source, target, layout.size))


def _move(pool: Tensor, source: Tensor, target: Tensor | None, size: int) -> Tensor:
    return _place(pool.index_select(0, source), target, size)


def _place(rows: Tensor, target: Tensor | None, size: int) -> Tensor:
    """Put rows where they go; zeros between them, so that slack does not look like a number if a bug reads it."""
    return rows if target is None else rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, target, rows)
