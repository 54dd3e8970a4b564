"""What RefineKV would read of a text at several thresholds, and how far its output would be from dense attention's.

Some of the later queries take one decode step each, by the method's own selection and kernels, from rows in float32:
clusters cover the rows before a query's own, and what follows the last complete one is read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvfold.core.retrieve import SelectContext, Summaries
from kvfold.eval.inspect.capture import LATER_QUERIES, LayerRows
from kvfold.kernels.attention import AttentionOutput, attend, join_sinks
from kvfold.kernels.clusters import attend_selected, count_read
from kvfold.methods.retrieve.refinekv import RefineKV

TAUS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Thresholds, as multiples of the longest value."""
EVERY = 4
"""Of the later queries every fourth takes the steps, the last one included: 8 of them in each head."""

_TILE_ELEMENTS = 1 << 25  # elements of keys that queries held at once may have copied; 128 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One threshold.

    Attributes:
        tau: As a multiple of the longest value.
        rows: Rows read exactly over rows that a query sees, the newest included; mean over KV heads and queries.
        scored: Summaries looked at over rows that a query sees.
        median: Norm of the error of the output over the norm of the dense output; half of the query heads and queries
            lie below.
        p95: 95 % lie below.
    """

    tau: float
    rows: float
    scored: float
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReading:
    """One layer.

    Attributes:
        layer: Index in the model.
        points: From the smallest threshold to the largest.
    """

    layer: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All layers that RefineKV can serve.

    Attributes:
        cluster: Rows of a cluster.
        queries: How many queries took a step in each head and layer.
        points: Over all layers, from the smallest threshold to the largest.
        layers: One by one.
    """

    cluster: int
    queries: int
    points: tuple[Point, ...]
    layers: tuple[LayerReading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the steps of one layer gave, a sample per query.

    Attributes:
        layer: Index in the model.
        rows: Share of rows read, ``[taus, samples]`` float64 on the CPU, a sample per KV head.
        scored: Summaries looked at, likewise.
        errors: Relative errors of the output, a sample per query head.
    """

    layer: int
    rows: Tensor
    scored: Tensor
    errors: Tensor


def take_steps(rows: LayerRows, taus: Sequence[float] = TAUS, *, every: int = EVERY) -> Steps:
    """Read one layer by query, once per threshold.

    Args:
        rows: The layer, without a cap on its logits; at least one cluster long.
        taus: Thresholds, at least 0.
        every: One in so many of the later queries is taken, the last one included.

    Returns:
        What was read and missed.
    """
    found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in taus]
    for step in _steps(rows, every):
        for parts, tau in zip(found, taus, strict=True):
            parts.append(step.read(tau))
    read, scored, errors = (
        torch.stack([torch.cat([part[side] for part in parts]) for parts in found]) for side in range(3)
    )
    return Steps(layer=rows.layer_idx, rows=read, scored=scored, errors=errors)


def summarise_steps(layers: Sequence[Steps], taus: Sequence[float] = TAUS, *, every: int = EVERY) -> Reading | None:
    """Take the steps of all layers together.

    Args:
        layers: From :func:`take_steps`.
        taus: The same as there.
        every: The same as there.

    Returns:
        The figures, ``None`` without a layer.
    """
    if not layers:
        return None
    return Reading(
        cluster=RefineKV().cluster,
        queries=-(-LATER_QUERIES // every),
        points=_points(layers, taus),
        layers=tuple(LayerReading(layer=layer.layer, points=_points([layer], taus)) for layer in layers),
    )


def _points(layers: Sequence[Steps], taus: Sequence[float]) -> tuple[Point, ...]:
    read, scored, errors = (
        torch.cat([getattr(layer, name) for layer in layers], 1) for name in ("rows", "scored", "errors")
    )
    middles, ends = errors.median(-1).values, errors.quantile(0.95, dim=-1)
    return tuple(
        Point(
            tau=tau,
            rows=float(read[index].mean()),
            scored=float(scored[index].mean()),
            median=float(middles[index]),
            p95=float(ends[index]),
        )
        for index, tau in enumerate(taus)
    )


class _Step:
    """Some queries with equally many complete clusters before them; they stand along the axis of batches."""

    def __init__(self, rows: LayerRows, sides: tuple[Tensor, Tensor], levels: Summaries, positions: Tensor):
        self.method, self.scale = RefineKV(), rows.scale
        batch, kv_heads = len(positions), rows.keys.shape[1]
        clusters = int(positions[0]) // self.method.cluster
        self.start, self.positions = clusters * self.method.cluster, positions
        self.queries = rows.queries[0, :, positions - rows.tokens].transpose(0, 1).float().unsqueeze(2)
        self.keys, self.values = (
            side[:, :, : self.start].expand(batch, kv_heads, self.start, side.shape[-1]) for side in sides
        )
        self.levels: Summaries = {
            name: part[:, :, :clusters].expand(batch, kv_heads, clusters, *part.shape[3:])
            for name, part in levels.items()
        }
        self.exists = torch.ones(batch, kv_heads, clusters, dtype=torch.bool, device=positions.device)
        sinks = None if rows.sinks is None else rows.sinks.detach().float()
        self.rest = self._attend(sides, self.start, sinks)
        self.dense = self._attend(sides, 0, sinks).output.squeeze(2)
        newest = torch.linalg.vector_norm(sides[1][:, :, self.start :], dim=-1)
        self.newest_norm = newest.cummax(-1).values[0, :, positions - self.start].T

    def _attend(self, sides: tuple[Tensor, Tensor], first: int, sinks: Tensor | None) -> AttentionOutput:
        """Attend to what each query sees from some row on; queries of one call share the rows."""
        keys, values = (side[:, :, first : int(self.positions[-1]) + 1] for side in sides)
        there = torch.arange(first, first + keys.shape[2], device=keys.device) <= self.positions[:, None]
        part = attend(self.queries.squeeze(2).transpose(0, 1)[None], keys, values, scale=self.scale, mask=there[None])
        part = part if sinks is None else join_sinks(part, sinks)
        return AttentionOutput(part.output[0].transpose(0, 1).unsqueeze(2), part.lse[0].T.unsqueeze(-1))

    def read(self, tau: float) -> tuple[Tensor, Tensor, Tensor]:
        """Take the step; returns rows read and summaries looked at per row seen, and relative errors."""
        context = SelectContext(
            queries=self.queries.squeeze(2),
            scale=self.scale,
            levels=(self.levels,),
            exists=(self.exists,),
            rest_lse=self.rest.lse.squeeze(2),
            rest_value_norm=self.newest_norm,
            amount=torch.full((len(self.positions),), tau, device=self.keys.device),
            certify=False,
        )
        chosen, segments = self.method.select(context), self.method.segments
        exact, _, scored = count_read(
            chosen,
            segments=segments,
            levels=context.levels,
            exists=context.exists,
            q_per_kv=self.queries.shape[1] // self.keys.shape[1],
        )
        output = attend_selected(
            self.queries,
            self.keys,
            self.values,
            segments=segments,
            levels=context.levels,
            exists=context.exists,
            selection=chosen,
            rest=self.rest,
            scale=self.scale,
        ).output.squeeze(2)
        missed = torch.linalg.vector_norm(output - self.dense, dim=-1)
        missed = missed / torch.linalg.vector_norm(self.dense, dim=-1).clamp_min(1e-30)
        seen = (self.positions.cpu() + 1).double().unsqueeze(-1)
        read, looked_at = (exact.cpu() + seen - self.start) / seen, scored.cpu() / seen
        return read.flatten(), looked_at.flatten(), missed.flatten().cpu().double()


def _steps(rows: LayerRows, every: int) -> Iterator[_Step]:
    """Sort the queries by how many clusters they have, as many at a time as memory allows."""
    cluster = RefineKV().cluster
    sides = (
        torch.cat((rows.keys, rows.later_keys), 2).float(),
        torch.cat((rows.values, rows.later_values), 2).float(),
    )
    count = sides[0].shape[2] // cluster
    keys, values = (
        side[:, :, : count * cluster].reshape(*side.shape[:2], count, cluster, side.shape[-1]) for side in sides
    )
    levels = RefineKV().summarise(keys, values, 0)
    last = rows.tokens + rows.queries.shape[2] - 1
    most = max(1, _TILE_ELEMENTS // sides[0].numel())
    positions = range(last, rows.tokens - 1, -every)[::-1]
    for _, alike in groupby(positions, lambda position: position // cluster):
        group = list(alike)
        for at in range(0, len(group), most):
            yield _Step(rows, sides, levels, torch.tensor(group[at : at + most], device=rows.keys.device))
