"""Plain torch: the same step from the parts that other methods use too."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.retrieve import Selection
from kvfold.kernels.attention import join_sinks
from kvfold.kernels.clusters.api import attend_selected
from kvfold.kernels.clusters.estimate import estimate, group_queries
from kvfold.kernels.clusters.fused.types import Clustered, Refined, Threshold
from kvfold.kernels.clusters.risk import published_risk
from kvfold.kernels.runs import attend_runs


def append(held: Clustered, new: tuple[Tensor, Tensor]) -> None:
    """Write the newest row of each run."""
    slots = (held.starts + held.lengths - 1).flatten()
    for pool, rows in zip((held.keys, held.values), new, strict=True):
        pool.index_copy_(0, slots, rows.flatten(0, 2))


def choose(
    q: Tensor, held: Clustered, rule: Threshold, rest_lse: Tensor, longest_of_tail: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose clusters.

    Args:
        q: ``[batch, q_heads, 1, head_dim]``.
        held: Rows and summaries.
        rule: What is read.
        rest_lse: Log-sum-exp of the tail and of sinks, ``[batch, q_heads]``.
        longest_of_tail: Norm of its longest value, ``[batch, kv_heads]``.
        scale: Factor on the logits.

    Returns:
        Which clusters are there, and which of them are read, bool, ``[batch, kv_heads, room]``.
    """
    exists = existing(held)
    queries = group_queries(q[:, :, 0], exists.shape[1])
    found = estimate(queries, scale, held.summaries, held.segment, exists)
    longest = torch.cat((found.value_norm.flatten(2), longest_of_tail.unsqueeze(-1)), -1).amax(-1)[..., None, None]
    share = found.value_reach / longest.clamp_min(torch.finfo(queries.dtype).tiny) if rule.value_radius else 1.0
    risk = published_risk(found, rest_lse.view(queries.shape[:3]), value_share=share)
    shared = risk.mean(2) if rule.mean else risk.amax(2)
    tau = amounts(held, rule).view(-1, 1, 1)
    unit = longest.squeeze(2) if rule.absolute else 1.0
    return exists, ((shared * unit > tau) | (tau <= 0)) & exists


def attend(
    q: Tensor,
    held: Clustered,
    rule: Threshold,
    *,
    scale: float,
    new: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    read: Tensor | None,
    alive: Tensor | None,
) -> Refined:
    """Compute :func:`kvfold.kernels.clusters.fused.attend_refined` in plain torch."""
    if new is not None:
        append(held, new)
    covered = clusters(held) * held.segment
    firsts, counts = held.starts + covered, held.lengths - covered
    tail = attend_runs(
        q, held.keys, held.values, firsts, counts, most_rows=held.tail_rows, scale=scale, impl="reference"
    )
    rest = tail if sinks is None else join_sinks(tail, sinks)
    norms = _rows(held.values, firsts, held.tail_rows).float().norm(dim=-1)
    hidden = torch.arange(held.tail_rows, device=q.device) >= counts[..., None]
    longest = norms.masked_fill(hidden, 0.0).amax(-1)
    exists, expanded = choose(q, held, rule, rest.lse[:, :, 0].float(), longest, scale)
    selection = Selection(expanded=expanded, represented=(exists & ~expanded,), scored=(exists.sum(-1),))
    pools = [_rows(pool, held.starts, exists.shape[-1] * held.segment) for pool in (held.keys, held.values)]
    found = attend_selected(
        q,
        *pools,
        segments=(held.segment,),
        levels=(held.summaries,),
        exists=(exists,),
        selection=selection,
        rest=rest,
        scale=scale,
        impl="masked",
    )
    many = expanded.sum(-1)
    if read is not None:
        rows = many * held.segment + clusters(held) - many + counts
        counted = torch.stack((rows, held.lengths)).sum(2)
        read += (counted if alive is None else counted * alive).sum(1)
    return Refined(found.output, found.lse, many.int())


def clusters(held: Clustered) -> Tensor:
    """Count the clusters of each run."""
    return ((held.lengths - 1) // held.segment).clamp_min(0) * held.fits[:, None]


def existing(held: Clustered) -> Tensor:
    """Say which clusters are there, bool, ``[batch, kv_heads, room]``."""
    room = held.summaries["mean_keys"].shape[2]
    return torch.arange(room, device=held.keys.device) < clusters(held)[..., None]


def amounts(held: Clustered, rule: Threshold) -> Tensor:
    """Return the threshold of each sequence."""
    if not rule.by_rows:
        return rule.amounts
    rows = held.lengths.sum(1).double().div(held.lengths.shape[1]).round().long()
    return rule.amounts[rows]


def _rows(pool: Tensor, firsts: Tensor, count: int) -> Tensor:
    index = firsts[..., None] + torch.arange(count, device=pool.device)
    return pool[index.clamp_max(pool.shape[0] - 1)]
