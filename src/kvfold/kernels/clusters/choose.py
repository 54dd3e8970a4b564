"""Choices of clusters in fixed shapes: the largest, those that hold a share of the mass, those that a bound needs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.estimate import Estimate, group_queries
from kvfold.kernels.clusters.logs import log_sum
from kvfold.kernels.clusters.logs import share as part_of
from kvfold.kernels.clusters.ranks import holding_mass, page_bounds, rank_largest, ranks_here
from kvfold.kernels.clusters.risk import error_bound, lost_mass, normaliser, sound_risk, terms

_MARGIN = 1 - 2.0**-8  # what is left is bounded once more after the choice, in another order of summation


def bound_pages(queries: Tensor, pages: Summaries, exists: Tensor) -> Tensor:
    """Rate pages of rows by the largest logit that a key between their ends could have, before scaling.

    Args:
        queries: One per head, ``[batch, q_heads, head_dim]``.
        pages: Smallest and largest entries of their keys, ``low_keys`` and ``high_keys``,
            ``[batch, kv_heads, pages, head_dim]``.
        exists: Which pages are there, bool, ``[batch, kv_heads, pages]``.

    Returns:
        The sum over dimensions of the larger of ``q low`` and ``q high``, ``[batch, q_heads, pages]``, float32 or
        wider; ``-inf`` where there is no page.
    """
    if ranks_here(queries) and exists.numel():
        return page_bounds(queries, pages, exists)
    grouped = group_queries(queries, exists.shape[1])
    up, down = grouped.clamp_min(0.0), grouped.clamp_max(0.0)
    bounds = up @ pages["high_keys"].to(grouped.dtype).mT + down @ pages["low_keys"].to(grouped.dtype).mT
    return bounds.masked_fill(~exists.unsqueeze(2), -torch.inf).flatten(1, 2)


def largest(scores: Tensor, count: Tensor) -> Tensor:
    """Choose the clusters with the largest scores; ties go to the earlier one.

    Args:
        scores: ``[..., clusters]``; ``-inf`` is never chosen.
        count: How many, broadcasts to ``[..., 1]``; any number.

    Returns:
        Bool, same shape.
    """
    if ranks_here(scores, whole_rows=True):
        return rank_largest(scores.float(), count)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device).expand_as(order) < count
    return _unsort(within, order) & (scores != -torch.inf)


def holding(log_mass: Tensor, share: Tensor) -> Tensor:
    """Choose the fewest clusters that hold a share of the mass of all, largest first.

    Args:
        log_mass: ``[..., clusters]``; ``-inf`` is never chosen.
        share: Broadcasts to ``[..., 1]``; 0: none, 1: all.

    Returns:
        Bool, same shape.
    """
    if ranks_here(log_mass, whole_rows=True):
        return holding_mass(log_mass.float(), share)
    total = log_sum(log_mass).unsqueeze(-1)
    mass = part_of(log_mass - total.masked_fill(total == -torch.inf, 0.0))
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return _unsort((before < share) | (share >= 1), order) & (log_mass != -torch.inf)


def until_bound(found: Estimate, rest_lse: Tensor, candidates: Tensor, longest: Tensor, bound: Tensor) -> Tensor:
    """Choose clusters to read, largest risk first, until what the others may add to the error is below a bound.

    Args:
        found: All clusters; those that are no candidates stay represented.
        rest_lse: Log-sum-exp of what is read anyway, ``[batch, kv_heads, q_per_kv]``.
        candidates: Which may be read, bool, broadcasts to ``found.log_mass``.
        longest: Norm of the longest value of all rows, ``[batch, kv_heads, 1, 1]``.
        bound: In units of values, broadcasts to ``found.log_mass``.

    Returns:
        Bool, ``[batch, kv_heads, q_per_kv, clusters]``.
    """
    candidates = candidates.expand_as(found.log_mass)
    least = found.log_mass - torch.where(candidates, lost_mass(found), 0.0)
    parts = terms(found, normaliser(least, rest_lse))
    value_share = found.value_reach / longest.clamp_min(torch.finfo(longest.dtype).tiny)
    risk = sound_risk(found, rest_lse, None, value_share=value_share)
    order = risk.masked_fill(~candidates, torch.inf).argsort(dim=-1, descending=True, stable=True)

    def left(part: Tensor, *, log: bool) -> Tensor:
        """Sum what stays represented if all before a place in the order are read."""
        nothing = -torch.inf if log else 0.0
        free = part.masked_fill(~candidates, nothing).gather(-1, order).flip(-1)
        fixed = part.masked_fill(candidates, nothing)
        if log:
            return torch.logaddexp(free.logcumsumexp(-1).flip(-1), log_sum(fixed).unsqueeze(-1))
        return free.cumsum(-1).flip(-1) + fixed.sum(-1, keepdim=True)

    if not found.log_mass.shape[-1]:
        return candidates
    error = error_bound(left(parts[0], log=True), left(parts[1], log=False), left(parts[2], log=False), longest)
    return _unsort(error > bound * _MARGIN, order) & candidates & (found.log_mass != -torch.inf)


def _unsort(sorted_choice: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(sorted_choice).scatter(-1, order, sorted_choice)
