"""Ratings of keys by keys in plain torch: no float32 copy of more than a tile, sums and norms in float32."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from kvfold.core.rope import Rotary
from kvfold.kernels.scores.tiles import map_rows, unit
from kvfold.kernels.scores.types import Metric

_ORDERS = {"l2": 2.0, "l1": 1.0, "linf": float("inf")}


def distance_to_mean(
    keys: Tensor, positions: Tensor, *, metric: Metric, starts: Sequence[int], rope: Rotary | None
) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.distance_to_mean` in plain torch."""
    if len(starts) == 1:
        return _to_one_mean(keys, positions, rope, metric)
    edges = torch.tensor(starts[1:], device=positions.device).expand(*positions.shape[:2], -1).contiguous()
    cuts = torch.searchsorted(positions.contiguous(), edges).tolist()
    first = cuts[0][0]
    if all(head == first for row in cuts for head in row):
        return _to_means(keys, positions, first, rope, metric)
    scores = keys.new_empty(keys.shape[:3], dtype=torch.float32)
    for row, heads in enumerate(cuts):
        for head, own in enumerate(heads):
            at = (slice(row, row + 1), slice(head, head + 1))
            scores[at] = _to_means(keys[at], positions[at], own, rope, metric)
    return scores


def unlikeness(keys: Tensor) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.unlikeness` in plain torch."""
    rows, width = keys.shape[2], _elements_per_row(keys)
    total = map_rows(lambda part: unit(keys[:, :, part]).sum(2).unsqueeze(-1), rows, width).sum(-1)
    anchor = unit(total).unsqueeze(-1)
    return map_rows(lambda part: -(unit(keys[:, :, part]) @ anchor).squeeze(-1), rows, width)


def lengths(rows: Tensor) -> Tensor:
    """Compute :func:`kvfold.kernels.scores.lengths` in plain torch."""
    return map_rows(
        lambda part: vector_norm(rows[:, :, part], dim=-1, dtype=torch.float32), rows.shape[2], _elements_per_row(rows)
    )


def _to_means(keys: Tensor, positions: Tensor, cuts: list[int], rope: Rotary | None, metric: Metric) -> Tensor:
    """Rate each run of rows between ``cuts`` against its own mean."""
    bounds = [0, *cuts, keys.shape[2]]
    runs = [slice(first, last) for first, last in itertools.pairwise(bounds) if first < last]
    if not runs:
        return keys.new_empty(keys.shape[:3], dtype=torch.float32)
    return torch.cat([_to_one_mean(keys[:, :, run], positions[:, :, run], rope, metric) for run in runs], dim=-1)


def _to_one_mean(keys: Tensor, positions: Tensor, rope: Rotary | None, metric: Metric) -> Tensor:
    rows, width = keys.shape[2], _elements_per_row(keys)

    def framed(part: slice) -> Tensor:
        piece = keys[:, :, part]
        return piece if rope is None else rope.unrotate(piece, positions[:, :, part])

    def part_sum(part: slice) -> Tensor:
        return framed(part).sum(2, dtype=torch.float32).unsqueeze(-1)

    def part_distance(part: slice) -> Tensor:
        if metric == "cosine":
            return -(unit(framed(part)) @ unit(mean).transpose(-1, -2)).squeeze(-1)
        # half precision minus float32 is float32: one pass, and no copy of the keys before it
        return vector_norm(framed(part) - mean, ord=_ORDERS[metric], dim=-1)

    mean = (map_rows(part_sum, rows, width).sum(-1) / max(1, rows)).unsqueeze(2)
    return map_rows(part_distance, rows, width)


def _elements_per_row(rows: Tensor) -> int:
    return rows.shape[0] * rows.shape[1] * rows.shape[3]
