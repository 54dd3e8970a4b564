"""Exact merging of attention outputs by their log-sum-exp, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.kernels.attention.types import AttentionOutput


def merge(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Merge attention over disjoint groups of rows into attention over their union.

    Args:
        parts: At least one result for the same queries.

    Returns:
        The result over the union; a query that sees no row of any group gets zero and ``-inf``.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    dtype = parts[0].output.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    output = torch.zeros_like(parts[0].output, dtype=work)
    for weight, part in zip(weights, parts, strict=True):
        output.addcmul_(weight.to(work), part.output.to(work))
    return AttentionOutput(output.to(dtype), lse)


def join_sinks(part: AttentionOutput, sinks: Tensor) -> AttentionOutput:
    """Let a learned logit per query head join the softmax: it takes weight and adds nothing to the output.

    Args:
        part: Attention over all rows.
        sinks: ``[q_heads]``.

    Returns:
        The result with the sinks in the denominator.
    """
    logits = sinks.to(part.lse.dtype).view(1, -1, 1).expand_as(part.lse)
    return merge([part, AttentionOutput(torch.zeros_like(part.output), logits)])
