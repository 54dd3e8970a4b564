"""Scores of clusters that say which are read first, and what each cluster's mean really misses."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.eval.study.sight import FORMS, Sight, cut_clusters
from kvfold.methods.retrieve.quest import Quest

IMPORTANCE, ORACLE = "importance", "true mass"


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
