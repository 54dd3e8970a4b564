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
from kvfold.eval.study.sight import FORMS, Sight, cut_clusters, sights
from kvfold.hf.load import Model
from kvfold.kernels.clusters import largest
from kvfold.methods.retrieve.quest import Quest
from kvfold.methods.retrieve.refinekv import RefineKV

SHARES = (0.05, 0.1, 0.2, 0.3)
"""Of the clusters before a query, whose rows are read."""
HEADS = 4
"""Query heads whose clusters are correlated, as in the published protocol."""
IMPORTANCE, ORACLE, QUEST = "importance", "true mass", "quest"


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


def cluster_scores(sight: Sight) -> dict[str, Tensor]:
    """Rate the clusters of each query head by everything but Quest, which only chooses.

    Args:
        sight: Queries and clusters.

    Returns:
        By name, ``[B, q_heads, clusters]``, ``-inf`` where there is no cluster: risks by the form of the summary, in
        units of the longest value; log of importance; log of true mass.
    """
    absent = ~sight.exists.unsqueeze(2)
    found = {f"risk, {form}": sight.risk(form).masked_fill(absent, -torch.inf) for form in FORMS}
    found |= {IMPORTANCE: sight.found("box").log_mass, ORACLE: sight.true_mass}
    return {name: score.flatten(1, 2) for name, score in found.items()}


def quest_levels(sight: Sight) -> dict[str, Tensor]:
    """Summarise the same clusters as Quest's pages."""
    pages = cut_clusters(sight.keys, sight.cluster), cut_clusters(sight.values, sight.cluster)
    return Quest(page=sight.cluster).summarise(*pages, 0)


def contribution_errors(sight: Sight) -> Tensor:
    """Measure what each cluster's mean misses of the cluster's part of the output.

    Args:
        sight: Queries and clusters.

    Returns:
        Norm of the difference of a cluster's share times its output, exactly and by its means, where every cluster
        is represented; ``[B, q_heads, clusters]``.
    """
    absent = ~sight.exists.unsqueeze(2)
    coarse = sight.found("box").log_mass
    total, about = (
        torch.logaddexp(mass.logsumexp(-1), sight.rest_lse).unsqueeze(-1) for mass in (sight.true_mass, coarse)
    )
    weights = (sight.logits - total.unsqueeze(-1)).exp()
    exact = torch.einsum("bkgcr,bkcrd->bkgcd", weights, cut_clusters(sight.values, sight.cluster))
    means = sight.summaries["box"]["mean_values"].unsqueeze(2)
    missed = exact - (coarse - about).exp().unsqueeze(-1) * means
    return torch.linalg.vector_norm(missed, dim=-1).masked_fill(absent, 0.0).flatten(1, 2)


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
        counts = torch.tensor([Budget.fraction(share).resolve(int(n)) for n in clusters], device=clusters.device)
        chosen = {name: largest(score, counts.view(-1, 1, 1)) for name, score in scores.items()}
        quest = Quest(page=sight.cluster)
        chosen[QUEST] = quest.select(sight.context(pages, (counts * sight.cluster).float())).expanded
        for name, expanded in chosen.items():
            read = (expanded.sum(-1) / clusters.unsqueeze(-1)).flatten().cpu()
            for represented in (True, False) if name == QUEST else (True,):
                missed = sight.error(expanded, represent=represented).flatten().cpu()
                errors.setdefault((name, represented, share), []).append((read, missed))
