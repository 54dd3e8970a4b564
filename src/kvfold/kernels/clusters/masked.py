"""Attention over chosen entries in fixed shapes: what is not read has a bias of minus infinity. Nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention import AttentionOutput, attend


def attend_chosen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    exist: Tensor,
    scale: float,
    log_size: Tensor | float = 0.0,
) -> AttentionOutput:
    """Attend to the chosen entries of one set.

    Args:
        q: ``[batch, q_heads, 1, head_dim]``.
        keys: ``[batch, kv_heads, entries, head_dim]``.
        values: ``[batch, kv_heads, entries, value_dim]``.
        chosen: Bool, ``[batch, heads, entries]``, of KV heads or of query heads.
        exist: Which entries hold numbers, bool, ``[batch, kv_heads, entries]``; the others may hold anything.
        scale: Factor on the logits.
        log_size: Added to the logits, a number or ``[batch, kv_heads, entries]``.

    Returns:
        Output and log-sum-exp.
    """
    batch, kv_heads = keys.shape[:2]
    if q.device.type == "cpu":
        # looking costs nothing here: room at the end is left out, and seldom is there room elsewhere
        held = exist.flatten(0, 1).any(0).nonzero()
        used = slice(0, int(held[-1]) + 1 if len(held) else 0)
        keys, values, chosen, exist = keys[:, :, used], values[:, :, used], chosen[..., used], exist[..., used]
        log_size = log_size[..., used] if isinstance(log_size, Tensor) else log_size
    if q.device.type != "cpu" or not exist.all():
        # weights of what is not read are 0, but 0 times what room may hold is not
        keys, values = (side.masked_fill(~exist.unsqueeze(-1), 0.0) for side in (keys, values))
    grouped = q.view(batch, kv_heads, q.shape[1] // kv_heads, *q.shape[2:])
    by_group = chosen.view(batch, kv_heads, chosen.shape[1] // kv_heads, chosen.shape[-1])
    parts = []
    for member in range(by_group.shape[2]):
        heads = grouped[:, :, member : member + 1] if by_group.shape[2] > 1 else grouped
        bias = _bias(by_group[:, :, member], log_size, q.dtype)
        part = attend(heads.flatten(1, 2), keys, values, scale=scale, bias=bias)
        parts.append([side.view(batch, kv_heads, -1, *side.shape[2:]) for side in part])
    output, lse = (torch.cat(sides, 2).flatten(1, 2) for sides in zip(*parts, strict=True))
    return AttentionOutput(output, lse + log_size if isinstance(log_size, float) else lse)


def _bias(chosen: Tensor, log_size: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Zero or a cluster's log size, minus infinity elsewhere; one size for all is added to the log-sum-exp instead."""
    if isinstance(log_size, float):
        # zero and minus infinity are the same in every type, so half precision rounds nothing
        return torch.zeros(chosen.shape, dtype=dtype, device=chosen.device).masked_fill_(~chosen, -torch.inf)
    return log_size.masked_fill(~chosen, -torch.inf)
