"""What a tighter summary saves: error of the output against rows read, as the threshold falls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.retrieve import Selection
from kvfold.eval.study.figures import Frozen, Spread, spread_of
from kvfold.eval.study.rows import Progress, check_cluster, read_rows, spread_positions
from kvfold.eval.study.sight import FORMS, Form, Sight, sights
from kvfold.hf.load import Model
from kvfold.kernels.clusters import count_read
from kvfold.methods.retrieve.refinekv import RefineKV

TAUS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""Thresholds, as multiples of the longest value."""


class Point(Frozen):
    """One threshold.

    Attributes:
        tau: As a multiple of the longest value.
        rows: Rows read exactly over rows seen, the newest included, mean over KV heads, queries and layers.
        means: Means read over rows seen.
        error: Norm of the error over that of the true output, over query heads, queries and layers.
    """

    tau: float
    rows: float
    means: float
    error: Spread


class SummaryCurve(Frozen):
    """One form of summary.

    Attributes:
        form: ``radius``, ``box``, ``minmax`` or ``exact``, which reads every key.
        delta: Median over all clusters of the bound on how far a logit lies from that of the mean.
        reach_nbytes: Bytes that the bound takes per cluster, measured; ``None`` for ``exact``.
        points: From the largest threshold to the smallest.
    """

    form: Form
    delta: float
    reach_nbytes: float | None
    points: tuple[Point, ...]


class SummaryFigures(Frozen):
    """The study.

    Attributes:
        cluster: Rows of a cluster.
        positions: Of the queries.
        layers: Layers that were measured.
        curves: By form.
    """

    study: Literal["summaries"] = "summaries"
    cluster: int
    positions: tuple[int, ...]
    layers: tuple[int, ...]
    curves: tuple[SummaryCurve, ...]


@torch.no_grad()
def study_summaries(
    model: Model,
    ids: Tensor,
    *,
    layers: Sequence[int],
    cluster: int = 16,
    chunk_size: int = 512,
    reading: Progress | None = None,
    measuring: Progress | None = None,
) -> SummaryFigures:
    """Measure; query heads of a KV head read what one of them needs.

    Args:
        model: The model.
        ids: ``[1, tokens]``; queries stand in its second half.
        layers: From :func:`~kvfold.eval.study.rows.check_layers`.
        cluster: Rows of a cluster.
        chunk_size: Tokens per forward call.
        reading: Called with (tokens done, tokens in all).
        measuring: Called with (layers done, layers in all).

    Returns:
        The figures.
    """
    positions = spread_positions(ids.shape[1])
    RefineKV(cluster=cluster)
    check_cluster(cluster, positions[0])
    deltas: dict[Form, list[Tensor]] = defaultdict(list)
    parts: dict[tuple[Form, float], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    reach: dict[Form, float | None] = {}
    for done, rows in enumerate(
        read_rows(model, ids, positions, layers=layers, chunk_size=chunk_size, progress=reading)
    ):
        for sight in sights(rows, cluster):
            for form in FORMS:
                found = sight.found(form)
                there = sight.exists.unsqueeze(2).expand_as(found.above)
                deltas[form].append(torch.maximum(found.above, found.below)[there].cpu())
                reach[form] = None if form == "exact" else reach_nbytes(sight, form)
                for tau in TAUS:
                    parts[form, tau].append(_read(sight, passing(sight, form, tau)))
        if measuring is not None:
            measuring(done + 1, len(layers))
    return SummaryFigures(
        cluster=cluster,
        positions=positions,
        layers=tuple(layers),
        curves=tuple(
            SummaryCurve(
                form=form,
                delta=float(torch.cat(deltas[form]).median()),
                reach_nbytes=reach[form],
                points=tuple(_point(tau, parts[form, tau]) for tau in TAUS),
            )
            for form in FORMS
        ),
    )


def passing(sight: Sight, form: Form, tau: float) -> Tensor:
    """Choose as ``refinekv(summary=FORM, tau=TAU)`` does, of which ``exact`` is no form.

    Args:
        sight: Queries and clusters.
        form: What bounds the distortion.
        tau: As a multiple of the longest value.

    Returns:
        Bool, ``[B, kv_heads, clusters]``.
    """
    return (sight.risk(form).amax(2) > tau) & sight.exists


def reach_nbytes(sight: Sight, form: Form) -> float:
    """Count the bytes per cluster of what tells the distortion of its keys."""
    names = ("radius", "box", "low", "high", "reach_step")
    parts = [part for name, part in sight.summaries[form].items() if name in names]
    return float(sum(part[0, 0, 0].numel() * part.element_size() for part in parts))


def _read(sight: Sight, expanded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read some clusters; returns rows and means over rows seen, per KV head, and errors per query head."""
    stand = sight.exists & ~expanded
    exact, means, _ = count_read(
        Selection(expanded=expanded, represented=(stand,), scored=(sight.exists.sum(-1),)),
        segments=(sight.cluster,),
        levels=(sight.summaries["box"],),
        exists=(sight.exists,),
        q_per_kv=sight.queries.shape[1] // sight.exists.shape[1],
    )
    seen = sight.visible.unsqueeze(-1)
    newest = seen - sight.exists.sum(-1) * sight.cluster
    rows, stands = (exact + newest) / seen, means / seen
    return rows.flatten().cpu(), stands.flatten().cpu(), sight.error(expanded).flatten().cpu()


def _point(tau: float, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Point:
    rows, means, missed = (torch.cat(side) for side in zip(*parts, strict=True))
    return Point(tau=tau, rows=float(rows.mean()), means=float(means.mean()), error=spread_of(missed))
