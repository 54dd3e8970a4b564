"""Attention over single rows that were chosen, and over what is left of the clusters that they come from.

What is left of a cluster is one entry: the method says its mass, and the mean of its values follows from the mean of
all of them without the ones that were read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core.retrieve import Selection, Summaries
from kvfold.kernels.attention import AttentionOutput
from kvfold.kernels.clusters import gathered, masked
from kvfold.kernels.clusters.logs import log_sum, share
from kvfold.kernels.clusters.summaries import working_dtype


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    segment: int,
    summaries: Summaries,
    exists: Tensor,
    selection: Selection,
    scale: float,
    is_copied: bool,
) -> list[AttentionOutput]:
    """Attend to chosen rows and to what is left; see :func:`kvfold.kernels.clusters.attend_selected`.

    Args:
        q: ``[batch, q_heads, 1, head_dim]``.
        keys: ``[batch, kv_heads, rows, head_dim]``; rows beyond the last existing cluster may be anything.
        values: ``[batch, kv_heads, rows, value_dim]``.
        segment: Rows of a cluster.
        summaries: Of the clusters.
        exists: Which clusters are there, bool, ``[batch, kv_heads, clusters]``.
        selection: The choice, with ``rows``.
        scale: Factor on the logits.
        is_copied: Whether to copy the chosen rows out and read nothing else.

    Returns:
        Parts to merge.
    """
    if selection.rows is None or selection.left is None:
        return []
    there = _as_many(exists.repeat_interleave(segment, -1), keys.shape[2])
    chosen = _as_many(selection.rows, keys.shape[2]) & there
    if is_copied:
        part = gathered.attend_chosen(q, keys, values, chosen, scale)
    else:
        part = masked.attend_chosen(q, keys, values, chosen, there, scale)
    sums, counts = sum_read(values, chosen, exists.shape[-1], segment, is_copied=is_copied)
    return [part, attend_left(q, sums, counts, selection.left, summaries, exists, segment)]


def attend_left(
    q: Tensor, sums: Tensor, counts: Tensor, log_mass: Tensor, summaries: Summaries, exists: Tensor, segment: int
) -> AttentionOutput:
    """Attend to what is left of clusters.

    Args:
        q: One query per head, ``[batch, q_heads, 1, head_dim]``; for its shape and type.
        sums: Sums of the values that are read of each cluster, ``[batch, kv_heads, clusters, value_dim]``.
        counts: How many these are, ``[batch, kv_heads, clusters]``.
        log_mass: Log of what is left, ``-inf`` for nothing, ``[batch, q_heads, clusters]``.
        summaries: With ``mean_values``, and ``mean_value_steps`` where these are whole numbers.
        exists: Which clusters are there, bool, ``[batch, kv_heads, clusters]``.
        segment: Rows of a cluster.

    Returns:
        Output and log-sum-exp.
    """
    work, means = working_dtype(q), summaries["mean_values"]
    wide = means.to(work)
    if "mean_value_steps" in summaries:
        wide = wide * summaries["mean_value_steps"].to(work).unsqueeze(-1)
    # weights of room are 0, but 0 times what room may hold is not
    wide = wide.masked_fill(~exists.unsqueeze(-1), 0.0)
    values = (segment * wide - sums.to(work)) / (segment - counts).clamp_min(1).unsqueeze(-1)
    batch, kv_heads, clusters = exists.shape
    mass = log_mass.to(work).view(batch, kv_heads, q.shape[1] // kv_heads, clusters)
    mass = mass.masked_fill(~exists.unsqueeze(2), -torch.inf)
    lse = log_sum(mass)
    weights = share(mass - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return AttentionOutput((weights @ values).flatten(1, 2).unsqueeze(2).to(q.dtype), lse.flatten(1, 2).unsqueeze(2))


def sum_read(values: Tensor, chosen: Tensor, clusters: int, segment: int, *, is_copied: bool) -> tuple[Tensor, Tensor]:
    """Sum the values that are read, per cluster.

    Args:
        values: Rows of clusters in order, ``[batch, kv_heads, rows, value_dim]``; what is not chosen may be anything.
        chosen: Which are read, bool, ``[batch, kv_heads, rows]``.
        clusters: How many clusters there are; rows may be more than they have, or fewer.
        segment: Rows of a cluster.
        is_copied: Whether to read nothing but what is chosen, which waits for the device to say how many they are.

    Returns:
        Sums in float32 or wider, ``[batch, kv_heads, clusters, value_dim]``, and how many rows they are of.
    """
    work, shape = working_dtype(values), (*values.shape[:2], clusters, segment)
    counts = _as_many(chosen, clusters * segment).view(shape).sum(-1)
    if is_copied:
        places = chosen.nonzero(as_tuple=True)
        sums = values.new_zeros(*shape[:3], values.shape[-1], dtype=work)
        return sums.index_put_((*places[:2], places[2] // segment), values[places].to(work), accumulate=True), counts
    whole = min(clusters, -(-values.shape[2] // segment))
    rows = values.masked_fill(~chosen.unsqueeze(-1), 0.0)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, max(0, whole * segment - rows.shape[2])))[:, :, : whole * segment]
    sums = rows.view(*shape[:2], whole, segment, values.shape[-1]).sum(-2, dtype=work)
    return torch.nn.functional.pad(sums, (0, 0, 0, clusters - whole)), counts


def sum_fetched(values: Tensor, chosen: Tensor, owners: Tensor, clusters: int) -> Tensor:
    """Sum values that were copied out, per cluster.

    Args:
        values: ``[batch, kv_heads, count, value_dim]``.
        chosen: Which of them count, bool, ``[batch, kv_heads, count]``.
        owners: Cluster of each, int64, same shape.
        clusters: How many there are.

    Returns:
        Sums in float32 or wider, ``[batch, kv_heads, clusters, value_dim]``.
    """
    work = working_dtype(values)
    read = values.masked_fill(~chosen.unsqueeze(-1), 0.0).to(work)
    sums = values.new_zeros(*values.shape[:2], clusters, values.shape[-1], dtype=work)
    return sums.scatter_add_(2, owners.unsqueeze(-1).expand_as(read), read)


def _as_many(rows: Tensor, count: int) -> Tensor:
    """Cut a choice of rows to so many, or extend it by none."""
    missing = count - rows.shape[-1]
    return rows[..., :count] if missing <= 0 else torch.nn.functional.pad(rows, (0, missing))
