"""What codes say of single rows for a query, before any row is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.core.retrieve import Summaries
from kvfold.kernels.clusters.logs import LEAST
from kvfold.kernels.clusters.risk import log_growth, normaliser
from kvfold.kernels.codes.words import from_bytes, length_of, unpack


class RowEstimate(NamedTuple):
    """Rows as a query sees them through their codes, in float32 or wider.

    Attributes:
        logits: ``[batch, kv_heads, q_per_kv, rows]``; ``-inf`` for a row that is not there.
        deviation: How far the true logit lies from it, the root mean square over queries like those that the frame
            was fitted to, ``[batch, kv_heads, 1, rows]``; 0 for a row that is not there.
    """

    logits: Tensor
    deviation: Tensor


def estimate_rows(
    queries: Tensor, scale: float, summaries: Summaries, fitted: Mapping[str, Tensor], exists: Tensor
) -> RowEstimate:
    """Read logits from what :func:`kvfold.kernels.codes.summarise_codes` kept.

    Args:
        queries: Sorted by KV head, ``[batch, kv_heads, q_per_kv, head_dim]``, float32 or float64.
        scale: Factor on the logits.
        summaries: Of clusters of rows.
        fitted: From :func:`kvfold.kernels.codes.fit_frame`.
        exists: Which clusters are there, bool, ``[batch, kv_heads, clusters]``.

    Returns:
        The estimate, of all rows of the clusters in order.
    """
    words, work = summaries["codes"], queries.dtype
    size = words.shape[-1]
    middles, levels = unpack(words.flatten(2), work)
    centres = from_bytes(summaries["centres"], summaries["centre_steps"], work)
    logits = queries @ fitted["weights"].to(work) @ middles
    logits = logits + (queries @ centres.mT).repeat_interleave(size, -1)
    room = ~exists.repeat_interleave(size, -1).unsqueeze(2)
    deviation = length_of(levels, fitted["longest"].to(work).unsqueeze(-1)).unsqueeze(2) * abs(scale)
    return RowEstimate(logits.mul_(scale).masked_fill_(room, -torch.inf), deviation.masked_fill_(room, 0.0))


def row_risk(found: RowEstimate, rest_lse: Tensor) -> Tensor:
    """Risk of taking each row for its code: RefineKV's of clusters, with one row each.

    Args:
        found: The rows.
        rest_lse: Log-sum-exp of what is read anyway, ``[batch, kv_heads, q_per_kv]``.

    Returns:
        In units of the longest value, ``[batch, kv_heads, q_per_kv, rows]``, finite; 0 for a row that is not there.
    """
    # a row that is not there deviates by 0, which makes both factors 0
    growth = log_growth(found.deviation, found.deviation)
    mass = _shares(found.logits + growth, rest_lse).mul_(-torch.expm1(-growth))
    return mass.add_(_shares(found.logits, rest_lse).mul_(torch.tanh(found.deviation / 2))).mul_(2)


def _shares(logs: Tensor, rest_lse: Tensor) -> Tensor:
    """Shares of rows in the mass of all and of the rest; next to 0 for a row that is not there."""
    return (logs - normaliser(logs, rest_lse)).clamp_min_(LEAST).exp_()
