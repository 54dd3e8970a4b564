"""Attention over chosen entries that are copied out; waits for the device to say how many they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels.attention import AttentionOutput, attend
from kvfold.kernels.clusters.summaries import working_dtype


def attend_chosen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    scale: float,
    log_size: Tensor | float = 0.0,
    run: int = 1,
) -> AttentionOutput:
    """Attend to the chosen entries of one set; see :func:`kvfold.kernels.clusters.masked.attend_chosen`.

    Args:
        q: ``[batch, q_heads, 1, head_dim]``.
        keys: ``[batch, kv_heads, entries * run, head_dim]``; what is not chosen may be anything.
        values: ``[batch, kv_heads, entries * run, value_dim]``.
        chosen: Bool, ``[batch, heads, entries]``, of KV heads or of query heads.
        scale: Factor on the logits.
        log_size: Added to the logits, a number or ``[batch, kv_heads, entries]``.
        run: Consecutive rows that are chosen together.

    Returns:
        Output and log-sum-exp.
    """
    batch, heads, entries = chosen.shape
    kv_heads = keys.shape[1]
    counts = chosen.sum(-1, keepdim=True)
    width = int(counts.max()) if counts.numel() else 0
    index, valid = _positions(chosen, width), torch.arange(width, device=q.device) < counts
    row = torch.arange(batch, device=q.device).view(-1, 1, 1)
    head = torch.arange(heads, device=q.device).view(1, -1, 1) // (heads // kv_heads)
    rows = [side.view(batch, kv_heads, entries, run, side.shape[-1])[row, head, index] for side in (keys, values)]
    if width and not counts.all():
        rows = [side.masked_fill_(counts[..., None, None] == 0, 0.0) for side in rows]
    bias = None
    if isinstance(log_size, Tensor) or not valid.all():
        sizes = log_size[row, head, index] if isinstance(log_size, Tensor) else torch.zeros_like(index)
        bias = sizes.to(working_dtype(q)).masked_fill_(~valid, -torch.inf).repeat_interleave(run, -1)
    output, lse = attend(q, rows[0].flatten(2, 3), rows[1].flatten(2, 3), scale=scale, bias=bias)
    return AttentionOutput(output, lse + log_size if isinstance(log_size, float) else lse)


def _positions(chosen: Tensor, width: int) -> Tensor:
    """List the chosen entries of each head in order, ``[batch, heads, width]``.

    Places beyond their number repeat the first one, which holds numbers; entry 0 where a head chose none.
    """
    place = (chosen.cumsum(-1) - 1).masked_fill(~chosen, width)
    at = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(place)
    first = chosen.to(torch.uint8).argmax(-1, keepdim=True) if width else place[..., :0]
    index = first.expand(-1, -1, width + 1).contiguous() if width else place.new_zeros(*place.shape[:2], 1)
    return index.scatter_(-1, place, at)[..., :width]
