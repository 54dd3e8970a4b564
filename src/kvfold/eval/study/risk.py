"""What the risk of a cluster is worth: how it ranks with the true error, and what it saves at an equal budget.

A rank correlation alone proves little: most of the spread of errors is spread of importance, so that importance alone
correlates as well. Rankings are told apart by the error of the output when each may read as many clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.core.budget import Budget
from kvfold.eval.study.figures import Frozen, Spread, log_correlation, rank_correlation, spread_of
from kvfold.eval.study.rows import Progress, check_cluster, read_rows, spread_positions
from kvfold.eval.study.scores import IMPORTANCE, ORACLE, cluster_scores, contribution_errors, quest_levels
from kvfold.eval.study.sight import Sight, sights
from kvfold.hf.load import Model
from kvfold.kernels.clusters import largest
from kvfold.methods.retrieve.quest import Quest
from kvfold.methods.retrieve.refinekv import RefineKV

SHARES = (0.05, 0.1, 0.2, 0.3)
"""Of the clusters before a query, whose rows are read."""
LEAST = 3
"""Clusters that are read at least: Quest never reads fewer, and a budget must be the same for all."""
HEADS = 4
"""Query heads whose clusters are correlated, as in the published protocol."""
QUEST = "quest"


class Correlation(Frozen):
    """Of a score of clusters with the norm of what the output misses by them.

    Attributes:
        score: Its name.
        spearman: Rank correlation.
        log_pearson: Correlation of the logs, where both are positive.
    """

    score: str
    spearman: float
    log_pearson: float


class Matched(Frozen):
    """Error of the output where each query head reads the clusters with the largest scores.

    Attributes:
        score: Its name.
        represented: Whether the other clusters stand for their rows by their means; else they are left out.
        share: Of the clusters that may be read.
        expanded: Of the clusters that were read, measured.
        error: Norm of the error over that of the true output, over query heads, queries and layers.
    """

    score: str
    represented: bool
    share: float
    expanded: float
    error: Spread


class RiskFigures(Frozen):
    """The study.

    Attributes:
        cluster: Rows of a cluster.
        positions: Of the queries.
        layers: Layers in which errors were measured.
        layer: The one whose clusters were correlated.
        heads: Its query heads that were.
        observations: Clusters that were correlated.
        correlations: By score.
        matched: By score and share.
    """

    study: Literal["risk"] = "risk"
    cluster: int
    positions: tuple[int, ...]
    layers: tuple[int, ...]
    layer: int
    heads: tuple[int, ...]
    observations: int
    correlations: tuple[Correlation, ...]
    matched: tuple[Matched, ...]


@torch.no_grad()
def study_risk(
    model: Model,
    ids: Tensor,
    *,
    layers: Sequence[int],
    cluster: int = 16,
    chunk_size: int = 512,
    reading: Progress | None = None,
    measuring: Progress | None = None,
) -> RiskFigures:
    """Measure.

    Args:
        model: The model.
        ids: ``[1, tokens]``; queries stand in its second half.
        layers: From :func:`~kvfold.eval.study.rows.check_layers`; the middle one is correlated.
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
    middle = layers[len(layers) // 2]
    pairs: dict[str, list[Tensor]] = {}
    errors: dict[tuple[str, bool, float], list[tuple[Tensor, Tensor]]] = {}
    heads: tuple[int, ...] = ()
    for done, rows in enumerate(
        read_rows(model, ids, positions, layers=layers, chunk_size=chunk_size, progress=reading)
    ):
        if rows.layer == middle:
            count = rows.queries.shape[1]
            heads = tuple(sorted({index * count // HEADS for index in range(HEADS)}))
        for sight in sights(rows, cluster):
            scores = cluster_scores(sight)
            if rows.layer == middle:
                _pair(pairs, sight, scores, heads)
            _spend(errors, sight, scores, quest_levels(sight))
        if measuring is not None:
            measuring(done + 1, len(layers))
    truth = torch.cat(pairs.pop("error"))
    known = {name: torch.cat(parts) for name, parts in pairs.items()}
    return RiskFigures(
        cluster=cluster,
        positions=positions,
        layers=tuple(layers),
        layer=middle,
        heads=heads,
        observations=len(truth),
        correlations=tuple(
            Correlation(score=name, spearman=rank_correlation(score, truth), log_pearson=log_correlation(score, truth))
            for name, score in known.items()
        ),
        matched=tuple(
            Matched(
                score=score,
                represented=represented,
                share=share,
                expanded=float(torch.cat([read for read, _ in parts]).mean()),
                error=spread_of(torch.cat([missed for _, missed in parts])),
            )
            for (score, represented, share), parts in errors.items()
        ),
    )


def _pair(pairs: dict[str, list[Tensor]], sight: Sight, scores: dict[str, Tensor], heads: tuple[int, ...]) -> None:
    """Collect scores and true errors of the clusters of some heads."""
    there = sight.exists.repeat_interleave(sight.queries.shape[1] // sight.exists.shape[1], 1)[:, heads]

    def collect(name: str, values: Tensor) -> None:
        pairs.setdefault(name, []).append(values[:, heads][there].cpu())

    collect("error", contribution_errors(sight))
    about = torch.logaddexp(sight.found("box").log_mass.logsumexp(-1), sight.rest_lse).flatten(1, 2).unsqueeze(-1)
    true = torch.logaddexp(sight.true_mass.logsumexp(-1), sight.rest_lse).flatten(1, 2).unsqueeze(-1)
    totals = {IMPORTANCE: about, ORACLE: true}
    for name, score in scores.items():
        # queries are pooled, so masses are compared as shares
        collect(name, (score - totals[name]).exp() if name in totals else score)


def _spend(
    errors: dict[tuple[str, bool, float], list[tuple[Tensor, Tensor]]],
    sight: Sight,
    scores: dict[str, Tensor],
    pages: dict[str, Tensor],
) -> None:
    """Read a share of the clusters by each score."""
    clusters = sight.exists[:, 0].sum(-1)
    for share in SHARES:
        budget = Budget.fraction(share)
        counts = torch.tensor([budget.resolve(int(n), minimum=LEAST) for n in clusters], device=clusters.device)
        chosen = {name: largest(score, counts.view(-1, 1, 1)) for name, score in scores.items()}
        quest = Quest(page=sight.cluster)
        chosen[QUEST] = quest.select(sight.context(pages, (counts * sight.cluster).float())).expanded
        for name, expanded in chosen.items():
            read = (expanded.sum(-1) / clusters.unsqueeze(-1)).flatten().cpu()
            for represented in (True, False) if name == QUEST else (True,):
                missed = sight.error(expanded, represent=represented).flatten().cpu()
                errors.setdefault((name, represented, share), []).append((read, missed))
